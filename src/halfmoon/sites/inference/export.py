"""Export a model as an ONNX file or a torch.export program, compared with the model before it is written.

Both map uint8 images (N, H, W, C) of the model's size, for any N, to probabilities float32 (N, classes): shrinking,
padding, normalization, the temperature and the softmax are part of the program. The model's card is stored as metadata.
"""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfmoon.core import tree
from halfmoon.core.errors import UserError, install_command
from halfmoon.data import load
from halfmoon.sites.inference.image_folder import list_images, read_batches
from halfmoon.sites.inference.load import MAX_BATCH_IMAGES, InferenceModel
from halfmoon.storage import atomic_io

MAX_PROBABILITY_DIFFERENCE = 1e-4
"""Largest difference between the program's and the model's probabilities that is accepted."""

CARD_FILE = "halfmoon.json"
"""Name of the card in a torch.export program, for `extra_files` of `torch.export.load`."""

_NOISE_IMAGES = 32
"""Number of random images to compare on."""


@dataclass(frozen=True)
class ExportResult:
    """A written file.

    Attributes:
        path: the file.
        images: the number of images on which it was compared with the model.
        difference: the largest difference of a probability.
    """

    path: Path
    images: int
    difference: float


class ExportedClassifier(nn.Module):
    """A module from uint8 images (N, H, W, C) to probabilities float32 (N, classes), whose tensors are all buffers."""

    def __init__(self, model: InferenceModel) -> None:
        """Copy the model's tensors into buffers, so that the exported program contains them.

        Args:
            model: the model, with its normalization, shrinking and temperature.
        """
        super().__init__()
        self.network = model.network
        self.shrink = model.card.shrink
        self.height, self.width = model.card.image[1:]
        self.temperature = model.card.temperature
        tensors = {"params": model.params, "stats": model.stats}
        flat = tree.flatten(tensors)
        # Paths of a tree contain slashes, which names of buffers in an exported program may not.
        self.path_of_buffer = {path.replace("/", "-"): path for path in flat}
        for name, path in self.path_of_buffer.items():
            self.register_buffer(name, flat[path].detach().cpu().contiguous())
        # (x / 255 - mean) / std as one multiplication and one addition, rounded to float32 once.
        std = torch.tensor(model.card.std, dtype=torch.float64)
        mean = torch.tensor(model.card.mean, dtype=torch.float64)
        self.register_buffer("scale", (1 / (255 * std)).float().view(-1, 1, 1))
        self.register_buffer("shift", (-mean / std).float().view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Classify images: shrink, pad, normalize, run the network, and apply temperature and softmax.

        Args:
            images: uint8 (N, H, W, C), in the model's size.

        Returns:
            Probabilities, float32 (N, classes).
        """
        tensors = dict(self.named_buffers())
        model = tree.unflatten({path: tensors[name] for name, path in self.path_of_buffer.items()})
        pixels = self._pool(images) if self.shrink > 1 else images
        inputs = pixels.permute(0, 3, 1, 2).to(torch.float32)
        missing_rows = self.height - inputs.shape[2]
        missing_columns = self.width - inputs.shape[3]
        if missing_rows or missing_columns:
            # Like `halfmoon.data.pad_to`: an odd row is added at the bottom, an odd column at the right.
            left = missing_columns // 2
            top = missing_rows // 2
            inputs = F.pad(inputs, (left, missing_columns - left, top, missing_rows - top))
        inputs = inputs * tensors["scale"] + tensors["shift"]
        logits = self.network.predict(model["params"], model.get("stats", {}), inputs)
        if self.temperature != 1:
            logits = logits / self.temperature
        return logits.softmax(-1)

    def _pool(self, images: Tensor) -> Tensor:
        """Shrink images by averaging square blocks of pixels, in integers, as in training.

        Args:
            images: uint8 (N, H, W, C). Height and width are multiples of the block's side.

        Returns:
            int32 (N, H / side, W / side, C), rounded half up.
        """
        side = self.shrink
        area = side**2
        count, height, width, channels = images.shape
        blocks = images.to(torch.int32).reshape(count, height // side, side, width // side, side, channels)
        total = blocks.sum((2, 4), dtype=torch.int32)
        # floor(total / area + 1/2), written as one division of integers.
        return torch.div(2 * total + area, 2 * area, rounding_mode="floor")


def real_images(model: InferenceModel, folder: Path | None = None) -> np.ndarray | None:
    """Read images of the kind that a model was trained on, to compare an exported program with the model.

    Args:
        model: the model.
        folder: a folder of images; its first batch with readable images is used.

    Returns:
        uint8 (N, H, W, C). Without a folder, test images if the model was trained on digits, otherwise None.

    Raises:
        UserError: no image of the folder can be read.
    """
    if folder is None:
        digits = model.card.options.get("data") == "digits"
        return load("digits").test.images[:MAX_BATCH_IMAGES] if digits else None
    for batch in read_batches(model, folder, list_images(folder)):
        if batch.rows:
            return batch.images
    raise UserError(f"{folder}: none of its images can be read; give a folder of images.")


def export_onnx(model: InferenceModel, path: Path, real: np.ndarray | None = None) -> ExportResult:
    """Export a model as an ONNX file with the input "images", the output "probabilities", and the card as metadata.

    The exported program is run with onnxruntime and compared with the model before the file is written.

    Args:
        model: the model.
        path: the file.
        real: images to compare on, in addition to noise; uint8 (N, H, W, C).

    Raises:
        UserError: a package is missing, or a probability differs by more than `MAX_PROBABILITY_DIFFERENCE`.
    """
    try:
        import onnx  # noqa: F401 (torch needs both, but reports it late)
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"{{onnx}} needs {error.name}: {install_command('onnx')}.", option="onnx") from error
    with _suppress_torch_messages():
        example = (_random_images(model, 2),)
        dynamic = {"images": {0: "batch"}}
        program = torch.onnx.export(
            ExportedClassifier(model).eval(),
            example,
            input_names=["images"],
            output_names=["probabilities"],
            dynamic_shapes=dynamic,
            dynamo=True,
            verbose=False,
        )
    assert program is not None, "torch returns a program if dynamo=True"
    program.model.metadata_props.update(model.card.render())
    data = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def run_onnx(images: np.ndarray) -> np.ndarray:
        return np.asarray(session.run(None, {"images": images})[0])

    return _write_checked(path, data, model, run_onnx, real)


def export_torch(model: InferenceModel, path: Path, real: np.ndarray | None = None) -> ExportResult:
    """Export a model as a program of torch.export (a .pt2 file), with the card as the extra file `CARD_FILE`.

    The program is loaded and compared with the model before the file is written.

    Args:
        model: the model.
        path: the file.
        real: images to compare on, in addition to noise; uint8 (N, H, W, C).

    Raises:
        UserError: a probability differs by more than `MAX_PROBABILITY_DIFFERENCE`.
    """
    data = io.BytesIO()
    extra_files = {CARD_FILE: json.dumps(model.card.render())}
    with _suppress_torch_messages():
        # The program accepts any number of images. Two are the example, because torch treats 1 as a constant.
        dynamic_shapes = {"images": {0: torch.export.Dim("batch")}}
        example = (_random_images(model, 2),)
        program = torch.export.export(ExportedClassifier(model).eval(), example, dynamic_shapes=dynamic_shapes)
        program.example_inputs = None  # otherwise they are pickled into the file
        torch.export.save(program, data, extra_files=extra_files)
        data.seek(0)
        loaded = torch.export.load(data).module()

    def run_program(images: np.ndarray) -> np.ndarray:
        return loaded(torch.from_numpy(images)).numpy()

    return _write_checked(path, data.getvalue(), model, run_program, real)


def _write_checked(
    path: Path, data: bytes, model: InferenceModel, run: Callable[[np.ndarray], np.ndarray], real: np.ndarray | None
) -> ExportResult:
    """Compare an exported program with the model on noise and real images, and write its file if they agree.

    Args:
        path: the file.
        data: its content.
        model: the model.
        run: computes the probabilities with the program that was loaded from `data`.
        real: images to compare on, in addition to noise.

    Raises:
        UserError: a probability differs by more than `MAX_PROBABILITY_DIFFERENCE`, or the file cannot be written.
    """
    noise = _random_images(model, _NOISE_IMAGES).numpy()
    samples = [noise[:1], noise[1:]]  # also a batch of one image, which exported programs may treat differently
    if real is not None:
        samples.append(real)
    difference = float(np.max([_max_difference(model, run, images) for images in samples]))
    # NaN fails this comparison, as it should: np.max propagates it.
    if not difference <= MAX_PROBABILITY_DIFFERENCE:
        raise UserError(
            f"{path} is not written: a probability differs from the model's by {difference:.2g}, more than "
            f"{MAX_PROBABILITY_DIFFERENCE:g}; try other versions of torch, onnx and onnxruntime."
        )
    try:
        atomic_io.write_atomically(path, data)
    except OSError as error:
        raise UserError(
            f"{path}: it cannot be written ({atomic_io.error_reason(error)}); choose another file."
        ) from error
    return ExportResult(path, sum(map(len, samples)), difference)


def _max_difference(model: InferenceModel, run: Callable[[np.ndarray], np.ndarray], images: np.ndarray) -> float:
    """Compute the largest difference of a probability, batch by batch; NaN if a probability is NaN."""
    batches = [images[first : first + model.batch] for first in range(0, len(images), model.batch)]
    return float(np.max([np.abs(run(batch) - model.probabilities(batch)).max() for batch in batches]))


def _random_images(model: InferenceModel, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *model.shape), generator=generator, dtype=torch.uint8)


@contextmanager
def _suppress_torch_messages() -> Iterator[None]:
    """Hide the messages that torch's exporter prints about optional packages and deprecated names, in a `with` block."""
    logger = logging.getLogger("torch.onnx")
    previous_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(previous_level)
