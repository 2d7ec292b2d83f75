"""CBAFed (Li et al., CVPR 2023): pseudo-labels fixed for a client update, and thresholds that even out the classes.

When a client update begins, a client labels all its rows once with the received model, and trains on those that pass.
The threshold of a class follows its share of all training labels of the last round, labels and accepted pseudo-labels
of all clients together. With r(c) = share(c) C / 10,

    T(c) = min(threshold_most, r(c) + threshold - std(r)).

A row whose likeliest class does not pass takes the second one if that is in the tail (r < tail). Residual weights slow
the model down: every `residual_every` rounds the server goes back by `residual` of the way to the model it kept the
last time, and so does a client with labels every `local_residual_every` epochs of a client update, by `local_residual`.

server: params, stats, share (classes,), saved (params, stats).  down: params, stats, share.  memory: the optimizer's
state.  up: the same, with the shares of the client's own training labels, and weight, how many images it trained on: so
a weighted mean is all that the server needs.

Departures: clients with labels train `labeled_epochs` times as long (theirs: 11, so that the local residual acts twice;
rates of 0.03 with labels and 0.02 without). Accepted rows get a new weak view each time (theirs are trained on as they
were cropped when labeled). A client with labels uses its unlabeled rows as well; each kind has a mean of its own.
`warmup` is the share of the rounds in which labels alone teach (theirs: 501 epochs of the one labeled client before 501
rounds); without it second classes of a model that knows nothing yet would be trained on. The std is over the classes as
they are, not a sample's. Their ten-fold weight of labeled clients on skin images is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Federation,
    PseudoLabels,
    StepMetrics,
    Task,
    UpdateRequirements,
    weighted_metric,
)
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.errors import check_minimum
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, model_of
from halfmoon.methods.objectives.base import LabeledOnce, one_hot, per_image, supervised, sweep_logits
from halfmoon.models import forward


@dataclass(frozen=True)
class CBAFed(ModelAveraging):
    """CBAFed with the constants of the authors' code (threshold_most is 0.9 on SVHN and skin images).

    `tail` None leaves the second classes out, `adaptive` False sets every threshold to threshold, `residual` 0 and
    `local_residual` 0 leave the residual weights out. Raises `UserError` for an interval below 1.
    """

    needed = Requirements("sum", "", ("some", "clients"))
    threshold: float = 0.84
    threshold_most: float = 0.95
    tail: float | None = 0.03
    adaptive: bool = True
    unlabeled_weight: float = 1.0
    residual: float = 0.5
    residual_every: int = 5
    local_residual: float = 0.8
    local_residual_every: int = 5
    warmup: float = 0.5
    labeled_epochs: int = 1
    keep_optimizer: bool = True

    def __post_init__(self) -> None:
        check_minimum(self, 1, "residual_every", "local_residual_every", "labeled_epochs")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": Balanced(task, self)}

    def start(self, task: Task, model: Tree) -> Tree:
        head = model["params"]["head"]["weight"]
        return {**model, "share": head.new_full((len(head),), 1 / len(head)), "saved": dict(model)}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort train, average, and go back a little every few rounds."""
        broadcast: Tree = {"stats": {}, **{name: part for name, part in server.items() if name != "saved"}}
        new = federation.average("train", broadcast).update
        saved: Tree = {"stats": {}, **server["saved"]}
        if self.residual and (task.round + 1) % self.residual_every == 0:
            saved = residual({name: new[name] for name in ("params", "stats")}, saved, self.residual)
            new = {**new, **saved}
        return {**new, "saved": saved}

    def thresholds(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """Return T (classes,), and which classes are in the tail (classes,), for the shares of all training labels."""
        r = share * len(share) / 10
        least = (r + self.threshold - r.std(correction=0)).clamp_max(self.threshold_most)
        least = least if self.adaptive else torch.full_like(r, self.threshold)
        return least, torch.zeros_like(r, dtype=torch.bool) if self.tail is None else r < self.tail


def residual(new: Tree, saved: Tree, share: float) -> Tree:
    """Return share * saved + (1 - share) * new."""
    return tree.map(lambda old, now: torch.lerp(now, old, share), saved, new)


@dataclass(frozen=True)
class Balanced(LabeledOnce):
    """The client of CBAFed."""

    options: CBAFed = CBAFed()

    @property
    def requirements(self) -> UpdateRequirements:
        o, upload_spec = self.options, UploadSpec(("params", "stats", "share"))
        return UpdateRequirements(
            ("weak",),
            precomputed_views=("weak",),
            labeled_epochs=o.labeled_epochs,
            masks_padding=True,
            keep_optimizer=o.keep_optimizer,
            upload_spec=upload_spec,
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        guess = sweep_logits(self.task, broadcast["params"], broadcast["stats"], data.views["weak"], data.u_real)
        pseudo = self.pseudo_label(guess.softmax(-1), broadcast["share"])
        pseudo = pseudo._replace(weight=padding.mask(pseudo.weight, data.u_real))
        if self.task.round < self.options.warmup * self.task.rounds:
            pseudo = pseudo._replace(weight=torch.zeros_like(pseudo.weight))
        carry = {**super().begin(broadcast, memory, data), **pseudo._asdict(), "real": data.real}
        carry |= {"labeled": data.labeled.double(), "images": torch.zeros_like(data.labeled, dtype=torch.float64)}
        carry["saved"] = (
            {"params": broadcast["params"], "stats": broadcast["stats"]} if self.options.local_residual else {}
        )
        return carry

    def pseudo_label(self, p: Tensor, share: Tensor) -> PseudoLabels:
        """Return the pseudo-labels of predictions p (U, classes)."""
        least, tail = self.options.thresholds(share)
        (first, second), (top, next_) = (part.unbind(-1) for part in p.topk(2, -1))
        passes, second_passes = first > least[top], tail[next_]
        label, confidence = torch.where(passes, top, next_), torch.where(passes, first, second)
        accepted = passes | second_passes
        return PseudoLabels(
            torch.where(accepted, label, top), torch.where(accepted, confidence, first), accepted.to(p.dtype)
        )

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one optimizer step, and a step back at the end of every few epochs of the labeled images."""
        gradient, loss, (moments, pseudo) = grad_and_value(self._loss, carry["params"], carry, batch)
        new = self.advance(carry, gradient, moments)
        images = carry["images"] + padding.count(batch.x, batch.x_real)
        if saved := carry["saved"]:
            model = model_of(new)
            stretch = (carry["labeled"] * self.options.local_residual_every).clamp_min(1)
            over = (images / stretch).floor() > (carry["images"] / stretch).floor()
            back = residual(model, saved, self.options.local_residual)
            new |= {**tree.select(over, back, model), "saved": tree.select(over, back, saved)}
        samples = {"kept": weighted_metric((carry["weight"] > 0).to(loss.dtype), carry["real"].get("u"))}
        return {**new, "images": images}, StepMetrics(loss, samples, (pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        like, classes = broadcast["share"], len(broadcast["share"])
        own = (torch.arange(len(data.y), device=data.y.device) < data.labeled).to(like)
        counts = (one_hot(data.y, classes, like) * own[:, None]).sum(0)
        counts = counts + (one_hot(carry["label"], classes, like) * carry["weight"][:, None]).sum(0)
        total = counts.sum()
        share = torch.where(total > 0, counts / total.clamp_min(1), like)
        upload, memory = super().finish(broadcast, carry, data)
        return Upload({**upload.update, "share": share}, total.round().double()), memory

    def _loss(self, params: Tree, carry: Tree, batch: Batch) -> tuple[Tensor, tuple[list[Tree], PseudoLabels]]:
        groups, joint = (batch.x, batch.u["weak"]), self.task.statistics == "joint"
        (labeled, logits), _, moments = forward(self.task.network, params, joint, groups, real=batch.masks(1))
        pseudo = PseudoLabels(*(carry[name][batch.u_rows] for name in ("label", "confidence", "weight")))
        pseudo = pseudo._replace(weight=padding.mask(pseudo.weight, batch.u_real))
        taught = (per_image(logits, pseudo.label) * pseudo.weight).sum() / pseudo.weight.sum().clamp_min(1)
        labels = supervised(labeled, batch.y, batch.x_real)
        return labels + self.options.unlabeled_weight * taught, (moments, pseudo)


ROWS = (MethodEntry("cbafed", "CBAFed", "CBAFed, CVPR 2023", "thresholds even out the classes", CBAFed()),)
