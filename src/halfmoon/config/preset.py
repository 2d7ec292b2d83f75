"""Default values from presets, protocols and recommendations. Options that the user sets override them.

`preset = "paper"` takes the values that the paper of the main method fixes. A protocol, such as "sage", is a named
experiment: the setup in which papers compare methods, or the recipe for few labels. The preset overrides the protocol.
"""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib import resources
from typing import Any

from halfmoon.config.sections import PartitionOptions
from halfmoon.core import hubs, toml
from halfmoon.core.errors import UserError

PROTOCOL_RECIPES = {"sage": "_proxyfl", "fedloke": "_fedloke"}
"""Protocols that are the table [protocol] of a recipe, by the recipe's file; protocols.toml has the others."""

DISPLACES = {
    "epochs": ("steps",), "epoch": ("steps",), "network": ("width",), "rounds": ("server_ema",), "split": ("setting",)
}  # fmt: skip
"""Options that drop values of a recipe: epochs replace its steps, a width belongs to its network, a short run would end
before an average over its rounds has begun, and a saved split contains the partition."""

LABEL_AMOUNTS = ("labels_per_class", "label_ratio", "labels")
"""Three options for the number of labels, of which one can be set."""

PARTITION_OPTIONS = tuple(option.name for option in fields(PartitionOptions) if option.name != "split")
"""Options that a saved split replaces."""

RECOMMENDED = "recommended"
"""The value of `method` that stands for the method recommended for the network, or else for where the labels are."""

SOLVER_EM_ROUNDS = {"ridge-head": 0, "mixture-head": 10}
"""Methods that solve a head in one round, from sums of all clients, and the default number of EM rounds after it."""


def resolve_method(options: Mapping[str, Any]) -> str:
    """Return the name of the method that these options train; replace "recommended" by the method that is recommended.

    The recommendation depends on where labels are (at the server, at all or some clients), and on whether only the head
    of a pretrained network is trained.
    """
    if options["method"] != RECOMMENDED:
        return options["method"]
    from halfmoon.methods import registry  # slow to import: it loads torch

    # A pretrained network whose head alone is trained works on fixed features, for which another method is recommended.
    trains_head = options.get("tune", "auto") in ("auto", "head") and not options.get("freeze")
    on_features = trains_head and options.get("network") in hubs.PRETRAINED
    situation = "features" if on_features else options.get("labels_at", "clients")
    return registry.RECOMMENDED[situation]


def default_cohort(options: Mapping[str, Any], clients: int) -> int:
    """Return the cohort size if no option sets it: all clients for a head that is solved from their sums."""
    clients = max(1, clients)
    return clients if options.get("method") in SOLVER_EM_ROUNDS else min(options["cohort"], clients)


def displaced_options(options: Mapping[str, Any]) -> set[str]:
    """Return the names of options that a recipe does not set together with these options."""
    return {displaced for name in options if options[name] is not None for displaced in DISPLACES.get(name, ())}


def displaced_protocol_values(options: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Return protocol values that another option drops, and that the user could keep by setting them.

    A protocol is a named table of options, the experiment of a paper. Options of the user drop values that do not fit
    them (`DISPLACES`): another network has another width, and few rounds need no average over rounds. Steps that epochs
    replace and a setting that a saved split replaces are not returned, as the two exclude each other.

    Args:
        options: the options that the user set.

    Returns:
        {option: (the protocol's value, the option that drops it)}.
    """
    values = protocol_values(options.get("protocol", "none"))
    displaced: dict[str, tuple[Any, str]] = {}
    # The other causes in `DISPLACES` exclude what they drop.
    for cause in ("network", "rounds"):
        if options.get(cause) is None:
            continue
        for name in DISPLACES[cause]:
            if name in values and options.get(name) is None:
                displaced[name] = (values[name], cause)
    return displaced


def protocol_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the protocol that `options` name, without those that `options` replace."""
    values = protocol_values(options.get("protocol", "none"))
    # An option of the user also removes protocol values that would contradict it.
    replaced = _replaced_groups(options) | displaced_options(options)
    return {name: value for name, value in values.items() if name not in replaced}


@cache
def protocol_values(name: str) -> Mapping[str, Any]:
    """Read the options that a protocol sets, the experiment of a paper by its name; "none" sets none."""
    package = resources.files("halfmoon")
    # Some protocols are shared with a recipe, a file of all runs of a paper's table.
    if name in PROTOCOL_RECIPES:
        file = package / "recipes" / f"{PROTOCOL_RECIPES[name]}.toml"
        table = "protocol"
    else:
        file = package / "config" / "protocols.toml"
        table = name
    return toml.parse(file.read_text("utf-8")).get(table, {})


def paper_run_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the paper of the method fixes, without those that `options` replace."""
    from halfmoon.methods import registry  # slow to import: it loads torch

    replaced = _replaced_groups(options)
    values = registry.entry(options.get("method", "feddure")).paper_run
    return {name: value for name, value in values.items() if name not in replaced}


def _replaced_groups(options: Mapping[str, Any]) -> set[str]:
    """Return options that are replaced as a group: one amount of labels by another, a partition by a split."""
    replaced: set[str] = set()
    if any(options.get(name) is not None for name in LABEL_AMOUNTS):
        replaced |= set(LABEL_AMOUNTS)
    if options.get("split") is not None:
        replaced |= set(PARTITION_OPTIONS)
    return replaced


def check_preset(config: Any) -> None:
    """Raise UserError if the preset is "paper" and the method's paper fixes no options."""
    from halfmoon.methods import registry  # slow to import: it loads torch

    if config.preset == "paper" and not registry.entry(config.method).paper_options:
        methods = ", ".join(name for name in registry.names() if registry.entry(name).paper_options)
        raise UserError(f"method {config.method} has no preset 'paper'; the methods that have one: {methods}.")
