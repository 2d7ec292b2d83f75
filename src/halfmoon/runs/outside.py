"""Runs with parts from outside: a method that is given as an object, and parts that are still what they were."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfmoon.api.types import Method
from halfmoon.config.schema import Config, initial_weights, plugin_origins
from halfmoon.core import plugins, weight_files
from halfmoon.core.errors import UserError
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import Objective

_LINE = re.compile(r"^# (.+ sha256 [0-9a-f]{64})$", re.MULTILINE)


CustomMethod = Method | Objective | registry.MethodEntry | Callable[[], Method]
"""A method as an object: itself, an objective for FedAvg, a row, or a callable such as `partial(FedAvg, Mine())`."""


def register(method: CustomMethod) -> str:
    """Let this process know a method of one's own, and return the name under which it goes: my_module:Mine.

    FedAvg around an objective goes by the name of the objective.
    """
    part: Any = registry.instance("of one's own", method)
    kind = type(registry.core(part.method if isinstance(part, registry.MethodEntry) else part))
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not isinstance(part, registry.MethodEntry):
        # Its options stand beside its name: the row has the defaults, as it would in another process.
        with suppress(TypeError):
            part = kind()
    registry.row(name, part)
    plugins.register("method", name, part)
    return name


def _differing(method: Any, name: str) -> dict[str, Any]:
    """Return the options in which a method differs from the row of its name; raise `UserError` for other differences.

    Only numbers, words and yes or no can be written into a run's file.
    """
    theirs = registry.entry(name).method
    mine, default = registry.options_in(method), registry.options_in(theirs)
    options = {key: option.default for key, option in mine.items() if key in default and option != default[key]}
    if registry.with_options(theirs, options) != method:
        raise UserError(
            f"method {name} differs from {type(registry.core(method)).__name__}() in more than its options, which a "
            "run's file could not say: give such a method a class or a MethodEntry of its own."
        )
    return options


def describe_method(method: CustomMethod | str) -> tuple[str, dict[str, Any]]:
    """Return a method's name, under which this process knows it, and the options in which an object differs."""
    if isinstance(method, str):
        return method, {}
    name, part = register(method), registry.instance("of one's own", method)
    if isinstance(part, registry.MethodEntry):
        return name, {}
    return name, _differing(FedAvg(part) if isinstance(part, Objective) else part, name)


def check(config: Config, words: str, root: Path) -> None:
    """Raise `UserError` where a part from outside is no longer what it was when the run's file, `words`, was written.

    `root` is named in it.
    """
    lines = set(_LINE.findall(words))
    start = initial_weights(config)
    line = (
        ""
        if start is None
        else f"weights from {weight_files.display_name(start)} sha256 {weight_files.sha256_of(start)}"
    )
    before = next((each for each in lines if each.startswith("weights from ")), "")
    if line.rpartition(" ")[2] != before.rpartition(" ")[2]:
        raise UserError(
            f"{root} was begun with the {before or 'network without weights'}, but here is {line or 'no such file'}: "
            "restore it, or start anew."
        )
    for each in plugin_origins(config):
        if str(each) in lines:
            continue
        before = next((line for line in sorted(lines) if line.startswith(f"{each.part} from ")), None)
        was = f"was begun with {before.rpartition(' from ')[2]}" if before else f"does not say which {each.part} it had"
        raise UserError(f"{root} {was}, but here is {str(each).rpartition(' from ')[2]}: restore it, or start anew.")
