"""The small federation once more with sites behind messages, in one process: nothing is shared but bytes."""

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
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.federation.server.sessions import SiteResponse
from halfmoon.federation.site.runtime import SiteRuntime
from halfmoon.storage.state_store import StateView, TreeStore

SEED, VERSION, HASH, RUN = 3, "0.1.0", "f" * 64, "0" * 32


def alone(dataset: FederatedDataset, k: int) -> FederatedDataset:
    """Return what a site has: its own rows and nobody else's, without the labels that are hidden."""
    mine = np.flatnonzero(dataset.split.client == k)
    labeled = dataset.split.labeled[mine]
    labels = dataset.train.labels[mine].clone()
    if not dataset.all_labels:
        labels[torch.from_numpy(~labeled)] = 0
    split = Split(np.full(len(mine), k), labeled, dataset.split.clients)
    return FederatedDataset(
        Examples(dataset.train.images[mine], labels), split, dataset.all_labels, reuse_labeled=dataset.reuse_labeled
    )


def local_clients(dataset: FederatedDataset, batching: Batching, store: TreeStore) -> LocalClients:
    """Return what computes at a site, or at the server, with its own store."""
    state_store = StateView(store, "client/", torch.device("cpu"))
    return LocalClients(dataset, Views(), Training(batching, Budget()), SEED, state_store)


class Wire:
    """A link within one process; it keeps what went over it."""

    def __init__(self, sites: Mapping[str, SiteRuntime]) -> None:
        """Carry messages to these sites."""
        self.sites = sites
        self.messages: list[bytes] = []

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, SiteResponse]:
        """Have each site answer, last to first: the order of replies is nobody's promise."""
        self.messages += requests.values()
        replies = {name: answer(self.sites[name], requests[name]) for name in reversed(list(requests))}
        self.messages += replies.values()
        return {name: SiteResponse(data) for name, data in replies.items()}


def answer(site: SiteRuntime, data: bytes) -> bytes:
    """Answer a request as a site does."""
    return write_message(site.run_request(read_message(data, Request)))


def behind(simulation: Simulation, batching: Batching) -> tuple[RemoteRuntime, Wire]:
    """Return the runtime of a server whose clients are sites with what the simulation's clients hold."""
    dataset, method, shared = simulation.dataset, simulation.method, simulation.base
    sites = {}
    for k in range(dataset.clients):
        own = local_clients(alone(dataset, k), batching, TreeStore())
        sites[f"site-{k}"] = SiteRuntime(k, method, shared, own, VERSION)
    wire, store = Wire(sites), TreeStore()
    server = local_clients(alone(dataset, SERVER), batching, store) if simulation.labeled else None
    remote = RemoteRuntime(
        method, shared, Views(), SiteCalls(wire, list(sites), RunIdentity(HASH, VERSION, RUN)),
        RuntimeSettings(simulation.size, SEED), server=server, store=store,
    )  # fmt: skip
    return remote, wire
