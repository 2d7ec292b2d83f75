"""Render studies as one self-contained HTML page: templates in web/ make the tables, a script there the charts."""

from collections.abc import Mapping, Sequence
from typing import Any

from halfmoon.core.versions import installed_version
from halfmoon.report import scores, series, templates
from halfmoon.report.gather import common_options
from halfmoon.report.headline import RowRoles, find_roles, write_headline
from halfmoon.report.run_reader import StoredRun
from halfmoon.report.scores import CellScore, ScoreTable, compare_order, final_scores, scores_at_equal_steps
from halfmoon.report.study import AxisValue, Column, Study, describe_scale, number_to_letters
from halfmoon.report.tables import format_mean
from halfmoon.storage.atomic_io import replace_nonfinite

CHARTS = {
    "learning": ("accuracy", "pseudo", "above", "share_above", "share_used"),
    "regulators": ("auc_confidence", "auc_weight", "weights_mean", "weights_spread", "reward"),
    "classes": (
        *("js_app_u", "js_labeled", "local_js_app_u", "local_js_labeled", "global_js_app_u", "global_js_labeled"),
        *("per_class", "class_shares"),
    ),
    "clients": ("clients",),
    "confusion": ("confusion",),
    "costs": ("accuracy_by_cost",),
}
"""Charts of a column, by section of the page, in their order."""


def render_html(studies: Sequence[Study]) -> str:
    """Render a report of studies (tables of runs) as one HTML page, with charts that its script draws.

    All texts are escaped, and nothing is loaded from other addresses.
    """
    # The templates call these functions by name.
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
        find_roles,
        list_roles,
        format_gain,
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
        version=installed_version("halfmoon"),
        # For the script; NaN and infinity are not JSON.
        data=replace_nonfinite({"studies": [_chart_data(study) for study in studies]}),
        CHARTS=CHARTS,
        COSTS=list(scores.COSTS),
        **{function.__name__: function for function in functions},
    )


def _chart_data(study: Study) -> dict[str, Any]:
    """Collect the JSON from which the page's script draws the charts of a study.

    Returns:
        "scale": the sentence on the scale of the study relative to its paper; "styles": color and dashes of each row;
        "rows_title": what the rows are, such as "method"; "groups": the curves of each column; "splits": images of each
        client and class; "option_panels": panels with an option of the study as x; "measure": name of the measure.
    """
    # A study of kind "splits" has splits without training, so it has no curves.
    has_curves = study.sweep.kind != "splits"
    return {
        "scale": describe_scale(study.sweep.scale),
        "styles": series.row_styles(study),
        "rows_title": study.sweep.rows,
        "groups": [series.column_charts(study, column) for column in study.columns] if has_curves else [],
        "splits": series.split_charts(study),
        "option_panels": series.line_charts(study, final_scores(study)),
        "measure": study.measured,
    }


def list_missing(study: Study) -> list[str]:
    """List what the page of a report cannot show of a study, and why, in a sentence each.

    Runs are left out that failed or have not finished, and charts for which the folders of some runs have no data.
    """
    notes = list(study.notes)
    runs = [(_name_run(study, cell, entry.seed), entry) for cell in study.sweep.cells for entry in cell.runs]
    notes += [f"{name} failed: {entry.failed.rstrip('.')}." for name, entry in runs if entry.failed]
    unfinished = [name for name, entry in runs if not entry.finished and not entry.failed]
    if unfinished:
        notes.append(f"Not finished, and left out: {_list_some(unfinished)}.")
    existing = [(name, run) for name, entry in runs if (run := study.run(entry)) is not None]
    is_trained = study.sweep.kind != "splits"  # otherwise runs only write a split
    missing_data: dict[str, list[str]] = {}  # names of runs by what they do not have
    for name, run in existing:
        for text in _find_missing_data(run, is_trained):
            missing_data.setdefault(text, []).append(name)
    for text in (_NO_SPLIT, _NO_PRIOR, _NO_CONFUSION, _NO_COUNTS_OF_SITES, _NO_CONFUSION_OF_SITES):
        names = missing_data.get(text, [])
        if names:
            notes.append(f"{text}: {'all runs' if len(names) == len(existing) else _list_some(names)}.")
    return notes


_NO_SPLIT = "No split.json (made by an older version), so no chart of clients and classes"
_NO_PRIOR = "No class distributions (made by an older version, or without unlabeled images), so no divergences"
_NO_CONFUSION = "No confusion matrix (made by an older version, or without test images)"
_NO_COUNTS_OF_SITES = (
    "No chart of clients and classes, no class distributions (a federation: its sites do not send their counts)"
)
_NO_CONFUSION_OF_SITES = "No confusion matrix (a federation without test images at its server)"


def _find_missing_data(run: StoredRun, is_trained: bool) -> list[str]:
    """List the data of charts that a run's folder does not have; `is_trained` is False for runs that only write a split."""
    has_confusion = bool((run.summary or {}).get("confusion"))
    if run.federated:
        return [_NO_COUNTS_OF_SITES] if has_confusion else [_NO_COUNTS_OF_SITES, _NO_CONFUSION_OF_SITES]
    missing = []
    if run.split is None:
        missing.append(_NO_SPLIT)
    if is_trained and not any(row.get("prior") for row in run.rows):
        missing.append(_NO_PRIOR)
    if is_trained and not has_confusion:
        missing.append(_NO_CONFUSION)
    return missing


def _name_run(study: Study, cell: Any, seed: int) -> str:
    titles = [axis.title(cell.at[axis.name]) for axis in study.sweep.axes if len(axis.values) > 1]
    return ", ".join([*titles, f"seed {seed}"])


def _list_some(names: Sequence[str], max_names: int = 6) -> str:
    rest = f"; and {len(names) - max_names} more" if len(names) > max_names else ""
    return "; ".join(names[:max_names]) + rest


def describe_sources(study: Study) -> dict[str, str]:
    """Describe paper, machine, versions and command of a study; "" for unknown ones."""
    sweep = study.sweep
    return {
        "paper": ", ".join(text for text in (sweep.paper, sweep.item) if text),
        "machine": _describe_machine(sweep.machine),
        "versions": ", ".join(f"{name} {version}" for name, version in sweep.versions.items()),
        "command": sweep.command,
    }


def _describe_machine(machine: Mapping[str, Any]) -> str:
    """Describe the machine of a sweep, such as "AMD EPYC, 16 cores, no GPU"; "" if its sweep.json has no record."""
    if not machine:
        return ""
    parts = []
    if machine.get("cpu"):
        parts.append(str(machine["cpu"]))
    if machine.get("cores"):
        parts.append(f"{machine['cores']} {'core' if machine['cores'] == 1 else 'cores'}")
    parts.append(str(machine["gpu"]) if machine.get("gpu") else "no GPU")
    return ", ".join(parts)


def differs_at_equal_steps(study: Study) -> bool:
    """Check whether accuracies after equal numbers of labeled steps differ from those of the final models.

    If no cell of the study differs, the report has no separate table of them.
    """
    final_score = final_scores(study)
    equal_score = scores_at_equal_steps(study)
    for column, steps in (equal_score.steps or {}).items():
        if not steps:  # a column without a comparison at equal steps
            continue
        for row in study.row_values:
            if equal_score.get(row.name, column).last != final_score.get(row.name, column).last:
                return True
    return False


def to_sentence(text: str) -> str:
    """Capitalize a text and add a full stop if it has none."""
    end = "" if text.endswith((".", "!", "?")) else "."
    return text[:1].upper() + text[1:] + end


class TableNotes:
    """Footnotes of one table. Equal notes share a letter.

    Attributes:
        texts: the notes in the order of their letters.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []

    def letter(self, text: str) -> str:
        """Get the letter of a note, and add the note if it is new."""
        if text not in self.texts:
            self.texts.append(text)
        return number_to_letters(self.texts.index(text)).lower()


def format_sign(text: str) -> str:
    """Replace hyphens by minus signs."""
    return text.replace("-", "\N{MINUS SIGN}")


def format_points(difference: float) -> str:
    """Format a difference in points with its sign."""
    return format_sign(f"{difference:+.2f}")


def format_count(value: float | None) -> str:
    """Format a number with at least three digits, a whole number without a decimal point; "" for None."""
    if value is None:
        return ""
    if value == round(value) or value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def kendall_taus(study: Study, score: ScoreTable) -> list[str]:
    """Compute the agreement of measured and published order for each column, as text."""
    return [compare_order(study, score, column).agreement for column in study.columns]


def describe_missing_seeds(cell: CellScore) -> str:
    """Describe how many seeds of a cell have finished; "" if all have."""
    return f"{cell.seeds} of {cell.planned} seeds finished" if cell.seeds < cell.planned else ""


def describe_published_note(cell: CellScore) -> str:
    """Describe the note of a cell's published number; "" without one."""
    note = cell.published.note.rstrip(".") if cell.published else ""
    return f"in the paper: {note}" if note else ""


def list_cell_scores(study: Study, score: ScoreTable, column: Column) -> list[tuple[AxisValue, CellScore]]:
    """List each row of a column that has runs or a published number, with its score."""
    cells = [(value, score.get(value.name, column)) for value in study.row_values]
    return [(value, cell) for value, cell in cells if cell.planned or cell.published]


def list_roles(row: str, roles: RowRoles) -> list[str]:
    """List the roles of a row in a word each for a table: upper bound, baseline, best."""
    roles_of_row = []
    if row == roles.ceiling:
        roles_of_row.append("upper bound")
    if row == roles.baseline:
        roles_of_row.append("baseline")
    if row in roles.winners and row != roles.ceiling:
        roles_of_row.append("best")
    return roles_of_row


def format_gain(cell: CellScore, baseline: CellScore) -> str:
    """Format the points that a row gains over the baseline's final accuracy; "" if one of them is unknown."""
    if cell.last is None or baseline.last is None:
        return ""
    return format_points(cell.last.mean - baseline.last.mean)
