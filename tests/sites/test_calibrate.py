"""Temperatures: by hand, recovered from a known scaling, and carried from the card into every probability."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import halfmoon
from halfmoon.cli import main as cli
from halfmoon.core.errors import UserError
from halfmoon.data import load
from halfmoon.engine.evaluation import COLDEST, HOTTEST
from halfmoon.engine.evaluation import temperature as of_tensors
from halfmoon.report import reliability
from halfmoon.runs import factory
from halfmoon.sites.inference import Model, export, load_model, measure
from halfmoon.sites.inference.measure import fit
from halfmoon.storage import integrity
from halfmoon.storage.serialization import check_seal

TEST = load("digits").test


def drawn(count: int, classes: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits (count, classes) and labels drawn from their softmax: perfectly calibrated."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (count, classes))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return logits, (rng.random((count, 1)) > p.cumsum(1)).sum(1)


def temperature(logits: np.ndarray, labels: np.ndarray) -> float:
    return of_tensors(torch.from_numpy(logits), torch.from_numpy(labels))


def textbook_ece(probability: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Return Guo et al.'s Equation 3, image by image and bin by bin."""
    total = 0.0
    for m in range(1, bins + 1):
        inside = [k for k, p in enumerate(probability) if (m - 1) / bins < p.max() <= m / bins]
        if inside:
            accuracy = sum(probability[k].argmax() == labels[k] for k in inside) / len(inside)
            confidence = sum(probability[k].max() for k in inside) / len(inside)
            total += len(inside) / len(labels) * abs(accuracy - confidence)
    return total


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.5])
def test_temperature_recovers_a_known_scaling(scale):
    """Logits that were multiplied need that factor as temperature; 5,000 images leave some 2 % of chance."""
    logits, labels = drawn(5_000)
    found = temperature(scale * logits, labels)
    assert found == pytest.approx(scale, rel=0.05)
    assert found == pytest.approx(scale * temperature(logits, labels), rel=1e-9)
    assert textbook_ece(softmax(scale * logits / found), labels) < 0.02


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(z) / np.exp(z).sum(1, keepdims=True)


def test_temperature_by_hand():
    """Logits (2, 0), of four images three are of class 0: p = 3/4 needs 2/T = ln 3."""
    logits, labels = np.tile([2.0, 0.0], (4, 1)), np.array([0, 0, 0, 1])
    assert temperature(logits, labels) == pytest.approx(2 / np.log(3), rel=1e-9)
    found = fit(logits, labels, 2 / np.log(3))
    assert found.calibration_error == pytest.approx(0, abs=1e-12)
    assert found.loss == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25), rel=1e-12)


def test_temperature_stays_in_its_range():
    """Never wrong: as sure as may be; never right: as unsure."""
    logits = np.tile([1.0, 0.0], (5, 1))
    assert temperature(logits, np.zeros(5, np.int64)) == pytest.approx(COLDEST)
    assert temperature(logits, np.ones(5, np.int64)) == pytest.approx(HOTTEST)


@pytest.mark.parametrize("seed", range(3))
def test_calibration_error_is_the_textbooks(seed):
    logits, labels = drawn(500, seed=seed)
    found = fit(logits, labels, 0.4)
    assert found.calibration_error == pytest.approx(textbook_ece(softmax(logits / 0.4), labels), rel=1e-9)
    assert found.loss == pytest.approx(-np.log(softmax(logits / 0.4)[np.arange(500), labels]).mean(), rel=1e-9)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of two rounds, and the digits' test images as `test/CLASS/NNNN.png`."""
    folder = tmp_path_factory.mktemp("calibrate")
    shared = {"method": "fedavg-sl", "rounds": 2, "lr": 0.01, "threads": 1, "clients": 4, "cohort": 2, "steps": 10}
    halfmoon.run(halfmoon.Config(**shared, budget="none", run_dir=folder / "run"))
    for number, (pixels, label) in enumerate(zip(TEST.images, TEST.labels, strict=True)):
        path = folder / ("validation" if number % 2 else "test") / str(label) / f"{number:04}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[:, :, 0]).save(path)
    return folder


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    """Return what a command prints as JSON."""
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_calibrated_model_tells_the_truth_everywhere(home: Path, tmp_path: Path, capsys) -> None:
    """The card has the temperature, and so have predict, evaluate, ONNX and torch.export; the tensors stay."""
    run, other = [str(home / "run")], str(home / "test")
    before = told(["evaluate", *run, other], capsys)
    plain = load_model(home / "run")
    found = told(["calibrate", *run, str(home / "validation")], capsys)
    model = load_model(home / "run")
    at = model.card.temperature
    assert at == found["after"]["temperature"] != 1
    assert found["after"]["loss"] < found["before"]["loss"]
    assert found["images"] == len(TEST) // 2
    after = told(["evaluate", *run, other, "--out", str(tmp_path / "o")], capsys)
    assert after["accuracy"] == before["accuracy"]
    assert after["calibration_error"] < before["calibration_error"]
    assert after["temperature"] == at
    assert (tmp_path / "o" / "reliability.png").read_bytes().startswith(b"\x89PNG")
    some = TEST.images[:40]
    np.testing.assert_allclose(model.probabilities(some), softmax(plain.logits(some) / at), rtol=1e-12)
    with safe_open(home / "run" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "2"
    assert check_seal((home / "run" / "model.safetensors").read_bytes())
    integrity.check(home / "run", "model.safetensors")
    assert cli.main(["predict", *run, other, "--out", str(tmp_path / "p.csv")]) == 0
    capsys.readouterr()
    row = next(csv.DictReader((tmp_path / "p.csv").open()))
    pixels = np.array(Image.open(home / "test" / row["path"]))[None, :, :, None]
    assert float(row["probability"]) == pytest.approx(model.probabilities(pixels).max(), abs=1e-6)
    exported = export.export_torch(model, tmp_path / "m.pt2", some)
    assert exported.difference < 1e-5
    program = torch.export.load(tmp_path / "m.pt2").module()
    np.testing.assert_allclose(program(torch.from_numpy(some)).numpy(), softmax(plain.logits(some) / at), atol=1e-5)
    again = told(["calibrate", *run, str(home / "validation")], capsys)
    assert again["before"] == again["after"] == found["after"]


def test_onnx_divides_by_the_temperature(home: Path, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    model = load_model(home / "run")
    hot = Model(replace(model.card, temperature=3.0), model.params, model.stats, model.device)
    export.export_onnx(hot, tmp_path / "m.onnx")
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (said,) = session.run(None, {"images": TEST.images[:9]})
    np.testing.assert_allclose(said, softmax(model.logits(TEST.images[:9]) / 3), atol=1e-5)


def test_a_card_with_an_impossible_temperature_is_refused(home: Path) -> None:
    card = load_model(home / "run").card
    for value in ("0.0", "-1.0", "NaN"):
        said = {**card.render(), "format": "2", "temperature": value}
        with pytest.raises(UserError, match="temperature"):
            type(card).parse(said, home)


def test_the_picture_has_a_bar_for_each_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = drawn(300)
    p = softmax(logits)
    found = measure.scores(labels, p.argmax(1), p.max(1), "abcd")
    kept = []
    monkeypatch.setattr(reliability, "write", lambda made, path: kept.append(made))  # before it becomes pixels
    reliability.reliability(found, tmp_path / "r.png")
    bars = kept[0].axes[0].patches
    full = [row for row in found["reliability"] if row["images"]]
    assert [bar.get_height() for bar in bars] == [row["accuracy"] for row in full]
    assert f"{100 * found['calibration_error']:.2f} %" in kept[0].axes[0].get_title(loc="left")


def test_a_run_with_validation_images_ends_with_a_temperature(tmp_path: Path) -> None:
    few = {"method": "fedavg-sl", "rounds": 2, "clients": 4, "cohort": 2, "steps": 5, "threads": 1, "budget": "none"}
    config = halfmoon.Config(**few, lr=0.01, validation_share=0.2, run_dir=tmp_path / "run")
    halfmoon.run(config)
    model = load_model(tmp_path / "run")
    held = factory.images(config).validation
    assert model.card.temperature == pytest.approx(temperature(model.logits(held.images), held.labels), rel=1e-4)
    assert model.card.temperature != 1
    halfmoon.run(halfmoon.Config(**few, run_dir=tmp_path / "plain"))
    assert load_model(tmp_path / "plain").card.temperature == 1
