"""Cross-entropy on labeled images: the lower and, with all labels, the upper bound of every comparison."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from halfmoon.api.types import Batch, Task, UpdateRequirements
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import EMPTY, FedAvgRow, Objective, StepResult, labeled_cross_entropy


@dataclass(frozen=True)
class Supervised(Objective):
    """CE(y, f(x))."""

    uses_class_weights: ClassVar[bool] = True

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(masks_padding=True)

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute the mean cross-entropy of the labeled images of a minibatch."""
        logits, moments = task.network.train(params, batch.x, real=batch.x_real)
        loss = labeled_cross_entropy(logits, batch.y, batch.x_real, task.class_weights)
        return loss, StepResult([moments], pseudo=())


ROWS = (
    FedAvgRow("fedavg", "FedAvg (labeled only)", "McMahan et al. 2017", "only labeled images: a lower bound",
              Supervised()),
    FedAvgRow("fedavg-sl", "FedAvg-SL (all labels)", "McMahan et al. 2017", "all labels: an upper bound", Supervised(),
              all_labels=True),
    FedAvgRow("fedprox-sl", "FedProx-SL (all labels)", "Li et al. 2020", "all labels, with a proximal term",
              Supervised(), prox=0.01, all_labels=True),
    FedAvgRow("supervised", "Fully Supervised", "SemiFL, NeurIPS 2022, Table 1",
              "all images in one place, with all labels", Supervised(), all_labels=True, pooled=True),
    FedAvgRow("partially-supervised", "Partially Supervised", "SemiFL, NeurIPS 2022, Table 1",
              "only the labeled images, in one place", Supervised(), pooled=True),
)  # fmt: skip
