"""Every method with the same number of tuning trials, then compared on seeds that tuned nothing.

    python results/equal_trials.py run digits --runs RUNS [--trials 20] [--seeds 0 1 2 3 4]
    python results/equal_trials.py run fashion_mnist --runs RUNS --data-dir DATA
    python results/equal_trials.py report

Each method searches three options with Optuna: the learning rate, and two of its paper. A trial is judged on as many
validation images as there are labels, 100, with seed and split 100. `run` appends each trial to
equal_trials_search.csv.gz and each final run to equal_trials.csv.gz, and resumes where it was stopped.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import records

HERE = Path(__file__).parent
SEARCH, FINAL, PAGE = (HERE / name for name in ("equal_trials_search.csv.gz", "equal_trials.csv.gz", "equal_trials.md"))
SHARED: dict[str, Any] = {"clients": 20, "cohort": 5, "steps": 8, "labeled_batch": 10, "unlabeled_batch": 30,
                          "labels": 100, "network": "small", "device": "cpu", "threads": 1}  # fmt: skip
SETS: dict[str, dict[str, Any]] = {
    "digits": {"setting": "dir-dir", "rounds": 40, "evaluate_every": 5, "validation_share": 100 / 1437},
    "fashion_mnist": {"setting": "iid-dir", "rounds": 60, "evaluate_every": 10, "data_share": 0.1, "shrink": 2,
                      "width": 16, "validation_share": 100 / 6000},
}  # fmt: skip
RATE = "lr=1e-3..2e-2"
THRESHOLD = "threshold=0.5,0.7,0.8,0.9,0.95"
KNOBS = {
    "fedavg": ("server_ema=0,0.9", "labeled_view=weak,plain"),
    "fedavg-control": ("server_ema=0,0.9", "labeled_view=weak,plain"),
    "fedavg-fixmatch": (THRESHOLD, "unlabeled_weight=0.3,1,3"),
    "fedavg-soft-labels": ("teacher_decay=0.5,0.9,0.97", "unlabeled_weight=0.3,1,3"),
    "fedavg-uda": (THRESHOLD, "unlabeled_weight=0.3,1,3"),
    "feddure": ("regulator_bias=-4,-2,0", "regulator_lr=1e-5,5e-5,5e-4"),
    "fedmatch": (THRESHOLD, "unlabeled_weight=0.01,0.1,1"),
    "fedloke": ("ema=0.5,0.7,0.9", "ramp_rounds=10,40,200"),
    "sage": (THRESHOLD, "unlabeled_weight=0.3,1,3"),
    "proxyfl": (THRESHOLD, "proxy_weight=0.1,0.3,1"),
}
"""Two options of each method beside the learning rate."""
VIEWS: dict[str, dict[str, Any]] = {"fedloke": {"strong_view": "fedloke"}}
"""The strong view of a method's paper, where it is not FedDure's, the default."""
FLOOR = "fedavg"
CONTROL = "fedavg-control"


def run_trials(data: str, trials: int, seeds: list[int], runs: Path, folder: Path | None, **changes: Any) -> None:
    """Search for each method, then train its best values with every seed."""
    from halfmoon.config import schema
    from halfmoon.runs import runner
    from halfmoon.storage.events import EventPrinter
    from halfmoon.studies.tuning import BEST, Knob, tune

    own = set(schema.Config.__dataclass_fields__)
    done = {(row["data"], row["method"], int(row["seed"])) for row in records.read_rows(FINAL)}
    for method, knobs in KNOBS.items():
        if all((data, method, seed) in done for seed in seeds):
            continue
        values = {**SHARED, **SETS[data], "data": data, "data_dir": folder, "method": method, **changes}
        values |= VIEWS.get(method, {})
        base = schema.Config(**values, seed=100, split_seed=100)
        words = [RATE, *(knob if knob.partition("=")[0] in own else f"{method}.{knob}" for knob in knobs)]
        place = runs / data / method
        searched = {row["trial"] for row in records.read_rows(SEARCH) if (row["data"], row["method"]) == (data, method)}
        display = EventPrinter(sys.stdout)
        parsed = [Knob.parse(word) for word in words]
        for trial in sorted(tune(base, parsed, trials, [100], place, display), key=number):
            if str(trial.number) not in searched:
                found = " ".join(f"{name}={value}" for name, value in trial.values.items())
                row = {"data": data, "method": method, "trial": trial.number, "validation": trial.accuracy}
                records.append_rows(SEARCH, [{**row, "values": found}])
        best = schema.resolve(schema.load_file(place / BEST), {}, place / BEST)
        for seed in seeds:
            if (data, method, seed) not in done:
                config = replace(best, seed=seed, split_seed=seed, run_dir=None)
                summary = runner.run_in_folder(config, place / f"seed{seed}")
                row = {"data": data, "method": method, "seed": seed, "accuracy": summary["accuracy"]["last"]}
                records.append_rows(FINAL, [row])
                print(row, flush=True)


def number(trial: Any) -> int:
    return trial.number


def report() -> None:
    """Write the comparison's tables into equal_trials.md."""
    from halfmoon.report.paired import rank_methods

    page = PAGE.read_text()
    scores = {}
    for data in SETS:
        found: dict[str, dict[int, float]] = {}
        for row in records.read_rows(FINAL):
            if row["data"] == data:
                found.setdefault(row["method"], {})[int(row["seed"])] = 100 * float(row["accuracy"])
        if not found:
            continue
        bases = [name for name in (FLOOR, CONTROL) if name in found]
        titles = {FLOOR: "labels only", CONTROL: "the control"}
        heads = [f"minus {titles[base]}, 95 % interval | p" for base in bases]
        lines = [f"| method | test % | {' | '.join(heads)} |", f"| --- | --: |{' --: | --: |' * len(bases)}"]
        for name, by_seed in found.items():
            cells = [difference(found, name, base) for base in bases]
            lines.append(f"| `{name}` | {mean(list(by_seed.values())):.1f} | {' | '.join(cells)} |")
        page = placed(page, data, "\n".join(lines))
        for method, by_seed in found.items():
            scores.setdefault(method, []).append(mean(list(by_seed.values())))
    complete = {method: values for method, values in scores.items() if len(values) == len(SETS)}
    if len(complete) > 2:
        result = rank_methods(complete)
        order = sorted(result.means.items(), key=lambda item: item[1])
        lines = ["| method | mean rank |", "| --- | --: |", *(f"| `{name}` | {rank:.1f} |" for name, rank in order)]
        page = placed(page, "ranks", "\n".join(lines) + f"\n\nThe critical difference is {result.critical:.1f} ranks.")
    PAGE.write_text(page)


def difference(found: dict[str, dict[int, float]], method: str, base: str) -> str:
    """Word a method's paired difference to a baseline in points, and its p-value.

    Interval and p-value are adjusted for the number of methods that are compared with the baseline (Bonferroni).

    Args:
        found: accuracy in % by method and seed.
        method: the method.
        base: labels only or the control; the control is not compared with itself or with labels only as a baseline.
    """
    from halfmoon.report.paired import compare_paired

    compared = [name for name in found if name != base and not (base == CONTROL and name == FLOOR)]
    if method not in compared:
        return " | "
    common = sorted(found[method].keys() & found[base].keys())
    pairs = [[found[name][seed] for seed in common] for name in (method, base)]
    result = compare_paired(pairs[0], pairs[1], comparisons=len(compared))
    return f"{result.mean:+.1f} [{result.low:+.1f}, {result.high:+.1f}] | {result.p:.3f}"


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def placed(page: str, name: str, text: str) -> str:
    """Return a page with the text between the marks of this name."""
    before, after = page.split(f"<!-- {name} -->\n", 1)
    return f"{before}<!-- {name} -->\n\n{text}\n\n<!-- /{name} -->{after.split(f'<!-- /{name} -->', 1)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "report"])
    parser.add_argument("data", nargs="?", choices=sorted(SETS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rounds", type=int, help="in place of the set's own number, to try the script")
    arguments = parser.parse_args()
    if arguments.action == "report":
        report()
    else:
        changes = {} if arguments.rounds is None else {"rounds": arguments.rounds}
        run_trials(arguments.data, arguments.trials, arguments.seeds, arguments.runs, arguments.data_dir, **changes)


if __name__ == "__main__":
    main()
