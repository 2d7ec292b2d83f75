"""Export a model as an ONNX file or a torch.export program, compared with the model before it is written.

Both take uint8 images (N, H, W, C) of the size that the model takes, any N, and give probabilities float32 (N,
classes): shrinking, padding, normalization, the temperature and the softmax are inside. The model's card travels along
as metadata.
"""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
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

MAX_PROBABILITY_DIFFERENCE = 1e-4  # the largest difference of a probability that is accepted

CARD_FILE = "halfmoon.json"
"""The name under which a torch.export program holds the card, for `extra_files` of `torch.export.load`."""

_NOISE_IMAGES = 32  # images of noise to compare on


@dataclass(frozen=True)
class ExportResult:
    """A written file."""

    path: Path
    images: int  # on which it was compared with the model
    difference: float  # the largest of a probability


class ExportedClassifier(nn.Module):
    """From uint8 images (N, H, W, C) to probabilities float32 (N, classes), as one module without parameters."""

    def __init__(self, model: InferenceModel) -> None:
        super().__init__()
        self.network, self.shrink = model.network, model.card.shrink
        self.height, self.width = model.card.image[1:]
        self.temperature = model.card.temperature
        tensors = {"params": model.params, "stats": model.stats}
        self.paths = {path.replace("/", "-"): path for path in tree.flatten(tensors)}
        for name, path in self.paths.items():
            self.register_buffer(name, tree.flatten(tensors)[path].detach().cpu().contiguous())
        std = torch.tensor(model.card.std, dtype=torch.float64)
        mean = torch.tensor(model.card.mean, dtype=torch.float64)
        self.register_buffer("scale", (1 / (255 * std)).float().view(-1, 1, 1))
        self.register_buffer("shift", (-mean / std).float().view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Return the probabilities."""
        tensors = dict(self.named_buffers())
        model = tree.unflatten({path: tensors[name] for name, path in self.paths.items()})
        pixels = self._pooled(images) if self.shrink > 1 else images
        x = pixels.permute(0, 3, 1, 2).to(torch.float32)
        broadcast, right = self.height - x.shape[2], self.width - x.shape[3]
        if broadcast or right:  # as `halfmoon.data.pad_to`: an odd row goes below, an odd column to the right
            x = F.pad(x, (right // 2, right - right // 2, broadcast // 2, broadcast - broadcast // 2))
        x = x * tensors["scale"] + tensors["shift"]
        logits = self.network.predict(model["params"], model.get("stats", {}), x)
        return (logits / self.temperature if self.temperature != 1 else logits).softmax(-1)

    def _pooled(self, images: Tensor) -> Tensor:
        """Do what `halfmoon.data.images.pool` does, in whole numbers."""
        f, area = self.shrink, self.shrink**2
        count, height, width, channels = images.shape
        blocks = images.to(torch.int32).reshape(count, height // f, f, width // f, f, channels)
        total = blocks.sum((2, 4), dtype=torch.int32)
        return torch.div(2 * total + area, 2 * area, rounding_mode="floor")


def real_images(model: InferenceModel, folder: Path | None = None) -> np.ndarray | None:
    """Return images to compare on: readable ones in `folder`, or test digits; raise `UserError`."""
    if folder is None:
        digits = model.card.options.get("data") == "digits"
        return load("digits").test.images[:MAX_BATCH_IMAGES] if digits else None
    for batch in read_batches(model, folder, list_images(folder)):
        if batch.rows:
            return batch.images
    raise UserError(f"{folder}: none of its images can be read; give a folder of images.")


def export_onnx(model: InferenceModel, path: Path, real: np.ndarray | None = None) -> ExportResult:
    """Write an ONNX file, from "images" to "probabilities", with the card as metadata.

    It is read back and compared on noise and on `real` images; raise `UserError` for a difference over `TOLERANCE`.
    """
    try:
        import onnx  # noqa: F401 (torch needs both, and says so late)
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"--onnx needs {error.name}: {install_command('onnx')}.") from error
    with _quiet():
        example = (_noise(model, 2),)
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
    assert program is not None, "dynamo gives a program"
    program.model.metadata_props.update(model.card.render())
    data = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return _write_checked(path, data, model, lambda images: np.asarray(session.run(None, {"images": images})[0]), real)


def export_torch(model: InferenceModel, path: Path, real: np.ndarray | None = None) -> ExportResult:
    """Write and compare a program of torch.export (.pt2) with the card as "halfmoon.json"; see `export_onnx`."""
    data, extra = io.BytesIO(), {CARD_FILE: json.dumps(model.card.render())}
    with _quiet():
        batch = {"images": {0: torch.export.Dim("batch")}}
        program = torch.export.export(ExportedClassifier(model).eval(), (_noise(model, 2),), dynamic_shapes=batch)
        program.example_inputs = None  # they would be pickled into the file
        torch.export.save(program, data, extra_files=extra)
        data.seek(0)
        again = torch.export.load(data).module()
    return _write_checked(path, data.getvalue(), model, lambda images: again(torch.from_numpy(images)).numpy(), real)


def _write_checked(
    path: Path, data: bytes, model: InferenceModel, run: Callable[[np.ndarray], np.ndarray], real: np.ndarray | None
) -> ExportResult:
    """Compare what was read back from `data` with the model, and write it."""
    noise = _noise(model, _NOISE_IMAGES).numpy()
    samples: Sequence[np.ndarray] = (noise[:1], noise[1:], *(() if real is None else (real,)))
    difference = float(np.max([_difference(model, run, images) for images in samples]))  # NaN stays NaN
    if not difference <= MAX_PROBABILITY_DIFFERENCE:
        raise UserError(
            f"{path} is not written: a probability differs from the model's by {difference:.2g}, more than "
            f"{MAX_PROBABILITY_DIFFERENCE:g}; try other versions of torch, onnx and onnxruntime."
        )
    try:
        atomic_io.replace(path, data)
    except OSError as error:
        raise UserError(f"{path}: it cannot be written ({atomic_io.reason(error)}); choose another file.") from error
    return ExportResult(path, sum(map(len, samples)), difference)


def _difference(model: InferenceModel, run: Callable[[np.ndarray], np.ndarray], images: np.ndarray) -> float:
    """Return the largest difference of a probability, batch by batch; not a number where one is none."""
    parts = [images[first : first + model.batch] for first in range(0, len(images), model.batch)]
    return float(np.max([np.abs(run(part) - model.probabilities(part)).max() for part in parts]))


def _noise(model: InferenceModel, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, *model.shape), generator=generator, dtype=torch.uint8)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's remarks on packages that are not needed, and on its own old names, from the user."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
