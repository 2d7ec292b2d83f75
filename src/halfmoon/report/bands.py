"""Curves over seeds for JSON: mean, smallest and largest by round; needs neither pandas nor torch."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

MAX_POINTS = 300
"""A curve has at most this many points; rounds between them are left out evenly."""


def summarize_curve(table: Any) -> dict[str, Any]:
    """Return {"x", "mean", "low", "high"} of a data frame with a line for each round and a column for each seed."""
    rounds = pick_evenly(table.index.tolist())
    return {"x": rounds, **summarize_seeds(table.loc[rounds].values)}


def summarize_seeds(lines: Iterable[Iterable[float]]) -> dict[str, list[float]]:
    """Return mean, low and high of each line, whose numbers are those of the seeds, with six digits."""
    seeds = [list(line) for line in lines]
    return {
        "mean": [six_digits(math.fsum(values) / len(values)) for values in seeds],
        "low": [six_digits(min(values)) for values in seeds],
        "high": [six_digits(max(values)) for values in seeds],
    }


def pick_evenly(rounds: Sequence[int], most: int = MAX_POINTS) -> list[int]:
    """Return at most `most` rounds or other numbers, evenly spaced, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[round(n * (len(rounds) - 1) / (most - 1))] for n in range(most)]


def six_digits(number: float) -> float:
    """Return a number with six digits: a page is read by eyes."""
    return float(f"{number:.6g}")
