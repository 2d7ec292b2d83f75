"""Decide whether unlabeled images help: paired differences over repeated splits, a verdict, and the labels it lacks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import ClientData, ClientUpdate, Federation, Method, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import rng
from halfmoon.core.tree import Tree
from halfmoon.data.groups import drop_shared_groups
from halfmoon.data.partition.primitives import GroupHoldout, named_generator
from halfmoon.engine.evaluation import Examples, evaluate_model
from halfmoon.methods.analytic import MeanSums, SumsUpdate
from halfmoon.report.paired import Difference, compare_paired

MARGIN = 2.0
"""Points of accuracy: if a gain of this size is ruled out, labels only are as good."""

FOLDS = 5
"""Parts of the labels in a cross-validation."""

REPEATS = 3
"""Repetitions of the cross-validation, each with another partition into parts."""

DRAWS = 10
"""Draws of the labels in a folder whose labels are all known."""

EXTRA_DIRECTIONS = 128
"""Directions beyond the span of the images, so that the mixture head finds as many as it requests."""

SHARED_SUMS = ("mean", "moments")
"""Client updates of a head that are the same for all heads (`halfmoon.methods.analytic`)."""

DecisionKind = Literal["help", "harm", "equal", "unknown"]

UNLABELED_VERDICTS = ("Unlabeled images help", "Labels alone are better", "Labels alone are as good")
JOINING_VERDICTS = ("Joining helps", "Alone is better", "Alone is as good")
"""The sentences for a gain, for a loss, and for a gain below the margin."""


class Fold(NamedTuple):
    """The rows of one split, int64 each."""

    labeled: np.ndarray
    unlabeled: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Decision:
    """The verdict of repeated splits.

    Attributes:
        kind: the verdict.
        base: mean accuracy of labels only, in percent.
        ours: mean accuracy of the method, in percent.
        difference: the paired difference in points, with its interval.
        splits: the number of splits.
        labels: the number of different test images.
        missing: about how many more labels would decide, where these cannot.
        verdicts: the sentences for "help", "harm" and "equal".
    """

    kind: DecisionKind
    base: float
    ours: float
    difference: Difference
    splits: int
    labels: int
    missing: int = 0
    verdicts: tuple[str, str, str] = UNLABELED_VERDICTS

    @property
    def sentence(self) -> str:
        """The decision as a sentence, with its interval."""
        difference = self.difference
        points = f"{difference.mean:+.1f} points, 95 % {difference.low:+.1f} to {difference.high:+.1f}"
        if self.base == self.ours == 100:
            return f"Both are at the ceiling ({points}): no tested image is left that unlabeled images could win."
        if self.kind == "unknown":
            more = f"about {self.missing:,} more labeled images would" if self.missing else "more would"
            return f"Cannot tell with so few labels ({points}): {more}."
        verdict = dict(zip(("help", "harm", "equal"), self.verdicts, strict=True))[self.kind]
        return f"{verdict} ({points})."

    def as_json(self) -> dict[str, Any]:
        """Return the decision as JSON-compatible values."""
        return {
            "kind": self.kind,
            "sentence": self.sentence,
            "labels_only": self.base,
            "with_unlabeled": self.ours,
            **self.difference._asdict(),
            "splits": self.splits,
            "missing": self.missing,
        }


def decide(
    method: Sequence[float],
    baseline: Sequence[float],
    test_train_ratio: float,
    labels: int,
    verdicts: tuple[str, str, str] = UNLABELED_VERDICTS,
) -> Decision:
    """Decide by the accuracies of two methods on the same splits.

    Args:
        method: accuracy of the method on each split, in percent.
        baseline: accuracy of the baseline on each split, in percent.
        test_train_ratio: the ratio of test to training images, as in `difference_interval`.
        labels: the number of different test images of all splits.
        verdicts: the sentences for "help", "harm" and "equal".
    """
    difference = difference_interval(method, baseline, test_train_ratio, labels)
    kind: DecisionKind = "unknown"
    if difference.low > 0:
        kind = "help"
    elif difference.high < 0:
        kind = "harm"
    elif difference.high < MARGIN:
        kind = "equal"
    return Decision(
        kind=kind,
        base=float(np.mean(baseline)),
        ours=float(np.mean(method)),
        difference=difference,
        splits=len(method),
        labels=labels,
        missing=estimate_missing_labels(difference, labels) if kind == "unknown" else 0,
        verdicts=verdicts,
    )


def difference_interval(
    method: Sequence[float], baseline: Sequence[float], test_train_ratio: float, labels: int
) -> Difference:
    """Compute the mean paired difference in points with the interval of the corrected resampled t-test.

    See `halfmoon.report.paired.compare_paired`. If all splits show the same difference, the interval is that of a proportion of
    which none was seen among `labels` images: 3 / n (the rule of three).

    Args:
        method: accuracy of the method on each split, in percent.
        baseline: accuracy of the baseline on each split, in percent.
        test_train_ratio: the ratio of test to training images.
        labels: the number of different test images of all splits.
    """
    difference = compare_paired(method, baseline, test_train_ratio)
    margin = 300 / labels if difference.low == difference.high else 0
    # Two accuracies differ by 100 points at most; the t-distribution of few splits has no bound.
    low = max(-100.0, difference.low - margin)
    high = min(100.0, difference.high + margin)
    return Difference(difference.mean, low, high, difference.p)


def estimate_missing_labels(difference: Difference, labels: int) -> int:
    """Estimate how many more labels would shrink the interval's half width to its mean, or to `MARGIN` if larger.

    The half width shrinks with the square root of the number of labels. The result is rounded up to tens.
    """
    half_width = difference.high - difference.mean
    target = max(abs(difference.mean), MARGIN)
    return max(10, 10 * math.ceil(labels * ((half_width / target) ** 2 - 1) / 10))


def cross_validation_folds(labels: np.ndarray, groups: Sequence[str] | None = None) -> Iterator[Fold]:
    """Yield the folds of `REPEATS` cross-validations of the labeled rows in `FOLDS` parts, stratified by class.

    A class with one label is always in training. A group is in the part of its first row; no row of a test group,
    labeled or not, is trained on.

    Args:
        labels: int64 (N,), negative for an unlabeled row.
        groups: the patient or group of each row; "" for none.
    """
    for repeat in range(REPEATS):
        fold_numbers = _assign_folds(labels, groups, repeat)
        for number in range(FOLDS):
            test_rows = np.flatnonzero(fold_numbers == number)
            labeled = drop_shared_groups(np.flatnonzero((labels >= 0) & (fold_numbers != number)), test_rows, groups)
            unlabeled = drop_shared_groups(np.flatnonzero(labels < 0), test_rows, groups)
            if len(test_rows) and len(labeled):
                yield Fold(labeled, unlabeled, test_rows)


def _assign_folds(labels: np.ndarray, groups: Sequence[str] | None, repeat: int) -> np.ndarray:
    """Assign each labeled row to one of `FOLDS` parts, int64 (N,); -1 for a row that is never tested."""
    fold_numbers = np.full(len(labels), -1)
    fold_of_group: dict[str, int] = {}
    # Each class continues where the last one ended, so that small classes do not all fill the first parts.
    offset = 0
    for label in np.unique(labels[labels >= 0]):
        rows = named_generator(0, "folds", str(repeat), str(label)).permutation(np.flatnonzero(labels == label))
        if len(rows) < 2:
            continue
        fold_numbers[rows] = (offset + np.arange(len(rows))) % FOLDS
        offset += len(rows)
        if groups is None:
            continue
        for row in rows:
            if group := groups[int(row)]:
                fold_numbers[row] = fold_of_group.setdefault(group, int(fold_numbers[row]))
    return fold_numbers


def label_draws(
    labels: np.ndarray,
    counts: Sequence[int],
    test_rows: np.ndarray | None = None,
    groups: Sequence[str] | None = None,
) -> Iterator[Fold]:
    """Yield `DRAWS` draws of labels from rows whose labels are all known.

    Args:
        labels: int64 (N,).
        counts: labels to draw of each class.
        test_rows: the rows to test on; None for a fifth of each class, drawn each time, with all rows of their groups.
        groups: the patient or group of each row; "" for none.
    """
    group_names = groups or [""] * len(labels)
    for number in range(DRAWS):
        labeled: list[np.ndarray] = []
        unlabeled: list[np.ndarray] = []
        tested: list[np.ndarray] = []
        sides = GroupHoldout()
        for label, count in enumerate(counts):
            rows = named_generator(0, "draws", str(number), str(label)).permutation(np.flatnonzero(labels == label))
            class_tests = sides.draw(rows, group_names, len(rows) // FOLDS) if test_rows is None else test_rows
            is_test = np.isin(rows, class_tests)
            tested.append(rows[is_test])
            labeled.append(rows[~is_test][:count])
            unlabeled.append(rows[~is_test][count:])
        yield Fold(
            labeled=np.sort(np.concatenate(labeled)),
            unlabeled=np.sort(np.concatenate(unlabeled)),
            test=np.sort(np.concatenate(tested)),
        )


def head_accuracy(method: Method, task: Task, data: Examples, fold: Fold) -> float:
    """Solve a head on a fold's training rows and return its accuracy on the test rows, in percent."""
    return model_accuracy(task, solve_head(method, task, data, fold), data, fold.test)


def model_accuracy(task: Task, model: Tree, data: Examples, rows: np.ndarray) -> float:
    """Return a model's accuracy on rows, int64, in percent."""
    indices = torch.from_numpy(rows)
    examples = Examples(data.images[indices], data.labels[indices])
    metrics = evaluate_model(task.network, model, task.normalize, examples).row()
    return 100 * cast(float, metrics["accuracy"])


def solve_head(method: Method, task: Task, data: Examples, fold: Fold) -> Tree:
    """Solve a head from sums over the fold's rows, all at one client, and return the model; see `solve_heads`."""
    return solve_heads([method], task, data, fold)[0]


def solve_heads(methods: Sequence[Method], task: Task, data: Examples, fold: Fold) -> list[Tree]:
    """Solve heads from sums over the fold's rows, all at one client.

    Features are converted once for all rounds, and the heads share the sums that do not depend on the method. Fewer images
    than half of the feature dimensions are solved in a basis of the images' span: the same heads, sooner.

    Args:
        methods: methods whose client updates are sums (`halfmoon.methods.analytic`).
        task: the task on features.
        data: features of all rows.
        fold: the rows.

    Returns:
        The model of each method, as `Method.solution`.
    """
    labeled = torch.from_numpy(fold.labeled)
    unlabeled = torch.from_numpy(fold.unlabeled)
    counts = torch.tensor([len(labeled), len(unlabeled)])
    network_parameters = task.network.init(rng.generator(0, "head"))
    images = data.images[torch.cat([labeled, unlabeled])]
    vectors = MeanSums(task).roots(methods[0].start(task, network_parameters), images)
    basis = None
    if 2 * (len(images) + EXTRA_DIRECTIONS) < vectors.shape[1]:
        basis = orthonormal_basis(vectors)
        vectors = vectors @ basis
    client_data = ClientData(
        x=vectors[: len(labeled)],
        y=data.labels[labeled],
        u=vectors[len(labeled) :],
        labeled=counts[0],
        unlabeled=counts[1],
    )
    federation = _SingleClientFederation(client_data)
    models: list[Tree] = []
    for method in methods:
        updates = cast(Mapping[str, SumsUpdate], method.client_updates(task))
        federation.updates = {name: replace(update, precomputed=True) for name, update in updates.items()}
        server = method.start(task, network_parameters)
        if basis is not None:
            head = server["head"]
            projected = {**head, "weight": head["weight"] @ basis, "center": head["center"] @ basis}
            server = {**server, "head": projected}
        for number in range(task.rounds):
            server = method.round(replace(task, round=number), server, cast(Federation, federation))
        if basis is not None:
            head = server["head"]
            lifted = {**head, "weight": head["weight"] @ basis.T, "center": basis @ head["center"]}
            server = {**server, "head": lifted}
        models.append(method.solution(task, server))
    return models


def orthonormal_basis(rows: Tensor) -> Tensor:
    """Compute orthonormal columns (F, n + `EXTRA_DIRECTIONS`) whose span includes `rows` (n, F)."""
    extra = torch.eye(rows.shape[1], EXTRA_DIRECTIONS, dtype=rows.dtype, device=rows.device)
    columns = torch.linalg.qr(torch.cat([rows.T, extra], 1))  # pyright: ignore[reportUnknownMemberType]
    return cast(Tensor, columns[0])


class _SingleClientFederation:
    """A federation of one client, which is in every cohort.

    The sums of `SHARED_SUMS` depend on the images and labels only, so they are computed once for all methods.
    """

    clients = 1
    size = 1
    labeled = 0

    def __init__(self, data: ClientData) -> None:
        self.updates: Mapping[str, ClientUpdate] = {}
        self.data = data
        self.cohort = torch.zeros(1, dtype=torch.int64)
        self.responders = self.cohort
        self._shared_sums: dict[str, Tree] = {}

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Compute the sums of the only client: they are the average."""
        sums = self._shared_sums.get(client_update)
        if sums is None:
            sums = self.updates[client_update].begin(broadcast, {}, self.data)
        if client_update in SHARED_SUMS:
            self._shared_sums[client_update] = sums
        return Upload({"sums": sums}, torch.ones(1))
