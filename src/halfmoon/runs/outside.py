"""Runs with parts from outside: a method that is given as an object, and parts that are still what they were."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfmoon.api.types import Method
from halfmoon.config.schema import Config, origins, weights_of
from halfmoon.core import plugins, weight_files
from halfmoon.core.errors import UserError
from halfmoon.methods import registry

_LINE = re.compile(r"^# (.+ sha256 [0-9a-f]{64})$", re.MULTILINE)


def register(method: Method | registry.MethodEntry) -> str:
    """Let this process know a method of one's own, and return the name under which it goes: my_module:Mine."""
    kind = type(method.method if isinstance(method, registry.MethodEntry) else method)
    name = f"{kind.__module__}:{kind.__qualname__}"
    part: Any = method
    if not isinstance(method, registry.MethodEntry):
        # Its options are said beside its name: the row has the defaults, as it would in another process.
        with suppress(TypeError):
            part = kind()
    registry.row(name, part)
    plugins.register("method", name, part)
    return name


def _differing(method: Method, name: str) -> dict[str, Any]:
    """Return the options in which a method differs from the row of its name; raise `UserError` for other differences.

    Only numbers, words and yes or no can be written into a run's file.
    """
    theirs = registry.entry(name).method
    mine, default = registry.options_in(method), registry.options_in(theirs)
    chosen = {key: option.default for key, option in mine.items() if key in default and option != default[key]}
    if registry.with_options(theirs, chosen) != method:
        raise UserError(
            f"method {name} differs from {type(method).__name__}() in more than its options, which a run's file could "
            "not say: give such a method a class, or an Entry, of its own."
        )
    return chosen


def named(config: Config, method: Method | registry.MethodEntry) -> Config:
    """Return the configuration of a method that was given as an object: its name, and the options that it has."""
    name = register(method)
    chosen = {} if isinstance(method, registry.MethodEntry) else _differing(method, name)
    return replace(config, method=name, options={**config.options, **chosen})


def check(config: Config, words: str, root: Path) -> None:
    """Raise `UserError` where a part from outside is no longer what it was when the run's file, `words`, was written.

    `root` is named in it.
    """
    held = set(_LINE.findall(words))
    start = weights_of(config)
    line = "" if start is None else f"weights from {weight_files.title(start)} sha256 {weight_files.named(start)}"
    before = next((each for each in held if each.startswith("weights from ")), "")
    if line.rpartition(" ")[2] != before.rpartition(" ")[2]:
        raise UserError(
            f"{root} was begun with the {before or 'network without weights'}, but here is {line or 'no such file'}: "
            "restore it, or start anew."
        )
    for each in origins(config):
        if str(each) in held:
            continue
        before = next((line for line in sorted(held) if line.startswith(f"{each.part} from ")), None)
        was = f"was begun with {before.rpartition(' from ')[2]}" if before else f"does not say which {each.part} it had"
        raise UserError(f"{root} {was}, but here is {str(each).rpartition(' from ')[2]}: restore it, or start anew.")
