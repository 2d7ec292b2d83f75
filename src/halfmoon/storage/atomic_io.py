"""Small files that survive a kill: written whole or not at all, locked, cut, read back line by line.

Nothing here knows what a file means; `halfmoon.storage.run_folder` does. Everything raises OSError as the system says
it.
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
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return one dict a line, without a last line that was cut off; raise UserError for a line that is no object."""
    return parse_rows(read(path) or b"", path)


def parse_rows(data: bytes, path: Path) -> list[dict[str, Any]]:
    """Return what `read_rows` returns of these bytes, which are those of a file."""
    table = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not a row of metrics ({error}); restore it.") from error
        table.append(row)
    return table


def read_number_pairs(path: Path, key: str, value: str) -> list[tuple[int, float]]:
    """Return (row[key], row[value]) of a file of rows that nothing depends on; a damaged line is left out."""
    pairs: list[tuple[int, float]] = []
    try:
        lines = (read(path) or b"").split(b"\n")[:-1]
    except OSError:
        return pairs
    for line in lines:
        with suppress(ValueError, LookupError, TypeError, OverflowError):
            row = parse_json(line)
            number, seconds = row[key], float(row[value])
            if type(number) is int and math.isfinite(seconds):
                pairs.append((number, seconds))
    return pairs


def parse_json(data: bytes | str) -> Any:
    """Return what JSON says; raise ValueError for what is none, nested too deeply, or has too long a number."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("values are nested too deeply") from error


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def json_line(value: dict[str, Any]) -> bytes:
    """Return a line of JSON; the same value gives the same bytes."""
    return (json.dumps(value) + "\n").encode()


def replace_nonfinite(value: Any) -> Any:
    """Return a value with None in place of the numbers that JSON does not know."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    return value


def read(path: Path) -> bytes | None:
    """Return the bytes of a file, None where there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file, None where there is no such file or no object in it."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def open_file(path: Path, flags: int, mode: int = 0o666) -> Iterator[int]:
    """Give the open file's number, and close it; `mode` is that of a file which is made."""
    handle = os.open(path, flags, mode)
    try:
        yield handle
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def write_atomically(path: Path, data: bytes, private: bool = False) -> None:
    """Write a file that is there whole or not at all: a partial one beside it is flushed and renamed.

    A `private` one can be read by its owner alone, from its first byte on.
    """
    partial = path.with_name(f".{path.name}{PARTIAL}")
    if private:
        partial.unlink(missing_ok=True)  # one that is there keeps its mode
    try:
        with open_file(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if private else 0o666) as handle:
            write_all(handle, data)
            os.fsync(handle)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append(path: Path, data: bytes) -> None:
    """Add to the end of a file, which is made where it is missing."""
    with open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as handle:
        write_all(handle, data)


def flush_and_measure(path: Path) -> int:
    """Bring a file to the disk and return its bytes, 0 where there is none."""
    if not path.exists():
        return 0
    with open_file(path, os.O_RDWR) as handle:
        os.fsync(handle)
        return os.fstat(handle).st_size


def truncate(path: Path, length: int) -> None:
    """Take away what a file holds beyond `length` bytes."""
    if path.exists() and path.stat().st_size > length:
        with open_file(path, os.O_RDWR) as handle:
            os.ftruncate(handle, length)
            os.fsync(handle)


def error_reason(error: OSError) -> str:
    return error.strerror or str(error)


if sys.platform == "win32":
    import msvcrt

    def flock(handle: int, shared: bool = False) -> bool:
        """Lock an open file until it is closed, or raise OSError at once where another process holds it."""
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        return True

    def sync_folder(path: Path) -> None:
        """Do nothing: Windows has no way to flush a folder."""
else:
    import fcntl

    def flock(handle: int, shared: bool = False) -> bool:
        """Lock an open file until it is closed, or raise OSError at once where another process holds it.

        Return False where the file system has no locks: then nobody is kept out (`halfmoon.storage.locks`).
        """
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def sync_folder(path: Path) -> None:
        """Bring the names in a folder to the disk."""
        with open_file(path, os.O_RDONLY) as handle:
            os.fsync(handle)
