"""Measured beside published: the two-sigma rule, agreement of orderings, and accuracy at equal labeled steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.report.run_reader import Run
from halfmoon.report.study import TEST, Published, Study, StudyCell
from halfmoon.report.tables import Spread, spread

ONE_SEED = "one seed: judged by the published deviation alone"
NO_PUBLISHED = "no published deviation: judged by the measured one alone"
UNKNOWN = "neither side has a deviation: not judged"


class Verdict(NamedTuple):
    """How a measured mean stands to the published one."""

    difference: float  # measured minus published, in points
    within: bool | None  # two standard deviations; None where no deviation is known
    note: str  # which deviations were used, "" for both


def verdict(measured: Spread, published: Published) -> Verdict:
    """Apply the two-sigma rule, |m - p| <= 2 sqrt(s_m^2 + s_p^2), all in percent.

    A deviation that is not known counts as zero beside one that is, and the note says so; without any there is no
    verdict.
    """
    difference = measured.mean - published.mean
    mine, theirs = measured.deviation, published.deviation
    if mine is None and theirs is None:
        return Verdict(difference, None, UNKNOWN)
    within = abs(difference) <= 2 * math.hypot(mine or 0.0, theirs or 0.0)
    return Verdict(difference, within, ONE_SEED if mine is None else NO_PUBLISHED if theirs is None else "")


def kendall(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Kendall's tau-b of two rankings, -1 to 1; None where one of them has nothing to order.

    Source: Kendall (1945), The treatment of ties in ranking problems: pairs that agree minus pairs that do not, over
    the geometric mean of the pairs that are not tied on each side.
    """
    score = ordered_left = ordered_right = 0
    for n in range(len(left)):
        for m in range(n):
            a, b = _sign(left[n] - left[m]), _sign(right[n] - right[m])
            score += a * b
            ordered_left += abs(a)
            ordered_right += abs(b)
    if not ordered_left or not ordered_right:
        return None
    return score / math.sqrt(ordered_left * ordered_right)


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


class Evaluation(NamedTuple):
    """One measurement of a run: the labeled steps it had used by then, and test accuracy as a share."""

    steps: float
    accuracy: float


def evaluations(entry: StudyCell, run: Run | None) -> list[Evaluation]:
    """Return what is known of a finished run in the order of its rounds: without its folder, its end alone."""
    rows = run.rows if run else []
    told = [((row.get("cost") or {}).get("labeled_steps"), (row.get("test") or {}).get("accuracy")) for row in rows]
    found = [Evaluation(used, share) for used, share in told if used is not None and share is not None]
    steps = (entry.cost or {}).get("labeled_steps")
    if not found and entry.accuracy and steps is not None:
        return [Evaluation(steps, entry.accuracy.last)]
    return found


def common_steps(runs: Sequence[Sequence[Evaluation]]) -> float | None:
    """Return the largest number of labeled steps that all runs reached; None where one has none at all."""
    ends = [run[-1].steps if run else 0 for run in runs]
    return min(ends, default=0) or None


def at_steps(run: Sequence[Evaluation], steps: float) -> float | None:
    """Return the accuracy of the last evaluation not after `steps`, None where there is none."""
    before = [each.accuracy for each in run if each.steps <= steps]
    return before[-1] if before else None


@dataclass(frozen=True)
class Deviation:
    """What a table says of one cell, in percent; None where nothing is known."""

    last: Spread | None = None
    best: Spread | None = None
    published: Published | None = None
    verdict: Verdict | None = None
    seeds: int = 0
    planned: int = 0
    note: str = ""


Column = tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """A table of accuracies: marks by row and column, and for each column the labeled steps it was taken at."""

    marks: Mapping[tuple[str, Column], Deviation]
    steps: Mapping[Column, float | None] | None = None  # None: at the end of every run

    def mark(self, row: str, column: Column) -> Deviation:
        """Return the mark of a cell; an empty one where the grid has none."""
        return self.marks.get((row, column), Deviation())


def final(study: Study) -> Score:
    """Return the accuracies at the end of every run, the last compared with what is published."""
    marks = {}
    for column in study.columns:
        for value in study.row_values:
            cell = study.cell(value.name, column)
            if cell is None:
                continue
            done = [entry.accuracy for entry in cell.runs if entry.finished and entry.accuracy]
            best = [accuracy.best for accuracy in done if accuracy.best is not None]
            last = _percent([accuracy.last for accuracy in done])
            marks[value.name, column] = Deviation(
                last,
                _percent(best) if len(best) == len(done) else None,
                cell.published,
                verdict(last, cell.published) if last and cell.published else None,
                len(done),
                len(cell.runs),
            )
    return Score(marks)


def equal(study: Study) -> Score:
    """Return the accuracies at the largest number of labeled steps that all finished runs of a column reached.

    There are none where the sweep compares something else.
    """
    marks: dict[tuple[str, Column], Deviation] = {}
    steps: dict[Column, float | None] = {}
    if study.sweep.measure != TEST:
        return Score(marks, steps)
    for column in study.columns:
        cells = {value.name: study.cell(value.name, column) for value in study.row_values}
        runs = {
            row: [evaluations(entry, study.run(entry)) for entry in cell.runs if entry.finished]
            for row, cell in cells.items()
            if cell is not None
        }
        steps[column] = reached = common_steps([run for each in runs.values() for run in each])
        for row, each in runs.items():
            cell = cells[row]
            assert cell is not None
            values = [at_steps(run, reached) for run in each] if reached else []
            known = [value for value in values if value is not None]
            # A mean over some of the seeds would be taken for one over all.
            last = _percent(known) if len(known) == len(each) else None
            judged = verdict(last, cell.published) if last and cell.published else None
            note = "" if last or not each else "no evaluation up to there is known"
            marks[row, column] = Deviation(last, None, cell.published, judged, len(each), len(cell.runs), note)
    return Score(marks, steps)


def _percent(shares: Sequence[float]) -> Spread | None:
    return spread([100 * share for share in shares]) if shares else None


class Order(NamedTuple):
    """The rows of a column from the best to the worst, as published and as measured, and how far they agree."""

    published: list[str]
    measured: list[str]
    tau: float | None  # None for fewer than two rows, or where all are equal


def order(study: Study, score: Score, column: Column) -> Order:
    """Compare the published order of a column with the measured one, over the rows that have both."""
    both = {}
    for value in study.row_values:
        mark = score.mark(value.name, column)
        if mark.last and mark.published:
            both[value.title] = (mark.published.mean, mark.last.mean)
    published = sorted(both, key=lambda title: -both[title][0])
    measured = sorted(both, key=lambda title: -both[title][1])
    return Order(published, measured, kendall([p for p, _ in both.values()], [m for _, m in both.values()]))
