"""Run the update of a client: begin, one step a batch, finish. One client runs in a loop, several batched by vmap."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, ClientUpdate, PseudoLabels, StepMetrics, WeightedMetric
from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree
from halfmoon.core.autodiff import vmap_clients
from halfmoon.core.errors import Diverged
from halfmoon.core.memory import LARGE_MODEL_BYTES
from halfmoon.core.tree import Tree
from halfmoon.engine.budget import ClientSize
from halfmoon.engine.groups import WorkSize
from halfmoon.engine.sampling import Amount, DrawnUpdate, Views, batches, compute_views, draw
from halfmoon.models.dropout import KEY, dropout_key


class ObservedPseudoLabels(NamedTuple):
    """Pseudo-labels that a client update made; diagnostics compare them with the true labels."""

    rows: Tensor  # (n,) int64, the unlabeled rows of the client
    pseudo: PseudoLabels  # of these rows
    models: dict[str, PseudoLabels]  # the pseudo-labels of single models, by name


MAX_LOSS = 1e6
"""A larger loss means that training has diverged: that of an untrained network is log(classes), 2.3 for ten classes."""

MAX_DROPOUT_KEY = 2**62
"""Keys of a step's dropout masks are drawn below this number."""


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


@dataclass(frozen=True)
class Query:
    """A query and its broadcast, as a function of the clients that train together.

    An executor (`halfmoon.engine.executors`) calls it, in any process.
    """

    context: ClientContext
    broadcast: Tree

    def __call__(self, tasks: Sequence[ClientTask]) -> dict[int, ClientResult]:
        """Train clients, batched by `torch.func.vmap` if there are several, and return their results by number."""
        with torch.no_grad():
            if len(tasks) == 1:
                # For one client vmap would only add overhead.
                task = tasks[0]
                received = {**self.broadcast, **task.private}
                result = update_one(self.context, task.client, received, task.memory, task.data, task.amount)
                return {task.client: result}
            per_client = tree.stack([task.private for task in tasks])
            results = update_many(self.context, self.broadcast, per_client, tasks)
        return {task.client: result for task, result in zip(tasks, results, strict=True)}


def update_one(
    context: ClientContext, client: int, broadcast: Tree, memory: Tree, data: ClientData, amount: Amount
) -> ClientResult:
    """Run one client's update in a plain loop, as a CPU and a site of a federation do.

    `ClientUpdate.begin` creates the carry, the state of the update between its steps (parameters, running statistics,
    optimizer). Each step takes a minibatch and returns a new carry, and `ClientUpdate.finish` turns the last one into
    the upload and the memory.

    All images and weights are channels-last inside of this function, the layout for which the convolutions of CPUs and of
    a GPU's tensor cores are made; those of a large model on a CPU are contiguous. So are upload and memory in any case, so
    that they do not depend on how they were computed.

    Args:
        context: the settings of this query: what the clients run, and the names of its random streams.
        client: the number of the client.
        broadcast: all that the client receives, also what only this client receives.
        memory: what the client stored at its last update; it is not modified.
        data: the client's images.
        amount: steps, and images of each step.

    Raises:
        Diverged: a loss or a number of the upload is not finite, or a loss is larger than `MAX_LOSS`.
    """
    client_update = context.client_update
    memory = tree.map(torch.clone, memory)  # the optimizer modifies it, and a store may have a reference to it
    lay_out = _choose_layout(broadcast)
    broadcast = lay_out(broadcast)
    memory = lay_out(memory)
    data = _add_precomputed_views(context, client, data)
    # `begin` comes before the draws: its pseudo-labels may exclude images from the minibatches.
    carry = client_update.begin(broadcast, memory, data)
    initial_pseudo_labels = _initial_pseudo_labels(client_update, carry, data, len(data.u))
    drawn_update = _draw(context, client, data, amount, client_update.drawable_rows(carry, data))
    log = _StepLog()
    take_step = _with_dropout(client_update)
    normalize = client_update.task.normalize
    for batch_of_one_client in batches([data], [drawn_update], context.views, normalize, context.view_images):
        batch = _lay_out_batch(_first_client(batch_of_one_client), lay_out)
        carry, step_metrics = take_step(broadcast, carry, batch)
        log.add(step_metrics, batch.u_rows)
    samples, step_pseudo_labels = log.summarize(context, client)
    upload, memory = client_update.finish(broadcast, carry, data)
    # A faulty upload is an error here, which names the step, instead of a refusal at the server.
    _check_upload(context, client, upload, broadcast, drawn_update.amount.steps)
    traffic = client_update.traffic(broadcast, upload)
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


def update_many(
    context: ClientContext, broadcast: Tree, per_client: Tree, tasks: Sequence[ClientTask]
) -> list[ClientResult]:
    """Run the updates of K clients at once, batched by vmap.

    Clients of unequal size are padded to the largest one. The state of a client that has taken all its steps no longer
    changes. An update that does not mask padding needs clients with equal images a step and, if it reads all images of
    a client at once, of equal size.

    Args:
        context: the settings of this query.
        broadcast: the tree that all clients receive.
        per_client: the trees that single clients receive, stacked: leaves (K, ...).
        tasks: the K clients.

    Returns:
        The results in the order of the tasks.

    Raises:
        Diverged: a loss or a number of an upload is not finite, or a loss is larger than `MAX_LOSS`.
    """
    client_update = context.client_update
    views = context.views
    normalize = client_update.task.normalize
    clients_data = [_add_precomputed_views(context, task.client, task.data) for task in tasks]
    padded = _pad(clients_data)
    longest_unlabeled = padded.u.shape[1]
    memory = tree.stack(
        [
            _pad_row_memory(client_update, task.memory, data, longest_unlabeled)
            for task, data in zip(tasks, clients_data, strict=True)
        ]
    )

    def lift(function: Callable[..., Any]) -> Callable[..., Any]:
        """Vmap a method of the update. Only what differs gets a client dimension; the broadcast is shared."""

        def call_for_one_client(private: Tree, *rest: Any) -> Any:
            return function({**broadcast, **private}, *rest)

        return vmap_clients(call_for_one_client)

    # As in `update_one`: begin, draw (which needs the carry), all steps, finish.
    carry: Tree = lift(client_update.begin)(per_client, memory, padded)
    makes_initial_pseudo_labels = bool(client_update.initial_pseudo_labels(carry, padded))

    def observe_initial_pseudo_labels(k: int) -> tuple[ObservedPseudoLabels, ...]:
        if not makes_initial_pseudo_labels:
            return ()
        client_carry = tree.index(carry, k)
        return _initial_pseudo_labels(client_update, client_carry, _one_client(padded, k), len(clients_data[k].u))

    def draw_for_client(k: int) -> DrawnUpdate:
        # Slices of the first carry must not outlive this call: they would keep it in memory for all steps.
        drawable = client_update.drawable_rows(tree.index(carry, k), _one_client(padded, k))
        return _draw(context, tasks[k].client, clients_data[k], tasks[k].amount, drawable)

    initial_pseudo_labels = [observe_initial_pseudo_labels(k) for k in range(len(tasks))]
    draws = [draw_for_client(k) for k in range(len(tasks))]
    steps = torch.tensor([update.amount.steps for update in draws], device=padded.y.device)
    fewest_steps = min(update.amount.steps for update in draws)
    take_step = lift(_with_dropout(client_update))
    log = _StepLog()
    for number, batch in enumerate(batches(clients_data, draws, views, normalize, context.view_images)):
        new_carry, step_metrics = take_step(per_client, carry, batch)
        if number < fewest_steps:
            carry = new_carry
        else:
            # Some clients have taken all their steps: they keep their state.
            carry = vmap_clients(tree.select)(number < steps, new_carry, carry)
        log.add(step_metrics, batch.u_rows)
    logs = [log.summarize(context, task.client, k, draws[k].amount) for k, task in enumerate(tasks)]
    upload, memory = lift(client_update.finish)(per_client, carry, padded)
    is_finite = _is_finite(upload)  # checked for all clients at once: each check waits for the device
    results: list[ClientResult] = []
    for k, task in enumerate(tasks):
        client_upload = upload.at(k)
        received = {**broadcast, **tree.index(per_client, k)}
        _check_upload(context, task.client, client_upload, received, draws[k].amount.steps, is_finite)
        # Cloned, as a slice would keep the memories of the whole group alive.
        client_memory = tree.map(
            torch.clone, _unpad_row_memory(client_update, tree.index(memory, k), len(clients_data[k].u))
        )
        samples, step_pseudo_labels = logs[k]
        labeled = len(clients_data[k].x)
        unlabeled = len(clients_data[k].u)
        result = ClientResult(
            upload=client_upload,
            memory=client_memory,
            samples=samples,
            amount=draws[k].amount,
            traffic=client_update.traffic(received, client_upload),
            images_outside_steps=client_update.images_outside_steps(labeled, unlabeled),
            memory_bytes=tree.nbytes(client_memory),
            observations=initial_pseudo_labels[k] or step_pseudo_labels,
        )
        results.append(result)
    return results


def _with_dropout(client_update: ClientUpdate) -> Callable[[Tree, Tree, Batch], tuple[Tree, StepMetrics]]:
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


class _StepLog:
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


def _check_upload(
    context: ClientContext, client: int, upload: Upload, broadcast: Tree, steps: int, is_finite: bool | None = None
) -> None:
    """Check that an upload contains what its update declares, and only finite numbers.

    A finite loss in each step does not suffice: the weights can become infinite or NaN in the last step itself.

    Args:
        context: the settings of this query.
        client: the number of the client.
        upload: its upload.
        broadcast: what it received.
        steps: its number of steps.
        is_finite: True if all numbers are known to be finite.
    """
    context.client_update.requirements.upload_spec.check(upload, broadcast, type(context.client_update).__name__)
    if is_finite is None:
        is_finite = _is_finite(upload)
    if is_finite:
        return
    for name, leaf in tree.flatten(upload.tree).items():
        if not bool(leaf.isfinite().all()):
            value = float(leaf[~leaf.isfinite()].flatten()[0])
            # The last step is named, or step 0 of an update without steps.
            raise Diverged(context.round, client, max(0, steps - 1), value, f"upload '{name.removeprefix('update/')}'")


def _is_finite(upload: Upload) -> bool:
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


def _draw(
    context: ClientContext, client: int, data: ClientData, amount: Amount, drawable: Tensor | None
) -> DrawnUpdate:
    """Draw all random choices of one client's update: minibatches, augmentations and, if needed, dropout keys.

    The update itself draws nothing, so that it gives the same result alone, under vmap and on another machine. The random
    stream is named by the seed, round, query and client.

    Args:
        context: the settings of this query.
        client: the number of the client.
        data: its images, without padding.
        amount: steps, and images of each step.
        drawable: the unlabeled images that may be drawn, (U,) bool; None: all.
    """
    requirements = context.client_update.requirements
    update = draw(amount, data, context.views, requirements, drawable, context.seed, *context.path(client))
    if not context.client_update.task.network.has_dropout:
        return update
    generator = rng.generator(context.seed, *context.path(client), KEY)
    # One key a step: dropout masks are computed from it inside of vmap, where no generator can be used.
    keys = torch.randint(MAX_DROPOUT_KEY, (update.amount.steps,), generator=generator)
    # `mixing` has the draws with one entry a step.
    return update._replace(mixing={**update.mixing, KEY: keys})


def _add_precomputed_views(context: ClientContext, client: int, data: ClientData) -> ClientData:
    """Add the views of all unlabeled rows that the update reads outside of its steps."""
    client_update = context.client_update
    names = client_update.requirements.precomputed_views
    normalize = client_update.task.normalize
    return compute_views(data, context.views, names, normalize, context.seed, *context.path(client))


def _first_client(batch: Batch) -> Batch:
    """Remove the client dimension of the batch of a single client, which has no padding."""
    fields: dict[str, Any] = {}
    for name, field in batch._asdict().items():
        if name != "real":
            fields[name] = field[0] if isinstance(field, Tensor) else tree.index(field, 0)
    return Batch(**fields)


def _choose_layout(broadcast: Tree) -> Callable[[Tree], Tree]:
    """Choose the layout of images and weights in which one client trains, by what it receives: the same everywhere.

    Channels-last, except for a large model on a CPU: its weights outweigh its images, and PyTorch copies channels-last
    gradients of weights once more.
    """
    params = broadcast["params"] if isinstance(broadcast.get("params"), dict) else broadcast
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


def _one_client(padded: ClientData, k: int) -> ClientData:
    """Return the data of client k from the data of stacked clients (leaves (K, ...)); it retains its padding."""
    return ClientData(
        x=padded.x[k],
        y=padded.y[k],
        u=padded.u[k],
        labeled=padded.labeled[k],
        unlabeled=padded.unlabeled[k],
        views=tree.index(padded.views, k),
        real=tree.index(padded.real, k),
    )


def _pad_row_memory(client_update: ClientUpdate, memory: Tree, data: ClientData, length: int) -> Tree:
    """Pad the leaves of a client's memory that have an entry for each unlabeled image, so that clients can be stacked.

    If the client has another number of images than at its last update, these leaves are reset.

    Args:
        client_update: declares these leaves, and the value of an empty entry, in `UpdateRequirements.row_memory`.
        memory: the client's memory.
        data: its images.
        length: number of entries after padding.
    """
    row_memory = client_update.requirements.row_memory
    if not row_memory:
        return memory
    leaves = tree.flatten(memory)
    for path, empty_value in row_memory.items():
        leaf = leaves[path]
        rows = leaf if len(leaf) == len(data.u) else leaf[:0]  # no entry, if the images have changed
        leaves[path] = torch.cat([rows, leaf.new_full((length - len(rows),), empty_value)])
    return tree.unflatten(leaves)


def _unpad_row_memory(client_update: ClientUpdate, memory: Tree, length: int) -> Tree:
    """Remove the padding of `_pad_row_memory`: cut leaves with an entry for each unlabeled image to `length` entries."""
    row_memory = client_update.requirements.row_memory
    if not row_memory:
        return memory
    leaves = tree.flatten(memory)
    for path in row_memory:
        leaves[path] = leaves[path][:length]
    return tree.unflatten(leaves)


def _initial_pseudo_labels(
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


def _repeat_rows(images: Tensor, length: int) -> Tensor:
    """Repeat images from the first one until there are `length`; without any, return zeros, which the mask excludes."""
    if not len(images):
        return images.new_zeros((length, *images.shape[1:]))
    return images[torch.arange(length, device=images.device) % len(images)]


def _pad(clients_data: Sequence[ClientData]) -> ClientData:
    """Stack the images of K clients; a smaller client is padded by repeating its images from the first one.

    Args:
        clients_data: each client's images.

    Returns:
        All leaves (K, ...). `real` is True for rows that are not padding; it is {} if there is no padding.
    """
    longest_x = max(len(data.x) for data in clients_data)
    longest_u = max(len(data.u) for data in clients_data)
    real: dict[str, Tensor] = {}
    if any(len(data.x) < longest_x or len(data.u) < longest_u for data in clients_data):
        device = clients_data[0].y.device
        x_positions = torch.arange(longest_x, device=device)
        u_positions = torch.arange(longest_u, device=device)
        real["x"] = torch.stack([x_positions < data.labeled for data in clients_data])
        real["u"] = torch.stack([u_positions < data.unlabeled for data in clients_data])
    views: dict[str, Tensor] = {}
    for name in clients_data[0].views:
        views[name] = torch.stack([_repeat_rows(data.views[name], longest_u) for data in clients_data])
    return ClientData(
        x=torch.stack([_repeat_rows(data.x, longest_x) for data in clients_data]),
        y=torch.stack([_repeat_rows(data.y, longest_x) for data in clients_data]),
        u=torch.stack([_repeat_rows(data.u, longest_u) for data in clients_data]),
        labeled=torch.stack([data.labeled for data in clients_data]),
        unlabeled=torch.stack([data.unlabeled for data in clients_data]),
        views=views,
        real=real,
    )
