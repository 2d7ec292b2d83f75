"""Every cell and seed of a report as CSV, unrounded."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from halfmoon.report.comparison import at_steps, equal, evaluations
from halfmoon.report.study import Cell, Study, StudyCell

HEAD = ("study", "paper", "item", "scale", "scale_about")
RUN = (
    *("seed", "finished", "failed", "last_percent", "best_percent", "best_round"),
    *("published_percent", "published_deviation", "published_note", "equal_labeled_steps", "equal_steps_percent"),
    *("labeled_steps", "labeled_images", "unlabeled_images", "forward", "backward", "bytes_down", "bytes_up"),
    *("stored_client", "stored_server", "seconds", "identity"),
)
COST = ("labeled_steps", "labeled_images", "unlabeled_images", "forward", "backward", "bytes_down", "bytes_up",
        "stored_client", "stored_server")  # fmt: skip


def as_csv(studies: Sequence[Study]) -> str:
    """Return a line for each cell and seed, and one without a seed for a cell that has no run.

    An axis is a column that holds names of values; an axis that is called like another column gets the prefix `axis_`.
    Accuracies are percent, an empty field is unknown.
    """
    axes = list(dict.fromkeys(axis.name for study in studies for axis in study.sweep.axes))
    heads = {name: f"axis_{name}" if name in (*HEAD, *RUN) else name for name in axes}
    file = io.StringIO()
    writer = csv.DictWriter(file, [*HEAD, *heads.values(), *RUN], lineterminator="\n")
    writer.writeheader()
    for study in studies:
        steps = equal(study).steps or {}
        for cell in study.sweep.cells:
            common = steps.get(tuple(cell.at[name] for name in study.column_axes))
            fixed = {**_head(study), **{heads[name]: value for name, value in cell.at.items()}, **_published(cell)}
            for entry in cell.runs:
                writer.writerow(_row({**fixed, **_entry(study, entry, common)}))
            if not cell.runs:
                writer.writerow(_row(fixed))
    return file.getvalue()


def _head(study: Study) -> dict[str, Any]:
    sweep = study.sweep
    scale = {"scale": sweep.scale.name, "scale_about": sweep.scale.about} if sweep.scale else {}
    return {"study": sweep.recipe or sweep.title, "paper": sweep.paper, "item": sweep.item, **scale}


def _published(cell: Cell) -> dict[str, Any]:
    if cell.published is None:
        return {}
    said = cell.published
    return {
        "published_percent": said.mean,
        "published_deviation": said.deviation,
        "published_note": said.note,
    }


def _entry(study: Study, entry: StudyCell, common: float | None) -> dict[str, Any]:
    made: dict[str, Any] = {"seed": entry.seed, "finished": entry.finished, "failed": entry.failed}
    made["identity"] = entry.identity
    if not entry.finished:
        return made
    if entry.accuracy is not None:
        best = entry.accuracy.best
        made["last_percent"] = 100 * entry.accuracy.last
        made["best_percent"] = None if best is None else 100 * best
        made["best_round"] = entry.accuracy.best_round
    if common is not None:
        share = at_steps(evaluations(entry, study.run(entry)), common)
        made["equal_labeled_steps"] = common
        made["equal_steps_percent"] = None if share is None else 100 * share
    cost = entry.cost or {}
    return {**made, **{key: cost.get(key) for key in COST}, "seconds": entry.seconds}


def _row(values: dict[str, Any]) -> dict[str, str]:
    words = {key: "" if value is None else value for key, value in values.items()}
    return {
        key: str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)
        for key, value in words.items()
    }
