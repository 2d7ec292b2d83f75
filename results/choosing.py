"""Which method to take: all of them at equal labeled steps, with labels at all clients, at some, or at the server.

    python results/choosing.py run fashion_mnist clients --runs RUNS --data-dir DATA [--seeds 0 1 2]
    python results/choosing.py report

`run` trains, appends a line to choosing.jsonl.gz for every finished run, skips the runs that have one, and resumes a run
that was stopped. Seed S is the seed of training and of the split. The recipe of a data set is that of evidence.py,
shorter and on fewer images; nothing was searched for here, and no method but for its threshold departs from its
defaults.
"""

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import evidence
import records
from evidence import deviation, half_interval, interval, spread

HERE = Path(__file__).parent
LINES, TABLE, SHEET = (HERE / f"choosing.{suffix}" for suffix in ("jsonl.gz", "md", "csv"))

SHARED: dict[str, Any] = {"setting": "iid-dir", "dirichlet_alpha": 0.5, "clients": 20, "cohort": 5, "rounds": 80,
                          "steps": 8, "labeled_batch": 10, "unlabeled_batch": 30, "network": "small", "device": "cpu",
                          "threads": 1, "evaluate_every": 10, "checkpoint_every": 20, "server_epochs": 1}  # fmt: skip
SETS: dict[str, dict[str, Any]] = {
    "fashion_mnist": {"data_share": 0.2, "shrink": 2, "width": 16, "lr": 5e-3, "labels": 100},
    "pneumonia_mnist": {"width": 8, "lr": 8e-3, "labels": 200, "flip": False, "server_ema": 0.9,
                        "validation_share": 0.1},
}  # fmt: skip
THRESHOLD = {"fashion_mnist": 0.7, "pneumonia_mnist": 0.9}
"""The confidence that a pseudo-label needs in the methods whose threshold is a constant (docs/training.md)."""

PLACES: dict[str, dict[str, Any]] = {
    "clients": {"reference": "fedavg"},
    "some": {"labels_at": "some", "labeled_clients": 5, "reference": "fedavg"},
    "server": {"labels_at": "server", "reference": "semifl"},
    "clients, DIR": {"setting": "dir-dir", "rounds": 60, "labels": 200, "reference": "fedavg"},
}
FLOORS = {"clients": "fedavg", "some": "fedavg", "server": "partially-supervised", "clients, DIR": "fedavg"}
FIXMATCH = {"clients": "fedavg-fixmatch", "some": "fedavg-fixmatch", "server": "semifl",
            "clients, DIR": "fedavg-fixmatch"}  # fmt: skip
"""What each method is compared with beside labels alone; with labels at the server FixMatch's like is SemiFL."""
CONTROL = "fedavg-control"
"""Labels only, with unlabeled images in batch normalization: gains of pseudo-labels are differences to it."""

PARTS = {"accuracy": "", "held": ", held-out training images"}

RECEIVED: dict[str, Any] = {"labels": "round"}
ROWS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg-control": {},
    "fedavg-fixmatch": {"threshold": True},
    "fixmatch-received": {"method": "fedavg-fixmatch", "threshold": True, "options": RECEIVED, "labeling": "running"},
    "fedavg-fixmatch-global": {"threshold": True},
    "fedavg-soft-labels": {},
    "fixmatch-proxy-tuning": {"threshold": True},
    "sage": {"threshold": True},
    "proxyfl": {"threshold": True},
    "protofssl": {},
    "feddure": {},
    "feddure-received": {"method": "feddure", "options": {"labels": "round", "regulator_bias": 0.0},
                         "labeling": "running"},
    "fedloke": {"options": {"ramp_rounds": 20}},
    "feddb": {"threshold": True},
    "fedmatch": {},
    "semifed": {"threshold": True},
    "cbafed": {},
    "rscfed": {},
    "twin-sight": {},
    "partially-supervised": {},
    "semifl": {"threshold": True},
    "semifl-feddpl": {"threshold": True},
    "fl2": {},
    "fedrgd": {"threshold": True, "norm": "group"},
    "fml": {},
    "fedavg-sl": {},
}  # fmt: skip
METHODS: dict[str, tuple[str, ...]] = {
    "clients": ("fedavg", "fedavg-control", "fedavg-fixmatch", "fixmatch-received", "fedavg-fixmatch-global",
                "fedavg-soft-labels", "fixmatch-proxy-tuning", "sage", "proxyfl", "feddure-received", "protofssl", "fedloke", "feddb",
                "fedmatch", "semifed", "feddure", "fml", "fedavg-sl"),
    "some": ("fedavg", "fedavg-control", "fedavg-fixmatch", "fixmatch-received", "fedavg-fixmatch-global",
             "fedavg-soft-labels", "cbafed", "twin-sight", "rscfed", "sage", "proxyfl", "feddb", "fedloke", "fedavg-sl"),
    "server": ("partially-supervised", "semifl", "fl2", "semifl-feddpl", "fedmatch", "fedrgd", "fedavg-sl"),
    "clients, DIR": ("fedavg", "fedavg-control", "fedavg-fixmatch", "fixmatch-received", "fedavg-fixmatch-global",
                     "fedavg-soft-labels", "fixmatch-proxy-tuning", "sage", "proxyfl", "fedavg-sl"),
}  # fmt: skip


def configured(data: str, place: str, row: str, seed: int, folder: Path | None) -> Any:
    """Return the configuration of a run."""
    from halfmoon.config.schema import Config

    said = {"method": row, **ROWS[row]}
    options = dict(said.pop("options", {}))
    if said.pop("threshold", False):
        options["threshold"] = THRESHOLD[data]
    values = {**SHARED, **SETS[data], **PLACES[place], **said, "options": options}
    return Config(**values, data=data, seed=seed, split_seed=seed, data_dir=folder)


def train_missing(data: str, place: str, rows: list[str], seeds: list[int], runs: Path, folder: Path | None) -> None:
    """Train the missing runs, seed by seed, so that the runs of a stopped call still have a comparison."""
    from halfmoon.runs import runner

    done = {(line["data"], line["place"], line["row"], line["seed"]) for line in records.read_lines(LINES)}
    for seed in seeds:
        for row in rows:
            if (data, place, row, seed) in done:
                continue
            began = time.perf_counter()
            there = runs / f"{data}-{place}-{row}-{seed}"
            summary = runner.run_in_folder(configured(data, place, row, seed, folder), there)
            line = {"data": data, "place": place, "row": row, "seed": seed, "title": summary["title"]}
            line |= {"accuracy": summary["accuracy"]["last"], **evidence.held(there), "cost": summary["cost"]}
            line |= {"used": summary.get("measured", {}).get("used", {}).get("last")}
            line |= {"right": summary.get("measured", {}).get("pseudo", {}).get("last")}
            line |= {"seconds": round(time.perf_counter() - began, 1)}
            records.append_line(LINES, line)
            print(json.dumps(line), flush=True)


def table(data: str, place: str, part: str = "accuracy") -> list[dict[str, Any]]:
    """Return a row a method, with its paired differences to labels alone and to FixMatch, in points.

    `part` is "accuracy", of the test images, or "held", of the training images that were set aside.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for line in records.read_lines(LINES):
        if (line["data"], line["place"]) == (data, place) and part in line:
            found.setdefault(line["row"], {})[line["seed"]] = line
    made = []
    for row in (row for row in METHODS[place] if row in found):
        runs = found[row]
        last = {seed: 100 * line[part] for seed, line in runs.items()}
        one = next(iter(runs.values()))
        line: dict[str, Any] = {
            "data": data,
            "place": place,
            "part": part,
            "row": row,
            "seeds": len(last),
            "last": fmean(last.values()),
        }
        line["deviation"] = deviation(list(last.values()))
        for name, other in (("floor", FLOORS[place]), ("control", CONTROL), ("fixmatch", FIXMATCH[place])):
            base = {seed: 100 * each[part] for seed, each in found.get(other, {}).items()}
            differences = [last[seed] - base[seed] for seed in last if seed in base]
            if row != other and differences and not (name == "control" and row == FLOORS[place]):
                line |= {name: fmean(differences), f"{name}_half": half_interval(differences)}
        line |= {"forward": one["cost"]["forward"], "bytes": one["cost"]["bytes_down"] + one["cost"]["bytes_up"]}
        made.append(line)
    return made


def report() -> None:
    """Write the tables into choosing.md, and the numbers behind them."""
    names = ("data", "place", "part", "row", "seeds", "last", "deviation", "floor", "floor_half", "control",
             "control_half", "fixmatch", "fixmatch_half", "forward", "bytes")  # fmt: skip
    page = TABLE.read_text()
    sheets = []
    for data, place, (part, words) in itertools.product(SETS, PLACES, PARTS.items()):
        rows = table(data, place, part)
        begin = f"<!-- table: {data}, {place}{words} -->\n"
        if not rows or begin not in page:
            continue
        sheets += rows
        page = evidence.renewed(page, begin, _markdown(rows, place))
    TABLE.write_text(page)
    evidence.write_sheet(SHEET, names, sheets)


def _markdown(rows: list[dict[str, Any]], place: str) -> str:
    least = min(row["forward"] for row in rows)
    with_control = any(row["row"] == CONTROL for row in rows)
    control = " minus control |" if with_control else ""
    made = f"| method | last % | minus labels only |{control} minus {FIXMATCH[place]} | forward passes | MB | seeds |\n"
    made += f"|---|--:|--:|{'--:|' if with_control else ''}--:|--:|--:|--:|\n"
    for row in rows:
        last = spread(row["last"], row["deviation"])
        control = f"{_gain(row, 'control')} | " if with_control else ""
        made += f"| `{row['row']}` | {last} | {_gain(row, 'floor')} | {control}{_gain(row, 'fixmatch')} | "
        made += f"{row['forward'] / least:.1f} | {row['bytes'] / 1e6:.0f} | {row['seeds']} |\n"
    return made


def _gain(row: dict[str, Any], name: str) -> str:
    return interval(row[name], row[f"{name}_half"]) if name in row else ""


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_command = commands.add_parser("run")
    run_command.add_argument("data", choices=SETS)
    run_command.add_argument("place", choices=PLACES)
    run_command.add_argument("--runs", type=Path, required=True)
    run_command.add_argument("--data-dir", type=Path)
    run_command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    run_command.add_argument("--rows", nargs="+", choices=ROWS)
    commands.add_parser("report")
    given = parser.parse_args()
    if given.command == "report":
        report()
    else:
        rows = given.rows or list(METHODS[given.place])
        train_missing(given.data, given.place, rows, given.seeds, given.runs, given.data_dir)


if __name__ == "__main__":
    sys.exit(main())
