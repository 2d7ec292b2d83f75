"""FedDure's Table 1 at full size: CIFAR-10, (DIR, DIR), one row and seed at a time; a run that was stopped is resumed.

    python results/full_size.py run fedavg --seed 0 --data-dir DATA --runs RUNS
    python results/full_size.py report --runs RUNS

`run` trains on one thread in the folder RUNS/ROW-seedN; the same command after an interruption continues from the last
checkpoint. `report` writes full_size.csv (the test accuracy of each evaluated round) and the table of full_size.md.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import halfmoon

HERE = Path(__file__).parent
CURVES = HERE / "full_size.csv"
PAGE = HERE / "full_size.md"
BEGIN = "<!-- table -->"

PROTOCOL: dict[str, Any] = {
    "data": "cifar10",
    "setting": "dir-dir",
    "dirichlet_alpha": 0.5,
    "clients": 100,
    "cohort": 5,
    "rounds": 200,
    "labels_per_class": 5,
    "network": "resnet9",
    "width": 64,
    "optimizer": "adam",
    "lr": 5e-4,
    "schedule": "constant",
    "labeled_batch": 10,
    "unlabeled_batch": "rest",
    "epochs": 1,
    "statistics": "joint",
    "labeling": "batch",
    "labeled_view": "cutout",
    "strong_view": "feddure",
    "budget": "none",
    "executor": "loop",
    "threads": 1,
    "evaluate_every": 5,
}
"""Section 4.1 of the paper, with the readings of the recipe `feddure-table1`."""

ROWS: dict[str, dict[str, Any]] = {
    "fedavg": {"method": "fedavg"},
    # No confidence reaches 1.5: unlabeled images only pass through batch normalization.
    "control": {"method": "fedavg-fixmatch", "options": {"threshold": 1.5}},
    "fixmatch": {"method": "fedavg-fixmatch"},
    "fedmatch": {"method": "fedmatch"},
    "feddure": {"method": "feddure", "preset": "paper"},
    "all-labels": {"method": "fedavg-sl"},
}

PUBLISHED = {"fedavg": 40.34, "fixmatch": 39.95, "fedmatch": 45.56, "feddure": 57.73, "all-labels": 58.38}
"""Table 1, CIFAR-10, (DIR, DIR), in percent, mean of three runs."""


def run_row(row: str, seed: int, runs: Path, overrides: dict[str, Any]) -> None:
    """Train a row, or resume it."""
    folder = runs / f"{row}-seed{seed}"
    if (folder / "config.toml").exists():
        halfmoon.resume(folder)
        return
    options = {**PROTOCOL, **ROWS[row], **overrides}
    halfmoon.run(halfmoon.Config(**options, seed=seed, split_seed=0, run_dir=folder))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; an unfinished last line is left out."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def write_report(runs: Path) -> None:
    """Write the learning curves and the table, in the order of `ROWS`."""
    curves: list[tuple[str, int, int, float]] = []
    table = "| row | seed | rounds | last % | mean of the last five evaluations | published % | hours |\n"
    table += "|---|--:|--:|--:|--:|--:|--:|\n"
    for row in ROWS:
        for folder in sorted(runs.glob(f"{row}-seed*")):
            seed = int(folder.name.rpartition("seed")[2])
            metrics = read_jsonl(folder / "metrics.jsonl")
            tested = [(line["round"], 100 * line["test"]["accuracy"]) for line in metrics if "test" in line]
            if not tested:
                continue
            curves += [(row, seed, number, accuracy) for number, accuracy in tested]
            last = [accuracy for _, accuracy in tested[-5:]]
            hours = sum(line["seconds"] for line in read_jsonl(folder / "timings.jsonl")) / 3600
            table += f"| `{row}` | {seed} | {len(metrics)} | {tested[-1][1]:.1f} | {sum(last) / len(last):.1f} | "
            table += f"{PUBLISHED.get(row, '')} | {hours:.1f} |\n"
    with CURVES.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row", "seed", "round", "accuracy"])
        writer.writerows((row, seed, number, f"{accuracy:.2f}") for row, seed, number, accuracy in curves)
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(BEGIN)] + f"{BEGIN}\n\n{table}")


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("row", choices=ROWS)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--data-dir", type=Path)
    running.add_argument("--runs", type=Path, required=True)
    reporting = commands.add_parser("report")
    reporting.add_argument("--runs", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "report":
        write_report(given.runs)
    else:
        run_row(given.row, given.seed, given.runs, {"data_dir": given.data_dir})


if __name__ == "__main__":
    sys.exit(main())
