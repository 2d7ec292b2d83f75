"""SAGE (CVPR 2025): the local and the received model label together, the more alike they are in confidence."""

from dataclasses import dataclass
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import Batch, PseudoLabels, Task
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    NOTHING,
    FedAvgRow,
    StepResult,
    one_hot,
    supervised,
    weak_and_strong,
)
from halfmoon.methods.objectives.pseudo_labeling import WithReceived, received


@dataclass(frozen=True)
class SAGE(WithReceived):
    """CE(y, f(x)) + unlabeled_weight * mean_i 1[l_i >= threshold or g_i >= threshold] CE(t_i, f(strong_i)).

    l and g are the largest probabilities of the model in training and of the received one on the weak view. The target
    t mixes their classes where the local model is sure (l >= threshold): a share 2^(-|l - g| / half_gap) is the local
    class, the rest the global one; elsewhere it is the global class. So a sample that the local model alone is sure
    of counts, with the global model's class if they differ much in confidence. The received model guesses under the
    statistics that came with it.

    Read from the authors' code, the paper being out of reach. Departures: there one optimizer serves all clients of the
    simulation, whose momentum so passes from client to client; here each starts anew (or keeps its own,
    `keep_optimizer`). Its clients weigh 2000 times their labeled rows and once the others, all the same for its equal
    clients. KL there, cross-entropy here: the gradient is the same.
    """

    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    half_gap: float = 0.05

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        labeled, strong, weak, moments = weak_and_strong(task, params, stats, batch)
        local, own = weak.softmax(-1).max(-1)
        wide, other = received(task, cached, batch.u["weak"]).softmax(-1).max(-1)
        share = (-log(2) / self.half_gap * (local - wide).abs()).exp().clamp(1e-6, 1.0)
        share = torch.where(local >= self.threshold, share, 0.0)[:, None]
        classes = weak.shape[-1]
        target = share * one_hot(own, classes, weak) + (1 - share) * one_hot(other, classes, weak)
        used = ((local >= self.threshold) | (wide >= self.threshold)).to(strong.dtype)
        consistency = mean(F.cross_entropy(strong, target, reduction="none") * used, batch.u_real)
        loss = supervised(labeled, batch.y, batch.x_real) + self.unlabeled_weight * consistency
        return loss, StepResult(moments, (PseudoLabels(target.argmax(-1), torch.maximum(local, wide), used),))


ROWS = (FedAvgRow("sage", "SAGE", "SAGE, CVPR 2025", "local and received model label images together", SAGE()),)
