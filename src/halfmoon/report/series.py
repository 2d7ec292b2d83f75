"""Data of a page's charts, made from the data frames of a study and ready for JSON; shares are percent."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from halfmoon.report import frame
from halfmoon.report.bands import pick_evenly, six_digits, summarize_curve, summarize_seeds
from halfmoon.report.run_reader import StoredRun
from halfmoon.report.scores import ScoreTable
from halfmoon.report.study import Column, Study
from halfmoon.report.styles import line_styles, style_to_json

JsonDict = dict[str, Any]

CURVE_METRICS = (
    *("accuracy", "pseudo", "above", "share_above", "share_used"),
    *("js_app_u", "js_labeled", "local_js_app_u", "local_js_labeled", "global_js_app_u", "global_js_labeled"),
)
"""The metrics that are drawn against rounds."""
COST_METRICS = ("steps", "forward", "megabytes", "seconds")

MAX_MATRIX_CLASSES = 100
"""With more classes, the most frequent confusions stand in a list instead of a matrix."""
MAX_CONFUSIONS = 20
MAX_CLIENTS = 40


def row_styles(study: Study) -> list[JsonDict]:
    """Return how each row of a study is drawn: title, color, dashes in pixels, marker."""
    values = study.row_values
    return [
        {"title": value.title, **style_to_json(style)}
        for value, style in zip(values, line_styles([value.name for value in values]), strict=True)
    ]


def column_charts(study: Study, column: Column) -> JsonDict:
    """Return all charts of one column: a dict for each row that has a run folder, and the class names."""
    lines, classes = [], []
    table = frame.metrics_frame(study)
    table = table[table["column"] == study.columns.index(column)]
    for number, value in enumerate(study.row_values):
        cell = study.cell(value.name, column)
        runs = [run for entry in (cell.runs if cell else []) if (run := study.run(entry)) is not None]
        if runs:
            line = _row_charts(table[table["row"] == value.name], runs)
            lines.append({"line": number, "seeds": len(runs), **line})
            classes = classes or list_classes(runs)
    return {"title": study.column_title(column), "classes": classes, "lines": lines}


def _row_charts(table: Any, runs: Sequence[StoredRun]) -> JsonDict:
    """Return the charts of one row: a curve over seeds for each metric, costs, and the final state by class."""
    tables = {
        metric: points.pivot(index="round", columns="run", values="value").dropna()
        for metric, points in table.groupby("metric")
        if points["run"].nunique() == len(runs)
    }
    series = {
        metric: summarize_curve(tables[metric]) for metric in CURVE_METRICS if metric in tables and len(tables[metric])
    }
    rounds = series.get("accuracy", {}).get("x", [])
    costs = {
        cost: summarize_seeds(tables[cost].loc[rounds].values)["mean"]
        for cost in COST_METRICS
        if rounds and cost in tables and set(rounds) <= set(tables[cost].index)
    }
    per_class = [(_last_value(run, "test") or {}).get("per_class") for run in runs]
    return {
        "series": series,
        "against": costs,
        "per_class": _summarize_classes(
            [[share or 0.0 for share in shares] for shares in per_class if shares], len(runs)
        ),
        "prior": _class_distributions(runs),
        "confusion": _mean_confusion(runs),
    }


def _last_value(run: StoredRun, part: str) -> JsonDict | None:
    return next((row[part] for row in reversed(run.rows) if row.get(part)), None)


def _summarize_classes(shares: Sequence[Sequence[float]], runs: int) -> JsonDict | None:
    """Return shares by class in percent over seeds, None where a run has none or other classes."""
    if len(shares) < runs or len({len(seed) for seed in shares}) != 1:
        return None
    return summarize_seeds([[100 * share for share in seeds] for seeds in zip(*shares, strict=True)])


def _class_distributions(runs: Sequence[StoredRun]) -> JsonDict | None:
    """Return the class shares at the end in percent, mean over seeds: FedDB's Figures 1 and 3."""
    priors = [_last_value(run, "prior") or {} for run in runs]
    names = ("accuracy", "app_u", "labeled", "unlabeled")
    bands = {
        name: _summarize_classes([prior[name] for prior in priors if prior.get(name)], len(runs)) for name in names
    }
    return {name: shares["mean"] for name, shares in bands.items() if shares} or None


def _mean_confusion(runs: Sequence[StoredRun]) -> JsonDict | None:
    """Return the mean confusion matrix as counts, or with many classes its largest entries off the diagonal."""
    matrices = [matrix for run in runs if (matrix := (run.summary or {}).get("confusion"))]
    if len(matrices) < len(runs):
        return None
    size = range(len(matrices[0]))
    mean = [[six_digits(sum(matrix[t][p] for matrix in matrices) / len(matrices)) for p in size] for t in size]
    if len(size) <= MAX_MATRIX_CLASSES:
        return {"matrix": mean}
    wrong = sorted(((mean[t][p], t, p) for t in size for p in size if t != p and mean[t][p]), reverse=True)
    return {"largest": [[t, p, count, six_digits(sum(mean[t]))] for count, t, p in wrong[:MAX_CONFUSIONS]]}


def list_classes(runs: Sequence[StoredRun]) -> list[str]:
    """Return the names of the classes, their numbers where the runs do not say."""
    for run in runs:
        for names in ((run.summary or {}).get("classes"), ((run.split or {}).get("counts") or {}).get("classes")):
            if names:
                return [str(name) for name in names]
    counts = (len((_last_value(run, "test") or {}).get("per_class") or []) for run in runs)
    return [str(n) for n in range(max(counts, default=0))]


class SplitUser(NamedTuple):
    """A run that has a split."""

    column: Column
    row: str
    seed: int


def split_charts(study: Study) -> list[JsonDict]:
    """Return each different split once: who uses it, and the counts of each client and class."""
    users: list[tuple[JsonDict, list[SplitUser]]] = []
    for cell, entry in study.finished():
        run = study.run(entry)
        split = run.split if run else None
        if split is None:
            continue
        user = SplitUser(study.columns[study.column_of(cell)], cell.at[study.sweep.rows], entry.seed)
        same = next((others for other, others in users if other == split), None)
        if same is None:
            users.append((split, [user]))
        else:
            same.append(user)
    everyone = [user for _, some in users for user in some]
    return [_split_chart(split, some, title_users(study, some, everyone)) for split, some in users]


def title_users(study: Study, users: Sequence[SplitUser], everyone: Sequence[SplitUser]) -> str:
    """Return who uses a split: columns, with the rows and seeds where not all of a column use it; "" for everyone."""
    if len(users) == len(everyone):
        return study.column_title(users[0].column) if len(study.columns) == 1 else ""
    words = []
    for column in dict.fromkeys(user.column for user in users):
        own, others = ([user for user in some if user.column == column] for some in (users, everyone))
        rows, seeds = dict.fromkeys(user.row for user in own), dict.fromkeys(user.seed for user in own)
        parts = [study.column_title(column)]
        if len(rows) < len({user.row for user in others}):
            parts.append(" and ".join(study.value_title(study.sweep.rows, row) for row in rows))
        if len(seeds) < len({user.seed for user in others}):
            parts.append(f"seed {' and '.join(map(str, seeds))}")
        words.append(", ".join(part for part in parts if part))
    return "; ".join(words)


def _split_chart(split: JsonDict, users: Sequence[SplitUser], title: str) -> JsonDict:
    clients = len(split["each"])
    numbers = pick_evenly(range(clients), MAX_CLIENTS)
    server = split.get("server")
    return {
        "title": title,
        "runs": len(users),
        "classes": [str(name) for name in split["counts"]["classes"]],
        "totals": {"labeled": split["counts"]["labeled"], "unlabeled": split["counts"]["unlabeled"]},
        "clients": clients,
        "shown": numbers,
        "server": server["labeled_classes"] if server else None,
        "labeled": [split["each"][k]["labeled_classes"] for k in numbers],
        "unlabeled": [split["each"][k]["unlabeled_classes"] for k in numbers],
    }


def line_charts(study: Study, score: ScoreTable) -> list[JsonDict]:
    """Return for kind "lines" a panel for each combination of the axes that are neither x nor the lines.

    Every line has points {x, mean, low, high} and published ones {x, mean, deviation}, in percent.
    """
    x = study.sweep.x
    if study.sweep.kind != "lines" or x is None:
        return []
    rows = study.sweep.rows
    line_axis = rows if x != rows else next((name for name in study.column_axes if name != x), x)
    others = [name for name in [rows, *study.column_axes] if name not in (x, line_axis)]
    panels: dict[tuple[str, ...], dict[str, JsonDict]] = {}
    runs_of = dict(iter(frame.cells_frame(study).groupby(["column", "row"])))
    places = [(number, value.name) for number in range(len(study.columns)) for value in study.row_values]
    for number, row in places:
        column = study.columns[number]
        cell = study.cell(row, column)
        if cell is None:
            continue
        panel = panels.setdefault(tuple(study.value_title(name, cell.at[name]) for name in others), {})
        name = cell.at[line_axis] if line_axis != x else study.sweep.title
        line = panel.setdefault(name, {"points": [], "published": []})
        shares = [share for share in runs_of[number, row]["last_percent"] if share is not None]
        last, place = score.mark(row, column).last, float(cell.at[x])
        if last:
            points = {"mean": last.mean, "low": min(shares), "high": max(shares)}
            line["points"].append({"x": place, **{key: six_digits(value) for key, value in points.items()}})
        if cell.published:
            published = {"mean": cell.published.mean, "deviation": cell.published.deviation}
            line["published"].append({"x": place, **published})
    names = [value.name for value in study.axis(line_axis).values] if line_axis != x else [study.sweep.title]
    return [
        {
            "title": ", ".join(title),
            "label": x,
            "own": line_axis != rows,
            "lines": [
                {
                    "line": n,
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
