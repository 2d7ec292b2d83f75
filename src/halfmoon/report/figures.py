"""Make, style and save figures without the global state of pyplot."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from halfmoon.core.errors import UserError

DOTS_PER_INCH = 200
"""Resolution of a saved figure."""

GRAY = "#595959"
"""Color of axes."""


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure; width and height are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Axes) -> None:
    """Remove the top and right lines of axes, and make the others gray."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRAY)
    axes.tick_params(labelsize=8, colors=GRAY, labelcolor="black")


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure as PNG; raise `UserError` if the file cannot be written."""
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH, format="png", metadata={"Software": "halfmoon"})
    except OSError as error:
        raise UserError(f"{path}: the figure cannot be written ({error.strerror or error}).") from error
