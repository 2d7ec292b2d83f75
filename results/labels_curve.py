"""Accuracy against labels a class: federated methods on frozen features and from scratch, with pooled floors.

    python results/labels_curve.py run cifar10 --runs RUNS --data-dir DATA [--seeds 0 1 2 3 4] [--minutes 10]
    python results/labels_curve.py run cifar10 --part places ...
    python results/labels_curve.py run cifar10 --part layers ...
    python results/labels_curve.py run cifar10 --part scratch ...
    python results/labels_curve.py report

`run` trains and appends a line to labels_curve.csv.gz for every run that is over and skips those that are there; it ends after so
many minutes. Seed S is that of training and of the split. No option was tuned: every option that is not named here has
its default. Features are computed once for a set, and stored.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import records
from evidence import half_interval, interval, renewed

HERE = Path(__file__).parent
LINES, PAGE, FIGURE = (HERE / f"labels_curve.{suffix}" for suffix in ("csv.gz", "md", "png"))
NAMES = ("data", "where", "labels", "setting", "row", "seed", "accuracy", "seconds")

TRAIN = 2500
TEST = 2000
"""Maximum number of images of a set."""

SHARES = {"cifar10": TRAIN / 50_000, "fashion_mnist": TRAIN / 60_000, "pneumonia_mnist": TRAIN / 4708}
LABELS = (1, 3, 10, 100)
SETTINGS = {"even": "iid-iid", "uneven": "dir-dir"}
SHARED: dict[str, Any] = {"device": "cpu", "threads": 1, "processes": 1, "steps": 5, "checkpoint_every": 1000,
                          "evaluate_every": 1000, "reference": "fedavg-fixmatch-global"}  # fmt: skip
FEATURES: dict[str, Any] = {"network": "efficientnet-lite0"}
HEAD: dict[str, Any] = {"rounds": 11, "reference": None, "budget": "none"}
ROWS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedavg-soft-labels": {},
    "fedavg-fixmatch-global": {},
    "ridge-head": {**HEAD, "rounds": 1},
    "mixture-head": HEAD,
}
FLOORS = ("logistic regression", "random forest")
LABEL_SETTINGS: dict[str, dict[str, Any]] = {
    "2 of 20 clients": {"labels_at": "some", "labeled_clients": 2, "setting": "iid-dir"},
    "server": {"labels_at": "server", "setting": "iid-dir"},
}
PLACED = {
    "2 of 20 clients": ("fedavg", "fedavg-soft-labels", "fedavg-fixmatch-global", "cbafed", "ridge-head",
                        "mixture-head"),
    "server": ("partially-supervised", "semifl", "fl2", "ridge-head", "mixture-head"),
}  # fmt: skip
AMOUNTS = (100, 400)
LAYERS: dict[str, Any] = {"network": "efficientnet-lite0", "resize": 64, "tune": "last", "cohort": 5, "steps": 4,
                          "rounds": 24, "unlabeled_batch": 20, "evaluate_every": 500}  # fmt: skip
SCRATCH: dict[str, Any] = {"protocol": "few-labels", "shrink": 2, "evaluate_every": 500, "checkpoint_every": 50}

Found = dict[tuple[Any, ...], dict[int, float]]  # by data, where, setting, row and labels: percent by seed
Point = tuple[str, int, str, str, int]  # where, labels a class (places: in all), setting, row, seed


def points(data: str, part: str, seeds: list[int]) -> Iterator[Point]:
    """Yield all runs, seed by seed, so that the finished ones can be compared at any time."""
    for seed in seeds:
        if part == "curve":
            yield from (("features", n, "pooled", row, seed) for n, row in itertools.product(LABELS, FLOORS))
            yield from (("features", n, s, row, seed) for n, s, row in itertools.product(LABELS, SETTINGS, ROWS))
        elif part == "places":
            cases = (
                (place, n, row) for place, n in itertools.product(LABEL_SETTINGS, AMOUNTS) for row in PLACED[place]
            )
            yield from (("features", n, place, row, seed) for place, n, row in cases)
        elif part == "layers":
            cases = itertools.product((10, 3), ("fedavg", "fedavg-soft-labels"))
            yield from (("layers", n, "even", row, seed) for n, row in cases)
        else:
            cases = itertools.product((10, 100), ("fedavg", "fedavg-soft-labels"))
            yield from (("scratch", n, "uneven", row, seed) for n, row in cases)


def configured(data: str, point: Point, folder: Path | None) -> Any:
    """Return the configuration of a run."""
    from halfmoon.config.schema import Config

    where, count, setting, row, seed = point
    classes = 2 if data == "pneumonia_mnist" else 10
    placed = LABEL_SETTINGS.get(setting, {"setting": SETTINGS.get(setting, "iid-iid")})
    chosen_options = {"scratch": SCRATCH, "layers": LAYERS}.get(where, {**FEATURES, **ROWS.get(row, {})})
    labels = count if setting in LABEL_SETTINGS else count * classes
    clients = 20 if setting in LABEL_SETTINGS else min(10, labels)
    who = {} if where == "scratch" else {"clients": clients, "cohort": clients}
    values = {**SHARED, **placed, **who, **chosen_options, "labels": labels, "data_share": SHARES[data]}
    values |= {"method": "fedavg" if row in FLOORS else row, "data": data, "data_dir": folder}
    if setting == "server" and row not in ROWS:
        values["reference"] = "semifl"
    return Config.of(**values, seed=seed, split_seed=seed)


def train_missing(data: str, part: str, seeds: list[int], runs: Path, folder: Path | None, minutes: float) -> None:
    """Run what is missing until the time is over."""
    from halfmoon.runs import factory, runner

    end = time.monotonic() + 60 * minutes
    shared = dict[Any, Any]()
    found = None
    done = {(line["data"], *_point(line)) for line in lines()}
    for point in points(data, part, seeds):
        if (data, *point) in done:
            continue
        if time.monotonic() > end:
            return
        where, _, _, row, seed = point
        config = configured(data, point, folder)
        if found is None:
            found = factory.load_images(config)
            found = replace(found, test=found.test.rows(_evenly(len(found.test))))
        split = factory.get_split(config, factory.fit_to_network(config, found))
        key = where, config.rounds
        if key not in shared:
            start = time.process_time()
            shared[key] = factory.build_problem(config, split, ("fedavg-fixmatch-global",), found)
            print(f"{data}, {key}: {time.process_time() - start:.0f} s of a core for images and features", flush=True)
        problem = replace(shared[key], split=split)
        start = time.process_time()
        if row in FLOORS:
            accuracy = _floor(row, problem, seed)
        else:
            run_folder = runs / "-".join(map(str, (data, *point))).replace(" ", "_")
            accuracy = runner.run_in_folder(config, run_folder, problem=problem)["accuracy"]["last"]
        line = [data, *point, f"{accuracy:.6f}", f"{time.process_time() - start:.2f}"]
        records.append_rows(LINES, [dict(zip(NAMES, line, strict=True))])
        print(*line, flush=True)


def _evenly(count: int) -> np.ndarray:
    """Return which of so many test images are used."""
    return np.arange(count)[:: -(-count // TEST)]


def _floor(row: str, problem: Any, seed: int) -> float:
    """Return the accuracy of a scikit-learn model that is trained on the labels of all clients."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    rows = problem.split.labeled & (problem.split.client >= 0)
    x, test = (each.images[:, 0, 0].float().numpy() for each in (problem.train, problem.test))
    y, true = (each.labels.numpy() for each in (problem.train, problem.test))
    model = LogisticRegression(max_iter=2000) if row == FLOORS[0] else RandomForestClassifier(300, random_state=seed)
    return float((model.fit(x[rows], y[rows]).predict(test) == true).mean())


def lines() -> list[dict[str, Any]]:
    """Read the finished runs."""
    kinds = {"labels": int, "seed": int, "accuracy": float, "seconds": float}
    return [{name: kinds.get(name, str)(cell) for name, cell in row.items()} for row in records.read_rows(LINES)]


def _point(line: dict[str, Any]) -> Point:
    return line["where"], line["labels"], line["setting"], line["row"], line["seed"]


def report() -> None:
    """Write the tables into the page, and draw the figure."""
    found: Found = {}
    seconds: dict[tuple[Any, ...], list[float]] = {}
    for line in lines():
        key = (line["data"], line["where"], line["setting"], line["row"], line["labels"])
        found.setdefault(key, {})[line["seed"]] = 100 * line["accuracy"]
        seconds.setdefault(key[:4], []).append(line["seconds"])
    page = PAGE.read_text()
    for name, rows in _tables(found, seconds).items():
        page = renewed(page, f"<!-- table: {name} -->\n", rows)
    PAGE.write_text(page)
    _draw(found)


def _tables(found: Found, seconds: dict[tuple[Any, ...], list[float]]) -> dict[str, str]:
    """Return the tables by name: accuracy at each number of labels, the difference from labels only, and seconds."""
    tables: dict[str, list[str]] = {}
    for key in dict.fromkeys(each[:4] for each in found):
        data, where, setting, row = key
        name = f"{data}, {'places' if setting in LABEL_SETTINGS else where}"
        amounts = sorted({each[4] for each in found if each[:3] == key[:3]})
        head = ["method", "clients", *map(str, amounts), "seconds"]
        lines = tables.setdefault(name, [_cells(head), _cells(["---", "---", *["--:"] * (len(amounts) + 1)])])
        cells = [_cell(found, key, amount) for amount in amounts]
        lines.append(_cells([row, setting, *cells, f"{fmean(seconds[key]):.1f}"]))
    return {name: "\n".join(lines) + "\n" for name, lines in tables.items()}


def _cells(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(found: Found, key: tuple[Any, ...], amount: int) -> str:
    """Return a mean, and the paired difference from labels only: of heads from the ridge head."""
    by_seed = found.get((*key, amount), {})
    if not by_seed:
        return ""
    base = {"mixture-head": "ridge-head", "semifl": "partially-supervised", "fl2": "partially-supervised"}
    chosen_options = key[3] in FLOORS or key[3] in base.values() or key[3] == "fedavg"
    other = found.get((*key[:3], base.get(key[3], "fedavg"), amount), {})
    differences = [value - other[seed] for seed, value in by_seed.items() if seed in other]
    gain = "" if chosen_options or not differences else f" ({interval(fmean(differences), half_interval(differences))})"
    return f"{fmean(by_seed.values()):.1f}{gain}"


def _draw(found: Found) -> None:
    """Draw accuracy over labels a class, a panel for each set."""
    from halfmoon.report.figures import new_figure, save_figure, style_axes

    shown = [(row, "even") for row in ROWS if row != "fedavg-fixmatch-global"]
    shown += [("fedavg", "uneven"), *((row, "pooled") for row in FLOORS)]
    figure = new_figure(11, 3.6)
    for panel, data in enumerate(SHARES, start=1):
        axes = figure.add_subplot(1, len(SHARES), panel)
        for number, (row, setting) in enumerate(shown):
            means = [fmean(found[data, "features", setting, row, count].values()) for count in LABELS]
            dashes = "--" if setting != "even" else "-"
            axes.plot(LABELS, means, dashes, color=f"C{number}", marker="o", ms=3, label=f"{row}, {setting}")
        axes.set(title=data, xscale="log", xlabel="labels a class", xticks=LABELS, xticklabels=LABELS)
        style_axes(axes)
    figure.axes[0].set_ylabel("test accuracy (%)")
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(names), fontsize=7, frameon=False)
    save_figure(figure, FIGURE)


def main() -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_command = commands.add_parser("run")
    run_command.add_argument("data", choices=SHARES)
    run_command.add_argument("--part", choices=("curve", "places", "layers", "scratch"), default="curve")
    run_command.add_argument("--runs", type=Path, required=True)
    run_command.add_argument("--data-dir", type=Path)
    run_command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    run_command.add_argument("--minutes", type=float, default=10)
    commands.add_parser("report")
    given = parser.parse_args()
    if given.command == "report":
        report()
    else:
        train_missing(given.data, given.part, given.seeds, given.runs, given.data_dir, given.minutes)


if __name__ == "__main__":
    sys.exit(main())
