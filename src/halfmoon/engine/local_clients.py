"""The client half of a federation, wherever it runs: who holds which rows, and what a client update to them does.

In a simulation `LocalClients` has all clients; a site of a real federation has its own rows alone.
Both draw from (seed, round, query, client), so that a site computes what its client computes in a simulation, bit by
bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from fractions import Fraction
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from halfmoon.aggregation.precision import encoded
from halfmoon.api.types import ClientData, ClientUpdate, StateStore
from halfmoon.core import rng, tree
from halfmoon.core.tensors import tensor_from_numpy
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.engine.budget import Budget, ClientSize, batch_rule_amount
from halfmoon.engine.driver import ClientContext, ClientResult, ClientTask, Query, first_memory
from halfmoon.engine.evaluation import Examples, ParallelMap, Quality
from halfmoon.engine.programs import MAX_PADDING, grouped
from halfmoon.engine.sampling import Amount, Batching, Views

Executor = Literal["loop", "vmap"]


@dataclass(frozen=True)
class FederatedDataset:
    """Who holds what: the training images (on the device that trains), and the split.

    With `all_labels` every client trains on all its rows as labeled ones: the supervised rows of the papers. `pooled`
    puts all rows, the server's too, into the hands of one client: a centralized run is a federation of one. With
    `reuse_labeled` a client's labeled rows are among its unlabeled ones as well (FedDB, Section 3.1). `label_flippers` label
    their rows wrongly, class c as `classes` - 1 - c; guesses are still compared with what is true.
    """

    train: Examples
    split: Split
    all_labels: bool = False
    pooled: bool = False
    reuse_labeled: bool = False
    label_flippers: frozenset[int] = frozenset()
    classes: int = 0  # needed where there are label_flippers

    @property
    def clients(self) -> int:
        return 1 if self.pooled else self.split.clients

    def stage(self, round: int, rounds: int) -> int | None:
        """Return which part of a stream has come by `round`; None where nothing streams."""
        return None if self.split.stage is None else round * self.split.stages // rounds

    def training_size(self, client: int, stage: int | None = None) -> ClientSize:
        return ClientSize(len(self._union(client, stage)), 0) if self.all_labels else self.split_size(client, stage)

    def split_size(self, client: int, stage: int | None = None) -> ClientSize:
        return ClientSize(*(len(self._rows(client, labeled, stage)) for labeled in (True, False)))

    def client_data(self, client: int, stage: int | None = None) -> tuple[ClientData, Tensor]:
        """Return what the client (or the `SERVER`) sees, and the labels of its unlabeled rows, which no method may see.

        In a stream, `stage` says which unlabeled rows are there by now.
        """
        images, labels = self.train
        x, u = (tensor_from_numpy(self.rows(client, kind, stage)).to(labels.device) for kind in (True, False))
        counts = torch.tensor([len(x), len(u)], device=labels.device)
        y = self.classes - 1 - labels[x] if client in self.label_flippers else labels[x]
        # Of images that are mapped into memory, channels lie last.
        return ClientData(images[x].contiguous(), y, images[u].contiguous(), counts[0], counts[1]), labels[u]

    def rows(self, client: int, labeled: bool, stage: int | None = None) -> np.ndarray:
        """Return the training rows, int64, that the client (or the `SERVER`) has as labeled ones, or as unlabeled.

        In a stream, `stage` says which unlabeled rows are there by now.
        """
        if self.all_labels:
            return self._union(client, stage) if labeled else np.zeros(0, np.int64)
        return self._rows(client, labeled, stage)

    def _rows(self, client: int, labeled: bool, stage: int | None) -> np.ndarray:
        if self.reuse_labeled and not labeled and client != SERVER:
            return self._union(client, stage)
        return self._split_rows(client, labeled, stage)

    def _union(self, client: int, stage: int | None) -> np.ndarray:
        return np.union1d(*(self._split_rows(client, labeled, stage) for labeled in (True, False)))

    def _split_rows(self, client: int, labeled: bool, stage: int | None) -> np.ndarray:
        if self.pooled:
            return np.flatnonzero((self.split.client != -1) & (self.split.labeled == labeled))
        return self.split.rows(client, labeled, stage)


@dataclass(frozen=True)
class Training:
    """How clients train: batch rule, budget and executor, and the batch rule of the server's own training.

    Without `serving` the server trains by the clients' rule. `together` is how many clients vmap lifts at most as one
    program (None: all of a cohort that are alike), and `padded` how much of one may be padding; `spread` says where
    programs, and the clients of a loop, train.
    """

    batching: Batching
    budget: Budget
    server_batching: Batching | None = None
    executor: Executor = "loop"
    parallel_map: ParallelMap = map
    max_group_size: int | None = None
    max_padding: Fraction = MAX_PADDING


@dataclass
class LocalClients:
    """Clients (and perhaps the server's own rows) on this machine, trained one by one or lifted together by vmap.

    What clients remember lies in `memories`, by number.
    """

    dataset: FederatedDataset
    views: Views
    training: Training
    seed: int
    memories: StateStore

    def update(
        self,
        context: ClientContext,
        clients: Sequence[int],
        stage: int | None,
        broadcast: Tree,
        per_client: Tree,
        quality: Quality,
    ) -> Iterator[ClientResult]:
        """Train clients (or the `SERVER`), remember what they keep, and yield what comes of it in their order.

        `per_client` (leaves (K, ...)) is merged into `broadcast`, a different slice for each client. `quality` compares
        pseudo-labels with the labels that are hidden from the work. Nothing that was yielded is held here, and what is
        remembered is not yielded.
        """
        hidden: dict[int, Tensor] = {}
        remaining = iter(enumerate(clients))  # not zip, which holds what it has given last
        for outcome in _without_gradients(self._client_rounds(context, clients, stage, broadcast, per_client, hidden)):
            place, client = next(remaining)
            if outcome.memory:
                self.memories.put(str(client), outcome.memory)
            for observation in outcome.observations:
                quality.add(observation.pseudo, hidden[client][observation.rows], observation.models)
            outcome = outcome._replace(memory={}, observations=())
            if client != SERVER and context.client_update.task.upload_precision != "float32":
                outcome = _encoded(context, client, {**broadcast, **tree.index(per_client, place)}, outcome)
            yield outcome
            del outcome  # or it would be held while the next client trains

    def _client_rounds(
        self,
        context: ClientContext,
        clients: Sequence[int],
        stage: int | None,
        broadcast: Tree,
        per_client: Tree,
        hidden: dict[int, Tensor],
    ) -> Iterator[ClientResult]:
        """Yield what comes of the clients in their order; `hidden` gets the labels that they do not see, by client."""
        amounts = [self._amount(context.client_update, client, stage) for client in clients]
        # Asked once, not of every client: what a client that is known would start from may be a network to draw.
        remembers = bool(
            first_memory(context.client_update, {**broadcast, **tree.index(per_client, 0)}, self.seed, clients[0])
        )

        def task(k: int) -> ClientTask:
            client, private = clients[k], tree.index(per_client, k)
            memory: Tree = {}
            if remembers:
                start = {**broadcast, **private}
                memory = self.memories.get(str(client)) or first_memory(context.client_update, start, self.seed, client)
            data, hidden[client] = self.dataset.client_data(client, stage)
            kind = self._kind(context.client_update, client, stage, amounts[k], memory)
            return ClientTask(client, private, memory, data, amounts[k], kind)

        tasks = map(task, range(len(clients)))
        results: dict[int, ClientResult] = {}
        turns = iter(clients)
        turn = next(turns, None)
        for part in self.training.parallel_map(Query(context, broadcast), self._programs(context.client_update, tasks)):
            results |= part
            part.clear()  # or what is yielded would be held while the next clients train
            while turn in results:
                yield results.pop(turn)
                turn = next(turns, None)

    def _programs(self, client_update: ClientUpdate, tasks: Iterable[ClientTask]) -> Iterator[list[ClientTask]]:
        """Yield the clients that train as one program, as soon as those of one kind are as many as may be.

        They are several programs where they are too unlike in size (`grouped`).
        """
        most = 1 if self.training.executor == "loop" else self.training.max_group_size
        waiting: dict[tuple[object, ...], list[ClientTask]] = {}
        for each in tasks:
            kind = each.kind
            waiting.setdefault(kind, []).append(each)
            del each  # or it would be held while the next clients train
            if len(waiting[kind]) == most:
                yield from _alike(client_update, waiting.pop(kind), self.training.max_padding)
        while waiting:
            yield from _alike(client_update, waiting.pop(next(iter(waiting))), self.training.max_padding)

    def _kind(
        self, client_update: ClientUpdate, client: int, stage: int | None, amount: Amount, memory: Tree
    ) -> tuple[object, ...]:
        """Return what clients that train as one program have in common.

        They have equally shaped memories, equal images a step and, where it matters, equal sizes; a work that masks
        padding takes all that have a step to do.
        """
        flat = sorted(tree.flatten(memory).items())  # a memory that was read has them in another order
        shapes = tuple(leaf.shape for path, leaf in flat if path not in client_update.requirements.row_memory)
        if client_update.requirements.masks_padding:
            return (min(amount.steps, 1),), shapes
        size = astuple(self.dataset.training_size(client, stage)) if client_update.requirements.needs_full_batch else ()
        return (amount.labeled, amount.unlabeled, *size), shapes

    def _amount(self, client_update: ClientUpdate, client: int, stage: int | None) -> Amount:
        if client == SERVER:
            return batch_rule_amount(
                self.training.server_batching or self.training.batching,
                client_update,
                self.dataset.training_size(client),
            )
        own, size = self.dataset.training_size(client, stage), self.dataset.split_size(client, stage)
        return self.training.budget.amount(self.training.batching, client_update, own, size)


def _encoded(context: ClientContext, client: int, broadcast: Tree, outcome: ClientResult) -> ClientResult:
    """Return what came of a client with its upload in the bytes that travel."""
    update = context.client_update
    draws = partial(rng.generator, context.seed, "upload", context.round, context.query, client)
    upload = encoded(outcome.upload, broadcast, update.task.upload_precision, update.requirements.upload_spec, draws)
    return outcome._replace(upload=upload, traffic=update.traffic(broadcast, upload))


def _alike(client_update: ClientUpdate, tasks: list[ClientTask], padded: Fraction) -> Iterator[list[ClientTask]]:
    """Yield the tasks that train as one program, and hold none that was yielded."""
    places = grouped(client_update, [each.extent for each in tasks], padded)
    programs = [[tasks[place] for place in each] for each in places]
    tasks.clear()
    while programs:
        yield programs.pop(0)


def _without_gradients(results: Iterator[ClientResult]) -> Iterator[ClientResult]:
    """Yield what an iterator does, which works without gradients; whoever takes it may have some."""
    while True:
        with torch.no_grad():
            result = next(results, None)
        if result is None:
            return
        yield result
        del result
