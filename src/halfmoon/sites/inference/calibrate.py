"""Probabilities that mean something: the temperature by which logits are divided, fitted on labeled images.

Guo et al., On Calibration of Modern Neural Networks, ICML 2017, Section 4.2: one number for all classes, which leaves
every label as it is and changes how sure the model is of it. The images have to be new to the model: on those that it
was trained on it is too often right.
"""

from __future__ import annotations

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
    """What a model's probabilities are worth at one temperature."""

    temperature: float
    calibration_error: float
    loss: float  # mean cross-entropy


@dataclass(frozen=True)
class Calibrated:
    """What came of a calibration; both fits are measured on the images that it was made on."""

    model: Path
    images: int
    before: Fit
    after: Fit
    unreadable: list[UnreadableImage]


def fit(logits: np.ndarray, labels: np.ndarray, at: float) -> Fit:
    """Return what logits (N, classes), divided by the temperature `at`, are worth on labels int64 (N,)."""
    z, y = torch.from_numpy(logits / at), torch.from_numpy(labels)
    confidence, guess = z.softmax(1).max(1)
    error, _ = calibration((guess == y).numpy(), confidence.numpy())
    return Fit(at, error, float(F.cross_entropy(z, y)))


def calibrate(path: Path, folder: Path, device: str = "cpu", network: str | None = None) -> Calibrated:
    """Fit the temperature of the model of a run (or in a file) on a folder of labeled images, and write it there.

    The tensors stay as they are; the file is there whole, old or new. Raise `UserError` where there is no such model,
    no labeled image that can be read, or the file cannot be written.
    """
    place, model = model_file(path), load_model(path, device, network)
    labels, logits, unreadable = labeled_logits(model, folder)
    found = temperature(torch.from_numpy(logits), torch.from_numpy(labels))
    store(place, model, found)
    before, after = (fit(logits, labels, at) for at in (model.card.temperature, found))
    return Calibrated(place, len(labels), before, after, unreadable)


def store(place: Path, model: Model, found: float) -> None:
    """Put a temperature into the card of the model file that `model` was read from."""
    try:
        atomic_io.replace(place, with_seal(place.read_bytes(), replace(model.card, temperature=found).render()))
        if place.name in integrity.sums(place.parent):  # a run's folder knows the checksum of its model
            integrity.note(place.parent, {place.name: integrity.digest_of(place) or ""})
    except OSError as error:
        raise UserError(f"{place}: it cannot be written ({atomic_io.reason(error)}); make it writable.") from error
