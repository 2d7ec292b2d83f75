"""(FL)^2 (Lee et al., NeurIPS 2024): SemiFL for very few labels, by three changes, each of which can be switched off.

As in `semifl`, clients label all their rows once with the received model under static batch normalization, and the
server fine-tunes the average on its labels. There is no mixing. With p the predictions on a client's rows,

- `adaptive`: rows with max p >= t q(label) / max q are used, with t the mean of max p and q the mean of p over the
  client's rows, instead of rows with max p >= threshold (client-specific adaptive thresholding);
- `sharpness`: the loss is CE(f(strong), label) + sharpness_weight KL(f(strong) || f'(strong)), the second term over
  rows with max p >= threshold only. f' is the network at weights that increase the CE of the same rows, by ASAM (Kwon
  et al. 2021): w + rho T^2 g / |T g| with T = |w| + eta for weights and 1 for biases. The second term's gradient is
  computed at f' with f constant (sharpness-aware consistency regularization);
- `status_aware`: a client has the weight 1 - t in the average, so that clients that have learned less count more.

server: params, stats, momentum.  broadcast: params, stats.  memory: the optimizer's state, at clients and server.
upload: params, weight (1 - t, or 1; 0 if a client used no pseudo-label). For the statistics the model is sent once
more, to all clients whose rows are counted (`batchnorm_stats`).

Departures: the batch rule sets the number of steps, and the run sets clipping and schedule (the authors' code clips at
1 and never advances its cosine schedule). Before the first round the server trains `warmup` times as long as in a round
(the authors' code: 10). With labels at the clients the first term includes their labeled images, as in `semifl`; a
client with labels and without a confident row learns from its labels only.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

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
    PseudoLabels,
    StepMetrics,
    Task,
    UpdateRequirements,
    weighted_metric,
)
from halfmoon.api.uploads import Upload, UploadSpec
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import grad_and_value, vjp
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import ModelAveraging, step_towards_mean
from halfmoon.methods.batchnorm_stats import BatchNormStatistics, Over, estimate_statistics, statistics_requirements
from halfmoon.methods.fedavg import LocalTraining
from halfmoon.methods.mutual import divergence
from halfmoon.methods.objectives import Supervised
from halfmoon.methods.objectives.base import (
    RoundLabelingClient,
    cross_entropy_per_image,
    labeled_cross_entropy,
    predict_with_running_stats,
)
from halfmoon.methods.objectives.thresholding import Threshold
from halfmoon.models import forward

MIN_WEIGHT = 1e-6
"""Smallest weight of a client that has trained."""


@dataclass(frozen=True)
class FL2(ModelAveraging):
    """(FL)^2 with the settings of the authors' code.

    Attributes:
        adaptive: use client-specific adaptive thresholds instead of `threshold`.
        sharpness: use sharpness-aware consistency regularization.
        status_aware: weight clients by 1 - their mean confidence.
        threshold: confidence from which rows count in the sharpness term (and, without `adaptive`, at all).
        rho: size of ASAM's step (the authors: 0.1, and 1.0 on CIFAR-100).
        eta: added to the size of weights in ASAM.
        unlabeled_weight: weight of the cross-entropy on pseudo-labels.
        sharpness_weight: weight of the sharpness term.
        warmup: number of times that the server trains before the first round.
        server_momentum: momentum of the server's step towards the average.
        sbn: rows that the batch-normalization statistics are estimated on.
        keep_optimizer: whether clients and server keep the optimizer's state between rounds.

    Raises:
        UserError: for a negative `warmup`.
    """

    uses_class_weights: ClassVar[bool] = True

    adaptive: bool = True
    sharpness: bool = True
    status_aware: bool = True
    threshold: float = 0.95
    rho: float = 0.1
    eta: float = 0.01
    unlabeled_weight: float = 1.0
    sharpness_weight: float = 1.0
    warmup: int = 10
    server_momentum: float = 0.5
    sbn: Over = "all"
    keep_optimizer: bool = True

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise UserError(f"warmup is {self.warmup}: give how often the server trains before the first round, or 0.")

    def requirements(self, norm: str) -> Requirements:
        return statistics_requirements(norm, self.sbn)

    def client_updates(self, task: Task) -> Mapping[str, ClientUpdate]:
        supervised = LocalTraining(task, Supervised(), keep_optimizer=self.keep_optimizer)
        return {"train": FL2Client(task, self), "fine-tune": supervised, "census": BatchNormStatistics(task)}

    def start(self, task: Task, model: Tree) -> Tree:
        return {**model, "momentum": tree.zeros_like(model["params"])}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        """Run a round of (FL)^2: clients train, the server steps to their average, then trains on its labels.

        "train" and "fine-tune" name client updates. Static batch normalization: training leaves the running statistics
        as they are, and those of the new model are then estimated on the images of the clients that `sbn` selects.

        Args:
            task: settings that all methods share: network, optimizer, rules for batch statistics.
            server: the server's state: model and momentum.
            federation: the clients of this round.

        Returns:
            The server's new state, with newly estimated batch-normalization statistics.
        """
        model = {"params": server["params"], "stats": server.get("stats", {})}
        if task.round == 0:
            # Without this warm-up the first pseudo-labels would be those of a random network.
            for _ in range(self.warmup if federation.labeled else 0):
                model["params"] = federation.query_server("fine-tune", model).update["params"]
            model["stats"] = estimate_statistics(federation, model, self.sbn)
        mean = federation.average("train", model)
        params, momentum = step_towards_mean(model["params"], mean, server["momentum"], self.server_momentum)
        if federation.labeled:
            params = federation.query_server("fine-tune", {**model, "params": params}).update["params"]
        new = {"params": params, "stats": model["stats"], "momentum": momentum}
        return {**new, "stats": estimate_statistics(federation, new, self.sbn)}


@dataclass(frozen=True)
class FL2Client(RoundLabelingClient):
    """The client of (FL)^2: it labels its rows, then trains with sharpness-aware consistency."""

    options: FL2 = FL2()

    @property
    def requirements(self) -> UpdateRequirements:
        return UpdateRequirements(
            views=("strong",),
            precomputed_views=("weak",),
            masks_padding=True,
            keep_optimizer=self.options.keep_optimizer,
            upload_spec=UploadSpec(update=("params",), statistics=(), weight="one"),
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        """Build the state of a client update of (FL)^2, with the pseudo-labels of all images by the received model.

        Args:
            broadcast: the server's model, "params" and "stats".
            memory: the state that the client stored after its last update.
            data: the client's images.
        """
        weak_views = data.views["weak"]
        logits = predict_with_running_stats(self.task, broadcast["params"], broadcast["stats"], weak_views)
        probabilities = logits.softmax(-1)
        rule = Threshold("fl2" if self.options.adaptive else "fixed", self.options.threshold)
        pseudo = rule.pseudo_label_all(probabilities, {}, data.u_real)
        # The learning status t: the mean confidence on the client's images. `finish` weighs the upload by 1 - t.
        status = padding.mean_or_zero(probabilities.amax(-1), data.u_real)
        return {**super().begin(broadcast, memory, data), "status": status, "real": data.real, **pseudo._asdict()}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Take a step of (FL)^2: on the cross-entropy and, with `sharpness`, the divergence from a perturbed network.

        The perturbed network has parameters that ASAM moved uphill (`compute_asam_step`): a flat minimum, in which its
        predictions hardly change, generalizes better.

        Args:
            broadcast: the model that the server sent (unused: `carry` has it).
            carry: state of the client update, with the pseudo-labels of all images; "weight" is 1 for those to use.
            batch: labeled images x, labels y, views u of unlabeled images; x_real and u_real mask padding.

        Returns:
            The new carry, and the step's loss, metrics and pseudo-labels.
        """
        options = self.options
        params = carry["params"]
        label = carry["label"][batch.u_rows]
        confidence = carry["confidence"][batch.u_rows]
        used = padding.mask(carry["weight"][batch.u_rows], batch.u_real)
        confident = padding.mask((confidence >= options.threshold).to(used.dtype), batch.u_real)
        real = batch.masks(views=1)
        network = self.task.network
        joint = self.task.statistics == "joint"

        def outputs(params: Tree) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
            (labeled, strong), _, _ = forward(network, params, joint, (batch.x, batch.u["strong"]), real=real)
            return (labeled, strong), ()

        def training_loss(logits: Tree) -> tuple[Tensor, tuple[Any, ...]]:
            mean = (cross_entropy_per_image(logits["strong"], label) * used).sum() / used.sum().clamp_min(1)
            labeled_loss = labeled_cross_entropy(logits["labeled"], batch.y, batch.x_real, self.task.class_weights)
            return labeled_loss + options.unlabeled_weight * mean, ()

        # Two losses are differentiated through the same forward pass: this one and ASAM's. So the network is run once,
        # and `backward` back-propagates the gradients of both losses in the logits.
        (labeled, strong), backward, _ = vjp(outputs, params)
        logit_gradient, loss, _ = grad_and_value(training_loss, {"labeled": labeled, "strong": strong})
        # True keeps the recorded pass for the second call.
        gradient = backward((logit_gradient["labeled"], logit_gradient["strong"]), options.sharpness)
        samples = {
            "kept": weighted_metric((carry["weight"] > 0).to(loss.dtype), carry["real"].get("u")),
            "status": weighted_metric(carry["status"]),
        }
        if options.sharpness:

            def confident_loss(logits: Tree) -> tuple[Tensor, tuple[Any, ...]]:
                return padding.mean(cross_entropy_per_image(logits["strong"], label) * confident, batch.u_real), ()

            confident_gradient, _, _ = grad_and_value(confident_loss, {"strong": strong})
            uphill = backward((torch.zeros_like(labeled), confident_gradient["strong"]), False)
            perturbed = tree.map(torch.add, params, compute_asam_step(params, uphill, options.rho, options.eta))

            def sharpness_loss(params: Tree) -> tuple[Tensor, tuple[Any, ...]]:
                logits = network.train(params, batch.u["strong"], real=batch.u_real)[0]
                return padding.mean(divergence(strong, logits) * confident, batch.u_real), ()

            # As in SAM, the gradient at the perturbed parameters is applied to the original ones.
            sharpness_gradient, sharpness, _ = grad_and_value(sharpness_loss, perturbed)
            gradient = tree.map(
                lambda g, h: torch.add(g, h, alpha=options.sharpness_weight), gradient, sharpness_gradient
            )
            loss = loss + options.sharpness_weight * sharpness
            samples["sharpness"] = weighted_metric(sharpness)
        pseudo = PseudoLabels(label, confidence, used)
        return self.optimizer_step(carry, gradient), StepMetrics(loss, samples=samples, pseudo=(pseudo,))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        """Upload (FL)^2's parameters with the weight 1 - mean confidence, so that clients that learned less count more.

        Args:
            broadcast: the tree that the server sent.
            carry: state of the client update after its last step; "status" is the mean confidence on all images, which is
                low for a client that learned less. Without `status_aware` all have the weight 1.
            data: the client's images and labels.
        """
        # The unlabeled images that steps could draw, (U,) bool: those whose confidence passes the threshold; None: all.
        drawable = self.drawable_rows(carry, data)
        has_trained = torch.ones_like(carry["status"])
        if drawable is not None:
            has_trained = drawable.any() & (data.unlabeled > 0)
        status = carry["status"] if self.options.status_aware else torch.zeros_like(carry["status"])
        _, memory = super().finish(broadcast, carry, data)
        # At a mean confidence of 1 the weight would be 0, and a cohort of such clients would have no average.
        weight = (1 - status).clamp_min(MIN_WEIGHT) * has_trained
        return Upload({"params": carry["params"]}, weight=weight.double()), memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        trained = labeled + unlabeled
        if not self.options.sharpness:
            return Passes(trained, trained)
        # A second backward pass of the same forward pass, and both passes of the perturbed network.
        return Passes(trained + unlabeled, 2 * trained + unlabeled)


def compute_asam_step(params: Tree, gradient: Tree, rho: float, eta: float) -> Tree:
    """Compute ASAM's step that increases the loss: rho T^2 g / |T g| (Kwon et al. 2021, Adaptive SAM).

    Args:
        params: the parameters w.
        gradient: the gradient g, a tree like `params`.
        rho: size of the step.
        eta: T is |w| + eta for leaves named "weight", and 1 for others.

    Returns:
        The change of the parameters, a tree like `params`.
    """
    scale = _asam_scale(params, eta)
    scaled_gradient = tree.map(torch.mul, scale, gradient)
    # The small constant keeps a gradient of 0 a step of 0.
    length = tree.squared_norm(scaled_gradient).sqrt() + 1e-16
    return tree.map(lambda t, g: t * g * (rho / length), scale, scaled_gradient)


def _asam_scale(params: Tree, eta: float) -> Tree:
    """Compute ASAM's scale T of each parameter: |w| + eta for leaves named "weight", 1 for others."""
    scale: Tree = {}
    for name, node in params.items():
        if isinstance(node, dict):
            scale[name] = _asam_scale(cast(Tree, node), eta)
        else:
            scale[name] = node.abs() + eta if name == "weight" else torch.ones_like(node)
    return scale


ROWS = (MethodEntry("fl2", "(FL)^2", "(FL)^2, NeurIPS 2024", "SemiFL for very few labels, by three changes", FL2()),)
