"""Answers of sites wait on the disk for the rest of their cohort, so that memory does not grow with it.

The files are the bytes as they came. No server needs them again: the next one removes those of a killed one.
"""

import os
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io
from halfmoon.storage.serialization import map_tree, unpack

SPOOL = "spool"
"""The subfolder of a run for answers that wait."""


class Spooled:
    """Bytes in a file, which is removed with the last reference to this."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, _remove, path)

    def read(self) -> bytes:
        """Return the bytes; raise UserError where they are gone."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{self.path}: what a site sent cannot be read again ({atomic_io.reason(error)})."
            ) from error


class Spool:
    """A folder of files that belong to nobody else; what the disk does not take stays in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self, data: bytes) -> bytes | Spooled:
        """Write bytes down, for this user alone to read, and return where they lie; or the bytes, on a full disk."""
        self._count += 1
        path = self.folder / f"{self._count}.safetensors"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with atomic_io.opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) as handle:
                atomic_io.write_all(handle, data)
        except OSError:
            _remove(path)
            return data
        return Spooled(path)


def content(data: bytes | Spooled) -> bytes:
    return data.read() if isinstance(data, Spooled) else data


def part(data: bytes | Spooled, shape: dict[str, Any], name: str) -> Tree:
    """Return the tree `name` of the message in `data`, whose trees have a known `shape`.

    From a file it is mapped into memory, not read.
    """
    branch = {name: shape.get(name, {})}
    return (map_tree(data.path, branch) if isinstance(data, Spooled) else unpack(data, branch))[name]


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
