"""The lone site's recipe while its images are labeled: features once, then a head in seconds, its guesses, and how
often it is right by cross-validation.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import Method, Task
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.core.user_cache import user_cache
from halfmoon.data import Images
from halfmoon.data.partition.primitives import stream
from halfmoon.engine.evaluation import Examples
from halfmoon.methods.analytic import directions
from halfmoon.models.efficientnet import MEAN, STD, centered
from halfmoon.runs import factory
from halfmoon.runs.factory import ImageSpec
from halfmoon.runs.features import features
from halfmoon.runs.pools import processors
from halfmoon.studies.decision import FOLDS, MARGIN, Fold, folds, head_accuracy, interval, solved
from halfmoon.studies.plan import head_config, head_task
from halfmoon.studies.scan_folder import Contents, looked_at, readable

LEAST = 20
"""Random labels on which a head is judged alone."""

PART = 256
"""Images that are decoded together: they bound the memory."""

DIRECTIONS, SAMPLE = 32, 2000
"""Principal directions of the features for orders and for similar images, and images from which they are computed."""

Progress = Callable[[str, int, int], None]
"""Told which step it is, how many of its parts are done, and of how many."""


class Point(NamedTuple):
    """A training on so many labels: percent right by cross-validation, and what the second half of the labels brought.

    Both with their 95 % intervals. `random` labels were drawn by chance; it was judged on `judged` of all.
    """

    labels: int
    random: int
    judged: int
    accuracy: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float

    @property
    def advice(self) -> str:
        """Say whether more labels help: no where the second half brought less than `MARGIN` for sure."""
        words = f"the second half of these labels brought {self.gain:+.1f} points"
        words += f" (95 % {self.gain_low:+.1f} to {self.gain_high:+.1f})"
        if self.gain_high < MARGIN:
            return f"More labels hardly help: {words}, less than {MARGIN:g}."
        return f"More labels help: {words}." if self.gain_low > 0 else f"Label more to see whether it helps: {words}."


@dataclass(frozen=True, eq=False)
class FolderFeatures:
    """Features of the images of a folder that could be read, half (n, 1, 1, F), and which `rows` these are."""

    contents: Contents
    values: Tensor
    rows: np.ndarray


def folder_features(folder: Path, paths: Sequence[str], tell: Progress) -> FolderFeatures:
    """Return the features of a folder's images; raise UserError where none can be read."""
    contents = looked_at(folder, ("a", "b"), [folder / path for path in paths], np.full(len(paths), -1))
    config, form = head_config({}, contents)[0], _form(contents)
    head, _, normalize = head_task(config, form)
    views, cache = factory.views(config, form), user_cache("features")
    values, indices = list[Tensor](), list[np.ndarray]()
    for first in range(0, len(paths), PART):
        tell("features of images", first, len(paths))
        rows = np.arange(first, min(first + PART, len(paths)))
        pixels, rows = readable(contents, rows, factory.preparation(config), lambda words: None)
        if pixels:
            images = factory.examples(Images(np.stack(pixels), contents.labels[rows]), torch.device("cpu"))
            values.append(features(head, views, normalize, cache, images).images)
            indices.append(rows)
    if not indices:
        raise UserError(f"{folder}: none of its images can be read; see halfmoon site check.")
    return FolderFeatures(contents, torch.cat(values), np.concatenate(indices))


def _form(contents: Contents) -> ImageSpec:
    channels = contents.channels
    shape = channels, contents.side, contents.side
    return ImageSpec(shape, contents.classes, False, MEAN[:channels], STD[:channels])


@dataclass(frozen=True, eq=False)
class HeadProblem:
    """The recommended head for a folder's images and the labels that they have now."""

    classes: tuple[str, ...]
    task: Task
    method: Method
    data: Examples

    def solved(self) -> Tree:
        """Return the head of all labels."""
        labels = self.data.labels.numpy()
        everything = Fold(np.flatnonzero(labels >= 0), np.flatnonzero(labels < 0), np.arange(0))
        return solved(self.method, self.task, self.data, everything)

    def cross_validate(self, tell: Progress, sample: np.ndarray | None = None) -> Point | None:
        """Return how often such a head is right, by cross-validation; None where a class of two labels is missing.

        It is judged on labels that chance drew, `sample` bool (n,), or on all where these are fewer than `LEAST`.
        """
        labels = self.data.labels.numpy()
        random = int(sample.sum()) if sample is not None else int((labels >= 0).sum())
        tests = sample if sample is not None and random >= LEAST else labels >= 0
        splits = [fold._replace(test=fold.test[tests[fold.test]]) for fold in folds(labels)]
        splits = [fold for fold in splits if len(fold.test)]
        whole, halves = list[float](), list[float]()

        def right(number: int) -> list[float]:
            both = splits[number], half(splits[number], labels, number)
            return [head_accuracy(self.method, self.task, self.data, fold) for fold in both]

        with ThreadPoolExecutor(len(processors())) as pool:
            for number, (one, other) in enumerate(pool.map(right, range(len(splits))), start=1):
                whole.append(one)
                halves.append(other)
                tell("splits of the cross-validation", number, len(splits))
        if len(splits) < 2:
            return None
        counts = int((labels >= 0).sum()), random, int(tests.sum())
        accuracy, gain = (interval(whole, base, 1 / (FOLDS - 1), counts[2]) for base in ([0.0] * len(whole), halves))
        ends = max(0.0, accuracy.low), min(100.0, accuracy.high)
        return Point(*counts, accuracy.mean, *ends, gain.mean, gain.low, gain.high)


def problem(own: FolderFeatures, labels: np.ndarray, names: Sequence[str]) -> HeadProblem:
    """Return the problem of these labels, int64 (N,) with -1 for none; classes without a label are left out.

    Raise UserError where fewer than two have one.
    """
    numbers, mine = np.unique(labels[own.rows], return_inverse=True)
    mine = mine - int(numbers[0] < 0)
    classes = tuple(names[int(number)] for number in numbers if number >= 0)
    if len(classes) < 2:
        raise UserError("The images that can be read have labels of fewer than two classes: label more of them.")
    contents = replace(own.contents, classes=classes, labels=mine)
    config = head_config({}, contents)[0]
    task = head_task(config, _form(contents))[1]
    return HeadProblem(classes, task, factory.method(config), Examples(own.values, torch.from_numpy(mine)))


def guesses(head: HeadProblem, model: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities float64 (n, K) and the leading `DIRECTIONS` of h, float32 (n, D), of a problem's images."""
    x = head.data.images[:, 0, 0].float()
    h = centered(x, tree.flatten(model["params"])[f"{head.task.network.head}/center"])
    some = h[:: -(-len(h) // SAMPLE)].double()
    near = h @ directions(some.T @ some, DIRECTIONS).float()
    return head.task.network.predict(model["params"], {}, x).double().softmax(-1).numpy(), near.numpy()


def half(fold: Fold, labels: np.ndarray, number: int) -> Fold:
    """Return a fold in which every other label of each class, drawn by its number, is unknown."""
    order = stream(0, "half of the labels", str(number)).permutation(fold.labeled)
    parts = [order[labels[order] == label] for label in np.unique(labels[order])]
    labeled = np.sort(np.concatenate([part[: -(-len(part) // 2)] for part in parts]))
    return fold._replace(labeled=labeled, unlabeled=np.sort(np.setdiff1d(np.r_[fold.labeled, fold.unlabeled], labeled)))
