"""Escape cells of tables against CSV formula injection: a spreadsheet would run such texts."""

from typing import Any

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def escape_formula(cell: str) -> str:
    """Return a cell that no spreadsheet takes for a formula: one that looks like one gets an apostrophe."""
    return f"'{cell}" if cell.startswith(FORMULA_STARTS) else cell


def escape_formulas(cells: list[Any]) -> list[Any]:
    """Return a row whose texts are `escape_formula`; numbers stay numbers."""
    return [escape_formula(cell) if isinstance(cell, str) else cell for cell in cells]
