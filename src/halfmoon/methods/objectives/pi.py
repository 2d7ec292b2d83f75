"""The Pi-model (Laine and Aila 2017): two weak views of one image should get the same prediction."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from halfmoon.api.types import Batch, Task
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    EMPTY,
    Consistency,
    FedAvgRow,
    StepResult,
    as_pseudo_labels,
    labeled_cross_entropy,
)
from halfmoon.models import forward


@dataclass(frozen=True)
class PiModel(Consistency):
    """CE(y, f(x)) + w mean_i ||p(weak_i) - p(weak2_i)||^2 / classes, p = softmax f; the gradient passes through both.

    Weight and ramp of w are those of the re-runs by MixMatch's authors, which the federated papers quote (in these,
    one of the two predictions gets no gradient). Laine and Aila ramp a weight of 100 times the labeled share over 80 of
    300 epochs, "sigmoid". Their term covers the labeled images too; here, as in the re-runs, only the unlabeled ones.
    """

    uses_class_weights: ClassVar[bool] = True

    unlabeled_weight: float = 10.0

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute the Pi-model's loss: cross-entropy, and squared distance between predictions on two weak views.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network, in which the loss is differentiated.
            stats: running batch-norm statistics (unused: training normalizes by the batch).
            batch: the minibatch, with two weak views of each unlabeled image.
            aux: unused here.
            cached: unused here.

        Returns:
            The loss (), in which the squared distance has the weight of this round, and batch statistics and
            pseudo-labels from the mean of both predictions.
        """
        groups = (batch.x, batch.u["weak"], batch.u["weak2"])
        joint = task.statistics == "joint"
        (labeled, first_logits, second_logits), _, moments = forward(
            task.network, params, joint, groups, real=batch.masks(views=2)
        )
        first = first_logits.softmax(-1)
        second = second_logits.softmax(-1)
        # Both predictions have gradients: each is drawn to the other.
        distance = mean((first - second).square(), batch.u_real)
        labeled_loss = labeled_cross_entropy(labeled, batch.y, batch.x_real, task.class_weights)
        loss = self.total_loss(task, labeled_loss, distance)
        return loss, StepResult(moments, pseudo=(as_pseudo_labels((first + second) / 2),))


ROWS = (FedAvgRow("pi-model", "Pi-Model", "Laine and Aila 2017", "two views, one prediction", PiModel(), pooled=True),)
