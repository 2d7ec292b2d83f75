"""UDA (Xie et al. 2020): the sharpened prediction on the weak view is the soft label of the strong view."""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import Batch, Task
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import EMPTY, FedAvgRow, Objective, StepResult, labeled_cross_entropy
from halfmoon.methods.objectives.pseudo_labeling import PseudoLabeling


@dataclass(frozen=True)
class UDA(PseudoLabeling, Objective):
    """CE(y, f(x)) + unlabeled_weight * mean_i 1[max q_i >= threshold] CE(sharpen(q_i), f(strong_i)).

    q = softmax f(weak), and sharpen(q) is q^(1/temperature), normalized: the softmax of the logits divided by the
    temperature. With another `thresholding`, the weight of that rule replaces the bracket. With `temperature` 1 and
    `threshold` 0, every image counts, with the full prediction of the teacher (Hinton et al. 2015): training does not
    make wrong predictions more confident. Training signal annealing is left out, as in the runs that the federated
    papers compare with.
    """

    uses_class_weights: ClassVar[bool] = True

    threshold: float = 0.8
    temperature: float = 0.4
    unlabeled_weight: float = 1.0

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute UDA's loss (Xie et al. 2020): the sharpened prediction on a weak view is the strong view's soft label.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network, in which the loss is differentiated.
            stats: running batch-norm statistics.
            batch: the minibatch, with a weak and a strong view of each unlabeled image.
            aux: state of adaptive thresholds.
            cached: predictions computed when the client update started.

        Returns:
            The loss (), and batch statistics, pseudo-labels and the new state.
        """
        labeled_logits, strong_logits, weak_logits, moments = self.compute_outputs(task, params, stats, batch, cached)
        pseudo, aux = self.pseudo_label(weak_logits, batch, aux)
        # The threshold applies to the prediction before it is sharpened.
        target = (weak_logits / self.temperature).softmax(-1)
        image_losses = F.cross_entropy(strong_logits, target, reduction="none") * pseudo.weight
        consistency = mean(image_losses, batch.u_real)
        labeled_loss = labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, task.class_weights)
        return labeled_loss + self.unlabeled_weight * consistency, StepResult(moments, pseudo=(pseudo,), aux=aux)


ROWS = (
    FedAvgRow("fedavg-uda", "FedAvg + UDA", "McMahan et al. 2017; Xie et al. 2020",
              "sharpened predictions on weak views label strong views", UDA()),
    FedAvgRow("fedprox-uda", "FedProx + UDA", "Li et al. 2020; Xie et al. 2020", "UDA with a proximal term", UDA(),
              prox=0.01),
    FedAvgRow("fedavg-soft-labels", "FedAvg + soft labels",
              "McMahan et al. 2017; Tarvainen and Valpola 2017; Xie et al. 2020",
              "the averaged model's predictions on weak views, without a threshold, label strong views",
              UDA(threshold=0.0, temperature=1.0, teacher="average")),
    FedAvgRow("uda", "UDA", "Xie et al. 2020", "sharpened predictions on weak views label strong views", UDA(),
              pooled=True),
)  # fmt: skip
