"""Test accuracy, the quality of pseudo-labels, the class bias of predictions, and calibration."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import NO_PSEUDO_LABELS, Labeling, PseudoLabels
from halfmoon.core import tree
from halfmoon.core.normalize import Normalize
from halfmoon.core.tensors import to_floats
from halfmoon.core.tree import Tree
from halfmoon.data.partition.heterogeneity import class_shares, jensen_shannon
from halfmoon.engine.executors.base import Executor
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.models import Network
from halfmoon.models.temperature import find_temperature

SERIAL = SerialExecutor()
"""The executor of evaluations that need no other."""

MAX_CPU_PIXELS = 2**20
"""The largest number of pixels that a CPU evaluates in one pass."""

LOGIT_PIXELS = 2**16
"""The largest number of pixels whose activations are in a CPU's memory at the same time."""

BATCH_STATISTICS_IMAGES = 250
"""Consecutive test images that share batch statistics, where a model is normalized by these."""


class Examples(NamedTuple):
    """Images with their labels."""

    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64


class ModelEvaluation(NamedTuple):
    """The predictions of a model on labeled images."""

    confusion: Tensor  # (classes, classes) int64; rows: true class, columns: predicted class
    loss: float  # mean cross-entropy
    correct: np.ndarray | None = None  # (N,) bool; None if the images are at several sites

    @property
    def packed(self) -> bytes | None:
        """`correct` with eight images in a byte."""
        return None if self.correct is None else np.packbits(self.correct).tobytes()

    @property
    def per_class(self) -> list[float]:
        """The accuracy of each class, to six digits; 0 for a class without images."""
        shares = self.confusion.diagonal() / self.confusion.sum(1).clamp_min(1)
        return [round(value, 6) for value in to_floats(shares)]

    @property
    def balanced_accuracy(self) -> float:
        """The mean accuracy over the classes that have images, as in scikit-learn's `balanced_accuracy_score`."""
        images = self.confusion.sum(1)
        present = images > 0
        shares = self.confusion.diagonal()[present].double() / images[present].double()
        return round(float(shares.mean()), 6)

    def row(self) -> dict[str, Any]:
        """Return accuracy, loss, accuracy by class and balanced accuracy, as metrics.jsonl stores them."""
        accuracy = int(self.confusion.diagonal().sum()) / int(self.confusion.sum())
        return {
            "accuracy": accuracy,
            "loss": self.loss,
            "per_class": self.per_class,
            "balanced_accuracy": self.balanced_accuracy,
        }


def accuracy_by_client(correct: np.ndarray, owners: np.ndarray) -> dict[int, float]:
    """Compute the accuracy of each client that has test images, to six digits.

    Args:
        correct: which test images are classified correctly, bool (N,).
        owners: the client of each test image, int64 (N,); below 0 for none.

    Returns:
        The accuracy by client number.
    """
    has_owner = owners >= 0
    image_counts = np.bincount(owners[has_owner])
    # `minlength`: a client at the end without a correct image still has an entry.
    correct_counts = np.bincount(owners[has_owner & correct], minlength=len(image_counts))
    accuracies: dict[int, float] = {}
    for client in np.flatnonzero(image_counts):
        accuracies[int(client)] = round(float(correct_counts[client] / image_counts[client]), 6)
    return accuracies


def summarize_clients(accuracies: Sequence[float]) -> dict[str, float | int]:
    """Summarize the accuracies of one or more clients, each of which counts the same.

    Returns:
        "clients": their number; "mean"; "deviation": the population standard deviation; "worst": the mean of the
        lowest tenth, rounded up to whole clients (q-FFL, ICLR 2020, Section 4).
    """
    ordered = np.sort(np.asarray(accuracies, np.float64))
    lowest = ordered[: math.ceil(len(ordered) / 10)]
    return {
        "clients": len(ordered),
        "mean": round(float(ordered.mean()), 6),
        "deviation": round(float(ordered.std()), 6),
        "worst": round(float(lowest.mean()), 6),
    }


def images_per_pass(images: Tensor, limit: int, pixels: int = MAX_CPU_PIXELS) -> int:
    """Compute the batch size for a forward pass, so that a CPU's memory suffices.

    The activations of a thousand images of 64x64 take a gigabyte, and such a batch is no faster than one of 256.

    Args:
        images: (N, C, H, W); only their device and size matter.
        limit: the largest batch size, which is always used on a GPU.
        pixels: the largest number of pixels in a batch on a CPU.
    """
    if images.device.type != "cpu":
        return limit
    height, width = images.shape[-2:]
    return max(1, min(limit, pixels // (height * width)))


@torch.no_grad()
def evaluate_model(
    network: Network,
    model: Tree,
    normalize: Normalize,
    test: Examples,
    batch: int = 1000,
    statistics: Labeling = "running",
    executor: Executor = SERIAL,
) -> ModelEvaluation:
    """Evaluate a model on labeled images.

    Args:
        network: the network.
        model: {"params", "stats"}.
        normalize: converts uint8 images for the network.
        test: the images.
        batch: the largest number of images in one pass.
        statistics: "running": normalize with the model's tracked statistics; else with the statistics of each
            `BATCH_STATISTICS_IMAGES` images.
        executor: computes the batches.

    Returns:
        The confusion matrix, the mean cross-entropy, and which images are classified correctly.
    """
    classes = network.classes
    confusion = torch.zeros(classes * classes, dtype=torch.int64, device=test.labels.device)
    loss = torch.zeros((), dtype=torch.float64, device=test.labels.device)
    if statistics == "running":
        batch = images_per_pass(test.images, batch)
    else:
        batch = BATCH_STATISTICS_IMAGES
    # `Examples` is a pair of images and labels.
    batches = map(Examples, torch.split(test.images, batch), torch.split(test.labels, batch))
    correct: list[np.ndarray] = []
    evaluate = partial(_evaluate_batch, network, model, normalize, statistics)
    for batch_confusion, batch_loss, batch_correct in executor.map(evaluate, batches):
        confusion += batch_confusion
        loss += batch_loss
        correct.append(batch_correct.cpu().numpy())
    return ModelEvaluation(confusion.reshape(classes, classes), float(loss) / len(test.labels), np.concatenate(correct))


@torch.no_grad()
def _evaluate_batch(
    network: Network, model: Tree, normalize: Normalize, statistics: Labeling, batch: Examples
) -> tuple[Tensor, Tensor, Tensor]:
    """Evaluate a model on one batch of n labeled images.

    Args:
        network: the network; it computes in float32 here.
        model: "params" and "stats".
        normalize: converts uint8 images for the network.
        statistics: "running": normalize with the model's tracked statistics; else with those of the batch.
        batch: images and labels.

    Returns:
        The flat confusion matrix (classes * classes,), the summed loss (), and which images are correct, (n,) bool.
    """
    params = tree.channels_last(model["params"])
    images, labels = batch
    classes = network.classes
    network = network.in_float32
    if statistics == "running":
        logits = _compute_logits(network, params, model["stats"], normalize, images)
    else:
        logits = network.train(params, normalize(images))[0]
    loss = F.cross_entropy(logits, labels, reduction="sum").double()
    predictions = logits.argmax(-1)
    # Pairs (true, predicted) as one number, so that bincount counts them.
    confusion = torch.bincount(labels * classes + predictions, minlength=classes * classes)
    return confusion, loss, predictions == labels


@torch.no_grad()
def compute_mean_prediction(
    network: Network,
    model: Tree,
    normalize: Normalize,
    images: Tensor,
    batch: int = 1000,
    executor: Executor = SERIAL,
) -> np.ndarray:
    """Compute the mean class probabilities of images, with the model's tracked statistics.

    On unlabeled images it is APP-U of FedDB (IJCAI 2024, Equation 8).

    Args:
        network: the network.
        model: {"params", "stats"}.
        normalize: converts uint8 images for the network.
        images: uint8 (N, C, H, W), N > 0.
        batch: the largest number of images in one pass.
        executor: computes the batches.

    Returns:
        float64 (classes,).
    """
    total = torch.zeros(network.classes, dtype=torch.float64, device=images.device)
    batches = torch.split(images, images_per_pass(images, batch))
    for batch_total in executor.map(partial(_sum_probabilities, network, model, normalize), batches):
        total += batch_total
    return (total / len(images)).cpu().numpy()


@torch.no_grad()
def _sum_probabilities(network: Network, model: Tree, normalize: Normalize, images: Tensor) -> Tensor:
    """Compute the sum of the class probabilities (classes,) of a batch of images, in float64."""
    params = tree.channels_last(model["params"])
    logits = _compute_logits(network.in_float32, params, model["stats"], normalize, images)
    return logits.double().softmax(-1).sum(0)


def _compute_logits(network: Network, params: Tree, stats: Tree, normalize: Normalize, images: Tensor) -> Tensor:
    """Compute logits (n, classes) in parts, whose activations need less memory; bit for bit those of one pass."""
    chunks = torch.split(images, images_per_pass(images, len(images), LOGIT_PIXELS))
    return torch.cat([network.predict(params, stats, normalize(chunk)) for chunk in chunks])


def prediction_bias(
    predicted_shares: np.ndarray,
    labeled_counts: np.ndarray,
    unlabeled_counts: np.ndarray,
    class_accuracies: Sequence[float],
) -> dict[str, Any]:
    """Compare a model's accuracy by class with its mean prediction and with the class shares of its labels.

    It shows whether classes that a model predicts often, or has many labels of, are also those that it recognizes well:
    Figures 1 and 3 of FedDB (IJCAI 2024). The returned keys are those of metrics.jsonl, where "app_u" is the paper's name
    for the average prediction probability of the unlabeled images.

    Args:
        predicted_shares: the model's mean class probabilities on unlabeled images (`compute_mean_prediction`),
            (classes,). They sum to 1; NaN if there are no unlabeled images.
        labeled_counts: labeled rows by class, (classes,).
        unlabeled_counts: unlabeled rows by class, (classes,).
        class_accuracies: the model's test accuracy by class, (classes,).

    Returns:
        "app_u" (`predicted_shares`), and "labeled", "unlabeled" and "accuracy", which are scaled to sum 1 and None if all
        values are zero; "js_app_u" and "js_labeled", the Jensen-Shannon divergences (bits, 0 to 1) of "accuracy" from
        "app_u" and from "labeled", None if one of the two is missing. Numbers are rounded to six digits.
    """
    accuracy_shares = class_shares(np.asarray(class_accuracies, np.float64))
    labeled_shares = class_shares(np.asarray(labeled_counts, np.float64))
    unlabeled_shares = class_shares(np.asarray(unlabeled_counts, np.float64))
    row: dict[str, Any] = {}
    shares = {
        "app_u": predicted_shares,
        "labeled": labeled_shares,
        "unlabeled": unlabeled_shares,
        "accuracy": accuracy_shares,
    }
    # JSON has no NaN: what is missing is None.
    for name, values in shares.items():
        row[name] = None if np.isnan(values).any() else values.round(6).tolist()
    divergences = {
        "js_app_u": jensen_shannon(accuracy_shares, predicted_shares),
        "js_labeled": jensen_shannon(accuracy_shares, labeled_shares),
    }
    for name, divergence in divergences.items():
        row[name] = None if np.isnan(divergence) else round(float(divergence), 6)
    return row


class Quality:
    """Quality of pseudo-labels, summed over steps and clients. Methods have no access to it.

    Attributes:
        classes: number of classes.
        threshold: the confidence from which a pseudo-label counts as confident.
        totals: (9,) float64: number, number with a known label and number correct, of all pseudo-labels, of the
            confident ones, and of those with a weight above 0.
        per_class: (2, classes) float64: correct pseudo-labels and images by true class.
        scores: (3, b) float64 of each step: whether the pseudo-label is correct, its confidence and its weight, for the
            images with a known label.
        models: the same counts for each of several models that make pseudo-labels, by name.
    """

    def __init__(self, classes: int, threshold: float, device: torch.device) -> None:
        self.classes = classes
        self.threshold = threshold
        self.totals = torch.zeros(9, dtype=torch.float64, device=device)
        self.per_class = torch.zeros(2, classes, dtype=torch.float64, device=device)
        self.scores: list[Tensor] = []
        self.models: dict[str, Quality] = {}

    def add(self, pseudo: PseudoLabels, hidden: Tensor, models: Mapping[str, PseudoLabels] = NO_PSEUDO_LABELS) -> None:
        """Compare pseudo-labels with true labels, and add the counts to the totals.

        Args:
            pseudo: the pseudo-labels of b images.
            hidden: the true labels, (b,), which the method does not see; below 0 where unknown.
            models: the pseudo-labels of single models for the same images, by name.
        """
        for name, model_pseudo in models.items():
            if name not in self.models:
                self.models[name] = Quality(self.classes, self.threshold, self.totals.device)
            self.models[name].add(model_pseudo, hidden)
        correct = (pseudo.label == hidden).double()
        with_label = (hidden >= 0).double()
        all_images = torch.ones_like(correct)
        confident = (pseudo.confidence >= self.threshold).double()
        used = (pseudo.weight > 0).double()
        # For each subset: its images, those with a known label, and those that are correct.
        counts = [
            torch.stack([subset, subset * with_label, subset * correct]).sum(1)
            for subset in (all_images, confident, used)
        ]
        self.totals += torch.cat(counts)
        true_class = F.one_hot(hidden.clamp(min=0), self.classes).double() * with_label[:, None]
        self.per_class += torch.stack([(true_class * correct[:, None]).sum(0), true_class.sum(0)])
        scores = torch.stack([correct, pseudo.confidence.double(), pseudo.weight.double()])
        # Ranks, for areas under the ROC curve, need all scores at once: they wait on the CPU until the round ends.
        self.scores.append(scores[:, hidden >= 0].cpu())

    def row(self) -> dict[str, Any] | None:
        """Return shares and accuracies of the pseudo-labels as metrics.jsonl stores them; None if none was counted.

        Accuracies and areas under the ROC curve are over the images whose label is known. "..._above" are of confident
        pseudo-labels, "..._used" of those with a weight above 0. "models" has the rows of several models.
        """
        all_counts, confident_counts, used_counts = (to_floats(counts) for counts in self.totals.reshape(3, 3))
        total, with_label, correct = all_counts
        confident, confident_with_label, confident_correct = confident_counts
        used, used_with_label, used_correct = used_counts
        if not total:
            return None
        correct_by_class, images_by_class = (to_floats(counts) for counts in self.per_class)
        row: dict[str, Any] = {
            "accuracy": _share(correct, with_label),
            "share_above": confident / total,
            "accuracy_above": _share(confident_correct, confident_with_label),
            "share_used": used / total,
            "accuracy_used": _share(used_correct, used_with_label),
            "per_class": list(map(_share, correct_by_class, images_by_class)),
        }
        correct_labels, confidences, weights = torch.cat(self.scores, dim=1).numpy()
        row["auc_confidence"] = roc_auc(correct_labels > 0, confidences)
        row["auc_weight"] = roc_auc(correct_labels > 0, weights)
        if self.models:
            row["models"] = {name: quality.row() for name, quality in self.models.items()}
        return row


def roc_auc(positive: np.ndarray[Any, Any], scores: np.ndarray[Any, Any]) -> float | None:
    """Compute the probability that a positive example has a higher score than a negative one; equal scores count half.

    For pseudo-labels it measures whether correct ones have higher confidences, or weights, than wrong ones.

    Args:
        positive: bool (n,).
        scores: float (n,).

    Returns:
        The area under the ROC curve, from 0 to 1; None if all examples are positive or all are negative.
    """
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if not positives or not negatives:
        return None
    # Mann-Whitney: the sum of the positives' ranks, where equal scores share their mean rank.
    _, score_index, score_counts = np.unique(scores, return_inverse=True, return_counts=True)
    mean_ranks = np.cumsum(score_counts) - (score_counts - 1) / 2
    rank_sum = float(mean_ranks[score_index][positive].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


@torch.no_grad()
def fit_temperature(network: Network, model: Tree, normalize: Normalize, images: Examples, batch: int = 1000) -> float:
    """Fit a model's softmax temperature on labeled images that it was not trained on (`find_temperature`).

    Divided by it, the logits give probabilities that match the model's accuracy.

    Args:
        network: the network.
        model: "params" and "stats".
        normalize: converts uint8 images for the network.
        images: the images with their labels.
        batch: the largest number of images in one pass.
    """
    params = tree.channels_last(model["params"])
    logits = [
        _compute_logits(network.in_float32, params, model["stats"], normalize, chunk).double()
        for chunk in torch.split(images.images, images_per_pass(images.images, batch))
    ]
    return find_temperature(torch.cat(logits), images.labels)


def _share(count: float, total: float) -> float | None:
    """Divide two counts; None if the total is 0."""
    return count / total if total else None
