"""Sweeps and run folders as the library leaves them, with numbers from formulas, for the tests of the reports."""

import json
import math
from pathlib import Path
from typing import Any

from halfmoon.storage import integrity

METHODS = {"fedavg": "FedAvg (labeled only)", "fixmatch": "FedAvg + FixMatch", "feddure": "FedDure"}
ROUNDS = 12


def compute_accuracy(method: int, seed: int, number: int) -> float:
    """A share that grows with the number of the round and of the method."""
    return round((0.55 + 0.08 * method) * (1 - math.exp(-number / 4)) + 0.01 * seed + 0.1, 6)


def format_metrics(method: int, seed: int, rounds: int, classes: int, *, prior: bool = True, steps: int = 5) -> str:
    """Return metrics.jsonl: an evaluation every second round; method 0 makes no pseudo-labels."""
    lines = []
    for number in range(1, rounds + 1):
        accuracy = compute_accuracy(method, seed, number)
        pseudo = None
        if method:
            pseudo = {"accuracy": 0.9 * accuracy, "share_above": 0.05 * number, "accuracy_above": None}
            pseudo |= {"share_used": 0.04 * number}
            if number > 3:
                pseudo["accuracy_above"] = min(1.0, accuracy + 0.1)
        cost = {"labeled_steps": steps * number, "forward": 100 * (1 + method) * number}
        cost |= {"bytes_down": 1_000_000 * number, "bytes_up": 500_000 * number}
        row: dict[str, Any] = {"round": number, "cohort": [0, 1], "train": {}, "pseudo": pseudo, "cost": cost}
        if number % 2 == 0:
            each = [round(accuracy * (0.6 + 0.8 * c / max(1, classes - 1)), 6) for c in range(classes)]
            row["test"] = {"accuracy": accuracy, "loss": 1.0, "per_class": each}
            if prior:
                flat = [round(1 / classes, 6)] * classes
                shares = [round(value / sum(each), 6) for value in each]
                row["prior"] = {"app_u": shares, "labeled": flat, "unlabeled": flat, "accuracy": shares}
                row["prior"] |= {"js_app_u": 0.2 / number, "js_labeled": 0.1 + 0.01 * method}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def make_split_summary(clients: int, names: list[str], shift: int = 0, server: bool = False) -> dict[str, Any]:
    """Return a split.json: client k has (k + c + shift) % 4 labeled of class c, and ten times as many unlabeled."""
    each = []
    for k in range(clients):
        labeled = [(k + c + shift) % 4 for c in range(len(names))]
        each.append({"labeled_classes": labeled, "unlabeled_classes": [10 * n for n in labeled]})
    total = sum(sum(one["labeled_classes"]) for one in each)
    counts = {"labeled": total, "unlabeled": 10 * total, "clients": clients, "classes": names}
    held = {"labeled": len(names), "labeled_classes": [1] * len(names)} if server else None
    return {"counts": counts, "server": held, "each": each}


def write_run(
    path: Path,
    method: int,
    seed: int,
    *,
    names: list[str] | None = None,
    title: str = "",
    finished: bool = True,
    extras: bool = True,
    split: dict[str, Any] | None = None,
    steps: int = 5,
    config: str = "",
    data: str = "digits",
) -> dict[str, Any]:
    """Write a run folder and return its summary; without `extras` it is one of an older version."""
    names = names or ["cat", "dog", "ship"]
    key = list(METHODS)[method]
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"identity": f"id-{key}-{seed}-{config}", "halfmoon": "0.1.0"}))
    (path / "config.toml").write_text(f'method = "{key}"\ndata = "{data}"\nseed = {seed}\n{config}')
    (path / "metrics.jsonl").write_text(format_metrics(method, seed, ROUNDS, len(names), prior=extras, steps=steps))
    (path / "timings.jsonl").write_text("".join(f'{{"round": {r}, "seconds": 0.5}}\n' for r in range(1, ROUNDS + 1)))
    last = compute_accuracy(method, seed, ROUNDS)
    cost = {"labeled_steps": steps * ROUNDS, "labeled_images": 10, "unlabeled_images": 20}
    cost |= {"forward": 100 * (1 + method) * ROUNDS, "backward": 10}
    cost |= {"bytes_down": 1_000_000 * ROUNDS, "bytes_up": 500_000 * ROUNDS}
    summary: dict[str, Any] = {"method": key, "title": title or METHODS[key], "seed": seed, "cost": cost}
    summary |= {"accuracy": {"last": last, "best": last, "best_round": ROUNDS}, "seconds": 0.5 * ROUNDS}
    if extras:
        size = len(names)
        matrix = [[80 if t == p else 20 if p == (t + 1) % size else 0 for p in range(size)] for t in range(size)]
        summary |= {"classes": names, "confusion": matrix}
        (path / "split.json").write_text(json.dumps(split or make_split_summary(4, names)))
    if finished:
        (path / "summary.json").write_text(json.dumps(summary))
        record_checksums(path)
    return summary


def record_checksums(path: Path) -> None:
    integrity.record_files(path, "config.toml", "metrics.jsonl", "summary.json", "split.json")


def make_sweep(**changes: Any) -> dict[str, Any]:
    """Return a sweep.json without cells: rows are methods, columns settings."""
    made: dict[str, Any] = {
        "format": 1,
        "recipe": "toy-table1",
        "title": "Toy, Table 1",
        "paper": "Toy",
        "item": "Table 1",
        "about": "Three methods on two settings.",
        "reading": "",
        "scale": {"name": "small", "about": "12 of 200 rounds: not the paper's experiment"},
        "kind": "table",
        "rows": "method",
        "columns": ["setting"],
        "x": None,
        "axes": [
            {"name": "setting", "values": [{"name": n, "title": n.upper()} for n in ("iid-iid", "dir-dir")]},
            {"name": "method", "values": [{"name": n, "title": title} for n, title in METHODS.items()]},
        ],
        "command": "halfmoon sweep toy-table1 --scale small",
        "machine": {"cpu": "a processor", "cores": 2, "gpu": None},
        "versions": {"halfmoon": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        "cells": [],
    }
    return made | changes


def make_run_entry(summary: dict[str, Any], folder: str = "", identity: str = "") -> dict[str, Any]:
    """Return the finished run of a cell as sweep.json says it."""
    kept = {key: summary[key] for key in ("seed", "accuracy", "cost", "seconds")}
    return kept | {"identity": identity, "folder": folder, "finished": True, "failed": None}


def write_sweep(root: Path, seeds: int = 2, **changes: Any) -> Path:
    """Write a sweep of all cells of `sweep()` with run folders, published numbers in its second column alone."""
    made = make_sweep(**changes)
    names = [str(name) for name in changes.get("names", ["cat", "dog", "ship"])]
    made.pop("names", None)
    for s, setting in enumerate(("iid-iid", "dir-dir")):
        for m, method in enumerate(METHODS):
            runs = []
            for seed in range(seeds):
                folder = f"cells/{setting}-{method}-{seed}"
                done = write_run(root / folder, m, seed, names=names, split=make_split_summary(4, names, shift=s))
                runs.append(make_run_entry(done, f"../{folder}"))
            published = {"mean": 60.0 + 10 * m, "deviation": 1.0 if m else None, "note": ""} if s else None
            made["cells"].append({"at": {"setting": setting, "method": method}, "published": published, "runs": runs})
    return write_sweep_file(root / "toy-table1-small", made)


def write_line_sweep(root: Path) -> Path:
    """Write a sweep of kind lines along three concentrations; FedDure alone has published numbers."""
    places = ("1.0", "0.5", "0.1")
    made = make_sweep(kind="lines", x="dirichlet_alpha", columns=["dirichlet_alpha"], scale=None, title="Toy, Figure 2")
    made["axes"][0] = {"name": "dirichlet_alpha", "values": [{"name": name, "title": name} for name in places]}
    for place, name in enumerate(places):
        for m, method in enumerate(METHODS):
            done = write_run(root / "more" / f"{place}{m}", m, place, extras=False, steps=5 if m else 10)
            published = {"mean": 62.0, "deviation": 1.0} if m == 2 else None
            at = {"dirichlet_alpha": name, "method": method}
            made["cells"].append(
                {"at": at, "published": published, "runs": [make_run_entry(done, f"../more/{place}{m}")]}
            )
    return write_sweep_file(root / "lines", made)


def write_sweep_file(folder: Path, made: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(made))
    return folder


def read_sweep_file(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sweep.json").read_text())
