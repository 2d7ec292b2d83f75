"""FedLoKe (CIKM 2023): a private local model labels the client's images for the global one, and the other way round.

"Non-IID always Bad? Semi-Supervised Heterogeneous Federated Learning with Local Knowledge Enhancement" (Zhang et al.).
A client keeps a local model, which knows its own distribution. A client update first mixes the global model into it
(Eq. 2), once; then both train together: on labels, strong views for the global model and weak ones for the local, and
on the soft guess that the OTHER makes of an unlabeled image's weak view, where its entropy is low (Eq. 9 to 14).

server: params, stats.  broadcast: the same.  memory: params and stats of the local model, at first a copy of what came
down. upload: params, stats, weight; nothing but the global model travels.

From the authors' released code come what the paper does not say: the local model starts as a copy (Algorithm 1, where
each starts at random, would make Eq. 2 average unrelated networks), the round counts from 0, so the first one has no
unsupervised loss, and the unlabeled mean runs over the minibatch (Eq. 9 and 10: over all of the client's images). Where
they differ this file follows the paper: weights by size (Eq. 1; the code's are uniform, the same for its equal
clients). With `statistics = "separate"` the passes are the code's, three a model, but the running statistics take in
the weak views first. Its guards (1e-8 inside logarithms, a term that is not finite set to 0) are left out.
"""

from collections.abc import Callable, Mapping
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
"""(quiet, loud): guesses are made of the quiet view, and the local model learns its labels on it; all else is loud."""


@dataclass(frozen=True)
class FedLoKe(ModelAveraging):
    """FedLoKe, Algorithm 1; the defaults are the paper's, mu (unpublished) that of the authors' script.

    `ema` is mu of Eq. 2, the share of itself that a local model keeps when a client update begins: at 1 it never reads
    the global model's parameters ("without EMA"), at 0 the global model replaces it. `delta` bounds the entropy of a
    guess that teaches, in nats; at 0 none does, with None all do. The unsupervised losses weigh `unlabeled_weight` *
    min(1, round / `ramp_rounds`), rounds from 0; 0 `ramp_rounds` is no ramp.

    The ablations of Figure 5: `local=False` has no local model, the global one is taught by its own guesses;
    `global_labels=False` teaches the local model by labels alone (its images pass both models all the same, so batch
    statistics stay comparable). `views` are Figure 6a's: all "strong", all "weak", or "none" augmented. `private`: how
    a local model starts, as a "copy" of the first received one or, as Algorithm 1 has it, as a random network ("fresh",
    the same for all clients). With `ema=1`, `global_labels=False` and `private="fresh"` the local models have learned
    from their client's labels alone: those of Figure 2.

    Raises `UserError` for an `ema` outside 0 to 1 or a negative `ramp_rounds`.
    """

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
            raise UserError(f"ema is {self.ema}: it is the share of itself that a local model keeps, from 0 to 1.")
        if self.ramp_rounds < 0:
            raise UserError(f"ramp_rounds is {self.ramp_rounds}: give a number of rounds, or 0 for no ramp.")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": Cotraining(task, self)}

    def ramp(self, round: int) -> Number:
        """Return lambda of Eq. 12, what the unsupervised losses weigh in `round` (from 0)."""
        return self.unlabeled_weight * (at_most_one(round / self.ramp_rounds) if self.ramp_rounds else 1.0)


@dataclass(frozen=True)
class Cotraining(ClientUpdate):
    """The client of FedLoKe: a global and a local model, each taught by the other."""

    options: FedLoKe = FedLoKe()

    @property
    def requirements(self) -> UpdateRequirements:
        views = VIEWS[self.options.views]
        return UpdateRequirements(
            views, labeled_views=views, masks_padding=True, upload_spec=mutual.uplink_of(self.options.weights)
        )

    def initial_memory(self, broadcast: Tree, generator: torch.Generator) -> Tree:
        if not self.options.local:
            return {}
        return mutual.memory_of(
            mutual.first_model(self.task, broadcast, self.options.private, generator), "params", "stats"
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        received = select_model(broadcast)
        carry = {"global": mutual.learner(self.task, received)}
        if self.options.local:
            fused = tree.map(lambda new, old: torch.lerp(new, old, self.options.ema), received, select_model(memory))
            carry["local"] = mutual.learner(self.task, fused)
        return carry

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one step of both models, each on its labels and on the other's guesses (Eq. 9 to 14)."""
        o, lam = self.options, self.options.ramp(self.task.round)
        quiet, loud = self.requirements.views
        main = self._pass(carry["global"], batch, loud)
        local = self._pass(carry["local"], batch, quiet) if o.local else main
        used = {"global": mutual.sure(main.guess, o.delta), "local": mutual.sure(local.guess, o.delta)}

        def lesson(teacher: Tensor, mask: Tensor, weight: Number) -> Callable[[Tensor, Tensor], Tensor]:
            def loss(labeled: Tensor, unlabeled: Tensor) -> Tensor:
                apart = mean(mask * mutual.divergence(teacher, unlabeled), batch.u_real)
                return labeled_cross_entropy(labeled, batch.y, batch.x_real) + weight * apart

            return loss

        new: Tree = {}
        new["global"], loss = mutual.advance(self, carry["global"], main, lesson(local.guess, used["local"], lam))
        if o.local:
            taught = lesson(main.guess, used["global"], lam if o.global_labels else 0.0)
            new["local"], other = mutual.advance(self, carry["local"], local, taught)
            loss = loss + other
        names = ("global", "local") if o.local else ("global",)
        teaching = "global" if o.global_labels else names[-1]  # guesses that teach somebody
        teaches = {"global": lam if o.global_labels or not o.local else 0.0, "local": lam}
        guesses = {"global": main.guess, "local": local.guess}
        pseudo = {name: mutual.pseudo_labels(guess, teaches[name] * used[name]) for name, guess in guesses.items()}
        samples = {f"{name}_sure": weighted_metric(used[name], batch.u_real) for name in names}
        return new, StepMetrics(loss, samples, (pseudo[teaching],), pseudo if o.local else {})

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        upload = Upload(select_model(carry["global"]), mutual.weight_of(data, self.options.weights))
        return upload, (mutual.memory_of(carry["local"], "params", "stats") if self.options.local else {})

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        forward, backward = count_passes(self.task, labeled + unlabeled, unlabeled)
        models = 2 if self.options.local else 1
        return Passes(models * forward, models * backward)

    def _pass(self, model: Tree, batch: Batch, labeled: str) -> mutual.Pass:
        """Return what a model says of the labeled images' view `labeled`, and of both views of the unlabeled ones."""
        quiet, loud = self.requirements.views
        views = batch._replace(x=batch.x_views[labeled], u={"weak": batch.u[quiet], "strong": batch.u[loud]})

        def outputs(params: Tree) -> mutual.Outputs:
            logits, strong, weak, moments = forward_weak_and_strong(self.task, params, model["stats"], views)
            return (logits, strong), (weak, moments)

        return mutual.passed(outputs, model["params"])


ROWS = (
    MethodEntry("fedloke", "FedLoKe", "FedLoKe, CIKM 2023",
                "a private local model and the global one label images for each other", FedLoKe()),
)  # fmt: skip
