"""Writer of a run folder: one process at a time, atomic files, and an error message that names the remedy.

A file is written under a temporary name, flushed to disk and renamed, so that a file under its final name is complete.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.storage import atomic_io, integrity, locks

CONFIG = "config.toml"
LOCK = ".lock"
START = "start-seed"
"""Prefix of the folders in which versions up to 0.2 stored a start without labels (`--start`)."""


class WriteError(UserError):
    """A file cannot be written, because the disk is full or the folder is not writable; older files are intact."""


class FolderInUse(UserError):
    """Another process is running in the folder."""


RESUME_ADVICE = "go on with: {resume}"
"""The end of a `WriteError` about a run that can be resumed."""

REPEAT_ADVICE = "start it again in the same folder."
"""The end of a `WriteError` about a run that is resumed by the command or call that started it."""


@contextmanager
def advise_for_parent(parent: Path, resumable: bool = True) -> Iterator[None]:
    """Replace the advice of a `WriteError` about a run below a folder by that for the whole command.

    Resuming only the run that failed would leave the others of a comparison, a plan or a search undone.

    Args:
        parent: the folder of the comparison, plan, rehearsal, search or sweep.
        resumable: whether `halfmoon resume` continues it; otherwise the command that started it does.
    """
    try:
        yield
    except WriteError as error:
        if error.resume is None or parent not in error.resume.parents:
            raise
        if resumable:
            advice = WriteError(error.message, resume=parent)
        else:
            advice = WriteError(error.message.replace(RESUME_ADVICE, REPEAT_ADVICE))
        raise advice from error.__cause__


class FolderWriter:
    """Writes the files of a run folder; the first call takes its lock, `close` (or the process' end) frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: int | None = None
        """The newest round whose checkpoint is known to be intact."""
        self._lock: locks.Lock | None = None

    @property
    def lock_warning(self) -> str:
        return "" if self._lock is None else self._lock.warning

    def acquire_lock(self) -> None:
        """Take the lock of the folder, unless this writer has it; raise `FolderInUse` if another process has it."""
        if self._lock is None:
            self._lock = _lock_folder(self.path)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.free()
            self._lock = None

    def write(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        with self.convert_errors(name):
            atomic_io.write_atomically(self.path / name, data)

    def append(self, name: str, line: bytes) -> None:
        """Append a line to a file."""
        self.acquire_lock()
        with self.convert_errors(name):
            atomic_io.append(self.path / name, line)

    def record_checksums(self, digests: dict[str, str]) -> None:
        """Add SHA-256 hashes of files, by name, to checksums.json."""
        with self.convert_errors(integrity.CHECKSUMS):
            integrity.record_checksums(self.path, digests)

    @contextmanager
    def convert_errors(self, target: str) -> Iterator[None]:
        """Convert an OSError in this block to a `WriteError` that names the remedy.

        Args:
            target: the file or folder that the block writes, for the message.
        """
        try:
            yield
        except OSError as error:
            if self.saved is None:
                saved_state = "no checkpoint was written yet"
            else:
                saved_state = f"the checkpoint of round {self.saved} is intact"
            remedy = atomic_io.write_remedy(error)
            next_step = RESUME_ADVICE if (self.path / CONFIG).exists() else REPEAT_ADVICE
            raise WriteError(
                f"{self.path}: {target} cannot be written ({atomic_io.error_reason(error)}); {saved_state}. "
                f"First {remedy}, then {next_step}",
                resume=self.path,
            ) from error


def _lock_folder(path: Path) -> locks.Lock:
    """Lock a run folder, so that no other process writes into it until the lock is freed.

    On a file system without locks, a file with the suffix `OWNER_SUFFIX` records the process that has the lock; only
    then the conflict tells which process that is.

    Raises:
        FolderInUse: another process has the lock.
        WriteError: the lock file cannot be written.
    """
    try:
        return locks.acquire(path / LOCK)
    except locks.LockConflict as error:
        names_owner = error.strerror and locks.OWNER_SUFFIX in error.strerror
        process = f" ({error.strerror})" if names_owner else ""
        raise FolderInUse(
            f"another process is running in {path}{process}",
            option="run_dir",
            hint="wait for it, or choose another {run_dir}.",
        ) from error
    except OSError as error:
        raise WriteError(
            f"{path}: the folder cannot be written ({atomic_io.error_reason(error)})",
            option="run_dir",
            hint="make it writable or choose another {run_dir}.",
        ) from error
