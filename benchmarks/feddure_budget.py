"""Is FedDure's published lead a matter of labeled steps? Three methods at 5 and at 45 equal labeled steps a visit.

    python benchmarks/feddure_budget.py --data-dir DATA [--run-dir budget] [--rounds 200] [--seeds 0 1 2] [--width 16]

CIFAR-10 at half size, (DIR, DIR), 100 clients, 5 in a round, ResNet-9: labels-only FedAvg, FixMatch and FedDure (with
what its paper fixes), at a constant and at a cosine rate. At 5 steps of 10 labels the 5,000 labels are seen in 10
epochs over the run, at 45 in 90. What is finished in the folder is not played again; a run that was stopped goes on.
At the defaults it takes many hours of two cores: on a GPU give --width 64 --shrink 1 instead. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfmoon.config.schema import Config, resolve
from halfmoon.runs import runner
from halfmoon.storage import atomic_io

METHODS = ("fedavg", "fedavg-fixmatch", "feddure")
STEPS = (5, 45)
SCHEDULES = ("constant", "cosine")


def configs(given: argparse.Namespace) -> Iterator[tuple[str, int, str, int, Config]]:
    """Yield (method, steps, schedule, seed, configuration) of every run."""
    for steps in given.steps:
        for schedule in SCHEDULES:
            for method in METHODS:
                for seed in given.seeds:
                    values: dict[str, Any] = {
                        "method": method, "data": given.data, "shrink": given.shrink, "clients": 100, "cohort": 5,
                        "setting": "dir-dir", "dirichlet_alpha": 0.5, "labels_per_class": 5.0, "network": "resnet9",
                        "width": given.width, "rounds": given.rounds, "optimizer": "adam", "lr": 5e-4,
                        "schedule": schedule, "labeled_batch": 10, "unlabeled_batch": 10, "steps": steps,
                        "budget": "none", "seed": seed, "split_seed": seed, "evaluate_every": 10,
                        "checkpoint_every": 10,
                    }  # fmt: skip
                    values |= {"preset": "paper"} if method == "feddure" else {}
                    values |= {} if given.data_dir is None else {"data_dir": given.data_dir}
                    yield method, steps, schedule, seed, resolve({**values, **small(given)}, {})


def small(given: argparse.Namespace) -> dict[str, Any]:
    """Return what --tiny changes: to see that it works."""
    if not given.tiny:
        return {}
    return {"data": "digits", "shrink": 1, "clients": 8, "labels_per_class": 1.0, "network": "small", "rounds": 1}


def table(found: dict[tuple[str, int, str], list[float]]) -> str:
    """Return the mean and the sample deviation over seeds of the last round's accuracy, in percent."""
    lines = ["| steps a visit | rate | method | last round % | seeds |", "|---:|---|---|---:|---:|"]
    for (method, steps, schedule), ends in found.items():
        spread = f" ± {statistics.stdev(ends):.2f}" if len(ends) > 1 else ""
        lines.append(f"| {steps} | {schedule} | {method} | {statistics.fmean(ends):.2f}{spread} | {len(ends)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Play what is left, and print the table after every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--run-dir", type=Path, default=Path("budget"))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--shrink", type=int, default=2)
    parser.add_argument(
        "--tiny", action="store_true", help="digits, a tiny network and one round: to see that it works"
    )
    given = parser.parse_args()
    found: dict[tuple[str, int, str], list[float]] = {}
    for method, steps, schedule, seed, config in configs(given):
        summary = runner.cell(config, given.run_dir / f"{method}-{steps}-{schedule}-seed{seed}")
        found.setdefault((method, steps, schedule), []).append(100 * summary["accuracy"]["last"])
        atomic_io.replace(given.run_dir / "table.md", table(found).encode())
    print(table(found))


if __name__ == "__main__":
    main()
