"""A federation on one machine: all clients train here, one by one or batched by vmap."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from halfmoon.aggregation import Aggregator
from halfmoon.api.types import ClientUpdate, Method, StateStore, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree
from halfmoon.core.tensors import tensor_from_numpy, to_ints
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.driver import ClientResult
from halfmoon.engine.evaluation import Quality, compute_mean_prediction, prediction_bias
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.runtime import RoundReport, Row, RuntimeSettings, ServerRuntime, read_all
from halfmoon.engine.sampling import Views
from halfmoon.storage.state_store import StateView, TreeStore

MAX_BIAS_IMAGES = 2_000
"""Largest number of unlabeled images on which a model's bias is measured: a share's standard error is below 0.0112."""


class _SharedAverage(NamedTuple):
    """The average of a client update, for a later run that would compute the same.

    Attributes:
        conditions: what the uploads depend on besides the broadcast and the images.
        broadcast: what the clients received.
        mean: their average.
        results: each client's result, without its upload, to count its cost.
    """

    conditions: tuple[object, ...]
    broadcast: Tree
    mean: Upload
    results: list[tuple[int, ClientResult]]


class SharedAverages:
    """The last average of each client update with `ClientUpdate.is_shared`, of runs on the same images and split."""

    def __init__(self) -> None:
        self._averages: dict[type[ClientUpdate], _SharedAverage] = {}

    def find(
        self, client_update: ClientUpdate, conditions: tuple[object, ...], broadcast: Tree
    ) -> _SharedAverage | None:
        """Find the average of an update under these conditions; None if it was not computed last."""
        average = self._averages.get(type(client_update))
        if average is None or average.conditions != conditions:
            return None
        leaves = tree.flatten(broadcast)
        shared_leaves = tree.flatten(average.broadcast)
        is_same = leaves.keys() == shared_leaves.keys() and all(
            torch.equal(leaf, shared_leaves[path]) for path, leaf in leaves.items()
        )
        return average if is_same else None

    def store(self, client_update: ClientUpdate, average: _SharedAverage) -> None:
        """Store an average in place of the last one of this update."""
        self._averages[type(client_update)] = average


class Simulation(ServerRuntime):
    """The runtime of an experiment on one machine that has the images of all clients.

    The memories of clients and the server's state store are in `store`.
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
        shared_averages: SharedAverages | None = None,
    ) -> None:
        """Build the simulated federation.

        Args:
            method: the method that trains.
            task: network, optimizer and number of rounds.
            dataset: training images and their distribution over clients.
            views: the augmentations.
            training: batch sizes, and the executor of local updates.
            settings: seed, cohort size and further settings; clients and device are set from the dataset.
            store: stores the memories of clients and the server's state store; None: a new one.
            aggregators: through which uploads pass before the method gets them.
            shared_averages: averages of other runs on the same images and split; None shares none.
        """
        device = dataset.train.labels.device
        settings = replace(settings, clients=dataset.clients, device=device)
        super().__init__(method, task, views, settings, store, aggregators)
        self.dataset = dataset
        self.memories: StateStore = StateView(self.store, "client/", device)
        self.local_clients = LocalClients(dataset, views, training, self.seed, self.memories, self._new_quality())
        self.trainer = self.local_clients
        self._executor = training.executor
        self._client_models: dict[int, Tree] = {}  # the latest models of some clients of this round
        self._shared_averages = shared_averages
        self._recorded_results: list[tuple[int, ClientResult]] | None = None

    @property
    def labeled(self) -> int:
        return 0 if self.dataset.pooled else self.dataset.training_size(SERVER).labeled

    @property
    def _stage(self) -> int | None:
        """The stage of the data stream at the current round; None if all images are there from the start."""
        return self.dataset.stage(self._round, self.base.rounds)

    def _start_measurements(self) -> None:
        self._client_models = {}
        self.local_clients.quality = self._new_quality()

    def close(self) -> RoundReport:
        """End the round and return its measurements, with the quality of its pseudo-labels."""
        quality = self.local_clients.quality
        return super().close()._replace(pseudo=None if quality is None else quality.row())

    def _find_shared_average(self, client_update: ClientUpdate, broadcast: Tree) -> Upload | None:
        self._recorded_results = None
        shared = self._shared_averages
        # Aggregators see each upload, and clients that drop out or store their models differ from run to run.
        if (
            shared is None
            or not client_update.is_shared
            or self.aggregators
            or self.settings.client_dropout
            or self.settings.client_models
        ):
            return None
        shared_average = shared.find(client_update, self._sharing_conditions(client_update), broadcast)
        if shared_average is None:
            self._recorded_results = []  # filled while the clients train, and stored with their average
            return None
        self._query += 1
        for client, result in shared_average.results:
            self._count_result(client_update, client, result)
        self.responders = torch.tensor([client for client, _ in shared_average.results], dtype=torch.int64)
        self._remove_missing(self.cohort, len(shared_average.results), bytes_per_recipient=tree.nbytes(broadcast))
        return shared_average.mean

    def _store_shared_average(self, client_update: ClientUpdate, broadcast: Tree, mean: Upload) -> None:
        if self._shared_averages is None or self._recorded_results is None:
            return
        conditions = self._sharing_conditions(client_update)
        average = _SharedAverage(conditions, broadcast, mean, self._recorded_results)
        self._shared_averages.store(client_update, average)
        self._recorded_results = None

    def _sharing_conditions(self, client_update: ClientUpdate) -> tuple[object, ...]:
        """List what the average of an update depends on besides the broadcast and the images."""
        dataset = self.dataset
        return (
            (dataset.all_labels, dataset.pooled, dataset.reuse_labeled, dataset.label_flippers),
            (self._stage, *to_ints(self.cohort)),
            client_update.task.upload_precision,
        )

    def _count_result(self, client_update: ClientUpdate, client: int, result: ClientResult) -> None:
        super()._count_result(client_update, client, result)
        if self._recorded_results is not None:
            without_tensors = result.upload._replace(update={}, aux={})
            self._recorded_results.append((client, result._replace(upload=without_tensors)))

    def _new_quality(self) -> Quality:
        """Create empty counts of the quality of pseudo-labels."""
        return Quality(self.base.network.classes, self.settings.confidence_threshold, self.device)

    def prediction_bias(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Measure the class bias of a model's predictions on the unlabeled images of this round's cohort.

        APP-U (FedDB, IJCAI 2024) is the mean prediction on these images without augmentation, or on a random sample of
        `MAX_BIAS_IMAGES` of them. It is compared with the class shares of all these images, and of the labeled images of
        the cohort or, if it has none, of the server. The measurement does not count towards the run's cost.

        Args:
            model: "params" and "stats".
            per_class: its test accuracy by class, (classes,).

        Returns:
            The result of `halfmoon.engine.evaluation.prediction_bias`; None without unlabeled images.
        """
        unlabeled = self._cohort_rows(labeled=False)
        labeled = self._cohort_rows(labeled=True)
        return self._bias_row(model, per_class, unlabeled, labeled)

    def client_prediction_bias(
        self, model: Tree, per_class: Sequence[float], test: Callable[[Tree], Sequence[float]]
    ) -> Row | None:
        """Compare the class bias of single clients' models ("local") with the server's on the same images ("global").

        This is the comparison of FedDB (IJCAI 2024), Figures 1 and 3.

        Args:
            model: the server's model, "params" and "stats".
            per_class: its test accuracy by class, (classes,).
            test: computes the test accuracy by class of a client's model.

        Returns:
            "each": for each client the results of `halfmoon.engine.evaluation.prediction_bias` for both models; and
            means over clients, {local, global}_{js_app_u, js_labeled}, with the extremes _low and _high. None if no
            client's model was stored.
        """
        rows: list[Row] = []
        for client, client_model in sorted(self._client_models.items()):
            unlabeled = self.dataset.rows(client, labeled=False, stage=self._stage)
            labeled = self.dataset.rows(client, labeled=True, stage=self._stage)
            server_bias = self._bias_row(model, per_class, unlabeled, labeled)
            if server_bias is not None:
                client_bias = self._bias_row(client_model, test(client_model), unlabeled, labeled)
                rows.append({"client": client, "local": client_bias, "global": server_bias})
        return {**summarize_bias(rows), "each": rows} if rows else None

    def _bias_row(
        self, model: Tree, per_class: Sequence[float], unlabeled: np.ndarray, labeled: np.ndarray
    ) -> Row | None:
        """Measure the class bias of a model on training images, whose true labels a simulation knows.

        Args:
            model: "params" and "stats".
            per_class: its test accuracy by class, (classes,).
            unlabeled: indices of the unlabeled training images, int64 (n,).
            labeled: indices of the labeled ones, whose class shares are compared; if empty, the server's.

        Returns:
            The result of `halfmoon.engine.evaluation.prediction_bias`; None without unlabeled images.
        """
        if not len(unlabeled):
            return None
        if not len(labeled) and not self.dataset.pooled:  # in pooled training the only client has the server's images
            labeled = self.dataset.rows(SERVER, labeled=True)
        images = self.dataset.train.images
        # A stream of random numbers of its own: measuring does not change what training draws.
        order = torch.randperm(len(unlabeled), generator=rng.generator(self.seed, "prior", self._round))
        sample = order[:MAX_BIAS_IMAGES].sort().values  # sorted, to read the images in order
        rows = tensor_from_numpy(unlabeled)[sample].to(images.device)
        predicted_shares = compute_mean_prediction(
            self.task.network, model, self.task.normalize, images[rows], executor=self._executor
        )
        return prediction_bias(
            predicted_shares,
            labeled_counts=self._class_counts(labeled),
            unlabeled_counts=self._class_counts(unlabeled),
            class_accuracies=per_class,
        )

    def _cohort_rows(self, labeled: bool) -> np.ndarray:
        """Return the labeled or the unlabeled training rows of all clients of the cohort."""
        return np.concatenate([self.dataset.rows(client, labeled, self._stage) for client in to_ints(self.cohort)])

    def _class_counts(self, rows: np.ndarray) -> np.ndarray:
        """Count the true classes of training rows, (classes,); rows without a known label are left out."""
        labels = self.dataset.train.labels
        labels = labels[tensor_from_numpy(rows).to(labels.device)]
        return torch.bincount(labels[labels >= 0], minlength=self.task.network.classes).cpu().numpy()

    def state(self) -> Tree:
        return {"client": read_all(self.memories), **super().state()}

    def _on_upload(self, client: int, broadcast: Tree, upload: Upload) -> None:
        """Store the models of the first `client_models` clients of the cohort, to measure their bias."""
        if client in to_ints(self.cohort)[: self.settings.client_models] and "params" in upload.update:
            self._client_models[client] = {"stats": {}, **broadcast, **upload.update}


def summarize_bias(rows: Sequence[Row]) -> Row:
    """Summarize the class bias of several clients: the mean, lowest and highest Jensen-Shannon divergence.

    Args:
        rows: for each client, the results of `prediction_bias` for its model ("local") and the server's ("global").

    Returns:
        {local, global}_{js_app_u, js_labeled}: the mean over clients, and the lowest and highest value with the
        suffixes _low and _high. Values that are None are left out.
    """
    result: Row = {}
    for model in ("local", "global"):
        for name in ("js_app_u", "js_labeled"):
            values = [row[model][name] for row in rows if row[model][name] is not None]
            if values:
                key = f"{model}_{name}"
                result[key] = round(float(np.mean(values)), 6)
                result[f"{key}_low"] = min(values)
                result[f"{key}_high"] = max(values)
    return result
