"""Runs from given weights: what is sent, what is saved, how they are resumed, and models of transformers."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import halfmoon
from halfmoon import Config, UserError, load_model
from halfmoon.cli.main import main
from halfmoon.config import schema as settings
from halfmoon.storage import atomic_io
from halfmoon.storage.checkpoints import Checkpoints

SMALL = Config(method="fedavg", rounds=1, data_share=0.2, clients=3, cohort=2, steps=2, budget="none", threads=1)
HEAD = 10 * 32 + 10
"""Numbers of the small network's head."""
HEAD_NAMES = {"params/head/weight", "params/head/bias"}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "run"
    halfmoon.run(replace(SMALL, run_dir=folder))
    return folder / "model.safetensors"


def changed(first: Path, folder: Path) -> set[str]:
    """Return what of a model differs from that of a run that started with it."""
    before = load_file(first)
    after = load_file(folder / "model.safetensors")
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_the_head_is_sent_and_the_saved_model_is_complete(
    first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes and checkpoints are the head's; the model file has all layers, the frozen ones as they were given.
    Its file names the weights' SHA-256; equal weights elsewhere are the same run; resumed = straight; another file is
    refused."""
    weights_file = tmp_path / "mine.safetensors"
    weights_file.write_bytes(first.read_bytes())
    config = replace(SMALL, rounds=2, weights=str(weights_file), freeze=("backbone",), optimizer="sgd", lr=0.1)
    folder = tmp_path / "run"
    monkeypatch.setattr(Checkpoints, "clear", lambda self: None)
    halfmoon.run(replace(config, run_dir=folder))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["cost"]["bytes_down"] == 2 * 4 * HEAD
    assert rows[0]["cost"]["bytes_up"] < 2 * 4 * HEAD + 100
    saved = load_file(folder / "checkpoint-000002.safetensors")
    assert sum(leaf.numel() for leaf in saved.values() if leaf.is_floating_point()) == HEAD
    assert changed(first, folder) == HEAD_NAMES
    images = np.zeros((2, 8, 8, 1), np.uint8)
    assert load_model(folder).probabilities(images).shape == (2, 10)
    digest = atomic_io.sha256(first.read_bytes())
    assert f"# weights from mine.safetensors sha256 {digest}\n" in (folder / "config.toml").read_text()
    there = replace(config, weights=str(first))
    assert settings.identity(there, "fedavg") == settings.identity(config, "fedavg")
    assert settings.identity(replace(config, freeze=("conv1",)), "fedavg") != settings.identity(config, "fedavg")
    repeated = tmp_path / "again"
    halfmoon.run(replace(config, rounds=2, run_dir=repeated))
    (repeated / "summary.json").unlink()
    for name in ("model.safetensors", "checkpoint-000002.safetensors", "checkpoint-000002.json"):
        (repeated / name).unlink()
    halfmoon.resume(repeated)
    assert (repeated / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    weights_file.write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(
        UserError, match=rf"was started with the weights from mine.safetensors sha256 {digest}, but here"
    ):
        halfmoon.resume(repeated)


def test_a_frozen_backbone_admits_noise_and_secure_sums(first: Path) -> None:
    """With batch normalization in the backbone alone there is no statistic that would leave without noise."""
    noisy = {"dp_clip": 1.0, "dp_noise": 1.0, "weights": str(first)}
    with pytest.raises(UserError, match="dp_clip needs norm 'group' or 'none'"):
        replace(SMALL, **noisy)
    with pytest.raises(UserError, match="freeze needs weights: layers that stay at random values learn nothing"):
        replace(SMALL, freeze=("backbone",))
    pytest.importorskip("dp_accounting")
    done = halfmoon.run(replace(SMALL, **noisy, freeze=("backbone",), run_dir=first.parent.parent / "noisy"))
    row = json.loads((done.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert row["aggregation"]["epsilon"] > 0
    assert changed(first, done.folder) == HEAD_NAMES


def test_a_slower_backbone_moves_as_much_less(first: Path, tmp_path: Path) -> None:
    """One step of plain SGD with a tenth of the rate moves the first layers a tenth as far, the head as far as ever."""
    plain = replace(SMALL, weights=str(first), steps=1, clients=1, cohort=1, optimizer="sgd", schedule="constant")
    moved = []
    for factor in (1.0, 0.1):
        folder = tmp_path / str(factor)
        halfmoon.run(replace(plain, backbone_lr=factor, run_dir=folder))
        after = load_file(folder / "model.safetensors")
        before = load_file(first)
        moved.append({name: after[name] - before[name] for name in before if name.startswith("params")})
    for name, change in moved[0].items():
        factor = 1.0 if "head" in name else 0.1
        torch.testing.assert_close(moved[1][name], factor * change, rtol=1e-3, atol=1e-7)
    assert moved[0]["params/conv1/conv/weight"].abs().max() > 1e-4


def test_a_folder_of_transformers_is_a_network_with_its_weights(tmp_path, monkeypatch):
    """A tiny vision transformer that transformers wrote, of 7 classes: a new head of 10 on the frozen layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_channels=1, num_labels=7, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    expected = transformers.ViTForImageClassification(config).eval()
    expected.save_pretrained(tmp_path / "vit")
    monkeypatch.chdir(tmp_path)
    run = replace(SMALL, network="transformers:vit", freeze=("backbone",), run_dir=tmp_path / "run")
    halfmoon.run(run)
    model = load_model(tmp_path / "run")  # without a word: its code is transformers'
    assert model.card.network.head == "classifier"
    with torch.no_grad():
        expected.classifier = torch.nn.Linear(8, 10)
        expected.classifier.load_state_dict(model.params["classifier"])
        x = torch.randn(3, 1, 8, 8)
        torch.testing.assert_close(model.network.predict(model.params, {}, x), expected(x).logits)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["cost"]["bytes_down"] == 2 * 4 * (8 * 10 + 10)
    text = (tmp_path / "run/config.toml").read_text()
    assert f"# transformers:vit from transformers {transformers.__version__} sha256 " in text
    assert "# weights from model.safetensors sha256 " in text
    other = settings.identity(replace(run, network=f"transformers:{tmp_path / 'vit'}"), "fedavg")
    assert other == settings.identity(run, "fedavg")
    with pytest.raises(UserError, match=r"image_size of the folder|the network's is \(1, \d+, 8\)"):
        halfmoon.run(replace(run, resize=16, run_dir=tmp_path / "large"))


def test_a_run_with_a_frozen_backbone_predicts_without_the_given_weights(first: Path, tmp_path: Path) -> None:
    """By the command line: `predict` says of pictures what the model says."""
    weights_file = tmp_path / "mine.safetensors"
    folder = tmp_path / "run"
    table = tmp_path / "found.csv"
    weights_file.write_bytes(first.read_bytes())
    text = "run --method fedavg --rounds 1 --data-share 0.2 --clients 3 --cohort 2 --steps 2 --freeze backbone"
    assert main([*text.split(), "--weights", str(weights_file), "--run-dir", str(folder)]) == 0
    weights_file.unlink()
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), np.uint8)
    (tmp_path / "pictures").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image[..., 0], "L").save(tmp_path / "pictures" / f"{number}.png")
    assert main(["predict", str(folder), str(tmp_path / "pictures"), "--out", str(table)]) == 0
    model = load_model(folder)
    rows = list(csv.DictReader(table.open()))
    assert [row["path"] for row in rows] == [f"{number}.png" for number in range(5)]
    assert [row["label"] for row in rows] == [model.card.classes[k] for k in model.probabilities(images).argmax(1)]
    assert changed(first, folder) == HEAD_NAMES
