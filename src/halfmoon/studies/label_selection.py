"""Train the head of a site that is still labeling its images: features once, then a head in seconds.

Predicts the unlabeled images for the labeling page, and estimates the head's accuracy by cross-validation.
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
from halfmoon.data.partition.primitives import named_generator
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.executors.pools import available_processors
from halfmoon.methods.analytic import principal_directions
from halfmoon.models.efficientnet import MEAN, STD, centered
from halfmoon.runs import factory
from halfmoon.runs.factory import ImageSpec
from halfmoon.runs.features import load_or_compute_features
from halfmoon.storage.events import NullRecorder
from halfmoon.studies.decision import MARGIN, difference_interval, solve_head
from halfmoon.studies.fold_solver import FoldSolver
from halfmoon.studies.folds import Fold, cross_validation_folds
from halfmoon.studies.plan import head_config, head_task
from halfmoon.studies.scan_folder import FolderContents, decode_images, read_headers

MIN_RANDOM_LABELS = 20
"""Random labels from which on a head is tested on these only."""

BATCH_IMAGES = 256
"""Images that are decoded together: they bound the memory."""

DIRECTIONS = 32
"""Principal directions of the features, for the order of images and for similar images."""

SAMPLE_IMAGES = 2000
"""Images from which the principal directions are computed."""

Progress = Callable[[str, int, int], None]
"""Receives the name of a step, the number of its parts that are done, and the number of all its parts."""


class LabelingResult(NamedTuple):
    """The cross-validated accuracy of a head, in percent, and the gain from the second half of the labels, in points.

    `random` labels were drawn at random; `judged` of all labels were tested on. `low` to `high` and `gain_low` to
    `gain_high` are 95 % intervals. The field names are keys of the folder's trainings-*.jsonl.
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
        """Advise whether to label more: no if the second half of the labels certainly brought less than `MARGIN`."""
        finding = f"the second half of these labels brought {self.gain:+.1f} points"
        finding += f" (95 % {self.gain_low:+.1f} to {self.gain_high:+.1f})"
        if self.gain_high < MARGIN:
            return f"More labels hardly help: {finding}, less than {MARGIN:g}."
        if self.gain_low > 0:
            return f"More labels help: {finding}."
        return f"Label more to see whether it helps: {finding}."


@dataclass(frozen=True, eq=False)
class FolderFeatures:
    """Features of a folder's readable images.

    Attributes:
        contents: the scanned folder.
        values: float16 (n, 1, 1, F).
        rows: int64 (n,), the index of each readable image in the folder's list.
    """

    contents: FolderContents
    values: Tensor
    rows: np.ndarray


def folder_features(folder: Path, paths: Sequence[str], report_progress: Progress) -> FolderFeatures:
    """Compute the features of a folder's images by the pretrained network of a plan, or load them from the user's cache.

    Args:
        folder: the folder that `paths` are in.
        paths: the images, relative to it.
        report_progress: receives the number of images that are done, after each batch.

    Raises:
        UserError: none of the images is readable.
    """
    # Features do not depend on labels: no image has one here, and the two class names are arbitrary, because a task needs
    # at least two classes.
    headers = read_headers(folder, [folder / path for path in paths])
    contents = FolderContents(
        folder=folder,
        classes=("a", "b"),
        paths=tuple(folder / path for path in paths),
        labels=np.full(len(paths), -1),
        tests=0,
        sizes=headers.sizes,
        gray=headers.gray,
        headers=headers.count,
        site=True,
    )
    config, _, _ = head_config({}, contents)
    image_spec = _image_spec(contents)
    head, _, normalize = head_task(config, image_spec)
    views = factory.build_views(config, image_spec)
    cache = user_cache("features")
    values: list[Tensor] = []
    readable_rows: list[np.ndarray] = []
    for first in range(0, len(paths), BATCH_IMAGES):
        report_progress("features of images", first, len(paths))
        rows = np.arange(first, min(first + BATCH_IMAGES, len(paths)))
        # People label one image at a time: whatever cannot be read is left out of the training, however many.
        preparation = replace(factory.image_preparation(config), skip_unreadable=True)
        # `rows` are then those of the readable images.
        pixels, rows, _ = decode_images(contents, rows, preparation, display=NullRecorder())
        if pixels:
            images = factory.to_examples(Images(np.stack(pixels), contents.labels[rows]), torch.device("cpu"))
            values.append(load_or_compute_features(head, views, normalize, cache, images).images)
            readable_rows.append(rows)
    if not readable_rows:
        raise UserError(f"{folder}: none of its images can be read; see halfmoon site check.")
    return FolderFeatures(contents, torch.cat(values), np.concatenate(readable_rows))


def _image_spec(contents: FolderContents) -> ImageSpec:
    channels = contents.channels
    shape = (channels, contents.side, contents.side)
    return ImageSpec(shape, contents.classes, False, MEAN[:channels], STD[:channels])


@dataclass(frozen=True, eq=False)
class HeadProblem:
    """The recommended head for a folder's images and their present labels.

    Attributes:
        classes: the classes that have a label.
        task: the task on features.
        method: the recommended head.
        data: features and labels of the readable images; -1 for an unlabeled one.
    """

    classes: tuple[str, ...]
    task: Task
    method: Method
    data: Examples

    def solve(self) -> Tree:
        """Solve the head from all labels."""
        labels = self.data.labels.numpy()
        all_rows = Fold(labeled=np.flatnonzero(labels >= 0), unlabeled=np.flatnonzero(labels < 0), test=np.arange(0))
        return solve_head(self.method, self.task, self.data, all_rows)

    def cross_validate(
        self, report_progress: Progress, random_sample: np.ndarray | None = None
    ) -> LabelingResult | None:
        """Estimate the head's accuracy by cross-validation.

        Labels that were chosen by the model are easier or harder than the folder. So a head is tested on the labels
        that were drawn at random, if there are at least `MIN_RANDOM_LABELS`, and on all otherwise.

        Args:
            report_progress: receives the number of finished folds.
            random_sample: bool (n,), true for a label that was drawn at random; None if all were.

        Returns:
            None where no class has two labels.
        """
        labels = self.data.labels.numpy()
        is_labeled = labels >= 0
        random_count = int(is_labeled.sum()) if random_sample is None else int(random_sample.sum())
        may_test = is_labeled
        if random_sample is not None and random_count >= MIN_RANDOM_LABELS:
            may_test = random_sample
        splits = [fold._replace(test=fold.test[may_test[fold.test]]) for fold in cross_validation_folds(labels)]
        splits = [fold for fold in splits if len(fold.test)]

        solver = FoldSolver(self.task, self.data)

        def measure_accuracy(fold: Fold, test_rows: np.ndarray) -> float:
            predicted = solver.predict(self.method, fold)
            return 100 * float((predicted[test_rows] == labels[test_rows]).mean())

        def test_fold(number: int) -> tuple[float, float]:
            fold = splits[number]
            half_of_labels = halve_labels(fold, labels, number)
            return measure_accuracy(fold, fold.test), measure_accuracy(half_of_labels, fold.test)

        accuracies: list[float] = []
        half_accuracies: list[float] = []
        with ThreadPoolExecutor(len(available_processors())) as pool:
            for finished, (accuracy, half_accuracy) in enumerate(pool.map(test_fold, range(len(splits))), start=1):
                accuracies.append(accuracy)
                half_accuracies.append(half_accuracy)
                report_progress("splits of the cross-validation", finished, len(splits))
        if len(splits) < 2:
            return None
        tested = int(may_test.sum())
        test_train_ratio = sum(len(fold.test) / len(fold.labeled) for fold in splits) / len(splits)
        # The difference from 0 is the accuracy itself, with the interval of the same test.
        mean = difference_interval(accuracies, [0.0] * len(accuracies), test_train_ratio, tested)
        gain = difference_interval(accuracies, half_accuracies, test_train_ratio, tested)
        return LabelingResult(
            labels=int(is_labeled.sum()),
            random=random_count,
            judged=tested,
            accuracy=mean.mean,
            low=max(0.0, mean.low),
            high=min(100.0, mean.high),
            gain=gain.mean,
            gain_low=gain.low,
            gain_high=gain.high,
        )


def head_problem(folder: FolderFeatures, labels: np.ndarray, names: Sequence[str]) -> HeadProblem:
    """Build the head's problem for the present labels; classes without a label are left out.

    Args:
        folder: the folder's features.
        labels: int64 (N,), one for each image of the folder's list, -1 for none.
        names: class names by label number.

    Raises:
        UserError: fewer than two classes have labels.
    """
    numbers, dense_labels = np.unique(labels[folder.rows], return_inverse=True)
    if numbers[0] < 0:
        dense_labels = dense_labels - 1  # number 0 of `dense_labels` means unlabeled: it becomes -1
    classes = tuple(names[int(number)] for number in numbers if number >= 0)
    if len(classes) < 2:
        raise UserError("The images that can be read have labels of fewer than two classes: label more of them.")
    contents = replace(folder.contents, classes=classes, labels=dense_labels)
    config, _, _ = head_config({}, contents)
    _, task, _ = head_task(config, _image_spec(contents))
    data = Examples(folder.values, torch.from_numpy(dense_labels))
    return HeadProblem(classes, task, factory.build_method(config), data)


def predict_images(problem: HeadProblem, model: Tree) -> tuple[np.ndarray, np.ndarray]:
    """Predict a folder's images by a trained head, and project their features on the leading principal directions.

    The labeling page orders images by the predictions, and finds similar images by the projections.

    Args:
        problem: the features of the images, and the task of the head.
        model: the trained head, as `HeadProblem.solve` returns it.

    Returns:
        Probabilities, float64 (n, classes), and projections, float32 (n, `DIRECTIONS` or fewer).
    """
    feature_values = problem.data.images[:, 0, 0].float()  # (n, F): features have one view, of height 1
    # The head subtracts this mean vector; the projections are those of the vectors that it classifies.
    center = tree.flatten(model["params"])[f"{problem.task.network.head}/center"]
    centered_values = centered(feature_values, center)
    stride = -(-len(centered_values) // SAMPLE_IMAGES)  # rounded up
    sample = centered_values[::stride].double()
    second_moments = sample.T @ sample
    projections = centered_values @ principal_directions(second_moments, DIRECTIONS).float()
    logits = problem.task.network.predict(model["params"], {}, feature_values)
    return logits.double().softmax(-1).numpy(), projections.numpy()


def halve_labels(fold: Fold, labels: np.ndarray, number: int) -> Fold:
    """Hide half of a fold's labels of each class, rounded down, to measure what more labels would add.

    Args:
        fold: the fold, whose hidden labels become unlabeled rows.
        labels: int64 (N,), the class of each row.
        number: the seed of the draw.
    """
    order = named_generator(0, "half of the labels", str(number)).permutation(fold.labeled)
    kept_rows: list[np.ndarray] = []
    for label in np.unique(labels[order]):
        class_rows = order[labels[order] == label]
        kept_rows.append(class_rows[: -(-len(class_rows) // 2)])
    labeled = np.sort(np.concatenate(kept_rows))
    unlabeled = np.setdiff1d(np.r_[fold.labeled, fold.unlabeled], labeled)
    return fold._replace(labeled=labeled, unlabeled=np.sort(unlabeled))
