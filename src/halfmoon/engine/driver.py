"""The driver of a client's update: begin, step by step, finish; for one client in a loop, or for K lifted by vmap."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, ClientUpdate, PseudoLabels, StepMetrics, WeightedMetric
from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree
from halfmoon.core.autodiff import vmap_clients
from halfmoon.core.tree import Tree
from halfmoon.engine.budget import ClientSize
from halfmoon.engine.programs import Extent
from halfmoon.engine.sampling import Amount, DrawnUpdate, Views, batches, draw, sweep


class Observed(NamedTuple):
    """Pseudo-labels of a client update and the unlabeled rows that they are of, (n,): diagnostics compare them."""

    rows: Tensor  # (n,) int64
    pseudo: PseudoLabels
    models: dict[str, PseudoLabels]


ABSURD = 1e6
"""A loss that means nothing: an untrained network's is log(classes), 2.3 with ten of them."""


class Diverged(RuntimeError):
    """A loss or a weight is no finite number, or a loss is absurdly large: training has to stop.

    `round`, `client` and `step` count from 0; the last two are None where the model of a whole round is meant. `value`
    is that of the `quantity`, the loss or a weight.
    """

    def __init__(self, round: int, client: int | None, step: int | None, value: float, quantity: str = "loss") -> None:
        place = "" if client is None or step is None else f" at client {client}, step {step + 1}"
        super().__init__(
            f"The {quantity} became {value:.6g} in round {round + 1}{place}: training stopped. "
            "The last checkpoint is from before it; a smaller learning rate is the usual remedy."
        )
        self.round, self.client, self.step, self._value, self._quantity = round, client, step, value, quantity

    def __reduce__(self) -> "tuple[type[Diverged], tuple[int, int | None, int | None, float, str]]":
        return type(self), (self.round, self.client, self.step, self._value, self._quantity)


def diverged(losses: Tensor) -> Tensor:
    """Return which losses (n,) are not finite or larger than `ABSURD`, (n,) bool."""
    return ~(losses.abs() <= ABSURD)


def images_per_call(device: torch.device) -> int:
    """Return of how many images views are made in one call: what fits a CPU's cache, or fills a GPU."""
    return 512 if device.type == "cpu" else 8192


@dataclass(frozen=True)
class ClientContext:
    """One query to the clients: what they are asked, when, and under which seed."""

    client_update: ClientUpdate
    views: Views
    seed: int
    round: int
    query: int
    rows: int = 512  # images whose views are made in one call

    def path(self, client: int) -> tuple[str, int, int, int]:
        """Return where the random numbers of a client update come from, with the seed."""
        return ("visit", self.round, self.query, client)


class ClientResult(NamedTuple):
    """What one client's update leaves: its upload, its memory, and what was counted.

    `swept` images went through the network outside the steps; `memory_bytes` is the memory's size, wherever that is.
    `observations` are its pseudo-labels, for whoever knows the hidden labels.
    """

    upload: Upload
    memory: Tree
    samples: dict[str, WeightedMetric]
    amount: Amount
    traffic: tuple[int, int]  # bytes down and up
    images_outside_steps: int = 0
    memory_bytes: int = 0
    observations: tuple[Observed, ...] = ()


class ClientTask(NamedTuple):
    """What one client needs for its update, beside what all clients of a query are sent."""

    client: int
    private: Tree  # merged into what all are sent
    memory: Tree
    data: ClientData
    amount: Amount
    kind: tuple[object, ...] = ()  # what those that train as one program have in common

    @property
    def extent(self) -> Extent:
        return Extent(self.amount, ClientSize(len(self.data.x), len(self.data.u)))


@dataclass(frozen=True)
class Query:
    """One query and what it sends to all clients; called with those that train as one program, it trains them."""

    context: ClientContext
    broadcast: Tree

    def __call__(self, tasks: Sequence[ClientTask]) -> dict[int, ClientResult]:
        return update_together(self.context, self.broadcast, tasks)


def update_together(context: ClientContext, broadcast: Tree, tasks: Sequence[ClientTask]) -> dict[int, ClientResult]:
    """Return what comes of the clients that train as one program, by client; of one alone, in a plain loop.

    Lifting one client only costs. It is what a `halfmoon.engine.evaluation.ParallelMap` applies, in whichever process.
    """
    with torch.no_grad():
        if len(tasks) == 1:
            client, private, memory, data, amount, _ = tasks[0]
            return {client: update_one(context, client, {**broadcast, **private}, memory, data, amount)}
        results = update_many(context, broadcast, tree.stack([each.private for each in tasks]), tasks)
    return {task.client: result for task, result in zip(tasks, results, strict=True)}


def update_one(
    context: ClientContext, client: int, broadcast: Tree, memory: Tree, data: ClientData, amount: Amount
) -> ClientResult:
    """Run a client update in a plain loop: what a CPU, and a site in a real federation, does.

    On a CPU everything is laid out channels-last in here, and plain again outside: what goes up and what is remembered
    does not depend on how it was computed.
    """
    client_update = context.client_update
    memory = tree.map(torch.clone, memory)  # its optimizer writes into it, and it may lie in a store
    laid = data.x.device.type == "cpu"
    if laid:
        broadcast, memory = tree.channels_last(broadcast), tree.channels_last(memory)
    data = _swept(context, client, data)
    carry = client_update.begin(broadcast, memory, data)
    guesses = _guesses(client_update, carry, data, len(data.u))
    update = _draw(context, client, data, amount, client_update.drawable_rows(carry, data))
    log = _Log()
    for stacked in batches([data], [update], context.views, client_update.task.normalize, context.rows):
        batch = _one(stacked)
        batch = _laid(batch) if laid else batch
        carry, notes = client_update.step(broadcast, carry, batch)
        log.add(notes, batch.u_rows)
    samples, observations = log.of(context, client)
    upload, memory = client_update.finish(broadcast, carry, data)
    _check_upload(context, client, upload, broadcast, update.amount.steps)
    traffic = client_update.traffic(broadcast, upload)
    upload, memory = upload.map(Tensor.contiguous), tree.contiguous(memory)
    swept, size = client_update.images_outside_steps(len(data.x), len(data.u)), tree.nbytes(memory)
    return ClientResult(upload, memory, samples, update.amount, traffic, swept, size, guesses or observations)


def update_many(
    context: ClientContext, downlinks: Tree, per_client: Tree, tasks: Sequence[ClientTask]
) -> list[ClientResult]:
    """Run K client updates as one program; `downlinks` is shared, `per_client` differs (leaves (K, ...)).

    Clients with fewer steps are frozen when theirs are over. Those of a
    work that does not mask padding need equal images a step and, if it looks at `whole` clients, one size.
    """
    client_update, views, normalize = context.client_update, context.views, context.client_update.task.normalize
    datas = [_swept(context, task.client, task.data) for task in tasks]
    padded = _padded(datas)
    length = padded.u.shape[1]
    memory = tree.stack(
        [_filled(client_update, task.memory, data, length) for task, data in zip(tasks, datas, strict=True)]
    )

    def merged(function: Callable[..., Any]) -> Callable[..., Any]:
        """Lift, and merge the shared and the private part of `broadcast` inside the lifted function."""

        def one(private: Tree, *rest: Any) -> Any:
            return function({**downlinks, **private}, *rest)

        return vmap_clients(one)

    carry: Tree = merged(client_update.begin)(per_client, memory, padded)
    guesses = [
        _guesses(client_update, tree.index(carry, k), _local(padded, k), len(data.u))
        if client_update.initial_pseudo_labels(carry, padded)
        else ()
        for k, data in enumerate(datas)
    ]
    updates = [
        _draw(
            context,
            task.client,
            data,
            task.amount,
            client_update.drawable_rows(tree.index(carry, k), _local(padded, k)),
        )
        for k, (task, data) in enumerate(zip(tasks, datas, strict=True))
    ]
    device = padded.y.device
    steps = torch.tensor([update.amount.steps for update in updates], device=device)
    fewest = min(update.amount.steps for update in updates)
    step, log = merged(client_update.step), _Log()
    for t, batch in enumerate(batches(datas, updates, views, normalize, context.rows)):
        new, notes = step(per_client, carry, batch)
        carry = new if t < fewest else vmap_clients(tree.select)(t < steps, new, carry)
        log.add(notes, batch.u_rows)
    logs = [log.of(context, task.client, k, updates[k].amount) for k, task in enumerate(tasks)]
    upload, memory = merged(client_update.finish)(per_client, carry, padded)
    results: list[ClientResult] = []
    finite = _finite(upload)  # of all clients at once
    for k, task in enumerate(tasks):
        mine, received = upload.at(k), {**downlinks, **tree.index(per_client, k)}
        _check_upload(context, task.client, mine, received, updates[k].amount.steps, finite)
        # A clone: a slice would keep the memories of the whole group alive.
        own = tree.map(torch.clone, _filled(client_update, tree.index(memory, k), datas[k]))
        traffic = client_update.traffic(received, mine)
        samples, labels = logs[k]
        amount, swept = updates[k].amount, client_update.images_outside_steps(len(datas[k].x), len(datas[k].u))
        size, labels = tree.nbytes(own), guesses[k] or labels
        results.append(ClientResult(mine, own, samples, amount, traffic, swept, size, labels))
    return results


def first_memory(client_update: ClientUpdate, broadcast: Tree, seed: int, client: int) -> Tree:
    """Return the memory that a client starts with; its random numbers are the client's or shared, as it requires."""
    return client_update.initial_memory(
        broadcast,
        rng.generator(seed, "remember", *((client,) if client_update.requirements.per_client_generator else ())),
    )


class _Log:
    """What the steps of a client update, or of several as one program, report: added up once, when they are over."""

    def __init__(self) -> None:
        self.steps: list[StepMetrics] = []
        self.rows: list[Tensor] = []

    def add(self, notes: StepMetrics, rows: Tensor) -> None:
        """Keep what a step reports of unlabeled `rows`; nothing is computed."""
        self.steps.append(notes)
        self.rows.append(rows)

    def of(
        self, context: ClientContext, client: int, k: int = 0, amount: Amount | None = None
    ) -> tuple[dict[str, WeightedMetric], tuple[Observed, ...]]:
        """Return the sums over a client's steps, and its pseudo-labels; in a program, of its place `k` and `amount`.

        Raise `Diverged` where a loss is not finite or absurdly large.
        """
        many = slice(None) if amount is None else (slice(0, amount.steps), k)
        if not self.steps or (amount is not None and amount.steps == 0):
            return {}, ()
        own = slice(None if amount is None else amount.unlabeled)  # of a step's unlabeled images, the rest is padding

        def stack(leaves: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(leaves))[many]

        losses = stack(notes.loss for notes in self.steps).detach()
        bad = diverged(losses).nonzero()
        if len(bad):
            raise Diverged(context.round, client, int(bad[0]), float(losses[bad[0]]))
        first = self.steps[0]
        samples = {"loss": WeightedMetric(losses.sum(), losses.square().sum(), torch.ones_like(losses).sum())}
        for name in first.samples:
            parts = zip(*(notes.samples[name] for notes in self.steps), strict=True)
            samples[name] = WeightedMetric(*(stack(part).sum(0) for part in parts))
        if not first.pseudo:
            return samples, ()

        def pseudo(each: Iterable[PseudoLabels]) -> PseudoLabels:
            return PseudoLabels(*(stack(leaves)[:, own].flatten() for leaves in zip(*each, strict=True)))

        models = {name: pseudo(notes.models[name] for notes in self.steps) for name in first.models}
        rows = stack(self.rows)[:, own].flatten()
        return samples, (Observed(rows, pseudo(notes.pseudo[0] for notes in self.steps), models),)


def _check_upload(
    context: ClientContext, client: int, upload: Upload, broadcast: Tree, steps: int, finite: bool | None = None
) -> None:
    """Refuse an upload that holds what its work does not declare, or that the last step has spoiled: its loss was still
    finite. `finite` says whether all is, where that is known.
    """
    context.client_update.requirements.upload_spec.check(upload, broadcast, type(context.client_update).__name__)
    if _finite(upload) if finite is None else finite:
        return
    for name, leaf in tree.flatten(upload.tree).items():
        if not bool(leaf.isfinite().all()):
            worst = float(leaf[~leaf.isfinite()].flatten()[0])
            raise Diverged(context.round, client, max(0, steps - 1), worst, f"upload '{name.removeprefix('update/')}'")


def _finite(upload: Upload) -> bool:
    """Say whether all numbers of an upload are finite; the device is asked once."""
    fine = [leaf.isfinite().all() for leaf in tree.leaves(upload.tree)]
    return not fine or bool(torch.stack(fine).all())


def add_metrics(old: WeightedMetric | None, new: WeightedMetric) -> WeightedMetric:
    if old is None:
        return new
    return WeightedMetric(old.total + new.total, old.squares + new.squares, old.count + new.count)


def _draw(context: ClientContext, client: int, data: ClientData, amount: Amount, keep: Tensor | None) -> DrawnUpdate:
    requirements = context.client_update.requirements
    return draw(amount, data, context.views, requirements, keep, context.seed, *context.path(client))


def _swept(context: ClientContext, client: int, data: ClientData) -> ClientData:
    normalize = context.client_update.task.normalize
    return sweep(
        data,
        context.views,
        context.client_update.requirements.precomputed_views,
        normalize,
        context.seed,
        *context.path(client),
    )


def _one(batch: Batch) -> Batch:
    parts: list[Any] = [leaf[0] if isinstance(leaf, Tensor) else tree.index(leaf, 0) for leaf in batch[:8]]
    return Batch(*parts)


def _laid(batch: Batch) -> Batch:
    own = {"x": batch.x}  # images, or features, which have no channels
    x, u, others, more = (tree.channels_last(part) for part in (own, batch.u, batch.second_batch, batch.x_views))
    return batch._replace(x=x["x"], u=u, second_batch=others, x_views=more)


def _local(padded: ClientData, k: int) -> ClientData:
    views, real = tree.index(padded.views, k), tree.index(padded.real, k)
    return ClientData(*(leaf[k] for leaf in padded[:5]), views=views, real=real)


def _filled(client_update: ClientUpdate, memory: Tree, data: ClientData, length: int | None = None) -> Tree:
    """Return a client's memory with `length` entries where it has one of each row; without one, those of its rows.

    What was remembered of other rows than it has now is nothing.
    """
    flat, own = tree.flatten(memory), len(data.u)
    for path, nothing in client_update.requirements.row_memory.items():
        leaf = flat[path]
        if length is None:
            flat[path] = leaf[:own]
            continue
        rows = leaf if len(leaf) == own else leaf[:0]
        flat[path] = torch.cat([rows, leaf.new_full((length - len(rows),), nothing)])
    return tree.unflatten(flat) if client_update.requirements.row_memory else memory


def _guesses(client_update: ClientUpdate, carry: Tree, data: ClientData, rows: int) -> tuple[Observed, ...]:
    """Return the pseudo-labels of the client's own `rows` where a client update makes them once, when it begins."""
    pseudo = tuple(
        PseudoLabels(*(leaf[:rows] for leaf in each)) for each in client_update.initial_pseudo_labels(carry, data)
    )
    return tuple(Observed(torch.arange(rows, device=own.label.device), own, {}) for own in pseudo)


def _padded(datas: Sequence[ClientData]) -> ClientData:
    """Stack clients of unequal size: rows beyond a client's own repeat them from the start."""

    def wrap(images: Tensor, length: int) -> Tensor:
        if not len(images):
            return images.new_zeros((length, *images.shape[1:]))
        return images[torch.arange(length, device=images.device) % len(images)]

    longest_x, longest_u = max(len(d.x) for d in datas), max(len(d.u) for d in datas)
    real: dict[str, Tensor] = {}
    if any(len(d.x) < longest_x or len(d.u) < longest_u for d in datas):
        device = datas[0].y.device
        real["x"] = torch.stack([torch.arange(longest_x, device=device) < d.labeled for d in datas])
        real["u"] = torch.stack([torch.arange(longest_u, device=device) < d.unlabeled for d in datas])
    return ClientData(
        torch.stack([wrap(d.x, longest_x) for d in datas]),
        torch.stack([wrap(d.y, longest_x) for d in datas]),
        torch.stack([wrap(d.u, longest_u) for d in datas]),
        torch.stack([d.labeled for d in datas]),
        torch.stack([d.unlabeled for d in datas]),
        {name: torch.stack([wrap(d.views[name], longest_u) for d in datas]) for name in datas[0].views},
        real,
    )
