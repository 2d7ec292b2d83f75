"""Decoded images kept in a folder of the user's choice, so that decoding is paid for once; they are mapped into memory.

Pixels lie in images-KEY.npy, and beside them images-KEY.json says how the pixels are spread: what is asked of them at
every start is read there, and the pixels themselves only where somebody looks at them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.images import Images, statistics
from halfmoon.data.readers.whole_files import mapped, replacing
from halfmoon.storage import atomic_io

Decoded = tuple[Images, tuple[str, ...] | None]
Reader = Callable[[Path | None], Decoded]
"""Given a file that pixels are to go through, or None: into memory."""

# Part of every key: raise it when a reader starts to give other pixels.
READER = 2


def keep(folder: Path | None, files: Sequence[Path], read: Reader, form: str = "") -> Decoded:
    """Return what `read` gives for `files`, from `folder` where it was kept before, and keep it there.

    The key is made of the files' paths, sizes and times of change, and of `form`, which tells apart readers that
    give other pixels for the same files. A kept file that is damaged is read anew
    and replaced. With no folder, only `read` is called. Raise UserError where the folder cannot be written.
    """
    if folder is None:
        return read(None)
    path = folder / f"images-{key(files, form)}.npy"
    kept = _kept(path)
    if kept is not None:
        return kept
    partial = path.with_name(f".{path.name}-{os.getpid()}.part")
    try:
        images, names = read(partial)
        spread = statistics(images.images)
        facts = {"names": names, "statistics": spread, "bytes": partial.stat().st_size}
        with replacing(path.with_suffix(".labels.npy")) as file:
            np.save(file, images.labels)
        atomic_io.replace(path.with_suffix(".json"), (json.dumps(facts) + "\n").encode())
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{folder}: decoded images cannot be kept there ({error}); choose another folder.") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    found = _kept(path)
    return found if found is not None else (images, names)


def _kept(path: Path) -> Decoded | None:
    """Return what was kept, None where it is not whole."""
    facts: Any = atomic_io.read_json(path.with_suffix(".json"))
    try:
        if path.stat().st_size != facts["bytes"]:
            return None
        mean, std = (tuple(float(value) for value in each) for each in facts["statistics"])
        names = None if facts["names"] is None else tuple(str(name) for name in facts["names"])
        labels = np.load(path.with_suffix(".labels.npy"), allow_pickle=False)
        return Images(mapped(path), labels, (mean, std)), names
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


def key(files: Sequence[Path], form: str = "") -> str:
    """Return 16 hexadecimal digits that change with `form` and the path, size or time of change of any file."""
    digest = hashlib.sha256(f"{READER}{form}".encode())
    for path in files:
        facts = path.stat()
        digest.update(f"\0{os.path.abspath(path)}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
