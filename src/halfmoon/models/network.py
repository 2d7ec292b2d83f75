"""What a network is: parameters in, logits and batch moments out; no side effect, nothing hidden."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon import tree
from halfmoon.tree import Tree

EPS = 1e-5
MOMENTUM = 0.1

Norm = Callable[[str, Tensor], Tensor]
"""(name of the layer, activations (B, C, H, W)) -> normalized activations."""


@dataclass(frozen=True)
class Network(ABC):
    """A classifier as a pure function.

    A model is the tree {"params": ..., "stats": ...}; "stats" holds the tracked mean and variance of each batch
    normalization and travels with the parameters.
    """

    channels: int = 3
    classes: int = 10
    width: int = 64

    @abstractmethod
    def init(self, generator: torch.Generator) -> Tree:
        """Return {"params", "stats"} with PyTorch's default initialization, drawn from `generator`."""

    @abstractmethod
    def layers(self, params: Tree, x: Tensor, norm: Norm) -> Tensor:
        """Return logits (B, classes) for x (B, C, H, W), with `norm` at every normalization."""

    @abstractmethod
    def check(self, shape: tuple[int, int, int]) -> None:
        """Raise `UserError` if images of `shape` (C, H, W) do not fit."""

    def train(self, params: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        """Return logits (B, classes) under batch statistics, and the moments {layer: {"mean", "var"}}.

        "var" is the unbiased variance, which is what running statistics track (as in PyTorch).
        """
        moments: Tree = {}

        def norm(name: str, z: Tensor) -> Tensor:
            p = params[name]["norm"]
            out, mean, inverse = torch.native_batch_norm(z, p["weight"], p["bias"], None, None, True, MOMENTUM, EPS)
            count = z.numel() // z.shape[-3]
            var = (inverse.detach().pow(-2) - EPS) * (count / max(count - 1, 1))
            moments[name] = {"mean": mean.detach(), "var": var}
            return out

        return self.layers(params, x, norm), moments

    def predict(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        """Return logits (B, classes) under the tracked statistics."""

        def norm(name: str, z: Tensor) -> Tensor:
            p, s = params[name]["norm"], stats[name]
            return F.batch_norm(z, s["mean"], s["var"], p["weight"], p["bias"], False, MOMENTUM, EPS)

        return self.layers(params, x, norm)


def track(stats: Tree, moments: Tree) -> Tree:
    """Return the running statistics after one more forward pass, with PyTorch's momentum of 0.1."""
    return tree.map(lambda old, new: torch.lerp(old, new, MOMENTUM), stats, moments)


def forward(
    network: Network, params: Tree, joint: bool, taught: tuple[Tensor, ...], frozen: tuple[Tensor, ...] = ()
) -> tuple[list[Tensor], list[Tensor], list[Tree]]:
    """Pass several groups of images under batch statistics, together or each alone.

    `taught` groups are differentiated; `frozen` ones only yield detached logits (pseudo-labels), and when each group
    passes alone they cost no backward pass. Return (logits of taught, logits of frozen, moments of every pass in
    the order frozen, taught).
    """
    groups = (*taught, *frozen)
    if joint:
        logits, moments = network.train(params, torch.cat(groups))
        parts = list(logits.split([len(group) for group in groups]))
        return parts[: len(taught)], [part.detach() for part in parts[len(taught) :]], [moments]
    passes: list[Tree] = []
    quiet: list[Tensor] = []
    with torch.no_grad():
        for group in frozen:
            logits, moments = network.train(params, group)
            quiet.append(logits.detach())
            passes.append(moments)
    loud: list[Tensor] = []
    for group in taught:
        logits, moments = network.train(params, group)
        loud.append(logits)
        passes.append(moments)
    return loud, quiet, passes


def convolution(generator: torch.Generator, inputs: int, outputs: int, kernel: int = 3) -> Tree:
    """Return weight and bias of a convolution, drawn as PyTorch draws them."""
    return _uniform(generator, (outputs, inputs, kernel, kernel), inputs * kernel * kernel)


def linear(generator: torch.Generator, inputs: int, outputs: int) -> Tree:
    """Return weight and bias of a linear layer, drawn as PyTorch draws them."""
    return _uniform(generator, (outputs, inputs), inputs)


def affine(channels: int) -> Tree:
    """Return the weight and bias of a normalization."""
    return {"weight": torch.ones(channels), "bias": torch.zeros(channels)}


def fresh_stats(channels: int) -> Tree:
    """Return the statistics of a normalization that has seen nothing."""
    return {"mean": torch.zeros(channels), "var": torch.ones(channels)}


def _uniform(generator: torch.Generator, shape: tuple[int, ...], fan_in: int) -> Tree:
    """Draw U(-1/sqrt(fan_in), 1/sqrt(fan_in)): what Kaiming uniform with a = sqrt(5) comes to."""
    bound = fan_in**-0.5
    return {
        "weight": torch.empty(shape).uniform_(-bound, bound, generator=generator),
        "bias": torch.empty(shape[0]).uniform_(-bound, bound, generator=generator),
    }
