"""A tree as the bytes of a safetensors file, and back with every bit, the order of its keys and its order in memory.

safetensors keeps tensors by name, but neither the order of the names, nor empty dicts, nor how a tensor lies in
memory. All three are part of a state: sums are taken in these orders, so a run that went on without them would
differ in the last digits.
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

SEAL = "sha256"
"""The name, among a file's metadata, of the checksum of all the rest."""


def pack(tree: Tree) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of the tensors and the tree's shape, which safetensors does not keep.

    The shape is the tree with None at its leaves, or the order of dimensions where one lies permuted (channels last).
    """
    return safetensors.torch.save(plain(tree)), _shape(tree)


def unpack(data: bytes, shape: dict[str, Any]) -> Tree:
    return _filled(safetensors.torch.load(data), shape)


def pack_file(tree: Tree) -> bytes:
    return safetensors.torch.save(plain(tree), {"shape": json.dumps(_shape(tree))})


def map_file(path: Path) -> Tree:
    """Return the tree of a file of `pack_file`; raise OSError or `safetensors.SafetensorError` if there is none.

    The leaves are mapped into memory, not read: a page comes when it is touched, and the system may take it back.
    The mapping is private: a leaf changed in place never changes the file. Only a permuted leaf is copied.
    """
    with safe_open(path, "pt") as file:
        shape = json.loads(file.metadata()["shape"])
    return map_tree(path, shape)


def map_tree(path: Path, shape: dict[str, Any]) -> Tree:
    with safe_open(path, "pt") as file:
        return _filled({name: file.get_tensor(name) for name in _paths(shape)}, shape)


def with_metadata(data: bytes, meta: dict[str, str]) -> bytes:
    """Put metadata into the header of a safetensors file, in place of what it may have.

    The library's own writer orders metadata by a hash that differs from process to process, and so would the file.
    """
    header, end = _header(data)
    del header["__metadata__"]
    text = json.dumps({"__metadata__": meta, **header}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[end:]


def with_seal(data: bytes, meta: dict[str, str]) -> bytes:
    """Return what `with_metadata` does, with the checksum of the rest of the file among the metadata."""
    plain = with_metadata(data, meta)
    return with_metadata(data, {**meta, SEAL: _seal(plain)})


def check_seal(data: bytes) -> bool:
    """Say whether a file of `with_seal` is as it was written; one without a seal passes. Raise ValueError for none."""
    header, _ = _header(data)
    checksum = header["__metadata__"].get(SEAL)
    return checksum is None or checksum == _seal(data)


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where the tensors begin; raise ValueError for what is none."""
    end = 8 + int.from_bytes(data[:8], "little")
    if end > len(data):
        raise ValueError("it is cut")
    header = parse_json(data[8:end])
    if not isinstance(header, dict):
        raise ValueError("it has no header")
    if not isinstance(header.setdefault("__metadata__", {}), dict):
        raise ValueError("its header has no metadata that could be read")
    return header, end


def _seal(data: bytes) -> str:
    """Return the SHA-256 of a file's header, without the seal and blanks, and of its tensors."""
    header, end = _header(data)
    meta = {name: value for name, value in header["__metadata__"].items() if name != SEAL}
    words = json.dumps({**header, "__metadata__": meta}, sort_keys=True).encode()
    return sha256(sha256(words).digest() + data[end:]).hexdigest()


def plain(tree: Tree) -> dict[str, Tensor]:
    """Return the leaves by path, on the CPU, in the plain order and each in its own memory."""
    # A clone a leaf: safetensors refuses tensors that share memory.
    return {
        path: leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for path, leaf in flatten(tree).items()
    }


def _shape(tree: Tree) -> dict[str, Any]:
    return {key: _shape(value) if isinstance(value, dict) else _order(value) for key, value in tree.items()}


def _order(leaf: Tensor) -> list[int] | None:
    if leaf.is_contiguous():
        return None
    order = sorted(range(leaf.dim()), key=lambda d: (-leaf.stride(d), d))
    return order if leaf.permute(order).is_contiguous() else None


def _paths(shape: dict[str, Any], prefix: str = "") -> list[str]:
    paths: list[str] = []
    for key, value in shape.items():
        path = f"{prefix}{key}"
        paths += _paths(value, f"{path}/") if isinstance(value, dict) else [path]
    return paths


def _filled(flat: dict[str, Tensor], shape: dict[str, Any], prefix: str = "") -> Tree:
    return {
        key: _filled(flat, value, f"{prefix}{key}/")
        if isinstance(value, dict)
        else _laid(flat[f"{prefix}{key}"], value)
        for key, value in shape.items()
    }


def _laid(leaf: Tensor, order: list[int] | None) -> Tensor:
    if order is None:
        return leaf
    return leaf.permute(order).contiguous().permute([order.index(d) for d in range(leaf.dim())])
