"""Measure accuracy with hostile clients, by attack, share of hostile clients, aggregation and method.

    python results/robust.py attacks --data-dir DIR [--seeds 0 1 ...] [--table results/robust]
    python results/robust.py false-counts [--seeds 0 1 2] [--out results/false_counts.md]

attacks: five attacks against five rules of aggregation on Fashion-MNIST. DIR contains `fashion_mnist/`. Ten clients train in
every round, so the shares of hostile ones are exact. A finished cell is a line of `--records` (JSON), and does not run
again, so the script can be stopped at any time. With `--table` it writes PATH.md and PATH.csv after every cell, missing
cells as "-".

false-counts: clients that report a million times their number of images, alone and with flipped signs, against every rule,
with and without the cap on weights that a federation's server has by default. The embedded digits, ten clients that all
train in every round, of which a share of `FALSE_COUNTERS` attack. A cell is test accuracy in percent after the last round,
mean and standard deviation over the seeds.
"""

import argparse
import csv
import io
import json
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from halfmoon.aggregation.attacks import Attack
from halfmoon.aggregation.weights import FACTOR
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.runs import runner

METHODS = ("feddure", "fedavg-fixmatch")
SHARES = (0.2, 0.3, 0.1)
RULES = ("mean", "clip", "median", "trimmed", "krum")
COMMON: dict[str, Any] = {
    "data": "fashion_mnist", "shrink": 2, "data_share": 0.1, "clients": 10, "cohort": 10, "setting": "iid-dir",
    "dirichlet_alpha": 0.5, "labels_per_class": 5.0, "network": "small", "width": 8, "lr": 5e-3, "labeled_batch": 20,
    "unlabeled_batch": 10, "labeled_view": "weak", "steps": 6, "rounds": 6, "schedule": "constant", "evaluate_every": 3,
    "checkpoint_every": 6, "byzantine": 0.3, "executor": "vmap", "device": "cpu", "threads": 1,
}  # fmt: skip
"""The options of all cells: the server expects three hostile clients of ten, whatever their number is."""

FIELDS: list[str] = [
    "method", "attack", "attackers", "aggregation", "seeds", "last", "last_sd", "best", "best_sd", "stopped"
]  # fmt: skip


class RobustCell(NamedTuple):
    """One run."""

    seed: int
    method: str
    attack: str
    attackers: float
    aggregation: str


def cells(seeds: list[int]) -> Iterator[RobustCell]:
    """Yield all cells in the order in which they run: seed by seed, share by share, the fast method first."""
    for seed in seeds:
        for shares in ((0.0, SHARES[0]), *((share,) for share in SHARES[1:])):
            for method in reversed(METHODS):
                kinds = [(share, attack) for share in shares for attack in (get_args(Attack) if share else ("none",))]
                yield from (RobustCell(seed, method, attack, share, rule) for share, attack in kinds for rule in RULES)


def run_cell(cell: RobustCell, data: Path, cache: Path) -> dict[str, Any]:
    """Run a cell; return its accuracies, or the message of the error that stopped it."""
    start = time.process_time()
    options: dict[str, Any] = {**cell._asdict(), "split_seed": cell.seed}
    config = Config(**COMMON, **options, data_dir=data, cache=cache)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result: dict[str, Any] = runner.run_in_folder(config, Path(folder) / "run")["accuracy"]
        except UserError as error:
            result = {"stopped": str(error)}
    return {**cell._asdict(), **result, "seconds": round(time.process_time() - start, 1)}


def build_table(rows: list[dict[str, Any]], method: str | None = None) -> list[dict[str, Any]]:
    """Return a row of `FIELDS` for each kind of cell with at least one finished seed."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["attack"], row["attackers"], row["aggregation"]), []).append(row)
    out: list[dict[str, Any]] = []
    for key, each in groups.items():
        completed = [row for row in each if "last" in row]
        line: dict[str, Any] = dict(zip(FIELDS, key, strict=False)) | {"seeds": len(each)}
        line["stopped"] = len(each) - len(completed)
        for name in ("last", "best"):
            values = [100 * row[name] for row in completed]
            line[name] = round(statistics.mean(values), 2) if values else None
            line[f"{name}_sd"] = round(statistics.stdev(values), 2) if len(values) > 1 else None
        out.append(line)
    return [line for line in out if method in (None, line["method"])]


def format_cell(line: dict[str, Any] | None) -> str:
    """Format a cell: last / best accuracy."""
    if line is None:
        return "-"
    if line["last"] is None:
        return "stopped"
    spread = [f" ± {line[f'{name}_sd']:.1f}" if line[f"{name}_sd"] is not None else "" for name in ("last", "best")]
    return f"{line['last']:.1f}{spread[0]} / {line['best']:.1f}{spread[1]}"


def format_tables(rows: list[dict[str, Any]]) -> str:
    """Format the tables as Markdown, one for each method."""
    text: list[str] = []
    for method in METHODS:
        lines = {(x["attack"], x["attackers"], x["aggregation"]): x for x in build_table(rows, method)}
        text += [f"## {method}", "", "| attack | hostile | " + " | ".join(RULES) + " |", "|---" * 7 + "|"]
        for attack in ("none", *get_args(Attack)):
            for share in (0.0,) if attack == "none" else sorted(SHARES):
                each = [format_cell(lines.get((attack, share, rule))) for rule in RULES]
                text.append(f"| {attack} | {share:.0%} | " + " | ".join(each) + " |")
        text.append("")
    return "\n".join(text)


def write_tables(rows: list[dict[str, Any]], path: Path) -> None:
    """Write PATH.csv, and replace the tables of PATH.md, from its first heading of a method on."""
    text = io.StringIO()
    out = csv.DictWriter(text, FIELDS, lineterminator="\n")
    out.writeheader()
    out.writerows(build_table(rows))
    path.with_suffix(".csv").write_text(text.getvalue())
    page = path.with_suffix(".md")
    head = page.read_text().split(f"## {METHODS[0]}")[0] if page.exists() else "# Hostile clients\n\n"
    page.write_text(head + format_tables(rows))


def measure_attacks(options: argparse.Namespace) -> None:
    """Run the cells that are not finished."""
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.records.read_text().splitlines()] if options.records.exists() else []
    finished = {RobustCell(*(row[name] for name in RobustCell._fields)) for row in rows}
    with tempfile.TemporaryDirectory() as cache:
        for cell in cells(options.seeds):
            if cell in finished or (options.clean and (cell.attack, cell.aggregation) != ("none", "mean")):
                continue
            rows.append(run_cell(cell, options.data_dir, Path(cache)))
            with options.records.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
            if options.table:
                write_tables(rows, options.table)
    if options.table:
        write_tables(rows, options.table)


# False counts

COUNT_ATTACKS = ("none", "sign-flip", "false-counts", "sign-flip-false-counts")
FALSE_COUNTERS = 0.1
"""Share of hostile clients."""
COUNT_OPTIONS: dict[str, Any] = {
    "data": "digits", "method": "fedavg-fixmatch", "clients": 10, "cohort": 10, "setting": "iid-dir",
    "dirichlet_alpha": 0.5, "labels_per_class": 4.0, "network": "small", "width": 6, "lr": 5e-3, "labeled_batch": 20,
    "unlabeled_batch": 20, "steps": 8, "rounds": 10, "evaluate_every": 10, "checkpoint_every": 10, "byzantine": 0.2,
    "executor": "loop", "device": "cpu", "threads": 1,
}  # fmt: skip


def run_counts(seed: int, attack: str, rule: str, cap: float) -> float | None:
    """Return the test accuracy in percent after the last round; None if an error stopped the run."""
    options = {"seed": seed, "split_seed": seed, "attack": attack, "aggregation": rule, "weight_cap": cap}
    share = 0.0 if attack == "none" else FALSE_COUNTERS
    config = Config(**COUNT_OPTIONS, **options, attackers=share)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        try:
            return 100 * runner.run_in_folder(config, Path(folder) / "run")["accuracy"]["last"]
        except UserError:
            return None


def format_accuracies(values: list[float | None]) -> str:
    """Format a cell: mean and standard deviation, or "stopped"."""
    completed = [value for value in values if value is not None]
    if len(completed) < len(values):
        return "stopped"
    return f"{statistics.mean(completed):.1f} ± {statistics.stdev(completed) if len(completed) > 1 else 0:.1f}"


def measure_counts(options: argparse.Namespace) -> None:
    """Run all cells, and write the page after each row."""
    head = [
        "# False counts", "",
        "A client that reports a false number of images dominates a mean unless weights are capped. The table compares every",
        "rule of aggregation without a cap and with the cap that a server has by default.", "",
        "    python results/robust.py false-counts --seeds " + " ".join(map(str, options.seeds)), "",
        "FedAvg + FixMatch on the embedded digits, ten clients of which one is hostile, ten short rounds. `false-counts`",
        "reports 10^6 times its images; `sign-flip-false-counts` also flips the sign of its update. `weight_cap`",
        f"{FACTOR:g} is the default of `halfmoon serve`; 0 is no cap. Cells are test accuracy in percent, mean ± standard",
        f"deviation over {len(options.seeds)} seeds. With three seeds, differences of a few points are noise.", "",
        "| aggregation | weight_cap | " + " | ".join(COUNT_ATTACKS) + " |", "| --- | --- |" + " --- |" * len(COUNT_ATTACKS),
    ]  # fmt: skip
    page = options.out.read_text() if options.out.exists() else ""
    *_, below = re.split(r"^\|.*\n", page, flags=re.MULTILINE)  # the conclusions, which are written by hand
    rows: list[str] = []
    for rule in RULES:
        for cap in (0.0, FACTOR):
            results = [[run_counts(seed, attack, rule, cap) for seed in options.seeds] for attack in COUNT_ATTACKS]
            rows.append(f"| `{rule}` | {cap:g} | " + " | ".join(map(format_accuracies, results)) + " |")
            options.out.write_text("\n".join([*head, *rows]) + "\n" + below)
            print(rows[-1], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    attacks = commands.add_parser("attacks")
    attacks.set_defaults(measure=measure_attacks)
    attacks.add_argument("--data-dir", type=Path, required=True, help="the folder that contains fashion_mnist/")
    attacks.add_argument("--seeds", type=int, nargs="+", default=[0])
    attacks.add_argument("--records", type=Path, default=Path("robust.jsonl"), help="finished cells, a line each")
    attacks.add_argument("--table", type=Path, metavar="PATH", help="write PATH.md and PATH.csv")
    attacks.add_argument("--clean", action="store_true", help="only cells without an attack, under the mean")
    counts = commands.add_parser("false-counts")
    counts.set_defaults(measure=measure_counts)
    counts.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    counts.add_argument("--out", type=Path, default=Path("results/false_counts.md"))
    options = parser.parse_args()
    options.measure(options)


if __name__ == "__main__":
    main()
