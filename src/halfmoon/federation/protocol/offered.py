"""Terms as people are shown them; it imports no torch, so that a site that only asks starts at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Offered:
    """Terms as they are shown to people: their hash, a sentence, and a table of (option, value, meaning)."""

    hash: str
    said: str
    rows: tuple[tuple[str, str, str], ...]
    brief: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return all of it as lines of text."""
        first, second = (max((len(row[k]) for row in self.rows), default=0) for k in (0, 1))
        table = [f"  {name:{first}}  {value:{second}}  {about}" for name, value, about in self.rows]
        return [self.said, *table, f"  hash: {self.hash}"]
