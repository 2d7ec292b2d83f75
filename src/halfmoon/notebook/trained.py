"""A trained model as one object: predict, evaluate, calibrate, export."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.notebook.progress import python_errors, to_path, warn
from halfmoon.sites.inference import export, image_folder, load, measure


@dataclass(frozen=True, eq=False, repr=False)
class Model(load.InferenceModel):
    """A trained network with its classes and the preparation of its images, stored in the file `path`."""

    path: Path

    def __repr__(self) -> str:
        network = type(self.network).__name__
        height, width, channels = self.shape
        return f"<Model {network}: {height}x{width}x{channels} -> {', '.join(self.classes[:8])}; {self.path}>"

    @python_errors
    def predict(self, images: np.ndarray | Images | Path | str, sure: float = 0.9) -> pd.DataFrame:
        """Predict images: a data frame with label, probability, sure, runner_up and runner_up_probability.

        Args:
            images: uint8 (N, H, W, C) of the model's size, or a folder of images of any size, for which `path` is the
                first column.
            sure: the probability, from 0 to 1, from which a prediction is marked as sure.

        Raises:
            UserError: images have another shape, or there are none.
        """
        image_folder.check_confidence(sure)
        if isinstance(images, str | Path):
            folder = Path(images)
            unreadable = list[image_folder.UnreadableImage]()
            rows = image_folder.iterate_predictions(self, folder, image_folder.list_images(folder), sure, unreadable)
            table = pd.DataFrame(rows, columns=[*image_folder.PREDICTION_COLUMNS])
            shares = ["probability", "runner_up_probability"]
            columns = {name: pd.to_numeric(table[name]) for name in shares} | {"sure": table["sure"] == "yes"}
            _warn_of_unreadable(unreadable)
            return table.assign(**columns)
        values = self.probabilities(images.images if isinstance(images, Images) else images)
        order = np.argsort(-values, axis=1, kind="stable")
        columns: dict[str, Any] = {}
        for rank, (label, share) in enumerate((("label", "probability"), ("runner_up", "runner_up_probability"))):
            if rank < len(self.classes):
                columns[label] = [self.classes[k] for k in order[:, rank]]
                columns[share] = np.take_along_axis(values, order[:, rank : rank + 1], 1)[:, 0]
        table = pd.DataFrame(columns)
        table.insert(2, "sure", table["probability"] >= sure)
        return table

    @python_errors
    def evaluate(self, images: Images | Path | str, sure: float = 0.9) -> dict[str, Any]:
        """Measure accuracy, per_class, confusion, calibration_error and auc, like `halfmoon evaluate`; from 0 to 1.

        Args:
            images: labeled images, such as the test images of a data set, or a folder.
            sure: the probability, from 0 to 1, from which a prediction is marked as sure.

        Raises:
            UserError: labels are missing, or are not classes of the model.
        """
        image_folder.check_confidence(sure)
        truth, logits = self._labeled(images)
        if not isinstance(images, Images) and measure.has_training_images(self, Path(images)):
            warn(f"{images} {measure.TRAINING_IMAGES_WARNING}")
        return measure.score_logits(self, truth, logits, sure)

    @python_errors
    def calibrate(self, images: Images | Path | str) -> "Model":
        """Fit the temperature, store it in the file, and return the calibrated model. No predicted class changes.

        Args:
            images: labeled images that were not used in training: `Images`, or a folder.

        Raises:
            UserError: labels are missing, the model was trained on the folder, or its file cannot be written.
        """
        if not isinstance(images, Images):
            measure.refuse_training_images(self, Path(images))
        truth, logits = self._labeled(images)
        value = measure.write_temperature(self.path, self, logits, truth)
        return replace(self, card=replace(self.card, temperature=value))

    @python_errors
    def export(self, file: Path | str, images: Images | None = None) -> export.ExportResult:
        """Export the model as a program of another library, whose outputs are compared with the model's.

        Args:
            file: a file that ends in .onnx, or in .pt2 for torch.export.
            images: images for the comparison; None for images of the model's data set, or noise.

        Raises:
            UserError: the ending is another one, a package is missing, or the outputs differ.
        """
        makers = {".onnx": export.export_onnx, ".pt2": export.export_torch}
        make = makers.get(Path(file).suffix)
        if make is None:
            raise UserError(f"{file} does not end in .onnx or .pt2: the ending chooses the format.")
        real = export.real_images(self) if images is None else images.images[: self.batch]
        return make(self, Path(file), real)

    def _labeled(self, images: Images | Path | str) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(images, Images):
            return images.labels, self.logits(images.images)
        truth, logits, unreadable = measure.compute_labeled_logits(self, Path(images))
        _warn_of_unreadable(unreadable)
        return truth, logits


def _warn_of_unreadable(unreadable: list[Any]) -> None:
    if unreadable:
        first = unreadable[0]
        warn(f"{len(unreadable)} image(s) could not be read, the first {first.path}: {first.reason}")


@python_errors
def load_model(path: Path | str, device: torch.device | str = "cpu", network: str | None = None) -> Model:
    """Load a trained model.

    Args:
        path: the folder of a finished run, or a `model.safetensors`.
        device: where it computes.
        network: my_module:make of a custom network; a file never causes the import of a module.

    Raises:
        UserError: there is no model, the run is not finished, or the file is damaged or of another version.
    """
    file = load.find_model_file(to_path(path))
    model = load.load_model(file, device, network)
    return Model(model.card, model.params, model.stats, model.device, file)
