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
        """Draw the initial weights of convolutions and head like PyTorch; without normalization, like FedMatch's code.

        FedMatch's (ICLR 2021) networks have neither normalizations nor biases.

        Args:
            generator: draws the weights of the convolutions in their order, then those of the head.

        Returns:
            "params", and in "stats" the initial running statistics, {} unless batch normalization tracks some.
        """
        params: Tree = {}
        blocks = self.blocks()  # the channels (inputs, outputs) of each convolution
        outputs = self.channels
        for name, (inputs, outputs) in blocks.items():
            shape = (outputs, inputs, 3, 3)
            if self.norm == "none":
                params[name] = {"conv": draw_without_bias(generator, shape)}
            else:
                params[name] = {"conv": uniform(generator, shape, fan_in=inputs * 9), "norm": affine(outputs)}
        if self.norm == "none":
            params["head"] = draw_without_bias(generator, (self.classes, outputs))
        else:
            params["head"] = linear(generator, outputs, self.classes)
        stats = {name: initial_stats(outputs) for name, (_, outputs) in blocks.items()}
        return {"params": params, "stats": stats if self.norm == "batch" else {}}

    def block(self, run: ForwardPass, name: str, z: Tensor) -> Tensor:
        """Apply a convolution, its normalization and a ReLU to activations z (B, C, H, W)."""
        return run.relu(run.norm(name, run.conv(name, z)))


@dataclass(frozen=True)
class ResNet9(Chain):
    """ResNet-9; 6,575,370 parameters at width 64 with 3 channels and 10 classes, 6,568,640 without normalization.

    Three halvings and a global maximum take images of 16x16, 32x32 or any larger multiple of 8; at 32x32 the global
    maximum is the MaxPool(4) of the papers.
    """

    def blocks(self) -> dict[str, tuple[int, int]]:
        """Return the (input, output) channels of each 3x3 convolution of ResNet-9, by name, in forward order."""
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
        """Apply ResNet-9's layers: convolution blocks, of which two pairs have a residual connection.

        Args:
            x: images (B, C, H, W).
            run: computes each layer, in training, evaluation, or for tangents.

        Returns:
            Logits (B, classes).
        """
        block = partial(self.block, run)  # convolution, normalization and ReLU
        z = block("prep", x)
        z = run.pool(block("layer1", z), 2)
        z = z + block("res1b", block("res1a", z))
        z = run.pool(block("layer2", z), 2)
        z = run.pool(block("layer3", z), 2)
        z = z + block("res3b", block("res3a", z))
        # A window of the size of the image: the global maximum.
        z = run.pool(z, list(z.shape[-2:])).flatten(1)
        return run.linear("head", z)

    def check(self, shape: tuple[int, int, int]) -> None:
        check_sides("ResNet-9", shape, multiple=8, minimum=16)


@dataclass(frozen=True)
class SmallCNN(Chain):
    """Three 3x3 convolutions (width, 2 width, 2 width channels) with normalization, two max-poolings, global mean."""

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


def draw_without_bias(generator: torch.Generator, shape: tuple[int, ...]) -> Tree:
    """Draw the weight of a layer without bias: truncated normal with variance 1 / fan in.

    This is Keras' VarianceScaling, which FedMatch's code uses.
    """
    weight = torch.empty(shape)
    fan_in = weight[0].numel()
    # Cut at two standard deviations, a normal variable has a smaller one: divided by that ratio, it has the right one.
    std = fan_in**-0.5 / CUT_NORMAL_STD
    torch.nn.init.trunc_normal_(weight, mean=0.0, std=std, a=-2 * std, b=2 * std, generator=generator)
    return {"weight": weight}
