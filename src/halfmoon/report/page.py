"""One self-contained HTML page of studies: tables by the templates in web/, charts drawn by the script there."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from halfmoon.report import scores, series, templates
from halfmoon.report.gather import common_options
from halfmoon.report.headline import write_headline
from halfmoon.report.scores import CellScore, ScoreTable, compare_order, final_scores, scores_at_equal_steps
from halfmoon.report.study import Column, Study, describe_scale, number_to_letters
from halfmoon.report.tables import format_mean
from halfmoon.storage.atomic_io import replace_nonfinite

CHARTS = {
    "learning": ("accuracy", "pseudo", "above", "share_above", "share_used"),
    "regulators": ("auc_confidence", "auc_weight", "weights_mean", "weights_spread", "reward"),
    "classes": (
        *("js_app_u", "js_labeled", "local_js_app_u", "local_js_labeled", "global_js_app_u", "global_js_labeled"),
        *("per_class", "prior"),
    ),
    "confusion": ("confusion",),
    "costs": ("against",),
}
"""The charts of a group, by section, in their order."""


def render_html(studies: Sequence[Study]) -> str:
    """Return the page: every text escaped, no address of anything outside."""
    functions = (
        TableNotes,
        format_mean,
        format_sign,
        format_points,
        format_count,
        scores.column_headings,
        kendall_taus,
        describe_missing_seeds,
        describe_published_note,
        list_cell_scores,
        scores.cost_rows,
        describe_scale,
        write_headline,
        list_missing,
        to_sentence,
        describe_sources,
        common_options,
        differs_at_equal_steps,
        compare_order,
        final_scores,
        scores_at_equal_steps,
    )
    return templates.render(
        "halfmoon.report",
        "page.html",
        title=" · ".join(study.sweep.title for study in studies),
        studies=studies,
        version=metadata.version("halfmoon"),
        data=replace_nonfinite({"studies": [_chart_data(study) for study in studies]}),
        CHARTS=CHARTS,
        COSTS=list(scores.COSTS),
        **{function.__name__: function for function in functions},
    )


def _chart_data(study: Study) -> dict[str, Any]:
    charts = study.sweep.kind != "splits"
    return {
        "scale": describe_scale(study.sweep.scale),
        "styles": series.row_styles(study),
        "groups": [series.column_charts(study, column) for column in study.columns] if charts else [],
        "splits": series.split_charts(study),
        "x": series.line_charts(study, final_scores(study)),
        "measured": study.measured,
    }


def list_missing(study: Study) -> list[str]:
    """Return a sentence for everything that the page cannot show, and why."""
    notes = list(study.notes)
    runs = [(_name_run(study, cell, entry.seed), entry) for cell in study.sweep.cells for entry in cell.runs]
    notes += [f"{name} failed: {entry.failed.rstrip('.')}." for name, entry in runs if entry.failed]
    unfinished = [name for name, entry in runs if not entry.finished and not entry.failed]
    if unfinished:
        notes.append(f"Not finished, and left out: {_list_some(unfinished)}.")
    charts = study.sweep.kind != "splits"
    here = [(name, run) for name, entry in runs if (run := study.run(entry)) is not None]
    plain = [(name, run) for name, run in here if not run.federated]
    old = "made by an older version"
    without = {
        f"No split.json ({old}), so no picture of clients and classes": [n for n, run in plain if run.split is None],
        f"No class distributions ({old}, or nobody has unlabeled images), so no divergences": [
            n for n, run in plain if charts and not any(row.get("prior") for row in run.rows)
        ],
        f"No confusion matrix ({old}, or without test images)": [
            n for n, run in plain if charts and not (run.summary or {}).get("confusion")
        ],
        "No picture of clients and classes, no class distributions (a federation: its sites keep their counts)": [
            n for n, run in here if run.federated
        ],
        "No confusion matrix (a federation without test images at its server)": [
            n for n, run in here if run.federated and not (run.summary or {}).get("confusion")
        ],
    }
    for words, names in without.items():
        if names:
            notes.append(f"{words}: {'all runs' if len(names) == len(here) else _list_some(names)}.")
    return notes


def _name_run(study: Study, cell: Any, seed: int) -> str:
    words = [axis.title(cell.at[axis.name]) for axis in study.sweep.axes if len(axis.values) > 1]
    return ", ".join([*words, f"seed {seed}"])


def _list_some(names: Sequence[str], most: int = 6) -> str:
    return "; ".join(names[:most]) + (f"; and {len(names) - most} more" if len(names) > most else "")


def describe_sources(study: Study) -> dict[str, str]:
    """Return the source of a study and its command; "" for what is not known."""
    sweep = study.sweep
    return {
        "paper": ", ".join(words for words in (sweep.paper, sweep.item) if words),
        "machine": _describe_machine(sweep.machine),
        "versions": ", ".join(f"{name} {version}" for name, version in sweep.versions.items()),
        "command": sweep.command,
    }


def _describe_machine(machine: Mapping[str, Any]) -> str:
    words = [str(machine["cpu"])] if machine.get("cpu") else []
    words += [f"{machine['cores']} {'core' if machine['cores'] == 1 else 'cores'}"] if machine.get("cores") else []
    words += [str(machine["gpu"]) if machine.get("gpu") else "no GPU"] if machine else []
    return ", ".join(words)


def differs_at_equal_steps(study: Study) -> bool:
    """Return whether equal labeled steps are another matter than the runs' ends: a table that says the same is none."""
    score, even = final_scores(study), scores_at_equal_steps(study)
    return any(
        even.mark(row.name, column).last != score.mark(row.name, column).last
        for row in study.row_values
        for column, steps in (even.steps or {}).items()
        if steps
    )


def to_sentence(words: str) -> str:
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


class TableNotes:
    """Footnotes of one table: the same words share a letter."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def mark(self, words: str) -> str:
        """Return the letter that stands for a note."""
        if words not in self.words:
            self.words.append(words)
        return number_to_letters(self.words.index(words)).lower()


def format_sign(words: str) -> str:
    return words.replace("-", "\N{MINUS SIGN}")


def format_points(difference: float) -> str:
    return format_sign(f"{difference:+.2f}")


def format_count(value: float | None) -> str:
    """Return a number with three digits at least, a whole one without a point."""
    if value is None:
        return ""
    if value == round(value) or value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def kendall_taus(study: Study, score: ScoreTable) -> list[str]:
    return [compare_order(study, score, column).agreement for column in study.columns]


def describe_missing_seeds(mark: CellScore) -> str:
    return f"{mark.seeds} of {mark.planned} seeds finished" if mark.seeds < mark.planned else ""


def describe_published_note(mark: CellScore) -> str:
    note = mark.published.note.rstrip(".") if mark.published else ""
    return f"in the paper: {note}" if note else ""


def list_cell_scores(study: Study, score: ScoreTable, column: Column) -> list[tuple[str, CellScore]]:
    """Return the title and the mark of each row of a column that has runs or a published number."""
    marks = [(value.title, score.mark(value.name, column)) for value in study.row_values]
    return [(title, mark) for title, mark in marks if mark.planned or mark.published]
