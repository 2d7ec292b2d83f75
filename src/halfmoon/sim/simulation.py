"""A federation on one machine: clients in a loop, or lifted together by vmap, on the same method code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from halfmoon import rng
from halfmoon.budget import Budget
from halfmoon.client import Errand, Outcome
from halfmoon.data.draw import Batching, Views
from halfmoon.data.split import SERVER
from halfmoon.evaluate import leaning, mean_prediction
from halfmoon.experiment import Row, TooFew
from halfmoon.ground import Executor, Ground, Holdings
from halfmoon.guards import Guard
from halfmoon.rounds import Rounds
from halfmoon.store import Store, StoreShelf
from halfmoon.tree import Tree
from halfmoon.types import Method, Shelf, Task

LOOKED_AT = 2_000
"""How many unlabeled images a model's leaning is measured on at most: a share is off by 0.011 (one sigma) at worst."""


class Simulation(Rounds):
    """The runtime of an experiment on one machine (a `halfmoon.experiment.Runtime`): its ground has all clients.

    `serving` is the batch rule of the server's own training (None: the clients'). What the clients and the server's
    shelf remember lies in `store`.
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
        guards: Sequence[Guard] = (),
    ) -> None:
        device = holdings.train.labels.device
        super().__init__(
            method, task, views, clients=holdings.clients, cohort=cohort, seed=seed, device=device,
            confident=confident, silent=silent, store=store, guards=guards,
        )  # fmt: skip
        self.holdings = holdings
        self.memories: Shelf = StoreShelf(self.store, "client/", device)
        self.ground = Ground(holdings, views, batching, serving or batching, budget, seed, executor, self.memories)
        self._stage: int | None = None

    @property
    def labeled(self) -> int:
        """Return how many labeled images the server itself has."""
        return 0 if self.holdings.pooled else self.holdings.own(SERVER).labeled

    def open(self, round: int) -> None:
        """Begin a round: draw its cohort, the same for every method of one seed."""
        super().open(round)
        self._stage = self.holdings.stage(round, self.base.rounds)

    def again(self, few: TooFew) -> None:
        """Raise `few`: who does not answer on one machine will not answer the second time either."""
        raise few

    def bring(self, model: Tree) -> None:
        """Do nothing: on one machine there is a test set or none."""

    def saved(self, round: int) -> None:
        """Do nothing: what clients on this machine remember is a part of what was saved."""

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

    def _visit(self, errand: Errand, clients: Sequence[int], down: Tree, each: Tree) -> dict[int, Outcome]:
        outcomes = self.ground.visit(errand, clients, self._stage, down, each, self._quality)
        return dict(zip(clients, outcomes, strict=True))
