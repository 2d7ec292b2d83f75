"""What a model file says of itself: enough to label images with nothing but the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from halfmoon import toml
from halfmoon.errors import UserError, nearest
from halfmoon.models import NETWORKS, Network

FORMAT = 1
"""The version of the metadata; it grows when an older halfmoon could not read it rightly."""

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


@dataclass(frozen=True)
class Card:
    """What a model is, how its images are made ready, and where it comes from.

    Images of `taken` (height, width) pixels are averaged over blocks of `shrink` x `shrink`, padded with zeros to
    `image` (channels, height, width), and normalized by `mean` and `std` (of pixels in 0..1, one a channel).
    """

    classes: tuple[str, ...]
    image: tuple[int, int, int]
    taken: tuple[int, int]
    shrink: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    network: Network
    method: str
    config: str  # the run's config.toml

    @property
    def shape(self) -> tuple[int, int, int]:
        """The (height, width, channels) of the images that the model takes."""
        return (*self.taken, self.image[0])

    @property
    def options(self) -> dict[str, Any]:
        """The run's configuration, option by option, as its config.toml has it; {} where it is no TOML."""
        return toml.table(self.config)

    def render(self) -> dict[str, str]:
        """Return the metadata of a model file; `parse` reads it."""
        (name,) = [name for name, kind in NETWORKS.items() if type(self.network) is kind]
        return {
            "format": str(FORMAT),
            "classes": json.dumps(self.classes),
            "image": json.dumps(self.image),
            "taken": json.dumps(self.taken),
            "shrink": json.dumps(self.shrink),
            "mean": json.dumps(self.mean),
            "std": json.dumps(self.std),
            "network": json.dumps({"name": name, **asdict(self.network)}),
            "method": self.method,
            "config": self.config,
        }

    @classmethod
    def parse(cls, said: Mapping[str, str], place: Path) -> Card:
        """Return the card of metadata; raise `UserError`, which names `place`, for what is missing or cannot be."""
        _check_format(said, place)
        missing = [name for name in (*_KINDS, *_WORDS) if name not in said]
        if missing:
            raise UserError(f"{place}: the model's metadata lack {missing[0]!r}; take an undamaged copy of the file.")
        held = {name: _parsed(name, said[name], place) for name in _KINDS}
        network = _network(held.pop("network"), place)
        card = cls(**held, network=network, method=said["method"], config=said["config"])
        problem = _problem(card)
        if problem:
            raise UserError(f"{place}: the model's metadata disagree ({problem}); take an undamaged copy of the file.")
        return card


def _check_format(said: Mapping[str, str], place: Path) -> None:
    number = said.get("format")
    if number == str(FORMAT):
        return
    if number is None and {"classes", "network", "image"} <= said.keys():
        raise UserError(
            f"{place} was written by an older halfmoon, which did not say how its images were made ready; "
            "train the model again."
        )
    if number is None:
        raise UserError(
            f"{place} says nothing of a model; give the folder of a finished run, or its model.safetensors."
        )
    raise UserError(
        f"{place} has metadata of version {number}, this halfmoon reads version {FORMAT}; "
        "use the halfmoon that trained the model, or a newer one."
    )


def _parsed(name: str, words: str, place: Path) -> Any:
    try:
        return TypeAdapter(_KINDS[name]).validate_json(words, strict=True)
    except ValidationError as error:
        raise UserError(
            f"{place}: the model's metadata have no readable {name!r} ({error.errors()[0]['msg']}); "
            "take an undamaged copy of the file."
        ) from error


def _network(said: dict[str, Any], place: Path) -> Network:
    name, values = said.get("name"), {key: value for key, value in said.items() if key != "name"}
    if name not in NETWORKS:
        raise UserError(f"{place}: this halfmoon has no network {name!r}: {nearest(str(name), NETWORKS)}")
    numbers = [key for key, value in values.items() if key != "norm" and not (type(value) is int and value > 0)]
    try:
        if not numbers:
            return NETWORKS[name](**values)
        problem = f"{numbers[0]} is {values[numbers[0]]!r}"
    except (TypeError, UserError) as error:
        problem = str(error)
    raise UserError(f"{place}: the model's network {name} cannot be made ({problem}); take an undamaged copy.")


def _problem(card: Card) -> str:
    """Return what does not fit together, "" where all does."""
    channels, height, width = card.image
    if channels not in (1, 3) or min(card.image) < 1 or min(card.taken) < 1 or card.shrink < 1:
        return f"images of {card.taken} are shrunk by {card.shrink} to {card.image}"
    if len(card.classes) != card.network.classes or len(set(card.classes)) != len(card.classes):
        return f"{len(set(card.classes))} class names for {card.network.classes} classes"
    if card.network.channels != channels:
        return f"the network takes {card.network.channels} channels, the images have {channels}"
    if len(card.mean) != channels or len(card.std) != channels or not all(value > 0 for value in card.std):
        return f"mean {card.mean} and std {card.std} for {channels} channels"
    if any(side % card.shrink for side in card.taken):
        return f"shrink {card.shrink} does not divide images of {card.taken}"
    small = tuple(side // card.shrink for side in card.taken)
    if small != (height, width) and (height != width or max(small) > height):
        return f"images of {small} are padded to {(height, width)}"
    try:
        card.network.check(card.image)
    except UserError as error:
        return str(error)
    return ""
