"""Scenarios: who holds which rows and which are labeled, in the settings of FedDure, SemiFL, FedDB, FedLoKe, FedMatch.

FedDure (AAAI 2024) names its settings (labeled, unlabeled); SemiFL (NeurIPS 2022) and FedDB (IJCAI 2024) share their
rules; FedLoKe (CIKM 2023) gives labeled and unlabeled rows one distribution; FedMatch (ICLR 2021) balances labels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple, get_args, get_type_hints

import numpy as np

from halfmoon.api.ranges import Range, at_least
from halfmoon.api.requirements import LabelLocation
from halfmoon.api.split_options import SplitOptions
from halfmoon.core import plugins
from halfmoon.core.errors import UserError, one_line
from halfmoon.data.partition import rules
from halfmoon.data.partition.primitives import (
    deal_evenly,
    draw_labeled,
    named_generator,
    rows_by_client,
    spread_by_dirichlet,
)
from halfmoon.data.partition.rules import RowPool
from halfmoon.data.partition.split import SERVER, Split, SplitOrigin, hash_labels

DEFAULT_LABELS_PER_CLASS = 5


@dataclass(frozen=True)
class Scenario(SplitOptions):
    """Say who holds which rows and which are labeled.

    setting: how the labeled and the unlabeled rows lie among clients:
        iid-iid, iid-dir, dir-dir: evenly in every class (iid) or by Dirichlet (dir);
        semifl-iid, feddb-iid: equal sizes, random classes, the remainder to nobody; labels alike, drawn apart;
        semifl-shards: `classes_per_client` shards of one class each; labels alike, drawn apart;
        semifl-dir, feddb-dir: by Dirichlet, labels alike, drawn apart; feddb-dir has min_size 1 where none is given;
        fedloke: equal sizes, a Dirichlet mix for each client in turn; labels are random rows of the client's own;
        fedloke-balanced: the same, but all clients' mixes are fitted to the classes together;
        pair-dir: even random blocks, each shared by Dirichlet between two clients of equal size; labels alike, drawn
            apart (SAGE);
        fedmatch-iid: labels evenly, the same number of unlabeled rows of every class at every client;
        fedmatch-noniid: labels evenly, half of the unlabeled rows from the class of the client's number;
        fedmatch-stream: fedmatch-noniid, the unlabeled rows seen in `stages`;
        my_module:rule, or a name of the entry point group halfmoon.splits: rule(labels, classes, scenario) returns
        each row's client, int (N,), -1 for nobody and -2 for the server, and which rows are labeled, bool (N,)
    clients: how many clients there are
    dirichlet_alpha: the Dirichlet's concentration; smaller is more uneven
    labels_per_class: labeled images of each class, per client on average; the pool is `clients` times as many
    label_ratio: instead of labels_per_class, the share of each class that is labeled, in (0, 1]
    min_size: fewest rows a client may have in a Dirichlet part; None: a fifth of the mean, 1 to 10
    cap: whether a client that holds its even share gets no further class in a Dirichlet part
    seed: of the split alone, apart from the seed of training
    tries: how often a Dirichlet part is drawn before giving up on min_size
    labels: instead of labels_per_class, the labeled images in all, labels // classes of each class
    labels_at: who holds the labeled pool: all clients, the server, or some clients, by the setting's rule
    labeled_clients: for labels_at "some", how many clients, drawn at random, share the pool
    classes_per_client: shards of a client in semifl-shards
    stages: into how many stages the unlabeled rows of every client are cut at random
    unlabeled_share: the share of every client's unlabeled rows that it has, at least one; the others are nobody's
        (FedLoKe, CIKM 2023, Figure 7)

    In fedloke and fedloke-balanced with labels at clients there is no pool: a labeled client marks
    int(label_ratio * rows) of its own rows, or labels_per_class * classes; classes may be missing among them.

    Raise UserError where a field is out of its range.
    """

    clients: int = 100
    labels_per_class: float | None = DEFAULT_LABELS_PER_CLASS
    cap: bool = True
    seed: int = 0
    tries: int = 100

    def __post_init__(self) -> None:
        other = self.label_ratio is not None or self.labels is not None
        if other and self.labels_per_class == DEFAULT_LABELS_PER_CLASS:
            # A given ratio or number takes the place of the default; a configuration file cannot say "none".
            object.__setattr__(self, "labels_per_class", None)
        _check_fields(self)
        _check_labels(self)

    def split(self, labels: np.ndarray, classes: int | Sequence[str], source: str = "") -> Split:
        """Return the split of rows with these true `labels`, int (N,), in 0..classes-1.

        `classes` is their number or their names (for messages), `source` the data set's name, kept in the
        split. The labeled pool is the first rows of a permutation inside each class. Labeled and unlabeled
        rows are disjoint and drawn from independent streams; a row has one holder or, where the setting drops a
        remainder, none. Raise UserError where the request cannot be met.
        """
        names = [str(c) for c in range(classes)] if isinstance(classes, int) else list(classes)
        totals = _class_totals(self, labels, names)
        if self.setting in _SETTING_RULES:
            client, labeled = self._one_draw(labels, names) if self._joint else self._two_draws(labels, totals, names)
        else:
            client, labeled = _apply_custom_rule(self, labels, len(names))
        if self.unlabeled_share < 1:
            client = rules.drop_unlabeled(
                client, labeled, self.unlabeled_share, named_generator(self.seed, "split", "share")
            )
        origin = SplitOrigin(asdict(self), source, hash_labels(labels))
        return Split(client, labeled, self.clients, origin, _draw_stages(self, client, labeled))

    @property
    def _joint(self) -> bool:
        """Whether labeled rows are marked among those that a client holds, in place of a pool."""
        return (
            self.setting in _SETTING_RULES
            and _SETTING_RULES[self.setting].labeled is None
            and self.labels_at != "server"
        )

    def _two_draws(self, labels: np.ndarray, totals: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return client and labeled where a labeled pool and its complement are shared apart."""
        labeled = draw_labeled(
            labels, _count_labeled_pool(self, totals, names), named_generator(self.seed, "split", "pool")
        )
        client = np.full(len(labels), SERVER, np.int64)
        by_labeled, by_unlabeled = _SETTING_RULES[self.setting]
        if self.labels_at != "server":
            assert by_labeled is not None
            some = _draw_labeled_clients(self)
            got = by_labeled(
                self,
                RowPool(labels[labeled], names, len(some), named_generator(self.seed, "split", "labeled"), "labeled"),
            )
            client[labeled] = np.append(some, -1)[got]  # nobody, -1, stays nobody
        if not labeled.all():
            draw = named_generator(self.seed, "split", "unlabeled")
            client[~labeled] = by_unlabeled(self, RowPool(labels[~labeled], names, self.clients, draw, "unlabeled"))
        return client, labeled

    def _one_draw(self, labels: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return client and labeled where clients mark some of their rows: both kinds have one distribution."""
        size = len(labels) // self.clients
        marked = _count_marked(self, size, len(names))
        draw = named_generator(self.seed, "split", "shared")
        client = _SETTING_RULES[self.setting].unlabeled(self, RowPool(labels, names, self.clients, draw, "shared"))
        labeled = np.zeros(len(labels), bool)
        draw = named_generator(self.seed, "split", "marks")
        some = set(_draw_labeled_clients(self).tolist())
        for k, own in enumerate(rows_by_client(client, self.clients)):
            rows = draw.permutation(own)
            labeled[rows[: marked if k in some else 0]] = True
        return client, labeled


_Rule = Callable[[Scenario, RowPool], np.ndarray]


class _SettingRules(NamedTuple):
    """How a setting shares rows; without a rule for labeled ones they are marked among the others."""

    labeled: _Rule | None
    unlabeled: _Rule


def _share_evenly(scenario: Scenario, part: RowPool) -> np.ndarray:
    part.check()
    return deal_evenly(part.labels, part.clients, part.draw)


def _share_by_dirichlet(scenario: Scenario, part: RowPool, least: int = 10) -> np.ndarray:
    """Spread a part by Dirichlet; without a min_size clients get `least` rows, or fewer where the part is small."""
    min_size = _min_size(scenario, part, least)
    part.check(min_size)
    return spread_by_dirichlet(
        part.labels,
        part.clients,
        scenario.dirichlet_alpha,
        part.draw,
        min_size=min_size,
        cap=scenario.cap,
        tries=scenario.tries,
        what=f"{part.what} images",
    )


def _min_size(scenario: Scenario, part: RowPool, least: int) -> int:
    if scenario.min_size is not None:
        return scenario.min_size
    # The papers ask for 10 where the mean is 50; a fixed 10 cannot be met by smaller pools.
    return max(1, min(least, len(part.labels) // (5 * part.clients)))


def _share_in_pairs(scenario: Scenario, part: RowPool) -> np.ndarray:
    return rules.pair_blocks(scenario, part, _min_size(scenario, part, 10), scenario.tries)


_SETTING_RULES: dict[str, _SettingRules] = {
    "iid-iid": _SettingRules(_share_evenly, _share_evenly),
    "iid-dir": _SettingRules(_share_evenly, _share_by_dirichlet),
    "dir-dir": _SettingRules(_share_by_dirichlet, _share_by_dirichlet),
    "semifl-iid": _SettingRules(rules.cut_evenly, rules.cut_evenly),
    "semifl-shards": _SettingRules(rules.cut_shards, rules.cut_shards),
    "semifl-dir": _SettingRules(_share_by_dirichlet, _share_by_dirichlet),
    "feddb-iid": _SettingRules(rules.cut_evenly, rules.cut_evenly),
    "feddb-dir": _SettingRules(partial(_share_by_dirichlet, least=1), partial(_share_by_dirichlet, least=1)),
    "fedloke": _SettingRules(None, rules.fill_in_turn),
    "fedloke-balanced": _SettingRules(None, rules.fill_together),
    "pair-dir": _SettingRules(_share_in_pairs, _share_in_pairs),
    "fedmatch-iid": _SettingRules(_share_evenly, rules.give_equal_classes),
    "fedmatch-noniid": _SettingRules(_share_evenly, rules.give_peaked),
    "fedmatch-stream": _SettingRules(_share_evenly, rules.give_peaked),
}


SETTINGS = tuple(_SETTING_RULES)
"""The rules of this package; another is named my_module:rule, or announced by an installed package."""


def _apply_custom_rule(scenario: Scenario, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return client and labeled as a rule from outside shares rows; raise UserError where they cannot be."""
    name = scenario.setting
    try:
        client, labeled = plugins.load(name, "split")(labels=labels.copy(), classes=classes, scenario=scenario)
        client, labeled = np.asarray(client), np.asarray(labeled)
    except UserError:
        raise
    except Exception as error:  # whatever somebody else's code does
        raise UserError(f"setting {name} failed ({type(error).__name__}: {one_line(error)[:200]}).") from error
    for what, array, kind in (("client", client, "iu"), ("labeled", labeled, "b")):
        if array.shape != labels.shape or array.dtype.kind not in kind:
            raise UserError(
                f"setting {name}: its {what} is {array.dtype} {array.shape}; it must return client, int "
                f"({len(labels)},), and labeled, bool ({len(labels)},)."
            )
    if client.min() < SERVER or client.max() >= scenario.clients:
        raise UserError(
            f"setting {name} gives rows to client {client.min() if client.min() < SERVER else client.max()}, but "
            f"clients are numbered 0 to {scenario.clients - 1}, the server is {SERVER} and nobody -1."
        )
    return client.astype(np.int64), labeled


def _check_fields(scenario: Scenario) -> None:
    s = scenario
    if s.setting not in _SETTING_RULES and not plugins.is_plugin(s.setting, "split"):
        *most, last = _SETTING_RULES
        raise UserError(f"setting {s.setting!r} is unknown; choose {', '.join(most)} or {last}.")
    for name, hint in get_type_hints(SplitOptions, include_extras=True).items():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, Range):
                each.check(name, getattr(s, name))
    at_least(1).check("tries", s.tries)
    if s.setting == "fedmatch-stream" and s.stages == 1:
        raise UserError("fedmatch-stream has only one stage, which is fedmatch-noniid; set stages to 2 or more.")


def _check_labels(scenario: Scenario) -> None:
    s = scenario
    if sum(each is not None for each in (s.labels_per_class, s.label_ratio, s.labels)) != 1:
        raise UserError("give exactly one of labels_per_class, label_ratio and labels.")
    if s.labels_at not in get_args(LabelLocation):
        raise UserError(f"labels_at {s.labels_at!r} is unknown; choose clients, server or some.")
    if (s.labels_at == "some") != (s.labeled_clients is not None):
        raise UserError(
            f"labeled_clients is {s.labeled_clients} and labels_at is {s.labels_at!r}; give labeled_clients a number "
            "where labels_at is 'some', and nowhere else."
        )
    if s.labeled_clients is not None and not s.labeled_clients <= s.clients:
        raise UserError(f"labeled_clients is {s.labeled_clients}; it must be from 1 to the {s.clients} clients.")
    if s.labels is not None and s._joint:
        raise UserError(
            f"{s.setting} labels random rows of each client, so labels cannot be counted out by class; give "
            "label_ratio or labels_per_class, or set labels_at to 'server'."
        )


def _class_totals(scenario: Scenario, labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return how many rows each class has, int64 (classes,)."""
    if scenario.clients > len(labels):
        raise UserError(f"{scenario.clients} clients cannot share {len(labels)} images; ask for fewer clients.")
    if labels.min() < 0 or labels.max() >= len(names):
        raise UserError(
            f"labels run from {labels.min()} to {labels.max()}, but {len(names)} classes are numbered "
            f"0 to {len(names) - 1}; give all classes."
        )
    totals = np.bincount(labels, minlength=len(names))
    if not totals.min():
        raise UserError(f"class {names[int(totals.argmin())]} has no image; leave it out or add images.")
    return totals


def _count_labeled_pool(scenario: Scenario, totals: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return how many rows of each class are labeled, int64 (classes,)."""
    clients, short = scenario.clients, int(totals.argmin())
    most = int(totals[short])
    if scenario.label_ratio is not None:
        pool = np.floor(totals * scenario.label_ratio + 0.5).astype(np.int64)
        request, remedy = f"label_ratio {scenario.label_ratio:g}", ""
    elif scenario.labels is not None:
        pool = np.full(len(names), scenario.labels // len(names), np.int64)
        request, remedy = f"labels {scenario.labels}", f"set labels to {most * len(names)} or less"
    else:
        assert scenario.labels_per_class is not None
        pool = np.full(len(names), math.floor(clients * scenario.labels_per_class + 0.5), np.int64)
        request = f"labels_per_class {scenario.labels_per_class:g} for {clients} clients"
        remedy = (
            f"set labels_per_class to {_format_decimal(most / clients)} or less, or clients to "
            f"{math.floor(most / scenario.labels_per_class)} or less"
        )
    if pool[short] > most:
        raise UserError(
            f"{request} needs {pool[short]} labeled images of class {names[short]}, which has {most}; {remedy}."
        )
    if not pool.min():
        raise UserError(f"{request} leaves class {names[int(pool.argmin())]} without a label; ask for more labels.")
    return pool


def _count_marked(scenario: Scenario, size: int, classes: int) -> int:
    """Return how many of its `size` rows a labeled client marks where labels come from no pool."""
    if scenario.label_ratio is not None:
        # The authors' int(r * n), but 0.29 * 100 is 29 here.
        marked, request = math.floor(scenario.label_ratio * size + 1e-9), f"label_ratio {scenario.label_ratio:g}"
    else:
        assert scenario.labels_per_class is not None
        marked = math.floor(scenario.labels_per_class * classes + 0.5)
        request = f"labels_per_class {scenario.labels_per_class:g}"
    if not marked:
        raise UserError(f"{request} labels none of the {size} images of a client; ask for more labels.")
    if marked > size:
        raise UserError(
            f"{request} labels {marked} images of each client, which has {size}; set labels_per_class to "
            f"{_format_decimal(size / classes)} or less, or ask for fewer clients."
        )
    return marked


def _draw_labeled_clients(scenario: Scenario) -> np.ndarray:
    if scenario.labeled_clients is None:
        return np.arange(scenario.clients)
    draw = named_generator(scenario.seed, "split", "holders")
    return np.sort(draw.permutation(scenario.clients)[: scenario.labeled_clients])


def _draw_stages(scenario: Scenario, client: np.ndarray, labeled: np.ndarray) -> np.ndarray | None:
    """Return the stage of each row: a client's unlabeled rows in random order, cut into equal parts."""
    stages = scenario.stages
    if stages == 1:
        return None
    draw = named_generator(scenario.seed, "split", "stages")
    stage = np.zeros(len(client), np.int64)
    for k, own in enumerate(rows_by_client(client, scenario.clients)):
        rows = draw.permutation(own[~labeled[own]])
        if len(rows) < stages:
            raise UserError(
                f"client {k} has {len(rows)} unlabeled images, fewer than {stages} stages; ask for fewer stages, fewer "
                "clients or fewer labels."
            )
        stage[rows] = np.arange(len(rows)) * stages // len(rows)
    return stage


def _format_decimal(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")
