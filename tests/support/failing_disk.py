"""A disk that fails as SQLite's tests let it: the Nth call is refused, or the power goes at the Nth call.

What a process does to files below a folder goes through a few functions of `os`, which are replaced. The power takes
along what was not flushed: of a file's unflushed bytes any beginning may be there, renames and removals since the last
flush of their folder may be undone from the last one backwards, as a journaling file system would.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "fsync", "replace", "ftruncate", "unlink", "mkdir", "copyfile")


class PowerLoss(BaseException):
    """The machine is off: nothing may be caught, nothing is cleaned up."""


@dataclass
class FailingDisk:
    """Counts calls below `root`; at call `at` it raises an OSError with `number`, or with None the power goes."""

    root: Path
    at: int = -1
    number: int | None = None
    count: int = 0
    off: bool = False
    paths: dict[int, Path] = field(default_factory=dict)
    durable: dict[Path, bytes] = field(default_factory=dict)  # of files with unflushed bytes: what is safe
    moves: list[tuple[Path, dict[Path, bytes | None]]] = field(default_factory=list)  # folder, names as they were

    def inside(self, path: Any) -> Path | None:
        """Return a path below the root, None for any other, and for locks, which hold nothing."""
        if isinstance(path, int):
            return self.paths.get(path)
        found = Path(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
        below = found is not None and (found == self.root or self.root in found.parents)
        return found if below and ".lock" not in found.name else None

    def tick(self) -> None:
        """Count a call, and fail where it is the one."""
        if self.off:
            raise PowerLoss
        self.count += 1
        if self.count - 1 != self.at:
            return
        if self.number is None:
            self.off = True
            raise PowerLoss
        raise OSError(self.number, os.strerror(self.number))

    def touch(self, path: Path) -> None:
        self.durable.setdefault(path, path.read_bytes() if path.is_file() else b"")

    def lose(self, chance: random.Random) -> None:
        """Leave on the disk what may be there after the power has gone."""
        for path, safe in self.durable.items():
            if path.is_file():
                now = path.read_bytes()
                whole = now.startswith(safe)
                path.write_bytes(now[: chance.randint(len(safe), len(now))] if whole else chance.choice([safe, now]))
        for _, before in reversed(self.moves[len(self.moves) - chance.randint(0, len(self.moves)) :]):
            for path, data in before.items():
                if data is None:
                    path.unlink(missing_ok=True)
                elif path.parent.is_dir():
                    path.write_bytes(data)


@contextmanager
def replace_file_calls(disk: FailingDisk) -> Iterator[FailingDisk]:
    """Let a disk stand under `os` and `shutil.copyfile`."""
    real: dict[str, Callable[..., Any]] = {name: getattr(shutil if name == "copyfile" else os, name) for name in CALLS}

    def opened(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        place = disk.inside(path)
        if place is None:
            return real["open"](path, flags, *rest, **more)
        disk.tick()
        if flags & os.O_TRUNC:
            disk.touch(place)
        handle = real["open"](path, flags, *rest, **more)
        disk.paths[handle] = place
        return handle

    def write(handle: int, data: Any) -> int:
        place = disk.paths.get(handle)
        if place is not None:
            disk.touch(place)
            try:
                disk.tick()
            except BaseException:
                real["write"](handle, bytes(data)[: len(data) // 2])  # the last one is torn
                raise
        return real["write"](handle, data)

    def fsync(handle: int) -> None:
        place = disk.paths.get(handle)
        if place is None:
            return
        disk.tick()
        if place.is_dir():
            disk.moves = [move for move in disk.moves if move[0] != place]
        disk.durable.pop(place, None)

    def renamed(old: Any, new: Any, *rest: Any, **more: Any) -> None:
        one = disk.inside(old)
        two = disk.inside(new)
        if one is not None and two is not None:
            disk.tick()
            before = {one: one.read_bytes(), two: two.read_bytes() if two.is_file() else None}
            disk.moves.append((two.parent, before))
            if one in disk.durable:
                disk.durable[two] = disk.durable.pop(one)
        real["replace"](old, new, *rest, **more)

    def cut(handle: int, length: int) -> None:
        place = disk.paths.get(handle)
        if place is not None:
            disk.tick()
            disk.touch(place)
        real["ftruncate"](handle, length)

    def unlink(path: Any, *rest: Any, **more: Any) -> None:
        place = disk.inside(path)
        if place is not None and place.is_file():
            disk.tick()
            disk.moves.append((place.parent, {place: place.read_bytes()}))
            disk.durable.pop(place, None)
        real["unlink"](path, *rest, **more)

    def mkdir(path: Any, *rest: Any, **more: Any) -> None:
        if disk.inside(path) is not None:
            disk.tick()
        real["mkdir"](path, *rest, **more)

    def copyfile(old: Any, new: Any, *rest: Any, **more: Any) -> Any:
        place = disk.inside(new)
        if place is not None:
            disk.tick()
            disk.touch(place)
        return real["copyfile"](old, new, *rest, **more)

    ours = dict(zip(CALLS, (opened, write, fsync, renamed, cut, unlink, mkdir, copyfile), strict=True))
    for name, made in ours.items():
        setattr(shutil if name == "copyfile" else os, name, made)
    try:
        yield disk
    finally:
        for name, made in real.items():
            setattr(shutil if name == "copyfile" else os, name, made)
