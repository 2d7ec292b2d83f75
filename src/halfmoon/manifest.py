"""Which file of a folder held which tree at a commit: one line a change in `manifest.jsonl`, only ever appended to.

The first bytes of the manifest, as many as a commit's `Mark` says, tell what there was then: the newest line of a
key counts. So an old commit can be read as long as the files that it names are there, and a new one costs no more
than its changes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from halfmoon import disk

MANIFEST = "manifest.jsonl"
# What a store writes beside its manifest: nothing else in the folder is ever removed.
_OURS = re.compile(r".+-\d{6,}\.safetensors|.+\.\d+\.spill|\..+" + re.escape(disk.PARTIAL))


class Damaged(Exception):
    """Why what was saved cannot be used, in a few words."""


class Entry(NamedTuple):
    """One tree on disk."""

    file: str  # name in the folder
    sha256: str  # of the file
    size: int  # bytes of the file
    nbytes: int  # bytes of the leaves


class Mark(NamedTuple):
    """Where the manifest ended at a commit."""

    length: int  # bytes
    chain: str  # SHA-256 of the last line after that of the lines before it, and so on

    def after(self, lines: Sequence[bytes]) -> Mark:
        """Return the mark with more lines behind it."""
        chain = self.chain
        for line in lines:
            chain = disk.digest(chain.encode() + line)
        return Mark(self.length + sum(map(len, lines)), chain)


START = Mark(0, "")
"""The mark of a folder that holds nothing."""


class Contents(NamedTuple):
    """What a folder held at a commit."""

    folder: Path
    mark: Mark
    version: int  # of the last commit that changed anything; -1 where there was none
    entries: dict[str, Entry]
    replaced: list[tuple[int, str]]  # (version of the commit that replaced or discarded it, file)


def line(version: int, key: str, entry: Entry | None) -> bytes:
    """Return the line that says where a key's tree is from this version on; None says that it was discarded."""
    return disk.render({"version": version, "key": key, **(entry._asdict() if entry else {"file": None})})


def append(folder: Path, mark: Mark, lines: Sequence[bytes]) -> Mark:
    """Bring lines to the disk behind those of a mark, and return the new mark. Raises OSError."""
    path = folder / MANIFEST
    disk.cut(path, mark.length)  # what a commit that failed has left
    disk.append(path, b"".join(lines))
    disk.flushed_length(path)
    disk.sync_folder(folder)
    return mark.after(lines)


def verify(folder: Path, mark: Mark) -> Contents:
    """Return what a folder held at a commit; raise `Damaged` if a bit of it is missing or was changed.

    Every file is read, here and not when its tree is first asked for: only before a run goes on can it fall back to
    the checkpoint before. It takes about as long as the disk takes to read the files once.
    """
    data = (disk.read(folder / MANIFEST) or b"")[: mark.length]
    lines = data.splitlines(keepends=True)
    if START.after(lines) != mark:
        raise Damaged(f"{folder.name}/{MANIFEST} was changed or cut")
    entries: dict[str, Entry] = {}
    replaced: list[tuple[int, str]] = []
    version = -1
    for each in lines:
        version, key, entry = _change(each)
        if key in entries:
            replaced.append((version, entries.pop(key).file))
        if entry is not None:
            entries[key] = entry
    for entry in entries.values():
        _check(folder, entry)
    return Contents(folder, mark, version, entries, replaced)


def sweep(contents: Contents, version: int) -> Contents:
    """Remove what a killed process has left, and return the contents for `Store.restore`.

    Kept are the files of `contents` and those that a commit from `version` on, the oldest that is still wanted, names;
    the manifest is cut back to its mark. Raises OSError.
    """
    replaced = [(when, file) for when, file in contents.replaced if when > version]
    names = {entry.file for entry in contents.entries.values()} | {file for _, file in replaced}
    if contents.folder.is_dir():
        for path in list(contents.folder.iterdir()):
            if _OURS.fullmatch(path.name) and path.name not in names:
                remove(path)
        disk.cut(contents.folder / MANIFEST, contents.mark.length)
    return contents._replace(replaced=replaced)


def remove(path: Path) -> None:
    """Remove a file, if it is there and the system lets it go. Raises OSError."""
    # Windows does not remove a file while it is mapped: a later sweep does.
    with suppress(PermissionError):
        path.unlink(missing_ok=True)


def _change(line: bytes) -> tuple[int, str, Entry | None]:
    """Return what `line` has put into a line; raise `Damaged` for any other."""
    try:
        row = disk.parsed(line)
        version, key = row["version"], row["key"]
        entry = None if row["file"] is None else Entry(*(row[field] for field in Entry._fields))
    except (ValueError, LookupError, TypeError) as error:
        raise Damaged(f"{MANIFEST} has a line that says no change") from error
    kinds = (int, str) if entry is None else (int, str, str, str, int, int)
    if tuple(map(type, (version, key, *(entry or ())))) != kinds:
        raise Damaged(f"{MANIFEST} has a line that says no change")
    # A file lies in the folder: a name that leads out of it is none that was written.
    if entry is not None and (not _OURS.fullmatch(entry.file) or Path(entry.file).name != entry.file):
        raise Damaged(f"{MANIFEST} names a file that is no store's")
    return version, key, entry


def _check(folder: Path, entry: Entry) -> None:
    try:
        with (folder / entry.file).open("rb") as file:
            if os.fstat(file.fileno()).st_size != entry.size:
                raise Damaged(f"{folder.name}/{entry.file} was cut")
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise Damaged(f"checksum of {folder.name}/{entry.file} differs")
    except OSError as error:
        raise Damaged(f"{folder.name}/{entry.file} cannot be read: {disk.reason(error)}") from error
