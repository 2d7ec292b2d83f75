"""A federation on one machine: clients in a loop, or lifted together by vmap, on the same method code."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from halfmoon.aggregation import Aggregator
from halfmoon.api.types import ClientUpdate, Method, StateStore, Task
from halfmoon.core import rng
from halfmoon.core.tensors import tensor_from_numpy, to_ints
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.driver import ClientContext
from halfmoon.engine.evaluation import leaning, mean_prediction
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.runtime import ClientResults, Row, RuntimeSettings, ServerRuntime, contents
from halfmoon.engine.sampling import Views
from halfmoon.storage.state_store import StateView, TreeStore

LOOKED_AT = 2_000
"""How many unlabeled images a model's leaning is measured on at most: a share is off by 0.011 (one sigma) at worst."""


class Simulation(ServerRuntime):
    """The runtime of an experiment on one machine which holds all clients.

    What the clients and the server's state store remember lies in `store`.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        dataset: FederatedDataset,
        views: Views,
        training: Training,
        settings: RuntimeSettings,
        store: TreeStore | None = None,
        aggregators: Sequence[Aggregator] = (),
    ) -> None:
        device = dataset.train.labels.device
        settings = replace(settings, clients=dataset.clients, device=device)
        super().__init__(method, task, views, settings, store, aggregators)
        self.dataset = dataset
        self.memories: StateStore = StateView(self.store, "client/", device)
        self.local_clients = LocalClients(dataset, views, training, self.seed, self.memories)
        self._spread = training.parallel_map
        self._stage: int | None = None
        self._uploads: dict[int, Tree] = {}  # what clients of this round have sent last

    @property
    def labeled(self) -> int:
        return 0 if self.dataset.pooled else self.dataset.training_size(SERVER).labeled

    def open(self, round: int) -> None:
        super().open(round)
        self._stage = self.dataset.stage(round, self.base.rounds)
        self._uploads = {}

    def prediction_bias(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Return what the model leans to, None where the cohort has no unlabeled row.

        APP-U is the mean prediction of the plain unlabeled images that this round's cohort has (in a stream: by now);
        where they are more than `LOOKED_AT`, as in a centralized run, of the first ones of a seeded permutation. The
        class shares are those of all these rows, and of the labeled rows of the cohort or, where it has none, of the
        server. Nothing of it is counted as cost.
        """
        return self._leaning(model, per_class, self._cohorts(False), self._cohorts(True))

    def client_prediction_bias(
        self, model: Tree, per_class: Sequence[float], test: Callable[[Tree], Sequence[float]]
    ) -> Row | None:
        """Return what the models of single clients lean to ("local"), and the server's on their images ("global").

        FedDB's (IJCAI 2024) Figures 1 and 3: "each" holds a row of `halfmoon.engine.evaluation.leaning` for both of
        each client, {local, global}_{js_app_u, js_labeled} their means over clients, and _low and _high the extremes.
        """
        each: list[Row] = []
        for client, local in sorted(self._uploads.items()):
            u, x = (self.dataset.rows(client, labeled, self._stage) for labeled in (False, True))
            ours = self._leaning(model, per_class, u, x)
            if ours is not None:
                theirs = self._leaning(local, test(local), u, x)
                each.append({"client": client, "local": theirs, "global": ours})
        return {**spans(each), "each": each} if each else None

    def _leaning(self, model: Tree, per_class: Sequence[float], u: np.ndarray, x: np.ndarray) -> Row | None:
        if not len(u):
            return None
        if not len(x) and not self.dataset.pooled:
            x = self.dataset.rows(SERVER, True)
        order = torch.randperm(len(u), generator=rng.generator(self.seed, "prior", self._round))
        images = self.dataset.train.images
        some = tensor_from_numpy(u)[order[:LOOKED_AT].sort().values].to(images.device)
        app_u = mean_prediction(self.task.network, model, self.task.normalize, images[some], parallel_map=self._spread)
        return leaning(app_u, self._counts(x), self._counts(u), per_class)

    def _cohorts(self, labeled: bool) -> np.ndarray:
        return np.concatenate([self.dataset.rows(k, labeled, self._stage) for k in to_ints(self.cohort)])

    def _counts(self, rows: np.ndarray) -> np.ndarray:
        labels = self.dataset.train.labels
        labels = labels[tensor_from_numpy(rows).to(labels.device)]
        return torch.bincount(labels[labels >= 0], minlength=self.task.network.classes).cpu().numpy()

    def state(self) -> Tree:
        return {"client": contents(self.memories), **super().state()}

    def _client_rounds(
        self, context: ClientContext, clients: Sequence[int], broadcast: Tree, per_client: Tree
    ) -> ClientResults:
        remaining = iter(clients)
        for outcome in self.local_clients.update(context, clients, self._stage, broadcast, per_client, self._quality):
            yield next(remaining), outcome
            del outcome

    def _ask(
        self, client_update: ClientUpdate, clients: Sequence[int], broadcast: Tree, per_client: Tree
    ) -> ClientResults:
        first = to_ints(self.cohort)[: self.settings.client_models]
        for client, outcome in super()._ask(client_update, clients, broadcast, per_client):
            if client in first and "params" in outcome.upload.update:
                self._uploads[client] = {"stats": {}, **broadcast, **outcome.upload.update}
            yield client, outcome
            del outcome


def spans(each: Sequence[Row]) -> Row:
    """Return mean, low and high over clients of what {"local", "global"} rows of `leaning` say of divergences."""
    result: Row = {}
    for whose in ("local", "global"):
        for name in ("js_app_u", "js_labeled"):
            values = [row[whose][name] for row in each if row[whose][name] is not None]
            if values:
                mean = round(float(np.mean(values)), 6)
                key = f"{whose}_{name}"
                result |= {key: mean, f"{key}_low": min(values), f"{key}_high": max(values)}
    return result
