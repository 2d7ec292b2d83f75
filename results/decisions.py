"""Simulate decisions whether unlabeled images help, as `halfmoon run --data FOLDER` makes them, and compare with the truth.

    python results/decisions.py --data-dir DATA --features FEATURES --out decisions.csv [--decisions 25] [--labels 3]

Each decision has a few labeled images of each class, drawn at random, and unlabeled images. Its truth is the accuracy
of the two heads on images that take no part in it. Features are computed once and stored in the folder FEATURES.
"""

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfmoon.config import schema as settings
from halfmoon.data import Images, Source
from halfmoon.engine.evaluation import Examples
from halfmoon.methods import registry
from halfmoon.models.efficientnet import FEATURES
from halfmoon.runs import factory
from halfmoon.runs.features import load_or_compute_features
from halfmoon.studies.decision import Decision
from halfmoon.studies.fold_solver import FoldSolver
from halfmoon.studies.folds import Fold, cross_validation_folds
from halfmoon.studies.head_comparison import decide_by_image, predict_folds
from halfmoon.studies.plan import HEADS, PRETRAINED, head_task

SETS = ("cifar10", "fashion_mnist", "pneumonia_mnist", "digits")
IMAGES = 3000
"""Images of a set that get features, drawn at random."""

HEAD_OPTIONS = {"network": PRETRAINED, "method": HEADS[1], "clients": 2, "cohort": 2, "rounds": 11, "budget": "none"}
COLUMNS = ("set", "draw", "kind", "estimate", "low", "high", "truth", "labels_only", "with_unlabeled", "missing")


def load_source(name: str, data_dir: Path) -> tuple[settings.Config, Source]:
    """Load a data set, and the configuration of heads on its features."""
    place = {} if name == "digits" else {"data_dir": data_dir}
    config = settings.resolve({}, {"data": name, **HEAD_OPTIONS, **place})
    return config, factory.load_images(config)


def load_features(name: str, data_dir: Path, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Load the features (N, 1, 1, F) and labels (N,) of a set, or compute and store them."""
    path = folder / f"{name}.npz"
    if path.exists():
        stored = np.load(path)
        return stored["values"], stored["labels"]
    config, source = load_source(name, data_dir)
    images = np.concatenate([source.train.images, source.test.images])
    labels = np.concatenate([source.train.labels, source.test.labels])
    rows = np.sort(np.random.default_rng(0).permutation(len(labels))[:IMAGES])
    height, width, channels = images.shape[1:]
    spec = factory.ImageSpec((channels, height, width), source.classes, False, source.mean, source.std)
    head, _, normalize = head_task(config, spec)
    examples = factory.to_examples(Images(images[rows], labels[rows]), torch.device("cpu"))
    features = load_or_compute_features(head, factory.build_views(config, spec), normalize, folder, examples)
    values = features.images[:, :1].numpy()
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(path, values=values, labels=labels[rows])
    return values, labels[rows]


def draw_rows(labels: np.ndarray, labels_per_class: int, unlabeled: int, seed: int) -> Fold:
    """Draw the labeled rows, the unlabeled rows, and the rows that measure the truth."""
    order = np.random.default_rng(seed).permutation(len(labels))
    classes = range(int(labels.max()) + 1)
    labeled = np.concatenate([order[labels[order] == label][:labels_per_class] for label in classes])
    others = order[~np.isin(order, labeled)]
    return Fold(labeled, others[:unlabeled], others[unlabeled:])


def simulate(values: np.ndarray, labels: np.ndarray, rows: Fold) -> tuple[Decision, list[float]]:
    """Make one decision, and measure the true balanced accuracy of both heads, in percent."""
    classes = int(labels.max()) + 1
    config = settings.resolve({}, {"data": "digits", **HEAD_OPTIONS})
    names = tuple(map(str, range(classes)))
    _, task, _ = head_task(config, factory.ImageSpec((3, 32, 32), names, False, (0.5,) * 3, (0.5,) * 3))
    methods = [registry.make(name) for name in HEADS]
    used = np.concatenate([rows.labeled, rows.unlabeled])
    known = torch.from_numpy(np.where(np.arange(len(used)) < len(rows.labeled), labels[used], -1))
    solver = FoldSolver(task, Examples(torch.from_numpy(values[used]), known))
    predictions = predict_folds(solver, *methods, cross_validation_folds(solver.labels))
    assert predictions is not None, "every class has several labels"
    everything = Fold(np.flatnonzero(solver.labels >= 0), np.flatnonzero(solver.labels < 0), np.arange(0))
    test_labels = labels[rows.test]
    truth: list[float] = []
    for method in methods:
        correct = solver.predict(method, everything, torch.from_numpy(values[rows.test])) == test_labels
        truth.append(100 * float(np.mean([correct[test_labels == label].mean() for label in range(classes)])))
    return decide_by_image(predictions), truth


def summarize(rows: list[dict[str, Any]]) -> str:
    """Summarize decisions in one line of a table."""
    estimates, truths, lows, highs = (
        np.array([row[name] for row in rows]) for name in ("estimate", "truth", "low", "high")
    )
    covered = int(((lows <= truths) & (truths <= highs)).sum())
    kinds = [row["kind"] for row in rows]
    right = sum(kind == "help" and truth > 0 for kind, truth in zip(kinds, truths, strict=True))
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("help", "equal", "harm", "unknown"))
    return (
        f"{len(rows)} decisions: estimate {estimates.mean():+.1f}, truth {truths.mean():+.1f}; interval holds the truth "
        f"{covered}, mean half width {(highs - lows).mean() / 2:.1f}; {counts}; help is right {right}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--decisions", type=int, default=25, help="of each set")
    parser.add_argument("--labels", type=int, default=3, help="of each class")
    parser.add_argument("--unlabeled", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first draw")
    options = parser.parse_args()
    table: list[dict[str, Any]] = []
    for name in options.sets:
        values, labels = load_features(name, options.data_dir, options.features)
        assert values.shape[-1] >= FEATURES, "features of the backbone"
        for draw in range(options.seed, options.seed + options.decisions):
            decision, truth = simulate(values, labels, draw_rows(labels, options.labels, options.unlabeled, draw))
            mean, low, high, _ = decision.difference
            numbers = (mean, low, high, truth[1] - truth[0], decision.base, decision.ours, decision.missing)
            table.append(dict(zip(COLUMNS, (name, draw, decision.kind, *numbers), strict=True)))
            # Written after every decision, so that a run that is stopped leaves what it has made.
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(table)
        print(f"{name}: {summarize([row for row in table if row['set'] == name])}", flush=True)
    print(f"all: {summarize(table)}")


if __name__ == "__main__":
    main()
