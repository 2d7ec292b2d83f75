"""Simulate a disk that fails: the Nth call raises an error, or the power is lost at the Nth call.

The functions of `os` and `shutil` through which a process changes files are replaced for paths below a folder. A loss of
power drops what was not flushed, as a journaling file system may: of a file's unflushed bytes any prefix may remain, and
renames and removals since the last flush of their folder may be undone, the latest first. SQLite is tested this way.
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
    """The machine is off. Derives from BaseException so that no handler catches it."""


@dataclass
class FailingDisk:
    """Counts the calls below a folder and fails at one of them.

    Attributes:
        root: the folder.
        failing_call: index of the call that fails, -1 for none.
        error_number: errno of the OSError to raise, or None for a loss of power.
        count: calls so far.
        off: whether the power is lost.
        paths: path of each open file handle.
        durable: the flushed content of each file with unflushed bytes.
        moves: (folder, content of the affected files before) of each rename and removal that is not flushed.
    """

    root: Path
    failing_call: int = -1
    error_number: int | None = None
    count: int = 0
    off: bool = False
    paths: dict[int, Path] = field(default_factory=dict)
    durable: dict[Path, bytes] = field(default_factory=dict)
    moves: list[tuple[Path, dict[Path, bytes | None]]] = field(default_factory=list)

    def find_path(self, path: Any) -> Path | None:
        """Return the path of a file below the root, None for any other file and for lock files, which are empty."""
        if isinstance(path, int):
            return self.paths.get(path)
        found = Path(os.fspath(path)) if isinstance(path, str | os.PathLike) else None
        below = found is not None and (found == self.root or self.root in found.parents)
        return found if below and ".lock" not in found.name else None

    def count_call(self) -> None:
        """Count a call, and fail if it is the failing one."""
        if self.off:
            raise PowerLoss
        self.count += 1
        if self.count - 1 != self.failing_call:
            return
        if self.error_number is None:
            self.off = True
            raise PowerLoss
        raise OSError(self.error_number, os.strerror(self.error_number))

    def record_durable_content(self, path: Path) -> None:
        """Store the content of a file before its first unflushed change."""
        self.durable.setdefault(path, path.read_bytes() if path.is_file() else b"")

    def drop_unflushed(self, generator: random.Random) -> None:
        """Leave a random state on the disk that is possible after the loss of power."""
        for path, durable in self.durable.items():
            if path.is_file():
                current = path.read_bytes()
                if current.startswith(durable):
                    # The file was appended to: any prefix of the appended bytes may be on the disk.
                    path.write_bytes(current[: generator.randint(len(durable), len(current))])
                else:
                    path.write_bytes(generator.choice([durable, current]))
        undone = generator.randint(0, len(self.moves))
        for _, before in reversed(self.moves[len(self.moves) - undone :]):
            for path, data in before.items():
                if data is None:
                    path.unlink(missing_ok=True)
                elif path.parent.is_dir():
                    path.write_bytes(data)


@contextmanager
def replace_file_calls(disk: FailingDisk) -> Iterator[FailingDisk]:
    """Replace the functions in `CALLS` by functions that count their calls on a disk and fail when it fails."""
    real: dict[str, Callable[..., Any]] = {name: getattr(shutil if name == "copyfile" else os, name) for name in CALLS}

    def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        found = disk.find_path(path)
        if found is not None:
            disk.count_call()
            if flags & os.O_TRUNC:  # opening empties the file, so what it had is unflushed from now on
                disk.record_durable_content(found)
        handle = real["open"](path, flags, *args, **kwargs)
        if found is not None:
            disk.paths[handle] = found
        return handle

    def write(handle: int, data: Any) -> int:
        path = disk.paths.get(handle)
        if path is not None:
            disk.record_durable_content(path)
            try:
                disk.count_call()
            except BaseException:
                real["write"](handle, bytes(data)[: len(data) // 2])  # the failing write is torn
                raise
        return real["write"](handle, data)

    def fsync(handle: int) -> None:
        path = disk.paths.get(handle)
        if path is None:
            return
        disk.count_call()
        if path.is_dir():
            # Flushing a folder makes renames and removals in it final; flushing a file, its bytes.
            disk.moves = [move for move in disk.moves if move[0] != path]
        disk.durable.pop(path, None)

    def replace(old: Any, new: Any, *args: Any, **kwargs: Any) -> None:
        source = disk.find_path(old)
        target = disk.find_path(new)
        if source is not None and target is not None:
            disk.count_call()
            before = {source: source.read_bytes(), target: target.read_bytes() if target.is_file() else None}
            disk.moves.append((target.parent, before))
            # Unflushed bytes move with the file: a rename does not flush them.
            if source in disk.durable:
                disk.durable[target] = disk.durable.pop(source)
        real["replace"](old, new, *args, **kwargs)

    def ftruncate(handle: int, length: int) -> None:
        path = disk.paths.get(handle)
        if path is not None:
            disk.count_call()
            disk.record_durable_content(path)
        real["ftruncate"](handle, length)

    def unlink(path: Any, *args: Any, **kwargs: Any) -> None:
        found = disk.find_path(path)
        if found is not None and found.is_file():
            disk.count_call()
            disk.moves.append((found.parent, {found: found.read_bytes()}))
            disk.durable.pop(found, None)
        real["unlink"](path, *args, **kwargs)

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if disk.find_path(path) is not None:
            disk.count_call()
        real["mkdir"](path, *args, **kwargs)

    def copyfile(old: Any, new: Any, *args: Any, **kwargs: Any) -> Any:
        target = disk.find_path(new)
        if target is not None:
            disk.count_call()
            disk.record_durable_content(target)
        return real["copyfile"](old, new, *args, **kwargs)

    replacements = {
        "open": open_file,
        "write": write,
        "fsync": fsync,
        "replace": replace,
        "ftruncate": ftruncate,
        "unlink": unlink,
        "mkdir": mkdir,
        "copyfile": copyfile,
    }
    for name, function in replacements.items():
        setattr(shutil if name == "copyfile" else os, name, function)
    try:
        yield disk
    finally:
        for name, function in real.items():
            setattr(shutil if name == "copyfile" else os, name, function)
