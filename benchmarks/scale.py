"""Measure what many clients cost.

    python benchmarks/scale.py all [--rounds 30]
    python benchmarks/scale.py registered [--rounds 30]
    python benchmarks/scale.py uploads [--method fedavg] [--cohort 5]
    python benchmarks/scale.py memories [--rounds 30]
    python benchmarks/scale.py dirichlet [--clients 1000] [--images 60000]
    python benchmarks/scale.py store [--clients 1000] [--width 64] [--cap-mib 1024] [--cohort 10] [--rounds 50]

registered: a round of ten clients out of 100 and out of a million registered clients, the two in turns in one process,
with the seconds of the split and the peak memory of the process.

uploads: how many uploads are in memory at once, and the peak memory of a round, for a method that averages (fedavg) and
for one that needs each upload (fedrgd).

memories: the steps of a round that read and write client memories on the disk, after 100 and after 100,000 clients have
trained, and how many function calls they take.

dirichlet: the time of a Dirichlet split of thousands of clients, or the message with which it is refused.

all: the four above, each in a separate process, as a table.

store: a model of every client under a memory cap. Every client first stores the parameters of a ResNet-9 (26.3 MB at
width 64), cohort by cohort; then random cohorts read theirs, add one and store the result. Each round commits and prunes
as a checkpoint does. At the end a new store verifies the files, as resuming does, and the models of every tenth client
must equal the number of its rounds.
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
from halfmoon.storage.manifest import START, ManifestEntry, StoreContents, remove_unreferenced, verify
from halfmoon.storage.state_store import StateView, TreeStore

MIB = 2**20
COHORT = 10
FEW = 100
MANY = 1_000_000
"""Registered clients."""
TRAINED_BEFORE = 100, 100_000
"""Clients with a memory."""
MAX_LINKS = 30_000
"""Hard links to one file: ext4 allows 65,000."""


def peak_memory() -> float:
    """Return the peak memory of this process so far, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


class CountingExecutor(SerialExecutor):
    """Train one client after the other, and count the uploads in memory after each.

    Attributes:
        uploads: the uploads that are still in memory.
        max_uploads: the largest number of them.
    """

    def __init__(self) -> None:
        self.uploads: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.max_uploads = 0

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Apply a function to each item, as the built-in `map` does."""

        def call_and_count(item: Any) -> Any:
            result = function(item)
            for client in result.values() if isinstance(result, dict) else ():
                self.uploads.add(next(tree.leaves(client.upload.update)))
            self.max_uploads = max(self.max_uploads, len(self.uploads))
            return result

        return map(call_and_count, items)


def build_simulation(
    method: str, split: Split, network: Network, cohort: int = COHORT, steps: int = 5, side: int = 8
) -> tuple[CountingExecutor, Tree, Callable[[int], Tree]]:
    """Simulate a federation with random images.

    Returns:
        The executor, the initial state of the server, and a function that runs the round of a number.
    """
    g = torch.Generator().manual_seed(0)
    shape = (len(split), network.channels, side, side)
    images = torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)
    labels = torch.arange(len(split)) % 10
    task = Task(network, SGD(0.03), Normalize((0.5,), (0.5,)))
    chosen = registry.make(method)
    executor = CountingExecutor()
    training = Training(Batching(10, 10, steps=steps), Budget(), executor=executor)
    dataset = FederatedDataset(Examples(images, labels), split)
    simulation = Simulation(chosen, task, dataset, Views(), training, RuntimeSettings(cohort))
    server = chosen.start(task, network.init(rng.generator(0, "model")))

    def run_round(number: int) -> Tree:
        nonlocal server
        simulation.open(number)
        server = chosen.round(simulation.task, server, simulation)
        simulation.record_server_bytes(tree.nbytes(server))
        simulation.close()
        return server

    return executor, server, run_round


def measure_registered(rounds: int) -> dict[str, Any]:
    """Measure a round and a split with few and with many registered clients."""
    labels = np.arange(2 * MANY) % 10
    splits = {}
    seconds = {}
    for clients in (FEW, MANY):
        start = time.perf_counter()
        scenario = Scenario("iid-iid", clients=clients, labels_per_class=None, label_ratio=0.5)
        splits[clients] = scenario.split(labels[: 2 * clients], 10)
        seconds[clients] = time.perf_counter() - start
    del labels
    simulations = {
        clients: build_simulation("fedavg", split, SmallCNN(1, 10, 8), side=6)[2] for clients, split in splits.items()
    }
    spent: dict[int, list[float]] = {clients: [] for clients in simulations}
    for number in range(rounds + 2):
        for clients, run_round in simulations.items():
            start = time.process_time()
            run_round(number)
            spent[clients].append(time.process_time() - start)
    medians = {clients: 1000 * statistics.median(times[2:]) for clients, times in spent.items()}
    return {
        "round_1e2_ms": medians[FEW],
        "round_1e6_ms": medians[MANY],
        "round_1e6_over_1e2": medians[MANY] / medians[FEW],
        "split_1e6_s": seconds[MANY],
        "peak_1e6_mib": peak_memory(),
    }


def measure_uploads(method: str, cohort: int) -> dict[str, Any]:
    """Count the uploads in memory in a round, including the mean, and measure the peak memory of the process."""
    retain_freed_memory()  # as every run on a CPU does
    network = ResNet9(1, 10, 64)
    rows = np.arange(2 * cohort)
    split = Split(rows // 2, rows % 2 == 0, cohort)
    executor, server, run_round = build_simulation(method, split, network, cohort, steps=1)
    size = tree.nbytes(server["params"]) / MIB
    before = peak_memory()
    run_round(0)
    return {"held": executor.max_uploads + 1, "model_mib": size, "peak_mib": peak_memory(), "before_mib": before}


def create_store(folder: Path, clients: int) -> TreeStore:
    """Create a store of the memories of clients: a file of 20 kB each, none of them in RAM."""
    model = {"w": torch.zeros(5000)}
    data = serialization.pack_file(model)
    folder.mkdir()
    entries = {}
    for k in range(clients):
        name = f"{k}-000000.safetensors"
        if k % MAX_LINKS == 0:
            first = folder / name
            first.write_bytes(data)
        else:
            os.link(first, folder / name)  # as many directory entries, with the disk space of a few
        entries[f"client/{k}"] = ManifestEntry(name, "0" * 64, len(data), tree.nbytes(model))
    store = TreeStore(folder, cap=0)
    store.restore(StoreContents(folder, START, 0, entries, []))
    return store


def update_memories(store: TreeStore, clients: Iterable[int], round: int) -> Counter[str]:
    """Read, store, commit and prune the memories of a cohort, as a round does.

    Returns:
        How often each Python function was called; empty except in every tenth round.
    """
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1

    view = StateView(store, "client/", torch.device("cpu"))
    if round % 10 == 0:
        sys.setprofile(count)
    try:
        for client in clients:
            found = view.get(str(client))
            view.put(str(client), {"w": torch.zeros(5000)} if found is None else found)
        commit = store.commit(round)
        store.prune(round - 1)
        store.total_bytes("client/")
        store.size("client/-2")
    finally:
        sys.setprofile(None)
    assert commit != START
    return calls


def measure_memories(rounds: int) -> dict[str, Any]:
    """Measure the processor milliseconds of a round's updates of memories, after few and after many clients trained.

    The two take turns. Half of a cohort have trained before, the others are new.
    """
    few, many = TRAINED_BEFORE
    spent: dict[int, list[float]] = {clients: [] for clients in TRAINED_BEFORE}
    calls: dict[int, Counter[str]] = {clients: Counter() for clients in TRAINED_BEFORE}
    with tempfile.TemporaryDirectory() as folder:
        stores = {clients: create_store(Path(folder) / str(clients), clients) for clients in TRAINED_BEFORE}
        gc.collect()
        for round in range(1, 10 * rounds + 1):
            for clients, store in stores.items():
                returning = [(round * COHORT // 2 + k) % few * (clients // few) for k in range(COHORT // 2)]
                new = range(clients + COHORT * round, clients + COHORT * round + COHORT // 2)
                start = time.process_time()
                counted = update_memories(store, [*returning, *new], round)
                if counted:  # the profiler slows the round down, so its time is not used
                    calls[clients] += counted
                else:
                    spent[clients].append(time.process_time() - start)
    medians = {clients: 1000 * statistics.median(times[5:]) for clients, times in spent.items()}
    return {
        "steps_ms": medians,
        "ratio": medians[many] / medians[few],
        "calls": {clients: sum(each.values()) / rounds for clients, each in calls.items()},
        "more_calls": {
            name: count - calls[few][name] for name, count in calls[many].items() if count > calls[few][name]
        },
    }


def measure_dirichlet(clients: int, images: int) -> dict[str, Any]:
    """Time the Dirichlet split at alpha 0.5; return the seconds, and "succeeds" or the message of the error."""
    start = time.perf_counter()
    try:
        Scenario("dir-dir", clients=clients, labels_per_class=None, label_ratio=0.4).split(np.arange(images) % 10, 10)
        result = "succeeds"
    except UserError as error:
        result = str(error)
    return {"seconds": time.perf_counter() - start, "result": result}


def run_in_process(command: str, **options: str | int) -> dict[str, Any]:
    """Run a subcommand of this script in a separate process, and return its figures."""
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    output = subprocess.run([sys.executable, __file__, command, *arguments], check=True, capture_output=True, text=True)
    return json.loads(output.stdout)


FIGURES = {
    "round_1e2_ms": "a round with 100 registered clients, ms",
    "round_1e6_ms": "a round with 1,000,000 registered clients, ms",
    "round_1e6_over_1e2": "ratio of both",
    "split_1e6_s": "a split of 1,000,000 clients, s",
    "peak_1e6_mib": "peak memory of the process with 1,000,000 clients, MiB",
    "upload_models_held": "models that FedAvg has in memory at once",
    "memories_1e5_over_1e2": "a round's client memories after 100,000 clients, relative to after 100",
}
"""Descriptions for the table."""


def print_all(rounds: int) -> None:
    """Run the four measurements, and print the table."""
    figures = run_in_process("registered", rounds=rounds)
    uploads = {
        (method, cohort): run_in_process("uploads", method=method, cohort=cohort)
        for method in ("fedavg", "fedrgd")
        for cohort in (5, 20)
    }
    memories = run_in_process("memories", rounds=rounds)
    figures["upload_models_held"] = max(found["held"] for (method, _), found in uploads.items() if method == "fedavg")
    figures["memories_1e5_over_1e2"] = memories["ratio"]
    print("| what | measured |\n|---|---|")
    for name, value in figures.items():
        print(f"| {FIGURES[name]} | {value:,.2f} |")
    for (method, cohort), found in uploads.items():
        grown = (found["peak_mib"] - found["before_mib"]) / found["model_mib"]
        text = f"{found['held']} models of {found['model_mib']:.1f} MiB; the process grows by {grown:.1f} models"
        print(f"| {method}, cohort of {cohort}: uploads in memory at once, with the mean | {text} |")
    for clients, spent in memories["steps_ms"].items():
        text = f"{spent:.2f} ms, {memories['calls'][clients]:,.0f} function calls"
        print(f"| {int(clients):,} clients trained before: memories of a round, read, stored, committed | {text} |")
    for clients, images in ((1_000, 60_000), (5_000, 50_000)):
        found = run_in_process("dirichlet", clients=clients, images=images)
        print(
            f"| Dirichlet 0.5, {clients:,} clients, {images:,} images | {found['seconds']:.2f} s: {found['result']} |"
        )


# The store of client models


class Meter:
    """Records the peak of each kind of memory in MiB, and the seconds of each kind of call."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.calls: Counter[str] = Counter()

    def record_memory(self) -> None:
        """Read the memory of this process from the kernel."""
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmHWM", "RssAnon", "RssFile"):
                self.peaks[name] = max(self.peaks.get(name, 0.0), int(rest.split()[0]) / 1024)

    def record_call(self, name: str, start: float) -> None:
        """Record a call that started at a time of `time.perf_counter` and has just ended."""
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.calls[name] += 1
        self.record_memory()


def make_model(width: int, value: float) -> Tree:
    """Return the parameters of a ResNet-9 with every number set to `value`."""
    params = ResNet9(channels=3, classes=10, width=width).init(rng.generator(0, "model"))["params"]
    return tree.map(lambda leaf: torch.full_like(leaf, value), params)


def update_models(store: TreeStore, cohorts: list[list[int]], width: int, meter: Meter) -> Counter[int]:
    """Store the model of each client of each round, plus one if it exists, and commit each round.

    Returns:
        The number of rounds of each client.
    """
    view = StateView(store, "client/", torch.device("cpu"))
    rounds = Counter[int]()
    initial = make_model(width, 1.0)
    for number, cohort in enumerate(cohorts):
        for client in cohort:
            start = time.perf_counter()
            found = view.get(str(client))
            if found is not None:
                meter.record_call("get", start)
            model = initial if found is None else tree.map(lambda leaf: leaf + 1, found)
            start = time.perf_counter()
            view.put(str(client), model)
            meter.record_call("put", start)
            rounds[client] += 1
            # Free both models before the next client is read.
            del found, model
        start = time.perf_counter()
        store.commit(number)
        store.prune(number - 1)
        meter.record_call("commit", start)
    return rounds


def models_equal_rounds(store: TreeStore, rounds: Counter[int]) -> bool:
    """Return whether every number in the model of every tenth client is the number of its rounds."""
    view = StateView(store, "client/", torch.device("cpu"))
    return all(
        all(bool((leaf == rounds[client]).all()) for leaf in tree.leaves(view.get(str(client)) or {}))
        for client in list(rounds)[::10]
    )


def measure_store(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return the memory in MiB, the milliseconds a call and the seconds of the rounds and of the verification."""
    generator = rng.generator(0, "cohorts")
    first_cohorts = list(torch.randperm(options.clients, generator=generator).split(options.cohort))
    later = [torch.randperm(options.clients, generator=generator)[: options.cohort] for _ in range(options.rounds)]
    cohorts = [[int(client) for client in cohort] for cohort in [*first_cohorts, *later]]
    meter = Meter()
    meter.record_memory()
    figures = {"MiB at the start": meter.peaks["VmHWM"]}
    store = TreeStore(folder / "clients", options.cap_mib * MIB)
    rounds = update_models(store, cohorts, options.width, meter)
    figures["MiB of all clients"] = store.total_bytes() / MIB
    figures |= {f"peak {name}, MiB": value for name, value in meter.peaks.items()}
    figures |= {f"ms a {name}": 1000 * seconds / meter.calls[name] for name, seconds in meter.seconds.items()}
    figures["s for all rounds"] = sum(meter.seconds.values())
    commit = store.last_commit
    del store
    start = time.perf_counter()
    contents = remove_unreferenced(verify(folder / "clients", commit), len(cohorts) - 2)
    figures["s to verify all when resuming"] = time.perf_counter() - start
    reopened = TreeStore(folder / "clients", options.cap_mib * MIB)
    reopened.restore(contents)
    if not models_equal_rounds(reopened, rounds):
        raise SystemExit("the model of a client lacks a round: the store is wrong")
    return figures


def print_store(options: argparse.Namespace) -> None:
    """Measure the store in a temporary folder, and print the figures."""
    retain_freed_memory()  # as every run on a CPU does
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = measure_store(options, Path(folder))
    for name, value in figures.items():
        print(f"{name:30s} {value:10.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("all", "registered", "memories"):
        commands.add_parser(name).add_argument("--rounds", type=int, default=30)
    uploads = commands.add_parser("uploads")
    uploads.add_argument("--method", default="fedavg")
    uploads.add_argument("--cohort", type=int, default=5)
    dirichlet = commands.add_parser("dirichlet")
    dirichlet.add_argument("--clients", type=int, default=1000)
    dirichlet.add_argument("--images", type=int, default=60_000)
    store = commands.add_parser("store")
    store.add_argument("--clients", type=int, default=1000)
    store.add_argument("--width", type=int, default=64, help="of the ResNet-9 of each client")
    store.add_argument("--cap-mib", type=int, default=1024, help="memory cap of the store")
    store.add_argument("--cohort", type=int, default=10)
    store.add_argument("--rounds", type=int, default=50, help="after every client has trained once")
    store.add_argument(
        "--folder", type=Path, default=None, help="where the files are stored (default: a temporary folder)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "all":
        print_all(options.rounds)
    elif options.command == "registered":
        print(json.dumps(measure_registered(options.rounds)))
    elif options.command == "uploads":
        print(json.dumps(measure_uploads(options.method, options.cohort)))
    elif options.command == "memories":
        print(json.dumps(measure_memories(options.rounds)))
    elif options.command == "dirichlet":
        print(json.dumps(measure_dirichlet(options.clients, options.images)))
    else:
        print_store(options)


if __name__ == "__main__":
    main()
