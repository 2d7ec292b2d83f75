"""Escape cells of CSV files that a spreadsheet would execute as formulas."""

from typing import Any

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def escape_formula(cell: str) -> str:
    """Prefix a text with an apostrophe if a spreadsheet would read it as a formula."""
    return f"'{cell}" if cell.startswith(FORMULA_STARTS) else cell


def escape_formulas(cells: list[Any]) -> list[Any]:
    """Apply `escape_formula` to the texts of a row; numbers do not change."""
    return [escape_formula(cell) if isinstance(cell, str) else cell for cell in cells]
