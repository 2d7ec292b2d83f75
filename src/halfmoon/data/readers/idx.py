"""Read the idx format of MNIST and Fashion-MNIST: a big-endian header, then raw bytes, usually gzipped.

The format is described on the page of the MNIST database (LeCun, Cortes, Burges): two zero bytes, 0x08 for
unsigned bytes, the number of axes, then the length of each axis as a 32-bit number.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.images import Images

MAX_UNPACKED_BYTES = 2**30
"""Largest size of a decompressed file, because gzip data can be a thousand times smaller. EMNIST has 0.64e9 bytes."""

_CHUNK_BYTES = 2**20


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an idx file (the format of MNIST) of uint8.

    Args:
        path: The file; it is decompressed if its suffix is .gz.
        axes: The expected number of axes of the array.

    Returns:
        uint8, of the shape in the file's header. It cannot be written to.

    Raises:
        UserError: If the file is damaged, or has another type or number of axes.
    """
    try:
        data = _read_gzip(path) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path}: not a complete gzip file ({error}); download it again.") from error
    # The header: two zero bytes, the type (8 is uint8), the number of axes, and 4 bytes for the length of each axis.
    magic = bytes((0, 0, 8, axes))
    header_bytes = len(magic) + 4 * axes
    if len(data) < header_bytes or data[:4] != magic:
        raise UserError(
            f"{path}: not an idx file of bytes with {axes} axes (it starts with "
            f"{data[:4].hex() or 'nothing'}, not {magic.hex()}); download it again."
        )
    shape = struct.unpack(f">{axes}I", data[4:header_bytes])
    size = math.prod(shape)  # Python numbers do not overflow, unlike NumPy's, for any header
    if len(data) - header_bytes != size:
        raise UserError(
            f"{path}: the header says {' x '.join(map(str, shape))} = {size} bytes, "
            f"but {len(data) - header_bytes} follow; download it again."
        )
    if not size:  # NumPy refuses an empty array whose other sides are too long
        return np.zeros((0,) * axes, np.uint8)
    return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)


def _read_gzip(path: Path) -> bytes:
    """Decompress a gzip file; raise UserError as soon as it exceeds `MAX_UNPACKED_BYTES`."""
    chunks = []
    size = 0
    with gzip.open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            chunks.append(chunk)
            size += len(chunk)
            if size > MAX_UNPACKED_BYTES:
                raise UserError(
                    f"{path}: it unpacks to over {MAX_UNPACKED_BYTES:,} bytes; unpack it yourself if it is no fake."
                )
    return b"".join(chunks)


def read_pair(folder: Path, prefix: str) -> Images:
    """Read the images and labels of one subset of an MNIST-like data set.

    Args:
        folder: The folder with the idx files.
        prefix: The subset: "train", or "t10k" for the test images.

    Raises:
        UserError: If a file is missing or damaged, or their lengths differ.
    """
    images_path = find_file(folder, f"{prefix}-images-idx3-ubyte")
    labels_path = find_file(folder, f"{prefix}-labels-idx1-ubyte")
    images = read_idx(images_path, axes=3)
    labels = read_idx(labels_path, axes=1)
    if len(images) != len(labels):
        raise UserError(
            f"{labels_path}: it has {len(labels)} labels, but {images_path.name} has {len(images)} images; "
            "download both again."
        )
    if not images.size:
        raise UserError(f"{images_path}: there are no images in it; download it again.")
    return Images(np.ascontiguousarray(images)[..., None], labels.astype(np.int64))


def has_files(folder: Path) -> bool:
    """Check whether a folder has idx files."""
    return any(folder.glob("train-*-idx?-ubyte*"))


def find_file(folder: Path, stem: str) -> Path:
    """Find the file `stem`.gz or `stem` in `folder`; raise UserError if neither exists."""
    for name in (f"{stem}.gz", stem):
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder}: {stem}.gz is missing; the set needs its four official idx files.")
