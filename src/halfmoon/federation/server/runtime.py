"""The server's runtime where the clients are sites behind a link: the same rounds, the client updates elsewhere."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext, Aggregator
from halfmoon.aggregation.weights import capped
from halfmoon.api.types import Method, StateStore, Task, WeightedMetric
from halfmoon.api.uploads import UPDATE_ONLY, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.driver import ClientContext, ClientResult
from halfmoon.engine.evaluation import ModelEvaluation
from halfmoon.engine.local_clients import LocalClients
from halfmoon.engine.loop import RoundReport, Row, TooFewReplies
from halfmoon.engine.runtime import ClientResults, RuntimeSettings, ServerRuntime
from halfmoon.engine.sampling import Views
from halfmoon.federation.protocol.messages import Reply, Request, RoundKey
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.federation.server.calls import CheckedReply, Evaluations, SiteCalls
from halfmoon.federation.server.cohorts import CohortSampler
from halfmoon.federation.server.secure_sum import MaskedSum, mean_uploads, sum_layout
from halfmoon.storage.manifest import StoreContents
from halfmoon.storage.state_store import StateView, TreeStore

CPU = torch.device("cpu")


class RemoteRuntime(ServerRuntime):
    """A runtime whose client k is the site `calls.names[k]`; `server` has the server's own labeled rows.

    Replies are used in the order of the numbers. A site without a usable answer leaves its round; a round with too few
    is played again.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        views: Views,
        calls: SiteCalls,
        settings: RuntimeSettings,
        server: LocalClients | None = None,
        store: TreeStore | None = None,
        aggregators: Sequence[Aggregator] = (),
    ) -> None:
        settings = replace(settings, clients=len(calls.names), confidence_threshold=1.0, client_dropout=0.0)
        super().__init__(method, task, views, settings, store, aggregators)
        self.calls, self.names = calls, tuple(calls.names)
        self.cohorts = CohortSampler(self.names, settings, calls.quarantine)
        self._staged = StagedStore(StateView(self.store, "state/", self.device))
        self._stores = [self._staged]
        self.state_store: StateStore = self._staged
        self.server = server
        if server is not None:
            self._stores += [StagedStore(server.memories)]
            self.server = replace(server, memories=self._stores[1])
        self._versions = MemoryVersions(self.store)
        self._model: Tree = {}  # to evaluate with the next query
        self._evaluations: Evaluations | None = None

    @property
    def labeled(self) -> int:
        return 0 if self.server is None else self.server.dataset.training_size(SERVER).labeled

    def prediction_bias(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        return None

    def open(self, round: int) -> None:
        """Begin a round, or begin it again: draw its cohort, at first as a simulation does."""
        super().open(round)
        self._model, self._evaluations = {}, None
        self._versions.drop()
        for store in self._stores:
            store.changes.clear()
        self.cohort = self.cohorts.draw(round)
        self._uniform_cohort = self.cohorts.uniform

    def retry_round(self, few: TooFewReplies) -> None:
        """Prepare to play the round again, or raise `few` when that was tried often enough."""
        self.cohorts.attempt += 1
        self._attempt = self.cohorts.attempt
        if self._attempt >= self.calls.rules.attempts or len(self.calls.quarantine.sites) == self.clients:
            raise few
        self.calls.say(f"round {self._round + 1} is played again, attempt {self._attempt + 1}: {few}")
        self.calls.wait_for_sites(self.calls.rules.quorum(self.size))

    def evaluate_next_round(self, model: Tree) -> None:
        self._model = model

    def final_evaluation(self, model: Tree) -> tuple[Row | None, Row | None]:
        """Return the last model's rows on the sites' images; Nones where no site has validation images."""
        if not any(self.calls.inspection.validations(name) for name in self.names):
            return None, None
        tests, validations = self._evaluate(model, self.calls.evaluators())
        return tests.row(self._round + 1), validations.row(self._round + 1)

    def evaluate_last(self, model: Tree) -> ModelEvaluation | None:
        names = [name for name in self.calls.evaluators() if self.calls.inspection.tests(name)]
        return self._evaluate(model, names).tests.tally()

    def _evaluate(self, model: Tree, names: Sequence[str]) -> Evaluations:
        requests = {name: self._request(name, self.task.rounds - 1, self._query, "", {}, model) for name in names}
        return self.calls.evaluate(requests, self.base.network)

    def on_checkpoint(self, round: int) -> None:
        self._versions.saved()

    def restore(self, clients: StoreContents, cost: dict[str, int]) -> None:
        super().restore(clients, cost)
        self._versions.restore()

    def record_server_bytes(self, server: int) -> None:
        """Take note of the bytes of the server's tree; the round is over, so its changes of state stores count."""
        self._commit()
        super().record_server_bytes(server)

    def close(self) -> RoundReport:
        """End the round: its measures and the cost of the run so far."""
        self._commit()
        self._attempt = 0
        self.cohorts.end_round()
        report = super().close()
        if self.calls.inspection.cap is not None and (row := self.calls.inspection.cap.row()):
            report = report._replace(aggregator={**row, **(report.aggregator or {})})
        for fact in (report.aggregator or {}).get("outside", ()):
            fact["site"] = self.names[fact["client"]]
        if self._evaluations is None:
            return report
        tests, validations = (part.row(self._round) for part in self._evaluations)
        return report._replace(evaluation=tests, validation=validations)

    def _commit(self) -> None:
        for store in self._stores:
            store.commit()
        self._versions.commit()

    def _client_rounds(
        self, context: ClientContext, clients: Sequence[int], broadcast: Tree, per_client: Tree
    ) -> ClientResults:
        if list(clients) == [SERVER]:
            assert self.server is not None, "a method asks a server for its labels where it has some"
            (result,) = self.server.update(context, clients, None, broadcast, per_client, self._quality)
            yield SERVER, result
            return
        name = next(name for name, own in self.client_updates.items() if own is context.client_update)
        what = f"round {context.round + 1}, query {context.query + 1} ({name})"
        downlinks = {
            self.names[k]: {**broadcast, **tree.index(per_client, place)}
            for place, k in enumerate(clients)
            if self.names[k] not in self.calls.quarantine.sites  # a method may ask others than its cohort
        }
        model, self._model = self._model, {}
        evaluators = self.calls.evaluators() if model else []
        self.cost.bytes_down += tree.nbytes(model) * sum(site in evaluators for site in downlinks)
        requests = {
            site: self._request(site, context.round, context.query, name, own, model if site in evaluators else {})
            for site, own in downlinks.items()
        }
        masked, keys = None, self.calls.inspection.keys
        if keys is not None:
            places = {self.names[k]: k for k in clients}
            masked = MaskedSum(requests, places, keys(), self._ask_masked, what)
            requests = masked.begin()
        network = self.base.network
        replies = self.calls.checked(self.calls.exchange(requests, what), requests, context, downlinks, network)
        if evaluators:
            self._evaluations = Evaluations.capped(self.calls.rules.weight_cap)
            for site, reply in replies.items():
                self.calls.add(self._evaluations, site, reply.reply, network)
        self._check_quorum(clients, replies, what)
        whole = {} if masked is None else {site: reply.whole() for site, reply in replies.items()}
        total = None if masked is None else masked.total(whole)
        for site, reply in replies.items():
            if reply.reply.memory_bytes:
                self._versions.add(site, (context.round, self._attempt, context.query))
        if total is not None:
            yield from self._unmasked(total, whole, context, clients, broadcast, per_client)
            return
        there = {k: replies.pop(self.names[k]) for k in clients if self.names[k] in replies}
        scale = self.calls.weight_scale(there)
        for k in list(there):
            yield (
                k,
                _to_device(
                    there.pop(k).whole().to_result(),
                    self.device,
                    context.client_update.requirements.upload_spec,
                    scale[k],
                ),
            )

    def _check_quorum(self, clients: Sequence[int], replies: Mapping[str, CheckedReply], what: str) -> None:
        """Raise `TooFewReplies` where too few of the cohort are left; a method may ask others, who do not count."""
        self.cohorts.lose(k for k in clients if self.names[k] not in replies)
        size, left = self.cohorts.size, len(self.cohorts.remaining)
        needed = self.calls.rules.quorum(size)
        if left < needed:
            raise TooFewReplies(f"{what} has {left} usable replies of {size}, and {needed} are needed.")

    def _ask_masked(self, requests: Mapping[str, Request], spec: TreeSpec, what: str) -> dict[str, Reply]:
        """Return the replies to requests about a masked sum alone; sites without a usable one have failed."""
        replies = self.calls.masked(requests, spec, what)
        self.cohorts.lose(k for k, site in enumerate(self.names) if site in requests and site not in replies)
        return replies

    def _unmasked(
        self,
        total: Tensor,
        replies: Mapping[str, Reply],
        context: ClientContext,
        clients: Sequence[int],
        broadcast: Tree,
        per_client: Tree,
    ) -> ClientResults:
        """Yield the results of a masked query, with the mean of all in the place of each one's update."""
        places = [place for place, k in enumerate(clients) if self.names[k] in replies]
        there = tuple(clients[place] for place in places)
        own = tree.to(tree.map(lambda leaf: leaf[torch.tensor(places, device=leaf.device)], per_client), CPU)
        at = (context.round, self._attempt, context.query)
        aggregation = AggregationContext(*at, "", tree.to(broadcast, CPU), own, there, len(clients), True)
        upload = self.calls.plain_spec(context, {**broadcast, **tree.index(per_client, places[0])})
        ups = mean_uploads(aggregation, upload, total, sum_layout(upload))
        for k, upload in zip(there, ups, strict=True):
            yield k, _to_device(replace(replies[self.names[k]], upload=upload.tree).to_result(), self.device)

    def _request(
        self, site: str, round: int, query: int, client_update: str, broadcast: Tree, evaluation: Tree
    ) -> Request:
        latest, oldest = self._versions.latest(site), self._versions.oldest(site)
        return Request(
            *self.calls.run, round, self._attempt, query, client_update, latest, oldest, broadcast, evaluation
        )


def _to_device(
    result: ClientResult, device: torch.device, upload_spec: UploadSpec = UPDATE_ONLY, scale: float = 1.0
) -> ClientResult:
    samples = {name: WeightedMetric(*(leaf.to(device) for leaf in sample)) for name, sample in result.samples.items()}
    upload = Upload.from_tree(tree.to(result.upload.tree, device))
    if scale < 1:
        upload = capped(upload.map(lambda leaf: leaf.unsqueeze(0)), upload_spec, [scale]).at(0)
    return result._replace(upload=upload, samples=samples)


VERSIONS_KEY = "visits"


@dataclass
class StagedStore:
    """A state store whose changes count when the round does: a round that is played again finds it as it was."""

    state_store: StateStore
    changes: dict[str, Tree] = field(default_factory=dict)

    def get(self, key: str) -> Tree | None:
        return self.changes[key] if key in self.changes else self.state_store.get(key)

    def put(self, key: str, tree: Tree) -> None:
        self.changes[key] = tree

    def keys(self) -> list[str]:
        return sorted({*self.state_store.keys(), *self.changes})

    def commit(self) -> None:
        for key, value in self.changes.items():
            self.state_store.put(key, value)
        self.changes.clear()


class MemoryVersions:
    """The last client update of each site that counted and left a memory there, stored so that a checkpoint has it.

    Those of a round count from its end (`commit`); a round that begins again has none (`drop`).
    """

    def __init__(self, store: TreeStore) -> None:
        self.store = store
        self._current: dict[str, RoundKey] = {}
        self._new: dict[str, RoundKey] = {}
        self._checkpoints: tuple[dict[str, RoundKey], ...] = ({}, {})  # the older and the newer one

    def latest(self, site: str) -> list[int]:
        return list(self._new.get(site, self._current.get(site, ())))

    def oldest(self, site: str) -> list[int]:
        """Return the oldest client update that may count again: that of the checkpoint to fall back on."""
        return list(self._checkpoints[0].get(site, ()))

    def add(self, site: str, at: RoundKey) -> None:
        self._new[site] = at

    def drop(self) -> None:
        self._new = {}

    def commit(self) -> None:
        """Count the client updates of the round that is over."""
        if self._new:
            self._current |= self._new
            self.store.put(VERSIONS_KEY, {site: torch.tensor(at) for site, at in self._current.items()})
        self._new = {}

    def saved(self) -> None:
        self._checkpoints = (self._checkpoints[1], dict(self._current))

    def restore(self) -> None:
        rows = {site: leaf.tolist() for site, leaf in (self.store.get(VERSIONS_KEY) or {}).items()}
        self._current = {site: (row[0], row[1], row[2]) for site, row in rows.items()}
        self._new, self._checkpoints = {}, ({}, {})
