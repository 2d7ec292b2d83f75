"""Data frames of the cells and of the metrics of a study, from which tables, charts, CSV and LaTeX are made."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pandas as pd

from halfmoon.core.spreadsheet import escape_formula, escape_formulas
from halfmoon.report.metrics import METRICS
from halfmoon.report.run_reader import StoredRun
from halfmoon.report.study import TEST_ACCURACY, CellRun, Study

COST_COLUMNS = ("labeled_steps", "labeled_images", "unlabeled_images", "forward", "backward", "bytes_down", "bytes_up",
        "stored_client", "stored_server")  # fmt: skip
"""Costs of a run, as in its summary.json."""

STUDY_COLUMNS = ("study", "paper", "item", "scale", "scale_about")
"""Columns that describe the study, in CSV."""

VALUE_COLUMNS = (
    *("seed", "finished", "failed", "last_percent", "best_percent", "best_round"),
    *("published_percent", "published_deviation", "published_note", "equal_labeled_steps", "equal_steps_percent"),
    *COST_COLUMNS,
    *("seconds", "identity"),
    *("clients_percent", "clients_spread", "clients_worst_percent", "used_percent"),
)
"""Columns that describe a run."""


@cache
def metrics_frame(study: Study) -> Any:
    """Collect a data frame with one line for each run, round and metric.

    A study is the grid of a report's table: its rows are usually methods, its columns data sets or settings, and a cell
    (a row in a column) has one run for each seed. Runs whose folder is missing have no lines.

    Returns:
        The columns are "run" (the folder), "row" (name of the method, or of another value that varies over the rows),
        "column" (an index of `Study.columns`), "seed", "round", "metric" and "value". Metrics are `METRICS`,
        "megabytes" (sent so far in both directions) and "seconds" (elapsed).
    """
    lines = []
    for cell, entry in study.finished():
        run = study.run(entry)
        if run is None:
            continue
        for point in iterate_points(run):
            lines.append((entry.folder, cell.at[study.sweep.rows], study.column_of(cell), entry.seed, *point))
    names = ["run", "row", "column", "seed", "round", "metric", "value"]
    # A round may have two values of a metric, such as two evaluations by sites: the last one counts.
    return pd.DataFrame(lines, columns=names).drop_duplicates(["row", "column", "run", "round", "metric"], keep="last")


def iterate_points(run: StoredRun) -> Iterator[tuple[int, str, float]]:
    """Iterate over the metrics of a run as (round, metric, value); accuracies and shares are in percent.

    For example metrics.jsonl's line {"round": 5, "test": {"accuracy": 0.81}} gives (5, "accuracy", 81.0).
    """
    for row in run.rows:
        for metric, (group, name, factor) in METRICS.items():
            value = (row.get(group) or {}).get(name)
            if value is not None:
                yield row["round"], metric, value * factor
        # Without test images at the server, a federation's sites evaluate the model: in the round after it was made,
        # whose line therefore has the number of the earlier round.
        evaluation = row.get("evaluation") or {}
        if not row.get("test") and evaluation.get("accuracy") is not None:
            yield evaluation["round"], "accuracy", 100 * evaluation["accuracy"]
        cost = row.get("cost") or {}
        if {"bytes_down", "bytes_up"} <= cost.keys():
            yield row["round"], "megabytes", (cost["bytes_down"] + cost["bytes_up"]) / 1e6
    # Timings are per round, the metric is the time since the start.
    elapsed = 0.0
    for number, seconds in sorted(run.seconds().items()):
        elapsed += seconds
        yield number, "seconds", elapsed


@cache
def cells_frame(study: Study) -> Any:
    """Collect a data frame with one line for each cell and seed, and one without a seed for a cell without runs.

    An axis is something that varies over the study, such as the method or the data set, and a cell is a combination of
    one value of every axis.

    Returns:
        The columns are "row" and "column" as in `metrics_frame`, "rounds", "sent" (MB in both directions), "costs"
        (whether any is known), the value of each axis as "axis:NAME", and `VALUE_COLUMNS`. Accuracies are in percent;
        None is unknown.
    """
    names = ["row", "column", "rounds", "sent", "costs"]
    names += [*(f"axis:{axis.name}" for axis in study.sweep.axes), *VALUE_COLUMNS]
    lines = []
    for cell in study.sweep.cells:
        cell_values = {"row": cell.at[study.sweep.rows], "column": study.column_of(cell)}
        cell_values |= {f"axis:{name}": value for name, value in cell.at.items()}
        if published := cell.published:
            cell_values["published_percent"] = published.mean
            cell_values["published_deviation"] = published.deviation
            cell_values["published_note"] = published.note
        # A cell without runs still has a line, with the published accuracy.
        lines += [{**cell_values, **_run_values(study, entry)} for entry in cell.runs] or [cell_values]
    # As objects, so that None does not become NaN, and integers do not become floats.
    table = pd.DataFrame([[line.get(name) for name in names] for line in lines], columns=names, dtype=object)
    # Rounds record the test accuracy only, so another measure is not known before the end of a run.
    if study.sweep.measure == TEST_ACCURACY:
        _add_equal_steps(study, table)
    return table


def _run_values(study: Study, entry: CellRun) -> dict[str, Any]:
    """Collect the values of one run for `cells_frame`, accuracies and shares in percent; unknown ones are left out.

    Args:
        study: the study, which reads the run's folder if it exists.
        entry: the run in the file of the study, which has accuracy, cost and duration also without the folder.
    """
    values: dict[str, Any] = {"seed": entry.seed, "finished": entry.finished, "failed": entry.failed}
    values["identity"] = entry.identity
    if not entry.finished:
        return values
    if entry.accuracy is not None:
        best = entry.accuracy.best
        values["last_percent"] = 100 * entry.accuracy.last
        values["best_percent"] = None if best is None else 100 * best
        values["best_round"] = entry.accuracy.best_round
    run = study.run(entry)  # None if its folder is missing
    summary = (run.summary if run else None) or {}
    clients = summary.get("client_accuracy")
    if clients:
        values["clients_percent"] = 100 * clients["mean"]
        values["clients_spread"] = 100 * clients["deviation"]
        values["clients_worst_percent"] = 100 * clients["worst"]  # mean of the lowest tenth of clients
    pseudo_labels = summary.get("pseudo_labels")
    if pseudo_labels and pseudo_labels.get("used") is not None:
        values["used_percent"] = 100 * pseudo_labels["used"]
    values["rounds"] = run.rows[-1]["round"] if run and run.rows else None
    cost = entry.cost or {}
    bytes_down = cost.get("bytes_down")
    bytes_up = cost.get("bytes_up")
    values["sent"] = None if bytes_down is None or bytes_up is None else (bytes_down + bytes_up) / 1e6
    values["costs"] = bool(cost)
    values |= {name: cost.get(name) for name in COST_COLUMNS}
    values["seconds"] = entry.seconds
    return values


def _add_equal_steps(study: Study, table: pd.DataFrame) -> None:
    """Set the accuracies at the largest number of labeled steps that all finished runs of a column reached.

    At equal steps methods are compared after the same training on labels, however long each of them trained. The
    accuracy of a run is that of its last evaluation up to this number.

    Args:
        study: the study.
        table: the table of `cells_frame`, whose columns "equal_labeled_steps" and "equal_steps_percent" are set.
    """
    # The lines of the table in their order: the runs of each cell, or one line for a cell without runs.
    entries = [entry for cell in study.sweep.cells for entry in cell.runs or [None]]
    # By number of the line: (labeled steps so far, accuracy) of each evaluation, in their order.
    evaluations: dict[int, list[tuple[float, float]]] = {}
    for line, entry in enumerate(entries):
        if entry is not None and entry.finished:
            evaluations[line] = _list_evaluations(entry, study.run(entry))
    for column in range(len(study.columns)):
        lines = [line for line, number in enumerate(table["column"]) if number == column and line in evaluations]
        # A run without evaluations makes this 0, so its column has no comparison at equal steps.
        last_steps = [evaluations[line][-1][0] if evaluations[line] else 0 for line in lines]
        equal_steps = min(last_steps, default=0)
        if not equal_steps:
            continue
        for line in lines:
            reached = [accuracy for steps, accuracy in evaluations[line] if steps <= equal_steps]
            table.at[line, "equal_labeled_steps"] = equal_steps
            table.at[line, "equal_steps_percent"] = 100 * reached[-1] if reached else None


def _list_evaluations(entry: CellRun, run: StoredRun | None) -> list[tuple[float, float]]:
    """List (labeled steps so far, test accuracy as a share) by evaluation; without a run folder only the last one."""
    rows = run.rows if run else []
    pairs = [((row.get("cost") or {}).get("labeled_steps"), (row.get("test") or {}).get("accuracy")) for row in rows]
    pairs = [(steps, share) for steps, share in pairs if steps is not None and share is not None]
    steps = (entry.cost or {}).get("labeled_steps")
    if not pairs and entry.accuracy and steps is not None:
        return [(steps, entry.accuracy.last)]
    return pairs


def format_csv(studies: Sequence[Study]) -> str:
    """Format the runs of all studies as CSV, a line for each run, with unrounded numbers; unknown fields are empty.

    The columns are those of the study, its axes (such as the method or the data set), and the values of the run. An
    axis with the name of another column gets the prefix `axis_`. Texts that a spreadsheet would read as a formula get
    an apostrophe.
    """
    axes = list(dict.fromkeys(axis.name for study in studies for axis in study.sweep.axes))
    # `cells_frame` prefixes its axes; the names of the file's columns have a prefix only if they would clash.
    headings = {f"axis:{name}": f"axis_{name}" if name in (*STUDY_COLUMNS, *VALUE_COLUMNS) else name for name in axes}
    tables = []
    for study in studies:
        sweep = study.sweep
        # How much smaller the study is than the paper's experiment; None for its full size.
        scale = (sweep.scale.name, sweep.scale.about) if sweep.scale else (None, None)
        texts = (sweep.recipe or sweep.title, sweep.paper, sweep.item, *scale)
        study_values = dict(zip(STUDY_COLUMNS, texts, strict=True))
        tables.append(cells_frame(study).assign(**study_values).astype(object))
    columns = [*STUDY_COLUMNS, *headings.values(), *VALUE_COLUMNS]
    table = pd.concat(tables).rename(columns=headings).reindex(columns=columns)
    header = escape_formulas(list(table.columns))
    return table.map(_format_field).to_csv(index=False, lineterminator="\n", header=header)


def _format_field(value: Any) -> str:
    """Format a value for CSV, with all digits of a number."""
    if isinstance(value, str):
        return escape_formula(value)
    if pd.isna(value):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)
