"""Append-only manifest of a tree store: `manifest.jsonl` records, one change per line, the file of each key.

A `Commit` stores the length of the manifest at that time. Replaying the lines up to this length, where the newest line
of a key wins, gives the store's contents at the commit. An old commit therefore remains readable as long as its files
exist, and a new commit only writes its changes.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from halfmoon.storage import atomic_io

MANIFEST = "manifest.jsonl"
MANIFEST_COPY = "manifest.second"
COPY = ".copy"
"""Suffix of the second copy of a tree's file.

All checkpoints share the file of a client that was not selected in between, and all clients share the manifest. Damage
to one of them would make every checkpoint unusable, so each has a copy.
"""
# Names of the files that a store writes; no other file in the folder is ever removed.
_STORE_FILE = re.compile(r".+-\d{6,}\.safetensors|.+-\d{6,}\.copy|.+\.\d+\.spill|\..+" + re.escape(atomic_io.PARTIAL))


class DamagedFile(Exception):
    """A saved file is damaged; the message is a short clause that states the reason."""


class ManifestEntry(NamedTuple):
    """One tree on disk."""

    file: str  # name in the folder
    sha256: str  # of the file
    size: int  # bytes of the file
    nbytes: int  # bytes of the leaves


class Commit(NamedTuple):
    """The state of the manifest at a commit."""

    length: int  # bytes of the manifest
    chain: str  # hash chain over the lines: SHA-256 of the previous hash followed by the line

    def after(self, lines: Sequence[bytes]) -> "Commit":
        """Return the commit after more lines were appended."""
        chain = self.chain
        for line in lines:
            chain = atomic_io.sha256(chain.encode() + line)
        return Commit(self.length + sum(map(len, lines)), chain)


START = Commit(0, "")
"""The commit of an empty folder."""


class StoreContents(NamedTuple):
    """The contents of a store's folder at a commit."""

    folder: Path
    commit: Commit
    version: int  # of the last commit with a change; -1 without any
    entries: dict[str, ManifestEntry]
    replaced: list[tuple[int, str]]  # (version of the commit that replaced or discarded it, file)
    repaired: tuple[str, ...] = ()  # damaged files that were restored from their second copy


def format_line(version: int, key: str, entry: ManifestEntry | None) -> bytes:
    """Format the manifest line of a key's new file; `entry` None records that the tree was discarded."""
    return atomic_io.json_line({"version": version, "key": key, **(entry._asdict() if entry else {"file": None})})


def append(folder: Path, commit: Commit, lines: Sequence[bytes]) -> Commit:
    """Append lines to the manifest and its copy, and flush both to disk.

    Args:
        folder: the store's folder.
        commit: the last commit; bytes after it are removed.
        lines: the new lines, from `format_line`.

    Returns:
        The new commit.

    Raises:
        OSError: if the disk refuses.
    """
    for path in (folder / MANIFEST_COPY, folder / MANIFEST):
        atomic_io.truncate(path, commit.length)  # remove the lines of a failed commit
        atomic_io.append(path, b"".join(lines))
        atomic_io.flush_and_measure(path)
    atomic_io.sync_folder(folder)
    return commit.after(lines)


def verify(folder: Path, commit: Commit) -> StoreContents:
    """Verify all files of a commit of the client memory, and repair damaged ones from their copies.

    The manifest is a log: each line has the new file of a client's key, and later lines of a key replace earlier ones.
    All files are read now rather than at first use, because only now can the caller fall back to an older checkpoint.

    Args:
        folder: the folder of the client memory.
        commit: the length and hash chain of the manifest at the checkpoint, which identify a prefix of the log.

    Returns:
        The files by key, those that were replaced, and the names of repaired ones.

    Raises:
        DamagedFile: if a file and its copy are missing or damaged.
    """
    repaired: list[str] = []
    lines = _read_lines(folder / MANIFEST, commit)
    if lines is None:
        lines = _read_lines(folder / MANIFEST_COPY, commit)
        if lines is None:
            raise DamagedFile(f"{folder.name}/{MANIFEST} was changed or cut")
        _repair(folder / MANIFEST, b"".join(lines))
        repaired.append(MANIFEST)
    if _read_lines(folder / MANIFEST_COPY, commit) is None:  # only the copy is damaged
        _repair(folder / MANIFEST_COPY, b"".join(lines))
    # Replay the manifest: the last line of a key has its current file, or none (entry None) if its tree was discarded.
    entries: dict[str, ManifestEntry] = {}
    replaced: list[tuple[int, str]] = []
    version = -1
    for line in lines:
        version, key, entry = _parse_line(line)
        if key in entries:
            replaced.append((version, entries.pop(key).file))
        if entry is not None:
            entries[key] = entry
    for entry in entries.values():
        if _check_or_repair(folder, entry):
            repaired.append(entry.file)
    return StoreContents(folder, commit, version, entries, replaced, tuple(repaired))


def _read_lines(path: Path, commit: Commit) -> list[bytes] | None:
    """Read the lines of a manifest up to a commit; None if the file is missing, too short or was changed."""
    try:
        lines = (atomic_io.read(path) or b"")[: commit.length].splitlines(keepends=True)
    except OSError:
        return None
    return lines if START.after(lines) == commit else None


def _repair(path: Path, data: bytes) -> None:
    """Rewrite a damaged file; ignore a failing disk, because the good copy still exists."""
    with suppress(OSError):
        if path.is_dir():
            return
        if data or path.exists():
            atomic_io.write_atomically(path, data)


def remove_unreferenced(contents: StoreContents, version: int) -> StoreContents:
    """Remove files of the client memory that no needed commit references, for example those of a killed process.

    A commit of a checkpoint has the checkpoint's round as its version.

    Args:
        contents: the contents to restore, from `verify`; the manifest (the log of files) is truncated to their commit,
            because a killed process may have appended lines.
        version: the oldest commit that must stay readable.

    Returns:
        The contents for `TreeStore.restore`.

    Raises:
        OSError: if the folder cannot be changed.
    """
    # Commit `version` still needs the files that were replaced after it.
    replaced = [(replaced_at, file) for replaced_at, file in contents.replaced if replaced_at > version]
    needed_files = {entry.file for entry in contents.entries.values()} | {file for _, file in replaced}
    needed_files |= {copy_of(file) for file in needed_files}
    if contents.folder.is_dir():
        for path in list(contents.folder.iterdir()):
            if _STORE_FILE.fullmatch(path.name) and path.name not in needed_files:
                remove(path)
        for name in (MANIFEST, MANIFEST_COPY):
            atomic_io.truncate(contents.folder / name, contents.commit.length)
    return contents._replace(replaced=replaced)


def remove(path: Path) -> None:
    """Remove a file and its copy if they exist and are not mapped. Raises OSError."""
    # Windows refuses to remove a mapped file; `remove_unreferenced` removes it after a restart.
    for file in (path, path.with_name(copy_of(path.name))):
        with suppress(PermissionError):
            file.unlink(missing_ok=True)


def write_second_copy(folder: Path, file: str) -> None:
    """Copy a flushed file of a tree to `copy_of(file)`, from which `verify` repairs it if it is damaged later.

    The copy itself is not flushed to disk, because a commit is valid without it.
    """
    with suppress(OSError):
        shutil.copyfile(folder / file, folder / copy_of(file))


def copy_of(file: str) -> str:
    """Return the name of the second copy of a tree's file."""
    return f"{file.removesuffix('.safetensors')}{COPY}"


def _parse_line(line: bytes) -> tuple[int, str, ManifestEntry | None]:
    """Parse a line of the manifest, which `format_line` wrote: one change of one tree.

    Returns:
        The version of the commit, the key of the tree, and the new file of the tree; None for the file if the commit
        removed the tree from the store.

    Raises:
        DamagedFile: the line has another form, or names a file that no store writes.
    """
    try:
        row = atomic_io.parse_json(line)
        version = row["version"]
        key = row["key"]
        entry = None if row["file"] is None else ManifestEntry(*(row[field] for field in ManifestEntry._fields))
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedFile(f"{MANIFEST} has an invalid line") from error
    # `type` and not `isinstance`: JSON's true would pass as an integer.
    if type(version) is not int or type(key) is not str:
        raise DamagedFile(f"{MANIFEST} has an invalid line")
    if entry is None:
        return version, key, None
    if tuple(map(type, entry)) != (str, str, int, int):
        raise DamagedFile(f"{MANIFEST} has an invalid line")
    # Reject a name with a path, which could point outside the folder.
    if not _STORE_FILE.fullmatch(entry.file) or Path(entry.file).name != entry.file:
        raise DamagedFile(f"{MANIFEST} names a file that no store writes")
    return version, key, entry


def _check_or_repair(folder: Path, entry: ManifestEntry) -> bool:
    """Check a tree's file, and repair it from its copy if necessary.

    Returns:
        Whether the file was repaired.

    Raises:
        DamagedFile: if both the file and its copy are damaged.
    """
    copy = folder / copy_of(entry.file)
    try:
        _check(folder, entry.file, entry)
    except DamagedFile as damage:
        try:
            _check(folder, copy.name, entry)
        except DamagedFile:
            raise damage from None
        _repair(folder / entry.file, copy.read_bytes())
        _check(folder, entry.file, entry)
        return True
    with suppress(OSError):
        if not copy.exists() or copy.stat().st_size != entry.size:  # the process was killed before it wrote the copy
            shutil.copyfile(folder / entry.file, copy)
    return False


def _check(folder: Path, name: str, entry: ManifestEntry) -> None:
    """Raise `DamagedFile` if a file differs from its entry in size or checksum, or cannot be read.

    Args:
        folder: the folder of the store.
        name: the name of the file: that in the entry, or of its second copy.
        entry: the entry of the manifest.
    """
    try:
        with (folder / name).open("rb") as file:
            if os.fstat(file.fileno()).st_size != entry.size:
                raise DamagedFile(f"{folder.name}/{name} was cut")
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise DamagedFile(f"checksum of {folder.name}/{name} differs")
    except OSError as error:
        raise DamagedFile(f"{folder.name}/{name} cannot be read: {atomic_io.error_reason(error)}") from error
