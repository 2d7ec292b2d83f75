"""A model's probabilities and features of a folder's images, also in the background, while a page is in use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from halfmoon.pages.label_order import Predictions
from halfmoon.sites.folders.site_folder import Progress

if TYPE_CHECKING:
    from halfmoon.sites.inference.load import InferenceModel


def predict_images(
    model: InferenceModel,
    folder: Path,
    paths: Sequence[str],
    progress: Progress | None = None,
    stop: Callable[[], bool] = bool,
) -> Predictions:
    """Return a model's guesses of the images of a folder, a batch in memory at a time; `stop` ends it early."""
    from halfmoon.sites.inference.image_folder import read_batches  # slow to import: it brings torch

    probabilities = np.full((len(paths), len(model.classes)), np.nan)
    features = np.zeros((len(paths), 1), np.float32)
    for number, batch in enumerate(read_batches(model, folder, paths), start=1):
        if stop():
            break
        if len(batch.rows):
            logits, vectors = model.represent(batch.images)
            if features.shape[1] != vectors.shape[1]:  # the first ones
                features = np.zeros((len(paths), vectors.shape[1]), np.float32)
            probabilities[batch.rows], features[batch.rows] = model.to_probabilities(logits), vectors
        if progress is not None:
            progress(min(number * model.batch, len(paths)), len(paths))
    return Predictions(probabilities, features, model.classes)


class BackgroundPrediction:
    """Guesses on their way: how many images are done, and what came out once all are."""

    def __init__(self, load: Callable[[], InferenceModel], folder: Path, paths: Sequence[str]) -> None:
        """Prepare to run the model that `load` returns; `start` begins."""
        self.count, self.of = 0, len(paths)
        self.result: Predictions | None = None
        self.classes: tuple[str, ...] = ()
        self.error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(load, folder, paths), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def wait(self) -> None:
        self._thread.join()

    def _run(self, load: Callable[[], InferenceModel], folder: Path, paths: Sequence[str]) -> None:
        def tell(count: int, of: int) -> None:
            self.count = count

        try:
            model = load()
            result = predict_images(model, folder, paths, tell, self._stop.is_set)
        except Exception as error:  # the page shows it; without it, the order would silently stay random
            self.error = str(error)
            return
        if not self._stop.is_set():
            self.classes, self.result = model.classes, result
