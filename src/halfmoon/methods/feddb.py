"""FedDB (IJCAI 2024): remove a client's class bias from its pseudo-labels, and balance the average of the clients.

A client's bias is its average prediction over all its unlabeled images, APP-U (Eq. 8). Debiased pseudo-labeling (DPL,
Eq. 14) divides every prediction by it before the threshold is applied. Debiased model averaging (DMA, Eq. 16 and
Algorithm 2) chooses the clients' weights so that the mean of their APP-U is close to the uniform distribution.

server: params, stats, and with `server_momentum` its momentum.  broadcast: params, stats.  memory: with
`keep_optimizer`, the optimizer's state; with adaptive thresholds, their state.  upload: params, stats, appu (`classes`
floats more than FedAvg), weight.

Where the authors' released code departs from the paper:
* Algorithm 2 takes the norm over classes (Eq. 16 sums over clients: a slip). The code minimizes a mean of squares
  without the root, rebuilds its optimizer in every iteration and has a weight decay of 0.9: `dma` = "released" does
  that, and the result is within about 2 % of uniform weights. "paper", Algorithm 2 as printed, takes a softmax of the
  *weights* in every iteration, which also makes them more equal. "logits" descends on logits instead, and is the only
  one that finds the minimum.
* The paper's APP-U of an epoch covers all unlabeled images, the code's only the confident ones: `accumulate_over`.
* The loss of pseudo-labels is divided by the number of all images in the paper (Eq. 5), of the confident ones in the
  code: `mean`, the code's by default. The values of gamma and `unlabeled_weight` are the code's, as the paper has none.
* The code adds a server momentum of 0.5 (`server_momentum`), a cosine schedule (the task's), and retains the clients'
  momentum between rounds (`keep_optimizer`). The paper does not mention these.
* The paper adds a client's labeled images to its unlabeled set (the code, by an index error, other images). The run
  decides this (`reuse_labeled`): by default the two sets are disjoint.
* Both use whole sets as batches, with one step an epoch. Here the run chooses the batch size; a minibatch of b of U
  images moves APP-U by its share of an epoch, gamma^(b / U), which is the paper's rule for whole sets.
* A client without a confident image trains on its labels only, in the same batches (the code: batches of 64).
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
from halfmoon.core.tensors import euclidean_norm
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, average_uploads, take_momentum_step
from halfmoon.methods.fedavg import LocalTraining
from halfmoon.methods.objectives import FixMatch
from halfmoon.methods.objectives.base import compute_mean_prediction, predict_all_rows
from halfmoon.methods.objectives.pseudo_labeling import Teacher, refuse_average_teacher
from halfmoon.methods.objectives.thresholding import Rule, unused_threshold_options

DMA = Literal["paper", "released", "logits", "uniform", "size"]
"""Weights of the clients in the average: from their APP-U in one of three ways, equal, or by their rows."""


@dataclass(frozen=True)
class FedDB(ModelAveraging):
    """FedDB, Algorithms 1 to 3.

    `threshold`, `unlabeled_weight`, `mean`, `labels`, `debias`, `teacher` and the thresholds are FixMatch's: the paper
    predicts once a round, with the received model, and applies the threshold to debiased predictions. Pseudo-labels
    always use the APP-U at the start of the round; the accumulated one is uploaded.

    Attributes:
        accumulate: whether APP-U follows the model while it trains, p <- gamma p + (1 - gamma) p_e for every epoch.
            "step": p_e from the weak views of each step (one more forward pass of the minibatch); "finish": from all
            rows after the last step; "none": it does not.
        accumulate_over: images in p_e; "used" includes only those whose pseudo-label is used (with "step").
        dma: weights of the clients in the average.
        dma_steps: iterations of Algorithm 2.
        dma_lr: their learning rate.

    Raises:
        UserError: `teacher` is "average".
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
        refuse_average_teacher("FedDB", self.objective)

    @property
    def unused_options(self) -> dict[str, str]:
        """List the options that have no effect beside the others, each with the reason (`registry.unused_options`)."""
        return unused_threshold_options(self.thresholding)

    @property
    def objective(self) -> FixMatch:
        """Build FedDB's client loss: FixMatch on predictions divided by the client's mean prediction (with `debias`).

        `mean` is whether the loss is averaged over "all" unlabeled images or over those whose pseudo-label is used.
        """
        return FixMatch(
            threshold=self.threshold,
            unlabeled_weight=self.unlabeled_weight,
            mean=self.mean,
            labels=self.labels,
            debias=self.debias,
            teacher=self.teacher,
            thresholding=self.thresholding,
            threshold_decay=self.threshold_decay,
        )

    def requirements(self, norm: str) -> Requirements:
        return Requirements(reason="the weights of its average are computed from each client's mean prediction")

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        return {"train": FedDBClient(task, self.objective, keep_optimizer=self.keep_optimizer, options=self)}

    def start(self, task: Task, model: Tree) -> Tree:
        return {**model, "momentum": tree.zeros_like(model["params"])} if self.server_momentum else model

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Train the cohort, and average its models with the weights of FedDB's debiased model averaging (DMA).

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the server's state: model, and momentum with `server_momentum`.
            federation: the clients of this round.

        Returns:
            The server's new state.
        """
        upload = federation.query("train", self.solution(task, server))
        if self.dma == "size":
            weights = upload.weight  # numbers of images, as in FedAvg
        else:
            # Algorithm 2 needs only the clients' mean predictions, no images.
            weights = compute_aggregation_weights(upload.aux["appu"], self.dma, self.dma_steps, self.dma_lr)
        # Clients without rows have no mean prediction, so their share goes to the others.
        new = average_uploads(upload._replace(weight=weights * (upload.weight > 0)), server)
        if not self.server_momentum:
            return new
        params, momentum = take_momentum_step(server["params"], new["params"], server["momentum"], self.server_momentum)
        return {"params": params, "stats": new["stats"], "momentum": momentum}


@dataclass(frozen=True)
class FedDBClient(LocalTraining):
    """The client of FedDB: FixMatch on debiased predictions, and an average prediction that follows the model."""

    options: FedDB = FedDB()

    @property
    def requirements(self) -> UpdateRequirements:
        requirements = super().requirements
        views = ("weak", "strong") if self.options.accumulate == "step" else requirements.views
        return replace(
            requirements, views=views, precomputed_views=("weak",), upload_spec=UploadSpec(aux={"appu": Aux()})
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        """Build the state of a client update: the received model, cached predictions, and the mean prediction APP-U."""
        logits = predict_all_rows(self.task, broadcast["params"], broadcast["stats"], data.views["weak"], data.u_real)
        # The same predictions serve the pseudo-labels of the round, the prior that debiases them, and the first APP-U.
        cached = self.options.objective.cache_predictions(broadcast, data, logits)
        objective_state = self.objective.begin(self.task, memory, data, cached)
        # "images" counts the unlabeled images of the steps so far, "rows" those of an epoch.
        appu = {"appu": cached["prior"], "images": torch.zeros_like(cached["prior"][0]), "rows": data.unlabeled}
        return {**ClientUpdate.begin(self, broadcast, memory, data), **objective_state, **appu, "cached": cached}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take one optimizer step of FedDB, and update the client's mean prediction (APP-U) by the model before it.

        Args:
            broadcast: the model that the server sent (unused: `carry` has it).
            carry: state of the client update: model, optimizer's state, APP-U and cached predictions.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The new carry, and the step's loss and pseudo-labels.
        """
        gradient, loss, result = grad_and_value(
            lambda params: self.objective(self.task, params, carry["stats"], batch, carry, carry["cached"]),
            carry["params"],
        )
        new = self.optimizer_step(carry, gradient, result.moments, consume=True, **result.aux)
        # The number of unlabeled images seen so far, from which `finish` computes the number of epochs.
        new["images"] = carry["images"] + padding.count(batch.u_rows, batch.u_real)
        if self.options.accumulate == "step":
            new["appu"] = self._update_appu(carry, batch, result.pseudo[0].weight)
        return new, StepMetrics(loss, samples={}, pseudo=result.pseudo)

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        """Return the upload (the trained model, and the client's mean prediction APP-U), and the state to store.

        With `accumulate` "finish", APP-U is updated here, from all unlabeled images of the client.

        Args:
            broadcast: the tree that the server sent.
            carry: state of the client update after its last step, with APP-U (classes,).
            data: the client's images and labels.
        """
        appu = carry["appu"]
        if self.options.accumulate == "finish":
            # One update for the whole local training: gamma to the power of all its epochs.
            decay = self._decay(carry, carry["images"])
            weak_views = data.views["weak"]
            logits = predict_all_rows(self.task, carry["params"], carry["stats"], weak_views, data.u_real)
            appu = decay * appu + (1 - decay) * compute_mean_prediction(logits, data.u_real)
        upload, memory = super().finish(broadcast, carry, data)
        return upload._replace(aux={"appu": appu}), memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        forward, backward = super().passes(labeled, unlabeled)
        return Passes(forward + (unlabeled if self.options.accumulate == "step" else 0), backward)

    def images_outside_steps(self, labeled: int, unlabeled: int) -> int:
        return (2 if self.options.accumulate == "finish" else 1) * unlabeled

    def _decay(self, carry: Tree, images: Tensor | int) -> Tensor:
        """Compute gamma to the power of the number of epochs that `images` images are."""
        # A minibatch is a fraction of an epoch, so gamma^fraction in each step is gamma after an epoch.
        epochs = images / carry["rows"].clamp_min(1).to(carry["appu"].dtype)
        return torch.full_like(epochs, self.options.gamma).pow(epochs)

    def _update_appu(self, carry: Tree, batch: Batch, used: Tensor) -> Tensor:
        """Update APP-U, a running mean (classes,) of the client's predictions, with the weak views of a minibatch.

        Args:
            carry: state of the client update, with the model before the step and APP-U.
            batch: the minibatch of b unlabeled images.
            used: weights of the pseudo-labels in the loss, (b,); with `accumulate_over` other than "all" they also
                weigh the predictions in the mean.

        Returns:
            gamma^e * APP-U + (1 - gamma^e) * mean prediction, where e is the minibatch's share of an epoch.
        """
        logits = predict_all_rows(self.task, carry["params"], carry["stats"], batch.u["weak"], batch.u_real)
        probabilities = logits.softmax(-1)
        if self.options.accumulate_over == "all":
            image_weights = padding.mask(torch.ones_like(used), batch.u_real)
        else:
            image_weights = used
        weights = image_weights[:, None]
        decay = self._decay(carry, padding.count(probabilities, batch.u_real))
        new = decay * carry["appu"] + (1 - decay) * (probabilities * weights).sum(0) / weights.sum().clamp_min(1)
        # Without a used image the mean of no images would pull APP-U towards 0.
        return torch.where(weights.sum() > 0, new, carry["appu"])


RELEASED_WEIGHT_DECAY = 0.9
"""Weight decay of Algorithm 2 in the released code."""

RELEASED_NESTEROV_FACTOR = 1.9
"""Factor of the gradient in the first step of Nesterov momentum 0.9: 1 + 0.9."""


def compute_aggregation_weights(appu: Tensor, dma: DMA, steps: int = 100, lr: float = 1.0) -> Tensor:
    """Compute the clients' weights in FedDB's debiased model averaging, DMA (IJCAI 2024, Algorithm 2).

    The weights minimize the distance of the weighted mean of the clients' average predictions (APP-U) from the uniform
    distribution. They start equal, and change in `steps` gradient descent steps:

    - "paper": a gradient step on `distance_from_uniform`, then a softmax of the weights.
    - "released": a gradient step on its mean of squares, with Nesterov momentum 0.9 and a new optimizer in every
      step, which results in a step of 1.9 lr, and weight decay 0.9; then the softmax.
    - "logits": a gradient step on logits, whose softmax the weights are.
    - "uniform": no step.

    Args:
        appu: average predictions of K clients, (K, classes).
        dma: variant of the algorithm.
        steps: number of gradient steps.
        lr: learning rate.

    Returns:
        Weights (K,) float64, which sum to 1.
    """
    # float64: rounding errors would grow over the many steps.
    appu = appu.double()
    clients, classes = appu.shape
    weights = torch.full_like(appu[:, 0], 1 / clients)
    logits = torch.zeros_like(weights)
    if dma == "uniform":
        return weights
    for _ in range(steps):
        if dma == "paper":
            # As printed: the softmax is applied to weights that are already a softmax, in every step.
            gradient = _gradient(lambda w: distance_from_uniform(w, appu), weights)
            weights = (weights - lr * gradient).softmax(0)
        elif dma == "released":
            # The released loss is the mean over classes of squared differences. Nesterov momentum in its first step
            # multiplies the gradient by 1 + 0.9.
            gradient = _gradient(lambda w: distance_from_uniform(w, appu).square() / classes, weights)
            with_decay = gradient + RELEASED_WEIGHT_DECAY * weights
            weights = (weights - RELEASED_NESTEROV_FACTOR * lr * with_decay).softmax(0)
        else:
            gradient = _gradient(lambda z: distance_from_uniform(z.softmax(0), appu), logits)
            logits = logits - lr * gradient
            weights = logits.softmax(0)
    return weights


def _gradient(function: Callable[[Tensor], Tensor], point: Tensor) -> Tensor:
    """Compute the gradient of a scalar function of one tensor."""
    gradient, _, _ = grad_and_value(lambda params: (function(params["point"]), ()), {"point": point})
    return gradient["point"]


def distance_from_uniform(weights: Tensor, appu: Tensor) -> Tensor:
    """Compute the Euclidean distance () of the weighted mean of APP-U (K, classes) from uniform (Eq. 16)."""
    return euclidean_norm(weights @ appu - 1 / appu.shape[1])


ROWS = (
    MethodEntry("feddb", "FedDB", "FedDB, IJCAI 2024", "pseudo-labels and averages without each client's class bias",
                FedDB()),
)  # fmt: skip
