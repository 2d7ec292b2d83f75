"""Measure accuracy against epsilon under client-level differential privacy, and compare accountants.

    python results/privacy.py accuracy --data-dir DIR [--seeds 0 1 ...] [--table results/privacy]
    python results/privacy.py accountants

accuracy: FedDure, and FedAvg on labeled images only. DIR contains `fashion_mnist/`. A finished run is a line of `--records`
(JSON), and does not run again, so the script can be stopped at any time. With `--table` it writes PATH.csv, and the table
of PATH.md, after every run; a missing cell is "-".

accountants: epsilon of the same rounds by each accountant of dp-accounting, and by halfmoon. "Renyi" was used for
everything before: RdpAccountant, for cohorts of k of n drawn without replacement. "PLD" is PLDAccountant for the sampling
that it knows: whole cohorts. "PLD, Poisson" is a different sampling, k / n for each client, only for comparison: halfmoon
does not draw such cohorts.
"""

import argparse
import csv
import io
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from halfmoon.aggregation.privacy.accounting import ORDERS, compute_planned_epsilon
from halfmoon.config.schema import Config
from halfmoon.runs import runner

METHODS = ("feddure", "fedavg")
CLIP_ONLY = 1e-6
"""Negligible noise, to measure the effect of clipping and of equal weights."""
NOISES = (None, CLIP_ONLY, 2.0, 4.0, 8.0)
COMMON: dict[str, Any] = {
    "data": "fashion_mnist", "shrink": 2, "clients": 1000, "cohort": 100, "setting": "iid-iid", "labels_per_class": 1.0,
    "network": "small", "width": 4, "norm": "group", "lr": 5e-3, "labeled_batch": 10, "unlabeled_batch": 10,
    "labeled_view": "weak", "steps": 5, "rounds": 40, "schedule": "constant", "evaluate_every": 10,
    "checkpoint_every": 40, "executor": "vmap",
    "device": "cpu", "threads": 1, "dp_delta": 1e-5,
}  # fmt: skip
CLIP = 0.5

FIELDS = ("method", "noise", "epsilon", "seeds", "last", "last_sd", "best", "best_sd")


class PrivacyCell(NamedTuple):
    """One run; without `noise` updates are not clipped."""

    seed: int
    method: str
    noise: float | None


def cells(seeds: list[int]) -> Iterator[PrivacyCell]:
    """Yield all runs, seed by seed."""
    for seed in seeds:
        for method in reversed(METHODS):  # the fast one first
            for noise in (None, 4.0, 2.0, 8.0, CLIP_ONLY):  # the most informative runs first
                yield PrivacyCell(seed, method, noise)


def run_cell(cell: PrivacyCell, data: Path, cache: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Run a cell, and return its record; `more` are other options."""
    start = time.process_time()
    private = {} if cell.noise is None else {"dp_clip": CLIP, "dp_noise": cell.noise}
    options = {**COMMON, "method": cell.method, "seed": cell.seed, "split_seed": cell.seed, **private, **more}
    with tempfile.TemporaryDirectory() as folder:
        summary = runner.run_in_folder(Config(**options, data_dir=data, cache=cache), Path(folder) / "run")
    epsilon = (summary.get("aggregation") or {}).get("epsilon")
    seconds = round(time.process_time() - start, 1)
    return {**cell._asdict(), "epsilon": epsilon, **summary["accuracy"], **more, "seconds": seconds}


def build_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of `FIELDS` for each method and noise with at least one finished seed."""
    out: list[dict[str, Any]] = []
    for method in METHODS:
        for noise in NOISES:
            each = [row for row in rows if (row["method"], row["noise"]) == (method, noise)]
            if not each:
                continue
            epsilon = each[0]["epsilon"] if noise not in (None, CLIP_ONLY) else None
            line: dict[str, Any] = {"method": method, "noise": noise, "epsilon": epsilon and round(epsilon, 2)}
            line["seeds"] = len(each)
            for name in ("last", "best"):
                values = [100 * row[name] for row in each]
                line[name] = round(statistics.mean(values), 2)
                line[f"{name}_sd"] = round(statistics.stdev(values), 2) if len(values) > 1 else None
            out.append(line)
    return out


def format_table(rows: list[dict[str, Any]]) -> str:
    """Format the table as Markdown."""
    lines = ["| noise | epsilon | seeds | " + " | ".join(METHODS) + " |", "|---" * (3 + len(METHODS)) + "|"]
    cells_by_noise = build_table(rows)
    for noise in NOISES:
        by_method = {line["method"]: line for line in cells_by_noise if line["noise"] == noise}
        one = next(iter(by_method.values()), {"epsilon": None, "seeds": 0})
        name = "no privacy" if noise is None else "0 (only clipped)" if noise == CLIP_ONLY else f"{noise:g}"
        epsilon = "-" if one["epsilon"] is None else f"{one['epsilon']:.2f}"
        each = [format_cell(by_method.get(method)) for method in METHODS]
        lines.append(f"| {name} | {epsilon} | {one['seeds']} | " + " | ".join(each) + " |")
    return "\n".join([*lines, ""])


def format_cell(line: dict[str, Any] | None) -> str:
    """Format a cell: last / best accuracy."""
    if line is None:
        return "-"
    spread = [f" ± {line[f'{name}_sd']:.1f}" if line[f"{name}_sd"] is not None else "" for name in ("last", "best")]
    return f"{line['last']:.1f}{spread[0]} / {line['best']:.1f}{spread[1]}"


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """Write PATH.csv, and into PATH.md, after its heading "## Table", the table."""
    text = io.StringIO()
    out = csv.DictWriter(text, FIELDS, lineterminator="\n")
    out.writeheader()
    out.writerows(build_table(rows))
    path.with_suffix(".csv").write_text(text.getvalue())
    page = path.with_suffix(".md")
    head = page.read_text().split("## Table\n")[0] if page.exists() else "# Accuracy against epsilon\n\n"
    page.write_text(f"{head}## Table\n\n{format_table(rows)}")


def measure_accuracy(options: argparse.Namespace) -> None:
    """Run the cells that are not finished."""
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.records.read_text().splitlines()] if options.records.exists() else []
    finished = {PrivacyCell(row["seed"], row["method"], row["noise"]) for row in rows}
    with tempfile.TemporaryDirectory() as cache:
        for cell in cells(options.seeds):
            if cell not in finished:
                rows.append(run_cell(cell, options.data_dir, Path(cache), options.options))
                with options.records.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1], flush=True)
            if options.table:
                write_table(rows, options.table)


# Accountants

DELTA = 1e-5
REPLACE_ONE = NeighboringRelation.REPLACE_ONE
PLANS = ((10, 10, 8.0), (20, 20, 20.0), (100, 1000, 4.0), (100, 1000, 8.0), (40, 200, 8.0), (5, 20, 8.0))
"""Cohort, clients and noise."""
ROUNDS = (1, 10, 40, 200)


def compare_accountants(_: argparse.Namespace) -> None:
    """Print the table."""
    print("| cohort | noise | rounds | Renyi (before) | PLD | halfmoon (now) | PLD, Poisson |")
    print("| --- " * 7 + "|")
    for cohort, clients, noise in PLANS:
        for rounds in ROUNDS:
            # Replacing a client moves a sum by up to 2 C. The PLD accountant accounts for that itself if it samples
            # (its sensitivity is C, of adding or removing a client), and not for whole cohorts: there z / 2 does.
            plain = dp_event.GaussianDpEvent(noise / 2)
            event = plain
            exact = "-"
            poisson = "-"
            if cohort == clients:
                exact = f"{PLDAccountant().compose(plain, rounds).get_epsilon(DELTA):.3f}"
            else:
                event = dp_event.SampledWithoutReplacementDpEvent(clients, cohort, plain)
                coin = dp_event.PoissonSampledDpEvent(cohort / clients, dp_event.GaussianDpEvent(noise))
                poisson = f"{PLDAccountant(REPLACE_ONE).compose(coin, rounds).get_epsilon(DELTA):.3f}"
            before = RdpAccountant(ORDERS, REPLACE_ONE).compose(event, rounds).get_epsilon(DELTA)
            now = compute_planned_epsilon(cohort, clients, rounds, noise, DELTA)
            plan = f"| {cohort} of {clients:,} | {noise:g} | {rounds} "
            print(f"{plan}| {before:.3f} | {exact} | {now:.3f} | {poisson} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    accuracy = commands.add_parser("accuracy")
    accuracy.set_defaults(command=measure_accuracy)
    accuracy.add_argument("--data-dir", type=Path, required=True, help="the folder that contains fashion_mnist/")
    accuracy.add_argument("--seeds", type=int, nargs="+", default=[0])
    accuracy.add_argument("--records", type=Path, default=Path("privacy.jsonl"), help="finished runs, a line each")
    accuracy.add_argument("--table", type=Path, metavar="PATH", help="write PATH.md and PATH.csv")
    accuracy.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="other options of the runs")
    accountants = commands.add_parser("accountants")
    accountants.set_defaults(command=compare_accountants)
    options = parser.parse_args()
    options.command(options)


if __name__ == "__main__":
    main()
