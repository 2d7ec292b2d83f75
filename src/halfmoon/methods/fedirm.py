"""FedIRM (Liu et al., MICCAI 2021): class relations at unlabeled clients are matched to those at labeled clients.

The relations R (classes, classes) of logits z with labels y: R_c = softmax(mean of the z_i with y_i = c / temperature),
uniform for classes without an image. Labeled images are trained on with cross-entropy. Unlabeled ones follow a mean
teacher, which is stored at its client (`MeanTeacherClient`), and the relations of confident predictions are matched:

    loss = mean CE(y, f(x)) + w (mean_i ||p_i - softmax teacher(weak_i)||^2 + (KL(R | S) + KL(S | R)) / 2 / classes),

p = softmax f(weak2), S the relations of f(weak2) with their arg max as labels, over images with max p >= `confidence`
and an entropy of p below `entropy`, R those of the clients with labels: each uploads the mean over its steps, and the
server averages them by numbers of rows. Before the first R exists the term is 0. w grows to `unlabeled_weight` as
exp(-5 (1 - t)^2) over the first `ramp` (a share) of the rounds. During the first `warmup` (a share) of the rounds it is
0, and clients without labels have weight 0 in the average.

server: params, stats, relation, related (1 once there is one).  broadcast: the same.  memory: the teacher's parameters
and steps, the optimizer's state.  upload: params, stats, relation, related (1 with labels, else 0 and a relation of
zeros), weight.

Departures: the entropy is that of one prediction; the authors' is of the mean of eleven with dropout, which no network
here has. Their labeled images have two views and smoothed labels, and their labeled clients have equal weights in R.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

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
from halfmoon.methods.mutual import select_low_entropy
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
    """FedIRM with the settings of the authors' code, whose warm-up and ramp are 20 and 30 of 200 rounds.

    Attributes:
        unlabeled_weight: final weight of the loss on unlabeled images.
        temperature: divides mean logits in the relations.
        confidence: predictions from this confidence on are used in the relations.
        entropy: predictions with an entropy below it, in nats, are used in the relations.
        decay: largest decay of the mean teacher.
        ramp: share of the rounds over which the weight grows.
        warmup: share of the rounds in which only labeled clients count.
        keep_optimizer: whether clients keep the optimizer's state between rounds.
    """

    uses_class_weights: ClassVar[bool] = True

    method_requirements = Requirements(aggregation="sum", reason="", label_locations=("some", "clients"))
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
        leaf = next(tree.leaves(model["params"]))
        classes = task.network.classes
        return {**model, "relation": leaf.new_zeros(classes, classes), "related": leaf.new_zeros(())}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        new = federation.average("train", {"stats": {}, **server}).update
        # Clients without labels upload zeros. The mean of "related" is the labeled clients' share of the weights, so
        # the quotient is the mean over the labeled clients only.
        share = new["related"]
        relation = torch.where(share > 0, new["relation"] / share.clamp_min(1e-12), server["relation"])
        return {**select_model(new), "relation": relation, "related": torch.maximum(server["related"], share.sign())}


def compute_relations(logits: Tensor, member: Tensor, temperature: float) -> Tensor:
    """Compute the class relation matrix of a batch: which classes a model confuses with each (FedIRM, MICCAI 2021).

    Args:
        logits: (n, classes).
        member: one-hot classes of the images, (n, classes); rows of zeros are left out.
        temperature: divides the mean logits.

    Returns:
        The matrix, (classes, classes); row c is the softmax of the mean logits of images of class c.
    """
    class_counts = member.sum(0).clamp_min(1)[:, None]
    return (member.T @ logits / class_counts / temperature).softmax(-1)


@dataclass(frozen=True)
class FedIRMClient(MeanTeacherClient):
    """The client of FedIRM: it trains with a mean teacher and with class relations."""

    options: FedIRM = FedIRM()

    @property
    def requirements(self) -> UpdateRequirements:
        upload_spec = UploadSpec(update=("params", "stats", "relation", "related"))
        return UpdateRequirements(
            views=("weak", "weak2"),
            masks_padding=True,
            keep_optimizer=self.options.keep_optimizer,
            upload_spec=upload_spec,
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        zeros = torch.zeros_like(broadcast["relation"])
        zero = zeros[0, 0]
        # 0 during the warm-up, then 1. A tensor, as a carry has tensors only.
        gate = zero + float(self.task.round >= self.options.warmup * self.task.rounds)
        return {**super().begin(broadcast, memory, data), "relation": zeros, "steps": zero, "gate": gate}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (moments, pseudo, matrix) = grad_and_value(self._loss, carry["params"], broadcast, carry, batch)
        new = self.optimizer_step(carry, gradient, moments)
        new |= update_teacher(carry, new["params"], self.options.decay)
        # A sum over the steps; `finish` divides it by their number.
        new |= {"relation": carry["relation"] + matrix, "steps": carry["steps"] + 1}
        return new, StepMetrics(loss, samples={}, pseudo=(pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, memory = super().finish(broadcast, carry, data)
        labeled = (data.labeled > 0).to(broadcast["relation"])
        relation = {"relation": labeled * carry["relation"] / carry["steps"].clamp_min(1), "related": labeled}
        # During the warm-up the gate is 0, and clients without labels have the weight 0.
        weight = upload.weight * torch.maximum(labeled, carry["gate"])
        return Upload({**upload.update, **relation}, weight=weight), memory

    def _loss(self, params: Tree, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, tuple[Any, ...]]:
        """Compute FedIRM's loss: cross-entropy, distance to a mean teacher, and matching of class relations.

        Row c of a relation matrix (classes, classes) is the softmax of the mean logits of images of class c: which
        classes the model confuses with c. Predicted classes stand for the labels of unlabeled images.

        Args:
            params: parameters of the network, in which the loss is differentiated.
            broadcast: with "relation", the mean relation matrix of clients with labels; "related" is 0 before there is
                one.
            carry: state of the client update, with the mean teacher; "gate" is 0 in the warm-up, else 1.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The loss (), and (batch statistics, pseudo-labels, relation matrix of the labeled images).
        """
        options = self.options
        classes = len(broadcast["relation"])
        joint = self.task.statistics == "joint"
        # The student gets one weak view of an image ("weak2"), the teacher another ("weak").
        groups = (batch.x, batch.u["weak2"])
        (labeled, logits), _, moments = forward(self.task.network, params, joint, groups, real=batch.masks(views=1))
        probabilities = logits.softmax(-1)
        pseudo = as_pseudo_labels(probabilities)
        low_entropy = select_low_entropy(logits, options.entropy)
        # 1 for images whose prediction is certain by both criteria, else 0: only these enter the relation matrix.
        confident = mask(low_entropy * (pseudo.confidence >= options.confidence), batch.u_real)
        predicted_classes = one_hot(pseudo.label, classes, logits) * confident[:, None]
        relation = compute_relations(logits, predicted_classes, options.temperature)
        # Without a relation of labeled clients the target is this client's, so that value and gradient are 0.
        target = torch.where(broadcast["related"] > 0, broadcast["relation"], relation.detach())
        # Mean over classes of (KL(R | S) + KL(S | R)) / 2, whose sum is that of (R - S) (log R - log S).
        divergence = ((target - relation) * (target.log() - relation.log())).sum() / 2 / classes
        teacher_logits = predict_with_teacher(
            self.task, carry["teacher"], carry["stats"], batch.u["weak"], batch.u_real
        )
        distance_to_teacher = mean((probabilities - teacher_logits.softmax(-1)).square().sum(-1), batch.u_real)
        unlabeled_weight = carry["gate"] * ramp_weight(self.task, options.unlabeled_weight, options.ramp, "sigmoid")
        labeled_loss = labeled_cross_entropy(labeled, batch.y, batch.x_real, self.task.class_weights)
        loss = labeled_loss + unlabeled_weight * (distance_to_teacher + divergence)
        # For the upload: the server averages these matrices to the next round's "relation".
        true_classes = one_hot(batch.y, classes, labeled)
        if batch.x_real is not None:
            true_classes = true_classes * batch.x_real[:, None]
        labeled_relation = compute_relations(labeled, true_classes, options.temperature).detach()
        return loss, (moments, pseudo._replace(weight=confident), labeled_relation)


ROWS = (
    MethodEntry(
        "fedirm",
        "FedIRM",
        "FedIRM, MICCAI 2021",
        "unlabeled clients match the labeled clients' class relations",
        FedIRM(),
    ),
)
