"""Trees by key, of which only so much is in memory: what the clients of a federation keep between their rounds.

A thousand clients that keep a model of 26 MB each are 26 GB. A store holds the trees that were used last, up to a
cap, and writes the others to files, which are mapped into memory when they are read.

A `commit` brings what has changed since the last one to the disk, for a checkpoint: one file a tree, named after its
key and the commit and never changed again, and one line in the manifest (`halfmoon.storage.manifest`). So a commit
costs what the clients of its rounds cost, however many there are, and the commit before stays readable until `prune`
removes the files that only it names.
"""

import os
import shutil
import tempfile
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch
from safetensors import SafetensorError

from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io, manifest, serialization
from halfmoon.storage.manifest import START, Commit, ManifestEntry, StoreContents

CAP = 2**30
"""Bytes in memory where nobody asks for another number: 1 GiB."""


class TreeStore:
    """Trees by key ("17", "server", "helpers/17"), on the CPU, at most `cap` bytes of them in memory."""

    def __init__(self, folder: Path | None = None, cap: int = CAP) -> None:
        """Make an empty store whose files are kept in `folder`, made at the first of them.

        Without a folder they go to a temporary one that is removed with the store. Raises UserError for a cap below 0.
        """
        if cap < 0:
            raise UserError(f"a store cannot hold {cap} bytes in memory; give 0 (all on disk) or more.")
        self.disk, self.cap = TreeFiles(folder), cap
        self.mark = START
        self._trees: OrderedDict[str, Tree] = OrderedDict()  # in memory, the least recently used first
        self._sizes: dict[str, int] = {}  # bytes of every entry
        self._bytes = Counter[str]()  # of all, and of those with keys of one prefix
        self._files: dict[str, ManifestEntry] = {}  # where an entry's present content is on disk
        self._last_commit: dict[str, ManifestEntry] = {}  # as of the last commit
        self._changed: set[str] = set()  # since then
        self._replaced: list[tuple[int, str]] = []
        self._version = -1
        self.resident = 0  # bytes in memory

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self._sizes if key.startswith(prefix))

    def total_bytes(self, prefix: str = "") -> int:
        """Return the bytes of the entries, in memory or not, whose keys begin with `prefix`: "", or all up to a "/".

        They are counted when entries come and go, so that asking costs the same among any number of them.
        """
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"bytes are counted by the part of a key up to its first '/', not by {prefix!r}")
        return self._bytes[prefix]

    def size(self, key: str) -> int:
        return self._sizes.get(key, 0)

    def _count(self, key: str, nbytes: int) -> None:
        for prefix in {"", key[: key.find("/") + 1]}:
            self._bytes[prefix] += nbytes

    @property
    def changed(self) -> bool:
        return bool(self._changed)

    def get(self, key: str) -> Tree | None:
        """Return a tree on the CPU, None where there is none; its leaves may not be changed in place.

        One that is not in memory is mapped from its file and stays there: reading does not push others out. Raises
        UserError where the file cannot be read.
        """
        if key in self._trees:
            self._trees.move_to_end(key)
            return self._trees[key]
        if key not in self._files:
            return None
        return self.disk.read(key, self._files[key])

    def put(self, key: str, value: Tree) -> None:
        """Keep a copy of a tree under a key, in the place of the one before; one larger than the cap goes to disk.

        Raises UserError where what has to make room cannot be written.
        """
        self._forget(key)
        nbytes = tree.nbytes(value)
        if nbytes > self.cap:
            self._files[key] = self.disk.spill(key, value)
        else:
            while self.resident + nbytes > self.cap:
                self._evict(next(iter(self._trees)))
            self._trees[key] = tree.map(lambda leaf: leaf.detach().to("cpu", copy=True), value)
            self.resident += nbytes
        self._sizes[key] = nbytes
        self._count(key, nbytes)
        self._changed.add(key)

    def discard(self, key: str) -> None:
        """Take a tree out, if it is there."""
        self._forget(key)
        if key in self._last_commit:
            self._changed.add(key)
        else:
            self._changed.discard(key)

    def commit(self, version: int) -> Commit:
        """Bring what has changed since the last commit to the disk, flushed, and return the mark to find it by.

        `version` is larger than that of every commit before (ValueError) and part of the files' names. Nothing is
        written where nothing has changed. Raises ValueError for a store without a folder, OSError as the system does.
        """
        if not self._changed:
            return self.mark
        folder = self.disk.folder
        if folder is None:
            raise ValueError("a store without a folder cannot be committed: settle it first")
        if version <= self._version:
            raise ValueError(f"version {version} cannot be committed after version {self._version}")
        keys = sorted(self._changed)
        for key in keys:
            if key in self._sizes:
                self._files[key] = manifest.write_copy(
                    self.disk.place(), self.disk.bring(key, version, self._files.get(key), self._trees.get(key))
                )
        lines = [manifest.format_line(version, key, self._files.get(key)) for key in keys]
        folder.mkdir(parents=True, exist_ok=True)
        self.mark = manifest.append(folder, self.mark, lines)
        self._replaced += [(version, self._last_commit.pop(key).file) for key in keys if key in self._last_commit]
        self._last_commit.update({key: self._files[key] for key in keys if key in self._files})
        self._changed, self._version = set(), version
        return self.mark

    def prune(self, version: int) -> None:
        """Remove the files that the commit `version` and those after it do not name. Raises OSError."""
        for when, file in self._replaced:
            if when <= version:
                manifest.remove(self.disk.place() / file)
        self._replaced = [(when, file) for when, file in self._replaced if when > version]

    def settle(self, folder: Path) -> None:
        """Keep the files in `folder` from now on; those in a temporary folder move. Raises OSError.

        Raises ValueError for a store that has another folder.
        """
        self.disk.settle(folder, self._files.values())

    def restore(self, contents: StoreContents) -> None:
        """Hold what `manifest.sweep` returned, in the place of everything the store held; no tree is read before `get`.

        Raises ValueError for a store that has another folder.
        """
        for key in list(self._sizes):
            self._forget(key)
        self.settle(contents.folder)
        self.mark, self._version = contents.mark, contents.version
        self._files, self._last_commit = dict(contents.entries), dict(contents.entries)
        self._sizes = {key: entry.nbytes for key, entry in contents.entries.items()}
        self._bytes.clear()
        for key, nbytes in self._sizes.items():
            self._count(key, nbytes)
        self._changed, self._replaced = set(), list(contents.replaced)

    def _forget(self, key: str) -> None:
        """Drop an entry from memory, and its file if no commit names it."""
        if key not in self._sizes:
            return
        if self._trees.pop(key, None) is not None:
            self.resident -= self._sizes[key]
        entry = self._files.pop(key, None)
        if entry is not None and entry != self._last_commit.get(key):
            self.disk.remove(entry)
        self._count(key, -self._sizes.pop(key))

    def _evict(self, key: str) -> None:
        if key not in self._files:
            self._files[key] = self.disk.spill(key, self._trees[key])
        del self._trees[key]
        self.resident -= self._sizes[key]


@dataclass(frozen=True)
class StateView:
    """A `halfmoon.api.types.StateStore`: the trees of a store with keys of one prefix, given out on a device."""

    store: TreeStore
    prefix: str
    device: torch.device

    def get(self, key: str) -> Tree | None:
        """Return a copy of a tree on the device, None where there is none; raises UserError as `TreeStore.get`.

        A copy even on the CPU: a leaf mapped from a file starts anywhere in memory, and a sum may depend on that.
        """
        state = self.store.get(self.prefix + key)
        return None if state is None else tree.map(lambda leaf: leaf.to(self.device, copy=True), state)

    def put(self, key: str, tree: Tree) -> None:
        self.store.put(self.prefix + key, tree)

    def keys(self) -> list[str]:
        return [key.removeprefix(self.prefix) for key in self.store.keys(self.prefix)]


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
            with atomic_io.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
                atomic_io.write_all(handle, data)
        except OSError as error:
            with suppress(OSError):
                manifest.remove(path)
            raise UserError(
                f"{path.parent}: the state of {key!r} ({len(data)} bytes) cannot be written "
                f"({atomic_io.error_reason(error)}); free some space and go on from the last checkpoint."
            ) from error
        return ManifestEntry(path.name, atomic_io.sha256(data), len(data), tree.nbytes(value))

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
            with atomic_io.open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as handle:
                atomic_io.write_all(handle, data)
            _rename_flushed(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        return ManifestEntry(name, atomic_io.sha256(data), len(data), tree.nbytes(value))


def _named(key: str) -> str:
    return quote(key, safe="")


def _rename_flushed(old: Path, new: Path) -> None:
    with atomic_io.open_file(old, os.O_RDWR) as handle:
        os.fsync(handle)
    os.replace(old, new)
