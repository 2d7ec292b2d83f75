"""One self-contained HTML page of studies: tables by the templates in web/, charts drawn by the script there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from halfmoon.core import templates
from halfmoon.report import gather, scores, series
from halfmoon.report.comparison import equal, final, order
from halfmoon.report.headline import headline
from halfmoon.report.study import Study, scale_words
from halfmoon.storage.atomic_io import finite

CHARTS = {
    "learning": ("accuracy", "pseudo", "above", "share_above", "share_used"),
    "classes": (
        *("js_app_u", "js_labeled", "local_js_app_u", "local_js_labeled", "global_js_app_u", "global_js_labeled"),
        *("per_class", "prior"),
    ),
    "confusion": ("confusion",),
    "costs": ("against",),
}
"""The charts of a group, by section, in their order."""


def as_html(studies: Sequence[Study]) -> str:
    """Return the page: every text escaped, no address of anything outside."""
    words = (
        *(scores.TableNotes, scores.percent, scores.signed, scores.points, scores.count, scores.column_heads),
        *(scores.taus_of, scores.seeds_words, scores.published_words, scores.marks_of, scores.costs_of),
        *(scale_words, headline, missing, sentence, facts, common_options, uneven, order, final, equal),
    )
    return templates.render(
        "halfmoon.report",
        "page.html",
        title=" · ".join(study.sweep.title for study in studies),
        studies=studies,
        version=metadata.version("halfmoon"),
        data=finite({"studies": [_data(study) for study in studies]}),
        CHARTS=CHARTS,
        COSTS=scores.COSTS,
        **{word.__name__: word for word in words},
    )


def missing(study: Study) -> list[str]:
    """Return a sentence for everything that the page cannot show, and why."""
    notes = list(study.notes)
    runs = [(_name(study, cell, entry.seed), entry) for cell in study.sweep.cells for entry in cell.runs]
    notes += [f"{name} failed: {entry.failed.rstrip('.')}." for name, entry in runs if entry.failed]
    open_ = [name for name, entry in runs if not entry.finished and not entry.failed]
    if open_:
        notes.append(f"Not finished, and left out: {_some(open_)}.")
    drawn = study.sweep.kind != "splits"
    here = [(name, run) for name, entry in runs if (run := study.run(entry)) is not None]
    old = "made by an older version"
    without = {
        f"No split.json ({old}), so no picture of clients and classes": [n for n, run in here if run.split is None],
        f"No class distributions ({old}, or nobody has unlabeled images), so no divergences": [
            n for n, run in here if drawn and not any(row.get("prior") for row in run.rows)
        ],
        f"No confusion matrix ({old})": [n for n, run in here if drawn and not (run.summary or {}).get("confusion")],
    }
    for words, names in without.items():
        if names:
            notes.append(f"{words}: {'all runs' if len(names) == len(here) else _some(names)}.")
    return notes


def _name(study: Study, cell: Any, seed: int) -> str:
    words = [axis.title(cell.at[axis.name]) for axis in study.sweep.axes if len(axis.values) > 1]
    return ", ".join([*words, f"seed {seed}"])


def _some(names: Sequence[str], most: int = 6) -> str:
    if len(names) <= most:
        return "; ".join(names)
    return "; ".join(names[:most]) + f"; and {len(names) - most} more"


def _data(study: Study) -> dict[str, Any]:
    """Return what the script needs of a study."""
    drawn = study.sweep.kind != "splits"
    return {
        "scale": scale_words(study.sweep.scale),
        "looks": series.line_looks(study),
        "groups": [series.group(study, column) for column in study.columns] if drawn else [],
        "splits": series.splits(study),
        "x": series.against_x(study, final(study)),
        "measured": study.measured,
    }


def facts(study: Study) -> dict[str, str]:
    """Return where a study comes from and by which command; "" for what is not known."""
    sweep = study.sweep
    return {
        "paper": ", ".join(words for words in (sweep.paper, sweep.item) if words),
        "machine": _machine(sweep.machine),
        "versions": ", ".join(f"{name} {version}" for name, version in sweep.versions.items()),
        "command": sweep.command,
    }


def common_options(study: Study) -> dict[str, Any]:
    """Return the options that all runs of a study share."""
    return gather.common_options(list(study.runs.values()))


def uneven(study: Study) -> bool:
    """Return whether equal labeled steps are another matter than the runs' ends: a table that says the same is none."""
    score, even = final(study), equal(study)
    steps = even.steps or {}
    return any(
        even.mark(row.name, column).last != score.mark(row.name, column).last
        for row in study.row_values
        for column in study.columns
        if steps.get(column)
    )


def sentence(words: str) -> str:
    """Return words with a capital at the beginning and a stop at the end."""
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def _machine(machine: Mapping[str, Any]) -> str:
    words = [str(machine["cpu"])] if machine.get("cpu") else []
    words += [f"{machine['cores']} {'core' if machine['cores'] == 1 else 'cores'}"] if machine.get("cores") else []
    words += [str(machine["gpu"]) if machine.get("gpu") else "no GPU"] if machine else []
    return ", ".join(words)
