"""Whose image each file is: a patient or an object, of which no image may lie on both sides of a split."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import dicom

NO_GROUP_ON_BOTH_SIDES = "no patient or group is on both sides"


def find_groups(paths: Sequence[Path], pattern: str | None = None) -> list[str] | None:
    """Return the group of each file: what `pattern` finds in its folder and name, else the patient of DICOM files.

    None where nothing is known; "" is an image without a group. Raise UserError where a file does not fit the pattern.
    """
    if pattern is None:
        return dicom.find_patients(paths)
    expression, names = compile_pattern(pattern), list[str]()
    for path in paths:
        match = expression.search("/".join(path.parts[-2:]))
        if match is None or match[1] is None:
            raise UserError(f"{path}: its folder and name do not fit group_pattern {pattern!r}; correct the pattern.")
        names.append(match[1])
    return names


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return a regular expression; raise UserError where it is none, or has not one group."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"group_pattern is {pattern!r}, no regular expression: {error}.") from error
    if expression.groups != 1:
        raise UserError(f"group_pattern is {pattern!r}: it needs one group, such as '(p[0-9]+)_'.")
    return expression


def drop_shared_groups(rows: np.ndarray, others: np.ndarray, groups: Sequence[str] | None) -> np.ndarray:
    """Return those of the rows, int64, whose group has no row among the `others`."""
    if groups is None:
        return rows
    names = np.array(groups)
    return rows[~np.isin(names[rows], sorted(set(names[others].tolist()) - {""}))]
