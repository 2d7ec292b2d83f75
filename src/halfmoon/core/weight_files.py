"""Files of weights, known by what is in them: a federation's terms name a file's SHA-256, not where it lies.

A machine that takes part is given its own copy of the file, and says so here; a run's file names the path.
"""

import hashlib
import re
from functools import lru_cache
from pathlib import Path

from halfmoon.core.errors import UserError

PREFIX = "sha256:"
"""What stands before the hash where a file is named by it."""

NAME = re.compile(r"sha256:[0-9a-f]{64}")
"""How a file is named by its hash."""

_OFFERED: dict[str, Path] = {}


def register(path: Path) -> str:
    """Let this process find a file by its hash, and return that name; raise `UserError` where it cannot be read."""
    name = f"{PREFIX}{file_sha256(path)}"
    _OFFERED[name] = path
    return name


def find(name: str) -> Path:
    """Return the file that a path, or a hash, names; raise `UserError` where this process has none of that hash."""
    if not name.startswith(PREFIX):
        return Path(name)
    if name not in _OFFERED:
        others = ", ".join(f"{path.name} has {each.removeprefix(PREFIX)[:16]}" for each, path in _OFFERED.items())
        raise UserError(
            f"the training starts from a file of weights with SHA-256 {name.removeprefix(PREFIX)}, which is not here"
            f"{f' ({others})' if others else ''}",
            option="weights",
            hint="get it from the people who run the server, and give its path as {weights}.",
        )
    return _OFFERED[name]


def sha256_of(name: str) -> str:
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else file_sha256(Path(name))


def display_name(name: str) -> str:
    return "a file" if name.startswith(PREFIX) else Path(name).name


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file; raise `UserError` where it cannot be read."""
    try:
        facts = path.stat()
        return _digest(path, facts.st_size, facts.st_mtime_ns)
    except OSError as error:
        raise UserError(
            f"weights {path} cannot be read ({error.strerror or error}): give a file of weights."
        ) from error


@lru_cache(maxsize=32)
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
