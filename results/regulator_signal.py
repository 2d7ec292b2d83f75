"""FedDure with other signals, inputs and starts of F-reg: information in its weights, and test accuracy.

    python results/regulator_signal.py run --runs RUNS [--sets digits] [--rows control feddure] [--seeds 0 1 2 3 4]
    python results/regulator_signal.py report [--runs RUNS]

`run` trains in the folders RUNS/SET-ROW-SEED; finished runs are read, so a stopped command continues. `report` writes
regulator_signal.csv from the finished runs, if RUNS is given, and then the tables of regulator_signal.md. A seed is that
of training and of the split. The learning rate of a shared F-reg was chosen on digits with seed 100, and `signal_weight`
with seed 101, by AUCs on the unlabeled images.
"""

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import evidence

import halfmoon

PAGE = Path(__file__).with_name("regulator_signal.md")
TABLE = Path(__file__).with_name("regulator_signal.csv")
BEGIN = "<!-- tables -->"

SHARED: dict[str, Any] = {**evidence.SHARED, "labeling": "running"}
SETS: dict[str, dict[str, Any]] = {
    "digits": evidence.SETS["digits"],
    "fashion_mnist": {
        **evidence.SETS["digits"],
        "rounds": 25,
        "labeled_batch": 20,
        "lr": 5e-3,
        "shrink": 2,
        "width": 16,
        "evaluate_every": 10,
    },
}
"""The recipe of results/evidence.py for uneven digits; that of Fashion-MNIST is of the same size."""

FEDDURE: dict[str, Any] = {"labels": "round", "regulator_bias": 0.0}
SHARED_REGULATOR: dict[str, Any] = {**FEDDURE, "share_regulator": True, "regulator_lr": 6e-3}

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "control": ("fedavg-control", {"labels": "round"}),
    "feddure": ("feddure", FEDDURE),
    "confidence": ("feddure", {**SHARED_REGULATOR, "regulator_input": "confidence"}),
    "prior-fixed": ("feddure", {**FEDDURE, "regulator_prior": "confidence", "regulator_lr": 0.0}),
    "prior-signal": (
        "feddure",
        {**FEDDURE, "regulator_prior": "confidence", "regulator_lr": 0.0, "signal_weight": 2.0},
    ),
    "signal": ("feddure", {**FEDDURE, "regulator_lr": 0.0, "signal_weight": 2.0}),
    "prior-signal-halves": (
        "feddure",
        {
            **FEDDURE,
            "regulator_prior": "confidence",
            "regulator_lr": 0.0,
            "signal_weight": 2.0,
            "signal_labels": "halves",
        },
    ),
}
"""The method and its options of each row."""

TITLES = {
    "control": "control: labels only",
    "feddure": "FedDure, `regulator_bias` 0",
    "confidence": "F-reg learns from the confidence, shared",
    "prior-fixed": "weights are the confidence",
    "prior-signal": "confidence and mean signal",
    "signal": "mean signal only",
    "prior-signal-halves": "confidence and mean signal, halves",
}

AUCS = ("auc_weight", "auc_confidence")

COLUMNS = ("set", "row", "seed", "accuracy", *AUCS)


def train(runs: Path, sets: Sequence[str], rows: Sequence[str], seeds: Sequence[int], options: dict[str, Any]) -> None:
    """Train all runs of these data sets and rows, seed by seed.

    Args:
        runs: folder of the run folders.
        sets: names in `SETS`.
        rows: names in `ROWS`.
        seeds: seeds of training and of the split.
        options: further options of every run, such as the number of rounds or the folder of the data.
    """
    for seed in seeds:
        for data in sets:
            for row in rows:
                method, method_options = ROWS[row]
                merged = {**SHARED, **SETS[data], **options, "data": data, "seed": seed, "split_seed": seed}
                halfmoon.run(
                    **merged,
                    method=method,
                    options=method_options,
                    run_dir=runs / f"{data}-{row}-{seed}",
                    progress=False,
                )


def mean_by_third(rounds: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Compute the mean of an AUC in each third of a run's rounds; rounds without it are left out."""
    size = -(-len(rounds) // 3)
    means: list[float] = []
    for start in range(0, len(rounds), size):
        values = [(row["pseudo"] or {}).get(key) for row in rounds[start : start + size]]
        known = [value for value in values if value is not None]
        means.append(statistics.fmean(known) if known else math.nan)
    return means


def write_table(runs: Path) -> None:
    """Write a line of the CSV file for every finished run: accuracy in %, and the AUCs of the three thirds."""
    lines: list[dict[str, Any]] = []
    for data in SETS:
        for row in ROWS:
            folders = [path.parent for path in runs.glob(f"{data}-{row}-*/summary.json")]
            finished = {
                int(folder.name.rsplit("-", 1)[1]): folder for folder in folders if is_run_of(folder, data, row)
            }
            for seed, folder in sorted(finished.items()):
                summary = json.loads((folder / "summary.json").read_text())
                rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                line: dict[str, Any] = {"set": data, "row": row, "seed": seed}
                line["accuracy"] = f"{100 * summary['accuracy']['last']:.4f}"
                for key in AUCS:
                    thirds = mean_by_third(rounds, key)
                    known = not any(math.isnan(value) for value in thirds)
                    line[key] = " ".join(f"{value:.4f}" for value in thirds) if known else ""
                lines.append(line)
    with TABLE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def is_run_of(folder: Path, data: str, row: str) -> bool:
    """Return whether a folder is of this row: the name of one row may be the start of another's."""
    return folder.name.rsplit("-", 1)[0] == f"{data}-{row}"


def interval(values: Sequence[float], digits: int = 1) -> str:
    """Word a mean with its 95 % interval of Student's t over seeds, if there are three or more."""
    mean = statistics.fmean(values)
    half_width = evidence.half_interval(list(values))
    if half_width is None:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} [{mean - half_width:.{digits}f}, {mean + half_width:.{digits}f}]"


def difference(accuracies: dict[int, float], base: dict[int, float]) -> str:
    """Word the mean difference over the seeds that both have, with its interval."""
    common = sorted(accuracies.keys() & base.keys())
    return interval([accuracies[seed] - base[seed] for seed in common]) if common else ""


def difference_lines(accuracy: dict[str, dict[int, float]]) -> list[str]:
    """Word what the mean signal adds to weights by confidence, if a data set has both."""
    if not accuracy.keys() >= {"prior-signal", "prior-fixed"}:
        return []
    gain = difference(accuracy["prior-signal"], accuracy["prior-fixed"])
    count = len(accuracy["prior-signal"].keys() & accuracy["prior-fixed"].keys())
    return ["", f"Confidence and mean signal, minus confidence only: {gain} points, over {count} seeds."]


def make_tables(lines: Sequence[dict[str, str]]) -> list[str]:
    """Make the tables of a data set: accuracy with paired differences, and the AUCs by third of the rounds."""
    text: list[str] = []
    for data in SETS:
        found = {row: [line for line in lines if line["set"] == data and line["row"] == row] for row in ROWS}
        found = {row: row_lines for row, row_lines in found.items() if row_lines}
        if not found:
            continue
        accuracy = {row: {int(line["seed"]): float(line["accuracy"]) for line in found[row]} for row in found}
        text += [
            f"## {data}",
            "",
            "| variant | test accuracy, % | minus control | minus FedDure | seeds |",
            "|---|---|---|---|--:|",
        ]
        for row, by_seed in accuracy.items():
            over_control = difference(by_seed, accuracy.get("control", {})) if row != "control" else ""
            over_feddure = difference(by_seed, accuracy.get("feddure", {})) if row not in ("control", "feddure") else ""
            mean = interval(list(by_seed.values()))
            text.append(f"| {TITLES[row]} | {mean} | {over_control} | {over_feddure} | {len(by_seed)} |")
        text += difference_lines(accuracy)
        text += [
            "",
            "| variant | AUC of | first third | second third | last third | seeds |",
            "|---|---|---|---|---|--:|",
        ]
        for row in found:
            known = [line for line in found[row] if line["auc_weight"]]
            if not known:
                continue
            weights, confidence = ([[float(value) for value in line[key].split()] for line in known] for key in AUCS)
            pairs = zip(weights, confidence, strict=True)
            differences = [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]
            for title, thirds in (("weights", weights), ("weights minus confidence", differences)):
                cells = " | ".join(interval(values, 2) for values in zip(*thirds, strict=True))
                text.append(f"| {TITLES[row]} | {title} | {cells} | {len(thirds)} |")
        text.append("")
    return text


def report(runs: Path | None) -> None:
    """Write the CSV file, if there are run folders, and the tables of the page."""
    if runs is not None:
        write_table(runs)
    with TABLE.open(newline="") as file:
        lines = list(csv.DictReader(file))
    before, _ = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n" + "\n".join(make_tables(lines)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["digits"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "report":
        report(arguments.runs)
        return 0
    if arguments.runs is None:
        parser.error("run needs --runs, the folder of the runs")
    options: dict[str, Any] = {}
    if arguments.rounds is not None:
        options["rounds"] = arguments.rounds
    if arguments.data_dir is not None:
        options["data_dir"] = arguments.data_dir
    train(arguments.runs, arguments.sets, arguments.rows, arguments.seeds, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
