"""FML, Federated Mutual Learning (Shen et al. 2020): a private model and the server's "meme" learn from each other.

Every client stores a private model; the server's model is the meme. Each learns from the labels and from the other's
prediction, KL(other || model), without gradient in the target, and both take their steps at the same time. As in
FedLoKe's experiments (CIKM 2023), the models also learn from each other on unlabeled images.

server: params, stats.  broadcast: the same.  memory: params, stats and, with `keep_optimizer`, optimizer state of the
private model.  upload: params, stats, weight; only the meme is uploaded.

The supervised half follows the paper, and the evident intent of the released code, which as published does not
communicate. Departure: all private models start as the same random network; the authors draw one for each client. For
the unlabeled half FedLoKe publishes neither weight nor view nor filter: they are options below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Passes,
    PseudoLabels,
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

    Attributes:
        private_share: the paper's alpha, the share of the labels in the private model's loss on labeled images; the
            meme's predictions have the rest.
        meme_share: the paper's beta, the same for the meme's loss.
        unlabeled_weight: weight of the divergence on unlabeled images in both losses; 0 is Shen et al.'s supervised FML.
        view: view of the unlabeled images for both models.
        delta: only predictions with an entropy below it, in nats, are used; None uses all.
        private: start of a private model: a random network ("fresh") or a "copy" of the first received model.
        keep_optimizer: keep the private model's momentum between rounds, as in the released code.
        weights: weight of a client's upload.
    """

    uses_class_weights: ClassVar[bool] = True

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
            share = getattr(self, name)
            if not 0 <= share <= 1:
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
        """Take one step of both models of Federated Mutual Learning, each on labels and on the other's predictions.

        Args:
            broadcast: the model that the server sent (unused: `carry` has it).
            carry: the private model, and the server's model (the "meme"), each with its optimizer's state.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The new carry, and the sum of both losses with the pseudo-labels of both models.
        """
        options = self.options
        # Both models process the minibatch before either takes its step, so both learn from predictions made before it.
        meme = self._run_model(carry["meme"], batch)
        private = self._run_model(carry["private"], batch)
        meme_loss = self._mutual_loss(private, batch, options.meme_share)
        private_loss = self._mutual_loss(meme, batch, options.private_share)
        new_meme, meme_value = mutual.optimizer_step(self, carry["meme"], meme, meme_loss)
        new_private, private_value = mutual.optimizer_step(self, carry["private"], private, private_loss)
        new = {"meme": new_meme, "private": new_private}
        loss = meme_value + private_value
        if not self.requirements.views:
            return new, StepMetrics(loss, samples={}, pseudo=())
        pseudo = {
            "global": _low_entropy_pseudo_labels(meme.prediction, options.delta),
            "local": _low_entropy_pseudo_labels(private.prediction, options.delta),
        }
        samples = {"private_sure": weighted_metric(pseudo["local"].weight, batch.u_real)}
        # `pseudo` is the main curve of pseudo-label quality, `models` the curves of both models.
        return new, StepMetrics(loss, samples=samples, pseudo=(pseudo["local"],), models=pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        weight = mutual.upload_weight(data, self.options.weights)
        # Supervised FML does not train clients without labels, so their memes are not averaged.
        weight = weight if self.requirements.views else weight * (data.labeled > 0)
        return Upload(select_model(carry["meme"]), weight), self._memory(carry["private"])

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        return Passes(2 * (labeled + unlabeled), 2 * (labeled + unlabeled))

    def _run_model(self, model: Tree, batch: Batch) -> mutual.ModelOutputs:
        """Run a model on a minibatch's labeled and unlabeled images, and record the pass for its gradient.

        Args:
            model: the model, of which "params" are used: batch normalization uses the statistics of the minibatch.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            Logits, the detached logits of unlabeled images as the prediction that teaches the other model, the batch
            statistics, and the recorded pass.
        """
        groups = (batch.x, *(batch.u[name] for name in self.requirements.views))

        def forward_pass(params: Tree) -> mutual.Outputs:
            joint = self.task.statistics == "joint"
            real = batch.masks(views=len(self.requirements.views))
            logits, _, moments = forward(self.task.network, params, joint, groups, real=real)
            labeled = logits[0]
            # Supervised FML has no unlabeled images: logits of no rows.
            unlabeled = logits[1] if self.requirements.views else labeled[:0]
            return (labeled, unlabeled), (unlabeled.detach(), moments)

        return mutual.run_and_record(forward_pass, model["params"])

    def _mutual_loss(
        self, teacher: mutual.ModelOutputs, batch: Batch, share: float
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Build a model's loss in Federated Mutual Learning, in which two models learn from each other.

        It is share * CE(y) + (1 - share) * KL on labeled images + unlabeled_weight * KL on unlabeled ones.

        Args:
            teacher: outputs of the other model; KL is the divergence from its predictions.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
            share: share of the true labels in the loss on labeled images, from 0 to 1.

        Returns:
            A function of the model's labeled logits (B, classes) and unlabeled logits (b, classes).
        """
        used = mutual.select_low_entropy(teacher.prediction, self.options.delta)

        def loss(labeled_logits: Tensor, unlabeled_logits: Tensor) -> Tensor:
            total = share * labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, self.task.class_weights)
            if len(labeled_logits):
                divergence = mutual.divergence(teacher.labeled, labeled_logits)
                total = total + (1 - share) * mean_or_zero(divergence, batch.x_real)
            if self.requirements.views:
                divergence = mutual.divergence(teacher.prediction, unlabeled_logits)
                total = total + self.options.unlabeled_weight * mean(used * divergence, batch.u_real)
            return total

        return loss

    def _memory(self, private: Tree) -> Tree:
        return mutual.select_memory(private, "params", "stats", *(["optimizer"] if self.options.keep_optimizer else []))


def _low_entropy_pseudo_labels(logits: Tensor, max_entropy: float | None) -> PseudoLabels:
    """Turn logits (b, classes) into pseudo-labels, with the weight 0 if their entropy is above `max_entropy` nats."""
    return mutual.as_pseudo_labels(logits, mutual.select_low_entropy(logits, max_entropy))


ROWS = (
    MethodEntry("fml", "FML", "Shen et al. 2020; as FedLoKe, CIKM 2023, uses it",
                "a private model and the global one learn from each other on all images", FML()),
)  # fmt: skip
