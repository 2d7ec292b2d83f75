"""Predict the images of a folder with a model, also in the background while a page is in use."""

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
    """Predict the classes and compute the features of a folder's images, with one batch in memory at a time.

    Args:
        model: the model.
        folder: the folder of the images.
        paths: N paths relative to the folder.
        progress: receives the number of finished images and N after each batch.
        stop: ends the loop before the next batch when it returns True; `bool` with no argument is always False.

    Returns:
        Probabilities and features of the N images. For images that are unreadable or were not reached the
        probabilities are NaN and the features 0.
    """
    from halfmoon.sites.inference.image_folder import read_batches  # slow, because it imports torch

    probabilities = np.full((len(paths), len(model.classes)), np.nan)
    features = np.zeros((len(paths), 1), np.float32)
    for number, batch in enumerate(read_batches(model, folder, paths), start=1):
        if stop():
            break
        # `rows` are the positions in `paths` of the images of the batch that could be read.
        if len(batch.rows):
            logits, vectors = model.represent(batch.images)
            # The number of features is known only after the first batch.
            if features.shape[1] != vectors.shape[1]:
                features = np.zeros((len(paths), vectors.shape[1]), np.float32)
            probabilities[batch.rows] = model.to_probabilities(logits)
            features[batch.rows] = vectors
        if progress is not None:
            progress(min(number * model.batch, len(paths)), len(paths))
    return Predictions(probabilities, features, model.classes)


class BackgroundPrediction:
    """The prediction of a folder's images in a thread.

    Attributes:
        count: the number of predicted images.
        total: the number of all images.
        result: the predictions, None until all images are predicted.
        classes: the model's classes, () until all images are predicted.
        error: the error message if the model failed, else "".
    """

    def __init__(self, load: Callable[[], InferenceModel], folder: Path, paths: Sequence[str]) -> None:
        """Prepare the thread that predicts the images while a page is in use; `start` starts it.

        Args:
            load: loads the model, in the thread, because this takes seconds.
            folder: the folder of the images.
            paths: paths of the images relative to the folder.
        """
        self.count = 0  # predicted images
        self.total = len(paths)
        self.result: Predictions | None = None  # None until all images are predicted
        self.classes: tuple[str, ...] = ()
        self.error = ""  # the message, if the model failed
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._predict, args=(load, folder, paths), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def wait(self) -> None:
        self._thread.join()

    def _predict(self, load: Callable[[], InferenceModel], folder: Path, paths: Sequence[str]) -> None:
        """Load the model and predict all images, in the thread; the results are published when all are known."""

        def update_count(count: int, total: int) -> None:
            self.count = count

        try:
            model = load()
            result = predict_images(model, folder, paths, progress=update_count, stop=self._stop.is_set)
        except Exception as error:
            # The page shows the error. Otherwise the user would not notice that the order remains random.
            self.error = str(error)
            return
        if not self._stop.is_set():
            self.classes = model.classes
            self.result = result
