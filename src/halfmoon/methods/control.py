"""FedAvg on labels only, with unlabeled images in batch normalization: the control of every semi-supervised method.

Methods such as FixMatch send the labeled and the unlabeled images of a step through the network in one pass, so both
contribute to the batch statistics that normalize the labeled images. FedAvg on labels only normalizes a batch of, say,
10 labeled images. The difference of the two mixes two effects: better statistics, and pseudo-labels. This control has
the same passes as FixMatch, and the loss of labels only: the cross-entropy of the labeled images.

* Control minus labels only: the gain of the statistics.
* Method minus control: the gain of pseudo-labels, regulators and everything else.

Its model is that of FixMatch with a threshold that no prediction passes, byte for byte. In a network without batch
normalization there are no statistics to improve, and the control is FedAvg on labels only, byte for byte.

server: params, stats.  broadcast: the same.  memory: with `keep_optimizer`,
the optimizer's state.  upload: the trained broadcast, and weight.

Departures: the control is ours, so there is no paper to depart from. A client without labels has no loss, but its upload
counts in the average with its batch statistics, as it does in FixMatch: the two differ only in the loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import SUM, Requirements
from halfmoon.api.types import Batch, ClientUpdate, Federation, Passes, Task, UpdateRequirements
from halfmoon.core.tree import Tree
from halfmoon.methods.fedavg import FedAvg, LocalTraining
from halfmoon.methods.objectives.base import (
    EMPTY,
    Objective,
    StepResult,
    count_passes,
    forward_weak_and_strong,
    labeled_cross_entropy,
)
from halfmoon.methods.objectives.supervised import Supervised
from halfmoon.models import forward


@dataclass(frozen=True)
class SupervisedWithUnlabeledStatistics(Objective):
    """CE(y, f(x)), where the unlabeled images of the step pass through the network together with x.

    Attributes:
        labels: passes of the method that it is the control of. "step": weak and strong views, as if pseudo-labels were
            predicted in each step. "round": strong views only, as if they had been predicted at the start of the round.
    """

    labels: Literal["step", "round"] = "step"

    @property
    def requirements(self) -> UpdateRequirements:
        views = ("strong",) if self.labels == "round" else ("weak", "strong")
        return UpdateRequirements(views=views, masks_padding=True)

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute the loss of a control experiment for FixMatch: the labeled images' cross-entropy alone.

        Unlabeled images are in the same forward passes as in FixMatch (strong views, and weak views if it predicts
        labels in each "step"), but have no loss: they only contribute to the batch statistics that normalize the
        labeled images. The difference to FixMatch is then the effect of its pseudo-labels.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network, in which the loss is differentiated.
            stats: running batch-norm statistics.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
            aux: unused state of the objective.
            cached: unused predictions on all images.

        Returns:
            The loss (), and the batch statistics of the passes.
        """
        if self.labels == "round":
            # FixMatch with labels of the round's start looks predictions up, so it has no pass of weak views.
            joint = task.statistics == "joint"
            groups = (batch.x, batch.u["strong"])
            (labeled, _), _, moments = forward(task.network, params, joint, groups, real=batch.masks(views=1))
        else:
            labeled, _, _, moments = forward_weak_and_strong(task, params, stats, batch)
        return labeled_cross_entropy(labeled, batch.y, batch.x_real, task.class_weights), StepResult(moments, pseudo=())

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        if self.labels == "round":
            passes = Passes(labeled + unlabeled, labeled + unlabeled)
        else:
            passes = count_passes(task, labeled + unlabeled, unlabeled)
        # With separate statistics the loss does not depend on unlabeled images, so no gradient passes through them.
        return passes if task.statistics == "joint" else passes._replace(backward=labeled)


@dataclass(frozen=True)
class BatchNormControl:
    """Average models that train on labels only, with unlabeled images in batch normalization.

    Attributes:
        labels: passes of the method that it is the control of (`SupervisedWithUnlabeledStatistics`).
        prox: weight of FedProx's proximal term.
        keep_optimizer: whether clients retain their optimizer's state between rounds.
    """

    uses_class_weights: ClassVar[bool] = True

    labels: Literal["step", "round"] = "step"
    prox: float = 0.0
    keep_optimizer: bool = False

    def requirements(self, norm: str) -> Requirements:
        return SUM

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        has_batch_statistics = task.network.norm == "batch"
        objective = SupervisedWithUnlabeledStatistics(self.labels) if has_batch_statistics else Supervised()
        return {"train": LocalTraining(task, objective, self.prox, self.keep_optimizer)}

    def start(self, task: Task, model: Tree) -> Tree:
        return FedAvg().start(task, model)

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        return FedAvg().round(task, server, federation)

    def solution(self, task: Task, server: Tree) -> Tree:
        return FedAvg().solution(task, server)


ROWS = (
    MethodEntry(
        name="fedavg-control",
        title="Labels-only control",
        paper="McMahan et al. 2017",
        about="only labeled images in the loss, all images in batch normalization: the control",
        method=BatchNormControl(),
    ),
)
