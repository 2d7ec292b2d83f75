"""MixMatch (Berthelot et al. 2019): sharpened pseudo-labels, and training on mixtures of all images and labels."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from halfmoon.api.types import Batch, Passes, Task, UpdateRequirements
from halfmoon.core.padding import concat, mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    EMPTY,
    Consistency,
    FedAvgRow,
    StepResult,
    as_pseudo_labels,
    count_passes,
    forward_and_predict,
    mix_rows,
    one_hot,
    sharpen,
    soft_cross_entropy,
)


@dataclass(frozen=True)
class MixMatch(Consistency):
    """CE(y', f(x')) + w mean ||q' - softmax f(u')||^2 / classes on mixtures x', u' with mixed labels y', q'.

    An unlabeled image's q is its mean prediction over two weak views, sharpened with `temperature`. Labeled images and
    both views are mixed with a permutation of all of them (`base.mix_rows`), with a coefficient from
    Beta(concentration, concentration): one a step, while the authors' code draws one for each image. The averaged
    teacher of `decay` is only used for evaluation.

    Defaults are the paper's for CIFAR-10, except the ramp: its 16,000 steps, 1/64 of the paper's run, are more than a
    short run has, and a weight of 75 from the second round on made training on the digits collapse.
    """

    uses_class_weights: ClassVar[bool] = True

    unlabeled_weight: float = 75.0
    temperature: float = 0.5
    concentration: float = 0.75
    decay: float | None = field(default=0.999, kw_only=True)

    @property
    def requirements(self) -> UpdateRequirements:
        return replace(super().requirements, mixup=self.concentration)

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = EMPTY, cached: Tree = EMPTY
    ) -> tuple[Tensor, StepResult]:
        """Compute MixMatch's loss (Berthelot et al. 2019) on mixtures of images and of labels and pseudo-labels.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            params: parameters of the network, in which the loss is differentiated.
            stats: running batch-norm statistics.
            batch: the minibatch, with two weak views of each unlabeled image and the draws of mixup.
            aux: unused here.
            cached: unused here.

        Returns:
            The loss (), in which the squared distance has the weight of this round, and batch statistics and
            pseudo-labels.
        """
        weak_views = (batch.u["weak"], batch.u["weak2"])
        mix = batch.mixing["mix"]
        order = batch.mixing["order"]
        sizes = [len(batch.x), len(weak_views[0]), len(weak_views[1])]
        mixtures = torch.split(mix_rows(torch.cat([batch.x, *weak_views]), mix, order), sizes)
        masks = batch.masks(views=2)
        # Five groups: mixtures of labeled images and of both views, then both views once more for the pseudo-labels.
        (labeled, *unlabeled), weak_logits, moments = forward_and_predict(
            task, params, stats, train_groups=mixtures, predict_groups=weak_views, real=(*masks, *masks[1:])
        )
        # One pseudo-label for both views: the mean of their predictions.
        prediction = torch.stack([logits.softmax(-1) for logits in weak_logits]).mean(0)
        pseudo_labels = sharpen(prediction, self.temperature)
        labels = one_hot(batch.y, task.network.classes, pseudo_labels)
        # Targets are mixed in the order of the images: labeled ones, then each view of the unlabeled ones.
        targets = mix_rows(torch.cat([labels, pseudo_labels, pseudo_labels]), mix, order)
        labeled_targets = targets[: len(labels)]
        unlabeled_targets = targets[len(labels) :]
        # Squared error in place of cross-entropy: it is bounded, and so less sensitive to wrong pseudo-labels.
        distance = mean((torch.cat(unlabeled).softmax(-1) - unlabeled_targets).square(), concat(masks[1:]))
        labeled_loss = soft_cross_entropy(labeled, labeled_targets, batch.x_real, task.class_weights)
        loss = self.total_loss(task, labeled_loss, distance)
        return loss, StepResult(moments, pseudo=(as_pseudo_labels(prediction),))

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        return count_passes(task, labeled + 2 * unlabeled, 2 * unlabeled)


ROWS = (
    FedAvgRow("mixmatch", "MixMatch", "Berthelot et al. 2019", "sharpened pseudo-labels, mixed images and labels",
              MixMatch(), pooled=True),
)  # fmt: skip
