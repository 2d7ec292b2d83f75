"""Accuracy against epsilon: FedDure and FedAvg on labels alone, under client-level differential privacy.

    python benchmarks/privacy.py --data-dir DIR [--seeds 0 1 ...] [--table results/privacy]

DIR holds `fashion_mnist/`. A finished run is a line of `--kept` (JSON), and is not played again: the benchmark can be
stopped anywhere. With `--table` it writes PATH.csv, and the table of PATH.md, after every run; what is missing is "-".
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

from halfmoon.config.schema import Config
from halfmoon.runs import runner

METHODS = ("feddure", "fedavg")
CLIP_ALONE = 1e-6
"""Noise that is none: what the clipping and the equal weights do by themselves."""
NOISES = (None, CLIP_ALONE, 2.0, 4.0, 8.0)
COMMON: dict[str, Any] = {
    "data": "fashion_mnist", "shrink": 2, "clients": 1000, "cohort": 100, "setting": "iid-iid", "labels_per_class": 1.0,
    "network": "small", "width": 4, "norm": "group", "lr": 5e-3, "labeled_batch": 10, "unlabeled_batch": 10,
    "labeled_view": "weak", "steps": 5, "rounds": 40, "schedule": "constant", "evaluate_every": 10,
    "checkpoint_every": 40, "executor": "vmap",
    "device": "cpu", "threads": 1, "dp_delta": 1e-5,
}  # fmt: skip
CLIP = 0.5

FIELDS = ("method", "noise", "epsilon", "seeds", "last", "last_sd", "best", "best_sd")


class Cell(NamedTuple):
    """One run; without `noise` nothing is clipped."""

    seed: int
    method: str
    noise: float | None


def cells(seeds: list[int]) -> Iterator[Cell]:
    """Yield all runs, seed by seed."""
    for seed in seeds:
        for method in reversed(METHODS):  # the quick one first
            for noise in (None, 4.0, 2.0, 8.0, CLIP_ALONE):  # a table that is cut off says the most in this order
                yield Cell(seed, method, noise)


def played(cell: Cell, data: Path, cache: Path, more: dict[str, Any]) -> dict[str, Any]:
    """Return what came of a run."""
    began = time.process_time()
    private = {} if cell.noise is None else {"dp_clip": CLIP, "dp_noise": cell.noise}
    own = {**COMMON, "method": cell.method, "seed": cell.seed, "split_seed": cell.seed, **private, **more}
    with tempfile.TemporaryDirectory() as folder:
        said = runner.run_in_folder(Config(**own, data_dir=data, cache=cache), Path(folder) / "run")
    epsilon = (said.get("aggregation") or {}).get("epsilon")
    seconds = round(time.process_time() - began, 1)
    return {**cell._asdict(), "epsilon": epsilon, **said["accuracy"], **more, "seconds": seconds}


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row of `FIELDS` for each method and noise that was played with one seed or more."""
    out: list[dict[str, Any]] = []
    for method in METHODS:
        for noise in NOISES:
            each = [row for row in rows if (row["method"], row["noise"]) == (method, noise)]
            if not each:
                continue
            said = each[0]["epsilon"] if noise not in (None, CLIP_ALONE) else None
            line: dict[str, Any] = {"method": method, "noise": noise, "epsilon": said and round(said, 2)}
            line["seeds"] = len(each)
            for name in ("last", "best"):
                values = [100 * row[name] for row in each]
                line[name] = round(statistics.mean(values), 2)
                line[f"{name}_sd"] = round(statistics.stdev(values), 2) if len(values) > 1 else None
            out.append(line)
    return out


def page(rows: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    words = ["| noise | epsilon | seeds | " + " | ".join(METHODS) + " |", "|---" * (3 + len(METHODS)) + "|"]
    lines = table(rows)
    for noise in NOISES:
        mine = {line["method"]: line for line in lines if line["noise"] == noise}
        one = next(iter(mine.values()), {"epsilon": None, "seeds": 0})
        name = "no privacy" if noise is None else "0 (clipped alone)" if noise == CLIP_ALONE else f"{noise:g}"
        epsilon = "-" if one["epsilon"] is None else f"{one['epsilon']:.2f}"
        each = [shown(mine.get(method)) for method in METHODS]
        words.append(f"| {name} | {epsilon} | {one['seeds']} | " + " | ".join(each) + " |")
    return "\n".join([*words, ""])


def shown(line: dict[str, Any] | None) -> str:
    """Return a cell of the page: last / best accuracy."""
    if line is None:
        return "-"
    spread = [f" ± {line[f'{name}_sd']:.1f}" if line[f"{name}_sd"] is not None else "" for name in ("last", "best")]
    return f"{line['last']:.1f}{spread[0]} / {line['best']:.1f}{spread[1]}"


def written(rows: list[dict[str, Any]], path: Path) -> None:
    """Write PATH.csv, and into PATH.md, after its heading "## Table", the table."""
    text = io.StringIO()
    out = csv.DictWriter(text, FIELDS, lineterminator="\n")
    out.writeheader()
    out.writerows(table(rows))
    path.with_suffix(".csv").write_text(text.getvalue())
    there = path.with_suffix(".md")
    head = there.read_text().split("## Table\n")[0] if there.exists() else "# Accuracy against epsilon\n\n"
    there.write_text(f"{head}## Table\n\n{page(rows)}")


def main() -> None:
    """Play what is not finished."""
    parser = argparse.ArgumentParser(description="Accuracy against epsilon under client-level differential privacy.")
    parser.add_argument("--data-dir", type=Path, required=True, help="the folder that has fashion_mnist/")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--kept", type=Path, default=Path("privacy.jsonl"), help="finished runs, a line each")
    parser.add_argument("--table", type=Path, help="write PATH.md and PATH.csv")
    parser.add_argument("--trial", type=json.loads, default={}, metavar="JSON", help="other options, for a first look")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in options.kept.read_text().splitlines()] if options.kept.exists() else []
    done = {Cell(row["seed"], row["method"], row["noise"]) for row in rows}
    with tempfile.TemporaryDirectory() as cache:
        for cell in cells(options.seeds):
            if cell not in done:
                rows.append(played(cell, options.data_dir, Path(cache), options.trial))
                with options.kept.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
                print(rows[-1], flush=True)
            if options.table:
                written(rows, options.table)


if __name__ == "__main__":
    main()
