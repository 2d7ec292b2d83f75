"""The only table that knows the methods by name."""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal

from halfmoon.errors import UserError, nearest
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.feddb import FedDB
from halfmoon.methods.feddure import FedDure
from halfmoon.methods.fedloke import FedLoKe
from halfmoon.methods.fedmatch import FedMatch
from halfmoon.methods.fedrgd import FedRGD
from halfmoon.methods.fml import FML
from halfmoon.methods.heterofl import HeteroFL
from halfmoon.methods.semifed import SemiFed
from halfmoon.methods.semifl import SemiFL
from halfmoon.objectives import (
    UDA,
    FixMatch,
    MeanTeacher,
    MixMatch,
    Objective,
    PiModel,
    PseudoLabel,
    ReMixMatch,
    Supervised,
)
from halfmoon.types import Method

Place = Literal["clients", "some", "server"]
"""Where labels lie: at every client, at some of them, or at the server alone."""

PLACES: dict[Place, str] = {
    "clients": "every client",
    "some": "some clients",
    "server": "the server",
}


@dataclass(frozen=True)
class Entry:
    """One method of the catalog: `method` carries the default options.

    `places` are the scenarios that it can use; `all_labels` marks a supervised upper bound, which trains on every row
    of the clients as a labeled one; `pooled` a centralized row: all rows in the hands of one client.
    """

    name: str
    title: str
    paper: str
    about: str
    method: Method
    places: tuple[Place, ...] = ("clients", "some")
    all_labels: bool = False
    pooled: bool = False

    @property
    def singles(self) -> str:
        """Return for what the server needs every single upload, nothing where their weighted sum is enough."""
        return self.unsummed("batch")

    def unsummed(self, norm: str) -> str:
        """Return `singles` with a network of this norm."""
        if self.pooled:
            return "all rows lie in one place"
        kind = type(self.method)
        return "" if kind is SemiFL and not self._counts(norm) else _SINGLES.get(kind, "")

    def unrobust(self, aggregation: str, norm: str) -> str:
        """Return why a robust aggregation cannot stand before the method with such a network, nothing where it can."""
        kind = type(self.method)
        if self._counts(norm):
            return f"it counts statistics in a question of their own, where no rule looks; use {_census_less(kind)}"
        return _SINGLES[kind] if kind in _LONE and aggregation != "clip" else ""

    def _counts(self, norm: str) -> bool:
        """Say whether clients are asked to count the statistics of a network with this norm."""
        return type(self.method) in _CENSUS and norm == "batch" and getattr(self.method, "sbn", "") != "server"

    @property
    def labels(self) -> str:
        """Return in words where the method expects labels."""
        if self.all_labels:
            return "all rows (upper bound)"
        if self.pooled:
            return "some of all rows, in one place"
        *others, last = (PLACES[place] for place in self.places)
        return f"{', '.join(others)} or {last}" if others else last


ANYWHERE: tuple[Place, ...] = ("clients", "some", "server")

_SINGLES: dict[type, str] = {
    FedDB: "the weights of its average are computed from each client's mean prediction",
    FedMatch: "the halves of the parameters have weights of their own, and helpers are single clients' models",
    FedRGD: "it averages in groups, and a group may be one client",
    HeteroFL: "each parameter is averaged over the clients whose width has it and who hold its class",
    SemiFed: "clients are sent the models of single other clients",
    SemiFL: "the statistics of a model are put together from each client's own (a sum is enough with sbn 'server', or "
    "with norm 'group' or 'none')",
}
"""Methods that secure aggregation and client-level privacy cannot be put around, and why."""

_LONE = {FedMatch, HeteroFL, SemiFed}
"""Of these, those that mean nothing any more where every client is given the one aggregate."""

_CENSUS = {HeteroFL, SemiFL}
"""Methods of static statistics (`halfmoon.methods.static`)."""


def _census_less(kind: type) -> str:
    """Return the options with which the clients of such a method count no statistics."""
    return "norm 'group' or 'none', or sbn 'server'" if kind is SemiFL else "norm 'group' or 'none'"


@dataclass(frozen=True)
class Option:
    """A hyper-parameter of a method."""

    type: Any
    default: Any


PROX = 0.01
_FEDAVG = "McMahan et al. 2017"
_FEDPROX = "Li et al. 2020"
_FEDDURE = "FedDure, AAAI 2024"
_FEDDB = "FedDB, IJCAI 2024"
_CENTRAL = "SemiFL, NeurIPS 2022, Table 1"


def _central(name: str, title: str, paper: str, about: str, objective: Objective) -> Entry:
    """Return a centralized row: a federation of one, whose optimizer lives on from round to round."""
    return Entry(name, title, paper, about, FedAvg(objective, keep_optimizer=True), ANYWHERE, pooled=True)


_SEMIFL = "SemiFL, NeurIPS 2022"
SEMIFL_PLACES: tuple[Place, ...] = ("server", "clients", "some")

_ENTRIES = (
    Entry("feddure", "FedDure", _FEDDURE, "dual regulators weigh each client's pseudo-labels", FedDure(), ("clients",)),
    Entry(
        "feddure-without-creg",
        "FedDure without C-reg",
        f"{_FEDDURE}, Table 2",
        "the fine-grained regulator alone, trained through the local model",
        FedDure(coarse=False),
        ("clients",),
    ),
    Entry(
        "feddure-without-freg",
        "FedDure without F-reg",
        f"{_FEDDURE}, Table 2",
        "the coarse-grained regulator alone, with a fixed threshold",
        FedDure(fine=False),
        ("clients",),
    ),
    Entry("fedavg", "FedAvg (labeled only)", _FEDAVG, "labeled images only: the floor", FedAvg()),
    Entry(
        "fedavg-sl", "FedAvg-SL (all labels)", _FEDAVG, "all labels: the ceiling", FedAvg(), ANYWHERE, all_labels=True
    ),
    Entry(
        "fedprox-sl",
        "FedProx-SL (all labels)",
        _FEDPROX,
        "all labels, with a proximal term",
        FedAvg(prox=PROX),
        ANYWHERE,
        all_labels=True,
    ),
    Entry(
        "fedavg-uda",
        "FedAvg + UDA",
        f"{_FEDAVG}; Xie et al. 2020",
        "sharpened guesses on weak views teach strong views",
        FedAvg(UDA()),
    ),
    Entry(
        "fedprox-uda",
        "FedProx + UDA",
        f"{_FEDPROX}; Xie et al. 2020",
        "UDA with a proximal term",
        FedAvg(UDA(), prox=PROX),
    ),
    Entry(
        "fedavg-fixmatch",
        "FedAvg + FixMatch",
        f"{_FEDAVG}; Sohn et al. 2020",
        "confident guesses on weak views label strong views",
        FedAvg(FixMatch()),
    ),
    Entry(
        "fedprox-fixmatch",
        "FedProx + FixMatch",
        f"{_FEDPROX}; Sohn et al. 2020",
        "FixMatch with a proximal term",
        FedAvg(FixMatch(), prox=PROX),
    ),
    Entry("feddb", "FedDB", _FEDDB, "pseudo-labels and averages without each client's class bias", FedDB()),
    Entry(
        "fixmatch-feddpl",
        "FixMatch-FedDPL",
        f"{_FEDDB}, Table 4",
        "FedDB's debiased pseudo-labels, averaged by rows",
        FedAvg(FixMatch(labels="round", debias=True, mean="used"), keep_optimizer=True),
    ),
    Entry(
        "supervised",
        "Fully Supervised",
        _CENTRAL,
        "all rows in one place, all with labels: the ceiling of all",
        FedAvg(keep_optimizer=True),
        ANYWHERE,
        all_labels=True,
        pooled=True,
    ),
    _central(
        "partially-supervised", "Partially Supervised", _CENTRAL, "the labeled rows in one place, alone", Supervised()
    ),
    _central("pi-model", "Pi-Model", "Laine and Aila 2017", "two views, one prediction", PiModel()),
    _central(
        "pseudo-label", "Pseudo-Label", "Lee 2013", "the likeliest class becomes the view's own label", PseudoLabel()
    ),
    _central(
        "mean-teacher",
        "Mean Teacher",
        "Tarvainen and Valpola 2017",
        "the average of past models says what a prediction should be",
        MeanTeacher(),
    ),
    _central(
        "mixmatch",
        "MixMatch",
        "Berthelot et al. 2019",
        "sharpened guesses, and mixtures of images and labels",
        MixMatch(),
    ),
    _central("uda", "UDA", "Xie et al. 2020", "sharpened guesses on weak views teach strong views", UDA()),
    _central(
        "remixmatch",
        "ReMixMatch",
        "Berthelot et al. 2020",
        "aligned guesses anchor strong views, mixed and turned",
        ReMixMatch(),
    ),
    _central(
        "fixmatch", "FixMatch", "Sohn et al. 2020", "confident guesses on weak views label strong views", FixMatch()
    ),
    Entry(
        "fedloke",
        "FedLoKe",
        "FedLoKe, CIKM 2023",
        "a private local model and the global one label images for each other",
        FedLoKe(),
    ),
    Entry(
        "fml",
        "FML",
        "Shen et al. 2020; as FedLoKe, CIKM 2023, uses it",
        "a private model and the travelling one teach each other on all images",
        FML(),
    ),
    Entry(
        "semifl",
        "SemiFL",
        _SEMIFL,
        "clients train on rows that they are sure of, and the server on its labels, in turn",
        SemiFL(),
        SEMIFL_PLACES,
    ),
    Entry(
        "semifl-feddpl",
        "SemiFL + FedDPL",
        f"{_SEMIFL}; FedDB, IJCAI 2024",
        "SemiFL with guesses divided by each client's mean prediction",
        SemiFL(debias=True),
        SEMIFL_PLACES,
    ),
    Entry(
        "heterofl",
        "HeteroFL (all labels)",
        "HeteroFL, ICLR 2021",
        "all labels, clients as wide as they can be",
        HeteroFL(),
        ANYWHERE,
        all_labels=True,
    ),
    Entry(
        "fedmatch",
        "FedMatch",
        "FedMatch, ICLR 2021",
        "one half of the parameters learns from labels, the other from guesses that similar clients share",
        FedMatch(),
        ANYWHERE,
    ),
    Entry(
        "fedmatch-feddpl",
        "FedMatch + FedDPL",
        "FedMatch, ICLR 2021; FedDB, IJCAI 2024",
        "FedMatch with its own guesses divided by each client's mean prediction",
        FedMatch(debias=True),
        ANYWHERE,
    ),
    Entry(
        "fedmatch-semifl",
        "FedMatch (SemiFL's version)",
        "FedMatch, ICLR 2021; SemiFL, NeurIPS 2022",
        "halves of the parameters learn from labels and from confident guesses: no helpers, no penalties",
        FedMatch(
            helpers=0,
            tau=0.95,
            labeled_weight=1.0,
            consistency_weight=0.0,
            unlabeled_weight=1.0,
            l2_weight=0.0,
            l1_weight=0.0,
            l1_threshold=0.0,
            delta_threshold=None,
            sigma_start=0.5,
            psi_start=0.5,
            view="weak",
        ),
        ANYWHERE,
    ),
    Entry(
        "fedrgd",
        "FedRGD",
        "FedRGD (SSFL), IEEE BigData 2021",
        "FixMatch, averaged in random groups; meant for norm = 'group'",
        FedRGD(),
        ANYWHERE,
    ),
    Entry(
        "fedrgd-feddpl",
        "FedRGD + FedDPL",
        "FedRGD (SSFL), IEEE BigData 2021; FedDB, IJCAI 2024",
        "FedRGD with guesses divided by each client's mean prediction; meant for norm = 'group'",
        FedRGD(FixMatch(debias=True)),
        ANYWHERE,
    ),
    Entry(
        "semifed",
        "SemiFed",
        "Lin et al. 2021",
        "consistency, and labels for good where enough clients' models agree",
        SemiFed(),
    ),
)


def names() -> list[str]:
    """Return the names of all methods."""
    return [each.name for each in _ENTRIES]


def names_at(place: Place) -> list[str]:
    """Return the names of the federated methods for few labels that can use them at this place."""
    found = (each for each in _ENTRIES if not each.all_labels and not each.pooled)
    return [each.name for each in found if place in each.places]


def entry(name: str) -> Entry:
    """Return a method's row; raises `UserError` with the nearest name for an unknown one."""
    for each in _ENTRIES:
        if each.name == name:
            return each
    raise UserError(f"unknown method '{name}': {nearest(name, names())}")


def options(name: str) -> dict[str, Option]:
    """Return the method's hyper-parameters by name, those of its objective among them."""
    return _options(entry(name).method)


def make(name: str, chosen: dict[str, Any] | None = None) -> Method:
    """Return the method with `chosen` options in place of its defaults; raises `UserError` for an unknown one."""
    method, chosen = entry(name).method, dict(chosen or {})
    unknown = sorted(set(chosen) - set(_options(method)))
    if unknown:
        raise UserError(f"{name} has no option '{unknown[0]}': {nearest(unknown[0], _options(method))}")
    return _with(method, chosen)


def _options(node: Any) -> dict[str, Option]:
    found: dict[str, Option] = {}
    types = _types(type(node))
    for field in fields(node):
        value = node.__dict__[field.name]
        if is_dataclass(value):
            found.update(_options(value))
        else:
            found[field.name] = Option(types[field.name], value)
    return found


@cache
def _types(kind: type) -> dict[str, Any]:
    # Python evaluates the words of every annotation anew each time, and every cell of a sweep asks.
    return typing.get_type_hints(kind)


def _with(node: Any, chosen: dict[str, Any]) -> Any:
    changes: dict[str, Any] = {}
    for field in fields(node):
        value = node.__dict__[field.name]
        if is_dataclass(value):
            changes[field.name] = _with(value, chosen)
        elif field.name in chosen:
            changes[field.name] = chosen[field.name]
    return replace(node, **changes)
