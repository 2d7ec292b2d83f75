"""SVHN's cropped digits: train_32x32.mat and test_32x32.mat, files of MATLAB (Netzer et al. 2011).

X holds the images as uint8 (32, 32, 3, N), y the labels (N, 1) from 1 to 10, where 10 stands for the digit 0
(http://ufldl.stanford.edu/housenumbers). Format 2 of that page.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError, one_line
from halfmoon.data.images import Images
from halfmoon.data.readers.idx import LARGEST

FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat"}


def is_here(folder: Path) -> bool:
    """Return whether the folder holds one of the two files."""
    return any((folder / file).is_file() for file in FILES.values())


def read(folder: Path) -> tuple[Images, Images]:
    """Return train and test images, uint8 (N, 32, 32, 3), labels 0 to 9 as the digits; raise as `read_mat` does."""
    for file in FILES.values():
        if not (folder / file).is_file():
            raise UserError(f"{folder / file} is missing; svhn is {' and '.join(FILES.values())}.")
    return read_mat(folder / FILES["train"]), read_mat(folder / FILES["test"])


def read_mat(path: Path) -> Images:
    """Return the images of one file; raise UserError where it cannot be read or X and y are not as they should be."""
    try:
        held = arrays(path.read_bytes(), ("X", "y"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: not a readable MATLAB file ({type(error).__name__}: {one_line(error)}); download it again."
        ) from error
    for name in ("X", "y"):
        if name not in held:
            raise UserError(f"{path}: there is no array {name} in it; SVHN's cropped digits are arrays X and y.")
    images, labels = held["X"], held["y"].reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3) or not images.shape[3]:
        raise UserError(f"{path}: X is {images.dtype} {images.shape}, not uint8 (32, 32, 3, N); download it again.")
    if len(labels) != images.shape[3]:
        raise UserError(
            f"{path}: y has {len(labels)} labels, but X has {images.shape[3]} images; download the file again."
        )
    digits = _digits(path, labels)
    return Images(np.ascontiguousarray(images.transpose(3, 0, 1, 2)), digits)


# MATLAB's format (MAT-File Format, MathWorks, chapter 1, "Level 5"). scipy reads it, too, but a damaged file can end
# the whole process there, which no `except` sees.

_HEAD = 128
_MATRIX, _COMPRESSED = 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""How numbers are stored."""
_CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}
"""What they are; small ones are often stored as less."""
_AXES = 32


def arrays(data: bytes, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the arrays of real numbers with these names in a MATLAB file; raise ValueError for one that is damaged.

    No more is unpacked than `LARGEST` bytes in all.
    """
    order = {b"IM": "<", b"MI": ">"}.get(data[126:_HEAD])
    if order is None or data[124:126][:: 1 if order == ">" else -1] != b"\1\0":
        raise ValueError("it does not begin as level 5 does")
    found: dict[str, np.ndarray] = {}
    place, left = _HEAD, LARGEST
    while place < len(data):
        kind, body, place = _element(data, place, order)
        if kind == _COMPRESSED:
            unpacked = _unpacked(body, left)
            left -= len(unpacked)
            kind, body, _ = _element(unpacked, 0, order)
        if kind == _MATRIX:
            found |= _array(body, order, names)
    return found


def _element(data: bytes | memoryview, place: int, order: str) -> tuple[int, memoryview, int]:
    """Return an element's type and content, and where the next one begins."""
    if place + 8 > len(data):
        raise ValueError("it is cut off")
    word, size = struct.unpack_from(f"{order}II", data, place)
    start = place + 8
    if word >> 16:  # a small one: its size and its content stand in the tag
        word, size, start = word & 0xFFFF, word >> 16, place + 4
    end = start + size
    if end > len(data) or (start < place + 8 < end):
        raise ValueError("it is cut off")
    after = place + 8 if start < place + 8 else end if word == _COMPRESSED else end + -end % 8
    return word, memoryview(data)[start:end], after


def _unpacked(body: memoryview, most: int) -> bytes:
    """Return what is packed; raise ValueError for more than `most` bytes of it."""
    packed = zlib.decompressobj()
    try:
        data = packed.decompress(body, most)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if packed.unconsumed_tail:
        raise ValueError(f"it unpacks to over {most:,} bytes")
    if not packed.eof:
        raise ValueError("it is cut off")
    return data


def _array(body: memoryview, order: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return an array of real numbers by its name, nothing for others."""
    _, flags, place = _element(body, 0, order)
    _, sides, place = _element(body, place, order)
    _, word, place = _element(body, place, order)
    name = bytes(word).decode("latin-1")
    if len(flags) < 8 or len(sides) % 4 or not 2 <= len(sides) // 4 <= _AXES:
        raise ValueError(f"its array {name!r} has no shape")
    (flag,) = struct.unpack_from(f"{order}I", flags)
    kind = _CLASSES.get(flag & 0xFF)
    if name not in names or kind is None or flag & 0x800:  # of cells, say, or complex
        return {}
    stored, content, _ = _element(body, place, order)
    if stored not in _TYPES:
        raise ValueError(f"its array {name!r} is stored as nobody knows")
    shape = np.frombuffer(sides, f"{order}i4").tolist()
    dtype = np.dtype(order + _TYPES[stored])
    if min(shape) < 0 or math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"its array {name!r} has another number of values than its shape")
    with np.errstate(invalid="ignore"):
        values = np.frombuffer(content, dtype).astype(kind)
    return {name: values.reshape(shape, order="F")}


def _digits(path: Path, labels: np.ndarray) -> np.ndarray:
    if not np.issubdtype(labels.dtype, np.number):
        raise UserError(f"{path}: y holds {labels.dtype}, not numbers; download it again.")
    wrong = np.flatnonzero(~np.isin(labels, np.arange(1, 11)))
    if wrong.size:
        raise UserError(
            f"{path}, image {wrong[0]}: y is {labels[wrong[0]]}, but labels are 1 to 10 (10 for the digit 0); "
            "download it again."
        )
    return labels.astype(np.int64) % 10
