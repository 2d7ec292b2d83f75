"""The server's runtime where the clients are sites behind a link: the same rounds, the client updates elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from halfmoon.aggregation import AggregationContext, Aggregator
from halfmoon.aggregation.weights import capped
from halfmoon.api.types import Method, StateStore, Task, WeightedMetric
from halfmoon.api.uploads import UPDATE_ONLY, Uplink, Upload
from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.driver import ClientContext, ClientResult
from halfmoon.engine.evaluation import Tally
from halfmoon.engine.local_clients import LocalClients
from halfmoon.engine.loop import Report, Row, TooFew
from halfmoon.engine.runtime import RuntimeSettings, ServerRuntime, Visited
from halfmoon.engine.sampling import Views
from halfmoon.federation.protocol.evaluation import Evaluations
from halfmoon.federation.protocol.messages import Reply, Request
from halfmoon.federation.protocol.tree_spec import TreeSpec
from halfmoon.federation.server.calls import SiteCalls
from halfmoon.federation.server.cohorts import CohortSampler
from halfmoon.federation.server.memory_versions import MemoryVersions
from halfmoon.federation.server.secure_sum import MaskedSum, layout, uploads
from halfmoon.federation.server.staged_store import StagedStore
from halfmoon.storage.manifest import Contents
from halfmoon.storage.state_store import StateView, Store

CPU = torch.device("cpu")


class RemoteRuntime(ServerRuntime):
    """A runtime whose client k is the site `calls.names[k]`; `server` has the server's own labeled rows.

    Replies are taken in the order of the numbers, whatever order they came in. A site without a usable answer leaves
    its round; a round with too few is played again, with other sites where there are some, once enough are ready.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        views: Views,
        calls: SiteCalls,
        settings: RuntimeSettings,
        server: LocalClients | None = None,
        store: Store | None = None,
        aggregators: Sequence[Aggregator] = (),
    ) -> None:
        settings = replace(settings, clients=len(calls.names), confidence_threshold=1.0, client_dropout=0.0)
        super().__init__(method, task, views, settings, store, aggregators)
        self.calls, self.names = calls, tuple(calls.names)
        self.server = None if server is None else replace(server, memories=StagedStore(server.memories))
        self.cohorts = CohortSampler(self.names, settings, calls.quarantine)
        self._staged = StagedStore(StateView(self.store, "state/", self.device))
        self.state_store: StateStore = self._staged
        self._versions = MemoryVersions(self.store)
        self._brought: Tree = {}
        self._evaluations: Evaluations | None = None

    @property
    def labeled(self) -> int:
        """Return how many labeled images the server itself has."""
        return 0 if self.server is None else self.server.dataset.own(SERVER).labeled

    def prior(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        """Return None: the server sees no unlabeled image."""
        return None

    def open(self, round: int) -> None:
        """Begin a round, or begin it again: draw its cohort, at first as a simulation does."""
        super().open(round)
        self._brought, self._evaluations = {}, None
        self._versions.drop()
        for staged in self._staged_stores():
            staged.changed.clear()
        self.cohort = self.cohorts.draw(round)
        self._fair = self.cohorts.uniform

    def again(self, few: TooFew) -> None:
        """Make ready to play the round again, or raise `few` when that was tried often enough."""
        self.cohorts.again()
        self._attempt = self.cohorts.attempt
        if self._attempt >= self.calls.rules.attempts or len(self.calls.quarantine.aside) == self.clients:
            raise few
        self.calls.say(f"round {self._round + 1} is played again, attempt {self._attempt + 1}: {few}")
        self.calls.ready(self.calls.rules.quorum(self.size))

    def bring(self, model: Tree) -> None:
        """Have the model tested with the next query by those who have test or validation images of their own."""
        self._brought = model

    def conclude(self, model: Tree) -> tuple[Row | None, Row | None]:
        """Return what the last model does on the sites' images; Nones where no site has validation images."""
        if not any(self.calls.validations(name) for name in self.names):
            return None, None
        tests, validations = self._concluded(model, self.calls.examining())
        return tests.row(self._round + 1), validations.row(self._round + 1)

    def concluded(self, model: Tree) -> Tally | None:
        """Return how a model does on the test images of all sites that have some and answer, None where none does."""
        return self._concluded(model, [name for name in self.calls.examining() if self.calls.tests(name)]).tests.tally()

    def _concluded(self, model: Tree, names: Sequence[str]) -> Evaluations:
        requests = {name: self._request(name, self.task.rounds - 1, self._query, "", {}, model) for name in names}
        return self.calls.examined(requests, self.base.network)

    def saved(self, round: int) -> None:
        """Take note of what is on the disk: the newest checkpoint, and the one to fall back on."""
        self._versions.saved()

    def restore(self, clients: Contents, cost: dict[str, int]) -> None:
        """Go on from a checkpoint."""
        super().restore(clients, cost)
        self._versions.restore()

    def stored(self, server: int) -> None:
        """Take note of the bytes of the server's tree; the round is over, so what it put on state stores counts."""
        self._keep()
        super().stored(server)

    def close(self) -> Report:
        """End the round: what it measured and what the run has cost so far."""
        self._keep()
        self._attempt = 0
        self.cohorts.over()
        report = super().close()
        if self.calls.cap is not None and (said := self.calls.cap.row()):
            report = report._replace(aggregator={**said, **(report.aggregator or {})})
        if self._evaluations is None:
            return report
        tests, validations = (each.row(self._round) for each in self._evaluations)
        return report._replace(evaluation=tests, validation=validations)

    def _keep(self) -> None:
        """Take over what a round that is over has changed; once it is done, there is nothing more to take."""
        for staged in self._staged_stores():
            staged.keep()
        self._versions.keep()

    def _staged_stores(self) -> list[StagedStore]:
        """Return what the server remembers of a round only when it is over."""
        own = None if self.server is None else self.server.memories
        return [self._staged, own] if isinstance(own, StagedStore) else [self._staged]

    def _visit(self, context: ClientContext, clients: Sequence[int], down: Tree, each: Tree) -> Visited:
        if list(clients) == [SERVER]:
            assert self.server is not None, "a method asks a server for its labels where it has some"
            (outcome,) = self.server.visit(context, clients, None, down, each, self._quality)
            yield SERVER, outcome
            return
        name = next(name for name, known in self.client_updates.items() if known is context.client_update)
        downlinks = {
            self.names[k]: {**down, **tree.index(each, place)}
            for place, k in enumerate(clients)
            if self.names[k] not in self.calls.quarantine.aside  # a method may ask others than its cohort
        }
        brought, self._brought = self._brought, {}
        examining = self.calls.examining() if brought else []
        said = Evaluations.capped(self.calls.rules.weight_cap)
        self.cost.bytes_down += tree.nbytes(brought) * sum(site in examining for site in downlinks)
        what = f"round {context.round + 1}, query {context.query + 1} ({name})"
        requests = {
            site: self._request(site, context.round, context.query, name, own, brought if site in examining else {})
            for site, own in downlinks.items()
        }
        masked = None
        if self.calls.keys is not None:
            places = {self.names[k]: k for k in clients}
            masked = MaskedSum(requests, places, self.calls.keys(), self._asked, what)
            requests = masked.begin()
        answers = self.calls.exchange(requests, what)
        good = self.calls.judged(answers, requests, context, downlinks, self.base.network)
        del answers  # what is not good need not wait
        if examining:
            for site, each_reply in good.items():
                self.calls.add(said, site, each_reply.reply, self.base.network)
            self._evaluations = said
        self.cohorts.lose(k for k in clients if self.names[k] not in good)
        # Those of its cohort count, in all its queries: a method may ask others as well, of whom some are always away.
        wanted, left, drawn = self.calls.rules.quorum(self.cohorts.drawn), len(self.cohorts.left), self.cohorts.drawn
        if left < wanted:
            raise TooFew(f"{what} has {left} usable replies of {drawn}, and {wanted} are needed.")
        whole = {} if masked is None else {site: judged.whole() for site, judged in good.items()}
        total = None if masked is None else masked.total(whole)
        for site, judged in good.items():
            if judged.reply.kept:
                self._versions.add(site, (context.round, self._attempt, context.query))
        if total is not None:
            yield from self._unmasked(total, whole, context, clients, down, each)
            return
        there = {k: good.pop(self.names[k]) for k in clients if self.names[k] in good}
        scale = self.calls.capped(there)
        for k in list(there):
            yield k, _placed(there.pop(k).whole().outcome(), self.device, context.client_update.needs.uplink, scale[k])

    def _asked(self, requests: Mapping[str, Request], pattern: TreeSpec, what: str) -> dict[str, Reply]:
        """Return the replies to requests about a masked sum alone; sites without a usable one have failed."""
        good = self.calls.asked(requests, pattern, what)
        self.cohorts.lose(k for k, site in enumerate(self.names) if site in requests and site not in good)
        return good

    def _unmasked(
        self,
        total: Tensor,
        good: Mapping[str, Reply],
        context: ClientContext,
        clients: Sequence[int],
        down: Tree,
        each: Tree,
    ) -> Visited:
        """Yield what came of a masked query, with the mean of all in the place of each one's update."""
        places = [place for place, k in enumerate(clients) if self.names[k] in good]
        there = tuple(clients[place] for place in places)
        mine = tree.to(tree.map(lambda leaf: leaf[torch.tensor(places, device=leaf.device)], each), CPU)
        at = (context.round, self._attempt, context.query)
        aggregation = AggregationContext(*at, "", tree.to(down, CPU), mine, there, len(clients), True)
        whole = {**down, **tree.index(each, places[0])}
        upload = self.calls.plain(context, whole)
        ups = uploads(aggregation, upload, total, layout(upload))
        for k, up in zip(there, ups, strict=True):
            yield k, _placed(replace(good[self.names[k]], up=up.tree).outcome(), self.device)

    def _request(self, site: str, round: int, query: int, client_update: str, down: Tree, evaluation: Tree) -> Request:
        known, safe = self._versions.known(site), self._versions.safe(site)
        return Request(*self.calls.run, round, self._attempt, query, client_update, known, safe, down, evaluation)


def _placed(
    outcome: ClientResult, device: torch.device, uplink: Uplink = UPDATE_ONLY, scale: float = 1.0
) -> ClientResult:
    """Return what came of a client update on the server's device, with its weight scaled."""
    samples = {name: WeightedMetric(*(leaf.to(device) for leaf in each)) for name, each in outcome.samples.items()}
    up = Upload.of(tree.to(outcome.up.tree, device))
    if scale < 1:
        up = capped(up.map(lambda leaf: leaf.unsqueeze(0)), uplink, [scale]).at(0)
    return outcome._replace(up=up, samples=samples)
