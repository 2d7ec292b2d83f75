"""The types of options: what a value is called, how it is read from words, and one sentence where it is another."""

from collections.abc import Mapping
from functools import cache as remembered
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from halfmoon.core.errors import UserError, one_line, suggest
from halfmoon.storage import toml

MOST_SHOWN = 120
"""Characters of a wrong value that an error shows."""


def parse(subject: str, kind: Any, words: str) -> Any:
    """Return the value of this type that `words` spell; `none` is None where it may be.

    Raise UserError, in which the value is called `subject`, where the words are no such value.
    """
    if NoneType in members(kind) and words == "none":
        return None
    if Path in members(kind):
        return Path(words)
    try:
        return _adapter(kind).validate_strings(words)
    except ValidationError:
        return _refuse(subject, kind, words)


def expected(kind: Any) -> str:
    """Return in words what a value of this type is."""
    kinds = [member for member in members(kind) if member is not NoneType]
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    phrases: list[str] = []
    for member in kinds:
        if get_origin(member) is Literal:
            phrases.append(" or ".join(repr(choice) for choice in get_args(member)))
        else:
            numbers = get_origin(member) is tuple and get_args(member)[0] in (int, float)
            phrases.append("a list of numbers" if numbers else words.get(member, "a list of names"))
    return " or ".join(phrases)


@remembered
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def typed(subject: str, kind: Any, value: Any) -> Any:
    """Return `value` as this type; an int serves as a float, a list as a tuple, text as a path, nothing else.

    Raise UserError, in which the value is called `subject`, for another.
    """
    if isinstance(value, list):
        value = tuple(cast("list[Any]", value))
    if isinstance(value, str) and Path in members(kind):
        value = Path(value)
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError:
        return _refuse(subject, kind, value)


def _refuse(subject: str, kind: Any, value: Any) -> Any:
    choices = [choice for member in members(kind) if get_origin(member) is Literal for choice in get_args(member)]
    if choices and isinstance(value, str) and int not in members(kind):
        raise UserError(f"{subject} is {value!r}: {suggest(value, choices)}")
    words = one_line(toml.text(value))
    words = words if len(words) <= MOST_SHOWN else f"{words[:MOST_SHOWN]} ..."
    raise UserError(f"{subject} is {words}: it must be {expected(kind)}.")


def merge_options(old: Mapping[str, Any], new: Any, subject: str) -> dict[str, Any]:
    """Return two tables of method options as one; the new ones win, one by one.

    The key "METHOD.NAME" says NAME in the table of METHOD.
    """
    if not isinstance(new, Mapping):
        raise UserError(f"{subject} is {toml.text(new)}: it must be a table of the method's options.")
    result = dict(old)
    for name, value in cast("Mapping[str, Any]", new).items():
        if isinstance(value, Mapping):
            table = cast("Mapping[str, Any]", value)
            before = result.get(name)
            inner = cast("Mapping[str, Any]", before if isinstance(before, Mapping) else {})
            for key, each in table.items():
                check_scalar(f"{subject}: {name}.{key}", each)
            result[name] = {**inner, **table}
            continue
        check_scalar(f"{subject}: {name}", value)
        method, dot, key = name.rpartition(".")
        if dot:
            result = merge_options(result, {method: {key: value}}, subject)
        else:
            result[name] = value
    return result


def check_scalar(subject: str, value: Any) -> None:
    """Raise UserError, in which the value is called `subject`, where it is no number, text, true or false."""
    if not isinstance(value, bool | int | float | str):
        raise UserError(f"{subject} is {toml.text(value)}: it must be a number, text, true or false.")
