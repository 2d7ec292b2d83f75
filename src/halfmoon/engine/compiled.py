"""The steps of a client update: as it writes them, or compiled into one program for each shape.

A compiled step is traced once (`make_fx` sees through vmap and autograd alike) and becomes one program of PyTorch's
Inductor: C++ on a processor, Triton's kernels, replayed as CUDA graphs, on a GPU. What changes from round to round, the
learning rate, its factor and the round, is an input, so that all rounds take the same program. Leaves are laid out in
one way, and dictionaries sorted, so that a run that goes on from its checkpoint takes it too.

What cannot be traced, because Python looks at a tensor's value, trains as it is written, and so do steps in more than
`SHAPES` shapes; `Steps.remark` says why.
"""

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from halfmoon.api.types import Batch, ClientUpdate, StepMetrics
from halfmoon.core import tree
from halfmoon.core.autodiff import nested_leaves, nested_like, vmap_clients
from halfmoon.core.errors import UserError, one_line
from halfmoon.core.tree import Tree
from halfmoon.core.user_cache import user_cache

SHAPES = 8
"""For how many shapes of its steps a client update is compiled at most, in one process."""

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable that says where Inductor keeps its programs; processes that are started inherit it."""

Graph = Callable[..., Sequence[Tensor]]
Arguments = tuple[Tree, Tree, Tree, Batch]
"""What all clients are sent, what each is, the carry and the batch of a step."""


@dataclass
class Steps:
    """Takes the steps of one client update or, with `together`, of K that are lifted as one program.

    `broadcast` is what all are sent, `per_client` what is private to each of the K (leaves (K, ...)). Where steps should be
    `compiled` and are not, `remark` says why.
    """

    client_update: ClientUpdate
    broadcast: Tree
    per_client: Tree = field(default_factory=dict[str, Any])
    together: bool = False
    compiled: bool = False
    remark: str = ""
    _program: "Program | None" = None
    _inputs: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(self, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        if self.compiled and (self._program is None or not self._program.steady):
            self._find(carry, batch)
        if self._program is None:
            return _step(self.client_update, self.together, self.broadcast, self.per_client, carry, batch)
        return self._program.step(self._inputs, carry, batch)

    def _find(self, carry: Tree, batch: Batch) -> None:
        """Take the program for these shapes or, where there is none, no other either."""
        broadcast, each = _sorted(self.broadcast), _sorted(self.per_client)
        program = _program(self.client_update, self.together, (broadcast, each, _sorted(carry), batch))
        if isinstance(program, Program):
            task = self.client_update.task
            numbers = batch.x.new_tensor([task.optimizer.lr, task.round, task.rate])
            self._program, self._inputs = program, [numbers, *_laid((broadcast, each), program.images)]
        else:
            self._program, self.compiled = None, False
            self.remark = f"The steps of {type(self.client_update).__name__} train without compile: {program}."


class Program(NamedTuple):
    """A compiled step, for arguments of one shape."""

    run: Graph  # of numbers, what is sent, carry and batch, leaf by leaf
    like: tuple[Tree, StepMetrics]  # what comes of it, with other leaves
    steady: bool  # whether the carry that comes out has the shape of the one that went in
    images: torch.memory_format  # of 4-dimensional leaves: channels-last where the loop lays them so
    gpu: bool

    def step(self, inputs: Sequence[Tensor], carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        """Return what comes of a step."""
        if self.gpu:
            torch.compiler.cudagraph_mark_step_begin()
        outputs = self.run(*inputs, *_laid((_sorted(carry), batch), self.images))
        # A CUDA graph writes its next results over these.
        return nested_like(self.like, (leaf.clone() for leaf in outputs) if self.gpu else iter(outputs))


def _step(
    client_update: ClientUpdate, together: bool, broadcast: Tree, per_client: Tree, carry: Tree, batch: Batch
) -> tuple[Tree, StepMetrics]:
    if not together:
        return client_update.step(broadcast, carry, batch)

    def one(private: Tree, carry: Tree, batch: Batch) -> tuple[Tree, StepMetrics]:
        return client_update.step({**broadcast, **private}, carry, batch)

    return vmap_clients(one)(per_client, carry, batch)


def _with_numbers(client_update: ClientUpdate, lr: Any, round: Any, rate: Any) -> ClientUpdate:
    task = replace(client_update.task, optimizer=client_update.task.optimizer.with_lr(lr), round=round, rate=rate)
    return replace(client_update, task=task)


def _program(client_update: ClientUpdate, together: bool, arguments: Arguments) -> Program | str:
    """Return the program for arguments of these shapes, made now if there was none, or why there is none."""
    alike = _with_numbers(client_update, 1.0, 0, 1.0)
    try:
        hash(alike)
    except TypeError:
        return "its options cannot be compared"
    programs = _programs(alike, together, torch.get_num_threads())
    shape = _shape(arguments)
    if shape not in programs and len(programs) >= SHAPES:
        return (
            f"they come in more than {SHAPES} shapes, and are compiled for the first {SHAPES} of a process alone, so "
            "that last digits depend on their order; clients are alike with a number as unlabeled_batch"
        )
    if shape not in programs:
        # As it is written first: what is wrong with it is raised as ever, and networks keep what they make but once.
        broadcast, each, carry, batch = arguments  # a step writes into the optimizer's state
        _step(client_update, together, broadcast, each, tree.map(torch.clone, carry), batch)
        try:
            programs[shape] = _compiled(client_update, together, arguments)
        except Exception as error:  # whatever PyTorch cannot do
            programs[shape] = f"PyTorch cannot compile them ({type(error).__name__}: {one_line(error)[:160]})"
    return programs[shape]


@lru_cache(maxsize=16)
def _programs(client_update: ClientUpdate, together: bool, threads: int) -> dict[Any, Program | str]:
    """Return the programs by shape, to be filled, of a work in any round; a number of threads is written into them."""
    return {}


def _compiled(client_update: ClientUpdate, together: bool, arguments: Arguments) -> Program:
    """Trace a step and compile it; raise whatever PyTorch raises."""
    x = arguments[3].x
    loop = not together and x.device.type == "cpu"
    images = torch.channels_last if loop else torch.contiguous_format
    outputs: list[tuple[Tree, StepMetrics]] = []

    def flat(numbers: Tensor, *leaves: Tensor) -> list[Tensor]:
        there = _with_numbers(client_update, *numbers.unbind())
        carry, notes = _step(there, together, *nested_like(arguments, iter(leaves)))
        outputs[:] = [(_sorted(carry), notes)]
        return _laid(outputs[0], images)

    run = built(flat, [x.new_ones(3), *_laid(arguments, images)])
    (result,) = outputs
    steady = _shape(result[0]) == _shape(arguments[2])
    like = nested_like(result, (torch.empty(0) for _ in nested_leaves(result)))
    return Program(run, like, steady, images, x.device.type == "cuda")


def built(function: Graph, inputs: Sequence[Tensor]) -> Graph:
    """Return a function of tensors as a program for others of these shapes; raise whatever PyTorch raises.

    Raise ValueError where it draws random numbers.
    """
    private_cache()
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, as the rest
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Without a ShapeEnv, which has nothing to do, Inductor would not look into its cache on the disk.
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        # Each is a tensor of its own: the same one in two places, as a teacher that begins as the model, is traced as
        # one.
        fakes = [torch.empty_like(leaf) for leaf in inputs]
        graph = make_fx(function)(*fakes)
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ValueError(f"a step draws random numbers: {node.target}")
    return inductor(graph, fakes)


def inductor(graph: GraphModule, inputs: Sequence[Tensor]) -> Graph:
    """Return a graph as a program of PyTorch's Inductor, for inputs such as these."""
    from torch import _inductor  # slow to import

    # Not torch.compile, which would walk through the graph once more, and look at all inputs at each call.
    options = {"triton.cudagraphs": True} if inputs[0].device.type == "cuda" else None
    return cast(Any, _inductor).compile(graph, list(inputs), options)


def private_cache() -> Path:
    """Have Inductor keep its programs in a folder that this user alone can write to, and return the folder.

    It is `halfmoon/inductor` in the user's cache directory, or the folder that TORCHINDUCTOR_CACHE_DIR names. Inductor
    runs what it finds there: raise `UserError` where another user owns the folder, or others can read or write it.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # slow to import

    folder = user_cache("inductor")
    path = os.environ.get(CACHE)
    if path and path != default_cache_dir():  # PyTorch writes its default there, too
        folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise UserError(
            f"compile keeps its programs in {folder}, which cannot be made ({error.strerror or error}): set {CACHE} to "
            "a folder of your own."
        ) from error
    problem = ""
    if not stat.S_ISDIR(facts.st_mode):
        problem = "is no folder"
    elif hasattr(os, "getuid") and facts.st_uid != os.getuid():
        problem = "belongs to another user"
    elif hasattr(os, "getuid") and facts.st_mode & 0o077:
        problem = "is not private, as others can read or write it"
    if problem:
        raise UserError(
            f"compile runs the programs in {folder}, but this {problem}: remove it, or make it "
            f"private (chmod 700), or set {CACHE} to a folder of your own."
        )
    os.environ[CACHE] = str(folder)
    from torch._inductor import codecache

    # Precompiled headers go into PyTorch's default folder whatever the variable says.
    module: Any = codecache
    module._HEADER_DIR = str(folder / "precompiled_headers")
    module._HEADER_LOCK_DIR = str(folder / "precompiled_headers" / "locks")
    return folder


def check(device: torch.device) -> None:
    """Raise `UserError` where nothing can be compiled: without a C++ compiler, or without Triton."""
    try:
        x = torch.ones(8, device=device)
        built(lambda *leaves: [leaves[0] + 1], [x])(x)
    except UserError:
        raise
    except Exception as error:
        tools = "a C++ compiler (g++ or clang++)" if device.type == "cpu" else "Triton and a C compiler"
        raise UserError(
            f"compile needs {tools}, and PyTorch finds none that works ({type(error).__name__}: "
            f"{one_line(error)[:160]}); install it, or leave compile out."
        ) from error


def _laid(value: Any, images: torch.memory_format) -> list[Tensor]:
    """Return the leaves of compiled steps as they lie in memory, 4-dimensional ones as `images`."""
    formats = {4: images}
    leaves = nested_leaves(value)
    return [leaf.contiguous(memory_format=formats.get(leaf.dim(), torch.contiguous_format)) for leaf in leaves]


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.device
    if isinstance(value, dict):
        return tuple((key, _shape(each)) for key, each in cast(Tree, value).items())
    return tuple(_shape(each) for each in value)


def _sorted(tree: Tree) -> Tree:
    return {key: _sorted(tree[key]) if isinstance(tree[key], dict) else tree[key] for key in sorted(tree)}
