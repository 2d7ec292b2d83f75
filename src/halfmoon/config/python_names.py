"""Errors and warnings of the Python API, which name options as Python does: `clients=2`, not `--clients 2`."""

import inspect
import re
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from halfmoon.config import schema
from halfmoon.core.errors import UserError

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


_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)((?: -?\d[\w.-]*)+(?<!\.)| [A-Z]+\b| [a-z][\w-]*)?")
"""A flag, and after it numbers, one word in capital letters, or one word in small letters."""

_COMMAND = re.compile(r"(`halfmoon [^`]+`)")
_RESUME = re.compile(r"`?halfmoon resume ([^\s`;,]+)`?(?<!\.)")


def in_python(text: str) -> str:
    """Replace flags in a sentence by Python's keywords; commands in backticks do not change."""
    # Split by a pattern with a group: the odd pieces are the commands.
    pieces = _COMMAND.split(_RESUME.sub(r'halfmoon.resume("\1")', text))
    return "".join(piece if number % 2 else _FLAG.sub(_format_option, piece) for number, piece in enumerate(pieces))


def _format_option(match: re.Match[str]) -> str:
    """Turn a flag in a message, with the values that follow it, into a Python argument.

    "--lr 0.1" becomes "lr=0.1", "--seeds 0 1" becomes "seeds=[0, 1]", "--data FOLDER" becomes "data=FOLDER".

    Args:
        match: a match of `_FLAG`: the flag's name without dashes, and the text after it that may be its values:
            several numbers, one placeholder in capital letters, or one word in small letters.
    """
    name = match[1].replace("-", "_")
    values = (match[2] or "").split()
    if values and values[0][0].islower():
        # The only word: a value if the option accepts it, otherwise the sentence goes on with it.
        if values[0] not in _list_choices(name):
            return name + match[2]
        values = [f'"{values[0]}"']
    if not values:
        return name
    return f"{name}={values[0]}" if len(values) == 1 else f"{name}=[{', '.join(values)}]"


def _list_choices(name: str) -> set[str]:
    """List the strings that an option accepts, from its type, such as `Literal["sgd", "adam"]`; none for any text."""
    # Types inside of others are looked through as well, such as those of `int | Literal["all"]`.
    types = [schema.option_types().get(name)]
    choices = set[str]()
    while types:
        option_type = types.pop()
        if isinstance(option_type, str):
            choices.add(option_type)
        types += get_args(option_type)
    return choices | (set(schema.NETWORKS) if name == "network" else set())


def python_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the Python API so that its `UserError`s name arguments, not flags of the command line.

    The functions below it are shared with the command line, whose messages say `--run-dir`.
    """

    @wraps(call)
    def translated(*args: P.args, **options: P.kwargs) -> R:
        try:
            return call(*args, **options)
        except UserError as error:
            # The method fills in placeholders such as {run_dir}; `in_python` replaces flags that the text spells out.
            text = error.in_python()
            error.args = (in_python(text),)
            raise

    return translated


def to_path(value: Any) -> Any:
    """Turn a string into a path; other values are returned unchanged."""
    return Path(value) if isinstance(value, str) else value
