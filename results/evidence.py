"""What semi-supervision gains, data set by data set: train the runs; write the tables, evidence.csv, evidence.png.

    python results/evidence.py run digits --runs RUNS [--data-dir DATA] [--seeds 0 1 2 3 4] [--rows fedavg feddure]
    python results/evidence.py report

`run` trains, appends a line to evidence.jsonl.gz for every finished run, skips the runs that have one, and resumes a run
that was stopped. Seed S is the seed of training and of the split, so an interval covers both. The recipes below were
chosen on validation images of seeds 100 to 102 (docs/training.md); no test image chose anything.
"""

import argparse
import base64
import csv
import io
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import records

HERE = Path(__file__).parent
LINES, SHEET, PICTURE = (HERE / f"evidence.{suffix}" for suffix in ("jsonl.gz", "csv", "png"))
PAGES = (
    HERE / "evidence.md",
    HERE / "evidence_images.md",
    HERE / "evidence_xrays.md",
    HERE / "evidence_older.md",
)
"""Where tables stand, between `<!-- table: NAME -->` and `END`."""
END = "<!-- /table -->"

SHARED: dict[str, Any] = {"setting": "dir-dir", "dirichlet_alpha": 0.5, "schedule": "cosine", "labeled_view": "weak",
                          "network": "small", "budget": "labeled-steps", "reference": "feddure", "device": "cpu",
                          "executor": "loop", "threads": 1, "checkpoint_every": 20}  # fmt: skip
SETS: dict[str, dict[str, Any]] = {
    "digits": {"lr": 6e-3, "rounds": 80, "steps": 6, "labeled_batch": 10, "unlabeled_batch": 30, "clients": 20,
               "cohort": 5, "labels_per_class": 0.5, "evaluate_every": 5},
    "digits, split 0": {"data": "digits", "split_seed": 0, "lr": 6e-3, "rounds": 80, "steps": 6, "labeled_batch": 10,
                        "unlabeled_batch": 30, "clients": 20, "cohort": 5, "labels_per_class": 0.5,
                        "evaluate_every": 5},
    "digits, IID labels": {"data": "digits", "setting": "iid-dir", "lr": 6e-3, "rounds": 80, "steps": 6,
                           "labeled_batch": 10, "unlabeled_batch": 30, "clients": 20, "cohort": 5,
                           "labels_per_class": 0.5, "evaluate_every": 5},
    "main job": {"data": "digits", "split_seed": 0, "setting": "iid-dir", "lr": 6e-3, "rounds": 80, "steps": 6,
                 "labeled_batch": 10, "unlabeled_batch": 30, "clients": 20, "cohort": 5, "labels_per_class": 0.5,
                 "evaluate_every": 5},
    "pneumonia_mnist": {"lr": 8e-3, "rounds": 150, "steps": 6, "labeled_batch": 10, "unlabeled_batch": 20,
                        "clients": 20, "cohort": 5,
                        "labels_per_class": 5.0, "width": 8, "flip": False, "server_ema": 0.9,
                        "validation_share": 0.1, "evaluate_every": 5},
    "pneumonia_mnist, IID labels": {"data": "pneumonia_mnist", "setting": "iid-dir", "lr": 8e-3, "rounds": 150,
                                    "steps": 6, "labeled_batch": 10, "unlabeled_batch": 20, "clients": 20,
                                    "cohort": 5, "labels_per_class": 5.0, "width": 8, "flip": False,
                                    "server_ema": 0.9, "validation_share": 0.1, "evaluate_every": 5},
    "fashion_mnist": {"setting": "iid-dir", "lr": 2e-3, "rounds": 500, "steps": 5, "labeled_batch": 32,
                      "unlabeled_batch": 48, "clients": 20, "cohort": 2, "labels_per_class": 0.5, "network": "resnet9",
                      "width": 8, "precision": "bf16", "server_ema": 0.9, "validation_share": 0.1,
                      "evaluate_every": 50, "checkpoint_every": 100, "reference": "fedavg"},
    "fashion_mnist, 14x14": {"data": "fashion_mnist", "setting": "iid-dir", "lr": 3e-3, "rounds": 80, "steps": 20,
                             "labeled_batch": 32, "unlabeled_batch": 48, "clients": 20, "cohort": 8,
                             "labels_per_class": 0.5, "shrink": 2, "width": 32, "validation_share": 0.1,
                             "evaluate_every": 10, "reference": "fedavg"},
    "fashion_mnist, DIR labels": {"data": "fashion_mnist", "lr": 5e-3, "rounds": 60, "steps": 8, "labeled_batch": 20,
                                  "unlabeled_batch": 30, "clients": 20, "cohort": 5, "labels_per_class": 0.5,
                                  "shrink": 2, "width": 32, "server_ema": 0.9, "validation_share": 0.1,
                                  "evaluate_every": 10},
    "cifar10": {"setting": "iid-iid", "lr": 2e-3, "rounds": 500, "steps": 5, "labeled_batch": 32, "unlabeled_batch": 64,
                "clients": 20, "cohort": 2, "labels_per_class": 5.0, "network": "resnet9", "width": 16, "shrink": 2,
                "precision": "bf16", "server_ema": 0.9, "validation_share": 0.1, "evaluate_every": 50,
                "checkpoint_every": 100, "reference": "fedavg"},
    "cifar10, 10 a round": {"data": "cifar10", "setting": "iid-iid", "lr": 5e-3, "rounds": 100, "steps": 5,
                            "labeled_batch": 32, "unlabeled_batch": 64, "clients": 20, "cohort": 10,
                            "labels_per_class": 5.0, "network": "resnet9", "width": 16, "shrink": 2,
                            "precision": "bf16", "server_ema": 0.8, "validation_share": 0.1, "evaluate_every": 10,
                            "reference": "fedavg"},
    "cifar10, DIR labels": {"data": "cifar10", "lr": 2e-3, "rounds": 150, "steps": 10, "labeled_batch": 16,
                            "unlabeled_batch": 48, "clients": 10, "cohort": 5, "labels_per_class": 10.0,
                            "network": "resnet9", "width": 16, "shrink": 2, "evaluate_every": 25,
                            "reference": "fedavg"},
}  # fmt: skip
"""The recipe of each data set, the same for all methods."""

SETS["pneumonia_mnist, ResNet-9"] = {**SETS["pneumonia_mnist, IID labels"], "lr": 2e-3, "network": "resnet9"}
SETS["pneumonia_mnist, 80 labels"] = {**SETS["pneumonia_mnist, ResNet-9"], "labels_per_class": 2.0,
                                      "unlabeled_batch": 60, "strong_view": "fedloke"}  # fmt: skip
SETS["fashion_mnist, sites alike"] = {**SETS["fashion_mnist"], "data": "fashion_mnist", "setting": "iid-iid",
                                      "unlabeled_batch": 128, "strong_view": "fedloke"}  # fmt: skip
for _name in ("digits", "digits, IID labels"):
    SETS[f"{_name}, kept optimizer"] = {**SETS[_name], "data": "digits", "options": {"keep_optimizer": True}}
SETS["fashion_mnist, float32"] = {**SETS["fashion_mnist"], "data": "fashion_mnist", "precision": "float32"}
SETS["cifar10, float32"] = {**SETS["cifar10"], "data": "cifar10", "precision": "float32"}

THRESHOLD = {
    "pneumonia_mnist": 0.9,
    "pneumonia_mnist, IID labels": 0.9,
    "pneumonia_mnist, ResNet-9": 0.9,
    "pneumonia_mnist, 80 labels": 0.95,
    "fashion_mnist": 0.8,
    "fashion_mnist, float32": 0.8,
    "fashion_mnist, sites alike": 0.8,
    "fashion_mnist, 14x14": 0.8,
    "cifar10": 0.8,
    "cifar10, float32": 0.8,
    "cifar10, 10 a round": 0.8,
    "cifar10, DIR labels": 0.8,
}
"""The confidence that a pseudo-label needs where it is not 0.7: a guess between two classes starts at one half."""

RECEIVED: dict[str, Any] = {"labeling": "running"}
ROWS: dict[str, dict[str, Any]] = {
    "fedavg": {"title": "FedAvg, labels only"},
    "control": {"title": "control: labels only, all images in batch normalization", "method": "fedavg-control",
                "options": {"labels": "round"}, **RECEIVED},
    "control-step": {"title": "control for methods with labels of each step (FedDure, FedMatch)", "method": "fedavg-control"},
    "fedavg-fixmatch": {"title": "FixMatch"},
    "fixmatch-received": {"title": "FixMatch, labels of the received model", "method": "fedavg-fixmatch",
                          "options": {"labels": "round"}, **RECEIVED},
    "fixmatch-received-0.9": {"title": "FixMatch, labels of the received model, threshold 0.9", "method": "fedavg-fixmatch",
                              "options": {"labels": "round", "threshold": 0.9}, **RECEIVED},
    "fixmatch-global": {"title": "FixMatch, labels of the received model at each step",
                        "method": "fedavg-fixmatch-global"},
    "fixmatch-debiased": {"title": "FixMatch, debiased labels of the received model (FedDPL)",
                          "method": "fedavg-fixmatch-global", "options": {"debias": True}},
    "soft": {"title": "soft labels of the averaged model", "method": "fedavg-soft-labels",
             "options": {"labels": "round"}, **RECEIVED},
    "soft-step": {"title": "soft labels of the averaged model at each step", "method": "fedavg-soft-labels"},
    "soft-debiased": {"title": "debiased soft labels of the averaged model", "method": "fedavg-soft-labels",
                      "options": {"labels": "round", "debias": True}, **RECEIVED},
    "soft-step-debiased": {"title": "debiased soft labels of the averaged model at each step",
                           "method": "fedavg-soft-labels", "options": {"debias": True, "debias_over": "step"}},
    "feddure": {"title": "FedDure"},
    "feddure-received": {"title": "FedDure, labels of the received model", "method": "feddure",
                         "options": {"labels": "round", "regulator_bias": 0.0}, **RECEIVED},
    "feddure-step": {"title": "FedDure, labels of each step", "method": "feddure", "options": {"regulator_bias": 0.0}},
    "feddure-debiased": {"title": "FedDure, debiased labels of the received model (FedDPL)", "method": "feddure",
                         "options": {"labels": "round", "regulator_bias": 0.0, "debias": True}, **RECEIVED},
    "feddb": {"title": "FedDB", **RECEIVED},
    "fixmatch-feddpl": {"title": "FixMatch-FedDPL: FedDB, averaged by rows", **RECEIVED},
    "fedmatch": {"title": "FedMatch"},
    "fedloke": {"title": "FedLoKe", "options": {"ramp_rounds": 20}},
    "fedavg-sl": {"title": "FedAvg, all labels"},
    "supervised": {"title": "centralized training, all labels"},
    "alone": {"title": "each site trains separately (mean over sites)", "precision": "float32"},
    "forest": {"title": "random forest, labels of all sites pooled"},
}  # fmt: skip


class Measure(NamedTuple):
    """A measured quantity: the suffix of a table's name, the images, and the heading of its column."""

    suffix: str
    images: str
    head: str


MEASURES = {
    "last": Measure("", "test", "last %"),
    "auc": Measure(", area under the ROC curve", "AUC, test", "AUC %"),
    "held": Measure(", held-out training images", "held-out training", "last %"),
    "held_balanced": Measure(", balanced accuracy of held-out training images", "balanced, held-out", "balanced %"),
    "balanced": Measure(", balanced accuracy", "balanced, test", "balanced %"),
}
"""The last round on the test images; of two classes, the area under the ROC curve of the model that a run keeps; and
the last round on the validation images, where some are set aside. "balanced" is the mean over two classes of the share
of their images that is found, which does not depend on how common they are."""

PICTURED = (("digits, IID labels", "last"), ("digits, IID labels, kept optimizer", "last"),
            ("digits", "last"), ("digits, kept optimizer", "last"),
            ("fashion_mnist", "last"), ("fashion_mnist, sites alike", "last"), ("cifar10", "last"),
            ("pneumonia_mnist, 80 labels", "held"), ("pneumonia_mnist, 80 labels", "held_balanced"),
            ("pneumonia_mnist, 80 labels", "last"), ("pneumonia_mnist, 80 labels", "balanced"),
            ("pneumonia_mnist, 80 labels", "auc"),
            ("pneumonia_mnist, IID labels", "held"), ("pneumonia_mnist, IID labels", "last"),
            ("pneumonia_mnist, IID labels", "auc"), ("pneumonia_mnist", "held"),
            ("pneumonia_mnist", "last"), ("pneumonia_mnist", "auc"))  # fmt: skip
"""The tables that are drawn and told in short; the others are older recipes, or say the same of other images."""

LABELS = {"iid-dir": "evenly", "dir-dir": "unevenly", "iid-iid": "evenly, like all images",
          "pneumonia_mnist, 80 labels": "evenly, 80 in all",
          "digits, IID labels, kept optimizer": "evenly, keep_optimizer",
          "digits, kept optimizer": "unevenly, keep_optimizer"}  # fmt: skip
"""How labels are distributed, in words: by the setting, or by the recipe where that is more precise."""
SHORT = {"FixMatch": ("fixmatch-received", "fixmatch-global", "fixmatch-debiased"),
         "soft labels": ("soft", "soft-step", "soft-step-debiased"),
         "FedDure": ("feddure-received", "feddure-step", "feddure-debiased"),
         "all labels": ("fedavg-sl",), "centralized": ("supervised",)}  # fmt: skip
"""The columns of the table in short, each the first of these methods that was run."""

WITH_THRESHOLD = ("fixmatch-received", "fixmatch-global", "fixmatch-debiased", "feddb", "fixmatch-feddpl")
"""The rows that take `THRESHOLD`."""
FLOOR = "fedavg"
CONTROL = "control"
CEILING = "fedavg-sl"
FLOORS = ("alone", "forest")


def configured(data: str, row: str, seed: int, folder: Path | None) -> Any:
    """Return the configuration of a run."""
    from halfmoon.config.schema import Config

    options = {name: value for name, value in ROWS[row].items() if name != "title"}
    values = {"data": data, "split_seed": seed, "method": row if row not in FLOORS else FLOOR}
    values |= {**SHARED, **SETS[data], **options}
    values["options"] = {**SETS[data].get("options", {}), **options.get("options", {})}
    if row in WITH_THRESHOLD:
        values["options"]["threshold"] = THRESHOLD.get(data, 0.7)
    config = Config(**values, seed=seed, data_dir=folder)
    if row == "supervised":  # as many steps in one place as all clients of a round take together
        return replace(config, steps=config.cohort * (config.steps or 1), budget="none")
    return config


def train_missing(data: str, rows: list[str], seeds: list[int], runs: Path, folder: Path | None) -> None:
    """Train the missing runs, seed by seed, so that the runs of a stopped call still have a comparison."""
    whole = (line for line in records.read_lines(LINES) if line["row"] in FLOORS or "correct" in line)
    done = {(line["data"], line["row"], line["seed"]) for line in whole}
    for seed in seeds:
        for row in rows:
            if (data, row, seed) in done:
                continue
            start_time = time.perf_counter()
            made = floor(data, row, seed, folder) if row in FLOORS else train_run(data, row, seed, runs, folder)
            line = {
                "data": data,
                "row": row,
                "seed": seed,
                **made,
                "seconds": round(time.perf_counter() - start_time, 1),
            }
            records.append_line(LINES, line)
            print(json.dumps(line), flush=True)


def train_run(data: str, row: str, seed: int, runs: Path, folder: Path | None) -> dict[str, Any]:
    """Train one run in its folder, or resume it there, and measure it."""
    from halfmoon.runs import runner

    run_dir = runs / f"{data.replace(', ', '-').replace(' ', '')}-{row}-{seed}"
    summary = runner.run_in_folder(configured(data, row, seed, folder), run_dir)
    score = {**summary["accuracy"], **held(run_dir), **area(data, run_dir, folder)}
    return {"accuracy": score, "labeled_steps": summary["cost"]["labeled_steps"], "correct": summary["correct"]}


def area(data: str, run_dir: Path, folder: Path | None) -> dict[str, float]:
    """Compute {"auc": area under the ROC curve} of a run's model on the test images; {} unless there are two classes."""
    from halfmoon import load_data
    from halfmoon.sites.inference.load import load_model
    from halfmoon.sites.inference.measure import area_under_roc

    model = load_model(run_dir)
    if len(model.classes) != 2:
        return {}
    test = load_data(SETS[data].get("data", data), folder).test
    found = area_under_roc(test.labels, model.probabilities(test.images))
    return {} if found is None else {"auc": found}


def held(run_dir: Path) -> dict[str, float]:
    """Return the last round's accuracy on validation images, where a run has some, and balanced accuracies."""
    end = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    found = {"held": end["validation"]["accuracy"]} if "validation" in end else {}
    for name, subset in (("balanced", "test"), ("held_balanced", "validation")):
        if subset in end and len(end[subset]["per_class"]) == 2:
            found[name] = statistics.fmean(end[subset]["per_class"])
    return found


def floor(data: str, row: str, seed: int, folder: Path | None) -> dict[str, Any]:
    """Measure a baseline without a federation: the mean of one model a site, or a forest on all labels."""
    from halfmoon.data.partition.split import Split
    from halfmoon.runs import factory
    from halfmoon.sites.inference.measure import area_under_roc

    config = configured(data, row, seed, folder)
    with factory.use_threads(factory.count_threads(config)):
        problem = factory.build_problem(config)
        split = problem.split
        train = problem.source.train
        test = problem.source.test
        if row == "forest":
            from sklearn.ensemble import RandomForestClassifier
            from sklearn.metrics import balanced_accuracy_score

            rows = np.flatnonzero(split.labeled & (split.client >= 0))
            forest = RandomForestClassifier(500, random_state=seed)
            forest.fit(train.images[rows].reshape(len(rows), -1), train.labels[rows])
            score = {}
            for name, images in (("last", test), ("held", problem.source.validation)):
                if images is not None:
                    share = forest.predict_proba(images.images.reshape(len(images), -1))
                    predicted = forest.classes_[share.argmax(1)]
                    score[name] = float((predicted == images.labels).mean())
                    if share.shape[1] == 2:
                        found = float(balanced_accuracy_score(images.labels, predicted))
                        score["balanced" if name == "last" else "held_balanced"] = found
                    if name == "last" and share.shape[1] == 2:
                        score |= {"auc": area_under_roc(images.labels, share)}
            return {"accuracy": score}
        shares = []
        for client in range(split.clients):
            site = np.where((split.client == client) & split.labeled, 0, -1)
            shares.append(_train_single_site(config, replace(problem, split=Split(site, site == 0, 1)), split.clients))
        return {"accuracy": {"last": statistics.fmean(shares)}}


def _train_single_site(config: Any, problem: Any, clients: int) -> float:
    """Train on one site's labels for as many local updates as a site has in the federation, at the same decaying rate."""
    from halfmoon.engine.budget import Budget
    from halfmoon.engine.evaluation import evaluate_model
    from halfmoon.engine.local_clients import FederatedDataset, Training
    from halfmoon.engine.loop import initial_model
    from halfmoon.engine.runtime import RuntimeSettings
    from halfmoon.engine.simulation import Simulation
    from halfmoon.runs import factory

    rounds = max(1, config.rounds * config.cohort // clients)
    task = replace(problem.task, rounds=rounds)
    method = factory.build_method(config)
    dataset = FederatedDataset(problem.train, problem.split)
    training = Training(problem.batching, Budget())
    settings = RuntimeSettings(1, config.seed)
    runtime = Simulation(method, task, dataset, problem.views, training, settings)
    server = method.start(task, initial_model(task, config.seed, runtime.device))
    for number in range(rounds):
        runtime.open(number)
        server = method.round(task.at(number), server, runtime)
        runtime.close()
    found = evaluate_model(task.network, method.solution(task, server), task.normalize, problem.test).row()["accuracy"]
    assert isinstance(found, float)
    return found


def renewed(page: str, begin: str, text: str) -> str:
    """Replace the text of a page between the marker `begin` and the next `END`."""
    before, after = page.split(begin, 1)
    return f"{before}{begin}\n{text}\n{END}{after.split(END, 1)[1]}"


def write_sheet(path: Path, names: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> None:
    """Write the numbers behind tables, with three digits."""
    with path.open("w", newline="") as file:
        sheet = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        sheet.writeheader()
        sheet.writerows({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows)


def table(data: str, key: str = "last") -> list[dict[str, Any]]:
    """Compute a row for each method that was run, with its differences to labels only and to the control, by seed.

    `key` is one of `MEASURES`.
    """
    found: dict[str, dict[int, dict[str, Any]]] = {}
    right: dict[str, dict[int, np.ndarray | None]] = {}
    for line in records.read_lines(LINES):
        if line["data"] == data and key in line["accuracy"]:  # of repeated runs the last one counts
            found.setdefault(line["row"], {})[line["seed"]] = line["accuracy"]
            right.setdefault(line["row"], {})[line["seed"]] = correct(line) if key == "last" else None
    base = {seed: 100 * each[key] for seed, each in found.get(FLOOR, {}).items()}
    top = {seed: 100 * each[key] for seed, each in found.get(CEILING, {}).items()}
    control = {seed: 100 * each[key] for seed, each in found.get(CONTROL, {}).items()}
    made = []
    for row in (name for name in ROWS if name in found):
        runs = found[row]
        last = {seed: 100 * each[key] for seed, each in sorted(runs.items())}
        chosen = [100 * each["chosen"] for each in runs.values() if key == "last" and "chosen" in each]
        both = [seed for seed in last if seed in base]
        differences = [last[seed] - base[seed] for seed in both]
        start = control if control else base
        way = [top[seed] - start[seed] for seed in both if seed in top and seed in start]
        line: dict[str, Any] = {
            "data": data,
            "images": MEASURES[key].images,
            "row": row,
            "title": ROWS[row]["title"],
            "seeds": len(last),
        }
        line |= {"last": statistics.fmean(last.values()), "deviation": deviation(list(last.values()))}
        line["chosen"] = statistics.fmean(chosen) if len(chosen) == len(last) else None
        if row != FLOOR and differences:
            line["difference"] = statistics.fmean(differences)
            crossed = crossed_half([(right[row][seed], right[FLOOR][seed]) for seed in both])
            line["half"] = half_interval(differences) if crossed is None else crossed
        common = [seed for seed in last if seed in control]
        if row not in (FLOOR, CONTROL) and common:
            over_control = [last[seed] - control[seed] for seed in common]
            line["over_control"] = statistics.fmean(over_control)
            line["control_seeds"] = len(common)
            crossed = crossed_half([(right[row][seed], right[CONTROL][seed]) for seed in common])
            line["control_half"] = half_interval(over_control) if crossed is None else crossed
        gains = [last[seed] - start[seed] for seed in last if seed in start and seed in top]
        if row not in (FLOOR, CONTROL, CEILING, "supervised", *FLOORS) and way and statistics.fmean(way) > 2 and gains:
            line["share"] = statistics.fmean(gains) / statistics.fmean(way)
        made.append(line)
    return made


def deviation(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def correct(line: dict[str, Any]) -> np.ndarray | None:
    """Return which test images a run's last model is right on, bool (N,); None where another model was kept."""
    if "correct" not in line or "chosen" in line["accuracy"]:
        return None
    bits = np.unpackbits(np.frombuffer(base64.b64decode(line["correct"]), np.uint8)).astype(bool)
    return bits[: round(bits.sum() / line["accuracy"]["last"])]  # without the padding of the last byte


def crossed_half(pairs: list[tuple[np.ndarray | None, np.ndarray | None]]) -> float | None:
    """Return half of the 95 % interval for other splits and other test images, where both are known of all runs."""
    from halfmoon.report.paired import compare_by_image

    if len(pairs) < 3 or any(one is None or two is None for one, two in pairs):
        return None
    found = compare_by_image(*(np.array(side) for side in zip(*pairs, strict=True)))
    return found.high - found.mean


def half_interval(differences: list[float]) -> float | None:
    """Return half of the 95 % interval of the mean of paired differences (Student's t); two say nothing."""
    from scipy.stats import t

    count = len(differences)
    return t.ppf(0.975, count - 1) * statistics.stdev(differences) / math.sqrt(count) if count > 2 else None


def report() -> None:
    """Write the tables, the numbers behind them, and the forest plot."""
    found = {(data, key): table(data, key) for data in SETS for key in MEASURES}
    found = {which: rows for which, rows in found.items() if any(row["row"] == FLOOR for row in rows)}
    names = ("data", "images", "row", "seeds", "last", "deviation", "chosen", "difference", "half", "over_control",
             "control_half", "control_seeds", "share")  # fmt: skip
    write_sheet(SHEET, names, chain.from_iterable(found.values()))
    tables = {
        f"{data}{MEASURES[key].suffix}": _markdown(rows, MEASURES[key].head) for (data, key), rows in found.items()
    }
    tables["in short"] = _columns(_short(found, PICTURED))
    pages = {path: path.read_text() for path in PAGES}
    for title, table_ in tables.items():
        begin = f"<!-- table: {title} -->\n"
        if not any(begin in page for page in pages.values()):
            raise SystemExit(f"No page has a block for {title}: write {begin.strip()} and {END} into {PAGES[0]}.")
        for path, page in pages.items():
            if begin in page:
                pages[path] = renewed(page, begin, table_)
    for path, page in pages.items():
        path.write_text(page)
    _draw(found)


def _markdown(rows: list[dict[str, Any]], head: str) -> str:
    """Return a table; a column that nobody fills is left out."""
    columns = {
        "method": [row["title"] for row in rows],
        head: [spread(row["last"], row["deviation"]) for row in rows],
        "chosen %": ["" if row["chosen"] is None else f"{row['chosen']:.1f}" for row in rows],
        "minus labels only, points (95 %)": [_gain(row) for row in rows],
        "minus control, points (95 %)": [_gain_over_control(row) for row in rows],
        "share of the gap": ["" if row.get("share") is None else f"{row['share']:.0%}" for row in rows],
        "seeds": [str(row["seeds"]) for row in rows],
    }
    return _columns({name: cells for name, cells in columns.items() if any(cells)})


def _short(
    found: dict[tuple[str, str], list[dict[str, Any]]], told: tuple[tuple[str, str], ...]
) -> dict[str, list[str]]:
    """Return the columns of a table of what is gained, a line for each of the tables that are told."""
    columns: dict[str, list[str]] = {}
    for which in told:
        data, key = which
        rows = {row["row"]: row for row in found[which]}
        line = dict(zip(("data set", "labels", "images"), _place(data, key), strict=True))
        line |= {"splits": str(rows[FLOOR]["seeds"])}
        line["labels only, %"] = f"{rows[FLOOR]['last']:.1f}"
        line["control"] = _gain(rows[CONTROL]) if CONTROL in rows else ""
        for head, names in SHORT.items():
            row = next((rows[name] for name in names if name in rows), {})
            share = f", {row['share']:.0%}" if "share" in row else ""
            if "over_control" in row:
                line[head] = _gain_over_control(row) + share
            else:
                splits = f" ({row['seeds']})" if row and row["seeds"] != rows[FLOOR]["seeds"] else ""
                line[head] = _gain(row) + share + splits + (" †" if row else "")
        for head, cell in line.items():
            columns.setdefault(head, []).append(cell)
    return columns


def _place(data: str, key: str) -> tuple[str, str, str]:
    """Return the data set, how its labels are distributed, and the images that are evaluated."""
    lie = LABELS.get(data) or LABELS[{**SHARED, **SETS[data]}["setting"]]
    return SETS[data].get("data", data), lie, MEASURES[key].images


def _columns(columns: dict[str, list[str]]) -> str:
    """Return a Markdown table: words to the left, numbers to the right."""
    head = "| " + " | ".join(columns) + " |\n"
    head += "|" + "|".join("---" if cells[0][:1].isalpha() else "--:" for cells in columns.values()) + "|\n"
    return head + "".join("| " + " | ".join(cells) + " |\n" for cells in zip(*columns.values(), strict=True))


def spread(mean: float, deviation: float | None) -> str:
    """Return a mean over seeds with its deviation, where there is one, for a table."""
    return f"{mean:.1f}" + ("" if deviation is None else f" ± {deviation:.1f}")


def interval(difference: float, half: float | None) -> str:
    """Return a difference with its 95 % interval, where there is one, for a table."""
    return f"{difference:+.1f}" + ("" if half is None else f" [{difference - half:+.1f}, {difference + half:+.1f}]")


def _gain_over_control(row: dict[str, Any]) -> str:
    if "over_control" not in row:
        return ""
    splits = f" ({row['control_seeds']})" if row["control_seeds"] != row["seeds"] else ""
    return interval(row["over_control"], row["control_half"]) + splits


def _gain(row: dict[str, Any]) -> str:
    return interval(row["difference"], row["half"]) if "difference" in row else ""


def _draw(found: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Draw the paired differences with their intervals, a panel a data set."""
    import matplotlib as mpl
    from PIL import Image

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    shown = {
        which: [row for row in found[which] if row.get("half") is not None and row["row"] != "alone"]
        for which in PICTURED
    }
    heights = [len(rows) for rows in shown.values()]
    figure, axes = plt.subplots(len(shown), 1, figsize=(8, 0.9 + 0.34 * sum(heights) + 0.6 * len(shown)),
                                height_ratios=heights, layout="constrained", squeeze=False)  # fmt: skip
    for axis, (which, rows) in zip(axes[:, 0], shown.items(), strict=True):
        data, labels, images = _place(*which)
        for place, row in enumerate(reversed(rows)):
            half = row["half"]
            above = row["difference"] - half > 0
            color = (
                "tab:gray" if row["row"] in (CEILING, "supervised", *FLOORS) else "tab:blue" if above else "tab:orange"
            )
            axis.errorbar(row["difference"], place, xerr=half, fmt="o", color=color, capsize=3)
        axis.set_yticks(range(len(rows)), [row["title"] for row in reversed(rows)])
        axis.set_ylim(-0.6, len(rows) - 0.4)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set_title(
            f"{data}: labels distributed {labels}, {images} images", loc="right", fontsize=10, fontweight="bold"
        )
        axis.grid(axis="x", alpha=0.3)
    figure.supxlabel(
        "points above FedAvg on labels only: mean over seeds and 95 % interval\n"
        "blue: a method whose interval is above zero; orange: another; gray: for comparison",
        fontsize=9,
    )
    drawing = io.BytesIO()
    figure.savefig(drawing, dpi=80, bbox_inches="tight")  # titles of rows are wider than the figure
    Image.open(drawing).convert("RGB").quantize(32).save(PICTURE, optimize=True)  # a fifth of the size in full color


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run_command = commands.add_parser("run")
    run_command.add_argument("data", choices=SETS)
    run_command.add_argument("--runs", type=Path, required=True)
    run_command.add_argument("--data-dir", type=Path)
    run_command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    run_command.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    commands.add_parser("report")
    given = parser.parse_args()
    if given.command == "report":
        report()
    else:
        train_missing(given.data, given.rows, given.seeds, given.runs, given.data_dir)


if __name__ == "__main__":
    sys.exit(main())
