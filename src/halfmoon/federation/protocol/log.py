"""What a person reads of a federation while it runs: one line an event, appended to a file that outlives processes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from halfmoon.storage import atomic_io


@dataclass(frozen=True)
class EventLog:
    """Lines of a log, in `path`; several processes may write to it, one after the other."""

    path: Path

    def say(self, words: str) -> None:
        """Add a line with the time of day; a line break becomes a blank. Raises OSError where it cannot be written."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {' '.join(words.splitlines())}\n"
        atomic_io.append(self.path, line.encode())


def size(count: int) -> str:
    """Return a number of bytes in words: 512 B, 36.1 kB, 26.4 MB."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


class Tail:
    """What is added to a text file from now on, by whole lines; a file that is not there yet has none."""

    def __init__(self, path: Path) -> None:
        """Begin at the end of `path`."""
        self.path = path
        self._at = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """Return the lines that were added since the last call; one that has no end yet comes later."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._at:  # somebody began it anew
                    self._at = 0
                file.seek(self._at)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._at += len(whole) + len(end)
        return (whole + end).decode(errors="replace").splitlines()
