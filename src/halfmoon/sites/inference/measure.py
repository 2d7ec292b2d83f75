"""Measure a model on labeled images: accuracy, the scores of each class, and calibration."""

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
from halfmoon.data.readers.class_folders import part_of
from halfmoon.engine.evaluation import temperature
from halfmoon.report.spreadsheet import harmless_row
from halfmoon.sites.inference.image_folder import UnreadableImage, check_confidence, list_labeled_images, read_batches
from halfmoon.sites.inference.load import InferenceModel, find_model_file, load_model
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.serialization import with_seal

TRAINING_IMAGES_WARNING = "has the images that the model was trained on: on new ones it is right less often."
"""What is said of the scores of a folder, after its name."""

Scores = dict[str, Any]


def evaluate_folder(model: InferenceModel, folder: Path, sure: float = 0.9) -> tuple[Scores, list[UnreadableImage]]:
    """Return `scores`, "auc" and "training_images" on a folder of labeled images, and the unreadable ones.

    Raise `UserError` for none that can be read.
    """
    check_confidence(sure)
    truth, logits, unreadable = compute_labeled_logits(model, folder)
    metrics = score_logits(model, truth, logits, sure)
    return {**metrics, "training_images": has_training_images(model, folder)}, unreadable


def score_logits(model: InferenceModel, truth: np.ndarray, logits: np.ndarray, sure: float) -> Scores:
    """Return `scores` and "auc" of a model's logits (N, classes) of images whose classes are `truth`, int64 (N,)."""
    values = model.to_probabilities(logits)
    metrics = compute_scores(truth, values.argmax(1), values.max(1), classes=model.classes, sure=sure)
    return {**metrics, "auc": area_under_roc(truth, values)}


def has_training_images(model: InferenceModel, folder: Path) -> bool:
    """Return whether a folder, or its part of the training images, is what the model's run was given as its data."""
    data = Path(model.card.options.get("data", ""))
    if not data.is_absolute() or not data.is_dir():
        return False
    return folder.resolve() in {each.resolve() for each in (data, part_of(data, "train")) if each is not None}


def refuse_training_images(model: InferenceModel, folder: Path) -> None:
    """Raise UserError for images on which a model is surer than on new ones."""
    if has_training_images(model, folder):
        raise UserError(
            f"{folder}: the model was trained on these images; calibrate on labeled ones that are new to it."
        )


def compute_labeled_logits(model: InferenceModel, folder: Path) -> tuple[np.ndarray, np.ndarray, list[UnreadableImage]]:
    """Return labels and logits of a folder of labeled images, and the unreadable ones; raise `UserError` for none."""
    paths, labels = list_labeled_images(folder, model.classes)
    truth, logits = [], []
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
    truth: np.ndarray, predicted: np.ndarray, confidence: np.ndarray, classes: Sequence[str], sure: float = 0.9
) -> Scores:
    """Return the scores of true and predicted classes, int64 (N,), and their probabilities, (N,).

    Balanced accuracy is the mean recall of the classes that occur; a score without a denominator is 0; rows of
    "confusion" are true classes; "sure" is about images with a probability of at least `sure`. Shares are in 0..1.
    """
    correct = truth == predicted
    pairs = np.bincount(truth * len(classes) + predicted, minlength=len(classes) ** 2)
    confusion = pairs.reshape(len(classes), len(classes))
    hits, support, predictions = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    precision, recall = _ratio(hits, predictions), _ratio(hits, support)
    f1 = _ratio(2 * hits, support + predictions)
    error, table = calibration_error(correct, confidence)
    above = confidence >= sure
    return {
        "images": len(truth),
        "accuracy": int(correct.sum()) / len(truth),
        "balanced_accuracy": float(recall[support > 0].mean()),
        "calibration_error": error,
        "sure": {
            "at_least": sure,
            "images": int(above.sum()),
            "share": int(above.sum()) / len(truth),
            "accuracy": int(correct[above].sum()) / int(above.sum()) if above.any() else None,
        },
        "per_class": [
            {"class": name, "precision": p, "recall": r, "f1": f, "support": n}
            for name, p, r, f, n in zip(
                classes, precision.tolist(), recall.tolist(), f1.tolist(), support.tolist(), strict=True
            )
        ],
        "classes": list(classes),
        "confusion": confusion.tolist(),
        "reliability": table,
    }


def area_under_roc(truth: np.ndarray, probabilities: np.ndarray) -> float | None:
    """Return the area under the ROC curve: the mean of one class against the rest, where both occur; None without."""
    from scipy.stats import rankdata  # slow to import

    counts = np.bincount(truth, minlength=probabilities.shape[1])
    both = np.flatnonzero((counts > 0) & (counts < len(truth)))
    mine, ranks = counts[both], rankdata(probabilities[:, both], axis=0)
    sums = (ranks * (truth[:, None] == both)).sum(0)
    return float(np.mean((sums - mine * (mine + 1) / 2) / (mine * (len(truth) - mine)))) if len(both) else None


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return part / np.maximum(whole, 1)


def calibration_error(
    correct: np.ndarray, confidence: np.ndarray, bins: int = 15
) -> tuple[float, list[dict[str, Any]]]:
    """Return the expected calibration error (Guo et al., ICML 2017, Equation 3) and its reliability table.

    Bin m has the images whose probability of the predicted class is in ((m-1)/M, m/M]; an empty one has None for
    scores.
    """
    edges = np.arange(bins + 1) / bins
    place = np.searchsorted(edges[1:-1], confidence, side="left")
    counts = np.bincount(place, minlength=bins)
    hits = np.bincount(place, weights=correct, minlength=bins)
    sums = np.bincount(place, weights=confidence, minlength=bins)
    error = float(np.abs(hits - sums).sum() / len(correct))
    table = [
        {
            "above": float(edges[m]),
            "to": float(edges[m + 1]),
            "images": int(n),
            "confidence": float(sums[m] / n) if n else None,
            "accuracy": float(hits[m] / n) if n else None,
        }
        for m, n in enumerate(counts)
    ]
    return error, table


def write_evaluation(metrics: Scores, unreadable: Sequence[UnreadableImage], out: Path) -> list[Path]:
    """Write evaluation.json and three tables into a folder; raise `UserError` where it cannot be written."""
    confusion = [
        ["true \\ predicted", *metrics["classes"]],
        *([n, *row] for n, row in zip(metrics["classes"], metrics["confusion"], strict=True)),
    ]
    whole = {**metrics, "unreadable": [each._asdict() for each in unreadable]}
    files = {
        "evaluation.json": json.dumps(whole, indent=1) + "\n",
        "classes.csv": _csv(_rows(metrics["per_class"])),
        "confusion.csv": _csv(confusion),
        "reliability.csv": _csv(_rows(metrics["reliability"])),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, words in files.items():
            atomic_io.replace(out / name, words.encode())
    except OSError as error:
        raise UserError(f"{out}: it cannot be written ({atomic_io.reason(error)}); choose another --out.") from error
    return [out / name for name in files]


def _rows(table: Sequence[dict[str, Any]]) -> list[list[Any]]:
    return [list(table[0]), *(list(row.values()) for row in table)]


def _csv(rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(harmless_row(list(row)) for row in rows)
    return text.getvalue()


@dataclass(frozen=True)
class CalibrationFit:
    """How well a model is calibrated at one temperature."""

    temperature: float
    calibration_error: float
    loss: float  # mean cross-entropy


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration; both fits are measured on the images that it was fitted on."""

    model: Path
    images: int
    before: CalibrationFit
    after: CalibrationFit
    unreadable: list[UnreadableImage]


def measure_fit(logits: np.ndarray, labels: np.ndarray, at: float) -> CalibrationFit:
    """Return how well logits (N, classes), divided by the temperature `at`, fit labels (N,)."""
    z, y = torch.from_numpy(logits / at), torch.from_numpy(labels)
    confidence, predicted = z.softmax(1).max(1)
    error, _ = calibration_error((predicted == y).numpy(), confidence.numpy())
    return CalibrationFit(at, error, float(F.cross_entropy(z, y)))


def calibrate_model(path: Path, folder: Path, device: str = "cpu", network: str | None = None) -> CalibrationResult:
    """Fit the temperature of a model on labeled images, and write it into its file; raise `UserError`."""
    place, model = find_model_file(path), load_model(path, device, network)
    refuse_training_images(model, folder)
    labels, logits, unreadable = compute_labeled_logits(model, folder)
    value = write_temperature(place, model, logits, labels)
    before, after = (measure_fit(logits, labels, at) for at in (model.card.temperature, value))
    return CalibrationResult(place, len(labels), before, after, unreadable)


def write_temperature(place: Path, model: InferenceModel, logits: np.ndarray, labels: np.ndarray) -> float:
    """Put the temperature that fits these logits into the card of the model file, and return it."""
    value = temperature(torch.from_numpy(logits), torch.from_numpy(labels))
    try:
        atomic_io.replace(place, with_seal(place.read_bytes(), replace(model.card, temperature=value).render()))
        if place.name in integrity.sums(place.parent):  # a run's folder knows the checksum of its model
            integrity.note(place.parent, {place.name: integrity.digest_of(place) or ""})
    except OSError as error:
        raise UserError(f"{place}: it cannot be written ({atomic_io.reason(error)}); make it writable.") from error
    return value
