"""What a network is: parameters in, logits and batch moments out; no side effect, nothing hidden."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar, cast, get_args

import torch
from torch import Tensor
from torch.func import jvp

from halfmoon.core import padding, tree
from halfmoon.core.errors import UserError, one_line, suggest
from halfmoon.core.tree import Tree
from halfmoon.models.passes import (
    MOMENTUM,
    EvalPass,
    ForwardPass,
    Norm,
    Precision,
    ProductCounter,
    RecordingPass,
    TangentPass,
    TrainPass,
    product_precision,
    to_float32,
)

ANY_REAL = "any real row"
"""Beside the moments of a pass over padded rows: whether any was real, a name that no layer has; else none counts."""


@dataclass(frozen=True)
class Network(ABC):
    """A classifier as a pure function.

    A model is the tree {"params": ..., "stats": ...}; "stats" holds the tracked mean and variance of each batch
    normalization and travels with the parameters. Under `norm` "group" and "none" there is nothing to track: stats and
    moments are {}. "none" is FedMatch's: no normalization, and no bias anywhere.

    Passes read sizes from the parameters, so the leading part of every leaf is a network as well (HeteroFL).
    `precision` is that of the products in passes over float32; trees and logits are float32 all the same.
    Raises `UserError` for an unknown `norm`.
    """

    channels: int = 3
    classes: int = 10
    width: int = 64
    norm: Norm = "batch"
    sliceable: ClassVar[bool] = True  # whether the leading part of every leaf is a network as well
    fixed_norm: ClassVar[bool] = False  # whether `norm` is not to be chosen: the network has its own
    precision: Precision = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise UserError(f"norm is {self.norm!r}: {suggest(str(self.norm), get_args(Norm))}")

    @abstractmethod
    def init(self, generator: torch.Generator) -> Tree:
        """Return {"params", "stats"}, drawn from `generator`."""

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        """Return what x (B, C, H, W) comes to, (B, classes), when `run` does what each layer does; "head" is last.

        A network that has passes of its own needs none.
        """
        raise NotImplementedError

    @abstractmethod
    def check(self, shape: tuple[int, int, int]) -> None:
        """Raise `UserError` if images of `shape` (C, H, W) do not fit."""

    @property
    def head(self) -> str | None:
        """Return the path of the last linear layer, None where there is no such layer."""
        return "head"

    def full_model(self, model: Tree) -> "tuple[Network, Tree]":
        """Return the network and the model that is saved, of what is trained: here these are the same."""
        return self.in_float32, model

    @property
    def in_float32(self) -> "Network":
        """Return the network whose products are not rounded: what is tested, saved and shipped."""
        return self if self.precision == "float32" else replace(self, precision="float32")

    def _passed(self, x: Tensor, run: ForwardPass) -> Tensor:
        with product_precision(self.precision, x.device):
            return to_float32(self.layers(x, run))

    def tree_path(self, name: str) -> str | None:
        """Return where a tensor of a PyTorch state dict lies in the model, None where the model has no place for it.

        "block.0.weight" is params/block/0/weight, "block.1.running_var" stats/block/1/var.
        """
        layer, _, last = name.rpartition(".")
        if last == "num_batches_tracked":
            return None
        kind = {"running_mean": "mean", "running_var": "var"}.get(last)
        place = layer.replace(".", "/")
        return f"stats/{place}/{kind}" if kind else f"params/{name.replace('.', '/')}"

    def zero_moments(self, params: Tree) -> Tree:
        """Return zeros in the shape of the moments: what a client without images has seen."""
        biases = {name: part["norm"]["bias"] for name, part in params.items() if "norm" in part}
        return {name: {"mean": torch.zeros_like(b), "var": torch.zeros_like(b)} for name, b in biases.items()}

    def count_products(self, shape: tuple[int, int, int]) -> int | None:
        """Return how many products one image of `shape` (C, H, W) costs forward, None where that cannot be counted."""
        with torch.device("meta"):
            params = self.init(torch.Generator())["params"]
        run = ProductCounter(params, self.norm)
        self.layers(torch.zeros(1, *shape), run)
        return run.products

    def train(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        """Return logits (B, classes) under batch statistics, and the moments {layer: {"mean", "var"}}.

        "var" is the unbiased variance, which is what running statistics track (as in PyTorch). Layers of which
        `settled` has statistics are normalized by these and have no moments. With a mask `real` (B,), statistics are
        those of the real images, and logits of the others mean nothing.
        """
        run = TrainPass(params, self.norm, settled=settled or {}, real=real)
        return self._passed(x, run), run.moments

    def embed(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        """Return (logits, features, moments): what `train` does, with the features (B, F) that the head was given.

        A second head can stand on the same pass, such as ReMixMatch's for rotations.
        """
        run = TrainPass(params, self.norm, settled=settled or {}, real=real)
        return self._passed(x, run), to_float32(run.inputs["head"]), run.moments

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Return logits (B, classes) under batch statistics, and the tape from which `tangent` works."""
        run = RecordingPass(params, self.norm, real=real)
        return self._passed(x, run), run.tape

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        """Return the derivative (B, classes) of the logits that `linearize` gave for these images, along `direction`.

        What `torch.func.jvp` gives; but the activations come from the tape, where that computes them a second time.
        """
        return self._passed(x, TangentPass(params, self.norm, direction, x, iter(tape), real))

    def predict(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        """Return logits (B, classes) under the tracked statistics ({} where nothing is tracked)."""
        return self.represent(params, stats, x)[0]

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits, features): what `predict` does, with the features (B, F) that the head was given.

        A network without a head has its logits for features.
        """
        run = EvalPass(params, self.norm, stats)
        logits = self._passed(x, run)
        return logits, to_float32(run.inputs.get(self.head or "", logits))


def check_sides(name: str, shape: tuple[int, int, int], multiple: int, least: int) -> None:
    """Raise `UserError` where a side of images (C, H, W) is below `least` or no multiple."""
    _, height, width = shape
    if min(height, width) < least or height % multiple or width % multiple:
        raise UserError(
            f"{name} takes images whose sides are multiples of {multiple} and at least {least}, not {height}x{width}; "
            "set image_size to the next such size, or use network = 'small'."
        )


def forward_tangent(
    network: Network, params: Tree, x: Tensor, direction: Tree, real: Tensor | None, refusal: str
) -> Tensor:
    """Return `Network.tangent` by `torch.func.jvp`, without a tape.

    Raise `UserError` with the words of `refusal`, and {} in them for PyTorch's, where a layer has no such derivative.
    """
    # PyTorch's forward-mode of a group normalization refuses other layouts.
    params, x, direction = tree.contiguous(params), x.contiguous(), tree.contiguous(direction)
    try:
        return jvp(lambda p: network.train(p, x, real=real)[0], (params,), (direction,))[1]
    except NotImplementedError as error:
        raise UserError(refusal.format(one_line(error)[:120])) from error


def track(stats: Tree, moments: Tree) -> Tree:
    """Return the running statistics after one more forward pass, with PyTorch's momentum of 0.1."""
    new = tree.map(lambda old, new: torch.lerp(old, new, MOMENTUM), stats, moments)
    return new if ANY_REAL not in moments else tree.select(moments[ANY_REAL], new, stats)


def mark_if_any_real(moments: Tree, real: Tensor | None) -> Tree:
    """Return a pass's moments with the mark by which `track` leaves out those of no row that is `real` (B,)."""
    return moments if real is None else {**moments, ANY_REAL: real.any()}


def forward(
    network: Network,
    params: Tree,
    joint: bool,
    taught: tuple[Tensor, ...],
    frozen: tuple[Tensor, ...] = (),
    real: tuple[Tensor, ...] = (),
) -> tuple[list[Tensor], list[Tensor], list[Tree]]:
    """Pass several groups of images under batch statistics, together or each alone.

    `taught` groups are differentiated; `frozen` ones only yield detached logits (pseudo-labels), and when each group
    passes alone they cost no backward pass. Return (logits of taught, logits of frozen, moments of every pass in
    the order frozen, taught). `real` has a mask of each group, `taught` first, where rows are padding.
    """
    groups = (*taught, *frozen)
    if joint:
        logits, moments = network.train(params, torch.cat(groups), real=padding.concat(real))
        parts = list(logits.split([len(group) for group in groups]))
        return parts[: len(taught)], [part.detach() for part in parts[len(taught) :]], [moments]
    masks = real or (None,) * len(groups)
    passes: list[Tree] = []
    quiet: list[Tensor] = []
    with torch.no_grad():
        for group, mask in zip(frozen, masks[len(taught) :], strict=True):
            logits, moments = network.train(params, group, real=mask)
            quiet.append(logits.detach())
            passes.append(moments)
    loud: list[Tensor] = []
    for group, mask in zip(taught, masks[: len(taught)], strict=True):
        if not len(group):  # a client without labels
            loud.append(group.new_zeros(0, network.classes))
            continue
        logits, moments = network.train(params, group, real=mask)
        loud.append(logits)
        passes.append(mark_if_any_real(moments, mask))
    return loud, quiet, passes


def kernels(params: Tree) -> Tree:
    """Return the kernels of convolutions and linear layers: the leaves of two dimensions or more."""
    tensors: Tree = {}
    for name, part in params.items():
        if isinstance(part, dict):
            if inner := kernels(cast(Tree, part)):
                tensors[name] = inner
        elif part.dim() >= 2:
            tensors[name] = part
    return tensors


def linear(generator: torch.Generator, inputs: int, outputs: int) -> Tree:
    return uniform(generator, (outputs, inputs), inputs)


def affine(channels: int) -> Tree:
    return {"weight": torch.ones(channels), "bias": torch.zeros(channels)}


def initial_stats(channels: int) -> Tree:
    return {"mean": torch.zeros(channels), "var": torch.ones(channels)}


def uniform(generator: torch.Generator, shape: tuple[int, ...], fan_in: int) -> Tree:
    """Draw U(-1/sqrt(fan_in), 1/sqrt(fan_in)): what Kaiming uniform with a = sqrt(5) comes to."""
    bound = fan_in**-0.5
    return {
        "weight": torch.empty(shape).uniform_(-bound, bound, generator=generator),
        "bias": torch.empty(shape[0]).uniform_(-bound, bound, generator=generator),
    }


@dataclass(frozen=True)
class Normalize:
    """Map uint8 pixels to (x / 255 - mean) / std, one mean and one std a channel, in `dtype`.

    Unequal numbers of means and stds, or a std that is not positive, raise UserError.
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise UserError(
                f"Normalize has {len(self.mean)} means and {len(self.std)} standard deviations: "
                "give one of each for every channel."
            )
        if not all(value > 0 for value in self.std):
            raise UserError(f"Normalize has the standard deviations {self.std}: all must be positive.")

    def __call__(self, images: Tensor) -> Tensor:
        """Return float images (n, C, H, W) from uint8 images (n, C, H, W) on the same device.

        Raises UserError for images of another type or another number of channels than `mean`.
        """
        if images.dtype is not torch.uint8:
            raise UserError(f"Normalize got images of {images.dtype}: give uint8 pixels, 0 to 255.")
        channels = images.shape[1]
        if channels != len(self.mean):
            raise UserError(
                f"Normalize holds {len(self.mean)} channel(s), the images have {channels}: "
                "take the mean and std of this source."
            )
        scale, shift = _constants(self.mean, self.std, self.dtype, images.device)
        return images.to(self.dtype).mul_(scale).add_(shift)


@lru_cache(maxsize=16)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return scale and shift (C, 1, 1): one multiplication and one addition a pixel, rounded once from doubles."""
    scale = torch.tensor([1 / (255 * spread) for spread in std], dtype=dtype, device=device)
    shift = torch.tensor([-centre / spread for centre, spread in zip(mean, std, strict=True)], dtype=dtype)
    return scale.view(-1, 1, 1), shift.to(device).view(-1, 1, 1)
