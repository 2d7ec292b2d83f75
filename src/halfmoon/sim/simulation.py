"""A federation on one machine: clients in a loop, or lifted together by vmap, on the same method code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from halfmoon import rng, tree
from halfmoon.budget import Budget, Cost, Holding, natural
from halfmoon.client import Errand, Outcome, add, first_memory, visit_many, visit_one
from halfmoon.data.draw import Amount, Batching, Views
from halfmoon.data.split import SERVER, Split
from halfmoon.evaluate import Examples, Quality, leaning, mean_prediction
from halfmoon.experiment import Report, Row
from halfmoon.manifest import Contents
from halfmoon.store import Store, StoreShelf
from halfmoon.tree import Tree
from halfmoon.types import Batch, Local, Method, Notes, Sample, Shelf, Task, Work

Executor = Literal["loop", "vmap"]

LOOKED_AT = 2_000
"""How many unlabeled images a model's leaning is measured on at most: a share is off by 0.011 (one sigma) at worst."""


@dataclass(frozen=True)
class Holdings:
    """Who holds what: the training images (on the device that trains), and the split.

    With `all_labels` every client trains on all its rows as labeled ones: the supervised rows of the papers. `pooled`
    puts all rows, the server's too, into the hands of one client: a centralized run is a federation of one. With
    `reuse_labeled` a client's labeled rows are among its unlabeled ones as well (FedDB, Section 3.1).
    """

    train: Examples
    split: Split
    all_labels: bool = False
    pooled: bool = False
    reuse_labeled: bool = False

    @property
    def clients(self) -> int:
        """Return how many clients there are."""
        return 1 if self.pooled else self.split.clients

    def stage(self, round: int, rounds: int) -> int | None:
        """Return which part of a stream has come by `round`; None where nothing streams."""
        return None if self.split.stage is None else round * self.split.stages // rounds

    def own(self, client: int, stage: int | None = None) -> Holding:
        """Return how many rows the client trains on."""
        given = self.given(client, stage)
        return Holding(len(self._union(client, stage)), 0) if self.all_labels else given

    def given(self, client: int, stage: int | None = None) -> Holding:
        """Return how many rows the split gives to the client."""
        return Holding(*(len(self._rows(client, labeled, stage)) for labeled in (True, False)))

    def local(self, client: int, stage: int | None = None) -> tuple[Local, Tensor]:
        """Return what the client (or the `SERVER`) sees, and the labels of its unlabeled rows, which no method may see.

        In a stream, `stage` says which unlabeled rows are there by now.
        """
        images, labels = self.train
        x, u = (torch.from_numpy(self.rows(client, kind, stage)).to(labels.device) for kind in (True, False))
        counts = torch.tensor([len(x), len(u)], device=labels.device)
        return Local(images[x], labels[x], images[u], counts[0], counts[1]), labels[u]

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
        return self._given(client, labeled, stage)

    def _union(self, client: int, stage: int | None) -> np.ndarray:
        return np.union1d(*(self._given(client, labeled, stage) for labeled in (True, False)))

    def _given(self, client: int, labeled: bool, stage: int | None) -> np.ndarray:
        if self.pooled:
            return np.flatnonzero((self.split.client != -1) & (self.split.labeled == labeled))
        return self.split.rows(client, labeled, stage)


class Simulation:
    """The runtime of an experiment on one machine (a `halfmoon.experiment.Runtime`).

    A round is `open`, any number of questions, `close`. Everything drawn depends on (seed, round, trip, client) alone.
    `serving` is the batch rule of the server's own training (None: the clients'). A client of the cohort fails to
    answer with probability `silent`, for a whole round; one always answers. What the clients and the server's shelf
    remember lies in `store`.
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
        serving: Batching | None = None,
        silent: float = 0.0,
        store: Store | None = None,
    ) -> None:
        self.method, self.base, self.task = method, task, task
        self.holdings, self.views, self.seed = holdings, views, seed
        self.works = method.works(task)
        self.batching, self.budget, self.executor = batching, budget, executor
        self.serving = serving or batching
        self.clients, self.size, self.confident, self.silent = holdings.clients, cohort, confident, silent
        self.store = Store() if store is None else store
        device = holdings.train.labels.device
        self.shelf: Shelf = StoreShelf(self.store, "shelf/", device)
        self.memories: Shelf = StoreShelf(self.store, "client/", device)
        self.cost = Cost()
        self.cohort = self.answered = torch.zeros(0, dtype=torch.int64)
        self._round = self._trip = 0
        self._stage: int | None = None
        self._samples: dict[str, Sample] = {}
        self._quality = self._fresh_quality()

    @property
    def labeled(self) -> int:
        """Return how many labeled images the server itself has."""
        return 0 if self.holdings.pooled else self.holdings.own(SERVER).labeled

    def open(self, round: int) -> None:
        """Begin a round: draw its cohort, the same for every method of one seed."""
        g = rng.generator(self.seed, "cohort", round)
        self.cohort = torch.randperm(self.clients, generator=g)[: self.size].sort().values
        self.task = self.base.at(round)
        self.works = self.method.works(self.task)
        self._round, self._trip = round, 0
        self._stage = self.holdings.stage(round, self.base.rounds)
        self._samples, self._quality = {}, self._fresh_quality()

    def ask(self, work: str, down: Tree, each: Tree | None = None, to: Tensor | None = None) -> Tree:
        """Send `down` (and its slice of `each`) to the cohort, or `to` others; return uploads, each leaf (k, ...)."""
        asked = self.cohort if to is None else to.cpu()
        there = self._there(asked)
        self.answered = asked[there]
        mute = asked[~torch.isin(asked, self.answered)]
        self.cohort = self.cohort[~torch.isin(self.cohort, mute)]
        private = {} if each is None else each
        outcomes = self._ask(
            self.works[work], self.answered.tolist(), down, tree.map(lambda leaf: leaf[there], private)
        )
        lost = len(asked) - len(there)  # they are sent something too
        self.cost.bytes_down += lost * (tree.nbytes(down) + tree.nbytes(private) // len(asked))
        return tree.stack([outcome.up for outcome in outcomes])

    def ask_server(self, work: str, down: Tree) -> Tree:
        """Do a work at the server, on its own labeled images; nothing travels. `down` is all that it starts from."""
        traffic = self.cost.bytes_down, self.cost.bytes_up
        (outcome,) = self._ask(self.works[work], [SERVER], down, {})
        self.cost.bytes_down, self.cost.bytes_up = traffic
        return outcome.up

    def stored(self, server: int) -> None:
        """Take note of the bytes of the server's tree; what lies on its shelf counts too."""
        beside = self.store.held("shelf/") + self.store.held(f"client/{SERVER}")
        self.cost.stored_server = max(self.cost.stored_server, server + beside)

    def close(self) -> Report:
        """End the round: what it measured and what the run has cost so far."""
        return Report(self.cohort.tolist(), self._samples, self._quality.row(), self.cost.row())

    def prior(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Return what the model leans to (`halfmoon.evaluate.leaning`), None where the cohort has no unlabeled row.

        APP-U is the mean prediction of the plain unlabeled images that this round's cohort has (in a stream: by now);
        where they are more than `LOOKED_AT`, as in a centralized run, of the first ones of a seeded permutation. The
        class shares are those of all these rows, and of the labeled rows of the cohort or, where it has none, of the
        server. Nothing of it is counted as cost.
        """
        u, x = self._cohorts(False), self._cohorts(True)
        if not len(u):
            return None
        if not len(x) and not self.holdings.pooled:
            x = self.holdings.rows(SERVER, True)
        order = torch.randperm(len(u), generator=rng.generator(self.seed, "prior", self._round))
        images = self.holdings.train.images
        some = torch.from_numpy(u)[order[:LOOKED_AT].sort().values].to(images.device)
        app_u = mean_prediction(self.task.network, model, self.task.normalize, images[some])
        return leaning(app_u, self._counts(x), self._counts(u), per_class)

    def _cohorts(self, labeled: bool) -> np.ndarray:
        """Return the training rows of this round's cohort that are labeled, or not."""
        return np.concatenate([self.holdings.rows(k, labeled, self._stage) for k in self.cohort.tolist()])

    def _counts(self, rows: np.ndarray) -> np.ndarray:
        """Return how many of the training rows are of each class, (classes,)."""
        labels = self.holdings.train.labels
        held = labels[torch.from_numpy(rows).to(labels.device)]
        return torch.bincount(held, minlength=self.task.network.classes).cpu().numpy()

    def state(self) -> Tree:
        """Return a copy of all that is remembered of and by the clients; a checkpoint commits the store instead."""
        shelves = {"client": self.memories, "shelf": self.shelf}
        return {name: {key: shelf.get(key) for key in shelf.keys()} for name, shelf in shelves.items()}  # noqa: SIM118

    def restore(self, clients: Contents, cost: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        self.store.restore(clients)
        self.cost = Cost(**cost)

    def _ask(self, work: Work, clients: Sequence[int], down: Tree, each: Tree) -> list[Outcome]:
        """Visit clients (or the server) and count what it takes."""
        errand = Errand(work, self.views, self.seed, self._round, self._trip, self._rows())
        self._trip += 1
        with torch.no_grad():
            outcomes = self._visit(errand, clients, down, each)
        for client, outcome in zip(clients, outcomes, strict=True):
            if outcome.memory:
                self.memories.put(str(client), outcome.memory)
                if client != SERVER:
                    self.cost.stored_client = max(self.cost.stored_client, tree.nbytes(outcome.memory))
            for name, new in outcome.samples.items():
                self._samples[name] = add(self._samples.get(name), new)
            own = self.holdings.own(client, self._stage)
            swept = work.swept(own.labeled, own.unlabeled)
            self.cost.visit(outcome.amount, work.passes(outcome.amount.labeled, outcome.amount.unlabeled), swept)
            self.cost.bytes_down += outcome.traffic[0]
            self.cost.bytes_up += outcome.traffic[1]
        return outcomes

    def _there(self, asked: Tensor) -> Tensor:
        """Return the places in `asked` of those who answer in this round; at least one does."""
        if not self.silent:
            return torch.arange(len(asked))
        draws = [
            float(torch.rand((), generator=rng.generator(self.seed, "silent", self._round, k))) for k in asked.tolist()
        ]
        there = [place for place, drawn in enumerate(draws) if drawn >= self.silent]
        return torch.tensor(there or [max(range(len(draws)), key=draws.__getitem__)])

    def _visit(self, errand: Errand, clients: Sequence[int], down: Tree, each: Tree) -> list[Outcome]:
        work = errand.work
        amounts = [self._amount(work, client) for client in clients]
        outcomes: dict[int, Outcome] = {}
        # Asked once, not of every client: what a client that is known would start from may be a network to draw.
        remembers = bool(first_memory(work, {**down, **tree.index(each, 0)}, self.seed))
        for group in self._groups(work, clients, amounts):
            memories: dict[int, Tree] = {k: {} for k in group}
            if remembers:
                memories = {k: self._memory(work, clients[k], {**down, **tree.index(each, k)}) for k in group}
            for part in _alike(memories):
                seen = [self.holdings.local(clients[k], self._stage) for k in part]
                datas = [data for data, _ in seen]
                observe = self._observer([hidden for _, hidden in seen])
                private = tree.map(lambda leaf, g=part: leaf[g], each)
                mine, kept = [clients[k] for k in part], [memories[k] for k in part]
                if self.executor == "vmap":
                    own = [amounts[k] for k in part]
                    made = visit_many(errand, mine, down, private, kept, datas, own, observe)
                else:
                    one = {**down, **tree.index(private, 0)}
                    made = [visit_one(errand, mine[0], one, kept[0], datas[0], amounts[part[0]], observe)]
                outcomes.update(zip(part, made, strict=True))
        return [outcomes[k] for k in range(len(clients))]

    def _amount(self, work: Work, client: int) -> Amount:
        if client == SERVER:
            return natural(self.serving, work, self.holdings.own(client))
        own, given = self.holdings.own(client, self._stage), self.holdings.given(client, self._stage)
        return self.budget.amount(self.batching, work, own, given)

    def _groups(self, work: Work, clients: Sequence[int], amounts: Sequence[Amount]) -> list[list[int]]:
        """Return the places in the cohort that run as one program: equal images a step and, where it matters, size."""
        if self.executor == "loop":
            return [[k] for k in range(len(amounts))]
        groups: dict[tuple[int, ...], list[int]] = {}
        for k, (client, amount) in enumerate(zip(clients, amounts, strict=True)):
            size = astuple(self.holdings.own(client, self._stage)) if work.whole else ()
            groups.setdefault((amount.labeled, amount.unlabeled, *size), []).append(k)
        return list(groups.values())

    def _memory(self, work: Work, client: int, down: Tree) -> Tree:
        """Return what the client remembers, for a work that remembers."""
        return self.memories.get(str(client)) or first_memory(work, down, self.seed)

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


def _alike(memories: dict[int, Tree]) -> list[list[int]]:
    """Return the keys in groups of equally shaped trees: a memory may hold something for each row of a client."""
    groups: dict[tuple[torch.Size, ...], list[int]] = {}
    for key, memory in memories.items():
        groups.setdefault(tuple(leaf.shape for leaf in tree.leaves(memory)), []).append(key)
    return list(groups.values())
