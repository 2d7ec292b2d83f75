"""Types of options: parse values from text, convert values from TOML and Python, and describe what a type accepts."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from halfmoon.core import toml
from halfmoon.core.errors import UserError, one_line, suggest

MAX_SHOWN_CHARACTERS = 120
"""Characters of a wrong value that an error message shows."""


def parse_value(subject: str, option_type: Any, text: str) -> Any:
    """Parse a value of this type from text; `none` is None if the type allows it.

    Args:
        subject: what an error message calls the value, such as "--rounds".
        option_type: the type, such as `int | None`.
        text: the text of the command line.

    Raises:
        UserError: the text is not a value of this type.
    """
    if NoneType in union_members(option_type) and text == "none":
        return None
    if Path in union_members(option_type):
        return Path(text)
    try:
        # Unlike `strict`, this mode parses numbers and booleans from text.
        return _adapter(option_type).validate_strings(text)
    except ValidationError:
        # `from None`: pydantic's message names internal types, which would not help the user.
        raise _type_error(subject, option_type, text) from None


def describe_type(option_type: Any) -> str:
    """Describe the values of a type for an error message, such as "a whole number or 'all'"."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path"}
    phrases: list[str] = []
    for member in union_members(option_type):
        if member is NoneType:
            continue
        if get_origin(member) is Literal:
            phrases.append(" or ".join(repr(choice) for choice in get_args(member)))
        elif get_origin(member) is tuple and get_args(member)[0] in (int, float):
            phrases.append("a list of numbers")
        else:
            phrases.append(names.get(member, "a list of names"))  # all other types are tuples of strings
    return " or ".join(phrases)


@cache
def _adapter(option_type: Any) -> TypeAdapter[Any]:
    # Building an adapter takes longer than thousands of validations.
    return TypeAdapter(option_type)


def union_members(option_type: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type itself if it is not one."""
    return get_args(option_type) if get_origin(option_type) in (Union, UnionType) else (option_type,)


def convert_value(subject: str, option_type: Any, value: Any) -> Any:
    """Convert a value of TOML or Python to this type.

    Only these conversions are made: int to float, list to tuple, text to path.

    Args:
        subject: what an error message calls the value, such as "rounds in run.toml".
        option_type: the type, such as `int | None`.
        value: the value.

    Raises:
        UserError: the value has another type.
    """
    # TOML has no tuples, and strict validation would refuse a list.
    if isinstance(value, list):
        value = tuple(cast("list[Any]", value))
    if isinstance(value, str) and Path in union_members(option_type):
        value = Path(value)
    try:
        # Strict: pydantic would otherwise convert the text "1" to a number, and 1.0 to an integer.
        return _adapter(option_type).validate_python(value, strict=True)
    except ValidationError:
        raise _type_error(subject, option_type, value) from None


def _type_error(subject: str, option_type: Any, value: Any) -> UserError:
    """Build the error about a value of the wrong type, which suggests a similar choice or lists the allowed values.

    Args:
        subject: what the message calls the value, such as "--rounds".
        option_type: the type, such as `int | None`.
        value: the value.
    """
    members = union_members(option_type)
    literals = [member for member in members if get_origin(member) is Literal]
    choices = [choice for literal in literals for choice in get_args(literal)]
    # A similar choice is a better hint than the list of all; an option that also takes numbers needs the list.
    if choices and isinstance(value, str) and int not in members:
        return UserError(f"{subject} is {value!r}: {suggest(value, choices)}")
    text = one_line(toml.format_text(value))
    if len(text) > MAX_SHOWN_CHARACTERS:
        text = f"{text[:MAX_SHOWN_CHARACTERS]} ..."
    return UserError(f"{subject} is {text}: it must be {describe_type(option_type)}.")


def merge_method_options(base: Mapping[str, Any], override: Any, subject: str) -> dict[str, Any]:
    """Merge two tables of method options, as a file and the command line define them; values of `override` win.

    A table has the options of the trained method as NAME, and those of each other method in a table METHOD. The key
    "METHOD.NAME" means NAME in the table of METHOD.

    Args:
        base: options of the lower layer.
        override: options of the upper layer: {NAME: value} or {METHOD: {NAME: value}}.
        subject: what an error message calls `override`.

    Raises:
        UserError: `override` is not such a table.
    """
    if not isinstance(override, Mapping):
        raise UserError(f"{subject} is {toml.format_text(override)}: it must be a table of the method's options.")
    merged = dict(base)
    for name, value in cast("Mapping[str, Any]", override).items():
        if isinstance(value, Mapping):
            # A table of the options of the method `name`.
            table = cast("Mapping[str, Any]", value)
            for option, setting in table.items():
                check_scalar(f"{subject}: {name}.{option}", setting)
            previous = merged.get(name)
            previous_table = cast("Mapping[str, Any]", previous if isinstance(previous, Mapping) else {})
            merged[name] = {**previous_table, **table}
            continue
        check_scalar(f"{subject}: {name}", value)
        # TOML writes [options.METHOD] tables; the command line and Python calls also write METHOD.NAME.
        method, dot, option = name.rpartition(".")
        if dot:
            merged = merge_method_options(merged, {method: {option: value}}, subject)
        else:
            merged[name] = value
    return merged


def check_scalar(subject: str, value: Any) -> None:
    """Raise UserError if a value is not a number, text, true or false; the message calls it `subject`."""
    if not isinstance(value, bool | int | float | str):
        raise UserError(f"{subject} is {toml.format_text(value)}: it must be a number, text, true or false.")
