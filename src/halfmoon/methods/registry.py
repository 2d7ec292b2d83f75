"""The catalog of methods: collect the rows (`ROWS`) of each method's file, and build methods by name."""

import importlib
import pkgutil
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, cast

from halfmoon import methods
from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.types import Method
from halfmoon.core import plugins
from halfmoon.core.errors import UserError, suggest
from halfmoon.core.label_locations import LabelLocation
from halfmoon.core.ranges import FINITE, POSITIVE, PROBABILITY, Range, minimum
from halfmoon.methods import objectives
from halfmoon.methods.analytic import ON_FEATURES
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import Objective, Supervised
from halfmoon.methods.objectives.base import FedAvgRow

ORDER = [
    "feddure", "feddure-without-creg", "feddure-without-freg", "fedavg", "fedavg-control", "fedavg-sl", "fedprox-sl", "fedavg-uda",
    "fedprox-uda", "fedavg-fixmatch", "fedprox-fixmatch", "fedavg-fixmatch-global", "fedavg-soft-labels",
    "fixmatch-proxy-tuning", "fedlabel", "sage", "proxyfl", "protofssl", "feddb", "fixmatch-feddpl", "supervised",
    "partially-supervised", "pi-model", "pseudo-label", "mean-teacher", "mixmatch", "uda", "remixmatch", "fixmatch",
    "fedloke", "fml", "semifl", "semifl-feddpl", "cbafed", "twin-sight", "rscfed", "fedirm", "fl2", "fedcon",
    "heterofl", "fedmatch", "fedmatch-feddpl", "fedmatch-semifl", "fedrgd", "fedrgd-feddpl", "semifed",
]  # fmt: skip
"""The order of methods in tables. Methods that are not in this list come last, by name."""

RENAMED = {"tau": "threshold"}
"""Old names of options, with the names of today."""

RECOMMENDED: dict[str, str] = {
    "clients": "fedavg-soft-labels", "some": "fedavg", "server": "fl2", "features": "mixture-head",
}  # fmt: skip
"""Method that `method = "recommended"` selects, by label location, or "features" on a pretrained network's features."""


@dataclass(frozen=True)
class Option:
    """A hyper-parameter of a method: its type annotation and its default."""

    type: Any
    default: Any


def _rows() -> Iterator[MethodEntry]:
    """Yield the catalog entries of all method modules: those that define a tuple `ROWS`."""
    for package in (methods, objectives):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            # This module is still being executed here: importing it would find no `ROWS`.
            if module.name == __name__:
                continue
            for row in vars(importlib.import_module(module.name)).get("ROWS", ()):
                yield _entry(row) if isinstance(row, FedAvgRow) else row


def _entry(row: FedAvgRow) -> MethodEntry:
    """Build the row of FedAvg around an objective. Pooled training keeps its optimizer, for it has one long update."""
    method = FedAvg(row.objective, row.prox, row.keep_optimizer or row.pooled)
    return MethodEntry(*row[:4], method, all_labels=row.all_labels, pooled=row.pooled)


_RANK = {name: rank for rank, name in enumerate(ORDER)}
_LISTED = {row.name: row for row in sorted(_rows(), key=lambda row: (_RANK.get(row.name, len(ORDER)), row.name))}

_UNLISTED = {row.name: row for row in ON_FEATURES}
"""Methods for a frozen backbone with a centered head only: `entry` finds them, `names` does not list them."""


def names() -> list[str]:
    """List the names of all methods: first this package's, then those that installed packages register."""
    return list(_LISTED) + [name for name in plugins.entry_points("method") if name not in _LISTED]


def names_at(location: LabelLocation) -> list[str]:
    """List this package's federated semi-supervised methods that support labels at this location."""
    rows = (row for row in _LISTED.values() if not row.all_labels and not row.pooled)
    return [row.name for row in rows if location in row.label_locations]


def ceilings() -> list[str]:
    """List the names of the supervised upper bounds, which train on all labels."""
    return [name for name in names() if entry(name).all_labels]


def entry(name: str) -> MethodEntry:
    """Look up a method in the catalog, by its name on the command line.

    Listed methods are shown in the catalog; unlisted ones need a network with a head on frozen features. An installed
    plug-in either supplies its entry, or the entry is built from its class: the class name, the first line of its
    docstring, and its attributes `all_labels` and `pooled`, if it has them.

    Raises:
        UserError: the name is unknown; the message suggests the most similar known one.
    """
    if name in _LISTED:
        return _LISTED[name]
    if name in _UNLISTED:
        return _UNLISTED[name]
    if not plugins.is_plugin(name, "method"):
        suggestion = suggest(name, names())
        raise UserError(f"unknown method '{name}': {suggestion}")
    return plugin_entry(name, plugins.load(name, "method"))


def plugin_entry(name: str, plugin: Any) -> MethodEntry:
    """Build the catalog entry of a plug-in, from what it supplies.

    A `MethodEntry` is used as it is, under the plug-in's name. A method (with `round`) is described by its class. An
    objective, the loss of a client, becomes FedAvg with that objective.

    Args:
        name: the plug-in's name on the command line.
        plugin: a method, an objective or a `MethodEntry`, or a class or function that builds one.

    Raises:
        UserError: the plug-in is none of these.
    """
    method = instance(name, plugin)  # calls a class or function
    if isinstance(method, MethodEntry):
        plugins.check_method(name, method.method)
        return replace(method, name=name)
    if isinstance(method, Objective):
        method = FedAvg(method)
    plugins.check_method(name, method)
    # `core` is the objective of FedAvg, and else the method: its class has the docstring and the attributes.
    described_class = cast("type[Any]", type(core(method)))
    return MethodEntry(name=name, method=method, **plugins.catalog_fields(described_class))


def instance(name: str, plugin: Any) -> Any:
    """Instantiate a plug-in if it is a class or a function without arguments; return instances unchanged."""
    # Objectives are callable, so `instantiate_method` would take one for a function that builds a method.
    return plugin if isinstance(plugin, Objective) else plugins.instantiate_method(name, plugin)


def core(method: Any) -> Any:
    """Return the object that describes a method: the objective of FedAvg with a custom objective, else the method."""
    return method.objective if type(method) is FedAvg and method.objective != Supervised() else method


def options(name: str) -> dict[str, Option]:
    """List a method's hyper-parameters by name, including those of its objective."""
    return options_in(entry(name).method)


_PROBABILITY_OPTIONS = frozenset(
    {
        *("threshold", "threshold_last", "threshold_most", "threshold_decay", "confidence", "agree", "decay", "ramp"),
        *("teacher_decay", "server_decay", "target_decay", "prior_decay", "alignment_decay", "server_momentum"),
    }
)
_POSITIVE_OPTIONS = frozenset({"temperature", "concentration"})
_COUNT_OPTIONS = frozenset({"hidden", "projected"})


def option_range(method: str, option: str) -> Range | None:
    """Return the numbers that a numeric option of a method of halfmoon may have, so that a typing error is refused.

    Confidences, shares and decays are from 0 to 1; weights, learning rates and numbers of steps are not negative; others
    may be any finite number. The option's name decides. None, which checks nothing, for methods of other packages.
    """
    if not type(core(entry(method).method)).__module__.startswith("halfmoon."):
        return None
    if option in _PROBABILITY_OPTIONS:
        return PROBABILITY
    if option in _POSITIVE_OPTIONS:
        return POSITIVE
    if option in _COUNT_OPTIONS:
        return minimum(1)
    # Sizes: they may exceed 1, but not be negative.
    is_size = option.endswith(("_weight", "_lr", "_steps", "_threshold", "_factor"))
    if is_size or option in ("prox", "rho", "eta", "delta", "entropy", "beta", "beta_labeled", "warmup"):
        return minimum(0)
    return FINITE


def make(name: str, values: dict[str, Any] | None = None) -> Method:
    """Build a method by name, with some options instead of its defaults.

    Args:
        name: the method's name on the command line.
        values: the options, by name.

    Raises:
        UserError: for an unknown method or option.
    """
    method = entry(name).method
    values = dict(values or {})
    defaults = options_in(method)
    unknown = sorted(set(values) - set(defaults))
    if unknown:
        raise UserError(f"{name} has no option '{unknown[0]}': {hint(unknown[0], defaults)}")
    return with_options(method, values)


def hint(option: str, defaults: dict[str, Option]) -> str:
    """Compose the hint for an option that a method does not have: its new name, or the most similar known one."""
    if RENAMED.get(option) in defaults:
        return f"{option} is now called {RENAMED[option]}."
    return suggest(option, defaults) if defaults else "it has no options."


def options_in(node: Any) -> dict[str, Option]:
    """List the hyper-parameters of a method and, recursively, of its objective or inner method.

    Args:
        node: a method or objective, a dataclass.

    Returns:
        Type and default of each option, by name.
    """
    # An objective or inner method is a field that is a dataclass itself; all other fields are options.
    defaults: dict[str, Option] = {}
    types = _types(cast("type[Any]", type(node)))
    for each in fields(node):
        value = node.__dict__[each.name]
        if is_dataclass(value):
            defaults.update(options_in(value))
        else:
            defaults[each.name] = Option(types[each.name], value)
    return defaults


def unused_options(node: Any) -> dict[str, str]:
    """List the options of a method, with those of its objective, that have no effect beside its other options.

    A method or objective may have a property `unused_options`, a mapping from such options to the reason, which is the
    end of a sentence: "without debias".

    Args:
        node: a method or objective, a dataclass.

    Returns:
        For each option without effect the reason.
    """
    unused = dict(getattr(node, "unused_options", {}))
    for each in fields(node):
        value = node.__dict__[each.name]
        if is_dataclass(value):
            unused |= unused_options(value)
    return unused


@cache
def _types(kind: type) -> dict[str, Any]:
    """Evaluate the type annotations of a class; cached, as Python evaluates them all at each call."""
    return typing.get_type_hints(kind)


def with_options(node: Any, values: dict[str, Any]) -> Any:
    """Replace options of a method and, recursively, of its objective or inner method.

    Args:
        node: a method or objective, a dataclass.
        values: the new values by name; names that it does not have are ignored.

    Returns:
        A copy with the new values.
    """
    changes: dict[str, Any] = {}
    for each in fields(node):
        value = node.__dict__[each.name]
        if is_dataclass(value):
            changes[each.name] = with_options(value, values)
        elif each.name in values:
            changes[each.name] = values[each.name]
    return replace(node, **changes)
