"""Clients at remote sites: requests, checked replies and, with secure aggregation, their sum."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext
from halfmoon.aggregation.weights import cap_weights
from halfmoon.api.uploads import UploadSpec
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.driver import ClientContext, ClientResult
from halfmoon.engine.local_clients import LocalClients
from halfmoon.engine.runtime import TooFewReplies
from halfmoon.federation.protocol.messages import Reply, Request, RoundKey
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.federation.server.calls import CheckedReply, Evaluations, SiteCalls
from halfmoon.federation.server.cohorts import CohortSampler
from halfmoon.federation.server.secure_sum import MaskedSum, mean_uploads, sum_layout
from halfmoon.models import Network
from halfmoon.storage.state_store import TreeStore

CPU = torch.device("cpu")


@dataclass
class SiteClients:
    """Clients at sites, as a `ClientTrainer`: client k is the site `calls.names[k]`.

    Replies are used in the order of client numbers. A site without a usable reply leaves its round.

    Attributes:
        calls: sends requests to the sites.
        cohorts: the clients of the round that have not failed, and the number of the attempt.
        versions: for each site, the local update that its memory is from.
        network: the network that the federation trains.
        device: where uploads are aggregated.
        server: trains on the server's labeled images; None if it has none.
        model_to_evaluate: a model that sites evaluate with the next query, besides training; {} for none.
        evaluations: the sites' evaluations of the current round; None if none were requested.
        evaluation_bytes: bytes of the models that were sent to be evaluated.
    """

    calls: SiteCalls
    cohorts: CohortSampler
    versions: "MemoryVersions"
    network: Network
    device: torch.device
    server: LocalClients | None = None
    model_to_evaluate: Tree = field(default_factory=dict, init=False)
    evaluations: Evaluations | None = field(default=None, init=False)
    evaluation_bytes: int = field(default=0, init=False)

    @property
    def names(self) -> Sequence[str]:
        """The sites, in the order of their client numbers."""
        return self.calls.names

    def train(
        self, context: ClientContext, clients: Sequence[int], broadcast: Tree, per_client: Tree
    ) -> Iterator[tuple[int, ClientResult]]:
        """Send a query to the sites, check their replies, and yield the results of their local updates.

        With secure aggregation the sites exchange keys and shares before the query, and the masks are removed after it
        (`MaskedSum`). A query to the server itself trains on the server's labeled images.

        Raises:
            TooFewReplies: if fewer sites than the quorum have sent a usable reply.
        """
        if list(clients) == [SERVER]:
            assert self.server is not None, "a method queries the server only if it has labels"
            yield from self.server.train(context, clients, broadcast, per_client)
            return
        description = f"round {context.round + 1}, query {context.query + 1} ({context.name})"
        # A method may query clients outside its cohort, so quarantined sites are left out here as well.
        downloads = {
            self.names[client]: {**broadcast, **tree.index(per_client, row)}
            for row, client in enumerate(clients)
            if self.names[client] not in self.calls.quarantine.sites
        }
        model = self.model_to_evaluate  # with the first query of a round only
        self.model_to_evaluate = {}
        evaluators = self.calls.evaluators() if model else []
        self.evaluation_bytes += tree.nbytes(model) * sum(site in evaluators for site in downloads)
        requests = {}
        for site, download in downloads.items():
            evaluated = model if site in evaluators else {}
            requests[site] = self._request(site, context.round, context.query, context.name, download, evaluated)
        masked = None
        if self.calls.inspection.keys is not None:
            numbers = {self.names[client]: client for client in clients}
            masked = MaskedSum(requests, numbers, self.calls.inspection.keys(), self._query_masked, description)
            requests = masked.start()
        replies = self.calls.request_updates(requests, context, downloads, self.network, description)
        if evaluators:
            self.evaluations = Evaluations.with_cap(self.calls.rules.weight_cap)
            for site, reply in replies.items():
                self.calls.add_evaluation(self.evaluations, site, reply.reply, self.network)
        self._check_quorum(clients, replies, description)
        total = None
        masked_replies: dict[str, Reply] = {}
        if masked is not None:
            masked_replies = {site: reply.load_upload() for site, reply in replies.items()}
            total = masked.total(masked_replies)
        for site, reply in replies.items():
            if reply.reply.memory_bytes:  # the site has stored a new state, from which it continues next time
                self.versions.add(site, (context.round, self.cohorts.attempt, context.query))
        if total is not None:
            yield from self._masked_results(total, masked_replies, context, clients, broadcast, per_client)
            return
        upload_spec = context.client_update.requirements.upload_spec
        present = {client: replies.pop(self.names[client]) for client in clients if self.names[client] in replies}
        scale = self.calls.weight_scale(present, upload_spec)
        # Popping a reply deletes its spooled file once its result was used.
        for client in list(present):
            result = present.pop(client).load_upload().to_result(self.device)
            if scale[client] < 1:
                result = _scale_weight(result, upload_spec, scale[client])
            yield client, result
            del result  # free the upload before the next one is loaded

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

    def evaluate(self, model: Tree, names: Sequence[str], round: int, query: int) -> Evaluations:
        """Have sites evaluate a model, without a local update.

        Args:
            model: {"params", "stats"}.
            names: the sites.
            round: the last round, from 0.
            query: the number of queries in that round.
        """
        requests = {name: self._request(name, round, query, "", {}, model) for name in names}
        return self.calls.evaluate(requests, self.network)

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
    ) -> Iterator[tuple[int, ClientResult]]:
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
            attempt=self.cohorts.attempt,
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
            yield client, reply.to_result(self.device)

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
            attempt=self.cohorts.attempt,
            query=query,
            client_update=client_update,
            latest=self.versions.latest(site),
            oldest=self.versions.oldest(site),
            download=broadcast,
            evaluation=evaluation,
        )


def _scale_weight(result: ClientResult, upload_spec: UploadSpec, factor: float) -> ClientResult:
    """Multiply the weight of a client's upload by a factor below 1.

    An upload of sums over images has no weight, so its sums are multiplied; `upload_spec` declares which they are.
    """
    # `cap_weights` expects uploads with a leading dimension of clients.
    stacked = result.upload.map(lambda leaf: leaf.unsqueeze(0))
    return result._replace(upload=cap_weights(stacked, upload_spec, [factor]).at(0))


VERSIONS_KEY = "visits"
"""Key of the versions of client memories in the store."""


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
