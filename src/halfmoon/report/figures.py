"""What all pictures share: a figure without global state, plain axes, and how it is saved."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from halfmoon.core.errors import UserError

DOTS_PER_INCH = 200
"""Dots per inch of a saved picture."""

GRAY = "#595959"


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches, that belongs to nobody but the caller."""
    picture = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(picture)
    return picture


def style_axes(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    axes.tick_params(labelsize=8, colors=GRAY, labelcolor="black")


def save_figure(picture: Figure, path: Path) -> None:
    """Save a figure as PNG; raise UserError if the file cannot be written."""
    try:
        picture.savefig(path, dpi=DOTS_PER_INCH, format="png", metadata={"Software": "halfmoon"})
    except OSError as error:
        raise UserError(f"{path}: the picture cannot be written ({error.strerror or error}).") from error
