"""Scenarios: how labeled and unlabeled rows lie among the clients (FedDure, AAAI 2024, after FedMatch)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from halfmoon.data.partition import deal, spread, stream, take_labeled
from halfmoon.data.split import Origin, Split, hash_labels
from halfmoon.errors import UserError

DEFAULT_LABELS = 5


@dataclass(frozen=True)
class Scenario:
    """Say who holds which rows and which are labeled.

    setting: how the labeled and the unlabeled rows lie among clients: evenly (iid) or by Dirichlet (dir)
    clients: how many clients there are
    gamma: the Dirichlet's concentration; smaller is more uneven
    labels_per_class: labeled images of each class, per client on average; the pool is `clients` times as many
    label_ratio: instead of labels_per_class, the share of each class that is labeled, in (0, 1]
    min_size: fewest rows a client may have in a Dirichlet part; None: a fifth of the mean, 1 to 10
    cap: whether a client that holds its even share gets no further class in a Dirichlet part
    seed: of the split alone, apart from the seed of training
    tries: how often a Dirichlet part is drawn before giving up on min_size

    Raise UserError where a field is out of its range.
    """

    setting: Literal["iid-iid", "iid-dir", "dir-dir"] = "dir-dir"
    clients: int = 100
    gamma: float = 0.5
    labels_per_class: float | None = DEFAULT_LABELS
    label_ratio: float | None = None
    min_size: int | None = None
    cap: bool = True
    seed: int = 0
    tries: int = 100

    def __post_init__(self) -> None:
        if self.label_ratio is not None and self.labels_per_class == DEFAULT_LABELS:
            # A given ratio takes the place of the default; a configuration file cannot say "none".
            object.__setattr__(self, "labels_per_class", None)
        _check(self)

    def split(self, labels: np.ndarray, classes: int | Sequence[str], source: str = "") -> Split:
        """Return the split of rows with these true labels, int (N,), in 0..classes-1.

        `classes` is their number or their names (for messages), `source` the data set's name, kept in the
        split. The labeled pool is the first rows of a permutation inside each class. Labeled and unlabeled
        rows are disjoint and drawn from independent streams; every row has one client. Raise UserError where
        the request cannot be met.
        """
        names = [str(c) for c in range(classes)] if isinstance(classes, int) else list(classes)
        labeled = take_labeled(labels, _pool(self, labels, names), stream(self.seed, "split", "pool"))
        client = np.full(len(labels), -1, np.int64)
        rules = self.setting.split("-")
        for rule, mine, what in zip(rules, (labeled, ~labeled), ("labeled", "unlabeled"), strict=True):
            if mine.any():
                client[mine] = _part(self, rule, labels[mine], what)
        return Split(client, labeled, self.clients, Origin(asdict(self), source, hash_labels(labels)))


def _check(scenario: Scenario) -> None:
    s = scenario
    if s.setting not in ("iid-iid", "iid-dir", "dir-dir"):
        raise UserError(f"setting {s.setting!r} is unknown; choose iid-iid, iid-dir or dir-dir.")
    if s.clients < 1:
        raise UserError(f"clients is {s.clients}; there must be at least one.")
    if not 0 < s.gamma <= 1e9:  # beyond, the gamma variates behind a Dirichlet overflow
        raise UserError(f"gamma is {s.gamma}; it must be above 0 and at most 1e9.")
    if (s.labels_per_class is None) == (s.label_ratio is None):
        raise UserError("give exactly one of labels_per_class and label_ratio.")
    if s.labels_per_class is not None and not (s.labels_per_class > 0 and math.isfinite(s.labels_per_class)):
        raise UserError(f"labels_per_class is {s.labels_per_class}; it must be positive.")
    if s.label_ratio is not None and not 0 < s.label_ratio <= 1:
        raise UserError(f"label_ratio is {s.label_ratio}; it must be above 0 and at most 1.")
    if s.min_size is not None and s.min_size < 0:
        raise UserError(f"min_size is {s.min_size}; it cannot be negative.")
    if s.tries < 1:
        raise UserError(f"tries is {s.tries}; at least one draw is needed.")


def _pool(scenario: Scenario, labels: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return how many rows of each class are labeled, int64 (classes,)."""
    clients = scenario.clients
    if clients > len(labels):
        raise UserError(f"{clients} clients cannot share {len(labels)} images; ask for fewer clients.")
    if labels.min() < 0 or labels.max() >= len(names):
        raise UserError(
            f"labels run from {labels.min()} to {labels.max()}, but {len(names)} classes are numbered "
            f"0 to {len(names) - 1}; give all classes."
        )
    held = np.bincount(labels, minlength=len(names))
    short = int(held.argmin())
    if not held[short]:
        raise UserError(f"class {names[short]} has no image; leave it out or add images.")
    if scenario.labels_per_class is None:
        assert scenario.label_ratio is not None
        pool = np.floor(held * scenario.label_ratio + 0.5).astype(np.int64)
        asked = f"label_ratio {scenario.label_ratio:g}"
    else:
        asked = f"labels_per_class {scenario.labels_per_class:g} for {clients} clients"
        wanted = math.floor(clients * scenario.labels_per_class + 0.5)
        if wanted > held[short]:
            raise UserError(
                f"{asked} needs {wanted} labeled images of class {names[short]}, which has {held[short]}; "
                f"set labels_per_class to {_decimal(held[short] / clients)} or less, or clients to "
                f"{math.floor(held[short] / scenario.labels_per_class)} or less."
            )
        pool = np.full(len(names), wanted, np.int64)
    if not pool.min():
        raise UserError(f"{asked} leaves class {names[int(pool.argmin())]} without a label; ask for more labels.")
    return pool


def _part(scenario: Scenario, rule: str, labels: np.ndarray, what: str) -> np.ndarray:
    """Return the client of each row of one pool."""
    clients = scenario.clients
    min_size = scenario.min_size
    if rule == "iid":
        min_size = 1
    elif min_size is None:
        # The papers ask for 10 where the mean is 50; a fixed 10 cannot be met by smaller pools.
        min_size = max(1, min(10, len(labels) // (5 * clients)))
    if min_size * clients > len(labels):
        raise UserError(
            f"{clients} clients with at least {min_size} {what} images each need {min_size * clients}, but "
            f"there are {len(labels)}; ask for fewer clients, a smaller min_size or another share of labels."
        )
    draw = stream(scenario.seed, "split", what)
    if rule == "iid":
        return deal(labels, clients, draw)
    return spread(
        labels,
        clients,
        scenario.gamma,
        draw,
        min_size=min_size,
        cap=scenario.cap,
        tries=scenario.tries,
        what=f"{what} images",
    )


def _decimal(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")
