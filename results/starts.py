"""What a start without labels adds to labels only, soft labels and FixMatch.

    python results/starts.py play digits --runs RUNS [--starts none longer simclr byol simsiam] [--seeds 0 1 2 3 4]
    python results/starts.py play fashion_mnist --runs RUNS --data-dir DATA
    python results/starts.py report

Each start tries the same number of values for its learning rate and one option, with seed and split 100: best is the
one after which labels only is best on as many validation images as there are labels, 100. Then it is played on seeds
that chose nothing. "longer" has no start, but the rounds of start and method together. `play` adds rows to starts.csv,
and goes on where it was stopped; `report` writes the tables of starts.md.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from equal_trials import append, mean, placed, rows

HERE = Path(__file__).parent
TABLE, PAGE = HERE / "starts.csv", HERE / "starts.md"
METHODS = {"fedavg": "labels only", "fedavg-soft-labels": "soft labels", "fedavg-fixmatch": "FixMatch"}
SHARED: dict[str, Any] = {"clients": 20, "cohort": 5, "steps": 8, "labeled_batch": 10, "unlabeled_batch": 30,
                          "labels": 100, "network": "small", "width": 16, "device": "cpu", "threads": 1,
                          "rounds": 40, "start_rounds": 40, "evaluate_every": 10}  # fmt: skip
SETS: dict[str, dict[str, Any]] = {
    "digits": {"setting": "dir-dir", "images": 1437},
    "fashion_mnist": {"setting": "iid-dir", "data_share": 0.1, "shrink": 2, "images": 6000},
}
RATES = [1e-3, 3e-3, 1e-2]
KNOBS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "simclr": ("temperature", (0.2, 0.5)),
    "byol": ("target_decay", (0.9, 0.99)),
    "simsiam": ("view", ("strong", "weak")),
}
"""The option of each start that is chosen with its learning rate."""
NONE, LONGER, CHOOSING = "none", "longer", 100


def config(data: str, folder: Path | None, seed: int, **values: Any) -> Any:
    """Return the configuration of a set, a seed and a start."""
    from halfmoon import Config

    own = {name: value for name, value in SETS[data].items() if name != "images"}
    return Config(**{**SHARED, **own, "data": data, "data_dir": folder, "seed": seed, "split_seed": seed, **values})


def started(start: str, rate: float, value: Any) -> dict[str, Any]:
    return {"start": start, "start_lr": rate, "options": {start: {KNOBS[start][0]: value}}}


def chosen(data: str, start: str, runs: Path, folder: Path | None) -> dict[str, Any]:
    """Return the values of a start that are best on validation images, after trying those that were not tried."""
    from halfmoon.report.run_reader import Run
    from halfmoon.runs import runner

    for rate, value in product(RATES, KNOBS[start][1]):
        row = {"data": data, "start": start, "method": "fedavg", "seed": CHOOSING, "values": f"{rate:g} {value}"}
        if not any(same(row, other) for other in rows(TABLE)):
            changes = {"validation_share": 100 / SETS[data]["images"], **started(start, rate, value)}
            place = runs / data / f"{start}-{rate:g}-{value}"
            summary = runner.cell(config(data, folder, CHOOSING, method="fedavg", **changes), place, tests=False)
            last = [row["validation"]["accuracy"] for row in Run.read(place).rows if "validation" in row][-1]
            append(TABLE, {**row, "accuracy": last, "steps": steps(summary)})
            print(row["values"], last, flush=True)
    tried = [row for row in rows(TABLE) if (row["data"], row["start"], row["seed"]) == (data, start, str(CHOOSING))]
    rate, value = max(tried, key=lambda row: float(row["accuracy"]))["values"].split()
    return started(start, float(rate), type(KNOBS[start][1][0])(value))


def steps(summary: dict[str, Any]) -> int:
    """Return the steps that clients have taken in a run and its start."""
    start = summary.get("start", {"cost": {"labeled_steps": 0}})
    return summary["cost"]["labeled_steps"] + start["cost"]["labeled_steps"]


def same(row: dict[str, Any], other: dict[str, str]) -> bool:
    """Return whether a row of the table is of this set, start, method, seed and values."""
    return all(str(row[name]) == other[name] for name in ("data", "start", "method", "seed", "values"))


def play(data: str, starts: list[str], seeds: list[int], runs: Path, folder: Path | None) -> None:
    """Choose the values of each start, then play every method after it, on every seed."""
    from halfmoon.runs import runner

    for start in starts:
        values = chosen(data, start, runs, folder) if start in KNOBS else {}
        if start == LONGER:
            values = {"rounds": SHARED["rounds"] + SHARED["start_rounds"]}
        words = f"{values['start_lr']:g} {values['options'][start][KNOBS[start][0]]}" if start in KNOBS else ""
        for seed in seeds:
            row = {"data": data, "start": start, "method": "", "seed": seed, "values": words}
            left = [name for name in METHODS if not any(same({**row, "method": name}, old) for old in rows(TABLE))]
            if not left:
                continue
            made = config(data, folder, seed, run_dir=runs / data / f"{start}-seed{seed}", **values)
            for summary in runner.compare(made, list(METHODS), (seed,), again=True).summaries:
                if summary["method"] in left:
                    new = {**row, "method": summary["method"], "accuracy": summary["accuracy"]["last"]}
                    new["steps"] = steps(summary)
                    append(TABLE, new)
                    print(new, flush=True)


def report() -> None:
    """Write the tables into starts.md."""
    page = PAGE.read_text()
    for data in SETS:
        found = [row for row in rows(TABLE) if row["data"] == data and row["seed"] != str(CHOOSING)]
        if found:
            page = placed(page, data, "\n".join(table(found)))
    PAGE.write_text(page)


def table(found: list[dict[str, str]]) -> list[str]:
    """Return a table of test accuracies, and of differences to the same method without a start, paired by seed."""
    from halfmoon.report.paired import paired

    def ends(start: str, method: str) -> dict[str, float]:
        own = [row for row in found if (row["start"], row["method"]) == (start, method)]
        return {row["seed"]: 100 * float(row["accuracy"]) for row in own}

    lines = ["| start | values | method | steps | test % | to no start | 95 % interval |"]
    lines.append("| --- | --- | --- | --: | --: | --: | --: |")
    for start in dict.fromkeys(row["start"] for row in found):
        for method, words in METHODS.items():
            own, base = ends(start, method), ends(NONE, method)
            seeds = sorted(own.keys() & base.keys())
            if not own:
                continue
            first = next(row for row in found if (row["start"], row["method"]) == (start, method))
            spent, end = f"{int(first['steps']):,}", f"{mean(list(own.values())):.1f}"
            cells = [start, first["values"], words, spent, end, "", ""]
            if start != NONE and len(seeds) > 1:
                apart = paired([own[seed] for seed in seeds], [base[seed] for seed in seeds])
                cells[-2:] = [f"{apart.mean:+.1f}", f"{apart.low:+.1f} to {apart.high:+.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["play", "report"])
    parser.add_argument("data", nargs="?", choices=sorted(SETS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--starts", nargs="+", default=[NONE, LONGER, *KNOBS], choices=[NONE, LONGER, *KNOBS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    if arguments.action == "report":
        report()
    else:
        play(arguments.data, arguments.starts, arguments.seeds, arguments.runs, arguments.data_dir)


if __name__ == "__main__":
    main()
