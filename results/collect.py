"""Tabulate finished runs: `python results/collect.py NAME RUN...` writes NAME.csv, NAME.md and NAME.png beside itself.

Each RUN is a finished run's folder. NAME.csv has one row an evaluation (method, seed, round, accuracy). NAME.md has
the last and the best round and the mean of the last ten evaluations, as mean and standard deviation (ddof = 1) over
seeds, with the number of seeds and what each method used. The methods of one seed share their cohorts, so that
`difference`, the mean over seeds of a method's last ten evaluations minus the first method's, is less noisy than
either.
"""

import csv
import statistics
import sys
from pathlib import Path

from halfmoon.report.curves import draw_curves
from halfmoon.report.run_reader import StoredRun

LATE = 10
COSTS = (("labeled_steps", "labeled steps"), ("forward", "forward (images)"), ("backward", "backward (images)"))


def percent(values: list[float]) -> str:
    """Return mean and standard deviation in percent."""
    mean = f"{100 * statistics.mean(values):.2f}"
    return f"{mean} ± {100 * statistics.stdev(values):.2f}" if len(values) > 1 else mean


def main(name: str, folders: list[str]) -> None:
    """Write the three files."""
    runs = [StoredRun.read(Path(folder)) for folder in folders]
    here = Path(__file__).parent
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        groups.setdefault(run.title, []).append(run)
    with (here / f"{name}.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["method", "seed", "round", "accuracy"])
        for run in runs:
            summary = run.summary or {}
            for number, value in run.series("test", "accuracy").items():
                table.writerow([summary["method"], summary["seed"], number, value])
    late = {
        title: {
            (run.summary or {})["seed"]: statistics.mean(list(run.series("test", "accuracy").values())[-LATE:])
            for run in group
        }
        for title, group in groups.items()
    }
    first = next(iter(late.values()))
    heads = [
        "method",
        "last round %",
        "best round %",
        f"mean of last {LATE} evaluations %",
        "difference",
        "seeds",
        *(words for _, words in COSTS),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for title, group in groups.items():
        scores = [(run.summary or {})["accuracy"] for run in group]
        both = [value - first[seed] for seed, value in late[title].items() if seed in first]
        costs = [f"{statistics.mean((run.summary or {})['cost'][key] for run in group):,.0f}" for key, _ in COSTS]
        cells = [
            percent([s["last"] for s in scores]),
            percent([s["best"] for s in scores]),
            percent(list(late[title].values())),
        ]
        lines.append(
            "| " + " | ".join([title, *cells, f"{100 * statistics.mean(both):+.2f}", str(len(group)), *costs]) + " |"
        )
    (here / f"{name}.md").write_text("\n".join(lines) + "\n")
    draw_curves(runs, here / f"{name}.png")
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
