"""Compare methods: differences paired by seed, their intervals, and mean ranks over data sets."""

import base64
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from halfmoon.report.remarks import CONTROL, LABELS_ONLY

CONFIDENCE_LEVEL = 0.95

ENOUGH_SEEDS = 5
"""Number of seeds below which intervals are wide."""


def one_seed_hint(several_seeds: str) -> str:
    """Word the hint about a comparison with one seed; `several_seeds` is the command or argument for several."""
    return f"One seed is not enough to rank methods: {several_seeds} gives intervals of differences."


class Difference(NamedTuple):
    """A mean difference, its interval and its two-sided p-value.

    With `comparisons` > 1 of `compare_paired` and `compare_by_image`, interval and p-value are both adjusted.
    """

    mean: float
    low: float
    high: float
    p: float


def compare_paired(
    method: Sequence[float], baseline: Sequence[float], test_train_ratio: float = 0.0, comparisons: int = 1
) -> Difference:
    """Compare the accuracies of two methods on the same splits of a data set, by Student's t of the differences.

    Args:
        method: accuracy of the method on n >= 2 splits, such as those of n seeds.
        baseline: accuracy of the baseline on the same splits, in the same order.
        test_train_ratio: ratio of test to training size if the splits are drawn from the same images. The variance is
            then (1/n + test_train_ratio) s^2 (Nadeau and Bengio 2003, Inference for the generalization error, section
            3).
        comparisons: number of comparisons that are reported together. Interval and p-value are adjusted for it
            (Bonferroni), so that the interval excludes zero if and only if p < 0.05.

    Returns:
        The mean of method minus baseline in the unit of the accuracies, its 95 % interval, and its p-value.

    Raises:
        ValueError: fewer than two splits, or different numbers of splits.
    """
    if len(method) != len(baseline) or len(method) < 2:
        raise ValueError(
            f"{len(method)} and {len(baseline)} results cannot be paired: give the same two or more splits"
        )
    differences = np.asarray(method, float) - np.asarray(baseline, float)
    count = len(differences)
    variance = (1 / count + test_train_ratio) * float(differences.var(ddof=1))
    return _student_t(float(differences.mean()), variance, count - 1, comparisons)


def compare_by_image(method: np.ndarray, baseline: np.ndarray, comparisons: int = 1) -> Difference:
    """Compare two methods by their correct predictions on the same test images, over splits and images.

    The interval is for new splits and new test images. A difference is the sum of a mean, a random effect of the split,
    one of the image, and a rest. Their mean squares S, I and R give the variance max(S, S + I - R) / (n m), with
    Satterthwaite's degrees of freedom (1946, An approximate distribution of estimates of variance components).
    `results/coverage.md` has the coverage of the interval.

    Args:
        method: whether the method is right on each of m >= 2 test images in each of n >= 2 splits, (n, m) bool.
        baseline: the same for the baseline.
        comparisons: number of comparisons that are reported together (`compare_paired`).

    Returns:
        The difference in points.

    Raises:
        ValueError: the shapes differ or are smaller.
    """
    if method.shape != baseline.shape or min(method.shape) < 2:
        raise ValueError(
            f"{method.shape} and {baseline.shape} cannot be paired: give two or more splits of the same images"
        )
    differences = 100 * (method.astype(float) - baseline)
    n, m = differences.shape  # splits, images
    split_means = differences.mean(1, keepdims=True)
    image_means = differences.mean(0, keepdims=True)
    residual = differences - split_means - image_means + differences.mean()
    # The mean squares S, I and R of the two-way analysis of variance.
    split_square = m * float(split_means.var(ddof=1))
    image_square = n * float(image_means.var(ddof=1))
    residual_square = float((residual**2).sum()) / ((n - 1) * (m - 1))
    total = max(split_square, split_square + image_square - residual_square)
    denominator = split_square**2 / (n - 1) + image_square**2 / (m - 1) + residual_square**2 / ((n - 1) * (m - 1))
    freedom = total**2 / denominator if denominator else n - 1
    # Estimated degrees of freedom may make the interval narrower than that of the splits alone, which would claim more
    # than the splits support: the wider one is returned. Both have the same mean, so the upper end tells which it is.
    crossed = _student_t(float(differences.mean()), total / (n * m), freedom, comparisons)
    splits_only = compare_paired(split_means[:, 0].tolist(), [0.0] * n, comparisons=comparisons)
    return crossed if crossed.high > splits_only.high else splits_only


def _student_t(mean: float, variance: float, freedom: float, comparisons: int) -> Difference:
    """Compute the 95 % interval and the two-sided p-value of a mean by Student's t distribution.

    Args:
        mean: the mean of the differences.
        variance: the variance of this mean.
        freedom: degrees of freedom.
        comparisons: number of comparisons, for the adjustment of Bonferroni.
    """
    error = math.sqrt(variance)
    # Without any spread t is not defined: the difference is exactly zero or certainly not.
    if error == 0:
        return Difference(mean, mean, mean, float(mean == 0))
    tail = (1 - CONFIDENCE_LEVEL) / comparisons / 2
    half_width = float(special.stdtrit(freedom, 1 - tail)) * error
    p_value = float(2 * special.stdtr(freedom, -abs(mean) / error))
    return Difference(mean, mean - half_width, mean + half_width, min(1.0, comparisons * p_value))


class MethodDifference(NamedTuple):
    """Difference of a method to the base, in points."""

    method: str
    difference: Difference


@dataclass(frozen=True)
class DifferenceTable:
    """Differences of the methods of a comparison to one of them, over the seeds that all of them have.

    Attributes:
        base: title of the method that the others are compared with: the control, otherwise labels only, otherwise the
            first one.
        seeds: number of common seeds.
        rows: the other methods, without labels only if the base is the control.
        control: the difference of the control to labels only, with the title of labels only; None if one of them was not
            run.
        images: number of test images whose spread is in the intervals; 0 if it is not.
    """

    base: str
    seeds: int
    rows: tuple[MethodDifference, ...]
    control: MethodDifference | None = None
    images: int = 0

    @property
    def headings(self) -> list[str]:
        return [f"against {self.base}", "points", "95 % interval", "p"]

    @property
    def cells(self) -> list[list[str]]:
        """Rows as text, under `headings`."""
        rows = []
        for row in self.rows:
            mean, low, high, p = row.difference
            rows.append([row.method, f"{mean:+.1f}", f"{low:+.1f} to {high:+.1f}", f"{p:.3f}"])
        return rows

    @property
    def comparisons(self) -> int:
        """Number of differences, for which intervals and p-values are adjusted."""
        return len(self.rows) + (self.control is not None)

    @property
    def description(self) -> str:
        """Sentences below the table: what the control gains over labels only, and what the intervals mean."""
        sentences = []
        if self.control is not None:
            # The base is the control here. It trains on labeled images as the method with labels only does, but its
            # batch normalization sees unlabeled images too.
            gain = self.control.difference
            sentences.append(
                f"{self.base} against {self.control.method}: {gain.mean:+.1f} points ({gain.low:+.1f} to "
                f"{gain.high:+.1f}), the effect of unlabeled images in batch normalization."
            )
        pairing = f"Differences are paired over {self.seeds} seeds"
        if self.comparisons > 1:
            pairing += f"; intervals and p are adjusted for {self.comparisons} comparisons (Bonferroni)"
        sentences.append(f"{pairing}.")
        images = f" and of the {self.images:,} test images" if self.images else ""
        sentences.append(f"The intervals contain the spread of the seeds{images}.")
        if self.seeds < ENOUGH_SEEDS:
            sentences.append(f"With fewer than {ENOUGH_SEEDS} seeds such intervals are wide.")
        return " ".join(sentences)

    def as_json(self) -> dict[str, Any]:
        """Collect the table of differences between methods and their base for JSON, with unrounded numbers in points.

        Returns:
            "base", "seeds", "images", "rows" of {"method", "mean", "low", "high", "p"}, "comparisons", and "control"
            of the same form, None if it was not run.
        """
        rows = [{"method": row.method, **row.difference._asdict()} for row in self.rows]
        control = None if self.control is None else self.control.difference._asdict()
        return {
            "base": self.base,
            "seeds": self.seeds,
            "images": self.images,
            "rows": rows,
            "comparisons": self.comparisons,
            "control": control,
        }


def compare_methods(summaries: Sequence[Mapping[str, Any]], ceilings: Collection[str] = ()) -> DifferenceTable | None:
    """Compare the final test accuracies of methods with that of the control.

    Without a control they are compared with labels only, and without labels only with the first method. If all runs
    recorded their correct predictions, these are compared (`compare_by_image`).

    Args:
        summaries: summary.json of each run.
        ceilings: names of methods that train with all labels; they are left out.

    Returns:
        The differences; None if fewer than two methods or fewer than two common seeds can be compared.
    """
    accuracies: dict[str, dict[int, float]] = {}
    correct: dict[str, dict[int, np.ndarray | None]] = {}
    titles: dict[str, str] = {}
    for summary in summaries:
        method = summary["method"]
        if summary["accuracy"] is not None and method not in ceilings:
            accuracies.setdefault(method, {})[summary["seed"]] = 100 * summary["accuracy"]["last"]
            correct.setdefault(method, {})[summary["seed"]] = read_correct(summary)
            titles[method] = summary["title"]
    seeds = sorted(set.intersection(*(set(values) for values in accuracies.values()))) if accuracies else []
    if len(accuracies) < 2 or len(seeds) < 2:
        return None

    # Predictions can be compared by image only if all runs have them for the same number of test images.
    image_counts = set()
    for by_seed in correct.values():
        for seed in seeds:
            predictions = by_seed[seed]
            image_counts.add(0 if predictions is None else len(predictions))
    images = image_counts.pop() if len(image_counts) == 1 else 0
    by_image = images > 1

    def compare(method: str, base: str, comparisons: int) -> MethodDifference:
        if by_image:
            tables = [np.array([correct[name][seed] for seed in seeds]) for name in (method, base)]
            difference = compare_by_image(tables[0], tables[1], comparisons)
        else:
            values = [[accuracies[name][seed] for seed in seeds] for name in (method, base)]
            difference = compare_paired(values[0], values[1], comparisons=comparisons)
        return MethodDifference(titles[method], difference)

    base = next((name for name in (CONTROL, LABELS_ONLY) if name in accuracies), next(iter(accuracies)))
    has_control = {CONTROL, LABELS_ONLY} <= accuracies.keys()
    methods = [name for name in accuracies if name != base and not (has_control and name == LABELS_ONLY)]
    comparisons = len(methods) + has_control
    rows = tuple(compare(name, base, comparisons) for name in methods)
    control = None
    if has_control:
        difference = compare(CONTROL, LABELS_ONLY, comparisons).difference
        control = MethodDifference(titles[LABELS_ONLY], difference)
    return DifferenceTable(titles[base], len(seeds), rows, control, images)


def read_correct(summary: Mapping[str, Any]) -> np.ndarray | None:
    """Decode which test images the final model of a run predicts correctly, bool (N,); None if it is unknown."""
    if "correct" not in summary:
        return None
    count = sum(map(sum, summary["confusion"]))
    correct = np.unpackbits(np.frombuffer(base64.b64decode(summary["correct"]), np.uint8), count=count).astype(bool)
    # They may be those of another model than the accuracy, such as the one of an earlier round.
    return correct if abs(correct.mean() - summary["accuracy"]["last"]) < 1 / (2 * count) else None


class MeanRanks(NamedTuple):
    """Mean ranks of methods over data sets.

    Attributes:
        means: mean rank of each method; 1 is the best.
        critical: the difference from which on two mean ranks differ significantly.
        p: p-value of Friedman's test that all methods are equal.
    """

    means: dict[str, float]
    critical: float
    p: float


def rank_methods(scores: Mapping[str, Sequence[float]]) -> MeanRanks:
    """Rank k >= 3 methods on n >= 2 data sets (Demsar 2006, Statistical comparisons of classifiers).

    Methods whose mean ranks differ by less than the critical difference are not distinguishable. It is Nemenyi's at
    5 %: q sqrt(k (k + 1) / (6 n)), q the studentized range over sqrt(2).

    Args:
        scores: accuracies of each method on the same data sets in the same order.

    Returns:
        The mean rank of each method (1 is the best), the critical difference, and the p-value of Friedman's test that
        all methods are equal.

    Raises:
        ValueError: fewer methods or data sets.
    """
    from scipy import stats  # slow to import

    table = np.array(list(scores.values()), float)
    count, sets = table.shape
    if count < 3 or sets < 2:
        raise ValueError(f"{count} methods on {sets} data sets cannot be ranked: give three or more on two or more")
    means = stats.rankdata(-table, axis=0).mean(axis=1)
    q = float(stats.studentized_range.ppf(CONFIDENCE_LEVEL, count, np.inf)) / math.sqrt(2)
    p = float(stats.friedmanchisquare(*table).pvalue)
    critical = q * math.sqrt(count * (count + 1) / (6 * sets))
    return MeanRanks(dict(zip(scores, map(float, means), strict=True)), critical, p)
