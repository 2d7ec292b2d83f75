"""FedIRM (Liu et al., MICCAI 2021): classes without labels keep the relations that they have where there are labels.

The relations R (classes, classes) of logits z with labels y: R_c = softmax(mean of the z_i with y_i = c / temperature),
uniform where there is none. A labeled image teaches by cross-entropy; an unlabeled one by a mean teacher, which stays
at its client (`TeacherClient`), and by the relations of the guesses that are sure:

    loss = mean CE(y, f(x)) + w (mean_i ||p_i - softmax teacher(weak_i)||^2 + (KL(R | S) + KL(S | R)) / 2 / classes),

p = softmax f(weak2), S the relations of f(weak2) with their arg max as labels, over images with max p >= `confidence`
and an entropy of p below `entropy`, R those of the clients with labels: each sends the mean over its steps, and the
server averages them by rows; before the first of them the term is 0. w grows to `unlabeled_weight` as
exp(-5 (1 - t)^2) over the first `ramp` of the rounds; in the first `warmup` of them it is 0, and a client without
labels weighs nothing.

server: params, stats, relation, related (1 once there is one).  broadcast: the same.  memory: the teacher's parameters
and steps, the optimizer's state.  upload: params, stats, relation, related (1 with labels, else 0 and no relation),
weight.

Departures: the entropy is that of one prediction, theirs of the mean of eleven with dropout, which no network here has.
Their labeled images come in two views with smoothed labels, and labeled clients weigh alike in R.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import Batch, ClientData, ClientUpdate, Federation, StepMetrics, Task, UpdateRequirements
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.padding import mask, mean
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, select_model
from halfmoon.methods.mutual import low_entropy_mask
from halfmoon.methods.objectives.base import (
    MeanTeacherClient,
    as_pseudo_labels,
    labeled_cross_entropy,
    one_hot,
    predict_with_teacher,
    ramp_weight,
    update_teacher,
)
from halfmoon.models import forward


@dataclass(frozen=True)
class FedIRM(ModelAveraging):
    """FedIRM with the settings of the authors' code, whose warm-up and ramp are 20 and 30 of 200 rounds."""

    method_requirements = Requirements("sum", "", ("some", "clients"))
    unlabeled_weight: float = 15.0
    temperature: float = 2.0
    confidence: float = 0.3
    entropy: float = 2.0
    decay: float = 0.99
    ramp: float = 0.15
    warmup: float = 0.1
    keep_optimizer: bool = True

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": FedIRMClient(task, self)}

    def start(self, task: Task, model: Tree) -> Tree:
        like, classes = next(tree.leaves(model["params"])), task.network.classes
        return {**model, "relation": like.new_zeros(classes, classes), "related": like.new_zeros(())}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        new = federation.average("train", {"stats": {}, **server}).update
        share = new["related"]
        relation = torch.where(share > 0, new["relation"] / share.clamp_min(1e-12), server["relation"])
        return {**select_model(new), "relation": relation, "related": torch.maximum(server["related"], share.sign())}


def relations(logits: Tensor, member: Tensor, temperature: float) -> Tensor:
    """Return R (classes, classes) of logits (n, classes), whose images are of the classes of `member` (n, classes)."""
    return (member.T @ logits / member.sum(0).clamp_min(1)[:, None] / temperature).softmax(-1)


@dataclass(frozen=True)
class FedIRMClient(MeanTeacherClient):
    """The client of FedIRM."""

    options: FedIRM = FedIRM()

    @property
    def requirements(self) -> UpdateRequirements:
        upload_spec = UploadSpec(("params", "stats", "relation", "related"))
        return UpdateRequirements(
            ("weak", "weak2"), masks_padding=True, keep_optimizer=self.options.keep_optimizer, upload_spec=upload_spec
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        nothing = torch.zeros_like(broadcast["relation"])
        gate = nothing[0, 0] + float(self.task.round >= self.options.warmup * self.task.rounds)
        return {**super().begin(broadcast, memory, data), "relation": nothing, "steps": nothing[0, 0], "gate": gate}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (moments, pseudo, matrix) = grad_and_value(
            self._loss_of, carry["params"], broadcast, carry, batch
        )
        new = self.advance(carry, gradient, moments)
        new |= update_teacher(carry, new["params"], self.options.decay)
        new |= {"relation": carry["relation"] + matrix, "steps": carry["steps"] + 1}
        return new, StepMetrics(loss, {}, (pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, memory = super().finish(broadcast, carry, data)
        labeled = (data.labeled > 0).to(broadcast["relation"])
        own = {"relation": labeled * carry["relation"] / carry["steps"].clamp_min(1), "related": labeled}
        return Upload({**upload.update, **own}, upload.weight * torch.maximum(labeled, carry["gate"])), memory

    def _loss_of(self, params: Tree, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
        options, classes, joint = self.options, len(broadcast["relation"]), self.task.statistics == "joint"
        groups = (batch.x, batch.u["weak2"])
        (labeled, z), _, moments = forward(self.task.network, params, joint, groups, real=batch.masks(1))
        p = z.softmax(-1)
        guess = as_pseudo_labels(p)
        certain = mask(low_entropy_mask(z, options.entropy) * (guess.confidence >= options.confidence), batch.u_real)
        own = relations(z, one_hot(guess.label, classes, z) * certain[:, None], options.temperature)
        target = torch.where(
            broadcast["related"] > 0, broadcast["relation"], own.detach()
        )  # no gradient while there is none
        divergence = ((target - own) * (target.log() - own.log())).sum() / 2 / classes
        teacher = predict_with_teacher(
            self.task, carry["teacher"], carry["stats"], batch.u["weak"], batch.u_real
        ).softmax(-1)
        distance_from_uniform = mean((p - teacher).square().sum(-1), batch.u_real)
        weight = carry["gate"] * ramp_weight(self.task, options.unlabeled_weight, options.ramp, "sigmoid")
        loss = labeled_cross_entropy(labeled, batch.y, batch.x_real) + weight * (distance_from_uniform + divergence)
        member = one_hot(batch.y, classes, labeled)
        member = member if batch.x_real is None else member * batch.x_real[:, None]
        matrix = relations(labeled, member, options.temperature).detach()
        return loss, (moments, guess._replace(weight=certain), matrix)


ROWS = (
    MethodEntry("fedirm", "FedIRM", "FedIRM, MICCAI 2021", "classes keep the labeled clients' relations", FedIRM()),
)
