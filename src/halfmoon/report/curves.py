"""Draw learning curves: test accuracy and the quality of pseudo-labels, round by round."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from halfmoon.report.figures import GRAY, new_figure, save_figure, style_axes
from halfmoon.report.metrics import METRIC_NAMES, METRICS
from halfmoon.report.run_reader import StoredRun, dataset_name
from halfmoon.report.styles import LineStyle, line_styles

_MAX_NAMES_AT_LINES = 8
"""Largest number of methods whose names are at the ends of their lines; for more there is a legend."""


class SeedCurve(NamedTuple):
    """One quantity of a method over the R rounds in which all of its seeds were measured.

    Attributes:
        rounds: int64 (R,).
        mean: mean over seeds, (R,).
        low: the smallest of the seeds, (R,).
        high: the largest of the seeds, (R,).
    """

    rounds: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def seed_curve(runs: Sequence[StoredRun], group: str, name: str) -> SeedCurve:
    """Compute the mean and the range of a quantity over the seeds of a method, round by round.

    Args:
        runs: the runs of a method, at least one, each with another seed.
        group: a group of metrics in metrics.jsonl, such as "test".
        name: the name of a metric in this group, such as "accuracy".
    """
    curves = [run.series(group, name) for run in runs]  # values by round
    # Seeds may have been evaluated in different rounds, and a mean needs all of them.
    rounds = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = np.array([[curve[round] for round in rounds] for curve in curves])
    return SeedCurve(np.array(rounds, dtype=np.int64), values.mean(0), values.min(0), values.max(0))


_PANELS = {
    ("pseudo", "accuracy"): "correct pseudo-labels (%)",
    ("pseudo", "share_above"): "confident pseudo-labels (%)",
}
"""Titles of the quantities on the right side, which are drawn if a method has them."""


def draw_curves(runs: Sequence[StoredRun], path: Path) -> None:
    """Draw a PNG with one line for each method: the mean over seeds, in a band from the smallest to the largest.

    Test accuracy is on the left. Accuracy and share of confident pseudo-labels (above the threshold of the diagnostics)
    are on the right, if any method has values above zero. The title names data, split, labels and seeds.

    Args:
        runs: the runs. Those with one title are seeds of one method.
        path: the PNG file.

    Raises:
        UserError: the file cannot be written.
    """
    groups, styles = _group_by_title(runs)
    panels = {}  # the quantities on the right, with the methods that have values of them
    for quantity in _PANELS:
        panel_groups = _groups_with_values(groups, quantity)
        if panel_groups:
            panels[quantity] = panel_groups
    has_legend = len(groups) > _MAX_NAMES_AT_LINES
    # Inches for the longest name at the end of a line.
    name_width = 0.0 if has_legend else 0.06 * max(map(len, groups), default=0)
    width = 6.0 if panels else 4.6
    legend_columns, legend_rows = _legend_grid_size(list(groups), width)
    legend_height = 0.19 * legend_rows if has_legend else 0.0  # in inches
    figure = new_figure(width + name_width, 3.5 + legend_height)
    if runs and (title := describe_runs(runs)):
        figure.suptitle(title, fontsize=8.5, color=GRAY, x=0.01, ha="left")
    grid = figure.add_gridspec(max(1, len(panels)), 2 if panels else 1, width_ratios=(1.5, 1) if panels else (1,))
    main = figure.add_subplot(grid[:, 0])
    for number, (quantity, panel_groups) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[number, 1], sharex=main)
        _draw_quantity(axes, panel_groups, styles, quantity, _PANELS[quantity])
        if number + 1 < len(panels):
            axes.tick_params(labelbottom=False)
            axes.set_xlabel("")
    line_ends = _draw_quantity(main, groups, styles, ("test", "accuracy"), "test accuracy (%)")
    note = _describe_seeds_band(groups)
    if has_legend:
        _add_legend(figure, main, legend_columns, note)
    else:
        _label_line_ends(main, line_ends, styles)
        if note:
            figure.supxlabel(note, fontsize=7.5, color=GRAY, x=0.01, ha="left")
    save_figure(figure, path)


def draw_metric(runs: Sequence[StoredRun], metric: str, axes: Axes) -> None:
    """Draw one metric on given axes, with lines and bands as in `draw_curves` and a legend.

    Args:
        runs: the runs. Those with one title are seeds of one method.
        metric: a name in `halfmoon.report.metrics.METRICS`.
        axes: the axes.
    """
    group, name, factor = METRICS[metric]  # where metrics.jsonl has it, and the factor by which it is shown
    groups, styles = _group_by_title([run for run in runs if run.series(group, name)])
    readable, unit = METRIC_NAMES[metric]
    label = f"{readable.replace('_', ' ')}{f' ({unit})' if unit else ''}"
    _draw_quantity(axes, groups, styles, (group, name), label, factor)
    if groups:
        axes.legend(frameon=False, fontsize=8, title=_describe_seeds_band(groups) or None, title_fontsize=7.5)


def draw_client_accuracies(runs: Sequence[StoredRun], axes: Axes) -> None:
    """Draw the accuracy of the final model on the test share of each client: a dot a client and seed, a line for the mean.

    Args:
        runs: the runs whose summaries have "client_accuracy"; those with one title are seeds of one method.
        axes: the axes.
    """
    groups, styles = _group_by_title(runs)
    for number, (title, group) in enumerate(groups.items()):
        values: list[float] = []
        for run in group:
            summary = run.summary or {}
            values += [100 * share for share in summary["client_accuracy"]["each"].values()]
        # Spread the dots over the width of a column, so that equal values do not cover each other: multiples of the
        # golden ratio modulo 1 are evenly spread.
        offsets = number + 0.3 * (np.arange(len(values)) * 0.618034 % 1 - 0.5)
        axes.scatter(offsets, values, s=14, color=styles[title].color, alpha=0.7, linewidth=0, label=title)
        axes.hlines(float(np.mean(values)), number - 0.3, number + 0.3, color=styles[title].color, linewidth=1.4)
    axes.set_xticks(range(len(groups)), list(groups), rotation=20 if len(groups) > 3 else 0, fontsize=8)
    axes.set_title("accuracy of the final model at each client (%); line: mean", fontsize=8.5, loc="left")
    axes.margins(x=0.1)
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)
    style_axes(axes)


def _group_by_title(runs: Sequence[StoredRun]) -> tuple[dict[str, list[StoredRun]], dict[str, LineStyle]]:
    """Group runs by their title; return the runs and the style of each line."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.title, []).append(run)
    # Styles depend on the name of the method, not on its title, so that they are those of all other figures.
    methods = [str(group[0].options.get("method", title)) for title, group in groups.items()]
    return groups, dict(zip(groups, line_styles(methods), strict=True))


def _groups_with_values(groups: dict[str, list[StoredRun]], quantity: tuple[str, str]) -> dict[str, list[StoredRun]]:
    """Select the methods that have a quantity; {} if it is zero for all of them."""
    metric_group, name = quantity
    curves = {title: seed_curve(runs, metric_group, name) for title, runs in groups.items()}
    if not any(curve.high.any() for curve in curves.values()):
        return {}
    return {title: groups[title] for title, curve in curves.items() if len(curve.rounds)}


def _add_legend(figure: Figure, main: Axes, columns: int, note: str) -> None:
    """Add a legend of the methods below the panels of a figure.

    Args:
        figure: the figure.
        main: the axes with a line for each method.
        columns: number of columns of the legend.
        note: its title, which explains the bands.
    """
    handles, names = main.get_legend_handles_labels()
    legend = figure.legend(
        handles,
        names,
        loc="outside lower left",
        ncols=columns,
        frameon=False,
        fontsize=8,
        handlelength=3.5,
        alignment="left",
        title=note,
        title_fontproperties=FontProperties(size=7.5),
    )
    legend.get_title().set_color(GRAY)


def separate_positions(heights: Sequence[float], gap: float) -> list[float]:
    """Move the heights of labels as little as possible (least squares) until they do not overlap.

    Args:
        heights: the heights, in any order.
        gap: the minimum distance of neighbors.

    Returns:
        The new heights in the order of `heights`; labels keep their order from bottom to top.
    """
    order = sorted(range(len(heights)), key=lambda n: heights[n])
    # After subtracting rank * gap, the constraint is that positions do not decrease: isotonic regression, solved by
    # pooling adjacent violators. Each pool is a mean and a count.
    pools: list[tuple[float, int]] = []
    for rank, n in enumerate(order):
        mean = heights[n] - rank * gap
        count = 1
        while pools and pools[-1][0] > mean:
            last_mean, last_count = pools.pop()
            mean = (last_mean * last_count + mean * count) / (last_count + count)
            count = last_count + count
        pools.append((mean, count))
    shifted = [mean for mean, count in pools for _ in range(count)]
    positions = [0.0] * len(heights)
    for rank, n in enumerate(order):
        positions[n] = shifted[rank] + rank * gap
    return positions


def _draw_quantity(
    axes: Axes,
    groups: dict[str, list[StoredRun]],
    styles: dict[str, LineStyle],
    quantity: tuple[str, str],
    label: str,
    factor: float = 100,
) -> dict[str, tuple[float, float]]:
    """Draw the learning curves of one quantity: a line for each method, in a band over its seeds.

    Args:
        axes: the axes.
        groups: the runs of each method by its title.
        styles: the line style of each method by its title.
        quantity: group and name of the quantity in metrics.jsonl, such as ("test", "accuracy").
        label: title of the axes.
        factor: factor of the values; 100 shows shares in percent.

    Returns:
        The last point (x, y) of each line by its title.
    """
    metric_group, name = quantity
    ends: dict[str, tuple[float, float]] = {}
    for number, (title, group) in enumerate(groups.items()):
        line = seed_curve(group, metric_group, name)
        if not len(line.rounds):
            continue
        style = styles[title]
        # About seven markers a line, shifted from line to line so that they do not cover each other.
        marker_interval = max(1, len(line.rounds) // 7)
        axes.plot(
            line.rounds,
            factor * line.mean,
            color=style.color,
            linestyle=style.dashes,
            linewidth=1.4,
            marker=style.marker,
            markersize=4,
            markevery=(number * marker_interval // max(1, len(groups)), marker_interval),
            label=title,
        )
        if len(group) > 1:
            axes.fill_between(
                line.rounds, factor * line.low, factor * line.high, color=style.color, alpha=0.18, linewidth=0
            )
        ends[title] = (float(line.rounds[-1]), float(factor * line.mean[-1]))
    axes.set_xlabel("round", fontsize=8.5)
    axes.set_title(label, fontsize=8.5, loc="left")
    axes.margins(x=0.03)
    # Percentages are shown over at least 4 points.
    _widen_axes(axes, 4.0 if factor == 100 else 0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)
    style_axes(axes)
    if factor == 100:
        # Around lines at 0 or 100 Matplotlib shows impossible percentages.
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -2), min(high, 102))
    return ends


def _widen_axes(axes: Axes, span: float) -> None:
    """Widen axes to at least two rounds (x) and to `span` (y), because a smaller range shows only noise.

    Accuracies and shares are not negative, so a range that was widened below zero is moved up.
    """
    left, right = axes.get_xlim()
    axes.set_xlim(*_widen_range(left, right, 2.0))
    bottom, top = axes.get_ylim()
    bottom, top = _widen_range(bottom, top, span)
    lowest_bottom = -0.03 * (top - bottom)  # 3 % of the range may be below zero
    shift = max(0.0, lowest_bottom - bottom)
    axes.set_ylim(bottom + shift, top + shift)


def _legend_grid_size(names: Sequence[str], width: float) -> tuple[int, int]:
    """Compute the number of columns of a legend in `width` inches, and of its rows, including the note."""
    longest = max(map(len, names), default=0)
    # 0.75 inches for the sample of a line, 0.055 for a letter.
    columns = max(1, int(width / (0.75 + 0.055 * longest)))
    rows = -(-len(names) // columns)  # ceiling division
    return columns, rows + 1


def _widen_range(low: float, high: float, span: float) -> tuple[float, float]:
    """Widen a range on both sides until it has the length `span`; a longer one remains."""
    missing = max(0.0, span - (high - low))
    return low - missing / 2, high + missing / 2


def _label_line_ends(axes: Axes, ends: dict[str, tuple[float, float]], styles: dict[str, LineStyle]) -> None:
    """Write the name of each method at the end of its line, without overlaps, connected to it by a thin line."""
    if not ends:
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top)  # so that the labels do not change the range
    line_height = 0.062 * (top - bottom)  # height of a line of text relative to the axes
    positions = separate_positions([height for _, height in ends.values()], line_height)
    # Spreading may move the highest label above the axes, so all of them move down.
    overshoot = max(0.0, max(positions) - top)
    for (title, (round, height)), position in zip(ends.items(), positions, strict=True):
        axes.annotate(
            title,
            xy=(round, height),
            xytext=(1.05, position - overshoot),
            textcoords=axes.get_yaxis_transform(),
            color=_darken(styles[title].color),
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": styles[title].color,
                "linewidth": 0.6,
                "shrinkA": 1,
                "relpos": (0, 0.5),
                "shrinkB": 3,
            },
        )


def _darken(color: str) -> str:
    """Darken a color "#rrggbb" for text, because thin letters need more contrast than lines."""
    return "#" + "".join(f"{int(int(color[n : n + 2], 16) * 0.75):02x}" for n in (1, 3, 5))


def _describe_seeds_band(groups: dict[str, list[StoredRun]]) -> str:
    counts = sorted({len(group) for group in groups.values()})
    if not counts or counts[-1] == 1:
        return ""
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean of {seeds} seeds; band: smallest to largest"


def _describe_split(options: Mapping[str, Any]) -> str:
    """Describe how a run's images were split, such as "dir, 100 clients"; "" if its options do not tell.

    Args:
        options: the options of the run's config.toml; `setting` is the rule by which classes differ between clients,
            such as "dir", which draws the classes of a client from a Dirichlet distribution.
    """
    setting = str(options.get("setting", ""))
    alpha = options.get("dirichlet_alpha")
    # A configuration contains the Dirichlet concentration also for settings that do not draw from this distribution.
    uses_alpha = alpha is not None and ("dir" in setting or "fedloke" in setting)
    texts = []
    if uses_alpha:
        texts.append(f"{setting} (\N{GREEK SMALL LETTER ALPHA} = {alpha:g})")
    elif setting:
        texts.append(setting)
    if isinstance(options.get("clients"), int):
        texts.append(f"{options['clients']} clients")
    return ", ".join(texts)


def _describe_labels(runs: Sequence[StoredRun]) -> str:
    """Describe the number of labels; "" if it is unknown or differs between the runs."""
    counts = {(run.split or {}).get("counts", {}).get("labeled") for run in runs}
    (count,) = counts if len(counts) == 1 else (None,)
    return "" if count is None else f"{count:,} labels"


def _describe_seeds(runs: Sequence[StoredRun]) -> str:
    """Describe the seeds of runs for the title of a figure: "seeds 0 to 4" if they are consecutive, else a list."""
    numbers = {run.options.get("seed", 0) for run in runs}
    seeds = sorted(n for n in numbers if isinstance(n, int))
    if len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    if not seeds:
        return ""
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def describe_runs(runs: Sequence[StoredRun]) -> str:
    """Describe the data, split, labels and seeds that all runs share, in one line for the title of a figure."""
    first, *rest = [run.options for run in runs]
    shared = {key: value for key, value in first.items() if all(options.get(key) == value for options in rest)}
    data = dataset_name(shared["data"]) if shared.get("data") else ""
    texts = [data, _describe_split(shared), _describe_labels(runs), _describe_seeds(runs)]
    return " \N{MIDDLE DOT} ".join(text for text in texts if text)
