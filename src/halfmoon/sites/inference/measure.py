"""Measure a model on labeled images (accuracy, scores of each class, calibration), and calibrate it."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from halfmoon.core.errors import UserError
from halfmoon.core.spreadsheet import escape_formulas
from halfmoon.data.readers.class_folders import find_subset
from halfmoon.models.temperature import find_temperature
from halfmoon.sites.inference.image_folder import UnreadableImage, check_confidence, list_labeled_images, read_batches
from halfmoon.sites.inference.load import InferenceModel, find_model_file, load_model
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.image_digests import load_digests
from halfmoon.storage.serialization import with_checksum

TRAINING_IMAGES_WARNING = "has the images that the model was trained on: on new ones its accuracy is lower."
"""Warning about the scores of a folder, after the folder's name."""

Scores = dict[str, Any]


def evaluate_folder(
    model: InferenceModel, folder: Path, min_confidence: float = 0.9
) -> tuple[Scores, list[UnreadableImage]]:
    """Evaluate a model on a folder of labeled images, and check whether it was trained on them.

    Args:
        model: the model.
        folder: the folder, with labels.csv or class folders.
        min_confidence: the scores "sure" are of images with a probability of at least this.

    Returns:
        The scores by name, and the unreadable images. Beside those of `score_logits` (accuracy and others) the scores
        have "training_images", whether the model was trained on any of the images, because its accuracy on new ones is
        lower, and "training_image_count", the number of images that are recognized by their pixels.

    Raises:
        UserError: no image can be read.
    """
    check_confidence(min_confidence)
    truth, logits, unreadable = compute_labeled_logits(model, folder)
    scores = score_logits(model, truth, logits, min_confidence)
    paths, _ = list_labeled_images(folder, model.classes)
    training_count = count_training_images(model, folder, paths)
    # By the location of the folder, or by the digests of training images; a model without digests has a count of 0.
    scores["training_images"] = has_training_images(model, folder) or training_count > 0
    scores["training_image_count"] = training_count
    return scores, unreadable


def score_logits(model: InferenceModel, truth: np.ndarray, logits: np.ndarray, min_confidence: float) -> Scores:
    """Compute all scores of a model's logits: those of `compute_scores`, and the area under the ROC curve as "auc".

    Args:
        model: the model, which calibrates probabilities and names the classes.
        truth: true classes, int64 (N,).
        logits: (N, classes).
        min_confidence: as for `compute_scores`.
    """
    probabilities = model.to_probabilities(logits)
    scores = compute_scores(
        truth=truth,
        predicted=probabilities.argmax(1),
        confidence=probabilities.max(1),
        classes=model.classes,
        min_confidence=min_confidence,
    )
    return {**scores, "auc": area_under_roc(truth, probabilities)}


def has_training_images(model: InferenceModel, folder: Path) -> bool:
    """Check whether a folder is the data set of the model's run, or its training images."""
    data = Path(model.card.options.get("data", ""))
    if not data.is_absolute() or not data.is_dir():
        return False
    training_folders = (data, find_subset(data, "train"))
    return folder.resolve() in {path.resolve() for path in training_folders if path is not None}


def refuse_training_images(model: InferenceModel, folder: Path) -> None:
    """Check that a folder has no training images of the model, because calibration needs images that are new to it.

    A model is more confident on its training images than on others. They are recognized by their folder, or by the
    digests next to the model's file.

    Raises:
        UserError: there are training images in the folder.
    """
    if has_training_images(model, folder):
        raise UserError(
            f"{folder}: the model was trained on these images; calibrate on labeled ones that are new to it."
        )

    paths, _ = list_labeled_images(folder, model.classes)
    training_count = count_training_images(model, folder, paths)
    if training_count > 0:
        raise UserError(
            f"{folder}: the model was trained on {training_count:,} of these {len(paths):,} images; calibrate on labeled "
            "ones that are new to it."
        )


def count_training_images(model: InferenceModel, folder: Path, paths: Sequence[str]) -> int:
    """Count the images of a folder, by `paths` relative to it, that the model was trained on.

    Training images are recognized by the digests next to the model's file; without these the count is 0.
    """
    digests = load_digests(model.file)
    if digests is None:
        return 0
    return sum(digests.count(batch.images) for batch in read_batches(model, folder, paths))


def compute_labeled_logits(model: InferenceModel, folder: Path) -> tuple[np.ndarray, np.ndarray, list[UnreadableImage]]:
    """Compute a model's logits of the labeled images of a folder, batch by batch.

    Args:
        model: the model.
        folder: the folder, with labels.csv or class folders.

    Returns:
        True classes, int64 (N,), logits, float64 (N, classes), and the unreadable images, which are not among the N.

    Raises:
        UserError: no image can be read.
    """
    paths, labels = list_labeled_images(folder, model.classes)
    truth: list[np.ndarray] = []
    logits: list[np.ndarray] = []
    unreadable: list[UnreadableImage] = []
    for batch in read_batches(model, folder, paths):
        truth.append(labels[batch.rows])
        logits.append(model.logits(batch.images))
        unreadable += batch.unreadable
    if len(unreadable) == len(paths):
        first = unreadable[0]
        raise UserError(f"{folder}: none of {len(paths)} labeled images can be read ({first.path}: {first.reason})")
    return np.concatenate(truth), np.concatenate(logits), unreadable


def compute_scores(
    truth: np.ndarray,
    predicted: np.ndarray,
    confidence: np.ndarray,
    classes: Sequence[str],
    min_confidence: float = 0.9,
) -> Scores:
    """Compute the scores of predictions.

    Args:
        truth: true classes, int64 (N,).
        predicted: predicted classes, int64 (N,).
        confidence: probabilities of the predicted classes, (N,).
        classes: the class names.
        min_confidence: "sure" has the accuracy of images with a probability of at least this.

    Returns:
        Shares are from 0 to 1. "balanced_accuracy" is the mean recall of the classes that occur; a score without a
        denominator is 0; the rows of "confusion" are true classes; "reliability" is the table of `calibration_error`.
    """
    correct = truth == predicted
    # Each pair of a true and a predicted class is one cell of the confusion matrix, numbered row by row.
    cell_counts = np.bincount(truth * len(classes) + predicted, minlength=len(classes) ** 2)
    confusion = cell_counts.reshape(len(classes), len(classes))
    hits = confusion.diagonal()
    support = confusion.sum(1)
    predictions = confusion.sum(0)
    precision = _ratio(hits, predictions)
    recall = _ratio(hits, support)
    f1 = _ratio(2 * hits, support + predictions)
    error, reliability = calibration_error(correct, confidence)
    confident = confidence >= min_confidence
    confident_count = int(confident.sum())
    class_columns = zip(classes, precision.tolist(), recall.tolist(), f1.tolist(), support.tolist(), strict=True)
    return {
        "images": len(truth),
        "accuracy": int(correct.sum()) / len(truth),
        "balanced_accuracy": float(recall[support > 0].mean()),
        "calibration_error": error,
        "sure": {
            "at_least": min_confidence,
            "images": confident_count,
            "share": confident_count / len(truth),
            "accuracy": int(correct[confident].sum()) / confident_count if confident_count else None,
        },
        "per_class": [
            {"class": name, "precision": class_precision, "recall": class_recall, "f1": class_f1, "support": count}
            for name, class_precision, class_recall, class_f1, count in class_columns
        ],
        "classes": list(classes),
        "confusion": confusion.tolist(),
        "reliability": reliability,
    }


def area_under_roc(truth: np.ndarray, probabilities: np.ndarray) -> float | None:
    """Compute the area under the ROC curve of one class against the rest, averaged over classes.

    The area is the share of pairs of an image of the class and one of another class that the probability of the class
    orders correctly. It is computed from ranks, as the Mann-Whitney U statistic, with ties counted as half.

    Args:
        truth: true classes, int64 (N,).
        probabilities: (N, classes).

    Returns:
        The mean over the classes that some images have and others do not; None if there is no such class.
    """
    from scipy.stats import rankdata  # slow to import

    counts = np.bincount(truth, minlength=probabilities.shape[1])
    usable_classes = np.flatnonzero((counts > 0) & (counts < len(truth)))
    if len(usable_classes) == 0:
        return None
    positives = counts[usable_classes]
    negatives = len(truth) - positives
    ranks = rankdata(probabilities[:, usable_classes], axis=0)
    is_positive = truth[:, None] == usable_classes
    rank_sums = (ranks * is_positive).sum(0)
    min_rank_sums = positives * (positives + 1) / 2
    areas = (rank_sums - min_rank_sums) / (positives * negatives)
    return float(np.mean(areas))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return numerator / np.maximum(denominator, 1)


def calibration_error(
    correct: np.ndarray, confidence: np.ndarray, bins: int = 15
) -> tuple[float, list[dict[str, Any]]]:
    """Compute the expected calibration error (Guo et al., ICML 2017, Equation 3) and its reliability table.

    The error is the difference between accuracy and mean confidence in bins of similar confidence, averaged over bins
    weighted by their images.

    Args:
        correct: whether each prediction is right, bool (N,).
        confidence: probabilities of the predicted classes, (N,).
        bins: the number M of bins; bin m has the confidences in ((m-1)/M, m/M].

    Returns:
        The error, and a row for each bin; an empty bin has None for confidence and accuracy.
    """
    edges = np.arange(bins + 1) / bins
    # side="left" puts a confidence that equals an edge into the bin below it.
    bin_index = np.searchsorted(edges[1:-1], confidence, side="left")
    counts = np.bincount(bin_index, minlength=bins)
    hits = np.bincount(bin_index, weights=correct, minlength=bins)
    confidence_sums = np.bincount(bin_index, weights=confidence, minlength=bins)
    # The number of images of a bin cancels: n/N * |hits/n - confidence_sum/n|.
    error = float(np.abs(hits - confidence_sums).sum() / len(correct))
    table: list[dict[str, Any]] = []
    for index, count in enumerate(counts):
        row = {"above": float(edges[index]), "to": float(edges[index + 1]), "images": int(count)}
        row["confidence"] = float(confidence_sums[index] / count) if count else None
        row["accuracy"] = float(hits[index] / count) if count else None
        table.append(row)
    return error, table


def write_evaluation(metrics: Scores, unreadable: Sequence[UnreadableImage], out: Path) -> list[Path]:
    """Write an evaluation into a folder: evaluation.json, classes.csv, confusion.csv and reliability.csv.

    Args:
        metrics: the scores, as `evaluate_folder` returns them.
        unreadable: images that could not be read, which are listed in evaluation.json.
        out: the folder.

    Returns:
        The files.

    Raises:
        UserError: the folder cannot be written.
    """
    confusion = [["true \\ predicted", *metrics["classes"]]]
    for name, row in zip(metrics["classes"], metrics["confusion"], strict=True):
        confusion.append([name, *row])
    all_values = {**metrics, "unreadable": [image._asdict() for image in unreadable]}
    files = {
        "evaluation.json": json.dumps(all_values, indent=1) + "\n",
        "classes.csv": _render_csv(_as_rows(metrics["per_class"])),
        "confusion.csv": _render_csv(confusion),
        "reliability.csv": _render_csv(_as_rows(metrics["reliability"])),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            atomic_io.write_atomically(out / name, text.encode())
    except OSError as error:
        raise UserError(
            f"{out}: it cannot be written ({atomic_io.error_reason(error)}); choose another {{out}}.",
            option="out",
        ) from error
    return [out / name for name in files]


def _as_rows(table: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """Convert records to rows, of which the first has the column names."""
    return [list(table[0]), *(list(record.values()) for record in table)]


def _render_csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(escape_formulas(list(row)) for row in rows)
    return text.getvalue()


@dataclass(frozen=True)
class CalibrationFit:
    """The calibration of a model at one temperature.

    Attributes:
        temperature: the divisor of logits.
        calibration_error: the expected calibration error, from 0 to 1.
        loss: the mean cross-entropy.
    """

    temperature: float
    calibration_error: float
    loss: float


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration, measured on the images that the temperature was fitted on.

    Attributes:
        model: the model's file.
        images: the number of images.
        before: the fit at the previous temperature.
        after: the fit at the new temperature.
        unreadable: images that could not be decoded.
        classes: the model's classes.
    """

    model: Path
    images: int
    before: CalibrationFit
    after: CalibrationFit
    unreadable: list[UnreadableImage]
    classes: tuple[str, ...]


def measure_fit(logits: np.ndarray, labels: np.ndarray, temperature: float) -> CalibrationFit:
    """Measure the calibration of logits (N, classes), divided by a temperature, on labels int64 (N,)."""
    scaled_logits = torch.from_numpy(logits / temperature)
    targets = torch.from_numpy(labels)
    confidence, predicted = scaled_logits.softmax(1).max(1)
    error, _ = calibration_error((predicted == targets).numpy(), confidence.numpy())
    return CalibrationFit(temperature, error, float(F.cross_entropy(scaled_logits, targets)))


def calibrate_model(path: Path, folder: Path, device: str = "cpu", network: str | None = None) -> CalibrationResult:
    """Calibrate a model: fit the temperature that divides its logits on labeled images, and write it into the file.

    Args:
        path: the folder of a finished run, or a model file.
        folder: labeled images that the model was not trained on.
        device: the device to compute on.
        network: MODULE:FUNCTION of a network from another package.

    Raises:
        UserError: the model or the images cannot be used, or the file cannot be written.
    """
    file = find_model_file(path)
    model = load_model(path, device, network)
    refuse_training_images(model, folder)
    labels, logits, unreadable = compute_labeled_logits(model, folder)
    temperature = write_temperature(file, model, logits, labels)
    return CalibrationResult(
        model=file,
        images=len(labels),
        before=measure_fit(logits, labels, model.card.temperature),
        after=measure_fit(logits, labels, temperature),
        unreadable=unreadable,
        classes=model.classes,
    )


def write_temperature(file: Path, model: InferenceModel, logits: np.ndarray, labels: np.ndarray) -> float:
    """Fit the temperature of a model, and write it into the metadata of the model's file.

    Args:
        file: the model's file.
        model: the model that was loaded from it.
        logits: logits of labeled images, (N, classes).
        labels: their classes, int64 (N,).

    Returns:
        The temperature.

    Raises:
        UserError: the file cannot be written.
    """
    fitted_temperature = find_temperature(torch.from_numpy(logits), torch.from_numpy(labels))
    try:
        metadata = replace(model.card, temperature=fitted_temperature).render()
        atomic_io.write_atomically(file, with_checksum(file.read_bytes(), metadata))
        # A run folder stores the checksum of its model, which has changed.
        if file.name in integrity.read_checksums(file.parent):
            integrity.record_checksums(file.parent, {file.name: integrity.file_sha256(file) or ""})
    except OSError as error:
        raise UserError(f"{file}: it cannot be written ({atomic_io.error_reason(error)}); make it writable.") from error
    return fitted_temperature
