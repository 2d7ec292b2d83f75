"""The table of a comparison: accuracy and costs of every method, as Markdown, CSV and JSON."""

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.core.spreadsheet import escape_formula
from halfmoon.report.study import PublishedAccuracy


class MeanDeviation(NamedTuple):
    """Mean and sample standard deviation (n - 1) over seeds; the deviation is None for one seed."""

    mean: float
    deviation: float | None


def mean_and_deviation(values: Sequence[float]) -> MeanDeviation:
    """Compute the mean and the sample standard deviation of at least one value."""
    return MeanDeviation(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def mean_if_complete(values: Sequence[float | None]) -> MeanDeviation | None:
    """Compute mean and deviation over seeds; None if a value is missing, as the mean of the others would mislead."""
    numbers = [value for value in values if value is not None]
    return mean_and_deviation(numbers) if numbers and len(numbers) == len(values) else None


def is_tie(first: float, second: float) -> bool:
    """Check whether two accuracies in percent are equal as tables show them, with two decimals."""
    return f"{first:.2f}" == f"{second:.2f}"


def format_mean(value: MeanDeviation | PublishedAccuracy | None) -> str:
    """Format mean ± deviation with two digits; only the mean without a deviation, "" for None."""
    if value is None:
        return ""
    return f"{value.mean:.2f}" if value.deviation is None else f"{value.mean:.2f} ± {value.deviation:.2f}"


_ACCURACY_DIGITS = 2
"""Decimal digits of accuracies in percent, which no other quantity has."""


class _QuantityColumn(NamedTuple):
    """One quantity of the table.

    Attributes:
        key: name in CSV and JSON.
        heading: heading in text and Markdown.
        group: group of numbers in a run's summary.json.
        name: name in this group.
        digits: number of decimal digits; None for three significant digits.
        missing: text for an unknown number.
        narrow: whether it is shown in a terminal of 80 columns.
        optional: whether it is left out if no run has it.
    """

    key: str
    heading: str
    group: str
    name: str
    digits: int | None
    missing: str = "unknown"
    narrow: bool = False
    optional: bool = False

    def values(self, summaries: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Collect the quantity of every run in the unit of the heading; None for runs that did not measure it."""
        numbers = [summary.get(self.group, {}).get(self.name) for summary in summaries]
        if self.group in ("accuracy", "client_accuracy", "pseudo_labels"):
            return [None if share is None else 100 * share for share in numbers]
        if self.key.startswith("megabytes"):  # 10^6 bytes
            return [None if count is None else count / 1e6 for count in numbers]
        return numbers


# Sizes have significant instead of decimal digits, because they differ between methods by orders of magnitude.
_COLUMNS = (
    _QuantityColumn("last_percent", "last %", "accuracy", "last", 2, narrow=True),
    _QuantityColumn("chosen_percent", "chosen %", "accuracy", "chosen", 2, narrow=True, optional=True),
    _QuantityColumn("best_percent", "best %", "accuracy", "best", 2),
    _QuantityColumn("clients_percent", "clients %", "client_accuracy", "mean", 2, "", optional=True),
    _QuantityColumn("clients_spread", "std over clients", "client_accuracy", "deviation", 2, "", optional=True),
    _QuantityColumn("clients_worst_percent", "worst tenth %", "client_accuracy", "worst", 2, "", optional=True),
    _QuantityColumn("used_percent", "used %", "pseudo_labels", "used", 1, "", narrow=True, optional=True),
    _QuantityColumn("labeled_steps", "labeled steps", "cost", "labeled_steps", 0, narrow=True),
    _QuantityColumn("forward_images", "forward (images)", "cost", "forward", 0),
    _QuantityColumn("backward_images", "backward (images)", "cost", "backward", 0),
    _QuantityColumn("megabytes_down", "sent down (MB)", "cost", "bytes_down", None),
    _QuantityColumn("megabytes_up", "sent up (MB)", "cost", "bytes_up", None),
    _QuantityColumn("megabytes_client", "stored by a client (MB)", "cost", "stored_client", None, ""),
    _QuantityColumn("megabytes_server", "stored by the server (MB)", "cost", "stored_server", None, ""),
)


@dataclass(frozen=True)
class MethodRow:
    """One method of a table.

    Attributes:
        method: title of the method.
        seeds: seeds of its runs.
        values: mean and deviation of each quantity by key; None if a run did not measure it.
    """

    method: str
    seeds: tuple[int, ...]
    values: dict[str, MeanDeviation | None]


@dataclass(frozen=True)
class ComparisonTable:
    """The table of a comparison, for several formats.

    Attributes:
        lines: the methods.
        wide: whether all columns are shown, or only those that fit into 80 characters.
    """

    lines: tuple[MethodRow, ...]
    wide: bool = True

    @property
    def columns(self) -> list[_QuantityColumn]:
        columns = [c for c in _COLUMNS if not c.optional or any(line.values[c.key] for line in self.lines)]
        return [column for column in columns if self.wide or column.narrow]

    @property
    def headings(self) -> list[str]:
        return ["method", *(column.heading for column in self.columns), "over"]

    @property
    def cells(self) -> list[list[str]]:
        """Rows as text: `mean ± standard deviation` over seeds, and the number of seeds."""
        rows = []
        for line in self.lines:
            numbers = [_format_cell(line.values[column.key], column) for column in self.columns]
            seeds = "1 seed" if len(line.seeds) == 1 else f"{len(line.seeds)} seeds"
            rows.append([line.method, *numbers, seeds])
        return rows

    def as_markdown(self) -> str:
        """Format the table as Markdown, with aligned columns."""
        # A bar would end the cell.
        rows = [[cell.replace("|", "\\|") for cell in row] for row in [self.headings, *self.cells]]
        widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        return "".join(f"| {' | '.join(_align(row, widths))} |\n" for row in rows)

    def as_csv(self) -> str:
        """Format the table of a comparison as CSV: a line for each method, unrounded mean and deviation over seeds.

        Unknown fields are empty. Names that a spreadsheet would read as a formula get an apostrophe.
        """
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        keys = [column.key for column in self.columns]
        writer.writerow(["method", "seeds", *(name for key in keys for name in (key, f"{key}_deviation"))])
        for line in self.lines:
            numbers = [number for key in keys for number in (line.values[key] or (None, None))]
            fields = ["" if number is None else repr(number) for number in numbers]
            writer.writerow([escape_formula(line.method), len(line.seeds), *fields])
        return file.getvalue()

    def as_json(self) -> list[dict[str, Any]]:
        """Collect the table of a comparison for JSON, with unrounded numbers.

        Returns:
            {"method", "seeds", quantity: {"mean", "deviation"} or None} of each method. Quantities are named as in CSV,
            such as "last_percent".
        """
        return [
            {
                "method": line.method,
                "seeds": list(line.seeds),
                **{key: None if value is None else value._asdict() for key, value in line.values.items()},
            }
            for line in self.lines
        ]


def comparison_table(summaries: Sequence[Mapping[str, Any]]) -> ComparisonTable:
    """Make the table of accuracies and costs of a comparison, with the mean over seeds of each method.

    Args:
        summaries: summary.json of each run; methods are in the order of their first run.

    Raises:
        UserError: two runs have the same method and seed.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for summary in summaries:
        method = summary["title"]
        seed = summary["seed"]
        group = groups.setdefault(method, [])
        if any(other["seed"] == seed for other in group):
            raise UserError(
                f"two runs of {method} have the seed {seed}; give runs with different seeds or different titles."
            )
        group.append(summary)
    lines = []
    for method, group in groups.items():
        # A quantity that a seed did not measure is unknown for the method.
        values = {column.key: mean_if_complete(column.values(group)) for column in _COLUMNS}
        lines.append(MethodRow(method, tuple(summary["seed"] for summary in group), values))
    return ComparisonTable(tuple(lines))


def _format_cell(value: MeanDeviation | None, column: _QuantityColumn) -> str:
    """Format a cell of the comparison's table as "mean ± deviation" over seeds, or as its mean for one seed.

    Args:
        value: None if a run did not measure it.
        column: the column of the quantity, with its number of digits and the text for an unknown number.
    """
    if value is None:
        return column.missing
    digits = column.digits
    if digits is None:  # three significant digits, or more for large numbers
        digits = max(0, 2 - math.floor(math.log10(value.mean))) if value.mean > 0 else 0
    text = f"{value.mean:,.{digits}f}"
    # A deviation of 0 is left out for costs, which are often the same for all seeds, but not for accuracies.
    is_accuracy = column.digits == _ACCURACY_DIGITS
    if value.deviation is None or (value.deviation == 0 and not is_accuracy):
        return text
    return f"{text} ± {value.deviation:,.{digits}f}"


def _align(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return [row[0].ljust(widths[0]), *numbers]
