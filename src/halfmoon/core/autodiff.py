"""Gradients of functions of trees, and vmap over clients, with less overhead than `torch.func`.

`torch.func` traverses every nested argument and result several times, in Python, and builds each gradient so that it
could be differentiated again. In a step of a small network this overhead exceeds the arithmetic. Therefore:

* One client is differentiated by plain autograd, with the same kernels and bits. Inside a transform of `torch.func`
  plain autograd does not work, and `torch.func` is used.
* Inside exactly one vmap over clients, the gradient is that of the sum of their losses with respect to the batched
  tensors, which is each client's gradient because no loss depends on another client's parameters.
* `vmap_clients` wraps and unwraps tensors as vmap does, but traverses the trees once.
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
    _add_batch_dim,  # pyright: ignore[reportPrivateUsage]: it has no public name
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
    """Compute the gradient and the value of a loss by the cheapest of three ways that works where it is called.

    Args:
        function: maps (params, *rest) to the loss () and other results.
        params: the tree (nested dict of tensors) to differentiate with respect to.
        rest: further arguments.

    Returns:
        The gradient, the loss and the other results. They are detached, except inside a transform of `torch.func` other
        than one vmap over clients: there an outer transform may have to differentiate them.
    """
    batch = _current_batch()
    if batch is not None:  # inside exactly one vmap over clients: plain autograd on the tensors of all clients
        variables = batch.make_variables(params)
        with torch.enable_grad():
            loss, aux = function(batch.wrap(variables), *rest)
        gradient = batch.gradient((loss,), variables, cotangents=None)
        return gradient, loss.detach(), _detach(aux)
    if inside_transform():  # inside nested transforms, where plain autograd does not work
        # A closure, because torch.func would wrap every leaf of a further argument.
        def loss_of(params: Tree) -> tuple[Tensor, Any]:
            return function(params, *rest)

        gradient, (loss, aux) = torch.func.grad_and_value(loss_of, has_aux=True)(params)
        return gradient, loss, aux
    # Outside of transforms: plain autograd.
    with torch.enable_grad():
        variables = _make_variables(params)
        loss, aux = function(variables, *rest)
        gradient = _gradient((loss,), variables, cotangents=None)
    return gradient, loss.detach(), _detach(aux)


def vjp(function: Callable[[Tree], tuple[Any, Any]], params: Tree) -> tuple[Any, Callable[..., Tree], Any]:
    """Compute outputs, and a function for vector-Jacobian products, in one of three ways like `grad_and_value`.

    Args:
        function: maps params to (outputs, aux); outputs is a tensor or a tuple of tensors, aux any other results.
        params: the tree (nested dict of tensors) to differentiate with respect to.

    Returns:
        The outputs; `pull(cotangents, retain_graph)`, which computes the gradient of the sum of outputs * cotangents and
        needs `retain_graph` if another pull follows; and aux. Outputs and aux are detached, except inside a transform of
        `torch.func` other than one vmap over clients: there an outer transform may have to differentiate them.
    """
    batch = _current_batch()
    if batch is not None:  # inside exactly one vmap over clients: plain autograd on the tensors of all clients
        batched_variables = batch.make_variables(params)
        with torch.enable_grad():
            outputs, aux = function(batch.wrap(batched_variables))
        batched_outputs = _as_tuple(outputs)

        def pull_batch(cotangents: Any, retain_graph: bool) -> Tree:
            return batch.gradient(batched_outputs, batched_variables, _as_tuple(cotangents), retain_graph)

        return _detach(outputs), pull_batch, _detach(aux)
    if inside_transform():  # inside nested transforms, where plain autograd does not work
        outputs, torch_pull, aux = cast(Any, torch.func.vjp(function, params, has_aux=True))

        def pull_in_transform(cotangents: Any, retain_graph: bool) -> Tree:
            return torch_pull(cotangents, retain_graph=retain_graph)[0]

        return outputs, pull_in_transform, aux
    # Outside of transforms: plain autograd.
    with torch.enable_grad():
        variables = _make_variables(params)
        outputs, aux = function(variables)
    output_tuple = _as_tuple(outputs)

    def pull(cotangents: Any, retain_graph: bool) -> Tree:
        with torch.enable_grad():
            return _gradient(output_tuple, variables, _as_tuple(cotangents), retain_graph)

    return _detach(outputs), pull, _detach(aux)


def _as_tuple(values: Any) -> tuple[Any, ...]:
    """Wrap a single tensor into a tuple."""
    return cast("tuple[Any, ...]", values if isinstance(values, tuple) else (values,))


def vmap_clients(function: Callable[..., Any]) -> Callable[..., Any]:
    """Vectorize a function over K clients, like `torch.func.vmap`.

    Every tensor in its arguments and results (nested dicts and tuples) gets a leading dimension K. It calls the private
    functions of which `torch.func.vmap` consists, because those allow to traverse the nested arguments only once.

    Args:
        function: a function of one client's tensors.

    Returns:
        A function of K clients' tensors, each (K, ...).
    """

    def vectorized(*arguments: Any) -> Any:
        """Call `function` once, on tensors whose leading dimension it does not see."""
        leaves = list_tensors(arguments)
        clients = len(leaves[0])
        lazy_load_decompositions()  # vmap needs them for operators without a batching rule
        level = _vmap_increment_nesting(clients, "error")  # as in vmap: random numbers inside raise an error
        try:
            # Batched tensors, which hide dimension 0 from `function`.
            wrapped = (_add_batch_dim(leaf, 0, level) for leaf in leaves)
            result = function(*rebuild_nested(arguments, wrapped))
            unwrapped = (_remove_batch_dim(leaf, level, clients, 0) for leaf in list_tensors(result))
            return rebuild_nested(result, unwrapped)
        finally:
            _vmap_decrement_nesting()

    return vectorized


def apply_across_clients(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor | None:
    """Apply a function to the activations of all clients of a vmap at once, with clients as channels.

    It is for functions that treat all channels equally, such as pooling, and saves the overhead of vmap.

    Args:
        function: maps activations (B, K * C, ...), B for the batch, to a tensor of the same first two dimensions.
        z: activations (B, C, ...) of one client, inside the vmap over K clients.

    Returns:
        The client's result; None outside of vmap, or inside of further transforms.
    """
    batch = _current_batch()
    if batch is None:
        return None
    differentiable = torch.is_grad_enabled()
    # Popping the stack of transforms leaves the vmap, so that ordinary autograd records the call on unwrapped tensors.
    # It may also change whether gradients are recorded, which is therefore set again.
    with temporarily_pop_interpreter_stack(), torch.set_grad_enabled(differentiable):
        # (K, B, C, ...) -> (B, K, C, ...) -> (B, K * C, ...)
        output = function(batch.unwrap(z).movedim(0, 1).flatten(1, 2))
        by_client = torch.unflatten(output, 1, (batch.size, -1))
    return _add_batch_dim(by_client, 1, batch.level)


def call_with_all_clients(function: Callable[..., Any], *trees: Tree) -> Any:
    """Call a function outside of the vmap over clients around this call, with the tensors of all K clients.

    It is for functions of PyTorch that vmap has no rules for, such as those for lists of tensors.

    Args:
        function: maps trees with leaves (K, ...) to nested dicts and tuples of tensors (K, ...).
        trees: trees of one client, inside the vmap.

    Returns:
        The results of one client; None outside of vmap, or inside of further transforms.
    """
    batch = _current_batch()
    if batch is None:
        return None
    differentiable = torch.is_grad_enabled()
    with temporarily_pop_interpreter_stack(), torch.set_grad_enabled(differentiable):
        results = function(*(tree.map(batch.unwrap, each) for each in trees))
    return rebuild_nested(results, (_add_batch_dim(leaf, 0, batch.level) for leaf in list_tensors(results)))


def inside_transform() -> bool:
    """Check whether this code runs inside a transform of `torch.func`."""
    return peek_interpreter_stack() is not None  # pyright: ignore[reportUnnecessaryComparison]: its stub says never None


class _ClientBatch(NamedTuple):
    """The vmap over K clients that encloses the current call. It has access to the tensors of all K clients.

    Attributes:
        level: the nesting level of the vmap.
        size: K.
    """

    level: int
    size: int

    def unwrap(self, leaf: Tensor) -> Tensor:
        """Get the tensor (K, ...) of all clients under a tensor of one client."""
        if not is_batchedtensor(leaf):
            return leaf.expand(self.size, *leaf.shape)
        dimension = maybe_get_bdim(leaf)
        return get_unwrapped(leaf).movedim(dimension, 0) if dimension else get_unwrapped(leaf)

    def make_variables(self, params: Tree) -> Tree:
        """Make a tree of the tensors of all clients (K, ...) with respect to which autograd differentiates."""
        with temporarily_pop_interpreter_stack():
            return _make_variables(tree.map(self.unwrap, params))

    def wrap(self, batched: Tree) -> Tree:
        """Make the tree that one client uses inside the vmap."""
        return tree.map(lambda leaf: _add_batch_dim(leaf, 0, self.level), batched)

    def gradient(
        self,
        outputs: tuple[Tensor, ...],
        variables: Tree,
        cotangents: tuple[Any, ...] | None,
        retain_graph: bool = False,
    ) -> Tree:
        """Compute the gradients of all K clients of this vmap by one backward pass of the sum of their losses.

        This is correct because no client's loss depends on the variables of another client.

        Args:
            outputs: what is differentiated, as batched tensors inside the vmap over clients.
            variables: the variables of all clients, ordinary tensors with a leading dimension K (`make_variables`).
            cotangents: a weight tensor for each output; None for a single output with weight 1.
            retain_graph: whether the graph is needed for another gradient.

        Returns:
            A tree like `variables`, of batched tensors inside the vmap.
        """
        # Popping the stack of transforms leaves the vmap, so that ordinary autograd can run on the unwrapped tensors.
        with temporarily_pop_interpreter_stack(), torch.enable_grad():
            batched_outputs = tuple(self.unwrap(output) for output in outputs)
            if cotangents is None:
                batched_cotangents = (torch.ones_like(batched_outputs[0]),)
            else:
                batched_cotangents = tuple(map(self.unwrap, cotangents))
            gradients = _gradient(batched_outputs, variables, batched_cotangents, retain_graph)
        return self.wrap(gradients)


def _current_batch() -> _ClientBatch | None:
    """Find the vmap over clients around this call; None if there is none, or another transform as well."""
    stack = get_interpreter_stack() if inside_transform() else []
    if len(stack) != 1 or stack[0].key() != TransformType.Vmap:
        return None
    return _ClientBatch(stack[0].level(), CVmapInterpreterPtr(stack[0]).batchSize())


def _make_variables(params: Tree) -> Tree:
    """Make leaf tensors on the same memory, with respect to which autograd differentiates."""
    return tree.map(lambda leaf: leaf.detach().requires_grad_(), params)


def _gradient(
    outputs: tuple[Tensor, ...], variables: Tree, cotangents: tuple[Any, ...] | None, retain_graph: bool = False
) -> Tree:
    """Differentiate the sum of outputs with respect to variables with autograd.

    Args:
        outputs: scalars, or tensors of any shape if there are cotangents.
        variables: a tree of leaf tensors that the outputs were computed from.
        cotangents: a weight tensor for each output; None if every weight is 1.
        retain_graph: whether the graph is needed for another gradient.

    Returns:
        A tree like `variables`; zeros where no output depends on a variable.
    """
    active = [index for index, output in enumerate(outputs) if output.requires_grad]
    if not active:
        return tree.zeros_like(tree.map(Tensor.detach, variables))
    differentiated = [outputs[index] for index in active]
    if cotangents is not None:
        # The gradient of this sum of products with respect to an output is its cotangent, bit by bit. Passing a
        # cotangent to autograd would import SymPy, which takes almost a second.
        differentiated = [tree.sum_scalars((outputs[index] * cotangents[index]).sum() for index in active)]
    leaves = list(tree.leaves(variables))
    gradients = torch.autograd.grad(
        differentiated, leaves, retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )
    return rebuild_nested(variables, iter(gradients))


def _detach(value: Any) -> Any:
    """Detach all tensors of nested dicts and tuples from the graph."""
    return rebuild_nested(value, (leaf.detach() for leaf in list_tensors(value)))


def list_tensors(value: Any) -> list[Tensor]:
    """List the tensors of nested dicts and tuples in order."""
    tensors: list[Tensor] = []
    _append_tensors(value, tensors)
    return tensors


def _append_tensors(value: Any, tensors: list[Tensor]) -> None:
    """Append the tensors of nested dicts and tuples to a list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return
    children = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
    for child in children:
        # Compared by type, and without a call for each tensor, because every step of every client does this several times.
        if type(child) is Tensor:
            tensors.append(child)
        else:
            _append_tensors(child, tensors)


def rebuild_nested(template: Any, leaves: Iterator[Tensor]) -> Any:
    """Build a structure like `template` (nested dicts and tuples) with other leaves.

    Args:
        template: the structure, whose tensors are replaced.
        leaves: the new tensors, in the order of `list_tensors`; as many as the template has are taken.
    """
    if isinstance(template, dict):
        return {
            key: next(leaves) if type(value) is Tensor else rebuild_nested(value, leaves)
            for key, value in cast(Tree, template).items()
        }
    if isinstance(template, Tensor):
        return next(leaves)
    children: Iterable[Any] = [rebuild_nested(child, leaves) for child in template]
    is_named_tuple = hasattr(template, "_fields")
    return type(template)(*children) if is_named_tuple else type(template)(children)


def cross_entropy(logits: Tensor, labels: Tensor, reduction: Literal["mean", "none"] = "mean") -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of logits (n, classes) and labels (n,): (), or (n,) for "none".

    Under vmap PyTorch decomposes that function in Python, at every step, and imports SymPy to do so. There a gather
    computes the same.
    """
    if not inside_transform():
        return F.cross_entropy(logits, labels, reduction=reduction)
    losses = -logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    return losses.mean() if reduction == "mean" else losses
