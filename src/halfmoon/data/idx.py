"""The idx format of MNIST and Fashion-MNIST: a big-endian header, then raw bytes, usually gzipped.

The format is described on the page of the MNIST database (LeCun, Cortes, Burges): two zero bytes, 0x08 for
unsigned bytes, the number of axes, then the length of each axis as a 32-bit number.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from halfmoon.data.images import Images
from halfmoon.errors import UserError


def find(folder: Path, stem: str) -> Path | None:
    """Return the file `stem` or `stem`.gz in `folder`, or None."""
    for name in (f"{stem}.gz", stem):
        if (folder / name).is_file():
            return folder / name
    return None


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Return the uint8 array of an idx file with that many axes; raise UserError where the file is damaged."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, OSError, zlib.error) as error:
        raise UserError(f"{path}: not a complete gzip file ({error}); download it again.") from error
    head = 4 + 4 * axes
    magic = bytes((0, 0, 8, axes))
    if len(data) < head or data[:4] != magic:
        raise UserError(
            f"{path}: not an idx file of bytes with {axes} axes (it starts with {data[:4].hex() or 'nothing'}, "
            f"not {magic.hex()}); download it again."
        )
    shape = struct.unpack(f">{axes}I", data[4:head])
    # Python numbers do not overflow, whatever the header claims.
    wanted = 1
    for length in shape:
        wanted *= length
    if len(data) - head != wanted:
        raise UserError(
            f"{path}: the header says {' x '.join(map(str, shape))} = {wanted} bytes, "
            f"but {len(data) - head} follow; download it again."
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def read_pair(folder: Path, prefix: str) -> Images:
    """Return the images and labels of `prefix` (train or t10k) in `folder`; raise UserError for missing or damaged files."""
    paths = [find(folder, f"{prefix}-{stem}") for stem in ("images-idx3-ubyte", "labels-idx1-ubyte")]
    for path, stem in zip(paths, ("images-idx3-ubyte", "labels-idx1-ubyte"), strict=True):
        if path is None:
            raise UserError(
                f"{folder}: {prefix}-{stem}.gz is missing; the set needs its four official idx files."
            )
    images_path, labels_path = paths
    assert images_path is not None and labels_path is not None
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise UserError(
            f"{labels_path}: it has {len(labels)} labels, but {images_path.name} has {len(images)} images; "
            "download both again."
        )
    return Images(images[..., None], labels.astype(np.int64))
