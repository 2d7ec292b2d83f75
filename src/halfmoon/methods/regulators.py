"""What FedDure's regulators learn from: the network that they judge, and what is made of its rewards and labels."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from halfmoon.api.types import Batch, Local, Task
from halfmoon.core import padding, tree
from halfmoon.core.autodiff import vjp
from halfmoon.core.tensors import euclidean
from halfmoon.core.tree import Tree


class Student(NamedTuple):
    """The network that the regulators train on: f_d, or f_l without C-reg."""

    params: Tree
    z: Tensor  # (b, classes) its logits of the strong views
    pull: Callable[[Tensor, bool], Tree]  # cotangent of z, whether another pull follows -> gradient in the parameters
    tangent: Callable[[Tree], Tensor]  # direction of the parameters -> tangent of z


def coarse_student(task: Task, params: Tree, batch: Batch) -> Student:
    """Return C-reg on the strong views alone."""
    network, strong, real = task.network, batch.u["strong"], batch.u_real
    z, pull, tape = vjp(lambda params: network.linearize(params, strong, real), params)

    def tangent(direction: Tree) -> Tensor:
        return network.tangent(params, strong, tape, direction, real)

    return Student(params, z, pull, tangent)


def local_student(
    task: Task, params: Tree, batch: Batch, logits: tuple[Tensor, Tensor], pull: Callable[..., Tree], apart: bool
) -> Student:
    """Return the local model in C-reg's place: the pass that it has made already.

    `logits` are those of labeled and strong images; `apart` says that the weak views had no part in the pass.
    """
    network, views, before = task.network, (batch.u["strong"],), 0
    real = batch.u_real
    labeled, strong = logits
    if task.statistics == "joint":  # the images of the pass that it has made, in its order
        before = len(batch.x)
        alone = apart or task.labeling == "running"
        views = (batch.x, *views) if alone else (batch.x, *views, batch.u["weak"])
        real = padding.concat(batch.masks(len(views) - 1))
    images = torch.cat(views)

    def tangent(direction: Tree) -> Tensor:
        tape = network.linearize(params, images, real)[1]
        moved = network.tangent(params, images, tape, direction, real)
        return moved[before : before + len(strong)]

    def pulled(cotangent: Tensor, again: bool) -> Tree:
        return pull((torch.zeros_like(labeled), cotangent), True)  # another pull always follows: the model's own

    return Student(params, strong, pulled, tangent)


def log_shares(data: Local, classes: int) -> Tensor:
    """Return the log share (classes,) of each class among a client's labels; a class without labels has next to none.

    Rows beyond the client's own are not counted.
    """
    own = torch.arange(len(data.y), device=data.y.device) < data.labeled
    counts = ((data.y[:, None] == torch.arange(classes, device=data.y.device)) & own[:, None]).sum(0)
    shares = counts.to(torch.float32) / data.labeled
    return shares.clamp_min(torch.finfo(torch.float32).tiny).log()


def followed(baseline: Tree, d: Tensor, decay: float) -> Tree:
    """Return the mean of rewards after it has seen d: a plain mean until `decay` forgets faster than that."""
    count = baseline["count"] + 1
    new = 1 - (1 - 1 / count).clamp_max(decay)
    return {"mean": baseline["mean"] + new.to(d.dtype) * (d - baseline["mean"]), "count": count}


def norm(gradient: Tree) -> Tensor:
    """Return the Euclidean norm of a tree, reading each leaf once."""
    return euclidean(torch.stack([euclidean(leaf) for leaf in tree.leaves(gradient)]))
