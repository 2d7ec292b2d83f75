"""Train on a folder's labels while people label it: in a separate process, one training at a time."""

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
from halfmoon.core.parents import exit_with_parent
from halfmoon.pages.label_order import Predictions
from halfmoon.sites.folders.labels import STATE_FOLDER
from halfmoon.storage import atomic_io

POINT_FIELDS = frozenset({"labels", "accuracy", "low", "high", "judged", "random", "advice"})
"""Fields of a result that the page shows."""


def run_training_process(pipe: Connection, folder: Path, paths: Sequence[str]) -> None:
    """Train a head on pretrained features with the labels that a page sends, until the page closes the pipe.

    Each message is (labels, classes, mask of the labels that are a random sample). The replies to it are: progress as
    (name of the step, finished items, all items); the `Predictions` of all images; and at the end either the estimated
    accuracy as a dictionary (empty with too few labels) or an error message. Features remain in memory between
    trainings.

    Args:
        pipe: the connection to the page.
        folder: the folder of the images.
        paths: paths of the images relative to the folder.
    """
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the page handles Ctrl-C, and then kills this process
    import torch

    from halfmoon.studies import label_selection

    torch.set_num_threads(1)  # label_selection already runs images and folds in parallel

    def send_progress(step: str, count: int, total: int) -> None:
        pipe.send((step, count, total))

    folder_features = None
    with suppress(EOFError):
        while True:
            labels, classes, mask = pipe.recv()
            try:
                if folder_features is None:
                    folder_features = label_selection.folder_features(folder, paths, send_progress)
                head = label_selection.head_problem(folder_features, labels, classes)
                head_probabilities, head_features = label_selection.predict_images(head, head.solve())
                # Unreadable images have no features; their rows remain NaN.
                probabilities = np.full((len(paths), len(head.classes)), np.nan)
                features = np.zeros((len(paths), head_features.shape[1]), np.float32)
                probabilities[folder_features.rows] = head_probabilities
                features[folder_features.rows] = head_features
                pipe.send(Predictions(probabilities, features, head.classes))
                result = head.cross_validate(send_progress, mask[folder_features.rows])
                pipe.send({**result._asdict(), "advice": result.advice} if result else {})
            except Exception as error:
                pipe.send(str(error) if isinstance(error, UserError) else f"The training failed: {one_line(error)}.")


class BackgroundTraining:
    """The trainings of a labeling page, one at a time, in a separate process: they order the images to label next.

    Attributes:
        count: the number of trainings that gave predictions.
        result: the predictions of the last training, None before the first one.
        progress: (step, count, total) of the running training: the name of its step, and the finished and all items of
            the step; None if none is running.
        error: the error message of the last training, else "".
        points: the results of all trainings, including those of earlier pages. They are the points of a learning curve,
            each with the number of labels and the estimated accuracy.
    """

    def __init__(self, folder: Path, paths: Sequence[str], labels_file: str) -> None:
        """Prepare trainings on the labels of a folder of images, and read the results of earlier ones; none starts.

        Args:
            folder: the folder of the images.
            paths: paths of the images relative to the folder.
            labels_file: name of the labels file. Each person who labels has one, with separate results.
        """
        self.folder = folder
        self.paths = paths
        self.count = 0  # trainings that gave predictions
        self.error = ""  # the message, if the last training failed
        self.result: Predictions | None = None  # of the last training
        # Of the running training: the name of its step, and the finished and all items (images or folds) of the step.
        self.progress: tuple[str, int, int] | None = None
        self._results_file = folder / STATE_FOLDER / f"trainings-{Path(labels_file).stem}.jsonl"
        # One dictionary for each training: the points of the curve of accuracy over the number of labels.
        self.points = [row for row in atomic_io.read_intact_rows(self._results_file) if row.keys() >= POINT_FIELDS]
        self._lock = threading.Lock()
        self._process: Any = None  # starts with the first training, and remains for the next ones
        self._pipe: Any = None
        # Times of the current step on the clock of `time.monotonic`, in seconds; the end is estimated.
        self._step_start = 0.0
        self._step_end = 0.0
        self._has_point = True  # False if the last training had too few labels to estimate the accuracy

    def begin(self, labels: np.ndarray, classes: Sequence[str], mask: np.ndarray) -> None:
        """Start a training on the labels so far, in a process that computes in the background.

        Args:
            labels: int64 (N,), indices of `classes`, -1 for none.
            classes: names of the classes.
            mask: bool (N,), labels that are a random sample; the accuracy is estimated on them.

        Raises:
            UserError: a training is running, there are too few labels, or the network is not installed.
        """
        ids = np.unique(labels[labels >= 0])
        if len(ids) == 0:
            raise UserError("No image has a label yet: label a few of every class, then train.")
        if len(ids) == 1:
            raise UserError(f"All labels are {classes[ids[0]]!r}: label images of another class too, then train.")
        if not is_installed("efficientnet-lite0"):
            raise UserError(f"Training needs the pretrained network: {install_command('pretrained')}.")
        with self._lock:
            if self.progress is not None:
                raise UserError("A training is running, in this tab or another: wait for its end.")
            self.progress = ("start", 0, 0)
            self.error = ""
        try:
            if self._process is None or not self._process.is_alive():
                context = multiprocessing.get_context("spawn")
                self._pipe, process_pipe = context.Pipe()
                self._process = context.Process(
                    target=run_training_process, args=(process_pipe, self.folder, self.paths), daemon=True
                )
                self._process.start()
                # If this copy remained open, a killed process would not end the pipe.
                process_pipe.close()
            self._pipe.send((labels, list(classes), mask))
        except OSError as error:
            self._process = None
            self.progress = None
            raise UserError(f"The training cannot start: {atomic_io.error_reason(error)}. Try again.") from error
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        """Receive the replies of the training process, in a thread, until the training has ended or the process died.

        The process sends tuples of progress (name of the step, finished items, all items), then `Predictions` of all
        images. At the end it sends a text, which is an error message, or a dictionary with the estimated accuracy, which is
        empty if there are too few labels. Each estimate is a point of the page's learning curve.
        """
        outcome: Any = "The training was ended before it was done: train again."
        with suppress(EOFError, OSError):
            while not isinstance(reply := self._pipe.recv(), (str, dict)):
                if isinstance(reply, Predictions):
                    self.result = reply
                    self.count += 1
                else:
                    self._update_progress(reply)
            outcome = reply
        if isinstance(outcome, str):
            self.error = outcome
        elif outcome:
            self.points.append(outcome)
            with suppress(OSError):  # in a read-only folder the curve is lost when the page closes
                self._results_file.parent.mkdir(exist_ok=True)
                # A full disk may have left half a line, which would damage the next one.
                separator = b"\n" if atomic_io.ends_within_line(self._results_file) else b""
                atomic_io.append(self._results_file, separator + atomic_io.json_line(outcome))
        self._has_point = bool(outcome)
        self.progress = None

    def _update_progress(self, progress: tuple[str, int, int]) -> None:
        now = time.monotonic()
        step, count, total = progress
        if self.progress is None or step != self.progress[0]:
            self._step_start = now
        self._step_end = now + (now - self._step_start) / count * (total - count) if count else 0.0
        self.progress = progress

    def describe(self) -> dict[str, Any]:
        """Describe the progress, the last error and all results for a page."""
        return {"progress": self.progress, "error": self.error, "points": self.points, "summary": self.summary}

    @property
    def summary(self) -> str:
        """Sentence for the page about the progress of the running training, or the result of the last one.

        A result (a point of the learning curve) has the accuracy in percent with its interval ("low" to "high"). It is
        estimated on "judged" of the "labels": the "random" ones, whose images were drawn at random, or all if too few
        were.
        """
        if (progress := self.progress) is not None:
            step, count, total = progress
            if not total:
                return "starting"
            seconds_left = max(0, round(self._step_end - time.monotonic()))
            time_left = f", {seconds_left // 60}:{seconds_left % 60:02} left" if count else ""
            return f"{step}: {count:,} of {total:,}{time_left}"
        if self.error or not (self.points or self.result):
            return self.error
        if not self._has_point:
            return "Trained. To estimate the accuracy, at least one class needs two labels."
        point = self.points[-1]
        interval = f"95 %: {point['low']:.0f} to {point['high']:.0f}"
        accuracy = f"{point['labels']:,} labels: {point['accuracy']:.0f} % right ({interval})"
        judged_on_all = point["judged"] == point["labels"] > point["random"]
        if judged_on_all:
            return (
                f"{accuracy}, on all labels because few were drawn at random; the others are harder than average. "
                f"{point['advice']}"
            )
        return f"{accuracy} on {point['judged']:,} random images. {point['advice']}"

    def stop(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
