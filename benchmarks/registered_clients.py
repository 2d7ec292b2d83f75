"""What a round costs when many more clients are registered than train: python benchmarks/registered_clients.py.

Every client holds 10 labeled and 50 unlabeled random images of 8x8; ten train in a round, five steps each. The time of
a round is the median over all rounds but the first two, the sizes taken in turn, side by side in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from halfmoon.api.types import Task
from halfmoon.augment import Normalize
from halfmoon.core import rng
from halfmoon.core.optim import SGD
from halfmoon.data import Split
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Batching, Views
from halfmoon.engine.simulation import Simulation
from halfmoon.methods import registry
from halfmoon.models import SmallCNN

LABELED, UNLABELED, SIDE = 10, 50, 8


def federation(method: str, clients: int) -> tuple[Simulation, dict]:
    """Return a federation of so many clients, and the server's tree."""
    rows = clients * (LABELED + UNLABELED)
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (rows, 1, SIDE, SIDE), generator=g, dtype=torch.uint8)
    split = Split(
        np.arange(rows) % clients, np.arange(rows) < clients * LABELED, clients
    )  # row r belongs to client r modulo clients
    network = SmallCNN(1, 10, 8)
    task = Task(network, SGD(0.03), Normalize((0.5,), (0.5,)))
    chosen = registry.make(method)
    held = FederatedDataset(Examples(images, torch.randint(0, 10, (rows,), generator=g)), split)
    simulation = Simulation(
        chosen, task, held, Views(), Training(Batching(10, 10), Budget()), RuntimeSettings(cohort=10)
    )
    return simulation, chosen.start(task, network.init(rng.generator(0, "model")))


def main() -> None:
    """Print the time of a round by the number of registered clients."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fedavg-fixmatch"])
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1_000, 10_000])
    parser.add_argument("--rounds", type=int, default=22)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for method in given.methods:
        running = {clients: federation(method, clients) for clients in given.clients}
        spent: dict[int, list[float]] = {clients: [] for clients in given.clients}
        for number in range(given.rounds):
            for clients, (simulation, server) in running.items():
                began = time.perf_counter()
                simulation.open(number)
                server = simulation.method.round(simulation.task, server, simulation)
                simulation.close()
                spent[clients].append(time.perf_counter() - began)
                running[clients] = simulation, server
        medians = {clients: statistics.median(times[2:]) for clients, times in spent.items()}
        first = medians[given.clients[0]]
        for clients, median in medians.items():
            print(f"{method}: {clients:,} clients, {1000 * median:.0f} ms a round, {median / first:.2f} of the first")


if __name__ == "__main__":
    main()
