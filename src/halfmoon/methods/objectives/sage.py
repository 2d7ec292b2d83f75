"""SAGE (CVPR 2025): pseudo-labels mix the classes of the local and the received model by their confidence gap."""

from dataclasses import dataclass
from math import log
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
    one_hot,
)
from halfmoon.methods.objectives.pseudo_labeling import ReceivedModelObjective, predict_with_received

MIN_LOCAL_SHARE = 1e-6
"""Smallest share of a confident local model's class in the target (the authors' code)."""


@dataclass(frozen=True)
class SAGE(ReceivedModelObjective):
    """CE(y, f(x)) + unlabeled_weight * mean_i 1[l_i >= threshold or g_i >= threshold] CE(t_i, f(strong_i)).

    l and g are the largest probabilities of the model in training and of the received one on the weak view. The target
    t mixes their classes if the local model is confident (l >= threshold): a share 2^(-|l - g| / half_gap) is the local
    class, the rest the global one. Otherwise it is the global class. So an image counts if only the local model is
    confident, with the global model's class if the two differ much in confidence. The received model predicts under
    the statistics that it was sent with.

    Read from the authors' code, as the paper was not available. Departures: in their simulation all clients share one
    optimizer, whose momentum passes from client to client; here each client starts with a new one (or retains its
    optimizer between rounds, `keep_optimizer`). Their clients weigh 2000 times their labeled rows plus the other rows,
    which makes no difference for its equal clients. They use KL, here it is cross-entropy: the gradient is the same.
    """

    uses_class_weights: ClassVar[bool] = True

    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    half_gap: float = 0.05

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute SAGE's loss (CVPR 2025): pseudo-labels mix the classes of the local and the received model.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network, in which the loss is differentiated.
            stats: running batch-norm statistics.
            batch: the minibatch, with a weak and a strong view of each of its b unlabeled images.
            aux: unused: SAGE has no state.
            cached: the received model.

        Returns:
            The loss (), and batch statistics and pseudo-labels.
        """
        labeled_logits, strong_logits, weak_logits, moments = forward_weak_and_strong(task, params, stats, batch)
        classes = weak_logits.shape[-1]
        local_confidence, local_label = weak_logits.softmax(-1).max(-1)
        received_logits = predict_with_received(task, cached, batch.u["weak"])
        global_confidence, global_label = received_logits.softmax(-1).max(-1)
        gap = (local_confidence - global_confidence).abs()
        # The share halves with each `half_gap` of difference in confidence; the bounds are the authors'.
        local_share = (-log(2) / self.half_gap * gap).exp().clamp(MIN_LOCAL_SHARE, 1.0)
        # (b, 1): multiplies rows of classes below.
        local_share = torch.where(local_confidence >= self.threshold, local_share, 0.0)[:, None]
        target = local_share * one_hot(local_label, classes, weak_logits)
        target = target + (1 - local_share) * one_hot(global_label, classes, weak_logits)
        # A confident local model is enough, even if the target is then mostly the global model's class.
        is_used = (local_confidence >= self.threshold) | (global_confidence >= self.threshold)
        used = is_used.to(strong_logits.dtype)
        consistency = mean(F.cross_entropy(strong_logits, target, reduction="none") * used, batch.u_real)
        labeled_loss = labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, task.class_weights)
        loss = labeled_loss + self.unlabeled_weight * consistency
        confidence = torch.maximum(local_confidence, global_confidence)
        return loss, StepResult(moments, pseudo=(PseudoLabels(target.argmax(-1), confidence, used),))


ROWS = (
    FedAvgRow(
        "sage", "SAGE", "SAGE, CVPR 2025", "pseudo-labels mix the classes of the local and the received model", SAGE()
    ),
)
