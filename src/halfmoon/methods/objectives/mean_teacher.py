"""Mean Teacher (Tarvainen and Valpola 2017): the average of all models so far says what a prediction should be."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from halfmoon.api.types import Batch, Needs, Passes, Task
from halfmoon.core.errors import UserError
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    NOTHING,
    FedAvgRow,
    Objective,
    Ramp,
    StepResult,
    guess_of,
    ramped,
    supervised,
)
from halfmoon.models import forward


@dataclass(frozen=True)
class MeanTeacher(Objective):
    """CE(y, f(x)) + w mean_i ||p(weak_i) - q(weak2_i)||^2 / classes; q, held fixed, is the averaged teacher's.

    The teacher follows every step with `decay` (`base.follow`), travels, and is evaluated, under statistics of its own
    (`Objective`). w grows to `unlabeled_weight` over the first `ramp` of the rounds; both, and the term's restriction
    to unlabeled images, are those of the re-runs by MixMatch's authors, which the federated papers quote. Raises
    `UserError` without a `decay`.
    """

    unlabeled_weight: float = 50.0
    ramp: float = 0.4
    ramp_shape: Ramp = "linear"
    decay: float | None = field(default=0.999, kw_only=True)

    def __post_init__(self) -> None:
        if self.decay is None:
            raise UserError("Mean Teacher needs a teacher: decay must be a number, such as 0.999.")

    @property
    def needs(self) -> Needs:
        return Needs(("weak", "weak2"), masks=True)

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        groups = (batch.x, batch.u["weak"])
        (labeled, student), _, moments = forward(
            task.network, params, task.statistics == "joint", groups, real=batch.masks(1)
        )
        with torch.no_grad():
            if task.labeling == "running":
                logits = task.network.predict(aux["teacher"], aux.get("teacher_stats", {}), batch.u["weak2"])
            else:
                logits, _ = task.network.train(aux["teacher"], batch.u["weak2"], real=batch.u_real)
            target = logits.softmax(-1).detach()
        apart = mean((student.softmax(-1) - target).square(), batch.u_real)
        weight = ramped(task, self.unlabeled_weight, self.ramp, self.ramp_shape)
        return supervised(labeled, batch.y, batch.x_real) + weight * apart, StepResult(moments, (guess_of(target),))

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        return Passes(labeled + 2 * unlabeled, labeled + unlabeled)


ROWS = (
    FedAvgRow(
        "mean-teacher",
        "Mean Teacher",
        "Tarvainen and Valpola 2017",
        "the average of past models says what a prediction should be",
        MeanTeacher(),
        pooled=True,
    ),
)
