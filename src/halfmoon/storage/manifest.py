"""Which file of a folder held which tree at a commit: one line a change in `manifest.jsonl`, only ever appended to.

The first bytes of the manifest, as many as a commit's `Commit` says, tell what there was then: the newest line of a
key counts. So an old commit can be read as long as the files that it names are there, and a new one costs no more
than its changes.
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

MANIFEST, SECOND = "manifest.jsonl", "manifest.second"
COPY = ".copy"
"""What the second copy of a tree's file is called beside it. A client that is idle has one file for all checkpoints,
and the manifest is one file for all clients: damage to either would leave no checkpoint whole."""
# What a store writes beside its manifest: nothing else in the folder is ever removed.
_OURS = re.compile(r".+-\d{6,}\.safetensors|.+-\d{6,}\.copy|.+\.\d+\.spill|\..+" + re.escape(atomic_io.PARTIAL))


class DamagedFile(Exception):
    """Why what was saved cannot be used, in a few words."""


class ManifestEntry(NamedTuple):
    """One tree on disk."""

    file: str  # name in the folder
    sha256: str  # of the file
    size: int  # bytes of the file
    nbytes: int  # bytes of the leaves


class Commit(NamedTuple):
    """Where the manifest ended at a commit."""

    length: int  # bytes
    chain: str  # SHA-256 of the last line after that of the lines before it, and so on

    def after(self, lines: Sequence[bytes]) -> "Commit":
        """Return the mark with more lines behind it."""
        chain = self.chain
        for line in lines:
            chain = atomic_io.sha256(chain.encode() + line)
        return Commit(self.length + sum(map(len, lines)), chain)


START = Commit(0, "")
"""The mark of a folder that holds nothing."""


class StoreContents(NamedTuple):
    """What a folder held at a commit."""

    folder: Path
    mark: Commit
    version: int  # of the last commit that changed anything; -1 where there was none
    entries: dict[str, ManifestEntry]
    replaced: list[tuple[int, str]]  # (version of the commit that replaced or discarded it, file)
    mended: tuple[str, ...] = ()  # files that were damaged, and are whole again from their second copy


def format_line(version: int, key: str, entry: ManifestEntry | None) -> bytes:
    """Return the line that says where a key's tree is from this version on; None says that it was discarded."""
    return atomic_io.json_line({"version": version, "key": key, **(entry._asdict() if entry else {"file": None})})


def append(folder: Path, mark: Commit, lines: Sequence[bytes]) -> Commit:
    """Bring lines to the disk behind those of a mark, and return the new mark. Raises OSError."""
    for path in (folder / SECOND, folder / MANIFEST):
        atomic_io.truncate(path, mark.length)  # what a commit that failed has left
        atomic_io.append(path, b"".join(lines))
        atomic_io.flush_and_measure(path)
    atomic_io.sync_folder(folder)
    return mark.after(lines)


def verify(folder: Path, mark: Commit) -> StoreContents:
    """Return what a folder held at a commit; raise `DamagedFile` if a bit of it is missing or was changed.

    Every file is read, here and not when its tree is first asked for: only before a run goes on can it fall back to
    the checkpoint before. It takes about as long as the disk takes to read the files once.
    """
    mended: list[str] = []
    lines = _lines(folder / MANIFEST, mark)
    if lines is None:
        lines = _lines(folder / SECOND, mark)
        if lines is None:
            raise DamagedFile(f"{folder.name}/{MANIFEST} was changed or cut")
        _mend(folder / MANIFEST, b"".join(lines))
        mended.append(MANIFEST)
    if _lines(folder / SECOND, mark) is None:
        _mend(folder / SECOND, b"".join(lines))
    entries: dict[str, ManifestEntry] = {}
    replaced: list[tuple[int, str]] = []
    version = -1
    for each in lines:
        version, key, entry = _change(each)
        if key in entries:
            replaced.append((version, entries.pop(key).file))
        if entry is not None:
            entries[key] = entry
    for entry in entries.values():
        if _checked(folder, entry):
            mended.append(entry.file)
    return StoreContents(folder, mark, version, entries, replaced, tuple(mended))


def _lines(path: Path, mark: Commit) -> list[bytes] | None:
    try:
        lines = (atomic_io.read(path) or b"")[: mark.length].splitlines(keepends=True)
    except OSError:
        return None
    return lines if START.after(lines) == mark else None


def _mend(path: Path, data: bytes) -> None:
    """Write a damaged file anew; a disk that does not take it is no worse than before."""
    with suppress(OSError):
        if path.is_dir():
            return
        if data or path.exists():
            atomic_io.write_atomically(path, data)


def remove_unreferenced(contents: StoreContents, version: int) -> StoreContents:
    """Remove what a killed process has left, and return the contents for `Store.restore`.

    Kept are the files of `contents` and those that a commit from `version` on, the oldest that is still wanted, names;
    the manifest is cut back to its mark. Raises OSError.
    """
    replaced = [(when, file) for when, file in contents.replaced if when > version]
    names = {entry.file for entry in contents.entries.values()} | {file for _, file in replaced}
    names |= {copy_of(file) for file in names}
    if contents.folder.is_dir():
        for path in list(contents.folder.iterdir()):
            if _OURS.fullmatch(path.name) and path.name not in names:
                remove(path)
        for name in (MANIFEST, SECOND):
            atomic_io.truncate(contents.folder / name, contents.mark.length)
    return contents._replace(replaced=replaced)


def remove(path: Path) -> None:
    """Remove a file and its copy, if they are there and the system lets them go. Raises OSError."""
    # Windows does not remove a file while it is mapped: a later sweep does.
    for each in (path, path.with_name(copy_of(path.name))):
        with suppress(PermissionError):
            each.unlink(missing_ok=True)


def write_copy(folder: Path, entry: ManifestEntry) -> ManifestEntry:
    """Write the second copy of a file that is flushed; not flushed itself, as it is for damage that comes later."""
    with suppress(OSError):  # without it a commit is as good as before
        shutil.copyfile(folder / entry.file, folder / copy_of(entry.file))
    return entry


def copy_of(file: str) -> str:
    return f"{file.removesuffix('.safetensors')}{COPY}"


def _change(line: bytes) -> tuple[int, str, ManifestEntry | None]:
    """Return what `line` has put into a line; raise `DamagedFile` for any other."""
    try:
        row = atomic_io.parse_json(line)
        version, key = row["version"], row["key"]
        entry = None if row["file"] is None else ManifestEntry(*(row[field] for field in ManifestEntry._fields))
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedFile(f"{MANIFEST} has a line that says no change") from error
    kinds = (int, str) if entry is None else (int, str, str, str, int, int)
    if tuple(map(type, (version, key, *(entry or ())))) != kinds:
        raise DamagedFile(f"{MANIFEST} has a line that says no change")
    # A file lies in the folder: a name that leads out of it is none that was written.
    if entry is not None and (not _OURS.fullmatch(entry.file) or Path(entry.file).name != entry.file):
        raise DamagedFile(f"{MANIFEST} names a file that is no store's")
    return version, key, entry


def _checked(folder: Path, entry: ManifestEntry) -> bool:
    """Return whether a tree's file had to be mended from its copy; raise `DamagedFile` where both are damaged."""
    copy = folder / copy_of(entry.file)
    try:
        _check(folder, entry.file, entry)
    except DamagedFile as damage:
        try:
            _check(folder, copy.name, entry)
        except DamagedFile:
            raise damage from None
        _mend(folder / entry.file, copy.read_bytes())
        _check(folder, entry.file, entry)
        return True
    with suppress(OSError):
        if not copy.exists() or copy.stat().st_size != entry.size:  # a kill came first
            shutil.copyfile(folder / entry.file, copy)
    return False


def _check(folder: Path, name: str, entry: ManifestEntry) -> None:
    try:
        with (folder / name).open("rb") as file:
            if os.fstat(file.fileno()).st_size != entry.size:
                raise DamagedFile(f"{folder.name}/{name} was cut")
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise DamagedFile(f"checksum of {folder.name}/{name} differs")
    except OSError as error:
        raise DamagedFile(f"{folder.name}/{name} cannot be read: {atomic_io.error_reason(error)}") from error
