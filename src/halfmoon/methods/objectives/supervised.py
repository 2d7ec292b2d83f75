"""Cross-entropy on labeled images: the floor and, with all labels, the ceiling of every comparison."""

from dataclasses import dataclass

from torch import Tensor

from halfmoon.api.types import Batch, Task, UpdateRequirements
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import NOTHING, FedAvgRow, Objective, StepResult, supervised


@dataclass(frozen=True)
class Supervised(Objective):
    """CE(y, f(x))."""

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(masks_padding=True)

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        logits, moments = task.network.train(params, batch.x, real=batch.x_real)
        return supervised(logits, batch.y, batch.x_real), StepResult([moments], ())


ROWS = (
    FedAvgRow("fedavg", "FedAvg (labeled only)", "McMahan et al. 2017", "labeled images only: the floor", Supervised()),
    FedAvgRow("fedavg-sl", "FedAvg-SL (all labels)", "McMahan et al. 2017", "all labels: the ceiling", Supervised(),
              all_labels=True),
    FedAvgRow("fedprox-sl", "FedProx-SL (all labels)", "Li et al. 2020", "all labels, with a proximal term",
              Supervised(), prox=0.01, all_labels=True),
    FedAvgRow("supervised", "Fully Supervised", "SemiFL, NeurIPS 2022, Table 1",
              "all rows in one place, all with labels: the ceiling of all", Supervised(), all_labels=True, pooled=True),
    FedAvgRow("partially-supervised", "Partially Supervised", "SemiFL, NeurIPS 2022, Table 1",
              "the labeled rows in one place, alone", Supervised(), pooled=True),
)  # fmt: skip
