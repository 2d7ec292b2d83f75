"""The table of a comparison: accuracy and costs of every method."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.core.spreadsheet import harmless


@dataclass(frozen=True)
class Result:
    """Accuracies and costs of one run: accuracies as shares, passes in images, messages and memory in bytes.

    `client` is the largest memory of a client between its rounds, `server` the server's largest; None where a run is
    from a version that did not measure it.
    """

    method: str
    seed: int
    last: float | None
    best: float | None
    labeled_steps: int
    forward: int
    backward: int
    down: int
    up: int
    client: int | None = None
    server: int | None = None
    chosen: float | None = None  # in the round that the validation images chose

    @classmethod
    def of(cls, summary: Mapping[str, Any], method: str | None = None) -> Result:
        """Take a run's summary.json apart; `method` is the name in the table, the method's title if None."""
        cost, accuracy = summary["cost"], summary["accuracy"]
        return cls(
            method=summary["title"] if method is None else method,
            seed=summary["seed"],
            last=accuracy["last"],
            best=accuracy.get("best"),
            labeled_steps=cost["labeled_steps"],
            forward=cost["forward"],
            backward=cost["backward"],
            down=cost["bytes_down"],
            up=cost["bytes_up"],
            client=cost.get("stored_client"),
            server=cost.get("stored_server"),
            chosen=accuracy.get("chosen"),
        )


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1) over seeds."""

    mean: float
    deviation: float | None  # None for one seed


def spread(values: Sequence[float]) -> Spread:
    """Return mean and deviation of one or more values."""
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


class _Column(NamedTuple):
    key: str  # in CSV and JSON
    heading: str
    of: Callable[[Result], float | None]
    digits: int | None  # after the point; None: as many as show three significant ones
    missing: str = "unknown"
    narrow: bool = False  # whether a terminal of 80 columns has room for it
    optional: bool = False  # whether it is left out where no run has it


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _megabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e6


_COLUMNS = (
    _Column("last_percent", "last %", lambda r: _percent(r.last), 2, narrow=True),
    _Column("chosen_percent", "chosen %", lambda r: _percent(r.chosen), 2, narrow=True, optional=True),
    _Column("best_percent", "best %", lambda r: _percent(r.best), 2),
    _Column("labeled_steps", "labeled steps", lambda r: r.labeled_steps, 0, narrow=True),
    _Column("forward_images", "forward (images)", lambda r: r.forward, 0),
    _Column("backward_images", "backward (images)", lambda r: r.backward, 0),
    # 1 MB = 10^6 bytes; what methods send and keep differs by orders of magnitude.
    _Column("megabytes_down", "sent down (MB)", lambda r: _megabytes(r.down), None),
    _Column("megabytes_up", "sent up (MB)", lambda r: _megabytes(r.up), None),
    _Column("megabytes_client", "kept by a client (MB)", lambda r: _megabytes(r.client), None, ""),
    _Column("megabytes_server", "kept by the server (MB)", lambda r: _megabytes(r.server), None, ""),
)


@dataclass(frozen=True)
class Line:
    """One method of a table; a quantity that not every run measured is None."""

    method: str
    seeds: tuple[int, ...]
    values: dict[str, Spread | None]


@dataclass(frozen=True)
class Table:
    """A comparison, ready to be written in several ways."""

    lines: tuple[Line, ...]
    wide: bool = True  # whether all columns are shown, or those that fit 80 characters

    @property
    def columns(self) -> list[_Column]:
        """The columns between the method and the seeds."""
        columns = [c for c in _COLUMNS if not c.optional or any(line.values[c.key] for line in self.lines)]
        return [column for column in columns if self.wide or column.narrow]

    @property
    def headings(self) -> list[str]:
        return ["method", *(column.heading for column in self.columns), "over"]

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text: `mean ± standard deviation` over seeds; one seed has no deviation, and it says so."""
        return [
            [
                line.method,
                *(_cell(line.values[column.key], column) for column in self.columns),
                "1 seed" if len(line.seeds) == 1 else f"{len(line.seeds)} seeds",
            ]
            for line in self.lines
        ]

    def as_text(self) -> str:
        """Return aligned columns for a terminal."""
        rows = [self.headings, *self.cells]
        widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
        rule = ["-" * width for width in widths]
        return "".join(_padded(row, widths, "  ").rstrip() + "\n" for row in [rows[0], rule, *rows[1:]])

    def as_markdown(self) -> str:
        """Return a Markdown table."""
        rows = [[cell.replace("|", "\\|") for cell in row] for row in [self.headings, *self.cells]]
        widths = [max(3, *(len(row[n]) for row in rows)) for n in range(len(rows[0]))]
        rule = ["-" * width if n == 0 else "-" * (width - 1) + ":" for n, width in enumerate(widths)]
        return "".join(f"| {_padded(row, widths, ' | ')} |\n" for row in [rows[0], rule, *rows[1:]])

    def as_csv(self) -> str:
        """Return unrounded numbers, two columns (mean, deviation) a quantity; an empty field is unknown."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        keys = [column.key for column in self.columns]
        writer.writerow(["method", "seeds", *(name for key in keys for name in (key, f"{key}_deviation"))])
        for line in self.lines:
            numbers = [number for key in keys for number in (line.values[key] or (None, None))]
            words = ["" if number is None else repr(number) for number in numbers]
            writer.writerow([harmless(line.method), len(line.seeds), *words])
        return file.getvalue()

    def as_json(self) -> list[dict[str, Any]]:
        """Return unrounded numbers, one dict a method: {"method", "seeds", quantity: {"mean", "deviation"} or None}."""
        return [
            {
                "method": line.method,
                "seeds": list(line.seeds),
                **{key: None if value is None else value._asdict() for key, value in line.values.items()},
            }
            for line in self.lines
        ]


def comparison(rows: Sequence[Result]) -> Table:
    """Put one line a method, in the order given, over the seeds of each.

    Raise UserError if one method comes twice with one seed: that would be counted as two seeds.
    """
    groups: dict[str, list[Result]] = {}
    for row in rows:
        group = groups.setdefault(row.method, [])
        if any(other.seed == row.seed for other in group):
            raise UserError(
                f"{row.method} comes twice with seed {row.seed}; compare runs of different seeds, or name them apart."
            )
        group.append(row)
    return Table(tuple(_line(method, group) for method, group in groups.items()))


def _line(method: str, group: Sequence[Result]) -> Line:
    values: dict[str, Spread | None] = {}
    for column in _COLUMNS:
        numbers = [column.of(result) for result in group]
        present = [number for number in numbers if number is not None]
        # A mean over some of the seeds would be taken for one over all.
        values[column.key] = spread(present) if len(present) == len(group) else None
    return Line(method, tuple(result.seed for result in group), values)


def _cell(value: Spread | None, column: _Column) -> str:
    if value is None:
        return column.missing
    digits = _digits(value.mean) if column.digits is None else column.digits
    text = f"{value.mean:,.{digits}f}"
    # What every seed spends alike has no deviation worth a word; an accuracy always has one.
    if value.deviation is None or (value.deviation == 0 and column.digits != 2):
        return text
    return f"{text} ± {value.deviation:,.{digits}f}"


def _digits(mean: float) -> int:
    """Return the digits after the point that show three significant ones; a large number keeps all before it."""
    return max(0, 2 - math.floor(math.log10(mean))) if mean > 0 else 0


def _padded(row: Sequence[str], widths: Sequence[int], gap: str) -> str:
    first, *others = (
        cell.ljust(width) if n == 0 else cell.rjust(width)
        for n, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return gap.join([first, *others])
