"""Summarize curves over seeds for JSON: mean, minimum and maximum by round. Imports neither pandas nor torch."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

MAX_POINTS = 300
"""Largest number of points of a curve; longer ones are thinned evenly."""


def summarize_curve(table: Any) -> dict[str, Any]:
    """Summarize a data frame with a row for each round and a column for each seed as {"x", "mean", "low", "high"}."""
    rounds = pick_evenly(table.index.tolist())
    return {"x": rounds, **summarize_seeds(table.loc[rounds].values)}


def summarize_seeds(lines: Iterable[Iterable[float]]) -> dict[str, list[float]]:
    """Compute mean, minimum and maximum of each line of numbers, one for each seed, with six digits."""
    seeds = [list(line) for line in lines]
    return {
        "mean": [six_digits(math.fsum(values) / len(values)) for values in seeds],
        "low": [six_digits(min(values)) for values in seeds],
        "high": [six_digits(max(values)) for values in seeds],
    }


def pick_evenly(numbers: Sequence[int], count: int = MAX_POINTS) -> list[int]:
    """Pick `count` of the numbers, evenly spaced, with the first and the last; all if there are fewer."""
    if len(numbers) <= count:
        return list(numbers)
    return [numbers[round(n * (len(numbers) - 1) / (count - 1))] for n in range(count)]


def six_digits(number: float) -> float:
    """Round a number to six significant digits, to make pages smaller."""
    return float(f"{number:.6g}")
