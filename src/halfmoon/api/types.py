"""Types that the author of a method implements or uses: Method, ClientUpdate, Federation, Batch and their fields."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from halfmoon.api.uploads import UPDATE_ONLY, Precision, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import ConstantSchedule, Number, Optimizer, Schedule
from halfmoon.core.tree import Tree
from halfmoon.models import Network, track

Statistics = Literal["joint", "separate"]
"""Images that share a forward pass, and so their batch statistics: all views of a step, or each view separately."""

Labeling = Literal["batch", "running"]
"""Statistics that normalize the weak views when their pseudo-labels are computed."""


@dataclass(frozen=True)
class Task:
    """Settings that all methods of a comparison share: the network, the optimizer, the rule for batch statistics.

    Attributes:
        network: maps images (B, C, H, W) to logits (B, classes).
        optimizer: the clients' optimizer, at the learning rate of this round.
        normalize: maps uint8 pixels to the network's input.
        statistics: the views that share a forward pass.
        labeling: statistics under which pseudo-labels are computed: those of the batch (the paper's released code) or
            the running ones.
        testing: the same for test images.
        upload_precision: number format of the model in an upload.
        class_weights: the weight of each class in the cross-entropy of labeled images; (): 1 for all.
        rounds: length of the run, for schedules and ramps.
        schedule: learning rate schedule.
        round: the current round, counted from 0.
        rate: the schedule's factor in this round; `optimizer` already contains it.

    Examples:
        >>> task = halfmoon.problem(data=(X, y), clients=5, rounds=10, schedule="cosine").task
        >>> task.at(5).rate
        0.5
    """

    network: Network
    optimizer: Optimizer
    normalize: Normalize
    statistics: Statistics = "joint"
    labeling: Labeling = "batch"
    testing: Labeling = "running"
    upload_precision: Precision = "float32"
    class_weights: tuple[float, ...] = field(default=(), kw_only=True)
    rounds: int = 200
    schedule: Schedule = field(default_factory=ConstantSchedule)
    round: int = 0
    rate: Number = 1.0

    def at(self, round: int) -> "Task":
        """Build the task of `round` (from 0), with the learning rate of that round."""
        rate = self.schedule.factor(round, self.rounds)
        lr = self.optimizer.lr / self.rate * rate
        return replace(self, optimizer=self.optimizer.with_lr(lr), round=round, rate=rate)


NO_TENSORS: dict[str, Tensor] = {}
"""Default of optional dictionaries of tensors."""


class ClientData(NamedTuple):
    """Images of one client. Under vmap, smaller clients are padded to the largest by repeating their rows.

    Examples:
        >>> labeled, unlabeled = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(6, 1, 8, 8, dtype=torch.uint8)
        >>> data = halfmoon.ClientData(
        ...     x=labeled,
        ...     y=torch.tensor([0, 1, 2, 1]),
        ...     u=unlabeled,
        ...     labeled=torch.tensor(4),
        ...     unlabeled=torch.tensor(6),
        ... )
        >>> data.rows
        tensor(10., dtype=torch.float64)
    """

    x: Tensor  # (L, C, H, W) uint8, labeled images
    y: Tensor  # (L,) int64
    u: Tensor  # (U, C, H, W) uint8, unlabeled images
    labeled: Tensor  # (): number of the L rows that are not padding
    unlabeled: Tensor  # (): number of the U rows that are not padding
    views: dict[str, Tensor] = NO_TENSORS  # view name -> (U, C, H, W): `UpdateRequirements.precomputed_views`
    real: dict[str, Tensor] = NO_TENSORS  # "x" (L,), "u" (U,) bool: False for padding rows; {} if there are none

    @property
    def rows(self) -> Tensor:
        """Number of images without padding, () float64."""
        return (self.labeled + self.unlabeled).double()

    @property
    def u_real(self) -> Tensor | None:
        """Mask of the unlabeled rows that are not padding, (U,) bool; None if no row is padding."""
        return self.real.get("u")


class Batch(NamedTuple):
    """Images of one step, augmented and normalized.

    Examples:
        >>> batch = halfmoon.Batch(
        ...     x=torch.rand(4, 1, 8, 8),
        ...     y=torch.tensor([0, 1, 2, 1]),
        ...     x_rows=torch.arange(4),
        ...     u={"weak": torch.rand(6, 1, 8, 8)},
        ...     u_rows=torch.arange(6),
        ... )
        >>> batch.u["weak"].shape
        torch.Size([6, 1, 8, 8])
    """

    x: Tensor  # (B, C, H, W) labeled
    y: Tensor  # (B,) int64
    x_rows: Tensor  # (B,) int64, index of each labeled image in ClientData.x
    u: dict[str, Tensor]  # view name -> (b, C, H, W), the views of `UpdateRequirements`
    u_rows: Tensor  # (b,) int64, index of each unlabeled image in ClientData.u
    second_batch: dict[str, Tensor] = NO_TENSORS  # view name -> (b, C, H, W): a second minibatch of unlabeled rows
    mixing: dict[str, Tensor] = NO_TENSORS  # "second_batch_rows" (b,), and the draws of `UpdateRequirements.mixup`
    x_views: dict[str, Tensor] = NO_TENSORS  # view name -> (B, C, H, W), more views of the images in x
    real: dict[str, Tensor] = NO_TENSORS  # "x" (B,), "u" (b,) bool: False for padding; {} if no image is padding

    @property
    def x_real(self) -> Tensor | None:
        """Mask of the labeled images that are not padding, (B,) bool; None if no image is padding."""
        return self.real.get("x")

    @property
    def u_real(self) -> Tensor | None:
        """Mask of the unlabeled images that are not padding, (b,) bool; None if no image is padding."""
        return self.real.get("u")

    def masks(self, views: int) -> tuple[Tensor, ...]:
        """Collect the masks of labeled images and of `views` views of unlabeled ones; () if no image is padding."""
        if not self.real:
            return ()
        return (self.real["x"], *[self.real["u"]] * views)


class WeightedMetric(NamedTuple):
    """Sums of a measured quantity, which can be added over steps and clients (averages cannot)."""

    total: Tensor  # ()
    squares: Tensor  # ()
    count: Tensor  # ()  # pyright: ignore[reportIncompatibleMethodOverride]


class PseudoLabels(NamedTuple):
    """Pseudo-labels of a step. The engine compares them with the hidden labels, where these are available."""

    label: Tensor  # (b,) int64
    confidence: Tensor  # (b,) the largest probability
    weight: Tensor  # (b,) weight of the image in the loss; 0 if it was not used


NO_PSEUDO_LABELS: dict[str, PseudoLabels] = {}
"""Default of `StepMetrics.models`, for methods with one model."""


class StepMetrics(NamedTuple):
    """Measurements of one step.

    Attributes:
        loss: ().
        samples: more measured quantities, by name.
        pseudo: the pseudo-labels that were used, at most one entry (torch.func does not accept None as a leaf).
        models: pseudo-labels of each of several models for the same images, by the model's name, used or not: "local"
            is a model that remains at its client, "global" one that is uploaded.

    Examples:
        >>> from halfmoon.api.types import weighted_metric
        >>> margin = weighted_metric(torch.tensor([0.5, 0.25]))
        >>> halfmoon.StepMetrics(loss=torch.tensor(1.0), samples={"margin": margin}, pseudo=()).samples["margin"].total
        tensor(0.7500)
    """

    loss: Tensor
    samples: dict[str, WeightedMetric]
    pseudo: tuple[PseudoLabels, ...]
    models: dict[str, PseudoLabels] = NO_PSEUDO_LABELS


class Passes(NamedTuple):
    """Number of images that one step sends through the classifier."""

    forward: int  # a forward-mode tangent counts as one more forward pass
    backward: int


def weighted_metric(values: Tensor, real: Tensor | None = None) -> WeightedMetric:
    """Sum up values of a measured quantity and their squares, from which the server computes mean and deviation.

    Args:
        values: any shape; (n,) if there is a mask.
        real: mask of the values that are not padding, (n,) bool.
    """
    values = values.detach()
    if real is not None:
        without_padding = values * real
        return WeightedMetric(without_padding.sum(), without_padding.square().sum(), real.to(values.dtype).sum())
    return WeightedMetric(values.sum(), values.square().sum(), torch.ones_like(values).sum())


@dataclass(frozen=True)
class UpdateRequirements:
    """Declaration of the data that a client update, or an objective, needs from the engine, and of its properties.

    Attributes:
        views: views of the unlabeled images in a batch. Without any, the update trains on labeled images only. A digit
            at the end of a name requests one more draw of the same recipe: ("weak", "weak2").
        labeled_views: additional views of the labeled images, in `batch.x_views`, made by the recipes of unlabeled
            images.
        second_batch: views of a second minibatch, in `batch.second_batch`, drawn with replacement from all unlabeled
            rows.
        precomputed_views: views of ALL unlabeled rows, which `begin` finds in `data.views`.
        mixup: parameter a of the Beta(a, a) distribution from which a step's "mix" () in `batch.mixing` is drawn.
            `batch.mixing` then also contains "order", a permutation of the B + len(views) * b images of the step, and
            "turn" (b,), numbers of quarter turns from 0 to 3.
        trains: whether the update takes steps; without them, `finish` follows `begin`.
        labeled_epochs: factor on the number of epochs, for clients with labels.
        masks_padding: whether the update ignores padding rows (`Batch.real`, `ClientData.real`). Then clients of
            unequal sizes, or with unequal numbers of images a step, can be batched together.
        all_rows: whether the update computes with all rows of a client together, apart from `precomputed_views` and
            `row_memory`.
        row_memory: leaves of the memory with one entry for each unlabeled row (U,), by path ("thresholds/label"), and
            the value that stands for a row without an entry. If clients of unequal sizes are batched, `begin` finds
            that value in padding rows; it finds it in all rows if the client's rows have changed since. Entries that
            `finish` leaves in padding rows are cut off.
        per_client_generator: whether `initial_memory` gets a different random generator for each client, instead of
            the same one for all clients of a run.
        keep_optimizer: whether `initial_memory`, `begin` and `finish` of `ClientUpdate` store the optimizer's state in
            the client's memory.
        upload_spec: content of the upload that `finish` returns: by default the received parameters and statistics,
            weighted by the number of rows. Validation, norms, clipping, robust rules, secure sums and noise rely on it;
            tensors that it does not declare are refused.
    """

    views: tuple[str, ...] = ()
    _: KW_ONLY
    labeled_views: tuple[str, ...] = ()
    second_batch: tuple[str, ...] = ()
    precomputed_views: tuple[str, ...] = ()
    mixup: float | None = None
    trains: bool = True
    labeled_epochs: int = 1
    masks_padding: bool = False
    all_rows: bool = False
    row_memory: Mapping[str, int] = field(default_factory=dict[str, int])
    per_client_generator: bool = False
    keep_optimizer: bool = False
    upload_spec: UploadSpec = UPDATE_ONLY

    @property
    def needs_full_batch(self) -> bool:
        """True if the result depends on all rows of a client: then only clients of one size are batched together.

        Unless `masks_padding` is set.
        """
        return self.all_rows or bool(self.precomputed_views or self.row_memory)


@dataclass(frozen=True)
class ClientUpdate:
    """Local update of one client: pure functions from tensors to tensors, written for ONE client.

    A client update draws no random numbers, sees no hidden labels, and does nothing that `torch.func.vmap` refuses
    (no boolean indexing, no `.item()`, no `if` on a tensor). By default it trains the received model with an optimizer,
    uploads it with the number of rows as its weight, and sends each view of its images through the classifier once.

    All methods use the same names for their arguments. Trees are nested dicts of tensors.

    - `broadcast`: the tree that the server sent, with the model in "params" and "stats".
    - `memory`: the state that the client stored after its last update.
    - `carry`: the state that one step passes to the next.
    - `data`: the client's images. `batch`: the minibatch of a step. `gradient`: the gradient of its loss.

    Examples:
        >>> from dataclasses import dataclass
        >>> from halfmoon.core.autodiff import grad_and_value
        >>> from halfmoon.methods.averaging import ModelAveraging
        >>> from halfmoon.methods.objectives.base import labeled_cross_entropy
        >>> from halfmoon.models import forward
        >>> @dataclass(frozen=True)
        ... class TrainOnLabels(halfmoon.ClientUpdate):
        ...     def loss(self, params, batch):
        ...         (logits,), _, moments = forward(self.task.network, params, True, (batch.x,))
        ...         return labeled_cross_entropy(logits, batch.y), moments
        ...
        ...     def step(self, broadcast, carry, batch):
        ...         gradient, loss, moments = grad_and_value(self.loss, carry["params"], batch)
        ...         metrics = halfmoon.StepMetrics(loss, samples={}, pseudo=())
        ...         return self.optimizer_step(carry, gradient, moments), metrics
        >>> @dataclass(frozen=True)
        ... class LabelsOnly(ModelAveraging):
        ...     def client_updates(self, task):
        ...         return {"train": TrainOnLabels(task)}
        >>> results = halfmoon.run(method=LabelsOnly(), data=(X, y), rounds=1, clients=5)
    """

    task: Task  # shared by all methods of a comparison

    max_norm_ratio: ClassVar[float] = float("inf")
    """Largest norm of an upload in medians of the cohort's, if it is below the bound of the server's operator."""

    is_shared: ClassVar[bool] = False
    """Whether simulated runs of one comparison share its average where they send the same broadcast.

    Its uploads must depend on the broadcast and the images only, and clients must store nothing."""

    @property
    def requirements(self) -> UpdateRequirements:
        """Data that the update needs from the engine; by default labeled images only."""
        return UpdateRequirements()

    @property
    def at_server(self) -> "ClientUpdate":
        """The update as the server runs it on its labeled images, for example without the clipping of clients."""
        return self

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        """Create the memory of a client that takes part for the first time.

        Args:
            broadcast: the tree that the server sent.
            generator: the same for all clients, unless `UpdateRequirements.per_client_generator` is set.
        """
        if not self.requirements.keep_optimizer:
            return {}
        return {"optimizer": self.task.optimizer.init(broadcast["params"])}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        """Create the carry of this update. May pass all images of the client through the network."""
        optimizer = memory.get("optimizer") or self.task.optimizer.init(broadcast["params"])
        return {"params": broadcast["params"], "stats": broadcast.get("stats", {}), "optimizer": optimizer}

    def drawable_rows(self, carry: Tree, data: ClientData) -> Tensor | None:
        """Select the unlabeled rows that may be drawn into batches, (U,) bool; None selects all rows."""
        return None

    def initial_pseudo_labels(self, carry: Tree, data: ClientData) -> tuple[PseudoLabels, ...]:
        """Return the pseudo-labels (U,) of all unlabeled rows, if the update computes them once, in `begin`.

        They are for diagnostics, which then ignore `StepMetrics.pseudo`.

        Returns:
            At most one entry; empty if pseudo-labels are computed in each step.
        """
        return ()

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one step on a minibatch, and return the new carry."""
        raise NotImplementedError

    def optimizer_step(
        self, carry: Tree, gradient: Tree, moments: Sequence[Tree] = (), *, consume: bool = False, **new: Any
    ) -> Tree:
        """Take one step of the client's optimizer, for use in `step`, and return the new carry.

        Args:
            carry: the state of the client's training between steps: "params", "optimizer" (its state), "stats" (running
                statistics of batch normalization), and what else the client update keeps there.
            gradient: gradient of the loss in the parameters.
            moments: batch statistics of forward passes, which the running statistics track one after the other.
            consume: whether `gradient` and the optimizer's state in `carry` may be overwritten, which saves memory.
            **new: further entries of the new carry.
        """
        params, optimizer = self.task.optimizer.step(carry["params"], gradient, carry["optimizer"], consume)
        # `track` moves the running statistics a tenth of the way to those of one pass.
        stats = {"stats": reduce(track, moments, carry["stats"])} if moments else {}
        return {**carry, "params": params, "optimizer": optimizer, **stats, **new}

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        """Return the upload, as `UpdateRequirements.upload_spec` declares it, and the memory to store."""
        memory = {"optimizer": carry["optimizer"]} if self.requirements.keep_optimizer else {}
        return Upload({"params": carry["params"], "stats": carry["stats"]}, data.rows), memory

    def find_fault(self, upload: Upload, labeled: int, unlabeled: int) -> str | None:
        """Find what no honest client can send, in an upload of the declared names and shapes.

        The server of a federation calls this for each upload that it can see (not those that secure aggregation hides),
        and refuses one with a fault. By default there is none: a client update with values that can be checked, such as
        counts of images, overrides this.

        Args:
            upload: the upload of one client, with finite values.
            labeled: number of labeled images that the client has declared.
            unlabeled: number of unlabeled images that it has declared.

        Returns:
            The first fault as text that does not name the client; None if there is none.
        """
        return None

    def upload_norm(self, upload: Upload) -> float | None:
        """Compute the norm that a server compares with the cohort's median; None for that of the update.

        Args:
            upload: what the client sends.
        """
        return None

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        """Count the images that a step on `labeled` + `unlabeled` images sends through the classifier."""
        images = labeled + len(self.requirements.views) * unlabeled
        return Passes(images, images)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        """Count the images that `begin` and `finish` send through the classifier.

        Args:
            labeled: number of labeled images of the client.
            unlabeled: number of its unlabeled images.
        """
        return unlabeled if self.requirements.precomputed_views else 0

    def traffic(self, broadcast: Tree, upload: Upload) -> tuple[int, int]:
        """Count the bytes of `broadcast` and `upload` as sent; a sparse method sends fewer than all."""
        return tree.nbytes(broadcast), upload.nbytes


class StateStore(Protocol):
    """Trees stored by name, on disk if memory is short."""

    def get(self, key: str) -> Tree | None:
        """Load a tree, or None if there is none of that name."""
        ...

    def put(self, key: str, tree: Tree) -> None:
        """Store a tree, and replace an earlier one of that name."""
        ...

    def keys(self) -> list[str]:
        """List the names, sorted."""
        ...


class Federation(Protocol):
    """Interface through which a method reaches clients. `client_update` is a name in `Method.client_updates`.

    Examples:
        >>> from dataclasses import dataclass
        >>> from halfmoon.methods.averaging import ModelAveraging
        >>> from halfmoon.methods.fedavg import LocalTraining
        >>> from halfmoon.methods.objectives import FixMatch
        >>> @dataclass(frozen=True)
        ... class TwoAverages(ModelAveraging):
        ...     def client_updates(self, task):
        ...         return {"train": LocalTraining(task, FixMatch())}
        ...
        ...     def round(self, task, server, federation):
        ...         first = federation.average("train", server).update
        ...         return federation.average("train", first).update
        >>> results = halfmoon.run(method=TwoAverages(), data=(X, y), rounds=1, clients=5)
    """

    clients: int  # number of registered clients, numbered from 0
    size: int  # number of clients that are sampled for a round
    cohort: Tensor  # (K,) int64, the clients of this round; clients that do not respond are removed
    responders: Tensor  # (k,) int64, clients that responded to the last query, in the order of its uploads
    state_store: StateStore  # the server's store, for trees that are too large for its state

    @property
    def labeled(self) -> int:
        """Number of labeled images at the server."""
        ...

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        """Run a client update at several clients, and return their uploads.

        Args:
            client_update: name of the update.
            broadcast: tree that is sent to all of them.
            per_client: tree with leaves (K, ...); slice k is merged into `broadcast` for client k.
            clients: numbers of the clients, (K,) int64; any registered ones. By default the cohort.

        Returns:
            The uploads of the clients that responded, every leaf (k, ...). If none of `clients` responded, the weights
            are (0,) and there are no other leaves.
        """
        ...

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Run a client update at the cohort, and return the weighted mean of the updates.

        Uploads are added up one by one, so that they need not all be in memory.

        Returns:
            The mean, with the sum of all weights as its weight. If that is 0, no client had data, and the update is
            the one in `broadcast`. Auxiliary tensors are reduced as the client update's `upload_spec` declares.

        Raises:
            UserError: an auxiliary tensor is declared to be needed from each client individually.
        """
        ...

    def query_server(self, client_update: str, broadcast: Tree) -> Upload:
        """Run a client update with `broadcast` at the server, on the server's labeled images."""
        ...


class Method(Protocol):
    """A federated method. Its fields are its hyper-parameters; it has no state.

    In all methods, `task` contains the settings that are shared by all methods of a comparison, and `server` is the
    tree that the last round returned.

    Examples:
        >>> from dataclasses import dataclass
        >>> from halfmoon.core import tree
        >>> from halfmoon.methods.averaging import ModelAveraging
        >>> from halfmoon.methods.fedavg import LocalTraining
        >>> from halfmoon.methods.objectives import FixMatch
        >>> @dataclass(frozen=True)
        ... class HalfSteps(ModelAveraging):
        ...     keep: float = 0.5
        ...
        ...     def client_updates(self, task):
        ...         return {"train": LocalTraining(task, FixMatch())}
        ...
        ...     def round(self, task, server, federation):
        ...         average = federation.average("train", server).update
        ...         blend = lambda old, new: self.keep * old + (1 - self.keep) * new
        ...         return {**average, "params": tree.map(blend, server["params"], average["params"])}
        >>> results = halfmoon.run(method=HalfSteps(keep=0.3), data=(X, y), rounds=1, clients=5)
    """

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        """Build the client updates, by the name under which `Federation.query` runs them; the first one trains."""
        ...

    def start(self, task: Task, model: Tree) -> Tree:
        """Build the server's state before the first round from the initial `model` = {"params", "stats"}."""
        ...

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Run one round with the clients of `federation`, and return the server's new state."""
        ...

    def solution(self, task: Task, server: Tree) -> Tree:
        """Return the model {"params", "stats"} to evaluate."""
        ...
