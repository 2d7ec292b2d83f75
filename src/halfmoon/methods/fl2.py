"""(FL)^2 (Lee et al., NeurIPS 2024): SemiFL for very few labels, by three changes, each of which has its switch.

As in `semifl`, clients label all their rows once with the received model under static batch normalization, and the
server fine-tunes the average on its labels; nothing is mixed. With p the predictions on a client's rows,

- `adaptive`: rows are kept where max p >= t q(label) / max q, t the mean of max p and q that of p over the client's
  rows, in place of max p >= threshold (client-specific adaptive thresholding);
- `sharpness`: the step leads down CE(f(strong), label) + sharpness_weight KL(f(strong) || f'(strong)), the second term
  over rows with max p >= threshold alone; f' are weights from which the same rows' CE rises fastest, by ASAM (Kwon et
  al. 2021): w + rho T^2 g / |T g| with T = |w| + eta for weights and 1 for biases. Its slope is taken at f', f is held
  fixed (sharpness-aware consistency regularization);
- `status_aware`: a client weighs 1 - t in the average, so that those which have learned less count for more.

server: params, stats, momentum.  broadcast: params, stats.  memory: the optimizer's state, at clients and server.
upload: params, weight (1 - t, or 1; 0 if a client used no pseudo-label). For the statistics the model is sent once
more, to all clients whose rows are counted (`batchnorm_stats`).

Departures: the step count is the batch rule's, and clipping and schedule are the run's (the authors' code clips at 1
and never takes a step of its cosine). Before the first round the server trains `warmup` times as long as in a round,
theirs 10. With labels at the clients the first term takes in their labeled images, as in `semifl`; a client with labels
that is sure of nothing learns from them alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

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


@dataclass(frozen=True)
class FL2(ModelAveraging):
    """(FL)^2 with the settings of the authors' code; `rho` is 0.1 (1.0 on CIFAR-100).

    `adaptive`, `sharpness` and `status_aware` are its three parts. `sbn`: whose rows the statistics are counted over.
    Raises `UserError` for a `warmup` below 0.
    """

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
        own_labels = LocalTraining(task, Supervised(), keep_optimizer=self.keep_optimizer)
        return {"train": SharpnessAware(task, self), "fine-tune": own_labels, "census": BatchNormStatistics(task)}

    def start(self, task: Task, model: Tree) -> Tree:
        return {**model, "momentum": tree.zeros_like(model["params"])}

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        model = {"params": server["params"], "stats": server.get("stats", {})}
        if task.round == 0:
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
class SharpnessAware(RoundLabelingClient):
    """The client of (FL)^2."""

    options: FL2 = FL2()

    @property
    def requirements(self) -> UpdateRequirements:
        keep, upload_spec = self.options.keep_optimizer, UploadSpec(("params",), (), "one")
        return UpdateRequirements(
            ("strong",), precomputed_views=("weak",), masks_padding=True, keep_optimizer=keep, upload_spec=upload_spec
        )

    def begin(self, broadcast: Tree, memory: Tree, data: ClientData) -> Tree:
        p = predict_with_running_stats(self.task, broadcast["params"], broadcast["stats"], data.views["weak"]).softmax(
            -1
        )
        rule = Threshold("fl2" if self.options.adaptive else "fixed", self.options.threshold)
        pseudo = rule.pseudo_label_all(p, {}, data.u_real)
        status = padding.mean_or_zero(p.amax(-1), data.u_real)
        return {**super().begin(broadcast, memory, data), "status": status, "real": data.real, **pseudo._asdict()}

    def step(self, broadcast: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        o, rows, params = self.options, batch.u_rows, carry["params"]
        label, confidence, used = (carry[name][rows] for name in ("label", "confidence", "weight"))
        used, real = padding.mask(used, batch.u_real), batch.masks(1)
        hard = padding.mask((confidence >= o.threshold).to(used.dtype), batch.u_real)
        network, joint = self.task.network, self.task.statistics == "joint"

        def outputs(params: Tree) -> tuple[tuple[Tensor, Tensor], tuple[Any, ...]]:
            (labeled, strong), _, _ = forward(network, params, joint, (batch.x, batch.u["strong"]), real=real)
            return (labeled, strong), ()

        def taught(z: Tree) -> tuple[Tensor, tuple[Any, ...]]:
            mean = (cross_entropy_per_image(z["strong"], label) * used).sum() / used.sum().clamp_min(1)
            return labeled_cross_entropy(z["labeled"], batch.y, batch.x_real) + o.unlabeled_weight * mean, ()

        (labeled, strong), pull, _ = vjp(outputs, params)
        cotangent, loss, _ = grad_and_value(taught, {"labeled": labeled, "strong": strong})
        gradient = pull((cotangent["labeled"], cotangent["strong"]), o.sharpness)
        samples = {
            "kept": weighted_metric((carry["weight"] > 0).to(loss.dtype), carry["real"].get("u")),
            "status": weighted_metric(carry["status"]),
        }
        if o.sharpness:

            def steep(z: Tree) -> tuple[Tensor, tuple[Any, ...]]:
                return padding.mean(cross_entropy_per_image(z["z"], label) * hard, batch.u_real), ()

            risen, _, _ = grad_and_value(steep, {"z": strong})
            uphill = pull((torch.zeros_like(labeled), risen["z"]), False)
            near = tree.map(torch.add, params, ascent(params, uphill, o.rho, o.eta))

            def apart(params: Tree) -> tuple[Tensor, tuple[Any, ...]]:
                here = network.train(params, batch.u["strong"], real=batch.u_real)[0]
                return padding.mean(divergence(strong, here) * hard, batch.u_real), ()

            flatter, distance_from_uniform, _ = grad_and_value(apart, near)
            gradient = tree.map(lambda g, h: torch.add(g, h, alpha=o.sharpness_weight), gradient, flatter)
            loss = loss + o.sharpness_weight * distance_from_uniform
            samples["sharpness"] = weighted_metric(distance_from_uniform)
        return self.advance(carry, gradient), StepMetrics(loss, samples, (PseudoLabels(label, confidence, used),))

    def finish(self, broadcast: Tree, carry: Tree, data: ClientData) -> tuple[Upload, Tree]:
        mask = self.drawable_rows(carry, data)
        trained = torch.ones_like(carry["status"]) if mask is None else mask.any() & (data.unlabeled > 0)
        status = carry["status"] if self.options.status_aware else torch.zeros_like(carry["status"])
        _, memory = super().finish(broadcast, carry, data)
        return Upload({"params": carry["params"]}, ((1 - status).clamp_min(1e-6) * trained).double()), memory

    def passes(self, labeled: int, unlabeled: int) -> Passes:
        taught = labeled + unlabeled
        if not self.options.sharpness:
            return Passes(taught, taught)
        return Passes(taught + unlabeled, 2 * taught + unlabeled)


def ascent(params: Tree, gradient: Tree, rho: float, eta: float) -> Tree:
    """Return ASAM's step up: rho T^2 g / |T g|, T = |w| + eta for leaves called "weight" and 1 for others."""
    size = _sizes(params, eta)
    scaled = tree.map(torch.mul, size, gradient)
    length = tree.squared_norm(scaled).sqrt() + 1e-16
    return tree.map(lambda t, g: t * g * (rho / length), size, scaled)


def _sizes(params: Tree, eta: float) -> Tree:
    sizes: Tree = {}
    for name, part in params.items():
        if isinstance(part, dict):
            sizes[name] = _sizes(cast(Tree, part), eta)
        else:
            sizes[name] = part.abs() + eta if name == "weight" else torch.ones_like(part)
    return sizes


ROWS = (MethodEntry("fl2", "(FL)^2", "(FL)^2, NeurIPS 2024", "SemiFL for very few labels, by three changes", FL2()),)
