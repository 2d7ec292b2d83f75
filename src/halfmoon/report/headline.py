"""What came out of a study, in a sentence or two: what a reader wants to know before any table."""

from __future__ import annotations

from collections.abc import Sequence

from halfmoon.report.gain import FLOOR, NO_BOUND
from halfmoon.report.scores import final
from halfmoon.report.study import Column, Study
from halfmoon.report.tables import Spread

CEILING = "(all labels)"
"""How the titles of methods end that train on all labels."""


def headline(study: Study) -> str:
    """Return which row ends highest, by how much, and what it won between labels alone and all labels; "" for splits.

    Rows that train on all labels are what others are measured by, and no winners.
    """
    if study.sweep.kind == "splits":
        return ""
    marks = {column: _ends(study, column) for column in study.columns}
    marks = {column: ends for column, ends in marks.items() if ends}
    if len(marks) > 1:
        return _several(study, marks)
    return _one(study, next(iter(marks.values()))) if marks else ""


def _ends(study: Study, column: Column) -> list[tuple[str, str, Spread]]:
    """Return (name, title, mean accuracy of the final models) of each row that is finished, the best first."""
    score = final(study)
    found = [(row.name, row.title, score.mark(row.name, column).last) for row in study.row_values]
    return sorted(((n, t, last) for n, t, last in found if last is not None), key=lambda each: -each[2].mean)


def _one(study: Study, ends: Sequence[tuple[str, str, Spread]]) -> str:
    rivals = [each for each in ends if not each[1].endswith(CEILING)] or list(ends)
    _, title, best = rivals[0]
    if len(ends) == 1:
        return f"{title} ends at {_percent(best)}."
    words = [f"{title} ends highest, at {_percent(best)}"]
    if len(rivals) > 1:
        _, second, other = rivals[1]
        apart = best.mean - other.mean
        spread = max(best.deviation or 0.0, other.deviation or 0.0)
        close = ", less than the seeds differ" if 0 < apart < spread else ""
        words = [f"{words[0]}, {apart:.1f} points above {second}{close}" if apart else f"{words[0]}, as does {second}"]
    return f"{words[0]}.{_between(ends)}"


def _between(ends: Sequence[tuple[str, str, Spread]]) -> str:
    """Return what the best row won of the way from labels alone to all labels; "" where one of them is missing."""
    floor = next((each for each in ends if each[0] == FLOOR), None)
    top = next((each for each in ends if each[1].endswith(CEILING)), None)
    rivals = [each for each in ends if each[0] != FLOOR and not each[1].endswith(CEILING)]
    if floor is None or top is None or not rivals:
        return ""
    whole = top[2].mean - floor[2].mean
    if whole <= 0:
        return f" {top[1]} ends below {floor[1]}, so this is {NO_BOUND}."
    won = rivals[0][2].mean - floor[2].mean
    if won <= 0:
        return f" No method is above labels alone ({floor[2].mean:.1f} %)."
    if won > whole:
        return f" {top[1]} ends below {rivals[0][1]}, so this is {NO_BOUND}."
    return f" It has {won:.1f} of the {whole:.1f} points between labels alone and all labels."


def _several(study: Study, marks: dict[Column, list[tuple[str, str, Spread]]]) -> str:
    wins: dict[str, int] = {}
    for ends in marks.values():
        rivals = [each for each in ends if not each[1].endswith(CEILING)] or ends
        wins[rivals[0][1]] = wins.get(rivals[0][1], 0) + 1
    title, count = max(wins.items(), key=lambda each: each[1])
    others = [f"{name} in {number}" for name, number in wins.items() if name != title]
    rest = f" ({', '.join(others)})" if others else ""
    where = "all" if count == len(marks) else f"{count} of"
    return f"{title} ends highest in {where} {len(marks)} columns{rest}."


def _percent(value: Spread) -> str:
    return f"{value.mean:.1f} %" if value.deviation is None else f"{value.mean:.1f} ± {value.deviation:.1f} %"
