"""The log of a federation, one line for each event, and the terms as text. Imports no torch, so it loads fast."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from halfmoon.storage import atomic_io


@dataclass(frozen=True)
class EventLog:
    """A log file to which several processes may append lines."""

    path: Path

    def write(self, text: str) -> None:
        """Append a line with date and time; line breaks in `text` become blanks. Raises OSError if that fails."""
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {' '.join(text.splitlines())}\n"
        atomic_io.append(self.path, line.encode())


@dataclass(frozen=True)
class TermsSummary:
    """The terms of a federation, for the people at a site.

    Attributes:
        hash: the hash of the terms.
        sentence: the terms in one sentence.
        rows: a table of (option, value, meaning).
        brief: ten lines about what a site sends, to whom and for how long.
    """

    hash: str
    sentence: str
    rows: tuple[tuple[str, str, str], ...]
    brief: tuple[str, ...] = ()

    def format_lines(self) -> list[str]:
        """Format all options as lines of text, in aligned columns."""
        name_width = max((len(name) for name, _, _ in self.rows), default=0)
        value_width = max((len(value) for _, value, _ in self.rows), default=0)
        table = [f"  {name:{name_width}}  {value:{value_width}}  {meaning}" for name, value, meaning in self.rows]
        return [self.sentence, *table, f"  hash: {self.hash}"]


def format_bytes(count: int) -> str:
    """Format a number of bytes: 512 B, 36.1 kB, 26.4 MB."""
    value = float(count)
    unit = "B"
    for larger_unit in ("kB", "MB", "GB"):
        # 999.5 would be rounded to 1000.
        if value < 999.5:
            break
        value = value / 1000
        unit = larger_unit
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


class Tail:
    """Read the lines that are appended to a text file from now on. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = path.stat().st_size if path.exists() else 0

    def read_lines(self) -> list[str]:
        """Read the complete lines that were appended since the last call."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:  # the file was truncated or replaced
                    self._offset = 0
                file.seek(self._offset)
                # An incomplete last line is read by a later call.
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(complete) + len(newline)
        return (complete + newline).decode(errors="replace").splitlines()
