"""Information in FedDure's weights: AUC of F-reg's weights and of the confidence for "this pseudo-label is correct".

    python results/regulator_auc.py run --runs RUNS [--seeds 0 1 2 3 4 5]
    python results/regulator_auc.py report --runs RUNS

`run` trains FedDure on digits in the folders RUNS/SETTING-SEED; finished runs are read. `report` writes the table of
regulator_auc.md. A seed is that of training and of the split.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import halfmoon

PAGE = Path(__file__).with_name("regulator_auc.md")
BEGIN = "<!-- table -->"

SETTINGS = {"iid-dir": "evenly", "dir-dir": "unevenly"}
"""Label distribution of each setting."""

OPTIONS: dict[str, Any] = {
    "data": "digits",
    "method": "feddure",
    "dirichlet_alpha": 0.5,
    "clients": 20,
    "cohort": 5,
    "labels_per_class": 0.5,
    "rounds": 80,
    "steps": 6,
    "labeled_batch": 10,
    "unlabeled_batch": 30,
    "labeled_view": "weak",
    "labeling": "running",
    "network": "small",
    "lr": 6e-3,
    "schedule": "cosine",
    "budget": "labeled-steps",
    "reference": "feddure",
    "evaluate_every": 5,
    "options": {"labels": "round", "regulator_bias": 0.0},
    "executor": "loop",
    "threads": 1,
    "device": "cpu",
}
"""The recipe of results/evidence.py for digits."""


def run(runs: Path, seeds: list[int], rounds: int) -> None:
    """Train FedDure with every setting and seed."""
    for seed in seeds:
        for setting in SETTINGS:
            options = {**OPTIONS, "rounds": rounds, "setting": setting, "seed": seed, "split_seed": seed}
            halfmoon.run(**options, run_dir=runs / f"{setting}-{seed}")


def mean_auc(path: Path, key: str) -> list[float]:
    """Compute the mean of an AUC in each third of a run's rounds."""
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    size = -(-len(rows) // 3)
    means = []
    for start in range(0, len(rows), size):
        values = [(row["pseudo"] or {}).get(key) for row in rows[start : start + size]]
        known = [value for value in values if value is not None]
        means.append(statistics.fmean(known) if known else float("nan"))
    return means


def report(runs: Path) -> None:
    """Write the table: mean and standard deviation over seeds, by setting, score and third of the rounds."""
    lines = [
        "| labels | AUC of | first third | second third | last third | seeds |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for setting, distribution in SETTINGS.items():
        folders = sorted(path.parent for path in runs.glob(f"{setting}-*/summary.json"))
        for key, title in (("auc_weight", "weights of F-reg"), ("auc_confidence", "confidence")):
            thirds = zip(*(mean_auc(folder, key) for folder in folders), strict=True)
            cells = []
            for values in thirds:
                deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
                cells.append(f"{statistics.fmean(values):.2f}{deviation}")
            lines.append(f"| {distribution} | {title} | {' | '.join(cells)} | {len(folders)} |")
    before, _ = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=OPTIONS["rounds"])
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.runs, arguments.seeds, arguments.rounds)
    else:
        report(arguments.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
