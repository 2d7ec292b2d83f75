"""MixMatch (Berthelot et al. 2019): guess, sharpen, and learn from mixtures of all images and their labels."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from halfmoon.api.types import Batch, Passes, Task, UpdateRequirements
from halfmoon.core.padding import concat, mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    NOTHING,
    Consistency,
    FedAvgRow,
    StepResult,
    guess_of,
    guessing_passes,
    mixed,
    one_hot,
    sharpened,
    soft_cross_entropy,
    taught_and_guessed,
)


@dataclass(frozen=True)
class MixMatch(Consistency):
    """CE(y', f(x')) + w mean ||q' - softmax f(u')||^2 / classes on mixtures x', u' with mixed labels y', q'.

    An unlabeled image's q is its mean prediction over two weak views, sharpened with `temperature`. Labeled images and
    both views are mixed with a permutation of all of them (`base.mixed`), with a coefficient from
    Beta(concentration, concentration): one a step, where the authors' code draws one for each image. The averaged
    teacher of `decay` only evaluates. Defaults: the
    paper's for CIFAR-10, but for the ramp: its 16,000 steps, 1/64 of its run, are more than a short run has, and a
    weight of 75 that is there from the second round on made the digits collapse.
    """

    unlabeled_weight: float = 75.0
    temperature: float = 0.5
    concentration: float = 0.75
    decay: float | None = field(default=0.999, kw_only=True)

    @property
    def requirements(self) -> UpdateRequirements:
        return replace(super().requirements, mixup=self.concentration)

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        weak = (batch.u["weak"], batch.u["weak2"])
        mix, order = batch.mixing["mix"], batch.mixing["order"]
        sizes = [len(batch.x), len(weak[0]), len(weak[1])]
        images = torch.split(mixed(torch.cat([batch.x, *weak]), mix, order), sizes)
        real = batch.masks(2)
        (x, *u), guesses, moments = taught_and_guessed(task, params, stats, images, weak, (*real, *real[1:]))
        guess = torch.stack([each.softmax(-1) for each in guesses]).mean(0)
        q = sharpened(guess, self.temperature)
        y = one_hot(batch.y, task.network.classes, q)
        targets = mixed(torch.cat([y, q, q]), mix, order)
        apart = mean((torch.cat(u).softmax(-1) - targets[len(y) :]).square(), concat(real[1:]))
        loss = self.total(task, soft_cross_entropy(x, targets[: len(y)], batch.x_real), apart)
        return loss, StepResult(moments, (guess_of(guess),))

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        return guessing_passes(task, labeled + 2 * unlabeled, 2 * unlabeled)


ROWS = (
    FedAvgRow("mixmatch", "MixMatch", "Berthelot et al. 2019", "sharpened guesses, and mixtures of images and labels",
              MixMatch(), pooled=True),
)  # fmt: skip
