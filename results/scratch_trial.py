"""Compare training from scratch with heads on features, and the choice that a plan makes between them with the truth.

    python results/scratch_trial.py --data-dir DATA --runs RUNS --out scratch_trial.csv [--sets digits] [--labels 10]

Each row is one plan of `halfmoon.run` on images in memory, of which few have a label, with a trial of training from
scratch. Its truth is the accuracy of the preferred head, and of the best method from scratch trained on all labels, on
images that take no part in the plan. A side in pixels resizes the images first, like photographs of the same objects.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import halfmoon
from halfmoon.runs import factory
from halfmoon.runs.callbacks import NULL_CALLBACK
from halfmoon.storage import atomic_io
from halfmoon.studies import run_plan
from halfmoon.studies.plan import single_client_split
from halfmoon.studies.run_trial import FOLDER, load_trial_images, train_from_scratch

IMAGES = {"digits": 600, "fashion_mnist": 600}
"""Training images of a plan; a quarter more where all have a label."""

UNLABELED_SHARE = 0.25
"""Share of the training images that has no label at least."""

TESTS = 1000
"""Images of the truth, fewer where a set has fewer."""

COLUMNS: tuple[str, ...] = (
    "set", "side", "labels", "draw", "rounds", "splits", "head", "head_cv", "scratch", "scratch_cv", "low", "high",
    "chosen", "head_true", "scratch_true", "minutes",
)  # fmt: skip


def resize(images: np.ndarray, side: int | None) -> np.ndarray:
    """Resize gray images (N, H, W, 1) to a side in pixels."""
    if side is None:
        return images
    resized = [Image.fromarray(image[..., 0]).resize((side, side), Image.Resampling.BICUBIC) for image in images]
    return np.stack([np.asarray(image) for image in resized])[..., None]


def draw_images(name: str, data_dir: Path, labels: int, draw: int, side: int | None) -> tuple[Any, Any]:
    """Draw the images of a plan, of which `labels` a class have a label, and the images of its truth."""
    source = halfmoon.load_data(name, data_dir)
    images = np.concatenate([source.train.images, source.test.images])
    classes = np.concatenate([source.train.labels, source.test.labels])
    generator = np.random.default_rng(draw)
    order = generator.permutation(len(classes))
    count = max(IMAGES[name], round(labels * len(source.classes) / (1 - UNLABELED_SHARE)))
    rows = order[:count]
    tests = order[count:][:TESTS]
    known = np.full(count, -1)
    for label in range(len(source.classes)):
        first = np.flatnonzero(classes[rows] == label)[:labels]
        known[first] = label
    return (resize(images[rows], side), known), (resize(images[tests], side), classes[tests])


def run_draw(arguments: argparse.Namespace, name: str, labels: int, draw: int) -> dict[str, Any]:
    """Run a plan with a trial, and measure the truth of both sides."""
    data, tests = draw_images(name, arguments.data_dir, labels, draw, arguments.side)
    folder = arguments.runs / f"{name}-{arguments.side}-{labels}-{draw}"
    results = halfmoon.run(data=data, minutes=arguments.minutes, scratch_trial=True, run_dir=folder, progress=False)
    trial = results.scratch_trial
    assert trial is not None, "the plan has a trial"
    plan = run_plan.load_plan(folder)
    assert plan is not None
    assert plan.trial is not None
    best = max(trial["methods"], key=lambda method: method["accuracy"])
    path = folder / FOLDER / best["name"]
    if trial["model"] is None:  # a plan does not train a model that it does not use
        source = load_trial_images(plan, plan.trial)
        problem = factory.build_problem(plan.trial.config, single_client_split(source.train.labels), raw=source)
        train_from_scratch(plan.trial.config, best["name"], path, problem, NULL_CALLBACK, tests=False)
    head = folder if trial["head"]["name"] == plan.config.method else folder / "baselines" / trial["head"]["name"]

    def measure(model: Path) -> float:
        return round(100 * halfmoon.load_model(model).evaluate(tests)["accuracy"], 1)

    summaries = [atomic_io.read_json(file) for file in (folder / FOLDER).rglob("summary.json")]
    return {
        "set": name,
        "side": arguments.side or data[0].shape[1],
        "labels": labels,
        "draw": draw,
        "rounds": plan.trial.config.rounds,
        "splits": trial["splits"],
        "head": trial["head"]["name"],
        "head_cv": round(trial["head"]["accuracy"], 1),
        "scratch": best["name"],
        "scratch_cv": round(best["accuracy"], 1),
        "low": round(trial["low"], 1),
        "high": round(trial["high"], 1),
        "chosen": "features" if trial["model"] is None else "scratch",
        "head_true": measure(head),
        "scratch_true": measure(path),
        "minutes": round(sum(summary["seconds"] for summary in summaries if summary) / 60, 1),
    }


def main() -> None:
    """Write a row for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs; finished ones are read")
    parser.add_argument("--out", type=Path, required=True, help="table to add rows to")
    parser.add_argument("--sets", nargs="+", choices=list(IMAGES), default=list(IMAGES))
    parser.add_argument("--labels", nargs="+", type=int, default=[3, 10, 100], help="labels a class")
    parser.add_argument("--draws", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--side", type=int, help="resize the images to this side first")
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="time limit of a plan; a trial has 60 rounds or more"
    )
    arguments = parser.parse_args()
    is_new = not arguments.out.exists()
    with arguments.out.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS)
        if is_new:
            table.writeheader()
        for draw in arguments.draws:
            for name in arguments.sets:
                for labels in arguments.labels:
                    row = run_draw(arguments, name, labels, draw)
                    table.writerow(row)
                    file.flush()
                    print(row, flush=True)


if __name__ == "__main__":
    main()
