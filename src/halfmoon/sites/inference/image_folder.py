"""List and label the images of a folder, of any size and mode, and read them a batch at a time."""

import csv
import io
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.readers.cache import replacing
from halfmoon.data.readers.class_folders import SUFFIXES, is_image, unlabeled_in
from halfmoon.data.readers.decode import fitted
from halfmoon.report.spreadsheet import harmless_row
from halfmoon.sites.folders.labels import LABELS_FILE, find_labels_file
from halfmoon.sites.folders.site_folder import join_names, read_site
from halfmoon.sites.inference.load import InferenceModel
from halfmoon.storage import atomic_io


class UnreadableImage(NamedTuple):
    """An image that could not be read."""

    path: str  # relative to the folder, with forward slashes
    reason: str


class ImageBatch(NamedTuple):
    """One batch of a folder."""

    rows: list[int]  # the places of the images in the list of paths
    images: np.ndarray  # uint8 (len(rows), H, W, C)
    unreadable: list[UnreadableImage]


def list_images(folder: Path) -> list[str]:
    """Return the sorted paths of all images in and below a folder, without hidden ones; raise `UserError` for none."""
    if not folder.is_dir():
        what = "this is a file" if folder.is_file() else "there is no such folder"
        raise UserError(f"{folder}: {what}; give a folder of images.")
    paths = []
    for place, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        near = Path(place).relative_to(folder)
        visible = (name for name in files if not name.startswith("."))
        visible = (name for name in visible if name.lower().endswith(SUFFIXES) or is_image(Path(place, name)))
        paths += [(near / name).as_posix() for name in visible]
    if not paths:
        raise UserError(f"{folder}: there is no image in it or below it ({', '.join(SUFFIXES)}).")
    return sorted(paths)


def list_labeled_images(folder: Path, classes: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the sorted paths of labeled images and their labels, int64 (N,), by labels.csv or by class folders.

    Raise `UserError` where there is neither, and for a class that is not in `classes`.
    """
    if find_labels_file(folder).is_file():
        site = read_site(folder)
        pairs = [(path, site.classes[label]) for path, label in zip(site.paths, site.labels, strict=True) if label >= 0]
        if not pairs:
            raise UserError(
                f"{folder / LABELS_FILE} names no image; write a line with path and label for each labeled one."
            )
    else:
        pairs = [(path, path.split("/")[0]) for path in list_images(folder) if "/" in path]
        if (without := unlabeled_in(folder)) is not None:
            pairs = [(path, name) for path, name in pairs if name != without.name]
        if not pairs:
            raise UserError(
                f"{folder} has neither a {LABELS_FILE} nor class folders; sort the images into a folder for each class, "
                f"or write a {LABELS_FILE} (path,label)."
            )
    numbers = {_plain(name): number for number, name in enumerate(classes)}
    unknown = Counter(name for _, name in pairs if _plain(name) not in numbers)
    if unknown:
        (name, count), others = unknown.most_common(1)[0], len(unknown) - 1
        more = f" ({others} more besides)" if others else ""
        raise UserError(
            f"{folder}: the model does not know the class {name!r} of {count} images{more}; its classes are: "
            f"{join_names(classes, 20)}."
        )
    return [path for path, _ in pairs], np.array([numbers[_plain(name)] for _, name in pairs], np.int64)


def read_batches(model: InferenceModel, folder: Path, paths: Sequence[str]) -> Iterator[ImageBatch]:
    """Yield the images at `paths` as the model takes them, a batch at a time, with the reasons of unreadable ones."""

    def pixels(path: str) -> np.ndarray | UnreadableImage:
        try:
            return fitted((folder / path).read_bytes(), path, *model.shape, model.card.crop, model.card.window)
        except OSError as error:
            return UnreadableImage(path, atomic_io.reason(error))
        except UserError as error:
            return UnreadableImage(path, str(error).removeprefix(f"{path}: "))

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as readers:  # Pillow lets others run while it reads an image
        for first in range(0, len(paths), model.batch):
            results = list(readers.map(pixels, paths[first : first + model.batch]))
            rows = [first + k for k, result in enumerate(results) if isinstance(result, np.ndarray)]
            readable = [result for result in results if isinstance(result, np.ndarray)]
            images = np.stack(readable) if readable else np.empty((0, *model.shape), np.uint8)
            yield ImageBatch(rows, images, [result for result in results if isinstance(result, UnreadableImage)])


def _plain(name: str) -> str:
    """Return a name with accents in one way: some systems split them off in names of folders."""
    return unicodedata.normalize("NFC", name)


def _refuse(error: OSError) -> None:
    raise UserError(
        f"{error.filename}: the folder cannot be read ({atomic_io.reason(error)}); make it readable."
    ) from error


PREDICTION_COLUMNS = ("path", "label", "probability", "sure", "runner_up", "runner_up_probability")


@dataclass(frozen=True)
class PredictionResult:
    """The table of a folder, and its counts."""

    out: Path
    images: int  # in the table
    below_confidence: int
    labels: dict[str, int]  # images of each class of the model
    unreadable: list[UnreadableImage]
    outliers: int


def predict_folder(
    model: InferenceModel,
    folder: Path,
    out: Path,
    sure: float = 0.9,
    unlike: Callable[[np.ndarray], np.ndarray] | None = None,
) -> PredictionResult:
    """Write a CSV file with the `COLUMNS` of each readable image, whole or not at all, and return its counts.

    "sure" is yes for a probability of at least `sure`. `unlike` says of features (N, F) which look unlike what the
    model knows, bool (N,); it is another column. Raise `UserError` where there is no image, or it cannot be
    written.
    """
    paths = list_images_checked(folder, sure)
    counts: Counter[str] = Counter()
    unsure = strange = 0
    unreadable: list[UnreadableImage] = []
    try:
        with replacing(out) as file:
            # Names may hold bytes that are no UTF-8: they are written as they are.
            text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="", write_through=True)
            table = csv.writer(text, lineterminator="\n")
            table.writerow(PREDICTION_COLUMNS if unlike is None else (*PREDICTION_COLUMNS, "unlike"))
            for cells in iterate_predictions(model, folder, paths, sure, unreadable, unlike):
                table.writerow(harmless_row(cells))
                counts[cells[1]] += 1
                unsure += cells[3] == "no"
                strange += cells[6:] == ["yes"]
            text.detach()
    except OSError as error:
        raise UserError(f"{out}: it cannot be written ({atomic_io.reason(error)}); choose another --out.") from error
    labels = {name: counts[name] for name in model.classes}
    return PredictionResult(out, sum(counts.values()), unsure, labels, unreadable, strange)


def list_images_checked(folder: Path, sure: float) -> list[str]:
    check_confidence(sure)
    return list_images(folder)


def iterate_predictions(
    model: InferenceModel,
    folder: Path,
    paths: Sequence[str],
    sure: float,
    unreadable: list[UnreadableImage],
    unlike: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Iterator[list[str]]:
    """Yield the cells of each readable image, of `COLUMNS` and of `unlike`; the others are added to `unreadable`."""
    for batch in read_batches(model, folder, paths):
        unreadable += batch.unreadable
        if not batch.rows:
            continue
        logits, features = model.represent(batch.images)
        odd = None if unlike is None else unlike(features)
        for place, (row, values) in enumerate(zip(batch.rows, model.to_probabilities(logits), strict=True)):
            best, *others = np.argsort(-values, kind="stable")
            cells = [paths[row], model.classes[best], f"{values[best]:.6f}", "yes" if values[best] >= sure else "no"]
            cells += [model.classes[others[0]], f"{values[others[0]]:.6f}"] if others else ["", ""]
            yield cells if odd is None else [*cells, "yes" if odd[place] else "no"]


def check_confidence(sure: float) -> None:
    if not 0 <= sure <= 1:
        raise UserError(f"--sure is {sure:g}: it must be a probability, from 0 to 1.")
