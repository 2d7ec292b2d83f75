"""FML, Federated Mutual Learning (Shen et al. 2020): a private model and the travelling "meme" teach each other.

Every client keeps a private model; the server's model visits as the meme. Both look at the same images: each learns its
labels and the other's prediction, KL(other || own), the target detached, and both step at once. Here as FedLoKe
(CIKM 2023) uses it among semi-supervised methods: the models teach each other on unlabeled images, too.

server: params, stats.  down: the same.  memory: params, stats and, with `keep_optimizer`, optimizer state of the
private model.  up: params, stats, weight; nothing but the meme travels.

The supervised half is the paper's, and the released code's as it is meant: the one that was published has its calls of
fork and merge commented out, so that nothing is communicated. One departure: all private models start as the same
random network, where the authors draw one for each client (`private`). Of the unlabeled half FedLoKe publishes neither
weight, nor view, nor filter: they are fields below. The learning-rate schedule is the task's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.types import Batch, ClientUpdate, Local, Needs, Passes, Pseudo, StepMetrics, Task, sample
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.padding import mean, mean_or_zero
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, model_of
from halfmoon.methods.mutual import (
    Looked,
    Pass,
    Weights,
    advance,
    divergence,
    kept,
    learner,
    passed,
    sure,
    uplink_of,
    weight_of,
)
from halfmoon.methods.objectives.base import supervised
from halfmoon.models import forward


@dataclass(frozen=True)
class FML(ModelAveraging):
    """FML; the defaults are the paper's where it speaks.

    `private_share` is its alpha, the weight of the labels beside the meme's predictions in the private model's loss;
    `meme_share` its beta, the same for the meme. `unlabeled_weight` weighs the divergence on unlabeled images in both
    losses: by default as much as that on labeled ones; 0 is Shen et al.'s supervised FML, which leaves unlabeled images
    aside. They are shown in one `view`, the same for both models, and with `delta` only guesses of an entropy below it
    (in nats) teach. `private`: how a private model starts, as a network of its own ("fresh") or as a "copy" of the
    first received one, which learns nothing from its twin in the first client update. `keep_optimizer`: whether the
    private model's momentum lives on between rounds (the released code's does); the meme's starts anew.

    Raises `UserError` for a share outside 0 to 1.
    """

    private_share: float = 0.5
    meme_share: float = 0.5
    unlabeled_weight: float = 0.5
    view: Literal["weak", "strong", "plain"] = "weak"
    delta: float | None = None
    private: Literal["fresh", "copy"] = "fresh"
    keep_optimizer: bool = True
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        for name, share in (("private_share", self.private_share), ("meme_share", self.meme_share)):
            if not 0 <= share <= 1:
                raise UserError(f"{name} is {share}: it is the labels' share of the loss, from 0 to 1.")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": MutualLearning(task, self)}


@dataclass(frozen=True)
class MutualLearning(ClientUpdate):
    """The client of FML: a private model and a meme, each taught by labels and by the other."""

    options: FML = FML()

    @property
    def needs(self) -> Needs:
        views = (self.options.view,) if self.options.unlabeled_weight else ()
        return Needs(views, masks=True, uplink=uplink_of(self.options.weights))

    def remember(self, down: Tree, generator: torch.Generator) -> Tree:
        model = model_of(down)
        if self.options.private == "fresh":
            like = next(tree.leaves(down["params"]))
            model = tree.to(self.task.network.init(generator), like.device, like.dtype)
        return self._kept(learner(self.task, model))

    def begin(self, down: Tree, memory: Tree, data: Local) -> Tree:
        private = learner(self.task, model_of(memory))
        if self.options.keep_optimizer:
            private["optimizer"] = memory.get("optimizer", {})
        return {"meme": learner(self.task, model_of(down)), "private": private}

    def step(self, down: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one step of both models, each on its labels and on the other's predictions."""
        o = self.options
        meme, private = (self._pass(carry[name], batch) for name in ("meme", "private"))
        new: Tree = {}
        new["meme"], loss = advance(self.task, carry["meme"], meme, self._lesson(private, batch, o.meme_share))
        lesson = self._lesson(meme, batch, o.private_share)
        new["private"], other = advance(self.task, carry["private"], private, lesson)
        loss = loss + other
        if not self.needs.views:
            return new, StepMetrics(loss, {}, ())
        made = {name: self._pseudo(seen) for name, seen in {"global": meme, "local": private}.items()}
        samples = {"private_sure": sample(made["local"].weight, batch.u_real)}
        return new, StepMetrics(loss, samples, (made["local"],), made)

    def finish(self, down: Tree, carry: Tree, data: Local) -> tuple[Upload, Tree]:
        weight = weight_of(data, self.options.weights)
        if not self.needs.views:
            weight = weight * (data.labeled > 0)
        return Upload(model_of(carry["meme"]), weight), self._kept(carry["private"])

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(2 * (labeled + unlabeled), 2 * (labeled + unlabeled))

    def _pass(self, model: Tree, batch: Batch) -> Pass:
        """Return what a model says of labeled and unlabeled images; its guesses are its logits of the same pass."""
        groups = (batch.x, *(batch.u[name] for name in self.needs.views))

        def look(params: Tree) -> Looked:
            joint, real = self.task.statistics == "joint", batch.masks(len(self.needs.views))
            parts, _, moments = forward(self.task.network, params, joint, groups, real=real)
            labeled, unlabeled = parts[0], parts[1] if self.needs.views else parts[0][:0]
            return (labeled, unlabeled), (unlabeled.detach(), moments)

        return passed(look, model["params"])

    def _pseudo(self, seen: Pass) -> Pseudo:
        """Return the pseudo-labels that a model's guesses amount to."""
        confidence, label = seen.guess.softmax(-1).max(-1)
        return Pseudo(label, confidence, sure(seen.guess, self.options.delta))

    def _lesson(self, teacher: Pass, batch: Batch, share: float):
        """Return share * CE(y) + (1 - share) * KL on labeled images + unlabeled_weight * KL on unlabeled ones."""
        used = sure(teacher.guess, self.options.delta)

        def loss(labeled: Tensor, unlabeled: Tensor) -> Tensor:
            total = share * supervised(labeled, batch.y, batch.x_real)
            if len(labeled):
                total = total + (1 - share) * mean_or_zero(divergence(teacher.labeled, labeled), batch.x_real)
            if self.needs.views:
                apart = mean(used * divergence(teacher.guess, unlabeled), batch.u_real)
                total = total + self.options.unlabeled_weight * apart
            return total

        return loss

    def _kept(self, private: Tree) -> Tree:
        return kept(private, "params", "stats", *(["optimizer"] if self.options.keep_optimizer else []))


ROWS = (
    MethodEntry(
        "fml",
        "FML",
        "Shen et al. 2020; as FedLoKe, CIKM 2023, uses it",
        "a private model and the travelling one teach each other on all images",
        FML(),
    ),
)
