"""Rounds of a method with simulated clients, which reveal what a server and its sites send to each other."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from halfmoon.api.requirements import requirements_of
from halfmoon.api.types import Method, StateStore, Task
from halfmoon.api.upload_mean import average_stacked_uploads
from halfmoon.api.uploads import Upload
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.engine.driver import ClientContext
from halfmoon.engine.sampling import Views
from halfmoon.federation.protocol.tree_spec import TreeSpec, UploadProbe, build_tree, make_tree_spec
from halfmoon.storage.state_store import StateView, TreeStore

TRIAL_ROUNDS = 3
"""Rounds that the simulated clients run, so that a method sends everything it may send.

For a method that does something else every few rounds (`halfmoon.api.requirements`: `period`) the first three such
rounds are run as well.
"""


class TrialFailed(Exception):
    """The uploads of simulated clients could not be computed."""


@dataclass
class TrialFederation:
    """A `halfmoon.api.types.Federation` of simulated clients, whose uploads consist of ones.

    Attributes:
        probe: finds the shapes of uploads.
        views: views of images.
        seed: seed of the federation.
        clients: the number of simulated clients.
        download_specs: for each client update the specs of the downloads that it was sent.
        upload_specs: for each client update the specs of its uploads, as they are transmitted.
        transmission: finds the specs of uploads in the precision of transmission; None to use `probe`.
    """

    probe: UploadProbe
    views: Views
    seed: int
    clients: int
    download_specs: dict[str, list[TreeSpec]] = field(default_factory=dict)
    upload_specs: dict[str, list[TreeSpec]] = field(default_factory=dict)
    transmission: UploadProbe | None = None

    def run_rounds(self, method: Method, task: Task) -> None:
        """Run the server's part of some rounds, to record the tensors that it sends and receives.

        The method gets this object as its federation: it calls `query` for uploads and reads the attributes set here,
        such as `labeled` (the server's labeled images: none) and `size` (of the cohort: all clients).

        Args:
            method: the method.
            task: its task.

        Raises:
            TrialFailed: the method cannot run with simulated clients.
        """
        self.state_store: StateStore = StateView(TreeStore(), "state/", torch.device("cpu"))
        self.labeled = 0
        self.size = self.clients
        try:
            server = method.start(task, task.network.init(rng.generator(self.seed, "model")))
            # A method may do something else every few rounds; after a period, all kinds of rounds repeat.
            period = requirements_of(method, task.network.norm).period
            rounds = list(range(TRIAL_ROUNDS))
            if period > TRIAL_ROUNDS:
                # The last round of each period differs from the others, so the first three of these are run as well.
                rounds += [period - 1, 2 * period - 1, 3 * period - 1]
            for round in rounds:
                # There is no learning rate beyond the last round, and shapes do not depend on it.
                round_task = replace(task.at(min(round, task.rounds - 1)), round=round)
                self.client_updates = method.client_updates(round_task)
                self.round = round
                self.cohort = torch.arange(self.clients)
                self.responders = self.cohort
                server = method.round(round_task, server, self)
        except (UserError, RuntimeError, LookupError, ValueError) as error:
            raise TrialFailed from error

    def query(
        self, client_update: str, broadcast: Tree, per_client: Tree | None = None, clients: Tensor | None = None
    ) -> Upload:
        """Record the shapes of a query's downloads and uploads, and return uploads of ones.

        Sites may compress what they send (`transmission`). What they send is recorded; what the method receives is
        decompressed, so it has the shapes and dtypes of `probe`.

        Args:
            client_update: name of the client update.
            broadcast: the tree that all clients receive.
            per_client: leaves (number of clients, ...), of which each client receives its slice too.
            clients: numbers of the clients; None for all.

        Returns:
            Uploads of the shapes that real clients would send, with a leading dimension of clients.

        Raises:
            TrialFailed: the shapes of an upload cannot be found.
        """
        self.responders = self.cohort if clients is None else clients  # read by the method: all clients reply
        server_specs: list[TreeSpec] = []
        for index in range(len(self.responders)):
            download = {**broadcast, **tree.index(per_client or {}, index)}
            self.download_specs.setdefault(client_update, []).append(make_tree_spec(download))
            context = ClientContext(self.client_updates[client_update], self.views, self.seed, self.round, query=0)
            server_spec = self.probe.find_spec(context, download)
            sent_spec = server_spec if self.transmission is None else self.transmission.find_spec(context, download)
            if server_spec is None or sent_spec is None:
                raise TrialFailed
            self.upload_specs.setdefault(client_update, []).append(sent_spec)
            server_specs.append(server_spec)
        # Ones, so that no weight or count is 0 and the method can divide by it. Expanded ones need no memory.
        count = len(server_specs)
        ones = build_tree(server_specs[0], lambda shape, dtype: torch.ones((), dtype=dtype).expand(count, *shape))
        return Upload.from_tree(ones)

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Average the uploads of a query."""
        upload_spec = self.client_updates[client_update].requirements.upload_spec
        return average_stacked_uploads(self.query(client_update, broadcast), upload_spec, broadcast, client_update)

    def query_server(self, client_update: str, broadcast: Tree) -> Upload:
        """Fail: the simulated server has no labeled images."""
        raise TrialFailed
