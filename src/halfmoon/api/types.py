"""What a method is made of: its five trees, what one client does, and the one port to the outside."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import reduce
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from halfmoon.api.uploads import UPDATE_ONLY, Precision, Uplink, Upload
from halfmoon.core import tree
from halfmoon.core.optim import Constant, Number, Optimizer, Schedule
from halfmoon.core.tree import Tree
from halfmoon.models import Network, track
from halfmoon.models.network import Normalize

Statistics = Literal["joint", "separate"]
"""Which images share a forward pass, and so their batch statistics: all views of a step, or each view alone."""

Labeling = Literal["batch", "running"]
"""Which statistics normalize the weak views when they are given pseudo-labels."""


@dataclass(frozen=True)
class Task:
    """What all methods of one comparison share: the network, the optimizer, the batch-statistics rule.

    `statistics` says which views share a forward pass, `labeling` whether pseudo-labels come from the network under
    batch statistics (the paper's released code) or under its tracked ones, `testing` the same of test images. `rounds`
    is the length of the whole run, for schedules and ramps; `at` gives the task of one round. Where a step is traced to
    be compiled, what changes from round to round is a tensor () in it: `round`, `rate` and the optimizer's `lr`.
    """

    network: Network  # images (B, C, H, W) to logits (B, classes)
    optimizer: Optimizer  # of the clients, at this round's rate
    normalize: Normalize  # uint8 pixels to what the network takes
    statistics: Statistics = "joint"
    labeling: Labeling = "batch"
    testing: Labeling = "running"
    upload_precision: Precision = "float32"  # of what clients send of a model
    rounds: int = 200
    schedule: Schedule = field(default_factory=Constant)  # of the learning rate
    round: int = 0  # counted from 0
    rate: Number = 1.0  # the schedule's factor, which `optimizer` has already taken in

    def at(self, round: int) -> "Task":
        """Return the task of `round` (from 0): with that round's learning rate."""
        rate = self.schedule.factor(round, self.rounds)
        lr = self.optimizer.lr / self.rate * rate
        return replace(self, optimizer=self.optimizer.with_lr(lr), round=round, rate=rate)


NOTHING: dict[str, Tensor] = {}
"""The default for client updates without extra inputs."""


class Local(NamedTuple):
    """What one client holds; rows beyond the counts (under vmap) repeat earlier ones."""

    x: Tensor  # (L, C, H, W) uint8, labeled images
    y: Tensor  # (L,) int64
    u: Tensor  # (U, C, H, W) uint8, unlabeled images
    labeled: Tensor  # () how many of L are the client's
    unlabeled: Tensor  # () how many of U are the client's
    views: dict[str, Tensor] = NOTHING  # view name -> (U, C, H, W), of every unlabeled row, where it sweeps
    real: dict[str, Tensor] = NOTHING  # "x" (L,), "u" (U,) bool, the client's own rows; {} where all are

    @property
    def rows(self) -> Tensor:
        """Return how many rows are the client's, () float64."""
        return (self.labeled + self.unlabeled).double()

    @property
    def u_real(self) -> Tensor | None:
        """Return which unlabeled rows are the client's own, (U,) bool; None: all."""
        return self.real.get("u")


class Batch(NamedTuple):
    """One step's images, augmented and normalized."""

    x: Tensor  # (B, C, H, W) labeled
    y: Tensor  # (B,) int64
    x_rows: Tensor  # (B,) int64, where each labeled image stands in Local.x
    u: dict[str, Tensor]  # view name -> (b, C, H, W), the views of `Needs`
    u_rows: Tensor  # (b,) int64, where each unlabeled image stands in Local.u
    others: dict[str, Tensor] = NOTHING  # view name -> (b, C, H, W) of a second minibatch, of any unlabeled rows
    mixing: dict[str, Tensor] = NOTHING  # "other_rows" (b,), "mix" (), "order" (B + views * b,), "turn" (b,): see Needs
    x_views: dict[str, Tensor] = NOTHING  # view name -> (B, C, H, W), more views of the images in x
    real: dict[str, Tensor] = NOTHING  # "x" (B,), "u" (b,) bool, False where an image is padding; {} where none is

    @property
    def x_real(self) -> Tensor | None:
        """Return which labeled images are no padding, (B,) bool; None: all."""
        return self.real.get("x")

    @property
    def u_real(self) -> Tensor | None:
        """Return which unlabeled images are no padding, (b,) bool; None: all."""
        return self.real.get("u")

    def masks(self, views: int) -> tuple[Tensor, ...]:
        """Return the masks of labeled images and of `views` views of unlabeled ones; () where none is padding."""
        return (self.real["x"], *[self.real["u"]] * views) if self.real else ()


class WeightedMetric(NamedTuple):
    """A measured quantity that adds over steps and clients: nobody can average averages."""

    total: Tensor  # ()
    squares: Tensor  # ()
    count: Tensor  # ()  # pyright: ignore[reportIncompatibleMethodOverride]


class Pseudo(NamedTuple):
    """The pseudo-labels of a step, for diagnostics where the hidden labels live."""

    label: Tensor  # (b,) int64
    confidence: Tensor  # (b,) the largest probability
    weight: Tensor  # (b,) how much the image counted in the loss; 0 is "not used"


NO_MODELS: dict[str, Pseudo] = {}
"""What a step reports of a method with one model alone."""


class StepMetrics(NamedTuple):
    """What a step reports of itself.

    `models` are the pseudo-labels that each of several models makes of the same images, by the model's name, whether
    they teach or not; "local" is one that stays at its client, "global" one that travels.
    """

    loss: Tensor  # ()
    samples: dict[str, WeightedMetric]  # what else was measured, by name
    pseudo: tuple[Pseudo, ...]  # none or one (None is no leaf that torch.func carries)
    models: dict[str, Pseudo] = NO_MODELS


class Passes(NamedTuple):
    """Images that one step sends through the classifier."""

    forward: int  # a forward-mode tangent counts as one more forward pass
    backward: int


def sample(values: Tensor, real: Tensor | None = None) -> WeightedMetric:
    """Sum `values` (any shape) up to a `WeightedMetric`; of values (n,) with a mask `real` (n,), the real ones."""
    values = values.detach()
    if real is not None:
        without_padding = values * real
        return WeightedMetric(without_padding.sum(), without_padding.square().sum(), real.to(values.dtype).sum())
    return WeightedMetric(values.sum(), values.square().sum(), torch.ones_like(values).sum())


@dataclass(frozen=True)
class Needs:
    """What a client update, or an objective, needs of the engine and tells it.

    views: the unlabeled views of a batch; none: it trains on labeled images alone. A digit at a view's end asks for one
        more draw of the same recipe: ("weak", "weak2").
    labeled_views: the views of the labeled images in `batch.x_views`, beside `batch.x`; their recipes are those of
        unlabeled images.
    others: the views of a second minibatch in `batch.others`, drawn with replacement from all unlabeled rows.
    sweep: the views of ALL unlabeled rows that `begin` finds in `data.views`.
    mixup: a of the Beta(a, a) from which a step's "mix" () is drawn. With it come "order", a permutation of the
        B + len(views) * b images of the step, and "turn" (b,), quarter turns from 0 to 3.
    trains: whether it takes steps; without them it goes from `begin` to `finish`.
    labeled_epochs: how many of the batch rule's epochs a client with labels makes in the place of one.
    masks: whether it leaves out padding rows (`Batch.real`, `Local.real`). Then clients of unequal sizes, or with
        unequal images a step, are batched together.
    all_rows: whether it computes with all rows of a client together, beside `sweep` and `row_memory`.
    row_memory: the leaves of the memory with an entry for each unlabeled row (U,), by path ("thresholds/label"), and
        the value that stands for a row without one. Where clients of unequal sizes are batched, `begin` finds that
        value in padding rows, and in all rows where other rows have come since; what `finish` leaves in padding rows
        is cut off.
    own_memory: whether `remember` gets a generator of each client's own, in place of one for all of a run.
    keep_optimizer: whether `remember`, `begin` and `finish` of `ClientUpdate` keep the optimizer's state at the client.
    uplink: what `finish` sends: by default the parameters and statistics that came down, with a weight in rows.
        Validation, norms, clipping, robust rules, secure sums and noise go by it; what it does not name is refused.
    """

    views: tuple[str, ...] = ()
    _: KW_ONLY
    labeled_views: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    sweep: tuple[str, ...] = ()
    mixup: float | None = None
    trains: bool = True
    labeled_epochs: int = 1
    masks: bool = False
    all_rows: bool = False
    row_memory: Mapping[str, int] = field(default_factory=dict[str, int])
    own_memory: bool = False
    keep_optimizer: bool = False
    uplink: Uplink = UPDATE_ONLY

    @property
    def whole(self) -> bool:
        """Return whether a client's rows matter together: without `masks`, only clients of one size are batched."""
        return self.all_rows or bool(self.sweep or self.row_memory)


@dataclass(frozen=True)
class ClientUpdate:
    """What one client does when asked: tensors in, tensors out, written for ONE client.

    A client update draws no random number, sees no hidden label, and does nothing that `torch.func.vmap` refuses
    (no boolean indexing, no `.item()`, no `if` on a tensor). By default it takes the received model with an optimizer,
    sends it back with a weight in rows, and sends each view of its images through the classifier once.

    `down` is the tree that came from the server, with the model in "params" and "stats"; `memory` what the client kept
    of its last update, `carry` what goes from step to step, `data` its rows, `batch` the minibatch of a step and
    `gradient` that of its loss. Trees are nested dicts of tensors.
    """

    task: Task  # what all methods of a comparison share

    @property
    def needs(self) -> Needs:
        """Return what it needs of the engine; by default labeled images alone."""
        return Needs()

    @property
    def at_server(self) -> "ClientUpdate":
        """Return the client update as the server does it on images of its own: no promise to clients binds it."""
        return self

    def remember(self, down: Tree, generator: torch.Generator) -> Tree:
        """First meeting: return the client's memory; `Needs.own_memory` says whose `generator` it is."""
        return {"optimizer": self.task.optimizer.init(down["params"])} if self.needs.keep_optimizer else {}

    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        """Return the carry of this client update; may sweep all local rows."""
        optimizer = memory.get("optimizer") or self.task.optimizer.init(down["params"])
        return {"params": down["params"], "stats": down.get("stats", {}), "optimizer": optimizer}

    def keep(self, carry: Tree, data: Local) -> Tensor | None:
        """Return (U,) bool, the unlabeled rows that may be drawn in this client update; None is all of them."""
        return None

    def guesses(self, carry: Tree, data: Local) -> tuple[Pseudo, ...]:
        """Return the pseudo-labels (U,) of all unlabeled rows, where a client update makes them once, when it begins.

        None or one; for diagnostics, which then leave aside what its steps report of the rows that they draw.
        """
        return ()

    def step(self, down: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one step on a minibatch."""
        raise NotImplementedError

    def advance(
        self, carry: Tree, gradient: Tree, moments: Sequence[Tree] = (), *, consume: bool = False, **new: Any
    ) -> Tree:
        """Return the carry after a step of the optimizer, with statistics that take in `moments`, and what is `new`.

        With `consume`, `gradient` and the optimizer's state in `carry` may not be used any more (`Optimizer.step`).
        """
        params, optimizer = self.task.optimizer.step(carry["params"], gradient, carry["optimizer"], consume)
        stats = {"stats": reduce(track, moments, carry["stats"])} if moments else {}
        return {**carry, "params": params, "optimizer": optimizer, **stats, **new}

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Upload, Tree]:
        """Return what goes up, as `Needs.uplink` declares it, and the memory that stays."""
        memory = {"optimizer": carry["optimizer"]} if self.needs.keep_optimizer else {}
        return Upload({"params": carry["params"], "stats": carry["stats"]}, data.rows), memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        """Count the images that a step on `labeled` + `unlabeled` images sends through the classifier."""
        images = labeled + len(self.needs.views) * unlabeled
        return Passes(images, images)

    def swept(self, labeled: int, unlabeled: int) -> int:
        """Count the images that `begin` and `finish` send through it, with `labeled` + `unlabeled` rows."""
        return unlabeled if self.needs.sweep else 0

    def traffic(self, down: Tree, up: Upload) -> tuple[int, int]:
        """Return the bytes that `down` and `up` take; less than all where a method is sparse."""
        return tree.nbytes(down), up.nbytes


class StateStore(Protocol):
    """Trees kept at the server by name, on disk where memory is short."""

    def get(self, key: str) -> Tree | None:
        """Return a tree, or None where there is none."""
        ...

    def put(self, key: str, tree: Tree) -> None:
        """Keep a tree in place of the one that was there."""
        ...

    def keys(self) -> list[str]:
        """Return the names, sorted."""
        ...


class Federation(Protocol):
    """All that a method knows of the outside. A `client_update` is called by its name in `Method.client_updates`."""

    clients: int  # how many are registered, numbered from 0
    cohort: Tensor  # (K,) int64, the clients of this round; those who fail to answer leave it
    answered: Tensor  # (k,) int64, who answered the last query: the order of its uploads
    state_store: StateStore  # the server's own store of trees, for what would not fit its tree

    @property
    def labeled(self) -> int:
        """Return how many labeled images the server itself has."""
        ...

    def ask(self, client_update: str, down: Tree, each: Tree | None = None, to: Tensor | None = None) -> Upload:
        """Send `down` to every client of the cohort and return the uploads of those who answer, every leaf (k, ...).

        `each` (leaves (K, ...)) is merged into `down`, a different slice for each client. `to` (K,) asks other clients
        than the cohort: some of it, or all that are registered; where none of them answers, the weights are (0,)
        and nothing else is there.
        """
        ...

    def average(self, client_update: str, down: Tree) -> Upload:
        """Send `down` to every client of the cohort, and return the weighted mean of the updates of those who answer.

        Uploads are added up as they come, so that not all have to be in memory. The weight is the sum of all; where it
        is 0 nobody had anything to learn from, and the update is what came `down`. Auxiliary tensors are reduced as the
        client update's `uplink` declares; raises `UserError` where the server would need each client's own.
        """
        ...

    def ask_server(self, client_update: str, down: Tree) -> Upload:
        """Run a client update with `down` at the server, on its own labeled images; return what a client would send."""
        ...


class Method(Protocol):
    """A federated method: its fields are its hyper-parameters; it holds no state.

    `task` is what all methods of a comparison share, `server` the tree that the last round returned.
    """

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        """Return the client half, by the name under which `Federation.ask` calls it; the first one trains."""
        ...

    def start(self, task: Task, model: Tree) -> Tree:
        """Return the server's tree for the initial `model` = {"params", "stats"}."""
        ...

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Play one round with the clients of `federation`, and return the server's new tree."""
        ...

    def solution(self, task: Task, server: Tree) -> Tree:
        """Return the model {"params", "stats"} that is evaluated."""
        ...
