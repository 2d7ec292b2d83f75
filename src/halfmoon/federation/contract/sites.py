"""The small federation with sites that exchange messages, in one process: only bytes are shared."""

from collections.abc import Mapping

import numpy as np
import torch

from halfmoon.data.partition.split import SERVER, Split
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import FederatedDataset, LocalClients, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Batching, Views
from halfmoon.engine.simulation import Simulation
from halfmoon.federation.protocol.messages import Request, read_message, write_message
from halfmoon.federation.server.calls import RunIdentity, SiteCalls
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.site.runtime import SiteRuntime
from halfmoon.storage.state_store import StateView, TreeStore

SEED = 3
VERSION = "0.1.0"
HASH = "f" * 64
RUN = "0" * 32


def select_site(dataset: FederatedDataset, client: int) -> FederatedDataset:
    """Select the data of one site, as it would have them in a deployment: the rows of one client of a simulation.

    The data set knows all labels. Those of unlabeled rows are removed, unless the method is one that trains on all
    labels as a supervised upper bound (`all_labels`).

    Args:
        dataset: the images of all clients, and their distribution.
        client: the number of the client, or `SERVER`.
    """
    rows = np.flatnonzero(dataset.split.client == client)
    labeled = dataset.split.labeled[rows]
    labels = dataset.train.labels[rows].clone()
    if not dataset.all_labels:
        labels[torch.from_numpy(~labeled)] = 0  # a site does not know these labels
    split = Split(np.full(len(rows), client), labeled, dataset.split.clients)
    return FederatedDataset(
        Examples(dataset.train.images[rows], labels),
        split,
        all_labels=dataset.all_labels,
        reuse_labeled=dataset.reuse_labeled,
    )


def make_local_clients(dataset: FederatedDataset, batching: Batching, store: TreeStore) -> LocalClients:
    """Make the local training of one site, or of the server, with its store."""
    state_store = StateView(store, "client/", torch.device("cpu"))
    return LocalClients(dataset, Views(), Training(batching, Budget()), SEED, state_store)


class Wire:
    """A connection to sites in this process that records all messages.

    Attributes:
        sites: the sites by name.
        messages: all requests and replies, in the order in which they were sent.
    """

    def __init__(self, sites: Mapping[str, SiteRuntime]) -> None:
        self.sites = sites
        self.messages: list[bytes] = []

    def exchange(self, requests: Mapping[str, bytes], description: str) -> Mapping[str, SiteReply]:
        """Deliver requests and return the replies, last site first: the server must not rely on their order."""
        self.messages += requests.values()
        replies: dict[str, bytes] = {}
        for name in reversed(list(requests)):
            replies[name] = run_site_request(self.sites[name], requests[name])
        self.messages += replies.values()
        return {name: SiteReply(data) for name, data in replies.items()}


def run_site_request(site: SiteRuntime, data: bytes) -> bytes:
    """Run the request in a message at a site and return its reply as a message."""
    return write_message(site.run_request(read_message(data, Request)))


def make_remote_runtime(simulation: Simulation, batching: Batching) -> tuple[RemoteRuntime, Wire]:
    """Make the runtime of a server that exchanges messages with sites, as the counterpart of a simulation.

    It is in one process, but each site gets only the images of one of the simulation's clients, and the server only the
    bytes of messages. Both runtimes must compute the same.

    Args:
        simulation: a simulation, which gives method, task, images and cohort size.
        batching: its batch rule.

    Returns:
        The runtime, and the connection to its sites, which records all messages.
    """
    dataset = simulation.dataset
    method = simulation.method
    task = simulation.base  # before the first round
    sites: dict[str, SiteRuntime] = {}
    for client in range(dataset.clients):
        local_clients = make_local_clients(select_site(dataset, client), batching, TreeStore())
        sites[f"site-{client}"] = SiteRuntime(client, method, task, local_clients, VERSION)
    wire = Wire(sites)
    store = TreeStore()
    server: LocalClients | None = None
    if simulation.labeled:  # the number of labeled images of the server, which then trains, too
        server = make_local_clients(select_site(dataset, client=SERVER), batching, store)
    calls = SiteCalls(wire, list(sites), RunIdentity(federation=HASH, version=VERSION, run=RUN))
    settings = RuntimeSettings(cohort=simulation.size, seed=SEED)
    return RemoteRuntime(method, task, Views(), calls, settings, server=server, store=store), wire
