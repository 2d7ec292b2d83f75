"""Compute the data of a page's charts from the data frames of a study, as JSON values; shares are in percent."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from halfmoon.report import frame
from halfmoon.report.bands import count_by_class, pick_evenly, six_digits, summarize_curve, summarize_seeds
from halfmoon.report.headline import find_roles
from halfmoon.report.run_reader import StoredRun
from halfmoon.report.scores import ScoreTable
from halfmoon.report.study import Column, Study
from halfmoon.report.styles import line_styles, style_to_json

JsonDict = dict[str, Any]

CURVE_METRICS = (
    *("accuracy", "pseudo", "above", "share_above", "share_used", "auc_confidence", "auc_weight"),
    *("weights_mean", "weights_spread", "reward"),
    *("js_app_u", "js_labeled", "local_js_app_u", "local_js_labeled", "global_js_app_u", "global_js_labeled"),
)
"""Metrics that are drawn by round."""

COST_METRICS = ("steps", "forward", "megabytes", "seconds")
"""Costs that can be the x axis of accuracy."""

MAX_MATRIX_CLASSES = 100
"""With more classes, a list of the most frequent confusions replaces the matrix."""

MAX_CONFUSIONS = 20
"""Length of that list."""

MAX_CLIENTS = 40
"""Largest number of clients in the chart of a split."""


def row_styles(study: Study) -> list[JsonDict]:
    """Collect the style of each row of a study: title, color, dashes in pixels, marker."""
    values = study.row_values
    return [
        {"title": value.title, **style_to_json(style)}
        for value, style in zip(values, line_styles([value.name for value in values]), strict=True)
    ]


def column_charts(study: Study, column: Column) -> JsonDict:
    """Compute the data of all charts of one column of a study, from which the page's script draws them.

    Returns:
        "title" of the column; "classes", their names; "lines": the charts of each row (usually a method) that has a run
        folder, with "line_id", the number of the row, and "seeds"; "winner": the number of the best row.
    """
    lines: list[JsonDict] = []
    classes: list[str] = []
    table = frame.metrics_frame(study)
    table = table[table["column"] == study.columns.index(column)]
    for number, value in enumerate(study.row_values):
        cell = study.cell(value.name, column)
        runs = [run for entry in (cell.runs if cell else []) if (run := study.run(entry)) is not None]
        if runs:
            line = _row_charts(table[table["row"] == value.name], runs)
            lines.append({"line_id": number, "seeds": len(runs), **line})
            # All runs of a column have the classes of its data set.
            classes = classes or list_classes(runs)
    # The confusion matrix and the class shares of the winner are shown first; of several, those of the first.
    winner = next(iter(find_roles(study, column).winners), None)
    names = [value.name for value in study.row_values]
    return {
        "title": study.column_title(column),
        "classes": classes,
        "lines": lines,
        "winner": names.index(winner) if winner is not None else None,
    }


def _row_charts(table: Any, runs: Sequence[StoredRun]) -> JsonDict:
    """Compute the charts of one row: a curve over seeds for each metric, costs, and the final state by class.

    Args:
        table: the lines of `halfmoon.report.frame.metrics_frame` of this row in one column.
        runs: the runs of this row in the column, one for each seed.

    Returns:
        "series": curves by metric; "costs": mean costs at the rounds of the accuracy curve, which can replace the
        rounds as x; "per_class": accuracies; "class_shares": distributions of classes; "confusion": the matrix of counts;
        "clients": accuracy of each client.
    """
    # A row for each round and a column for each run. A mean over only some of the runs or rounds would mislead, so
    # metrics that a run lacks, and rounds that a run lacks (dropna), are left out.
    tables = {
        metric: points.pivot(index="round", columns="run", values="value").dropna()
        for metric, points in table.groupby("metric")
        if points["run"].nunique() == len(runs)
    }
    series = {
        metric: summarize_curve(tables[metric]) for metric in CURVE_METRICS if metric in tables and len(tables[metric])
    }
    rounds = series.get("accuracy", {}).get("x", [])
    # Costs are x coordinates of the accuracies, so they are needed at exactly their rounds.
    costs = {
        cost: summarize_seeds(tables[cost].loc[rounds].values)["mean"]
        for cost in COST_METRICS
        if rounds and cost in tables and set(rounds) <= set(tables[cost].index)
    }
    per_class = [(_last_value(run, "test") or {}).get("per_class") for run in runs]
    return {
        "series": series,
        "costs": costs,
        "per_class": _summarize_classes(
            [[share or 0.0 for share in shares] for shares in per_class if shares], len(runs)
        ),
        "class_shares": _class_distributions(runs),
        "confusion": _mean_confusion(runs),
        "clients": _client_accuracies(runs),
    }


def _last_value(run: StoredRun, group: str) -> JsonDict | None:
    return next((row[group] for row in reversed(run.rows) if row.get(group)), None)


def _summarize_classes(shares: Sequence[Sequence[float]], runs: int) -> JsonDict | None:
    """Summarize shares by class over seeds, in percent; None if a run has none or other classes."""
    if len(shares) < runs or len({len(seed) for seed in shares}) != 1:
        return None
    return summarize_seeds([[100 * share for share in seeds] for seeds in zip(*shares, strict=True)])


def _class_distributions(runs: Sequence[StoredRun]) -> JsonDict | None:
    """Compute the class shares at the end in percent, mean over seeds (FedDB, Figures 1 and 3)."""
    priors = [_last_value(run, "prior") or {} for run in runs]
    names = ("accuracy", "app_u", "labeled", "unlabeled")
    bands = {
        name: _summarize_classes([prior[name] for prior in priors if prior.get(name)], len(runs)) for name in names
    }
    return {name: shares["mean"] for name, shares in bands.items() if shares} or None


def _mean_confusion(runs: Sequence[StoredRun]) -> JsonDict | None:
    """Compute the mean confusion matrix over runs with different seeds, as counts of test images.

    Returns:
        "matrix", with a row for each true class; with many classes instead "largest", the most frequent confusions as
        [true class, predicted class, count, test images of the true class]. None if a run has no matrix.
    """
    matrices = [matrix for run in runs if (matrix := (run.summary or {}).get("confusion"))]
    if len(matrices) < len(runs):
        return None
    classes = range(len(matrices[0]))
    mean: list[list[float]] = []
    for true in classes:
        row = [sum(matrix[true][predicted] for matrix in matrices) / len(matrices) for predicted in classes]
        mean.append([six_digits(count) for count in row])
    if len(classes) <= MAX_MATRIX_CLASSES:
        return {"matrix": mean}
    return {"largest": _list_largest_confusions(mean)}


def _list_largest_confusions(mean: Sequence[Sequence[float]]) -> list[list[float]]:
    """List the most frequent confusions of a matrix, as [true class, predicted class, count, images of the true class]."""
    errors: list[tuple[float, int, int]] = []
    for true, row in enumerate(mean):
        for predicted, count in enumerate(row):
            if true != predicted and count:
                errors.append((count, true, predicted))
    errors.sort(reverse=True)
    return [[true, predicted, count, six_digits(sum(mean[true]))] for count, true, predicted in errors[:MAX_CONFUSIONS]]


def _client_accuracies(runs: Sequence[StoredRun]) -> JsonDict | None:
    """Collect the accuracy of the final model at each client, in percent, mean over seeds.

    Returns:
        "accuracies": [client, accuracy] of every client, the worst first; "mean", "deviation" and "worst_tenth" (mean of
        the lowest tenth) over clients. None if a run did not measure it.
    """
    summaries = [(run.summary or {}).get("client_accuracy") for run in runs]
    # A mean over only some of the runs would mislead.
    measured = [summary for summary in summaries if summary]
    if len(measured) < len(runs):
        return None
    by_client: dict[str, list[float]] = {}
    for summary in measured:
        for client, share in summary.get("each", {}).items():
            by_client.setdefault(client, []).append(100 * share)
    accuracies = [[client, six_digits(sum(values) / len(values))] for client, values in by_client.items()]
    # Names of the page, and of summary.json.
    names = {"mean": "mean", "deviation": "deviation", "worst_tenth": "worst"}
    means = {name: 100 * sum(s[key] for s in measured) / len(measured) for name, key in names.items()}
    values = {name: six_digits(value) for name, value in means.items()}
    return {"accuracies": sorted(accuracies, key=itemgetter(1)), **values}


def list_classes(runs: Sequence[StoredRun]) -> list[str]:
    """List the names of the classes; their numbers if the runs have no names."""
    for run in runs:
        for names in ((run.summary or {}).get("classes"), ((run.split or {}).get("counts") or {}).get("classes")):
            if names:
                return [str(name) for name in names]
    counts = (len((_last_value(run, "test") or {}).get("per_class") or []) for run in runs)
    return [str(n) for n in range(max(counts, default=0))]


class SplitUser(NamedTuple):
    """A run that uses a split."""

    column: Column
    row: str
    seed: int


def split_charts(study: Study) -> list[JsonDict]:
    """Compute a chart of each different split of a study: its runs, and the images of each client and class."""
    # Each split with the runs that use it; a list, because its dictionaries are no keys.
    users: list[tuple[JsonDict, list[SplitUser]]] = []
    for cell, entry in study.finished():
        run = study.run(entry)
        split = run.split if run else None
        if split is None:
            continue
        user = SplitUser(study.columns[study.column_of(cell)], cell.at[study.sweep.rows], entry.seed)
        # Splits are compared by their counts: runs of different methods and seeds often share one.
        same_split = next((split_users for other, split_users in users if other == split), None)
        if same_split is None:
            users.append((split, [user]))
        else:
            same_split.append(user)
    all_users = [user for _, split_users in users for user in split_users]
    charts = []
    for split, split_users in users:
        charts.append(_split_chart(split, split_users, title_users(study, split_users, all_users)))
    return charts


def title_users(study: Study, users: Sequence[SplitUser], all_users: Sequence[SplitUser]) -> str:
    """Name the runs that use a split, such as "CIFAR-10, FedAvg, seed 0", for the title of its chart.

    Rows (methods) and seeds are left out where all runs of a column use the split.

    Args:
        study: the study.
        users: the runs that use the split.
        all_users: all runs that have a split.

    Returns:
        The columns, rows and seeds. If all runs use the split, the title of the column, or "" with several columns.
    """
    if len(users) == len(all_users):
        return study.column_title(users[0].column) if len(study.columns) == 1 else ""
    titles = []
    for column in dict.fromkeys(user.column for user in users):  # each column once, in their order
        split_users = [user for user in users if user.column == column]
        column_users = [user for user in all_users if user.column == column]
        rows = dict.fromkeys(user.row for user in split_users)
        seeds = dict.fromkeys(user.seed for user in split_users)
        is_of_some_rows = len(rows) < len({user.row for user in column_users})
        is_of_some_seeds = len(seeds) < len({user.seed for user in column_users})
        texts = [study.column_title(column)]
        if is_of_some_rows:
            texts.append(" and ".join(study.value_title(study.sweep.rows, row) for row in rows))
        if is_of_some_seeds:
            texts.append(f"seed {' and '.join(map(str, seeds))}")
        titles.append(", ".join(text for text in texts if text))
    return "; ".join(titles)


def _split_chart(split: JsonDict, users: Sequence[SplitUser], title: str) -> JsonDict:
    """Compute the chart of a split: the numbers of labeled and unlabeled images by client and class.

    Args:
        split: the run's split.json: totals in "counts", and the counts of the server and of each client by class.
        users: the runs with this split.
        title: names these runs.
    """
    clients = len(split["each"])
    numbers = pick_evenly(range(clients), MAX_CLIENTS)  # the clients that are shown
    labeled = count_by_class(split, "labeled")
    unlabeled = count_by_class(split, "unlabeled")
    return {
        "title": title,
        "runs": len(users),
        "classes": {"labeled": labeled.names, "unlabeled": unlabeled.names},
        "totals": {"labeled": split["counts"]["labeled"], "unlabeled": split["counts"]["unlabeled"]},
        "clients": clients,
        "shown_clients": numbers,
        "server": labeled.server,
        "labeled": [labeled.clients[k] for k in numbers],
        "unlabeled": [unlabeled.clients[k] for k in numbers],
    }


def line_charts(study: Study, score: ScoreTable) -> list[JsonDict]:
    """Compute the charts of a study that draws accuracy over an option, such as the number of labels ("x").

    There is a panel for each combination of what else varies, and a line for each row (usually a method). Every line
    has points {x, mean, low, high} and published points {x, mean, deviation}, in percent.
    """
    x = study.sweep.x
    if study.sweep.kind != "lines" or x is None:
        return []
    rows = study.sweep.rows
    # If the rows are x, the first other axis gives the lines; if there is none, the study is a single line.
    line_axis = rows if x != rows else next((name for name in study.column_axes if name != x), x)
    panel_axes = [name for name in [rows, *study.column_axes] if name not in (x, line_axis)]
    panels: dict[tuple[str, ...], dict[str, JsonDict]] = {}
    runs_of = dict(iter(frame.cells_frame(study).groupby(["column", "row"])))
    positions = [(number, value.name) for number in range(len(study.columns)) for value in study.row_values]
    for number, row in positions:
        column = study.columns[number]
        cell = study.cell(row, column)
        if cell is None:
            continue
        panel = panels.setdefault(tuple(study.value_title(name, cell.at[name]) for name in panel_axes), {})
        name = cell.at[line_axis] if line_axis != x else study.sweep.title
        line = panel.setdefault(name, {"points": [], "published": []})
        shares = [share for share in runs_of[number, row]["last_percent"] if share is not None]
        last = score.get(row, column).last
        x_value = float(cell.at[x])
        if last:
            points = {"mean": last.mean, "low": min(shares), "high": max(shares)}
            line["points"].append({"x": x_value, **{key: six_digits(value) for key, value in points.items()}})
        if cell.published:
            published = {"mean": cell.published.mean, "deviation": cell.published.deviation}
            line["published"].append({"x": x_value, **published})
    # All names, also those without points, so that a line has the same style in every panel.
    names = [value.name for value in study.axis(line_axis).values] if line_axis != x else [study.sweep.title]
    return [
        {
            "title": ", ".join(title),
            "option": x,
            "lines": [
                {
                    "line_id": n,
                    "title": study.axis(line_axis).title(name),
                    **style_to_json(style),
                    **{key: sorted(points, key=itemgetter("x")) for key, points in panel[name].items()},
                }
                for n, (name, style) in enumerate(zip(names, line_styles(names), strict=True))
                if name in panel
            ],
        }
        for title, panel in panels.items()
    ]
