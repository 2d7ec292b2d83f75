"""Functions that write, lock, truncate and read small files, safely if the process is killed.

All functions raise the OSError of the system unless their documentation names another error.
"""

import errno
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from halfmoon.core.errors import UserError

PARTIAL = ".partial"
"""Suffix of temporary files, which are complete only after they were renamed."""

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""Error numbers of file systems that have no locks."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read one dict per line, without an incomplete last line; raise UserError for a line that is no object."""
    return parse_rows(read(path) or b"", path)


def parse_rows(data: bytes, path: Path) -> list[dict[str, Any]]:
    """Parse a file of JSON objects, one on each line, such as metrics.jsonl.

    Args:
        data: the content of the file; bytes after the last line break are an incomplete row, which is ignored.
        path: the file, for error messages.

    Raises:
        UserError: a line is no JSON object.
    """
    rows = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not a row of metrics ({error}); restore it.") from error
        rows.append(row)
    return rows


def read_intact_rows(path: Path) -> list[dict[str, Any]]:
    """Read one dict per line of a file that only helps the user; damaged lines and an unreadable file are skipped."""
    rows = []
    try:
        lines = (read(path) or b"").split(b"\n")[:-1]
    except OSError:
        return rows
    for line in lines:
        with suppress(ValueError):
            row = parse_json(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def read_number_pairs(path: Path, first_name: str, second_name: str) -> list[tuple[int, float]]:
    """Read two numbers of each row of a file, for display only; damaged lines are skipped.

    Args:
        path: the file, with a JSON object on each line.
        first_name: name of an integer in the rows, such as "round".
        second_name: name of a number in the rows, such as "seconds".

    Returns:
        The pairs of numbers, in the order of the lines.
    """
    pairs: list[tuple[int, float]] = []
    try:
        lines = (read(path) or b"").split(b"\n")[:-1]
    except OSError:
        return pairs
    for line in lines:
        with suppress(ValueError, LookupError, TypeError, OverflowError):
            row = parse_json(line)
            first = row[first_name]
            second = float(row[second_name])
            if type(first) is int and math.isfinite(second):
                pairs.append((first, second))
    return pairs


def parse_json(data: bytes | str) -> Any:
    """Parse JSON; raise ValueError if it is invalid, nested too deeply or has too long a number."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def sha256(data: bytes) -> str:
    """Compute the SHA-256 of bytes as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def json_line(value: dict[str, Any]) -> bytes:
    """Format a dict as a line of JSON; the same value gives the same bytes."""
    return (json.dumps(value) + "\n").encode()


def replace_nonfinite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, with None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    return value


def read(path: Path) -> bytes | None:
    """Read the bytes of a file, None if it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object, None if the file does not exist or contains none."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def open_file(path: Path, flags: int, mode: int = 0o666) -> Iterator[int]:
    """Open a file descriptor and close it at the end of the block; `mode` is for a new file."""
    handle = os.open(path, flags, mode)
    try:
        yield handle
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes) -> None:
    """Write all bytes to a file descriptor; one call of `os.write` may write only some of them."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def write_atomically(path: Path, data: bytes, private: bool = False) -> None:
    """Write a file atomically: write and flush a temporary file in the same folder, then rename it.

    Args:
        path: the file.
        data: its content.
        private: allow only the user to read the file, also while it is written.
    """
    partial = path.with_name(f".{path.name}{PARTIAL}")
    if private:
        partial.unlink(missing_ok=True)  # an existing file would retain its mode
    try:
        with open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666) as handle:
            write_all(handle, data)
            os.fsync(handle)
        os.replace(partial, path)  # a reader sees the old or the new file, never a part of one
    except OSError as error:
        error.filename = str(path)  # the name that the user knows; a failed write has none
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)  # makes the new name survive a power failure


def append(path: Path, data: bytes) -> None:
    """Append to a file, which is created if it is missing."""
    try:
        with open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as handle:
            write_all(handle, data)
    except OSError as error:
        error.filename = str(path)  # a failed write has none
        raise


def ends_within_line(path: Path) -> bool:
    """Check whether a file's last line lacks its line break; False for missing and empty files."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 1))
            return size > 0 and file.read(1) != b"\n"
    except FileNotFoundError:
        return False


def flush_and_measure(path: Path) -> int:
    """Flush a file to disk and return its size in bytes, 0 if it does not exist."""
    if not path.exists():
        return 0
    with open_file(path, os.O_RDWR) as handle:
        os.fsync(handle)
        return os.fstat(handle).st_size


def truncate(path: Path, length: int) -> None:
    """Truncate a file to at most `length` bytes."""
    if path.exists() and path.stat().st_size > length:
        with open_file(path, os.O_RDWR) as handle:
            os.ftruncate(handle, length)
            os.fsync(handle)


def error_reason(error: OSError) -> str:
    """Return the system's text of an error, without its number and path."""
    return error.strerror or str(error)


def is_disk_full(error: BaseException | None) -> bool:
    """Check whether a file could not be written because the disk, or the user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def find_os_error(error: BaseException) -> OSError | None:
    """Return the error of the system that an error is, or that it was raised from; None for any other error."""
    candidates = (error, error.__cause__)
    return next((each for each in candidates if isinstance(each, OSError)), None)


def write_remedy(error: OSError) -> str:
    """Return what to do after a file could not be written, as an imperative without a full stop."""
    return "free some space" if is_disk_full(error) else "make it writable"


if sys.platform == "win32":
    import msvcrt

    def flock(handle: int, shared: bool = False) -> bool:
        """Lock an open file until it is closed; raise OSError immediately if another process has the lock."""
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        return True

    def sync_folder(path: Path) -> None:
        """Do nothing: Windows has no way to flush a folder."""
else:
    import fcntl

    def flock(handle: int, shared: bool = False) -> bool:
        """Lock an open file until it is closed, without waiting; raise OSError if another process has the lock.

        With `shared`, other processes may have shared locks at the same time. Return False if the file system has no
        locks; then no other process is excluded (`halfmoon.storage.locks`).
        """
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def sync_folder(path: Path) -> None:
        """Flush the directory entries of a folder to disk, which makes a rename durable."""
        with open_file(path, os.O_RDONLY) as handle:
            os.fsync(handle)
