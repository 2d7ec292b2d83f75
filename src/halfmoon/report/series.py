"""What the charts of a page draw: means and bands over seeds, ready for JSON, shares as percent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from halfmoon.report.comparison import Column, Score
from halfmoon.report.run_reader import Run
from halfmoon.report.study import Study
from halfmoon.report.styles import drawn, looks

Data = dict[str, Any]

SERIES = {
    "accuracy": ("test", "accuracy", 100.0),
    "pseudo": ("pseudo", "accuracy", 100.0),
    "above": ("pseudo", "accuracy_above", 100.0),
    "share_above": ("pseudo", "share_above", 100.0),
    "share_used": ("pseudo", "share_used", 100.0),
    "js_app_u": ("prior", "js_app_u", 1.0),
    "js_labeled": ("prior", "js_labeled", 1.0),
    "local_js_app_u": ("clients", "local_js_app_u", 1.0),
    "local_js_labeled": ("clients", "local_js_labeled", 1.0),
    "global_js_app_u": ("clients", "global_js_app_u", 1.0),
    "global_js_labeled": ("clients", "global_js_labeled", 1.0),
}
"""Quantities by round: part and name in metrics.jsonl, and the factor under which they are drawn."""

MOST_POINTS = 300
"""A line has at most so many points; rounds between them are left out evenly."""

LARGEST_MATRIX = 100
"""With more classes, the most frequent confusions stand in a list instead of a matrix."""

SHOWN_CLIENTS = 40
_CONFUSIONS = 20


def line_looks(study: Study) -> list[Data]:
    """Return how each row of a study is drawn: title, color, dashes in pixels, marker."""
    values = study.row_values
    styles = looks([value.name for value in values])
    return [{"title": value.title, **drawn(style)} for value, style in zip(values, styles, strict=True)]


def group(study: Study, column: Column) -> Data:
    """Return everything that is drawn of one column: a dict for each row with a run folder, and the class names."""
    lines, classes = [], []
    for number, value in enumerate(study.row_values):
        cell = study.cell(value.name, column)
        runs = [run for entry in (cell.runs if cell else []) if (run := study.run(entry)) is not None]
        if runs:
            lines.append({"line": number, "seeds": len(runs), **_line(runs)})
            classes = classes or class_names(runs)
    return {"title": study.column_title(column), "classes": classes, "lines": lines}


def _line(runs: Sequence[Run]) -> Data:
    made: Data = {"series": {}}
    for key, (part, name, factor) in SERIES.items():
        values = [run.series(part, name) for run in runs]
        rounds = thinned(common(values))
        if rounds:
            made["series"][key] = {"x": rounds, **band([[each[r] * factor for r in rounds] for each in values])}
    rounds = made["series"].get("accuracy", {}).get("x", [])
    made["against"] = _against(runs, rounds)
    made["per_class"] = _per_class(runs)
    made["prior"] = _prior(runs)
    made["confusion"] = _confusion(runs)
    return made


def common(values: Sequence[Mapping[int, float]]) -> list[int]:
    """Return the rounds that every seed has, in order."""
    return sorted(set.intersection(*(set(each) for each in values))) if values else []


def thinned(rounds: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """Return at most `most` rounds, evenly chosen, the first and the last among them."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[round(n * (len(rounds) - 1) / (most - 1))] for n in range(most)]


def band(seeds: Sequence[Sequence[float]]) -> Data:
    """Return mean, low and high over seeds (each of the same length), six digits of each."""
    columns = list(zip(*seeds, strict=True))
    shapes: dict[str, Callable[[Sequence[float]], float]] = {
        "mean": lambda values: math.fsum(values) / len(values),
        "low": min,
        "high": max,
    }
    return {name: [short(of(values)) for values in columns] for name, of in shapes.items()}


def short(number: float) -> float:
    """Return a number with six digits: a page is read by eyes."""
    return float(f"{number:.6g}")


def _against(runs: Sequence[Run], rounds: Sequence[int]) -> Data:
    """Return what was spent up to each round, mean over seeds: labeled steps, forward images, MB sent, seconds."""
    spent: dict[str, list[dict[int, float]]] = {"steps": [], "forward": [], "megabytes": [], "seconds": []}
    for run in runs:
        costs = {row["round"]: row.get("cost") or {} for row in run.rows}
        spent["steps"].append({r: cost["labeled_steps"] for r, cost in costs.items() if "labeled_steps" in cost})
        spent["forward"].append({r: cost["forward"] for r, cost in costs.items() if "forward" in cost})
        both = {"bytes_down", "bytes_up"}
        sent = {r: (cost["bytes_down"] + cost["bytes_up"]) / 1e6 for r, cost in costs.items() if both <= cost.keys()}
        spent["megabytes"].append(sent)
        spent["seconds"].append(_elapsed(run))
    return {
        key: band([[each[r] for r in rounds] for each in values])["mean"]
        for key, values in spent.items()
        if rounds and all(r in each for each in values for r in rounds)
    }


def _elapsed(run: Run) -> dict[int, float]:
    total, elapsed = 0.0, {}
    for number, seconds in sorted(run.seconds().items()):
        total += seconds
        elapsed[number] = total
    return elapsed


def class_names(runs: Sequence[Run]) -> list[str]:
    """Return the names of the classes, their numbers where the runs do not say."""
    for run in runs:
        for names in ((run.summary or {}).get("classes"), ((run.split or {}).get("counts") or {}).get("classes")):
            if names:
                return [str(name) for name in names]
    lasts = (_last(run, "test") for run in runs)
    return [str(n) for n in range(max((len(last.get("per_class") or []) for last in lasts if last), default=0))]


def _last(run: Run, part: str) -> Data | None:
    return next((row[part] for row in reversed(run.rows) if row.get(part)), None)


def _per_class(runs: Sequence[Run]) -> Data | None:
    """Return the class-wise accuracy of the final model in percent."""
    each = [(_last(run, "test") or {}).get("per_class") for run in runs]
    known = [[100 * (value or 0.0) for value in values] for values in each if values]
    alike = len({len(values) for values in known}) == 1
    return band(known) if alike and len(known) == len(runs) else None


def _prior(runs: Sequence[Run]) -> Data | None:
    """Return the class shares at the end in percent, mean over seeds: FedDB's Figures 1 and 3."""
    each = [_last(run, "prior") for run in runs]
    names = ("accuracy", "app_u", "labeled", "unlabeled")
    made = {}
    for name in names:
        values = [prior.get(name) for prior in each if prior is not None]
        alike = len({len(shares or []) for shares in values}) == 1
        if alike and len(values) == len(runs) and all(values):
            made[name] = band([[100 * share for share in shares] for shares in values if shares])["mean"]
    return made or None


def _confusion(runs: Sequence[Run]) -> Data | None:
    """Return the mean confusion matrix as counts, or with many classes its largest entries off the diagonal."""
    each = [(run.summary or {}).get("confusion") for run in runs]
    known = [matrix for matrix in each if matrix]
    if len(known) < len(runs):
        return None
    size = len(known[0])
    mean = [[short(sum(matrix[t][p] for matrix in known) / len(known)) for p in range(size)] for t in range(size)]
    if size <= LARGEST_MATRIX:
        return {"matrix": mean}
    wrong = [(mean[t][p], t, p) for t in range(size) for p in range(size) if t != p and mean[t][p]]
    return {"largest": [[t, p, n, short(sum(mean[t]))] for n, t, p in sorted(wrong, reverse=True)[:_CONFUSIONS]]}


class User(NamedTuple):
    """A run that was played on a split."""

    column: Column
    row: str
    seed: int


def splits(study: Study) -> list[Data]:
    """Return each different split once: who uses it, and the counts of each client and class."""
    found: list[tuple[Data, list[User]]] = []
    for cell, entry in study.finished():
        run = study.run(entry)
        split = run.split if run else None
        if split is None:
            continue
        user = User(tuple(cell.at[name] for name in study.column_axes), cell.at[study.sweep.rows], entry.seed)
        match = next((users for known, users in found if known == split), None)
        if match is None:
            found.append((split, [user]))
        else:
            match.append(user)
    everyone = [user for _, users in found for user in users]
    return [_split(split, users, users_title(study, users, everyone)) for split, users in found]


def users_title(study: Study, users: Sequence[User], everyone: Sequence[User]) -> str:
    """Return who uses a split: columns, with the rows and seeds where not all of a column use it; "" for everyone."""
    if len(users) == len(everyone):
        return study.column_title(users[0].column) if len(study.columns) == 1 else ""
    words = []
    for column in dict.fromkeys(user.column for user in users):
        mine, others = ([user for user in some if user.column == column] for some in (users, everyone))
        rows, seeds = dict.fromkeys(user.row for user in mine), dict.fromkeys(user.seed for user in mine)
        parts = [study.column_title(column)]
        if len(rows) < len({user.row for user in others}):
            parts.append(" and ".join(study.value_title(study.sweep.rows, row) for row in rows))
        if len(seeds) < len({user.seed for user in others}):
            parts.append(f"seed {' and '.join(map(str, seeds))}")
        words.append(", ".join(part for part in parts if part))
    return "; ".join(words)


def _split(split: Data, users: Sequence[User], title: str) -> Data:
    clients = len(split["each"])
    if clients <= SHOWN_CLIENTS:
        shown = list(range(clients))
    else:
        shown = [round(n * (clients - 1) / (SHOWN_CLIENTS - 1)) for n in range(SHOWN_CLIENTS)]
    server = split.get("server")
    return {
        "title": title,
        "runs": len(users),
        "classes": [str(name) for name in split["counts"]["classes"]],
        "totals": {"labeled": split["counts"]["labeled"], "unlabeled": split["counts"]["unlabeled"]},
        "clients": clients,
        "shown": shown,
        "server": server["labeled_classes"] if server else None,
        "labeled": [split["each"][k]["labeled_classes"] for k in shown],
        "unlabeled": [split["each"][k]["unlabeled_classes"] for k in shown],
    }


def against_x(study: Study, score: Score) -> list[Data]:
    """Return for kind "lines" a panel for each combination of the axes that are neither x nor the lines.

    Every line has points {x, mean, low, high} and published ones {x, mean, deviation}, in percent.
    """
    x = study.sweep.x
    if study.sweep.kind != "lines" or x is None:
        return []
    places = {value.name: float(value.name) for value in study.axis(x).values}
    lines_of = study.sweep.rows if x != study.sweep.rows else next((n for n in study.column_axes if n != x), x)
    others = [name for name in [study.sweep.rows, *study.column_axes] if name not in (x, lines_of)]
    panels: dict[tuple[str, ...], dict[str, Data]] = {}
    for column in study.columns:
        for value in study.row_values:
            cell = study.cell(value.name, column)
            if cell is None:
                continue
            panel = panels.setdefault(tuple(study.value_title(name, cell.at[name]) for name in others), {})
            name = cell.at[lines_of] if lines_of != x else study.sweep.title
            line = panel.setdefault(name, {"points": [], "published": []})
            shares = [100 * e.accuracy.last for e in cell.runs if e.finished and e.accuracy]
            mark = score.mark(value.name, column)
            if shares and mark.last:
                point = {"mean": mark.last.mean, "low": min(shares), "high": max(shares)}
                line["points"].append({"x": places[cell.at[x]], **{key: short(v) for key, v in point.items()}})
            if cell.published:
                published = {"mean": cell.published.mean, "deviation": cell.published.deviation}
                line["published"].append({"x": places[cell.at[x]], **published})
    names = [value.name for value in study.axis(lines_of).values] if lines_of != x else [study.sweep.title]
    return [
        {
            "title": ", ".join(title),
            "label": x,
            "own": lines_of != study.sweep.rows,
            "lines": [
                {"line": n, "title": study.axis(lines_of).title(name), **drawn(style), **_by_x(panel[name])}
                for n, (name, style) in enumerate(zip(names, looks(names), strict=True))
                if name in panel
            ],
        }
        for title, panel in panels.items()
    ]


def _by_x(line: Data) -> Data:
    return {key: sorted(points, key=lambda point: point["x"]) for key, points in line.items()}
