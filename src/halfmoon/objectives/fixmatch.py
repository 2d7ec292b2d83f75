"""FixMatch (Sohn et al. 2020): a confident guess on the weak view is the label of the strong one."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from halfmoon.objectives.base import Seen, weak_and_strong, weak_and_strong_passes
from halfmoon.tree import Tree
from halfmoon.types import Batch, Passes, Pseudo, Task


@dataclass(frozen=True)
class FixMatch:
    """CE(y, f(x)) + unlabeled_weight * mean_i 1[max q_i >= tau] CE(argmax q_i, f(strong_i)), q = softmax f(weak).

    The mean runs over all unlabeled images of the batch, used or not (Sohn et al. 2020, Eq. 4).
    """

    tau: float = 0.95
    unlabeled_weight: float = 1.0

    @property
    def views(self) -> tuple[str, ...]:
        """Return the views it wants."""
        return ("weak", "strong")

    def __call__(self, task: Task, params: Tree, stats: Tree, batch: Batch) -> tuple[Tensor, Seen]:
        """Return the scalar loss and what was seen."""
        labeled, strong, weak, moments = weak_and_strong(task, params, stats, batch)
        confidence, label = weak.softmax(-1).max(-1)
        used = (confidence >= self.tau).to(strong.dtype)
        consistency = (F.cross_entropy(strong, label, reduction="none") * used).mean()
        loss = F.cross_entropy(labeled, batch.y) + self.unlabeled_weight * consistency
        return loss, Seen(moments, (Pseudo(label, confidence, used),))

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        """Count the images of one gradient."""
        return weak_and_strong_passes(task, labeled, unlabeled)
