"""Check the header of a message before anything is allocated for what it announces.

A message is a safetensors file: eight bytes with the header's length, the header (JSON: type, shape and place of each
tensor), and the tensors' bytes. A sender may lie in every byte. A header that passes here describes each byte that came
exactly once, so reading them takes as much memory again, and no more.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from halfmoon.federation.protocol.tree_spec import TreeSpec, iterate_leaves

MAX_HEADER_BYTES = 2**22  # bytes of a header at most
MAX_TENSORS = 2**14  # tensors of a message at most

MAX_DIMENSIONS, MAX_ELEMENTS = 8, 2**36
"""Dimensions of a tensor at most, and the largest product of those that are not 0."""

MAX_DEPTH = 16  # names inside each other, at most
MAX_NAME_LENGTH = 200  # characters of one name at most

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""The types of tensors that travel, as safetensors calls them."""


class UnreadableMessage(ValueError):
    """A header that is none, or describes other bytes than those that came; says what is wrong."""


class TruncatedMessage(UnreadableMessage):
    """Fewer bytes than the header alone would have."""


TensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Path -> (shape, type)."""


@dataclass(frozen=True)
class Header:
    """The texts of a header, and the shapes and types of the tensors."""

    texts: dict[str, str]
    tensors: TensorSpecs


def parse_header(data: bytes) -> Header:
    """Return the header of a message; raise `UnreadableMessage` for one that does not describe the bytes behind it."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise TruncatedMessage("is cut off, or none of halfmoon's")
    if length > MAX_HEADER_BYTES:
        raise UnreadableMessage(f"its header has {length:,} bytes, of {MAX_HEADER_BYTES:,} at most")
    entries = parse_json(data[8 : 8 + length])
    texts = entries.pop("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise UnreadableMessage("its header has no texts")
    if len(entries) > MAX_TENSORS:
        raise UnreadableMessage(f"it has {len(entries):,} tensors, of {MAX_TENSORS:,} at most")
    return Header(texts, _tensors(entries, len(data) - 8 - length))


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Return the object in a JSON text; raise `UnreadableMessage` where there is none, or a name stands there twice."""
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except UnreadableMessage:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableMessage(f"its header is no JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise UnreadableMessage("its header is no object of JSON")
    return value


def check_layout(shape: Any, tensors: TensorSpecs) -> None:
    """Raise `UnreadableMessage` unless a tree's shape (`halfmoon.storage.serialization`) has each of the tensors once,
    and nothing else.
    """
    missing = dict(tensors)
    for path, order in _leaves(shape):
        if path not in missing:
            raise UnreadableMessage(f"it has no tensor {path[:MAX_NAME_LENGTH]!r}, or has it twice")
        dimensions = range(len(missing.pop(path)[0]))
        whole = isinstance(order, list) and all(type(number) is int for number in order)
        if order is not None and not (whole and sorted(order) == list(dimensions)):
            raise UnreadableMessage(f"the order of {path[:MAX_NAME_LENGTH]!r} in memory is none")
    if missing:
        raise UnreadableMessage(f"its tensor {min(missing)[:MAX_NAME_LENGTH]!r} is in no tree")


def select_tree_spec(shape: dict[str, Any], tensors: TensorSpecs, name: str) -> TreeSpec:
    """Return the pattern of the tree `name` in a message, whose shape was checked; a branch without leaves is None."""
    paths = ["/".join(path) for path, _ in iterate_leaves(shape.get(name, {}))]
    return {path: tensors.get(f"{name}/{path}") for path in paths}


def is_printable(text: str, longest: int) -> bool:
    return len(text) <= longest and text.isprintable()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) < len(pairs):
        raise UnreadableMessage("its header has a name twice")
    return names


def _no_number(word: str) -> None:
    raise UnreadableMessage(f"its header has {word} for a number")


def _tensors(entries: dict[str, Any], size: int) -> TensorSpecs:
    tensors: TensorSpecs = {}
    places: list[tuple[int, int]] = []
    for name, entry in entries.items():
        which = f"its tensor {name[:MAX_NAME_LENGTH]!r}"
        try:
            dtype, shape, (begin, end) = DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
        except (LookupError, TypeError, ValueError) as error:
            raise UnreadableMessage(f"what {which} is like is not said") from error
        if len(shape) > MAX_DIMENSIONS:
            raise UnreadableMessage(f"{which} has {len(shape):,} dimensions, of {MAX_DIMENSIONS} at most")
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise UnreadableMessage(f"{which} has a size that is no whole number from 0")
        if math.prod(side for side in shape if side) > MAX_ELEMENTS:
            raise UnreadableMessage(f"{which} is of more than {MAX_ELEMENTS:,} numbers")
        if end - begin != math.prod(shape) * dtype.itemsize:
            raise UnreadableMessage(f"{which} has other bytes than its shape says")
        tensors[name] = (shape, dtype)
        places.append((begin, end))
    offset = 0
    for begin, end in sorted(places):
        if begin != offset:
            raise UnreadableMessage("its tensors do not lie one behind the other")
        offset = end
    if offset != size:
        raise UnreadableMessage(f"its tensors are said to have {offset:,} bytes, but {size:,} have come")
    return tensors


def _leaves(shape: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if not isinstance(shape, dict) or depth > MAX_DEPTH:
        raise UnreadableMessage(f"its shape is no tree, or has names inside each other over {MAX_DEPTH} deep")
    for key, value in shape.items():
        if not key or "/" in key or not is_printable(key, MAX_NAME_LENGTH):
            raise UnreadableMessage(f"it has a name that is none: {key[:MAX_NAME_LENGTH]!r}")
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}/", depth + 1)
        else:
            yield f"{prefix}{key}", value
