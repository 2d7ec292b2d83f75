"""Time digits' main job under several seeds: played one after another, and with `seeds_together`.

    python benchmarks/seeds_together.py [--methods fedavg ...] [--seeds 5] [--rounds 80] [--turns 3]

Both play the whole comparison in one process: clients, tests, checkpoints, tables and curves. They take turns; a line
says the processor seconds of both, their ratio, and how far the accuracies lie apart, and at last the medians.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import halfmoon
from halfmoon import Config
from halfmoon.cli.main import MAIN_JOB

METHODS = ("fedavg", "fedavg-fixmatch", "feddure")


def job(method: str, rounds: int) -> dict[str, Any]:
    """Return the options of the main job for one of its methods."""
    own = {name: value for name, value in MAIN_JOB["options"].items() if not isinstance(value, dict)}
    options = own if method == "feddure" else MAIN_JOB["options"].get(method, {})
    kept = {name: value for name, value in MAIN_JOB.items() if name not in ("baselines", "options")}
    return {**kept, "method": method, "rounds": rounds, "device": "cpu", "options": {method: options}}


def played(method: str, rounds: int, seeds: int, together: bool) -> tuple[float, list[float]]:
    """Return processor seconds and last accuracies of a comparison."""
    with tempfile.TemporaryDirectory() as folder:
        config = Config(**job(method, rounds), seeds_together=together, run_dir=Path(folder) / "run")
        began = time.process_time()
        made = halfmoon.compare([method], config, seeds)
        return time.process_time() - began, [each["accuracy"]["last"] for each in made.summaries]


def main() -> None:
    """Print a line a turn and method, and the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    for method in given.methods:
        played(method, 1, 2, True)  # what is imported late counts for neither
    ratios: dict[str, list[float]] = {method: [] for method in given.methods}
    for _ in range(given.turns):
        for method in given.methods:
            apart, one = played(method, given.rounds, given.seeds, False)
            together, other = played(method, given.rounds, given.seeds, True)
            ratios[method].append(together / apart)
            gap = max(abs(a - b) for a, b in zip(one, other, strict=True))
            load = os.getloadavg()[0]
            print(
                f"{method}: apart {apart:.1f} s, together {together:.1f} s, ratio {together / apart:.2f}, "
                f"accuracies within {100 * gap:.2f} points, load {load:.1f}",
                flush=True,
            )
    for method, each in ratios.items():
        print(f"{method}: median {statistics.median(each):.2f} of {len(each)}")


if __name__ == "__main__":
    main()
