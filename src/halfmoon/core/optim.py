"""Optimizers as pure functions on trees, so that vmap can lift them; one step equals `torch.optim`'s."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, cast

import torch
from torch import Tensor

from halfmoon.core import tree
from halfmoon.core.autodiff import call_with_all_clients, inside_transform, rebuild_nested
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree

Number = float | Tensor
"""A learning rate: a number or a tensor ()."""

SMALL_MODEL_BYTES = 2**24
"""Size of the parameters below which a step of Adam processes all leaves at once on a CPU, which needs more memory."""


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
        """Take one step of the optimizer.

        Args:
            params: the parameters (nested dict of tensors), which are not changed.
            gradient: a tree like `params`.
            state: the optimizer's state, from `init` or the step before.
            consume: whether `gradient` and `state` may be overwritten or emptied, which saves a large model memory.

        Returns:
            The new parameters and the new state.
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
        """Take one step of SGD with momentum, like `torch.optim.SGD`; return the new parameters and the new state.

        Args:
            params: the parameters (nested dict of tensors), which are not changed.
            gradient: a tree like `params`.
            state: the momentum buffers, from `init` or the step before.
            consume: without effect: no tensor is overwritten.
        """
        gradient = add_weight_decay(params, gradient, self.weight_decay)
        if not self.momentum:
            return gradient_step(params, gradient, self.lr), state
        # The buffer follows PyTorch: momentum * buffer + gradient, without dampening.
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
        """Take one step of Adam, like `torch.optim.Adam`; return the new parameters and the new state.

        Args:
            params: the parameters (nested dict of tensors), which are not changed.
            gradient: a tree like `params`.
            state: both moments and the count of steps, from `init` or the step before.
            consume: whether `gradient` and `state` may be overwritten or emptied, which saves a large model memory.
        """
        gradient = add_weight_decay(params, gradient, self.weight_decay)
        lr = self.lr
        # Three implementations with the same bits. The faster ones change tensors in place or use kernels for lists of
        # tensors, for which vmap has no rules: clients of a vmap take that step together, outside of it.
        if not isinstance(lr, Tensor):
            # A GPU takes large models at once, too: starting seven kernels a leaf takes longer than their arithmetic.
            is_on_gpu = next(tree.leaves(params)).device.type == "cuda"
            if is_on_gpu or tree.nbytes(params) < SMALL_MODEL_BYTES:
                if not inside_transform():
                    return self._step_all_leaves(params, gradient, state, lr)
                stepped = call_with_all_clients(partial(self._step_all_leaves, lr=lr), params, gradient, state)
                if stepped is not None:
                    return stepped
            elif consume and not inside_transform():
                return self._step_in_place(params, gradient, state, lr)
        terms = self._bias_correction(state["steps"] + 1)
        # Running means of the gradient (first moment) and of its square (second moment). lerp, not addcmul_ or lerp_:
        # vmap has no batching rule for these.
        first = tree.map(lambda m, g: torch.lerp(m, g, 1 - self.beta1), state["first"], gradient)
        second = tree.map(lambda v, g: torch.lerp(v, g * g, 1 - self.beta2), state["second"], gradient)

        def update_leaf(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            denominator = v.sqrt().mul_(terms.scale.to(v.dtype)).add_(terms.shift.to(v.dtype))
            if isinstance(lr, Tensor):
                return p - lr * (m / denominator)
            return torch.addcdiv(p, m, denominator, value=-lr)

        new_state = {"first": first, "second": second, "steps": terms.steps}
        return tree.map(update_leaf, params, first, second), new_state

    def _bias_correction(self, steps: Tensor) -> "BiasCorrection":
        """Compute the bias correction of both moments as changes of the denominator only.

        With c1 = 1 - beta1^t and c2 = sqrt(1 - beta2^t), Adam's step is

            lr (m / c1) / (sqrt(v) / c2 + eps) = lr m / (sqrt(v) c1 / c2 + eps c1).

        The right side reads and writes the leaves fewer times, and memory traffic is the cost of a step on a CPU.

        Args:
            steps: t, the number of steps with this one, () float64.
        """
        c1 = 1 - self.beta1**steps
        c2 = (1 - self.beta2**steps).sqrt()
        return BiasCorrection(steps=steps, scale=c1 / c2, shift=c1 * self.eps)

    def _step_all_leaves(self, params: Tree, gradient: Tree, state: Tree, lr: float) -> tuple[Tree, Tree]:
        """Take Adam's step with one call for all leaves, because calls cost more than arithmetic in a small network.

        Args:
            params: the parameters of one client, or of K clients with leaves (K, ...), which are not changed.
            gradient: a tree like `params`, which is not changed.
            state: both moments and the count of steps, () or (K,), which are not changed.
            lr: the learning rate.
        """
        terms = self._bias_correction(state["steps"] + 1)
        param_leaves, gradient_leaves, first_leaves, second_leaves = _list_leaves(params, gradient, state)
        # The functions for lists of tensors, which torch.optim uses too, are not in PyTorch's type stubs.
        foreach: Any = torch
        dtype = second_leaves[0].dtype
        first = foreach._foreach_lerp(first_leaves, gradient_leaves, 1 - self.beta1)
        squares = foreach._foreach_mul(gradient_leaves, gradient_leaves)
        second = foreach._foreach_lerp(second_leaves, squares, 1 - self.beta2)
        denominator = foreach._foreach_sqrt(second)
        foreach._foreach_mul_(denominator, _align(terms.scale.to(dtype), denominator))
        foreach._foreach_add_(denominator, _align(terms.shift.to(dtype), denominator))
        new = foreach._foreach_addcdiv(param_leaves, first, denominator, value=-lr)
        new_state = {
            "first": rebuild_nested(params, iter(first)),
            "second": rebuild_nested(params, iter(second)),
            "steps": terms.steps,
        }
        return rebuild_nested(params, iter(new)), new_state

    def _step_in_place(self, params: Tree, gradient: Tree, state: Tree, lr: float) -> tuple[Tree, Tree]:
        """Take Adam's step with the memory of one more leaf: overwrite the moments, and free the gradient's leaves.

        Args:
            params: the parameters, which are not changed.
            gradient: a tree like `params`, which is emptied.
            state: both moments, which are overwritten, and the count of steps.
            lr: the learning rate.
        """
        terms = self._bias_correction(state["steps"] + 1)
        param_leaves, gradient_leaves, first_leaves, second_leaves = _list_leaves(params, gradient, state)
        # Drop the tree's references, so that popping a leaf from the list below frees it.
        gradient.clear()
        gradient_leaves.reverse()
        new_leaves: list[Tensor] = []
        for param, first, second in zip(param_leaves, first_leaves, second_leaves, strict=True):
            slope = gradient_leaves.pop()
            # One buffer is the squared gradient, then the denominator, and at last the new parameter.
            buffer = torch.empty_like(param)
            first.lerp_(slope, 1 - self.beta1)
            second.lerp_(torch.mul(slope, slope, out=buffer), 1 - self.beta2)
            torch.sqrt(second, out=buffer).mul_(terms.scale.to(buffer.dtype)).add_(terms.shift.to(buffer.dtype))
            new_leaves.append(torch.addcdiv(param, first, buffer, value=-lr, out=buffer))
        return rebuild_nested(params, iter(new_leaves)), {**state, "steps": terms.steps}


class BiasCorrection(NamedTuple):
    """Adam's bias correction after `steps` steps: the denominator is sqrt(v) * scale + shift, all ()."""

    steps: Tensor
    scale: Tensor
    shift: Tensor


def _align(term: Tensor, leaves: list[Tensor]) -> Tensor | list[Tensor]:
    """Shape a term of one client () or of K clients (K,) so that a function for lists of tensors applies it to leaves.

    The terms of K clients become one (K, 1, ...) for each leaf (K, ...).
    """
    if not term.ndim:
        return term
    return [term.view(-1, *[1] * (leaf.ndim - 1)) for leaf in leaves]


def _list_leaves(params: Tree, gradient: Tree, state: Tree) -> list[list[Tensor]]:
    """List the leaves of params, gradient, first and second moment, all in the order of params.

    Trees that were loaded from a file may have another order of keys.
    """
    trees = (params, gradient, state["first"], state["second"])
    return [list(tree.leaves_like(params, each)) for each in trees]


@dataclass(frozen=True)
class OptimizerWrapper:
    """Base of classes that change the step of another optimizer, and have its learning rate and state."""

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
    """Clip the gradient before the step, like `torch.nn.utils.clip_grad_value_` and `clip_grad_norm_`.

    The optimizer adds weight decay to the clipped gradient.

    Attributes:
        norm: bound of the Euclidean norm of the whole gradient.
        value: bound of the absolute value of every entry.
    """

    norm: float | None = None
    value: float | None = None

    def step(self, params: Tree, gradient: Tree, state: Tree, consume: bool = False) -> tuple[Tree, Tree]:
        """Clip the gradient by value and by its norm over all parameters, then take a step of the inner optimizer.

        Args:
            params: the parameters (nested dict of tensors), which are not changed.
            gradient: a tree like `params`.
            state: the state of the inner optimizer.
            consume: whether the inner optimizer may overwrite `gradient` and `state`, which saves memory.

        Returns:
            The new parameters and the new state.
        """
        if self.value is not None:
            bound = self.value
            gradient = tree.map(lambda g: g.clamp(-bound, bound), gradient)
        if self.norm is not None:
            # 1e-6 as in clip_grad_norm_: no division by zero.
            scale = (self.norm / (tree.squared_norm(gradient).sqrt() + 1e-6)).clamp_max(1.0)
            gradient = tree.map(lambda g: g * scale, gradient)
        return self.optimizer.step(params, gradient, state, consume)


@dataclass(frozen=True)
class LayerwiseLearningRate(OptimizerWrapper):
    """Train some parameters with a smaller learning rate, like a parameter group of `torch.optim`.

    The steps of SGD and Adam are proportional to the learning rate, and their states do not depend on it. So taking the
    share `factor` of a step is the same as a step with `factor` times the rate.

    Attributes:
        factor: factor on the learning rate of these parameters.
        paths: their paths in the tree, such as "backbone/conv1/weight".
    """

    factor: float
    paths: frozenset[str]

    def step(self, params: Tree, gradient: Tree, state: Tree, consume: bool = False) -> tuple[Tree, Tree]:
        new, state = self.optimizer.step(params, gradient, state, consume)
        return self._shorten_steps(params, new, prefix=""), state

    def _shorten_steps(self, old: Tree, new: Tree, prefix: str) -> Tree:
        """Scale the step from old to new parameters by `self.factor` at `self.paths`: the backbone's lower learning rate.

        For SGD and Adam, scaling the finished step has the effect of a lower learning rate.

        Args:
            old: the parameters before the optimizer's step, nested dicts of tensors.
            new: the parameters after the step, of the same structure.
            prefix: the path of both trees in the network's parameters, such as "backbone/layer1/"; "" for the root.
        """
        result: Tree = {}
        for key, value in new.items():
            path = f"{prefix}{key}"
            if isinstance(value, dict):
                result[key] = self._shorten_steps(old[key], cast(Tree, value), prefix=f"{path}/")
            else:
                result[key] = torch.lerp(old[key], value, self.factor) if path in self.paths else value
        return result


def at_most_one(number: Number) -> Number:
    """Compute min(number, 1)."""
    return number.clamp_max(1.0) if isinstance(number, Tensor) else min(1.0, number)


def exp(number: Number) -> Number:
    """Compute the exponential function."""
    return number.exp() if isinstance(number, Tensor) else math.exp(number)


class Schedule(Protocol):
    """Learning rate schedule over the rounds; all steps of a round have the same rate."""

    def factor(self, round: int, rounds: int) -> float:
        """Return the factor of the learning rate in `round` (from 0) of `rounds`."""
        ...


@dataclass(frozen=True)
class ConstantSchedule:
    """Constant learning rate."""

    def factor(self, round: int, rounds: int) -> float:
        return 1.0


@dataclass(frozen=True)
class CosineSchedule:
    """Learning rate that falls from 1 to `floor` times its initial value along half a cosine.

    Loshchilov and Hutter 2017, Eq. 5, without restarts.
    """

    floor: float = 0.0

    def factor(self, round: int, rounds: int) -> float:
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * round / rounds)) / 2


@dataclass(frozen=True)
class StepSchedule:
    """Learning rate that is multiplied by `gamma` at the shares `at` of the run."""

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
    """Return gradient + weight_decay * params (coupled weight decay, L2 regularization)."""
    if not weight_decay:
        return gradient
    return tree.map(lambda p, g: torch.add(g, p, alpha=weight_decay), params, gradient)
