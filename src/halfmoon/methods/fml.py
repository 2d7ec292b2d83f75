"""FML, Federated Mutual Learning (Shen et al. 2020): a private model and the travelling "meme" teach each other.

Every client keeps a private model; the server's model is the meme. Each learns the labels and the other's prediction,
KL(other || own), the target detached, and both step at once. Here as FedLoKe (CIKM 2023) uses it: the models teach each
other on unlabeled images, too.

server: params, stats.  broadcast: the same.  memory: params, stats and, with `keep_optimizer`, optimizer state of the
private model.  upload: params, stats, weight; nothing but the meme travels.

The supervised half is the paper's, and the released code's as it is meant (as published it communicates nothing).
Departure: all private models start as the same random network, where the authors draw one for each client. Of the
unlabeled half FedLoKe publishes neither weight, nor view, nor filter: they are fields below.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Passes,
    StepMetrics,
    Task,
    UpdateRequirements,
    weighted_metric,
)
from halfmoon.api.uploads import Upload
from halfmoon.core.errors import UserError
from halfmoon.core.padding import mean, mean_or_zero
from halfmoon.core.tree import Tree
from halfmoon.methods import mutual
from halfmoon.methods.averaging import ModelAveraging, select_model
from halfmoon.methods.objectives.base import labeled_cross_entropy
from halfmoon.models import forward


@dataclass(frozen=True)
class FML(ModelAveraging):
    """FML; the defaults are the paper's where it speaks.

    `private_share` is its alpha, the weight of the labels beside the meme's predictions in the private model's loss;
    `meme_share` its beta, the same for the meme. `unlabeled_weight` weighs the divergence on unlabeled images in both
    losses; 0 is Shen et al.'s supervised FML. These are shown in one `view`, and with `delta` only guesses of an
    entropy below it (in nats) teach. `private`: a private model starts as a network of its own ("fresh") or as a "copy"
    of the first received one; with `keep_optimizer` its momentum lives on between rounds, as in the released code.
    """

    private_share: float = 0.5
    meme_share: float = 0.5
    unlabeled_weight: float = 0.5
    view: Literal["weak", "strong", "plain"] = "weak"
    delta: float | None = None
    private: Literal["fresh", "copy"] = "fresh"
    keep_optimizer: bool = True
    weights: mutual.Weights = "uniform"

    def __post_init__(self) -> None:
        for name in ("private_share", "meme_share"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise UserError(f"{name} is {share}: it is the labels' share of the loss, from 0 to 1.")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": MutualLearning(task, self)}


@dataclass(frozen=True)
class MutualLearning(ClientUpdate):
    """The client of FML: a private model and a meme, each taught by labels and by the other."""

    options: FML = FML()

    @property
    def requirements(self) -> UpdateRequirements:
        views = (self.options.view,) if self.options.unlabeled_weight else ()
        return UpdateRequirements(views, masks_padding=True, upload_spec=mutual.uplink_of(self.options.weights))

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        model = mutual.first_model(self.task, broadcast, self.options.private, generator)
        return self._memory(mutual.learner(self.task, model))

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        private = mutual.learner(self.task, select_model(memory))
        private |= {"optimizer": memory.get("optimizer", {})} if self.options.keep_optimizer else {}
        return {"meme": mutual.learner(self.task, select_model(broadcast)), "private": private}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        o = self.options
        meme, private = (self._pass(carry[name], batch) for name in ("meme", "private"))
        lessons = self._lesson(private, batch, o.meme_share), self._lesson(meme, batch, o.private_share)
        one, loss = mutual.advance(self, carry["meme"], meme, lessons[0])
        two, other = mutual.advance(self, carry["private"], private, lessons[1])
        new, loss = {"meme": one, "private": two}, loss + other
        if not self.requirements.views:
            return new, StepMetrics(loss, {}, ())
        guesses = {"global": meme.guess, "local": private.guess}
        pseudo = {name: mutual.pseudo_labels(guess, mutual.sure(guess, o.delta)) for name, guess in guesses.items()}
        own = pseudo["local"]
        return new, StepMetrics(loss, {"private_sure": weighted_metric(own.weight, batch.u_real)}, (own,), pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        weight = mutual.weight_of(data, self.options.weights)
        weight = weight if self.requirements.views else weight * (data.labeled > 0)
        return Upload(select_model(carry["meme"]), weight), self._memory(carry["private"])

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(2 * (labeled + unlabeled), 2 * (labeled + unlabeled))

    def _pass(self, model: Tree, batch: Batch) -> mutual.Pass:
        """Return what a model says of labeled and unlabeled images; its guesses are its logits of the same pass."""
        groups = (batch.x, *(batch.u[name] for name in self.requirements.views))

        def outputs(params: Tree) -> mutual.Outputs:
            joint, real = self.task.statistics == "joint", batch.masks(len(self.requirements.views))
            parts, _, moments = forward(self.task.network, params, joint, groups, real=real)
            labeled, unlabeled = parts[0], parts[1] if self.requirements.views else parts[0][:0]
            return (labeled, unlabeled), (unlabeled.detach(), moments)

        return mutual.passed(outputs, model["params"])

    def _lesson(self, teacher: mutual.Pass, batch: Batch, share: float):
        """Return share * CE(y) + (1 - share) * KL on labeled images + unlabeled_weight * KL on unlabeled ones."""
        used = mutual.sure(teacher.guess, self.options.delta)

        def loss(labeled: Tensor, unlabeled: Tensor) -> Tensor:
            total = share * labeled_cross_entropy(labeled, batch.y, batch.x_real)
            if len(labeled):
                total = total + (1 - share) * mean_or_zero(mutual.divergence(teacher.labeled, labeled), batch.x_real)
            if self.requirements.views:
                apart = mean(used * mutual.divergence(teacher.guess, unlabeled), batch.u_real)
                total = total + self.options.unlabeled_weight * apart
            return total

        return loss

    def _memory(self, private: Tree) -> Tree:
        return mutual.memory_of(private, "params", "stats", *(["optimizer"] if self.options.keep_optimizer else []))


ROWS = (
    MethodEntry("fml", "FML", "Shen et al. 2020; as FedLoKe, CIKM 2023, uses it",
                "a private model and the travelling one teach each other on all images", FML()),
)  # fmt: skip
