"""What all pictures share: a figure without global state, and colors and marks that anybody can tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from halfmoon.errors import UserError

DOTS = 200
"""Dots per inch of a saved picture."""

GRAY = "#595959"

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
    """How one line is drawn: color, dashes and marker each tell it from its neighbors."""

    color: str
    dashes: tuple[int, tuple[float, ...]]
    marker: str


def look(number: int) -> Look:
    """Return the look of the line `number`; 315 different ones."""
    return Look(_COLORS[number % len(_COLORS)], _DASHES[number % len(_DASHES)], _MARKERS[number % len(_MARKERS)])


def figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches, that belongs to nobody but the caller."""
    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    return made


def tidy(axes: Axes) -> None:
    """Take away what carries no information."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    axes.tick_params(labelsize=8, colors=GRAY, labelcolor="black")


def write(made: Figure, path: Path) -> None:
    """Save a figure as PNG; raise UserError if the file cannot be written."""
    try:
        made.savefig(path, dpi=DOTS, format="png", metadata={"Software": "halfmoon"})
    except OSError as error:
        raise UserError(f"{path}: the picture cannot be written ({error.strerror or error}).") from error
