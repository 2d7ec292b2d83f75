"""Colors, dashes and marks that anybody can tell apart, for pictures and pages alike."""

from __future__ import annotations

from typing import NamedTuple

# Okabe and Ito (2008), told apart under every color blindness; without their yellow, too pale for a line on white.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = (
    (0, ()),
    (0, (5, 1.5)),
    (0, (1.5, 1.2)),
    (0, (6, 1.5, 1.5, 1.5)),
    (0, (3, 1.2, 1.2, 1.2, 1.2, 1.2)),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")


class Look(NamedTuple):
    """How one line is drawn: color, dashes (offset, lengths) and marker each tell it from its neighbors."""

    color: str
    dashes: tuple[int, tuple[float, ...]]
    marker: str


def look(number: int) -> Look:
    """Return the look of the line `number`; 315 different ones."""
    return Look(_COLORS[number % len(_COLORS)], _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)])
