"""Cache of a user: decoded images, features and converted weights, all of which can be recomputed."""

import os
import stat
from contextlib import suppress
from pathlib import Path

MAX_BYTES = 10 * 2**30
"""Size of one kind of files, beyond which the least recently used ones are removed."""


def user_cache(kind: str) -> Path:
    """Return the path of the cache for a kind of files. The folder may not exist yet."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    return Path(cache_home) / "halfmoon" / kind


def is_private(path: Path) -> bool:
    """Check that no other user of this machine can have written a file of a cache, or moved it there.

    The file, which is no link, and its folder have to belong to this user, and no one else may write to them.
    """
    if os.name != "posix":
        return True
    try:
        file_status = path.lstat()
        folder_status = path.parent.stat()
    except OSError:
        return False
    return stat.S_ISREG(file_status.st_mode) and all(
        status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        for status in (file_status, folder_status)
    )


def trim(folder: Path, keep: str = "", cap: int = MAX_BYTES) -> None:
    """Remove the least recently used files of a folder until the rest has `cap` bytes or fewer.

    Files whose names are equal up to the first dot are one group, and are removed together. A file that another process
    has mapped remains readable there. Files that cannot be removed are skipped.

    Args:
        folder: the cache.
        keep: name of a group that is not removed.
        cap: size in bytes.
    """
    groups: dict[str, list[tuple[float, int, Path]]] = {}
    for path in folder.iterdir():
        with suppress(OSError):  # another process has removed it
            status = path.stat()
            group = groups.setdefault(path.name.partition(".")[0], [])
            group.append((status.st_mtime, status.st_size, path))
    total = sum(size for files in groups.values() for _, size, _ in files)
    # A group is as recent as its newest file: tuples compare by their first entry, the time of change.
    for name in sorted(groups, key=lambda name: max(groups[name])):
        if total <= cap:
            return
        if name != keep:
            for _, size, path in groups[name]:
                with suppress(OSError):
                    path.unlink()
                    total -= size
