"""The server half of a runtime, wherever the clients are: draws cohorts, asks them, and counts what it costs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext, Aggregator
from halfmoon.aggregation.mean import UploadMean, mean_of
from halfmoon.aggregation.precision import decoded
from halfmoon.api.types import ClientUpdate, Method, StateStore, Task, WeightedMetric
from halfmoon.api.uploads import Upload, stack
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.memory import release_memory
from halfmoon.core.tensors import to_ints
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.budget import Cost
from halfmoon.engine.driver import ClientContext, ClientResult, add, images_per_call
from halfmoon.engine.evaluation import Quality
from halfmoon.engine.sampling import Views
from halfmoon.storage.manifest import StoreContents
from halfmoon.storage.state_store import StateView, TreeStore

WORD = 2**32

Row = dict[str, Any]
"""One round's line of metrics.jsonl."""

ClientResults = Iterator[tuple[int, ClientResult]]
"""Clients, and what came of their updates, one after the other."""


class TooFewReplies(UserError):
    """A round that too few clients have answered: nothing of it counts, and it is played again."""


class RoundReport(NamedTuple):
    """What a runtime measured in one round."""

    cohort: list[int]
    samples: dict[str, WeightedMetric]
    pseudo: Row | None
    cost: dict[str, int]  # of the run so far
    evaluation: Row | None = None  # how the model before this round did on test images that only the clients have
    validation: Row | None = None  # the same on validation images that only the clients have
    aggregator: Row | None = None  # what stood between the uploads and the method says of the round


@dataclass(frozen=True)
class RuntimeSettings:
    """How a runtime draws and measures.

    cohort: how many clients train in a round.
    seed: what cohorts, batches and views are drawn from.
    clients: how many are registered; a simulation takes the number of its data set.
    device: where the server computes; a simulation takes that of its data set.
    confidence_threshold: the confidence from which diagnostics call a pseudo-label confident.
    client_models: of how many clients a round the models that they send are kept, to be measured.
    client_dropout: the probability that a client of the cohort does not answer, for a whole round.
    cohort_secret: what a server draws cohorts from in place of the seed, if sites must not foresee them.
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
    """A federation that the round loop drives, on this machine or by network; `_client_rounds` knows where clients are.

    A round is `open`, any number of queries, `close`. Everything drawn depends on (seed, round, query, client) alone. A
    client of the cohort fails to answer with probability `settings.client_dropout`, for a whole round; one always
    answers. What the server's state store remembers lies in `store`. Uploads pass all `aggregators` to the method.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        views: Views,
        settings: RuntimeSettings,
        store: TreeStore | None = None,
        aggregators: Sequence[Aggregator] = (),
    ) -> None:
        self.method, self.base, self.task, self.views = method, task, task, views
        self.settings, self.seed, self.device = settings, settings.seed, settings.device
        self.client_updates = method.client_updates(task)
        self.clients, self.size = settings.clients, settings.cohort
        self.aggregators = tuple(aggregators)
        self.store = TreeStore() if store is None else store
        self.state_store: StateStore = StateView(self.store, "state/", self.device)
        self.cost = Cost()
        self.cohort = self.responders = torch.zeros(0, dtype=torch.int64)
        self._round = self._attempt = self._query = 0
        self._fair = True  # whether the cohort was drawn from all clients alike
        self._samples: dict[str, WeightedMetric] = {}
        self._quality = self._fresh_quality()

    @property
    @abstractmethod
    def labeled(self) -> int:
        """Return how many labeled images the server itself has."""

    @abstractmethod
    def prediction_bias(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Return what the model leans to (`halfmoon.engine.evaluation.leaning`), None where that cannot be known.

        It is measured on the unlabeled rows of this round's cohort and adds nothing to the cost. `per_class` (classes,)
        is the model's test accuracy by class.
        """

    def client_prediction_bias(
        self, model: Tree, per_class: Sequence[float], test: Callable[[Tree], Sequence[float]]
    ) -> Row | None:
        """Return what the models that single clients have sent lean to, and what `model` does on their images.

        `test` returns the test accuracy by class of a model. None where that is not wanted or cannot be known.
        """
        return None

    @abstractmethod
    def _client_rounds(
        self, context: ClientContext, clients: Sequence[int], broadcast: Tree, per_client: Tree
    ) -> ClientResults:
        """Visit clients (or the `SERVER`); `per_client` (leaves (K, ...)) is merged into `broadcast`, a slice for each.

        Yield what came of it by client, in their order, of those who answered: of one at least, if it is the cohort.
        """

    def retry_round(self, few: TooFewReplies) -> None:
        """Make ready to play the round again that too few have answered, or raise `few`."""
        raise few  # who does not answer on one machine will not answer the second time either

    def evaluate_next_round(self, model: Tree) -> None:
        """Have the model tested with the next query, where clients have test or validation images of their own."""
        return  # on one machine there is a test set or none

    def final_evaluation(self, model: Tree) -> tuple[Row | None, Row | None]:
        return None, None

    def on_checkpoint(self, round: int) -> None:
        """Take note that the first `round` rounds are on the disk."""
        return  # what clients on one machine remember is a part of what was saved

    def open(self, round: int) -> None:
        """Begin a round: draw its cohort, the same for every method of one seed."""
        draw = rng.generator(self.seed, "cohort", round)
        self.cohort = first_of_permutation(self.clients, self.size, draw).sort().values
        self.task = self.base.at(round)
        self.client_updates = self.method.client_updates(self.task)
        self._round, self._query = round, 0
        self._samples, self._quality = {}, self._fresh_quality()

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        """Send `broadcast` (and its slice of `per_client`) to the cohort, or `clients` others; return uploads, each leaf (k, ...).

        Of `clients` nobody may answer; then the weights are (0,), and nothing else is there.
        """
        recipients = self.cohort if clients is None else clients.cpu()
        there = answering(recipients, self.settings.client_dropout, self.seed, self._round)
        private = {} if per_client is None else per_client
        own = tree.map(lambda leaf: leaf[there], private)
        ups = {
            client: outcome.upload
            for client, outcome in self._ask(
                self.client_updates[client_update], to_ints(recipients[there]), broadcast, own
            )
        }
        upload, responders = stack(list(ups.values())), tuple(ups)
        del ups  # what is stacked is not held twice
        if responders and self.aggregators:
            place = {client: k for k, client in enumerate(to_ints(recipients))}
            mine = torch.tensor([place[client] for client in responders], dtype=torch.int64)
            received = tree.map(lambda leaf: leaf[mine.to(leaf.device)], private)
            at = (self._round, self._attempt, self._query - 1)
            fair = clients is None and self._fair
            upload_spec = self.client_updates[client_update].requirements.upload_spec
            who = responders, len(recipients), fair, upload_spec, self.state_store
            context = AggregationContext(*at, client_update, broadcast, received, *who)
            upload = self._aggregated(context, upload)
        else:
            self.responders = torch.tensor(responders, dtype=torch.int64)
        self._lose(recipients, tree.nbytes(broadcast) + tree.nbytes(private) // len(recipients))
        return upload

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Send `broadcast` to the cohort, and return the weighted mean of the updates, added up as they come.

        Where an aggregator has to see all uploads of a cohort, they are all held before it.
        """
        update = self.client_updates[client_update]
        if self.aggregators:
            return mean_of(
                self.query(client_update, broadcast), update.requirements.upload_spec, broadcast, client_update
            )
        mean, recipients, answered = (
            UploadMean(update.requirements.upload_spec, client_update),
            self.cohort,
            list[int](),
        )
        there = answering(recipients, self.settings.client_dropout, self.seed, self._round)
        for client, outcome in self._ask(update, to_ints(recipients[there]), broadcast, {}):
            mean.add(outcome.upload)
            answered.append(client)
            del outcome  # or it would be held while the next client trains
        self.responders = torch.tensor(answered, dtype=torch.int64)
        self._lose(recipients, tree.nbytes(broadcast))
        return mean.result(broadcast)

    def _lose(self, recipients: Tensor, nbytes: int) -> None:
        """Take those who have not answered out of the cohort; they were sent something too, `nbytes` bytes each."""
        mute = recipients[~torch.isin(recipients, self.responders)]
        self.cohort = self.cohort[~torch.isin(self.cohort, mute)]
        self.cost.bytes_down += len(mute) * nbytes

    def _aggregated(self, context: AggregationContext, upload: Upload) -> Upload:
        """Return the uploads that the aggregators let through; whose answer does not count has not answered."""
        for aggregator in self.aggregators:
            places, upload = aggregator.uploads(context, upload)
            if not places:
                what = f"round {context.round + 1}, query {context.query + 1} ({context.client_update})"
                raise TooFewReplies(f"{what} has no usable upload of {context.cohort}.")
            context = context if len(places) == len(context.clients) else context.only(places)
        self.responders = torch.tensor(context.clients, dtype=torch.int64)
        return upload

    def stop_reason(self, round: int) -> str | None:
        """Return in a sentence why `round` (from 0) may not be played, None where it may."""
        return next((why for aggregator in self.aggregators if (why := aggregator.ended(round)) is not None), None)

    def query_server(self, client_update: str, broadcast: Tree) -> Upload:
        """Do a work at the server, on its own labeled images; nothing travels. `broadcast` is all that it starts from."""
        traffic = self.cost.bytes_down, self.cost.bytes_up
        ((_, outcome),) = self._ask(self.client_updates[client_update].at_server, [SERVER], broadcast, {})
        self.cost.bytes_down, self.cost.bytes_up = traffic
        return outcome.upload

    def record_server_bytes(self, server: int) -> None:
        """Take note of the bytes of the server's tree; what lies on its state store counts too."""
        beside = self.store.total_bytes("state/") + self.store.size(f"client/{SERVER}")
        self.cost.stored_server = max(self.cost.stored_server, server + beside)

    def close(self) -> RoundReport:
        row = {name: value for aggregator in self.aggregators for name, value in aggregator.row().items()}
        cohort, quality = to_ints(self.cohort), self._quality.row()
        return RoundReport(cohort, self._samples, quality, self.cost.row(), aggregator=row or None)

    def state(self) -> Tree:
        return {"state": contents(self.state_store)}

    def restore(self, clients: StoreContents, cost: dict[str, int]) -> None:
        self.store.restore(clients)
        self.cost = Cost(**cost)

    def _ask(
        self, client_update: ClientUpdate, clients: Sequence[int], broadcast: Tree, per_client: Tree
    ) -> ClientResults:
        rows = images_per_call(self.device)
        context = ClientContext(client_update, self.views, self.seed, self._round, self._query, rows)
        self._query += 1
        precision = client_update.task.upload_precision
        for client, outcome in self._client_rounds(context, clients, broadcast, per_client):
            if client != SERVER:
                self.cost.stored_client = max(self.cost.stored_client, outcome.memory_bytes)
            for name, new in outcome.samples.items():
                self._samples[name] = add(self._samples.get(name), new)
            passes = client_update.passes(outcome.amount.labeled, outcome.amount.unlabeled)
            self.cost.add(outcome.amount, passes, outcome.images_outside_steps)
            self.cost.bytes_down += outcome.traffic[0]
            self.cost.bytes_up += outcome.traffic[1]
            if precision != "float32" and client != SERVER:
                received = {**broadcast, **tree.index(per_client, clients.index(client))}
                outcome = outcome._replace(upload=decoded(outcome.upload, received, precision))
            yield client, outcome
            del outcome
            release_memory(tree.nbytes(broadcast))

    def _fresh_quality(self) -> Quality:
        return Quality(self.base.network.classes, self.settings.confidence_threshold, self.device)


def contents(store: StateStore) -> Tree:
    return {key: store.get(key) for key in store.keys()}  # noqa: SIM118


def answering(recipients: Tensor, dropout: float, seed: int, round: int) -> Tensor:
    """Return the places in `recipients` of those who answer in a round, each with probability 1 - `dropout`.

    At least one does.
    """
    if not dropout:
        return torch.arange(len(recipients))
    draws = [float(torch.rand((), generator=rng.generator(seed, "silent", round, int(k)))) for k in recipients]
    there = [place for place, number in enumerate(draws) if number >= dropout]
    return torch.tensor(there or [max(range(len(draws)), key=draws.__getitem__)])


def first_of_permutation(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Return torch.randperm(count)[:size] in the time and memory of `size`; all numbers where there are fewer.

    Fisher and Yates' shuffle as PyTorch does it: the i-th number changes places with the one that lies a 32-bit random
    number modulo count - i after it. What has not been moved stands where it stood, so that a few entries are enough.
    Raise ValueError for 2^32 / 20 numbers and more, of which PyTorch draws otherwise.
    """
    if count >= WORD // 20:
        raise ValueError(f"a cohort is drawn of fewer than {WORD // 20} clients, not {count}")
    size = min(size, count)
    pairs = torch.empty((size + 1) // 2, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    moved: dict[int, int] = {}
    indices: list[int] = []
    for place in range(size):
        pair = int(pairs[place // 2])
        word = (pair >> 32 if place % 2 == 0 else pair) % WORD  # the first of a pair of words is the higher one
        other = place + word % (count - place)
        indices.append(moved.get(other, other))
        moved[other] = moved.get(place, place)
    return torch.tensor(indices, dtype=torch.int64)
