"""Hostile clients against robust aggregation: accuracy by attack, share of hostile clients, rule and method.

    python benchmarks/robust.py --data-dir DIR [--seeds 0 1 ...] [--table results/robust]

DIR holds `fashion_mnist/`. Ten clients train in every round, so that the shares of hostile ones are exact. A finished
cell is a line of `--kept` (JSON), and is not played again: the benchmark can be stopped anywhere. With `--table` it
writes PATH.md and PATH.csv of what is finished after every cell, missing cells as "-".
"""

import argparse
import csv
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from halfmoon.aggregation.attacks import Attack
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
"""What all cells share: the server expects three hostile clients of ten, whatever comes."""

FIELDS: list[str] = [
    "method", "attack", "attackers", "aggregation", "seeds", "last", "last_sd", "best", "best_sd", "stopped"
]  # fmt: skip


class Cell(NamedTuple):
    """One run."""

    seed: int
    method: str
    attack: str
    attackers: float
    aggregation: str


def cells(seeds: list[int]) -> Iterator[Cell]:
    """Yield all cells in the order in which they are played: seed by seed, share by share, the fast method first."""
    for seed in seeds:
        for shares in ((0.0, SHARES[0]), *((share,) for share in SHARES[1:])):
            for method in reversed(METHODS):
                kinds = [(share, attack) for share in shares for attack in (get_args(Attack) if share else ("none",))]
                yield from (Cell(seed, method, attack, share, rule) for share, attack in kinds for rule in RULES)


def played(cell: Cell, data: Path, cache: Path) -> dict[str, Any]:
    """Return what came of a cell: its accuracies, or the sentence by which its run was stopped."""
    began = time.process_time()
    own: dict[str, Any] = {**cell._asdict(), "split_seed": cell.seed}
    config = Config(**COMMON, **own, data_dir=data, cache=cache)
    with tempfile.TemporaryDirectory() as folder:
        try:
            said: dict[str, Any] = runner.run_in_folder(config, Path(folder) / "run")["accuracy"]
        except UserError as error:
            said = {"stopped": str(error)}
    return {**cell._asdict(), **said, "seconds": round(time.process_time() - began, 1)}


def table(rows: list[dict[str, Any]], method: str | None = None) -> list[dict[str, Any]]:
    """Return a row of `FIELDS` for each kind of cell that is finished with one seed or more."""
    found: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["method"], row["attack"], row["attackers"], row["aggregation"]), []).append(row)
    out: list[dict[str, Any]] = []
    for key, each in found.items():
        through = [row for row in each if "last" in row]
        line: dict[str, Any] = dict(zip(FIELDS, key, strict=False)) | {"seeds": len(each)}
        line["stopped"] = len(each) - len(through)
        for name in ("last", "best"):
            values = [100 * row[name] for row in through]
            line[name] = round(statistics.mean(values), 2) if values else None
            line[f"{name}_sd"] = round(statistics.stdev(values), 2) if len(values) > 1 else None
        out.append(line)
    return [line for line in out if method in (None, line["method"])]


def shown(line: dict[str, Any] | None) -> str:
    """Return a cell of the page: last / best accuracy."""
    if line is None:
        return "-"
    if line["last"] is None:
        return "stopped"
    spread = [f" ± {line[f'{name}_sd']:.1f}" if line[f"{name}_sd"] is not None else "" for name in ("last", "best")]
    return f"{line['last']:.1f}{spread[0]} / {line['best']:.1f}{spread[1]}"


def page(rows: list[dict[str, Any]]) -> str:
    """Return the tables as Markdown, one a method."""
    words: list[str] = []
    for method in METHODS:
        lines = {(x["attack"], x["attackers"], x["aggregation"]): x for x in table(rows, method)}
        words += [f"## {method}", "", "| attack | hostile | " + " | ".join(RULES) + " |", "|---" * 7 + "|"]
        for attack in ("none", *get_args(Attack)):
            for share in (0.0,) if attack == "none" else sorted(SHARES):
                each = [shown(lines.get((attack, share, rule))) for rule in RULES]
                words.append(f"| {attack} | {share:.0%} | " + " | ".join(each) + " |")
        words.append("")
    return "\n".join(words)


def written(rows: list[dict[str, Any]], path: Path) -> None:
    """Write PATH.csv, and into PATH.md, from its first heading of a method on, the tables."""
    text = io.StringIO()
    out = csv.DictWriter(text, FIELDS, lineterminator="\n")
    out.writeheader()
    out.writerows(table(rows))
    path.with_suffix(".csv").write_text(text.getvalue())
    there = path.with_suffix(".md")
    head = there.read_text().split(f"## {METHODS[0]}")[0] if there.exists() else "# Hostile clients\n\n"
    there.write_text(head + page(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Play attacks against rules of aggregation.")
    parser.add_argument("--data-dir", type=Path, required=True, help="the folder that has fashion_mnist/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kept", type=Path, default=Path("robust.jsonl"), help="finished cells, a line each")
    parser.add_argument("--table", type=Path, help="write PATH.md and PATH.csv")
    parser.add_argument("--clean", action="store_true", help="play the cells without an attack under the mean alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.kept.read_text().splitlines()] if options.kept.exists() else []
    done = {Cell(*(row[name] for name in Cell._fields)) for row in rows}
    with tempfile.TemporaryDirectory() as cache:
        for cell in cells(options.seeds):
            if cell in done or (options.clean and (cell.attack, cell.aggregation) != ("none", "mean")):
                continue
            rows.append(played(cell, options.data_dir, Path(cache)))
            with options.kept.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            sys.stdout.write(f"{rows[-1]}\n")
            sys.stdout.flush()
            if options.table:
                written(rows, options.table)
    if options.table:
        written(rows, options.table)


if __name__ == "__main__":
    main()
