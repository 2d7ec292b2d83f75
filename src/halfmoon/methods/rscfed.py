"""RSCFed (Liang et al., CVPR 2022): average random groups of clients, and weight down models that differ from a group.

Labeled images are trained on with cross-entropy. Unlabeled ones follow a mean teacher, which is stored at its client:

    loss = mean CE(y, f(x)) + unlabeled_weight mean_i ||softmax f(weak2_i) - sharpen(softmax teacher(weak_i))||^2,

teacher <- keep teacher + (1 - keep) params after its t-th step in all rounds, keep = min(decay, 1 - 1 / t). From the
uploads of a round the server forms `groups` random groups of `size` clients; a client can be in several of them. With
n_i = rows_i, times `labeled_factor` for a client with labels, and a the mean of a group's models weighted by n, models
have the weights

    v_i = n_i exp(-beta |model_i - a| / rows_i),

where |.| is the sum of the norms of all tensors, including statistics, and beta is `beta_labeled` in a group with a
labeled client. A group's model is the mean with the weights v, and the new global model is the mean over groups.

server: params, stats.  broadcast: the same.  memory: the teacher's parameters and steps, the optimizer's
state.  upload: params, stats, weight (rows), labels (1 with labels, else 0).

Departures: a client trains once in a round for all its groups; in the authors' code it trains for each. Groups follow a
hash of the round. The authors' code applies `labeled_factor` to the sizes and again to the weights, 36 in all; here it
counts once. It starts with a model of the labeled client, whose training is not published; here `warmup`, by default 0,
is the share of the rounds in which clients train on labels only and the server averages clients with labels. The
teacher's running statistics are the student's. All clients have the same learning rate (the authors: 0.03 with labels,
0.021 without).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import Batch, ClientData, ClientUpdate, Federation, StepMetrics, Task, UpdateRequirements
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core import padding, rng, tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import UserError, check_minimum
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
    """RSCFed with the settings of the authors' code for 10 clients of which 1 has labels.

    Attributes:
        groups: number of random groups.
        size: clients in a group.
        beta: how fast weights fall with the distance from a group's mean, in groups without a labeled client.
        beta_labeled: the same for groups with a labeled client.
        labeled_factor: multiplies the row counts of labeled clients.
        unlabeled_weight: weight of the loss on unlabeled images.
        temperature: sharpens the teacher's predictions.
        decay: largest decay of the mean teacher.
        keep_optimizer: whether clients keep the optimizer's state between rounds.
        warmup: share of the rounds, from the first, that train on labels only. The server then averages the models of
            clients with labels, by their numbers of images, and teachers do not change.
    """

    uses_class_weights: ClassVar[bool] = True

    method_requirements = Requirements(
        reason="a client's weight depends on the distance of its model from its group's mean",
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
    warmup: float = 0.0

    def __post_init__(self) -> None:
        check_minimum(self, 1, "groups", "size")
        if not 0 <= self.warmup <= 1:
            raise UserError(f"warmup is {self.warmup:g}: it is a share of the rounds, from 0 to 1.")

    def is_warming_up(self, task: Task) -> bool:
        """Return whether this round trains on labels only."""
        return task.round < self.warmup * task.rounds

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": RSCFedClient(task, self)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Run a round of RSCFed (CVPR 2022): average random groups of clients, then average the groups' means.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the server's model.
            federation: the clients of this round.

        Returns:
            The server's new model; the old one if no client trained.
        """
        server = {"stats": {}, **server}
        upload = federation.query("train", server)
        if self.is_warming_up(task):
            upload = upload._replace(weight=upload.weight * (upload.aux["labels"] > 0))
        if not bool(upload.weight.sum() > 0):
            return server
        if self.is_warming_up(task):
            return average_uploads(upload, server)
        # Groups are the same for every seed, as a method draws no random numbers of the run.
        generator = rng.generator(0, "rscfed", task.round)
        group_means: list[Tree] = []
        for _ in range(self.groups):
            # A group is `size` clients, drawn without replacement; a client may be in several groups.
            members = torch.randperm(len(upload.weight), generator=generator)[: self.size].to(upload.weight.device)
            # A group without any image would have no mean.
            if bool(upload.weight[members].sum() > 0):
                group = tree.map(lambda leaf, index=members: leaf[index.to(leaf.device)], upload.update)
                weights = self.compute_group_weights(group, upload.weight[members], upload.aux["labels"][members])
                group_means.append(tree.weighted_mean(group, weights))
        if not group_means:
            return server
        return tree.weighted_mean(tree.stack(group_means), torch.ones(len(group_means)))

    def compute_group_weights(self, models: Tree, rows: Tensor, labels: Tensor) -> Tensor:
        """Weigh the models of a group, less the farther they are from the group's mean (RSCFed's distance-reweighting).

        The server averages random groups of clients by these weights, so that a model of noisy pseudo-labels counts less.
        A model's weight is n_k / n * exp(-beta * distance_k / rows_k), where n_k is its number of images, times
        `labeled_factor` for clients with labels, and distance_k the sum over leaves of the Euclidean distances.

        Args:
            models: models of m clients, leaves (m, ...).
            rows: number of images of each client, (m,).
            labels: 1 for clients with labels, else 0, (m,).

        Returns:
            The weights up to a common factor, (m,) float64; 0 for clients without images.
        """
        sizes = rows.double() * torch.where(labels > 0, self.labeled_factor, 1.0)
        center = average_uploads(Upload(models, sizes))
        pairs = zip(tree.leaves(models), tree.leaves(center), strict=True)
        # float64: beta is large, so rounding errors of the distances would change the weights.
        distance = tree.sum_scalars(
            euclidean_norm((leaf - mean).flatten(1).double(), -1).to(sizes.device) for leaf, mean in pairs
        )
        # Another beta if the group has a client with labels.
        beta = self.beta_labeled if bool((labels > 0).any()) else self.beta
        # In logarithms, and relative to the largest: all exp(-beta ...) may underflow to 0.
        log_weights = (sizes / sizes.sum()).log() - beta * distance / rows.double().clamp_min(1)
        return (log_weights - log_weights.max()).exp()


@dataclass(frozen=True)
class RSCFedClient(MeanTeacherClient):
    """The client of RSCFed: it trains on labels and on its mean teacher's predictions."""

    options: RSCFed = RSCFed()

    @property
    def requirements(self) -> UpdateRequirements:
        upload_spec = UploadSpec(aux={"labels": Aux(values="mark")})
        return UpdateRequirements(
            views=("weak", "weak2"),
            masks_padding=True,
            keep_optimizer=self.options.keep_optimizer,
            upload_spec=upload_spec,
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        carry = super().begin(broadcast, memory, data)
        if self.options.warmup:
            # A client may have stored its teacher in the warm-up: until its first step the teacher is the received model.
            is_new = carry["teacher_steps"] < 0
            carry["teacher"] = tree.select(is_new, broadcast["params"], carry["teacher"])
        return carry

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, (moments, target) = grad_and_value(self._loss, carry["params"], carry, batch)
        new = self.optimizer_step(carry, gradient, moments)
        pseudo = as_pseudo_labels(target)
        if self.options.is_warming_up(self.task):
            pseudo = pseudo._replace(weight=torch.zeros_like(pseudo.confidence))
        else:
            new |= update_teacher(carry, new["params"], self.options.decay)
        return new, StepMetrics(loss, samples={}, pseudo=(pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload, memory = super().finish(broadcast, carry, data)
        return upload._replace(aux={"labels": (data.labeled > 0).double()}), memory

    def _loss(self, params: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, tuple[list[Tree], Tensor]]:
        """Compute RSCFed's loss: CE(labels) + unlabeled_weight * squared distance to a teacher's sharpened predictions.

        Args:
            params: parameters of the student network, in which the loss is differentiated.
            carry: state of the client update, with the teacher's parameters.
            batch: the minibatch; student and teacher get different weak views of the unlabeled images.

        Returns:
            The loss (), and (batch statistics of the pass, the teacher's predictions (b, classes)).
        """
        joint = self.task.statistics == "joint"
        groups = (batch.x, batch.u["weak2"])  # "weak2" is a second weak view
        (labeled_logits, student_logits), _, moments = forward(
            self.task.network, params, joint, groups, real=batch.masks(views=1)
        )
        teacher_logits = predict_with_teacher(
            self.task, carry["teacher"], carry["stats"], batch.u["weak"], batch.u_real
        )
        target = sharpen(teacher_logits.softmax(-1), self.options.temperature)
        distance = padding.mean((student_logits.softmax(-1) - target).square().sum(-1), batch.u_real)
        labeled_loss = labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, self.task.class_weights)
        weight = 0.0 if self.options.is_warming_up(self.task) else self.options.unlabeled_weight
        return labeled_loss + weight * distance, (moments, target)


ROWS = (
    MethodEntry("rscfed", "RSCFed", "RSCFed, CVPR 2022", "random groups of clients, weighted by distance", RSCFed()),
)
