"""Compare measured with published accuracies: means over seeds, the two-sigma rule, orderings, and costs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from halfmoon.report import frame
from halfmoon.report.study import TEST_ACCURACY, Column, PublishedAccuracy, Study
from halfmoon.report.tables import MeanDeviation, mean_if_complete

ONE_SEED = "one seed: compared by the published deviation only"
NO_PUBLISHED = "no published deviation: compared by the measured one only"
NO_DEVIATION = "no deviation is known: not compared"


class PublishedComparison(NamedTuple):
    """Comparison of a measured mean with the published one.

    Attributes:
        difference: measured minus published, in points.
        within: whether it is within two standard deviations; None if no deviation is known.
        note: a note if only one deviation, or none, is known; otherwise "".
    """

    difference: float
    within: bool | None
    note: str


def compare_to_published(measured: MeanDeviation, published: PublishedAccuracy) -> PublishedComparison:
    """Decide whether a measured accuracy reproduces a published one: |m - p| <= 2 sqrt(s_m^2 + s_p^2), in percent.

    If only one deviation is known the other counts as zero, with a note. Without any there is no verdict.
    """
    difference = measured.mean - published.mean
    deviations = measured.deviation, published.deviation
    if deviations == (None, None):
        return PublishedComparison(difference, None, NO_DEVIATION)
    within = abs(difference) <= 2 * math.hypot(*(deviation or 0.0 for deviation in deviations))
    note = ""
    if measured.deviation is None:
        note = ONE_SEED
    elif published.deviation is None:
        note = NO_PUBLISHED
    return PublishedComparison(difference, within, note)


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Compute Kendall's tau-b of two rankings, from -1 to 1; None if all values of one are equal."""
    if len(left) < 2:
        return None
    from scipy.stats import kendalltau  # slow to import

    result: Any = kendalltau(left, right)
    return None if math.isnan(result.statistic) else float(result.statistic)


def tau_interval(rows: Sequence["CellScore"]) -> tuple[float, float] | None:
    """Compute the 95 % interval of Kendall's tau-b between published and measured means; None if a row has one seed.

    Tau tells whether methods have the published order. Measured means are drawn 2,000 times from their t distributions
    over seeds. Published means count as exact, and rows as independent, which is conservative if they share their
    splits.

    Args:
        rows: the published and the measured accuracy of each method.
    """
    last = [row.last for row in rows]
    deviations = [mean.deviation for mean in last if mean and mean.deviation is not None]
    published = np.array([row.published.mean for row in rows if row.published])
    if not len(rows) == len(deviations) == len(published) > 1:
        return None
    seeds = np.array([row.seeds for row in rows])
    # A fixed seed, so that the same runs give the same report.
    errors = np.random.default_rng(0).standard_t(seeds - 1, (2000, len(rows))) * deviations / np.sqrt(seeds)
    draws = np.array([mean.mean for mean in last if mean]) + errors
    # Tau-b of each draw from the signs of all pairs. Draws have no ties, so only published ties reduce the denominator.
    left, right = np.triu_indices(len(rows), 1)
    signs = np.sign(published[left] - published[right])
    if not signs.any():
        return None
    taus = (np.sign(draws[:, left] - draws[:, right]) @ signs) / math.sqrt(len(signs) * np.count_nonzero(signs))
    low, high = np.quantile(taus, [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class CellScore:
    """Accuracies of one cell in percent; None if unknown.

    Attributes:
        last: accuracy at the end of the runs.
        best: the best accuracy of the runs.
        published: the published accuracy.
        verdict: comparison of `last` with `published`.
        seeds: number of finished seeds.
        planned: number of planned seeds.
        note: a note for the table.
        clients: mean accuracy over clients, each on its test images.
        spread: standard deviation over clients.
        worst: mean of the lowest tenth of the clients.
        used: share of the pseudo-labels that were used, over all rounds; None for methods without pseudo-labels.
    """

    last: MeanDeviation | None = None
    best: MeanDeviation | None = None
    published: PublishedAccuracy | None = None
    verdict: PublishedComparison | None = None
    seeds: int = 0
    planned: int = 0
    note: str = ""
    clients: MeanDeviation | None = None
    spread: MeanDeviation | None = None
    worst: MeanDeviation | None = None
    used: MeanDeviation | None = None


@dataclass(frozen=True)
class ScoreTable:
    """A table of accuracies.

    Attributes:
        scores: the scores by row and column.
        steps: labeled steps of each column at which its scores were measured; None for the end of every run.
    """

    scores: Mapping[tuple[str, Column], CellScore]
    steps: Mapping[Column, float | None] | None = None

    def get(self, row: str, column: Column) -> CellScore:
        """Get the score of a cell, an empty one if there is no such cell."""
        return self.scores.get((row, column), CellScore())


def final_scores(study: Study) -> ScoreTable:
    """Compute the accuracies at the end of the runs, compared with the published ones."""
    return ScoreTable(_cell_scores(study))


def scores_at_equal_steps(study: Study) -> ScoreTable:
    """Build the table of accuracies in which all methods of a column have trained on labels equally long.

    A column is a setting, such as a data set, and its cells are methods. Their accuracies are taken at the largest
    number of labeled steps (batches of labeled images, over all clients) that all finished runs of the column reached.
    The table is empty if the sweep measures something other than the test accuracy, because other measures are not
    known in the middle of a run.
    """
    if study.sweep.measure != TEST_ACCURACY:
        return ScoreTable({}, {})
    steps: dict[Column, float | None] = dict.fromkeys(study.columns)
    table = frame.cells_frame(study)
    for number, value in zip(table["column"], table["equal_labeled_steps"], strict=True):
        # All runs of a column have the same number, or None if they are unfinished.
        if value is not None:
            steps[study.columns[number]] = value
    return ScoreTable(_cell_scores(study, equal=True), steps)


def _cell_scores(study: Study, equal: bool = False) -> dict[tuple[str, Column], CellScore]:
    """Compute the accuracies of each cell of a study (a method on a data set) from its finished runs over seeds.

    Args:
        study: the study.
        equal: whether accuracies are those at equal numbers of labeled steps, without the values that are known only
            for the end of a run; otherwise they are those at the end.

    Returns:
        The scores by row and column.
    """
    scores = {}
    for (row, number), runs in frame.cells_frame(study).groupby(["row", "column"]):
        column = study.columns[number]
        finished = runs[runs["finished"].eq(True)]
        # Federations without test images have finished runs without an accuracy.
        if not equal:
            finished = finished[finished["last_percent"].notna()]
        last = mean_if_complete(finished["equal_steps_percent" if equal else "last_percent"])
        cell = study.cell(row, column)
        published = cell.published if cell else None
        is_unknown = equal and len(finished) > 0 and not last  # runs are finished, but not evaluated at these steps
        scores[row, column] = CellScore(
            last=last,
            best=None if equal else mean_if_complete(finished["best_percent"]),
            published=published,
            verdict=compare_to_published(last, published) if last and published else None,
            seeds=len(finished),
            planned=int(runs["seed"].notna().sum()),
            note="no evaluation up to this number of steps is known" if is_unknown else "",
            clients=None if equal else mean_if_complete(finished["clients_percent"]),
            spread=None if equal else mean_if_complete(finished["clients_spread"]),
            worst=None if equal else mean_if_complete(finished["clients_worst_percent"]),
            used=None if equal else mean_if_complete(finished["used_percent"]),
        )
    return scores


class OrderComparison(NamedTuple):
    """Orders of the rows of a column from the best to the worst.

    Attributes:
        published: the published order.
        measured: the measured order.
        kendall_tau: their agreement; None for fewer than two rows, or if all are equal.
        interval: its 95 % interval over seeds.
    """

    published: list[str]
    measured: list[str]
    kendall_tau: float | None
    interval: tuple[float, float] | None

    @property
    def agreement(self) -> str:
        """Kendall's tau with its interval, "0.37 [-0.08, 0.70]"; "" if it is undefined."""
        if self.kendall_tau is None:
            return ""
        if self.interval is None:
            return f"{self.kendall_tau:.2f}"
        low, high = self.interval
        return f"{self.kendall_tau:.2f} [{low:.2f}, {high:.2f}]"


def compare_order(study: Study, score: ScoreTable, column: Column) -> OrderComparison:
    """Compare the published order of methods with the measured one, in a column of a study.

    Args:
        study: the study, whose rows are methods.
        score: the accuracies of each row and column, measured and published.
        column: the column, usually a data set.

    Returns:
        The titles of the rows that have both accuracies, the best first, in the published and in the measured order;
        Kendall's tau between the orders, and its interval.
    """
    cells = {value.title: score.get(value.name, column) for value in study.row_values}
    both = {title: cell for title, cell in cells.items() if cell.published and cell.last}
    published = {title: cell.published.mean for title, cell in both.items() if cell.published}
    measured = {title: cell.last.mean for title, cell in both.items() if cell.last}
    return OrderComparison(
        sorted(both, key=lambda title: -published[title]),
        sorted(both, key=lambda title: -measured[title]),
        kendall_tau([*published.values()], [*measured.values()]),
        tau_interval([*both.values()]),
    )


COSTS = {
    "labeled steps": "labeled_steps",
    "forward passes, images": "forward",
    "sent, MB": "sent",
    "seconds": "seconds",
}
"""Costs in a table, with their columns in `halfmoon.report.frame.cells_frame`."""


def cost_rows(study: Study, column: Column) -> list[tuple[str, list[float | None]]]:
    """Compute the table of costs of a report: for each row (usually a method) of a column, the mean over its seeds.

    Args:
        study: the study.
        column: the column, usually a data set.

    Returns:
        Title and numbers of each row: the mean over seeds of the rounds, then of each cost the mean total and the mean
        per round. A number that is unknown for a seed is None.
    """
    table = frame.cells_frame(study)
    table = table[table["column"].eq(study.columns.index(column)) & table["costs"].eq(True)]  # runs with known costs
    rows: list[tuple[str, list[float | None]]] = []
    for value in study.row_values:
        runs = table[table["row"].eq(value.name)]
        if not len(runs):
            continue
        numbers: list[list[float | None]] = [list(runs["rounds"])]
        for name in COSTS.values():
            pairs = zip(runs[name], runs["rounds"], strict=True)
            numbers += [list(runs[name]), [cost / n if cost is not None and n else None for cost, n in pairs]]
        means = [mean_if_complete(values) for values in numbers]
        rows.append((value.title, [mean and mean.mean for mean in means]))
    return rows


def column_headings(study: Study, columns: Sequence[Column]) -> list[list[tuple[str, list[Column]]]]:
    """Compute the lines of headings above the columns of a table, one for each axis, such as data set and clients.

    Returns:
        For each axis its titles from left to right, with the columns that each spans.
    """
    # Adjacent columns with the same values of this axis and all axes above it share a heading.
    return [
        [
            (study.value_title(name, key[-1]), list(same))
            for key, same in groupby(columns, key=lambda column, d=depth: column[: d + 1])
        ]
        for depth, name in enumerate(study.column_axes)
    ]
