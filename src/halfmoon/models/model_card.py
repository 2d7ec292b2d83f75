"""Metadata of a model file: all that is needed to label images with the file."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from halfmoon.core import toml
from halfmoon.core.errors import UserError
from halfmoon.models import Network
from halfmoon.models import registry as networks

PLAIN = "1"
SCALED = "2"
"""Versions of the metadata. Models with a temperature have another one, because older versions would ignore it."""

_REQUIRED_TYPES: dict[str, Any] = {
    "classes": tuple[str, ...],
    "image": tuple[int, int, int],
    "taken": tuple[int, int],
    "shrink": int,
    "mean": tuple[float, ...],
    "std": tuple[float, ...],
    "network": dict[str, Any],
}
"""Fields of `Card` that are stored as JSON, with their types."""

_REQUIRED_TEXTS = ("method", "config")
"""Fields that are stored as they are."""

_OPTIONAL_TYPES: dict[str, Any] = {"crop": bool, "window": tuple[float, float], "temperature": float}


@dataclass(frozen=True)
class Card:
    """The metadata of a model: classes, preparation of images, network and origin.

    Images are resampled to `input_size` (height, width), with `crop` in proportion; they are averaged over blocks of
    `shrink` x `shrink`, padded with zeros to `image` (channels, height, width), and normalized by `mean` and `std` (of
    pixels in 0..1, one a channel). Probabilities are the softmax of the network's logits divided by `temperature`
    (`halfmoon.sites.inference.measure`).
    """

    classes: tuple[str, ...]
    image: tuple[int, int, int]
    input_size: tuple[int, int]
    shrink: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    network: Network
    method: str
    config: str  # the run's config.toml
    crop: bool = False  # whether images of other sides are cut, not squeezed
    window: tuple[float, float] | None = None  # values of more than 8 bits that are black and white
    temperature: float = 1.0

    @property
    def shape(self) -> tuple[int, int, int]:
        return (*self.input_size, self.image[0])

    @property
    def options(self) -> dict[str, Any]:
        return toml.parse_or_empty(self.config)

    def render(self) -> dict[str, str]:
        """Convert the metadata to strings by name, as a model.safetensors stores them; `parse` is the inverse."""
        # Fields that later versions added are left out at their defaults, so that older versions can read the file.
        optional = {}
        if self.crop:
            optional["crop"] = json.dumps(self.crop)
        if self.window:
            optional["window"] = json.dumps(self.window)
        if self.temperature != 1:
            optional["temperature"] = json.dumps(self.temperature)
        return {
            # A version that does not divide logits by the temperature refuses the second format.
            "format": PLAIN if self.temperature == 1 else SCALED,
            "classes": json.dumps(self.classes),
            "image": json.dumps(self.image),
            "taken": json.dumps(self.input_size),  # the name of this field in the file format
            "shrink": json.dumps(self.shrink),
            "mean": json.dumps(self.mean),
            "std": json.dumps(self.std),
            "network": json.dumps(networks.describe(self.network)),
            "method": self.method,
            "config": self.config,
            **optional,
        }

    @classmethod
    def parse(cls, metadata: Mapping[str, str], path: Path) -> "Card":
        """Parse the metadata of a model file, the inverse of `render`.

        Args:
            metadata: the strings by name.
            path: the file, for messages.

        Returns:
            The metadata as a card: classes, preparation of images, network and origin of the model.

        Raises:
            UserError: a value is missing, damaged or contradicts others, or the version is unknown.
        """
        _check_format(metadata, path)
        # `_REQUIRED_TYPES` are fields in JSON with their types, `_REQUIRED_TEXTS` those that are stored as they are.
        missing = [name for name in (*_REQUIRED_TYPES, *_REQUIRED_TEXTS) if name not in metadata]
        if missing:
            raise UserError(f"{path}: the model's metadata lack {missing[0]!r}; take an undamaged copy of the file.")
        names = [name for name in (*_REQUIRED_TYPES, *_OPTIONAL_TYPES) if name in metadata]
        fields = {name: _parse_field(name, metadata[name], path) for name in names}
        network = _build_network(fields.pop("network"), path)
        size = fields.pop("taken")
        card = cls(**fields, input_size=size, network=network, method=metadata["method"], config=metadata["config"])
        problem = _find_contradiction(card)
        if problem:
            raise UserError(f"{path}: the model's metadata disagree ({problem}); take an undamaged copy of the file.")
        return card


def _check_format(metadata: Mapping[str, str], path: Path) -> None:
    """Raise UserError if metadata have no format that this version reads: PLAIN, or SCALED with a temperature."""
    number = metadata.get("format")
    if number in (PLAIN, SCALED):
        return
    if number is None and {"classes", "network", "image"} <= metadata.keys():
        raise UserError(
            f"{path} was written by an older halfmoon, which did not store the preparation of its images; "
            "train the model again."
        )
    if number is None:
        raise UserError(
            f"{path} has no metadata of a model; give the folder of a finished run, or its model.safetensors."
        )
    raise UserError(
        f"{path} has metadata of version {number}, this halfmoon reads versions {PLAIN} and {SCALED}; "
        "use the halfmoon that trained the model, or a newer one."
    )


def _parse_field(name: str, text: str, path: Path) -> Any:
    """Parse a field of a model file's metadata from JSON, and check its type.

    Args:
        name: the name of the field in the file.
        text: its JSON.
        path: the file, for messages.
    """
    try:
        return TypeAdapter({**_REQUIRED_TYPES, **_OPTIONAL_TYPES}[name]).validate_json(text, strict=True)
    except ValidationError as error:
        raise UserError(
            f"{path}: the model's metadata have no readable {name!r} ({error.errors()[0]['msg']}); "
            "take an undamaged copy of the file."
        ) from error


def _build_network(description: dict[str, Any], path: Path) -> Network:
    """Build the network that metadata describe; raise UserError if this version cannot make it."""
    try:
        return networks.from_description(description)
    except (TypeError, UserError) as error:
        raise UserError(
            f"{path}: the model's network {description.get('name')} cannot be made ({str(error).removesuffix('.')}); "
            "take an undamaged copy of the file, or the halfmoon that made it."
        ) from error


def _find_contradiction(card: Card) -> str:
    """Describe the first contradiction between the fields of a model's metadata; "" if there is none.

    Images of `input_size` are averaged over blocks of `shrink` x `shrink` pixels and then padded to the square `image`.
    """
    channels = card.image[0]
    sizes_are_possible = min(*card.image, *card.input_size, card.shrink) >= 1
    if channels not in (1, 3) or not sizes_are_possible:
        return f"images of {card.input_size} are shrunk by {card.shrink} to {card.image}"
    if len(card.classes) != card.network.classes or len(set(card.classes)) != len(card.classes):
        return f"{len(set(card.classes))} class names for {card.network.classes} classes"
    if card.network.channels != channels:
        return f"the network takes {card.network.channels} channels, the images have {channels}"
    if len(card.mean) != channels or len(card.std) != channels or not all(value > 0 for value in card.std):
        return f"mean {card.mean} and std {card.std} for {channels} channels"
    if card.window is not None and not card.window[0] < card.window[1]:
        return f"window {card.window}"
    if not 0 < card.temperature < math.inf:
        return f"a temperature of {card.temperature:g}"
    size_contradiction = _find_size_contradiction(card)
    if size_contradiction:
        return size_contradiction
    try:
        card.network.check(card.image)
    except UserError as error:
        return str(error)
    return ""


def _find_size_contradiction(card: Card) -> str:
    """Describe a contradiction between the image sizes of a card; "" if there is none.

    Images of `input_size` are made smaller by the factor `shrink`, and then padded with zeros to the square `image`.
    """
    _, height, width = card.image
    if any(side % card.shrink for side in card.input_size):
        return f"shrink {card.shrink} does not divide images of {card.input_size}"
    shrunk = tuple(side // card.shrink for side in card.input_size)
    is_padded = shrunk != (height, width)
    can_be_padded = height == width and max(shrunk) <= height  # only squares result from padding
    if is_padded and not can_be_padded:
        return f"images of {shrunk} are padded to {(height, width)}"
    return ""
