"""How the folder is changed: all files of a change or none, private ones readable by their owner alone at any instant.

A change is first written beside the files, as a whole, into a folder `.next`. That is renamed to `.ready`: from then on
the change counts, and whoever holds the lock next puts into place what a kill has left there, the record last.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from halfmoon.core.errors import UserError
from halfmoon.sites.keys.paths import LOCK, RECORD
from halfmoon.storage import atomic_io, locks

WAITING = 10.0
"""Seconds that the lock is waited for; whoever has it needs it for less than one."""

_NEXT, _READY, _BORN, _GONE = ".next", ".ready", ".partial-", ".gone"


@dataclass(frozen=True)
class File:
    """What a file holds; a private one is for its owner alone."""

    data: bytes
    private: bool = False


def make(folder: Path, files: Mapping[str, File]) -> None:
    """Make a folder with these files, whole or not at all; raise UserError where something is there already."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()) or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} is there already: name a new folder, or delete that one if nobody needs it.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        born = Path(mkdtemp(prefix=f".{folder.name}{_BORN}", dir=folder.parent))
        try:
            with locks.held(born / LOCK) as lock:
                _write(born, files)
                os.replace(born, folder)
                if lock.owner is not None:  # it has moved along, and says that somebody is at work
                    (folder / lock.owner.name).unlink(missing_ok=True)
        except BaseException:
            shutil.rmtree(born, ignore_errors=True)
            raise
        atomic_io.sync_folder(folder.parent)
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({atomic_io.reason(error)}); choose another folder.") from error


def change(folder: Path, files: Mapping[str, File], gone: Sequence[str] = ()) -> None:
    """Put files into a locked folder and delete others: all or none."""
    os.mkdir(folder / _NEXT, 0o700)
    _write(folder / _NEXT, {**files, _GONE: File(json.dumps(list(gone)).encode())})
    os.replace(folder / _NEXT, folder / _READY)
    atomic_io.sync_folder(folder)
    finish(folder)


def finish(folder: Path) -> None:
    """Put into place what a change in a locked folder has left to do; clear away what never counted."""
    ready = folder / _READY
    if (folder / _NEXT).exists():
        shutil.rmtree(folder / _NEXT)
    if not ready.is_dir():
        return
    gone = json.loads((ready / _GONE).read_bytes())
    paths = [path.relative_to(ready) for path in ready.rglob("*") if path.is_file() and path.name != _GONE]
    for path in sorted(paths, key=lambda each: (each == Path(RECORD), each)):
        _folders(folder, path.parent)
        os.replace(ready / path, folder / path)
        atomic_io.sync_folder((folder / path).parent)
    for name in gone:
        (folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # something else lies there
            (folder / name).parent.rmdir()
    os.replace(ready, folder / _NEXT)  # it is done, however far the next line comes
    shutil.rmtree(folder / _NEXT)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock and finish what was left; raise UserError where it cannot be had or used."""
    try:
        with locks.held(folder / LOCK, WAITING):
            finish(folder)
            yield
    except locks.Held as error:
        raise UserError(
            f"{folder} is being changed by another process: try again when that is done ({atomic_io.reason(error)})."
        ) from error
    except OSError as error:
        raise UserError(f"{error.filename or folder} cannot be used ({atomic_io.reason(error)}); mend that.") from error


def _clear(folder: Path) -> None:
    """Delete what was left by those who were killed while they made this folder."""
    for left in folder.parent.glob(f".{folder.name}{_BORN}*"):
        try:
            with locks.held(left / LOCK):
                shutil.rmtree(left)
        except locks.Held:
            continue  # it is being made right now


def _write(root: Path, files: Mapping[str, File]) -> None:
    for name, file in files.items():
        _folders(root, Path(name).parent)
        handle = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if file.private else 0o644)
        try:
            atomic_io.write_all(handle, file.data)
            os.fsync(handle)
        finally:
            os.close(handle)


def _folders(root: Path, path: Path) -> None:
    for part in [*reversed(path.parents), path]:
        (root / part).mkdir(mode=0o700, exist_ok=True)
