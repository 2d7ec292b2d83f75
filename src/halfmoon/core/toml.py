"""Writer of TOML values, and a parser that limits tomllib to what can be written back."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast


def format_key(name: str) -> str:
    """Format the name of an option or a table, quoted if TOML requires it."""
    bare = name and all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name)
    return name if bare else format_value(name)


MAX_DECIMAL_BITS = 10_000
"""Bits from which a whole number is written in hexadecimal digits."""


def format_value(item: Any) -> str:
    """Format a TOML value; raise TypeError for a value that TOML cannot represent."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int):
        # Python refuses to format more than 4,300 decimal digits; hexadecimal has no limit and is valid TOML.
        return str(item) if item.bit_length() < MAX_DECIMAL_BITS else hex(item)
    if isinstance(item, float):
        return repr(item)
    if isinstance(item, str | Path):
        # JSON escapes what TOML's basic strings must escape, except DEL.
        return json.dumps(str(item), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(item, Sequence):
        elements = cast(Sequence[Any], item)
        return f"[{', '.join(map(format_value, elements))}]"
    raise TypeError(f"no TOML for {item!r}")


def format_text(item: Any) -> str:
    """Format a value as TOML if possible, "none" for None, otherwise as Python's `repr`."""
    try:
        return format_value(item)
    except TypeError:
        return "none" if item is None else repr(item)


def parse(text: str) -> dict[str, Any]:
    """Parse TOML; raise tomllib.TOMLDecodeError if it is invalid or has values out of Python's range."""
    try:
        content = tomllib.loads(text)
        # tomllib reads hexadecimal numbers of any length, but Python refuses to format long ones in decimal.
        str(content)
        return content
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError as error:
        raise tomllib.TOMLDecodeError("values are nested too deeply") from error
    except ValueError as error:  # too many digits, or an invalid time zone
        raise tomllib.TOMLDecodeError("a number or a time in it is out of range") from error


def parse_or_empty(text: str) -> dict[str, Any]:
    """Parse TOML, {} if it is invalid."""
    try:
        return parse(text)
    except tomllib.TOMLDecodeError:
        return {}
