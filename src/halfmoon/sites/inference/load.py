"""Load a trained model from a run, with every check, and compute its probabilities."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from halfmoon.core import plugins, tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.data.images import pad_to, pool
from halfmoon.models import Network
from halfmoon.models.network import Normalize
from halfmoon.runs.model_card import Card
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import MODEL, RUN, SUMMARY
from halfmoon.storage.serialization import check_seal

MAX_BATCH_IMAGES, MAX_BATCH_PIXELS = 256, 2**19  # images, and their pixels, of a batch at most: they bound the memory


@dataclass(frozen=True, eq=False)
class InferenceModel:
    """A trained network with all that is needed to label images; `load_model` makes it."""

    card: Card
    params: Tree
    stats: Tree  # {} where the network tracks nothing
    device: torch.device

    @property
    def network(self) -> Network:
        return self.card.network

    @property
    def classes(self) -> tuple[str, ...]:
        return self.card.classes

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.card.shape

    @property
    def batch(self) -> int:
        return max(1, min(MAX_BATCH_IMAGES, MAX_BATCH_PIXELS // (self.shape[0] * self.shape[1])))

    def prepare(self, images: np.ndarray) -> np.ndarray:
        """Return uint8 (N, *shape) as the training images were: shrunk, then padded; raise `UserError`."""
        _check_images(images, self.shape)
        small = pool(images, self.card.shrink) if self.card.shrink > 1 else images
        height, width = self.card.image[1:]
        return small if small.shape[1:3] == (height, width) else pad_to(small, height)

    def probabilities(self, images: np.ndarray) -> np.ndarray:
        """Return float64 (N, classes) of uint8 images, by a softmax under the card's temperature."""
        return self.to_probabilities(self.logits(images))

    def to_probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Return the probabilities float64 (N, classes) that logits (N, classes) come to under the temperature."""
        return torch.from_numpy(logits / self.card.temperature).softmax(-1).numpy()

    def logits(self, images: np.ndarray) -> np.ndarray:
        """Return logits, float64 (N, classes), of uint8 images (N, *shape), a few at a time; raise `UserError`."""
        _check_images(images, self.shape)
        logits = np.empty((len(images), len(self.classes)))
        for first in range(0, len(images), self.batch):
            rows = slice(first, first + self.batch)
            logits[rows] = self.represent(images[rows])[0]
        return logits

    @torch.no_grad()
    def represent(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return logits float64 (N, classes) and features float32 (N, F) of uint8 images (N, *shape), all at once."""
        pixels = torch.from_numpy(np.ascontiguousarray(self.prepare(images).transpose(0, 3, 1, 2)))
        x = Normalize(self.card.mean, self.card.std)(pixels.to(self.device))
        logits, features = self.network.represent(self.params, self.stats, x)
        return logits.double().cpu().numpy(), features.flatten(1).float().cpu().numpy()


def load_model(path: Path | str, device: torch.device | str = "cpu", network: str | None = None) -> InferenceModel:
    """Return the model of a finished run's folder, or of a file, on `device`.

    `network` (my_module:make) names a network from outside, which no file loads alone. Raise `UserError` for no model,
    or a damaged one.
    """
    place = find_model_file(Path(path))
    try:
        intact = check_seal(place.read_bytes())
    except (OSError, ValueError):  # no safetensors file, or none at all: whoever reads it says so
        intact = True
    if not intact:
        raise UserError(
            f"{place} was changed since it was written (its checksum differs): take an undamaged copy of the file."
        )
    try:
        with safe_open(place, "pt") as file:
            metadata = file.metadata() or {}
            flat = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except OSError as error:
        raise UserError(
            f"{place} cannot be read ({atomic_io.reason(error)}); give the folder of a finished run."
        ) from error
    except SafetensorError as error:
        raise UserError(
            f"{place} is no undamaged safetensors file ({error}); give the folder of a finished run."
        ) from error
    with plugins.only([network] if network else []):
        card = Card.parse(metadata, place)
    with torch.device("meta"):  # shapes alone: nothing is drawn
        expected = card.network.init(torch.Generator())
    _check_tensors(flat, tree.flatten(expected), place)
    parts = tree.unflatten(flat)
    params, stats = tree.to(parts["params"], device), tree.to(parts.get("stats", {}), device)
    return InferenceModel(card, tree.channels_last(params), stats, torch.device(device))


def find_model_file(path: Path) -> Path:
    """Return the model file that is meant; raise `UserError` where there is none yet, or no single one."""
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
    runs = sorted(each.parent.name for each in path.glob(f"*/{MODEL}"))
    if runs:
        raise UserError(f"{path} holds {len(runs)} run(s), not one; give the folder of one of them: {', '.join(runs)}.")
    raise UserError(f"{path} holds no {MODEL}; give the folder of a finished run.")


def _check_images(images: np.ndarray, shape: tuple[int, int, int]) -> None:
    if images.dtype != np.uint8 or images.shape[1:] != shape:
        raise UserError(
            f"the model takes images uint8 (N, {', '.join(map(str, shape))}), not {images.dtype} {images.shape}; "
            "resize and convert them first."
        )


def _check_tensors(flat: Tree, expected: Tree, place: Path) -> None:
    """Raise `UserError` where the tensors are not those of the network."""
    for name in sorted(flat.keys() ^ expected.keys()):
        what = "lacks" if name in expected else "has, beyond its network,"
        raise UserError(f"{place} {what} the tensor {name!r}; take an undamaged copy of the file.")
    for name, leaf in expected.items():
        tensor = flat[name]
        if tensor.shape != leaf.shape or tensor.dtype != leaf.dtype:
            raise UserError(
                f"{place}: the tensor {name!r} is {tensor.dtype} {tuple(tensor.shape)}, but its network has "
                f"{leaf.dtype} {tuple(leaf.shape)}; take an undamaged copy of the file."
            )
        if not tensor.isfinite().all():
            raise UserError(f"{place}: the tensor {name!r} holds values that are not finite; train the model again.")
