"""Mean Teacher (Tarvainen and Valpola 2017): the prediction of an average of past models is the target."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from halfmoon.api.types import Batch, Passes, Task
from halfmoon.core.errors import UserError
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    EMPTY,
    Consistency,
    FedAvgRow,
    StepResult,
    as_pseudo_labels,
    labeled_cross_entropy,
    predict_with_teacher,
)
from halfmoon.models import forward


@dataclass(frozen=True)
class MeanTeacher(Consistency):
    """CE(y, f(x)) + w mean_i ||p(weak_i) - q(weak2_i)||^2 / classes, with the teacher's prediction q.

    The teacher moves in every step by `decay` (`base.update_teacher`), is sent and averaged with the model, and is the
    evaluated model, under its own statistics (`Objective`). Weight and ramp of w, and the term's restriction to
    unlabeled images, are those of the re-runs by MixMatch's authors, which the federated papers quote.

    Raises:
        UserError: `decay` is None.
    """

    uses_class_weights: ClassVar[bool] = True

    unlabeled_weight: float = 50.0
    decay: float | None = field(default=0.999, kw_only=True)

    def __post_init__(self) -> None:
        if self.decay is None:
            raise UserError("Mean Teacher needs a teacher: decay must be a number, such as 0.999.")

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute Mean Teacher's loss: cross-entropy, and squared distance to the averaged model's predictions.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the student, in which the loss is differentiated.
            stats: its running batch-norm statistics (unused: training normalizes by the batch).
            batch: the minibatch; student and teacher get different weak views of the unlabeled images.
            aux: "teacher", the averaged parameters, and "teacher_stats", their running statistics.
            cached: unused here.

        Returns:
            The loss (), in which the squared distance has the weight of this round, and batch statistics and the
            teacher's pseudo-labels.
        """
        groups = (batch.x, batch.u["weak"])
        joint = task.statistics == "joint"
        (labeled_logits, student_logits), _, moments = forward(
            task.network, params, joint, groups, real=batch.masks(views=1)
        )
        # The teacher has running statistics of its passes, as its weights differ from the student's.
        teacher_stats = aux.get("teacher_stats", {})
        teacher_logits = predict_with_teacher(task, aux["teacher"], teacher_stats, batch.u["weak2"], batch.u_real)
        target = teacher_logits.softmax(-1)
        distance = mean((student_logits.softmax(-1) - target).square(), batch.u_real)
        labeled_loss = labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, task.class_weights)
        return self.total_loss(task, labeled_loss, distance), StepResult(moments, pseudo=(as_pseudo_labels(target),))

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + 2 * unlabeled, labeled + unlabeled)


ROWS = (
    FedAvgRow("mean-teacher", "Mean Teacher", "Tarvainen and Valpola 2017",
              "the prediction of an average of past models is the target", MeanTeacher(), pooled=True),
)  # fmt: skip
