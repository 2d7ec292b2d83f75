"""The table of a comparison: accuracy and costs of every method."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.report.spreadsheet import escape_formula
from halfmoon.report.study import PublishedAccuracy


class MeanDeviation(NamedTuple):
    """Mean and sample standard deviation (n - 1) over seeds."""

    mean: float
    deviation: float | None  # None for one seed


def mean_and_deviation(values: Sequence[float]) -> MeanDeviation:
    return MeanDeviation(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def mean_if_complete(values: Sequence[float | None]) -> MeanDeviation | None:
    """Return mean and deviation over seeds, None where one is unknown: a mean over some would pass for one over all."""
    numbers = [value for value in values if value is not None]
    return mean_and_deviation(numbers) if numbers and len(numbers) == len(values) else None


def format_mean(value: MeanDeviation | PublishedAccuracy | None) -> str:
    """Return mean ± deviation with two digits, without what is not known."""
    if value is None:
        return ""
    return f"{value.mean:.2f}" if value.deviation is None else f"{value.mean:.2f} ± {value.deviation:.2f}"


class _QuantityColumn(NamedTuple):
    key: str  # in CSV and JSON
    heading: str
    part: str  # of a run's summary.json
    name: str  # in this part
    digits: int | None  # after the point; None: as many as show three significant ones
    missing: str = "unknown"
    narrow: bool = False  # whether a terminal of 80 columns has room for it
    optional: bool = False  # whether it is left out where no run has it

    def values(self, summaries: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Return the quantity of every run in the unit of the heading; None where a run did not measure it."""
        numbers = [summary.get(self.part, {}).get(self.name) for summary in summaries]
        if self.part in ("accuracy", "pseudo_labels"):
            return [None if share is None else 100 * share for share in numbers]
        if self.key.startswith("megabytes"):  # 10^6 bytes
            return [None if count is None else count / 1e6 for count in numbers]
        return numbers


# Messages and memory of methods differ by orders of magnitude.
_COLUMNS = (
    _QuantityColumn("last_percent", "last %", "accuracy", "last", 2, narrow=True),
    _QuantityColumn("chosen_percent", "chosen %", "accuracy", "chosen", 2, narrow=True, optional=True),
    _QuantityColumn("best_percent", "best %", "accuracy", "best", 2),
    _QuantityColumn("used_percent", "used %", "pseudo_labels", "used", 1, "", narrow=True, optional=True),
    _QuantityColumn("labeled_steps", "labeled steps", "cost", "labeled_steps", 0, narrow=True),
    _QuantityColumn("forward_images", "forward (images)", "cost", "forward", 0),
    _QuantityColumn("backward_images", "backward (images)", "cost", "backward", 0),
    _QuantityColumn("megabytes_down", "sent down (MB)", "cost", "bytes_down", None),
    _QuantityColumn("megabytes_up", "sent up (MB)", "cost", "bytes_up", None),
    _QuantityColumn("megabytes_client", "kept by a client (MB)", "cost", "stored_client", None, ""),
    _QuantityColumn("megabytes_server", "kept by the server (MB)", "cost", "stored_server", None, ""),
)


@dataclass(frozen=True)
class MethodRow:
    """One method of a table; a quantity that not every run measured is None."""

    method: str
    seeds: tuple[int, ...]
    values: dict[str, MeanDeviation | None]


@dataclass(frozen=True)
class ComparisonTable:
    """A comparison, ready to be written in several ways."""

    lines: tuple[MethodRow, ...]
    wide: bool = True  # whether all columns are shown, or those that fit 80 characters

    @property
    def columns(self) -> list[_QuantityColumn]:
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
            [line.method, *(_format_cell(line.values[column.key], column) for column in self.columns), count]
            for line, count in zip(self.lines, seeds, strict=True)
        ]

    def as_markdown(self) -> str:
        """Return a Markdown table."""
        rows = [[cell.replace("|", "\\|") for cell in row] for row in [self.headings, *self.cells]]
        widths = [max(3, *map(len, words)) for words in zip(*rows, strict=True)]
        rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        return "".join(f"| {' | '.join(_align(row, widths))} |\n" for row in rows)

    def as_csv(self) -> str:
        """Return unrounded numbers, two columns (mean, deviation) a quantity; an empty field is unknown."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        keys = [column.key for column in self.columns]
        writer.writerow(["method", "seeds", *(name for key in keys for name in (key, f"{key}_deviation"))])
        for line in self.lines:
            numbers = [number for key in keys for number in (line.values[key] or (None, None))]
            words = ["" if number is None else repr(number) for number in numbers]
            writer.writerow([escape_formula(line.method), len(line.seeds), *words])
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


def comparison_table(summaries: Sequence[Mapping[str, Any]]) -> ComparisonTable:
    """Put one line a method, in the order of the runs' summaries (summary.json), over the seeds of each.

    Raise UserError if one method comes twice with one seed: that would be counted as two seeds.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for summary in summaries:
        method, seed = summary["title"], summary["seed"]
        group = groups.setdefault(method, [])
        if any(other["seed"] == seed for other in group):
            raise UserError(
                f"{method} comes twice with seed {seed}; compare runs of different seeds, or name them apart."
            )
        group.append(summary)
    lines = []
    for method, group in groups.items():
        values = {column.key: mean_if_complete(column.values(group)) for column in _COLUMNS}
        lines.append(MethodRow(method, tuple(summary["seed"] for summary in group), values))
    return ComparisonTable(tuple(lines))


def _format_cell(value: MeanDeviation | None, column: _QuantityColumn) -> str:
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


def _align(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True))]
