"""One process a folder: by the system's lock, and where a file system has none, by a file that says who is there.

A lock of the system ends with its process, however that ends. A file does not, so that it says which process wrote it:
one of this machine that lives no more is replaced, one of another machine has to be removed by people.
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
"""What the file is called, behind the name of the one that cannot be locked."""


class LockConflict(OSError):
    """Another process holds the lock; `str` says which, if known."""


@dataclass
class Lock:
    """A lock that is held until `free`; `remark` says in a sentence that it is no lock of the system's."""

    handle: int
    owner: Path | None = None
    remark: str = ""

    def free(self) -> None:
        if self.owner is not None:
            self.owner.unlink(missing_ok=True)
        os.close(self.handle)


def acquire(path: Path) -> Lock:
    """Lock a file, made where it is missing; raise `LockConflict` where another process has it, OSError as usual."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            if atomic_io.flock(handle):
                return Lock(handle)
        except OSError as error:
            raise LockConflict(*error.args) from error
        owner = path.with_name(path.name + OWNER_SUFFIX)
        _claim(owner)
        remark = (
            f"the file system of {path.parent} has no locks: {owner.name} says that this process is the only one here; "
            "where it is killed, the next one on this machine takes over"
        )
        return Lock(handle, owner, remark)
    except BaseException:
        os.close(handle)
        raise


def is_held(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file, None where nobody can know; readers do not exclude readers."""
    try:
        with atomic_io.open_file(path, os.O_RDONLY) as handle:
            return False if atomic_io.flock(handle, shared=True) else None
    except BlockingIOError:
        return True
    except OSError:
        return None


@contextmanager
def hold(path: Path, patience: float = 0.0) -> Iterator[Lock]:
    """Hold the lock of a file for the duration of a block.

    Args:
        path: the file.
        patience: seconds to wait for another process to free the lock.

    Raises:
        LockConflict: if another process still holds the lock after that time.
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
        time.sleep(0.02)
    try:
        yield lock
    finally:
        lock.free()
        if patience:
            time.sleep(0.001)  # others may wait for it: who takes it again at once would keep them out


def _claim(owner: Path) -> None:
    """Make the file that says who is there; raise `LockConflict` where a process that may live has made it."""
    mine = json.dumps(_process(os.getpid())).encode()
    while True:
        try:
            with atomic_io.open_file(owner, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as handle:
                atomic_io.write_all(handle, mine)
                os.fsync(handle)
            return
        except FileExistsError:
            _drop_dead(owner)


def _drop_dead(owner: Path) -> None:
    """Remove the file of a process that is gone; raise `LockConflict` for any other."""
    content = atomic_io.read(owner)
    if content is None:
        return
    try:
        facts = atomic_io.parse_json(content)
        local = facts["host"] == socket.gethostname()
        dead = local and _process(int(facts["process"])) != facts
    except (ValueError, LookupError, TypeError, OverflowError):
        raise LockConflict(errno.EWOULDBLOCK, f"{owner} cannot be read; where nobody is at work, remove it") from None
    if not dead:
        where = f"process {facts['process']} on {str(facts['host'])[:64]}"
        raise LockConflict(
            errno.EWOULDBLOCK, f"{where} is at work, says {owner}; where that is not so, remove the file"
        )
    # Another may have done the same and be there by now: what was taken away is looked at before it is thrown away.
    spare = owner.with_name(f"{owner.name}.{secrets.token_hex(4)}")
    try:
        os.rename(owner, spare)
    except FileNotFoundError:
        return
    if spare.read_bytes() != content:
        os.link(spare, owner)
        spare.unlink()
        raise LockConflict(errno.EWOULDBLOCK, "another process was faster")
    spare.unlink()


def _process(number: int) -> dict[str, Any]:
    """Return what tells a process from all others: its machine, that machine's start, and its own."""
    boot = (atomic_io.read(Path("/proc/sys/kernel/random/boot_id")) or b"").decode().strip()
    try:
        began = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        began = "" if _lives(number) else "gone"
    return {"host": socket.gethostname(), "boot": boot, "process": number, "began": began}


def _lives(number: int) -> bool:
    try:
        os.kill(number, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
