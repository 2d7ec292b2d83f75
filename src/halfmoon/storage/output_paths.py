"""Check that a command can write its output where the user wants it, before it computes what it writes."""

import os
from pathlib import Path

from halfmoon.core.errors import UserError


def check_output_file(path: Path, option: str, makes_folder: bool = False) -> None:
    """Raise UserError if no file can be written at a path: it is a folder, or its folder is missing or not writable.

    Args:
        path: the file.
        option: the name of the option that the path was given by.
        makes_folder: True if the caller makes a missing folder.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder: {{{option}}} needs the name of a file in it.", option=option)
    parent = path.parent
    if makes_folder:
        return check_output_folder(parent, option)
    if not parent.is_dir():
        problem = "is no folder" if parent.exists() else "does not exist"
        raise UserError(
            f"{path}: the folder {parent} {problem}; make it, or choose another {{{option}}}.", option=option
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(
            f"{path}: the folder {parent} cannot be written; make it writable, or choose another {{{option}}}.",
            option=option,
        )
    return None


def check_output_folder(path: Path, option: str) -> None:
    """Raise UserError if no files can be written into a folder: it is a file, or cannot be made or written.

    Args:
        path: the folder, which need not exist.
        option: the name of the option that the path was given by.
    """
    # The nearest folder that exists: the ones below it are made.
    existing = next((parent for parent in (path, *path.parents) if os.path.lexists(parent)), path)
    if not existing.is_dir():
        raise UserError(f"{existing} is a file, not a folder; choose another {{{option}}}.", option=option)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(
            f"{existing} cannot be written; make it writable, or choose another {{{option}}}.", option=option
        )
