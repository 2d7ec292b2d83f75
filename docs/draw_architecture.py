"""Draw docs/images/architecture.png, the packages and the way of a round: `python docs/draw_architecture.py`.

A test compares `ROWS` with the imports of the package.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from halfmoon.report.figures import GRAY, new_figure

PICTURE = Path(__file__).resolve().parent / "images" / "architecture.png"

ROWS = (
    {"notebook": "results as objects"},
    {"cli": "commands and flags", "pages": "label, review, watch"},
    {"studies": "sweeps, image folders", "federation": "server, sites, Flower", "contract": "check-method"},
    {"sites": "folders, keys, trained models"},
    {"runs": "factory and runner: what a configuration describes, played"},
    {"config": "every option once", "methods": "one file a method or a loss, registry"},
    {"engine": "the round loop, clients", "report": "tables, charts"},
    {"data": "readers, splits, views", "aggregation": "robust rules, secure sums, privacy"},
    {"api": "Method, ClientUpdate", "storage": "run folders"},
    {"models": "networks"},
    {"core": "trees, random streams, gradients, optimizers, errors"},
)
"""The packages from the top down: each imports from its own row and those below it."""

PANEL, BLUE, ORANGE = "#f4f4f4", "#dbe7f5", "#fbe6d0"
ROUND = (
    ("Server state", "a tree: params, stats, ..."),
    ("Method.round", "asks: Federation.query(name, down)"),
    ("ServerRuntime", "cohort; memories; counts the cost"),
    ("ClientUpdate, for each client", "begin, step by step, finish"),
    ("Aggregators", "clip, median, Krum, sums, noise"),
    ("Method.round", "averages into the new state"),
    ("engine.loop", "tests, writes a row, saves"),
)
"""What a round passes, in order, and what happens there."""


def box(axes: Axes, left: float, low: float, width: float, height: float, words: tuple[str, str], color: str) -> None:
    """Draw a box with a name and what it does."""
    frame = FancyBboxPatch((left, low), width, height, boxstyle="round,pad=0,rounding_size=0.08", fc=color, ec=GRAY)
    axes.add_patch(frame)
    axes.text(left + width / 2, low + 0.64 * height, words[0], ha="center", va="center", fontsize=9, weight="bold")
    axes.text(left + width / 2, low + 0.27 * height, words[1], ha="center", va="center", fontsize=6.8)


def packages(axes: Axes) -> None:
    """Draw the rows of packages."""
    axes.set_title("Packages: imports go down only", fontsize=10, loc="left")
    for number, row in enumerate(reversed(ROWS)):
        width = 10 / len(row)
        for place, words in enumerate(row.items()):
            color = ORANGE if words[0] in ("api", "methods") else BLUE
            box(axes, place * width + 0.06, number + 0.1, width - 0.12, 0.78, words, color)
    axes.set(xlim=(0, 10), ylim=(0, len(ROWS)))


def cycle(axes: Axes) -> None:
    """Draw the way of a round."""
    axes.set_title("A round, from cohort to average", fontsize=10, loc="left")
    step = len(ROWS) / len(ROUND)
    for number, words in enumerate(ROUND):
        low = len(ROWS) - (number + 1) * step + 0.13
        mine = words[0].startswith(("Method", "ClientUpdate"))
        box(axes, 0.5, low, 3.6, 0.76, words, ORANGE if mine else PANEL)
        if number:
            arrow(axes, (2.3, low + step), (2.3, low + 0.76))
    last, first = 0.13 + 0.38, len(ROWS) - step + 0.13 + 0.38
    arrow(axes, (0.5, last), (0.5, first), "arc3,rad=-0.06")
    axes.text(0.13, len(ROWS) / 2, "next round", rotation=90, ha="center", va="center", fontsize=7, color=GRAY)
    axes.set(xlim=(0, 4.2), ylim=(0, len(ROWS)))


def arrow(axes: Axes, tail: tuple[float, float], head: tuple[float, float], bend: str = "arc3") -> None:
    """Draw an arrow between two points."""
    shape = FancyArrowPatch(tail, head, arrowstyle="-|>", mutation_scale=9, color=GRAY, connectionstyle=bend, lw=1)
    axes.add_patch(shape)


def draw() -> None:
    """Draw both halves side by side and save them."""
    made = new_figure(11, 5.6)
    left, right = made.subplots(1, 2, width_ratios=(10, 4.6))
    packages(left)
    cycle(right)
    for axes in (left, right):
        axes.set_axis_off()
    made.savefig(PICTURE, dpi=110, format="png", metadata={"Software": "halfmoon"})


if __name__ == "__main__":
    draw()
