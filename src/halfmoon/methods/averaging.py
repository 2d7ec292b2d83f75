"""The server half of FedAvg, and what servers of other methods do with uploads."""

import torch

from halfmoon.api.requirements import SUM, Requirements
from halfmoon.api.types import Federation, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.tree import Tree


class ModelAveraging:
    """The server half of FedAvg: its tree is the model, and a round is the weighted mean of what clients send."""

    needed = SUM

    def requirements(self, norm: str) -> Requirements:
        return self.needed

    def start(self, task: Task, model: Tree) -> Tree:
        return model

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        return federation.average("train", model_of(server)).update

    def solution(self, task: Task, server: Tree) -> Tree:
        return model_of(server)


def model_of(tree: Tree) -> Tree:
    """Return {"params", "stats"} of what holds them and more; stats, {} without batch normalization, may be missing."""
    return {"params": tree["params"], "stats": tree.get("stats", {})}


def average(upload: Upload, server: Tree | None = None) -> Tree:
    """Return the parts of the update (leaves (K, ...)), averaged with the weights (K,).

    Batch-normalization statistics are averaged like parameters (McMahan et al. 2017, Algorithm 1; FedDure's
    aggregation_content "all"). Where all weights are zero, nobody had anything to learn from: what `server` holds
    of the same names stays.
    """
    if server is not None and not bool(upload.weight.sum() > 0):
        return {name: server[name] for name in upload.update}
    return tree.weighted_mean(upload.update, upload.weight)


def momentum_step(params: Tree, mean: Tree, momentum: Tree, keep: float) -> tuple[Tree, Tree]:
    """Return (params, momentum) after the server's step to `mean`: v <- keep v + params - mean, params <- params - v.

    SGD with a learning rate of 1 and a momentum of `keep` on the round's change (FedAvgM, Hsu et al. 2019; SemiFL's
    global momentum); with `keep` 0 the result is the mean.
    """
    momentum = tree.map(lambda v, old, new: keep * v + (old - new), momentum, params, mean)
    return tree.map(torch.sub, params, momentum), momentum


def combine(params: Tree, mean: Upload, momentum: Tree, keep: float, share: float = 0.0) -> tuple[Tree, Tree]:
    """Return (params, momentum) after a step with momentum to share * params + (1 - share) * the uploads' `mean`.

    Where nobody trained (it weighs nothing) both stay.
    """
    if not bool(mean.weight > 0):
        return params, momentum
    new = mean.update["params"]
    target = tree.map(lambda new, old: torch.lerp(new, old, share), new, params) if share else new
    return momentum_step(params, target, momentum, keep)
