"""Pseudo-Label (Lee 2013): the class that the network finds most likely is the image's label."""

from dataclasses import dataclass, replace

from torch import Tensor

from halfmoon.api.types import Batch, Passes, Task, UpdateRequirements
from halfmoon.core.autodiff import cross_entropy
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    NOTHING,
    FedAvgRow,
    Objective,
    Ramp,
    StepResult,
    ramped,
    supervised,
    taught_and_guessed,
)
from halfmoon.methods.objectives.pseudo_labeling import PseudoLabeling, received, surer
from halfmoon.models import forward


@dataclass(frozen=True)
class PseudoLabel(PseudoLabeling, Objective):
    """CE(y, f(x)) + w mean_i 1[max q_i >= threshold] CE(argmax q_i, f(weak_i)), q = softmax f(weak): one view is both.

    w grows to `unlabeled_weight` over the first `ramp` of the rounds. Lee has no threshold (threshold = 0), and a
    weight that stays 0 for a while and then grows to 3; these defaults are those of the re-runs by MixMatch's
    authors, which the federated papers quote.
    """

    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    ramp: float = 0.4
    ramp_shape: Ramp = "linear"

    @property
    def requirements(self) -> UpdateRequirements:
        return replace(super().requirements, views=("weak",))

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        groups = (batch.x, batch.u["weak"])
        if self._again(task):
            (labeled, logits), (guess,), moments = taught_and_guessed(
                task, params, stats, groups, groups[1:], batch.masks(2)
            )
        else:
            joint = task.statistics == "joint"
            (labeled, logits), _, moments = forward(task.network, params, joint, groups, real=batch.masks(1))
            guess = cached["guess"][batch.u_rows] if self.labels == "round" else logits.detach()
        if self.teacher != "local" and self.labels == "step":
            other = received(task, cached, batch.u["weak"])
            guess = other if self.remote else surer(guess, other)
        pseudo, aux = self.pseudo_label(self.adjusted(guess, batch, cached), batch, aux)
        taught = mean(cross_entropy(logits, pseudo.label, reduction="none") * pseudo.weight, batch.u_real)
        weight = ramped(task, self.unlabeled_weight, self.ramp, self.ramp_shape)
        return supervised(labeled, batch.y, batch.x_real) + weight * taught, StepResult(moments, (pseudo,), aux)

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        remote = self.teacher != "local" and self.labels == "step"
        again = (self._again(task) + remote) * unlabeled
        return Passes(labeled + unlabeled + again, labeled + unlabeled)

    def _again(self, task: Task) -> bool:
        """Return whether the guesses need a pass of their own."""
        return self.labels == "step" and not self.remote and task.labeling == "running"


ROWS = (
    FedAvgRow("pseudo-label", "Pseudo-Label", "Lee 2013", "the likeliest class becomes the view's own label",
              PseudoLabel(), pooled=True),
)  # fmt: skip
