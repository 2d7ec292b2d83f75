"""HTML from Python: elements whose texts are escaped, unless they are elements themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

from halfmoon.storage.atomic_io import finite


class Markup(str):
    """A piece of HTML, already safe."""


_EMPTY = {"br", "meta"}

Attributes = Mapping[str, str]


def el(name: str, attributes: Attributes | None = None, *children: str | Markup) -> Markup:
    """Return an element; children that are plain text are escaped, and so is every attribute."""
    said = "".join(f' {key}="{escape(value)}"' for key, value in (attributes or {}).items())
    if name in _EMPTY:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{joined(*children)}</{name}>")


def joined(*children: str | Markup) -> Markup:
    """Put pieces one after the other."""
    return Markup("".join(child if isinstance(child, Markup) else escape(child, quote=False) for child in children))


def script_data(value: Any) -> str:
    """Return JSON that is safe inside a script element: no `<`, `>`, `&`, and no separator that ends a line."""
    words = json.dumps(finite(value), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return words.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
