"""Compare what `halfmoon recipes` estimates of a run with what the run takes, side by side in one process.

    python benchmarks/cost_estimate.py [--data-dir DIR] [--rounds N] [--repeats N] [--only WORDS] [--clock cpu|wall]

Every run is played a few times (`--repeats`), each right after its own estimate, whose timings are taken anew. One
thread; `--clock cpu`, the default, counts the time that the process has computed, so that what else the machine does
hardly matters, `--clock wall` what a clock on the wall says. Loading data and making the split are not in either.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch

from halfmoon import build
from halfmoon.config import Config
from halfmoon.sweep.cost import Estimator
from halfmoon.sweep.timing import Timings
from halfmoon.watch import Running

CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


def configs(data_dir: Path | None, rounds: int) -> dict[str, Config]:
    """Return short runs by name: small networks on digits and, where they lie in `data_dir`, on larger images."""
    digits = Config(rounds=rounds, threads=1, budget="none", labels_per_class=2)
    server = {"labels_at": "server", "setting": "semifl-iid", "labels": 200, "labels_per_class": None}
    found = {f"{name}, digits": replace(digits, method=name) for name in ("fedavg", "fedavg-fixmatch", "feddure")}
    found["semifl, digits"] = replace(digits, method="semifl", **server)
    if data_dir is None:
        return found
    base = Config(
        data_dir=data_dir, data="fashion_mnist", data_share=0.2, rounds=rounds, threads=1, budget="none", shrink=2,
        network="small", labels_per_class=2, steps=10, unlabeled_batch=50,
    )  # fmt: skip
    cifar = replace(base, data="cifar10", network="resnet9", width=16, shrink=1, steps=3)
    wrn = replace(cifar, network="wrn", width=1, shrink=2, optimizer="sgd", lr=0.03, steps=None, epochs=1)
    found |= {f"{name}, fashion_mnist": replace(base, method=name) for name in ("fedavg", "fedavg-fixmatch", "feddure")}
    found |= {f"{name}, cifar10": replace(cifar, method=name) for name in ("fedavg-fixmatch", "feddure", "fedloke")}
    found["feddb, cifar10"] = replace(wrn, method="feddb", reuse_labeled=True)
    found["semifl, cifar10"] = replace(wrn, method="semifl", **server)
    return found


class Stopwatch:
    """Note when the first round is over, which also warms up, and when the last one is."""

    def __init__(self, clock: str) -> None:
        """Count with this clock."""
        self.clock, self.times = CLOCKS[clock], list[float]()

    def begin(self, run: Running) -> None:
        """Begin the first round."""
        self.times.append(self.clock())

    def round(self, run: Running, row: dict) -> None:
        """Note the end of a round."""
        self.times.append(self.clock())

    def end(self, run: Running, summary: dict) -> None:
        """Note nothing more."""

    def say(self, words: str) -> None:
        """Hear nothing."""


def played(config: Config, clock: str) -> tuple[float, dict]:
    """Return the seconds of all rounds of a run, and its summary."""
    watch = Stopwatch(clock)
    with tempfile.TemporaryDirectory() as folder:
        summary = build.cell(config, Path(folder) / "run", watch)
    return watch.times[-1] - watch.times[0], summary


def estimated(config: Config) -> tuple[float, float]:
    """Return the seconds estimated of a run from fresh timings, and the forward passes it counts."""
    with tempfile.TemporaryDirectory() as folder:
        estimator = Estimator(Timings(Path(folder)))
        flows, _ = estimator.flows(config)
        return estimator.run(config).seconds, sum(flow.forward + flow.swept for flow in flows)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu")
    parser.add_argument("--only", default="", help="only the runs with this in their name")
    given = parser.parse_args()
    torch.set_num_threads(1)
    versions = {name: metadata.version(name) for name in ("halfmoon", "torch")}
    print(json.dumps({**versions, "python": platform.python_version(), "load": os.getloadavg()[0]}))
    print("| run | estimated s | measured s | estimate / measured | forward images, estimate / counted |")
    print("|---|---|---|---|---|")
    for name, config in configs(given.data_dir, given.rounds).items():
        if given.only not in name:
            continue
        pairs = []
        for _ in range(given.repeats):
            guess, images = estimated(config)
            truth, summary = played(config, given.clock)
            pairs.append((guess, truth, images / summary["cost"]["forward"]))
        guess, truth, images = (statistics.median(each) for each in zip(*pairs, strict=True))
        print(f"| {name} | {guess:.2f} | {truth:.2f} | {guess / truth:.2f} | {images:.2f} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
