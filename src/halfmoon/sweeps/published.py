"""The papers' own numbers, cell by cell (`halfmoon/recipes/published.csv`)."""

import csv
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

COLUMNS = ("paper", "table", "dataset", "setting", "labels", "method")


class Published(NamedTuple):
    """A published test accuracy in percent; `deviation` is as the paper gives it, None where it gives none."""

    mean: float
    deviation: float | None
    note: str


def lookup(where: Mapping[str, str]) -> Published | None:
    """Return the one published number whose columns are all as in `where`; None where there is none, or several."""
    values = tuple(where.values())
    rows = _by(tuple(where)).get(values, []) if all(isinstance(value, str) for value in values) else []
    if len(rows) != 1 or not rows[0]["mean"]:
        return None
    (row,) = rows
    return Published(float(row["mean"]), float(row["std"]) if row["std"] else None, row["note"])


@cache
def _by(columns: tuple[str, ...]) -> Mapping[tuple[str, ...], list[Mapping[str, str]]]:
    """Return the rows by what stands in some columns: a sweep looks up thousands of cells."""
    rows: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in _rows():
        rows.setdefault(tuple(row[column] for column in columns), []).append(row)
    return rows


@cache
def _rows() -> tuple[Mapping[str, str], ...]:
    file = resources.files("halfmoon") / "recipes" / "published.csv"
    return tuple(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
