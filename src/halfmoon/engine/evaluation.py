"""Accuracy on a test set, the quality of pseudo-labels where the hidden labels live, and what a model leans to."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import NO_PSEUDO_LABELS, Labeling, PseudoLabels
from halfmoon.core import tree
from halfmoon.core.tensors import to_floats
from halfmoon.core.tree import Tree
from halfmoon.data.partition.heterogeneity import class_shares, jensen_shannon
from halfmoon.models import Network
from halfmoon.models.network import Normalize

Item = TypeVar("Item")
Result = TypeVar("Result")


class ParallelMap(Protocol):
    """What applies a function to items, as the built-in `map` does, which is the one that spreads nothing.

    Results come in the order of the items, and do not depend on where they were computed.
    """

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """Return an iterator of function(item)."""
        ...


PIXELS = 2**20
"""Pixels of the images that a CPU evaluates together at most."""

TOGETHER = 250
"""Test images that share batch statistics where these are what normalizes them, in their order."""


MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
"""The range of temperatures: without a wrong answer among the images, the best one would be 0."""


class Examples(NamedTuple):
    """Images with their labels."""

    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64


class ModelEvaluation(NamedTuple):
    """What a model said of a test set, counted in one pass."""

    confusion: Tensor  # (classes, classes) int64; rows: true class, columns: predicted class
    loss: float  # mean cross-entropy
    correct: np.ndarray | None = None  # (N,) bool, None where images are at several places

    @property
    def packed(self) -> bytes | None:
        """The bits of `correct`, eight in a byte."""
        return None if self.correct is None else np.packbits(self.correct).tobytes()

    @property
    def per_class(self) -> list[float]:
        """Return the accuracy of each class, to six digits; 0 for a class without test images."""
        shares = self.confusion.diagonal() / self.confusion.sum(1).clamp_min(1)
        return [round(value, 6) for value in to_floats(shares)]

    def row(self) -> dict[str, float | list[float]]:
        accuracy = int(self.confusion.diagonal().sum()) / int(self.confusion.sum())
        return {"accuracy": accuracy, "loss": self.loss, "per_class": self.per_class}


def at_once(images: Tensor, most: int, pixels: int = PIXELS) -> int:
    """Return how many of the images (N, C, H, W) are looked at together: `most`, on a CPU up to so many pixels.

    The activations of a thousand images of 64x64 take a gigabyte, and are no faster than those of 256.
    """
    return most if images.device.type != "cpu" else max(1, min(most, pixels // (images.shape[-2] * images.shape[-1])))


@torch.no_grad()
def evaluate_model(
    network: Network,
    model: Tree,
    normalize: Normalize,
    test: Examples,
    batch: int = 1000,
    statistics: Labeling = "running",
    parallel_map: ParallelMap = map,
) -> ModelEvaluation:
    """Count what `model` says of the test set under its tracked statistics, or under those of every `TOGETHER`.

    `batch` images at a time, which `spread` may count side by side.
    """
    classes = network.classes
    cells = torch.zeros(classes * classes, dtype=torch.int64, device=test.labels.device)
    loss = torch.zeros((), dtype=torch.float64, device=test.labels.device)
    batch = at_once(test.images, batch) if statistics == "running" else TOGETHER
    parts = map(Examples, torch.split(test.images, batch), torch.split(test.labels, batch))
    correct: list[np.ndarray] = []
    for count, total, right in parallel_map(partial(_counts, network, model, normalize, statistics), parts):
        cells += count
        loss += total
        correct.append(right.cpu().numpy())
    return ModelEvaluation(cells.reshape(classes, classes), float(loss) / len(test.labels), np.concatenate(correct))


@torch.no_grad()
def _counts(
    network: Network, model: Tree, normalize: Normalize, statistics: Labeling, part: Examples
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how often each predicted class meets each true one (classes * classes,), the losses' sum, who is right."""
    params, (images, labels), classes = tree.channels_last(model["params"]), part, network.classes
    network = network.in_float32
    if statistics == "running":
        logits = _logits(network, params, model["stats"], normalize, images)
    else:
        logits = network.train(params, normalize(images))[0]
    loss, predictions = F.cross_entropy(logits, labels, reduction="sum").double(), logits.argmax(-1)
    return torch.bincount(labels * classes + predictions, minlength=classes * classes), loss, predictions == labels


@torch.no_grad()
def mean_prediction(
    network: Network,
    model: Tree,
    normalize: Normalize,
    images: Tensor,
    batch: int = 1000,
    parallel_map: ParallelMap = map,
) -> np.ndarray:
    """Return the mean class probabilities, float64 (classes,), of one or more images, uint8 (N, C, H, W).

    Over unlabeled images it is FedDB's APP-U (IJCAI 2024, Equation 8), here under the model's tracked statistics.
    """
    total = torch.zeros(network.classes, dtype=torch.float64, device=images.device)
    for part in parallel_map(
        partial(_predicted, network, model, normalize), torch.split(images, at_once(images, batch))
    ):
        total += part
    return (total / len(images)).cpu().numpy()


@torch.no_grad()
def _predicted(network: Network, model: Tree, normalize: Normalize, images: Tensor) -> Tensor:
    params = tree.channels_last(model["params"])
    return _logits(network.in_float32, params, model["stats"], normalize, images).double().softmax(-1).sum(0)


def _logits(network: Network, params: Tree, stats: Tree, normalize: Normalize, images: Tensor) -> Tensor:
    """Return the logits (n, classes), to the bit those of one pass, whose activations would be larger than a model."""
    parts = torch.split(images, at_once(images, len(images), 2**16))
    return torch.cat([network.predict(params, stats, normalize(part)) for part in parts])


def leaning(
    app_u: np.ndarray, labeled: np.ndarray, unlabeled: np.ndarray, per_class: Sequence[float]
) -> dict[str, Any]:
    """Return what a model's bias follows: its prior over unlabeled images, or the labeled mix.

    `app_u` (classes,) is its mean prediction of unlabeled images, `labeled` and `unlabeled` (classes,) count rows, and
    `per_class` (classes,) is its test accuracy by class. The row holds app_u and the three others scaled to sum 1, None
    where all are zero, and the Jensen-Shannon divergences (bits, 0 to 1) between "accuracy" and "app_u", js_app_u, and
    between "accuracy" and "labeled", js_labeled (FedDB, IJCAI 2024, Figures 1 and 3).
    """
    accuracy, labeled, unlabeled = (
        class_shares(np.asarray(each, np.float64)) for each in (per_class, labeled, unlabeled)
    )
    shares = {"app_u": app_u, "labeled": labeled, "unlabeled": unlabeled, "accuracy": accuracy}
    distances = {"js_app_u": jensen_shannon(accuracy, app_u), "js_labeled": jensen_shannon(accuracy, labeled)}
    row: dict[str, Any] = {name: None if np.isnan(s).any() else s.round(6).tolist() for name, s in shares.items()}
    return row | {name: None if np.isnan(js) else round(float(js), 6) for name, js in distances.items()}


class Quality:
    """Counts over pseudo-labels, summed over steps and clients; no method ever sees it."""

    def __init__(self, classes: int, threshold: float, device: torch.device) -> None:
        self.classes, self.threshold = classes, threshold
        self.totals = torch.zeros(9, dtype=torch.float64, device=device)
        self.per_class = torch.zeros(2, classes, dtype=torch.float64, device=device)
        self.models: dict[str, Quality] = {}

    def add(self, pseudo: PseudoLabels, hidden: Tensor, models: Mapping[str, PseudoLabels] = NO_PSEUDO_LABELS) -> None:
        """Compare pseudo-labels (b,) with the labels (b,) that the method does not see, below 0 where nobody knows.

        Those that each of several `models` makes are counted apart, by its name.
        """
        for name, each in models.items():
            if name not in self.models:
                self.models[name] = Quality(self.classes, self.threshold, self.totals.device)
            self.models[name].add(each, hidden)
        right = (pseudo.label == hidden).double()
        kinds = torch.ones_like(right), (pseudo.confidence >= self.threshold).double(), (pseudo.weight > 0).double()
        labeled = (hidden >= 0).double()
        self.totals += torch.cat([torch.stack([each, each * labeled, each * right]).sum(1) for each in kinds])
        belongs = F.one_hot(hidden.clamp(min=0), self.classes).double() * labeled[:, None]
        self.per_class += torch.stack([(belongs * right[:, None]).sum(0), belongs.sum(0)])

    def row(self) -> dict[str, Any] | None:
        """Return the shares and accuracies, None where nothing was counted; "models" holds those of several models.

        An accuracy is that over the images whose label is known.
        """
        total, labeled, right, above, above_labeled, above_right, used, used_labeled, used_right = to_floats(
            self.totals
        )
        if not total:
            return None
        hits, rows = (to_floats(part) for part in self.per_class)
        return {
            "accuracy": right / labeled if labeled else None,
            "share_above": above / total,
            "accuracy_above": above_right / above_labeled if above_labeled else None,
            "share_used": used / total,
            "accuracy_used": used_right / used_labeled if used_labeled else None,
            "per_class": [h / n if n else None for h, n in zip(hits, rows, strict=True)],
            **({"models": {name: each.row() for name, each in self.models.items()}} if self.models else {}),
        }


def temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature of the least mean cross-entropy of logits float64 (N, classes) with labels int64 (N,).

    Guo et al., On Calibration of Modern Neural Networks, ICML 2017, Section 4.2: one number for all classes. In
    1 / temperature = b the cross-entropy is convex: the sign of its derivative, mean of E_p[z] - z_y with p the
    softmax of b z, is followed by bisection in log b, between `MIN_TEMPERATURE` and `MAX_TEMPERATURE`.
    """
    z, right = logits, logits.gather(1, labels[:, None])[:, 0]

    def slope(b: float) -> float:
        return float((((b * z).softmax(1) * z).sum(1) - right).mean())

    low, high = math.log(1 / MAX_TEMPERATURE), math.log(1 / MIN_TEMPERATURE)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


@torch.no_grad()
def fit_temperature(network: Network, model: Tree, normalize: Normalize, images: Examples, batch: int = 1000) -> float:
    """Return the temperature of `model` = {"params", "stats"} on labeled images that it was not trained on."""
    params = tree.channels_last(model["params"])
    some = torch.split(images.images, at_once(images.images, batch))
    parts = [_logits(network.in_float32, params, model["stats"], normalize, each).double() for each in some]
    return temperature(torch.cat(parts), images.labels)
