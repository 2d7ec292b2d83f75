"""FedAvg (McMahan et al. 2017) and FedProx (Li et al. 2020) around any semi-supervised objective.

The clients of a round train the server's model on their own rows, and the server averages what comes back with the
weights |labeled| + |unlabeled|. With `prox` > 0 every client adds (prox / 2) ||params - received params||^2 to its
loss.

server: params, stats.  down: params, stats.  memory: nothing.  up: params, stats, weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.func import grad_and_value

from halfmoon import tree
from halfmoon.methods.averaging import average
from halfmoon.models import track
from halfmoon.objectives import Objective, Supervised
from halfmoon.tree import Tree
from halfmoon.types import Batch, Federation, Local, Notes, Passes, Task, Work


@dataclass(frozen=True)
class LocalTraining(Work):
    """Train the received model with an objective, and send it back."""

    objective: Objective = field(default_factory=Supervised)
    prox: float = 0.0

    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        """Start from the server's model with a fresh optimizer."""
        optimizer = self.task.optimizer.init(down["params"])
        return {"params": down["params"], "stats": down["stats"], "optimizer": optimizer}

    def step(self, down: Tree, carry: Tree, batch: Batch) -> tuple[Tree, Notes]:
        """Take one optimizer step on objective + proximal term."""
        gradient, (loss, seen) = grad_and_value(self._loss, has_aux=True)(carry["params"], carry["stats"], batch)
        if self.prox:
            gradient = tree.map(
                lambda g, new, old: torch.add(g, new - old, alpha=self.prox),
                gradient,
                carry["params"],
                down["params"],
            )
        params, optimizer = self.task.optimizer.step(carry["params"], gradient, carry["optimizer"])
        stats = carry["stats"]
        for moments in seen.moments:
            stats = track(stats, moments)
        return {"params": params, "stats": stats, "optimizer": optimizer}, Notes(loss, {}, seen.pseudo)

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Tree, Tree]:
        """Send the model with its weight |labeled| + |unlabeled|."""
        weight = (data.labeled + data.unlabeled).double()
        return {"params": carry["params"], "stats": carry["stats"], "weight": weight}, {}

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        """Count the objective's images."""
        return self.objective.passes(self.task, labeled, unlabeled)

    def _loss(self, params: Tree, stats: Tree, batch: Batch):
        return self.objective(self.task, params, stats, batch)


@dataclass(frozen=True)
class FedAvg:
    """Federated averaging of an objective, with FedProx's proximal term if `prox` > 0."""

    objective: Objective = field(default_factory=Supervised)
    prox: float = 0.0

    def works(self, task: Task) -> Mapping[str, Work]:
        """Return the one thing a client does."""
        return {"train": LocalTraining(task, self.objective.views, self.objective, self.prox)}

    def start(self, task: Task, model: Tree) -> Tree:
        """Remember the model and nothing else."""
        return model

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort train, and average."""
        return average(federation.ask("train", server))

    def solution(self, task: Task, server: Tree) -> Tree:
        """Return the averaged model."""
        return server
