"""Measure one mechanism of each of four papers on digits, with the small network.

    python results/mechanisms.py run --runs RUNS [--only fedloke feddb semifl feddure] [--seeds 0 1 2 3 4]
    python results/mechanisms.py report --runs RUNS

`run` trains in the folders RUNS/NAME-SEED; finished runs are read, so that a stopped command goes on. `report` writes
the tables of mechanisms.md. A seed is that of training and of the split; no option was chosen by these runs.

- FedLoKe, Figure 4: accuracy of pseudo-labels of the local and of the global model, by heterogeneity.
- FedDB, Figure 3: distance of a client model's accuracies by class from the classes of its labels, and from APP-U.
- SemiFL, Table 2 and Figure 6: alternate training, and pseudo-labels of the global model.
- FedDure, Theorem 2: the norm of C-reg's gradient over the rounds.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scipy import stats

import halfmoon

PAGE = Path(__file__).with_name("mechanisms.md")
BEGIN = "<!-- tables -->"

SHARED: dict[str, Any] = {
    "data": "digits",
    "clients": 20,
    "cohort": 5,
    "rounds": 60,
    "steps": 6,
    "labeled_batch": 10,
    "unlabeled_batch": 30,
    "network": "small",
    "labeled_view": "weak",
    "labeling": "running",
    "lr": 6e-3,
    "schedule": "cosine",
    "evaluate_every": 10,
    "executor": "loop",
    "threads": 1,
    "device": "cpu",
}
"""The recipe of results/evidence.py for digits, with fewer rounds."""

ALPHAS = (0.01, 0.1, 0.5)
FEDDURE = {"method": "feddure", "setting": "dir-dir", "dirichlet_alpha": 0.5, "labels_per_class": 0.5}
SEMIFL = {"method": "semifl", "labels_at": "server", "labels": 100, "setting": "semifl-dir", "dirichlet_alpha": 0.3,
          "server_batch": 20, "strong_view": "semifl"}  # fmt: skip
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "fedloke": {
        f"fedloke-{alpha}": {
            "method": "fedloke",
            "setting": "fedloke",
            "dirichlet_alpha": alpha,
            "label_ratio": 0.1,
            "strong_view": "fedloke",
        }
        for alpha in ALPHAS
    },
    "feddb": {
        "feddb-fixmatch": {
            "method": "fedavg-fixmatch",
            "setting": "feddb-dir",
            "dirichlet_alpha": 0.3,
            "label_ratio": 0.1,
            "client_models": 5,
            "evaluate_every": 5,
            "strong_view": "fedloke",
        }
    },
    "semifl": {
        "semifl-neither": {**SEMIFL, "options": {"fine_tune": False, "labels": "step", "mix_weight": 0.0}},
        "semifl-global": {**SEMIFL, "options": {"fine_tune": False, "mix_weight": 0.0}},
        "semifl-alternate": {**SEMIFL, "options": {"labels": "step", "mix_weight": 0.0}},
        "semifl-both": {**SEMIFL, "options": {"mix_weight": 0.0}},
    },
    "feddure": {
        "feddure-adam": {**FEDDURE, "options": {"regulator_bias": 0.0}},
        "feddure-plain": {
            **FEDDURE,
            "options": {"regulator_bias": 0.0, "coarse_step": "plain", "coarse_lr": 0.05, "virtual_lr": 0.05},
        },
    },
}
"""The options of each mechanism's runs, by name."""


def train(runs: Path, mechanisms: Sequence[str], seeds: Sequence[int], rounds: int) -> None:
    """Train all runs of these mechanisms, seed by seed."""
    for seed in seeds:
        for mechanism in mechanisms:
            for name, options in RUNS[mechanism].items():
                merged = {**SHARED, "rounds": rounds, **options, "seed": seed, "split_seed": seed}
                halfmoon.run(**merged, run_dir=runs / f"{name}-{seed}", progress=False)


def read_rounds(runs: Path, name: str) -> list[list[dict[str, Any]]]:
    """Read the metrics of each round, for every finished run of this name."""
    folders = sorted(path.parent for path in runs.glob(f"{name}-*/summary.json"))
    return [[json.loads(line) for line in (folder / "metrics.jsonl").open()] for folder in folders]


def interval(values: Sequence[float], digits: int = 1) -> str:
    """Word a mean with its 95 % interval of Student's t over seeds."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return f"{mean:.{digits}f}"
    half_width = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:.{digits}f} [{mean - half_width:.{digits}f}, {mean + half_width:.{digits}f}]"


def over_last_quarter(rounds: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float | None]) -> float:
    """Average a value over the last quarter of a run's rounds; rounds without it are left out."""
    last = rounds[-max(1, len(rounds) // 4) :]
    known = [number for number in map(value, last) if number is not None]
    return statistics.fmean(known) if known else math.nan


def pseudo_accuracy(model: str | None = None) -> Callable[[dict[str, Any]], float | None]:
    """Return a function from a round's metrics to the accuracy, in %, of its pseudo-labels (of one model by name)."""

    def read(row: dict[str, Any]) -> float | None:
        pseudo = row["pseudo"] or {}
        accuracy = pseudo.get("models", {}).get(model, {}).get("accuracy") if model else pseudo.get("accuracy")
        return None if accuracy is None else 100 * accuracy

    return read


def report_fedloke(runs: Path) -> list[str]:
    lines = ["| alpha | local model, % | global model, % | difference | seeds |", "|--:|---|---|---|--:|"]
    for alpha in ALPHAS:
        results = read_rounds(runs, f"fedloke-{alpha}")
        local = [over_last_quarter(rounds, pseudo_accuracy("local")) for rounds in results]
        received = [over_last_quarter(rounds, pseudo_accuracy("global")) for rounds in results]
        if results:
            difference = [a - b for a, b in zip(local, received, strict=True)]
            lines.append(
                f"| {alpha} | {interval(local)} | {interval(received)} | {interval(difference)} | {len(results)} |"
            )
    return lines


def report_feddb(runs: Path) -> list[str]:
    lines = ["| model | from APP-U, bits | from the labels, bits | difference | seeds |", "|---|---|---|---|--:|"]
    results = read_rounds(runs, "feddb-fixmatch")
    for model, title in (("local", "a client's own model"), ("global", "the server's model at the client")):

        def distance(row: dict[str, Any], key: str) -> float | None:
            return (row.get("clients") or {}).get(key)

        columns = []
        for key in (f"{model}_js_app_u", f"{model}_js_labeled"):
            columns.append([over_last_quarter(rounds, lambda row, key=key: distance(row, key)) for rounds in results])
        if results:
            difference = [labeled - app_u for app_u, labeled in zip(*columns, strict=True)]
            cells = [interval(column, 2) for column in (*columns, difference)]
            lines.append(f"| {title} | {' | '.join(cells)} | {len(results)} |")
    return lines


def report_semifl(runs: Path) -> list[str]:
    lines = [
        "| server fine-tunes the average | pseudo-labels of | test accuracy, % | pseudo-labels correct, % | minus neither | seeds |",
        "|---|---|---|---|---|--:|",
    ]

    def accuracies(results: list[list[dict[str, Any]]]) -> list[float]:
        return [100 * rounds[-1]["test"]["accuracy"] for rounds in results]

    baseline = accuracies(read_rounds(runs, "semifl-neither"))
    titles = {
        "semifl-neither": ("no", "the model in training"),
        "semifl-global": ("no", "the global model"),
        "semifl-alternate": ("yes", "the model in training"),
        "semifl-both": ("yes", "the global model"),
    }
    for name, (fine_tunes, labels) in titles.items():
        results = read_rounds(runs, name)
        if not results:
            continue
        accuracy = accuracies(results)
        correct = [over_last_quarter(rounds, pseudo_accuracy()) for rounds in results]
        gain = [a - b for a, b in zip(accuracy, baseline, strict=False)]
        gain_text = "" if name == "semifl-neither" else interval(gain)
        lines.append(
            f"| {fine_tunes} | {labels} | {interval(accuracy)} | {interval(correct)} | {gain_text} | {len(results)} |"
        )
    return lines


def report_feddure(runs: Path) -> list[str]:
    lines = [
        "| C-reg's step | first quarter | second | third | last | last / first | seeds |",
        "|---|---|---|---|---|---|--:|",
    ]
    for name, title in (("feddure-adam", "Adam, cosine rate"), ("feddure-plain", "plain, rate 0.05 on a cosine")):
        results = read_rounds(runs, name)
        if not results:
            continue
        quarters: list[list[float]] = [[], [], [], []]
        for rounds in results:
            norms = [row["train"]["coarse_gradient"] for row in rounds]
            for quarter in range(4):
                start = quarter * len(norms) // 4
                stop = (quarter + 1) * len(norms) // 4
                quarters[quarter].append(statistics.fmean(norms[start:stop]))
        ratio = [last / first for first, last in zip(quarters[0], quarters[3], strict=True)]
        cells = [interval(values, 2) for values in (*quarters, ratio)]
        lines.append(f"| {title} | {' | '.join(cells)} | {len(results)} |")
    return lines


TABLES: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "fedloke": ("FedLoKe, Figure 4: whose pseudo-labels are correct?", report_fedloke),
    "feddb": ("FedDB, Figure 3: what does a model's bias depend on?", report_feddb),
    "semifl": ("SemiFL, Table 2: what does alternating training gain?", report_semifl),
    "feddure": ("FedDure, Theorem 2: does C-reg's gradient vanish?", report_feddure),
}


def report(runs: Path) -> None:
    """Write the tables of the page below its introduction."""
    introduction, _ = PAGE.read_text().split(BEGIN)
    sections = [f"## {title}\n\n" + "\n".join(make_lines(runs)) for title, make_lines in TABLES.values()]
    PAGE.write_text(f"{introduction}{BEGIN}\n\n" + "\n\n".join(sections) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "report"))
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=tuple(RUNS), default=tuple(RUNS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, default=SHARED["rounds"])
    arguments = parser.parse_args()
    if arguments.command == "run":
        train(arguments.runs, arguments.only, arguments.seeds, arguments.rounds)
    else:
        report(arguments.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
