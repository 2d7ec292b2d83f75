"""The tables of accuracy and of cost on a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from halfmoon.report.comparison import Column, Deviation, Score, order
from halfmoon.report.markup import Markup, el, joined
from halfmoon.report.study import Published, Study, StudyCell, scale_words
from halfmoon.report.tables import Spread, spread

NUMBER = {"class": "n"}
MINUS, NOTHING = "\N{MINUS SIGN}", "\N{EN DASH}"
SIGMA, TAU = "\N{GREEK SMALL LETTER SIGMA}", "\N{GREEK SMALL LETTER TAU}"


class TableNotes:
    """Footnotes of one table: the same words share a letter."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def mark(self, words: str) -> Markup:
        """Return the letter that stands for a note, nothing for no words."""
        if not words:
            return Markup("")
        if words not in self.words:
            self.words.append(words)
        return el("sup", None, _letters(self.words.index(words)))

    def listed(self) -> Markup:
        """Return all notes with their letters, for below the table."""
        if not self.words:
            return Markup("")
        items = [joined(el("sup", None, _letters(n)), f" {words}. ") for n, words in enumerate(self.words)]
        return el("p", {"class": "notes"}, *items)


def _letters(number: int) -> str:
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def percent(value: Spread | Published | None) -> str:
    """Return mean ± deviation with two digits, without what is not known."""
    if value is None:
        return ""
    return f"{value.mean:.2f}" if value.deviation is None else f"{value.mean:.2f} ± {value.deviation:.2f}"


def points(difference: float) -> str:
    """Return a signed difference in points, with a real minus."""
    return f"{difference:+.2f}".replace("-", MINUS)


def framed(study: Study, caption: str, head: Markup, body: Markup, notes: str = "", kind: str = "frame") -> Markup:
    """Return a table in a frame that scrolls by itself; its caption carries the scale of the study."""
    scale = scale_words(study.sweep.scale)
    # Beside the table, not in it: a caption inside would scroll out of a narrow screen.
    title = el("p", {"class": "caption"}, caption, *([" ", el("strong", {"class": "scale"}, scale)] if scale else []))
    table = el("table", {"aria-label": caption}, el("thead", None, head), el("tbody", None, body))
    frame = {"class": kind, "tabindex": "0", "role": "region", "aria-label": caption}
    return joined(title, el("div", frame, table), notes)


def grid(study: Study, score: Score, caption: str) -> Markup:
    """Return the table laid out by the axes: a row a row value, all columns beside each other."""
    notes = TableNotes()
    rows = []
    for value in study.row_values:
        cells = [_composite(score.mark(value.name, column), notes) for column in study.columns]
        rows.append(el("tr", None, el("th", {"scope": "row"}, value.title), *cells))
    if score.steps is not None:
        cells = [el("td", NUMBER, f"{score.steps[column] or 0:,.0f}") for column in study.columns]
        rows.append(el("tr", {"class": "foot"}, el("th", {"scope": "row"}, "labeled steps"), *cells))
    taus = [order(study, score, column).tau for column in study.columns]
    if any(tau is not None for tau in taus):
        cells = [el("td", NUMBER, "" if tau is None else f"{tau:.2f}".replace("-", MINUS)) for tau in taus]
        rows.append(
            el("tr", {"class": "foot"}, el("th", {"scope": "row"}, "Kendall's \N{GREEK SMALL LETTER TAU}"), *cells)
        )
    head = _column_heads(study)
    return framed(study, caption, head, joined(*rows), notes.listed(), "frame grid")


def _column_heads(study: Study) -> Markup:
    """Return a row of headings for each axis of the columns; equal neighbors share one."""
    lines = []
    for depth, name in enumerate(study.column_axes):
        heads = []
        for key, same in groupby(study.columns, key=lambda column, d=depth: column[: d + 1]):
            span = {"scope": "col", "colspan": str(len(list(same))), **NUMBER}
            heads.append(el("th", span, study.value_title(name, key[-1])))
        corner = study.sweep.rows if depth == len(study.column_axes) - 1 else ""
        lines.append(el("tr", None, el("th", {"scope": "col"}, corner), *heads))
    return joined(*lines)


def _composite(mark: Deviation, notes: TableNotes) -> Markup:
    lines: list[Markup] = []
    if mark.last:
        lines.append(el("div", {"class": "main"}, percent(mark.last), notes.mark(_seeds(mark))))
    elif mark.note:
        lines.append(el("div", None, NOTHING, notes.mark(mark.note)))
    elif mark.planned:
        lines.append(el("div", None, NOTHING, notes.mark("not finished")))
    if mark.best:
        lines.append(el("div", {"class": "less"}, f"best {percent(mark.best)}"))
    if mark.published:
        note = notes.mark(_printed(mark.published))
        lines.append(el("div", {"class": "less"}, f"paper {percent(mark.published)}", note))
    if mark.verdict:
        lines.append(el("div", {"class": "less"}, f"{points(mark.verdict.difference)} ", _judged(mark, notes)))
    return el("td", NUMBER, *lines)


def _seeds(mark: Deviation) -> str:
    return f"{mark.seeds} of {mark.planned} seeds finished" if mark.seeds < mark.planned else ""


def _printed(published: Published) -> str:
    return f"in the paper: {published.note.rstrip('.')}" if published.note else ""


def _judged(mark: Deviation, notes: TableNotes) -> Markup:
    if mark.verdict is None:
        return Markup("")
    word = {True: "within", False: "outside", None: ""}[mark.verdict.within]
    badge = el("span", {"class": f"verdict {word}"}, f"{word} 2{SIGMA}") if word else Markup("")
    return joined(badge, notes.mark(mark.verdict.note))


def flat(study: Study, score: Score, column: Column, caption: str) -> Markup:
    """Return the table of one column: a line a row value, everything known of it from left to right."""
    notes = TableNotes()
    at_end = score.steps is None
    heads = [study.sweep.rows, "seeds", "last %" if at_end else "accuracy %", *(["best %"] if at_end else [])]
    marks = [(value.title, score.mark(value.name, column)) for value in study.row_values]
    marks = [(title, mark) for title, mark in marks if mark.planned or mark.published]
    beside = any(mark.published for _, mark in marks)
    heads += ["published %", "difference, points", "two-sigma rule"] if beside else []
    rows = []
    for title, mark in marks:
        seeds = f"{mark.seeds}" if mark.seeds == mark.planned else f"{mark.seeds} of {mark.planned}"
        cells = [el("td", NUMBER, seeds), el("td", NUMBER, percent(mark.last), notes.mark(mark.note))]
        cells += [el("td", NUMBER, percent(mark.best))] if at_end else []
        if beside:
            said = notes.mark(_printed(mark.published)) if mark.published else ""
            cells.append(el("td", NUMBER, percent(mark.published), said))
            cells.append(el("td", NUMBER, points(mark.verdict.difference) if mark.verdict else ""))
            cells.append(el("td", None, _judged(mark, notes)))
        rows.append(el("tr", None, el("th", {"scope": "row"}, title), *cells))
    words = {"seeds", "last %", "best %", "accuracy %", "published %", "difference, points"}
    head = el("tr", None, *(el("th", {"scope": "col", **(NUMBER if name in words else {})}, name) for name in heads))
    return framed(study, caption, head, joined(*rows), notes.listed())


def ordering(study: Study, score: Score, column: Column) -> Markup:
    """Return the published order beside the measured one, nothing where fewer than two rows have both."""
    found = order(study, score, column)
    if len(found.published) < 2:
        return Markup("")
    tau = "not defined" if found.tau is None else f"{found.tau:.2f}".replace("-", MINUS)
    rows = []
    for rank, (published, measured) in enumerate(zip(found.published, found.measured, strict=True), start=1):
        moved = {"class": "moved"} if published != measured else None
        cells = [el("td", None, published), el("td", moved, measured)]
        rows.append(el("tr", None, el("th", {"scope": "row"}, str(rank)), *cells))
    head = el("tr", None, *(el("th", {"scope": "col"}, words) for words in ("rank", "published", "measured")))
    caption = f"Published and measured order; Kendall's {TAU} = {tau} over the {len(rows)} that have both numbers."
    return framed(study, caption, head, joined(*rows))


COSTS = (("labeled_steps", "labeled steps", 1.0), ("forward", "forward passes, images", 1.0), ("sent", "sent, MB", 1e6))


def costs(study: Study, column: Column) -> Markup:
    """Return what the runs of a column used in all and a round, mean over seeds; seconds are those of this machine."""
    rows = []
    for value in study.row_values:
        cell = study.cell(value.name, column)
        done = [entry for entry in (cell.runs if cell else []) if entry.finished and entry.cost]
        if not done:
            continue
        rounds = [run.rows[-1]["round"] if (run := study.run(entry)) and run.rows else None for entry in done]
        cells = [el("td", NUMBER, _count(_mean(rounds)))]
        for key, _, unit in COSTS:
            cells += _both([_spent(entry, key, unit) for entry in done], rounds)
        cells += _both([entry.seconds for entry in done], rounds)
        rows.append(el("tr", None, el("th", {"scope": "row"}, value.title), *cells))
    if not rows:
        return Markup("")
    names = [words for _, words, _ in COSTS] + ["seconds"]
    first = [el("th", {"scope": "colgroup", "colspan": "2"}, words) for words in names]
    second = [el("th", {"scope": "col", **NUMBER}, words) for _ in names for words in ("in all", "a round")]
    span = {"scope": "col", "rowspan": "2"}
    top = el("tr", None, el("th", span, study.sweep.rows), el("th", span, "rounds"), *first)
    return framed(study, "What was used, mean over seeds.", joined(top, el("tr", None, *second)), joined(*rows))


def _spent(entry: StudyCell, key: str, unit: float) -> float | None:
    cost: Mapping[str, Any] = entry.cost or {}
    if key == "sent":
        down, up = cost.get("bytes_down"), cost.get("bytes_up")
        return None if down is None or up is None else (down + up) / unit
    value = cost.get(key)
    return None if value is None else value / unit


def _both(totals: Sequence[float | None], rounds: Sequence[float | None]) -> list[Markup]:
    """Return the cells "in all" and "a round"."""
    each = [t / r if t is not None and r else None for t, r in zip(totals, rounds, strict=True)]
    return [el("td", NUMBER, _count(_mean(values))) for values in (totals, each)]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return spread(known).mean if known and len(known) == len(values) else None


def _count(value: float | None) -> str:
    """Return a number with three digits at least, a whole one without a point."""
    if value is None:
        return ""
    if value == round(value) or value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"
