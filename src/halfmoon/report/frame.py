"""Two data frames of a study: its cells and its metrics. Tables, charts, CSV and LaTeX are made from them."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pandas as pd

from halfmoon.report.run_reader import StoredRun
from halfmoon.report.spreadsheet import escape_formula, escape_formulas
from halfmoon.report.study import TEST_ACCURACY, CellRun, Study

METRICS = {
    "accuracy": ("test", "accuracy", 100.0),
    "loss": ("train", "loss", 1.0),
    "pseudo": ("pseudo", "accuracy", 100.0),
    "above": ("pseudo", "accuracy_above", 100.0),
    "share_above": ("pseudo", "share_above", 100.0),
    "share_used": ("pseudo", "share_used", 100.0),
    "auc_confidence": ("pseudo", "auc_confidence", 1.0),
    "auc_weight": ("pseudo", "auc_weight", 1.0),
    "weights_mean": ("train", "m", 1.0),
    "weights_spread": ("train", "m_spread", 1.0),
    "reward": ("train", "d", 1.0),
    "js_app_u": ("prior", "js_app_u", 1.0),
    "js_labeled": ("prior", "js_labeled", 1.0),
    "local_js_app_u": ("clients", "local_js_app_u", 1.0),
    "local_js_labeled": ("clients", "local_js_labeled", 1.0),
    "global_js_app_u": ("clients", "global_js_app_u", 1.0),
    "global_js_labeled": ("clients", "global_js_labeled", 1.0),
    "epsilon": ("aggregation", "epsilon", 1.0),
    "steps": ("cost", "labeled_steps", 1.0),
    "forward": ("cost", "forward", 1.0),
}
"""Metrics by round: part and name in metrics.jsonl, and the factor under which a report shows them."""

COST_COLUMNS = ("labeled_steps", "labeled_images", "unlabeled_images", "forward", "backward", "bytes_down", "bytes_up",
        "stored_client", "stored_server")  # fmt: skip
STUDY_COLUMNS = ("study", "paper", "item", "scale", "scale_about")
VALUE_COLUMNS = (
    *("seed", "finished", "failed", "last_percent", "best_percent", "best_round"),
    *("published_percent", "published_deviation", "published_note", "equal_labeled_steps", "equal_steps_percent"),
    *COST_COLUMNS,
    *("seconds", "identity"),
)


@cache
def metrics_frame(study: Study) -> Any:
    """Return a data frame with one line for each run, round and metric: run, row, column, seed, round, metric, value.

    `row` is the method or another value of the rows' axis, `column` a place in `Study.columns`. Beside `METRICS` there
    are "megabytes" (sent so far, both ways) and "seconds" (elapsed).
    """
    lines = [
        (entry.folder, cell.at[study.sweep.rows], study.column_of(cell), entry.seed, *point)
        for cell, entry in study.finished()
        if (run := study.run(entry)) is not None
        for point in iterate_points(run)
    ]
    names = ["run", "row", "column", "seed", "round", "metric", "value"]
    return pd.DataFrame(lines, columns=names).drop_duplicates(["row", "column", "run", "round", "metric"], keep="last")


def iterate_points(run: StoredRun) -> Iterator[tuple[int, str, float]]:
    """Yield (round, metric, value) of a run; accuracies and shares are percent."""
    for row in run.rows:
        for metric, (part, name, factor) in METRICS.items():
            value = (row.get(part) or {}).get(name)
            if value is not None:
                yield row["round"], metric, value * factor
        evaluation = row.get("evaluation") or {}
        if not row.get("test") and evaluation.get("accuracy") is not None:
            yield evaluation["round"], "accuracy", 100 * evaluation["accuracy"]
        cost = row.get("cost") or {}
        if {"bytes_down", "bytes_up"} <= cost.keys():
            yield row["round"], "megabytes", (cost["bytes_down"] + cost["bytes_up"]) / 1e6
    elapsed = 0.0
    for number, seconds in sorted(run.seconds().items()):
        elapsed += seconds
        yield number, "seconds", elapsed


@cache
def cells_frame(study: Study) -> Any:
    """Collect a data frame with one line for each cell and seed, and one without a seed for a cell that has no run.

    The columns are `row` and `column` as in `metrics_frame`, `rounds`, `sent` (MB), `costs` (whether any is known),
    the axes as "axis:NAME", and `VALUE_COLUMNS`. Accuracies are percent; None is unknown.
    """
    names = ["row", "column", "rounds", "sent", "costs"]
    names += [*(f"axis:{axis.name}" for axis in study.sweep.axes), *VALUE_COLUMNS]
    lines = []
    for cell in study.sweep.cells:
        head = {"row": cell.at[study.sweep.rows], "column": study.column_of(cell)}
        head |= {f"axis:{name}": value for name, value in cell.at.items()}
        if published := cell.published:
            head |= {"published_percent": published.mean, "published_deviation": published.deviation}
            head["published_note"] = published.note
        lines += [{**head, **_run_values(study, entry)} for entry in cell.runs] or [head]
    table = pd.DataFrame([[line.get(name) for name in names] for line in lines], columns=names, dtype=object)
    if study.sweep.measure == TEST_ACCURACY:
        _add_equal_steps(study, table)
    return table


def _run_values(study: Study, entry: CellRun) -> dict[str, Any]:
    values: dict[str, Any] = {"seed": entry.seed, "finished": entry.finished, "failed": entry.failed}
    values["identity"] = entry.identity
    if not entry.finished:
        return values
    if entry.accuracy is not None:
        best = entry.accuracy.best
        values["last_percent"] = 100 * entry.accuracy.last
        values["best_percent"] = None if best is None else 100 * best
        values["best_round"] = entry.accuracy.best_round
    run = study.run(entry)
    values["rounds"] = run.rows[-1]["round"] if run and run.rows else None
    cost = entry.cost or {}
    traffic = cost.get("bytes_down"), cost.get("bytes_up")
    values["sent"] = None if None in traffic else sum(number or 0 for number in traffic) / 1e6
    values["costs"] = bool(cost)
    return {**values, **{name: cost.get(name) for name in COST_COLUMNS}, "seconds": entry.seconds}


def _add_equal_steps(study: Study, table: pd.DataFrame) -> None:
    """Fill in the accuracies at the largest number of labeled steps that all finished runs of a column reached."""
    entries = [entry for cell in study.sweep.cells for entry in cell.runs or [None]]
    curves = {
        n: _list_evaluations(entry, study.run(entry)) for n, entry in enumerate(entries) if entry and entry.finished
    }
    for column in range(len(study.columns)):
        places = [n for n, place in enumerate(table["column"]) if place == column and n in curves]
        steps = min((curves[n][-1][0] if curves[n] else 0 for n in places), default=0)
        if not steps:
            continue
        for n in places:
            share = next((share for used, share in reversed(curves[n]) if used <= steps), None)
            table.at[n, "equal_labeled_steps"] = steps
            table.at[n, "equal_steps_percent"] = None if share is None else 100 * share


def _list_evaluations(entry: CellRun, run: StoredRun | None) -> list[tuple[float, float]]:
    """Return (labeled steps so far, test accuracy as a share) by round; of a run without its folder the end alone."""
    rows = run.rows if run else []
    pairs = [((row.get("cost") or {}).get("labeled_steps"), (row.get("test") or {}).get("accuracy")) for row in rows]
    pairs = [(steps, share) for steps, share in pairs if steps is not None and share is not None]
    steps = (entry.cost or {}).get("labeled_steps")
    if not pairs and entry.accuracy and steps is not None:
        return [(steps, entry.accuracy.last)]
    return pairs


def format_csv(studies: Sequence[Study]) -> str:
    """Return the cells of all studies, unrounded; an empty field is unknown.

    An axis that is called like another column gets the prefix `axis_`. A text that a spreadsheet would take for a
    formula gets an apostrophe.
    """
    axes = list(dict.fromkeys(axis.name for study in studies for axis in study.sweep.axes))
    heads = {f"axis:{name}": f"axis_{name}" if name in (*STUDY_COLUMNS, *VALUE_COLUMNS) else name for name in axes}
    tables = []
    for study in studies:
        sweep = study.sweep
        scale = (sweep.scale.name, sweep.scale.about) if sweep.scale else (None, None)
        words = dict(zip(STUDY_COLUMNS, (sweep.recipe or sweep.title, sweep.paper, sweep.item, *scale), strict=True))
        tables.append(cells_frame(study).assign(**words).astype(object))
    table = pd.concat(tables).rename(columns=heads).reindex(columns=[*STUDY_COLUMNS, *heads.values(), *VALUE_COLUMNS])
    header = escape_formulas(list(table.columns))
    return table.map(_format_field).to_csv(index=False, lineterminator="\n", header=header)


def _format_field(value: Any) -> str:
    """Return a value as CSV shows it, all digits of a number."""
    if isinstance(value, str):
        return escape_formula(value)
    return "" if pd.isna(value) else str(value).lower() if isinstance(value, bool) else str(value)
