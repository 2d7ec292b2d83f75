"""Escape cells of CSV files that a spreadsheet would execute as formulas."""

import re
from typing import Any

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def escape_formula(cell: str) -> str:
    """Prefix a text with an apostrophe if a spreadsheet would read it as a formula."""
    return f"'{cell}" if cell.startswith(FORMULA_STARTS) else cell


_SIGNED_NUMBER = re.compile(r"[+-](\d+(\.\d*)?)?")
"""A sign, alone or before a number: a spreadsheet computes nothing of it, and classes have such names."""


def protect_cell(cell: str) -> str:
    """Escape a text of a file that halfmoon reads again; `restore_cell` undoes it, whatever the text is."""
    return f"'{cell}" if _is_formula(cell.lstrip("'")) else cell


def restore_cell(cell: str) -> str:
    """Undo `protect_cell`."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell.lstrip("'")) else cell


def _is_formula(cell: str) -> bool:
    return cell.startswith(FORMULA_STARTS) and not _SIGNED_NUMBER.fullmatch(cell)


def escape_formulas(cells: list[Any]) -> list[Any]:
    """Apply `escape_formula` to the texts of a row; numbers do not change."""
    return [escape_formula(cell) if isinstance(cell, str) else cell for cell in cells]
