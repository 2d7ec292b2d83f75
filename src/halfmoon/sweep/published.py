"""The papers' own numbers, cell by cell (`halfmoon/recipes/published.csv`)."""

from __future__ import annotations

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
    found = [row for row in _rows() if all(row[column] == value for column, value in where.items())]
    if len(found) != 1 or not found[0]["mean"]:
        return None
    (row,) = found
    return Published(float(row["mean"]), float(row["std"]) if row["std"] else None, row["note"])


@cache
def _rows() -> tuple[Mapping[str, str], ...]:
    file = resources.files("halfmoon") / "recipes" / "published.csv"
    return tuple(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))
