"""Networks that are a chain of 3x3 convolutions: ResNet-9, and a small one for the embedded digits and for tests."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.models.network import Network, affine, check_sides, initial_stats, linear, uniform
from halfmoon.models.passes import ForwardPass

CUT_NORMAL_STD = 0.87962566103423978
"""The standard deviation of a standard normal variable cut at -2 and 2."""


@dataclass(frozen=True)
class Chain(Network):
    """3x3 convolutions, each with its normalization or none, and a head on the last."""

    @abstractmethod
    def blocks(self) -> dict[str, tuple[int, int]]:
        """Return the channels of each convolution, {name: (inputs, outputs)}."""

    def init(self, generator: torch.Generator) -> Tree:
        """Draw as PyTorch draws; under "none", without bias and as FedMatch's code draws (`unbiased`)."""
        params: Tree = {}
        blocks, last = self.blocks(), self.channels
        for name, (inputs, last) in blocks.items():
            if self.norm == "none":
                params[name] = {"conv": unbiased(generator, (last, inputs, 3, 3))}
            else:
                params[name] = {"conv": uniform(generator, (last, inputs, 3, 3), inputs * 9), "norm": affine(last)}
        shape = (self.classes, last)
        params["head"] = unbiased(generator, shape) if self.norm == "none" else linear(generator, last, self.classes)
        tracked = {name: initial_stats(outputs) for name, (_, outputs) in blocks.items()}
        return {"params": params, "stats": tracked if self.norm == "batch" else {}}

    def block(self, run: ForwardPass, name: str, z: Tensor) -> Tensor:
        return run.relu(run.norm(name, run.conv(name, z)))


@dataclass(frozen=True)
class ResNet9(Chain):
    """ResNet-9; 6,575,370 parameters at width 64 with 3 channels and 10 classes, 6,568,640 without normalization.

    Three halvings and a global maximum take images of 16x16, 32x32 or any larger multiple of 8; at 32x32 the global
    maximum is the MaxPool(4) of the papers.
    """

    def blocks(self) -> dict[str, tuple[int, int]]:
        w = self.width
        return {
            "prep": (self.channels, w),
            "layer1": (w, 2 * w),
            "res1a": (2 * w, 2 * w),
            "res1b": (2 * w, 2 * w),
            "layer2": (2 * w, 4 * w),
            "layer3": (4 * w, 8 * w),
            "res3a": (8 * w, 8 * w),
            "res3b": (8 * w, 8 * w),
        }

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        block = partial(self.block, run)
        z = block("prep", x)
        z = run.pool(block("layer1", z), 2)
        z = z + block("res1b", block("res1a", z))
        z = run.pool(block("layer2", z), 2)
        z = run.pool(block("layer3", z), 2)
        z = z + block("res3b", block("res3a", z))
        z = run.pool(z, list(z.shape[-2:])).flatten(1)
        return run.linear("head", z)

    def check(self, shape: tuple[int, int, int]) -> None:
        check_sides("ResNet-9", shape, multiple=8, minimum=16)


@dataclass(frozen=True)
class SmallCNN(Chain):
    """Three 3x3 convolutions (width, 2 width, 2 width) with normalization, two halvings, global mean."""

    width: int = 16

    def blocks(self) -> dict[str, tuple[int, int]]:
        w = self.width
        return {"conv1": (self.channels, w), "conv2": (w, 2 * w), "conv3": (2 * w, 2 * w)}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        z = x
        for name in ("conv1", "conv2", "conv3"):
            z = self.block(run, name, z)
            if name != "conv3":
                z = run.pool(z, 2)
        return run.linear("head", z.mean((-2, -1)))

    def check(self, shape: tuple[int, int, int]) -> None:
        if min(shape[1:]) < 4:
            raise UserError(f"The small network takes images of at least 4x4 pixels, not {shape[1]}x{shape[2]}.")


def unbiased(generator: torch.Generator, shape: tuple[int, ...]) -> Tree:
    """Return a weight alone: variance 1 / fan in, normal, cut at two deviations (Keras' VarianceScaling, FedMatch)."""
    weight = torch.empty(shape)
    std = weight[0].numel() ** -0.5 / CUT_NORMAL_STD
    torch.nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator=generator)
    return {"weight": weight}
