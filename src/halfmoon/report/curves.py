"""Learning curves: test accuracy, and the quality of pseudo-labels, round by round."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from halfmoon.report.figures import GRAY, new_figure, save_figure, style_axes
from halfmoon.report.frame import METRICS
from halfmoon.report.run_reader import StoredRun, dataset_name
from halfmoon.report.styles import LineStyle
from halfmoon.report.styles import line_styles as styles_of

_MAX_NAMES_AT_LINES = 8  # so many names find room beside the ends of their lines; more go into a legend


class SeedCurve(NamedTuple):
    """One quantity of one method over the rounds that all its seeds measured."""

    rounds: np.ndarray  # (R,) int64
    mean: np.ndarray  # (R,) over seeds
    low: np.ndarray  # (R,) the smallest of the seeds
    high: np.ndarray  # (R,) the largest


def seed_curve(runs: Sequence[StoredRun], part: str, name: str) -> SeedCurve:
    """Return `row[part][name]` of the seeds of one method, over the rounds that every one of them has."""
    each = [run.series(part, name) for run in runs]
    rounds = sorted(set.intersection(*(set(series) for series in each)))
    values = np.array([[series[round] for round in rounds] for series in each])
    return SeedCurve(np.array(rounds, dtype=np.int64), values.mean(0), values.min(0), values.max(0))


_PANELS = {
    ("pseudo", "accuracy"): "correct pseudo-labels (%)",
    ("pseudo", "share_above"): "confident pseudo-labels (%)",
}
"""What stands on the right, where a method has any."""


def draw_curves(runs: Sequence[StoredRun], path: Path) -> None:
    """Draw a PNG with one line a method (several seeds: their mean, in a band from the smallest to the largest).

    Left test accuracy; right, where a method makes any, the accuracy of its pseudo-labels and the share of them
    that is confident (above the threshold of the diagnostics); a panel without anything above zero is left out. The
    head says on what. Raise UserError if the picture cannot be written.
    """
    groups, styles = _group_by_title(runs)
    panels = {what: lines for what in _PANELS if (lines := _groups_with_values(groups, what))}
    beside = 0.06 * max(map(len, groups), default=0) if len(groups) <= _MAX_NAMES_AT_LINES else 0.0
    width = 6.0 if panels else 4.6
    columns, rows = _legend_grid_size(list(groups), width)
    picture = new_figure(width + beside, 3.5 if len(groups) <= _MAX_NAMES_AT_LINES else 3.5 + 0.19 * rows)
    if runs and (words := describe_runs(runs)):
        picture.suptitle(words, fontsize=8.5, color=GRAY, x=0.01, ha="left")
    grid = picture.add_gridspec(max(1, len(panels)), 2 if panels else 1, width_ratios=(1.5, 1) if panels else (1,))
    main = picture.add_subplot(grid[:, 0])
    for place, (what, lines) in enumerate(panels.items()):
        axes = picture.add_subplot(grid[place, 1], sharex=main)
        _draw_quantity(axes, lines, styles, what, _PANELS[what])
        if place + 1 < len(panels):
            axes.tick_params(labelbottom=False)
            axes.set_xlabel("")
    ends = _draw_quantity(main, groups, styles, ("test", "accuracy"), "test accuracy (%)")
    note = _describe_seeds_band(groups)
    if len(groups) > _MAX_NAMES_AT_LINES:
        _add_legend(picture, main, columns, note)
    else:
        _label_line_ends(main, ends, styles)
        if note:
            picture.supxlabel(note, fontsize=7.5, color=GRAY, x=0.01, ha="left")
    save_figure(picture, path)


def draw_metric(runs: Sequence[StoredRun], metric: str, axes: Axes) -> None:
    """Draw a metric of `halfmoon.report.frame.METRICS` as `draw_curves` does, with a legend."""
    part, name, factor = METRICS[metric]
    groups, styles = _group_by_title([run for run in runs if run.series(part, name)])
    label = f"{metric.replace('_', ' ')}{' (%)' if factor == 100 else ''}"
    _draw_quantity(axes, groups, styles, (part, name), label, factor)
    if groups:
        axes.legend(frameon=False, fontsize=8, title=_describe_seeds_band(groups) or None, title_fontsize=7.5)


def _group_by_title(runs: Sequence[StoredRun]) -> tuple[dict[str, list[StoredRun]], dict[str, LineStyle]]:
    """Return the runs of each line, and how it is drawn."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.title, []).append(run)
    methods = [str(group[0].options.get("method", title)) for title, group in groups.items()]
    return groups, dict(zip(groups, styles_of(methods), strict=True))


def _groups_with_values(groups: dict[str, list[StoredRun]], what: tuple[str, str]) -> dict[str, list[StoredRun]]:
    """Return the methods that have a quantity; {} where it is zero for all of them."""
    lines = {title: seed_curve(group, *what) for title, group in groups.items()}
    if not any(line.high.any() for line in lines.values()):
        return {}
    return {title: groups[title] for title, line in lines.items() if len(line.rounds)}


def _add_legend(picture: Figure, main: Axes, columns: int, note: str) -> None:
    """Put all names below the panels: too many for the ends of their lines."""
    handles, names = main.get_legend_handles_labels()
    picture.legend(
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
    ).get_title().set_color(GRAY)


def separate_positions(heights: Sequence[float], gap: float) -> list[float]:
    """Move positions as little as possible (least squares), order kept, until neighbors are `gap` apart."""
    order = sorted(range(len(heights)), key=lambda n: heights[n])
    # Shifted by their rank, "gap apart" is "not falling": pool neighbors that fall, as in isotonic regression.
    pools: list[tuple[float, int]] = []
    for rank, n in enumerate(order):
        mean, count = heights[n] - rank * gap, 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (before * many + mean * count) / (many + count), many + count
        pools.append((mean, count))
    flat = [mean for mean, count in pools for _ in range(count)]
    positions = [0.0] * len(heights)
    for rank, n in enumerate(order):
        positions[n] = flat[rank] + rank * gap
    return positions


def _draw_quantity(
    axes: Axes,
    groups: dict[str, list[StoredRun]],
    styles: dict[str, LineStyle],
    what: tuple[str, str],
    label: str,
    factor: float = 100,
) -> dict[str, tuple[float, float]]:
    """Draw one quantity of all methods, times `factor`; return where each line ends."""
    ends: dict[str, tuple[float, float]] = {}
    for number, (title, group) in enumerate(groups.items()):
        line = seed_curve(group, *what)
        if not len(line.rounds):
            continue
        style = styles[title]
        every = max(1, len(line.rounds) // 7)
        axes.plot(
            line.rounds,
            factor * line.mean,
            color=style.color,
            linestyle=style.dashes,
            linewidth=1.4,
            marker=style.marker,
            markersize=4,
            markevery=(number * every // max(1, len(groups)), every),
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
    _widen_axes(axes, 4.0 if factor == 100 else 0.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.6)
    axes.set_axisbelow(True)
    style_axes(axes)
    return ends


def _widen_axes(axes: Axes, span: float) -> None:
    """Show at least two rounds and `span`, as a smaller piece only enlarges noise, and nothing below zero."""
    left, right = _widen_range(*axes.get_xlim(), 2.0)
    bottom, top = _widen_range(*axes.get_ylim(), span)
    up = max(0.0, -0.03 * (top - bottom) - bottom)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom + up, top + up)


def _legend_grid_size(names: Sequence[str], width: float) -> tuple[int, int]:
    """Return the columns of a legend that fit into `width` inches, and its rows with one for the note."""
    longest = max(map(len, names), default=0)
    columns = max(1, int(width / (0.75 + 0.055 * longest)))
    return columns, -(-len(names) // columns) + 1


def _widen_range(low: float, high: float, span: float) -> tuple[float, float]:
    missing = max(0.0, span - (high - low))
    return low - missing / 2, high + missing / 2


def _label_line_ends(axes: Axes, ends: dict[str, tuple[float, float]], styles: dict[str, LineStyle]) -> None:
    """Write every method's name at the right end of its line, apart from each other, with a hair line to its end."""
    if not ends:
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top)
    gap = 0.062 * (top - bottom)
    places = separate_positions([height for _, height in ends.values()], gap)
    overshoot = max(0.0, max(places) - top)
    for (title, (round, height)), place in zip(ends.items(), places, strict=True):
        axes.annotate(
            title,
            xy=(round, height),
            xytext=(1.05, place - overshoot),
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
    # Thin letters need more contrast than a line.
    return "#" + "".join(f"{int(int(color[n : n + 2], 16) * 0.75):02x}" for n in (1, 3, 5))


def _describe_seeds_band(groups: dict[str, list[StoredRun]]) -> str:
    counts = sorted({len(group) for group in groups.values()})
    if not counts or counts[-1] == 1:
        return ""
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean of {seeds} seeds; band: smallest to largest"


def _describe_split(options: Mapping[str, Any]) -> str:
    setting = str(options.get("setting", ""))
    alpha = options.get("dirichlet_alpha")
    parts = [setting] if setting else []
    if alpha is not None and ("dir" in setting or "fedloke" in setting):
        parts[-1:] = [f"{setting} (\N{GREEK SMALL LETTER ALPHA} = {alpha:g})"]
    if isinstance(options.get("clients"), int):
        parts.append(f"{options['clients']} clients")
    return ", ".join(parts)


def _describe_labels(runs: Sequence[StoredRun]) -> str:
    """Return how many labels there are, "" where no run says it, or they differ."""
    counts = {(run.split or {}).get("counts", {}).get("labeled") for run in runs}
    (count,) = counts if len(counts) == 1 else (None,)
    return "" if count is None else f"{count:,} labels"


def _describe_seeds(runs: Sequence[StoredRun]) -> str:
    """Return the seeds, the first few by number."""
    numbers = {run.options.get("seed", 0) for run in runs}
    seeds = sorted(n for n in numbers if isinstance(n, int))
    if len(seeds) > 1 and seeds == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}" if seeds else ""


def describe_runs(runs: Sequence[StoredRun]) -> str:
    """Return a line for a picture's head: data, split, labels and seeds, as far as all runs share them."""
    first, *others = [run.options for run in runs]
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    parts = [dataset_name(shared["data"]) if shared.get("data") else "", _describe_split(shared)]
    return " \N{MIDDLE DOT} ".join(part for part in [*parts, _describe_labels(runs), _describe_seeds(runs)] if part)
