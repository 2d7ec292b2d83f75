"""Escape cells of tables against CSV formula injection: a spreadsheet would run such texts."""

from typing import Any

FORMULA = ("=", "+", "-", "@", "\t", "\r")


def harmless(cell: str) -> str:
    """Return a cell that no spreadsheet takes for a formula: one that looks like one gets an apostrophe."""
    return f"'{cell}" if cell.startswith(FORMULA) else cell


def harmless_row(cells: list[Any]) -> list[Any]:
    """Return a row whose texts are `harmless`; numbers stay numbers."""
    return [harmless(cell) if isinstance(cell, str) else cell for cell in cells]
