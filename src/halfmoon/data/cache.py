"""Decoded images kept in a folder of the user's choice, so that decoding is paid for once."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from halfmoon.data.files import replacing
from halfmoon.data.images import Images
from halfmoon.errors import UserError

Decoded = tuple[Images, tuple[str, ...] | None]

# Part of every key: raise it when a reader starts to give other pixels.
READER = 1


def keep(folder: Path | None, files: Sequence[Path], read: Callable[[], Decoded], form: str = "") -> Decoded:
    """Return what `read` gives for `files`, from `folder` where it was kept before, and keep it there.

    The key is made of the files' paths, sizes and times of change, and of `form`, which tells apart readers that
    give other pixels for the same files. A kept file that is damaged is read anew
    and replaced. With no folder, only `read` is called. Raise UserError where the folder cannot be written.
    """
    if folder is None:
        return read()
    path = folder / f"images-{key(files, form)}.npz"
    try:
        with np.load(path, allow_pickle=False) as kept:
            names = tuple(str(name) for name in kept["names"])
            return Images(kept["images"], kept["labels"]), names or None
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        images, names = read()
    try:
        with replacing(path) as file:
            np.savez(file, images=images.images, labels=images.labels, names=np.array(names or (), dtype=np.str_))
    except OSError as error:
        raise UserError(f"{folder}: decoded images cannot be kept there ({error}); choose another folder.") from error
    return images, names


def key(files: Sequence[Path], form: str = "") -> str:
    """Return 16 hexadecimal digits that change with `form` and the path, size or time of change of any file."""
    digest = hashlib.sha256(f"{READER}{form}".encode())
    for path in files:
        facts = path.stat()
        digest.update(f"\0{path.resolve()}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
