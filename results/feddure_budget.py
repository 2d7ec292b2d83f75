"""Is FedDure's published lead a matter of labeled steps? Three methods at 5 and at 45 equal labeled steps a local update.

    python results/feddure_budget.py run --data-dir DATA --runs RUNS [--seeds 0 1 2] [--schedules cosine] [--width 64]
    python results/feddure_budget.py report

CIFAR-10 at half size, (DIR, DIR), 100 clients, 5 in a round, 200 rounds, ResNet-9: labels-only FedAvg, FixMatch and
FedDure (with what its paper fixes), at a constant and at a cosine rate. At 5 steps of 10 labels the 5,000 labels are
seen in 10 epochs over the run, at 45 in 90. `run` trains and appends a line to feddure_budget.jsonl.gz for every run that is over
and skips those that are there; a run that was stopped goes on. At the defaults it takes hours of a core: on a GPU give
--width 64 --shrink 1 instead.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import records
from evidence import deviation, half_interval, interval, renewed, spread

HERE = Path(__file__).parent
LINES = HERE / "feddure_budget.jsonl.gz"
TABLE = HERE / "feddure_budget.md"
BEGIN = "<!-- table -->\n"

SHARED: dict[str, Any] = {"data": "cifar10", "clients": 100, "cohort": 5, "setting": "dir-dir", "dirichlet_alpha": 0.5,
                          "labels_per_class": 5.0, "network": "resnet9", "rounds": 200, "optimizer": "adam",
                          "lr": 5e-4, "labeled_batch": 10, "unlabeled_batch": 10, "budget": "none",
                          "evaluate_every": 10, "checkpoint_every": 10}  # fmt: skip
FLOOR = "fedavg"
METHODS: dict[str, dict[str, Any]] = {FLOOR: {}, "fedavg-fixmatch": {}, "feddure": {"preset": "paper"}}
STEPS = (5, 45)
SCHEDULES = ("constant", "cosine")
CELL = ("width", "shrink", "steps", "schedule")
"""The options of all cells except the method."""


def train_missing(given: argparse.Namespace) -> None:
    """Train the missing runs, seed by seed, so that the runs of a stopped call still have a comparison."""
    from halfmoon.config.schema import resolve
    from halfmoon.runs import runner

    done = {tuple(line[name] for name in (*CELL, "method", "seed")) for line in records.read_lines(LINES)}
    cells = [(seed, schedule, steps, method) for seed in given.seeds for schedule in given.schedules
             for steps in given.steps for method in METHODS]  # fmt: skip
    for seed, schedule, steps, method in cells:
        line = {"width": given.width, "shrink": given.shrink, "steps": steps, "schedule": schedule}
        line |= {"method": method, "seed": seed}
        if tuple(line.values()) in done:
            continue
        start = time.perf_counter()
        values = {**SHARED, **METHODS[method], **line, "split_seed": seed}
        values |= {} if given.data_dir is None else {"data_dir": given.data_dir}
        summary = runner.run_in_folder(resolve(values, {}), given.runs / "-".join(map(str, line.values())))
        line |= {"accuracy": summary["accuracy"], "cost": summary["cost"]}
        line |= {name: each["last"] for name, each in summary.get("measured", {}).items()}
        records.append_line(LINES, {**line, "seconds": round(time.perf_counter() - start, 1)})
        print(json.dumps(line), flush=True)


def report() -> None:
    """Write the table: the last round in percent, and its paired difference to labels only, in points."""
    found: dict[tuple[Any, ...], dict[str, dict[int, float]]] = {}
    for line in records.read_lines(LINES):
        cell = found.setdefault(tuple(line[name] for name in CELL), {})
        cell.setdefault(line["method"], {})[line["seed"]] = 100 * line["accuracy"]["last"]
    table = "| steps a round | rate | width | method | last % | minus labels only, points (95 %) | seeds |\n"
    table += "|--:|---|--:|---|--:|--:|--:|\n"
    for (width, _, steps, schedule), methods in sorted(found.items(), key=lambda each: (each[0][3], each[0])):
        for method, ends in methods.items():
            floor = methods.get(FLOOR, {})
            differences = [ends[seed] - floor[seed] for seed in ends if seed in floor] if method != FLOOR else []
            table += f"| {steps} | {schedule} | {width} | `{method}` | "
            last = list(ends.values())
            gain = interval(fmean(differences), half_interval(differences)) if differences else ""
            table += f"{spread(fmean(last), deviation(last))} | {gain} | {len(ends)} |\n"
    TABLE.write_text(renewed(TABLE.read_text(), BEGIN, table))


def main() -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_command = commands.add_parser("run")
    run_command.add_argument("--data-dir", type=Path)
    run_command.add_argument("--runs", type=Path, required=True)
    run_command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run_command.add_argument("--steps", type=int, nargs="+", default=STEPS)
    run_command.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    run_command.add_argument("--width", type=int, default=16)
    run_command.add_argument("--shrink", type=int, default=2)
    commands.add_parser("report")
    given = parser.parse_args()
    if given.command == "report":
        report()
    else:
        train_missing(given)


if __name__ == "__main__":
    sys.exit(main())
