"""FixMatch (Sohn et al. 2020): a confident prediction on the weak view is the label of the strong view."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from halfmoon.api.types import Batch, Task
from halfmoon.core.autodiff import cross_entropy
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    EMPTY,
    FedAvgRow,
    Objective,
    Ramp,
    StepResult,
    labeled_cross_entropy,
    ramp_weight,
    unused_ramp_options,
)
from halfmoon.methods.objectives.pseudo_labeling import PseudoLabeling


@dataclass(frozen=True)
class FixMatch(PseudoLabeling, Objective):
    """CE(y, f(x)) + unlabeled_weight * mean_i 1[max q_i >= threshold] CE(argmax q_i, f(strong_i)), q = softmax f(weak).

    With another `thresholding`, the weight of that rule replaces the bracket. `teacher` "global" is the FixMatch-GPL of
    SAGE's and ProxyFL's tables (CVPR 2025, 2026), "local" their FixMatch-LPL.

    The weight grows from 0 over the first `ramp` (a share) of the rounds, as in Mean Teacher; with 0 it is constant. If
    labels are few, the first models predict badly, and the average of the clients needs many rounds to unlearn that.

    The mean is over "all" unlabeled images of the batch, used or not (Sohn et al. 2020, Eq. 4), or over those that are
    "used", as in FedDB's and SemiFL's released code.
    """

    uses_class_weights: ClassVar[bool] = True

    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    mean: Literal["all", "used"] = "all"
    ramp: float = 0.0
    ramp_shape: Ramp = "linear"

    @property
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        return {**super().unused_options, **unused_ramp_options(self.ramp)}

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute FixMatch's loss (Sohn et al. 2020): confident predictions on weak views label the strong views.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network, in which the loss is differentiated.
            stats: running batch-norm statistics.
            batch: the minibatch, with a weak and a strong view of each unlabeled image.
            aux: state of adaptive thresholds.
            cached: what `cache_predictions` computed when the client update started: predictions on all images, or the
                received model, if an option lets these make the pseudo-labels.

        Returns:
            The loss (), and batch statistics, pseudo-labels and the new state.
        """
        labeled_logits, strong_logits, weak_logits, moments = self.compute_outputs(task, params, stats, batch, cached)
        pseudo, aux = self.pseudo_label(weak_logits, batch, aux)
        image_losses = cross_entropy(strong_logits, pseudo.label, reduction="none") * pseudo.weight
        # A mean over all images shrinks the loss while few predictions are confident; one over used images does not.
        if self.mean == "all":
            consistency = mean(image_losses, batch.u_real)
        else:
            consistency = image_losses.sum() / pseudo.weight.sum().clamp_min(1)
        weight = ramp_weight(task, self.unlabeled_weight, self.ramp, self.ramp_shape)
        labeled_loss = labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, task.class_weights)
        return labeled_loss + weight * consistency, StepResult(moments, pseudo=(pseudo,), aux=aux)


ROWS = (
    FedAvgRow("fedavg-fixmatch", "FedAvg + FixMatch", "McMahan et al. 2017; Sohn et al. 2020",
              "confident predictions on weak views label strong views", FixMatch()),
    FedAvgRow("fedprox-fixmatch", "FedProx + FixMatch", "Li et al. 2020; Sohn et al. 2020",
              "FixMatch with a proximal term", FixMatch(), prox=0.01),
    FedAvgRow("fedavg-fixmatch-global", "FedAvg + FixMatch, global labels",
              "McMahan et al. 2017; Sohn et al. 2020; SAGE, CVPR 2025",
              "FixMatch with pseudo-labels from the received model (FixMatch-GPL)", FixMatch(teacher="global")),
    FedAvgRow("fixmatch-feddpl", "FixMatch-FedDPL", "FedDB, IJCAI 2024, Table 4",
              "FedDB's debiased pseudo-labels, averaged by rows", FixMatch(labels="round", debias=True, mean="used"),
              keep_optimizer=True),
    FedAvgRow("fixmatch", "FixMatch", "Sohn et al. 2020", "confident predictions on weak views label strong views",
              FixMatch(), pooled=True),
)  # fmt: skip
