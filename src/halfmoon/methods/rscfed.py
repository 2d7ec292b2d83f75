"""RSCFed (Liang et al., CVPR 2022): averages of random groups, in which models far from the others count less.

A labeled image teaches by cross-entropy; an unlabeled one by a mean teacher, which stays at its client:

    loss = mean CE(y, f(x)) + unlabeled_weight mean_i ||softmax f(weak2_i) - sharpen(softmax teacher(weak_i))||^2,

teacher <- keep teacher + (1 - keep) params after its t-th step in all rounds, keep = min(decay, 1 - 1 / t). From the
uploads of a round the server forms `groups` groups of `size` clients at random, a client in several of them perhaps.
Each group has a mean a of its models by n, and from it weights

    v_i = n_i exp(-beta |model_i - a| / rows_i), n_i the rows, times `labeled_factor` for a client with labels,

|.| the sum of the norms of all tensors, statistics too; beta is `beta_labeled` in a group with a labeled client. The
group's model has the weights v, and the new one is the mean over groups.

server: params, stats.  broadcast: the same.  memory: the teacher's parameters and steps, the optimizer's
state.  upload: params, stats, weight (rows), labels (1 with labels, else 0).

Departures: a client trains once in a round for all its groups, theirs for each. Groups follow a hash of the
round. Their code applies `labeled_factor` to the sizes and again to the weights, 36 in all; here it counts once. They
begin with a model of the labeled client. Tracked statistics of the teacher are the student's. Learning rates are one
(theirs: 0.03 with labels, 0.021 without).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import Batch, ClientData, ClientUpdate, Federation, StepMetrics, Task, UpdateRequirements
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core import padding, rng, tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import check_minimum
from halfmoon.core.tensors import euclidean_norm
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, average_uploads
from halfmoon.methods.objectives.base import (
    MeanTeacherClient,
    as_pseudo_labels,
    labeled_cross_entropy,
    predict_with_teacher,
    sharpen,
    update_teacher,
)
from halfmoon.models import forward


@dataclass(frozen=True)
class RSCFed(ModelAveraging):
    """RSCFed with the settings of the authors' code for 10 clients of which 1 has labels."""

    method_requirements = Requirements(
        reason="a client's weight depends on how far its own model is from its group's",
        label_locations=("some", "clients"),
    )
    groups: int = 3
    size: int = 5
    beta: float = 1e4
    beta_labeled: float = 100.0
    labeled_factor: float = 6.0
    unlabeled_weight: float = 0.02
    temperature: float = 0.5
    decay: float = 0.999
    keep_optimizer: bool = False

    def __post_init__(self) -> None:
        check_minimum(self, 1, "groups", "size")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": Following(task, self)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        server = {"stats": {}, **server}
        upload = federation.query("train", server)
        if not bool(upload.weight.sum() > 0):
            return server
        g, means = rng.generator(0, "rscfed", task.round), list[Tree]()
        for _ in range(self.groups):
            mine = torch.randperm(len(upload.weight), generator=g)[: self.size].to(upload.weight.device)
            if bool(upload.weight[mine].sum() > 0):
                group = tree.map(lambda leaf, m=mine: leaf[m.to(leaf.device)], upload.update)
                shares = self.weigh(group, upload.weight[mine], upload.aux["labels"][mine])
                means.append(tree.weighted_mean(group, shares))
        return tree.weighted_mean(tree.stack(means), torch.ones(len(means))) if means else server

    def weigh(self, models: Tree, rows: Tensor, labels: Tensor) -> Tensor:
        """Return v (m,) of a group's models (leaves (m, ...)) with so many `rows` (m,); who has none weighs nothing."""
        n = rows.double() * torch.where(labels > 0, self.labeled_factor, 1.0)
        center = average_uploads(Upload(models, n))
        pairs = zip(tree.leaves(models), tree.leaves(center), strict=True)
        away = tree.sum_scalars(
            euclidean_norm((leaf - mean).flatten(1).double(), -1).to(n.device) for leaf, mean in pairs
        )
        beta = self.beta_labeled if bool((labels > 0).any()) else self.beta
        logs = (n / n.sum()).log() - beta * away / rows.double().clamp_min(1)
        return (logs - logs.max()).exp()  # all may be too small for a number; their shares are not


@dataclass(frozen=True)
class Following(MeanTeacherClient):
    """The client of RSCFed."""

    options: RSCFed = RSCFed()

    @property
    def requirements(self) -> UpdateRequirements:
        upload_spec = UploadSpec(aux={"labels": Aux(values="mark")})
        return UpdateRequirements(
            ("weak", "weak2"), masks_padding=True, keep_optimizer=self.options.keep_optimizer, upload_spec=upload_spec
        )

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (moments, target) = grad_and_value(self._loss, carry["params"], carry, batch)
        new = self.advance(carry, gradient, moments)
        new |= update_teacher(carry, new["params"], self.options.decay)
        return new, StepMetrics(loss, {}, (as_pseudo_labels(target),))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, memory = super().finish(broadcast, carry, data)
        return upload._replace(aux={"labels": (data.labeled > 0).double()}), memory

    def _loss(self, params: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, tuple[list[Tree], Tensor]]:
        joint, groups = self.task.statistics == "joint", (batch.x, batch.u["weak2"])
        (labeled, student), _, moments = forward(self.task.network, params, joint, groups, real=batch.masks(1))
        guess = predict_with_teacher(self.task, carry["teacher"], carry["stats"], batch.u["weak"], batch.u_real)
        target = sharpen(guess.softmax(-1), self.options.temperature)
        apart = padding.mean((student.softmax(-1) - target).square().sum(-1), batch.u_real)
        loss = labeled_cross_entropy(labeled, batch.y, batch.x_real) + self.options.unlabeled_weight * apart
        return loss, (moments, target)


ROWS = (MethodEntry("rscfed", "RSCFed", "RSCFed, CVPR 2022", "averages of random groups by distance", RSCFed()),)
