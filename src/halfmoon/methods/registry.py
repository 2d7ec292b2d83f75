"""The catalog of methods: it collects the rows that stand in each method's own file."""

import importlib
import pkgutil
import typing
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, cast

from halfmoon import methods
from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import LabelLocation
from halfmoon.api.types import Method
from halfmoon.core import plugins
from halfmoon.core.errors import UserError, suggest
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
"""The order of methods in tables; one that is not named here comes last."""

RENAMED = {"tau": "threshold"}
"""Options by their names in older versions, with those of today."""

RECOMMENDED: dict[str, str] = {
    "clients": "fedavg-soft-labels", "some": "fedavg", "server": "fl2", "features": "mixture-head",
}  # fmt: skip
"""What `method = "recommended"` stands for on a pretrained network's features, or else by where labels lie."""


@dataclass(frozen=True)
class Option:
    """A hyper-parameter of a method."""

    type: Any
    default: Any


def _rows() -> Iterator[MethodEntry]:
    """Yield the rows of all modules of this package that have some."""
    for package in (methods, objectives):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if module.name == __name__:
                continue
            for row in vars(importlib.import_module(module.name)).get("ROWS", ()):
                yield _entry(row) if isinstance(row, FedAvgRow) else row


def _entry(row: FedAvgRow) -> MethodEntry:
    method = FedAvg(row.objective, row.prox, row.keep_optimizer or row.pooled)
    return MethodEntry(*row[:4], method, all_labels=row.all_labels, pooled=row.pooled)


_PLACE = {name: place for place, name in enumerate(ORDER)}
_OURS = {row.name: row for row in sorted(_rows(), key=lambda row: (_PLACE.get(row.name, len(ORDER)), row.name))}

_UNLISTED = {row.name: row for row in ON_FEATURES}
"""Methods for a frozen backbone with a centered head only: `entry` has them, `names` does not."""


def names() -> list[str]:
    """Return the names of all methods, those that installed packages announce last."""
    return list(_OURS) + [name for name in plugins.entry_points("method") if name not in _OURS]


def names_at(place: LabelLocation) -> list[str]:
    """Return the names of this package's federated methods for few labels that can use them at this place."""
    rows = (row for row in _OURS.values() if not row.all_labels and not row.pooled)
    return [row.name for row in rows if place in row.label_locations]


def ceilings() -> list[str]:
    """Return the names of the supervised upper bounds."""
    return [name for name in names() if entry(name).all_labels]


def entry(name: str) -> MethodEntry:
    """Return a method's row; raises `UserError` with the nearest name for an unknown one.

    A method from outside has the row that it gives itself, or one made of its class: its name, the first line of its
    docstring, and `all_labels` and `pooled` where it says them.
    """
    if name in _OURS:
        return _OURS[name]
    if name in _UNLISTED:
        return _UNLISTED[name]
    if not plugins.is_plugin(name, "method"):
        near = suggest(name, names())
        raise UserError(f"unknown method '{name}': {near}")
    return row(name, plugins.load(name, "method"))


def row(name: str, part: Any) -> MethodEntry:
    """Return the row of a method from outside; raise `UserError` where it is no method.

    An objective stands for FedAvg around it, and gives the row its own words.
    """
    method = instance(name, part)
    if isinstance(method, MethodEntry):
        plugins.check_method(name, method.method)
        return replace(method, name=name)
    if isinstance(method, Objective):
        method = FedAvg(method)
    plugins.check_method(name, method)
    return MethodEntry(name=name, method=method, **plugins.catalog_fields(cast("type[Any]", type(core(method)))))


def instance(name: str, part: Any) -> Any:
    """Return the method, objective or row that a class or a function of no arguments makes; others stay as they are."""
    return part if isinstance(part, Objective) else plugins.instantiate_method(name, part)


def core(method: Any) -> Any:
    """Return what tells a method from others: of FedAvg around an objective that objective, else the method."""
    return method.objective if type(method) is FedAvg and method.objective != Supervised() else method


def options(name: str) -> dict[str, Option]:
    """Return the method's hyper-parameters by name, those of its objective among them."""
    return options_in(entry(name).method)


def make(name: str, values: dict[str, Any] | None = None) -> Method:
    """Return the method with `values` options in place of its defaults; raises `UserError` for an unknown one."""
    method, values = entry(name).method, dict(values or {})
    defaults = options_in(method)
    for option in sorted(set(values) - set(defaults)):
        raise UserError(f"{name} has no option '{option}': {hint(option, defaults)}")
    return with_options(method, values)


def hint(option: str, defaults: dict[str, Option]) -> str:
    """Return what to say of an option that a method does not have: its new name, or the nearest of those it has."""
    if RENAMED.get(option) in defaults:
        return f"{option} is now called {RENAMED[option]}."
    return suggest(option, defaults) if defaults else "it has no options of its own."


def options_in(node: Any) -> dict[str, Option]:
    """Return the fields of a method, and of its objective, that are options."""
    table: dict[str, Option] = {}
    types = _types(cast("type[Any]", type(node)))
    for each in fields(node):
        value = node.__dict__[each.name]
        if is_dataclass(value):
            table.update(options_in(value))
        else:
            table[each.name] = Option(types[each.name], value)
    return table


@cache
def _types(kind: type) -> dict[str, Any]:
    # Python evaluates the words of every annotation anew each time, and every cell of a sweep asks.
    return typing.get_type_hints(kind)


def with_options(node: Any, values: dict[str, Any]) -> Any:
    """Return a method with these options in place of its own, its objective's among them."""
    changes: dict[str, Any] = {}
    for each in fields(node):
        value = node.__dict__[each.name]
        if is_dataclass(value):
            changes[each.name] = with_options(value, values)
        elif each.name in values:
            changes[each.name] = values[each.name]
    return replace(node, **changes)
