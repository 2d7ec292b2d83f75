"""One self-contained HTML page of studies: tables written here, charts drawn by the script that comes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from string import Template
from typing import Any

from halfmoon.report import scores, series
from halfmoon.report.comparison import Column, Score, equal, final
from halfmoon.report.gather import common_options
from halfmoon.report.headline import headline
from halfmoon.report.markup import Markup, el, joined, script_data
from halfmoon.report.study import Study, scale_words

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
    web = resources.files("halfmoon.report") / "web"
    title = " · ".join(study.sweep.title for study in studies)
    data = {"studies": [_data(study) for study in studies]}
    body = joined(*(_study(number, study) for number, study in enumerate(studies)))
    return Template((web / "page.html").read_text(encoding="utf-8")).substitute(
        title=joined(f"{title} · halfmoon"),
        style=(web / "page.css").read_text(encoding="utf-8"),
        body=body,
        foot=joined(f"Written by halfmoon {metadata.version('halfmoon')}."),
        data=script_data(data),
        script="\n".join((web / name).read_text(encoding="utf-8") for name in ("draw.js", "charts.js", "page.js")),
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


def _study(number: int, study: Study) -> Markup:
    sweep = study.sweep
    parts = [el("h1", None, sweep.title)]
    said = headline(study)
    if said:
        parts.append(el("p", {"class": "headline"}, said))
    scale = scale_words(sweep.scale)
    if scale:
        parts.append(el("p", {"class": "banner", "role": "note"}, scale))
    parts.append(_head(study))
    if sweep.kind == "splits":
        parts.append(_splits())
    else:
        parts += _results(study)
        parts.append(_groups(study))
        parts.append(_splits())
    notes = missing(study)
    if notes:
        listed = el("ul", None, *(el("li", None, words) for words in notes))
        parts.append(el("section", {"class": "missing"}, el("h2", None, "What is missing"), listed))
    return el("article", {"class": "study", "data-study": str(number)}, *parts)


def _head(study: Study) -> Markup:
    """Return what was run, on what, and by which command."""
    sweep = study.sweep
    parts = [el("p", {"class": "about"}, sentence(sweep.about))] if sweep.about else []
    if sweep.reading:
        how = el("strong", None, "How the paper is read: ")
        parts.append(el("p", {"class": "reading"}, how, sentence(sweep.reading)))
    facts = {
        "paper": ", ".join(words for words in (sweep.paper, sweep.item) if words),
        "machine": _machine(sweep.machine),
        "versions": ", ".join(f"{name} {version}" for name, version in sweep.versions.items()),
        "command": sweep.command,
    }
    rows = [
        joined(el("dt", None, name), el("dd", None, el("code", None, words) if name == "command" else words))
        for name, words in facts.items()
        if words
    ]
    parts.append(el("dl", {"class": "facts"}, *rows))
    legend = study.legend()
    if legend:
        items = [joined(el("dt", None, name), el("dd", None, words)) for name, words in legend.items()]
        said = el("summary", None, "What the configurations are")
        parts.append(el("details", None, said, el("dl", None, *items)))
    options = common_options(list(study.runs.values()))
    if options:
        items = [
            joined(el("dt", None, name), el("dd", None, "none" if value is None else str(value)))
            for name, value in options.items()
        ]
        said = el("summary", None, "Options that all runs share")
        parts.append(el("details", None, said, el("dl", {"class": "options"}, *items)))
    return el("header", None, *parts)


def sentence(words: str) -> str:
    """Return words with a capital at the beginning and a stop at the end."""
    return words[:1].upper() + words[1:] + ("" if words.endswith((".", "!", "?")) else ".")


def _machine(machine: Mapping[str, Any]) -> str:
    words = [str(machine["cpu"])] if machine.get("cpu") else []
    words += [f"{machine['cores']} {'core' if machine['cores'] == 1 else 'cores'}"] if machine.get("cores") else []
    words += [str(machine["gpu"]) if machine.get("gpu") else "no GPU"] if machine else []
    return ", ".join(words)


def _results(study: Study) -> list[Markup]:
    """Return the tables of all columns together; with one column they stand in its group."""
    score, even = final(study), equal(study)
    parts = []
    if study.sweep.kind == "lines":
        parts.append(
            section(f"{study.measured} along {study.sweep.x}", el("div", {"class": "charts", "data-along": ""}))
        )
    if len(study.columns) > 1:
        parts.append(section("Accuracy", grid_note(study), scores.grid(study, score, f"{study.measured} in percent.")))
        if _uneven(study, even):
            table = scores.grid(study, even, "Test accuracy in percent at equal labeled steps.")
            parts.append(section("Accuracy at equal labeled steps", equal_note(), table))
    return parts


def _uneven(study: Study, even: Score) -> bool:
    """Return whether equal labeled steps are another matter than the runs' ends: a table that says the same is none."""
    steps = even.steps or {}
    if not any(steps.values()):
        return False
    final_score = final(study)
    return any(
        (one := even.mark(row.name, column).last) != (other := final_score.mark(row.name, column).last)
        and not (one is None and other is None)
        for row in study.row_values
        for column in study.columns
        if steps.get(column)
    )


def section(title: str, *children: str | Markup) -> Markup:
    """Return a section under a heading."""
    return el("section", None, el("h2", None, title), *children)


def grid_note(study: Study) -> Markup:
    """Return how the tables of accuracy are to be read."""
    words = "Mean ± sample standard deviation over seeds, of the final model; best: of each seed's best round."
    if any(cell.published for cell in study.sweep.cells):
        words += (
            " The difference is the final model's mean minus the published one, in points; two-sigma rule: it lies "
            "within where it is at most twice the root of the sum of both squared deviations."
        )
    return el("p", {"class": "how"}, words)


def equal_note() -> Markup:
    """Return what equal labeled steps are."""
    return el(
        "p",
        {"class": "how"},
        "Every run at the largest number of labeled steps that all runs of its column reached: its last evaluation not "
        "after that. Readings of one protocol differ up to nine-fold in steps.",
    )


def _splits() -> Markup:
    return el(
        "section",
        {"data-splits": "", "hidden": ""},
        el("h2", None, "Clients and classes"),
        el("p", {"class": "how"}, "Areas are proportional to the number of images, apart for labeled and unlabeled."),
        el("div", {"class": "charts", "data-splits-here": ""}),
    )


def _groups(study: Study) -> Markup:
    several = len(study.columns) > 1
    groups = [_group(number, study, column, several) for number, column in enumerate(study.columns)]
    if not several:
        return joined(*groups)
    options = [el("option", {"value": str(n)}, study.column_title(column)) for n, column in enumerate(study.columns)]
    choice = el("label", {"class": "choice"}, "Column: ", el("select", {"data-choose": "group"}, *options))
    return joined(el("div", {"class": "chooser", "hidden": ""}, choice), *groups)


def _group(number: int, study: Study, column: Column, several: bool) -> Markup:
    """Return one column: its tables, and places for its charts."""
    score, even = final(study), equal(study)
    title = study.column_title(column)
    reached = (even.steps or {}).get(column)
    parts = [el("h2", {"class": "column"}, title)] if several else []
    ordering = scores.ordering(study, score, column)
    if several:  # the numbers stand in the grid above, of all columns beside each other
        parts += [section("Order", ordering)] if ordering else []
    else:
        parts.append(
            section("Accuracy", grid_note(study), scores.flat(study, score, column, f"{study.measured}."), ordering)
        )
    if reached and not several and _uneven(study, even):
        table = scores.flat(study, even, column, f"Test accuracy at {reached:,.0f} labeled steps.")
        parts.append(section("Accuracy at equal labeled steps", equal_note(), table))
    parts.append(section("Learning curves", _charts("learning", "Lines: mean over seeds; bands: smallest to largest.")))
    parts.append(section("Classes", _charts("classes", "")))
    parts.append(section("Confusion", _charts("confusion", "")))
    parts.append(section("Costs", scores.costs(study, column), _charts("costs", "")))
    return el("div", {"class": "group", "data-group": str(number)}, *parts)


def _charts(name: str, how: str) -> Markup:
    note = el("p", {"class": "how"}, how) if how else Markup("")
    words = " ".join(CHARTS[name])
    return joined(note, el("div", {"class": "charts", "data-charts": name, "data-names": words}))
