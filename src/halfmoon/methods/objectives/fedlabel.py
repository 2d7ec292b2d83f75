"""FedLabel (Cho et al., ICCV 2023): the surer of the local and the received model labels an image."""

from dataclasses import dataclass

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
    supervised,
    weak_and_strong,
)
from halfmoon.methods.objectives.pseudo_labeling import WithReceived, received


@dataclass(frozen=True)
class FedLabel(WithReceived):
    """CE(y, f(x)) + unlabeled_weight * mean_i 1[max(l_i, g_i) >= threshold] (CE(c_i, f(strong_i)) + k_i).

    l and g are the largest probabilities of the model in training and of the received one on the weak view, c is the
    class of the surer one. Where both name c, k = consistency_weight * min(l, g) / max(l, g) * KL(q || f(strong)), with
    the received model's probabilities q on the weak view; elsewhere k = 0.

    A reading of the abstract and of a third party's port, neither paper nor authors' code being at hand: that the
    received model is the target of the divergence, the strong view, the threshold and the weights are ours.
    """

    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    consistency_weight: float = 1.0

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        labeled, strong, weak, moments = weak_and_strong(task, params, stats, batch)
        local, own = weak.softmax(-1).max(-1)
        wide = received(task, cached, batch.u["weak"]).log_softmax(-1)
        surety, other = wide.exp().max(-1)
        label, confidence = torch.where(local >= surety, own, other), torch.maximum(local, surety)
        used = (confidence >= self.threshold).to(strong.dtype)
        divergence = (wide.exp() * (wide - strong.log_softmax(-1))).sum(-1)
        ratio = torch.where(own == other, torch.minimum(local, surety) / confidence, 0.0)
        terms = F.cross_entropy(strong, label, reduction="none") + self.consistency_weight * ratio * divergence
        loss = supervised(labeled, batch.y, batch.x_real) + self.unlabeled_weight * mean(used * terms, batch.u_real)
        return loss, StepResult(moments, (PseudoLabels(label, confidence, used),))


ROWS = (
    FedAvgRow(
        "fedlabel", "FedLabel", "FedLabel, ICCV 2023", "the surer of local and received model labels", FedLabel()
    ),
)
