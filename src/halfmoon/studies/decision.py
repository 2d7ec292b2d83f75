"""Decide whether unlabeled images help: paired differences over repeated splits, a verdict, and the labels it lacks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from halfmoon.api.types import ClientData, ClientUpdate, Federation, Method, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import rng
from halfmoon.core.tree import Tree
from halfmoon.engine.evaluation import Examples, ModelEvaluation, evaluate_model
from halfmoon.methods.analytic import MeanSums, SumsUpdate
from halfmoon.report.paired import Difference, compare_paired
from halfmoon.studies.folds import Fold

MARGIN = 2.0
"""Points of accuracy: if a gain of this size is ruled out, labels only are as good."""

EXTRA_DIRECTIONS = 128
"""Directions beyond the span of the images, so that the mixture head finds as many as it requests."""

SHARED_SUMS = ("mean", "moments")
"""Client updates of a head that are the same for all heads (`halfmoon.methods.analytic`)."""

DecisionKind = Literal["help", "harm", "equal", "unknown"]

UNLABELED_VERDICTS = ("Unlabeled images help", "Labels alone are better", "Labels alone are as good")
JOINING_VERDICTS = ("Joining helps", "Alone is better", "Alone is as good")
"""The sentences for a gain, for a loss, and for a gain below the margin."""


EVEN_MIX = "even class mix"
"""Name of the mix with the same number of images of each class."""

ESTIMATED_MIX = "estimated class mix"
"""Name of the mix that the unlabeled images of a folder are estimated to have."""

FOLDER_MIX = "class mix of the test images"
"""Name of the mix of test images whose labels are all known."""


class Accuracy(NamedTuple):
    """An accuracy in percent with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def text(self) -> str:
        """The accuracy and its interval, rounded."""
        return f"{self.mean:.1f} ({self.low:.0f} to {self.high:.0f})"


class ClassMix(NamedTuple):
    """The accuracies of two methods for images with given shares of the classes.

    Attributes:
        name: the name of the mix.
        shares: the share of each class, 0 to 1.
        labels_only: the accuracy of the method with labels only.
        with_unlabeled: the accuracy of the method with unlabeled images.
    """

    name: str
    shares: tuple[float, ...]
    labels_only: Accuracy
    with_unlabeled: Accuracy

    def as_json(self) -> dict[str, Any]:
        """Return the accuracies as JSON-compatible values."""
        return {
            "name": self.name,
            "shares": list(self.shares),
            "labels_only": self.labels_only._asdict(),
            "with_unlabeled": self.with_unlabeled._asdict(),
        }


@dataclass(frozen=True)
class Decision:
    """The verdict of repeated splits.

    Attributes:
        kind: the verdict.
        base: mean accuracy of labels only, in percent, on an even class mix where `mixes` are given.
        ours: mean accuracy of the method, in percent, on an even class mix where `mixes` are given.
        difference: the paired difference in points, with its interval.
        by_labels: the same by the labels of this folder only, where `difference` also rests on other image sets.
        splits: the number of splits.
        labels: the number of different test images.
        missing: about how many more labels would decide, where these cannot.
        available: the number of images that could be labeled; None if it is not known.
        mixes: the accuracies for several shares of the classes.
        verdicts: the sentences for "help", "harm" and "equal".
    """

    kind: DecisionKind
    base: float
    ours: float
    difference: Difference
    splits: int
    labels: int
    missing: int = 0
    available: int | None = None
    mixes: tuple[ClassMix, ...] = ()
    by_labels: Difference | None = None
    verdicts: tuple[str, str, str] = UNLABELED_VERDICTS

    @property
    def sentence(self) -> str:
        """The decision as a sentence for the user, with its interval."""
        difference = self.difference
        # Percentage points by which the method is ahead of labels only.
        points = f"{difference.mean:+.1f} points, 95 % {difference.low:+.1f} to {difference.high:+.1f}"
        if self.base == self.ours == 100:  # labels only, and the method, are right on every image
            return f"Both are at the ceiling ({points}): no tested image is left that unlabeled images could win."
        if self.kind == "unknown":
            return f"Cannot tell with so few labels ({points}): {self._advise_labels()}."
        verdicts_by_kind = dict(zip(("help", "harm", "equal"), self.verdicts, strict=True))
        verdict = verdicts_by_kind[self.kind]
        return f"{verdict} ({points})."

    @property
    def prefers_unlabeled(self) -> bool:
        """Whether to use the method with unlabeled images: it helps, or it is ahead where nothing is certain."""
        return self.kind == "help" or (self.kind == "unknown" and self.difference.mean > 0)

    def _advise_labels(self) -> str:
        """State how many more labels would decide, where the folder has so many images."""
        if not self.missing:
            return "more would"
        if self.available is None or self.missing <= self.available:
            return f"about {self.missing:,} more labeled images would"
        if not self.available:
            return "more labeled images would, and this folder has no other"
        return f"labels for all {self.available:,} other images of the folder may not be enough"

    def as_json(self) -> dict[str, Any]:
        """Return the decision as JSON-compatible values."""
        return {
            "kind": self.kind,
            "sentence": self.sentence,
            "labels_only": self.base,
            "with_unlabeled": self.ours,
            **self.difference._asdict(),
            "by_labels": self.by_labels and self.by_labels._asdict(),
            "splits": self.splits,
            "missing": self.missing,
            "prefers_unlabeled": self.prefers_unlabeled,
            "class_mixes": [mix.as_json() for mix in self.mixes],
        }


def decide(
    method: Sequence[float],
    baseline: Sequence[float],
    test_train_ratio: float,
    labels: int,
    verdicts: tuple[str, str, str] = UNLABELED_VERDICTS,
    available: int | None = None,
    mixes: tuple[ClassMix, ...] = (),
) -> Decision:
    """Decide by the accuracies of two methods on the same splits whether the method is better, equal or worse.

    Args:
        method: accuracy of the method on each split, in percent.
        baseline: accuracy of the baseline on each split, in percent.
        test_train_ratio: the ratio of test to training images, as in `difference_interval`.
        labels: the number of different test images of all splits, whose labels the decision rests on.
        verdicts: the sentences for "help", "harm" and "equal".
        available: the number of images that could be labeled; None if it is not known.
        mixes: the accuracies for several shares of the classes, to report beside the decision.
    """
    difference = difference_interval(method, baseline, test_train_ratio, labels)
    kind = name_verdict(difference)
    return Decision(
        kind=kind,
        base=float(np.mean(baseline)),
        ours=float(np.mean(method)),
        difference=difference,
        splits=len(method),
        labels=labels,
        missing=estimate_missing_labels(difference, labels) if kind == "unknown" else 0,
        available=available,
        mixes=mixes,
        verdicts=verdicts,
    )


def decide_by_evaluations(
    method: Sequence[ModelEvaluation],
    baseline: Sequence[ModelEvaluation],
    test_train_ratio: float,
    tested: int,
    available: int,
    test_shares: np.ndarray,
) -> Decision:
    """Decide by the balanced accuracies of two methods on the test images of the same splits.

    Args:
        method: the evaluation of the method on each split.
        baseline: the evaluation of the baseline on each split.
        test_train_ratio: the ratio of test to training images, as in `difference_interval`.
        tested: the number of different test images of all splits.
        available: the number of images that could be labeled, for the advice to label more.
        test_shares: the share of each class among the test images, (classes,).

    Returns:
        The decision, with the accuracies for two class mixes: an even one, and that of the test images.
    """

    def interval(evaluations: Sequence[ModelEvaluation], measure: str) -> Accuracy:
        accuracies = [100 * cast(float, evaluation.row()[measure]) for evaluation in evaluations]
        # The difference from 0 is the accuracy itself, with the interval of the same test.
        mean, low, high, _ = difference_interval(accuracies, [0.0] * len(accuracies), test_train_ratio, tested)
        return Accuracy(mean, max(0.0, low), min(100.0, high))

    # Balanced accuracy is the accuracy where all classes are equally frequent.
    even_shares = np.full(len(test_shares), 1 / len(test_shares))
    even_mix = ClassMix(
        name=EVEN_MIX,
        shares=tuple(even_shares.tolist()),
        labels_only=interval(baseline, "balanced_accuracy"),
        with_unlabeled=interval(method, "balanced_accuracy"),
    )
    folder_mix = ClassMix(
        name=FOLDER_MIX,
        shares=tuple(test_shares.tolist()),
        labels_only=interval(baseline, "accuracy"),
        with_unlabeled=interval(method, "accuracy"),
    )
    return decide(
        method=[100 * evaluation.balanced_accuracy for evaluation in method],
        baseline=[100 * evaluation.balanced_accuracy for evaluation in baseline],
        test_train_ratio=test_train_ratio,
        labels=tested,
        available=available,
        mixes=(even_mix, folder_mix),
    )


def name_verdict(difference: Difference) -> DecisionKind:
    """Name the verdict of a difference: whether its interval excludes zero, or a gain of `MARGIN` points."""
    if difference.low > 0:
        return "help"
    if difference.high < 0:
        return "harm"
    if difference.high < MARGIN:
        return "equal"
    return "unknown"


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


def head_accuracy(method: Method, task: Task, data: Examples, fold: Fold) -> float:
    """Solve a head on a fold's training rows and return its accuracy on the test rows, in percent."""
    return model_accuracy(task, solve_head(method, task, data, fold), data, fold.test)


def model_accuracy(task: Task, model: Tree, data: Examples, rows: np.ndarray) -> float:
    """Return a model's accuracy on rows, int64, in percent."""
    return 100 * cast(float, evaluate_rows(task, model, data, rows).row()["accuracy"])


def evaluate_rows(task: Task, model: Tree, data: Examples, rows: np.ndarray) -> ModelEvaluation:
    """Evaluate a model on rows, int64."""
    indices = torch.from_numpy(rows)
    examples = Examples(data.images[indices], data.labels[indices])
    return evaluate_model(task.network, model, task.normalize, examples)


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
    federation = SingleClientFederation(client_data)
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


class SingleClientFederation:
    """A federation of one client, which is in every cohort.

    The sums of `SHARED_SUMS` depend on the images and labels only, so they are computed once for all methods.
    """

    clients = 1
    size = 1
    labeled = 0

    def __init__(self, data: ClientData) -> None:
        """Make the federation of a client with these images, whose `updates` are set before the first round."""
        self.updates: Mapping[str, ClientUpdate] = {}
        self.data = data
        self.cohort = torch.zeros(1, dtype=torch.int64)
        self.responders = self.cohort
        self._shared_sums: dict[str, Tree] = {}
        self._centered_data: ClientData | None = None

    def average(self, client_update: str, broadcast: Tree) -> Upload:
        """Compute the sums of the only client: they are the average."""
        sums = self._shared_sums.get(client_update)
        if sums is None:
            sums = self.compute_sums(client_update, broadcast)
        if client_update in SHARED_SUMS:
            self._shared_sums[client_update] = sums
        return Upload({"sums": sums}, torch.ones(1))

    def compute_sums(self, client_update: str, broadcast: Tree) -> Tree:
        """Compute the sums of a client update over the client's images."""
        data = self.data if client_update == "mean" else self._center_data(broadcast["head"]["center"])
        return self.updates[client_update].begin(broadcast, {}, data)

    def _center_data(self, center: Tensor) -> ClientData:
        """Convert the vectors q to h once: all methods and rounds have the same center, the mean of all images."""
        if self._centered_data is None:
            update = cast(SumsUpdate, self.updates["mean"])
            self._centered_data = self.data._replace(
                x=update.center(self.data.x, center), u=update.center(self.data.u, center)
            )
        return self._centered_data
