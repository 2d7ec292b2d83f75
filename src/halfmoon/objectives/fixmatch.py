"""FixMatch (Sohn et al. 2020): a confident guess on the weak view is the label of the strong one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from halfmoon.objectives.base import NOTHING, Objective, PseudoLabeling, Seen, supervised
from halfmoon.tree import Tree
from halfmoon.types import Batch, Pseudo, Task


@dataclass(frozen=True)
class FixMatch(PseudoLabeling, Objective):
    """CE(y, f(x)) + unlabeled_weight * mean_i 1[max q_i >= tau] CE(argmax q_i, f(strong_i)), q = softmax f(weak).

    The mean runs over "all" unlabeled images of the batch, used or not (Sohn et al. 2020, Eq. 4), or over those that
    are "used", as in FedDB's and SemiFL's released code.
    """

    tau: float = 0.95
    unlabeled_weight: float = 1.0
    mean: Literal["all", "used"] = "all"

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aside: Tree = NOTHING, ready: Tree = NOTHING
    ) -> tuple[Tensor, Seen]:
        """Return the scalar loss and what was seen."""
        labeled, strong, weak, moments = self.look(task, params, stats, batch, ready)
        confidence, label = weak.softmax(-1).max(-1)
        used = (confidence >= self.tau).to(strong.dtype)
        loss = F.cross_entropy(strong, label, reduction="none") * used
        consistency = loss.mean() if self.mean == "all" else loss.sum() / used.sum().clamp_min(1)
        total = supervised(labeled, batch.y) + self.unlabeled_weight * consistency
        return total, Seen(moments, (Pseudo(label, confidence, used),))
