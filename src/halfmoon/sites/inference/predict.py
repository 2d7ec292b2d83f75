"""Predict the classes of a folder's images, as a table with probabilities."""

import csv
import io
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.readers.whole_files import replacing
from halfmoon.report.spreadsheet import harmless_row
from halfmoon.sites.inference.image_folder import UnreadableImage, batches, image_paths
from halfmoon.sites.inference.load import Model
from halfmoon.storage import atomic_io

COLUMNS = ("path", "label", "probability", "sure", "runner_up", "runner_up_probability")


@dataclass(frozen=True)
class PredictionResult:
    """The table of a folder, and its counts."""

    out: Path
    images: int  # in the table
    unsure: int  # of these
    labels: dict[str, int]  # images of each class of the model
    unreadable: list[UnreadableImage]


def predict(model: Model, folder: Path, out: Path, sure: float = 0.9) -> PredictionResult:
    """Write a CSV file with one row for each readable image in `folder` and below it, and return what it holds.

    The columns are `COLUMNS`: path (relative to the folder), most probable class with its probability, "yes" where
    that is at least `sure` else "no", and the second class with its probability (empty for a model of one class).
    Images are read and written batch by batch. The file is there whole or not at all. Raise `UserError` where there
    is no image, `sure` is not in 0..1, or the file cannot be written.
    """
    check_share(sure)
    paths = image_paths(folder)
    counts: Counter[str] = Counter()
    unsure, unreadable = 0, []
    try:
        with replacing(out) as file:
            # Names may hold bytes that are no UTF-8: they are written as they are.
            text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="", write_through=True)
            table = csv.writer(text, lineterminator="\n")
            table.writerow(COLUMNS)
            for batch in batches(model, folder, paths):
                for row, values in zip(batch.rows, model.probabilities(batch.images), strict=True):
                    label, others = _best(model, values)
                    confident = values.max() >= sure
                    cells = [paths[row], label, f"{values.max():.6f}", "yes" if confident else "no", *others]
                    table.writerow(harmless_row(cells))
                    counts[label] += 1
                    unsure += not confident
                unreadable += batch.unreadable
            text.detach()
    except OSError as error:
        raise UserError(f"{out}: it cannot be written ({atomic_io.reason(error)}); choose another --out.") from error
    labels = {name: counts[name] for name in model.classes}
    return PredictionResult(out, sum(counts.values()), unsure, labels, unreadable)


def check_share(sure: float) -> None:
    """Raise `UserError` unless `sure` is a number from 0 to 1."""
    if not 0 <= sure <= 1:
        raise UserError(f"--sure is {sure:g}: it must be a probability, from 0 to 1.")


def _best(model: Model, values: np.ndarray) -> tuple[str, list[str]]:
    """Return the most probable class, and the next with its probability."""
    order = np.argsort(-values, kind="stable")
    second = [word for k in order[1:2] for word in (model.classes[k], f"{values[k]:.6f}")]
    return model.classes[order[0]], second or ["", ""]
