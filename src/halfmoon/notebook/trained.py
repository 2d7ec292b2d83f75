"""A trained model as one object: predict, evaluate, calibrate, export."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from halfmoon.core.errors import UserError
from halfmoon.data import Images
from halfmoon.notebook.progress import paths, python_errors, warn
from halfmoon.sites.inference import export, image_folder, load, measure


@dataclass(frozen=True, eq=False, repr=False)
class Model(load.InferenceModel):
    """A trained network with its classes and the preparation of its images."""

    path: Path  # the model's file

    def __repr__(self) -> str:
        network = type(self.network).__name__
        height, width, channels = self.shape
        return f"<Model {network}: {height}x{width}x{channels} -> {', '.join(self.classes[:8])}; {self.path}>"

    @python_errors
    def predict(self, images: np.ndarray | Images | Path | str, sure: float = 0.9) -> pd.DataFrame:
        """Return a row an image: label, probability, sure, runner_up, runner_up_probability.

        Args:
            images: uint8 (N, H, W, C) of the model's size, or a folder of any sizes; then `path` comes first.
            sure: the probability, 0..1, from which a guess is called sure.

        Raises:
            UserError: images are of another form, or there are none.
        """
        image_folder.check_confidence(sure)
        if isinstance(images, str | Path):
            folder, unreadable = Path(images), list[image_folder.UnreadableImage]()
            rows = image_folder.iterate_predictions(self, folder, image_folder.list_images(folder), sure, unreadable)
            table = pd.DataFrame(rows, columns=[*image_folder.PREDICTION_COLUMNS])
            shares = ["probability", "runner_up_probability"]
            columns = {name: pd.to_numeric(table[name]) for name in shares} | {"sure": table["sure"] == "yes"}
            return _warned(table.assign(**columns), unreadable)
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
        """Return what `halfmoon evaluate` prints: accuracy, per_class, confusion, calibration_error, auc; shares 0..1.

        Args:
            images: labeled ones: a data set's test part, or a folder.
            sure: the probability, 0..1, from which a guess is called sure.

        Raises:
            UserError: labels are missing, or no classes of the model.
        """
        image_folder.check_confidence(sure)
        truth, logits = self._labeled(images)
        if not isinstance(images, Images) and measure.has_training_images(self, Path(images)):
            warn(f"{images} {measure.TRAINING_IMAGES_WARNING}")
        return measure.score_logits(self, truth, logits, sure)

    @python_errors
    def calibrate(self, images: Images | Path | str) -> "Model":
        """Fit the temperature, write it, and return the calibrated model; every predicted class stays as it is.

        Args:
            images: labeled ones that are new to the model: `Images`, or a folder.

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
        """Write a program for others, compared with the model beforehand.

        Args:
            file: ends in .onnx, or in .pt2 for torch.export.
            images: what both are compared on; without them, images of the model's data set or noise.

        Raises:
            UserError: the ending is another one, a package is missing, or the program computes other numbers.
        """
        makers = {".onnx": export.export_onnx, ".pt2": export.export_torch}
        make = makers.get(Path(file).suffix)
        if make is None:
            raise UserError(f"{file} does not end in .onnx or .pt2: the end says what is written.")
        real = export.real_images(self) if images is None else images.images[: self.batch]
        return make(self, Path(file), real)

    def _labeled(self, images: Images | Path | str) -> tuple[np.ndarray, np.ndarray]:
        if isinstance(images, Images):
            return images.labels, self.logits(images.images)
        truth, logits, unreadable = measure.compute_labeled_logits(self, Path(images))
        _warned(None, unreadable)
        return truth, logits


def _warned(value: Any, unreadable: list[Any]) -> Any:
    if unreadable:
        first = unreadable[0]
        warn(f"{len(unreadable)} image(s) could not be read, the first {first.path}: {first.reason}")
    return value


@python_errors
def load_model(path: Path | str, device: torch.device | str = "cpu", network: str | None = None) -> Model:
    """Return a trained model.

    Args:
        path: a finished run's folder, or a `model.safetensors`.
        device: where it computes.
        network: my_module:make of a network from outside; a file alone makes no module be imported.

    Raises:
        UserError: there is none, the run is not finished, or the file is damaged, of another version, or no model.
    """
    place = load.find_model_file(paths(path))
    model = load.load_model(place, device, network)
    return Model(model.card, model.params, model.stats, model.device, place)
