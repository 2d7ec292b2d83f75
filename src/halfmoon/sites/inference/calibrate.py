"""Calibrate a trained model: fit the temperature by which its logits are divided on labeled images.

Guo et al., On Calibration of Modern Neural Networks, ICML 2017, Section 4.2: one number for all classes, which leaves
every predicted class as it is. The images have to be new to the model: on its training images it is too often right.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from halfmoon.core.errors import UserError
from halfmoon.engine.calibration import temperature
from halfmoon.sites.inference.image_folder import UnreadableImage
from halfmoon.sites.inference.load import Model, load_model, model_file
from halfmoon.sites.inference.measure import calibration, labeled_logits
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.serialization import with_seal


@dataclass(frozen=True)
class Fit:
    """How well a model is calibrated at one temperature."""

    temperature: float
    calibration_error: float
    loss: float  # mean cross-entropy


@dataclass(frozen=True)
class CalibrationResult:
    """A calibration; both fits are measured on the images that it was fitted on."""

    model: Path
    images: int
    before: Fit
    after: Fit
    unreadable: list[UnreadableImage]


def fit(logits: np.ndarray, labels: np.ndarray, at: float) -> Fit:
    """Return how well logits (N, classes), divided by the temperature `at`, fit labels int64 (N,)."""
    z, y = torch.from_numpy(logits / at), torch.from_numpy(labels)
    confidence, predicted = z.softmax(1).max(1)
    error, _ = calibration((predicted == y).numpy(), confidence.numpy())
    return Fit(at, error, float(F.cross_entropy(z, y)))


def calibrate(path: Path, folder: Path, device: str = "cpu", network: str | None = None) -> CalibrationResult:
    """Fit the temperature of the model of a run (or in a file) on a folder of labeled images, and write it there.

    The tensors stay as they are; the file is there whole, old or new. Raise `UserError` where there is no such model,
    no labeled image that can be read, or the file cannot be written.
    """
    place, model = model_file(path), load_model(path, device, network)
    labels, logits, unreadable = labeled_logits(model, folder)
    value = temperature(torch.from_numpy(logits), torch.from_numpy(labels))
    write_temperature(place, model, value)
    before, after = (fit(logits, labels, at) for at in (model.card.temperature, value))
    return CalibrationResult(place, len(labels), before, after, unreadable)


def write_temperature(place: Path, model: Model, value: float) -> None:
    """Put a temperature into the card of the model file that `model` was read from."""
    try:
        atomic_io.replace(place, with_seal(place.read_bytes(), replace(model.card, temperature=value).render()))
        if place.name in integrity.sums(place.parent):  # a run's folder knows the checksum of its model
            integrity.note(place.parent, {place.name: integrity.digest_of(place) or ""})
    except OSError as error:
        raise UserError(f"{place}: it cannot be written ({atomic_io.reason(error)}); make it writable.") from error
