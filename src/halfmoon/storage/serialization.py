"""Conversion of trees to safetensors files and back, with the order of keys and the memory format.

safetensors stores tensors by name, but neither the order of the names, nor empty dicts, nor the memory format of a
tensor. Sums follow these orders, so a resumed run without them would differ in the last digits.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from halfmoon.core.tree import Tree, flatten
from halfmoon.storage.atomic_io import parse_json

CHECKSUM_KEY = "sha256"
"""Metadata key of the checksum of the rest of the file."""


def pack(tree: Tree) -> tuple[bytes, dict[str, Any]]:
    """Serialize a tree.

    Returns:
        The bytes of a safetensors file, and the tree's structure as JSON values: nested dicts with None for a contiguous
        leaf and the order of dimensions for a permuted one (channels last).
    """
    return safetensors.torch.save(copy_leaves_to_cpu(tree)), _describe_structure(tree)


def unpack(data: bytes, shape: dict[str, Any]) -> Tree:
    """Deserialize a tree from the two results of `pack`."""
    return _fill_structure(safetensors.torch.load(data), shape)


def pack_file(tree: Tree) -> bytes:
    """Serialize a tree to a safetensors file whose metadata contain the tree's structure."""
    return safetensors.torch.save(copy_leaves_to_cpu(tree), {"shape": json.dumps(_describe_structure(tree))})


def map_file(path: Path) -> Tree:
    """Map the tree of a file of `pack_file` into memory, so that the system reads its leaves when they are used.

    Only leaves whose dimensions are stored in another order (channels last) are copied. The mapping is private: a leaf
    changed in place never changes the file.

    Raises:
        OSError, safetensors.SafetensorError: if the file is missing or damaged.
    """
    with safe_open(path, "pt") as file:
        shape = json.loads(file.metadata()["shape"])
    return map_tree(path, shape)


def map_tree(path: Path, shape: dict[str, Any]) -> Tree:
    """Map the tree of a safetensors file into memory, with a structure as `pack` returns it."""
    with safe_open(path, "pt") as file:
        return _fill_structure({name: file.get_tensor(name) for name in _list_paths(shape)}, shape)


def with_metadata(data: bytes, meta: dict[str, str]) -> bytes:
    """Replace the metadata in the header of a safetensors file.

    The library's own writer orders metadata by a hash that differs from process to process, and so would the file.

    Args:
        data: the file's content.
        meta: the new metadata.

    Returns:
        The content of the new file.
    """
    header, tensors_start = _parse_header(data)
    del header["__metadata__"]
    text = json.dumps({"__metadata__": meta, **header}).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors to 8 bytes
    # The file: the length of the header in 8 bytes, the header, and the tensors.
    return len(text).to_bytes(8, "little") + text + data[tensors_start:]


def with_checksum(data: bytes, meta: dict[str, str]) -> bytes:
    """Put metadata and a checksum of the rest of the file into the header of a safetensors file."""
    plain = with_metadata(data, meta)
    return with_metadata(data, {**meta, CHECKSUM_KEY: _hash_content(plain)})


def check_checksum(data: bytes) -> bool:
    """Check the checksum of a file of `with_checksum`; True without a checksum. Raise ValueError for another file type."""
    header, _ = _parse_header(data)
    checksum = header["__metadata__"].get(CHECKSUM_KEY)
    return checksum is None or checksum == _hash_content(data)


def _parse_header(data: bytes) -> tuple[dict[str, Any], int]:
    """Parse the JSON header of a safetensors file.

    Args:
        data: the file's content: the length of the header in 8 bytes, the header, and the tensors.

    Returns:
        The header, and the offset of the tensors in bytes.

    Raises:
        ValueError: the header is invalid.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    if end > len(data):
        raise ValueError("it is truncated")
    header = parse_json(data[8:end])
    if not isinstance(header, dict):
        raise ValueError("it has no header")
    if not isinstance(header.setdefault("__metadata__", {}), dict):
        raise ValueError("its header has no metadata that could be read")
    return header, end


def _hash_content(data: bytes) -> str:
    """Compute the SHA-256 of a file's header, without checksum and padding, and of its tensors."""
    header, end = _parse_header(data)
    meta = {name: value for name, value in header["__metadata__"].items() if name != CHECKSUM_KEY}
    text = json.dumps({**header, "__metadata__": meta}, sort_keys=True).encode()
    return sha256(sha256(text).digest() + data[end:]).hexdigest()


def copy_leaves_to_cpu(tree: Tree) -> dict[str, Tensor]:
    """Copy the leaves to the CPU by path, each contiguous and with separate memory."""
    # Clone each leaf: safetensors refuses tensors that share memory.
    return {
        path: leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for path, leaf in flatten(tree).items()
    }


def _describe_structure(tree: Tree) -> dict[str, Any]:
    """Describe keys and memory formats as nested dicts: the dimension order of each leaf, None if it is contiguous."""
    return {
        key: _describe_structure(value) if isinstance(value, dict) else _dimension_order(value)
        for key, value in tree.items()
    }


def _dimension_order(leaf: Tensor) -> list[int] | None:
    """Compute the order of dimensions in which a permuted leaf is contiguous; None for a contiguous leaf and for others."""
    if leaf.is_contiguous():
        return None
    order = sorted(range(leaf.dim()), key=lambda d: (-leaf.stride(d), d))
    return order if leaf.permute(order).is_contiguous() else None


def _list_paths(shape: dict[str, Any], prefix: str = "") -> list[str]:
    """List the paths of the leaves of a structure, such as "params/head/weight"."""
    paths: list[str] = []
    for key, value in shape.items():
        path = f"{prefix}{key}"
        paths += _list_paths(value, f"{path}/") if isinstance(value, dict) else [path]
    return paths


def _fill_structure(flat: dict[str, Tensor], shape: dict[str, Any], prefix: str = "") -> Tree:
    """Build a tree from its leaves, by the structure that was stored with them.

    Args:
        flat: the leaves by path ("a/b/c"), as safetensors stores them: contiguous and without an order.
        shape: the structure, with nested dicts like the tree, in the order of its keys. Instead of a leaf it has the
            order of the leaf's dimensions in memory, None if it is contiguous (see `pack`).
        prefix: the path of the structure itself, with a slash at its end; "" for the root.
    """
    tree: Tree = {}
    for key, value in shape.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            tree[key] = _fill_structure(flat, value, prefix=f"{path}/")
        else:
            tree[key] = _permute_leaf(flat[path], value)
    return tree


def _permute_leaf(leaf: Tensor, order: list[int] | None) -> Tensor:
    """Restore the memory format of a leaf; the values by index do not change."""
    if order is None:
        return leaf
    # Copy to the stored order of dimensions, then undo the permutation, which is a view.
    return leaf.permute(order).contiguous().permute([order.index(d) for d in range(leaf.dim())])
