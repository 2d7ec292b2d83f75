"""FML, Federated Mutual Learning (Shen et al. 2020): a private model and the server's "meme" learn from each other.

Every client stores a private model; the server's model is the meme. Each learns from the labels and from the other's
prediction, KL(other || model), without gradient in the target, and both step at once. Here as FedLoKe (CIKM 2023) uses
it: the models teach each other on unlabeled images, too.

server: params, stats.  broadcast: the same.  memory: params, stats and, with `keep_optimizer`, optimizer state of the
private model.  upload: params, stats, weight; only the meme is uploaded.

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
    """FML. The defaults are the paper's, as far as it states them.

    `private_share` is its alpha, the weight of the labels beside the meme's predictions in the private model's loss;
    `meme_share` its beta, the same for the meme. `unlabeled_weight` weighs the divergence on unlabeled images in both
    losses; 0 is Shen et al.'s supervised FML. These are shown in one `view`, and with `delta` only predictions with
    an entropy below it (in nats) are used. `private`: a private model starts as a random network ("fresh") or as a
    "copy" of the first received one; with `keep_optimizer` its momentum is retained between rounds, as in the released
    code.
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
        return {"train": FMLClient(task, self)}


@dataclass(frozen=True)
class FMLClient(ClientUpdate):
    """The client of FML: a private model and a meme, each trained on labels and on the other's predictions."""

    options: FML = FML()

    @property
    def requirements(self) -> UpdateRequirements:
        views = (self.options.view,) if self.options.unlabeled_weight else ()
        return UpdateRequirements(views, masks_padding=True, upload_spec=mutual.upload_spec_for(self.options.weights))

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        model = mutual.initial_private_model(self.task, broadcast, self.options.private, generator)
        return self._memory(mutual.init_training(self.task, model))

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        private = mutual.init_training(self.task, select_model(memory))
        private |= {"optimizer": memory.get("optimizer", {})} if self.options.keep_optimizer else {}
        return {"meme": mutual.init_training(self.task, select_model(broadcast)), "private": private}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        o = self.options
        meme, private = (self._pass(carry[name], batch) for name in ("meme", "private"))
        losses = self._mutual_loss(private, batch, o.meme_share), self._mutual_loss(meme, batch, o.private_share)
        one, loss = mutual.advance(self, carry["meme"], meme, losses[0])
        two, other = mutual.advance(self, carry["private"], private, losses[1])
        new, loss = {"meme": one, "private": two}, loss + other
        if not self.requirements.views:
            return new, StepMetrics(loss, {}, ())
        predictions = {"global": meme.prediction, "local": private.prediction}
        pseudo = {
            name: mutual.pseudo_labels(guess, mutual.low_entropy_mask(guess, o.delta))
            for name, guess in predictions.items()
        }
        own = pseudo["local"]
        return new, StepMetrics(loss, {"private_sure": weighted_metric(own.weight, batch.u_real)}, (own,), pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        weight = mutual.upload_weight(data, self.options.weights)
        weight = weight if self.requirements.views else weight * (data.labeled > 0)
        return Upload(select_model(carry["meme"]), weight), self._memory(carry["private"])

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(2 * (labeled + unlabeled), 2 * (labeled + unlabeled))

    def _pass(self, model: Tree, batch: Batch) -> mutual.ModelOutputs:
        """Compute a model's outputs; its predictions are the logits of the same pass."""
        groups = (batch.x, *(batch.u[name] for name in self.requirements.views))

        def outputs(params: Tree) -> mutual.Outputs:
            joint, real = self.task.statistics == "joint", batch.masks(len(self.requirements.views))
            parts, _, moments = forward(self.task.network, params, joint, groups, real=real)
            labeled, unlabeled = parts[0], parts[1] if self.requirements.views else parts[0][:0]
            return (labeled, unlabeled), (unlabeled.detach(), moments)

        return mutual.run_model(outputs, model["params"])

    def _mutual_loss(self, teacher: mutual.ModelOutputs, batch: Batch, share: float):
        """Build share * CE(y) + (1 - share) * KL on labeled images + unlabeled_weight * KL on unlabeled ones."""
        used = mutual.low_entropy_mask(teacher.prediction, self.options.delta)

        def loss(labeled: Tensor, unlabeled: Tensor) -> Tensor:
            total = share * labeled_cross_entropy(labeled, batch.y, batch.x_real)
            if len(labeled):
                total = total + (1 - share) * mean_or_zero(mutual.divergence(teacher.labeled, labeled), batch.x_real)
            if self.requirements.views:
                apart = mean(used * mutual.divergence(teacher.prediction, unlabeled), batch.u_real)
                total = total + self.options.unlabeled_weight * apart
            return total

        return loss

    def _memory(self, private: Tree) -> Tree:
        return mutual.select_memory(private, "params", "stats", *(["optimizer"] if self.options.keep_optimizer else []))


ROWS = (
    MethodEntry("fml", "FML", "Shen et al. 2020; as FedLoKe, CIKM 2023, uses it",
                "a private model and the global one learn from each other on all images", FML()),
)  # fmt: skip
