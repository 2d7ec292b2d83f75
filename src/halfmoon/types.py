"""What a method is made of: its five trees, what one client does, and the one port to the outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from halfmoon.augment import Normalize
from halfmoon.models import Network
from halfmoon.optim import Optimizer
from halfmoon.tree import Tree

Statistics = Literal["joint", "separate"]
"""Which images share a forward pass, and so their batch statistics: all views of a step, or each view alone."""

Labeling = Literal["batch", "running"]
"""Which statistics normalize the weak views when they are given pseudo-labels."""


@dataclass(frozen=True)
class Task:
    """What all methods of one comparison share: the network, the optimizer, the batch-statistics rule.

    `statistics` says which views share a forward pass, `labeling` whether pseudo-labels come from the network under
    batch statistics (the paper's released code) or under its tracked ones. `rounds` is the length of the whole run,
    for schedules and ramps.
    """

    network: Network
    optimizer: Optimizer
    normalize: Normalize
    statistics: Statistics = "joint"
    labeling: Labeling = "batch"
    rounds: int = 200


class Local(NamedTuple):
    """What one client holds; rows beyond the counts (under vmap) repeat earlier ones."""

    x: Tensor  # (L, C, H, W) uint8, labeled images
    y: Tensor  # (L,) int64
    u: Tensor  # (U, C, H, W) uint8, unlabeled images
    labeled: Tensor  # () how many of L are the client's
    unlabeled: Tensor  # () how many of U are the client's


class Batch(NamedTuple):
    """One step's images, augmented and normalized."""

    x: Tensor  # (B, C, H, W) labeled
    y: Tensor  # (B,) int64
    x_rows: Tensor  # (B,) int64, where each labeled image stands in Local.x
    u: dict[str, Tensor]  # view name -> (b, C, H, W), the views that the work asks for
    u_rows: Tensor  # (b,) int64, where each unlabeled image stands in Local.u


class Sample(NamedTuple):
    """A measured quantity that adds over steps and clients: nobody can average averages."""

    total: Tensor  # ()
    squares: Tensor  # ()
    count: Tensor  # ()


class Pseudo(NamedTuple):
    """The pseudo-labels of a step, for diagnostics where the hidden labels live."""

    label: Tensor  # (b,) int64
    confidence: Tensor  # (b,) the largest probability
    weight: Tensor  # (b,) how much the image counted in the loss; 0 is "not used"


class Notes(NamedTuple):
    """What a step reports of itself."""

    loss: Tensor  # ()
    samples: dict[str, Sample]
    pseudo: tuple[Pseudo, ...]  # none or one (None is no leaf that torch.func carries)


class Passes(NamedTuple):
    """Images that one step sends through the classifier."""

    forward: int  # a forward-mode tangent counts as one more forward pass
    backward: int


def sample(values: Tensor) -> Sample:
    """Sum `values` (any shape) up to a `Sample`."""
    values = values.detach()
    return Sample(values.sum(), values.square().sum(), torch.ones_like(values).sum())


@dataclass(frozen=True)
class Work:
    """What one client does when asked: tensors in, tensors out, written for ONE client.

    A work draws no random number, sees no hidden label, and does nothing that `torch.func.vmap` refuses
    (no boolean indexing, no `.item()`, no `if` on a tensor). `views` are the unlabeled views it wants in a batch;
    none means that it trains on labeled images alone.
    """

    task: Task
    views: tuple[str, ...] = ()

    def remember(self, down: Tree, generator: torch.Generator) -> Tree:
        """First meeting: return the client's memory; `generator` is the same for every client of a run."""
        return {}

    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        """Return the carry of this visit; may sweep all local rows."""
        raise NotImplementedError

    def keep(self, carry: Tree, data: Local) -> Tensor | None:
        """Return (U,) bool, the unlabeled rows that may be drawn in this visit; None is all of them."""
        return None

    def step(self, down: Tree, carry: Tree, batch: Batch) -> tuple[Tree, Notes]:
        """Take one step on a minibatch."""
        raise NotImplementedError

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Tree, Tree]:
        """Return what goes up and the memory that stays."""
        raise NotImplementedError

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        """Count the images that a step on `labeled` + `unlabeled` images sends through the classifier."""
        raise NotImplementedError


class Federation(Protocol):
    """All that a method knows of the outside."""

    cohort: Tensor  # (K,) int64, the clients of this round; after ask(): those who answered, in a fixed order

    def ask(self, work: str, down: Tree, each: Tree | None = None) -> Tree:
        """Send `down` to every client of the cohort and return their uploads, every leaf (K, ...).

        `each` (leaves (K, ...)) is merged into `down`, a different slice for each client.
        """
        ...


class Method(Protocol):
    """A federated method: its fields are its hyper-parameters; it holds no state."""

    def works(self, task: Task) -> Mapping[str, Work]:
        """Return the client half, by the name under which `Federation.ask` calls it."""
        ...

    def start(self, task: Task, model: Tree) -> Tree:
        """Return the server's tree for the initial `model` = {"params", "stats"}."""
        ...

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Play one round and return the server's new tree."""
        ...

    def solution(self, task: Task, server: Tree) -> Tree:
        """Return the model {"params", "stats"} that is evaluated."""
        ...
