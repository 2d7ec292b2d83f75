"""Networks by name: those of this package, and any `torch.nn.Module` that a factory from outside makes."""

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

import torch

from halfmoon.core import hubs, plugins, tree
from halfmoon.core.errors import UserError, suggest
from halfmoon.core.memory import machine_memory
from halfmoon.models import NETWORKS, Network
from halfmoon.models.modules import ModuleNetwork, from_factory
from halfmoon.models.passes import Norm

MAX_UNCHECKED_WIDTH = 128
"""The width up to which every network fits any machine."""

PROBED_WIDTH_STEP = 192
"""Widths at which parameters are counted, to extrapolate: this one, twice and three times as many."""


def names() -> list[str]:
    """List the names of this package's networks, then of those that installed packages register."""
    return [*NETWORKS, *plugins.entry_points("network")]


def make(name: str, channels: int, classes: int, size: tuple[int, int], norm: str, width: int | None) -> Network:
    """Create a network by name.

    Args:
        name: a name of `names`, or of a factory outside of this package.
        channels: channels of images.
        classes: number of classes.
        size: height and width of images.
        norm: kind of normalization: "batch", "group" or "none".
        width: factor of the layers' sizes; None: the network's default.

    Raises:
        UserError: the network is unknown, does not fit the options, or is too large for this machine.
    """
    if name in NETWORKS:
        width_option: dict[str, Any] = {} if width is None else {"width": width}
        if NETWORKS[name].fixed_norm:
            norm = _check_fixed_norm(name, norm)
        network = NETWORKS[name](channels=channels, classes=classes, norm=norm, **width_option)  # type: ignore[arg-type]
        _check_size(name, network)
        return network
    if width is not None:
        raise UserError(f"width is {width}, but network {name} comes from outside and has its own: leave width out.")
    _check_fixed_norm(name, norm)
    return from_factory(name, channels, classes, size)


def count_parameters(network: Network) -> int:
    """Count the parameters of a network of this package without building it.

    The number is a quadratic function of the width, so it is extrapolated from three narrow networks on the "meta"
    device. A very wide one would exceed the sizes that a tensor can have.
    """
    step = PROBED_WIDTH_STEP
    counts: list[int] = []
    with torch.device("meta"):  # shapes only
        for width in (step, 2 * step, 3 * step):
            counts.append(tree.numel(replace(network, width=width).init(torch.Generator())["params"]))
    first, second, third = counts
    # Newton's forward differences: a linear and a quadratic term in the distance from the first width.
    distance = network.width - step
    linear_term = (second - first) * distance // step
    quadratic_term = (third - 2 * second + first) * distance * (distance - step) // (2 * step**2)
    return first + linear_term + quadratic_term


def _check_size(name: str, network: Network) -> None:
    """Check that the parameters of a network, in float32, fit this machine's memory; raise `UserError` if not."""
    if network.width <= MAX_UNCHECKED_WIDTH:
        return
    memory = machine_memory()
    size = 4 * count_parameters(network)  # bytes: a float32 has four
    if memory is not None and size > memory:
        raise UserError(
            f"width is {network.width}: network {name} would take {size:,} bytes for its parameters alone, but this "
            f"machine's memory has {memory:,}; choose a smaller width."
        )


def describe(network: Network) -> dict[str, Any]:
    """Describe a network as JSON values, from which `from_description` recreates it."""
    if isinstance(network, ModuleNetwork):
        values = {"channels": network.channels, "classes": network.classes, "size": list(network.size)}
        return {"name": network.name, **values}
    (name,) = [name for name, kind in NETWORKS.items() if type(network) is kind]
    values = {each.name: getattr(network, each.name) for each in fields(network)}
    del values["precision"]  # only for training; the description is for evaluation and export
    return {"name": name, **values}


def from_description(description: Mapping[str, Any]) -> Network:
    """Create a network from its description in a file or message, which `describe` has written.

    Args:
        description: "name" and options of the network; it is checked, as files and messages may be damaged.

    Raises:
        UserError: the network is unknown, or an option is unknown or has another type. Messages are ends of a sentence
            that the caller begins.
    """
    name = str(description.get("name"))
    values = {key: value for key, value in description.items() if key != "name"}
    if name not in NETWORKS:
        return _external_from_description(name, values)
    # The precision is a setting of training, which a description does not have.
    options = {each.name: each for each in fields(NETWORKS[name]) if each.name != "precision"}
    for key, value in values.items():
        option = options.get(key)
        if option is None:
            raise UserError(f"it has no {key!r}")
        # Options without a default are channels and classes.
        kind = int if option.default is MISSING else type(option.default)
        if type(value) is not kind or (kind is int and value < 1):
            raise UserError(f"{key} is {value!r}")
    return NETWORKS[name](**values)


def _check_fixed_norm(name: str, norm: str) -> Norm:
    """Check that the option `norm` has its default for a network whose normalization cannot be chosen."""
    if norm not in ("batch", "none"):
        raise UserError(f"norm is {norm!r}, but network {name} brings its own normalization: leave norm out.")
    return "none"


def _external_from_description(name: str, values: Mapping[str, Any]) -> Network:
    """Create a network that is not of this package from its description: one of a known package, or a plug-in.

    Known packages are transformers, torchvision and timm. The description may come from another machine, so it may name
    neither files nor code that the user has not permitted.

    Args:
        name: the network's name.
        values: "channels", "classes" and "size" [height, width].

    Raises:
        UserError: the network is unknown or may not be loaded, or a value is invalid.
    """
    is_from_hub = hubs.package_of(name) is not None
    hubs.check_portable(name)  # raises an error for a name that only the sender's machine can resolve
    if not is_from_hub and not plugins.is_plugin(name, "network"):
        raise UserError(f"this halfmoon has no network {name!r}: {suggest(name, names())}")
    size = values.get("size")
    numbers = [values.get("channels"), values.get("classes"), *(size if isinstance(size, list) else ())]
    if len(numbers) != 4 or not all(type(each) is int and each > 0 for each in numbers):
        raise UserError(f"channels, classes and size are {numbers}")
    if not is_from_hub:
        plugins.load(name, "network")  # also if it is imported already, because this checks the permission to load it
    return from_factory(name, numbers[0], numbers[1], (numbers[2], numbers[3]))
