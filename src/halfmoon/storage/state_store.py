"""Store of client memory: trees by key, with a cap on the bytes in memory; the rest is in files.

A thousand clients with a model of 26 MB each need 26 GB. A store has the most recently used trees in memory, up to a
cap, and writes older ones to files, which are mapped into memory when they are read.

`commit` writes the changes since the last commit to disk, for a checkpoint: one file per tree, named after its key and
the commit and never modified afterwards, and one line in the manifest (`halfmoon.storage.manifest`). The cost of a
commit depends on the clients that changed, not on their total number. The previous commit remains readable until `prune`
removes its files.
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

DEFAULT_MEMORY_BYTES = 2**30
"""Default limit of the bytes in memory: 1 GiB."""


class TreeStore:
    """Trees by key ("17", "server", "helpers/17"), on the CPU, at most `cap` bytes of them in memory."""

    def __init__(self, folder: Path | None = None, cap: int = DEFAULT_MEMORY_BYTES) -> None:
        """Create an empty store of trees by key, such as the models that clients keep between rounds.

        Args:
            folder: folder of the files, created with the first of them. By default a temporary folder, which is
                removed with the store.
            cap: maximum bytes of the trees in memory.

        Raises:
            UserError: if `cap` is below 0.
        """
        if cap < 0:
            raise UserError(f"a store cannot hold {cap} bytes in memory; give 0 (all on disk) or more.")
        self.disk = TreeFiles(folder)
        self.cap = cap
        self.last_commit = START
        self._trees: OrderedDict[str, Tree] = OrderedDict()  # in memory, ordered from the oldest use to the newest
        self._sizes: dict[str, int] = {}  # bytes of every entry, in memory or on disk
        self._bytes = Counter[str]()  # total bytes by prefix of the key ("helpers/" of "helpers/17"); "" for all
        self._files: dict[str, ManifestEntry] = {}  # files of current content
        self._committed_files: dict[str, ManifestEntry] = {}  # files as of the last commit
        self._changed: set[str] = set()  # keys that changed since the last commit
        self._replaced: list[tuple[int, str]] = []  # (version of the commit that replaced it, file), for `prune`
        self._version = -1  # of the last commit with a change; -1 without any
        self.resident = 0  # bytes in memory

    def keys(self, prefix: str = "") -> list[str]:
        """List the keys that begin with `prefix`, sorted."""
        return sorted(key for key in self._sizes if key.startswith(prefix))

    def total_bytes(self, prefix: str = "") -> int:
        """Return the bytes of all entries whose keys begin with `prefix`, in memory or on disk.

        The sums are updated on every change, so that a query takes constant time.

        Args:
            prefix: "" for all entries, or the part of a key up to and including its first "/".
        """
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"bytes are counted by the part of a key up to its first '/', not by {prefix!r}")
        return self._bytes[prefix]

    def size(self, key: str) -> int:
        """Return the bytes of a tree, 0 if the key is unknown."""
        return self._sizes.get(key, 0)

    def _add_to_totals(self, key: str, nbytes: int) -> None:
        """Add bytes (negative to subtract) to the totals of all keys and of the key's first part."""
        for prefix in {"", key[: key.find("/") + 1]}:
            self._bytes[prefix] += nbytes

    @property
    def changed(self) -> bool:
        """Whether trees were put or discarded since the last commit."""
        return bool(self._changed)

    def get(self, key: str) -> Tree | None:
        """Return the tree of a key on the CPU; None if the key is unknown. Do not change its leaves in place.

        They may be those that the store has in memory. A tree on disk is mapped from its file and remains there, so that
        reading evicts no other tree.

        Raises:
            UserError: if the file cannot be read.
        """
        if key in self._trees:
            self._trees.move_to_end(key)
            return self._trees[key]
        if key not in self._files:
            return None
        return self.disk.read(key, self._files[key])

    def put(self, key: str, value: Tree) -> None:
        """Store a copy of a tree under a key, in place of the previous one.

        Trees that were not used for the longest time are written to disk if memory exceeds the cap, as is a tree that is
        larger than the cap.

        Raises:
            UserError: if a tree that has to leave memory cannot be written.
        """
        self._forget(key)
        nbytes = tree.nbytes(value)
        if nbytes > self.cap:
            self._files[key] = self.disk.spill(key, value)
        else:
            # The first key is the one that was not used for the longest time.
            while self.resident + nbytes > self.cap:
                self._evict(next(iter(self._trees)))
            self._trees[key] = tree.map(lambda leaf: leaf.detach().to("cpu", copy=True), value)
            self.resident += nbytes
        self._sizes[key] = nbytes
        self._add_to_totals(key, nbytes)
        self._changed.add(key)

    def discard(self, key: str) -> None:
        """Remove a tree if it exists."""
        self._forget(key)
        if key in self._committed_files:
            self._changed.add(key)
        else:
            self._changed.discard(key)

    def commit(self, version: int) -> Commit:
        """Write and flush all changes since the last commit; without changes no file is written.

        The files are written before the lines of the manifest that name them, so that a killed process leaves the last
        commit readable, with unused files at most.

        Args:
            version: number of the commit, larger than all before, such as the round; the files' names contain it.

        Returns:
            The commit, from which `manifest.verify` reads the contents back.

        Raises:
            ValueError: if the store has no folder or `version` is too small.
            OSError: if the disk refuses.
        """
        if not self._changed:
            return self.last_commit
        folder = self.disk.folder
        if folder is None:
            raise ValueError("a store without a folder cannot be committed: call `use_folder` first")
        if version <= self._version:
            raise ValueError(f"version {version} cannot be committed after version {self._version}")
        keys = sorted(self._changed)
        for key in keys:
            if key in self._sizes:  # not discarded
                entry = self.disk.write_committed(
                    key, version, spilled=self._files.get(key), value=self._trees.get(key)
                )
                manifest.write_second_copy(folder, entry.file)
                self._files[key] = entry
        # The line of a key without a file records that its tree was discarded.
        lines = [manifest.format_line(version, key, self._files.get(key)) for key in keys]
        folder.mkdir(parents=True, exist_ok=True)
        self.last_commit = manifest.append(folder, self.last_commit, lines)
        # Files that this commit replaces are removed later, when no checkpoint needs the earlier commit.
        for key in keys:
            if key in self._committed_files:
                self._replaced.append((version, self._committed_files.pop(key).file))
            if key in self._files:
                self._committed_files[key] = self._files[key]
        self._changed = set()
        self._version = version
        return self.last_commit

    def prune(self, version: int) -> None:
        """Remove the files that only commits before `version` need. Raises OSError."""
        for replaced_at, file in self._replaced:
            if replaced_at <= version:
                manifest.remove(self.disk.current_folder() / file)
        self._replaced = [(replaced_at, file) for replaced_at, file in self._replaced if replaced_at > version]

    def use_folder(self, folder: Path) -> None:
        """Store the files in `folder` from now on; move those of the temporary folder there.

        Raises:
            ValueError: if the store has another folder already.
            OSError: if a file cannot be moved.
        """
        self.disk.use_folder(folder, self._files.values())

    def restore(self, contents: StoreContents) -> None:
        """Replace the contents of the store with those of a commit; `get` reads the trees later.

        Args:
            contents: the result of `manifest.remove_unreferenced`.

        Raises:
            ValueError: if the store has another folder already.
        """
        for key in list(self._sizes):
            self._forget(key)
        self.use_folder(contents.folder)
        self.last_commit = contents.commit
        self._version = contents.version
        self._files = dict(contents.entries)
        self._committed_files = dict(contents.entries)
        self._sizes = {key: entry.nbytes for key, entry in contents.entries.items()}
        self._bytes.clear()
        for key, nbytes in self._sizes.items():
            self._add_to_totals(key, nbytes)
        self._changed = set()
        self._replaced = list(contents.replaced)

    def _forget(self, key: str) -> None:
        """Remove the tree of a key from memory, and its file unless the last commit still needs it."""
        if key not in self._sizes:
            return
        if self._trees.pop(key, None) is not None:
            self.resident -= self._sizes[key]
        entry = self._files.pop(key, None)
        if entry is not None and entry != self._committed_files.get(key):
            self.disk.remove(entry)
        self._add_to_totals(key, -self._sizes.pop(key))

    def _evict(self, key: str) -> None:
        """Remove a tree from memory; write it to a file first, unless its file is up to date."""
        if key not in self._files:
            self._files[key] = self.disk.spill(key, self._trees[key])
        del self._trees[key]
        self.resident -= self._sizes[key]


@dataclass(frozen=True)
class StateView:
    """A `halfmoon.api.types.StateStore`: the trees of a store with keys of one prefix, copied to a device."""

    store: TreeStore
    prefix: str
    device: torch.device

    def get(self, key: str) -> Tree | None:
        """Return a copy of a tree on the device, None if the key is unknown; raises UserError as `TreeStore.get`.

        The leaves are copied even on the CPU, because the alignment of a mapped leaf may change the bits of a sum.
        """
        state = self.store.get(self.prefix + key)
        return None if state is None else tree.map(lambda leaf: leaf.to(self.device, copy=True), state)

    def put(self, key: str, tree: Tree) -> None:
        self.store.put(self.prefix + key, tree)

    def keys(self) -> list[str]:
        return [key.removeprefix(self.prefix) for key in self.store.keys(self.prefix)]


class TreeFiles:
    """The files of a store, in its folder, or in a temporary one that is removed with this object."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._temporary: Path | None = None
        self._spills = 0

    def current_folder(self) -> Path:
        """Return the current folder of the files; create a temporary one if no folder was given."""
        if self.folder is not None:
            return self.folder
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="halfmoon-"))
            weakref.finalize(self, shutil.rmtree, self._temporary, ignore_errors=True)
        return self._temporary

    def read(self, key: str, entry: ManifestEntry) -> Tree:
        """Map the tree of a file into memory.

        Args:
            key: the key of the tree, for messages.
            entry: the entry of its file in the manifest.

        Raises:
            UserError: the file cannot be read.
        """
        path = self.current_folder() / entry.file
        try:
            return serialization.map_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{path}: the state of {key!r} cannot be read ({error}); go on from the last checkpoint."
            ) from error

    def remove(self, entry: ManifestEntry) -> None:
        manifest.remove(self.current_folder() / entry.file)

    def use_folder(self, folder: Path, entries: Iterable[ManifestEntry]) -> None:
        """Store the files in `folder` from now on, and move these there from the temporary folder.

        Raises:
            ValueError: if another folder was given before.
            OSError: if a file cannot be moved.
        """
        if self.folder is not None:
            if self.folder != folder:
                raise ValueError(f"the store has its files in {self.folder}, not in {folder}")
            return
        for entry in entries:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.move(self.current_folder() / entry.file, folder / entry.file)
        self.folder = folder

    def spill(self, key: str, value: Tree) -> ManifestEntry:
        """Write a tree that does not fit into memory to an unflushed file, which the next commit may rename into place.

        Raises:
            UserError: if it cannot be written.
        """
        # Use a new name each time: a reader may still have the previous file mapped.
        self._spills += 1
        path = self.current_folder() / f"{_quote_key(key)}.{self._spills}.spill"
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

    def write_committed(
        self, key: str, version: int, spilled: ManifestEntry | None, value: Tree | None
    ) -> ManifestEntry:
        """Write the file of a tree for a commit, and flush it to disk.

        Args:
            key: the key of the tree.
            version: the number of the commit, which the file's name contains.
            spilled: the file that has the tree already, which is only renamed; None if the tree is in memory.
            value: the tree in memory, if there is no file.

        Returns:
            The entry of the file for the manifest.
        """
        name = f"{_quote_key(key)}-{version:06d}.safetensors"
        path = self.current_folder() / name
        if spilled is not None:
            _rename_flushed(self.current_folder() / spilled.file, path)
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


def _quote_key(key: str) -> str:
    """Encode a key as a file name: slashes become %2F."""
    return quote(key, safe="")


def _rename_flushed(old: Path, new: Path) -> None:
    """Flush a file to disk and rename it, so that a file under its final name is complete even after a power loss."""
    with atomic_io.open_file(old, os.O_RDWR) as handle:
        os.fsync(handle)
    os.replace(old, new)
