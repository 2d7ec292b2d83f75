"""FedAvg (McMahan et al. 2017) and FedProx (Li et al. 2020) around any semi-supervised objective.

The clients of a round train the server's model on their own rows, and the server averages what comes back with the
weights |labeled| + |unlabeled|. With `prox` > 0 every client adds (prox / 2) ||params - received params||^2 to its
loss.

What an objective keeps beside the model (Mean Teacher's averaged teacher, ReMixMatch's class frequencies) travels and
is averaged with it. An averaged teacher's batch statistics are counted at the end of a client update over all local
rows, un-augmented and without a step (`batchnorm_stats.row_moments`). A client that has nothing to train on (no labels,
and an objective that wants them) weighs nothing. Where the average of the server's models gives the pseudo-labels
(`teacher` "average"), the server keeps it and sends it down beside the model.

server: params, stats and what the objective keeps beside, or average.  down: the same.  memory: with `keep_optimizer`,
the optimizer's state; with thresholds that adapt, running means or the rows' labels.  up: what came down, trained, less
the average, and weight.

Departures: FedProx (Algorithm 2) draws clients in proportion to their rows and averages them alike; here, as in FedAvg,
they are drawn alike and averaged by rows, so that the term is all that differs. A row counts whether it is labeled or
not. Batch-normalization statistics, of which neither paper speaks, are averaged like parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

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
from halfmoon.methods.batchnorm_stats import row_moments
from halfmoon.methods.objectives import Objective, Supervised


@dataclass(frozen=True)
class LocalTraining(ClientUpdate):
    """Train the received model with an objective, and send it back."""

    objective: Objective = field(default_factory=Supervised)
    prox: float = 0.0
    keep_optimizer: bool = False

    @property
    def requirements(self) -> UpdateRequirements:
        upload_spec = UploadSpec(("params", "stats", *self.objective.travels), ("stats", "teacher_stats"))
        requirements = self.objective.requirements
        all_rows = requirements.all_rows or self.counts
        return replace(requirements, all_rows=all_rows, keep_optimizer=self.keep_optimizer, upload_spec=upload_spec)

    @property
    def counts(self) -> bool:
        """Return whether a client update ends with a count of the averaged teacher's statistics."""
        return self.objective.decay is not None and self.task.network.norm == "batch"

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        return {**super().initial_memory(broadcast, generator), **self.objective.initial_memory(self.task, broadcast)}

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        cached = self.objective.prepare(self.task, broadcast, data)
        own = self.objective.begin(self.task, memory, data, cached)
        travels = {name: broadcast[name] for name in self.objective.travels if name in broadcast}
        return {**super().begin(broadcast, memory, data), **travels, **own, "cached": cached}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        gradient, loss, result = grad_and_value(self._loss, carry["params"], carry, batch)
        if self.prox:
            pull = partial(torch.add, alpha=self.prox)
            gradient = tree.map(lambda g, new, old: pull(g, new - old), gradient, carry["params"], broadcast["params"])
        new = self.advance(carry, gradient, result.moments, consume=True, **result.aux)
        return {**new, **self.objective.after(carry, new["params"])}, StepMetrics(loss, {}, result.pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        weight = data.rows if self.requirements.views else data.rows * (data.labeled > 0)
        _, memory = super().finish(broadcast, carry, data)
        own = {name: carry[name] for name in self.objective.initial_memory(self.task, broadcast)}
        new = {**carry, **self.objective.finish(self.task, carry)}
        if self.counts and len(data.x) + len(data.u):
            rows, total = data.labeled + data.unlabeled, row_moments(self.task, carry["teacher"], data)
            mean = tree.map(lambda leaf: leaf / rows.clamp_min(1), total)
            new["teacher_stats"] = tree.select(rows > 0, mean, carry["teacher_stats"])
        update = {name: new[name] for name in self.requirements.upload_spec.update if name in new}
        return Upload(update, weight), {**memory, **own}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return self.objective.passes(self.task, labeled, unlabeled)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        """Count what the objective looks at when a client update begins, and all rows where the teacher's are
        counted.
        """
        return super().images_outside_steps(labeled, unlabeled) + (labeled + unlabeled if self.counts else 0)

    def _loss(self, params: Tree, carry: Tree, batch: Batch):
        return self.objective(self.task, params, carry["stats"], batch, carry, carry["cached"])


@dataclass(frozen=True)
class FedAvg:
    """Federated averaging of an objective, with FedProx's proximal term if `prox` > 0.

    `keep_optimizer`: whether a client's momentum lives on between its rounds.
    """

    objective: Objective = field(default_factory=Supervised)
    prox: float = 0.0
    keep_optimizer: bool = False

    def requirements(self, norm: str) -> Requirements:
        return self.objective.method_requirements

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": LocalTraining(task, self.objective, self.prox, self.keep_optimizer)}

    def start(self, task: Task, model: Tree) -> Tree:
        first = self.objective.start(task, model)
        return first if self.objective.averages is None else {**first, "average": model}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        new, keep = federation.average("train", server).update, self.objective.averages
        if keep is None:
            return new
        model = {name: new.get(name, {}) for name in server["average"]}  # without batch normalization no "stats" come
        return {**new, "average": tree.moving_average(server["average"], model, task.round, keep)}

    def solution(self, task: Task, server: Tree) -> Tree:
        return self.objective.solution(server)
