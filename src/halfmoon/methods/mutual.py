"""Two models of one client that teach each other: what FedLoKe and FML have in common.

Both models pass their images, then both take their step (Jacobi): what the one is taught is the other's guess before
either has moved.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfmoon.api.types import ClientData, ClientUpdate, PseudoLabels, Task
from halfmoon.api.uploads import UploadSpec
from halfmoon.core import tree
from halfmoon.core.autodiff import grad_and_value, vjp
from halfmoon.core.tree import Tree
from halfmoon.methods.averaging import select_model

Weights = Literal["size", "uniform"]
"""What a client's upload weighs: |labeled| + |unlabeled| rows (McMahan et al. 2017), or 1."""

Outputs = tuple[tuple[Tensor, Tensor], tuple[Tensor, list[Tree]]]
"""((logits of labeled images, logits of unlabeled ones), (detached guesses, moments of the passes))."""


class Pass(NamedTuple):
    """What one model says of a minibatch, and how to differentiate it."""

    labeled: Tensor  # (B, classes) logits
    unlabeled: Tensor  # (b, classes) logits
    guess: Tensor  # (b, classes) detached logits, with which it teaches
    moments: list[Tree]
    pull: Callable[[tuple[Tensor, Tensor], bool], Tree]  # as `halfmoon.core.autodiff.vjp` returns it


def learner(task: Task, model: Tree) -> Tree:
    """Return {"params", "stats", "optimizer"} of a model that starts to learn with a fresh optimizer."""
    return {**model, "optimizer": task.optimizer.init(model["params"])}


def memory_of(model: Tree, *names: str) -> Tree:
    """Return named parts of a learner for a memory, without empty ones: a flat tree keeps no trace of these."""
    return {name: model[name] for name in names if model[name]}


def first_model(task: Task, broadcast: Tree, private: Literal["copy", "fresh"], generator: torch.Generator) -> Tree:
    """Return the private model that a client begins with: a copy of what came down, or a random network."""
    if private == "copy":
        return select_model(broadcast)
    like = next(tree.leaves(broadcast["params"]))
    return tree.to(task.network.init(generator), like.device, like.dtype)


def pseudo_labels(guess: Tensor, weight: Tensor) -> PseudoLabels:
    """Return the pseudo-labels that logits (b, classes) amount to."""
    confidence, label = guess.softmax(-1).max(-1)
    return PseudoLabels(label, confidence, weight)


def passed(forward: Callable[[Tree], Outputs], params: Tree) -> Pass:
    """Return what the model of `params` says, where `forward` passes the images of a minibatch."""
    (labeled, unlabeled), pull, (guess, moments) = vjp(forward, params)
    return Pass(labeled, unlabeled, guess, moments, pull)


def advance(
    update: ClientUpdate, model: Tree, outputs: Pass, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tree, Tensor]:
    """Return the learner after one step on loss(labeled, unlabeled) of its logits, and that loss ()."""
    logits = {"labeled": outputs.labeled, "unlabeled": outputs.unlabeled}
    cotangent, value, _ = grad_and_value(lambda z: (loss(z["labeled"], z["unlabeled"]), ()), logits)
    gradient = outputs.pull((cotangent["labeled"], cotangent["unlabeled"]), False)
    return update.advance(model, gradient, outputs.moments, consume=True), value


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(softmax(teacher) || softmax(student)) (n,) in nats of logits (n, classes); the teacher is detached."""
    target, guess = teacher.detach().log_softmax(-1), student.log_softmax(-1)
    return (target.exp() * (target - guess)).sum(-1)


def sure(guess: Tensor, delta: float | None) -> Tensor:
    """Return 1 (n,) where a guess's entropy is below `delta` nats, else 0, of logits (n, classes); None trusts all."""
    if delta is None:
        return torch.ones_like(guess[:, 0])
    log = guess.log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1)
    return (entropy < delta).to(guess.dtype)


def uplink_of(weights: Weights) -> UploadSpec:
    """Return what a client sends: one model, and its weight."""
    return UploadSpec(weight="rows" if weights == "size" else "one")


def weight_of(data: ClientData, weights: Weights) -> Tensor:
    """Return what a client's upload weighs, ()."""
    rows = data.rows
    return rows if weights == "size" else torch.ones_like(rows)
