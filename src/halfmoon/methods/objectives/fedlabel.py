"""FedLabel (Cho et al., ICCV 2023): pseudo-labels from the local or the global model, if it is more confident."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import Batch, PseudoLabels, Task
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    EMPTY,
    FedAvgRow,
    StepResult,
    forward_weak_and_strong,
    labeled_cross_entropy,
)
from halfmoon.methods.objectives.pseudo_labeling import ReceivedModelObjective, predict_with_received


@dataclass(frozen=True)
class FedLabel(ReceivedModelObjective):
    """CE(y, f(x)) + unlabeled_weight * mean_i 1[max(l_i, g_i) >= threshold] (CE(c_i, f(strong_i)) + k_i).

    l and g are the largest probabilities of the model in training and of the received one on the weak view, c is the
    class of the more confident model. If both predict c, k = consistency_weight * min(l, g) / max(l, g) *
    KL(q || f(strong)), with the received model's probabilities q on the weak view; otherwise k = 0.

    This is a reading of the abstract and of a third party's port, as neither paper nor authors' code was available.
    Assumptions: the received model is the target of the divergence; the strong view; the threshold and the weights.
    """

    uses_class_weights: ClassVar[bool] = True

    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    consistency_weight: float = 1.0

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute FedLabel's loss (ICCV 2023): the more confident of local and received model labels each image.

        If both models predict the same class, the strong view also follows the received model's probabilities.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network, in which the loss is differentiated.
            stats: running batch-norm statistics.
            batch: the minibatch, with a weak and a strong view of each unlabeled image.
            aux: unused: FedLabel has no state.
            cached: the received model.

        Returns:
            The loss (), and batch statistics and pseudo-labels.
        """
        labeled, strong, weak, moments = forward_weak_and_strong(task, params, stats, batch)
        local_confidence, local_label = weak.softmax(-1).max(-1)
        global_log_p = predict_with_received(task, cached, batch.u["weak"]).log_softmax(-1)
        global_confidence, global_label = global_log_p.exp().max(-1)

        # Ties go to the local model.
        label = torch.where(local_confidence >= global_confidence, local_label, global_label)
        confidence = torch.maximum(local_confidence, global_confidence)
        used = (confidence >= self.threshold).to(strong.dtype)
        # KL(q || f(strong)), with the received model's detached prediction q.
        divergence = (global_log_p.exp() * (global_log_p - strong.log_softmax(-1))).sum(-1)
        lower_confidence = torch.minimum(local_confidence, global_confidence)
        # `confidence` is the larger of the two, so the ratio is min / max.
        ratio = torch.where(local_label == global_label, lower_confidence / confidence, 0.0)
        image_losses = F.cross_entropy(strong, label, reduction="none") + self.consistency_weight * ratio * divergence

        loss = labeled_cross_entropy(labeled, batch.y, batch.x_real, task.class_weights)
        loss = loss + self.unlabeled_weight * mean(used * image_losses, batch.u_real)
        return loss, StepResult(moments, pseudo=(PseudoLabels(label, confidence, used),))


ROWS = (
    FedAvgRow(
        "fedlabel", "FedLabel", "FedLabel, ICCV 2023", "pseudo-labels from the more confident of two models", FedLabel()
    ),
)
