"""Losses that need no label, of two views of each unlabeled image: SimCLR, BYOL with FedEMA's clients, and SimSiam."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.requirements import ANYWHERE, Requirements
from halfmoon.api.types import Batch, Local, Needs, Passes, Task
from halfmoon.core import rng, tree
from halfmoon.core.errors import UserError
from halfmoon.core.padding import concat, mean
from halfmoon.core.tree import Tree
from halfmoon.methods.objectives.base import NOTHING, FedAvgRow, Objective, StepResult, embedded, supervised
from halfmoon.models.network import affine, linear
from halfmoon.models.passes import Batched

PROJECTOR, PREDICTOR = "projector", "predictor"


@dataclass(frozen=True)
class SelfSupervised(Objective):
    """What the three losses share: two draws of one `view`, and a projector on what the network's head is given.

    The projector, and the predictor of BYOL and SimSiam, have one layer of `hidden` features with batch normalization,
    and give `projected` numbers. They travel and are averaged with the network, and are no part of the solution. The
    network's own head learns nothing: it stays as it was drawn, for the next run.

    Departures: these heads normalize both views together, as over two images of one view hidden features would be 1 and
    -1; SimSiam's projector has three layers, and normalizes what it gives. Views are the run's, without resized crops.
    Raises `UserError` for a network that does not end in a linear layer.
    """

    requirements: ClassVar[Requirements] = Requirements("sum", "", ANYWHERE, labeled=False)
    heads: ClassVar[tuple[str, ...]] = (PROJECTOR, PREDICTOR)
    view: Literal["strong", "weak"] = "strong"
    hidden: int = 128
    projected: int = 64

    @property
    def needs(self) -> Needs:
        return Needs((self.view, f"{self.view}2"), masks=True)

    def start(self, task: Task, model: Tree) -> Tree:
        like = head_weight(task, model["params"])
        g, inputs, projectors = rng.generator(0, "self-supervised"), like.shape[1], dict[str, Any]()
        for name in self.heads:
            projectors[name] = mlp(g, inputs, self.hidden, self.projected)
            inputs = self.projected
        params = {**model["params"], **tree.to(projectors, like.device, like.dtype)}
        return super().start(task, {**model, "params": params})

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        return Passes(2 * unlabeled, 2 * unlabeled)

    def projections(self, task: Task, params: Tree, batch: Batch) -> tuple[Tensor, list[Tree]]:
        """Return the projections (2 b, projected) of both views, and the moments of the passes."""
        features, moments = both_features(task, params, self.needs.views, batch)
        return through(params[PROJECTOR], features, batch), moments


@dataclass(frozen=True)
class SimCLR(SelfSupervised):
    """mean_i -log(exp(s(z_i, z_j) / temperature) / sum_{k != i} exp(s(z_i, z_k) / temperature)), NT-Xent.

    z are the projections of all views of a step, j is the other view of i's image, s the cosine (Chen et al. 2020, Eq.
    1). A client compares its own images alone: a step has as many negatives as its batch, where the paper's has
    thousands.
    """

    heads: ClassVar[tuple[str, ...]] = (PROJECTOR,)
    temperature: float = 0.5

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        projections, moments = self.projections(task, params, batch)
        loss = info_nce(projections, self.temperature, both(batch))
        return loss, StepResult(moments, ())


@dataclass(frozen=True)
class SimSiam(SelfSupervised):
    """-(s(p_1, z_2) + s(p_2, z_1)) / 2, mean over images; p = predictor(z), and z is no path of the gradient.

    s is the cosine, z_1 and z_2 are the projections of an image's views (Chen and He 2021, Eq. 1 to 4).
    """

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        projections, moments = self.projections(task, params, batch)
        alike = agreement(through(params[PREDICTOR], projections, batch), projections, batch)
        return -alike / 2, StepResult(moments, ())


@dataclass(frozen=True)
class BYOL(SelfSupervised):
    """4 - 2 s(p_1, t_2) - 2 s(p_2, t_1), mean over images: a predictor of what a slow target network says.

    s is the cosine, t the target's projection of the other view (Grill et al. 2020, Eq. 2). After each step the target
    keeps `target_decay` of itself and takes the rest of the network. Clients follow FedEMA (Zhuang et al., ICLR 2022):
    a client takes mu W_k + (1 - mu) W_g in place of the received W_g, its own W_k being that of its last round, with
    mu = min(lambda_k ||W_g - W_k||, 1) and lambda_k = `autoscale` / ||W_g - W_k|| of the first time; `autoscale` 0
    always takes W_g. The norm is that of network and projector; the predictor is mixed with the same mu.

    Departures: a client sets its lambda_k by the model that it receives when it is asked again, where the paper's
    server does so at the end of its first round; these are the same where all clients train in every round. A client
    keeps its target, as it keeps W_k. The statistics of batches are the received ones.
    """

    target_decay: float = 0.99
    autoscale: float = 0.7

    def prepare(self, task: Task, down: Tree, data: Local) -> Tree:
        return {"received": down["params"]}

    def remember(self, task: Task, down: Tree) -> Tree:
        scale = next(tree.leaves(down["params"])).new_zeros(())
        return {"params": down["params"], "target": down["params"], "scale": scale}

    def begin(self, task: Task, memory: Tree, data: Local, cached: Tree) -> Tree:
        own, received = memory["params"], cached["received"]
        far = divergence(own, received)
        scale = torch.where((memory["scale"] == 0) & (far > 0), self.autoscale / far, memory["scale"])
        mu = (scale * far).clamp_max(1)
        mixed = tree.map(lambda there, here: torch.lerp(there, here, mu), received, own)
        return {"params": mixed, "target": memory["target"], "scale": scale}

    def after(self, carry: Tree, params: Tree) -> Tree:
        target = tree.map(partial(torch.lerp, weight=1 - self.target_decay), carry["target"], params)
        return {**super().after(carry, params), "target": target}

    def __call__(
        self, task: Task, params: Tree, stats: Tree, batch: Batch, aux: Tree = NOTHING, cached: Tree = NOTHING
    ) -> tuple[Tensor, StepResult]:
        projections, moments = self.projections(task, params, batch)
        with torch.no_grad():
            targets, _ = self.projections(task, aux["target"], batch)
        alike = agreement(through(params[PREDICTOR], projections, batch), targets, batch)
        return 4 - 2 * alike, StepResult(moments, ())

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        return Passes(4 * unlabeled, 2 * unlabeled)


def head_weight(task: Task, params: Tree) -> Tensor:
    """Return the weight (classes, F) of the layer that projectors stand beside; raises `UserError` if there is none."""
    if task.network.head is None:
        raise UserError("a projector needs a network that ends in a linear layer, on whose input it stands.")
    return tree.flatten(params)[f"{task.network.head}/weight"]


def mlp(generator: torch.Generator, inputs: int, hidden: int, outputs: int) -> dict[str, Any]:
    """Return the parameters of a projector or predictor, which `through` runs."""
    first, last = linear(generator, inputs, hidden), linear(generator, hidden, outputs)
    return {"first": {"weight": first["weight"], "norm": affine(hidden)}, "last": last}


def network_params(params: Tree) -> Tree:
    """Return the parameters of the network, without those of a projector and a predictor, which no module has."""
    return {name: part for name, part in params.items() if name not in (PROJECTOR, PREDICTOR)}


def both_features(task: Task, params: Tree, views: Sequence[str], batch: Batch) -> tuple[Tensor, list[Tree]]:
    """Return what the head is given (2 b, F) of two views of the unlabeled images, and the moments of the passes."""
    images = [batch.u[name] for name in views]
    _, features, moments = embedded(task, network_params(params), images, batch.masks(2)[1:])
    return torch.cat(features), moments


def through(head: Tree, z: Tensor, batch: Batch) -> Tensor:
    """Return what a projector or predictor makes of both views' rows z (2 b, F): linear, batch norm, ReLU, linear."""
    run = Batched(head, "batch", real=both(batch))
    hidden = run.norm("first", run.linear("first", z)[:, :, None, None])
    return run.linear("last", run.relu(hidden).flatten(1))


def both(batch: Batch) -> Tensor | None:
    """Return the mask (2 b,) of both views' rows, None where no row is padding."""
    return concat(batch.masks(2)[1:])


def agreement(predicted: Tensor, projected: Tensor, batch: Batch) -> Tensor:
    """Return s(p_1, z_2) + s(p_2, z_1), mean over images, of the rows (2 b, projected) of both views."""
    other = projected.detach().roll(len(projected) // 2, 0)
    return 2 * mean(F.cosine_similarity(predicted, other, dim=-1), both(batch))


def divergence(own: Tree, received: Tree) -> Tensor:
    """Return the Euclidean distance () of two networks with their projectors."""
    parts = ({name: part for name, part in each.items() if name != PREDICTOR} for each in (own, received))
    return tree.squared_norm(tree.map(torch.sub, *parts)).sqrt()


def info_nce(z: Tensor, temperature: float, real: Tensor | None = None) -> Tensor:
    """Return SimCLR's loss () of (`real`) projections z (2 N, P), of which i and i + N are two views of one image."""
    z = F.normalize(z, dim=-1)
    same = torch.eye(len(z), dtype=torch.bool, device=z.device)
    if real is not None:
        same = same | (real[:, None] & ~real)  # a padding row keeps its partner: it counts nothing, but is finite
    alike = torch.where(same, -torch.inf, z @ z.T / temperature)
    partner = torch.arange(len(z), device=z.device).roll(len(z) // 2)
    return supervised(alike, partner, real)


STARTS = (
    FedAvgRow("simclr", "SimCLR", "McMahan et al. 2017; Chen et al. 2020",
              "the views of an image find each other among all views of the step", SimCLR()),
    FedAvgRow("byol", "BYOL with FedEMA", "Grill et al. 2020; FedEMA, ICLR 2022",
              "each view predicts what a slow network says of the other one", BYOL()),
    FedAvgRow("simsiam", "SimSiam", "McMahan et al. 2017; Chen and He 2021",
              "each view predicts what the network itself says of the other one", SimSiam()),
)  # fmt: skip
"""Rows that do not stand in `ROWS`: they train a network for other methods to start from, and no classifier."""
