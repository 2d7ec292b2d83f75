"""The files of a `halfmoon.storage.state_store.Store`: one a tree, mapped into memory when it is read."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from safetensors import SafetensorError

from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io, manifest, serialization
from halfmoon.storage.manifest import ManifestEntry


class TreeFiles:
    """Files in `folder`, or in a temporary one, which goes with this object, as long as there is none."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._temporary: Path | None = None
        self._spills = 0

    def place(self) -> Path:
        """Return where the files are now."""
        if self.folder is not None:
            return self.folder
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="halfmoon-"))
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        return self._temporary

    def read(self, key: str, entry: ManifestEntry) -> Tree:
        """Return the tree in a file, mapped into memory; raise UserError where it cannot be read."""
        path = self.place() / entry.file
        try:
            return serialization.map_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path}: the state of {key!r} cannot be read ({error}); go on from the last checkpoint."
            ) from error

    def remove(self, entry: ManifestEntry) -> None:
        """Remove a file and its copy; raise OSError."""
        manifest.remove(self.place() / entry.file)

    def settle(self, folder: Path, entries: Iterable[ManifestEntry]) -> None:
        """Keep the files in `folder` from now on; these move there from the temporary one. Raises OSError.

        Raises ValueError where another folder was given before.
        """
        if self.folder is not None:
            if self.folder != folder:
                raise ValueError(f"the store keeps its files in {self.folder}, not in {folder}")
            return
        for entry in entries:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(self.place() / entry.file, folder / entry.file)
        self.folder = folder

    def spill(self, key: str, value: Tree) -> ManifestEntry:
        """Write a tree to a file that the next commit may take over; a crash before it loses nothing that counts.

        Raises UserError where it cannot be written.
        """
        # A number each: the file before may still be mapped by who has read it.
        self._spills += 1
        path = self.place() / f"{_named(key)}.{self._spills}.spill"
        data = serialization.pack_file(value)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_io.opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
                atomic_io.write_all(handle, data)
        except OSError as error:
            with suppress(OSError):
                manifest.remove(path)
            raise UserError(
                f"{path.parent}: the state of {key!r} ({len(data)} bytes) cannot be written "
                f"({atomic_io.reason(error)}); free some space and go on from the last checkpoint."
            ) from error
        return ManifestEntry(path.name, atomic_io.digest(data), len(data), tree.nbytes(value))

    def bring(self, key: str, version: int, spilled: ManifestEntry | None, value: Tree | None) -> ManifestEntry:
        """Return the file of a tree in a commit, flushed: the one it was spilled to, or a new one with `value`."""
        name = f"{_named(key)}-{version:06d}.safetensors"
        path = self.place() / name
        if spilled is not None:
            _rename_flushed(self.place() / spilled.file, path)
            return spilled._replace(file=name)
        assert value is not None, "it is in memory or in a file"
        data = serialization.pack_file(value)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{name}{atomic_io.PARTIAL}")
        try:
            with atomic_io.opened(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
                atomic_io.write_all(handle, data)
            _rename_flushed(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        return ManifestEntry(name, atomic_io.digest(data), len(data), tree.nbytes(value))


def _named(key: str) -> str:
    return quote(key, safe="")


def _rename_flushed(old: Path, new: Path) -> None:
    with atomic_io.opened(old, os.O_RDWR) as handle:
        os.fsync(handle)
    os.replace(old, new)
