"""Scenarios: partition rows among clients and select the labeled ones, as in FedDure, SemiFL, FedDB, FedLoKe, FedMatch.

FedDure (AAAI 2024) names its settings (labeled, unlabeled). SemiFL (NeurIPS 2022) and FedDB (IJCAI 2024) have the same
rules. FedLoKe (CIKM 2023) has one distribution for labeled and unlabeled rows. FedMatch (ICLR 2021) balances labels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np

from halfmoon.core import plugins
from halfmoon.core.errors import UserError, one_line
from halfmoon.core.label_locations import LabelLocation
from halfmoon.core.ranges import Range, minimum
from halfmoon.core.split_options import DEFAULT_LABELS_PER_CLASS, SplitOptions
from halfmoon.data.images import UNKNOWN
from halfmoon.data.partition import rules
from halfmoon.data.partition.primitives import (
    draw_labeled,
    named_generator,
    rows_by_client,
    spread_by_dirichlet,
    spread_evenly,
)
from halfmoon.data.partition.rules import RowPool
from halfmoon.data.partition.split import SERVER, Split, SplitOrigin, hash_labels


@dataclass(frozen=True)
class Scenario(SplitOptions):
    """Partition rows among clients and select the labeled ones.

    A row is an image of the data set. Unless stated otherwise, labeled and unlabeled rows are partitioned by the same
    rule with independent draws.

    setting: the rule that partitions labeled and unlabeled rows:
        iid-iid, iid-dir, dir-dir: labeled and unlabeled rows evenly in every class (iid) or by Dirichlet (dir);
        semifl-iid, feddb-iid: equal sizes, random classes, the remainder unused;
        semifl-shards: `classes_per_client` shards of one class each;
        semifl-dir, feddb-dir: by Dirichlet; the default of min_size is 1 for feddb-dir;
        fedloke: equal sizes, a Dirichlet mix for each client in turn; labels for random rows of each client;
        fedloke-balanced: the same, but the mixes of all clients are fitted to the classes jointly;
        pair-dir: random blocks of equal size, each divided by Dirichlet between two clients of equal size (SAGE);
        fedmatch-iid: labels evenly, the same number of unlabeled rows of every class at every client;
        fedmatch-noniid: labels evenly, half of the unlabeled rows from the class of the client's number;
        fedmatch-stream: fedmatch-noniid, with unlabeled rows that arrive in `stages`;
        my_module:rule, or a name of the entry point group halfmoon.splits: rule(labels, classes, scenario) returns
        the client of each row, int (N,), -1 for none and -2 for the server, and the labeled rows, bool (N,)
    clients: number of clients
    dirichlet_alpha: concentration of the Dirichlet distribution; smaller is more uneven
    labels_per_class: labeled images of each class, per client on average; the pool is `clients` times as many
    label_ratio: instead of labels_per_class, the share of each class that is labeled, in (0, 1]
    min_size: fewest rows of a client in a Dirichlet partition; None: a fifth of the mean, 1 to 10
    cap: True if a client with an even share gets no further class in a Dirichlet partition
    seed: seed of the split, independent of the seed of training
    tries: number of Dirichlet draws before an error about min_size
    labels: instead of labels_per_class, the total number of labeled images, labels // classes of each class
    labels_at: location of the labeled pool: all clients, the server, or some clients, by the setting's rule
    labeled_clients: for labels_at "some", the number of clients, drawn at random, that have labels
    classes_per_client: shards of a client in semifl-shards
    stages: number of stages into which the unlabeled rows of every client are divided at random
    unlabeled_share: share of every client's unlabeled rows that is used, at least one row; the rest is unused
        (FedLoKe, CIKM 2023, Figure 7)
    unknown_share: share of every client's unlabeled rows that are of unknown classes, see `split_open_set`

    Examples:
        >>> split = halfmoon.Scenario(setting="iid-dir", clients=5, labels_per_class=2.0).split(y, classes=10)

    In fedloke and fedloke-balanced with labels at clients there is no pool: int(label_ratio * rows) random rows of a
    labeled client are labeled, or labels_per_class * classes; some classes may have no label.

    Raises:
        UserError: If a field is out of its range.
    """

    labels_per_class: float | None = DEFAULT_LABELS_PER_CLASS
    cap: bool = True
    seed: int = 0
    tries: int = 100

    def __post_init__(self) -> None:
        has_other_amount = self.label_ratio is not None or self.labels is not None
        if has_other_amount and self.labels_per_class == DEFAULT_LABELS_PER_CLASS:
            # A ratio or number replaces the default: a configuration file cannot set labels_per_class to None.
            object.__setattr__(self, "labels_per_class", None)
        _check_fields(self)
        _check_labels(self)

    def split(self, labels: np.ndarray, classes: int | Sequence[str], source: str = "") -> Split:
        """Draw the split of a data set: the client of each row (image), and which rows are labeled.

        There are three kinds of settings. A custom one calls the user's rule. In a joint one, all rows are partitioned
        by one rule, then random rows of each client are labeled. In a separate one, the labeled rows (the first ones of
        a permutation inside each class) are drawn, then labeled and unlabeled rows are partitioned with independent
        random numbers.

        Args:
            labels: The true label of each row, int (N,), 0 to classes - 1.
            classes: The number of classes, or their names for error messages.
            source: The name of the data set, stored in the split.

        Returns:
            The split. A row has one client or, if the setting drops a remainder, none.

        Raises:
            UserError: If the data set is too small for the request.
        """
        names = [str(c) for c in range(classes)] if isinstance(classes, int) else list(classes)
        totals = _class_totals(self, labels, names)
        if self.setting not in _SETTING_RULES:
            client, labeled = _apply_custom_rule(self, labels, len(names))
        elif self._joint:
            client, labeled = self._draw_jointly(labels, names)
        else:
            client, labeled = self._draw_separately(labels, totals, names)
        if self.unlabeled_share < 1:
            generator = named_generator(self.seed, "split", "share")
            client = rules.reduce_unlabeled(client, labeled, self.unlabeled_share, generator)
        origin = SplitOrigin(_origin_fields(self), source, hash_labels(labels))
        return Split(client, labeled, self.clients, origin, _draw_stages(self, client, labeled))

    def split_partially_labeled(
        self, labels: np.ndarray, classes: Sequence[str], source: str = "", client: np.ndarray | None = None
    ) -> Split:
        """Draw the split of a data set whose clients are known, or some of whose images have no label.

        If any image has no label, all images with a label are the labeled ones of the split; otherwise the labeled ones
        are drawn as by `split`. Unless `client` is given, labeled images are partitioned by the rule of the setting,
        and those without a label evenly at random. A data set with all labels and without `client` is passed to
        `split`.

        Args:
            labels: The label of each row, int (N,), -1 if unlabeled.
            classes: The class names.
            source: The name of the data set, stored in the split.
            client: The client of each row, int64 (N,); None for the rule of the setting.

        Raises:
            UserError: If the data set is too small for the request, the setting needs the labels of all images, or
                labels_at is "some" (labels are at some drawn clients) together with `client`.
        """
        names = list(classes)
        is_known = labels != UNKNOWN
        if client is None and is_known.all():
            return self.split(labels, classes, source)
        totals = _class_totals(self, labels[is_known], names)
        labeled = is_known
        if is_known.all():  # the data set has all labels: hide those of all but the labeled pool
            pool_counts = _count_labeled_pool(self, totals, names)
            labeled = draw_labeled(labels, pool_counts, named_generator(self.seed, "split", "pool"))
        if client is None:
            client = self._draw_partially_labeled(labels, names)
        elif self.labels_at == "some":
            raise UserError("labels_at is 'some', but clients names the client of each image; leave labels_at out.")
        if self.labels_at == "server":
            client = np.where(labeled, SERVER, client)  # SERVER = -2; clients have unlabeled images only
        if self.unlabeled_share < 1:
            generator = named_generator(self.seed, "split", "share")
            client = rules.reduce_unlabeled(client, labeled, self.unlabeled_share, generator)
        origin = SplitOrigin(_origin_fields(self), source, hash_labels(labels))
        return Split(client, labeled, self.clients, origin, _draw_stages(self, client, labeled))

    def split_open_set(self, labels: np.ndarray, classes: Sequence[str], source: str = "") -> Split:
        """Draw the split of a data set some of whose images are of no known class; clients get these as unlabeled ones.

        It simulates an open set, in which unlabeled images may be of none of the classes to be learned.

        The known rows are split as by `split`. Then a share of every client's unlabeled rows, `unknown_share`, is
        replaced by random rows of unknown classes, so that no client has more unlabeled rows than before (Oliver et al.,
        NeurIPS 2018, Realistic evaluation of deep semi-supervised learning algorithms, section 4.4). The replaced rows,
        and unknown rows that are not needed, are at no client.

        Args:
            labels: The label of each row, int (N,), -1 if its class is unknown.
            classes: The names of the known classes.
            source: The name of the data set, stored in the split.

        Raises:
            UserError: If the data set is too small for the request, or has too few rows of unknown classes.
        """
        known_rows = np.flatnonzero(labels != UNKNOWN)
        known_split = self.split(labels[known_rows], classes)
        client = np.full(len(labels), -1, np.int64)
        client[known_rows] = known_split.client
        labeled = np.zeros(len(labels), bool)
        labeled[known_rows] = known_split.labeled
        if self.unknown_share:
            generator = named_generator(self.seed, "split", "unknown")
            is_unknown = labels == UNKNOWN
            client = rules.replace_by_unknown(client, labeled, is_unknown, self.unknown_share, generator)
        origin = SplitOrigin(_origin_fields(self), source, hash_labels(labels))
        return Split(client, labeled, self.clients, origin, _draw_stages(self, client, labeled))

    def _draw_partially_labeled(self, labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Partition rows with a label by the setting's rule, and those without one evenly at random.

        Args:
            labels: The label of each row, int (N,), `UNKNOWN` for none.
            names: The class names.

        Returns:
            The client of each row, int64 (N,); `SERVER` for all rows with a label if labels are at the server.

        Raises:
            UserError: If the setting has no rule for labeled rows: it is a custom or a joint one.
        """
        labeled_rule = _SETTING_RULES[self.setting].labeled if self.setting in _SETTING_RULES else None
        if labeled_rule is None:
            raise UserError(
                f"setting {self.setting} needs the labels of all images, but {int((labels == UNKNOWN).sum()):,} have "
                "none; choose dir-dir or iid-iid, or give clients, one id for each image."
            )
        is_known = labels != UNKNOWN
        client = np.full(len(labels), SERVER, np.int64)
        if self.labels_at != "server":
            labeled_clients = _draw_labeled_clients(self)
            generator = named_generator(self.seed, "split", "labeled")
            row_pool = RowPool(labels[is_known], names, len(labeled_clients), generator, kind="labeled")
            client[is_known] = _to_client_numbers(labeled_rule(self, row_pool), labeled_clients)
        generator = named_generator(self.seed, "split", "unlabeled")
        # Without labels, all rows count as one class, which is spread evenly.
        one_class = np.zeros(int((~is_known).sum()), np.int64)
        client[~is_known] = spread_evenly(one_class, self.clients, generator)
        return client

    @property
    def _joint(self) -> bool:
        """True if labeled rows are selected from each client's rows instead of a pool."""
        return (
            self.setting in _SETTING_RULES
            and _SETTING_RULES[self.setting].labeled is None
            and self.labels_at != "server"
        )

    def _draw_separately(
        self, labels: np.ndarray, totals: np.ndarray, names: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw labeled rows from all rows, then partition labeled and unlabeled rows separately.

        Args:
            labels: The label of each row, int (N,).
            totals: The number of rows of each class, (classes,).
            names: The class names.

        Returns:
            The client of each row, int64 (N,), `SERVER` for labeled rows if labels are at the server; and the labeled
            rows, bool (N,).
        """
        pool_counts = _count_labeled_pool(self, totals, names)
        labeled = draw_labeled(labels, pool_counts, named_generator(self.seed, "split", "pool"))
        client = np.full(len(labels), SERVER, np.int64)
        labeled_rule, unlabeled_rule = _SETTING_RULES[self.setting]
        if self.labels_at != "server":
            assert labeled_rule is not None  # only joint settings have none
            labeled_clients = _draw_labeled_clients(self)
            generator = named_generator(self.seed, "split", "labeled")
            row_pool = RowPool(labels[labeled], names, len(labeled_clients), generator, kind="labeled")
            client[labeled] = _to_client_numbers(labeled_rule(self, row_pool), labeled_clients)
        if not labeled.all():
            generator = named_generator(self.seed, "split", "unlabeled")
            row_pool = RowPool(labels[~labeled], names, self.clients, generator, kind="unlabeled")
            client[~labeled] = unlabeled_rule(self, row_pool)
        return client, labeled

    def _draw_jointly(self, labels: np.ndarray, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Partition all rows, then label random rows of each client: both kinds of rows have the same distribution.

        Args:
            labels: The label of each row, int (N,).
            names: The class names.

        Returns:
            The client of each row, int64 (N,), -1 for none, and the labeled rows, bool (N,).
        """
        size = len(labels) // self.clients  # of each client: the rules of joint settings give all clients equal sizes
        labels_per_client = _count_labels_per_client(self, size, len(names))
        generator = named_generator(self.seed, "split", "shared")
        partition_rule = _SETTING_RULES[self.setting].unlabeled
        client = partition_rule(self, RowPool(labels, names, self.clients, generator, kind="shared"))
        labeled = np.zeros(len(labels), bool)
        generator = named_generator(self.seed, "split", "marks")
        labeled_clients = set(_draw_labeled_clients(self).tolist())
        for client_number, client_rows in enumerate(rows_by_client(client, self.clients)):
            # Drawn for every client, so that the rows of one do not depend on which other clients have labels.
            rows = generator.permutation(client_rows)
            if client_number in labeled_clients:
                labeled[rows[:labels_per_client]] = True
        return client, labeled


def _to_client_numbers(positions: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Translate a rule's numbering of the clients that have labels, from 0, to the numbers of these clients.

    Args:
        positions: The position in `clients` for each row, int (N,); -1 for no client.
        clients: Client numbers, int64, ascending.

    Returns:
        The client of each row, int64 (N,); -1 for no client.
    """
    # Index -1 selects the appended last element, which is -1 again.
    return np.append(clients, -1)[positions]


_Rule = Callable[[Scenario, RowPool], np.ndarray]


class _SettingRules(NamedTuple):
    """The rules of a setting. If `labeled` is None, labels are drawn from the rows of each client."""

    labeled: _Rule | None
    unlabeled: _Rule


def _partition_evenly(scenario: Scenario, row_pool: RowPool) -> np.ndarray:
    """Partition a pool evenly in every class."""
    row_pool.check()
    return spread_evenly(row_pool.labels, row_pool.clients, row_pool.generator)


def _partition_by_dirichlet(scenario: Scenario, row_pool: RowPool, default_min_size: int = 10) -> np.ndarray:
    """Partition each class among the clients by a Dirichlet distribution; see `spread_by_dirichlet`.

    Args:
        scenario: The scenario, with concentration, smallest size and cap.
        row_pool: The rows.
        default_min_size: The fewest rows of a client if the scenario does not define it.

    Returns:
        The client of each row, int64 (N,).
    """
    min_size = _min_size(scenario, row_pool, default_min_size)
    row_pool.check(min_size)
    return spread_by_dirichlet(
        row_pool.labels,
        row_pool.clients,
        scenario.dirichlet_alpha,
        row_pool.generator,
        min_size=min_size,
        cap=scenario.cap,
        tries=scenario.tries,
        row_kind=f"{row_pool.kind} images",
    )


def _min_size(scenario: Scenario, row_pool: RowPool, default: int) -> int:
    """Choose the fewest rows of a client: the scenario's min_size, or at most `default`."""
    if scenario.min_size is not None:
        return scenario.min_size
    # The papers require 10 at a mean of 50. Smaller pools cannot fulfill a fixed 10, so it is a fifth of the mean there.
    return max(1, min(default, len(row_pool.labels) // (5 * row_pool.clients)))


def _partition_in_pairs(scenario: Scenario, row_pool: RowPool) -> np.ndarray:
    """Partition a pool in blocks of two clients (SAGE)."""
    return rules.assign_paired_blocks(scenario, row_pool, _min_size(scenario, row_pool, 10), scenario.tries)


_SETTING_RULES: dict[str, _SettingRules] = {
    "iid-iid": _SettingRules(_partition_evenly, _partition_evenly),
    "iid-dir": _SettingRules(_partition_evenly, _partition_by_dirichlet),
    "dir-dir": _SettingRules(_partition_by_dirichlet, _partition_by_dirichlet),
    "semifl-iid": _SettingRules(rules.assign_equal_sizes, rules.assign_equal_sizes),
    "semifl-shards": _SettingRules(rules.assign_shards, rules.assign_shards),
    "semifl-dir": _SettingRules(_partition_by_dirichlet, _partition_by_dirichlet),
    "feddb-iid": _SettingRules(rules.assign_equal_sizes, rules.assign_equal_sizes),
    "feddb-dir": _SettingRules(
        partial(_partition_by_dirichlet, default_min_size=1), partial(_partition_by_dirichlet, default_min_size=1)
    ),
    "fedloke": _SettingRules(None, rules.assign_sequentially),
    "fedloke-balanced": _SettingRules(None, rules.assign_jointly),
    "pair-dir": _SettingRules(_partition_in_pairs, _partition_in_pairs),
    "fedmatch-iid": _SettingRules(_partition_evenly, rules.assign_equal_classes),
    "fedmatch-noniid": _SettingRules(_partition_evenly, rules.assign_peaked_classes),
    "fedmatch-stream": _SettingRules(_partition_evenly, rules.assign_peaked_classes),
}


SETTINGS = tuple(_SETTING_RULES)
"""The settings of this package. Others are my_module:rule, or entry points of installed packages."""


def _origin_fields(scenario: Scenario) -> dict[str, Any]:
    """Return the fields of a scenario for the origin of its splits, without options of later versions at their default."""
    values = asdict(scenario)
    if not scenario.unknown_share:
        del values["unknown_share"]
    return values


def _apply_custom_rule(scenario: Scenario, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Call a custom partition rule, and check what it returns.

    Args:
        scenario: The scenario, whose setting names the rule.
        labels: The label of each row, int (N,).
        classes: The number of classes.

    Returns:
        The client of each row, int64 (N,), and the labeled rows, bool (N,).

    Raises:
        UserError: If the rule fails, or returns arrays of another shape or type, or invalid client numbers.
    """
    name = scenario.setting
    try:
        custom_rule = plugins.load(name, "split")
        client, labeled = custom_rule(labels=labels.copy(), classes=classes, scenario=scenario)
        client = np.asarray(client)
        labeled = np.asarray(labeled)
    except UserError:
        raise
    except Exception as error:  # custom code can raise anything
        raise UserError(f"setting {name} failed ({type(error).__name__}: {one_line(error)[:200]}).") from error
    for field_name, array, allowed_kinds in (("client", client, "iu"), ("labeled", labeled, "b")):
        if array.shape != labels.shape or array.dtype.kind not in allowed_kinds:
            raise UserError(
                f"setting {name}: its {field_name} is {array.dtype} {array.shape}; it must return client, int "
                f"({len(labels)},), and labeled, bool ({len(labels)},)."
            )
    if client.min() < SERVER or client.max() >= scenario.clients:
        invalid_client = client.min() if client.min() < SERVER else client.max()
        raise UserError(
            f"setting {name} gives rows to client {invalid_client}, but "
            f"clients are numbered 0 to {scenario.clients - 1}, the server is {SERVER} and nobody -1."
        )
    return client.astype(np.int64), labeled


def _check_fields(scenario: Scenario) -> None:
    """Raise UserError if a field has an invalid value, regardless of the other fields."""
    if scenario.setting not in _SETTING_RULES and not plugins.is_plugin(scenario.setting, "split"):
        *all_but_last, last = _SETTING_RULES
        raise UserError(f"setting {scenario.setting!r} is unknown; choose {', '.join(all_but_last)} or {last}.")
    # The allowed range of a field is in its type: Annotated[int, Range(...)].
    for name, hint in get_type_hints(SplitOptions, include_extras=True).items():
        for annotation in getattr(hint, "__metadata__", ()):
            if isinstance(annotation, Range):
                annotation.check(name, getattr(scenario, name))
    minimum(1).check("tries", scenario.tries)
    if scenario.setting == "fedmatch-stream" and scenario.stages == 1:
        raise UserError("fedmatch-stream has only one stage, which is fedmatch-noniid; set stages to 2 or more.")


def _check_labels(scenario: Scenario) -> None:
    """Raise UserError if the fields that set the number and the location of labels contradict each other.

    labels_at is "clients" (all of them), "server", or "some" (`labeled_clients` clients, drawn at random).
    """
    amounts = (scenario.labels_per_class, scenario.label_ratio, scenario.labels)
    if sum(amount is not None for amount in amounts) != 1:
        raise UserError("give exactly one of labels_per_class, label_ratio and labels.")
    if scenario.labels_at not in get_args(LabelLocation):
        raise UserError(f"labels_at {scenario.labels_at!r} is unknown; choose clients, server or some.")
    if (scenario.labels_at == "some") != (scenario.labeled_clients is not None):
        raise UserError(
            f"labeled_clients is {scenario.labeled_clients} and labels_at is {scenario.labels_at!r}; give labeled_clients a number "
            "where labels_at is 'some', and nowhere else."
        )
    # The type of the field, which `_check_fields` checks, demands 1 or more.
    if scenario.labeled_clients is not None and scenario.labeled_clients > scenario.clients:
        raise UserError(
            f"labeled_clients is {scenario.labeled_clients}; it must be from 1 to the {scenario.clients} clients."
        )
    # A joint setting partitions all rows and then labels random ones of each client, so that it cannot provide an exact
    # number of labels of each class.
    if scenario.labels is not None and scenario._joint:
        raise UserError(
            f"{scenario.setting} labels random rows of each client, so labels cannot be counted out by class; give "
            "label_ratio or labels_per_class, or set labels_at to 'server'."
        )


def _class_totals(scenario: Scenario, labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Count the rows of each class, int64 (classes,).

    Args:
        scenario: The scenario, with the number of clients.
        labels: The label of each row, int (N,), without unknown ones.
        names: The class names.

    Raises:
        UserError: If there are more clients than rows, a label is out of range, or a class has no row.
    """
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
    """Compute how many images of each class are labeled at all clients together (the labeled pool).

    Args:
        scenario: The scenario; one of these is set: label_ratio, the share of labeled images of each class; labels, the
            total number; labels_per_class, the number of each class per client on average, which may be fractional.
        totals: The number of images of each class, (classes,).
        names: The class names.

    Returns:
        The number of labeled images of each class, int64 (classes,).

    Raises:
        UserError: If a class has too few images, or would have no label.
    """
    if scenario.label_ratio is not None:
        pool = np.floor(totals * scenario.label_ratio + 0.5).astype(np.int64)
        request = f"label_ratio {scenario.label_ratio:g}"
    elif scenario.labels is not None:
        pool = np.full(len(names), scenario.labels // len(names), np.int64)
        request = f"labels {scenario.labels}"
    else:
        assert scenario.labels_per_class is not None
        pool = np.full(len(names), math.floor(scenario.clients * scenario.labels_per_class + 0.5), np.int64)
        request = f"labels_per_class {scenario.labels_per_class:g} for {scenario.clients} clients"
    smallest_class = int(totals.argmin())
    smallest_total = int(totals[smallest_class])
    if pool[smallest_class] > smallest_total:
        raise UserError(
            f"{request} needs {pool[smallest_class]} labeled images of class {names[smallest_class]}, which has "
            f"{smallest_total}; {_advise_fewer_labels(scenario, smallest_total, len(names))}."
        )
    if not pool.min():
        raise UserError(f"{request} leaves class {names[int(pool.argmin())]} without a label; ask for more labels.")
    return pool


def _advise_fewer_labels(scenario: Scenario, smallest_total: int, classes: int) -> str:
    """Advise on the largest number of labels, if the smallest class has `smallest_total` images."""
    if scenario.labels is not None:
        return f"set labels to {smallest_total * classes} or less"
    # A label_ratio is at most 1, so that it never asks for more images than a class has.
    assert scenario.labels_per_class is not None
    advice = f"set labels_per_class to {_format_decimal(smallest_total / scenario.clients)} or less"
    most_clients = math.floor(smallest_total / scenario.labels_per_class)
    if most_clients > 0:
        advice += f", or clients to {most_clients} or less"
    return advice


def _count_labels_per_client(scenario: Scenario, size: int, classes: int) -> int:
    """Compute the number of labeled rows of each client, for settings that label random rows of each client.

    Args:
        scenario: The scenario, with a share of labels or a number per class.
        size: The number of rows of a client, which is equal for all clients in these settings.
        classes: The number of classes.

    Raises:
        UserError: If the number is zero or larger than `size`.
    """
    if scenario.label_ratio is not None:
        # The authors' int(r * n), except that 0.29 * 100 = 28.999999999999996 becomes 29.
        count = math.floor(scenario.label_ratio * size + 1e-9)
        request = f"label_ratio {scenario.label_ratio:g}"
    else:
        assert scenario.labels_per_class is not None
        count = math.floor(scenario.labels_per_class * classes + 0.5)
        request = f"labels_per_class {scenario.labels_per_class:g}"
    if not count:
        raise UserError(f"{request} labels none of the {size} images of a client; ask for more labels.")
    if count > size:
        raise UserError(
            f"{request} labels {count} images of each client, which has {size}; set labels_per_class to "
            f"{_format_decimal(size / classes)} or less, or ask for fewer clients."
        )
    return count


def _draw_labeled_clients(scenario: Scenario) -> np.ndarray:
    """Draw the clients that have labels, ascending; all clients unless `labeled_clients` is set."""
    if scenario.labeled_clients is None:
        return np.arange(scenario.clients)
    generator = named_generator(scenario.seed, "split", "holders")
    return np.sort(generator.permutation(scenario.clients)[: scenario.labeled_clients])


def _draw_stages(scenario: Scenario, client: np.ndarray, labeled: np.ndarray) -> np.ndarray | None:
    """Divide each client's unlabeled rows evenly among the stages of a stream, in random order.

    It simulates clients to which new unlabeled images arrive during training (FedMatch, ICLR 2021).

    Args:
        scenario: The scenario, with the number of stages, each of which lasts for a part of the training rounds.
        client: The client of each row, int64 (N,).
        labeled: The labeled rows, bool (N,).

    Returns:
        The stage of each row, int64 (N,); None if there is only one stage.

    Raises:
        UserError: If a client has fewer unlabeled rows than there are stages.
    """
    stages = scenario.stages
    if stages == 1:
        return None
    generator = named_generator(scenario.seed, "split", "stages")
    stage = np.zeros(len(client), np.int64)
    for client_number, client_rows in enumerate(rows_by_client(client, scenario.clients)):
        rows = generator.permutation(client_rows[~labeled[client_rows]])
        if len(rows) < stages:
            raise UserError(
                f"client {client_number} has {len(rows)} unlabeled images, fewer than {stages} stages; ask for fewer stages, fewer "
                "clients or fewer labels."
            )
        # Position i of n gets stage floor(i * stages / n), so that the sizes of stages differ by at most one.
        stage[rows] = np.arange(len(rows)) * stages // len(rows)
    return stage


def _format_decimal(value: float) -> str:
    """Format a number with up to four decimals, without trailing zeros."""
    return f"{value:.4f}".rstrip("0").rstrip(".")
