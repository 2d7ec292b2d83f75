"""Compare heads on features of the top of EfficientNet-Lite0 with heads on those of the top and of middle blocks.

    python results/heads.py DATA [--images 850] [--tests 700] [--seeds 100 101 102 103 104]

DATA is a folder with `cifar10`, `fashion_mnist` and `pneumonia_mnist`. For each seed, labels of 1, 3, 10 and 100 images a
class are drawn, up to half of the training images; the others are unlabeled. Accuracy is that on official test images.
The features of the top are the first 1,280, so that both heads have the same images, labels and network passes.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

import halfmoon
from halfmoon import Config
from halfmoon.core import hubs
from halfmoon.core.user_cache import user_cache
from halfmoon.engine.evaluation import Examples
from halfmoon.methods.analytic import MixtureHead, RidgeHead
from halfmoon.models.efficientnet import FEATURES, MEAN, STD
from halfmoon.runs import factory
from halfmoon.runs.factory import ImageSpec
from halfmoon.runs.features import load_or_compute_features
from halfmoon.studies.decision import Fold, model_accuracy, solve_heads
from halfmoon.studies.plan import head_task

SETS = ("cifar10", "fashion_mnist", "pneumonia_mnist")
LABELS = (1, 3, 10, 100)
METHODS = (RidgeHead(), MixtureHead())
NETWORKS = ("efficientnet-lite0", hubs.MULTILAYER)
IMAGE_SEED = 77
"""Seed of the drawn images; the constants of the features were chosen on other images."""


def draw_images(images: halfmoon.Images, count: int) -> Examples:
    """Draw `count` images without replacement."""
    rows = np.random.default_rng(IMAGE_SEED).permutation(len(images.labels))[:count]
    pixels = images.images[rows].reshape(len(rows), *images.images.shape[1:3], -1)
    return factory.to_examples(halfmoon.Images(pixels, images.labels[rows]), torch.device("cpu"))


def compare(name: str, folder: Path, images: int, tests: int, seeds: list[int]) -> None:
    """Print a row for each number of labels of one set."""
    source = halfmoon.load_data(name, folder)
    examples = [draw_images(source.train, images), draw_images(source.test, tests)]
    labels = torch.cat([each.labels for each in examples])
    shape = examples[0].images.shape[1:]
    channels = shape[0]
    spec = ImageSpec(tuple(shape), source.classes, False, MEAN[:channels], STD[:channels])
    values: torch.Tensor | None = None
    tasks = []
    for network in reversed(NETWORKS):
        config = Config(method="mixture-head", network=network, data=name, rounds=1 + METHODS[1].em_rounds, clients=1)
        head, task, normalize = head_task(config, spec)
        tasks.insert(0, task)
        if values is None:
            views = factory.build_views(config, spec)
            cache = user_cache("features")
            parts = [load_or_compute_features(head, views, normalize, cache, each).images for each in examples]
            values = torch.cat(parts)
    assert values is not None
    train_labels = labels[: len(examples[0].labels)].numpy()
    test_rows = np.arange(len(train_labels), len(labels))
    for count in LABELS:
        if 2 * count * len(source.classes) > images:
            continue  # most images would be labeled
        accuracies: dict[tuple[int, int], list[float]] = {}
        for seed in seeds:
            generator = np.random.default_rng(seed)
            labeled = np.concatenate(
                [
                    generator.permutation(np.flatnonzero(train_labels == label))[:count]
                    for label in range(len(source.classes))
                ]
            )
            unlabeled = np.setdiff1d(np.arange(len(train_labels)), labeled)
            fold = Fold(np.sort(labeled), unlabeled, test_rows)
            for row, (task, features) in enumerate(zip(tasks, (values[..., :FEATURES], values), strict=True)):
                data = Examples(features, labels)
                for column, model in enumerate(solve_heads(METHODS, task, data, fold)):
                    accuracies.setdefault((row, column), []).append(model_accuracy(task, model, data, test_rows))
        cells = [f"{np.mean(accuracies[row, column]):.1f}" for column in (0, 1) for row in (0, 1)]
        gains = np.subtract(accuracies[1, 1], accuracies[0, 1])
        error = gains.std(ddof=1) / len(gains) ** 0.5
        print(f"| {name} | {count} | {' | '.join(cells)} | {gains.mean():+.1f} ± {error:.1f} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--images", type=int, default=850)
    parser.add_argument("--tests", type=int, default=700)
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101, 102, 103, 104])
    parser.add_argument("--sets", nargs="+", default=SETS)
    arguments = parser.parse_args()
    print("| set | labels a class | ridge, top | ridge, both | mixture, top | mixture, both | mixture: both - top |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for name in arguments.sets:
        compare(name, arguments.data, arguments.images, arguments.tests, arguments.seeds)


if __name__ == "__main__":
    main()
