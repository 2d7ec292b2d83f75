"""Time clients in programs of vmap against the loop, over networks.

`factory.MAX_VMAP_PRODUCTS` and `factory.MAX_VMAPPED_CLIENTS_ON_CPU` are chosen by these numbers.

    python benchmarks/programs.py [--clients 20] [--together 5 10 20] [--turns 4] [--networks small:16:8:1 ...]

A network is NAME:WIDTH:PIXELS:CHANNELS. Each round has two steps of FedAvg on 10 labeled images a client, or of
FixMatch on 10 + 10 or 10 + 30, all clients alike; the loop and the programs take turns in one process, on one thread.
A line says the loop's milliseconds, and the median over turns of each program's processor time over the loop's in the
same turn.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from peer_rounds import one_round

from halfmoon import Config
from halfmoon.core.memory import retain_freed_memory
from halfmoon.data import Scenario
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import Simulation
from halfmoon.methods import registry
from halfmoon.runs import factory
from halfmoon.runs.factory import ImageSpec

ROUNDS = (("fedavg", 10), ("fedavg-fixmatch", 10), ("fedavg-fixmatch", 30))
NETWORKS = (
    *("small:16:8:1", "small:8:16:1", "small:32:8:1", "small:16:16:1", "small:16:28:1", "small:64:8:1"),
    *("small:16:32:3", "small:32:32:3"),
)


def side(network: str, method: str, unlabeled: int, clients: int, together: int) -> Callable[[], None]:
    """Return a round with so many clients in a program; 1 is the loop."""
    name, width, pixels, channels = (int(part) if part.isdecimal() else part for part in network.split(":"))
    config = Config(
        method=method, cohort=clients, clients=clients, device="cpu", network=str(name), width=int(width), steps=2,
        unlabeled_batch=unlabeled,
    )  # fmt: skip
    shape = (int(channels), int(pixels), int(pixels))
    g = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (clients * 70, *shape), generator=g, dtype=torch.uint8)
    labels = torch.arange(len(images)) % 10
    form = ImageSpec(shape, tuple("0123456789"), False, (0.5,) * shape[0], (0.25,) * shape[0])
    rule = Scenario(setting="iid-iid", clients=clients, labels_per_class=1.0)
    held = FederatedDataset(Examples(images, labels), rule.split(labels.numpy(), form.classes, "noise"))
    task, made = factory.build_task(config, form), registry.make(method)
    batching, serving = factory.build_batch_rules(config)
    training = Training(
        batching, Budget(), serving, SerialExecutor() if together == 1 else VmapExecutor(max_group_size=together)
    )
    runtime = Simulation(made, task, held, factory.build_views(config, form), training, RuntimeSettings(clients))
    return one_round(made, runtime)


def main() -> None:
    """Print a line for each network and round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--together", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    for method, unlabeled in ROUNDS:
        for network in given.networks:
            spent: dict[int, list[float]] = {count: [] for count in (1, *given.together)}
            plays = {count: side(network, method, unlabeled, given.clients, count) for count in spent}
            for turn in range(given.turns + 1):
                for count, play in plays.items():
                    began = time.process_time()
                    play()
                    if turn:
                        spent[count].append(time.process_time() - began)
            ratios = {
                count: round(statistics.median(a / b for a, b in zip(spent[count], spent[1], strict=True)), 2)
                for count in given.together
            }
            print(method, unlabeled, network, f"{statistics.median(spent[1]) * 1e3:.0f} ms", ratios, flush=True)


if __name__ == "__main__":
    main()
