"""Pseudo-Label (Lee 2013): the class that the network predicts is the label of the same view."""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from halfmoon.api.types import Batch, Passes, Task, UpdateRequirements
from halfmoon.core.autodiff import cross_entropy
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    EMPTY,
    FedAvgRow,
    Objective,
    Ramp,
    StepResult,
    forward_and_predict,
    labeled_cross_entropy,
    ramp_weight,
    unused_ramp_options,
)
from halfmoon.methods.objectives.pseudo_labeling import PseudoLabeling, predict_with_received, select_more_confident
from halfmoon.models import forward


@dataclass(frozen=True)
class PseudoLabel(PseudoLabeling, Objective):
    """CE(y, f(x)) + w mean_i 1[max q_i >= threshold] CE(argmax q_i, f(weak_i)), q = softmax f(weak).

    w grows to `unlabeled_weight` over the first `ramp` of the rounds. Lee has no threshold (threshold = 0), and a
    weight that remains 0 for a while and then grows to 3; these defaults are those of the re-runs by MixMatch's
    authors, which the federated papers quote.
    """

    uses_class_weights: ClassVar[bool] = True

    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    ramp: float = 0.4
    ramp_shape: Ramp = "linear"

    @property
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        return {**super().unused_options, **unused_ramp_options(self.ramp)}

    @property
    def requirements(self) -> UpdateRequirements:
        return replace(super().requirements, views=("weak",))

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute Pseudo-Label's loss (Lee 2013): the predicted class of a weak view is the label of the same view.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network, in which the loss is differentiated.
            stats: running batch-norm statistics.
            batch: the minibatch of labeled and unlabeled images.
            aux: state of adaptive thresholds.
            cached: what was computed when the client update started: "round_logits" of all images, with labels "round",
                or the received model.

        Returns:
            The loss (), and batch statistics, pseudo-labels and the new state.
        """
        # The same view is trained on and predicts, so one pass serves both unless it needs running statistics.
        groups = (batch.x, batch.u["weak"])
        if self._needs_separate_pass(task):
            (labeled, logits), (prediction,), moments = forward_and_predict(
                task, params, stats, train_groups=groups, predict_groups=groups[1:], real=batch.masks(views=2)
            )
        else:
            joint = task.statistics == "joint"
            (labeled, logits), _, moments = forward(task.network, params, joint, groups, real=batch.masks(views=1))
            prediction = cached["round_logits"][batch.u_rows] if self.labels == "round" else logits.detach()
        # `teacher` is the model that predicts: the one in training ("local"), the received one, or for each image the more
        # confident of the two ("both").
        if self.teacher != "local" and self.labels == "step":
            received = predict_with_received(task, cached, batch.u["weak"])
            prediction = received if self.teacher_is_received else select_more_confident(prediction, received)
        pseudo, aux = self.pseudo_label(self.debias_predictions(prediction, batch, cached), batch, aux)
        pseudo_loss = mean(cross_entropy(logits, pseudo.label, reduction="none") * pseudo.weight, batch.u_real)
        weight = ramp_weight(task, self.unlabeled_weight, self.ramp, self.ramp_shape)
        labeled_loss = labeled_cross_entropy(labeled, batch.y, batch.x_real, task.class_weights)
        return labeled_loss + weight * pseudo_loss, StepResult(moments, pseudo=(pseudo,), aux=aux)

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        uses_received = self.teacher != "local" and self.labels == "step"
        # Each of the two is one more pass over the unlabeled images if it is true.
        predictions = (self._needs_separate_pass(task) + uses_received) * unlabeled
        return Passes(labeled + unlabeled + predictions, labeled + unlabeled)

    def _needs_separate_pass(self, task: Task) -> bool:
        """Check whether the pseudo-labels need a forward pass in addition to the one that trains."""
        return self.labels == "step" and not self.teacher_is_received and task.labeling == "running"


ROWS = (
    FedAvgRow("pseudo-label", "Pseudo-Label", "Lee 2013", "the predicted class is the label of the same view",
              PseudoLabel(), pooled=True),
)  # fmt: skip
