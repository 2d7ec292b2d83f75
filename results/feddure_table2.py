"""FedDure's Table 2, an ablation of its two regulators, with four more rows.

    python results/feddure_table2.py run --runs RUNS [--sets digits-even digits-uneven] [--seeds 0 1 2] [--rows feddure]
    python results/feddure_table2.py choose --runs RUNS --data-dir DATA
    python results/feddure_table2.py report

`run` trains in the folders RUNS/SET-ROW-SEED, appends a line to feddure_table2.csv for each finished run, and skips the
runs that have one. `report` writes the tables of feddure_table2.md. A seed is that of training and of the split. `choose`
trains FedDure and the control on Fashion-MNIST with seeds 100 and 101 at each of `RATES`, and prints their accuracy on
validation images.

The recipe of digits is that of results/evidence.py. That of Fashion-MNIST is the one of results/equal_trials.py.
"""

import argparse
import csv
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import equal_trials
import evidence
import torch

import halfmoon
from halfmoon.report.paired import compare_paired

HERE = Path(__file__).parent
PAGE = HERE / "feddure_table2.md"
TABLE = HERE / "feddure_table2.csv"
COLUMNS = ("set", "row", "seed", "accuracy")
RATES = (2e-3, 5e-3, 1e-2)

SHARED: dict[str, Any] = {**evidence.SHARED, "labeling": "running"}
FASHION: dict[str, Any] = {
    **equal_trials.SHARED,
    **equal_trials.SETS["fashion_mnist"],
    "data": "fashion_mnist",
    "lr": 5e-3,
    "checkpoint_every": 20,
}
SETS: dict[str, dict[str, Any]] = {
    "digits-uneven": {"data": "digits", **evidence.SETS["digits"]},
    "digits-even": {**evidence.SETS["digits, IID labels"]},
    "fashion-uneven": {**FASHION, "setting": "dir-dir"},
    "fashion-even": {**FASHION, "setting": "iid-dir"},
}
SET_TITLES = {
    "digits-uneven": "Digits, uneven labels (DIR, DIR)",
    "digits-even": "Digits, even labels (IID, DIR)",
    "fashion-uneven": "Fashion-MNIST, uneven labels (DIR, DIR)",
    "fashion-even": "Fashion-MNIST, even labels (IID, DIR)",
}

FEDDURE: dict[str, Any] = {"labels": "round", "regulator_bias": 0.0}
THRESHOLD: dict[str, Any] = {"labels": "round", "threshold": 0.7}
NO_REWARD = 1e-12
"""Bound of d that turns Eq. 8 off."""
ROWS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fedavg": ("labels only", "fedavg", {}),
    "control": ("control: labels only, all images in batch normalization", "fedavg-control", {"labels": "round"}),
    "fixmatch": ("neither regulator: FixMatch (Table 2)", "fedavg-fixmatch", THRESHOLD),
    "without-creg": ("without C-reg (Table 2)", "feddure-without-creg", FEDDURE),
    "without-freg": ("without F-reg, fixed threshold (Table 2)", "feddure-without-freg", THRESHOLD),
    "feddure": ("FedDure (Table 2)", "feddure", FEDDURE),
    "no-d": ("no d: F-reg learns through C-reg, without Eq. 8", "feddure", {**FEDDURE, "reward_bound": NO_REWARD}),
    "frozen": ("F-reg is frozen at its random start", "feddure", {**FEDDURE, "regulator_lr": 0.0}),
    "random": ("random weights in [0, 1) in place of F-reg's", "random_weights:random_weights", FEDDURE),
}
"""Title, method and its options of each row."""


def configure(data: str, row: str, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a run."""
    _, method, method_options = ROWS[row]
    values = {**SHARED, **SETS[data], **options, "seed": seed, "split_seed": seed, "method": method}
    return {**values, "options": method_options}


def train_run(data: str, row: str, seed: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Train one run in a folder, unless it is finished there, and return the metrics of its last round."""
    if row == "random" and not (folder / "summary.json").exists():
        # A resumed run would draw other numbers.
        shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(seed)
    halfmoon.run(**configure(data, row, seed, options), run_dir=folder, progress=False)
    last: dict[str, Any] = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    return last


def read_table() -> list[dict[str, str]]:
    """Read the lines of all finished runs."""
    if not TABLE.exists():
        return []
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def train(runs: Path, sets: Sequence[str], rows: Sequence[str], seeds: Sequence[int], options: dict[str, Any]) -> None:
    """Train all missing runs of these data sets and rows, seed by seed, so that a stopped command leaves pairs."""
    done = {(line["set"], line["row"], int(line["seed"])) for line in read_table()}
    for data in sets:
        for seed in seeds:
            for row in rows:
                if (data, row, seed) in done:
                    continue
                last = train_run(data, row, seed, runs / f"{data}-{row}-{seed}", options)
                accuracy = f"{100 * last['test']['accuracy']:.4f}"
                is_new = not TABLE.exists()
                with TABLE.open("a", newline="") as file:
                    writer = csv.writer(file, lineterminator="\n")
                    if is_new:
                        writer.writerow(COLUMNS)
                    writer.writerow((data, row, seed, accuracy))
                print(data, row, seed, accuracy, flush=True)


def choose(runs: Path, sets: Sequence[str], options: dict[str, Any]) -> None:
    """Print the validation accuracy of FedDure and the control at each learning rate, on seeds that are not reported."""
    for data in sets:
        for rate in RATES:
            for row in ("control", "feddure"):
                scores = []
                for seed in (100, 101):
                    folder = runs / f"choose-{data}-{row}-{rate:g}-{seed}"
                    last = train_run(data, row, seed, folder, {**options, "lr": rate})
                    scores.append(100 * last["validation"]["accuracy"])
                print(data, f"{rate:g}", row, " ".join(f"{score:.1f}" for score in scores), flush=True)


def word_difference(ours: dict[int, float], base: dict[int, float], comparisons: int) -> str:
    """Word a mean paired difference with its interval, adjusted for all comparisons of the column."""
    common = sorted(ours.keys() & base.keys())
    if len(common) < 3:
        return ""
    pairs = [[side[seed] for seed in common] for side in (ours, base)]
    found = compare_paired(pairs[0], pairs[1], comparisons=comparisons)
    return f"{found.mean:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def make_table(data: str, lines: Sequence[dict[str, str]]) -> list[str]:
    """Make the table of a data set."""
    scores: dict[str, dict[int, float]] = {}
    for line in lines:
        if line["set"] == data:
            scores.setdefault(line["row"], {})[int(line["seed"])] = float(line["accuracy"])
    if not scores:
        return []
    text = [f"## {SET_TITLES[data]}", "", "| variant | test accuracy, % | minus control | minus FedDure | seeds |"]
    text.append("|---|--:|--:|--:|--:|")
    for row in (name for name in ROWS if name in scores):
        cells = [ROWS[row][0]]
        values = list(scores[row].values())
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        cells.append(f"{statistics.fmean(values):.1f}{spread}")
        for base in ("control", "feddure"):
            known = row != base and base in scores
            cells.append(word_difference(scores[row], scores[base], len(scores) - 1) if known else "")
        text.append(f"| {' | '.join([*cells, str(len(values))])} |")
    return [*text, ""]


def report() -> None:
    """Write the tables of the page."""
    lines = read_table()
    text = [line for data in SETS for line in make_table(data, lines)]
    before, _ = PAGE.read_text().split("<!-- tables -->")
    PAGE.write_text(f"{before}<!-- tables -->\n\n" + "\n".join(text))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "choose", "report"))
    parser.add_argument("--runs", type=Path)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["digits-uneven", "digits-even"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--rounds", type=int, help="instead of the set's number, to try the script")
    parser.add_argument("--data-dir", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "report":
        report()
        return 0
    if arguments.runs is None:
        parser.error(f"{arguments.command} needs --runs, the folder of the runs")
    options: dict[str, Any] = {} if arguments.rounds is None else {"rounds": arguments.rounds}
    if arguments.data_dir is not None:
        options["data_dir"] = arguments.data_dir
    if arguments.command == "choose":
        choose(arguments.runs, arguments.sets, options)
    else:
        train(arguments.runs, arguments.sets, arguments.rows, arguments.seeds, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
