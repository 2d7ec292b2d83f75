"""Training on a folder's labels while people give more: in a process of its own, one at a time."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.core.errors import UserError, install_command, one_line
from halfmoon.core.hubs import is_installed
from halfmoon.pages.label_order import Predictions
from halfmoon.sites.folders.labels import STATE_FOLDER
from halfmoon.storage import atomic_io


def run_training_process(pipe: Connection, folder: Path, paths: Sequence[str]) -> None:
    """Answer (labels, classes, drawn at random) by (step, done, of) as it goes, by `Guesses`, and at its end by a point
    of the curve (a dict, empty with too few labels) or by a sentence; features stay in memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the page
    import torch

    from halfmoon.studies import label_selection

    torch.set_num_threads(1)  # images, and splits, are computed side by side

    def tell(step: str, count: int, of: int) -> None:
        pipe.send((step, count, of))

    own = None
    with suppress(EOFError):
        while True:
            labels, classes, mask = pipe.recv()
            try:
                own = own or label_selection.folder_features(folder, paths, tell)
                head = label_selection.head_problem(own, labels, classes)
                values = label_selection.predict_images(head, head.solve())
                probabilities = np.full((len(paths), len(head.classes)), np.nan)
                features = np.zeros((len(paths), values[1].shape[1]), np.float32)
                probabilities[own.rows], features[own.rows] = values
                pipe.send(Predictions(probabilities, features, head.classes))
                point = head.cross_validate(tell, mask[own.rows])
                pipe.send({**point._asdict(), "advice": point.advice} if point else {})
            except Exception as error:
                pipe.send(str(error) if isinstance(error, UserError) else f"The training failed: {one_line(error)}.")


class BackgroundTraining:
    """The trainings of a page: `count` gave guesses, the last of them `result`; `points` are of earlier pages too."""

    def __init__(self, folder: Path, paths: Sequence[str], table: str) -> None:
        """Prepare to train on labels in the file `table` of a folder; nothing starts yet."""
        self.folder, self.paths = folder, paths
        self.count, self.error = 0, ""
        self.result: Predictions | None = None
        self.progress: tuple[str, int, int] | None = None
        self._file = folder / STATE_FOLDER / f"trainings-{Path(table).stem}.jsonl"
        self.points = atomic_io.read_rows(self._file)
        self._lock = threading.Lock()
        self._process: Any = None
        self._pipe: Any = None
        self._began = self._ends = 0.0
        self._has_point = True

    def begin(self, labels: np.ndarray, classes: Sequence[str], mask: np.ndarray) -> None:
        """Train in the background, and judge by those labels that `mask`, bool (N,), says were drawn at random.

        Raise UserError where a training is running, or the network is not installed.
        """
        ids = np.unique(labels[labels >= 0])
        if len(ids) < 2:
            only = f"All labels are {classes[ids[0]]!r}: label images of another class too" if len(ids) else ""
            raise UserError(f"{only or 'No image has a label yet: label a few of every class'}, then train.")
        if not is_installed("efficientnet-lite0"):
            raise UserError(f"Training needs the pretrained network: {install_command('pretrained')}.")
        with self._lock:
            if self.progress is not None:
                raise UserError("A training is running, in this tab or another: wait for its end.")
            self.progress, self.error = ("start", 0, 0), ""
        try:
            if self._process is None or not self._process.is_alive():
                context = multiprocessing.get_context("spawn")
                self._pipe, other = context.Pipe()
                self._process = context.Process(
                    target=run_training_process, args=(other, self.folder, self.paths), daemon=True
                )
                self._process.start()
                other.close()  # so that its end is seen
            self._pipe.send((labels, list(classes), mask))
        except OSError as error:
            self._process = self.progress = None
            raise UserError(f"The training cannot start: {atomic_io.error_reason(error)}. Try again.") from error
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        """Take what the process says until it is done, or dead."""
        message: Any = "The training was ended before it was done: train again."
        with suppress(EOFError, OSError):
            while not isinstance(reply := self._pipe.recv(), (str, dict)):
                if isinstance(reply, Predictions):
                    self.result, self.count = reply, self.count + 1
                else:
                    self._tell(reply)
            message = reply
        if isinstance(message, str):
            self.error = message
        elif message:
            self.points.append(message)
            with suppress(OSError):  # a folder that cannot be written shows the curve as long as the page is open
                self._file.parent.mkdir(exist_ok=True)
                atomic_io.append(self._file, atomic_io.json_line(message))
        self._has_point = bool(message)
        self.progress = None

    def _tell(self, progress: tuple[str, int, int]) -> None:
        now, (step, count, of) = time.monotonic(), progress
        if self.progress is None or step != self.progress[0]:
            self._began = now
        self._ends = now + (now - self._began) / count * (of - count) if count else 0.0
        self.progress = progress

    def facts(self) -> dict[str, Any]:
        """Return how far it is, and what came out."""
        return {"progress": self.progress, "error": self.error, "points": self.points, "words": self.words}

    @property
    def words(self) -> str:
        """Say how far a training is, or what the last one found."""
        if (progress := self.progress) is not None:
            step, count, of = progress
            left = max(0, round(self._ends - time.monotonic()))
            time_left = f", {left // 60}:{left % 60:02} left" if count else ""
            return f"{step}: {count:,} of {of:,}{time_left}" if of else "starting"
        if self.error or not (self.points or self.result):
            return self.error
        if not self._has_point:
            return "Trained. Two labels of one class, or more, are needed to judge it."
        point = self.points[-1]
        ends = f"95 %: {point['low']:.0f} to {point['high']:.0f}"
        few = ". Few were random, so all of them judge: chosen ones are harder than the rest."
        by = few if point["judged"] == point["labels"] > point["random"] else f" on {point['judged']:,} random ones."
        return f"{point['labels']:,} labels: {point['accuracy']:.0f} % right ({ends}){by} {point['advice']}"

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
