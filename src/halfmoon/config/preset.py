"""`preset = "paper"`: what the main method's paper fixes of a run, under everything that is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from halfmoon.core.errors import UserError


def paper_run(given: Mapping[str, Any], amounts: Sequence[str], scenario: Sequence[str]) -> dict[str, Any]:
    """Return what the paper fixes, without what `given` values say in other words.

    Of the `amounts` of labels one is enough, and a saved split decides the `scenario`.
    """
    from halfmoon.methods import registry  # slow to import: it brings torch

    said = any(given.get(name) is not None for name in amounts)
    without = {*(amounts if said else ()), *(scenario if given.get("split") is not None else ())}
    fixed = registry.entry(given.get("method", "feddure")).paper_run
    return {name: value for name, value in fixed.items() if name not in without}


def check_preset(config: Any) -> None:
    """Raise UserError where what the main method's paper fixes is no preset, with the names of those whose is."""
    from halfmoon.methods import registry  # slow to import: it brings torch

    if config.preset == "paper" and not registry.entry(config.method).paper_options:
        known = ", ".join(name for name in registry.names() if registry.entry(name).paper_options)
        raise UserError(f"method {config.method} has no preset 'paper'; the methods that have one: {known}.")
