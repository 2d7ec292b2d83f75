"""Where pseudo-labels come from, and which of them count: what all objectives with weak and strong views share."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, Passes, PseudoLabels, Task, UpdateRequirements
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree, leaves
from halfmoon.methods.objectives.base import (
    Objective,
    debiased,
    guessing_passes,
    prior,
    sweep_logits,
    weak_and_strong,
)
from halfmoon.methods.objectives.thresholding import Rule, Threshold
from halfmoon.models import forward

Teacher = Literal["local", "global", "both", "average"]
"""Who gives pseudo-labels: the model in training, the received one, the surer of the two, or the average of the
server's models over the rounds."""


@dataclass(frozen=True, kw_only=True)
class PseudoLabeling:
    """Mixed into an objective: where its pseudo-labels come from, the options of all with weak and strong views.

    labels: "step" guesses on the views of each step, "round" once a client update with the received model (FedDB Alg.
        3) or the average.
    teacher: who guesses in a step: the model in training ("local"), the received one ("global": it stays as it came,
        under its tracked statistics), for each image the more confident of the two ("both"), or the average of the
        server's models ("average"). That comes down beside the model, keeps `teacher_decay` of itself in each round,
        and changes less from round to round than a model of a small cohort.
    debias: divide each guess by the average prediction before it is judged: the client's of the round (FedDB's APP-U),
        for which all its rows are looked at, or with `debias_over` "step" that of the step's images, which costs
        nothing but wavers with their number.
    thresholding, threshold_decay: which guesses count (`halfmoon.methods.objectives.thresholding`).

    Raise `UserError` for labels of the round and a teacher that is asked in each step, or a decay that is no share.
    """

    labels: Literal["step", "round"] = "step"
    teacher: Teacher = "local"
    teacher_decay: float = 0.9
    debias: bool = False
    debias_over: Literal["all", "step"] = "all"
    thresholding: Rule = "fixed"
    threshold_decay: float = 0.999
    threshold: float = 0.95

    def __post_init__(self) -> None:
        if self.labels == "round" and self.teacher not in ("local", "average"):
            raise UserError(
                f"teacher is {self.teacher!r} and labels are the round's, which the received model gives once; set "
                "labels to 'step', or leave teacher out."
            )
        if not 0 <= self.teacher_decay < 1:
            raise UserError(f"teacher_decay is {self.teacher_decay}: it must be at least 0 and below 1.")

    @property
    def requirements(self) -> UpdateRequirements:
        all_rows = self.labels == "round" or self.rule.sweeps or (self.debias and self.debias_over == "all")
        return UpdateRequirements(
            views=("strong",) if self.labels == "round" else ("weak", "strong"),
            precomputed_views=("weak",) if all_rows else (),
            masks_padding=True,
            row_memory=self.rule.row_memory,
        )

    @property
    def averages(self) -> float | None:
        return self.teacher_decay if self.teacher == "average" else None

    @property
    def remote(self) -> bool:
        """Return whether the guesses of a step are those of a model that came down, alone."""
        return self.teacher in ("global", "average")

    @property
    def rule(self) -> Threshold:
        """Return which guesses count."""
        return Threshold(self.thresholding, self.threshold, self.threshold_decay)

    def prepare(self, task: Task, broadcast: Tree, data: ClientData) -> Tree:
        guess, model = None, self.teaching(broadcast)
        if self.requirements.precomputed_views:
            guess = sweep_logits(task, model["params"], model["stats"], data.views["weak"], data.u_real)
        return self.prepared(broadcast, data, guess)

    def teaching(self, broadcast: Tree) -> Tree:
        """Return the model that teaches of those that came down: the average of the server's, or the server's own."""
        model = broadcast["average"] if self.teacher == "average" else broadcast
        return {"params": model["params"], "stats": model.get("stats", {})}

    def prepared(self, broadcast: Tree, data: ClientData, guess: Tensor | None) -> Tree:
        """Return "received", the model, if it teaches, and of its logits (U, classes), where there are any:

        "prior" (classes,), their APP-U, "guess", themselves, and "profile", what `Threshold.begin` makes of them.
        """
        cached: Tree = {}
        if self.teacher != "local" and self.labels == "step":
            cached["received"] = self.teaching(broadcast)
        if guess is None:
            return cached
        cached["prior"] = prior(guess, data.u_real)
        if self.labels == "round":
            cached["guess"] = guess
        if self.rule.sweeps:
            logits = debiased(guess, cached["prior"]) if self.debias else guess
            cached["profile"] = self.rule.begin({}, data, logits.softmax(-1))
        return cached

    def initial_memory(self, task: Task, broadcast: Tree) -> Tree:
        state = self.rule.initial_memory(task.network.classes, next(leaves(broadcast["params"])))
        return {"thresholds": state} if state else {}

    def begin(self, task: Task, memory: Tree, data: ClientData, cached: Tree) -> Tree:
        if self.rule.sweeps:
            return {"thresholds": cached["profile"]}
        return {"thresholds": self.rule.begin(memory.get("thresholds", {}), data)}

    def pseudo_label(self, guess: Tensor, batch: Batch, aux: Tree) -> tuple[PseudoLabels, Tree]:
        """Return the pseudo-labels of logits (b, classes) on the images of a step, and the thresholds' new state."""
        thresholds = aux.get("thresholds", {})
        pseudo, state = self.rule.pseudo_label(guess.softmax(-1), batch.u_rows, thresholds, batch.u_real)
        return pseudo, {"thresholds": state} if state else {}

    def outputs(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, cached: Tree
    ) -> tuple[Tensor, Tensor, Tensor, list[Tree]]:
        """Return the logits of labeled and strong images, detached (debiased) guesses (b, classes), and the moments."""
        if self.labels == "round" or self.remote:
            groups, joint = (batch.x, batch.u["strong"]), task.statistics == "joint"
            (labeled, strong), _, moments = forward(task.network, params, joint, groups, real=batch.masks(1))
            weak = cached["guess"][batch.u_rows] if self.labels == "round" else received(task, cached, batch.u["weak"])
        else:
            labeled, strong, weak, moments = weak_and_strong(task, params, stats, batch)
            if self.teacher == "both":
                weak = surer(weak, received(task, cached, batch.u["weak"]))
        return labeled, strong, self.adjusted(weak, batch, cached), moments

    def adjusted(self, guess: Tensor, batch: Batch, cached: Tree) -> Tensor:
        """Return the guesses (b, classes) on the images of a step, debiased where that is wanted."""
        if not self.debias:
            return guess
        return debiased(guess, cached["prior"] if self.debias_over == "all" else prior(guess, batch.u_real))

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        if self.labels == "round":
            return Passes(labeled + unlabeled, labeled + unlabeled)
        if self.remote:
            return Passes(labeled + 2 * unlabeled, labeled + unlabeled)
        passes = guessing_passes(task, labeled + unlabeled, unlabeled)
        return passes._replace(forward=passes.forward + unlabeled) if self.teacher == "both" else passes


class WithReceived(Objective):
    """An objective in which the received model guesses on weak views, beside the model in training."""

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(("weak", "strong"), masks_padding=True)

    def prepare(self, task: Task, broadcast: Tree, data: ClientData) -> Tree:
        return {"received": {"params": broadcast["params"], "stats": broadcast.get("stats", {})}}

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        passes = guessing_passes(task, labeled + unlabeled, unlabeled)
        return passes._replace(forward=passes.forward + unlabeled)


def no_average(method: str, objective: Objective) -> None:
    """Raise `UserError` where an objective wants the average of the server's models of a method that keeps none."""
    if objective.averages is not None:
        raise UserError(
            f"teacher is 'average', but {method} keeps no average of the server's models: choose another teacher, or a "
            "method that averages by rows, such as fedavg-soft-labels."
        )


@torch.no_grad()
def received(task: Task, cached: Tree, images: Tensor) -> Tensor:
    """Return detached logits (b, classes) of the received model in `cached`, under the statistics that came with it."""
    return task.network.predict(cached["received"]["params"], cached["received"]["stats"], images).detach()


def surer(one: Tensor, other: Tensor) -> Tensor:
    """Return, row by row, those of two logits (b, classes) whose largest probability is the larger; of equals `one`."""
    more = other.softmax(-1).amax(-1) > one.softmax(-1).amax(-1)
    return torch.where(more[:, None], other, one)
