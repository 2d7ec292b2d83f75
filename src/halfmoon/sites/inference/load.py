"""Load a trained model from a run or a file, check it, and compute its probabilities."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from halfmoon.core import hubs, plugins, toml, tree
from halfmoon.core.errors import UserError
from halfmoon.core.normalize import Normalize
from halfmoon.core.tree import Tree
from halfmoon.data.images import average_pool, pad_to
from halfmoon.models import Network
from halfmoon.models.efficientnet import FEATURES as TOP_FEATURES
from halfmoon.models.model_card import Card
from halfmoon.models.modules import ModuleNetwork
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import MODEL, RUN, SUMMARY
from halfmoon.storage.serialization import check_checksum

MAX_BATCH_IMAGES = 256

MAX_BATCH_PIXELS = 2**19
"""Bounds the memory that a batch needs."""


@dataclass(frozen=True, eq=False)
class InferenceModel:
    """A trained network with everything needed to classify images; `load_model` makes it.

    Attributes:
        card: the metadata of the model's file.
        params: the parameters.
        stats: running statistics such as batch normalization's; {} for a network without them.
        device: the device of the tensors.
        file: the model's file; None if it is unknown.
    """

    card: Card
    params: Tree
    stats: Tree
    device: torch.device
    file: Path | None = field(default=None, kw_only=True)

    @property
    def network(self) -> Network:
        """Return the network's architecture."""
        return self.card.network

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the class names, in the order of the probabilities."""
        return self.card.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the height, width and channels of input images."""
        return self.card.shape

    @property
    def batch(self) -> int:
        """Return the number of images that are computed at once."""
        return max(1, min(MAX_BATCH_IMAGES, MAX_BATCH_PIXELS // (self.shape[0] * self.shape[1])))

    def prepare(self, images: np.ndarray) -> np.ndarray:
        """Shrink and pad images as in training.

        Images are first reduced by the card's factor (means of blocks of pixels), and then padded to the square that
        the network was trained on. The card is the metadata of the model's file.

        Args:
            images: uint8 (N, *shape), in the size that the model accepts, before these two steps.

        Returns:
            uint8 (N, height, width, channels), in the size of the network's input.

        Raises:
            UserError: the images have another type or shape.
        """
        _check_images(images, self.shape)
        small = average_pool(images, self.card.shrink) if self.card.shrink > 1 else images
        _, height, width = self.card.image
        return small if small.shape[1:3] == (height, width) else pad_to(small, height)

    def probabilities(self, images: np.ndarray) -> np.ndarray:
        """Compute calibrated probabilities, float64 (N, classes), of images uint8 (N, *shape)."""
        return self.to_probabilities(self.logits(images))

    def to_probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Convert logits (N, classes) to probabilities, float64 (N, classes), with the card's temperature."""
        return torch.from_numpy(logits / self.card.temperature).softmax(-1).numpy()

    def logits(self, images: np.ndarray) -> np.ndarray:
        """Compute the logits of images, in batches.

        Args:
            images: uint8 (N, *shape).

        Returns:
            float64 (N, classes).

        Raises:
            UserError: the images have another type or shape.
        """
        _check_images(images, self.shape)
        logits = np.empty((len(images), len(self.classes)))
        for first in range(0, len(images), self.batch):
            rows = slice(first, first + self.batch)
            logits[rows], _ = self.represent(images[rows])
        return logits

    @torch.no_grad()
    def represent(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute the logits and the features (inputs of the last linear layer) of one batch of images.

        The features are for distances between images. The pretrained network `hubs.MULTILAYER` appends features of its
        middle blocks to those of its top. They are left out: they find unknown objects less often (results/heads.md).

        Args:
            images: uint8 (N, *shape), at most `batch` of them.

        Returns:
            Logits, float64 (N, classes), and features, float32 (N, F).
        """
        channels_first = self.prepare(images).transpose(0, 3, 1, 2)
        pixels = torch.from_numpy(np.ascontiguousarray(channels_first))
        x = Normalize(self.card.mean, self.card.std)(pixels.to(self.device))
        logits, features = self.network.represent(self.params, self.stats, x)
        if isinstance(self.network, ModuleNetwork) and self.network.factory == hubs.MULTILAYER:
            features = features[:, :TOP_FEATURES]
        return logits.double().cpu().numpy(), features.flatten(1).float().cpu().numpy()


def load_model(path: Path | str, device: torch.device | str = "cpu", network: str | None = None) -> InferenceModel:
    """Load a trained model from a safetensors file, and check that it is intact and fits its network.

    Args:
        path: the folder of a finished run, or a model file.
        device: the device for its tensors.
        network: MODULE:FUNCTION of a network from another package. No code is imported unless it is named here,
            even if the file requests it.

    Raises:
        UserError: there is no model, it is damaged, or it needs no network from another package, but one is given.
    """
    file = find_model_file(Path(path))
    # The metadata of the file contain a checksum of its tensors.
    try:
        intact = check_checksum(file.read_bytes())
    except (OSError, ValueError):
        intact = True  # the file cannot be read or is no safetensors file: the code below reports that
    if not intact:
        raise UserError(
            f"{file} was changed since it was written (its checksum differs): use an undamaged copy of the file."
        )
    try:
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (it is no dict)
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({atomic_io.error_reason(error)}); give the folder of a finished run."
        ) from error
    except SafetensorError as error:
        raise UserError(
            f"{file} is no undamaged safetensors file ({error}); give the folder of a finished run."
        ) from error
    with plugins.allow_only([network] if network else []):
        card = Card.parse(metadata, file)
    stored_name = toml.parse_or_empty(card.config).get("network", "")
    if network and ":" in network and stored_name and ":" not in stored_name:
        raise UserError(
            f"{{network}} is {network!r}, but the network of this model is part of halfmoon: leave it out.",
            option="network",
        )
    with torch.device("meta"):  # only the shapes are needed: no values are drawn
        expected = card.network.init(torch.Generator())
    _check_tensors(tensors, tree.flatten(expected), file)
    model = tree.unflatten(tensors)
    params = tree.channels_last(tree.to(model["params"], device))
    stats = tree.to(model.get("stats", {}), device)
    return InferenceModel(card, params, stats, torch.device(device), file=file)


def find_model_file(path: Path) -> Path:
    """Find the model file in the folder of a finished run.

    Args:
        path: the folder; a path of a file is returned unchanged.

    Raises:
        UserError: the run is not finished, or there is no model or more than one.
    """
    if path.is_file():
        return path
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder; give the folder of a finished run.")
    if (path / RUN).exists() and atomic_io.read_json(path / SUMMARY) is None:
        raise UserError(
            f"{path}: the run is not finished, so there is no model yet; "
            f"go on with: {shlex.join(['halfmoon', 'resume', str(path)])}"
        )
    if (path / MODEL).exists():
        return path / MODEL
    run_names = sorted(model_file.parent.name for model_file in path.glob(f"*/{MODEL}"))
    if run_names:
        raise UserError(
            f"{path} holds {len(run_names)} run(s), not one; give the folder of one of them: {', '.join(run_names)}."
        )
    raise UserError(f"{path} holds no {MODEL}; give the folder of a finished run.")


def _check_images(images: np.ndarray, shape: tuple[int, int, int]) -> None:
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        raise UserError(
            f"the model takes images uint8 (N, {', '.join(map(str, shape))}), not {images.dtype} {images.shape}; "
            "resize and convert them first."
        )


def _check_tensors(tensors: Tree, expected: Tree, file: Path) -> None:
    """Check the tensors of a model's file: names, shapes and dtypes must be those of its network, and values finite.

    Args:
        tensors: the tensors by name.
        expected: tensors of the network without values, on the meta device.
        file: the file, for errors.

    Raises:
        UserError: the first difference.
    """
    for name in sorted(tensors.keys() ^ expected.keys()):
        problem = "lacks" if name in expected else "has, beyond its network,"
        raise UserError(f"{file} {problem} the tensor {name!r}; use an undamaged copy of the file.")
    for name, leaf in expected.items():
        tensor = tensors[name]
        if tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
            raise UserError(
                f"{file}: the tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, but its network has "
                f"{leaf.dtype} {tuple(leaf.shape)}; use an undamaged copy of the file."
            )
        if not tensor.isfinite().all():
            raise UserError(f"{file}: the tensor {name!r} has values that are not finite; train the model again.")
