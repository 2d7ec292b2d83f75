"""TOML that is written; Python's own tomllib reads it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def key(name: str) -> str:
    """Return the name of an option or a table, quoted where TOML asks for it."""
    bare = name and all(letter.isascii() and (letter.isalnum() or letter in "-_") for letter in name)
    return name if bare else value(name)


def value(held: Any) -> str:
    """Return a TOML value; raise TypeError for what TOML cannot say."""
    if isinstance(held, bool):
        return "true" if held else "false"
    if isinstance(held, int | float):
        return "none" if held is None else repr(held)
    if isinstance(held, str | Path):
        # JSON escapes what TOML's basic strings must escape, except DEL.
        return json.dumps(str(held), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(held, Sequence):
        return f"[{', '.join(value(each) for each in held)}]"
    raise TypeError(f"no TOML for {held!r}")


def shown(held: Any) -> str:
    """Return a value as a TOML file has it, "none" for None, or as Python has it."""
    try:
        return value(held)
    except TypeError:
        return "none" if held is None else repr(held)


def table(words: str) -> dict[str, Any]:
    """Return what a TOML file says, {} where it is no TOML."""
    try:
        return tomllib.loads(words)
    except tomllib.TOMLDecodeError:
        return {}
