"""What a method won of the distance between labels alone and all labels, in one sentence."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from halfmoon.report.tables import spread

FLOOR = "fedavg"
"""The method that learns from labels alone."""
NO_BOUND = "no upper bound here: more rounds or another rate would be needed"
"""What all labels are where something ends above them."""


def gain(summaries: Sequence[Mapping[str, Any]], ceilings: Collection[str]) -> str | None:
    """Return what the first other method won between labels alone and all labels, in the mean over its seeds.

    `ceilings` are the names of methods that have all labels. It is said of the last round. None where one of the three
    was not played, or all labels end below labels alone.
    """
    ends: dict[str, list[float]] = {}
    titles = {summary["method"]: summary["title"] for summary in summaries}
    for summary in summaries:
        accuracy = summary["accuracy"]
        if accuracy is not None:
            ends.setdefault(summary["method"], []).append(100 * accuracy["last"])
    means = {name: spread(values).mean for name, values in ends.items()}
    tops = [name for name in means if name in ceilings]
    others = [name for name in means if name != FLOOR and name not in ceilings]
    if FLOOR not in means or not tops or not others:
        return None
    top, name = tops[0], others[0]
    whole, won = means[top] - means[FLOOR], means[name] - means[FLOOR]
    if whole <= 0:
        return None
    over = f", in the mean of {len(ends[name])} seeds" if len(ends[name]) > 1 else ""
    if won < 0:
        return f"{titles[name]} ended {-won:.1f} points below {titles[FLOOR]}{over}."
    if won > whole:
        above = f"{won:.1f} points above {titles[FLOOR]} and {won - whole:.1f} above {titles[top]}{over}"
        return f"{titles[name]} ended {above}. All labels are {NO_BOUND}."
    return f"{titles[name]} won {won:.1f} of the {whole:.1f} points between {titles[FLOOR]} and {titles[top]}{over}."
