"""Draw a split (images by client and class, as Figure 3 of FedDure) and a model's calibration."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from halfmoon.report.bands import UNKNOWN_CLASS, count_by_class, pick_evenly
from halfmoon.report.figures import GRAY, new_figure, save_figure, style_axes
from halfmoon.report.styles import line_style

MAX_CLIENTS = 40
"""Largest number of clients that are drawn."""

_POINTS_PER_INCH = 72
_LABEL_POINTS = 8.5

_SERVER_COLUMNS = 2
"""Columns for a server: one for its images, and an empty one before the clients."""


def bubble_areas(counts: np.ndarray, largest: float) -> np.ndarray:
    """Scale counts to bubble areas in square points; the largest count has the area `largest`."""
    top = counts.max(initial=0)
    return counts * (largest / top) if top else np.zeros(counts.shape)


def draw_split(summary: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG of a split, with clients as columns and classes as rows.

    Labeled images are in the upper panel, unlabeled ones in the lower. A server with labeled images is on the left.

    Args:
        summary: the dictionary of `halfmoon.data.partition.heterogeneity.summarize`.
        path: the PNG file.

    Raises:
        UserError: the file cannot be written.
    """
    classes: Sequence[str] = summary["counts"]["classes"]
    clients = summary["counts"]["clients"]
    numbers = pick_evenly(range(clients), MAX_CLIENTS)  # the clients that are shown
    server = summary["server"]
    first_client = _SERVER_COLUMNS if server else 0
    columns = first_client + len(numbers)
    class_inches = float(np.clip(2.1 / len(classes), 0.055, 0.21))
    client_inches = float(np.clip(5.6 / columns, 0.135, 0.3))
    parts = {kind: count_by_class(summary, kind) for kind in ("labeled", "unlabeled")}
    name_inches = 0.055 * max(len(name) for part in parts.values() for name in part.names)
    # A panel of a single row, of images whose classes are unknown, needs room for its legend.
    heights = [max(0.5, class_inches * len(part.names)) for part in parts.values()]
    # 1.5 inches are for titles, labels and the legend.
    figure = new_figure(width=max(4.0, client_inches * columns + 1.5 + name_inches), height=sum(heights) + 1.5)
    panels = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    # With many classes, bubbles may overlap, because smaller ones would be invisible.
    largest = (0.95 * _POINTS_PER_INCH * min(client_inches, max(class_inches, 0.09))) ** 2
    for number, (axes, (kind, part)) in enumerate(zip(panels, parts.items(), strict=True)):
        counts = np.zeros((columns, len(part.names)), np.int64)
        counts[first_client:] = [part.clients[client] for client in numbers]
        if part.server is not None:
            counts[0] = part.server
        _draw_panel(axes, counts, largest, line_style(number).color)
        unknown = " whose classes are unknown" if part.names == [UNKNOWN_CLASS] else ""
        axes.set_title(
            f"{kind}: {summary['counts'][kind]:,} images{unknown}",
            fontsize=_LABEL_POINTS,
            loc="left",
            fontweight="bold",
        )
        _label_ticks(axes.yaxis, part.names, class_inches)
    _label_ticks(
        panels[1].xaxis,
        [str(client) for client in numbers],
        client_inches / 2.2,  # a number is 2.2 times as wide as high, and side by side only the width matters
        leading_names=["server"] if server else [],
        first=first_client,
    )
    label = "client" if clients <= MAX_CLIENTS else f"client ({MAX_CLIENTS} of {clients} shown, evenly chosen)"
    panels[1].set_xlabel(label, fontsize=_LABEL_POINTS)
    save_figure(figure, path)


def _draw_panel(axes: Axes, counts: np.ndarray, largest: float, color: str) -> None:
    """Draw one panel of a split: the images of each client and class as bubbles, with a legend of three bubbles.

    Args:
        axes: the panel, with clients from left to right and classes from bottom to top.
        counts: images by client and class, (clients, classes).
        largest: area of the bubble of the largest count, in square points; areas are proportional to counts.
        color: color of all bubbles.
    """
    x, y = np.nonzero(counts)
    axes.scatter(x, y, s=bubble_areas(counts, largest)[x, y], color=color, linewidth=0)
    axes.set_xlim(-0.7, counts.shape[0] - 0.3)
    axes.set_ylim(-0.7, counts.shape[1] - 0.3)
    axes.set_axisbelow(True)
    axes.grid(color="#EEEEEE", linewidth=0.5)
    style_axes(axes)
    axes.tick_params(length=2)
    # The largest count, and round counts of about a half and a tenth of it.
    samples = _round_numbers(int(counts.max(initial=0)))
    if counts.shape[1] == 1:  # a single row has no room for more
        samples = samples[:1]
    # Marker sizes of Line2D are diameters, those of scatter are areas.
    sizes = [np.sqrt(largest * sample / counts.max()) for sample in samples]
    handles = [
        Line2D([], [], linestyle="", marker="o", color=color, markersize=size, markeredgewidth=0, label=f"{n:,}")
        for n, size in zip(samples, sizes, strict=True)
    ]
    axes.legend(
        handles=handles,
        title="images",
        title_fontsize=7.5,
        fontsize=7.5,
        frameon=False,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        borderaxespad=0.3,
        labelspacing=0.9,
    )


def _round_numbers(top: int) -> list[int]:
    """Choose up to three counts for the legend: the largest, about a half and about a tenth of it."""
    counts = (top, _keep_first_digit(top / 2), _keep_first_digit(top / 10))
    return sorted({n for n in counts if n >= 1}, reverse=True)


def _keep_first_digit(number: float) -> int:
    """Round down to one significant digit; 0 for numbers below 1."""
    if number < 1:
        return 0
    unit = 10 ** int(np.log10(number))
    return int(number // unit * unit)


def _label_ticks(axis: Any, names: list[str], inches: float, leading_names: Sequence[str] = (), first: int = 0) -> None:
    """Label the ticks of an axis with names, and leave out so many of `names` that the others do not overlap.

    Args:
        axis: the axis of Matplotlib.
        names: the names of the ticks from `first` on, such as those of clients.
        inches: the distance of two ticks.
        leading_names: the names of the ticks from 0 on, which are never left out, such as that of the server.
        first: the position of the first of `names`.
    """
    # A label is 0.115 inches high.
    interval = max(1, int(np.ceil(0.115 / inches)))
    positions = [*range(len(leading_names)), *range(first, first + len(names), interval)]
    axis.set_ticks(positions, [*leading_names, *names[::interval]], fontsize=7.5)


def draw_reliability(scores: Mapping[str, Any], path: Path) -> None:
    """Draw a PNG of a model's calibration: bars of accuracy over probability, and below them the images of each bin.

    A bar below the diagonal shows that the model is overconfident.

    Args:
        scores: the dict of `halfmoon.sites.inference.measure.compute_scores`.
        path: the PNG file.

    Raises:
        UserError: the file cannot be written.
    """
    # Each row is a bin of probabilities from "above" to "to", with its accuracy and mean probability ("confidence").
    rows = [row for row in scores["reliability"] if row["images"]]
    left = [row["above"] for row in rows]
    width = [row["to"] - row["above"] for row in rows]
    figure = new_figure(width=4.2, height=4.6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([0, 1], [0, 1], color=GRAY, linewidth=1, dashes=(4, 2), label="perfect calibration")
    bars = {"align": "edge", "edgecolor": "white", "linewidth": 0.5}
    above.bar(left, [row["accuracy"] for row in rows], width, color=line_style(0).color, label="accuracy", **bars)
    means = [row["confidence"] for row in rows]
    above.plot(
        means,
        [row["accuracy"] for row in rows],
        "o",
        color=line_style(1).color,
        markersize=3.5,
        label="mean of the bin",
    )
    above.set_ylabel("accuracy", fontsize=_LABEL_POINTS)
    above.set_ylim(0, 1)
    error = f"expected calibration error {100 * scores['calibration_error']:.2f} %, {scores['images']:,} images"
    above.set_title(error, fontsize=_LABEL_POINTS, loc="left", fontweight="bold")
    above.legend(fontsize=7.5, frameon=False, loc="upper left")
    below.bar(left, [row["images"] for row in rows], width, color=GRAY, **bars)
    below.set_ylabel("images", fontsize=_LABEL_POINTS)
    below.set_xlabel("probability of the label", fontsize=_LABEL_POINTS)
    below.set_xlim(0, 1)
    for axes in (above, below):
        style_axes(axes)
    save_figure(figure, path)
