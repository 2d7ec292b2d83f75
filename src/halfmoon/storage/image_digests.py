"""Keyed digests of the images that a model was trained on, by which later commands recognize them.

The file is next to the model and is never sent. Its random key makes digests of two runs incomparable.
"""

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfmoon.storage import atomic_io

DIGESTS = "training-images.digests"
"""File of a key and, after it, the digest of each training image, `DIGEST_BYTES` each."""

DIGEST_BYTES = 16
SEARCHED_PARENTS = 3
"""Folders in which the file is searched: that of the model's file and those above it."""


@dataclass(frozen=True)
class TrainingDigests:
    """The digests of a model's training images.

    Attributes:
        key: the random key of the hash function, which is needed to compute the digest of another image.
        digests: the digest of each image.
    """

    key: bytes
    digests: frozenset[bytes]

    def count(self, images: Iterable[np.ndarray]) -> int:
        """Count the images, each uint8 (H, W, C) in the size that the model reads, that were training images."""
        return sum(compute_digest(self.key, image) in self.digests for image in images)


def compute_digest(key: bytes, image: np.ndarray) -> bytes:
    """Compute the keyed digest of an image, uint8 (H, W, C)."""
    digest = hashlib.blake2b(repr(image.shape).encode(), key=key, digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(image).data)
    return digest.digest()


def write_digests(folder: Path, images: Iterable[np.ndarray], replace: bool = False) -> None:
    """Write a keyed hash of each training image into a folder, by which a later evaluation recognizes training images.

    Args:
        folder: the folder, which is created if it is missing.
        images: the images.
        replace: True to replace an existing file; False to leave it unchanged.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / DIGESTS
    if path.exists() and not replace:
        return
    key = secrets.token_bytes(DIGEST_BYTES)
    # Sorted, so that the order of the images cannot be learned from the file.
    digests = sorted(compute_digest(key, image) for image in images)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_io.write_atomically(path, key + b"".join(digests))


def load_digests(model_file: Path | None) -> TrainingDigests | None:
    """Load the digests of a model's training images, from the folder of the model's file or one of those above it.

    Returns:
        The digests; None without a model file, or if none of the `SEARCHED_PARENTS` folders has a file of digests.
    """
    if model_file is None:
        return None
    for folder in list(model_file.absolute().parents)[:SEARCHED_PARENTS]:
        data = atomic_io.read(folder / DIGESTS)
        if data:
            starts = range(DIGEST_BYTES, len(data), DIGEST_BYTES)
            return TrainingDigests(
                key=data[:DIGEST_BYTES], digests=frozenset(data[start : start + DIGEST_BYTES] for start in starts)
            )
    return None
