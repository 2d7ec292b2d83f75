"""Time rounds of unequal clients client by client and as padded programs, on the digits.

    python benchmarks/unequal_clients.py [--methods NAME ...] [--rules main rest] [--cohorts 5 20] [--turns N] [--json]
    python benchmarks/unequal_clients.py --large [--methods NAME ...] [--cohorts 5 20] [--turns N] [--json]

A Dirichlet cohort under two batch rules: "main" is the main job's (six steps on 10 labeled and 30 unlabeled images at
every client; what differs is how many rows are labeled when a round begins), "rest" spreads each client's unlabeled
rows over its steps, so steps and images a step differ as well. `--large` has cohorts in which one client is ten times
as large as each of the others, and steps on 10 + 30 images until all unlabeled ones are seen: in programs that are
padded by a third at most, and in one of all. The sides take turns in one process on one thread; a figure is the median
over turns of the program's CPU time over the loop's in the same turn.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from halfmoon import Config
from halfmoon.core.memory import retain_freed_memory
from halfmoon.data.partition.split import Split
from halfmoon.engine.budget import Budget
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.engine.groups import MAX_PADDING
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import Simulation
from halfmoon.runs import factory

METHODS = ("fedavg", "fedavg-fixmatch", "feddure")
OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg-fixmatch": {"labels": "round", "threshold": 0.7},
    "feddure": {"labels": "round", "regulator_bias": 0.0},
    "semifl": {"threshold": 0.3},  # or nobody would train on pseudo-labels of a model that has not learned yet
    "cbafed": {"threshold": 0.1, "warmup": 0.0},
    "proxyfl": {"tuning_passes": 0},  # the server's, of which clients know nothing
}
RULES: dict[str, dict[str, Any]] = {"main": {"steps": 6, "unlabeled_batch": 30}, "rest": {}}
LARGE: dict[str, Any] = {"unlabeled_batch": 30}


def rounds(name: str, rule: str, cohort: int, executor: Any, padded: Fraction = MAX_PADDING) -> Callable[[int], None]:
    """Return what plays the round of a number, from the same first model."""
    large = rule == "large"
    config = Config(
        method=name, data="digits", clients=cohort if large else 20, cohort=cohort, lr=6e-3, labeling="running",
        device="cpu", options=OPTIONS.get(name, {}), **(LARGE if large else RULES[rule]),
    )  # fmt: skip
    shared, method = factory.build_problem(config), factory.build_method(config)
    how = VmapExecutor(max_padding=padded) if executor == "vmap" else SerialExecutor()
    training = Training(shared.batching, Budget(), shared.serving, how)
    held = FederatedDataset(shared.train, one_large(len(shared.train.labels), cohort) if large else shared.split)
    simulation = Simulation(method, shared.task, held, shared.views, training, RuntimeSettings(cohort))
    server = method.start(shared.task, shared.task.network.init(torch.Generator().manual_seed(0)))

    def play(number: int) -> None:
        simulation.open(number)
        method.round(simulation.task, server, simulation)
        simulation.close()

    return play


def one_large(rows: int, clients: int) -> Split:
    """Return a split in which the first client has ten times the rows of each other one, a fifth of them labeled."""
    share = rows // (clients + 9)
    client = np.repeat(np.arange(clients), [10 * share, *[share] * (clients - 1)])
    client = np.concatenate([client, np.full(rows - len(client), -1)])
    return Split(client, np.arange(rows) % 5 == 0, clients)


def measure(name: str, rule: str, cohort: int, turns: int) -> dict[str, float]:
    """Return the median milliseconds of the loop, and the median ratio of the programs' time to it.

    Of a cohort with a large client, also that of one program, "ratio_of_one".
    """
    sides = [rounds(name, rule, cohort, executor) for executor in ("loop", "vmap")]
    if rule == "large":
        sides.append(rounds(name, rule, cohort, "vmap", Fraction(1)))
    times: list[list[float]] = []
    for turn in range(turns + 1):
        spent: list[float] = []
        for play in sides:
            began = time.process_time()
            play(turn)
            spent.append(time.process_time() - began)
        times += [spent] if turn else []
    found = {"loop_ms": float(round(statistics.median(spent[0] for spent in times) * 1e3))}
    for side, ratio in enumerate(("ratio", "ratio_of_one")[: len(sides) - 1], 1):
        found[ratio] = round(statistics.median(spent[side] / spent[0] for spent in times), 2)
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Time unequal clients one by one and as one program.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rules", nargs="+", choices=[*RULES], default=[*RULES])
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--cohorts", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    retain_freed_memory()
    found: dict[str, dict[str, float]] = {}
    for rule in ["large"] if given.large else given.rules:
        for name in given.methods:
            for cohort in given.cohorts:
                found[f"{rule} {name} {cohort}"] = measure(name, rule, cohort, given.turns)
                if not given.json:
                    print(f"{rule} {name} {cohort}", found[f"{rule} {name} {cohort}"], flush=True)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
