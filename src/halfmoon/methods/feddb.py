"""FedDB (IJCAI 2024): divide a client's own class bias out of its pseudo-labels, and balance the clients' average.

A client's bias is its average prediction over all its unlabeled images, APP-U (Eq. 8). Debiased pseudo-labeling (DPL,
Eq. 14) divides every prediction by it before it is judged. Debiased model averaging (DMA, Eq. 16 and Algorithm 2)
chooses the clients' weights so that the mean of their APP-U is near the uniform distribution.

server: params, stats, and with `server_momentum` its momentum.  down: params, stats.  memory: with `keep_optimizer`,
the optimizer's state; with thresholds that adapt, theirs.  up: params, stats, appu (`classes` floats more than FedAvg),
weight.

Where the authors' released code departs from the paper:
* Algorithm 2 takes the norm over classes (Eq. 16 sums over clients: a slip). The code minimizes a mean of squares
  without the root, rebuilds its optimizer at every iteration and decays the weights by 0.9: `dma` = "released" is that,
  and comes within about 2 % of uniform weights. "paper", Algorithm 2 as printed, takes a softmax of the *weights* at
  every iteration, which also pulls them together; "logits" descends on logits instead, and is the one that minimizes.
* The paper's APP-U of an epoch covers all unlabeled images, the code's the confident ones: `accumulate_over`.
* The loss of pseudo-labels is divided by all images in the paper (Eq. 5), by the confident ones in the code: `mean`,
  the code's by default. The values of gamma and of `unlabeled_weight` are the code's: the paper gives none.
* The code adds a server momentum of 0.5 (`server_momentum`), a cosine schedule (the task's), and keeps the clients'
  momentum between rounds (`keep_optimizer`), of which the paper says nothing.
* The paper gives a client's labeled images to its unlabeled set as well (the code, by an index error, other images).
  That is for the run to say (`reuse_labeled`): by default the sets are apart.
* Both take whole sets as batches, one step an epoch. Here the batch rule is the run's; a minibatch of b of U images
  moves APP-U by the share of an epoch that it is, gamma^(b / U), which is the paper's rule for whole sets.
* A client without a confident image trains on its labels alone, in the same batches (the code: batches of 64).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from halfmoon.api.method_entry import MethodEntry
from halfmoon.api.requirements import Requirements
from halfmoon.api.types import (
    Batch,
    ClientData,
    ClientUpdate,
    Federation,
    Passes,
    StepMetrics,
    Task,
    UpdateRequirements,
)
from halfmoon.api.uploads import Aux, Upload, UploadSpec
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.tensors import euclidean
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, average, momentum_step
from halfmoon.methods.fedavg import LocalTraining
from halfmoon.methods.objectives import FixMatch
from halfmoon.methods.objectives.base import prior, sweep_logits
from halfmoon.methods.objectives.pseudo_labeling import Teacher, no_average
from halfmoon.methods.objectives.thresholding import Rule

DMA = Literal["paper", "released", "logits", "uniform", "size"]
"""How the server weighs the clients: by their APP-U in one of three ways, all alike, or by their rows."""


@dataclass(frozen=True)
class FedDB(ModelAveraging):
    """FedDB, Algorithms 1 to 3.

    `threshold`, `unlabeled_weight`, `mean`, `labels`, `debias`, `teacher` and the thresholds are FixMatch's: the paper
    guesses once a round, with the received model, and judges the debiased guess. `accumulate`: whether APP-U follows
    the model while it trains, p <- gamma p + (1 - gamma) p_e for every epoch, with p_e from the weak views of each
    "step" (one more forward pass of the minibatch), from one more sweep when all steps are taken ("finish"), or not at
    all ("none"). `accumulate_over` "used" counts in p_e only images whose pseudo-label is used (of a "step").
    Pseudo-labels always come from the APP-U of the round's start; what is accumulated goes to the server. `dma_steps`
    and `dma_lr` are the iterations of Algorithm 2 and their rate. Raises `UserError` for the teacher "average".
    """

    threshold: float = 0.95
    unlabeled_weight: float = 1.0
    mean: Literal["all", "used"] = "used"
    labels: Literal["step", "round"] = "round"
    debias: bool = True
    accumulate: Literal["step", "finish", "none"] = "step"
    accumulate_over: Literal["all", "used"] = "all"
    gamma: float = 0.5
    dma: DMA = "paper"
    dma_steps: int = 100
    dma_lr: float = 1.0
    server_momentum: float = 0.0
    keep_optimizer: bool = True
    teacher: Teacher = "local"
    thresholding: Rule = "fixed"
    threshold_decay: float = 0.999

    def __post_init__(self) -> None:
        no_average("FedDB", self.objective)

    @property
    def objective(self) -> FixMatch:
        """Return the clients' loss."""
        return FixMatch(
            self.threshold, self.unlabeled_weight, self.mean, labels=self.labels, debias=self.debias,
            teacher=self.teacher, thresholding=self.thresholding, threshold_decay=self.threshold_decay,
        )  # fmt: skip

    def requirements(self, norm: str) -> Requirements:
        return Requirements(reason="the weights of its average are computed from each client's mean prediction")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": Debiased(task, self.objective, keep_optimizer=self.keep_optimizer, options=self)}

    def start(self, task: Task, model: Tree) -> Tree:
        return {**model, "momentum": tree.zeros_like(model["params"])} if self.server_momentum else model

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Let the cohort train, and average with the weights of DMA; who has no rows weighs nothing."""
        upload = federation.query("train", self.solution(task, server))
        shares = (
            upload.weight if self.dma == "size" else mixture(upload.aux["appu"], self.dma, self.dma_steps, self.dma_lr)
        )
        new = average(upload._replace(weight=shares * (upload.weight > 0)), server)
        if not self.server_momentum:
            return new
        params, momentum = momentum_step(server["params"], new["params"], server["momentum"], self.server_momentum)
        return {"params": params, "stats": new["stats"], "momentum": momentum}


@dataclass(frozen=True)
class Debiased(LocalTraining):
    """The client of FedDB: FixMatch on debiased guesses, and an average prediction that follows the model."""

    options: FedDB = FedDB()

    @property
    def requirements(self) -> UpdateRequirements:
        requirements = super().requirements
        views = ("weak", "strong") if self.options.accumulate == "step" else requirements.views
        return replace(
            requirements, views=views, precomputed_views=("weak",), upload_spec=UploadSpec(aux={"appu": Aux()})
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        guess = sweep_logits(self.task, broadcast["params"], broadcast["stats"], data.views["weak"], data.u_real)
        cached = self.options.objective.prepared(broadcast, data, guess)
        own = self.objective.begin(self.task, memory, data, cached)
        new = {"appu": cached["prior"], "images": torch.zeros_like(cached["prior"][0]), "rows": data.unlabeled}
        return {**ClientUpdate.begin(self, broadcast, memory, data), **own, **new, "cached": cached}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one optimizer step, and let APP-U follow the model in front of it."""
        gradient, loss, result = grad_and_value(self._loss, carry["params"], carry, batch)
        new = self.advance(carry, gradient, result.moments, consume=True, **result.aux)
        new["images"] = carry["images"] + padding.count(batch.u_rows, batch.u_real)
        if self.options.accumulate == "step":
            new["appu"] = self._accumulated(carry, batch, result.pseudo[0].weight)
        return new, StepMetrics(loss, {}, result.pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        appu = carry["appu"]
        if self.options.accumulate == "finish":
            keep = self._keep(carry, carry["images"])
            views = data.views["weak"]
            guess = sweep_logits(self.task, carry["params"], carry["stats"], views, data.u_real)
            appu = keep * appu + (1 - keep) * prior(guess, data.u_real)
        upload, memory = super().finish(broadcast, carry, data)
        return upload._replace(aux={"appu": appu}), memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        forward, backward = super().passes(labeled, unlabeled)
        return Passes(forward + (unlabeled if self.options.accumulate == "step" else 0), backward)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return (2 if self.options.accumulate == "finish" else 1) * unlabeled

    def _keep(self, carry: Tree, images: Tensor | int) -> Tensor:
        """Return gamma to the number of epochs that so many images are."""
        epochs = images / carry["rows"].clamp_min(1).to(carry["appu"].dtype)
        return torch.full_like(epochs, self.options.gamma).pow(epochs)

    def _accumulated(self, carry: Tree, batch: Batch, used: Tensor) -> Tensor:
        """Return APP-U (classes,) after a step whose weak views have been looked at with the model in front of it."""
        p = sweep_logits(self.task, carry["params"], carry["stats"], batch.u["weak"], batch.u_real)
        p = p.softmax(-1)
        rows = padding.mask(torch.ones_like(used), batch.u_real) if self.options.accumulate_over == "all" else used
        weight, keep = rows[:, None], self._keep(carry, padding.count(p, batch.u_real))
        new = keep * carry["appu"] + (1 - keep) * (p * weight).sum(0) / weight.sum().clamp_min(1)
        return torch.where(weight.sum() > 0, new, carry["appu"])


def mixture(appu: Tensor, dma: DMA, steps: int = 100, lr: float = 1.0) -> Tensor:
    """Return DMA's weights (K,), float64, which sum to 1, for the clients' APP-U (K, classes).

    Starting from 1 / K, `steps` times:
    "paper" (Algorithm 2): a step down the norm of `distance`, then a softmax of the weights.
    "released": one on its mean of squares, with Nesterov momentum 0.9 from a fresh start, which makes a step of
    1.9 lr, and weight decay 0.9, then the softmax.
    "logits": a step on the norm in logits whose softmax the weights are.
    "uniform" is 1 / K.
    """
    appu = appu.double()
    weights = torch.full_like(appu[:, 0], 1 / len(appu))
    logits = torch.zeros_like(weights)
    if dma == "uniform":
        return weights
    for _ in range(steps):
        if dma == "paper":
            weights = (weights - lr * _slope(lambda w: distance(w, appu), weights)).softmax(0)
        elif dma == "released":
            slope = _slope(lambda w: distance(w, appu).square() / appu.shape[1], weights) + 0.9 * weights
            weights = (weights - 1.9 * lr * slope).softmax(0)
        else:
            logits = logits - lr * _slope(lambda z: distance(z.softmax(0), appu), logits)
            weights = logits.softmax(0)
    return weights


def _slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    return grad_and_value(lambda point: (function(point["at"]), ()), {"at": at})[0]["at"]


def distance(weights: Tensor, appu: Tensor) -> Tensor:
    """Return the Euclidean distance () of the weighted mean of APP-U (K, classes) from uniform (Eq. 16)."""
    return euclidean(weights @ appu - 1 / appu.shape[1])


ROWS = (
    MethodEntry("feddb", "FedDB", "FedDB, IJCAI 2024", "pseudo-labels and averages without each client's class bias",
                FedDB()),
)  # fmt: skip
