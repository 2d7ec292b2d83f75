"""What the tables of accuracy and of cost on a page say; how they look is in web/tables.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from halfmoon.report.comparison import Column, Deviation, Score, order
from halfmoon.report.study import Published, Study, StudyCell
from halfmoon.report.tables import Spread, spread

MINUS = "\N{MINUS SIGN}"


class TableNotes:
    """Footnotes of one table: the same words share a letter."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def mark(self, words: str) -> str:
        """Return the letter that stands for a note."""
        if words not in self.words:
            self.words.append(words)
        return _letters(self.words.index(words))


def _letters(number: int) -> str:
    return (_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("a") + number % 26)


def percent(value: Spread | Published | None) -> str:
    """Return mean ± deviation with two digits, without what is not known."""
    if value is None:
        return ""
    return f"{value.mean:.2f}" if value.deviation is None else f"{value.mean:.2f} ± {value.deviation:.2f}"


def signed(value: float) -> str:
    """Return a number with two digits and a real minus."""
    return f"{value:.2f}".replace("-", MINUS)


def points(difference: float) -> str:
    """Return a difference in points with its sign."""
    return f"{difference:+.2f}".replace("-", MINUS)


def count(value: float | None) -> str:
    """Return a number with three digits at least, a whole one without a point."""
    if value is None:
        return ""
    if value == round(value) or value >= 10_000:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def column_heads(study: Study) -> list[list[tuple[str, int]]]:
    """Return for each axis of the columns its headings with how many columns they span; equal neighbors share one."""
    return [
        [
            (study.value_title(name, key[-1]), len(list(same)))
            for key, same in groupby(study.columns, key=lambda column, d=depth: column[: d + 1])
        ]
        for depth, name in enumerate(study.column_axes)
    ]


def taus_of(study: Study, score: Score) -> list[str]:
    """Return Kendall's tau of each column, "" where it has none."""
    found = [order(study, score, column).tau for column in study.columns]
    return ["" if tau is None else signed(tau) for tau in found]


def seeds_words(mark: Deviation) -> str:
    """Return how many seeds are finished where not all are."""
    return f"{mark.seeds} of {mark.planned} seeds finished" if mark.seeds < mark.planned else ""


def published_words(mark: Deviation) -> str:
    """Return the note of a published number."""
    note = mark.published.note.rstrip(".") if mark.published else ""
    return f"in the paper: {note}" if note else ""


def marks_of(study: Study, score: Score, column: Column) -> list[tuple[str, Deviation]]:
    """Return the title and the mark of each row of a column that says anything."""
    marks = [(value.title, score.mark(value.name, column)) for value in study.row_values]
    return [(title, mark) for title, mark in marks if mark.planned or mark.published]


COSTS = ("labeled steps", "forward passes, images", "sent, MB", "seconds")


def costs_of(study: Study, column: Column) -> list[tuple[str, list[float | None]]]:
    """Return by row the rounds, and each of `COSTS` in all and a round: means over seeds, None where one is unknown."""
    rows: list[tuple[str, list[float | None]]] = []
    for value in study.row_values:
        cell = study.cell(value.name, column)
        done = [entry for entry in (cell.runs if cell else []) if entry.finished and entry.cost]
        if not done:
            continue
        rounds = [run.rows[-1]["round"] if (run := study.run(entry)) and run.rows else None for entry in done]
        values = [_mean(rounds)]
        for totals in zip(*(_spent(entry) for entry in done), strict=True):
            each = [t / r if t is not None and r else None for t, r in zip(totals, rounds, strict=True)]
            values += [_mean(totals), _mean(each)]
        rows.append((value.title, values))
    return rows


def _spent(entry: StudyCell) -> tuple[float | None, ...]:
    cost: Mapping[str, Any] = entry.cost or {}
    down, up = cost.get("bytes_down"), cost.get("bytes_up")
    sent = None if down is None or up is None else (down + up) / 1e6
    return cost.get("labeled_steps"), cost.get("forward"), sent, entry.seconds


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return spread(known).mean if known and len(known) == len(values) else None
