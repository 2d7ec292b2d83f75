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
        """Copy the model's tensors into buffers."""
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
        """Compute probabilities, float32 (N, classes), of images uint8 (N, H, W, C)."""
        tensors = dict(self.named_buffers())
        model = tree.unflatten({path: tensors[name] for name, path in self.path_of_buffer.items()})
        pixels = self._pool(images) if self.shrink > 1 else images
        x = pixels.permute(0, 3, 1, 2).to(torch.float32)
        rows = self.height - x.shape[2]
        columns = self.width - x.shape[3]
        if rows or columns:
            # Like `halfmoon.data.pad_to`: an odd row is added at the bottom, an odd column at the right.
            x = F.pad(x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
        x = x * tensors["scale"] + tensors["shift"]
        logits = self.network.predict(model["params"], model.get("stats", {}), x)
        if self.temperature != 1:
            logits = logits / self.temperature
        return logits.softmax(-1)

    def _pool(self, images: Tensor) -> Tensor:
        """Average blocks of pixels like `halfmoon.data.images.average_pool`, in integers."""
        side = self.shrink
        area = side**2
        count, height, width, channels = images.shape
        blocks = images.to(torch.int32).reshape(count, height // side, side, width // side, side, channels)
        total = blocks.sum((2, 4), dtype=torch.int32)
        # Rounds half up: floor(total / area + 1/2).
        return torch.div(2 * total + area, 2 * area, rounding_mode="floor")


def real_images(model: InferenceModel, folder: Path | None = None) -> np.ndarray | None:
    """Read images to compare on.

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
    """Write an ONNX file from "images" to "probabilities", with the card as metadata.

    The file is loaded and compared with the model before it is written.

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
        raise UserError(f"--onnx needs {error.name}: {install_command('onnx')}.") from error
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
    """Write a program of torch.export (.pt2), with the card as `CARD_FILE`; otherwise like `export_onnx`."""
    data = io.BytesIO()
    extra_files = {CARD_FILE: json.dumps(model.card.render())}
    with _suppress_torch_messages():
        batch = {"images": {0: torch.export.Dim("batch")}}
        program = torch.export.export(
            ExportedClassifier(model).eval(), (_random_images(model, 2),), dynamic_shapes=batch
        )
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
    """Compare a loaded program with the model, and write its file.

    Args:
        path: the file.
        data: its content.
        model: the model.
        run: computes the probabilities with the program that was loaded from `data`.
        real: images to compare on, in addition to noise.
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
    """Hide torch's messages about optional packages and about its own deprecated names."""
    logger = logging.getLogger("torch.onnx")
    previous_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(previous_level)
