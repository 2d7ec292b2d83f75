"""The tasks and results of clients, and what their updates share: first memories, metrics, pseudo-labels and checks.

`halfmoon.engine.local_clients.update_one` runs the update of one client in a loop, and
`halfmoon.engine.vmapped_clients.update_many` those of several at once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, ClientUpdate, PseudoLabels, StepMetrics, WeightedMetric
from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree
from halfmoon.core.errors import Diverged
from halfmoon.core.tree import Tree
from halfmoon.engine.budget import ClientSize
from halfmoon.engine.groups import WorkSize
from halfmoon.engine.sampling import Amount, Views, compute_views
from halfmoon.models.dropout import KEY, dropout_key


class ObservedPseudoLabels(NamedTuple):
    """Pseudo-labels that a client update made; diagnostics compare them with the true labels."""

    rows: Tensor  # (n,) int64, the unlabeled rows of the client
    pseudo: PseudoLabels  # of these rows
    models: dict[str, PseudoLabels]  # the pseudo-labels of single models, by name


MAX_LOSS = 1e6
"""A larger loss means that training has diverged: that of an untrained network is log(classes), 2.3 for ten classes."""


def diverged(losses: Tensor) -> Tensor:
    """Find the losses (n,) that are not finite or larger than `MAX_LOSS`, (n,) bool."""
    return ~(losses.abs() <= MAX_LOSS)  # a comparison with NaN is false


def images_per_call(device: torch.device) -> int:
    """Return the number of images whose views are made in one call: they fit a CPU's cache, or fill a GPU."""
    return 512 if device.type == "cpu" else 8192


@dataclass(frozen=True)
class ClientContext:
    """The settings of one query to clients, the same for all of them.

    Attributes:
        client_update: the update that they run.
        views: the augmentations of the run.
        seed: the seed of the run.
        round: the round, from 0.
        query: the number of earlier queries in this round.
        view_images: the number of images whose views are made in one call.
        name: the name of the update, by which a server requests it from its sites.
    """

    client_update: ClientUpdate
    views: Views
    seed: int
    round: int
    query: int
    view_images: int = 512
    name: str = ""

    def path(self, client: int) -> tuple[str, int, int, int]:
        """Return the name of the random stream of a client's update; with the seed it determines all draws."""
        return ("visit", self.round, self.query, client)


class ClientResult(NamedTuple):
    """The result of one client's update.

    Attributes:
        upload: what the client sends.
        memory: what it stores until its next update.
        samples: training metrics, summed over steps.
        amount: steps, and images of each step.
        traffic: bytes received and sent.
        images_outside_steps: images that went through the network before or after the steps.
        memory_bytes: bytes of the memory, wherever it is stored.
        observations: pseudo-labels, for diagnostics that know the true labels.
    """

    upload: Upload
    memory: Tree
    samples: dict[str, WeightedMetric]
    amount: Amount
    traffic: tuple[int, int]
    images_outside_steps: int = 0
    memory_bytes: int = 0
    observations: tuple[ObservedPseudoLabels, ...] = ()


class ClientTask(NamedTuple):
    """The inputs of one client's update, besides the broadcast.

    Attributes:
        client: the number of the client.
        private: the tree that only this client receives; its entries override those of the broadcast.
        memory: its memory.
        data: its images.
        amount: steps, and images of each step.
        group_key: clients may share a batched run only if their keys are equal.
    """

    client: int
    private: Tree
    memory: Tree
    data: ClientData
    amount: Amount
    group_key: tuple[object, ...] = ()

    @property
    def work_size(self) -> WorkSize:
        return WorkSize(self.amount, ClientSize(len(self.data.x), len(self.data.u)))


def with_dropout(client_update: ClientUpdate) -> Callable[[Tree, Tree, Batch], tuple[Tree, StepMetrics]]:
    """Return the step of an update in which the network's dropouts, if it has some, use the key of the batch."""
    if not client_update.task.network.has_dropout:
        return client_update.step

    def step(broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        with dropout_key(batch.mixing.get(KEY)):
            return client_update.step(broadcast, carry, batch)

    return step


def create_first_memory(client_update: ClientUpdate, broadcast: Tree, seed: int, client: int) -> Tree:
    """Create the memory (the state between rounds) of a client that takes part for the first time.

    Its random numbers are the same for all clients unless the update requires a generator for each.

    Args:
        client_update: the update that the client runs.
        broadcast: the tree that it receives.
        seed: the seed of the run.
        client: the number of the client.
    """
    path = (client,) if client_update.requirements.per_client_generator else ()
    return client_update.initial_memory(broadcast, rng.generator(seed, "remember", *path))


class StepLog:
    """The metrics of all steps of an update of one client or of several batched ones.

    They are summed after the last step, so that the device is not waited for in each step.
    """

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.rows: list[Tensor] = []

    def add(self, step_metrics: StepMetrics, rows: Tensor) -> None:
        """Store the metrics of a step and the unlabeled `rows` of its batch."""
        self.steps.append(step_metrics)
        self.rows.append(rows)

    def summarize(
        self, context: ClientContext, client: int, k: int = 0, amount: Amount | None = None
    ) -> tuple[dict[str, WeightedMetric], tuple[ObservedPseudoLabels, ...]]:
        """Sum a client's metrics over its steps.

        Args:
            context: the settings of this query.
            client: the number of the client.
            k: its position among batched clients.
            amount: its steps and images of each step; None if there is only one client.

        Returns:
            The summed metrics by name, and the pseudo-labels of all steps.

        Raises:
            Diverged: a loss is not finite or larger than `MAX_LOSS`.
        """
        if not self.steps or (amount is not None and amount.steps == 0):
            return {}, ()
        if amount is None:
            step_index: Any = slice(None)
            image_slice = slice(None)
        else:
            # Later steps repeat the client's last one, and further images of a step are padding.
            step_index = (slice(0, amount.steps), k)
            image_slice = slice(amount.unlabeled)

        def stack(leaves: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(leaves))[step_index]

        losses = stack(metrics.loss for metrics in self.steps).detach()
        _check_losses(context, client, losses)
        first = self.steps[0]
        samples = {"loss": WeightedMetric(losses.sum(), losses.square().sum(), torch.ones_like(losses).sum())}
        for name in first.samples:
            fields = zip(*(metrics.samples[name] for metrics in self.steps), strict=True)
            samples[name] = WeightedMetric(*(stack(field).sum(0) for field in fields))
        if not first.pseudo:
            return samples, ()

        def join(pseudo_labels: Iterable[PseudoLabels]) -> PseudoLabels:
            fields = zip(*pseudo_labels, strict=True)
            return PseudoLabels(*(stack(field)[:, image_slice].flatten() for field in fields))

        models = {name: join(metrics.models[name] for metrics in self.steps) for name in first.models}
        rows = stack(self.rows)[:, image_slice].flatten()
        pseudo = join(metrics.pseudo[0] for metrics in self.steps)
        return samples, (ObservedPseudoLabels(rows, pseudo, models),)


def _check_losses(context: ClientContext, client: int, losses: Tensor) -> None:
    """Raise `Diverged` at the first step of a client whose loss (steps,) is not finite or too large.

    This waits for the device, once a client and query; no step does (`tests/engine/test_meta_device.py`).
    """
    bad_steps = diverged(losses).nonzero()
    if len(bad_steps):
        step = int(bad_steps[0])
        raise Diverged(context.round, client, step, float(losses[step]))


def check_upload(
    context: ClientContext, client: int, upload: Upload, broadcast: Tree, steps: int, known_finite: bool = False
) -> None:
    """Check that an upload contains what its update declares, and only finite numbers.

    A finite loss in each step does not suffice: the weights can become infinite or NaN in the last step itself.

    Args:
        context: the settings of this query.
        client: the number of the client.
        upload: its upload.
        broadcast: what it received.
        steps: its number of steps.
        known_finite: all numbers are known to be finite.
    """
    context.client_update.requirements.upload_spec.check(upload, broadcast, type(context.client_update).__name__)
    if known_finite or is_finite(upload):
        return
    for name, leaf in tree.flatten(upload.tree).items():
        if not bool(leaf.isfinite().all()):
            value = float(leaf[~leaf.isfinite()].flatten()[0])
            # The last step is named, or step 0 of an update without steps.
            raise Diverged(context.round, client, max(0, steps - 1), value, f"upload '{name.removeprefix('update/')}'")


def is_finite(upload: Upload) -> bool:
    """Check whether all numbers of an upload are finite, waiting for the device only once.

    The sum of numbers is not finite if one of them is not, and takes a quarter of the time of a check of each. It can also
    overflow, so that False means: perhaps not finite.
    """
    finite = [leaf.sum().isfinite() for leaf in tree.leaves(upload.tree)]
    return not finite or bool(torch.stack(finite).all())


def add_metrics(old: WeightedMetric | None, new: WeightedMetric) -> WeightedMetric:
    """Add two sums of a metric; the first may be missing."""
    if old is None:
        return new
    return WeightedMetric(old.total + new.total, old.squares + new.squares, old.count + new.count)


def add_precomputed_views(context: ClientContext, client: int, data: ClientData) -> ClientData:
    """Add the views of all unlabeled rows that the update reads outside of its steps."""
    client_update = context.client_update
    names = client_update.requirements.precomputed_views
    normalize = client_update.task.normalize
    return compute_views(data, context.views, names, normalize, context.seed, *context.path(client))


def observe_initial_pseudo_labels(
    client_update: ClientUpdate, carry: Tree, data: ClientData, rows: int
) -> tuple[ObservedPseudoLabels, ...]:
    """Collect the pseudo-labels that an update computes once, before its steps, for diagnostics.

    Args:
        client_update: the update.
        carry: its state before the first step.
        data: the client's images, perhaps padded.
        rows: number of unlabeled images without padding.

    Returns:
        At most one entry; empty if the update computes pseudo-labels in each step.
    """
    observed: list[ObservedPseudoLabels] = []
    for pseudo_labels in client_update.initial_pseudo_labels(carry, data):
        unpadded = PseudoLabels(
            label=pseudo_labels.label[:rows],
            confidence=pseudo_labels.confidence[:rows],
            weight=pseudo_labels.weight[:rows],
        )
        row_numbers = torch.arange(rows, device=unpadded.label.device)
        observed.append(ObservedPseudoLabels(row_numbers, unpadded, models={}))
    return tuple(observed)
