"""Time rounds of a Dirichlet cohort client by client and as one padded program, on the digits' main job.

    python benchmarks/unequal_clients.py [--cohorts 5 20] [--turns N] [--json]

Two batch rules: "main" is the main job's (six steps on 10 labeled and 30 unlabeled images at every client; what differs
is how many rows are labeled when a round begins), "rest" spreads each client's unlabeled rows over its steps, so steps
and images a step differ as well. The sides take turns in one process on one thread; a figure is the median over turns
of the program's CPU time over the loop's in the same turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from halfmoon import Config
from halfmoon.core.allocator import keep_memory
from halfmoon.engine.budget import Budget
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import Simulation
from halfmoon.runs import factory

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg-fixmatch": {"labels": "round", "tau": 0.7},
    "feddure": {"labels": "round", "regulator_bias": 0.0},
}
RULES: dict[str, dict[str, Any]] = {"main": {"steps": 6, "unlabeled_batch": 30}, "rest": {}}


def rounds(name: str, rule: str, cohort: int, executor: Any) -> Callable[[int], None]:
    """Return what plays the round of a number, from the same first model."""
    config = Config(
        method=name, data="digits", clients=20, cohort=cohort, lr=6e-3, labeling="running", device="cpu",
        options=METHODS[name], **RULES[rule],
    )  # fmt: skip
    shared, method = factory.problem(config), factory.method(config)
    training = Training(shared.batching, Budget(), shared.serving, executor)
    held = FederatedDataset(shared.train, shared.split)
    simulation = Simulation(method, shared.task, held, shared.views, training, RuntimeSettings(cohort))
    server = method.start(shared.task, shared.task.network.init(torch.Generator().manual_seed(0)))

    def play(number: int) -> None:
        simulation.open(number)
        method.round(simulation.task, server, simulation)
        simulation.close()

    return play


def measure(name: str, rule: str, cohort: int, turns: int) -> dict[str, float]:
    """Return the median milliseconds of the loop, and the median ratio of the program's time to it."""
    sides = [rounds(name, rule, cohort, executor) for executor in ("loop", "vmap")]
    times: list[tuple[float, float]] = []
    for turn in range(turns + 1):
        spent: list[float] = []
        for play in sides:
            began = time.process_time()
            play(turn)
            spent.append(time.process_time() - began)
        times += [(spent[0], spent[1])] if turn else []
    ratio = statistics.median(many / loop for loop, many in times)
    return {"loop_ms": round(statistics.median(loop for loop, _ in times) * 1e3), "ratio": round(ratio, 2)}


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Time unequal clients one by one and as one program.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cohorts", type=int, nargs="+", default=[5, 20])
    parser.add_argument("--turns", type=int, default=9)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    found: dict[str, dict[str, float]] = {}
    for rule in RULES:
        for name in METHODS:
            for cohort in given.cohorts:
                found[f"{rule} {name} {cohort}"] = measure(name, rule, cohort, given.turns)
                if not given.json:
                    print(f"{rule} {name} {cohort}", found[f"{rule} {name} {cohort}"], flush=True)
    if given.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
