"""The runtime of a federation's server: the rounds of a simulation, with local updates at remote sites."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext, Aggregator
from halfmoon.aggregation.weights import cap_weights
from halfmoon.api.types import Method, StateStore, Task, WeightedMetric
from halfmoon.api.uploads import UPDATE_ONLY, Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.driver import ClientContext, ClientResult
from halfmoon.engine.local_clients import LocalClients
from halfmoon.engine.loop import RoundReport, Row, TooFewReplies
from halfmoon.engine.runtime import ClientResults, RuntimeSettings, ServerRuntime
from halfmoon.engine.sampling import Views
from halfmoon.federation.protocol.messages import Reply, Request, RoundKey
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.federation.server.calls import CheckedReply, Evaluations, FederatedEvaluation, SiteCalls
from halfmoon.federation.server.cohorts import CohortSampler
from halfmoon.federation.server.secure_sum import MaskedSum, mean_uploads, sum_layout
from halfmoon.storage.manifest import StoreContents
from halfmoon.storage.state_store import StateView, TreeStore

CPU = torch.device("cpu")


class RemoteRuntime(ServerRuntime):
    """A runtime whose client k is the site `calls.names[k]`.

    Replies are used in the order of client numbers. A site without a usable reply leaves its round; a round with too few
    replies is retried.

    Attributes:
        calls: sends requests to the sites.
        server: trains on the server's labeled images, if it has some.
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
        """Prepare to train. The base class runs the method's rounds; this class sends its queries to real sites.

        Args:
            method: the method.
            task: its task.
            views: the augmentations.
            calls: sends requests to the sites.
            settings: cohort size, seed and device. Real clients drop out by themselves, so none are dropped at random.
            server: trains on the server's labeled images; None if it has none.
            store: stores state between rounds; None for memory.
            aggregators: uploads pass through them before the method gets them.
        """
        settings = replace(
            settings,
            clients=len(calls.names),
            confidence_threshold=1.0,  # only for diagnostics of pseudo-labels, which sites do not send
            client_dropout=0.0,
        )
        super().__init__(method, task, views, settings, store, aggregators)
        self.calls = calls
        self.names = tuple(calls.names)
        self.cohorts = CohortSampler(self.names, settings, calls.quarantine)
        # A round that is retried must see the state from before it, so changes are staged until the round ends. They
        # concern the method's state (`state_store`), and the state of the server's local training (its memories).
        staged_state = StagedStore(StateView(self.store, "state/", self.device))
        self._stores = [staged_state]  # all stores with staged changes
        self.state_store: StateStore = staged_state
        self.server = server
        if server is not None:
            staged_memories = StagedStore(server.memories)
            self._stores.append(staged_memories)
            self.server = replace(server, memories=staged_memories)
        self._versions = MemoryVersions(self.store)  # for each site, the local update that its state is from
        self._model: Tree = {}  # the model that sites evaluate with the next query, besides training
        self._evaluations: Evaluations | None = None  # the sites' evaluations of the current round

    @property
    def labeled(self) -> int:
        return 0 if self.server is None else self.server.dataset.training_size(SERVER).labeled

    def prediction_bias(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        return None

    def open(self, round: int) -> None:
        """Begin an attempt at a round: drop the state of an earlier attempt, and sample the cohort.

        The first attempt has the cohort that a simulation with the same seed samples. A later one avoids sites that
        failed, so its cohort is no uniform sample, and differential privacy does not count on sampling in it.
        """
        super().open(round)
        self._model = {}
        self._evaluations = None
        # An earlier attempt has noted that sites now have the state after its updates. Without the note they continue
        # from their state before the round, which they still store.
        self._versions.discard_new()
        # It has also changed the state of the method and of the server's own training; neither is written yet.
        for store in self._stores:
            store.changes.clear()
        self.cohort = self.cohorts.draw(round)
        self._uniform_cohort = self.cohorts.uniform

    def retry_round(self, few: TooFewReplies) -> None:
        """Prepare another attempt at a round that had too few replies, and wait until enough sites are connected.

        Args:
            few: the error with which the last attempt ended.

        Raises:
            TooFewReplies: `few`, if the last allowed attempt has failed or every site is in quarantine.
        """
        self.cohorts.attempt += 1  # another attempt has another cohort
        self._attempt = self.cohorts.attempt  # the base class reports it to the aggregators
        all_quarantined = len(self.calls.quarantine.sites) == self.clients
        if self._attempt >= self.calls.rules.attempts or all_quarantined:
            raise few
        text = f"round {self._round + 1} is played again, attempt {self._attempt + 1}: {few}"
        self.calls.log.record("round_retried", text, round=self._round + 1, attempt=self._attempt + 1)
        self.calls.wait_for_sites(self.calls.rules.quorum(self.size))

    def evaluate_next_round(self, model: Tree) -> None:
        self._model = model

    def final_evaluation(self, model: Tree) -> tuple[Row | None, Row | None]:
        """Evaluate the last model at the sites, and return its test and validation rows; None without validation images."""
        if not any(self.calls.inspection.validation_count(name) for name in self.names):
            return None, None
        tests, validations = self._evaluate(model, self.calls.evaluators())
        return tests.row(self._round + 1), validations.row(self._round + 1)

    def evaluate_last(self, model: Tree) -> FederatedEvaluation:
        """Evaluate a model on the test images of the sites."""
        names = [name for name in self.calls.evaluators() if self.calls.inspection.test_count(name)]
        return self._evaluate(model, names).tests

    def _evaluate(self, model: Tree, names: Sequence[str]) -> Evaluations:
        requests = {name: self._request(name, self.task.rounds - 1, self._query, "", {}, model) for name in names}
        return self.calls.evaluate(requests, self.base.network)

    def on_checkpoint(self, round: int) -> None:
        self._versions.saved()

    def restore(self, clients: StoreContents, cost: dict[str, int]) -> None:
        super().restore(clients, cost)
        self._versions.restore()

    def record_server_bytes(self, server: int) -> None:
        """Record the bytes of the server's tree. The round is over, so its changes to state stores take effect."""
        self._commit()
        super().record_server_bytes(server)

    def close(self) -> RoundReport:
        """End the round: make its changes of state final, and report its metrics and the cost of the run so far.

        To the report of a simulation it adds the clients whose weight was capped, the site names of outliers (clients
        whose update a robust aggregation rule left out), and the sites' evaluation of the model from before the round.
        """
        self._commit()  # writes the staged changes of this round to the store
        self._attempt = 0
        self.cohorts.end_round()
        report = super().close()
        weight_cap = self.calls.inspection.cap
        cap_row = None if weight_cap is None else weight_cap.row()  # the capped clients and the largest share
        if cap_row:
            report = report._replace(aggregator={**cap_row, **(report.aggregator or {})})
        # A robust rule knows clients by their numbers only. The rows are changed in place, as parts of the report.
        outliers = (report.aggregator or {}).get("outside", ())
        for outlier in outliers:
            outlier["site"] = self.names[outlier["client"]]
        if self._evaluations is None:
            return report
        return report._replace(
            evaluation=self._evaluations.tests.row(self._round),
            validation=self._evaluations.validations.row(self._round),
        )

    def _commit(self) -> None:
        for store in self._stores:
            store.commit()
        self._versions.commit()

    def _client_rounds(
        self, context: ClientContext, clients: Sequence[int], broadcast: Tree, per_client: Tree
    ) -> ClientResults:
        """Send a query to the sites, check their replies, and yield the results of their local updates.

        With secure aggregation the sites exchange keys and shares before the query, and the masks are removed after it
        (`MaskedSum`). A query to the server itself trains on its own labeled images.

        Raises:
            TooFewReplies: if fewer sites than the quorum have sent a usable reply.
        """
        if list(clients) == [SERVER]:
            assert self.server is not None, "a method queries the server only if it has labels"
            (result,) = self.server.update(context, clients, None, broadcast, per_client, self._quality)
            yield SERVER, result
            return
        name = next(name for name, update in self.client_updates.items() if update is context.client_update)
        description = f"round {context.round + 1}, query {context.query + 1} ({name})"
        # A method may query clients outside its cohort, so quarantined sites are left out here as well.
        downloads = {
            self.names[client]: {**broadcast, **tree.index(per_client, row)}
            for row, client in enumerate(clients)
            if self.names[client] not in self.calls.quarantine.sites
        }
        model = self._model  # evaluated with the first query of a round only
        self._model = {}
        evaluators = self.calls.evaluators() if model else []
        self.cost.bytes_down += tree.nbytes(model) * sum(site in evaluators for site in downloads)
        requests = {}
        for site, download in downloads.items():
            evaluated = model if site in evaluators else {}
            requests[site] = self._request(site, context.round, context.query, name, download, evaluated)
        masked = None
        if self.calls.inspection.keys is not None:
            numbers = {self.names[client]: client for client in clients}
            masked = MaskedSum(requests, numbers, self.calls.inspection.keys(), self._query_masked, description)
            requests = masked.start()
        network = self.base.network
        responses = self.calls.exchange(requests, description)
        replies = self.calls.check_replies(responses, requests, context, downloads, network)
        # The responses are not needed any more; without this they would be in memory until the last result is used.
        del responses
        if evaluators:
            self._evaluations = Evaluations.with_cap(self.calls.rules.weight_cap)
            for site, reply in replies.items():
                self.calls.add_evaluation(self._evaluations, site, reply.reply, network)
        self._check_quorum(clients, replies, description)
        total = None
        masked_replies: dict[str, Reply] = {}
        if masked is not None:
            masked_replies = {site: reply.load_upload() for site, reply in replies.items()}
            total = masked.total(masked_replies)
        for site, reply in replies.items():
            if reply.reply.memory_bytes:  # the site has stored a new state, from which it continues next time
                self._versions.add(site, (context.round, self._attempt, context.query))
        if total is not None:
            yield from self._masked_results(total, masked_replies, context, clients, broadcast, per_client)
            return
        upload_spec = context.client_update.requirements.upload_spec
        present = {client: replies.pop(self.names[client]) for client in clients if self.names[client] in replies}
        scale = self.calls.weight_scale(present, upload_spec)
        # Popping a reply deletes its spooled file once its result was used.
        for client in list(present):
            yield client, _load_result(present.pop(client), self.device, upload_spec, scale[client])

    def _check_quorum(self, clients: Sequence[int], replies: Mapping[str, CheckedReply], description: str) -> None:
        """Mark the clients without a usable reply as failed, and check that enough of the cohort are left.

        Clients outside the cohort, which a method may query as well, do not count.

        Args:
            clients: numbers of the clients that were queried.
            replies: their usable replies, by site.
            description: the query, for the error.

        Raises:
            TooFewReplies: if fewer clients than the quorum are left.
        """
        self.cohorts.mark_failed(client for client in clients if self.names[client] not in replies)
        cohort_size = self.cohorts.size
        remaining = len(self.cohorts.remaining)
        needed = self.calls.rules.quorum(cohort_size)
        if remaining < needed:
            raise TooFewReplies(
                f"{description} has {remaining} usable replies of {cohort_size}, and {needed} are needed."
            )

    def _query_masked(self, requests: Mapping[str, Request], spec: TreeSpec, description: str) -> dict[str, Reply]:
        """Send the requests of one step of a secure sum, return the usable replies, and mark the other sites as failed.

        Args:
            requests: the request of each site.
            spec: names, shapes and dtypes of the tensors in a reply.
            description: description of the exchange for the log.
        """
        replies = self.calls.collect_masked(requests, spec, description)
        failed_sites = [site for site in requests if site not in replies]
        self.cohorts.mark_failed(self.names.index(site) for site in failed_sites)
        return replies

    def _masked_results(
        self,
        total: Tensor,
        replies: Mapping[str, Reply],
        context: ClientContext,
        clients: Sequence[int],
        broadcast: Tree,
        per_client: Tree,
    ) -> ClientResults:
        """Yield the results of a query with secure aggregation, in which the update of a single client is not known.

        So each client gets the mean of all updates: a method that averages them computes the same as without secure
        aggregation.

        Args:
            total: the unmasked sum of updates and weights in fixed point, int64, (number of parameters + 1,).
            replies: the replies, by site; their masked uploads are not used.
            context: the client update.
            clients: numbers of the clients that were queried.
            broadcast: the tree that all clients received.
            per_client: leaves (len(clients), ...), of which each client received its slice.
        """
        rows = [row for row, client in enumerate(clients) if self.names[client] in replies]
        responders = tuple(clients[row] for row in rows)
        responder_slices = tree.map(lambda leaf: leaf[torch.tensor(rows, device=leaf.device)], per_client)
        aggregation = AggregationContext(
            round=context.round,
            attempt=self._attempt,
            query=context.query,
            client_update="",  # a mean reads neither this nor `cohort` and `random_cohort`; noise and robust rules do
            broadcast=tree.to(broadcast, CPU),
            per_client=tree.to(responder_slices, CPU),
            clients=responders,
            cohort=len(clients),
            random_cohort=True,
        )
        # The mean is a change, to which `mean_uploads` adds the values that each client received. It uses only these
        # values and the clients of `aggregation`. All uploads have the same shapes, so one client's download is enough
        # to find them.
        spec = self.calls.plain_spec(context, {**broadcast, **tree.index(per_client, rows[0])})
        uploads = mean_uploads(aggregation, spec, total, sum_layout(spec))
        for client, upload in zip(responders, uploads, strict=True):
            reply = replace(replies[self.names[client]], upload=upload.tree)
            yield client, _to_device(reply.to_result(), self.device)

    def _request(
        self, site: str, round: int, query: int, client_update: str, broadcast: Tree, evaluation: Tree
    ) -> Request:
        """Build the request for one site: to run a local update, to evaluate a model, or both.

        A site stores its state after each local update. It continues from the state of the update `latest`. The server
        keeps two checkpoints, so it may resume from either; a site may delete the states from before `oldest`, the
        update that its state was from in the older of them.

        Args:
            site: the site.
            round: the round, from 0.
            query: the number of earlier queries in this round.
            client_update: name of the local update to run; "" for none.
            broadcast: the tree that the site receives for it.
            evaluation: a model to evaluate on the site's images; {} for none.
        """
        return Request(
            federation=self.calls.run.federation,
            version=self.calls.run.version,
            run=self.calls.run.run,
            round=round,
            attempt=self._attempt,
            query=query,
            client_update=client_update,
            latest=self._versions.latest(site),
            oldest=self._versions.oldest(site),
            download=broadcast,
            evaluation=evaluation,
        )


def _load_result(
    reply: CheckedReply, device: torch.device, upload_spec: UploadSpec, weight_scale: float
) -> ClientResult:
    """Load a reply with its upload from the spool, and multiply the weight of the upload by `weight_scale`."""
    return _to_device(reply.load_upload().to_result(), device, upload_spec, weight_scale)


def _to_device(
    result: ClientResult, device: torch.device, upload_spec: UploadSpec = UPDATE_ONLY, weight_scale: float = 1.0
) -> ClientResult:
    """Move a client's upload and metrics to a device, and multiply the weight of the upload by `weight_scale`.

    An upload of sums over images has no weight, so its sums are multiplied; `upload_spec` declares which they are.
    """
    samples = {name: WeightedMetric(*(leaf.to(device) for leaf in sample)) for name, sample in result.samples.items()}
    upload = Upload.from_tree(tree.to(result.upload.tree, device))
    if weight_scale < 1:
        # `cap_weights` expects uploads with a leading dimension of clients.
        stacked = upload.map(lambda leaf: leaf.unsqueeze(0))
        upload = cap_weights(stacked, upload_spec, [weight_scale]).at(0)
    return result._replace(upload=upload, samples=samples)


VERSIONS_KEY = "visits"
"""Key of the versions of client memories in the store."""


@dataclass
class StagedStore:
    """A state store whose changes take effect at the end of the round. A new attempt at a round sees the old state."""

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
    """For each site, the last local update that changed its client memory. Part of a checkpoint.

    The updates of a round count from its end (`commit`); a new attempt discards them (`discard_new`).
    """

    def __init__(self, store: TreeStore) -> None:
        self.store = store
        self._current: dict[str, RoundKey] = {}
        self._new: dict[str, RoundKey] = {}
        self._checkpoints: tuple[dict[str, RoundKey], ...] = ({}, {})  # the older and the newer one

    def latest(self, site: str) -> list[int]:
        return list(self._new.get(site, self._current.get(site, ())))

    def oldest(self, site: str) -> list[int]:
        """Return the oldest update that the server may resume from: that of the older checkpoint."""
        return list(self._checkpoints[0].get(site, ()))

    def add(self, site: str, at: RoundKey) -> None:
        self._new[site] = at

    def discard_new(self) -> None:
        self._new = {}

    def commit(self) -> None:
        """Accept the updates of the round that is over."""
        if self._new:
            self._current |= self._new
            self.store.put(VERSIONS_KEY, {site: torch.tensor(at) for site, at in self._current.items()})
        self._new = {}

    def saved(self) -> None:
        self._checkpoints = (self._checkpoints[1], dict(self._current))

    def restore(self) -> None:
        rows = {site: leaf.tolist() for site, leaf in (self.store.get(VERSIONS_KEY) or {}).items()}
        self._current = {site: (row[0], row[1], row[2]) for site, row in rows.items()}
        self._new = {}
        self._checkpoints = ({}, {})
