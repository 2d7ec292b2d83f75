"""FedLoKe (CIKM 2023): a private local model and the global model label a client's images for each other.

"Non-IID always Bad? Semi-Supervised Heterogeneous Federated Learning with Local Knowledge Enhancement" (Zhang et al.).
A client stores a local model, which fits its distribution. A client update first mixes the global model into it
(Eq. 2), once; then both train together: on labels, with strong views for the global model and weak ones for the local,
and on the OTHER model's soft prediction on an unlabeled image's weak view, if its entropy is low (Eq. 9 to 14).

server: params, stats.  broadcast: the same.  memory: params and stats of the local model, at first a copy of the
received model.  upload: params, stats, weight; only the global model is uploaded.

Details that the paper leaves open follow the authors' released code: the local model starts as a copy (with the random
start of Algorithm 1, Eq. 2 would average unrelated networks), rounds count from 0, so the first one has no unsupervised
loss, and the unlabeled mean is over the minibatch (Eq. 9 and 10: over all of the client's images). If they differ this
file follows the paper: weights by size (Eq. 1; the code's are uniform, which is the same for its clients of equal
size). With `statistics = "separate"` the passes are the code's, three for each model, but the running statistics are
updated with the weak views first. The code's guards (1e-8 inside logarithms, terms that are not finite set to 0) are
left out.
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
    StepMetrics,
    Task,
    UpdateRequirements,
    weighted_metric,
)
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.optim import Number, at_most_one
from halfmoon.core.padding import mean
from halfmoon.core.tree import Tree
from halfmoon.methods import mutual
from halfmoon.methods.averaging import ModelAveraging, select_model
from halfmoon.methods.objectives.base import count_passes, forward_weak_and_strong, labeled_cross_entropy

VIEWS = {
    "default": ("weak", "strong"),
    "strong": ("strong2", "strong"),
    "weak": ("weak", "weak2"),
    "none": ("plain", "plain2"),
}
"""(weak, strong): predictions and the local model's labels use the weak view; everything else uses the strong one."""


@dataclass(frozen=True)
class FedLoKe(ModelAveraging):
    """FedLoKe, Algorithm 1; the defaults are the paper's, mu (unpublished) that of the authors' script.

    With `ema=1`, `global_labels=False` and `private="fresh"` the local models are trained only on their client's
    labels: those of Figure 2.

    Attributes:
        ema: mu of Eq. 2, the share of itself that a local model retains when a client update begins. With 1 it never
            uses the global model's parameters ("without EMA"), with 0 the global model replaces it.
        delta: predictions with an entropy below it, in nats, are used; 0 uses none, None uses all.
        ramp_rounds: the unsupervised losses have the weight `unlabeled_weight` * min(1, round / `ramp_rounds`), with
            rounds from 0; 0 is no ramp.
        unlabeled_weight: final weight of the unsupervised losses.
        local: False has no local model: the global one is trained on its own predictions (ablation of Figure 5).
        global_labels: False trains the local model on labels only (ablation of Figure 5). Its unlabeled images pass
            through both models all the same, so that batch statistics are comparable.
        views: views of Figure 6a: the paper's ("default"), all "strong", all "weak", or without augmentation ("none").
        private: start of a local model: a "copy" of the first received model or, as in Algorithm 1, a random network
            ("fresh"), the same for all clients.
        weights: weight of a client's upload.

    Raises:
        UserError: for an `ema` outside 0 to 1 or a negative `ramp_rounds`.
    """

    uses_class_weights: ClassVar[bool] = True

    ema: float = 0.9
    delta: float | None = 0.1
    ramp_rounds: int = 200
    unlabeled_weight: float = 1.0
    local: bool = True
    global_labels: bool = True
    views: Literal["default", "strong", "weak", "none"] = "default"
    private: Literal["copy", "fresh"] = "copy"
    weights: mutual.Weights = "size"

    def __post_init__(self) -> None:
        if not 0 <= self.ema <= 1:
            raise UserError(f"ema is {self.ema}: it is the share of itself that a local model retains, from 0 to 1.")
        if self.ramp_rounds < 0:
            raise UserError(f"ramp_rounds is {self.ramp_rounds}: give a number of rounds, or 0 for no ramp.")

    @property
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        return {} if self.local else dict.fromkeys(("ema", "private"), "without a local model (local is false)")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": FedLoKeClient(task, self)}

    def ramp(self, round: int) -> Number:
        """Compute lambda of Eq. 12, the weight of the unsupervised losses in `round` (from 0)."""
        return self.unlabeled_weight * (at_most_one(round / self.ramp_rounds) if self.ramp_rounds else 1.0)


@dataclass(frozen=True)
class FedLoKeClient(ClientUpdate):
    """The client of FedLoKe: a global and a local model, each trained on the predictions of the other."""

    options: FedLoKe = FedLoKe()

    @property
    def requirements(self) -> UpdateRequirements:
        views = VIEWS[self.options.views]
        return UpdateRequirements(
            views, labeled_views=views, masks_padding=True, upload_spec=mutual.upload_spec_for(self.options.weights)
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        if not self.options.local:
            return {}
        local = mutual.initial_private_model(self.task, broadcast, self.options.private, generator)
        return mutual.select_memory(local, "params", "stats")

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        received = select_model(broadcast)
        carry = {"global": mutual.init_training(self.task, received)}
        if self.options.local:
            # Eq. 2, for the statistics as well: mu * local + (1 - mu) * global.
            fused = tree.map(lambda new, old: torch.lerp(new, old, self.options.ema), received, select_model(memory))
            carry["local"] = mutual.init_training(self.task, fused)
        return carry

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one step of both models, each on its labels and on the other's predictions (FedLoKe, Eq. 9 to 14).

        The local model remains at the client. Only predictions with a low entropy are used, and their weight grows over
        the rounds. Without the options `local` or `global_labels` (ablations), the global model teaches itself, or the
        local one learns from labels only.

        Args:
            broadcast: the model that the server sent (unused: `carry` has it).
            carry: the global and the local model, each with its optimizer's state.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The new carry, and the sum of both losses with the pseudo-labels of both models.
        """
        options = self.options
        ramp = options.ramp(self.task.round)  # lambda of Eq. 12
        weak_view, strong_view = self.requirements.views
        # Both models process the minibatch before either takes its step. Without a local model the global one is its
        # own teacher.
        global_outputs = self._run_model(carry["global"], batch, strong_view)
        local_outputs = self._run_model(carry["local"], batch, weak_view) if options.local else global_outputs
        # 1 for predictions whose entropy is low enough for the other model to learn from.
        used = {
            "global": mutual.select_low_entropy(global_outputs.prediction, options.delta),
            "local": mutual.select_low_entropy(local_outputs.prediction, options.delta),
        }
        new: Tree = {}
        global_loss = self._mutual_loss(batch, local_outputs.prediction, used["local"], ramp)
        new["global"], loss = mutual.optimizer_step(self, carry["global"], global_outputs, global_loss)
        if options.local:
            local_weight = ramp if options.global_labels else 0.0
            local_loss = self._mutual_loss(batch, global_outputs.prediction, used["global"], local_weight)
            new["local"], local_value = mutual.optimizer_step(self, carry["local"], local_outputs, local_loss)
            loss = loss + local_value
        # Pseudo-labels are reported with the weight that they have in the other model's loss.
        names = ("global", "local") if options.local else ("global",)
        global_weight = ramp if options.global_labels or not options.local else 0.0
        pseudo = {
            "global": mutual.as_pseudo_labels(global_outputs.prediction, global_weight * used["global"]),
            "local": mutual.as_pseudo_labels(local_outputs.prediction, ramp * used["local"]),
        }
        # The main curve is of pseudo-labels that some model is trained on: the local model's if the global's are unused.
        reported = "global" if options.global_labels else names[-1]
        samples = {f"{name}_sure": weighted_metric(used[name], batch.u_real) for name in names}
        models = pseudo if options.local else {}
        return new, StepMetrics(loss, samples=samples, pseudo=(pseudo[reported],), models=models)

    def _mutual_loss(
        self, batch: Batch, teacher: Tensor, mask: Tensor, weight: Number
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Build a model's loss in FedLoKe: cross-entropy of labels + weight * divergence from the other's predictions.

        Args:
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
            teacher: the other model's prediction, detached logits (b, classes).
            mask: 1 for images whose prediction is used, (b,).
            weight: factor of the unlabeled loss (lambda of Eq. 12).

        Returns:
            A function of the model's labeled logits (B, classes) and unlabeled logits (b, classes).
        """

        def loss(labeled_logits: Tensor, unlabeled_logits: Tensor) -> Tensor:
            divergence = mean(mask * mutual.divergence(teacher, unlabeled_logits), batch.u_real)
            labeled_loss = labeled_cross_entropy(labeled_logits, batch.y, batch.x_real, self.task.class_weights)
            return labeled_loss + weight * divergence

        return loss

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload = Upload(select_model(carry["global"]), mutual.upload_weight(data, self.options.weights))
        memory = mutual.select_memory(carry["local"], "params", "stats") if self.options.local else {}
        return upload, memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        forward, backward = count_passes(self.task, labeled + unlabeled, unlabeled)
        models = 2 if self.options.local else 1
        return Passes(models * forward, models * backward)

    def _run_model(self, model: Tree, batch: Batch, labeled_view: str) -> mutual.ModelOutputs:
        """Run one of FedLoKe's two models on a view of the labeled images, and on two views of the unlabeled ones.

        Args:
            model: "params" and "stats" (running batch-norm statistics).
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.
            labeled_view: name of the view of the labeled images.

        Returns:
            Logits, predictions on the weak view, batch statistics, and a function for the gradient.
        """
        weak_view, strong_view = self.requirements.views
        views = batch._replace(
            x=batch.x_views[labeled_view], u={"weak": batch.u[weak_view], "strong": batch.u[strong_view]}
        )

        def forward_pass(params: Tree) -> mutual.Outputs:
            """Split the outputs into those to differentiate and auxiliary ones."""
            labeled_logits, strong, weak, moments = forward_weak_and_strong(self.task, params, model["stats"], views)
            return (labeled_logits, strong), (weak, moments)

        return mutual.run_and_record(forward_pass, model["params"])


ROWS = (
    MethodEntry("fedloke", "FedLoKe", "FedLoKe, CIKM 2023",
                "a private local model and the global one label images for each other", FedLoKe()),
)  # fmt: skip
