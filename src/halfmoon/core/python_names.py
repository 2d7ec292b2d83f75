"""Errors and warnings of the Python API, which name options as Python does: `clients=2`, not `--clients 2`."""

import inspect
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from halfmoon.core.errors import UserError, in_python

PACKAGE = str(Path(__file__).resolve().parents[1])
"""Folder of halfmoon's modules."""

P = ParamSpec("P")
R = TypeVar("R")


def warn(text: str) -> None:
    """Warn with the line of the user's code that called halfmoon, not a line of halfmoon."""
    frame = inspect.currentframe()
    level = 1  # level 1 is this function, level 2 its caller
    while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(in_python(text), RuntimeWarning, stacklevel=level)


def python_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the Python API so that its `UserError`s name arguments, not flags of the command line.

    The functions below it are shared with the command line, whose messages say `--run-dir`.
    """

    @wraps(call)
    def translated(*args: P.args, **options: P.kwargs) -> R:
        try:
            return call(*args, **options)
        except UserError as error:
            error.args = (error.in_python(),)
            raise

    return translated


def to_path(value: Any) -> Any:
    """Turn a string into a path; other values are returned unchanged."""
    return Path(value) if isinstance(value, str) else value
