"""What many clients cost: python benchmarks/scale.py [--json].

Four questions, each in a process of its own. A round of ten clients out of 100 and out of a million that are
registered, the two taking their rounds in turn in one process, with the seconds of the split and that process' peak
memory. How many uploads are alive at once, and the peak memory of a round, as the cohort grows, for a method that
averages and for one that needs each upload. The steps of a round that deal with memories, where 1,000 and where 100,000
clients have been met. What the Dirichlet split says of thousands of clients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import Task
from halfmoon.augment import Normalize
from halfmoon.core import rng, tree
from halfmoon.core.allocator import keep_memory
from halfmoon.core.errors import UserError
from halfmoon.core.optim import SGD
from halfmoon.core.tree import Tree
from halfmoon.data import Split
from halfmoon.data.partition.scenario import Scenario
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Batching, Views
from halfmoon.engine.simulation import Simulation
from halfmoon.methods import registry
from halfmoon.models import ResNet9, SmallCNN
from halfmoon.models.network import Network
from halfmoon.storage.manifest import START, Commit, Contents, ManifestEntry
from halfmoon.storage.state_store import StateView, Store

MIB, COHORT = 2**20, 10
FEW, MANY = 100, 1_000_000


def peak() -> float:
    """Return the largest memory of this process so far, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


class Counting:
    """Trains one client after the other, and counts the uploads that are alive when one has been made."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def __call__(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Return what `map` does."""

        def counted(item: Any) -> Any:
            result = function(item)
            self.alive.add(next(tree.leaves(result.up.update)))
            self.most = max(self.most, len(self.alive))
            return result

        return map(counted, items)


def federation(
    method: str, split: Split, network: Network, cohort: int = COHORT, steps: int = 5, side: int = 8
) -> tuple[Counting, Tree, Callable[[int], Tree]]:
    """Return a simulation of random images, the server's first tree, and what plays a round on it."""
    g = torch.Generator().manual_seed(0)
    shape = (len(split), network.channels, side, side)
    images = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    labels = torch.arange(len(split)) % 10
    task = Task(network, SGD(0.03), Normalize((0.5,), (0.5,)))
    chosen = registry.make(method)
    counting = Counting()
    training = Training(Batching(10, 10, steps=steps), Budget(), spread=counting)
    held = FederatedDataset(Examples(images, labels), split)
    simulation = Simulation(chosen, task, held, Views(), training, RuntimeSettings(cohort))
    server = chosen.start(task, network.init(rng.generator(0, "model")))

    def play(number: int) -> Tree:
        nonlocal server
        simulation.open(number)
        server = chosen.round(simulation.task, server, simulation)
        simulation.stored(tree.nbytes(server))
        simulation.close()
        return server

    return counting, server, play


def registered(rounds: int) -> dict[str, Any]:
    """Return what a round and a split cost among few and among many clients that are registered."""
    labels = np.arange(2 * MANY) % 10
    splits, seconds = {}, {}
    for clients in (FEW, MANY):
        began = time.perf_counter()
        scenario = Scenario("iid-iid", clients=clients, labels_per_class=None, label_ratio=0.5)
        splits[clients] = scenario.split(labels[: 2 * clients], 10)
        seconds[clients] = time.perf_counter() - began
    del labels
    running = {clients: federation("fedavg", split, SmallCNN(1, 10, 8), side=6)[2] for clients, split in splits.items()}
    spent: dict[int, list[float]] = {clients: [] for clients in running}
    for number in range(rounds + 2):
        for clients, play in running.items():
            began = time.process_time()
            play(number)
            spent[clients].append(time.process_time() - began)
    medians = {clients: 1000 * statistics.median(times[2:]) for clients, times in spent.items()}
    return {
        "round_1e2_ms": medians[FEW],
        "round_1e6_ms": medians[MANY],
        "round_1e6_over_1e2": medians[MANY] / medians[FEW],
        "split_1e6_s": seconds[MANY],
        "peak_1e6_mib": peak(),
    }


def uploads(method: str, cohort: int) -> dict[str, Any]:
    """Return how many uploads are held in a round of a cohort, with the mean, and the process' peak memory."""
    keep_memory()  # as every run on a CPU does
    network = ResNet9(1, 10, 64)
    rows = np.arange(2 * cohort)
    split = Split(rows // 2, rows % 2 == 0, cohort)
    counting, server, play = federation(method, split, network, cohort, steps=1)
    size = tree.nbytes(server["params"]) / MIB
    before = peak()
    play(0)
    return {"held": counting.most + 1, "model_mib": size, "peak_mib": peak(), "before_mib": before}


def met(clients: int, rounds: int = 30) -> dict[str, Any]:
    """Return the milliseconds of a round's steps that deal with what clients remember, where so many have been met."""
    model = {"w": torch.zeros(5000)}
    entries = {f"client/{k}": ManifestEntry(f"{k}.safetensors", "0" * 64, 20_000, 20_000) for k in range(clients)}
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "clients")
        store.restore(Contents(Path(folder) / "clients", START, -1, entries, []))
        view = StateView(store, "client/", torch.device("cpu"))
        for round in range(rounds):
            began = time.process_time()
            for client in range(clients + COHORT * round, clients + COHORT * (round + 1)):
                view.get(str(client))
                view.put(str(client), model)
            mark: Commit = store.commit(round)
            store.prune(round - 1)
            kept = store.held("client/") + store.size("client/-2")
            spent.append(time.process_time() - began)
            assert mark != START
            assert kept == 20_000 * (clients + COHORT * (round + 1))
    return {"steps_ms": 1000 * statistics.median(spent[2:])}


def dirichlet(clients: int, rows: int) -> dict[str, Any]:
    """Return what the Dirichlet split at alpha 0.5 says of so many clients, and after how long."""
    began = time.perf_counter()
    try:
        Scenario("dir-dir", clients=clients, labels_per_class=None, label_ratio=0.4).split(np.arange(rows) % 10, 10)
        said = "succeeds"
    except UserError as error:
        said = str(error)
    return {"seconds": time.perf_counter() - began, "said": said}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "registered": registered, "uploads": uploads, "met": met, "dirichlet": dirichlet
}  # fmt: skip


def alone(name: str, *given: str | int) -> dict[str, Any]:
    """Return what a part says in a process of its own."""
    command = [sys.executable, __file__, "--part", name, *map(str, given)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part:
        name, *rest = given.part
        print(json.dumps(PARTS[name](*(int(each) if each.isdigit() else each for each in rest))))
        return
    found = alone("registered", given.rounds)
    cohorts = {(m, k): alone("uploads", m, k) for m in ("fedavg", "fedrgd") for k in (5, 20)}
    steps = {clients: alone("met", clients) for clients in (1_000, 100_000)}
    splits = {
        (clients, rows): alone("dirichlet", clients, rows) for clients, rows in ((1_000, 60_000), (5_000, 50_000))
    }
    found["upload_models_held"] = max(each["held"] for (m, _), each in cohorts.items() if m == "fedavg")
    found["met_1e5_over_1e3"] = steps[100_000]["steps_ms"] / steps[1_000]["steps_ms"]
    if given.json:
        parts = {"uploads": cohorts, "met": steps, "dirichlet": splits}
        found |= {name: {str(key): value for key, value in part.items()} for name, part in parts.items()}
        print(json.dumps(found))
        return
    print("| what | measured |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:,.2f} |")
    for (method, cohort), each in cohorts.items():
        grown = (each["peak_mib"] - each["before_mib"]) / each["model_mib"]
        words = f"{each['held']} models of {each['model_mib']:.1f} MiB; the process grows by {grown:.1f} models"
        print(f"| {method}, cohort of {cohort}: held at once, with the mean | {words} |")
    for clients, each in steps.items():
        print(f"| {clients:,} clients met: memories of a round, put, committed, counted | {each['steps_ms']:.1f} ms |")
    for (clients, rows), each in splits.items():
        print(f"| Dirichlet 0.5, {clients:,} clients, {rows:,} images | {each['seconds']:.2f} s: {each['said']} |")


if __name__ == "__main__":
    main()
