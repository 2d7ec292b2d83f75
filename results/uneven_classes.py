"""Compare heads where the classes of the unlabeled images are even, uneven, and as the set has them.

    python results/uneven_classes.py --data-dir DATA --features FEATURES --out uneven_classes.csv

The mixture head takes classes for even unless the totals of its soft labels differ clearly; it is compared with itself
where they are always taken for even, and with the ridge head. Accuracy is measured on official test images, weighted to
have the class mix of the unlabeled images, and as the mean recall of the classes. No image or draw of labels of this
script chose a constant: the 3,000 images of results/decisions.py, which did, are left out. Features are computed once and
stored in the folder FEATURES.
"""

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decisions import HEAD_OPTIONS, IMAGES, load_source

from halfmoon.api.types import Task
from halfmoon.data import Images
from halfmoon.engine.evaluation import Examples
from halfmoon.methods.analytic import MixtureHead, RidgeHead
from halfmoon.runs import factory
from halfmoon.runs.features import load_or_compute_features
from halfmoon.studies.decision import solve_heads
from halfmoon.studies.folds import Fold
from halfmoon.studies.plan import head_task

SETS = ("cifar10", "fashion_mnist", "pneumonia_mnist")
MIXES = ("even", "set", "1:5", "1:10")
"""Class mixes of the unlabeled images: even; that of the set, if it is uneven; and a largest class five or ten times the
smallest, with the others between them in equal ratios and in an order that each draw chooses."""

ALWAYS_EVEN = 1e9
METHODS = {
    "ridge head": RidgeHead(),
    "mixture head, even shares": MixtureHead(share_noise=ALWAYS_EVEN),
    "mixture head": MixtureHead(),
}
COLUMNS = ("set", "mix", "labels", "draw", "method", "accuracy", "balanced")
IMAGE_SEED = 55


def load_features(name: str, options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, int, Task]:
    """Load the features and labels of training images, then test images; compute and store them if they are not yet.

    Returns:
        Features (N, 1, 1, F), labels (N,), the number of training images, and the task on features.
    """
    config, source = load_source(name, options.data_dir)
    train_count = len(source.train.labels)
    count = train_count + len(source.test.labels)
    used = np.random.default_rng(0).permutation(count)[:IMAGES]  # as results/decisions.py draws them
    order = np.setdiff1d(np.arange(count), used)
    order = np.random.default_rng(IMAGE_SEED).permutation(order)
    train_rows = order[order < train_count][: options.images]
    test_rows = order[order >= train_count][: options.tests]
    rows = np.concatenate([train_rows, test_rows])
    images = np.concatenate([source.train.images, source.test.images])
    labels = np.concatenate([source.train.labels, source.test.labels])[rows]
    height, width, channels = images.shape[1:]
    spec = factory.ImageSpec((channels, height, width), source.classes, False, source.mean, source.std)
    head, task, normalize = head_task(config, spec)
    examples = factory.to_examples(Images(images[rows], labels), torch.device("cpu"))
    views = factory.build_views(config, spec)
    features = load_or_compute_features(head, views, normalize, options.features, examples)
    return features.images[:, :1].float().numpy(), labels, len(train_rows), task


def draw_shares(mix: str, labels: np.ndarray, classes: int, generator: np.random.Generator) -> np.ndarray:
    """Draw the share of each class."""
    if mix == "set":
        return np.bincount(labels, minlength=classes) / len(labels)
    ratio = 1.0 if mix == "even" else float(mix.removeprefix("1:"))
    shares = ratio ** -np.linspace(0, 1, classes)
    return generator.permutation(shares / shares.sum())


def draw_fold(labels: np.ndarray, tests: int, shares: np.ndarray, count: int, generator: np.random.Generator) -> Fold:
    """Draw `count` labeled images of each class, and as many unlabeled ones as have these shares.

    Args:
        labels: of all rows, of which the last `tests` are test images.
        tests: the number of test images.
        shares: the share of each class.
        count: labels a class.
        generator: draws the images.
    """
    order = generator.permutation(len(labels) - tests)
    by_class = [order[labels[order] == label] for label in range(len(shares))]
    labeled = np.concatenate([rows[:count] for rows in by_class])
    others = [rows[count:] for rows in by_class]
    total = min(len(rows) / share for rows, share in zip(others, shares, strict=True))
    unlabeled = [rows[: round(total * share)] for rows, share in zip(others, shares, strict=True)]
    return Fold(np.sort(labeled), np.sort(np.concatenate(unlabeled)), np.arange(len(labels) - tests, len(labels)))


def measure(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the accuracies of each head for each mix, number of labels and draw, in percent."""
    values, labels, train_count, task = load_features(name, options)
    classes = int(labels.max()) + 1
    data = Examples(torch.from_numpy(values), torch.from_numpy(labels))
    for mix in MIXES:
        if mix == "set" and name != "pneumonia_mnist":
            continue  # the same as even
        for count in options.labels:
            for draw in options.draws:
                generator = np.random.default_rng((draw, count))
                shares = draw_shares(mix, labels, classes, generator)
                fold = draw_fold(labels, len(labels) - train_count, shares, count, generator)
                for method, model in zip(METHODS, solve_heads(list(METHODS.values()), task, data, fold), strict=True):
                    logits = task.network.predict(
                        model["params"], model["stats"], task.normalize(data.images[torch.from_numpy(fold.test)])
                    )
                    correct = logits.argmax(1).numpy() == labels[fold.test]
                    recalls = np.array([correct[labels[fold.test] == label].mean() for label in range(classes)])
                    numbers = (100 * float(shares @ recalls), 100 * float(recalls.mean()))
                    yield dict(zip(COLUMNS, (name, mix, count, draw, method, *numbers), strict=True))


def summarize(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of the table."""
    yield "| set | mix | labels a class | ridge | even shares | **estimated shares** | difference | difference in mean recall |"
    yield "| --- | --- | --: | --: | --: | --: | --: | --: |"
    for cell in dict.fromkeys((row["set"], row["mix"], row["labels"]) for row in rows):
        selected = [row for row in rows if (row["set"], row["mix"], row["labels"]) == cell]
        ridge, even, estimated = (
            np.array([(row["accuracy"], row["balanced"]) for row in selected if row["method"] == name])
            for name in METHODS
        )
        accuracies = " | ".join(f"{values[:, 0].mean():.1f}" for values in (ridge, even, estimated))
        differences = estimated - even
        errors = differences.std(0, ddof=1) / len(differences) ** 0.5
        texts = [f"{mean:+.1f} ± {error:.1f}" for mean, error in zip(differences.mean(0), errors, strict=True)]
        yield f"| {' | '.join(map(str, cell))} | {accuracies} | {' | '.join(texts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--labels", type=int, nargs="+", default=(1, 3, 10))
    parser.add_argument("--draws", type=int, nargs="+", default=range(5))
    parser.add_argument("--images", type=int, default=3000)
    parser.add_argument("--tests", type=int, default=2000)
    options = parser.parse_args()
    assert HEAD_OPTIONS["rounds"] == 1 + MixtureHead().em_rounds
    rows: list[dict[str, Any]] = []
    for name in options.sets:
        for row in measure(name, options):
            rows.append(row)
            # Written after every row, so that a run that is stopped leaves what it has measured.
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(rows)
    print("\n".join(summarize(rows)))


if __name__ == "__main__":
    main()
