"""The log of a federation, one line an event, and its terms for people. Imports no torch, to start at once."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from halfmoon.storage import atomic_io


@dataclass(frozen=True)
class EventLog:
    """The log in the file `path`; several processes may write to it, one after the other."""

    path: Path

    def say(self, words: str) -> None:
        """Add a line with the time of day; a line break becomes a blank. Raises OSError where it cannot be written."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {' '.join(words.splitlines())}\n"
        atomic_io.append(self.path, line.encode())


@dataclass(frozen=True)
class TermsSummary:
    """Terms for people: their hash, a sentence, a table of (option, value, meaning), and ten lines in `brief`."""

    hash: str
    sentence: str
    rows: tuple[tuple[str, str, str], ...]
    brief: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        first, second = (max((len(row[k]) for row in self.rows), default=0) for k in (0, 1))
        table = [f"  {name:{first}}  {value:{second}}  {about}" for name, value, about in self.rows]
        return [self.sentence, *table, f"  hash: {self.hash}"]


def format_bytes(count: int) -> str:
    """Return a number of bytes in words: 512 B, 36.1 kB, 26.4 MB."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


class Tail:
    """Reads the lines that are added to a text file from now on; the file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def lines(self) -> list[str]:
        """Return the whole lines that were added since the last call."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # the file was begun anew
                    self._offset = 0
                file.seek(self._offset)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(end)
        return (whole + end).decode(errors="replace").splitlines()
