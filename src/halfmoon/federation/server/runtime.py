"""The runtime of a federation's server: the rounds of a simulation, with local updates at remote sites."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from halfmoon.aggregation import Aggregator
from halfmoon.api.types import Method, StateStore, Task
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER
from halfmoon.engine.local_clients import LocalClients
from halfmoon.engine.runtime import RoundReport, Row, RuntimeSettings, ServerRuntime, TooFewReplies
from halfmoon.engine.sampling import Views
from halfmoon.federation.server.calls import Evaluations, FederatedEvaluation, SiteCalls
from halfmoon.federation.server.cohorts import CohortSampler
from halfmoon.federation.server.site_clients import MemoryVersions, SiteClients
from halfmoon.storage.manifest import StoreContents
from halfmoon.storage.state_store import StateView, TreeStore


class RemoteRuntime(ServerRuntime):
    """A runtime whose clients are sites. A round with too few replies is retried.

    Attributes:
        sites: sends the sites their requests and checks the replies.
        names: the sites, in the order of their client numbers.
        cohorts: samples the cohorts.
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
            client_dropout=0.0,
        )
        super().__init__(method, task, views, settings, store, aggregators)
        self.names = tuple(calls.names)
        self.cohorts = CohortSampler(self.names, settings, calls.quarantine)
        # A round that is retried must see the state from before it, so changes are staged until the round ends. They
        # concern the method's state (`state_store`), and the state of the server's local training (its memories).
        staged_state = StagedStore(StateView(self.store, "state/", self.device))
        self._stores = [staged_state]  # all stores with staged changes
        self.state_store: StateStore = staged_state
        if server is not None:
            staged_memories = StagedStore(server.memories)
            self._stores.append(staged_memories)
            server = replace(server, memories=staged_memories)
        versions = MemoryVersions(self.store)
        self.sites = SiteClients(calls, self.cohorts, versions, task.network, self.device, server)
        self.trainer = self.sites

    @property
    def calls(self) -> SiteCalls:
        """Sends requests to the sites."""
        return self.sites.calls

    @property
    def labeled(self) -> int:
        server = self.sites.server
        return 0 if server is None else server.dataset.training_size(SERVER).labeled

    def prediction_bias(self, model: Tree, per_class: Sequence[float]) -> Row | None:
        return None

    def open(self, round: int) -> None:
        """Begin an attempt at a round: drop the state of an earlier attempt, and sample the cohort.

        The first attempt has the cohort that a simulation with the same seed samples. A later one avoids sites that
        failed, so its cohort is no uniform sample, and differential privacy does not count on sampling in it.
        """
        super().open(round)
        self.sites.model_to_evaluate = {}
        self.sites.evaluations = None
        # An earlier attempt has noted that sites now have the state after its updates. Without the note they continue
        # from their state before the round, which they still store.
        self.sites.versions.discard_new()
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
        text = f"round {self._round + 1} is repeated, attempt {self._attempt + 1}: {few}"
        self.calls.log.record("round_retried", text, round=self._round + 1, attempt=self._attempt + 1)
        self.calls.wait_for_sites(self.calls.rules.quorum(self.size))

    def evaluate_next_round(self, model: Tree) -> None:
        self.sites.model_to_evaluate = model

    def final_evaluation(self, model: Tree, rounds: int) -> tuple[Row | None, Row | None]:
        """Evaluate the last model at the sites, and return its test and validation rows; None without validation images."""
        if not any(self.calls.inspection.validation_count(name) for name in self.names):
            return None, None
        tests, validations = self._evaluate(model, self.calls.evaluators())
        return tests.row(rounds), validations.row(rounds)

    def evaluate_last(self, model: Tree) -> FederatedEvaluation:
        """Evaluate a model on the test images of the sites."""
        names = [name for name in self.calls.evaluators() if self.calls.inspection.test_count(name)]
        return self._evaluate(model, names).tests

    def _evaluate(self, model: Tree, names: Sequence[str]) -> Evaluations:
        return self.sites.evaluate(model, names, self.task.rounds - 1, self._query)

    def on_checkpoint(self, round: int) -> None:
        self.sites.versions.saved()

    def restore(self, clients: StoreContents, cost: dict[str, int]) -> None:
        super().restore(clients, cost)
        self.sites.versions.restore()

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
        self.cost.bytes_down += self.sites.evaluation_bytes
        self.sites.evaluation_bytes = 0
        report = super().close()
        weight_cap = self.calls.inspection.cap
        cap_row = None if weight_cap is None else weight_cap.row()  # the capped clients and the largest share
        if cap_row:
            report = report._replace(aggregator={**cap_row, **(report.aggregator or {})})
        # A robust rule knows clients by their numbers only. The rows are changed in place, as parts of the report.
        outliers = (report.aggregator or {}).get("outside", ())
        for outlier in outliers:
            outlier["site"] = self.names[outlier["client"]]
        evaluations = self.sites.evaluations
        if evaluations is None:
            return report
        return report._replace(
            evaluation=evaluations.tests.row(self._round),
            validation=evaluations.validations.row(self._round),
        )

    def _commit(self) -> None:
        for store in self._stores:
            store.commit()
        self.sites.versions.commit()


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
