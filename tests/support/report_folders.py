"""Write sweeps and run folders with made-up numbers, without training, for the tests of reports."""

import json
import math
from pathlib import Path
from typing import Any

from halfmoon.storage import integrity

METHODS = {"fedavg": "FedAvg (labeled only)", "fixmatch": "FedAvg + FixMatch", "feddure": "FedDure"}
ROUNDS = 12


def compute_accuracy(method: int, seed: int, number: int) -> float:
    """Return an accuracy that grows with the round and with the index of the method."""
    # A curve that saturates: after 12 rounds, exp(-3) = 5 % of the gain are missing.
    return round((0.55 + 0.08 * method) * (1 - math.exp(-number / 4)) + 0.01 * seed + 0.1, 6)


def format_metrics(method: int, seed: int, rounds: int, classes: int, *, prior: bool = True, steps: int = 5) -> str:
    """Return the text of metrics.jsonl: an evaluation every second round, and no pseudo-labels for method 0."""
    lines = []
    for number in range(1, rounds + 1):
        accuracy = compute_accuracy(method, seed, number)
        pseudo = None
        if method:
            pseudo = {"accuracy": 0.9 * accuracy, "share_above": 0.05 * number, "accuracy_above": None}
            pseudo |= {"share_used": 0.04 * number}
            if number > 3:  # None before, which every reader of metrics has to accept
                pseudo["accuracy_above"] = min(1.0, accuracy + 0.1)
        cost = {"labeled_steps": steps * number, "forward": 100 * (1 + method) * number}
        cost |= {"bytes_down": 1_000_000 * number, "bytes_up": 500_000 * number}
        row: dict[str, Any] = {"round": number, "cohort": [0, 1], "train": {}, "pseudo": pseudo, "cost": cost}
        if number % 2 == 0:
            per_class = [round(accuracy * (0.6 + 0.8 * c / max(1, classes - 1)), 6) for c in range(classes)]
            row["test"] = {"accuracy": accuracy, "loss": 1.0, "per_class": per_class}
            if prior:
                uniform = [round(1 / classes, 6)] * classes
                shares = [round(value / sum(per_class), 6) for value in per_class]
                row["prior"] = {"app_u": shares, "labeled": uniform, "unlabeled": uniform, "accuracy": shares}
                row["prior"] |= {"js_app_u": 0.2 / number, "js_labeled": 0.1 + 0.01 * method}
        lines.append(json.dumps(row) + "\n")
    return "".join(lines)


def make_split_summary(clients: int, names: list[str], shift: int = 0, server: bool = False) -> dict[str, Any]:
    """Return the content of split.json.

    Client k has (k + c + shift) % 4 labeled images of class c and ten times as many unlabeled ones.
    """
    client_entries = []
    for k in range(clients):
        labeled = [(k + c + shift) % 4 for c in range(len(names))]
        client_entries.append({"labeled_classes": labeled, "unlabeled_classes": [10 * n for n in labeled]})
    total = sum(sum(client["labeled_classes"]) for client in client_entries)
    counts = {"labeled": total, "unlabeled": 10 * total, "clients": clients, "classes": names}
    server_counts = {"labeled": len(names), "labeled_classes": [1] * len(names)} if server else None
    return {"counts": counts, "server": server_counts, "each": client_entries}


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
    """Write a run folder and return its summary; without `extras` as an older version did."""
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
        # Of 100 images a class, 20 are taken for the next class: no row or column is empty, and it is not symmetric.
        matrix = [[80 if t == p else 20 if p == (t + 1) % size else 0 for p in range(size)] for t in range(size)]
        summary |= {"classes": names, "confusion": matrix}
        (path / "split.json").write_text(json.dumps(split or make_split_summary(4, names)))
    if finished:
        (path / "summary.json").write_text(json.dumps(summary))
        record_checksums(path)
    return summary


def record_checksums(path: Path) -> None:
    """Record the checksums of a run's files again, after a test has changed them."""
    integrity.record_files(path, "config.toml", "metrics.jsonl", "summary.json", "split.json")


def make_sweep(**changes: Any) -> dict[str, Any]:
    """Return the content of sweep.json without cells. Rows are methods, columns are settings."""
    result: dict[str, Any] = {
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
    return result | changes


def make_run_entry(summary: dict[str, Any], folder: str = "", identity: str = "") -> dict[str, Any]:
    """Return the entry of a finished run in sweep.json."""
    entry = {key: summary[key] for key in ("seed", "accuracy", "cost", "seconds")}
    return entry | {"identity": identity, "folder": folder, "finished": True, "failed": None}


def write_sweep(root: Path, seeds: int = 2, **changes: Any) -> Path:
    """Write a sweep with all cells and run folders. Only its second column has published numbers."""
    sweep = make_sweep(**changes)
    names = [str(name) for name in changes.get("names", ["cat", "dog", "ship"])]
    sweep.pop("names", None)
    for s, setting in enumerate(("iid-iid", "dir-dir")):
        for m, method in enumerate(METHODS):
            runs = []
            for seed in range(seeds):
                folder = f"cells/{setting}-{method}-{seed}"
                summary = write_run(root / folder, m, seed, names=names, split=make_split_summary(4, names, shift=s))
                runs.append(make_run_entry(summary, f"../{folder}"))
            published = {"mean": 60.0 + 10 * m, "deviation": 1.0 if m else None, "note": ""} if s else None
            sweep["cells"].append({"at": {"setting": setting, "method": method}, "published": published, "runs": runs})
    return write_sweep_file(root / "toy-table1-small", sweep)


def write_line_sweep(root: Path) -> Path:
    """Write a sweep of kind "lines" over three concentrations. Only FedDure has published numbers."""
    alphas = ("1.0", "0.5", "0.1")
    sweep = make_sweep(
        kind="lines", x="dirichlet_alpha", columns=["dirichlet_alpha"], scale=None, title="Toy, Figure 2"
    )
    sweep["axes"][0] = {"name": "dirichlet_alpha", "values": [{"name": name, "title": name} for name in alphas]}
    for index, name in enumerate(alphas):
        for m, method in enumerate(METHODS):
            summary = write_run(root / "more" / f"{index}{m}", m, index, extras=False, steps=5 if m else 10)
            published = {"mean": 62.0, "deviation": 1.0} if m == 2 else None  # 2 is FedDure
            at = {"dirichlet_alpha": name, "method": method}
            sweep["cells"].append(
                {"at": at, "published": published, "runs": [make_run_entry(summary, f"../more/{index}{m}")]}
            )
    return write_sweep_file(root / "lines", sweep)


def write_sweep_file(folder: Path, sweep: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sweep.json").write_text(json.dumps(sweep))
    return folder


def read_sweep_file(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sweep.json").read_text())
