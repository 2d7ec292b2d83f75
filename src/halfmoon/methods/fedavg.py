"""FedAvg (McMahan et al. 2017) and FedProx (Li et al. 2020), with any semi-supervised objective.

The clients of a round train the server's model on their images, and the server averages their uploads with the weights
|labeled| + |unlabeled|. With `prox` > 0 every client adds (prox / 2) ||params - received params||^2 to its loss.

Tensors that an objective adds to the model (Mean Teacher's averaged teacher, ReMixMatch's class frequencies) are sent
and averaged with it. The batch statistics of an averaged teacher are counted at the end of a client update over all
local rows, without augmentation and without a step (`batchnorm_stats.sum_row_moments`). A client that has nothing to
train on (no labels, with an objective that needs them) has the weight 0. If the average of the server's models predicts
the pseudo-labels (`teacher` "average"), the server stores that average and sends it with the model.

server: params, stats, and tensors of the objective, or average.  broadcast: the same.  memory: with `keep_optimizer`,
the optimizer's state; with adaptive thresholds, running means or the rows' labels.  upload: the trained broadcast
without average, and weight.

Departures: FedProx (Algorithm 2) samples clients in proportion to their rows and averages them with equal weights.
Here, as in FedAvg, they are sampled uniformly and averaged by rows, so that the term is the only difference. A row
counts whether it is labeled or not. Batch-normalization statistics, which neither paper mentions, are averaged like
parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from halfmoon.api.requirements import Requirements
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Federation,
    Passes,
    StepMetrics,
    Task,
    UpdateRequirements,
)
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.tree import Tree
from halfmoon.methods.batchnorm_stats import sum_row_moments
from halfmoon.methods.objectives import Objective, Supervised


@dataclass(frozen=True)
class LocalTraining(ClientUpdate):
    """Train the received model with an objective, and upload it."""

    objective: Objective = field(default_factory=Supervised)
    prox: float = 0.0
    keep_optimizer: bool = False

    @property
    def requirements(self) -> UpdateRequirements:
        upload_spec = UploadSpec(
            update=("params", "stats", *self.objective.shared_names), statistics=("stats", "teacher_stats")
        )
        requirements = self.objective.requirements
        all_rows = requirements.all_rows or self.counts_teacher_stats
        return replace(requirements, all_rows=all_rows, keep_optimizer=self.keep_optimizer, upload_spec=upload_spec)

    @property
    def counts_teacher_stats(self) -> bool:
        """True if a client update ends with a count of the averaged teacher's batch statistics."""
        return self.objective.decay is not None and self.task.network.norm == "batch"

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        return {**super().initial_memory(broadcast, generator), **self.objective.initial_memory(self.task, broadcast)}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        cached = self.objective.prepare(self.task, broadcast, data)
        local_state = self.objective.begin(self.task, memory, data, cached)
        shared_state = {name: broadcast[name] for name in self.objective.shared_names if name in broadcast}
        return {**super().begin(broadcast, memory, data), **shared_state, **local_state, "cached": cached}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one optimizer step on the objective (the clients' loss), with FedProx's proximal term if `prox` is set.

        Args:
            broadcast: the model that the server sent; the proximal term pulls towards it.
            carry: the local model, the optimizer's state, and the state of the objective.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The new carry, and the step's loss and pseudo-labels.
        """
        gradient, loss, result = grad_and_value(
            lambda params: self.objective(self.task, params, carry["stats"], batch, carry, carry["cached"]),
            carry["params"],
        )
        if self.prox:
            # FedProx: add the gradient of prox / 2 |params - received|^2, which is prox (params - received).
            gradient = tree.map(
                lambda leaf, params, received: torch.add(leaf, params - received, alpha=self.prox),
                gradient,
                carry["params"],
                broadcast["params"],
            )
        new_carry = self.optimizer_step(
            carry,
            gradient,
            result.moments,  # batch statistics of the pass
            consume=True,  # the gradient and the old state are not used again, so the optimizer may overwrite them
            **result.aux,  # new state of the objective, such as thresholds
        )
        # State that follows the new parameters, such as the mean teacher.
        following_state = self.objective.after_step(carry, new_carry["params"])
        return {**new_carry, **following_state}, StepMetrics(loss, samples={}, pseudo=result.pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        """Return the upload (model and shared state of the objective, weighted by images), and the memory to store.

        If the objective uploads a mean teacher, the running average of the model (`counts_teacher_stats`), the teacher's
        batch-normalization statistics are estimated here, on all images of the client.

        Args:
            broadcast: the tree that the server sent.
            carry: state of the client update after its last step.
            data: the client's images and labels.
        """
        # An upload weighs as much as the client has images. An objective without views trains on labels only: clients
        # without labels have trained nothing.
        weight = data.rows if self.requirements.views else data.rows * (data.labeled > 0)
        _, memory = super().finish(broadcast, carry, data)
        objective_memory = {name: carry[name] for name in self.objective.initial_memory(self.task, broadcast)}
        new = {**carry, **self.objective.finish(self.task, carry)}
        if self.counts_teacher_stats and len(data.x) + len(data.u):
            # A tensor under vmap: a client of a cohort may have no rows, and then retains the received statistics.
            rows = data.labeled + data.unlabeled
            # The teacher's activations differ from the student's, so its statistics are counted over all rows at the
            # end.
            total = sum_row_moments(self.task, carry["teacher"], data)
            mean = tree.map(lambda leaf: leaf / rows.clamp_min(1), total)
            new["teacher_stats"] = tree.select(rows > 0, mean, carry["teacher_stats"])
        update = {name: new[name] for name in self.requirements.upload_spec.update if name in new}
        return Upload(update, weight), {**memory, **objective_memory}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return self.objective.passes(self.task, labeled, unlabeled)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        """Count the images that the objective predicts on at the start, and those of the teacher's statistics."""
        teacher_images = labeled + unlabeled if self.counts_teacher_stats else 0
        return super().images_outside_steps(labeled, unlabeled) + teacher_images


@dataclass(frozen=True)
class FedAvg:
    """Federated averaging of an objective, with FedProx's proximal term if `prox` > 0.

    Attributes:
        objective: the clients' loss.
        prox: weight of the proximal term.
        keep_optimizer: whether clients retain their optimizer's state between rounds.
    """

    objective: Objective = field(default_factory=Supervised)
    prox: float = 0.0
    keep_optimizer: bool = False

    def requirements(self, norm: str) -> Requirements:
        return self.objective.method_requirements

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": LocalTraining(task, self.objective, self.prox, self.keep_optimizer)}

    def start(self, task: Task, model: Tree) -> Tree:
        server = self.objective.start(task, model)
        return server if self.objective.server_average_decay is None else {**server, "average": model}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        new = federation.average("train", server).update
        decay = self.objective.server_average_decay
        if decay is None:
            return new
        model = {name: new.get(name, {}) for name in server["average"]}  # uploads have "stats" only with batch norm
        return {**new, "average": tree.moving_average(server["average"], model, task.round, decay)}

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.objective.solution(server)
