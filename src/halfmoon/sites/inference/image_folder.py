"""List, label and read the images of a folder, of any size and mode, and write a model's predictions."""

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from halfmoon.core.errors import UnknownRangeError, UserError
from halfmoon.core.spreadsheet import escape_formulas
from halfmoon.data.class_names import match_class_name, normalize_class_name
from halfmoon.data.readers.cache import write_atomically
from halfmoon.data.readers.class_folders import (
    SUBSET_NAMES,
    SUFFIXES,
    describe_unsupported_formats,
    find_subset,
    find_unlabeled,
    is_image,
    walk_files,
)
from halfmoon.data.readers.decode import decode_to_shape
from halfmoon.data.readers.label_table import LABELS_FILE, find_labels_file, normalize_path, read_label_table
from halfmoon.sites.folders.site_folder import is_site_folder, join_names, read_site
from halfmoon.sites.inference.load import InferenceModel
from halfmoon.storage import atomic_io

MAX_LISTED_CLASSES = 20
"""Number of classes in a message; further ones are counted."""

MAX_DECODE_THREADS = 4


class UnreadableImage(NamedTuple):
    """An image that cannot be decoded."""

    path: str  # relative to the folder, with forward slashes
    reason: str


class ImageBatch(NamedTuple):
    """A batch of decoded images."""

    rows: list[int]  # indices of the images in the list of paths
    images: np.ndarray  # uint8 (len(rows), H, W, C)
    unreadable: list[UnreadableImage]


def list_images(folder: Path) -> list[str]:
    """List all images in and below a folder, except hidden ones, as sorted relative paths.

    Raises:
        UserError: the folder does not exist, cannot be read, or has no image.
    """
    if not folder.is_dir():
        problem = "this is a file" if folder.is_file() else "there is no such file or folder"
        raise UserError(f"{folder}: {problem}; give a folder of images.")
    paths = [
        path.relative_to(folder).as_posix()
        for path in walk_files(folder, onerror=_raise_unreadable_folder)
        if path.name.lower().endswith(SUFFIXES) or is_image(path)
    ]
    if not paths:
        formats = describe_unsupported_formats(folder)
        only = f", only {formats}" if formats else f" ({', '.join(SUFFIXES)})"
        raise UserError(f"{folder}: there is no image in it or below it{only}.")
    return sorted(paths)


def list_labeled_images(folder: Path, classes: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """List the labeled images of a folder, by labels.csv or by class folders.

    Args:
        folder: the folder of images.
        classes: the model's classes.

    Returns:
        Sorted paths, and the class index of each image, int64 (N,).

    Raises:
        UserError: the folder has neither, or a class that is not in `classes`.
    """
    class_by_path = _read_class_names(folder, classes)
    # Some file systems decompose the accents in names of folders.
    class_index = {normalize_class_name(name): index for index, name in enumerate(classes)}
    unknown = Counter(name for name in class_by_path.values() if normalize_class_name(name) not in class_index)
    if unknown:
        name, count = unknown.most_common(1)[0]
        more = f", and {len(unknown) - 1} more of the folder's classes" if len(unknown) > 1 else ""
        similar = match_class_name(name, classes)
        hint = f"rename it to {similar!r}, if it is that class; " if similar else ""
        raise UserError(
            f"{folder}: the model does not know the class {name!r} of {count} images{more}; {hint}its classes are: "
            f"{join_names(classes, MAX_LISTED_CLASSES)}."
        )
    labels = np.array([class_index[normalize_class_name(name)] for name in class_by_path.values()], np.int64)
    return list(class_by_path), labels


def describe_unused_images(folder: Path, classes: Sequence[str] | None = None) -> list[str]:
    """Describe the images of a folder that are not used, by kind: without a label, and in formats that are not read.

    Args:
        folder: the folder of images.
        classes: the model's classes, if only labeled images are used; None if all images are.
    """
    notes: list[str] = []
    if classes is not None:
        labeled, _ = list_labeled_images(folder, classes)
        if count := len(set(list_images(folder)) - set(labeled)):
            notes.append(f"{count:,} images without a label" if count > 1 else "1 image without a label")
    formats = describe_unsupported_formats(folder)
    return [*notes, formats] if formats else notes


def _read_class_names(folder: Path, classes: Sequence[str]) -> dict[str, str]:
    """Read the class name of each labeled image, from labels.csv or, without it, from the names of folders.

    Args:
        folder: the folder of images.
        classes: the model's classes.

    Returns:
        Class names by path, in the order of the paths.

    Raises:
        UserError: no image has a label.
    """
    if read_label_table(folder).file is not None and is_site_folder(folder):
        site = read_site(folder)
        labeled = [(path, label) for path, label in zip(site.paths, site.labels, strict=True) if label >= 0]
        if not labeled:
            raise UserError(
                f"{find_labels_file(folder)} names no image; write a line with path and label for each labeled one."
            )
        return {path: site.classes[label] for path, label in labeled}
    class_by_path = {path: path.split("/")[0] for path in list_images(folder) if "/" in path}
    _refuse_parts(folder, set(class_by_path.values()), classes)
    unlabeled_folder = find_unlabeled(folder)
    if unlabeled_folder is not None:
        class_by_path = {path: name for path, name in class_by_path.items() if name != unlabeled_folder.name}
    if not class_by_path:
        raise UserError(
            f"{folder} has neither a {LABELS_FILE} nor class folders; sort the images into a folder for each "
            f"class, or write a {LABELS_FILE} (path,label)."
        )
    return class_by_path


def _refuse_parts(folder: Path, top_folders: set[str], classes: Sequence[str]) -> None:
    """Refuse the folder of a data set whose top folders are parts, such as train and test, instead of classes.

    Args:
        folder: the folder of images.
        top_folders: the names of its subfolders with images.
        classes: the model's classes, which may be called like a subset.

    Raises:
        UserError: all top folders are parts.
    """
    subset_names = {name for names in SUBSET_NAMES for name in names}
    if top_folders and all(name.lower() in subset_names and name not in classes for name in top_folders):
        subset = find_subset(folder, "test") or find_subset(folder, "validation") or folder / sorted(top_folders)[0]
        raise UserError(
            f"{folder}: it has the folders {join_names(sorted(top_folders))}: give one of them, such as {subset}."
        )


def _decode_for_model(model: InferenceModel, folder: Path, path: str) -> np.ndarray | UnreadableImage:
    """Decode an image as the model needs it, uint8 (H, W, C), or return the reason why it cannot be read."""
    try:
        return decode_to_shape((folder / path).read_bytes(), path, *model.shape, model.card.crop, model.card.window)
    except OSError as error:
        return UnreadableImage(path, atomic_io.error_reason(error))
    except UnknownRangeError:
        # The message of this error advises an option of training, which commands on a trained model do not have.
        return UnreadableImage(path, "its pixels have 32 bits and no known range; convert it to 8 or 16 bits.")
    except UserError as error:
        return UnreadableImage(path, str(error).removeprefix(f"{path}: "))


def read_batches(model: InferenceModel, folder: Path, paths: Sequence[str]) -> Iterator[ImageBatch]:
    """Decode images as the model needs them, one batch at a time.

    Args:
        model: determines the size of images and of batches.
        folder: the folder of images.
        paths: the images, relative to `folder`.

    Yields:
        Batches in the order of `paths`.
    """
    decode = partial(_decode_for_model, model, folder)
    # Pillow releases the interpreter's lock while it decodes, so threads decode in parallel.
    with ThreadPoolExecutor(min(MAX_DECODE_THREADS, os.cpu_count() or 1)) as threads:
        for first in range(0, len(paths), model.batch):
            rows: list[int] = []
            decoded: list[np.ndarray] = []
            unreadable: list[UnreadableImage] = []
            for row, result in enumerate(threads.map(decode, paths[first : first + model.batch]), start=first):
                if isinstance(result, UnreadableImage):
                    unreadable.append(result)
                else:
                    rows.append(row)
                    decoded.append(result)
            images = np.stack(decoded) if decoded else np.empty((0, *model.shape), np.uint8)
            yield ImageBatch(rows, images, unreadable)


def _raise_unreadable_folder(error: OSError) -> None:
    raise UserError(
        f"{error.filename}: the folder cannot be read ({atomic_io.error_reason(error)}); make it readable."
    ) from error


PREDICTION_COLUMNS = ("path", "label", "probability", "sure", "runner_up", "runner_up_probability")

OUTLIER_COLUMN = "unlike"

OutlierTest = Callable[[np.ndarray], np.ndarray]
"""Maps features (N, F) to bool (N,): whether an image does not resemble those that the model was made for."""


@dataclass(frozen=True)
class PredictionResult:
    """Counts of a table of predictions.

    Attributes:
        out: the file.
        images: the number of images in the table.
        below_confidence: how many of these have a smaller probability than required.
        labels: images of each class of the model.
        unreadable: images that are not in the table.
        outliers: how many images are outliers; 0 without a test for them.
    """

    out: Path
    images: int
    below_confidence: int
    labels: dict[str, int]
    unreadable: list[UnreadableImage]
    outliers: int


def predict_folder(
    model: InferenceModel,
    folder: Path,
    out: Path,
    min_confidence: float = 0.9,
    is_outlier: OutlierTest | None = None,
) -> PredictionResult:
    """Classify the images of a folder, and write a CSV file with the `PREDICTION_COLUMNS` of each readable image.

    The file is complete when it appears. Further columns of the folder's labels.csv or metadata.csv, such as an age, follow
    these.

    Args:
        model: the model.
        folder: the folder of images.
        out: the file.
        min_confidence: the column "sure" is yes for a probability of at least this, from 0 to 1.
        is_outlier: adds the column `OUTLIER_COLUMN`.

    Raises:
        UserError: there is no image, or the file cannot be written.
    """
    check_confidence(min_confidence)
    paths = list_images(folder)
    counts: Counter[str] = Counter()
    below_confidence = 0
    outliers = 0
    unreadable: list[UnreadableImage] = []
    try:
        with write_atomically(out) as file:
            # File names may contain bytes that are no UTF-8: "surrogateescape" writes them unchanged.
            text = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="", write_through=True)
            table = csv.writer(text, lineterminator="\n")
            titles = PREDICTION_COLUMNS if is_outlier is None else (*PREDICTION_COLUMNS, OUTLIER_COLUMN)
            extra_titles, extra_cells = read_extra_columns(folder)
            extra_titles = [f"given_{title}" if title in titles else title for title in extra_titles]
            table.writerow([*titles, *escape_formulas(extra_titles)])
            for cells in iterate_predictions(model, folder, paths, min_confidence, unreadable, is_outlier):
                extra = extra_cells.get(normalize_path(cells[0]), [""] * len(extra_titles))
                table.writerow(escape_formulas([*cells, *extra]))
                counts[cells[1]] += 1
                below_confidence += cells[3] == "no"
                outliers += cells[6:] == ["yes"]
            text.detach()
    except OSError as error:
        raise UserError(
            f"{out}: it cannot be written ({atomic_io.error_reason(error)}); choose another {{out}}.",
            option="out",
        ) from error
    return PredictionResult(
        out=out,
        images=sum(counts.values()),
        below_confidence=below_confidence,
        labels={name: counts[name] for name in model.classes},
        unreadable=unreadable,
        outliers=outliers,
    )


def read_extra_columns(folder: Path) -> tuple[list[str], dict[str, list[str]]]:
    """Read the columns of a folder's labels.csv or metadata.csv that are no labels.

    Returns:
        The titles of the columns, and the cells of each image by its normalized path; empty if there is no table, or it
        has a fault.
    """
    table = read_label_table(folder)
    if table.faults:
        return [], {}
    cells = zip(table.rows, table.extra_cells, strict=True)
    return list(table.extra_titles), {normalize_path(path): list(extra) for (path, _, _), extra in cells}


def iterate_predictions(
    model: InferenceModel,
    folder: Path,
    paths: Sequence[str],
    min_confidence: float,
    unreadable: list[UnreadableImage],
    is_outlier: OutlierTest | None = None,
) -> Iterator[list[str]]:
    """Classify images batch by batch, and format the predictions as cells of a table.

    Args:
        model: the model.
        folder: the folder of images.
        paths: the images, relative to `folder`.
        min_confidence: the column "sure" is yes for a probability of at least this.
        unreadable: receives the images that cannot be decoded.
        is_outlier: adds the column `OUTLIER_COLUMN`.

    Yields:
        The cells of `PREDICTION_COLUMNS` of each readable image, and of `OUTLIER_COLUMN`.
    """
    for batch in read_batches(model, folder, paths):
        unreadable += batch.unreadable
        if not batch.rows:
            continue
        logits, features = model.represent(batch.images)
        outliers = None if is_outlier is None else is_outlier(features)
        for index, (row, probabilities) in enumerate(zip(batch.rows, model.to_probabilities(logits), strict=True)):
            ranking = np.argsort(-probabilities, kind="stable")  # class indices, the most probable first
            best = ranking[0]
            is_confident = probabilities[best] >= min_confidence
            cells = [paths[row], model.classes[best], f"{probabilities[best]:.6f}", "yes" if is_confident else "no"]
            if len(ranking) > 1:
                runner_up = ranking[1]
                cells += [model.classes[runner_up], f"{probabilities[runner_up]:.6f}"]
            else:
                cells += ["", ""]
            if outliers is not None:
                cells.append("yes" if outliers[index] else "no")
            yield cells


def check_confidence(min_confidence: float) -> None:
    """Raise UserError for a probability that is not from 0 to 1."""
    if not 0 <= min_confidence <= 1:
        raise UserError(f"{{sure}} is {min_confidence:g}: it must be a probability, from 0 to 1.", option="sure")
