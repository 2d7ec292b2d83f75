"""Files of pretrained weights, identified by their SHA-256: a federation's terms name the hash, not a path.

Each machine of a federation has a copy of the file, whose path it registers. The config of a run names a path.
"""

import hashlib
import re
from functools import lru_cache
from pathlib import Path

from halfmoon.core.errors import UserError

PREFIX = "sha256:"
"""Beginning of a name that is a hash."""

NAME = re.compile(r"sha256:[0-9a-f]{64}")
"""Name of a file by its hash."""

_REGISTERED: dict[str, Path] = {}


def register(path: Path) -> str:
    """Register a file in this process, and return its name by hash; raise `UserError` if it cannot be read."""
    name = f"{PREFIX}{file_sha256(path)}"
    _REGISTERED[name] = path.absolute()  # a process that registers it too may have another current folder
    return name


def registered() -> list[str]:
    """List the paths of the registered files, for another process that registers them as well."""
    return [str(path) for path in _REGISTERED.values()]


def find(name: str) -> Path:
    """Find a file of initial weights by its path, or by its hash if the name begins with `PREFIX`.

    A server names the file by its hash; this machine must have registered a file of that content.

    Raises:
        UserError: no file of that hash is registered.
    """
    if not name.startswith(PREFIX):
        return Path(name)
    if name not in _REGISTERED:
        hashes = [
            f"{path.name} has {name_by_hash.removeprefix(PREFIX)[:16]}" for name_by_hash, path in _REGISTERED.items()
        ]
        registered = f" ({', '.join(hashes)})" if hashes else ""
        raise UserError(
            f"the training starts from a file of weights with SHA-256 {name.removeprefix(PREFIX)}, which is not here"
            f"{registered}",
            option="weights",
            hint="get it from the people who run the server, and give its path as {weights}.",
        )
    return _REGISTERED[name]


def sha256_of(name: str) -> str:
    """Get the SHA-256 of a file by its path or hash; raises `UserError`."""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else file_sha256(Path(name))


def display_name(name: str) -> str:
    """Get a name for sentences, without folders."""
    return "a file" if name.startswith(PREFIX) else Path(name).name


def file_sha256(path: Path) -> str:
    """Compute the SHA-256 of a file; raise `UserError` if it cannot be read."""
    try:
        status = path.stat()
        return _digest(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise UserError(
            f"weights {path} cannot be read ({error.strerror or error}): give a file of weights."
        ) from error


@lru_cache(maxsize=32)
def _digest(path: Path, size: int, changed: int) -> str:
    # Size and time of change are in the cache's key, so that a changed file is read.
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
