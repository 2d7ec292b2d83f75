"""Labeling on a disk that is full or fails, and in a process that is killed: each label is saved, or it is not."""

import errno
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from failing_disk import FailingDisk, replace_file_calls
from PIL import Image

from halfmoon import UserError
from halfmoon.pages.browser_images import MIN_STORED_FILE_BYTES, ImageCache
from halfmoon.pages.label_store import LabelStore
from halfmoon.pages.training import BackgroundTraining
from halfmoon.sites.folders import read_site
from halfmoon.sites.folders.labels import STATE_FOLDER, UNDECIDED_FILE, read_labels

COUNT = 6


def make_site(folder: Path, class_folders: bool = False) -> Path:
    for row in range(COUNT):
        path = folder / (f"{'ab'[row % 2]}/{row}.png" if class_folders else f"{row}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 40 * row, np.uint8)).save(path)
    (folder / "classes.txt").write_text("a\nb\n")
    return folder


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name.endswith(".partial")]


@pytest.mark.parametrize("class_folders", [False, True])
def test_a_label_on_a_full_disk_is_saved_or_refused(tmp_path: Path, class_folders: bool) -> None:
    """At each call that changes a file: after a refusal the old label is there, and the next attempt succeeds."""
    outcomes = set()
    for at in range(40):
        folder = make_site(tmp_path / str(at), class_folders)
        store = LabelStore(read_site(folder), ())
        if not class_folders:
            store.set_undecided(1, True, None)
        before = read_labels(folder)
        row = 1 if not class_folders else 0
        path = store.paths[row]
        old = store.classes[store.labels[row]] if class_folders else ""
        disk = FailingDisk(folder, at, errno.ENOSPC)
        refusal = ""
        try:
            with replace_file_calls(disk):
                store.set_label(row, "b", old, None)
        except UserError as error:
            refusal = str(error)
        saved = not refusal
        if refusal:
            assert "No space left on device" in refusal
            assert refusal.endswith("the label is not saved.")
        outcomes.add(saved)
        assert leftovers(folder) == []
        after = read_labels(folder)
        flushes_folder = (
            saved is False and after.get(path) == "b"
        )  # the file was renamed, but its folder is not flushed
        assert (after.get(path) == "b") == saved or flushes_folder
        if not saved and not flushes_folder and not class_folders:
            assert after == before
        store.refresh()
        store.set_label(row, "b", after.get(path, old), None)
        assert read_labels(folder)[path] == "b"
        if disk.count <= at:
            break
    assert outcomes == {True, False}


def test_a_saved_label_counts_although_its_image_remains_marked(tmp_path: Path) -> None:
    """The mark "not sure" is in another file, for which there was no space: the answer was "the label is not saved"."""
    store = LabelStore(read_site(make_site(tmp_path)), ())
    store.set_undecided(1, True, None)
    for at in range(40):
        disk = FailingDisk(tmp_path / STATE_FOLDER, at, errno.ENOSPC)
        with replace_file_calls(disk):
            store.set_label(1, "a", "", None)
        assert read_labels(tmp_path)["1.png"] == "a"
        state = LabelStore(read_site(tmp_path), ()).describe(0)
        assert (state["labeled"], state["undecided"]) == (1, 0)
        if disk.count <= at:
            break
        store.set_label(1, "", "a", None)
        store.set_undecided(1, True, None)
    assert at > 2
    assert read_labels(tmp_path, UNDECIDED_FILE) == {}


KILLED = """
import sys
from pathlib import Path
from halfmoon.pages.label_store import LabelStore
from halfmoon.sites.folders import read_site

store = LabelStore(read_site(Path(sys.argv[1])), ())
print("ready", flush=True)
for number in range(100_000):
    row = number % 6
    label = "ab"[number // 6 % 2]
    store.refresh()
    old = store.classes[store.labels[row]] if store.labels[row] >= 0 else ""
    store.set_label(row, label, old, "me")
    print(row, label, flush=True)
"""


def test_a_killed_page_has_every_confirmed_label(tmp_path: Path) -> None:
    folder = make_site(tmp_path)
    confirmed: dict[str, str] = {}
    for number in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(random.Random(number).uniform(0.05, 0.3))
        process.send_signal(signal.SIGKILL)
        lines = [line.split() for line in process.stdout.read().splitlines() if line.count(" ") == 1]
        process.wait()
        confirmed |= {f"{row}.png": label for row, label in lines}
        assert lines
        stored = read_labels(folder)
        last = int(lines[-1][0])
        unconfirmed = f"{(last + 1) % COUNT}.png"  # it may be saved already
        assert {k: v for k, v in stored.items() if k != unconfirmed} == {
            k: v for k, v in confirmed.items() if k != unconfirmed
        }
        confirmed = dict(stored)
        LabelStore(read_site(folder), ()).set_label(0, "a", stored["0.png"], None)  # no lock remains
        confirmed["0.png"] = "a"


def test_results_of_trainings_survive_half_a_line(tmp_path: Path) -> None:
    """After it, the next result was lost, and the page refused to open."""
    (tmp_path / STATE_FOLDER).mkdir()
    file = tmp_path / STATE_FOLDER / "trainings-labels.jsonl"
    file.write_text('{"labels": 5, "accur')
    training = BackgroundTraining(tmp_path, ["a.png"], "labels.csv")
    assert training.points == []

    class Pipe:
        """A training that ends with an estimate."""

        def recv(self) -> dict[str, object]:
            numbers = dict.fromkeys(("labels", "accuracy", "low", "high", "judged", "random"), 50)
            return {**numbers, "advice": "Label more."}

    training._pipe = Pipe()
    training._receive()
    assert BackgroundTraining(tmp_path, ["a.png"], "labels.csv").points == training.points != []


def test_a_full_disk_leaves_no_part_of_a_thumbnail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (600, 600, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.png")
    assert (tmp_path / "large.png").stat().st_size > MIN_STORED_FILE_BYTES

    def fail(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("halfmoon.pages.browser_images.os.replace", fail)
    assert ImageCache(tmp_path).get("large.png", small=True).data
    assert [*(tmp_path / STATE_FOLDER / "thumbnails").iterdir()] == []
