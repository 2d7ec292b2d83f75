"""The server half of FedAvg, and functions of other methods' servers that average uploads."""

import torch

from halfmoon.api.requirements import SUM, Requirements
from halfmoon.api.types import Federation, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.tree import Tree


class ModelAveraging:
    """The server half of FedAvg: its state is the model, and a round computes the weighted mean of the uploads.

    Attributes:
        method_requirements: the requirements that `requirements` returns.
    """

    method_requirements = SUM

    def requirements(self, norm: str) -> Requirements:
        return self.method_requirements

    def start(self, task: Task, model: Tree) -> Tree:
        return model

    def round(self, task: Task, server: Tree, federation: Federation) -> Tree:
        return federation.average("train", select_model(server)).update

    def solution(self, task: Task, server: Tree) -> Tree:
        return select_model(server)


def select_model(tree: Tree) -> Tree:
    """Select {"params", "stats"} from a tree; "stats" may be missing, and is {} without batch normalization."""
    return {"params": tree["params"], "stats": tree.get("stats", {})}


def average_uploads(upload: Upload, server: Tree | None = None) -> Tree:
    """Average the updates of K clients by their weights.

    Batch-normalization statistics are averaged like parameters (McMahan et al. 2017, Algorithm 1; the setting
    aggregation_content = "all" of FedDure's code).

    Args:
        upload: the uploads, every leaf (K, ...).
        server: tree to return if all weights are 0, because no client had data.
    """
    if server is not None and not bool(upload.weight.sum() > 0):
        return {name: server[name] for name in upload.update}
    return tree.weighted_mean(upload.update, upload.weight)


def take_momentum_step(params: Tree, mean: Tree, momentum: Tree, keep: float) -> tuple[Tree, Tree]:
    """Move the server's parameters to the clients' mean with momentum.

    v <- keep v + params - mean, params <- params - v: v points away from the mean, like a gradient.

    This is SGD with a learning rate of 1 on the change of the round (FedAvgM, Hsu et al. 2019; SemiFL's global
    momentum).

    Args:
        params: the server's parameters.
        mean: mean of the clients' parameters.
        momentum: v, a tree like `params`.
        keep: the momentum factor; 0 results in the mean.

    Returns:
        The new parameters and the new momentum.
    """
    # Sign as in SGD: `old - new` is the gradient that a step of 1 follows to the mean.
    new_momentum = tree.map(lambda v, old, new: keep * v + (old - new), momentum, params, mean)
    new_params = tree.map(torch.sub, params, new_momentum)
    return new_params, new_momentum


def step_towards_mean(params: Tree, mean: Upload, momentum: Tree, keep: float, share: float = 0.0) -> tuple[Tree, Tree]:
    """Move the server's parameters, by SGD with momentum, towards share * params + (1 - share) * mean of the uploads.

    Args:
        params: the server's parameters.
        mean: mean of the uploads. If its weight is 0, no client had data, and nothing changes.
        momentum: momentum buffer, a tree like `params`.
        keep: the momentum factor, from 0 to below 1.
        share: share of the server's parameters in the target.

    Returns:
        The new parameters and the new momentum.
    """
    if not bool(mean.weight > 0):
        return params, momentum
    target = mean.update["params"]
    # Without a share no interpolation is computed: even lerp with weight 0 may round differently.
    if share:
        target = tree.map(lambda new, old: torch.lerp(new, old, share), target, params)
    return take_momentum_step(params, target, momentum, keep)
