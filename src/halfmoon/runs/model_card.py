"""What a model file says of itself: enough to label images with nothing but the file."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from halfmoon.core.errors import UserError
from halfmoon.models import Network
from halfmoon.models import registry as networks
from halfmoon.storage import toml

PLAIN, SCALED = "1", "2"
"""Versions of the metadata: an older halfmoon would leave out the temperature of a model that has one."""

_KINDS: dict[str, Any] = {
    "classes": tuple[str, ...],
    "image": tuple[int, int, int],
    "taken": tuple[int, int],
    "shrink": int,
    "mean": tuple[float, ...],
    "std": tuple[float, ...],
    "network": dict[str, Any],
}
_WORDS = ("method", "config")
_MAYBE: dict[str, Any] = {"crop": bool, "window": tuple[float, float], "temperature": float}


@dataclass(frozen=True)
class Card:
    """What a model is, how its images are made ready, and where it comes from.

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
        """Return the metadata of a model file; `parse` reads it."""
        scaled = {} if self.temperature == 1 else {"temperature": json.dumps(self.temperature)}
        return {
            "format": SCALED if scaled else PLAIN,
            "classes": json.dumps(self.classes),
            "image": json.dumps(self.image),
            "taken": json.dumps(self.input_size),
            "shrink": json.dumps(self.shrink),
            "mean": json.dumps(self.mean),
            "std": json.dumps(self.std),
            "network": json.dumps(networks.describe(self.network)),
            "method": self.method,
            "config": self.config,
            **({"crop": json.dumps(self.crop)} if self.crop else {}),
            **({"window": json.dumps(self.window)} if self.window else {}),
            **scaled,
        }

    @classmethod
    def parse(cls, metadata: Mapping[str, str], place: Path) -> "Card":
        """Return the card of metadata; raise `UserError`, which names `place`, for what is missing or cannot be."""
        _check_format(metadata, place)
        missing = [name for name in (*_KINDS, *_WORDS) if name not in metadata]
        if missing:
            raise UserError(f"{place}: the model's metadata lack {missing[0]!r}; take an undamaged copy of the file.")
        names = [name for name in (*_KINDS, *_MAYBE) if name in metadata]
        fields = {name: _parsed(name, metadata[name], place) for name in names}
        network, size = _network(fields.pop("network"), place), fields.pop("taken")
        card = cls(**fields, input_size=size, network=network, method=metadata["method"], config=metadata["config"])
        problem = _problem(card)
        if problem:
            raise UserError(f"{place}: the model's metadata disagree ({problem}); take an undamaged copy of the file.")
        return card


def _check_format(metadata: Mapping[str, str], place: Path) -> None:
    number = metadata.get("format")
    if number in (PLAIN, SCALED):
        return
    if number is None and {"classes", "network", "image"} <= metadata.keys():
        raise UserError(
            f"{place} was written by an older halfmoon, which did not say how its images were made ready; "
            "train the model again."
        )
    if number is None:
        raise UserError(
            f"{place} says nothing of a model; give the folder of a finished run, or its model.safetensors."
        )
    raise UserError(
        f"{place} has metadata of version {number}, this halfmoon reads versions {PLAIN} and {SCALED}; "
        "use the halfmoon that trained the model, or a newer one."
    )


def _parsed(name: str, words: str, place: Path) -> Any:
    try:
        return TypeAdapter({**_KINDS, **_MAYBE}[name]).validate_json(words, strict=True)
    except ValidationError as error:
        raise UserError(
            f"{place}: the model's metadata have no readable {name!r} ({error.errors()[0]['msg']}); "
            "take an undamaged copy of the file."
        ) from error


def _network(description: dict[str, Any], place: Path) -> Network:
    try:
        return networks.from_description(description)
    except (TypeError, UserError) as error:
        raise UserError(
            f"{place}: the model's network {description.get('name')} cannot be made ({str(error).removesuffix('.')}); "
            "take an undamaged copy of the file, or the halfmoon that made it."
        ) from error


def _problem(card: Card) -> str:
    channels, height, width = card.image
    if channels not in (1, 3) or min(card.image) < 1 or min(card.input_size) < 1 or card.shrink < 1:
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
    if any(side % card.shrink for side in card.input_size):
        return f"shrink {card.shrink} does not divide images of {card.input_size}"
    small = tuple(side // card.shrink for side in card.input_size)
    if small != (height, width) and (height != width or max(small) > height):
        return f"images of {small} are padded to {(height, width)}"
    try:
        card.network.check(card.image)
    except UserError as error:
        return str(error)
    return ""
