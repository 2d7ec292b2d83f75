"""A federation on one machine: clients in a loop, or lifted together by vmap, on the same method code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfmoon import rng, tree
from halfmoon.budget import Budget, Cost, Holding
from halfmoon.client import Errand, Outcome, add, first_memory, visit_many, visit_one
from halfmoon.data import Split
from halfmoon.data.draw import Amount, Batching, Views
from halfmoon.evaluate import Examples, Quality
from halfmoon.experiment import Report
from halfmoon.tree import Tree
from halfmoon.types import Batch, Local, Method, Notes, Sample, Task, Work

Executor = Literal["loop", "vmap"]


@dataclass(frozen=True)
class Holdings:
    """Who holds what: the training images (on the device that trains), and the split.

    With `all_labels` every client trains on all its rows as labeled ones: the supervised rows of the papers.
    """

    train: Examples
    split: Split
    all_labels: bool = False

    def own(self, client: int) -> Holding:
        """Return how many rows the client trains on."""
        given = self.given(client)
        return Holding(given.labeled + given.unlabeled, 0) if self.all_labels else given

    def given(self, client: int) -> Holding:
        """Return how many rows the split gives to the client."""
        return Holding(len(self.split.rows(client, True)), len(self.split.rows(client, False)))

    def local(self, client: int) -> tuple[Local, Tensor]:
        """Return what the client sees, and the labels of its unlabeled rows, which no method may see."""
        images, labels = self.train
        x = torch.from_numpy(self.split.rows(client, True)).to(labels.device)
        u = torch.from_numpy(self.split.rows(client, False)).to(labels.device)
        if self.all_labels:
            x, u = torch.cat([x, u]).sort().values, u[:0]
        counts = torch.tensor([len(x), len(u)], device=labels.device)
        return Local(images[x], labels[x], images[u], counts[0], counts[1]), labels[u]


class Simulation:
    """The runtime of an experiment on one machine (a `halfmoon.experiment.Runtime`).

    A round is `open`, any number of `ask`, `close`. Everything drawn depends on (seed, round, trip, client) alone.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        holdings: Holdings,
        *,
        views: Views,
        batching: Batching,
        budget: Budget,
        seed: int,
        cohort: int,
        executor: Executor = "loop",
        confident: float = 0.95,
    ) -> None:
        self.task, self.holdings, self.views, self.seed = task, holdings, views, seed
        self.works = method.works(task)
        self.batching, self.budget, self.executor = batching, budget, executor
        self.size, self.confident = cohort, confident
        self.memories: dict[int, Tree] = {}
        self.cost = Cost()
        self.cohort = torch.zeros(0, dtype=torch.int64)
        self._round = self._trip = 0
        self._samples: dict[str, Sample] = {}
        self._quality = self._fresh_quality()

    def open(self, round: int) -> None:
        """Begin a round: draw its cohort, the same for every method of one seed."""
        g = rng.generator(self.seed, "cohort", round)
        self.cohort = torch.randperm(self.holdings.split.clients, generator=g)[: self.size].sort().values
        self._round, self._trip = round, 0
        self._samples, self._quality = {}, self._fresh_quality()

    def ask(self, work: str, down: Tree, each: Tree | None = None) -> Tree:
        """Send `down` (and its slice of `each`) to the cohort and return the uploads, every leaf (K, ...)."""
        errand = Errand(self.works[work], self.views, self.seed, self._round, self._trip, self._rows())
        self._trip += 1
        clients = self.cohort.tolist()
        with torch.no_grad():
            outcomes = self._visit(errand, clients, down, each or {})
        for client, outcome in zip(clients, outcomes, strict=True):
            if outcome.memory:
                self.memories[client] = outcome.memory
            for name, new in outcome.samples.items():
                self._samples[name] = add(self._samples.get(name), new)
            self.cost.visit(outcome.amount, errand.work.passes(*outcome.amount[1:]))
            self.cost.bytes_up += tree.nbytes(outcome.up)
        self.cost.bytes_down += tree.nbytes(down) * len(clients) + tree.nbytes(each or {})
        return tree.stack([outcome.up for outcome in outcomes])

    def close(self) -> Report:
        """End the round: what it measured and what the run has cost so far."""
        return Report(self.cohort.tolist(), self._samples, self._quality.row(), self.cost.row())

    def state(self) -> Tree:
        """Return the clients' memories, for a checkpoint."""
        return {str(client): memory for client, memory in sorted(self.memories.items())}

    def restore(self, memories: Tree, cost: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self.memories = {int(client): memory for client, memory in memories.items()}
        self.cost = Cost(**cost)

    def _visit(self, errand: Errand, clients: Sequence[int], down: Tree, each: Tree) -> list[Outcome]:
        work = errand.work
        seen = [self.holdings.local(client) for client in clients]
        amounts = [
            self.budget.amount(self.batching, work, self.holdings.own(c), self.holdings.given(c)) for c in clients
        ]
        outcomes: dict[int, Outcome] = {}
        for group in self._groups(amounts):
            datas, hidden = [seen[k][0] for k in group], [seen[k][1] for k in group]
            observe = self._observer(hidden)
            private = tree.map(lambda leaf, g=group: leaf[g], each)
            mine = [clients[k] for k in group]
            memories = [self._memory(work, client, {**down, **tree.index(private, i)}) for i, client in enumerate(mine)]
            if self.executor == "vmap":
                made = visit_many(errand, mine, down, private, memories, datas, [amounts[k] for k in group], observe)
            else:
                one = {**down, **tree.index(private, 0)}
                made = [visit_one(errand, mine[0], one, memories[0], datas[0], amounts[group[0]], observe)]
            outcomes.update(zip(group, made, strict=True))
        return [outcomes[k] for k in range(len(clients))]

    def _groups(self, amounts: Sequence[Amount]) -> list[list[int]]:
        """Return the places in the cohort that run as one program: those with equal images a step."""
        if self.executor == "loop":
            return [[k] for k in range(len(amounts))]
        groups: dict[tuple[int, int], list[int]] = {}
        for k, amount in enumerate(amounts):
            groups.setdefault((amount.labeled, amount.unlabeled), []).append(k)
        return list(groups.values())

    def _memory(self, work: Work, client: int, down: Tree) -> Tree:
        return self.memories[client] if client in self.memories else first_memory(work, down, self.seed)

    def _observer(self, hidden: Sequence[Tensor]) -> Callable[[int, Batch, Notes], None]:
        def observe(k: int, batch: Batch, notes: Notes) -> None:
            for pseudo in notes.pseudo:
                self._quality.add(pseudo, hidden[k][batch.u_rows])

        return observe

    def _fresh_quality(self) -> Quality:
        return Quality(self.task.network.classes, self.confident, self.holdings.train.labels.device)

    def _rows(self) -> int:
        """Return how many images' views are made in one call: what fits a CPU's cache, or fills a GPU."""
        return 512 if self.holdings.train.labels.device.type == "cpu" else 8192
