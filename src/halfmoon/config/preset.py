"""What lies under everything that is said: `preset = "paper"`, what the main method's paper fixes of a run, and under
that a protocol by name: the experiment in which papers compare methods, or the recipe for few labels.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from typing import Any

from halfmoon.config.sections import PartitionOptions
from halfmoon.core import hubs
from halfmoon.core.errors import UserError
from halfmoon.storage import toml

SHIPPED = {"sage": "_proxyfl", "fedloke": "_fedloke"}
"""The file among the recipes whose table [protocol] a protocol is; protocols.toml here has the others."""

OVERRULED = {
    "epochs": ("steps",), "epoch": ("steps",), "network": ("width",), "rounds": ("server_ema",), "split": ("setting",)
}  # fmt: skip
"""What of a recipe goes where this is said: epochs replace its steps, a width is that of its network, a short run ends
before an average over its rounds has begun, and a saved split says who holds what."""

AMOUNTS = ("labels_per_class", "label_ratio", "labels")
"""Three ways to say how many labels there are."""

SCENARIO = tuple(each.name for each in fields(PartitionOptions) if each.name != "split")
"""What a saved split decides in place of the options."""

RECOMMENDED = "recommended"
"""In place of a method's name: the one that is recommended for the network, or else for where the labels are."""

SOLVED = {"ridge-head": 0, "mixture-head": 10}
"""Methods that solve a head from the sums of all clients in one round, and how many rounds of EM follow by default."""


def named(settings: Mapping[str, Any]) -> str:
    """Return the method of these settings, with the recommended one by its name."""
    if settings["method"] != RECOMMENDED:
        return settings["method"]
    from halfmoon.methods import registry  # slow to import: it brings torch

    head = settings.get("tune", "auto") in ("auto", "head") and not settings.get("freeze")
    on_features = head and settings.get("network") in hubs.PRETRAINED
    return registry.RECOMMENDED.get("features" if on_features else settings.get("labels_at", "clients"), RECOMMENDED)


def cohort_of(settings: Mapping[str, Any], clients: int) -> int:
    """Return the cohort where nobody says it: all clients for a head that is solved from their sums."""
    most = max(1, clients)
    return most if settings.get("method") in SOLVED else min(settings["cohort"], most)


def overruled(settings: Mapping[str, Any]) -> set[str]:
    """Return what a recipe no longer says under these settings."""
    return {each for name in settings if settings[name] is not None for each in OVERRULED.get(name, ())}


def left_out(settings: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return what the protocol of `settings` would set and another option displaces: {name: (value, that option)}.

    Steps beside epochs are no loss, and a saved split has its own setting: both could not be kept.
    """
    values = protocol_values(settings.get("protocol", "none"))
    return {
        name: (values[name], cause)
        for cause in ("network", "rounds")
        for name in OVERRULED[cause]
        if settings.get(cause) is not None and name in values and settings.get(name) is None
    }


def protocol_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the protocol that `settings` name says of a run, without what they say in other words."""
    values = protocol_values(settings.get("protocol", "none"))
    without = _said_otherwise(settings) | overruled(settings)
    return {name: value for name, value in values.items() if name not in without}


@cache
def protocol_values(name: str) -> Mapping[str, Any]:
    """Return everything that a protocol sets."""
    place, key = resources.files("halfmoon"), "protocol"
    if name in SHIPPED:
        file = place / "recipes" / f"{SHIPPED[name]}.toml"
    else:
        file, key = place / "config" / "protocols.toml", name
    return toml.loads(file.read_text("utf-8")).get(key, {})


def paper_run(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the paper fixes, without what `settings` say in other words."""
    from halfmoon.methods import registry  # slow to import: it brings torch

    without = _said_otherwise(settings)
    fixed = registry.entry(settings.get("method", "feddure")).paper_run
    return {name: value for name, value in fixed.items() if name not in without}


def _said_otherwise(settings: Mapping[str, Any]) -> set[str]:
    amount = any(settings.get(name) is not None for name in AMOUNTS)
    return {*(AMOUNTS if amount else ()), *(SCENARIO if settings.get("split") is not None else ())}


def check_preset(config: Any) -> None:
    """Raise UserError where what the main method's paper fixes is no preset, with the names of those whose is."""
    from halfmoon.methods import registry  # slow to import: it brings torch

    if config.preset == "paper" and not registry.entry(config.method).paper_options:
        methods = ", ".join(name for name in registry.names() if registry.entry(name).paper_options)
        raise UserError(f"method {config.method} has no preset 'paper'; the methods that have one: {methods}.")
