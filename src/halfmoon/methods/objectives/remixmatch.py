"""ReMixMatch (Berthelot et al. 2020): aligned guesses on weak views anchor strong ones, mixed and not, and rotated."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import Batch, ClientData, Passes, Task, UpdateRequirements
from halfmoon.core.errors import UserError
from halfmoon.core.padding import concat, row_mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import (
    NOTHING,
    FedAvgRow,
    Objective,
    Ramp,
    StepResult,
    embedded,
    guess_of,
    guessing_passes,
    mixed,
    one_hot,
    ramped,
    sharpened,
    soft_cross_entropy,
    supervised,
    taught_and_guessed,
)

TINY = 1e-6
"""Added to both class frequencies before one is divided by the other (the authors' code)."""


@dataclass(frozen=True)
class ReMixMatch(Objective):
    """CE(y', f(x')) + w CE(q', f(u')) + v CE(q, f(strong)) + r CE(turn, rotation head of the turned strong view).

    q is the weak view's prediction, times labeled class frequencies over the running mean of all predictions (`align`),
    normalized, sharpened with `temperature`. Primes are mixtures, as in MixMatch, of the labeled images (a strong view
    of them; batch.x without `strong_labels`), the weak view, and `anchors` strong ones; v and r concern the first of
    these, unmixed. Weights w = `unlabeled_weight`, v = `anchor_weight`, r = `rotation_weight`; w and v grow over the
    first `ramp` of the rounds. The averaged teacher of `decay` only evaluates.

    The running mean, of `alignment_decay` a step (the authors' code: the mean of the last 128), starts uniform, travels
    and is averaged; the class frequencies are a client's own. The rotation head, linear on what the network's head is
    given, starts at zero, travels, and is no part of the solution. Defaults are the paper's, but for 2 strong views in
    place of 8. Departures: these strong views are the run's (no CTAugment); one mixing coefficient a step, not one an
    image; each image is turned at random, where the code turns a quarter of the batch each way.
    Raises `UserError` for no anchor, and for images that are not square where they are turned.
    """

    heads: ClassVar[tuple[str, ...]] = ("rotation",)
    unlabeled_weight: float = 1.5
    anchor_weight: float = 0.5
    rotation_weight: float = 0.5
    temperature: float = 0.5
    concentration: float = 0.75
    anchors: int = 2
    strong_labels: bool = True
    align: bool = True
    alignment_decay: float = 1 - 1 / 128
    ramp: float = 1 / 64
    ramp_shape: Ramp = "linear"
    decay: float | None = field(default=0.999, kw_only=True)

    def __post_init__(self) -> None:
        if self.anchors < 1:
            raise UserError(f"anchors is {self.anchors}: ReMixMatch needs at least 1 strong view.")

    @property
    def requirements(self) -> UpdateRequirements:
        views = ("weak", "strong", *(f"strong{n}" for n in range(2, self.anchors + 1)))
        labeled_views = ("strong",) if self.strong_labels else ()
        return UpdateRequirements(views, labeled_views=labeled_views, mixup=self.concentration, masks_padding=True)

    @property
    def travels(self) -> tuple[str, ...]:
        return (*super().travels, *(["predicted"] if self.align else []))

    def start(self, task: Task, model: Tree) -> Tree:
        head = model["params"]["head"]["weight"]
        rotation = {"weight": head.new_zeros(4, head.shape[1]), "bias": head.new_zeros(4)}
        server = super().start(task, {**model, "params": {**model["params"], "rotation": rotation}})
        return {**server, "predicted": head.new_full((len(head),), 1 / len(head))} if self.align else server

    def prepare(self, task: Task, broadcast: Tree, data: ClientData) -> Tree:
        if not self.align:
            return {}
        own = (torch.arange(len(data.y), device=data.y.device) < data.labeled)[:, None]
        counts = (one_hot(data.y, task.network.classes, broadcast["predicted"]) * own).sum(0)
        return {"marginal": counts / data.labeled.clamp_min(1)}

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        groups = (
            batch.x_views["strong"] if self.strong_labels else batch.x,
            *(batch.u[name] for name in self.requirements.views),
        )
        mix, order = batch.mixing["mix"], batch.mixing["order"]
        images = torch.split(mixed(torch.cat(groups), mix, order), [len(group) for group in groups])
        strong = batch.u["strong"]
        taught = (*images, strong)
        turned = quarter_turns(strong, batch.mixing["turn"]) if self.rotation_weight else None
        (x, *u, anchor), (weak,), rotations, moments = self._outputs(task, params, stats, taught, turned, batch)
        raw = weak.softmax(-1)
        guess, news = self._align(raw, aux, cached, batch.u_real)
        q = sharpened(guess, self.temperature)
        y = one_hot(batch.y, task.network.classes, q)
        targets = mixed(torch.cat([y, *[q] * len(u)]), mix, order)
        grown = ramped(task, 1.0, self.ramp, self.ramp_shape)
        every = concat(batch.masks(len(u))[1:])
        loss = soft_cross_entropy(x, targets[: len(y)], batch.x_real)
        loss = loss + grown * self.unlabeled_weight * soft_cross_entropy(torch.cat(u), targets[len(y) :], every)
        loss = loss + grown * self.anchor_weight * soft_cross_entropy(anchor, q, batch.u_real)
        if turned is not None:
            loss = loss + self.rotation_weight * supervised(rotations, batch.mixing["turn"], batch.u_real)
        return loss, StepResult(moments, (guess_of(guess),), news)

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        taught = labeled + (2 + self.anchors + bool(self.rotation_weight)) * unlabeled
        return guessing_passes(task, taught, unlabeled)

    def _align(self, guess: Tensor, aux: Tree, cached: Tree, real: Tensor | None) -> tuple[Tensor, Tree]:
        """Return the guesses (b, classes) with the labels' class frequencies, and the new running mean."""
        if not self.align:
            return guess, {}
        aligned = guess * (cached["marginal"] + TINY) / (aux["predicted"] + TINY)
        predicted = torch.lerp(aux["predicted"], row_mean(guess, real), 1 - self.alignment_decay)
        return aligned / aligned.sum(-1, keepdim=True), {"predicted": predicted}

    def _outputs(
        self, task: Task, params: Tree, stats: Tree, taught: tuple[Tensor, ...], turned: Tensor | None, batch: Batch
    ) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tree]]:
        """Return the logits of the taught groups, of the guessed one, of the rotation head (b, 4), and the moments."""
        head, weak, real = params["rotation"], batch.u["weak"], batch.masks(len(taught))
        if turned is None or task.statistics == "separate":
            logits, guess, moments = taught_and_guessed(task, params, stats, taught, (weak,), real)
            if turned is None:
                return logits, guess, weak.new_zeros(0, 4), moments
            _, features, last = task.network.embed(params, turned, real=batch.u_real)
            return logits, guess, F.linear(features, head["weight"], head["bias"]), [*moments, last]
        groups = (*taught, turned, weak) if task.labeling == "batch" else (*taught, turned)
        logits, features, moments = embedded(task, params, groups, batch.masks(len(groups) - 1))
        rotations = F.linear(features[len(taught)], head["weight"], head["bias"])
        if task.labeling == "batch":
            guess = logits[-1].detach()
        else:
            with torch.no_grad():
                guess = task.network.predict(params, stats, weak).detach()
        return logits[: len(taught)], [guess], rotations, moments


def quarter_turns(images: Tensor, turns: Tensor) -> Tensor:
    """Return images (b, C, H, H), each turned counter-clockwise `turns` (b,) times by 90 degrees."""
    if images.shape[-1] != images.shape[-2]:
        height, width = images.shape[-2:]
        raise UserError(
            f"ReMixMatch turns images by 90 degrees, and these are {height}x{width}: pad them to a square "
            "(image_size), or set rotation_weight = 0."
        )
    each = torch.stack([torch.rot90(images, k, (-2, -1)) for k in range(4)])
    return each[turns, torch.arange(len(images), device=images.device)]


ROWS = (
    FedAvgRow("remixmatch", "ReMixMatch", "Berthelot et al. 2020",
              "aligned guesses anchor strong views, mixed and turned", ReMixMatch(), pooled=True),
)  # fmt: skip
