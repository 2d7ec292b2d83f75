"""Client data and local training, for simulations and for sites.

In a simulation `LocalClients` trains all clients; a site trains only itself. All random numbers depend on (seed, round,
query, client), so that a site computes bit for bit what its client computes in a simulation.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation.precision import compress_upload
from halfmoon.api.types import Batch, ClientData, ClientUpdate, StateStore
from halfmoon.core import rng, tree
from halfmoon.core.memory import LARGE_MODEL_BYTES
from halfmoon.core.tensors import tensor_from_numpy
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.engine.budget import Budget, ClientSize, compute_amount
from halfmoon.engine.driver import (
    ClientContext,
    ClientResult,
    ClientTask,
    StepLog,
    add_precomputed_views,
    check_upload,
    create_first_memory,
    observe_initial_pseudo_labels,
    with_dropout,
)
from halfmoon.engine.evaluation import Examples, Quality
from halfmoon.engine.executors.base import Executor
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.sampling import Amount, Batching, Views, batches, draw
from halfmoon.engine.vmapped_clients import update_many


@dataclass(frozen=True)
class FederatedDataset:
    """Training images and their distribution over clients.

    Attributes:
        train: all training images, on the device that trains.
        split: the client of each image, and which images are labeled.
        all_labels: clients use all their images as labeled ones, as the supervised upper bounds of papers do.
        pooled: one client has all images, also those of the server: centralized training.
        reuse_labeled: a client's labeled images are also among its unlabeled ones (FedDB, Section 3.1).
        label_flippers: clients that train with false labels, class c as `classes` - 1 - c. Pseudo-labels are still
            compared with the true labels.
        classes: number of classes, needed only with label flippers.
    """

    train: Examples
    split: Split
    all_labels: bool = False
    pooled: bool = False
    reuse_labeled: bool = False
    label_flippers: frozenset[int] = frozenset()
    classes: int = 0

    @property
    def clients(self) -> int:
        """The number of clients."""
        return 1 if self.pooled else self.split.clients

    def stage(self, round: int, rounds: int) -> int | None:
        """Return the stage of the data stream at a round of `rounds`; None if all images are there from the start."""
        return None if self.split.stage is None else round * self.split.stages // rounds

    def training_size(self, client: int, stage: int | None = None) -> ClientSize:
        """Count the labeled and unlabeled rows on which a client trains."""
        if self.all_labels:
            return ClientSize(labeled=len(self._union(client, stage)), unlabeled=0)
        return self.split_size(client, stage)

    def split_size(self, client: int, stage: int | None = None) -> ClientSize:
        """Count the labeled and unlabeled rows of a client in the split, whether or not all count as labeled."""
        return ClientSize(
            labeled=len(self._rows(client, labeled=True, stage=stage)),
            unlabeled=len(self._rows(client, labeled=False, stage=stage)),
        )

    def client_data(self, client: int, stage: int | None = None) -> tuple[ClientData, Tensor]:
        """Collect the images of a client (or the `SERVER`), and the true labels of its unlabeled ones.

        The true labels only measure the quality of pseudo-labels: methods have no access to them.

        Args:
            client: the number of the client.
            stage: the stage of a data stream, up to which unlabeled images are included; None: all.

        Returns:
            The images and labels that the client trains on, and the hidden labels (U,) int64.
        """
        images, labels = self.train
        device = labels.device
        labeled_rows = tensor_from_numpy(self.rows(client, labeled=True, stage=stage)).to(device)
        unlabeled_rows = tensor_from_numpy(self.rows(client, labeled=False, stage=stage)).to(device)
        counts = torch.tensor([len(labeled_rows), len(unlabeled_rows)], device=device)
        y = labels[labeled_rows]
        if client in self.label_flippers:
            # A simulated attack: the client trains with false labels.
            y = self.classes - 1 - y
        data = ClientData(
            # Images that are mapped from a file are channels-last.
            x=images[labeled_rows].contiguous(),
            y=y,
            u=images[unlabeled_rows].contiguous(),
            labeled=counts[0],
            unlabeled=counts[1],
        )
        return data, labels[unlabeled_rows]

    def rows(self, client: int, labeled: bool, stage: int | None = None) -> np.ndarray:
        """Return the indices of the training images that a client (or the `SERVER`) uses as labeled or as unlabeled.

        With `all_labels`, the setting of supervised upper bounds, it uses all its images as labeled ones.

        Args:
            client: the number of the client; `SERVER` is a number, too.
            labeled: whether to return labeled images, or else unlabeled ones.
            stage: the stage of a data stream, up to which unlabeled images are included; None: all.

        Returns:
            int64 (n,).
        """
        if self.all_labels:
            return self._union(client, stage) if labeled else np.zeros(0, np.int64)
        return self._rows(client, labeled, stage)

    def _rows(self, client: int, labeled: bool, stage: int | None) -> np.ndarray:
        """Return the rows of the split; with `reuse_labeled` the unlabeled ones include the labeled ones."""
        if self.reuse_labeled and not labeled and client != SERVER:
            return self._union(client, stage)
        return self._split_rows(client, labeled, stage)

    def _union(self, client: int, stage: int | None) -> np.ndarray:
        """Return all rows of a client, labeled or not."""
        return np.union1d(self._split_rows(client, True, stage), self._split_rows(client, False, stage))

    def _split_rows(self, client: int, labeled: bool, stage: int | None) -> np.ndarray:
        """Return the rows of a client in the split; in centralized training all rows belong to one client."""
        if self.pooled:
            # Rows that neither a client nor the server has are those of client -1.
            return np.flatnonzero((self.split.client != -1) & (self.split.labeled == labeled))
        return self.split.rows(client, labeled, stage)


@dataclass(frozen=True)
class Training:
    """Settings of local training.

    Attributes:
        batching: batch sizes and number of steps.
        budget: adjusts the number of steps, so that methods are compared at equal cost.
        server_batching: the same for training at the server; None: as clients.
        executor: computes the updates of clients: one by one, in vmapped groups, or in several processes.
    """

    batching: Batching
    budget: Budget
    server_batching: Batching | None = None
    executor: Executor = field(default_factory=SerialExecutor)


@dataclass
class LocalClients:
    """Clients on this machine (and perhaps the server's labeled images), trained by an executor.

    Attributes:
        dataset: their images.
        views: the augmentations.
        training: how they train.
        seed: the seed of the run.
        memories: what clients store between their updates, by number.
        quality: collects the quality of pseudo-labels, for which a simulation, not the method, knows the true labels;
            None if they are not measured.
    """

    dataset: FederatedDataset
    views: Views
    training: Training
    seed: int
    memories: StateStore
    quality: Quality | None = None

    def train(
        self, context: ClientContext, clients: Sequence[int], broadcast: Tree, per_client: Tree
    ) -> Iterator[tuple[int, ClientResult]]:
        """Train clients (or the `SERVER`), store their memories, and yield their results in the order of `clients`.

        Results are not stored here, so that the caller can free an upload before the next client trains.

        Args:
            context: the query.
            clients: numbers of the clients.
            broadcast: the tree that all clients receive.
            per_client: leaves (K, ...), of which each client receives its slice too.

        Yields:
            Each client and its result, without the memory and the pseudo-labels; the upload in the precision in which it
            would be sent.
        """
        # In a data stream clients get more images over the rounds.
        stage = self.dataset.stage(context.round, context.client_update.task.rounds)
        hidden_labels: dict[int, Tensor] = {}  # true labels of unlabeled images, filled while clients train
        tasks = self._make_tasks(context.client_update, clients, stage, broadcast, per_client, hidden_labels)
        results = self.training.executor.run_clients(
            tasks,
            context.client_update,
            train_one=partial(update_one, context, broadcast),
            train_group=partial(update_many, context, broadcast),
        )
        for position, client in enumerate(clients):
            # Gradients are disabled only while clients train: the caller may need them between two results.
            with torch.no_grad():
                result = next(results)
            if result.memory:
                self.memories.put(str(client), result.memory)
            if self.quality is not None:
                for observed in result.observations:
                    self.quality.add(observed.pseudo, hidden_labels[client][observed.rows], observed.models)
            result = result._replace(memory={}, observations=())
            if client != SERVER and context.client_update.task.upload_precision != "float32":
                received = {**broadcast, **tree.index(per_client, position)}
                result = _encode_upload(context, client, received, result)
            yield client, result
            del result  # free the upload before the next client trains
        with torch.no_grad():
            next(results, None)  # let the map finish: a pool of processes ends its queue after the last result

    def _make_tasks(
        self,
        client_update: ClientUpdate,
        clients: Sequence[int],
        stage: int | None,
        broadcast: Tree,
        per_client: Tree,
        hidden_labels: dict[int, Tensor],
    ) -> Iterator[ClientTask]:
        """Return an iterator over the tasks of an executor, one for each client, in the order of `clients`.

        Args:
            client_update: the update that the clients run.
            clients: numbers of the clients.
            stage: the stage of a data stream; None if there is none.
            broadcast: the tree that all clients receive.
            per_client: leaves (K, ...), of which each client receives its slice too.
            hidden_labels: gets the true labels of each client's unlabeled images, by client, when its task is made.
        """
        amounts = [self._amount(client_update, client, stage) for client in clients]
        # Computed for one client only: a first memory may be a network, which takes time to initialize.
        first_received = {**broadcast, **tree.index(per_client, 0)}
        uses_memory = bool(create_first_memory(client_update, first_received, self.seed, clients[0]))

        def make_task(k: int) -> ClientTask:
            """Load the images and the memory of the k-th client, or create its first memory."""
            client = clients[k]
            private = tree.index(per_client, k)
            memory: Tree = {}
            if uses_memory:
                received = {**broadcast, **private}
                stored = self.memories.get(str(client))
                memory = stored or create_first_memory(client_update, received, self.seed, client)
            data, hidden_labels[client] = self.dataset.client_data(client, stage)
            group_key = self._group_key(client_update, client, stage, amounts[k], memory)
            return ClientTask(client, private, memory, data, amounts[k], group_key)

        return map(make_task, range(len(clients)))  # lazy: only the tasks of unfinished groups are in memory

    def _group_key(
        self, client_update: ClientUpdate, client: int, stage: int | None, amount: Amount, memory: Tree
    ) -> tuple[object, ...]:
        """Compute a key that is equal for clients which can be batched together under vmap.

        Their memories have equal shapes. If the update masks padding, any number of images fits together, but clients
        without a step do not join those with steps. Otherwise the images of a step must be equal, and the number of
        rows if the update reads all of them.

        Args:
            client_update: the update that the client runs.
            client: the number of the client.
            stage: the stage of a data stream; None if there is none.
            amount: the client's steps, and images of each step.
            memory: what the client stored after its last update. Leaves with an entry for each image (`row_memory`) are
                padded like the images.
        """
        requirements = client_update.requirements
        # Sorted, as a memory that was read from a file has another order of leaves than a new one.
        leaves = sorted(tree.flatten(memory).items())
        shapes = tuple(leaf.shape for path, leaf in leaves if path not in requirements.row_memory)
        if requirements.masks_padding:
            has_steps = min(amount.steps, 1)
            return (has_steps,), shapes
        sizes = [amount.labeled, amount.unlabeled]
        if requirements.needs_full_batch:
            rows = self.dataset.training_size(client, stage)
            sizes += [rows.labeled, rows.unlabeled]
        return tuple(sizes), shapes

    def _amount(self, client_update: ClientUpdate, client: int, stage: int | None) -> Amount:
        """Compute the number of steps of a client's update, and of images in a step.

        Args:
            client_update: the update.
            client: the number of the client, or `SERVER`.
            stage: the stage of a data stream; None if there is none.
        """
        if client == SERVER:
            # The budget, which makes methods equally expensive, applies to clients only.
            batching = self.training.server_batching or self.training.batching
            return compute_amount(batching, client_update, self.dataset.training_size(client))
        return self.training.budget.amount(
            self.training.batching,
            client_update,
            self.dataset.training_size(client, stage),
            self.dataset.split_size(client, stage),
        )


def _encode_upload(context: ClientContext, client: int, received: Tree, result: ClientResult) -> ClientResult:
    """Convert an upload to the precision in which it is sent (`Task.upload_precision`), and count its bytes.

    Args:
        context: the query; with the client it names the random stream of stochastic rounding.
        client: the number of the client.
        received: the tree that the client received.
        result: the result of its update.
    """
    update = context.client_update
    make_generator = partial(rng.generator, context.seed, "upload", context.round, context.query, client)
    upload = compress_upload(
        result.upload, received, update.task.upload_precision, update.requirements.upload_spec, make_generator
    )
    return result._replace(upload=upload, traffic=update.traffic(received, upload))


@torch.no_grad()
def update_one(context: ClientContext, broadcast: Tree, task: ClientTask) -> ClientResult:
    """Run one client's update in a plain loop, as a CPU and a site of a federation do.

    `ClientUpdate.begin` creates the carry, the state of the update between its steps (parameters, running statistics,
    optimizer). Each step takes a minibatch and returns a new carry, and `ClientUpdate.finish` turns the last one into
    the upload and the memory.

    All images and weights are channels-last inside of this function, the layout for which the convolutions of CPUs and of
    a GPU's tensor cores are made; those of a large model on a CPU are contiguous. So are upload and memory in any case, so
    that they do not depend on how they were computed.

    Args:
        context: the settings of this query: what the clients run, and the names of its random streams.
        broadcast: the tree that all clients receive.
        task: the client, with its images, its memory and the tree that only this client receives; it is not modified.

    Raises:
        Diverged: a loss or a number of the upload is not finite, or a loss is larger than `MAX_LOSS`.
    """
    client_update = context.client_update
    received = {**broadcast, **task.private}
    lay_out = _choose_layout(received)
    received = lay_out(received)
    memory = tree.map(torch.clone, task.memory)  # the optimizer modifies it, and a store may have a reference to it
    memory = lay_out(memory)
    data = add_precomputed_views(context, task.client, task.data)
    # `begin` comes before the draws: its pseudo-labels may exclude images from the minibatches.
    carry = client_update.begin(received, memory, data)
    initial_pseudo_labels = observe_initial_pseudo_labels(client_update, carry, data, len(data.u))
    drawn_update = draw(
        task.amount,
        data,
        context.views,
        client_update.requirements,
        client_update.drawable_rows(carry, data),
        context.seed,
        *context.path(task.client),
        dropout=client_update.task.network.has_dropout,
    )
    log = StepLog()
    take_step = with_dropout(client_update)
    normalize = client_update.task.normalize
    for batch_of_one_client in batches([data], [drawn_update], context.views, normalize, context.view_images):
        batch = _lay_out_batch(_first_client(batch_of_one_client), lay_out)
        carry, step_metrics = take_step(received, carry, batch)
        log.add(step_metrics, batch.u_rows)
    samples, step_pseudo_labels = log.summarize(context, task.client)
    upload, memory = client_update.finish(received, carry, data)
    # A faulty upload is an error here, which names the step, instead of a refusal at the server.
    check_upload(context, task.client, upload, received, drawn_update.amount.steps)
    traffic = client_update.traffic(received, upload)
    upload = upload.map(Tensor.contiguous)
    memory = tree.contiguous(memory)
    return ClientResult(
        upload=upload,
        memory=memory,
        samples=samples,
        amount=drawn_update.amount,
        traffic=traffic,
        images_outside_steps=client_update.images_outside_steps(len(data.x), len(data.u)),
        memory_bytes=tree.nbytes(memory),
        observations=initial_pseudo_labels or step_pseudo_labels,
    )


def _first_client(batch: Batch) -> Batch:
    """Remove the client dimension of the batch of a single client, which has no padding."""
    leaves: dict[str, Any] = {}
    for name, leaf in batch._asdict().items():
        if name != "real":
            leaves[name] = leaf[0] if isinstance(leaf, Tensor) else tree.index(leaf, 0)
    return Batch(**leaves)


def _choose_layout(received: Tree) -> Callable[[Tree], Tree]:
    """Choose the layout of images and weights in which one client trains, by what it receives: the same everywhere.

    Channels-last, except for a large model on a CPU: its weights outweigh its images, and PyTorch copies channels-last
    gradients of weights once more.
    """
    params = received["params"] if isinstance(received.get("params"), dict) else received
    is_large = tree.nbytes(params) >= LARGE_MODEL_BYTES
    if is_large and next(tree.leaves(params)).device.type == "cpu":
        return tree.contiguous
    return tree.channels_last


def _lay_out_batch(batch: Batch, lay_out: Callable[[Tree], Tree]) -> Batch:
    """Convert all images of a batch; features of images have no channels and remain as they are."""
    return batch._replace(
        x=lay_out({"x": batch.x})["x"],
        u=lay_out(batch.u),
        second_batch=lay_out(batch.second_batch),
        x_views=lay_out(batch.x_views),
    )
