"""Optimizers as pure functions on trees, so that vmap can lift them; one step equals `torch.optim`'s."""

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

from halfmoon.core import tree
from halfmoon.core.autodiff import inside_transform, rebuild_nested
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree

Number = float | Tensor
"""A learning rate: a number or a tensor ()."""


class Optimizer(Protocol):
    """Hyper-parameters of an optimizer; its state is a tree."""

    @property
    def lr(self) -> Number: ...

    def with_lr(self, lr: Number) -> "Optimizer":
        """Return the same optimizer with another learning rate; states are interchangeable."""
        ...

    def init(self, params: Tree) -> Tree:
        """Return the state before the first step."""
        ...

    def step(self, params: Tree, gradient: Tree, state: Tree, consume: bool = False) -> tuple[Tree, Tree]:
        """Return (params, state) after one step.

        With `consume`, `gradient` and `state` may be overwritten, or empty afterwards: a large model saves memory.
        """
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum and coupled weight decay, as `torch.optim.SGD`."""

    lr: Number = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise UserError("SGD with nesterov needs a momentum above 0; set one, or leave nesterov out.")

    def with_lr(self, lr: Number) -> "SGD":
        return replace(self, lr=lr)

    def init(self, params: Tree) -> Tree:
        """Return zero momentum buffers (none without momentum)."""
        return {"momentum": tree.zeros_like(params)} if self.momentum else {}

    def step(self, params: Tree, gradient: Tree, state: Tree, consume: bool = False) -> tuple[Tree, Tree]:
        gradient = add_weight_decay(params, gradient, self.weight_decay)
        if not self.momentum:
            return gradient_step(params, gradient, self.lr), state
        buffer = tree.map(lambda g, b: torch.add(g, b, alpha=self.momentum), gradient, state["momentum"])
        if self.nesterov:
            gradient = tree.map(lambda g, b: torch.add(g, b, alpha=self.momentum), gradient, buffer)
        else:
            gradient = buffer
        return gradient_step(params, gradient, self.lr), {"momentum": buffer}


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015) with coupled weight decay, as `torch.optim.Adam`."""

    lr: Number = 5e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0

    def with_lr(self, lr: Number) -> "Adam":
        return replace(self, lr=lr)

    def init(self, params: Tree) -> Tree:
        """Return zero moments and the count of steps taken."""
        device = next(tree.leaves(params)).device
        return {
            "first": tree.zeros_like(params),
            "second": tree.zeros_like(params),
            "steps": torch.zeros((), dtype=torch.float64, device=device),
        }

    def step(self, params: Tree, gradient: Tree, state: Tree, consume: bool = False) -> tuple[Tree, Tree]:
        gradient = add_weight_decay(params, gradient, self.weight_decay)
        steps = state["steps"] + 1
        # lr m/c1 / (sqrt(v)/c2 + eps) = lr m / (sqrt(v) c1/c2 + eps c1): on a CPU a step costs the memory it walks over
        c1, c2 = 1 - self.beta1**steps, (1 - self.beta2**steps).sqrt()
        scale, shift = c1 / c2, c1 * self.eps
        lr = self.lr
        if not inside_transform() and not isinstance(lr, Tensor):
            terms = (steps, c1 * self.eps, c1 / c2)
            if tree.nbytes(params) < 2**24:
                return self._at_once(params, gradient, state, terms, lr)
            if consume:
                return self._leaf_by_leaf(params, gradient, state, terms, lr)
        first = tree.map(lambda m, g: torch.lerp(m, g, 1 - self.beta1), state["first"], gradient)
        # lerp, not addcmul_ or lerp_: vmap has no batching rule for these
        second = tree.map(lambda v, g: torch.lerp(v, g * g, 1 - self.beta2), state["second"], gradient)

        def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            denominator = v.sqrt().mul_(scale.to(v.dtype)).add_(shift.to(v.dtype))
            if isinstance(lr, Tensor):
                return p - lr * (m / denominator)
            return torch.addcdiv(p, m, denominator, value=-lr)

        return tree.map(moved, params, first, second), {"first": first, "second": second, "steps": steps}

    def _at_once(
        self, params: Tree, gradient: Tree, state: Tree, terms: tuple[Tensor, Tensor, Tensor], lr: float
    ) -> tuple[Tree, Tree]:
        """Do what `step` does with one call for all leaves, which no transform of `torch.func` could see through.

        The same kernels on each leaf, and so the same bits: a step on a small network costs more calls than arithmetic.
        """
        steps, shift, scale = terms
        p, g, m, v = _leaves(params, gradient, state)
        calls: Any = torch  # its calls for lists of tensors, which torch.optim makes as well, are not exported
        dtype = v[0].dtype
        first = calls._foreach_lerp(m, g, 1 - self.beta1)
        second = calls._foreach_lerp(v, calls._foreach_mul(g, g), 1 - self.beta2)
        denominator = calls._foreach_sqrt(second)
        calls._foreach_mul_(denominator, scale.to(dtype))
        calls._foreach_add_(denominator, shift.to(dtype))
        new = calls._foreach_addcdiv(p, first, denominator, value=-lr)
        trees = (rebuild_nested(params, iter(each)) for each in (new, first, second))
        return next(trees), {"first": next(trees), "second": next(trees), "steps": steps}

    def _leaf_by_leaf(
        self, params: Tree, gradient: Tree, state: Tree, terms: tuple[Tensor, Tensor, Tensor], lr: float
    ) -> tuple[Tree, Tree]:
        """Do what `step` does and hold one leaf more: the moments are overwritten, the gradient's leaves are freed."""
        steps, shift, scale = terms
        p, g, m, v = _leaves(params, gradient, state)
        gradient.clear()
        g.reverse()
        new: list[Tensor] = []
        for old, first, second in zip(p, m, v, strict=True):
            slope, leaf = g.pop(), torch.empty_like(old)
            first.lerp_(slope, 1 - self.beta1)
            second.lerp_(torch.mul(slope, slope, out=leaf), 1 - self.beta2)
            torch.sqrt(second, out=leaf).mul_(scale.to(leaf.dtype)).add_(shift.to(leaf.dtype))
            new.append(torch.addcdiv(old, first, leaf, value=-lr, out=leaf))
        return rebuild_nested(params, iter(new)), {**state, "steps": steps}


def _leaves(params: Tree, gradient: Tree, state: Tree) -> list[list[Tensor]]:
    """Return the leaves of params, gradient and both moments in one order: from a file they may come in another."""
    trees = (params, gradient, state["first"], state["second"])
    return [list(tree.leaves_like(params, each)) for each in trees]


@dataclass(frozen=True)
class OptimizerWrapper:
    """Another optimizer, with its learning rate and its state."""

    optimizer: Optimizer

    @property
    def lr(self) -> Number:
        return self.optimizer.lr

    def with_lr(self, lr: Number) -> Self:
        return replace(self, optimizer=self.optimizer.with_lr(lr))

    def init(self, params: Tree) -> Tree:
        return self.optimizer.init(params)


@dataclass(frozen=True)
class GradientClipping(OptimizerWrapper):
    """Clip the gradient, then step: `value` bounds every entry, `norm` the Euclidean norm of the whole tree.

    As `torch.nn.utils.clip_grad_value_` and `clip_grad_norm_` before the optimizer's step (weight decay comes after).
    """

    norm: float | None = None
    value: float | None = None

    def step(self, params: Tree, gradient: Tree, state: Tree, consume: bool = False) -> tuple[Tree, Tree]:
        """Return (params, state) after one step on the clipped gradient."""
        if self.value is not None:
            bound = self.value
            gradient = tree.map(lambda g: g.clamp(-bound, bound), gradient)
        if self.norm is not None:
            scale = (self.norm / (tree.squared_norm(gradient).sqrt() + 1e-6)).clamp_max(1.0)
            gradient = tree.map(lambda g: g * scale, gradient)
        return self.optimizer.step(params, gradient, state, consume)


@dataclass(frozen=True)
class LayerwiseLearningRate(OptimizerWrapper):
    """Step, but move the parameters of `paths` by `factor` of the step: parameter groups with two learning rates.

    The steps of SGD and Adam are proportional to the learning rate and their states do not depend on it, so this is
    the step at `factor` times the rate.
    """

    factor: float
    paths: frozenset[str]

    def step(self, params: Tree, gradient: Tree, state: Tree, consume: bool = False) -> tuple[Tree, Tree]:
        new, state = self.optimizer.step(params, gradient, state, consume)
        return self._held_back(params, new, ""), state

    def _held_back(self, old: Tree, new: Tree, place: str) -> Tree:
        result: Tree = {}
        for key, value in new.items():
            path = f"{place}{key}"
            if isinstance(value, dict):
                result[key] = self._held_back(old[key], cast(Tree, value), f"{path}/")
            else:
                result[key] = torch.lerp(old[key], value, self.factor) if path in self.paths else value
        return result


def at_most_one(number: Number) -> Number:
    return number.clamp_max(1.0) if isinstance(number, Tensor) else min(1.0, number)


def exp(number: Number) -> Number:
    return number.exp() if isinstance(number, Tensor) else math.exp(number)


class Schedule(Protocol):
    """How the learning rate moves over the rounds; all steps of a round share it."""

    def factor(self, round: int, rounds: int) -> float:
        """Return the factor of the learning rate in `round` (from 0) of `rounds`."""
        ...


@dataclass(frozen=True)
class ConstantSchedule:
    """The learning rate stays."""

    def factor(self, round: int, rounds: int) -> float:
        return 1.0


@dataclass(frozen=True)
class CosineSchedule:
    """Half a cosine from 1 to `floor` over the run (Loshchilov and Hutter 2017, Eq. 5, without restarts)."""

    floor: float = 0.0

    def factor(self, round: int, rounds: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * round / rounds)) / 2


@dataclass(frozen=True)
class StepSchedule:
    """Multiply by `gamma` whenever one of the shares `at` (of the run) is passed."""

    at: tuple[float, ...] = (0.5, 0.75)
    gamma: float = 0.1

    def factor(self, round: int, rounds: int) -> float:
        return self.gamma ** sum(round >= share * rounds for share in self.at)


def gradient_step(params: Tree, gradient: Tree, lr: Number) -> Tree:
    """Return params - lr * gradient: the plain, differentiable step."""
    if isinstance(lr, Tensor):
        return tree.map(lambda p, g: p - lr * g, params, gradient)
    return tree.map(lambda p, g: torch.add(p, g, alpha=-lr), params, gradient)


def add_weight_decay(params: Tree, gradient: Tree, weight_decay: float) -> Tree:
    if not weight_decay:
        return gradient
    return tree.map(lambda p, g: torch.add(g, p, alpha=weight_decay), params, gradient)
