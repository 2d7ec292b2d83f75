"""Groups of images, such as those of one patient or object, which must not be on both sides of a split."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import dicom

NO_GROUP_ON_BOTH_SIDES = "no patient or group is on both sides"


def find_groups(paths: Sequence[Path], pattern: str | None = None) -> list[str] | None:
    """Find the group of each file: the match of a pattern, or by default the patient of DICOM files.

    Args:
        paths: The image files.
        pattern: A regular expression with one group, searched in "FOLDER/NAME" of each file.

    Returns:
        The group of each file, "" for none; None if no file has a group.

    Raises:
        UserError: If a file does not match the pattern.
    """
    if pattern is None:
        return dicom.find_patients(paths)
    expression = compile_pattern(pattern)
    names: list[str] = []
    for path in paths:
        match = expression.search("/".join(path.parts[-2:]))
        if match is None or match[1] is None:
            raise UserError(f"{path}: its folder and name do not fit group_pattern {pattern!r}; correct the pattern.")
        names.append(match[1])
    return names


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; raise UserError if it is invalid, or does not have exactly one group."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"group_pattern is {pattern!r}, no regular expression: {error}.") from error
    if expression.groups != 1:
        raise UserError(f"group_pattern is {pattern!r}: it needs one group, such as '(p[0-9]+)_'.")
    return expression


def drop_shared_groups(rows: np.ndarray, others: np.ndarray, groups: Sequence[str] | None) -> np.ndarray:
    """Select the rows, int64, whose group has no row in `others`; rows without a group remain."""
    if groups is None:
        return rows
    names = np.array(groups)
    return rows[~np.isin(names[rows], sorted(set(names[others].tolist()) - {""}))]
