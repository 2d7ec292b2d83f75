"""What an objective is, and the forward pass that those with a weak and a strong view share."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from halfmoon.models import forward
from halfmoon.tree import Tree
from halfmoon.types import Batch, Passes, Pseudo, Task


class Seen(NamedTuple):
    """What a loss leaves behind: the moments of its forward passes, and its pseudo-labels if it made some."""

    moments: list[Tree]
    pseudo: tuple[Pseudo, ...]  # none or one


class Objective(Protocol):
    """A loss for one minibatch; its fields are its hyper-parameters."""

    @property
    def views(self) -> tuple[str, ...]:
        """Return the unlabeled views it wants."""
        ...

    def __call__(self, task: Task, params: Tree, stats: Tree, batch: Batch) -> tuple[Tensor, Seen]:
        """Return the scalar loss and what was seen."""
        ...

    def passes(self, task: Task, labeled: int, unlabeled: int) -> Passes:
        """Count the images that one gradient of the loss sends through the network."""
        ...


def weak_and_strong(task: Task, params: Tree, stats: Tree, batch: Batch) -> tuple[Tensor, Tensor, Tensor, list[Tree]]:
    """Return the logits of labeled (B, classes), strong (b, classes) and, detached, weak images, and the moments."""
    weak, strong = batch.u["weak"], batch.u["strong"]
    joint = task.statistics == "joint"
    if task.labeling == "running":
        with torch.no_grad():
            guess = task.network.predict(params, stats, weak).detach()
        (labeled, loud), _, moments = forward(task.network, params, joint, (batch.x, strong))
    else:
        (labeled, loud), (guess,), moments = forward(task.network, params, joint, (batch.x, strong), (weak,))
    return labeled, loud, guess, moments


def weak_and_strong_passes(task: Task, labeled: int, unlabeled: int) -> Passes:
    """Count the images of `weak_and_strong` and of one backward pass through it."""
    shared = task.statistics == "joint" and task.labeling == "batch"
    return Passes(labeled + 2 * unlabeled, labeled + (2 if shared else 1) * unlabeled)
