"""Base class of networks: pure functions from parameters and images to logits and batch statistics."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from halfmoon.core import padding, tree
from halfmoon.core.arithmetic import Precision
from halfmoon.core.errors import UserError, one_line, suggest
from halfmoon.core.tree import Tree
from halfmoon.models.passes import (
    MOMENTUM,
    EvalPass,
    ForwardPass,
    Norm,
    ProductCounter,
    RecordingPass,
    TangentPass,
    TrainPass,
    product_precision,
    to_float32,
)

ANY_REAL = "any real row"
"""Key in the moments of a pass over padded rows: whether any row was real. Otherwise the moments are ignored."""


@dataclass(frozen=True)
class Network(ABC):
    """A classifier as a pure function.

    A model is the tree {"params": ..., "stats": ...}; "stats" has the tracked mean and variance of each batch
    normalization and is sent with the parameters. With `norm` "group" and "none" there are no statistics: stats and
    moments are {}. "none" is FedMatch's network, without normalization and biases.

    Passes read sizes from the parameters, so the first rows and columns of every leaf are a narrower network (HeteroFL).

    Attributes:
        channels: channels of images.
        classes: number of classes.
        width: a factor of the layers' sizes.
        norm: kind of normalization.
        sliceable: whether the first rows and columns of every leaf are a narrower network.
        fixed_norm: whether the network has a fixed normalization, and `norm` cannot be chosen.
        precision: precision of the products in passes; trees and logits are always float32.

    Raises:
        UserError: `norm` is unknown.
    """

    channels: int = 3
    classes: int = 10
    width: int = 64
    norm: Norm = "batch"
    sliceable: ClassVar[bool] = True
    fixed_norm: ClassVar[bool] = False
    precision: Precision = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise UserError(f"norm is {self.norm!r}: {suggest(str(self.norm), get_args(Norm))}")

    @abstractmethod
    def init(self, generator: torch.Generator) -> Tree:
        """Initialize a model {"params", "stats"} at random."""

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        """Compute the logits (B, classes) of x (B, C, H, W), where `run` computes each layer; the last one is "head".

        Networks that override the passes do not need it.
        """
        raise NotImplementedError

    @abstractmethod
    def check(self, shape: tuple[int, int, int]) -> None:
        """Check that images of a shape (C, H, W) fit; raises `UserError`."""

    @property
    def head(self) -> str | None:
        """Path of the last linear layer; None if there is no such layer."""
        return "head"

    def head_layer(self, params: Tree, method: str) -> Tree:
        """Return the parameters of the last linear layer: "weight" (classes, F), and "bias" (classes,) if it has one.

        Args:
            params: the parameters of the network.
            method: the name of the method that needs the layer, for the error.

        Raises:
            UserError: the network does not end in a linear layer.
        """
        if self.head is None:
            raise UserError(f"{method} needs a network that ends in a linear layer: choose another network or method.")
        layer: Any = params
        for name in self.head.split("/"):
            layer = layer[name]
        return layer

    def check_head_name(self, method: str) -> None:
        """Raise UserError unless the last layer is called "head", as in halfmoon's networks.

        Args:
            method: the name of the method that adds or replaces layers next to it, for the error.
        """
        if self.head != "head":
            raise UserError(
                f"{method} needs one of halfmoon's networks, as it works on the weights of their last layer: choose another "
                "network or method."
            )

    @property
    def has_dropout(self) -> bool:
        """True if the network has dropout, which is only applied in training (`halfmoon.models.dropout`)."""
        return False

    def full_model(self, model: Tree) -> "tuple[Network, Tree]":
        """Convert a trained model to the network and the model that are saved. Subclasses add frozen parameters."""
        return self.in_float32, model

    @property
    def in_float32(self) -> "Network":
        """The network in float32, which is evaluated, saved and exported."""
        return self if self.precision == "float32" else replace(self, precision="float32")

    def _run_layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        with product_precision(self.precision, x.device):
            return to_float32(self.layers(x, run))

    def tree_path(self, name: str) -> str | None:
        """Convert the name of a tensor in a PyTorch state dict to its path in the model.

        Args:
            name: such as "block.0.weight", which is params/block/0/weight, or "block.1.running_var", which is
                stats/block/1/var.

        Returns:
            The path; None if the model has no such tensor.
        """
        layer, _, tensor_name = name.rpartition(".")
        if tensor_name == "num_batches_tracked":  # of use only to a momentum that changes
            return None
        statistic = {"running_mean": "mean", "running_var": "var"}.get(tensor_name)
        layer_path = layer.replace(".", "/")
        return f"stats/{layer_path}/{statistic}" if statistic else f"params/{name.replace('.', '/')}"

    def zero_moments(self, params: Tree) -> Tree:
        """Make zeros of the shapes of the moments, for clients without images."""
        moments: Tree = {}
        for name, layer in params.items():
            if "norm" in layer:
                bias = layer["norm"]["bias"]
                moments[name] = {"mean": torch.zeros_like(bias), "var": torch.zeros_like(bias)}
        return moments

    def count_products(self, shape: tuple[int, int, int]) -> int | None:
        """Count the multiplications of a forward pass of one image (C, H, W); None if they cannot be counted."""
        with torch.device("meta"):  # shapes without memory for values
            params = self.init(torch.Generator())["params"]
        run = ProductCounter(params, self.norm)
        self.layers(torch.zeros(1, *shape), run)
        return run.products

    def train(
        self, params: Tree, x: Tensor, fixed_stats: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        """Compute logits under batch statistics, and the batch statistics.

        Args:
            params: parameters.
            x: images (B, C, H, W).
            fixed_stats: fixed statistics of some layers, which are normalized by these and have no moments.
            real: (B,) bool, False for padding. Statistics are those of real images; logits of padding are undefined.

        Returns:
            Logits (B, classes), and moments {layer: {"mean", "var"}}. "var" is the unbiased variance, which running
            statistics track, as in PyTorch.
        """
        run = TrainPass(params, self.norm, fixed_stats=fixed_stats or {}, real=real)
        return self._run_layers(x, run), run.moments

    def embed(
        self, params: Tree, x: Tensor, fixed_stats: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        """Compute logits, features and moments like `train`; features (B, F) are the inputs of the head.

        A second head can use the features of the same pass, such as ReMixMatch's for rotations.
        """
        run = TrainPass(params, self.norm, fixed_stats=fixed_stats or {}, real=real)
        return self._run_layers(x, run), to_float32(run.inputs["head"]), run.moments

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        """Compute logits (B, classes) under batch statistics, and record for `tangent` what it needs of each layer.

        Args:
            params: parameters.
            x: images (B, C, H, W).
            real: (B,) bool, False for padding, which is left out of the statistics; None if there is none.

        Returns:
            The logits, those of padding undefined, and the tape: the activations, batch statistics and positions of
            maxima that each layer recorded, in the order in which the layers ran.
        """
        run = RecordingPass(params, self.norm, real=real)
        return self._run_layers(x, run), run.tape

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        """Compute the derivative (B, classes) of the logits of `linearize` along a direction of the parameters.

        It equals that of `torch.func.jvp`, which would compute the activations a second time. Here each layer gets them
        from the tape, in the order in which `linearize` recorded them.

        Args:
            params: the parameters of `linearize`.
            x: the images of `linearize`.
            tape: the tape that `linearize` returned. It is read, not changed.
            direction: a tree like the parameters.
            real: the mask of `linearize`, (B,) bool: False for padding, whose derivatives are undefined.
        """
        tangents = TangentPass(params, self.norm, direction, x, iter(tape), real)
        return self._run_layers(x, tangents)

    def predict(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        """Compute logits (B, classes) under the tracked statistics ({} if there are none)."""
        return self.represent(params, stats, x)[0]

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits like `predict`, and features (B, F), the inputs of the head; without a head, the logits."""
        run = EvalPass(params, self.norm, stats)
        logits = self._run_layers(x, run)
        return logits, to_float32(run.inputs.get(self.head or "", logits))

    def extract_features(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        """Compute the features of `represent` only; a network whose inputs are features need not compute logits."""
        return self.represent(params, stats, x)[1]


def check_sides(name: str, shape: tuple[int, int, int], multiple: int, minimum: int) -> None:
    """Check that height and width of images fit a network.

    Args:
        name: the network's name, for the error message.
        shape: (C, H, W) of the images.
        multiple: height and width must be multiples of this number.
        minimum: the smallest height and width.

    Raises:
        UserError: they do not fit.
    """
    _, height, width = shape
    if min(height, width) < minimum or height % multiple or width % multiple:
        raise UserError(
            f"{name} takes images whose sides are multiples of {multiple} and at least {minimum}, not {height}x{width}; "
            "set image_size to the next such size, or use network = 'small'."
        )


def forward_tangent(
    network: Network, params: Tree, x: Tensor, direction: Tree, real: Tensor | None, refusal: str
) -> Tensor:
    """Compute the derivative of the logits along a direction of the parameters, by `torch.func.jvp` (forward mode).

    It serves networks for which no tape is recorded (`Network.tangent`).

    Args:
        network: the network.
        params: its parameters.
        x: images (B, C, H, W).
        direction: a tree like `params`.
        real: (B,) bool, False for padding; None if there is none.
        refusal: the error message, in which PyTorch's message replaces {}.

    Returns:
        (B, classes).

    Raises:
        UserError: a layer has no forward derivative.
    """
    # PyTorch's forward mode of group normalization accepts only contiguous tensors.
    params = tree.contiguous(params)
    x = x.contiguous()
    direction = tree.contiguous(direction)
    try:
        # Of PyTorch's kernels for attention only the plain one has a forward derivative.
        with sdpa_kernel(SDPBackend.MATH):
            return jvp(lambda p: network.train(p, x, real=real)[0], (params,), (direction,))[1]
    except NotImplementedError as error:
        raise UserError(refusal.format(one_line(error)[:120])) from error


def track(stats: Tree, moments: Tree) -> Tree:
    """Update running statistics by the moments of a pass, with PyTorch's momentum of 0.1."""
    new = tree.map(lambda old, new: torch.lerp(old, new, MOMENTUM), stats, moments)
    return new if ANY_REAL not in moments else tree.select(moments[ANY_REAL], new, stats)


def mark_if_any_real(moments: Tree, real: Tensor | None) -> Tree:
    """Record in a pass's moments whether any row is real (B,), so that `track` ignores a pass of padding only."""
    return moments if real is None else {**moments, ANY_REAL: real.any()}


def forward(
    network: Network,
    params: Tree,
    joint: bool,
    differentiated: tuple[Tensor, ...],
    detached: tuple[Tensor, ...] = (),
    real: tuple[Tensor, ...] = (),
) -> tuple[list[Tensor], list[Tensor], list[Tree]]:
    """Compute the logits of several groups of images under batch statistics.

    Args:
        network: the network.
        params: its parameters.
        joint: whether all groups share one pass and its statistics, or each group has a pass.
        differentiated: groups of images (n, C, H, W) whose logits are differentiated.
        detached: groups whose logits are detached, such as for pseudo-labels. In a separate pass they need no backward
            pass.
        real: masks of the rows (n,) that are not padding, those of `differentiated` first; () if no row is padding.

    Returns:
        Logits (n, classes) of each group in `differentiated`, those of `detached`, and the batch statistics of every
        pass, those of `detached` first.
    """
    count = len(differentiated)
    groups = (*differentiated, *detached)
    if joint:
        # One pass computes the gradients of all groups; `detach` below keeps those of pseudo-labels out of the loss.
        logits, moments = network.train(params, torch.cat(groups), real=padding.concat(real))
        logits_by_group = list(logits.split([len(group) for group in groups]))
        detached_logits = [group_logits.detach() for group_logits in logits_by_group[count:]]
        return logits_by_group[:count], detached_logits, [moments]
    # Separate passes: each group has batch statistics of its own, and pseudo-labels record no graph.
    masks = real or (None,) * len(groups)
    passes: list[Tree] = []
    detached_logits = []
    with torch.no_grad():
        for group, mask in zip(detached, masks[count:], strict=True):
            logits, moments = network.train(params, group, real=mask)
            detached_logits.append(logits.detach())
            passes.append(moments)
    differentiated_logits: list[Tensor] = []
    for group, mask in zip(differentiated, masks[:count], strict=True):
        if not len(group):  # a client without labels
            differentiated_logits.append(group.new_zeros(0, network.classes))
            continue
        logits, moments = network.train(params, group, real=mask)
        differentiated_logits.append(logits)
        passes.append(mark_if_any_real(moments, mask))
    return differentiated_logits, detached_logits, passes


def kernels(params: Tree) -> Tree:
    """Select the weights of convolutions and linear layers: the leaves of two dimensions or more, without biases."""
    selected: Tree = {}
    for name, value in params.items():
        if isinstance(value, dict):
            if inner := kernels(cast(Tree, value)):
                selected[name] = inner
        elif value.dim() >= 2:
            selected[name] = value
    return selected


def linear(generator: torch.Generator, inputs: int, outputs: int) -> Tree:
    """Initialize a linear layer, {"weight" (outputs, inputs), "bias" (outputs,)}."""
    return uniform(generator, (outputs, inputs), inputs)


def affine(channels: int) -> Tree:
    """Initialize the weight and bias of a normalization, (channels,) each."""
    return {"weight": torch.ones(channels), "bias": torch.zeros(channels)}


def initial_stats(channels: int) -> Tree:
    """Initialize the statistics of a batch normalization, (channels,) each."""
    return {"mean": torch.zeros(channels), "var": torch.ones(channels)}


def uniform(generator: torch.Generator, shape: tuple[int, ...], fan_in: int) -> Tree:
    """Draw weights from U(-1/sqrt(fan_in), 1/sqrt(fan_in)), which is Kaiming uniform with a = sqrt(5)."""
    bound = fan_in**-0.5
    return {
        "weight": torch.empty(shape).uniform_(-bound, bound, generator=generator),
        "bias": torch.empty(shape[0]).uniform_(-bound, bound, generator=generator),
    }
