"""Accuracy on a test set, and the quality of pseudo-labels where the hidden labels live."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon import tree
from halfmoon.augment import Normalize
from halfmoon.models import Network
from halfmoon.tree import Tree
from halfmoon.types import Pseudo


class Examples(NamedTuple):
    """Images with their labels."""

    images: Tensor  # (N, C, H, W) uint8
    labels: Tensor  # (N,) int64


@torch.no_grad()
def scores(
    network: Network, model: Tree, normalize: Normalize, test: Examples, batch: int = 1000
) -> dict[str, float | list[float]]:
    """Return {"accuracy", "loss", "per_class"} of `model` under its tracked statistics."""
    correct = torch.zeros(network.classes, dtype=torch.int64, device=test.labels.device)
    seen = torch.bincount(test.labels, minlength=network.classes)
    loss = torch.zeros((), dtype=torch.float64, device=test.labels.device)
    params = tree.channels_last(model["params"])
    for images, labels in zip(test.images.split(batch), test.labels.split(batch), strict=True):
        logits = network.predict(params, model["stats"], normalize(images))
        loss += F.cross_entropy(logits, labels, reduction="sum").double()
        hit = labels[logits.argmax(-1) == labels]
        correct += torch.bincount(hit, minlength=network.classes)
    total = len(test.labels)
    per_class = (correct / seen.clamp_min(1)).tolist()
    return {
        "accuracy": int(correct.sum()) / total,
        "loss": float(loss) / total,
        "per_class": [round(value, 6) for value in per_class],
    }


class Quality:
    """Counts over pseudo-labels, summed over steps and clients; no method ever sees it."""

    def __init__(self, classes: int, threshold: float, device: torch.device) -> None:
        self.classes, self.threshold = classes, threshold
        self.totals = torch.zeros(6, dtype=torch.float64, device=device)
        self.per_class = torch.zeros(2, classes, dtype=torch.float64, device=device)

    def add(self, pseudo: Pseudo, hidden: Tensor) -> None:
        """Compare pseudo-labels (b,) with the labels (b,) that the method does not see."""
        right = (pseudo.label == hidden).double()
        above = (pseudo.confidence >= self.threshold).double()
        used = (pseudo.weight > 0).double()
        self.totals += torch.stack(
            [
                right.new_tensor(len(right)),
                right.sum(),
                above.sum(),
                (above * right).sum(),
                used.sum(),
                (used * right).sum(),
            ]
        )
        belongs = F.one_hot(hidden, self.classes).double()
        self.per_class += torch.stack([(belongs * right[:, None]).sum(0), belongs.sum(0)])

    def row(self) -> dict[str, float | list[float | None] | None] | None:
        """Return the shares and accuracies, None where nothing was counted."""
        seen, right, above, above_right, used, used_right = self.totals.tolist()
        if not seen:
            return None
        hits, rows = self.per_class.tolist()
        return {
            "accuracy": right / seen,
            "share_above": above / seen,
            "accuracy_above": above_right / above if above else None,
            "share_used": used / seen,
            "accuracy_used": used_right / used if used else None,
            "per_class": [h / n if n else None for h, n in zip(hits, rows, strict=True)],
        }
