"""Draw docs/images/architecture.png, the packages and the path of a round: `python docs/draw_architecture.py`.

A test compares `ROWS` with the imports of the package.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from halfmoon.report.figures import GRAY, new_figure

PICTURE = Path(__file__).resolve().parent / "images" / "architecture.png"

ROWS = (
    {"cli": "commands and flags"},
    {"pages": "label, review, watch"},
    {"studies": "Python API, sweeps, image folders", "federation": "server, sites, Flower, check-method"},
    {"runs": "from options to a run folder", "sites": "folders, keys, trained models"},
    {"config": "every option once", "engine": "the round loop, clients, executors"},
    {"methods": "one file a method or a loss", "aggregation": "robust rules, secure sums, privacy"},
    {"api": "Method, ClientUpdate", "data": "readers, splits, views", "report": "tables, charts"},
    {"models": "networks, model files", "storage": "run folders, checkpoints"},
    {"core": "trees, random streams, gradients, optimizers, errors"},
)
"""The packages from the top down. Each imports only from the rows below it: those of a row do not know one another."""

PANEL, BLUE, ORANGE = "#f4f4f4", "#dbe7f5", "#fbe6d0"
ROUND = (
    ("Server state", "a tree: params, stats, ..."),
    ("Method.round", "Federation.query(name, broadcast)"),
    ("ServerRuntime", "sends to the cohort, counts the cost"),
    ("ClientUpdate, at each client", "begin, a step a batch, finish"),
    ("Aggregators", "clip, median, Krum, sums, noise"),
    ("Method.round", "averages into the new state"),
    ("run_rounds", "evaluates, writes metrics, saves"),
)
"""The steps of a round in order: a function or class, and its task."""


def draw_box(
    axes: Axes, left: float, bottom: float, width: float, height: float, text: tuple[str, str], color: str
) -> None:
    """Draw a box with a name, and below it a line about its task.

    Args:
        axes: the axes.
        left, bottom, width, height: the position and size of the box, in units of the axes.
        text: the name and the line.
        color: the color of the box.
    """
    frame = FancyBboxPatch((left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.08", fc=color, ec=GRAY)
    axes.add_patch(frame)
    axes.text(left + width / 2, bottom + 0.64 * height, text[0], ha="center", va="center", fontsize=9, weight="bold")
    axes.text(left + width / 2, bottom + 0.27 * height, text[1], ha="center", va="center", fontsize=6.8)


def draw_packages(axes: Axes) -> None:
    """Draw the rows of packages."""
    axes.set_title("Packages: each imports from lower rows only", fontsize=10, loc="left")
    for number, row in enumerate(reversed(ROWS)):
        width = 10 / len(row)
        for column, (package, task) in enumerate(row.items()):
            color = ORANGE if package in ("api", "methods") else BLUE
            draw_box(axes, column * width + 0.06, number + 0.1, width - 0.12, 0.78, (package, task), color)
    axes.set(xlim=(0, 10), ylim=(0, len(ROWS)))


def draw_round(axes: Axes) -> None:
    """Draw the steps of a round, with an arrow from each to the next and from the last to the first."""
    axes.set_title("A round, from cohort to average", fontsize=10, loc="left")
    height = 0.76
    spacing = len(ROWS) / len(ROUND)
    top = len(ROWS) - spacing + 0.13
    for number, text in enumerate(ROUND):
        bottom = top - number * spacing
        is_method_code = text[0].startswith(("Method", "ClientUpdate"))
        draw_box(axes, 0.5, bottom, 3.6, height, text, ORANGE if is_method_code else PANEL)
        if number:
            draw_arrow(axes, (2.3, bottom + spacing), (2.3, bottom + height))
    middle_of_last = 0.13 + height / 2
    middle_of_first = top + height / 2
    draw_arrow(axes, (0.5, middle_of_last), (0.5, middle_of_first), "arc3,rad=-0.06")
    axes.text(0.13, len(ROWS) / 2, "next round", rotation=90, ha="center", va="center", fontsize=7, color=GRAY)
    axes.set(xlim=(0, 4.2), ylim=(0, len(ROWS)))


def draw_arrow(axes: Axes, tail: tuple[float, float], head: tuple[float, float], bend: str = "arc3") -> None:
    """Draw an arrow between two points."""
    shape = FancyArrowPatch(tail, head, arrowstyle="-|>", mutation_scale=9, color=GRAY, connectionstyle=bend, lw=1)
    axes.add_patch(shape)


def main() -> None:
    """Draw both halves side by side and save them."""
    figure = new_figure(11, 5.6)
    left, right = figure.subplots(1, 2, width_ratios=(10, 4.6))
    draw_packages(left)
    draw_round(right)
    for axes in (left, right):
        axes.set_axis_off()
    figure.savefig(PICTURE, dpi=110, format="png", metadata={"Software": "halfmoon"})


if __name__ == "__main__":
    main()
