"""The only table that knows the methods by name."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, cast

from halfmoon.api.requirements import ANYWHERE, Place, requirements_of
from halfmoon.api.types import Method
from halfmoon.core import plugins
from halfmoon.core.errors import UserError, nearest
from halfmoon.methods.cbafed import CBAFed
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.feddb import FedDB
from halfmoon.methods.feddure import PAPER, PAPER_RUN, FedDure
from halfmoon.methods.fedloke import FedLoKe
from halfmoon.methods.fedmatch import FedMatch
from halfmoon.methods.fedrgd import FedRGD
from halfmoon.methods.fl2 import FL2
from halfmoon.methods.fml import FML
from halfmoon.methods.heterofl import HeteroFL
from halfmoon.methods.objectives import (
    SAGE,
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
from halfmoon.methods.protofssl import ProtoFSSL
from halfmoon.methods.proxyfl import ProxyTuning
from halfmoon.methods.rscfed import RSCFed
from halfmoon.methods.semifed import SemiFed
from halfmoon.methods.semifl import SemiFL
from halfmoon.methods.twinsight import TwinSight

PLACES: dict[Place, str] = {
    "clients": "every client",
    "some": "some clients",
    "server": "the server",
}


@dataclass(frozen=True)
class MethodEntry:
    """One method of the catalog: `method` carries the default options.

    `all_labels` marks a supervised upper bound, which trains on every row of the clients as a labeled one; `pooled` a
    centralized row: all rows in the hands of one client. `paper_options` are the options that the method's paper fixes,
    `paper_run` what it fixes of a run: `preset` "paper" sets both. What the method requires it declares itself
    (`halfmoon.api.requirements`).
    """

    name: str
    title: str
    paper: str
    about: str
    method: Method
    all_labels: bool = False
    pooled: bool = False
    paper_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    paper_run: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def singles(self) -> str:
        """Return for what the server needs every single upload, nothing where their weighted sum is enough."""
        return self.unsummed("batch")

    def unsummed(self, norm: str) -> str:
        """Return `singles` with a network of this norm."""
        if self.pooled:
            return "all rows lie in one place"
        needed = requirements_of(self.method, norm)
        return needed.reason if needed.aggregation == "individual" else ""

    def unrobust(self, aggregation: str, norm: str) -> str:
        """Return why a robust aggregation cannot stand before the method with such a network, nothing where it can."""
        needed = requirements_of(self.method, norm)
        if needed.counts_statistics:
            return f"it counts statistics in a query of their own, where no rule looks; use {needed.counts_statistics}"
        return needed.reason if needed.personal and aggregation != "clip" else ""

    @property
    def places(self) -> tuple[Place, ...]:
        """Return where labels may lie, the expected place first."""
        return ANYWHERE if self.all_labels or self.pooled else requirements_of(self.method).places

    @property
    def labels(self) -> str:
        """Return in words where the method expects labels."""
        if self.all_labels:
            return "all rows (upper bound)"
        if self.pooled:
            return "some of all rows, in one place"
        *others, last = (PLACES[place] for place in self.places)
        return f"{', '.join(others)} or {last}" if others else last


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


def _feddure(name: str, title: str, paper: str, about: str, method: FedDure) -> MethodEntry:
    """Return FedDure or one of its ablations, with what the paper fixes."""
    return MethodEntry(name, title, paper, about, method, paper_options=PAPER, paper_run=PAPER_RUN)


def _central(name: str, title: str, paper: str, about: str, objective: Objective) -> MethodEntry:
    """Return a centralized row: a federation of one, whose optimizer lives on from round to round."""
    return MethodEntry(name, title, paper, about, FedAvg(objective, keep_optimizer=True), pooled=True)


_SEMIFL = "SemiFL, NeurIPS 2022"

_ENTRIES = (
    _feddure("feddure", "FedDure", _FEDDURE, "dual regulators weigh each client's pseudo-labels", FedDure()),
    _feddure(
        "feddure-without-creg",
        "FedDure without C-reg",
        f"{_FEDDURE}, Table 2",
        "the fine-grained regulator alone, trained through the local model",
        FedDure(coarse=False),
    ),
    _feddure(
        "feddure-without-freg",
        "FedDure without F-reg",
        f"{_FEDDURE}, Table 2",
        "the coarse-grained regulator alone, with a fixed threshold",
        FedDure(fine=False),
    ),
    MethodEntry("fedavg", "FedAvg (labeled only)", _FEDAVG, "labeled images only: the floor", FedAvg()),
    MethodEntry("fedavg-sl", "FedAvg-SL (all labels)", _FEDAVG, "all labels: the ceiling", FedAvg(), all_labels=True),
    MethodEntry(
        "fedprox-sl",
        "FedProx-SL (all labels)",
        _FEDPROX,
        "all labels, with a proximal term",
        FedAvg(prox=PROX),
        all_labels=True,
    ),
    MethodEntry(
        "fedavg-uda",
        "FedAvg + UDA",
        f"{_FEDAVG}; Xie et al. 2020",
        "sharpened guesses on weak views teach strong views",
        FedAvg(UDA()),
    ),
    MethodEntry(
        "fedprox-uda",
        "FedProx + UDA",
        f"{_FEDPROX}; Xie et al. 2020",
        "UDA with a proximal term",
        FedAvg(UDA(), prox=PROX),
    ),
    MethodEntry(
        "fedavg-fixmatch",
        "FedAvg + FixMatch",
        f"{_FEDAVG}; Sohn et al. 2020",
        "confident guesses on weak views label strong views",
        FedAvg(FixMatch()),
    ),
    MethodEntry(
        "fedprox-fixmatch",
        "FedProx + FixMatch",
        f"{_FEDPROX}; Sohn et al. 2020",
        "FixMatch with a proximal term",
        FedAvg(FixMatch(), prox=PROX),
    ),
    MethodEntry(
        "fedavg-fixmatch-global",
        "FedAvg + FixMatch, global labels",
        f"{_FEDAVG}; Sohn et al. 2020; SAGE, CVPR 2025",
        "FixMatch with the received model's guesses (FixMatch-GPL)",
        FedAvg(FixMatch(teacher="global")),
    ),
    MethodEntry(
        "fedavg-soft-labels",
        "FedAvg + soft labels",
        f"{_FEDAVG}; Tarvainen and Valpola 2017; Xie et al. 2020",
        "what the averaged model predicts on weak views, sure or not, teaches strong views",
        FedAvg(UDA(threshold=0.0, temperature=1.0, teacher="average")),
    ),
    MethodEntry(
        "fixmatch-proxy-tuning",
        "FixMatch, global labels, proxy tuning",
        "ProxyFL, CVPR 2026, Table 4",
        "FixMatch-GPL with ProxyFL's tuning of the classifier at the server",
        ProxyTuning(FedAvg(FixMatch(teacher="global"))),
    ),
    MethodEntry("sage", "SAGE", "SAGE, CVPR 2025", "local and received model label images together", FedAvg(SAGE())),
    MethodEntry(
        "proxyfl", "ProxyFL", "ProxyFL, CVPR 2026", "features are drawn to proxies of the classes", ProxyTuning()
    ),
    MethodEntry("protofssl", "ProtoFSSL", "Kim et al. 2022", "prototypes of classes, no classifier", ProtoFSSL()),
    MethodEntry("feddb", "FedDB", _FEDDB, "pseudo-labels and averages without each client's class bias", FedDB()),
    MethodEntry(
        "fixmatch-feddpl",
        "FixMatch-FedDPL",
        f"{_FEDDB}, Table 4",
        "FedDB's debiased pseudo-labels, averaged by rows",
        FedAvg(FixMatch(labels="round", debias=True, mean="used"), keep_optimizer=True),
    ),
    MethodEntry(
        "supervised",
        "Fully Supervised",
        _CENTRAL,
        "all rows in one place, all with labels: the ceiling of all",
        FedAvg(keep_optimizer=True),
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
    MethodEntry(
        "fedloke",
        "FedLoKe",
        "FedLoKe, CIKM 2023",
        "a private local model and the global one label images for each other",
        FedLoKe(),
    ),
    MethodEntry(
        "fml",
        "FML",
        "Shen et al. 2020; as FedLoKe, CIKM 2023, uses it",
        "a private model and the travelling one teach each other on all images",
        FML(),
    ),
    MethodEntry(
        "semifl",
        "SemiFL",
        _SEMIFL,
        "clients train on rows that they are sure of, and the server on its labels, in turn",
        SemiFL(),
    ),
    MethodEntry(
        "semifl-feddpl",
        "SemiFL + FedDPL",
        f"{_SEMIFL}; FedDB, IJCAI 2024",
        "SemiFL with guesses divided by each client's mean prediction",
        SemiFL(debias=True),
    ),
    MethodEntry("cbafed", "CBAFed", "CBAFed, CVPR 2023", "thresholds even out the classes", CBAFed()),
    MethodEntry("twin-sight", "Twin-sight", "Twin-sight, ICLR 2024", "a second network without labels", TwinSight()),
    MethodEntry("rscfed", "RSCFed", "RSCFed, CVPR 2022", "averages of random groups by distance", RSCFed()),
    MethodEntry("fl2", "(FL)^2", "(FL)^2, NeurIPS 2024", "SemiFL for very few labels, by three changes", FL2()),
    MethodEntry(
        "heterofl",
        "HeteroFL (all labels)",
        "HeteroFL, ICLR 2021",
        "all labels, clients as wide as they can be",
        HeteroFL(),
        all_labels=True,
    ),
    MethodEntry(
        "fedmatch",
        "FedMatch",
        "FedMatch, ICLR 2021",
        "one half of the parameters learns from labels, the other from guesses that similar clients share",
        FedMatch(),
    ),
    MethodEntry(
        "fedmatch-feddpl",
        "FedMatch + FedDPL",
        "FedMatch, ICLR 2021; FedDB, IJCAI 2024",
        "FedMatch with its own guesses divided by each client's mean prediction",
        FedMatch(debias=True),
    ),
    MethodEntry(
        "fedmatch-semifl",
        "FedMatch, SemiFL's version",
        "SemiFL, NeurIPS 2022, Table 1",
        "half of each kernel learns from labels, half from confident guesses; no helpers, no penalties",
        SemiFL(labels="step", mix_weight=0.0, halves=True),
    ),
    MethodEntry(
        "fedrgd",
        "FedRGD",
        "FedRGD (SSFL), IEEE BigData 2021",
        "FixMatch, averaged in random groups; meant for norm = 'group'",
        FedRGD(),
    ),
    MethodEntry(
        "fedrgd-feddpl",
        "FedRGD + FedDPL",
        "FedRGD (SSFL), IEEE BigData 2021; FedDB, IJCAI 2024",
        "FedRGD with guesses divided by each client's mean prediction; meant for norm = 'group'",
        FedRGD(FixMatch(debias=True)),
    ),
    MethodEntry(
        "semifed",
        "SemiFed",
        "Lin et al. 2021",
        "consistency, and labels for good where enough clients' models agree",
        SemiFed(),
    ),
)


_OURS = {each.name: each for each in _ENTRIES}


RECOMMENDED: dict[str, str] = {"clients": "fedavg-soft-labels", "some": "cbafed", "server": "fl2"}
"""What `method = "recommended"` stands for, by where labels lie; docs/choosing.md has the evidence, and its limits."""


def names() -> list[str]:
    """Return the names of all methods, those that installed packages announce last."""
    return [each.name for each in _ENTRIES] + [name for name in plugins.announced("method") if name not in _OURS]


def names_at(place: Place) -> list[str]:
    """Return the names of this package's federated methods for few labels that can use them at this place."""
    found = (each for each in _ENTRIES if not each.all_labels and not each.pooled)
    return [each.name for each in found if place in each.places]


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
    if not plugins.foreign(name, "method"):
        near = nearest(name, names())
        raise UserError(f"unknown method '{name}': {near}")
    return row(name, plugins.load(name, "method"))


def row(name: str, part: Any) -> MethodEntry:
    """Return the row of a method from outside; raise `UserError` where it is no method."""
    made = plugins.called(name, part)
    if isinstance(made, MethodEntry):
        plugins.check_method(name, made.method)
        return replace(made, name=name)
    plugins.check_method(name, made)
    return MethodEntry(name=name, method=made, **plugins.said_of(cast("type[Any]", type(made))))


def options(name: str) -> dict[str, Option]:
    """Return the method's hyper-parameters by name, those of its objective among them."""
    return options_in(entry(name).method)


def make(name: str, chosen: dict[str, Any] | None = None) -> Method:
    """Return the method with `chosen` options in place of its defaults; raises `UserError` for an unknown one."""
    method, chosen = entry(name).method, dict(chosen or {})
    unknown = sorted(set(chosen) - set(options_in(method)))
    if unknown:
        raise UserError(f"{name} has no option '{unknown[0]}': {nearest(unknown[0], options_in(method))}")
    return with_options(method, chosen)


def options_in(node: Any) -> dict[str, Option]:
    """Return the fields of a method, and of its objective, that are options."""
    found: dict[str, Option] = {}
    types = _types(cast("type[Any]", type(node)))
    for each in fields(node):
        value = node.__dict__[each.name]
        if is_dataclass(value):
            found.update(options_in(value))
        else:
            found[each.name] = Option(types[each.name], value)
    return found


@cache
def _types(kind: type) -> dict[str, Any]:
    # Python evaluates the words of every annotation anew each time, and every cell of a sweep asks.
    return typing.get_type_hints(kind)


def with_options(node: Any, chosen: dict[str, Any]) -> Any:
    """Return a method with these options in place of its own, its objective's among them."""
    changes: dict[str, Any] = {}
    for each in fields(node):
        value = node.__dict__[each.name]
        if is_dataclass(value):
            changes[each.name] = with_options(value, chosen)
        elif each.name in chosen:
            changes[each.name] = chosen[each.name]
    return replace(node, **changes)
