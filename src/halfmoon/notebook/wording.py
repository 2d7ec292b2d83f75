"""Errors and remarks in the words of whoever reads them: an option is `clients=2` in Python, not `--clients 2`."""

import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from halfmoon.config import schema
from halfmoon.core.errors import UserError

P = ParamSpec("P")
R = TypeVar("R")

_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)((?: -?\d[\w.-]*)+(?<!\.)| [A-Z]+\b| [a-z][\w-]*)?")
_COMMAND = re.compile(r"(`halfmoon [^`]+`)")
_RESUME = re.compile(r"`?halfmoon resume ([^\s`;,]+)`?(?<!\.)")


def in_python(words: str) -> str:
    """Return a sentence with options as Python has them; a command in backticks stays one of the shell."""
    parts = _COMMAND.split(_RESUME.sub(r'halfmoon.resume("\1")', words))
    return "".join(each if number % 2 else _FLAG.sub(_option, each) for number, each in enumerate(parts))


def _option(match: re.Match[str]) -> str:
    name, values = match[1].replace("-", "_"), (match[2] or "").split()
    if values and values[0][0].islower():
        if values[0] not in _choices(name):
            return name + match[2]
        values = [f'"{values[0]}"']
    listed = ", ".join(values)
    return f"{name}=[{listed}]" if len(values) > 1 else f"{name}={listed}" if values else name


def _choices(name: str) -> set[str]:
    """Return the words that an option can be, {} where they are not listed."""
    waiting, words = [schema.kinds().get(name)], set[str]()
    while waiting:
        kind = waiting.pop()
        words |= {kind} if isinstance(kind, str) else set()
        waiting += get_args(kind)
    return words | (set(schema.NETWORKS) if name == "network" else set())


def python_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose `UserError`s name arguments, not flags."""

    @wraps(call)
    def translated(*args: P.args, **options: P.kwargs) -> R:
        try:
            return call(*args, **options)
        except UserError as error:
            error.args = (in_python(str(error)),)
            raise

    return translated


def paths(value: Any) -> Any:
    """Return a text as a path, anything else as it is: people write folders as texts."""
    return Path(value) if isinstance(value, str) else value
