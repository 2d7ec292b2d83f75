"""The header of a message, judged before anything is allocated for what it announces.

A message is a safetensors file: eight bytes with the header's length, the header (JSON: for each tensor its type, shape
and place), and the tensors' bytes. Whoever sends one may lie in every byte of it. A header that passes here describes
each of the bytes that came exactly once, so that reading them takes as much memory again, and no more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from halfmoon.federation.protocol.tree_spec import TreeSpec

LONGEST = 2**22
"""Bytes of a header at most."""

TENSORS = 2**14
"""Tensors of a message at most."""

DIMENSIONS, ELEMENTS = 8, 2**36
"""Dimensions of a tensor at most, and the largest product of those that are not 0."""

DEEPEST = 16
"""Names inside each other, at most."""

NAME = 200
"""Characters of one name at most."""

TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""The types of tensors that travel, as safetensors calls them."""


class UnreadableMessage(ValueError):
    """A header that is none, or describes other bytes than those that came; says what is wrong."""


Tensors = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Path -> (shape, type)."""


class Cut(UnreadableMessage):
    """Fewer bytes than the header alone would have."""


@dataclass(frozen=True)
class Header:
    """What a header says: the texts beside the tensors, and what the tensors are like."""

    texts: dict[str, str]
    tensors: Tensors


def judged(data: bytes) -> Header:
    """Return the header of a message; raise `UnreadableMessage` for one that does not describe the bytes behind it."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise Cut("is cut off, or none of halfmoon's")
    if length > LONGEST:
        raise UnreadableMessage(f"its header has {length:,} bytes, of {LONGEST:,} at most")
    said = parsed(data[8 : 8 + length])
    texts = said.pop("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(each, str) for each in texts.values()):
        raise UnreadableMessage("its header has no texts")
    if len(said) > TENSORS:
        raise UnreadableMessage(f"it has {len(said):,} tensors, of {TENSORS:,} at most")
    return Header(texts, _tensors(said, len(data) - 8 - length))


def parsed(text: str | bytes) -> dict[str, Any]:
    """Return the object in a JSON text; raise `UnreadableMessage` where there is none, or a name stands there twice."""
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except UnreadableMessage:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableMessage(f"its header is no JSON ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise UnreadableMessage("its header is no object of JSON")
    return found


def check_shape(shape: Any, tensors: Tensors) -> None:
    """Raise `UnreadableMessage` unless a tree's shape (`halfmoon.storage.serialization`) has each of the tensors once,
    and nothing else."""
    left = dict(tensors)
    for path, order in _leaves(shape):
        if path not in left:
            raise UnreadableMessage(f"it has no tensor {path[:NAME]!r}, or has it twice")
        dimensions = range(len(left.pop(path)[0]))
        whole = isinstance(order, list) and all(type(each) is int for each in order)
        if order is not None and not (whole and sorted(order) == list(dimensions)):
            raise UnreadableMessage(f"the order of {path[:NAME]!r} in memory is none")
    if left:
        raise UnreadableMessage(f"its tensor {min(left)[:NAME]!r} is in no tree")


def pattern(shape: dict[str, Any], tensors: Tensors, name: str) -> TreeSpec:
    """Return the pattern of the tree `name` in a message, whose shape was checked."""
    found: TreeSpec = {}

    def walk(branch: dict[str, Any], path: str) -> None:
        for key, value in branch.items():
            place = f"{path}{key}"
            if not isinstance(value, dict):
                found[place] = tensors[f"{name}/{place}"]
            elif value:
                walk(value, f"{place}/")
            else:
                found[place] = None

    walk(shape.get(name, {}), "")
    return found


def fine(text: str, longest: int) -> bool:
    """Say whether a text may stand in a log: printable, and not too long."""
    return len(text) <= longest and text.isprintable()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise UnreadableMessage("its header has a name twice")
    return found


def _no_number(word: str) -> None:
    raise UnreadableMessage(f"its header has {word} for a number")


def _tensors(said: dict[str, Any], size: int) -> Tensors:
    found: Tensors = {}
    places: list[tuple[int, int]] = []
    for name, each in said.items():
        try:
            kind, shape, (begin, end) = TYPES[each["dtype"]], tuple(each["shape"]), each["data_offsets"]
        except (LookupError, TypeError, ValueError) as error:
            raise UnreadableMessage(f"what its tensor {name[:NAME]!r} is like is not said") from error
        if len(shape) > DIMENSIONS:
            raise UnreadableMessage(
                f"its tensor {name[:NAME]!r} has {len(shape):,} dimensions, of {DIMENSIONS} at most"
            )
        if not all(type(each) is int and each >= 0 for each in (*shape, begin, end)):
            raise UnreadableMessage(f"its tensor {name[:NAME]!r} has a size that is no whole number from 0")
        if math.prod(side for side in shape if side) > ELEMENTS:
            raise UnreadableMessage(f"its tensor {name[:NAME]!r} is of more than {ELEMENTS:,} numbers")
        if end - begin != math.prod(shape) * kind.itemsize:
            raise UnreadableMessage(f"its tensor {name[:NAME]!r} has other bytes than its shape says")
        found[name] = (shape, kind)
        places.append((begin, end))
    at = 0
    for begin, end in sorted(places):
        if begin != at:
            raise UnreadableMessage("its tensors do not lie one behind the other")
        at = end
    if at != size:
        raise UnreadableMessage(f"its tensors are said to have {at:,} bytes, but {size:,} have come")
    return found


def _leaves(shape: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield (path, order in memory) of each tensor that a tree's shape says there is."""
    if not isinstance(shape, dict) or depth > DEEPEST:
        raise UnreadableMessage(f"its shape is no tree, or has names inside each other over {DEEPEST} deep")
    for key, value in shape.items():
        if not key or "/" in key or not fine(key, NAME):
            raise UnreadableMessage(f"it has a name that is none: {key[:NAME]!r}")
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}/", depth + 1)
        else:
            yield f"{prefix}{key}", value
