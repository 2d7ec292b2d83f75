"""Method against method: differences paired by seed, their intervals, and mean ranks over data sets."""

import base64
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from halfmoon.report.remarks import LABELS_ONLY

CONFIDENCE_LEVEL = 0.95
ENOUGH_SEEDS = 5
"""Seeds below which an interval is wide and says little."""
ONE_SEED_HINT = "One seed decides nothing: halfmoon compare --seeds 0 1 2 3 4 gives each difference with its interval."


class Difference(NamedTuple):
    """A mean difference, its 95 % interval and its two-sided p-value."""

    mean: float
    low: float
    high: float
    p: float


def compare_paired(ours: Sequence[float], base: Sequence[float], overlap: float = 0.0) -> Difference:
    """Compare two methods on the same splits, n >= 2, by Student's t of the differences.

    `overlap` is the ratio of test to training size where the splits are drawn from the same images: the variance is
    then (1/n + overlap) s^2 (Nadeau and Bengio 2003, Inference for the generalization error, section 3). Raises
    ValueError for fewer than two splits, or numbers of splits that differ.
    """
    if len(ours) != len(base) or len(ours) < 2:
        raise ValueError(f"{len(ours)} and {len(base)} results cannot be paired: give the same two or more splits")
    differences = np.asarray(ours, float) - np.asarray(base, float)
    mean, count = float(differences.mean()), len(differences)
    return _student_t(mean, (1 / count + overlap) * float(differences.var(ddof=1)), count - 1)


def compare_by_image(ours: np.ndarray, base: np.ndarray) -> Difference:
    """Compare two methods, in points, by which of the same m >= 2 test images they are right on: bool (n, m), n >= 2.

    The interval is for new splits and new test images: differences have a mean, a random part of the split, one of the
    image and a rest, whose mean squares S, I and R give the variance max(S, S + I - R) / (n m), with Satterthwaite's
    degrees of freedom (1946, An approximate distribution of estimates of variance components). It is never narrower
    than that of the splits alone. `results/coverage.md` has its coverage. Raises ValueError for shapes that differ or
    are smaller.
    """
    if ours.shape != base.shape or min(ours.shape) < 2:
        raise ValueError(f"{ours.shape} and {base.shape} cannot be paired: give two or more splits of the same images")
    d = 100 * (ours.astype(float) - base)
    n, m = d.shape
    splits, images = d.mean(1, keepdims=True), d.mean(0, keepdims=True)
    rest = d - splits - images + d.mean()
    squares = m * splits.var(ddof=1), n * images.var(ddof=1), float((rest**2).sum()) / ((n - 1) * (m - 1))
    total = float(max(squares[0], squares[0] + squares[1] - squares[2]))
    spread = sum(s**2 / free for s, free in zip(squares, (n - 1, m - 1, (n - 1) * (m - 1)), strict=True))
    both = _student_t(float(d.mean()), total / (n * m), total**2 / spread if spread else n - 1)
    alone = compare_paired(splits[:, 0].tolist(), [0.0] * n)
    return both if both.high > alone.high else alone


def _student_t(mean: float, variance: float, freedom: float) -> Difference:
    error = math.sqrt(variance)
    reach = float(special.stdtrit(freedom, (1 + CONFIDENCE_LEVEL) / 2)) * error
    if error == 0:
        return Difference(mean, mean, mean, float(mean == 0))
    return Difference(mean, mean - reach, mean + reach, float(2 * special.stdtr(freedom, -abs(mean) / error)))


def adjust_holm(values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for how many there are (Holm 1979): each is valid beside all the others."""
    adjusted, floor = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        floor = max(floor, min(1.0, (len(values) - rank) * values[place]))
        adjusted[place] = floor
    return adjusted


class MethodDifference(NamedTuple):
    """A method against the base: the difference in points, and p adjusted for the number of methods."""

    method: str
    difference: Difference
    adjusted: float


@dataclass(frozen=True)
class DifferenceTable:
    """The methods of a comparison against one of them, over the seeds that all of them have."""

    base: str
    seeds: int
    rows: tuple[MethodDifference, ...]
    images: int = 0
    """Test images whose spread is in the intervals."""

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
        few = f" With fewer than {ENOUGH_SEEDS} seeds such intervals are wide." if self.seeds < ENOUGH_SEEDS else ""
        several = f", p adjusted for {len(self.rows)} comparisons (Holm)" if len(self.rows) > 1 else ""
        images = f" and of the {self.images:,} test images" if self.images else ""
        spread = f"The intervals hold the spread of the seeds{images}."
        return f"Differences are paired over {self.seeds} seeds{several}. {spread}{few}"

    def as_json(self) -> dict[str, Any]:
        rows = [{"method": row.method, **row.difference._asdict(), "adjusted_p": row.adjusted} for row in self.rows]
        return {"base": self.base, "seeds": self.seeds, "images": self.images, "rows": rows}


def compare_methods(summaries: Sequence[Mapping[str, Any]], ceilings: Collection[str] = ()) -> DifferenceTable | None:
    """Compare the final test accuracies of runs against labels alone, or else against the first method.

    Methods with all labels, the `ceilings`, are left out. None where fewer than two methods, or fewer than two seeds,
    can be compared. Where all runs say which test images they are right on, that is compared (`compare_by_image`).
    """
    ends: dict[str, dict[int, float]] = {}
    rights: dict[str, dict[int, np.ndarray | None]] = {}
    titles: dict[str, str] = {}
    for summary in summaries:
        if summary["accuracy"] is not None and summary["method"] not in ceilings:
            ends.setdefault(summary["method"], {})[summary["seed"]] = 100 * summary["accuracy"]["last"]
            rights.setdefault(summary["method"], {})[summary["seed"]] = _read_correct(summary)
            titles[summary["method"]] = summary["title"]
    seeds = sorted(set.intersection(*(set(values) for values in ends.values()))) if ends else []
    if len(ends) < 2 or len(seeds) < 2:
        return None
    base = LABELS_ONLY if LABELS_ONLY in ends else next(iter(ends))
    numbers = {name: [values[seed] for seed in seeds] for name, values in ends.items()}
    counts = {0 if (right := each[seed]) is None else len(right) for each in rights.values() for seed in seeds}
    images = counts.pop() if len(counts) == 1 else 0
    tables = {name: np.array([each[seed] for seed in seeds]) for name, each in rights.items()} if images > 1 else {}
    compared = {
        name: compare_by_image(tables[name], tables[base]) if tables else compare_paired(values, numbers[base])
        for name, values in numbers.items()
        if name != base
    }
    adjusted = adjust_holm([difference.p for difference in compared.values()])
    rows = tuple(MethodDifference(titles[name], compared[name], p) for name, p in zip(compared, adjusted, strict=True))
    return DifferenceTable(titles[base], len(seeds), rows, images)


def _read_correct(summary: Mapping[str, Any]) -> np.ndarray | None:
    """Return which test images a run is right on at its end, bool (N,); None where that is not known."""
    if "correct" not in summary:
        return None
    count = sum(map(sum, summary["confusion"]))
    right = np.unpackbits(np.frombuffer(base64.b64decode(summary["correct"]), np.uint8), count=count).astype(bool)
    return right if abs(right.mean() - summary["accuracy"]["last"]) < 1 / (2 * count) else None


class MeanRanks(NamedTuple):
    """Mean ranks over data sets, 1 is best, and how far apart two must be to differ."""

    means: dict[str, float]
    critical: float
    p: float
    """That all methods are equal, by Friedman's test."""


def rank_methods(scores: Mapping[str, Sequence[float]]) -> MeanRanks:
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
    q = float(stats.studentized_range.ppf(CONFIDENCE_LEVEL, count, np.inf)) / math.sqrt(2)
    p = float(stats.friedmanchisquare(*table).pvalue)
    return MeanRanks(
        dict(zip(scores, map(float, means), strict=True)), q * math.sqrt(count * (count + 1) / (6 * sets)), p
    )
