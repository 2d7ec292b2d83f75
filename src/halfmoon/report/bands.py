"""Curves over seeds for JSON: mean, smallest and largest by round; needs neither pandas nor torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST_POINTS = 300
"""A curve has at most this many points; rounds between them are left out evenly."""


def curve(seeds: Sequence[Mapping[int, float]]) -> dict[str, Any]:
    """Return {"x", "mean", "low", "high"} of {round: value} of each seed, over the rounds that all seeds have.

    Nothing is in it where no round is common to all.
    """
    common = sorted(set.intersection(*map(set, seeds))) if seeds else []
    rounds = thinned(common)
    return {"x": rounds, **band([[seed[number] for number in rounds] for seed in seeds])} if rounds else {}


def band(seeds: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Return mean, low and high over seeds, each a sequence of the same length, with six digits."""
    columns = list(zip(*seeds, strict=True))
    return {
        "mean": [short(math.fsum(values) / len(values)) for values in columns],
        "low": [short(min(values)) for values in columns],
        "high": [short(max(values)) for values in columns],
    }


def thinned(rounds: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """Return at most `most` rounds or other numbers, evenly spaced, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[round(n * (len(rounds) - 1) / (most - 1))] for n in range(most)]


def short(number: float) -> float:
    """Return a number with six digits: a page is read by eyes."""
    return float(f"{number:.6g}")
