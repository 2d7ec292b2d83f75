"""A trained model at work: the file states enough, folders are labeled and measured, exports give the same numbers.

Temperatures: by hand, recovered from a known scaling, and carried from the card into every probability."""

import csv
import json
import os
import re
import shlex
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from scipy.special import softmax

import halfmoon
from halfmoon.cli import main as cli
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.spreadsheet import escape_formulas
from halfmoon.data import load
from halfmoon.models import NETWORKS
from halfmoon.models.model_card import Card
from halfmoon.models.temperature import MAX_TEMPERATURE, MIN_TEMPERATURE
from halfmoon.models.temperature import find_temperature as of_tensors
from halfmoon.report import diagrams
from halfmoon.runs import factory
from halfmoon.sites.inference import InferenceModel, export, load_model, measure
from halfmoon.sites.inference import load as deployed
from halfmoon.sites.inference import model as trained
from halfmoon.sites.inference.image_folder import list_images, list_labeled_images
from halfmoon.sites.inference.measure import measure_fit
from halfmoon.storage import integrity
from halfmoon.storage.serialization import CHECKSUM_KEY, check_checksum

TEST = load("digits").test


def write_images(folder: Path, images: np.ndarray, names: list[str]) -> None:
    """Write uint8 (N, H, W, 1 or 3) under these names."""
    for pixels, name in zip(images, names, strict=True):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(path)


def one_sentence(text: str) -> None:
    """Demand what every message must be: one line that ends with a point, or with a command or a list."""
    assert text.startswith("halfmoon: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    """Return what a command prints as JSON."""
    assert cli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs and the digits' test images: `run`, `padded` and `test/CLASS/NNNN.png`."""
    folder = tmp_path_factory.mktemp("deploy")
    shared = {"method": "fedavg-sl", "rounds": 3, "lr": 0.01, "threads": 1, "clients": 4, "cohort": 2, "steps": 10}
    halfmoon.run(halfmoon.Config(**shared, budget="none", run_dir=folder / "run"))
    made = {"image_size": 9, "shrink": 2, "labeled_view": "plain"}
    halfmoon.run(halfmoon.Config(**shared, **made, budget="none", run_dir=folder / "padded"))
    write_images(folder / "test", TEST.images, [f"{y}/{k:04}.png" for k, y in enumerate(TEST.labels)])
    return folder


def build(
    name: str, norm: Any, image: tuple[int, int, int], taken: tuple[int, int], shrink: int = 1, **size: int
) -> InferenceModel:
    """Return an untrained model whose statistics are not those of the start."""
    network = NETWORKS[name](channels=image[0], classes=3, norm=norm, **size)
    generator = torch.Generator().manual_seed(1)
    made = network.init(generator)
    stats = tree.map(lambda leaf: leaf + torch.rand(leaf.shape, generator=generator), made["stats"])
    pixels = {"mean": (0.4,) * image[0], "std": (0.25,) * image[0]}
    card = Card(("a", "b", "c"), image, taken, shrink, **pixels, network=network, method="fedavg", config="seed = 7\n")
    return InferenceModel(card, made["params"], stats, torch.device("cpu"))


@pytest.mark.parametrize("name", ["run", "padded"])
def test_a_runs_own_test_set_gives_its_accuracy_and_confusion(workspace, name, capsys):
    """The images go through PNG, and in one run through shrinking (8 to 4) and padding (4 to 9) as in training."""
    summary = json.loads((workspace / name / "summary.json").read_text())
    found = run_json(["evaluate", str(workspace / name), str(workspace / "test")], capsys)
    assert found["accuracy"] == summary["accuracy"]["last"]
    assert found["confusion"] == summary["confusion"]
    assert len({row.index(max(row)) for row in found["confusion"]}) > 1, "a model of one class would prove nothing"


def test_the_file_says_how_images_are_made_ready(workspace: Path) -> None:
    """Digits are 8x8; averaged over 2x2 blocks they are 4x4, padded to 9x9."""
    card = load_model(workspace / "padded").card
    assert (card.input_size, card.shrink, card.image, card.shape) == ((8, 8), 2, (1, 9, 9), (8, 8, 1))
    assert card.classes == tuple("0123456789")
    assert (card.method, card.options["lr"], card.options["image_size"]) == ("fedavg-sl", 0.01, 9)
    assert card == load_model(workspace / "padded" / "model.safetensors").card
    assert Card.parse(card.render(), Path("x")) == card


def test_a_picture_is_averaged_then_padded_in_the_middle() -> None:
    """Blocks of 2x2: (1+2+3+5)/4 = 2.75 is 3; (0+0+0+2)/4 = 0.5 is 1, halves go up; 2 columns in 5 leave 1 and 2."""
    model = build("small", "batch", (1, 5, 5), (2, 4), 2, width=2)
    image = np.array([[1, 2, 0, 0], [3, 5, 0, 2]], np.uint8)[None, :, :, None]
    wanted = np.zeros((5, 5), np.uint8)
    wanted[2, 1:3] = 3, 1
    assert np.array_equal(model.prepare(image)[0, :, :, 0], wanted)


def test_probabilities_are_the_softmax_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared with numpy's exponentials of the network's logits, in any number of batches, and for no image at all."""
    model = build("small", "batch", (1, 8, 8), (8, 8), width=2)
    images = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 1), np.uint8)
    x = torch.from_numpy((images.transpose(0, 3, 1, 2) / 255 - 0.4) / 0.25).float()
    raw = np.exp(model.network.predict(model.params, model.stats, x).double().numpy())
    wanted = raw / raw.sum(1, keepdims=True)
    for maximum in (256, 3):
        monkeypatch.setattr(deployed, "MAX_BATCH_IMAGES", maximum)
        np.testing.assert_allclose(model.probabilities(images), wanted, rtol=0, atol=1e-6)
    assert model.probabilities(images[:0]).shape == (0, 3)
    with pytest.raises(UserError, match=r"takes images uint8 \(N, 8, 8, 1\), not uint8 \(7, 8, 7, 1\)"):
        model.probabilities(images[:, :, :7])


Change = Callable[[dict[str, str], dict[str, torch.Tensor]], object]
DAMAGES: dict[str, tuple[Change, str]] = {
    "no metadata": (lambda said, _: said.clear(), "has no metadata of a model"),
    "older": (lambda said, _: said.pop("format"), "older halfmoon"),
    "newer": (lambda said, _: said.update(format="3"), "metadata of version 3, this halfmoon reads versions 1 and 2"),
    "no classes": (lambda said, _: said.pop("classes"), "lack 'classes'"),
    "no JSON": (lambda said, _: said.update(mean="[0.1"), "no readable 'mean'"),
    "two numbers": (lambda said, _: said.update(image="[1, 8]"), "no readable 'image'"),
    "text": (lambda said, _: said.update(shrink='"2"'), "no readable 'shrink'"),
    "network": (lambda said, _: said.update(network='{"name": "smal"}'), "did you mean 'small'?"),
    "width": (lambda said, _: said.update(network='{"name": "small", "width": 0}'), "width is 0"),
    "key": (lambda said, _: said.update(network='{"name": "small", "deep": 3}'), "cannot be made"),
    "one class": (lambda said, _: said.update(classes='["0"]'), "1 class names for 10 classes"),
    "zero std": (lambda said, _: said.update(std="[0.0]"), "disagree"),
    "too small": (lambda said, _: said.update(image="[1, 2, 2]", taken="[2, 2]"), "at least 4x4"),
    "too large": (lambda said, _: said.update(taken="[30, 30]"), "are padded to"),
    "indivisible": (lambda said, _: said.update(shrink="3"), "does not divide"),
    "tensor gone": (lambda _, flat: flat.pop("params/head/bias"), "lacks the tensor 'params/head/bias'"),
    "tensor more": (lambda _, flat: flat.update(more=torch.ones(1)), "has, beyond its network, the tensor 'more'"),
    "shape": (lambda _, flat: flat.update({"params/head/bias": torch.ones(3)}), r"\(3,\), but its network has"),
    "dtype": (lambda _, flat: flat.update({"params/head/bias": torch.ones(10).half()}), "float16"),
    "NaN": (lambda _, flat: flat["params/head/bias"].fill_(torch.nan), "not finite"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_a_sentence(workspace, tmp_path, damage, capsys):
    change, message = DAMAGES[damage]
    with safe_open(workspace / "run" / "model.safetensors", "pt") as file:
        text = file.metadata()
        flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    text.pop(CHECKSUM_KEY, None)  # what a checksum finds first is a test of its own
    change(text, flat)
    path = tmp_path / "model.safetensors"
    save_file(flat, path, text)
    with pytest.raises(UserError, match=message) as raised:
        load_model(path)
    assert str(path) in str(raised.value)
    assert cli.main(["predict", str(path), str(workspace / "test"), "--out", str(tmp_path / "p.csv")]) == 2
    one_sentence(capsys.readouterr().err)
    assert not (tmp_path / "p.csv").exists()


def test_what_is_no_finished_run_is_refused(workspace: Path, tmp_path: Path) -> None:
    """Nothing, an empty folder, a folder of runs, a run that continues, a cut file, a file of another kind."""
    (tmp_path / "runs").mkdir()
    whole = (workspace / "run" / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-5])
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "going").mkdir()
    (tmp_path / "going" / "run.json").write_text("{}")
    for name, text in {
        "none": "no such file or folder",
        "runs": "holds no model.safetensors",
        "cut.safetensors": "no undamaged safetensors file|was changed since it was written",
        "note.txt": "no undamaged safetensors file|was changed since it was written",
        "going": "not finished, so there is no model yet; go on with: halfmoon resume",
    }.items():
        with pytest.raises(UserError, match=text):
            load_model(tmp_path / name)
    with pytest.raises(UserError, match=r"holds 2 run.* padded, run"):
        load_model(workspace)


def test_every_image_of_any_size_and_depth_gets_a_row(workspace, tmp_path, capsys, monkeypatch):
    """Rows stand in the order of the paths and hold what the model says; a broken image is named, and the code is 1."""
    folder = tmp_path / "new"
    write_images(folder, TEST.images[:7], [f"a/b/{k}.png" for k in range(4)] + ["z.png", "0.PNG", "a, b.png"])
    Image.fromarray(np.full((20, 31, 3), 90, np.uint8)).save(folder / "photo.jpg")
    write_images(folder, TEST.images[:2], [".hidden/x.png", ".y.png"])
    (folder / "broken.png").write_bytes((folder / "z.png").read_bytes()[:40])
    (folder / "note.txt").write_text("no image")
    monkeypatch.setattr(deployed, "MAX_BATCH_IMAGES", 2)
    out = tmp_path / "sub" / "p.csv"
    arguments = ["predict", str(workspace / "run"), str(folder), "--out", str(out), "--sure", "0.5"]
    assert cli.main([*arguments, "--json"]) == 1
    printed, errors = capsys.readouterr()
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = ["0.PNG", "a, b.png", "a/b/0.png", "a/b/1.png", "a/b/2.png", "a/b/3.png", "photo.jpg", "z.png"]
    assert [row["path"] for row in rows] == wanted
    model = load_model(workspace / "run")
    for row, k in zip(rows, (5, 6, 0, 1, 2, 3, None, 4), strict=True):
        if k is not None:
            values = model.probabilities(TEST.images[k : k + 1])[0]
            first, second = np.argsort(-values)[:2]
            assert (row["label"], row["runner_up"]) == (model.classes[first], model.classes[second])
            assert abs(float(row["probability"]) - values[first]) < 1e-6
            assert abs(float(row["runner_up_probability"]) - values[second]) < 1e-6
        assert row["sure"] == ("yes" if float(row["probability"]) >= 0.5 else "no")
    metadata = json.loads(printed)
    assert (metadata["images"], sum(metadata["labels"].values())) == (8, 8)
    assert metadata["unsure"] == sum(row["sure"] == "no" for row in rows)
    assert [each["path"] for each in metadata["unreadable"]] == ["broken.png"]
    assert "broken.png: not a readable image" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_name_that_is_no_text_is_written_as_it_is(workspace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    write_images(folder, TEST.images[:1], ["x.png"])
    os.rename(bytes(folder / "x.png"), bytes(folder) + b"/\xff.png")
    assert cli.main(["predict", str(workspace / "run"), str(folder), "--out", str(tmp_path / "p.csv")]) == 0
    assert (tmp_path / "p.csv").read_bytes().splitlines()[1].startswith(b"\xff.png,")


def test_a_folder_and_an_array_have_the_same_labels(tmp_path: Path) -> None:
    """Also where a name looks like no value (None) or like a formula."""
    plain = build("small", "batch", (1, 8, 8), (8, 8), width=2)
    card = replace(plain.card, classes=("None", "-x", "=1"))
    model = trained.Model(card, plain.params, plain.stats, plain.device, tmp_path / "m")
    write_images(tmp_path, TEST.images[:20], [f"-{k:02}.png" for k in range(20)])
    found = model.predict(tmp_path)
    expected = model.predict(TEST.images[:20])
    assert list(found["path"]) == [f"-{k:02}.png" for k in range(20)]
    for name in ("label", "sure", "runner_up"):
        assert list(found[name]) == list(expected[name])
    for name in ("probability", "runner_up_probability"):
        assert found[name].tolist() == pytest.approx(expected[name].tolist(), abs=1e-6)


def test_scores_are_those_of_scikit_learn() -> None:
    """Also where class 3 is never true and class 2 never predicted."""
    from sklearn import metrics

    rng = np.random.default_rng(3)
    truth = rng.integers(0, 3, 50)
    prediction = rng.choice([0, 1, 3], 50)
    confidence = rng.uniform(0.3, 1, 50)
    found = measure.compute_scores(truth, prediction, confidence, ["a", "b", "c", "d"], min_confidence=0.8)
    assert found["accuracy"] == metrics.accuracy_score(truth, prediction)
    recalls = metrics.recall_score(truth, prediction, labels=[0, 1, 2], average=None, zero_division=0)
    assert found["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    for name, score in (("precision", metrics.precision_score), ("f1", metrics.f1_score)):
        wanted = score(truth, prediction, labels=range(4), average=None, zero_division=0)
        assert [each[name] for each in found["per_class"]] == wanted.tolist()
    assert [each["support"] for each in found["per_class"]] == [int((truth == k).sum()) for k in range(4)]
    assert found["confusion"] == metrics.confusion_matrix(truth, prediction, labels=range(4)).tolist()
    above = confidence >= 0.8
    assert found["sure"]["share"] == above.mean()
    assert found["sure"]["accuracy"] == (truth == prediction)[above].mean()
    assert measure.compute_scores(truth, prediction, confidence, "abcd", min_confidence=1.0)["sure"]["accuracy"] is None


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    """Counted over all pairs of an image of a class and one of another; class 3 does not occur and counts nothing."""
    rng = np.random.default_rng(4)
    truth = rng.integers(0, 3, 40)
    p = rng.dirichlet(np.ones(4), 40).round(1)
    shares = []
    for k in range(3):
        positives = p[truth == k, k]
        other = p[truth != k, k]
        shares.append(np.mean([(a > b) + 0.5 * (a == b) for a in positives for b in other]))
    assert measure.area_under_roc(truth, p) == pytest.approx(np.mean(shares))
    assert measure.area_under_roc(np.zeros(5, dtype=np.int64), p[:5]) is None


def test_calibration_by_hand() -> None:
    """Five bins. (0.4, 0.6]: 0.5 right, 0.6 wrong: |1 - 1.1| = 0.1. (0.8, 1]: 0.9 and 1.0 right: |2 - 1.9| = 0.1.
    The upper edge belongs to a bin: 0.6 is not in (0.6, 0.8], where 0.7 is wrong: |0 - 0.7| = 0.7. In all 0.9 / 5."""
    right = np.array([1, 0, 1, 1, 0], bool)
    confidence = np.array([0.5, 0.6, 0.9, 1.0, 0.7])
    error, table = measure.calibration_error(right, confidence, bins=5)
    assert error == pytest.approx(0.9 / 5)
    assert [each["images"] for each in table] == [0, 0, 2, 1, 2]
    assert table[0]["accuracy"] is None
    assert (table[2]["accuracy"], table[2]["confidence"]) == (0.5, pytest.approx(0.55))


def test_a_table_of_labels_says_the_same_as_folders(workspace, tmp_path, capsys):
    """For any case of its name. Images without a label count for nothing; the files hold what is printed."""
    names = [f"{k:03}.png" for k in range(30)]
    write_images(tmp_path / "site", TEST.images[:30], names)
    lines = [f"{name},{y}" for name, y in zip(names[:20], TEST.labels, strict=False)]
    (tmp_path / "site" / "Labels.csv").write_text("\n".join(["path,label", *reversed(lines)]))
    write_images(tmp_path / "sorted", TEST.images[:20], [f"{TEST.labels[k]}/{names[k]}" for k in range(20)])
    arguments = ["evaluate", str(workspace / "run"), "--out", str(tmp_path / "o")]
    found = [run_json([*arguments, str(tmp_path / name)], capsys) for name in ("site", "sorted")]
    for name in ("images", "accuracy", "confusion", "sure", "per_class"):
        assert found[0][name] == found[1][name]
    for one, two in zip(found[0]["reliability"], found[1]["reliability"], strict=True):
        # The images are added up in another order.
        assert {k: v and pytest.approx(v, rel=1e-12) for k, v in one.items()} == two
    assert found[0]["images"] == 20
    stored = json.loads((tmp_path / "o" / "evaluation.json").read_text())
    assert stored["confusion"] == found[1]["confusion"]
    rows = list(csv.reader((tmp_path / "o" / "confusion.csv").open()))
    assert [row[1:] for row in rows[1:]] == [[str(n) for n in row] for row in stored["confusion"]]
    assert len(list(csv.reader((tmp_path / "o" / "reliability.csv").open()))) == 16


def test_folders_without_known_labels_are_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "flat", TEST.images[:2], ["0.png", "1.png"])
    write_images(tmp_path / "odd", TEST.images[:3], ["0/0.png", "cat/1.png", "cat/2.png"])
    write_images(tmp_path / "none", TEST.images[:1], ["0.png"])
    (tmp_path / "none" / "labels.csv").write_text("path,label\n")
    (tmp_path / "empty").mkdir()
    for name, text in {
        "flat": "neither a labels.csv nor class folders",
        "odd": "does not know the class 'cat' of 2 images; its classes are: 0, 1",
        "none": "names no image",
        "empty": "no image in it",
        "gone": "no such file or folder",
    }.items():
        with pytest.raises(UserError, match=text):
            list_labeled_images(tmp_path / name, ["0", "1"])
    write_images(tmp_path / "pets", TEST.images[:4], ["0/0.png", "1/0.png", "Unlabeled/0.png", "Unlabeled/1.png"])
    assert list_labeled_images(tmp_path / "pets", ["0", "1"])[0] == ["0/0.png", "1/0.png"]
    with pytest.raises(UserError, match=r"0.png: this is a file; give a folder"):
        list_images(tmp_path / "pets" / "0" / "0.png")
    assert list_images(tmp_path / "odd") == ["0/0.png", "cat/1.png", "cat/2.png"]
    (tmp_path / "odd" / "IM0001").write_bytes(bytes(128) + b"DICM")
    assert "IM0001" in list_images(tmp_path / "odd"), "DICOM is known by its content, as at a site"


def test_a_labeled_image_that_is_broken_is_left_out_and_named(workspace, tmp_path, capsys):
    write_images(tmp_path, TEST.images[:2], ["0/a.png", "0/b.png"])
    (tmp_path / "0" / "b.png").write_bytes(b"nothing")
    assert cli.main(["evaluate", str(workspace / "run"), str(tmp_path)]) == 1
    printed, errors = capsys.readouterr()
    assert "images: 1\n" in printed
    assert "0/b.png: not a readable image" in errors
    (tmp_path / "0" / "a.png").write_bytes(b"nothing")
    assert cli.main(["evaluate", str(workspace / "run"), str(tmp_path)]) == 2
    assert "none of 2 labeled images can be read" in capsys.readouterr().err


SHAPES: dict[str, tuple[str, str, tuple[int, int, int], tuple[int, int], int, dict[str, int]]] = {
    "small, shrunk and padded": ("small", "batch", (1, 8, 8), (10, 6), 2, {"width": 2}),
    "resnet9, group": ("resnet9", "group", (3, 16, 16), (16, 16), 1, {"width": 2}),
    "wrn, none": ("wrn", "none", (3, 8, 8), (8, 8), 1, {"width": 1, "depth": 10}),
}
MORE = {"resnet9, batch": ("resnet9", "batch", (1, 16, 16), (15, 13), 1, {"width": 2})}


def but_nightly(names: Iterable[str], *nightly: str) -> list[Any]:
    """Return names to parametrize with, of which some are for the night."""
    return [pytest.param(name, marks=[pytest.mark.nightly] if name in nightly else []) for name in names]


@pytest.mark.parametrize("name", but_nightly(SHAPES, "resnet9, group", "wrn, none"))
def test_an_onnx_file_says_what_the_model_says(name: str, tmp_path: Path) -> None:
    """For one image and many, with the card and its temperature; the oracle is onnxruntime on the file."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model = build(*SHAPES[name][:5], **SHAPES[name][5])
    model = replace(model, card=replace(model.card, temperature=3.0))
    assert export.export_onnx(model, tmp_path / "m.onnx").difference < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(uint8)", list(model.shape))
    text = session.get_modelmeta().custom_metadata_map
    assert Card.parse(text, Path("m.onnx")) == model.card
    for count in (1, 5):
        images = np.random.default_rng(count).integers(0, 256, (count, *model.shape), np.uint8)
        (found,) = session.run(["probabilities"], {"images": images})
        np.testing.assert_allclose(found, model.probabilities(images), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", but_nightly([*SHAPES, *MORE], "resnet9, group", "wrn, none"))
def test_a_torch_program_says_what_the_model_says(name: str, tmp_path: Path) -> None:
    shape = (SHAPES | MORE)[name]
    model = build(*shape[:5], **shape[5])
    path = tmp_path / "m.pt2"
    assert export.export_torch(model, path).difference < 1e-5
    text = {export.CARD_FILE: ""}
    program = torch.export.load(path, extra_files=text).module()
    assert Card.parse(json.loads(text[export.CARD_FILE]), path) == model.card
    for count in (1, 5):
        images = np.random.default_rng(count).integers(0, 256, (count, *model.shape), np.uint8)
        found = program(torch.from_numpy(images)).numpy()
        np.testing.assert_allclose(found, model.probabilities(images), rtol=0, atol=1e-5)
    with zipfile.ZipFile(path) as archive:
        assert not [each for each in archive.infolist() if each.filename.endswith(".pt") and each.file_size]


def test_a_program_that_says_something_else_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth less is more than 1e-4 of the largest of three probabilities, which is 1/3 at least."""
    model = build("small", "none", (1, 4, 4), (4, 4), width=1)
    right = export.ExportedClassifier.forward
    monkeypatch.setattr(export.ExportedClassifier, "forward", lambda self, images: right(self, images) * 0.999)
    with pytest.raises(UserError, match=r"not written: a probability differs .* more than 0.0001"):
        export.export_torch(model, tmp_path / "m.pt2")
    assert not list(tmp_path.iterdir())


def test_without_the_extra_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"--onnx needs onnxruntime: pip install -c constraints.txt '\.\[onnx\]'"):
        export.export_onnx(build("small", "none", (1, 4, 4), (4, 4), width=1), tmp_path / "m.onnx")


def test_real_images_are_compared_on_as_well(workspace: Path, tmp_path: Path) -> None:
    """The embedded digits for a model of digits, a folder's images for any, none for a model of unknown data."""
    model = load_model(workspace / "run")
    digits = export.real_images(model)
    assert digits is not None
    assert np.array_equal(digits, TEST.images[:256])
    other = replace(model, card=replace(model.card, config='data = "cifar10"\n'))
    assert export.real_images(other) is None
    write_images(tmp_path / "few", TEST.images[:3], ["a.png", "b.png", "c.png"])
    found = export.real_images(other, tmp_path / "few")
    assert found is not None
    assert np.array_equal(found, TEST.images[:3])
    assert export.export_torch(model, tmp_path / "m.pt2", found).images == 32 + 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("predict run", "required: FOLDER"),
        ("predict", "required: MODEL, FOLDER"),
        ("predict run test --sure 1.5", "--sure is 1.5: it must be a probability"),
        ("predict run test --sure nan", "--sure is nan: it must be a probability"),
        ("predict run test --sure much", "--sure"),
        ("predict run test --device gpu", "--device is 'gpu'"),
        ("predict run test --out run/summary.json/p.csv", "run/summary.json is a file, not a folder"),
        ("predict run test --out run", "run is a folder: --out needs the name of a file in it"),
        ("predict run gone", "no such file or folder"),
        ("evaluate run run/model.safetensors", "this is a file"),
        ("evaluate run test --out run/summary.json", "run/summary.json is a file, not a folder"),
        ("export run", "give --onnx FILE, --torch FILE or both"),
        # Before the model is loaded: it is not read, and does not exist.
        (
            "export none --torch gone/m.pt2",
            "gone/m.pt2: the folder gone does not exist; make it, or choose another --torch",
        ),
        ("export none --onnx run", "run is a folder: --onnx needs the name of a file in it"),
        ("export run --torch m.pt2 --images clients", "no such file or folder"),
    ],
)
def test_bad_input_is_one_sentence(workspace, command, message, capsys, monkeypatch):
    monkeypatch.chdir(workspace)
    before = sorted(path.name for path in workspace.rglob("*"))
    assert cli.main(command.split()) == 2
    errors = capsys.readouterr().err
    one_sentence(errors)
    assert message in errors
    assert sorted(path.name for path in workspace.rglob("*")) == before


PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def form(printed: str) -> str:
    """Return printed text without what differs between machines: the numbers, and the width of columns."""
    return re.sub(r"[ -]+", " ", re.sub(r"\d[\d.]*(e-\d+)?", "#", printed.strip()))


def test_the_page_runs_in_order_and_prints_what_stands_there(tmp_path, monkeypatch, capsys):
    """A line `...` stands for any lines."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for language, content in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        wanted = content
        if language == "python":
            capsys.readouterr()
            exec(compile(content, PAGE.name, "exec", dont_inherit=True), names)
            ran += 1
            continue
        if language == "shell":
            line, _, wanted = content.partition("\n")
            capsys.readouterr()
            assert cli.main(shlex.split(line.removeprefix("$ halfmoon "))) == 0
            ran += 1
        parts = [re.escape(form(part)) for part in wanted.split("...\n")]
        printed = capsys.readouterr().out
        assert re.fullmatch(r"(?s:.*)".join(parts), form(printed)), printed
    assert ran == 10


def test_what_looks_like_a_formula_is_text_in_a_table() -> None:
    """`=1+1` as a class, and a file called `@x.png`, get an apostrophe; a number remains one."""
    cells = escape_formulas(["@x.png", "=1+1", "+1", "\t=1", "\r=1", "0.512345", "a=1", "-cat", 0.5, None])
    assert cells == ["'@x.png", "'=1+1", "'+1", "'\t=1", "'\r=1", "0.512345", "a=1", "'-cat", 0.5, None]


def drawn(count: int, classes: int = 4, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits (count, classes) and labels drawn from their softmax: perfectly calibrated."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (count, classes))
    return logits, (rng.random((count, 1)) > softmax(logits, axis=1).cumsum(1)).sum(1)


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
    assert textbook_ece(softmax(scale * logits / found, axis=1), labels) < 0.02


def test_temperature_by_hand():
    """Logits (2, 0), of four images three are of class 0: p = 3/4 needs 2/T = ln 3."""
    logits = np.tile([2.0, 0.0], (4, 1))
    labels = np.array([0, 0, 0, 1])
    assert temperature(logits, labels) == pytest.approx(2 / np.log(3), rel=1e-9)
    found = measure_fit(logits, labels, 2 / np.log(3))
    assert found.calibration_error == pytest.approx(0, abs=1e-12)
    assert found.loss == pytest.approx(-0.75 * np.log(0.75) - 0.25 * np.log(0.25), rel=1e-12)


def test_temperature_stays_in_its_range():
    """Never wrong: as sure as may be; never right: as unconfident."""
    logits = np.tile([1.0, 0.0], (5, 1))
    assert temperature(logits, np.zeros(5, np.int64)) == pytest.approx(MIN_TEMPERATURE)
    assert temperature(logits, np.ones(5, np.int64)) == pytest.approx(MAX_TEMPERATURE)


@pytest.mark.parametrize("seed", range(3))
def test_calibration_error_is_the_textbooks(seed):
    logits, labels = drawn(500, seed=seed)
    found = measure_fit(logits, labels, 0.4)
    assert found.calibration_error == pytest.approx(textbook_ece(softmax(logits / 0.4, axis=1), labels), rel=1e-9)
    assert found.loss == pytest.approx(-np.log(softmax(logits / 0.4, axis=1)[np.arange(500), labels]).mean(), rel=1e-9)


def test_a_calibrated_model_tells_the_truth_everywhere(workspace: Path, tmp_path: Path, capsys) -> None:
    """The card has the temperature, and so have predict, evaluate, ONNX and torch.export; the tensors stay."""
    shutil.copytree(workspace / "run", tmp_path / "run")
    for number, path in enumerate(sorted(workspace.glob("test/*/*.png"))):
        half = tmp_path / ("validation" if number % 2 else "test") / path.parent.name
        half.mkdir(parents=True, exist_ok=True)
        (half / path.name).hardlink_to(path)
    workspace = tmp_path
    run = [str(workspace / "run")]
    other = str(workspace / "test")
    before = run_json(["evaluate", *run, other], capsys)
    plain = load_model(workspace / "run")
    found = run_json(["calibrate", *run, str(workspace / "validation")], capsys)
    model = load_model(workspace / "run")
    at = model.card.temperature
    assert at == found["after"]["temperature"] != 1
    assert found["after"]["loss"] < found["before"]["loss"]
    assert found["images"] == len(TEST) // 2
    after = run_json(["evaluate", *run, other, "--out", str(tmp_path / "o")], capsys)
    assert after["accuracy"] == before["accuracy"]
    assert after["calibration_error"] < before["calibration_error"]
    assert after["temperature"] == at
    assert (tmp_path / "o" / "reliability.png").read_bytes().startswith(b"\x89PNG")
    some = TEST.images[:40]
    np.testing.assert_allclose(model.probabilities(some), softmax(plain.logits(some) / at, axis=1), rtol=1e-12)
    with safe_open(workspace / "run" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "2"
    assert check_checksum((workspace / "run" / "model.safetensors").read_bytes())
    integrity.check_files(workspace / "run", "model.safetensors")
    assert cli.main(["predict", *run, other, "--out", str(tmp_path / "p.csv")]) == 0
    capsys.readouterr()
    row = next(csv.DictReader((tmp_path / "p.csv").open()))
    pixels = np.array(Image.open(workspace / "test" / row["path"]))[None, :, :, None]
    assert float(row["probability"]) == pytest.approx(model.probabilities(pixels).max(), abs=1e-6)
    exported = export.export_torch(model, tmp_path / "m.pt2", some)
    assert exported.difference < 1e-5
    program = torch.export.load(tmp_path / "m.pt2").module()
    np.testing.assert_allclose(
        program(torch.from_numpy(some)).numpy(), softmax(plain.logits(some) / at, axis=1), atol=1e-5
    )
    repeated = run_json(["calibrate", *run, str(workspace / "validation")], capsys)
    assert repeated["before"] == repeated["after"] == found["after"]


def test_a_card_with_an_impossible_temperature_is_refused(workspace: Path) -> None:
    card = load_model(workspace / "run").card
    for value in ("0.0", "-1.0", "NaN"):
        text = {**card.render(), "format": "2", "temperature": value}
        with pytest.raises(UserError, match="temperature"):
            type(card).parse(text, workspace)


def test_the_picture_has_a_bar_for_each_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = drawn(300)
    p = softmax(logits, axis=1)
    found = measure.compute_scores(labels, p.argmax(1), p.max(1), "abcd")
    stored = []
    monkeypatch.setattr(diagrams, "save_figure", lambda made, path: stored.append(made))  # before it becomes pixels
    diagrams.draw_reliability(found, tmp_path / "r.png")
    bars = stored[0].axes[0].patches
    full = [row for row in found["reliability"] if row["images"]]
    assert [bar.get_height() for bar in bars] == [row["accuracy"] for row in full]
    assert f"{100 * found['calibration_error']:.2f} %" in stored[0].axes[0].get_title(loc="left")


def test_a_run_with_validation_images_ends_with_a_temperature(workspace: Path, tmp_path: Path) -> None:
    few = {"method": "fedavg-sl", "rounds": 2, "clients": 4, "cohort": 2, "steps": 5, "threads": 1, "budget": "none"}
    config = halfmoon.Config(**few, lr=0.01, validation_share=0.2, run_dir=tmp_path / "run")
    halfmoon.run(config)
    model = load_model(tmp_path / "run")
    held = factory.load_images(config).validation
    assert model.card.temperature == pytest.approx(temperature(model.logits(held.images), held.labels), rel=1e-4)
    assert model.card.temperature != 1
    assert load_model(workspace / "run").card.temperature == 1
