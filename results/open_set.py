"""Measure methods on open sets: a share of every client's unlabeled images is of classes without a label.

    python results/open_set.py --data-dir DATA --runs RUNS --out open_set.csv [--seeds 0 1 2 3 4]

Of ten classes six have labels. A larger share replaces images of the known classes, so that no client has more images.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import halfmoon
from halfmoon.config import schema as settings
from halfmoon.core import hubs

SETS: dict[str, dict[str, Any]] = {
    "digits": {},
    "fashion_mnist": {"data_share": 0.03},
}
"""Data sets and their options."""

UNKNOWN_CLASSES = 4
SHARES = (0.0, 0.1, 0.3, 0.5)
HEADS = ("ridge-head", "mixture-head")
METHODS = (*HEADS, "fedavg", "fedavg-control", "fedavg-soft-labels", "fedavg-fixmatch", "feddure")
COMMON: dict[str, Any] = {
    "unknown_classes": UNKNOWN_CLASSES, "clients": 5, "cohort": 5, "labels_per_class": 2.0, "setting": "iid-iid",
    "executor": "loop", "threads": 1, "processes": 1,
}  # fmt: skip
TRAINED: dict[str, Any] = {"network": "small", "width": 16, "rounds": 20, "steps": 10, "lr": 3e-3}
"""Options of the methods that train by steps, from scratch."""

SOLVED: dict[str, Any] = {"network": hubs.MULTILAYER, "tune": "head", "rounds": 11, "budget": "none"}
"""Options of the heads on features."""


def run_one(name: str, method: str, share: float, seed: int, options: argparse.Namespace) -> float:
    """Run a method, or read its finished run, and return its test accuracy in percent."""
    place = {} if name == "digits" else {"data_dir": options.data_dir}
    values = {
        **COMMON,
        **(SOLVED if method in HEADS else TRAINED),
        **SETS[name],
        **place,
        "data": name,
        "method": method,
        "unknown_share": share,
        "seed": seed,
        "split_seed": seed,
        "run_dir": options.runs / f"{name}-{method}-{share:g}-{seed}",
    }
    results = halfmoon.run(settings.resolve({}, values), progress=False)
    return 100 * results.summaries[0]["accuracy"]["last"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(5))
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", default=METHODS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.sets:
        for method in options.methods:
            for share in SHARES:
                for seed in options.seeds:
                    accuracy = run_one(name, method, share, seed, options)
                    rows.append({"set": name, "method": method, "share": share, "seed": seed, "accuracy": accuracy})
                values = [
                    row["accuracy"]
                    for row in rows
                    if (row["set"], row["method"], row["share"]) == (name, method, share)
                ]
                print(f"{name} {method} {share:.0%}: {sum(values) / len(values):.1f}", flush=True)
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
