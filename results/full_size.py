"""FedDure's Table 1 at full size: CIFAR-10, (DIR, DIR), one row and seed at a time; a run that was stopped is resumed.

    python results/full_size.py run fedavg --seed 0 --data-dir DATA --runs RUNS
    python results/full_size.py report --runs RUNS --device cpu

`run` trains on one thread in the folder RUNS/ROW-seedN; the same command after an interruption continues from the last
checkpoint. `report` writes full_size.csv (the test accuracy of each evaluated round), full_size_regulators.csv.gz (how well
FedDure's weights distinguish correct pseudo-labels, each round) and the tables of full_size.md.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

import records

import halfmoon

HERE = Path(__file__).parent
CURVES = HERE / "full_size.csv"
REGULATORS = HERE / "full_size_regulators.csv.gz"
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
    # Unlabeled images only pass through batch normalization (FixMatch whose threshold no confidence reaches).
    "control": {"method": "fedavg-control"},
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


def read_curves() -> list[dict[str, str]]:
    """Read the learning curves that are published, one entry for each evaluated round."""
    if not CURVES.exists():
        return []
    with CURVES.open(newline="") as file:
        return list(csv.DictReader(file))


def curve_of(folder: Path, device: str) -> list[dict[str, str]]:
    """Return the test accuracy of each evaluated round of a run folder named ROW-seedN."""
    row, _, seed = folder.name.rpartition("-seed")
    rounds = read_jsonl(folder / "metrics.jsonl")
    return [
        {
            "device": device,
            "row": row,
            "seed": seed,
            "round": str(line["round"]),
            "accuracy": f"{100 * line['test']['accuracy']:.2f}",
        }
        for line in rounds
        if "test" in line
    ]


def regulators_of(folder: Path, device: str) -> list[dict[str, str]]:
    """Return, for each round of a run of FedDure, how well weights and confidences distinguish correct pseudo-labels."""
    row, _, seed = folder.name.rpartition("-seed")
    entries = []
    for line in read_jsonl(folder / "metrics.jsonl"):
        pseudo_labels = line["pseudo"]
        if pseudo_labels.get("auc_weight") is None:
            continue
        values = {name: pseudo_labels[name] for name in ("accuracy", "auc_confidence", "auc_weight")}
        values |= {name: line["train"][name] for name in ("m", "m_spread", "d", "d_spread")}
        entry = {"device": device, "row": row, "seed": seed, "round": str(line["round"])}
        entries.append(entry | {name: f"{value:.4f}" for name, value in values.items()})
    return entries


def write_csv(path: Path, entries: list[dict[str, str]]) -> None:
    """Write entries with equal keys as a table."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(entries[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(entries)


def mean_between(curve: dict[int, float], first: int, last: int) -> float | None:
    """Return the mean accuracy of the evaluated rounds from first to last; None if the run stopped earlier."""
    if not curve or max(curve) < last:
        return None
    chosen = [accuracy for number, accuracy in curve.items() if first <= number <= last]
    return sum(chosen) / len(chosen)


def accuracy_table(entries: list[dict[str, str]]) -> str:
    """Return a table of the runs: the means of five evaluations at three stages, and the last evaluation."""
    runs: dict[tuple[str, str, str], dict[int, float]] = {}
    for entry in entries:
        key = (entry["device"], entry["row"], entry["seed"])
        runs.setdefault(key, {})[int(entry["round"])] = float(entry["accuracy"])
    stages = ((30, 50), (75, 95), (175, 195))
    table = "| device | method | seed | last round | accuracy there % |"
    table += "".join(f" rounds {first} to {last} % |" for first, last in stages)
    table += " published % (round 200) |\n|---|---|--:|--:|--:|" + "--:|" * len(stages) + "--:|\n"
    for device, row, seed in sorted(runs, key=lambda key: (key[0], list(ROWS).index(key[1]), key[2])):
        curve = runs[device, row, seed]
        means = [mean_between(curve, first, last) for first, last in stages]
        texts = ["" if mean is None else f"{mean:.1f}" for mean in means]
        table += f"| {device} | `{row}` | {seed} | {max(curve)} | {curve[max(curve)]:.1f} | "
        table += " | ".join(texts) + f" | {PUBLISHED.get(row, '')} |\n"
    return table


def regulator_table(entries: list[dict[str, str]]) -> str:
    """Return a table of FedDure's weights by thirds of the rounds that were trained: the mean over runs and rounds."""
    stages = ((1, 20), (21, 60), (61, 110))
    table = "| device | rounds | runs | correct pseudo-labels % | AUC of confidence | AUC of F-reg's weights | mean m |"
    table += " spread of m | mean d |\n|---|---|--:|--:|--:|--:|--:|--:|--:|\n"
    for device in sorted({entry["device"] for entry in entries}):
        for first, last in stages:
            chosen = [entry for entry in entries if entry["device"] == device and first <= int(entry["round"]) <= last]
            if not chosen:
                continue
            names = ("accuracy", "auc_confidence", "auc_weight", "m", "m_spread", "d")
            means = {name: sum(float(entry[name]) for entry in chosen) / len(chosen) for name in names}
            runs = len({entry["seed"] for entry in chosen})
            table += f"| {device} | {first} to {last} | {runs} | {100 * means['accuracy']:.1f} | "
            table += " | ".join(f"{means[name]:.3f}" for name in names[1:]) + " |\n"
    return table


def write_report(runs: Path | None, device: str) -> None:
    """Replace the curves of a device by those of the run folders, and write the tables of full_size.md."""
    curves = read_curves()
    regulators = records.read_rows(REGULATORS)
    if runs is not None:
        curves = [entry for entry in curves if entry["device"] != device]
        regulators = [entry for entry in regulators if entry["device"] != device]
        for row in ROWS:
            for folder in sorted(runs.glob(f"{row}-seed*")):
                curves += curve_of(folder, device)
                if row == "feddure":
                    regulators += regulators_of(folder, device)
    write_csv(CURVES, curves)
    if regulators:
        records.write_text(REGULATORS, records.format_rows(regulators, header=True))
    text = PAGE.read_text()
    tables = f"{BEGIN}\n\n{accuracy_table(curves)}\n{regulator_table(regulators)}"
    PAGE.write_text(text[: text.index(BEGIN)] + tables)


def main() -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("row", choices=ROWS)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--data-dir", type=Path)
    running.add_argument("--runs", type=Path, required=True)
    running.add_argument("--torch-device", choices=["cpu", "cuda"], default="cpu")
    running.add_argument("--setting", choices=["iid-iid", "iid-dir", "dir-dir"], default="dir-dir")
    running.add_argument("--checkpoint-every", type=int, default=1)
    reporting = commands.add_parser("report")
    reporting.add_argument("--runs", type=Path, help="new run folders; without it only the page is written")
    reporting.add_argument("--device", default="cpu", help="name of the machine in the tables")
    given = parser.parse_args()
    if given.command == "report":
        write_report(given.runs, given.device)
    else:
        overrides = {
            "data_dir": given.data_dir,
            "device": given.torch_device,
            "setting": given.setting,
            "checkpoint_every": given.checkpoint_every,
        }
        run_row(given.row, given.seed, given.runs, overrides)


if __name__ == "__main__":
    sys.exit(main())
