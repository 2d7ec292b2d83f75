"""Mean Teacher (Tarvainen and Valpola 2017): the average of all models so far says what a prediction should be."""

from dataclasses import dataclass, field

from torch import Tensor

from halfmoon.api.types import Batch, Passes, Task
from halfmoon.core.errors import UserError
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    NOTHING,
    Consistency,
    FedAvgRow,
    StepResult,
    guess_of,
    supervised,
    teacher_logits,
)
from halfmoon.models import forward


@dataclass(frozen=True)
class MeanTeacher(Consistency):
    """CE(y, f(x)) + w mean_i ||p(weak_i) - q(weak2_i)||^2 / classes; q, held fixed, is the averaged teacher's.

    The teacher follows every step with `decay` (`base.follow`), travels, and is evaluated, under statistics of its own
    (`Objective`). Weight and ramp of w, and the term's restriction to unlabeled images, are those of the re-runs by
    MixMatch's authors, which the federated papers quote. Raises `UserError` without a `decay`.
    """

    unlabeled_weight: float = 50.0
    decay: float | None = field(default=0.999, kw_only=True)

    def __post_init__(self) -> None:
        if self.decay is None:
            raise UserError("Mean Teacher needs a teacher: decay must be a number, such as 0.999.")

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        groups = (batch.x, batch.u["weak"])
        (labeled, student), _, moments = forward(
            task.network, params, task.statistics == "joint", groups, real=batch.masks(1)
        )
        teacher = aux["teacher"], aux.get("teacher_stats", {})
        target = teacher_logits(task, *teacher, batch.u["weak2"], batch.u_real).softmax(-1)
        apart = mean((student.softmax(-1) - target).square(), batch.u_real)
        loss = self.total(task, supervised(labeled, batch.y, batch.x_real), apart)
        return loss, StepResult(moments, (guess_of(target),))

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + 2 * unlabeled, labeled + unlabeled)


ROWS = (
    FedAvgRow("mean-teacher", "Mean Teacher", "Tarvainen and Valpola 2017",
              "the average of past models says what a prediction should be", MeanTeacher(), pooled=True),
)  # fmt: skip
