"""Validate the header of a message before memory is allocated for its contents.

A message is a safetensors file: eight bytes with the header's length, the header (JSON with type, shape and byte range
of each tensor), and the tensors' bytes. Any byte may be forged. A header that passes these checks describes each
received byte exactly once, so reading the tensors needs at most as much memory as the message itself.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from halfmoon.federation.protocol.tree_spec import TreeSpec, iterate_leaves

LENGTH_BYTES = 8  # at the beginning of a message: the length of its header
MAX_HEADER_BYTES = 2**22
MAX_TENSORS = 2**14  # in one message

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**36
"""Largest product of a tensor's dimensions, not counting those that are 0."""

MAX_DEPTH = 16  # of nested names
MAX_NAME_LENGTH = 200  # characters

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
"""The tensor types of messages, by their names in safetensors."""


class UnreadableMessage(ValueError):
    """A header that is invalid or does not match the received bytes; the text names the fault."""


class TruncatedMessage(UnreadableMessage):
    """A message with fewer bytes than its header needs."""


TensorSpecs = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Path -> (shape, dtype)."""


@dataclass(frozen=True)
class Header:
    """A validated header.

    Attributes:
        texts: the metadata texts by name.
        tensors: shape and dtype of each tensor by path.
    """

    texts: dict[str, str]
    tensors: TensorSpecs


def parse_header(data: bytes) -> Header:
    """Parse and validate the header of a message in the safetensors format, from a sender who may be hostile.

    The tensors are not read. A valid header describes each byte behind it exactly once.

    Args:
        data: the complete message: the header's length (8 bytes, little-endian), the header (JSON), the tensors.

    Returns:
        The metadata, and the shape and dtype of each tensor.

    Raises:
        TruncatedMessage: the message is shorter than its header.
        UnreadableMessage: the header is invalid, too large, or describes other bytes than those that follow it.
    """
    header_length = int.from_bytes(data[:LENGTH_BYTES], "little")
    tensor_bytes = len(data) - LENGTH_BYTES - header_length
    if len(data) < LENGTH_BYTES or tensor_bytes < 0:
        raise TruncatedMessage("is truncated, or was not written by halfmoon")
    if header_length > MAX_HEADER_BYTES:
        raise UnreadableMessage(f"its header has {header_length:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
    entries = parse_json(data[LENGTH_BYTES : LENGTH_BYTES + header_length])
    texts = entries.pop("__metadata__", {})
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise UnreadableMessage("the metadata in its header are not texts")
    if len(entries) > MAX_TENSORS:
        raise UnreadableMessage(f"it has {len(entries):,} tensors; the limit is {MAX_TENSORS:,}")
    return Header(texts, _parse_tensor_entries(entries, tensor_bytes))


def parse_json(text: str | bytes) -> dict[str, Any]:
    """Parse a JSON object in the header of a message, from a sender who may be hostile.

    It is stricter than `json.loads`: other parsers may read duplicate names differently, and NaN passes comparisons.

    Raises:
        UnreadableMessage: it is invalid, no object, or has duplicate names, NaN or infinity.
    """
    try:
        value = json.loads(text, object_pairs_hook=_reject_duplicates, parse_constant=_reject_constant)
    except UnreadableMessage:
        raise
    except (ValueError, RecursionError) as error:
        raise UnreadableMessage(f"its header is not valid JSON ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise UnreadableMessage("its header is not a JSON object")
    return value


def check_layout(layout: Any, tensors: TensorSpecs) -> None:
    """Check that the layout of a message's trees has each tensor exactly once, and no other ones.

    Args:
        layout: nested dict, by tree and path, of each tensor's dimension order in memory; None for the usual order, in
            which the last dimension is contiguous (see `halfmoon.storage.serialization`).
        tensors: the tensors of the message's header.

    Raises:
        UnreadableMessage: a tensor is missing, duplicate or in no tree, or a dimension order is no permutation.
    """
    remaining = dict(tensors)
    for path, order in _iterate_layout(layout):
        if path not in remaining:
            raise UnreadableMessage(f"the tensor {path[:MAX_NAME_LENGTH]!r} is missing or occurs twice")
        shape, _ = remaining.pop(path)
        if order is not None:
            are_integers = isinstance(order, list) and all(type(number) is int for number in order)
            if not are_integers or sorted(order) != list(range(len(shape))):
                raise UnreadableMessage(f"the dimension order of {path[:MAX_NAME_LENGTH]!r} is no permutation")
    if remaining:
        raise UnreadableMessage(f"its tensor {min(remaining)[:MAX_NAME_LENGTH]!r} is in no tree")


def select_tree_spec(layout: dict[str, Any], tensors: TensorSpecs, name: str) -> TreeSpec:
    """Select the shapes and dtypes of one tree of tensors (nested dict) from the header of a message.

    Args:
        layout: the message's layout, checked by `check_layout`.
        tensors: the tensors of the message's header.
        name: the name of the tree in the message.

    Returns:
        (shape, dtype) of each tensor by its path in the tree; None for an empty dict in it.
    """
    paths = ["/".join(path) for path, _ in iterate_leaves(layout.get(name, {}))]
    return {path: tensors.get(f"{name}/{path}") for path in paths}


def is_printable(text: str, max_length: int) -> bool:
    """Check that a text is printable and has at most `max_length` characters."""
    return len(text) <= max_length and text.isprintable()


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise UnreadableMessage("its header has a duplicate name")
    return values


def _reject_constant(constant: str) -> None:
    # Python's JSON parser accepts NaN and Infinity, which no count or shape may be.
    raise UnreadableMessage(f"its header has {constant} in place of a number")


def _parse_tensor_entries(entries: dict[str, Any], size: int) -> TensorSpecs:
    """Parse the tensor entries of a safetensors header.

    Args:
        entries: {"dtype", "shape", "data_offsets"} of each tensor, by its name.
        size: bytes behind the header, which the tensors must fill exactly.

    Returns:
        (shape, dtype) of each tensor, by its name.

    Raises:
        UnreadableMessage: an entry is invalid, or the tensors overlap, leave gaps or have another size together.
    """
    tensors: TensorSpecs = {}
    byte_ranges: list[tuple[int, int]] = []
    for name, entry in entries.items():
        shape, dtype, byte_range = _parse_tensor_entry(name, entry)
        tensors[name] = (shape, dtype)
        byte_ranges.append(byte_range)
    offset = 0
    for begin, end in sorted(byte_ranges):
        if begin != offset:
            raise UnreadableMessage("its tensors overlap or leave gaps")
        offset = end
    if offset != size:
        raise UnreadableMessage(f"its header describes {offset:,} bytes of tensors, but {size:,} were received")
    return tensors


def _parse_tensor_entry(name: str, entry: Any) -> tuple[tuple[int, ...], torch.dtype, tuple[int, int]]:
    """Parse the entry of one tensor in a safetensors header, from a sender who may be hostile.

    Args:
        name: the name of the tensor.
        entry: {"dtype", "shape", "data_offsets"}, of which anything may be missing or wrong.

    Returns:
        Shape, dtype, and byte range (begin, end).
    """
    subject = f"its tensor {name[:MAX_NAME_LENGTH]!r}"
    try:
        dtype = DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (LookupError, TypeError, ValueError) as error:
        raise UnreadableMessage(f"{subject} has no valid type, shape and byte range") from error
    if len(shape) > MAX_DIMENSIONS:
        raise UnreadableMessage(f"{subject} has {len(shape):,} dimensions; the limit is {MAX_DIMENSIONS}")
    # `type(...) is int` because bool is a subclass of int.
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise UnreadableMessage(f"{subject} has a size that is not a non-negative integer")
    # A dimension of 0 would hide huge other ones.
    if math.prod(side for side in shape if side) > MAX_ELEMENTS:
        raise UnreadableMessage(f"{subject} has more than {MAX_ELEMENTS:,} elements")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise UnreadableMessage(f"{subject} has a byte range that does not match its shape")
    return shape, dtype, (begin, end)


def _iterate_layout(layout: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the path and the dimension order of each tensor in the layout of a message.

    Args:
        layout: nested dict from names to dimension orders, from a sender who may be hostile.
        prefix: the path of `layout` in the complete layout, with a "/" at its end.
        depth: the number of names in `prefix`.

    Raises:
        UnreadableMessage: a name is invalid, or names are nested too deeply.
    """
    if not isinstance(layout, dict) or depth > MAX_DEPTH:
        raise UnreadableMessage(f"its layout is not a tree of at most {MAX_DEPTH} nested names")
    for key, value in layout.items():
        if not key or "/" in key or not is_printable(key, MAX_NAME_LENGTH):
            raise UnreadableMessage(f"it has an invalid name: {key[:MAX_NAME_LENGTH]!r}")
        if isinstance(value, dict):
            yield from _iterate_layout(value, f"{prefix}{key}/", depth + 1)
        else:
            yield f"{prefix}{key}", value
