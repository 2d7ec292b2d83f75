"""Make, style and save figures without the global state of pyplot."""

import io
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from halfmoon.core.errors import UserError
from halfmoon.storage import atomic_io

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


FORMATS: dict[str, dict[str, str | None]] = {
    ".png": {"Software": "halfmoon"},
    ".pdf": {"Creator": "halfmoon", "CreationDate": None},
    ".svg": {"Creator": "halfmoon", "Date": None},
}
"""Suffixes of figures, with their metadata. Without a date, the same figure has the same bytes."""


def check_figure_suffix(path: Path) -> str:
    """Return the suffix of a figure's file, in lower case; raise UserError unless it is one of `FORMATS`."""
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise UserError(f"{path} does not end in {', '.join(FORMATS)}: the suffix chooses the format of a figure.")
    return suffix


def save_figure(figure: Figure, path: Path) -> None:
    """Save a figure as PNG, PDF or SVG, by the suffix of the file, completely or not at all.

    Raises:
        UserError: the suffix is another one, or the file cannot be written.
    """
    suffix = check_figure_suffix(path)
    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "halfmoon"}):  # names in an SVG file are random otherwise
        figure.savefig(content, dpi=DOTS_PER_INCH, format=suffix[1:], metadata=FORMATS[suffix])
    try:
        atomic_io.write_atomically(path, content.getvalue())
    except OSError as error:
        raise UserError(
            f"{path}: the figure cannot be written ({atomic_io.error_reason(error)}); {atomic_io.write_remedy(error)}, "
            "or choose another file."
        ) from error
