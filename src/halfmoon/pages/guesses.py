"""Compute a model's probabilities and features of a folder's images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from halfmoon.pages.choice import Guesses
from halfmoon.sites.inference.image_folder import batches

if TYPE_CHECKING:
    from halfmoon.sites.inference.load import Model

Progress = Callable[[int, int], None]
"""Told how many images are done, and of how many."""


def guess(
    model: Model, folder: Path, paths: Sequence[str], progress: Progress | None = None, stop: Callable[[], bool] = bool
) -> Guesses:
    """Return a model's guesses of the images of a folder, a batch in memory at a time; `stop` ends it early."""
    probabilities = np.full((len(paths), len(model.classes)), np.nan)
    features: np.ndarray | None = None
    for number, batch in enumerate(batches(model, folder, paths), start=1):
        if stop():
            break
        if len(batch.rows):
            logits, vectors = model.represent(batch.images)
            if features is None:
                features = np.zeros((len(paths), vectors.shape[1]), np.float32)
            probabilities[batch.rows], features[batch.rows] = model.scaled(logits), vectors
        if progress is not None:
            progress(min(number * model.batch, len(paths)), len(paths))
    return Guesses(probabilities, np.zeros((len(paths), 1), np.float32) if features is None else features)
