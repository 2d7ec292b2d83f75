"""The result of a study in a sentence or two, for the top of its page."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.report import frame
from halfmoon.report.paired import compare_paired
from halfmoon.report.remarks import CONTROL, LABELS_ONLY, NO_UPPER_BOUND
from halfmoon.report.scores import final_scores
from halfmoon.report.study import Study
from halfmoon.report.tables import MeanDeviation

ALL_LABELS_SUFFIX = "(all labels)"
"""How the titles of methods end that train on all labels."""


class FinalAccuracy(NamedTuple):
    """The final models of one row."""

    name: str
    title: str
    accuracy: MeanDeviation

    @property
    def ceiling(self) -> bool:
        return self.title.endswith(ALL_LABELS_SUFFIX)


def write_headline(study: Study) -> str:
    """Return which row ends highest, by how much, and its gain between labels alone and all labels; "" for splits.

    Rows that train on all labels are what others are measured by, and no winners.
    """
    if study.sweep.kind == "splits":
        return ""
    score = final_scores(study)
    columns = []
    for column in study.columns:
        marks = [(row.name, row.title, score.mark(row.name, column).last) for row in study.row_values]
        ends = [FinalAccuracy(name, title, last) for name, title, last in marks if last is not None]
        if ends:
            columns.append(sorted(ends, key=lambda end: -end.accuracy.mean))
    if len(columns) > 1:
        return _describe_columns(study, columns)
    return _describe_column(study, columns[0]) if columns else ""


def _competitors(ends: Sequence[FinalAccuracy]) -> list[FinalAccuracy]:
    return [end for end in ends if not end.ceiling] or list(ends)


def _describe_interval(study: Study, first: str, second: str, columns: int) -> str:
    """Return the 95 % interval of the difference of two rows, paired by seed in the mean of the columns; "" for one."""
    table = frame.cells_frame(study)
    table = table[table["last_percent"].notna()]
    seeds = [dict(list(table[table["row"] == name].groupby("seed")["last_percent"])) for name in (first, second)]
    both = [seed for seed in seeds[0] if all(len(each.get(seed, ())) == columns for each in seeds)]
    if len(both) < 2:
        return ""
    ours, base = ([float(each[seed].mean()) for seed in both] for each in seeds)
    difference = compare_paired(ours, base)
    doubt = "" if difference.low > 0 else f", so {len(both)} seeds cannot tell them apart"
    return f" (95 % interval {difference.low:+.1f} to {difference.high:+.1f}{doubt})"


def _describe_column(study: Study, ends: Sequence[FinalAccuracy]) -> str:
    first, *others = _competitors(ends)
    best = first.accuracy
    words = f"{best.mean:.1f} %" if best.deviation is None else f"{best.mean:.1f} ± {best.deviation:.1f} %"
    if len(ends) == 1:
        return f"{first.title} ends at {words}."
    sentence = f"{first.title} ends highest, at {words}"
    if others:
        apart, other = best.mean - others[0].accuracy.mean, others[0].title
        interval = _describe_interval(study, first.name, others[0].name, 1)
        sentence += f", {apart:.1f} points above {other}{interval}" if apart else f", as does {other}"
    return f"{sentence}.{_describe_gain(ends)}"


def _describe_gain(ends: Sequence[FinalAccuracy]) -> str:
    """Describe the gain of the best row on the way to all labels; "" if one of the rows is missing.

    The way starts at the control if it was run, otherwise at labels only.
    """
    rows = {end.name: end for end in ends}
    base = rows.get(CONTROL) or rows.get(LABELS_ONLY)
    top = next((end for end in ends if end.ceiling), None)
    best = next((end for end in ends if end.name not in (LABELS_ONLY, CONTROL) and not end.ceiling), None)
    if base is None or top is None or best is None:
        return ""
    gain = best.accuracy.mean - base.accuracy.mean
    possible_gain = top.accuracy.mean - base.accuracy.mean
    if possible_gain <= 0:
        return f" {top.title} ends below {base.title}, so this is {NO_UPPER_BOUND}."
    if gain <= 0:
        return f" No method is above {base.title} ({base.accuracy.mean:.1f} %)."
    if gain > possible_gain:
        return f" {top.title} ends below {best.title}, so this is {NO_UPPER_BOUND}."
    return f" It has {gain:.1f} of the {possible_gain:.1f} points between {base.title} and all labels."


def _describe_columns(study: Study, columns: Sequence[Sequence[FinalAccuracy]]) -> str:
    wins = Counter(_competitors(ends)[0].title for ends in columns)
    title, count = wins.most_common(1)[0]
    others = [f"{name} in {number}" for name, number in wins.items() if name != title]
    rest = f" ({', '.join(others)})" if others else ""
    sentence = (
        f"{title} ends highest in {'all' if count == len(columns) else f'{count} of'} {len(columns)} columns{rest}"
    )
    return f"{sentence}.{_describe_mean_lead(study, columns, title)}"


def _describe_mean_lead(study: Study, columns: Sequence[Sequence[FinalAccuracy]], title: str) -> str:
    """Return how far a row is above the next one in the mean of the columns; "" where a column lacks them."""
    means: dict[str, float] = {}
    for end in (end for ends in columns for end in _competitors(ends)):
        if sum(end.name == other.name for ends in columns for other in ends) == len(columns):
            means[end.name] = means.get(end.name, 0.0) + end.accuracy.mean / len(columns)
    titles = {end.name: end.title for ends in columns for end in ends}
    winner = next((name for name in means if titles[name] == title), None)
    others = sorted((name for name in means if name != winner), key=lambda name: -means[name])
    if winner is None or not others:
        return ""
    apart, interval = means[winner] - means[others[0]], _describe_interval(study, winner, others[0], len(columns))
    where = f"{abs(apart):.1f} points {'above' if apart >= 0 else 'below'} {titles[others[0]]}"
    return f" In the mean of the columns it is {where}{interval}."
