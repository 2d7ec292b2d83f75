"""Keep a model of every client, under a cap on memory, through rounds with a checkpoint each; report memory, times.

    python benchmarks/client_store.py [--clients 1000] [--width 64] [--cap-mib 1024] [--cohort 10] [--rounds 50]

Every client first keeps the parameters of a ResNet-9 (26.3 MB at width 64), cohort by cohort; then random cohorts
read theirs, add one and keep it. Each round commits and prunes as a checkpoint does. At the end a new store verifies
what is on disk, as resuming does, and every client that was visited must have counted its visits.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from halfmoon.core import rng, tree
from halfmoon.core.memory import retain_freed_memory
from halfmoon.core.tree import Tree
from halfmoon.models import ResNet9
from halfmoon.storage.manifest import remove_unreferenced, verify
from halfmoon.storage.state_store import StateView, TreeStore

MIB = 2**20


class Meter:
    """The largest of each kind of memory that was seen, in MiB, and the seconds of each kind of call."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.calls: Counter[str] = Counter()

    def look(self) -> None:
        """Read the process' memory as the kernel counts it."""
        for line in Path("/proc/self/status").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("VmHWM", "RssAnon", "RssFile"):
                self.peaks[name] = max(self.peaks.get(name, 0.0), int(rest.split()[0]) / 1024)

    def add(self, name: str, began: float) -> None:
        """Take note of a call that began then and is over."""
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        self.calls[name] += 1
        self.look()


def model(width: int, value: float) -> Tree:
    """Return the parameters of a ResNet-9 with every number set to `value`."""
    params = ResNet9(channels=3, classes=10, width=width).init(rng.generator(0, "model"))["params"]
    return tree.map(lambda leaf: torch.full_like(leaf, value), params)


def play(store: TreeStore, cohorts: list[list[int]], width: int, meter: Meter) -> Counter[int]:
    """Let the clients of each round keep, or count up, their model, and commit each round; return their visits."""
    state_store, visits = StateView(store, "client/", torch.device("cpu")), Counter[int]()
    first = model(width, 1.0)
    for round, cohort in enumerate(cohorts):
        for client in cohort:
            began = time.perf_counter()
            found = state_store.get(str(client))
            if found is not None:
                meter.add("get", began)
            now = first if found is None else tree.map(lambda leaf: leaf + 1, found)
            began = time.perf_counter()
            state_store.put(str(client), now)
            meter.add("put", began)
            visits[client] += 1
            del found, now
        began = time.perf_counter()
        store.commit(round)
        store.prune(round - 1)
        meter.add("commit", began)
    return visits


def counted(store: TreeStore, visits: Counter[int]) -> bool:
    """Say whether every number of every tenth client's model is the count of its visits."""
    state_store = StateView(store, "client/", torch.device("cpu"))
    return all(
        all(bool((leaf == visits[client]).all()) for leaf in tree.leaves(state_store.get(str(client)) or {}))
        for client in list(visits)[::10]
    )


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Return what the run took, in MiB, milliseconds a call and seconds."""
    chance = rng.generator(0, "cohorts")
    everyone = list(torch.randperm(options.clients, generator=chance).split(options.cohort))
    later = [torch.randperm(options.clients, generator=chance)[: options.cohort] for _ in range(options.rounds)]
    cohorts = [[int(client) for client in cohort] for cohort in [*everyone, *later]]
    meter = Meter()
    meter.look()
    result = {"MiB at the start": meter.peaks["VmHWM"]}
    store = TreeStore(folder / "clients", options.cap_mib * MIB)
    visits = play(store, cohorts, options.width, meter)
    result["MiB kept by all clients"] = store.total_bytes() / MIB
    result |= {f"peak {name}, MiB": value for name, value in meter.peaks.items()}
    result |= {f"ms a {name}": 1000 * seconds / meter.calls[name] for name, seconds in meter.seconds.items()}
    result["s for all rounds"] = sum(meter.seconds.values())
    mark = store.last_commit
    del store
    began = time.perf_counter()
    contents = remove_unreferenced(verify(folder / "clients", mark), len(cohorts) - 2)
    result["s to verify all at resuming"] = time.perf_counter() - began
    again = TreeStore(folder / "clients", options.cap_mib * MIB)
    again.restore(contents)
    if not counted(again, visits):
        raise SystemExit("a client has lost a visit: the store is wrong")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep a model of every client, under a cap on memory.")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64, help="of the ResNet-9 that each client keeps")
    parser.add_argument("--cap-mib", type=int, default=1024, help="what the store may hold in memory")
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=50, help="after every client was met once")
    parser.add_argument("--folder", type=Path, default=None, help="where the files lie (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()  # as every run on a CPU does
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        result = measure(options, Path(folder))
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    for name, value in result.items():
        sys.stdout.write(f"{name:28s} {value:10.1f}\n")


if __name__ == "__main__":
    main()
