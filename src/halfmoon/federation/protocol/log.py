"""The terms of a federation as text, and sizes. Imports no torch, so it loads fast."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TermsSummary:
    """The terms of a federation, for the people at a site.

    Attributes:
        hash: the hash of the terms.
        sentence: the terms in one sentence.
        rows: a table of (option, value, meaning).
        brief: a few lines about what a site sends, to whom and for how long.
        tensors: a table of (tensor that a site sends, size, what it tells about a single image).
    """

    hash: str
    sentence: str
    rows: tuple[tuple[str, str, str], ...]
    brief: tuple[str, ...] = ()
    tensors: tuple[tuple[str, str, str], ...] = ()

    def format_lines(self) -> list[str]:
        """Format all options and tensors as lines of text, in aligned columns."""
        lines = [self.sentence, *_align(self.rows)]
        if self.tensors:
            lines.append("This site sends, and this tells about a single image:")
            lines += _align(self.tensors)
        lines.append(f"  hash: {self.hash}")
        return lines


def _align(rows: tuple[tuple[str, str, str], ...]) -> list[str]:
    """Format the rows of a table of (name, value, meaning) as lines with columns of equal width."""
    name_width = max((len(name) for name, _, _ in rows), default=0)
    value_width = max((len(value) for _, value, _ in rows), default=0)
    return [f"  {name:{name_width}}  {value:{value_width}}  {meaning}" for name, value, meaning in rows]


def format_bytes(count: int) -> str:
    """Format a number of bytes for people, in decimal units: 512 B, 36.1 kB, 26.4 MB, 1.5 GB."""
    value = float(count)
    unit = "B"
    for larger_unit in ("kB", "MB", "GB"):
        # 999.5 would be rounded to 1000.
        if value < 999.5:
            break
        value = value / 1000
        unit = larger_unit
    if unit == "B":
        return f"{count} B"
    return f"{value:.1f} {unit}"
