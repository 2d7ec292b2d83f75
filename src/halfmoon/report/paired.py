"""Method against method: differences paired by seed, their intervals, and mean ranks over data sets."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from halfmoon.report.gain import FLOOR

LEVEL = 0.95
SEEDS = 5
"""Seeds below which an interval is wide and says little."""
ONE_SEED = "One seed decides nothing: halfmoon compare --seeds 0 1 2 3 4 gives each difference with its interval."


class Difference(NamedTuple):
    """A mean difference, its 95 % interval and its two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float


def paired(ours: Sequence[float], base: Sequence[float], overlap: float = 0.0) -> Difference:
    """Compare two methods on the same splits, n >= 2, by Student's t of the differences.

    `overlap` is the ratio of test to training size where the splits are drawn from the same images: the variance is
    then (1/n + overlap) s^2 (Nadeau and Bengio 2003, Inference for the generalization error, section 3). Raises
    ValueError for fewer than two splits, or numbers of splits that differ.
    """
    if len(ours) != len(base) or len(ours) < 2:
        raise ValueError(f"{len(ours)} and {len(base)} results cannot be paired: give the same two or more splits")
    differences = np.asarray(ours, float) - np.asarray(base, float)
    mean, count = float(differences.mean()), len(differences)
    error = math.sqrt((1 / count + overlap) * differences.var(ddof=1))
    reach = float(special.stdtrit(count - 1, (1 + LEVEL) / 2)) * error
    if error == 0:
        return Difference(mean, mean, mean, float(mean == 0))
    return Difference(mean, mean - reach, mean + reach, float(2 * special.stdtr(count - 1, -abs(mean) / error)))


def holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for how many there are (Holm 1979): each is valid beside all the others."""
    adjusted, floor = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        floor = max(floor, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = floor
    return adjusted


class Row(NamedTuple):
    """A method against the base: the difference in points, and p adjusted for the number of methods."""

    method: str
    difference: Difference
    adjusted: float


@dataclass(frozen=True)
class Differences:
    """The methods of a comparison against one of them, over the seeds that all of them have."""

    base: str
    seeds: int
    rows: tuple[Row, ...]

    @property
    def headings(self) -> list[str]:
        return [f"against {self.base}", "points", "95 % interval", "p"]

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text."""
        return [
            [row.method, f"{d.mean:+.1f}", f"{d.low:+.1f} to {d.high:+.1f}", f"{row.adjusted:.3f}"]
            for row in self.rows
            for d in [row.difference]
        ]

    @property
    def sentence(self) -> str:
        """How the table is read, and whether there are enough seeds."""
        few = f" With fewer than {SEEDS} seeds such intervals are wide." if self.seeds < SEEDS else ""
        several = f", p adjusted for {len(self.rows)} comparisons (Holm)" if len(self.rows) > 1 else ""
        return f"Differences are paired over {self.seeds} seeds{several}.{few}"

    def as_json(self) -> dict[str, Any]:
        rows = [{"method": row.method, **row.difference._asdict(), "adjusted_p": row.adjusted} for row in self.rows]
        return {"base": self.base, "seeds": self.seeds, "rows": rows}


def differences(summaries: Sequence[Mapping[str, Any]], ceilings: Collection[str] = ()) -> Differences | None:
    """Compare the final test accuracies of runs against labels alone, or else against the first method.

    Methods with all labels, the `ceilings`, are left out. None where fewer than two methods, or fewer than two seeds,
    can be compared.
    """
    ends: dict[str, dict[int, float]] = {}
    titles: dict[str, str] = {}
    for summary in summaries:
        if summary["accuracy"] is not None and summary["method"] not in ceilings:
            ends.setdefault(summary["method"], {})[summary["seed"]] = 100 * summary["accuracy"]["last"]
            titles[summary["method"]] = summary["title"]
    seeds = sorted(set.intersection(*(set(values) for values in ends.values()))) if ends else []
    if len(ends) < 2 or len(seeds) < 2:
        return None
    base = FLOOR if FLOOR in ends else next(iter(ends))
    numbers = {name: [values[seed] for seed in seeds] for name, values in ends.items()}
    compared = {name: paired(values, numbers[base]) for name, values in numbers.items() if name != base}
    adjusted = holm([difference.p for difference in compared.values()])
    rows = tuple(Row(titles[name], compared[name], p) for name, p in zip(compared, adjusted, strict=True))
    return Differences(titles[base], len(seeds), rows)


class Ranks(NamedTuple):
    """Mean ranks over data sets, 1 is best, and how far apart two must be to differ."""

    means: dict[str, float]
    critical: float
    p: float
    """That all methods are equal, by Friedman's test."""


def ranks(scores: Mapping[str, Sequence[float]]) -> Ranks:
    """Rank k >= 3 methods on n >= 2 data sets, as Demsar (2006, Statistical comparisons of classifiers) advises.

    The critical difference is Nemenyi's at 5 %: q sqrt(k (k + 1) / (6 n)), q the studentized range over sqrt(2).
    Raises ValueError for fewer methods or data sets.
    """
    from scipy import stats  # slow to import

    table = np.array(list(scores.values()), float)
    count, sets = table.shape
    if count < 3 or sets < 2:
        raise ValueError(f"{count} methods on {sets} data sets cannot be ranked: three and two are the least")
    means = stats.rankdata(-table, axis=0).mean(axis=1)
    q = float(stats.studentized_range.ppf(LEVEL, count, np.inf)) / math.sqrt(2)
    p = float(stats.friedmanchisquare(*table).pvalue)
    return Ranks(dict(zip(scores, map(float, means), strict=True)), q * math.sqrt(count * (count + 1) / (6 * sets)), p)
