"""The table of a comparison: accuracy and costs of every method."""

import csv
import io
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.report.spreadsheet import harmless
from halfmoon.report.study import Published


@dataclass(frozen=True)
class Result:
    """Accuracies and costs of one run: accuracies as shares, passes in images, messages and memory in bytes.

    `client` is the largest memory of a client between its rounds, `server` the server's largest; None where a run is
    from a version that did not measure it. `chosen` is the accuracy in the round that the validation images chose.
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
    selection: float | None = None

    @classmethod
    def of(cls, summary: Mapping[str, Any], method: str | None = None) -> "Result":
        """Read a run's summary.json; `method` is the name in the table, the method's title if None."""
        cost, accuracy = summary["cost"], summary["accuracy"]
        return cls(
            summary["title"] if method is None else method,
            summary["seed"],
            accuracy["last"],
            accuracy.get("best"),
            *(cost[name] for name in ("labeled_steps", "forward", "backward", "bytes_down", "bytes_up")),
            client=cost.get("stored_client"),
            server=cost.get("stored_server"),
            selection=accuracy.get("chosen"),
        )


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1) over seeds."""

    mean: float
    deviation: float | None  # None for one seed


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def mean_of(values: Sequence[float | None]) -> Spread | None:
    """Return mean and deviation over seeds, None where one is unknown: a mean over some would pass for one over all."""
    numbers = [value for value in values if value is not None]
    return spread(numbers) if numbers and len(numbers) == len(values) else None


def plus_minus(value: Spread | Published | None) -> str:
    """Return mean ± deviation with two digits, without what is not known."""
    if value is None:
        return ""
    return f"{value.mean:.2f}" if value.deviation is None else f"{value.mean:.2f} ± {value.deviation:.2f}"


class _Column(NamedTuple):
    key: str  # in CSV and JSON
    heading: str
    attribute: str  # of a `Result`
    unit: Callable[[float], float]
    digits: int | None  # after the point; None: as many as show three significant ones
    missing: str = "unknown"
    narrow: bool = False  # whether a terminal of 80 columns has room for it
    optional: bool = False  # whether it is left out where no run has it


def _percent(share: float) -> float:
    return 100 * share


def _count(number: float) -> float:
    return number


def _megabytes(number: float) -> float:
    return number / 1e6


# 1 MB = 10^6 bytes; messages and memory of methods differ by orders of magnitude.
_COLUMNS = (
    _Column("last_percent", "last %", "last", _percent, 2, narrow=True),
    _Column("chosen_percent", "chosen %", "selection", _percent, 2, narrow=True, optional=True),
    _Column("best_percent", "best %", "best", _percent, 2),
    _Column("labeled_steps", "labeled steps", "labeled_steps", _count, 0, narrow=True),
    _Column("forward_images", "forward (images)", "forward", _count, 0),
    _Column("backward_images", "backward (images)", "backward", _count, 0),
    _Column("megabytes_down", "sent down (MB)", "down", _megabytes, None),
    _Column("megabytes_up", "sent up (MB)", "up", _megabytes, None),
    _Column("megabytes_client", "kept by a client (MB)", "client", _megabytes, None, ""),
    _Column("megabytes_server", "kept by the server (MB)", "server", _megabytes, None, ""),
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
        columns = [c for c in _COLUMNS if not c.optional or any(line.values[c.key] for line in self.lines)]
        return [column for column in columns if self.wide or column.narrow]

    @property
    def headings(self) -> list[str]:
        return ["method", *(column.heading for column in self.columns), "over"]

    @property
    def cells(self) -> list[list[str]]:
        """The rows as text: `mean ± standard deviation` over seeds; one seed has no deviation, and it says so."""
        seeds = ["1 seed" if len(line.seeds) == 1 else f"{len(line.seeds)} seeds" for line in self.lines]
        return [
            [line.method, *(_cell(line.values[column.key], column) for column in self.columns), count]
            for line, count in zip(self.lines, seeds, strict=True)
        ]

    def as_markdown(self) -> str:
        """Return a Markdown table."""
        rows = [[cell.replace("|", "\\|") for cell in row] for row in [self.headings, *self.cells]]
        widths = [max(3, *map(len, words)) for words in zip(*rows, strict=True)]
        rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        return "".join(f"| {' | '.join(_aligned(row, widths))} |\n" for row in rows)

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
    values = {}
    for column in _COLUMNS:
        numbers = [getattr(result, column.attribute) for result in group]
        values[column.key] = mean_of([None if number is None else column.unit(number) for number in numbers])
    return Line(method, tuple(result.seed for result in group), values)


def _cell(value: Spread | None, column: _Column) -> str:
    if value is None:
        return column.missing
    digits = column.digits
    if digits is None:  # three significant ones; a large number keeps all before the point
        digits = max(0, 2 - math.floor(math.log10(value.mean))) if value.mean > 0 else 0
    text = f"{value.mean:,.{digits}f}"
    # A cost that is equal for all seeds has no deviation worth a word; an accuracy always has one.
    if value.deviation is None or (value.deviation == 0 and column.digits != 2):
        return text
    return f"{text} ± {value.deviation:,.{digits}f}"


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))]
