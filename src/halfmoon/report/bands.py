"""Prepare numbers for charts: curves over seeds, and images by client and class. Imports neither pandas nor torch."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

MAX_POINTS = 300
"""Largest number of points of a curve; longer ones are thinned evenly."""

UNKNOWN_CLASS = "unknown"
"""Name of the row of images whose true class no one knows, in the chart of a split."""


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


class ClassCounts(NamedTuple):
    """Images by class of the labeled or of the unlabeled part of a split.

    Attributes:
        names: the classes, and `UNKNOWN_CLASS` if the true class of some images is unknown; only this if that of all is.
        server: images of the server by name; None if it has none.
        clients: images of each client by name.
    """

    names: list[str]
    server: list[int] | None
    clients: list[list[int]]


def count_by_class(split: Mapping[str, Any], kind: Literal["labeled", "unlabeled"]) -> ClassCounts:
    """Count the images of each client and class, and those whose class is unknown.

    Args:
        split: the content of split.json, from `halfmoon.data.partition.heterogeneity.summarize`.
        kind: the part of the split.
    """
    names = [str(name) for name in split["counts"]["classes"]]
    clients = [list(client[f"{kind}_classes"]) for client in split["each"]]
    server = list(split["server"]["labeled_classes"]) if split.get("server") and kind == "labeled" else None
    # Splits of older versions have counts by class only.
    unknown = [
        client.get(kind, sum(counts)) - sum(counts) for client, counts in zip(split["each"], clients, strict=True)
    ]
    if not any(unknown):
        return ClassCounts(names, server, clients)
    if server is None and not any(map(any, clients)):
        return ClassCounts([UNKNOWN_CLASS], None, [[count] for count in unknown])
    return ClassCounts(
        [*names, UNKNOWN_CLASS],
        None if server is None else [*server, 0],
        [[*counts, count] for counts, count in zip(clients, unknown, strict=True)],
    )
