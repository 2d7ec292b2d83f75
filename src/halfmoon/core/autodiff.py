"""Gradients of functions of trees, and programs for K trees: `torch.func`'s answers for less of a small step's time.

`torch.func` walks through every nested argument and result several times, in Python, and builds each gradient so that
it could be differentiated again. A step on a small network costs more of that than of arithmetic. So one client alone
is differentiated by plain autograd, with the same kernels and the same bits; where a transform of `torch.func` is at
work already, plain autograd cannot see through it. Of clients that are lifted by one vmap, and no more, the gradient is
that of the sum of their losses, taken of the tensors underneath; a gradient inside another is left to `torch.func`.
`lifted` wraps and unwraps the leaves of clients as vmap does, but walks over them once.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, cast, overload

import torch
import torch.func
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import (
    CVmapInterpreterPtr,
    TransformType,
    _add_batch_dim,  # pyright: ignore[reportPrivateUsage]: as the tensors underneath, it has no public name
    _remove_batch_dim,  # pyright: ignore[reportPrivateUsage]
    _vmap_decrement_nesting,  # pyright: ignore[reportPrivateUsage]
    _vmap_increment_nesting,  # pyright: ignore[reportPrivateUsage]
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    maybe_get_bdim,
    peek_interpreter_stack,
)
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch._functorch.vmap import lazy_load_decompositions  # pyright: ignore[reportPrivateImportUsage]

from halfmoon.core import tree
from halfmoon.core.tree import Tree


@overload
def grad_and_value(function: Callable[[Tree], tuple[Tensor, Any]], params: Tree) -> tuple[Tree, Tensor, Any]: ...
@overload
def grad_and_value(
    function: Callable[..., tuple[Tensor, Any]], params: Tree, *rest: Any
) -> tuple[Tree, Tensor, Any]: ...
def grad_and_value(function: Callable[..., tuple[Tensor, Any]], params: Tree, *rest: Any) -> tuple[Tree, Tensor, Any]:
    """Return (gradient in `params`, loss, aside) of function(params, *rest) = (loss (), aside); all are detached."""
    if (program := _program()) is not None:
        marked = program.marked(params)
        with torch.enable_grad():
            loss, aux = function(program.tree(marked), *rest)
        gradient = program.gradient((loss,), marked, None)
        return gradient, loss.detach(), _detached(aux)
    if inside_transform():
        # What is not differentiated is closed over: torch.func would wrap every leaf of an argument.
        def closed(p: Tree) -> tuple[Tensor, Any]:
            return function(p, *rest)

        gradient, (loss, aux) = torch.func.grad_and_value(closed, has_aux=True)(params)
        return gradient, loss, aux
    with torch.enable_grad():
        marked = _marked(params)
        loss, aux = function(marked, *rest)
        gradient = _gradient((loss,), marked, None)
    return gradient, loss.detach(), _detached(aux)


def vjp(function: Callable[[Tree], tuple[Any, Any]], params: Tree) -> tuple[Any, Callable[..., Tree], Any]:
    """Return (outputs, pull, aux) of function(params) = (outputs, aux), outputs a tensor or a tuple of them.

    pull(cotangents, again) returns the gradient in `params`; `again`: another pull follows. All results are detached.
    """
    if (program := _program()) is not None:
        leaves = program.marked(params)
        with torch.enable_grad():
            outputs, aux = function(program.tree(leaves))
        results = cast("tuple[Tensor, ...]", outputs if isinstance(outputs, tuple) else (outputs,))

        def together(cotangents: Any, again: bool) -> Tree:
            pulled = cast("tuple[Any, ...]", cotangents if isinstance(cotangents, tuple) else (cotangents,))
            return program.gradient(results, leaves, pulled, again)

        return _detached(outputs), together, _detached(aux)
    if inside_transform():
        outputs, pull, aux = cast(Any, torch.func.vjp(function, params, has_aux=True))

        def lifted_back(cotangents: Any, again: bool) -> Tree:
            return pull(cotangents, retain_graph=again)[0]

        return outputs, lifted_back, aux
    with torch.enable_grad():
        marked = _marked(params)
        outputs, aux = function(marked)
    heads = cast("tuple[Tensor, ...]", outputs if isinstance(outputs, tuple) else (outputs,))

    def back(cotangents: Any, again: bool) -> Tree:
        pulled = cast("tuple[Any, ...]", cotangents if isinstance(cotangents, tuple) else (cotangents,))
        with torch.enable_grad():
            return _gradient(heads, marked, pulled, again)

    return _detached(outputs), back, _detached(aux)


def vmap_clients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.func.vmap(function)`: all leaves of arguments and results (dicts, tuples) lead with K."""

    def many(*arguments: Any) -> Any:
        leaves = list(nested_leaves(arguments))
        size = len(leaves[0])
        lazy_load_decompositions()
        level = _vmap_increment_nesting(size, "error")
        try:
            wrapped = (_add_batch_dim(leaf, 0, level) for leaf in leaves)
            result = function(*nested_like(arguments, wrapped))
            return nested_like(result, (_remove_batch_dim(leaf, level, size, 0) for leaf in nested_leaves(result)))
        finally:
            _vmap_decrement_nesting()

    return many


def apply_across_clients(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor | None:
    """Return what a function makes of z (B, C, ...) of all clients that one vmap lifts: it sees (B, K * C, ...).

    For what treats all channels alike. None where no vmap is at work, or another transform as well.
    """
    if (program := _program()) is None:
        return None
    differentiable = torch.is_grad_enabled()
    with temporarily_pop_interpreter_stack(), torch.set_grad_enabled(differentiable):
        output = function(program.below(z).movedim(0, 1).flatten(1, 2))
        apart = torch.unflatten(output, 1, (program.size, -1))
    return _add_batch_dim(apart, 1, program.level)


def inside_transform() -> bool:
    """Say whether a transform of `torch.func` is at work around this call."""
    return peek_interpreter_stack() is not None  # pyright: ignore[reportUnnecessaryComparison]: its stub says never None


class _Program(NamedTuple):
    """The one vmap that is at work: K clients, whose tensors (K, ...) lie under those that a function sees."""

    level: int
    size: int

    def below(self, leaf: Tensor) -> Tensor:
        if not is_batchedtensor(leaf):
            return leaf.expand(self.size, *leaf.shape)
        return get_unwrapped(leaf).movedim(maybe_get_bdim(leaf), 0)

    def marked(self, params: Tree) -> Tree:
        """Return a tree of the tensors underneath, that autograd differentiates by."""
        with temporarily_pop_interpreter_stack():
            return _marked(tree.map(self.below, params))

    def tree(self, below: Tree) -> Tree:
        return tree.map(lambda leaf: _add_batch_dim(leaf, 0, self.level), below)

    def gradient(
        self, outputs: tuple[Tensor, ...], marked: Tree, cotangents: tuple[Any, ...] | None, again: bool = False
    ) -> Tree:
        """Return each client's gradient: no client's loss depends on another's leaves."""
        with temporarily_pop_interpreter_stack(), torch.enable_grad():
            heads = tuple(self.below(each) for each in outputs)
            pulled = (torch.ones_like(heads[0]),) if cotangents is None else tuple(map(self.below, cotangents))
            gradients = _gradient(heads, marked, pulled, again)
        return self.tree(gradients)


def _program() -> _Program | None:
    """Return the vmap around this call, if there is one and no other transform."""
    stack = get_interpreter_stack() if inside_transform() else []
    if len(stack) != 1 or stack[0].key() != TransformType.Vmap:
        return None
    return _Program(stack[0].level(), CVmapInterpreterPtr(stack[0]).batchSize())


def _marked(params: Tree) -> Tree:
    """Return the tree with leaves of its own, on the same memory, that autograd differentiates by."""
    return tree.map(lambda leaf: leaf.detach().requires_grad_(), params)


def _gradient(
    outputs: tuple[Tensor, ...], marked: Tree, cotangents: tuple[Any, ...] | None, again: bool = False
) -> Tree:
    flat = list(tree.leaves(marked))
    active = [k for k, each in enumerate(outputs) if each.requires_grad]
    if not active:
        return tree.zeros_like(tree.map(Tensor.detach, marked))
    heads = [outputs[k] for k in active]
    if cotangents is not None:
        # The gradient of a sum of products is the cotangent, bit by bit; handed to autograd, a first cotangent imports
        # SymPy, which takes most of a second.
        heads = [tree.sum_scalars((outputs[k] * cotangents[k]).sum() for k in active)]
    gradients = torch.autograd.grad(heads, flat, retain_graph=again, allow_unused=True, materialize_grads=True)
    return nested_like(marked, iter(gradients))


def _detached(value: Any) -> Any:
    return nested_like(value, (leaf.detach() for leaf in nested_leaves(value)))


def nested_leaves(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts and tuples in order."""
    if isinstance(value, Tensor):
        yield value
    else:
        parts = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
        for each in parts:
            yield from nested_leaves(each)


def nested_like(like: Any, leaves: Iterator[Tensor]) -> Any:
    """Return what `like` is, with other leaves."""
    if isinstance(like, Tensor):
        return next(leaves)
    if isinstance(like, dict):
        return {key: nested_like(value, leaves) for key, value in cast(Tree, like).items()}
    parts: Iterable[Any] = (nested_like(each, leaves) for each in like)
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def cross_entropy(logits: Tensor, labels: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
    """Return `torch.nn.functional.cross_entropy` of logits (n, classes) and labels (n,): scalar, or (n,) for "none".

    Under vmap PyTorch takes it apart in Python, at every step, and imports SymPy for that; so there it is a gather.
    """
    if not inside_transform():
        return F.cross_entropy(logits, labels, reduction=reduction)
    each = -logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return each.mean() if reduction == "mean" else each
