"""The folder of what halfmoon can compute again: decoded images, features, converted weights."""

import os
from contextlib import suppress
from pathlib import Path

CAP = 10 * 2**30
"""Bytes that one kind of files takes; beyond it those that were not used for longest go."""


def user_cache(kind: str) -> Path:
    """Return this user's folder for a kind of files; nothing is made."""
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(home) / "halfmoon" / kind


def trim(folder: Path, keep: str = "", cap: int = CAP) -> None:
    """Remove the least recently used files of a folder until the rest has `cap` bytes.

    Files whose names are equal up to the first dot go together; those of `keep` stay. A file that another process has
    mapped stays readable there. What cannot be removed stays.
    """
    groups: dict[str, list[tuple[float, int, Path]]] = {}
    for path in folder.iterdir():
        with suppress(OSError):  # another process was faster
            facts = path.stat()
            groups.setdefault(path.name.partition(".")[0], []).append((facts.st_mtime, facts.st_size, path))
    total = sum(size for files in groups.values() for _, size, _ in files)
    for name in sorted(groups, key=lambda name: max(groups[name])):
        if total <= cap:
            return
        if name != keep:
            for _, size, path in groups[name]:
                with suppress(OSError):
                    path.unlink()
                    total -= size
