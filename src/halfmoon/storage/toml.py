"""TOML that is written, and read by Python's own tomllib."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def format_key(name: str) -> str:
    """Return the name of an option or a table, quoted where TOML asks for it."""
    bare = name and all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name)
    return name if bare else format_value(name)


def format_value(item: Any) -> str:
    """Return a TOML value; raise TypeError for what TOML cannot say."""
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, int):
        # Python writes no number of over 4,300 digits, except in hexadecimal, which TOML knows, too.
        return str(item) if item.bit_length() < 10_000 else hex(item)
    if isinstance(item, float):
        return repr(item)
    if isinstance(item, str | Path):
        # JSON escapes what TOML's basic strings must escape, except DEL.
        return json.dumps(str(item), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(item, Sequence):
        return f"[{', '.join(format_value(each) for each in item)}]"
    raise TypeError(f"no TOML for {item!r}")


def format_text(item: Any) -> str:
    """Return a value as a TOML file has it, "none" for None, or as Python has it."""
    try:
        return format_value(item)
    except TypeError:
        return "none" if item is None else repr(item)


def parse(words: str) -> dict[str, Any]:
    """Return what TOML says; raise tomllib.TOMLDecodeError for whatever is none that Python reads."""
    try:
        content = tomllib.loads(words)
        # In hexadecimal any number can be read, but not be written as Python writes numbers.
        str(content)
        return content
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError as error:
        raise tomllib.TOMLDecodeError("values are nested too deeply") from error
    except ValueError as error:  # too many digits, a time zone that there is not
        raise tomllib.TOMLDecodeError("a number or a time in it is out of range") from error


def parse_or_empty(words: str) -> dict[str, Any]:
    """Return what a TOML file says, {} where it is no TOML."""
    try:
        return parse(words)
    except tomllib.TOMLDecodeError:
        return {}
