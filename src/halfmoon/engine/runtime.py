"""The server's side of a federation: sample cohorts, send queries to clients, and count their cost."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext, Aggregator
from halfmoon.aggregation.precision import decompress_upload
from halfmoon.api.types import ClientUpdate, Method, StateStore, Task, WeightedMetric
from halfmoon.api.upload_mean import UploadMean, average_stacked_uploads
from halfmoon.api.uploads import Upload, stack
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.memory import release_memory
from halfmoon.core.tensors import to_ints
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.budget import Cost
from halfmoon.engine.driver import ClientContext, ClientResult, add_metrics, images_per_call
from halfmoon.engine.sampling import Views
from halfmoon.storage.manifest import StoreContents
from halfmoon.storage.state_store import StateView, TreeStore

UINT32_VALUES = 2**32

Row = dict[str, Any]
"""One round's line of metrics.jsonl."""


class ClientTrainer(Protocol):
    """Trains clients, wherever they are: on this machine (`LocalClients`) or at sites (`SiteClients`)."""

    def train(
        self, context: ClientContext, clients: Sequence[int], broadcast: Tree, per_client: Tree
    ) -> Iterator[tuple[int, ClientResult]]:
        """Have clients (or the `SERVER`) train, and yield their results in the order of `clients`.

        A result is not stored here, so that the caller can free an upload before it takes the next one.

        Args:
            context: the query.
            clients: numbers of the clients.
            broadcast: the tree that all clients receive.
            per_client: leaves (len(clients), ...), of which each client receives its slice too.

        Yields:
            Each client that replies, with its result. If `clients` is the cohort, one or more reply: an implementation
            that gets fewer raises an error instead.
        """
        ...


class TooFewReplies(UserError):
    """Too few clients have replied in a round. The round has no effect and is retried."""


class RoundReport(NamedTuple):
    """The measurements of one round."""

    cohort: list[int]
    samples: dict[str, WeightedMetric]  # training metrics, summed over clients and steps
    cost: dict[str, int]  # of the run until now
    pseudo: Row | None = None  # quality of pseudo-labels, measured by a simulation
    evaluation: Row | None = None  # of the model before this round, on test images that only clients have
    validation: Row | None = None  # the same on their validation images
    aggregator: Row | None = None  # what the aggregators report


@dataclass(frozen=True)
class RuntimeSettings:
    """Settings of a runtime.

    Attributes:
        cohort: number of clients that train in a round.
        seed: seed of cohorts, batches and views.
        clients: number of registered clients; a simulation takes it from its data set.
        device: where the server computes; a simulation takes it from its data set.
        confidence_threshold: the confidence from which diagnostics call a pseudo-label confident.
        client_models: number of clients a round whose sent models are measured.
        client_dropout: probability that a client of the cohort does not reply in a round.
        cohort_secret: the seed of the cohorts of a server whose sites must not predict them; None: `seed`.
    """

    cohort: int
    seed: int = 0
    clients: int = 0
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (a device is immutable)
    confidence_threshold: float = 0.95
    client_dropout: float = 0.0
    client_models: int = 0
    cohort_secret: bytes | None = None


class ServerRuntime(ABC):
    """A federation, simulated or over the network, as the round loop and methods see it.

    A round is `open`, any number of queries, `close`. All random numbers depend only on (seed, round, query, client).
    A client of the cohort does not reply with probability `settings.client_dropout`, for a whole round; one client
    or more replies. Subclasses set `trainer`, which reaches the clients.

    Attributes:
        trainer: trains the clients.
        method: the method that trains.
        base: its task, with the learning rate of the first round.
        task: the task at the current round.
        client_updates: the method's client updates by name, at the current round.
        cohort: the clients of the current round, sorted; those that do not reply are removed after a query.
        responders: the clients whose uploads the last query returned, in the order of the uploads.
        store: the trees of the server's state store and of simulated clients' memories.
        aggregators: through which uploads pass, one after the other, before the method gets them.
        cost: the cost of the run until now.
    """

    trainer: ClientTrainer

    def __init__(
        self,
        method: Method,
        task: Task,
        views: Views,
        settings: RuntimeSettings,
        store: TreeStore | None = None,
        aggregators: Sequence[Aggregator] = (),
    ) -> None:
        """Build the runtime before its first round.

        Args:
            method: the method that trains.
            task: network, optimizer and number of rounds, at the first round.
            views: the augmentations.
            settings: seed, device, and numbers of clients.
            store: stores the trees of the server's state store and of simulated clients' memories; None: a new one.
            aggregators: through which uploads pass before the method gets them.
        """
        self.method = method
        self.base = task  # at the first round; `open` derives each round's task from it
        self.task = task
        self.views = views
        self.settings = settings
        self.seed = settings.seed
        self.device = settings.device
        self.client_updates = method.client_updates(task)
        self.clients = settings.clients
        self.size = settings.cohort
        self.aggregators = tuple(aggregators)
        self.store = TreeStore() if store is None else store
        self.state_store: StateStore = StateView(self.store, "state/", self.device)
        self.cost = Cost()
        self.cohort = torch.zeros(0, dtype=torch.int64)
        self.responders = torch.zeros(0, dtype=torch.int64)
        self._round = 0
        self._attempt = 0
        self._query = 0
        self._uniform_cohort = True  # whether the cohort is a uniform sample of all clients
        self._samples: dict[str, WeightedMetric] = {}

    @property
    @abstractmethod
    def labeled(self) -> int:
        """The number of labeled images of the server."""

    @abstractmethod
    def prediction_bias(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Measure the class bias of a model's predictions on the unlabeled images of this round's cohort (FedDB).

        The images that this sends through the network do not count towards the run's cost.

        Args:
            model: {"params", "stats"}.
            per_class: its test accuracy by class, (classes,).

        Returns:
            The row of `halfmoon.engine.evaluation.prediction_bias`; None if it cannot be measured.
        """

    def client_prediction_bias(
        self, model: Tree, per_class: Sequence[float], test: Callable[[Tree], Sequence[float]]
    ) -> Row | None:
        """Measure the class bias of the models that single clients sent, and of `model` on these clients' images.

        Only a simulation, which has the clients' images, overrides it.

        Args:
            model: the server's model, {"params", "stats"}.
            per_class: its test accuracy by class.
            test: computes the test accuracy by class of a client's model.

        Returns:
            A row for metrics.jsonl; None if it is not wanted or cannot be measured.
        """
        return None

    def retry_round(self, few: TooFewReplies) -> None:
        """Prepare to retry a round that had too few replies, or raise `few`."""
        raise few  # a simulated client that drops out would drop out of the retry, too

    def evaluate_next_round(self, model: Tree) -> None:
        """Have clients evaluate a model on their test and validation images with the next query."""
        return  # in a simulation only the server evaluates

    def final_evaluation(self, model: Tree, rounds: int) -> tuple[Row | None, Row | None]:
        """Have clients evaluate the last model, that of so many `rounds`.

        Returns:
            Their test and validation results, None if there are none.
        """
        return None, None

    def on_checkpoint(self, round: int) -> None:
        """Handle that a checkpoint of the first `round` rounds is on the disk."""
        return  # in a simulation the checkpoint contains the memories of all clients

    def open(self, round: int) -> None:
        """Begin a round: sample its cohort, which is the same for every method with one seed.

        Args:
            round: the round, from 0.
        """
        generator = rng.generator(self.seed, "cohort", round)
        self.cohort = first_of_permutation(self.clients, self.size, generator).sort().values
        self.task = self.base.at(round)
        self.client_updates = self.method.client_updates(self.task)
        self._round = round
        self._query = 0
        self._samples = {}
        self._start_measurements()

    def _start_measurements(self) -> None:
        """Forget what was measured in the round before; a simulation measures more than a server of sites can."""
        return

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        """Have clients run an update, return their uploads, and set `responders` to the clients that sent them.

        Clients that do not reply, or whose upload an aggregator drops, are removed from the cohort.

        Args:
            client_update: the name of the update.
            broadcast: the tree that all clients receive.
            per_client: leaves (number of clients, ...), of which each client receives its slice too.
            clients: numbers of the clients, at least one; None: the cohort.

        Returns:
            The uploads of the `responders`, stacked: every leaf is (k, ...). If none of `clients` replies, it
            contains only weights of shape (0,).

        Raises:
            ValueError: `clients` names no client.
            TooFewReplies: the aggregators accept no upload.
        """
        recipients = self.cohort if clients is None else clients.cpu()
        if len(recipients) == 0:
            raise ValueError(f"query({client_update!r}) has no clients: give at least one, or leave clients out.")
        private = {} if per_client is None else per_client
        query = self._query  # the next call increases it
        update = self.client_updates[client_update]
        uploads: dict[int, Upload] = {}
        for client, result in self._train_clients(client_update, update, recipients, broadcast, private):
            uploads[client] = result.upload
            del result
        upload = stack(list(uploads.values()))  # a copy
        responders = tuple(uploads)
        del uploads  # each upload is now stored twice: free the first copy
        if responders and self.aggregators:
            # Only some recipients may have replied: select their slices of the trees that single clients got.
            positions = {client: k for k, client in enumerate(to_ints(recipients))}
            rows = torch.tensor([positions[client] for client in responders], dtype=torch.int64)
            context = AggregationContext(
                round=self._round,
                attempt=self._attempt,
                query=query,
                client_update=client_update,
                broadcast=broadcast,
                per_client=tree.map(lambda leaf: leaf[rows.to(leaf.device)], private),
                clients=responders,
                cohort=len(recipients),
                random_cohort=clients is None and self._uniform_cohort,
                upload_spec=update.requirements.upload_spec,
                memory=self.state_store,
            )
            upload = self._aggregate(context, upload)
        else:
            self.responders = torch.tensor(responders, dtype=torch.int64)
        # All slices of `private` have the same size.
        bytes_per_recipient = tree.nbytes(broadcast) + tree.nbytes(private) // len(recipients)
        self._remove_missing(recipients, len(responders), bytes_per_recipient)
        return upload

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Have the cohort run an update, and return the weighted mean of the uploads.

        Uploads are added to a running sum as they arrive. Aggregators need all of them at once, so with aggregators
        all uploads of the cohort are in memory together.

        Args:
            client_update: the name of the update.
            broadcast: the tree that all clients receive.

        Returns:
            The mean, with the sum of the weights. `responders` is set to the clients that sent an upload.
        """
        update = self.client_updates[client_update]
        upload_spec = update.requirements.upload_spec
        shared_average = self._find_shared_average(update, broadcast)
        if shared_average is not None:
            return shared_average
        if self.aggregators:
            return average_stacked_uploads(self.query(client_update, broadcast), upload_spec, broadcast, client_update)
        mean = UploadMean(upload_spec, client_update)
        recipients = self.cohort
        responders: list[int] = []
        for client, result in self._train_clients(client_update, update, recipients, broadcast, {}):
            mean.add(result.upload)
            responders.append(client)
            del result  # free the upload before the next client trains
        self.responders = torch.tensor(responders, dtype=torch.int64)
        # Before a client without a reply is removed: the cohort is a condition of the shared average.
        average = mean.result(broadcast)
        self._store_shared_average(update, broadcast, average)
        self._remove_missing(recipients, len(responders), bytes_per_recipient=tree.nbytes(broadcast))
        return average

    def _find_shared_average(self, client_update: ClientUpdate, broadcast: Tree) -> Upload | None:
        """Find the average that another simulated run of the comparison has computed from the same broadcast.

        Returns:
            The average, whose cost is counted as if it had been computed again; None if the clients have to train.
        """
        return None  # only a simulation shares averages

    def _store_shared_average(self, client_update: ClientUpdate, broadcast: Tree, mean: Upload) -> None:
        """Store an average for later runs of the comparison, if they may share it."""
        return

    def query_server(self, client_update: str, broadcast: Tree) -> Upload:
        """Run an update on the server's labeled images, starting from `broadcast`. It counts no bytes sent."""
        bytes_down = self.cost.bytes_down
        bytes_up = self.cost.bytes_up
        update = self.client_updates[client_update].at_server
        ((_, result),) = self._train_clients(client_update, update, torch.tensor([SERVER]), broadcast, {})
        self.cost.bytes_down = bytes_down
        self.cost.bytes_up = bytes_up
        return result.upload

    def stop_reason(self, round: int) -> str | None:
        """Return a sentence on why `round` (from 0) must not start, such as a spent privacy budget, or None."""
        for aggregator in self.aggregators:
            reason = aggregator.stop_reason(round)
            if reason is not None:
                return reason
        return None

    def record_server_bytes(self, server: int) -> None:
        """Record the bytes of the server's tree after a round, to which those of its state store are added."""
        state_bytes = self.store.total_bytes("state/") + self.store.size(f"client/{SERVER}")
        self.cost.stored_server = max(self.cost.stored_server, server + state_bytes)

    def close(self) -> RoundReport:
        """End the round and return its measurements."""
        aggregator_row: Row = {}
        for aggregator in self.aggregators:
            aggregator_row |= aggregator.row()
        return RoundReport(
            cohort=to_ints(self.cohort),
            samples=self._samples,
            cost=self.cost.row(),
            aggregator=aggregator_row or None,
        )

    def state(self) -> Tree:
        """Return the trees that the federation stores between rounds."""
        return {"state": read_all(self.state_store)}

    def restore(self, clients: StoreContents, cost: dict[str, int]) -> None:
        """Continue from the stored trees and the cost in a checkpoint."""
        self.store.restore(clients)
        self.cost = Cost(**cost)

    def _train_clients(
        self, update_name: str, client_update: ClientUpdate, recipients: Tensor, broadcast: Tree, per_client: Tree
    ) -> Iterator[tuple[int, ClientResult]]:
        """Send the next query of the round to clients; count the cost and the metrics of each result, and yield it.

        Args:
            update_name: the name of the update.
            client_update: the update that they run.
            recipients: numbers of the clients, (n,). Those that drop out of this round do not train.
            broadcast: the tree that all of them receive.
            per_client: leaves (n, ...), of which each receives its slice too.

        Yields:
            Each client's number and result, with the upload in float32.
        """
        present = sample_responders(recipients, self.settings.client_dropout, self.seed, self._round)
        clients = to_ints(recipients[present])
        per_client = tree.map(lambda leaf: leaf[present], per_client)
        context = ClientContext(
            client_update=client_update,
            views=self.views,
            seed=self.seed,
            round=self._round,
            query=self._query,
            view_images=images_per_call(self.device),
            name=update_name,
        )
        self._query += 1
        precision = client_update.task.upload_precision
        for client, result in self.trainer.train(context, clients, broadcast, per_client):
            self._count_result(client_update, client, result)
            if precision != "float32" and client != SERVER:
                received = {**broadcast, **tree.index(per_client, clients.index(client))}
                result = result._replace(upload=decompress_upload(result.upload, received, precision))
            self._on_upload(client, broadcast, result.upload)  # a simulation stores some clients' models
            yield client, result
            del result  # free the upload before the next client trains
            release_memory(tree.nbytes(broadcast))

    def _count_result(self, client_update: ClientUpdate, client: int, result: ClientResult) -> None:
        """Count the cost and the metrics of a client's result."""
        if client != SERVER:
            self.cost.stored_client = max(self.cost.stored_client, result.memory_bytes)
        for name, sample in result.samples.items():
            self._samples[name] = add_metrics(self._samples.get(name), sample)
        passes = client_update.passes(result.amount.labeled, result.amount.unlabeled)
        self.cost.add(result.amount, passes, result.images_outside_steps)
        bytes_down, bytes_up = result.traffic
        self.cost.bytes_down += bytes_down
        self.cost.bytes_up += bytes_up

    def _on_upload(self, client: int, broadcast: Tree, upload: Upload) -> None:
        """Observe the upload of a client before it is aggregated."""
        return

    def _remove_missing(self, recipients: Tensor, replies: int, bytes_per_recipient: int) -> None:
        """Remove the recipients that are not in `responders` from this round's cohort, and count what they were sent.

        Args:
            recipients: the clients that were queried. Those outside of the cohort do not change it.
            replies: the number of them that replied. It includes those whose upload an aggregator has dropped, and
                their bytes were counted with their results.
            bytes_per_recipient: the bytes that were sent to each.
        """
        missing = recipients[~torch.isin(recipients, self.responders)]
        self.cohort = self.cohort[~torch.isin(self.cohort, missing)]
        self.cost.bytes_down += (len(recipients) - replies) * bytes_per_recipient

    def _aggregate(self, context: AggregationContext, upload: Upload) -> Upload:
        """Pass stacked uploads through the aggregators; clients whose upload is dropped count as not replying.

        Args:
            context: the round, the query and its clients.
            upload: their uploads, every leaf (k, ...).

        Returns:
            The uploads of the remaining clients, which `responders` is set to.

        Raises:
            TooFewReplies: no upload remains.
        """
        for aggregator in self.aggregators:
            positions, upload = aggregator.process_uploads(context, upload)
            if not positions:
                query = f"round {context.round + 1}, query {context.query + 1} ({context.client_update})"
                raise TooFewReplies(f"{query} has no usable upload of {context.cohort}.")
            if len(positions) < len(context.clients):
                context = context.only(positions)
        self.responders = torch.tensor(context.clients, dtype=torch.int64)
        return upload


def read_all(store: StateStore) -> Tree:
    """Return all trees of a state store by key."""
    return {key: store.get(key) for key in store.keys()}  # noqa: SIM118


def sample_responders(recipients: Tensor, dropout: float, seed: int, round: int) -> Tensor:
    """Sample the clients that reply in a round, each with probability 1 - `dropout`.

    Args:
        recipients: numbers of the clients, (n,).
        dropout: the probability that a client does not reply.
        seed: the seed of the run.
        round: the round, from 0. A client replies to all queries of a round or to none.

    Returns:
        The positions in `recipients` of the clients that reply, one or more.
    """
    if not dropout:
        return torch.arange(len(recipients))
    # A generator for each client: whether it replies does not depend on which other clients are sampled.
    draws = [float(torch.rand((), generator=rng.generator(seed, "silent", round, int(k)))) for k in recipients]
    present = [position for position, number in enumerate(draws) if number >= dropout]
    if not present:
        # A round needs one reply: the client that was closest to replying sends it.
        present = [max(range(len(draws)), key=draws.__getitem__)]
    return torch.tensor(present)


def first_of_permutation(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Compute torch.randperm(count)[:size] in time and memory proportional to `size`.

    Args:
        count: the number of elements.
        size: how many of them to return; all if there are fewer.
        generator: random numbers.

    Returns:
        Different numbers below `count`, int64 (min(size, count),).

    Raises:
        ValueError: `count` is 2^32 / 20 or more, for which PyTorch uses another algorithm.
    """
    max_count = UINT32_VALUES // 20
    if count >= max_count:
        raise ValueError(f"a cohort is drawn of fewer than {max_count} clients, not {count}")
    size = min(size, count)
    # PyTorch's Fisher-Yates shuffle: element i is exchanged with the one at i + (32-bit random number) mod (count - i).
    # Only exchanged elements are stored: the rest is still in its first position.
    pairs = torch.empty((size + 1) // 2, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    moved: dict[int, int] = {}
    indices: list[int] = []
    for position in range(size):
        pair = int(pairs[position // 2])
        # A 64-bit number has two random numbers, the first in its higher half.
        number = (pair >> 32 if position % 2 == 0 else pair) % UINT32_VALUES
        other = position + number % (count - position)
        indices.append(moved.get(other, other))
        moved[other] = moved.get(position, position)
    return torch.tensor(indices, dtype=torch.int64)
