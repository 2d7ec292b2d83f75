"""Compare two heads by their predictions of held-out labeled images: the gain with its interval, and accuracies.

The gain is estimated as a product: the share of images on which the heads differ, which the unlabeled images show
precisely, and the advantage, which is the share of these images on which only the one head is right minus the share on
which only the other is. The labeled images estimate the advantage, and so do other image sets, by a normal prior. So
30 labeled images, of which the heads differ on eight, are not the only evidence. `Decision.by_labels` has the estimate
without the prior.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import special

from halfmoon.api.types import Method
from halfmoon.report.paired import CONFIDENCE_LEVEL, Difference
from halfmoon.studies.decision import ESTIMATED_MIX, EVEN_MIX, MARGIN, Accuracy, ClassMix, Decision, name_verdict
from halfmoon.studies.fold_solver import FoldSolver
from halfmoon.studies.folds import Fold

PRIOR_ADVANTAGE = 0.5
"""Mean advantage of the mixture head over the ridge head on the image sets of results/decisions.md."""

PRIOR_DEVIATION = 0.3
"""Standard deviation of the advantage of a further image set.

Between the means of 13 tasks, which are the four sets and random choices of two, three and five of their classes, it is
0.21, so that a further one is predicted with 0.24: 0.21 * sqrt(1 + 1 / 13) * 2.18 / 1.96, with Student's t. Only four sets
are independent, so that more is assumed. An advantage of zero is not excluded before any label is seen.
"""

DRAW_VARIANCE = 0.25
"""Variance of the advantage over draws of the labels of one image set, times the number of labels. It is 0.08 to 0.34
there, 0.22 on average: the standard deviation is 0.05 to 0.10 with 30 labels, and 0.24 with 6."""

PRIOR_IMAGES = 5
"""Images that the prior of the variance counts as."""

DISAGREEMENT_VARIANCE = 0.5
"""Prior variance of an image's difference, in units of its mean square disagreement: the heads are both wrong on some
of the images on which they differ."""

SHARE_ITERATIONS = 50
"""Iterations of the estimate of the class shares. Few: more fit the noise of a confusion matrix of few images."""

MAX_LABELS = 1_000_000
"""Number of labels up to which the labels that are missing are estimated."""

NORMAL_QUANTILE = float(special.ndtri((1 + CONFIDENCE_LEVEL) / 2))


@dataclass(frozen=True, eq=False)
class FoldPredictions:
    """Predictions of two heads for N images in S folds.

    Attributes:
        labels: int64 (N,), negative for an unlabeled image.
        tested: whether a fold holds out an image, bool (S, N).
        baseline: classes that the head of labels only predicts, int64 (S, N).
        method: classes that the head of labels and unlabeled images predicts, int64 (S, N).
        final_baseline: classes that the head of labels only predicts when it is solved on all labels, int64 (N,).
        final_method: classes that the other head predicts when it is solved on all labels, int64 (N,).
        classes: the number of classes.
    """

    labels: np.ndarray
    tested: np.ndarray
    baseline: np.ndarray
    method: np.ndarray
    final_baseline: np.ndarray
    final_method: np.ndarray
    classes: int

    def mean_correct(self, predictions: np.ndarray) -> np.ndarray:
        """Compute how often each image is predicted correctly by the folds that hold it out, (N,); NaN if none does."""
        correct = (predictions == self.labels) & self.tested
        counts = self.tested.sum(0)
        return np.where(counts > 0, correct.sum(0) / np.maximum(counts, 1), np.nan)

    @property
    def tested_rows(self) -> np.ndarray:
        """The images that some fold holds out, int64."""
        return np.flatnonzero(self.tested.any(0))

    @property
    def tested_disagreement(self) -> np.ndarray:
        """How often the heads of the folds that hold an image out differ on it, (N,); 0 if none does."""
        differs = (self.method != self.baseline) & self.tested
        return differs.sum(0) / np.maximum(self.tested.sum(0), 1)

    @property
    def final_disagreement(self) -> float:
        """The share of the comparison rows on which the heads with all labels differ."""
        rows = self.comparison_rows
        return float((self.final_method[rows] != self.final_baseline[rows]).mean())

    @property
    def comparison_rows(self) -> np.ndarray:
        """The images on which the heads' disagreement is measured: the unlabeled ones, or those tested if none is."""
        unlabeled = np.flatnonzero(self.labels < 0)
        return unlabeled if len(unlabeled) else self.tested_rows


def predict_folds(
    solver: FoldSolver, baseline: Method, method: Method, folds: Iterable[Fold]
) -> FoldPredictions | None:
    """Solve two heads (last layers of a network) on every fold and on all labels, and predict all images.

    Args:
        solver: the projected features of all images.
        baseline: the head of labels only.
        method: the head of labels and unlabeled images.
        folds: the folds of a cross-validation.

    Returns:
        The classes that both heads predict; None where there is no fold.
    """
    labels = solver.labels
    tested: list[np.ndarray] = []
    baseline_predictions: list[np.ndarray] = []
    method_predictions: list[np.ndarray] = []
    for fold in folds:
        tested.append(np.isin(np.arange(len(labels)), fold.test))
        baseline_predictions.append(solver.predict(baseline, fold))
        method_predictions.append(solver.predict(method, fold))
    if not tested:
        return None
    all_labels = Fold(labeled=np.flatnonzero(labels >= 0), unlabeled=np.flatnonzero(labels < 0), test=np.arange(0))
    return FoldPredictions(
        labels=labels,
        tested=np.stack(tested),
        baseline=np.stack(baseline_predictions),
        method=np.stack(method_predictions),
        final_baseline=solver.predict(baseline, all_labels),
        final_method=solver.predict(method, all_labels),
        classes=solver.task.network.classes,
    )


class Advantage(NamedTuple):
    """The estimated advantage of the method on images on which the heads differ.

    Attributes:
        mean: the estimate by labels and prior.
        unit_variance: the variance of the labels' part of it around the image set's mean over draws of labels, times the
            number of labels.
        labels: the number of tested labels.
    """

    mean: float
    unit_variance: float
    labels: int

    def variance(self, labels: int) -> float:
        """Return the variance of the advantage of heads with so many labels: of the image set's mean, and of a draw."""
        precision = labels / self.unit_variance + 1 / PRIOR_DEVIATION**2
        return 1 / precision + DRAW_VARIANCE / labels


def decide_by_image(predictions: FoldPredictions) -> Decision:
    """Decide by the predictions of held-out images whether unlabeled images help.

    The gain is the accuracy of the head with unlabeled images minus that of the head of labels only, where all classes
    are equally frequent. It is the share of images on which the heads differ, times the advantage: the share of these on
    which only the one is right minus the share on which only the other is. The labels of the folder and a prior from
    other image sets both estimate the advantage.

    Args:
        predictions: the predictions of both heads on every fold, and of both heads with all labels.
    """
    advantage = estimate_advantage(predictions)
    difference = estimate_gain(predictions, advantage.mean, advantage.variance(advantage.labels))
    # Without the prior. Two errors add: the first term is that of the estimated mean of this image set, over all draws of
    # its labels. The heads to decide on come from one draw, and the second term is how far their advantage is from it.
    labels_mean, labels_variance = _estimate_by_labels(predictions, expected_advantage=0.0)
    by_labels = estimate_gain(predictions, labels_mean, labels_variance + DRAW_VARIANCE / advantage.labels)
    kind = name_verdict(difference)
    missing = 0
    if kind == "unknown":
        points_per_advantage = 100 * predictions.final_disagreement
        missing = _estimate_missing_labels(difference.mean, points_per_advantage, advantage)
    even_shares = np.full(predictions.classes, 1 / predictions.classes)
    even_mix = measure_class_mix(predictions, even_shares, EVEN_MIX)
    estimated_mix = measure_class_mix(predictions, estimate_class_shares(predictions), ESTIMATED_MIX)
    return Decision(
        kind=kind,
        base=even_mix.labels_only.mean,
        ours=even_mix.with_unlabeled.mean,
        difference=difference,
        by_labels=by_labels,
        splits=len(predictions.tested),
        labels=advantage.labels,
        missing=missing,
        available=int((predictions.labels < 0).sum()),
        mixes=(even_mix, estimated_mix),
    )


def estimate_gain(predictions: FoldPredictions, advantage: float, advantage_variance: float) -> Difference:
    """Estimate how many percentage points unlabeled images add to the accuracy of the head with all labels.

    The gain is the product of the disagreement, the share of images on which the two heads with all labels differ, and
    of the advantage on these images. The errors of both are independent, so the variance is that of a product:
    Var(d a) = d^2 Var(a) + a^2 Var(d) + Var(d) Var(a).

    Args:
        predictions: the predictions of both heads.
        advantage: the share of the images on which the heads differ where only the head with unlabeled images is right,
            minus the share where only the head of labels only is.
        advantage_variance: the variance of the advantage.

    Returns:
        The gain in points, its interval, and the p-value of a gain of zero.
    """
    disagreement = predictions.final_disagreement
    count = len(predictions.comparison_rows)
    disagreement_variance = disagreement * (1 - disagreement) / count
    variance = disagreement**2 * advantage_variance
    variance += disagreement_variance * (advantage**2 + advantage_variance)
    mean = 100 * disagreement * advantage
    if variance == 0:
        # The heads agree on all n images: with a confidence of 95 % they differ on less than a share of 3 / n of others.
        bound = 100 * 3 / count
        return Difference(mean, mean - bound, mean + bound, 1.0)
    error = 100 * math.sqrt(variance)
    p_value = float(2 * special.ndtr(-abs(mean) / error))
    half_width = NORMAL_QUANTILE * error
    return Difference(mean, max(-100.0, mean - half_width), min(100.0, mean + half_width), p_value)


def estimate_advantage(predictions: FoldPredictions) -> Advantage:
    """Estimate the advantage of the method over the baseline on images on which their predictions differ.

    The estimate by the labels is combined with a normal prior, the advantage on other image sets, by the precisions
    (inverse variances) of both.

    Args:
        predictions: the predictions of both heads on every fold.
    """
    labels_mean, variance = _estimate_by_labels(predictions, expected_advantage=PRIOR_ADVANTAGE)
    prior_precision = 1 / PRIOR_DEVIATION**2
    combined = (labels_mean / variance + PRIOR_ADVANTAGE * prior_precision) / (1 / variance + prior_precision)
    labels = len(predictions.tested_rows)
    return Advantage(mean=combined, unit_variance=variance * labels, labels=labels)


def _estimate_by_labels(predictions: FoldPredictions, expected_advantage: float) -> tuple[float, float]:
    """Estimate the advantage by the labels of the folder.

    It is the mean difference in correctness of the held-out images, in which each class has the same weight, over the
    share of images on which the heads of the folds differ.

    By chance the heads differ on more or fewer of the labeled images than of the unlabeled ones. What this excess adds to
    the mean difference at an expected advantage is subtracted (a control variate). That is 0 on average, whatever the
    advantage is, and the remaining error is smaller if the expected advantage is near it.

    The variance of an image's difference is that of all tested images, shrunk to what the disagreement on unlabeled
    images lets expect: six tested images may have the same difference by chance.

    Args:
        predictions: the predictions of both heads on every fold. Disagreement is measured on its `comparison_rows`, the
            unlabeled images, or the tested ones if there are none.
        expected_advantage: the advantage by which the excess is subtracted; 0 for the labels only.

    Returns:
        The estimate, and its variance around the image set's mean over draws of labels.
    """
    rows = predictions.tested_rows
    correct = predictions.mean_correct(predictions.method) - predictions.mean_correct(predictions.baseline)
    weights = class_weights(predictions.labels[rows])
    differs = (predictions.method != predictions.baseline)[:, predictions.comparison_rows]  # bool (folds, images)
    disagreement = max(float(differs.mean()), 1 / differs.size)  # not 0: heads that never differ show no advantage
    excess = predictions.tested_disagreement[rows] - disagreement
    differences = correct[rows] - expected_advantage * excess
    mean_difference = float(weights @ differences)

    # A difference in correctness is at most 1, and 0 where the heads agree. So its variance is at most the mean square of
    # the share of folds that disagree; half of that, since both may be wrong where they disagree. This
    # expected variance counts as `PRIOR_IMAGES` further images, as in a posterior mean of a variance.
    expected_variance = DISAGREEMENT_VARIANCE * float((differs.mean(0) ** 2).mean())
    squares = float(((differences - mean_difference) ** 2).sum())
    image_variance = (squares + PRIOR_IMAGES * expected_variance) / (len(rows) - 1 + PRIOR_IMAGES)
    # The first term is the error of the weighted mean. The second is the deviation of the heads of this draw of the labels
    # from heads of another draw: the labels at hand are one draw of those that the image set could have.
    variance = image_variance * float((weights**2).sum()) / disagreement**2 + DRAW_VARIANCE / len(rows)
    return mean_difference / disagreement, variance


def _estimate_missing_labels(gain: float, points_per_advantage: float, advantage: Advantage) -> int:
    """Estimate how many more labels would decide whether unlabeled images help, for an interval that cannot tell.

    Enough are those with which the half width of the gain's interval is at most the gain, so that it excludes zero, or
    `MARGIN` if that is larger, as a gain below it does not count. More labels are tried in steps of 5 %.

    Args:
        gain: the estimated gain in points.
        points_per_advantage: the share of images on which the heads differ, in percent: the gain is this times the
            advantage.
        advantage: the estimated advantage.

    Returns:
        The number of further labels, rounded up to a multiple of ten.
    """
    target = max(abs(gain), MARGIN)

    def half_width(labels: int) -> float:
        return NORMAL_QUANTILE * points_per_advantage * math.sqrt(advantage.variance(labels))

    labels = advantage.labels
    while half_width(labels) > target and labels < MAX_LABELS:
        labels = math.ceil(1.05 * labels)
    return max(10, 10 * math.ceil((labels - advantage.labels) / 10))


def class_weights(labels: np.ndarray) -> np.ndarray:
    """Compute weights of images that sum to 1, with the same sum for each class; `labels` is int64 (n,)."""
    classes, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return 1 / (len(classes) * counts[inverse])


def measure_class_mix(predictions: FoldPredictions, shares: np.ndarray, name: str) -> ClassMix:
    """Estimate the accuracies of both heads for images with given shares of the classes, in percent.

    Args:
        predictions: the predictions of both heads on every fold.
        shares: the share of each class, (classes,). A class without a tested label is left out.
        name: the name of the mix.
    """
    return ClassMix(
        name=name,
        shares=tuple(shares.tolist()),
        labels_only=_mix_accuracy(predictions, predictions.baseline, shares),
        with_unlabeled=_mix_accuracy(predictions, predictions.method, shares),
    )


def _mix_accuracy(predictions: FoldPredictions, predicted: np.ndarray, shares: np.ndarray) -> Accuracy:
    """Estimate the accuracy of one head on images with given shares of the classes, in percent, with a normal interval.

    It is the mean of the classes' accuracies, weighted by their shares. The standard error is that of binomial shares.
    One success and one failure are added to each class for it, so that a class of two correct images does not count as
    certain (Agresti and Caffo 2000).

    Args:
        predictions: the labels, and which fold holds out which image.
        predicted: the head's predictions in every fold, int64 (S, N).
        shares: the share of each class. Classes that no fold tests are left out, and the other shares scaled to 1.
    """
    correct = predictions.mean_correct(predicted)  # NaN for an image that no fold holds out
    mean = 0.0
    variance = 0.0
    tested_share = 0.0
    for label in np.unique(predictions.labels[predictions.tested_rows]):
        class_correct = correct[(predictions.labels == label) & ~np.isnan(correct)]
        count = len(class_correct)
        smoothed = (class_correct.sum() + 1) / (count + 2)
        mean += float(shares[label] * class_correct.mean())
        variance += float(shares[label] ** 2 * smoothed * (1 - smoothed) / count)
        tested_share += float(shares[label])
    if tested_share == 0:
        return Accuracy(mean=0.0, low=0.0, high=100.0)  # nothing is known
    mean *= 100 / tested_share
    half_width = 100 * NORMAL_QUANTILE * math.sqrt(variance) / tested_share
    return Accuracy(mean, max(0.0, mean - half_width), min(100.0, mean + half_width))


def estimate_class_shares(predictions: FoldPredictions) -> np.ndarray:
    """Estimate the share of each class among the unlabeled images, (classes,).

    How often each class is predicted is not how frequent it is, as a head confuses classes. The confusion matrix of the
    head of labels and unlabeled images is estimated on the images that folds hold out. EM then finds the shares that
    best explain, through this matrix, how often that head predicts each class for unlabeled images (Saerens et al.
    2002, Adjusting the outputs of a classifier to new a priori probabilities, with a confusion matrix in place of
    probabilities).

    Args:
        predictions: the predictions of the head in the folds (`method`), and of the one that is solved on all labels
            (`final_method`).
    """
    classes = predictions.classes
    # Rows are true classes, columns predicted ones. Each row starts with one image that is spread over all classes.
    confusion = np.full((classes, classes), 1 / classes)
    for is_tested, predicted in zip(predictions.tested, predictions.method, strict=True):
        # An image that n folds hold out counts 1 / n in each of them.
        fold_counts = predictions.tested[:, is_tested].sum(0)
        image_weights = 1 / fold_counts
        np.add.at(confusion, (predictions.labels[is_tested], predicted[is_tested]), image_weights)
    confusion /= confusion.sum(1, keepdims=True)
    predicted_counts = np.bincount(predictions.final_method[predictions.comparison_rows], minlength=classes)
    shares = np.full(classes, 1 / classes)
    for _ in range(SHARE_ITERATIONS):
        by_class = shares[:, None] * confusion
        by_class /= by_class.sum(0)  # probability of each true class (row) given the predicted one (column)
        shares = by_class @ predicted_counts / predicted_counts.sum()
    return shares
