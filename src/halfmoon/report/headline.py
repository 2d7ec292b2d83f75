"""Describe the result of a study in a sentence or two, for the top of its page."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from halfmoon.report import frame
from halfmoon.report.paired import compare_paired
from halfmoon.report.remarks import CONTROL, LABELS_ONLY, NO_UPPER_BOUND
from halfmoon.report.scores import ScoreTable, final_scores
from halfmoon.report.study import Column, Study
from halfmoon.report.tables import MeanDeviation, is_tie

ALL_LABELS_SUFFIX = "(all labels)"
"""End of the titles of methods that train on all labels."""


BASELINES = (CONTROL, LABELS_ONLY)
"""Rows that train on the labeled images only."""


class FinalAccuracy(NamedTuple):
    """The final accuracy of one row.

    Attributes:
        name: name of the row.
        title: its title.
        accuracy: mean and deviation over seeds, in percent.
    """

    name: str
    title: str
    accuracy: MeanDeviation

    @property
    def is_ceiling(self) -> bool:
        """True for a method that trains on all labels."""
        return self.title.endswith(ALL_LABELS_SUFFIX)


class RowRoles(NamedTuple):
    """Rows with a role in the comparison of a column; None for a role that no row has.

    Attributes:
        winners: the best rows that do not train on all labels: one, or several with the same accuracy.
        baseline: the control; without it, labels only. Gains are relative to this row.
        ceiling: the best row that trains on all labels.
    """

    winners: tuple[str, ...]
    baseline: str | None
    ceiling: str | None


def find_roles(study: Study, column: Column) -> RowRoles:
    """Find the rows of a column that the page marks: the winners, the baseline (labels only) and the upper bound."""
    ranking = rank_rows(study, final_scores(study), column)
    names = [row.name for row in ranking]
    return RowRoles(
        winners=tuple(row.name for row in _best_rows(_without_upper_bounds(ranking))),
        baseline=next((name for name in BASELINES if name in names), None),
        ceiling=next((row.name for row in ranking if row.is_ceiling), None),
    )


def rank_rows(study: Study, score: ScoreTable, column: Column) -> list[FinalAccuracy]:
    """Rank the rows of a column that have an accuracy, the best first."""
    rows = []
    for row in study.row_values:
        accuracy = score.get(row.name, column).last
        if accuracy is not None:
            rows.append(FinalAccuracy(row.name, row.title, accuracy))
    return sorted(rows, key=lambda row: -row.accuracy.mean)


def write_headline(study: Study) -> str:
    """Write the headline of a study's report: the best row, its lead, and its gain relative to that of all labels.

    The rows of a study are usually methods, its columns data sets. Rows that train on all labels are upper bounds and
    do not compete.

    Returns:
        The sentences; "" for a study of splits, which has no accuracy.
    """
    if study.sweep.kind == "splits":
        return ""
    score = final_scores(study)  # accuracies of the final models by row and column
    rankings = [rank_rows(study, score, column) for column in study.columns]
    columns = [ranking for ranking in rankings if ranking]
    if len(columns) > 1:
        return _describe_columns(study, columns)
    return _describe_column(study, columns[0]) if columns else ""


def _without_upper_bounds(rows: Sequence[FinalAccuracy]) -> list[FinalAccuracy]:
    """Leave out rows that train on all labels; keep them if there are no other rows."""
    return [row for row in rows if not row.is_ceiling] or list(rows)


def _best_rows(ranking: Sequence[FinalAccuracy]) -> list[FinalAccuracy]:
    """Select the first row of a ranking, and those that have the same accuracy."""
    return [row for row in ranking if is_tie(row.accuracy.mean, ranking[0].accuracy.mean)]


def _join(names: Sequence[str]) -> str:
    """Join names as in a sentence: "A", "A and B", "A, B and C"."""
    return " and ".join(", ".join(names).rsplit(", ", 1))


def _format_points(points: float) -> str:
    """Format a difference of accuracies; a small one is not shown as 0.0."""
    return f"{points:.1f}" if points >= 0.05 else "less than 0.1"


def _describe_interval(study: Study, first: str, second: str, columns: int) -> str:
    """Describe the 95 % interval of the difference in accuracy of two rows of a table, paired by seed.

    Args:
        study: the study with the runs of the table.
        first: name of the better row.
        second: name of the other row.
        columns: number of columns that a seed must have; their mean is compared.

    Returns:
        The interval in points, in parentheses after a space; "" with fewer than two common seeds.
    """
    table = frame.cells_frame(study)
    # A seed has one accuracy in each column, and counts only if both rows have all of them.
    table = table[table["last_percent"].notna()]
    first_by_seed = dict(list(table[table["row"] == first].groupby("seed")["last_percent"]))
    second_by_seed = dict(list(table[table["row"] == second].groupby("seed")["last_percent"]))
    seeds = []  # those that both rows have in all columns
    for seed, accuracies in first_by_seed.items():
        if len(accuracies) == columns and len(second_by_seed.get(seed, ())) == columns:
            seeds.append(seed)
    if len(seeds) < 2:
        return ""
    first_means = [float(first_by_seed[seed].mean()) for seed in seeds]
    second_means = [float(second_by_seed[seed].mean()) for seed in seeds]
    difference = compare_paired(first_means, second_means)
    doubt = "" if difference.low > 0 else f", so {len(seeds)} seeds are too few to rank them"
    return f" (95 % interval {difference.low:+.1f} to {difference.high:+.1f}{doubt})"


def _describe_column(study: Study, rows: Sequence[FinalAccuracy]) -> str:
    """Describe in sentences the best row of a column, its lead over the second one, and its share of the possible gain.

    Args:
        study: the study.
        rows: the accuracies of the column's rows (usually methods), the best first.
    """
    baseline = next((row for row in rows if row.name in BASELINES), None)
    methods = _best_methods(rows)
    if baseline is not None and methods:
        lead = methods[0].accuracy.mean - baseline.accuracy.mean
        if lead <= 0 or is_tie(methods[0].accuracy.mean, baseline.accuracy.mean):
            return _describe_no_gain(study, rows, baseline, methods)
    competitors = _without_upper_bounds(rows)
    best = _best_rows(competitors)
    if len(rows) == 1:
        return f"{best[0].title} has {_format_accuracy(best[0].accuracy)}."
    sentence = _describe_best(best)
    next_rows = competitors[len(best) :]
    if next_rows:
        second = next_rows[0]
        lead = best[0].accuracy.mean - second.accuracy.mean
        # The interval compares two rows, and would be another one for each of several best rows.
        interval = _describe_interval(study, best[0].name, second.name, columns=1) if len(best) == 1 else ""
        sentence += f", {_format_points(lead)} points above {second.title}{interval}"
    return f"{sentence}.{_describe_gain(rows)}"


def _describe_best(best: Sequence[FinalAccuracy]) -> str:
    """Describe which rows are the best with which accuracy, without a period."""
    if len(best) == 1:
        return f"{best[0].title} is the best with {_format_accuracy(best[0].accuracy)}"
    if all(row.accuracy.deviation is None for row in best):
        return f"{_join([row.title for row in best])} are the best with {_format_accuracy(best[0].accuracy)}"
    accuracies = [f"{row.title} with {_format_accuracy(row.accuracy)}" for row in best]
    return f"{_join(accuracies)} are the best"


def _format_accuracy(accuracy: MeanDeviation) -> str:
    mean = f"{accuracy.mean:.1f}"
    return f"{mean} %" if accuracy.deviation is None else f"{mean} ± {accuracy.deviation:.1f} %"


def _best_methods(ranking: Sequence[FinalAccuracy]) -> list[FinalAccuracy]:
    """Find the best rows that are neither baselines nor upper bounds: none, one, or several with the same accuracy."""
    return _best_rows([row for row in ranking if row.name not in BASELINES and not row.is_ceiling])


def _describe_no_gain(
    study: Study, rows: Sequence[FinalAccuracy], baseline: FinalAccuracy, methods: Sequence[FinalAccuracy]
) -> str:
    """Describe a column in which training on the labeled images only is at least as accurate as every method.

    Args:
        study: the study.
        rows: the accuracies of the column's rows, the best first.
        baseline: the best row that trains on the labeled images only.
        methods: the best methods: one, or several with the same accuracy.
    """
    gap = baseline.accuracy.mean - methods[0].accuracy.mean
    is_single = len(methods) == 1
    if not is_tie(baseline.accuracy.mean, methods[0].accuracy.mean):
        interval = _describe_interval(study, baseline.name, methods[0].name, columns=1) if is_single else ""
        position = f"{'is' if is_single else 'are'} {_format_points(gap)} points below it{interval}"
    else:
        position = f"{'has' if is_single else 'have'} the same accuracy"
    sentences = (
        f"No method gains over training on labels alone: {baseline.title} has {_format_accuracy(baseline.accuracy)}, and "
        f"the best {'method' if is_single else 'methods'}, {_join([row.title for row in methods])}, {position}."
    )
    upper_bound = next((row for row in rows if row.is_ceiling), None)
    if upper_bound is None:
        return sentences
    if upper_bound.accuracy.mean <= baseline.accuracy.mean:
        return f"{sentences} {upper_bound.title} is not above it, so this is {NO_UPPER_BOUND}."
    return f"{sentences} {upper_bound.title} has {_format_accuracy(upper_bound.accuracy)}."


def _describe_gain(ranking: Sequence[FinalAccuracy]) -> str:
    """Describe the gain of the best row relative to the gain of all labels; "" if one of the rows is missing.

    Gains are relative to the control if it was run, otherwise to labels only. Both train on the labeled images only;
    the control has the unlabeled images in its batch normalization. The upper bound, or ceiling, has all labels.

    Args:
        ranking: the rows of a table, the most accurate first.
    """
    rows = {row.name: row for row in ranking}
    base = rows.get(CONTROL) or rows.get(LABELS_ONLY)  # what a method without unlabeled images reaches
    upper_bound = next((row for row in ranking if row.is_ceiling), None)
    best = _best_methods(ranking)
    if base is None or upper_bound is None or not best:
        return ""
    gain = best[0].accuracy.mean - base.accuracy.mean
    possible_gain = upper_bound.accuracy.mean - base.accuracy.mean
    if possible_gain <= 0:
        return f" {upper_bound.title} is below {base.title}, so this is {NO_UPPER_BOUND}."
    if gain > possible_gain:
        titles = _join([row.title for row in best])
        return f" {upper_bound.title} is below {titles}, so this is {NO_UPPER_BOUND}."
    subject = "It has" if len(best) == 1 else "They have"
    return f" {subject} {gain:.1f} of the {possible_gain:.1f} points between {base.title} and all labels."


def _describe_columns(study: Study, columns: Sequence[Sequence[FinalAccuracy]]) -> str:
    """Describe in sentences which row is the best in most columns, and its lead in their mean.

    Args:
        study: the study.
        columns: the accuracies of the rows (usually methods) of each column (usually a data set), the best first.
    """
    best_by_column = [_best_rows(_without_upper_bounds(rows)) for rows in columns]
    # Without any method, the baselines are compared with each other.
    baselines = BASELINES if any(_best_methods(rows) for rows in columns) else ()
    unbeaten: list[str] = []  # the baseline of each column without a gain
    wins = Counter[str]()
    for best in best_by_column:
        baseline = next((row.title for row in best if row.name in baselines), None)
        if baseline is not None:
            unbeaten.append(baseline)
        else:
            wins.update(row.title for row in best)
    count = max(wins.values(), default=0)
    leaders = [title for title, number in wins.items() if number == count]
    if len(unbeaten) >= count:
        others = [f"{title} is the best in {number}" for title, number in wins.items()]
        sentence = "No method gains over training on labels alone"
        leaders = unbeaten[:1]
        count = len(unbeaten)
    else:
        others = [f"{title} in {number}" for title, number in wins.items() if title not in leaders]
        if unbeaten:
            others.append(f"no method gains over training on labels alone in {len(unbeaten)}")
        sentence = f"{_join(leaders)} {'is' if len(leaders) == 1 else 'are each'} the best"
    if sum(wins.values()) + len(unbeaten) > len(columns):
        others.append("equal accuracies count for each")
    share = "all" if count == len(columns) else f"{count} of"
    note = f" ({', '.join(others)})" if others else ""
    lead = _describe_mean_lead(study, columns, leaders)
    return f"{sentence} in {share} {len(columns)} columns{note}.{lead}"


def _describe_mean_lead(study: Study, columns: Sequence[Sequence[FinalAccuracy]], leaders: Sequence[str]) -> str:
    """Describe how far the row with the most wins is above or below the best other row, in the mean of the columns.

    It is below if it wins most columns narrowly and loses another one by far.

    Args:
        study: the study.
        columns: the rows of every column.
        leaders: titles of the rows with the most wins; of several the one with the highest mean is described.

    Returns:
        A sentence; "" if the row is missing in a column, or no other row is in every column.
    """
    means = _means_over_columns(columns)
    titles = {row.name: row.title for rows in columns for row in rows}
    winners = [name for name in means if titles[name] in leaders]
    if not winners:
        return ""
    winner = max(winners, key=lambda name: means[name])
    others = [name for name in means if name != winner]
    if winner in BASELINES:
        others = [name for name in others if name not in BASELINES] or others
    if not others:
        return ""
    best_other = max(others, key=lambda name: means[name])
    subject = "it" if len(leaders) == 1 and winner not in BASELINES else titles[winner]
    if is_tie(means[winner], means[best_other]):
        return f" In the mean of the columns {subject} and {titles[best_other]} have the same accuracy."
    lead = means[winner] - means[best_other]
    interval = _describe_interval(study, winner, best_other, len(columns))
    position = f"{_format_points(abs(lead))} points {'above' if lead >= 0 else 'below'}"
    return f" In the mean of the columns {subject} is {position} {titles[best_other]}{interval}."


def _means_over_columns(columns: Sequence[Sequence[FinalAccuracy]]) -> dict[str, float]:
    """Compute the mean accuracy of each row that is in every column, by name, without upper bounds."""
    column_counts = Counter(row.name for rows in columns for row in rows)
    means: dict[str, float] = {}
    for rows in columns:
        for row in _without_upper_bounds(rows):
            if column_counts[row.name] == len(columns):
                means[row.name] = means.get(row.name, 0.0) + row.accuracy.mean / len(columns)
    return means
