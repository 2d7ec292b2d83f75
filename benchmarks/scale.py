"""What many clients cost: python benchmarks/scale.py [--json].

Four questions, each in a process of its own. A round of ten clients out of 100 and out of a million that are
registered, the two taking their rounds in turn in one process, with the seconds of the split and that process' peak
memory. How many uploads are alive at once, and the peak memory of a round, as the cohort grows, for a method that
averages and for one that needs each upload. The steps of a round that deal with memories on the disk, where 100 and
where 100,000 clients have been met, and how many calls of functions they take. What the Dirichlet split says of
thousands of clients.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import Task
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.memory import retain_freed_memory
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import SGD
from halfmoon.core.tree import Tree
from halfmoon.data import Split
from halfmoon.data.partition.scenario import Scenario
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Batching, Views
from halfmoon.engine.simulation import Simulation
from halfmoon.methods import registry
from halfmoon.models import ResNet9, SmallCNN
from halfmoon.models.network import Network
from halfmoon.storage import serialization
from halfmoon.storage.manifest import START, Commit, ManifestEntry, StoreContents
from halfmoon.storage.state_store import StateView, TreeStore

MIB, COHORT = 2**20, 10
FEW, MANY = 100, 1_000_000
MET = 100, 100_000
LINKS = 30_000
"""Names of one file at most: ext4 allows 65,000."""


def peak() -> float:
    """Return the largest memory of this process so far, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


class Counting(SerialExecutor):
    """Trains one client after the other, and counts the uploads that are alive when one has been made."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most = 0

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Return what the built-in `map` does."""

        def counted(item: Any) -> Any:
            result = function(item)
            for client in result.values() if isinstance(result, dict) else ():
                self.alive.add(next(tree.leaves(client.upload.update)))
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
    training = Training(Batching(10, 10, steps=steps), Budget(), executor=counting)
    held = FederatedDataset(Examples(images, labels), split)
    simulation = Simulation(chosen, task, held, Views(), training, RuntimeSettings(cohort))
    server = chosen.start(task, network.init(rng.generator(0, "model")))

    def play(number: int) -> Tree:
        nonlocal server
        simulation.open(number)
        server = chosen.round(simulation.task, server, simulation)
        simulation.record_server_bytes(tree.nbytes(server))
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
    retain_freed_memory()  # as every run on a CPU does
    network = ResNet9(1, 10, 64)
    rows = np.arange(2 * cohort)
    split = Split(rows // 2, rows % 2 == 0, cohort)
    counting, server, play = federation(method, split, network, cohort, steps=1)
    size = tree.nbytes(server["params"]) / MIB
    before = peak()
    play(0)
    return {"held": counting.most + 1, "model_mib": size, "peak_mib": peak(), "before_mib": before}


def memories(folder: Path, clients: int) -> TreeStore:
    """Return a store, with nothing in memory, in which so many clients have been met: a file each, of 20 kB."""
    model = {"w": torch.zeros(5000)}
    data = serialization.pack_file(model)
    folder.mkdir()
    entries = {}
    for k in range(clients):
        name = f"{k}-000000.safetensors"
        if k % LINKS == 0:
            first = folder / name
            first.write_bytes(data)
        else:
            os.link(first, folder / name)  # a directory of as many names, on the disk of a few
        entries[f"client/{k}"] = ManifestEntry(name, "0" * 64, len(data), tree.nbytes(model))
    store = TreeStore(folder, cap=0)
    store.restore(StoreContents(folder, START, 0, entries, []))
    return store


def remembered(store: TreeStore, clients: Iterable[int], round: int) -> Counter[str]:
    """Do what a round does with memories: read each, put what it has become, commit, remove what that replaced.

    Return how often each function of Python was called.
    """
    called: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called[frame.f_code.co_qualname] += 1

    view = StateView(store, "client/", torch.device("cpu"))
    if round % 10 == 0:
        sys.setprofile(count)
    try:
        for client in clients:
            found = view.get(str(client))
            view.put(str(client), {"w": torch.zeros(5000)} if found is None else found)
        mark: Commit = store.commit(round)
        store.prune(round - 1)
        store.total_bytes("client/")
        store.size("client/-2")
    finally:
        sys.setprofile(None)
    assert mark != START
    return called


def met(rounds: int) -> dict[str, Any]:
    """Return the processor milliseconds of a round's steps that deal with memories, where few and many have been met.

    The two take their rounds in turn. Half of a cohort are met again, the others for the first time.
    """
    few, many = MET
    spent: dict[int, list[float]] = {clients: [] for clients in MET}
    calls: dict[int, Counter[str]] = {clients: Counter() for clients in MET}
    with tempfile.TemporaryDirectory() as folder:
        stores = {clients: memories(Path(folder) / str(clients), clients) for clients in MET}
        gc.collect()
        for round in range(1, 10 * rounds + 1):
            for clients, store in stores.items():
                again = [(round * COHORT // 2 + k) % few * (clients // few) for k in range(COHORT // 2)]
                new = range(clients + COHORT * round, clients + COHORT * round + COHORT // 2)
                began = time.process_time()
                called = remembered(store, [*again, *new], round)
                if called:
                    calls[clients] += called
                else:
                    spent[clients].append(time.process_time() - began)
    medians = {clients: 1000 * statistics.median(times[5:]) for clients, times in spent.items()}
    return {
        "steps_ms": medians,
        "ratio": medians[many] / medians[few],
        "calls": {clients: sum(each.values()) / rounds for clients, each in calls.items()},
        "more_calls": {
            name: count - calls[few][name] for name, count in calls[many].items() if count > calls[few][name]
        },
    }


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
    steps = alone("met", given.rounds)
    splits = {
        (clients, rows): alone("dirichlet", clients, rows) for clients, rows in ((1_000, 60_000), (5_000, 50_000))
    }
    found["upload_models_held"] = max(each["held"] for (m, _), each in cohorts.items() if m == "fedavg")
    found["met_1e5_over_1e2"] = steps["ratio"]
    if given.json:
        parts = {"uploads": cohorts, "dirichlet": splits}
        found |= {name: {str(key): value for key, value in part.items()} for name, part in parts.items()}
        found["met"] = steps
        print(json.dumps(found))
        return
    print("| what | measured |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:,.2f} |")
    for (method, cohort), each in cohorts.items():
        grown = (each["peak_mib"] - each["before_mib"]) / each["model_mib"]
        words = f"{each['held']} models of {each['model_mib']:.1f} MiB; the process grows by {grown:.1f} models"
        print(f"| {method}, cohort of {cohort}: held at once, with the mean | {words} |")
    for clients, spent in steps["steps_ms"].items():
        words = f"{spent:.2f} ms, {steps['calls'][clients]:,.0f} calls of functions"
        print(f"| {int(clients):,} clients met: memories of a round, read, put, committed, counted | {words} |")
    for (clients, rows), each in splits.items():
        print(f"| Dirichlet 0.5, {clients:,} clients, {rows:,} images | {each['seconds']:.2f} s: {each['said']} |")


if __name__ == "__main__":
    main()
