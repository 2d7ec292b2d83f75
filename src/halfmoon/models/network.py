"""What a network is: parameters in, logits and batch moments out; no side effect, nothing hidden."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon import tree
from halfmoon.tree import Tree

EPS = 1e-5
MOMENTUM = 0.1


@dataclass
class Run(ABC):
    """One pass through a network: what its layers do, on given parameters; `Network.layers` says in which order.

    z is activations (B, C, H, W); whatever a network does besides (adding, averaging, flattening) has to be linear.
    """

    params: Tree

    def conv(self, name: str, z: Tensor) -> Tensor:
        """Convolve 3x3, with bias; height and width stay."""
        p = self.params[name]["conv"]
        return F.conv2d(z, p["weight"], p["bias"], padding=1)

    @abstractmethod
    def norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize each channel, with weight and bias."""

    def relu(self, z: Tensor) -> Tensor:
        """Return max(z, 0)."""
        return F.relu(z)

    def pool(self, z: Tensor, size: int | list[int]) -> Tensor:
        """Take the maximum of each tile of `size`."""
        return F.max_pool2d(z, size)

    def linear(self, name: str, z: Tensor) -> Tensor:
        """Map features (B, inputs) to (B, outputs)."""
        return F.linear(z, self.params[name]["weight"], self.params[name]["bias"])


@dataclass
class Settled(Run):
    """A pass under the tracked statistics."""

    stats: Tree

    def norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize with the tracked mean and variance."""
        p, s = self.params[name]["norm"], self.stats[name]
        return F.batch_norm(z, s["mean"], s["var"], p["weight"], p["bias"], False, MOMENTUM, EPS)


@dataclass
class Batched(Run):
    """A pass under batch statistics, which it leaves in `moments`."""

    moments: Tree = field(default_factory=dict)

    def norm(self, name: str, z: Tensor) -> Tensor:
        """Normalize with the batch's own mean and variance."""
        return self.normalized(name, z)[0]

    def normalized(self, name: str, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normalized activations, the batch's mean and its inverse standard deviation (C,)."""
        p = self.params[name]["norm"]
        out, mean, inverse = torch.native_batch_norm(z, p["weight"], p["bias"], None, None, True, MOMENTUM, EPS)
        count = z.numel() // z.shape[-3]
        var = (inverse.detach().pow(-2) - EPS) * (count / max(count - 1, 1))
        self.moments[name] = {"mean": mean.detach(), "var": var}
        return out, mean, inverse


@dataclass
class Recorded(Batched):
    """A pass under batch statistics that keeps, in order, what its tangents will need: what autograd saves anyway."""

    tape: list[Tensor] = field(default_factory=list)

    def conv(self, name: str, z: Tensor) -> Tensor:
        """Keep the input."""
        self.tape.append(z)
        return super().conv(name, z)

    def norm(self, name: str, z: Tensor) -> Tensor:
        """Keep the input and its statistics."""
        out, mean, inverse = self.normalized(name, z)
        self.tape += [z, mean, inverse]
        return out

    def relu(self, z: Tensor) -> Tensor:
        """Keep the output."""
        self.tape.append(F.relu(z))
        return self.tape[-1]

    def pool(self, z: Tensor, size: int | list[int]) -> Tensor:
        """Keep where the maxima were."""
        out, where = F.max_pool2d(z, size, return_indices=True)
        self.tape.append(where)
        return out

    def linear(self, name: str, z: Tensor) -> Tensor:
        """Keep the input."""
        self.tape.append(z)
        return super().linear(name, z)


@dataclass
class Tangent(Run):
    """A pass of tangents over a recorded one: z is how the activations move as the parameters move along `direction`.

    It computes no activation again: a layer with weights costs its two derivatives, so the pass two convolutions a
    layer (one in the first, whose images stand still).
    """

    direction: Tree
    images: Tensor
    tape: Iterator[Tensor]

    def conv(self, name: str, z: Tensor) -> Tensor:
        """d(w * x) = dw * x + w * dx."""
        x, w, d = next(self.tape), self.params[name]["conv"]["weight"], self.direction[name]["conv"]
        moved = F.conv2d(x, d["weight"], d["bias"], padding=1)
        return moved if z is self.images else moved.add_(F.conv2d(z, w, padding=1))

    def norm(self, name: str, z: Tensor) -> Tensor:
        """In weight and bias normalization is affine; in its input its derivative is symmetric: its own backward."""
        w, d = self.params[name]["norm"]["weight"], self.direction[name]["norm"]
        x, mean, inverse = next(self.tape), next(self.tape), next(self.tape)
        moved = torch.native_batch_norm(x, d["weight"], d["bias"], None, None, True, MOMENTUM, EPS)[0]
        only_input = [True, False, False]
        backward = torch.ops.aten.native_batch_norm_backward
        return moved.add_(backward(z, x, w, None, None, mean, inverse, True, EPS, only_input)[0])

    def relu(self, z: Tensor) -> Tensor:
        """Where the output is 0, nothing moves."""
        return torch.ops.aten.threshold_backward(z, next(self.tape), 0)

    def pool(self, z: Tensor, size: int | list[int]) -> Tensor:
        """The maxima move as the activations that they are."""
        where = next(self.tape)
        return z.flatten(-2).gather(-1, where.flatten(-2)).unflatten(-1, where.shape[-2:])

    def linear(self, name: str, z: Tensor) -> Tensor:
        """d(w x) = dw x + w dx."""
        d = self.direction[name]
        return F.linear(next(self.tape), d["weight"], d["bias"]) + F.linear(z, self.params[name]["weight"])


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
    def layers(self, x: Tensor, run: Run) -> Tensor:
        """Return what x (B, C, H, W) comes to, (B, classes), when `run` does what each layer does."""

    @abstractmethod
    def check(self, shape: tuple[int, int, int]) -> None:
        """Raise `UserError` if images of `shape` (C, H, W) do not fit."""

    def train(self, params: Tree, x: Tensor) -> tuple[Tensor, Tree]:
        """Return logits (B, classes) under batch statistics, and the moments {layer: {"mean", "var"}}.

        "var" is the unbiased variance, which is what running statistics track (as in PyTorch).
        """
        run = Batched(params)
        return self.layers(x, run), run.moments

    def linearize(self, params: Tree, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits (B, classes) under batch statistics, and the tape from which `tangent` works."""
        run = Recorded(params)
        return self.layers(x, run), run.tape

    def tangent(self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree) -> Tensor:
        """Return the derivative (B, classes) of the logits that `linearize` gave for (params, x), along `direction`.

        What `torch.func.jvp` gives; but the activations come from the tape, where that computes them a second time.
        """
        return self.layers(x, Tangent(params, direction, x, iter(tape)))

    def predict(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        """Return logits (B, classes) under the tracked statistics."""
        return self.layers(x, Settled(params, stats))


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
