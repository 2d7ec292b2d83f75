"""Play FedAvg and FixMatch on digits in float32 and in bf16, and print the test accuracy after the last round.

    python benchmarks/precision.py [--rounds 40] [--seeds 0 1 2]

Six steps on 10 labeled and 30 unlabeled images, (DIR, DIR), labels of the round by running statistics: the main job's
recipe but for its number of rounds. Clients train as one program (vmap).
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import halfmoon
from halfmoon import Config

METHODS: dict[str, dict[str, Any]] = {"fedavg": {}, "fedavg-fixmatch": {"labels": "round", "threshold": 0.7}}
RECIPE: dict[str, Any] = {"data": "digits", "lr": 6e-3, "steps": 6, "unlabeled_batch": 30, "labeling": "running"}


def accuracy(method: str, precision: Any, seed: int, rounds: int) -> float:
    """Return the share of test images that the last model names rightly."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        shared: dict[str, Any] = {**RECIPE, "rounds": rounds, "seed": seed, "executor": "vmap", "workers": 1}
        options = METHODS[method]
        halfmoon.run(Config(method=method, precision=precision, options=options, run_dir=place, **shared))
        return json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])["test"]["accuracy"]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="Accuracy in float32 and in bf16.")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    for method in METHODS:
        for precision in ("float32", "bf16"):
            found = [accuracy(method, precision, seed, given.rounds) for seed in given.seeds]
            print(method, precision, [round(100 * each, 1) for each in found], flush=True)


if __name__ == "__main__":
    main()
