"""Locks that give one process exclusive use of a folder, on file systems with and without `flock`.

The operating system frees its lock when the process ends. On a file system without locks an owner file stands in, which
names the process that created it. The owner file of a dead process on this machine is replaced; one of another machine
must be removed by hand, because its process cannot be checked from here.
"""

import errno
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfmoon.storage import atomic_io

OWNER_SUFFIX = ".owner"
"""Suffix of the owner file, after the name of the file that cannot be locked."""


class LockConflict(OSError):
    """Another process has the lock; the message names it if it is known."""


@dataclass
class Lock:
    """A lock that lasts until `free`; `warning` is a warning if an owner file is used in place of a system lock."""

    handle: int
    owner: Path | None = None
    warning: str = ""

    def free(self) -> None:
        """Free the lock, and remove the owner file."""
        if self.owner is not None:
            self.owner.unlink(missing_ok=True)
        os.close(self.handle)


def acquire(path: Path) -> Lock:
    """Lock a file without waiting; it is created if it is missing.

    On a file system without locks, a second file (`OWNER_SUFFIX`) records the process that has the lock, its owner.

    Raises:
        LockConflict: if another process has the lock.
        OSError: if the file cannot be opened.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        try:
            if atomic_io.flock(handle):
                return Lock(handle)
        except OSError as error:
            raise LockConflict(*error.args) from error
        owner = path.with_name(path.name + OWNER_SUFFIX)
        _create_owner(owner)
        warning = (
            f"the file system of {path.parent} has no locks: {owner.name} reserves the folder for this process; "
            "if it is killed, the next process on this machine takes over"
        )
        return Lock(handle, owner, warning)
    except BaseException:
        os.close(handle)
        raise


def is_held(path: Path) -> bool | None:
    """Test whether a process has the lock of a file.

    Returns:
        True or False, or None if the file system has no locks or the file cannot be opened.
    """
    try:
        with atomic_io.open_file(path, os.O_RDONLY) as handle:
            return False if atomic_io.flock(handle, shared=True) else None
    except BlockingIOError:
        return True
    except OSError:
        return None


RETRY_SECONDS = 0.02
"""Interval at which a process that waits for a lock tries again."""

YIELD_SECONDS = 0.001
"""Pause after a lock was freed, in which a waiting process can acquire it."""


@contextmanager
def hold(path: Path, patience: float = 0.0) -> Iterator[Lock]:
    """Hold the lock of a file for the duration of a block.

    Args:
        path: the file.
        patience: seconds to wait for another process to free the lock.

    Raises:
        LockConflict: if another process still has the lock after that time.
        OSError: if the file cannot be opened.
    """
    end = time.monotonic() + patience
    while True:
        try:
            lock = acquire(path)
            break
        except LockConflict:
            if time.monotonic() >= end:
                raise
        time.sleep(RETRY_SECONDS)
    try:
        yield lock
    finally:
        lock.free()
        if patience:
            time.sleep(YIELD_SECONDS)  # let a waiting process acquire the lock before this one does so once more


def _create_owner(owner: Path) -> None:
    """Create the file that records this process as the owner of a lock, for file systems without locks.

    Raises:
        LockConflict: the file exists, and the process that it names may be alive.
    """
    identity = json.dumps(_identify_process(os.getpid())).encode()
    while True:
        try:
            # O_EXCL: of several processes, only one creates the file.
            with atomic_io.open_file(owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
                atomic_io.write_all(handle, identity)
                os.fsync(handle)
            return
        except FileExistsError:
            _remove_dead_owner(owner)


def _remove_dead_owner(owner: Path) -> None:
    """Remove the owner file of a dead process; raise `LockConflict` if its process may be alive."""
    content = atomic_io.read(owner)
    if content is None:
        return
    try:
        recorded = atomic_io.parse_json(content)
        is_local = recorded["host"] == socket.gethostname()
        is_dead = is_local and _identify_process(int(recorded["process"])) != recorded
    except (ValueError, LookupError, TypeError, OverflowError):
        raise LockConflict(
            errno.EWOULDBLOCK, f"{owner} cannot be read; remove it if no process uses the folder"
        ) from None
    if not is_dead:
        process = f"process {recorded['process']} on {str(recorded['host'])[:64]}"
        raise LockConflict(
            errno.EWOULDBLOCK, f"{process} is at work according to {owner}; if it is not running, remove the file"
        )
    # Another process may have replaced the file since it was read. Rename it first, which is atomic, then compare it
    # with the content read above, and put it back if it is a different one.
    renamed = owner.with_name(f"{owner.name}.{secrets.token_hex(4)}")
    try:
        os.rename(owner, renamed)
    except FileNotFoundError:
        return
    if renamed.read_bytes() != content:
        os.link(renamed, owner)
        renamed.unlink()
        raise LockConflict(errno.EWOULDBLOCK, "another process acquired the lock first")
    renamed.unlink()


def _identify_process(number: int) -> dict[str, Any]:
    """Identify a process by host, boot of the host, process number and start time; numbers alone are reused."""
    boot = (atomic_io.read(Path("/proc/sys/kernel/random/boot_id")) or b"").decode().strip()
    try:
        start_time = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        start_time = "" if _is_alive(number) else "gone"
    return {"host": socket.gethostname(), "boot": boot, "process": number, "began": start_time}


def _is_alive(number: int) -> bool:
    """Check whether a process of this number exists; signal 0 tests it without an effect."""
    try:
        os.kill(number, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
