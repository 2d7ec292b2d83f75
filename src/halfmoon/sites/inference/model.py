"""A trained model as one object: predict, evaluate, calibrate, export."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from halfmoon.core.errors import UserError
from halfmoon.core.python_names import python_errors, to_path, warn
from halfmoon.data import Images, Source, memory
from halfmoon.data.conversion import find_test, open_images, read_unlabeled
from halfmoon.data.preparation import Preparation
from halfmoon.sites.inference import export, image_folder, load, measure


@dataclass(frozen=True, eq=False, repr=False)
class Model(load.InferenceModel):
    """A trained network with its classes and the preparation of its images, stored in the file `path`.

    Examples:
        >>> model = halfmoon.load_model("runs/first")
        >>> model.predict(X[:3])
    """

    path: Path

    def __repr__(self) -> str:
        network = type(self.network).__name__
        height, width, channels = self.shape
        return f"<Model {network}: {height}x{width}x{channels} -> {', '.join(self.classes[:8])}; {self.path}>"

    @python_errors
    def predict(self, images: Any, sure: float = 0.9) -> pd.DataFrame:
        """Predict the classes of images, as a data frame with a row for each image.

        Its columns are label, probability, sure, runner_up (the second class) and runner_up_probability. Images of
        another size, or with other channels, are converted as the command `halfmoon predict` does.

        Args:
            images: a folder, for which `path` is the first column; an array or tensor of a batch or of one image; a PIL
                image; the path of an image; a list of any of these; or a data set as for `halfmoon.run`, whose labels are
                ignored. One image gives one row.
            sure: the probability, from 0 to 1, from which a prediction is marked as sure.

        Raises:
            UserError: images have another shape, or there are none.

        Examples:
            >>> model.predict(X[:3])["label"]
            >>> model.predict(PIL.Image.open("photo.jpg"))
            >>> model.predict("folder").to_csv("predictions.csv")
        """
        image_folder.check_confidence(sure)
        if isinstance(images, str | Path) and not Path(images).is_file():
            folder = Path(images)
            unreadable = list[image_folder.UnreadableImage]()
            # The rows of the command's CSV file, in which numbers are texts and `sure` is "yes" for True.
            rows = image_folder.iterate_predictions(self, folder, image_folder.list_images(folder), sure, unreadable)
            table = pd.DataFrame(rows, columns=[*image_folder.PREDICTION_COLUMNS])
            shares = ["probability", "runner_up_probability"]
            columns = {name: pd.to_numeric(table[name]) for name in shares} | {"sure": table["sure"] == "yes"}
            _warn_of_unreadable(unreadable)
            return table.assign(**columns)
        values = self.predict_proba(images)
        order = np.argsort(-values, axis=1, kind="stable")  # the first of equal classes wins, as in argmax
        columns: dict[str, Any] = {}
        for rank, (label, share) in enumerate((("label", "probability"), ("runner_up", "runner_up_probability"))):
            if rank < len(self.classes):  # a model of one class has no second one
                columns[label] = [self.classes[k] for k in order[:, rank]]
                columns[share] = np.take_along_axis(values, order[:, rank : rank + 1], 1)[:, 0]
        table = pd.DataFrame(columns)
        table.insert(2, "sure", table["probability"] >= sure)  # after the probability, as in the table of a folder
        return table

    @python_errors
    def predict_proba(self, images: Any) -> np.ndarray:
        """Compute the calibrated probabilities of images, float64 (N, K); the K columns are in the order of `classes`.

        Args:
            images: as for `predict`; (1, K) is returned for one image. Of a folder, the images are in the order of
                their paths, without those that cannot be read.

        Raises:
            UserError: images have another shape, or there are none.

        Examples:
            >>> model.predict_proba(X).argmax(axis=1)
        """
        if isinstance(images, str | Path) and not Path(images).is_file():
            folder = Path(images)
            unreadable = list[image_folder.UnreadableImage]()
            batches: list[np.ndarray] = []
            for batch in image_folder.read_batches(self, folder, image_folder.list_images(folder)):
                unreadable += batch.unreadable
                batches.append(self.probabilities(batch.images))
            _warn_of_unreadable(unreadable)
            return np.concatenate(batches)
        if isinstance(images, str | Path):
            images = [images]
        pixels, _ = read_unlabeled(images, self._preparation, self.shape[2])
        return self.probabilities(_to_standard_layout(pixels))

    @python_errors
    def evaluate(self, images: Any, sure: float = 0.9) -> dict[str, Any]:
        """Measure accuracy, per_class, confusion, calibration_error and auc, like `halfmoon evaluate`; from 0 to 1.

        Args:
            images: labeled images: a folder, `(X, y)`, or another type of data as for `halfmoon.run`, such as the test
                images of a data set. Labels are names of the model's classes, or their numbers if no name is a number.
                Images with the label -1 are left out. Of a `DatasetDict` or a `Source`, the part "test" is measured.
            sure: the probability, from 0 to 1, from which a prediction is marked as sure.

        Raises:
            UserError: labels are missing, or are not classes of the model.

        Examples:
            >>> model.evaluate((X_test, y_test))["accuracy"]
        """
        image_folder.check_confidence(sure)
        truth, logits = self._labeled(images)
        if self._was_trained_on(images):
            name = images if isinstance(images, str | Path) else "images"
            warn(f"{name} {measure.TRAINING_IMAGES_WARNING}")
        return measure.score_logits(self, truth, logits, sure)

    @python_errors
    def calibrate(self, images: Any) -> "Model":
        """Calibrate the probabilities: fit the temperature that divides the logits, and store it in the model's file.

        A class of probability 0.9 should be right in 9 of 10 images. No predicted class changes.

        Args:
            images: labeled images that were not used in training, of any type of `evaluate`.

        Returns:
            The model with the temperature; this one is unchanged.

        Raises:
            UserError: labels are missing, the model was trained on the folder, or its file cannot be written.

        Examples:
            >>> model = model.calibrate((X_validation, y_validation))
        """
        if isinstance(images, str | Path):
            measure.refuse_training_images(self, Path(images))
        elif self._was_trained_on(images):
            raise UserError("images: the model was trained on these; calibrate on labeled ones that are new to it.")
        truth, logits = self._labeled(images)
        value = measure.write_temperature(self.path, self, logits, truth)
        return replace(self, card=replace(self.card, temperature=value))

    @python_errors
    def export(self, file: Path | str, images: Images | None = None) -> export.ExportResult:
        """Export the model as an ONNX file or a program of torch.export, whose outputs are compared with the model's.

        Args:
            file: a file that ends in .onnx, or in .pt2 for torch.export.
            images: images for the comparison, in addition to noise. None for the default: test images of the bundled
                digits if the model was trained on the digits, otherwise only noise.

        Raises:
            UserError: the ending is another one, a package is missing, or the outputs differ.

        Examples:
            >>> model.export("model.onnx")
        """
        exporters = {".onnx": export.export_onnx, ".pt2": export.export_torch}
        export_model = exporters.get(Path(file).suffix)
        if export_model is None:
            raise UserError(f"{file} does not end in .onnx or .pt2: the ending chooses the format.")
        if images is None:
            compared = export.real_images(self)  # None if there are none
        else:
            compared = images.images[: self.batch]  # one batch is enough
        return export_model(self, Path(file), compared)

    @property
    def _preparation(self) -> Preparation:
        """Return the conversion of images to the size and channels of the model's input."""
        height, width, channels = self.shape
        return Preparation((height, width), channels, self.card.crop, self.card.window)

    def _was_trained_on(self, images: Any) -> bool:
        """Check whether images are those that the model was trained on, as far as its file tells."""
        if isinstance(images, str | Path):
            return measure.has_training_images(self, Path(images))
        name = str(self.card.options.get("data", ""))
        return memory.is_memory_name(name) and memory.is_training_data(name, self._open(images))

    def _open(self, images: Any) -> memory.ImageCollection:
        """Open labeled images in memory; of a data set with parts, the test images."""
        if isinstance(images, Source | Mapping):
            test = find_test(images)
            if test is None:
                raise UserError("images has no part 'test' or 'validation': give one of its parts.")
            images = test
        return open_images(images, classes=self.classes, name="images")

    def _labeled(self, images: Any) -> tuple[np.ndarray, np.ndarray]:
        """Compute what is needed to evaluate: the labels, int64 (N,), and the logits (N, classes) of labeled images.

        Args:
            images: a folder, or labeled images in memory; unlabeled ones are left out, and unreadable ones with a
                warning.
        """
        if not isinstance(images, str | Path):
            collection = self._open(images)
            is_labeled = collection.labels >= 0
            if not is_labeled.any():
                raise UserError("images has no labeled image: every label is -1.")
            pixels = _to_standard_layout(collection.load(self._preparation)[is_labeled])
            return collection.labels[is_labeled], self.logits(pixels)
        truth, logits, unreadable = measure.compute_labeled_logits(self, Path(images))
        _warn_of_unreadable(unreadable)
        return truth, logits


def _to_standard_layout(pixels: np.ndarray) -> np.ndarray:
    """Copy images if their memory is not that of images decoded from files, (N, H, W, C) in C order and writable.

    PyTorch chooses its convolution by the strides, also those of an axis of length 1, and another one rounds differently.
    """
    _, height, width, channels = pixels.shape
    strides = (height * width * channels, width * channels, channels, 1)
    return pixels if pixels.strides == strides and pixels.flags.writeable else np.array(pixels, order="C")


def _warn_of_unreadable(unreadable: list[Any]) -> None:
    if unreadable:
        first = unreadable[0]
        warn(f"{len(unreadable)} image(s) could not be read, the first {first.path}: {first.reason}")


@python_errors
def load_model(path: Path | str, device: torch.device | str = "cpu", network: str | None = None) -> Model:
    """Load a trained model.

    Args:
        path: the folder of a finished run, or a `model.safetensors`.
        device: where it computes, such as "cuda".
        network: "my_module:make" of a custom network, which the caller must name: a file from somebody else never
            causes the import of a module.

    Raises:
        UserError: there is no model, the run is not finished, or the file is damaged or of another version.

    Examples:
        >>> model = halfmoon.load_model("runs/first")
        >>> print(model.classes)
    """
    file = load.find_model_file(to_path(path))
    model = load.load_model(file, device, network)
    # `file` of the base class may be unknown (None); `path` of a `Model` never is.
    return Model(model.card, model.params, model.stats, model.device, path=file, file=file)
