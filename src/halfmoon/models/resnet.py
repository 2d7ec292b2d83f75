"""Residual networks: ResNet-8 of SAGE and ProxyFL, and ResNet-18 with the stem of ImageNet or for 32x32 images."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.models.network import Network, affine, check_sides, initial_stats, linear
from halfmoon.models.passes import ForwardPass

STEM_CHANNELS = 16
"""Channels of the first convolution of a Wide ResNet."""


@dataclass(frozen=True)
class WideResNet(Network):
    """WRN-`depth`-`width`: three groups of (depth - 4) / 6 pre-activation blocks of 16, 32, 64 times `width` channels.

    1,467,610 parameters for WRN-28-2 with 10 classes, 23,401,012 for WRN-28-8 with 100. Convolutions have no bias. A
    block is z + conv(relu(norm(conv(relu(norm(z)))))); where it changes the channels, a 1x1 convolution of its first
    relu replaces z, without a normalization after it. The second and third group start with stride 2.
    Raises `UserError` for a depth that is not 6 n + 4.
    """

    width: int = 2
    depth: int = 28

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depth < 10 or self.depth % 6 != 4:
            raise UserError(
                f"A Wide ResNet has a depth of 6 n + 4, not {self.depth}; set depth to 10, 16, 22, 28 or 40."
            )

    def _blocks(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, input channels, output channels and stride of each residual block."""
        first_group_channels = STEM_CHANNELS * self.width
        return residual_blocks(STEM_CHANNELS, first_group_channels, groups=3, depth=(self.depth - 4) // 6)

    def init(self, generator: torch.Generator) -> Tree:
        """Draw the initial weights of a Wide ResNet: convolutions after He et al., the head like PyTorch with bias 0.

        Args:
            generator: draws the weights layer by layer, in the order of the forward pass.

        Returns:
            "params", and the initial running statistics "stats". Without normalization there are no biases either.
        """
        params: Tree = {"stem": {"conv": kaiming(generator, self.channels, STEM_CHANNELS, kernel=3)}}
        stats: Tree = {}

        def add_unit(name: str, inputs: int, outputs: int) -> None:
            """Add a normalization and the 3x3 convolution after it (pre-activation)."""
            params[name] = {"norm": affine(inputs), "conv": kaiming(generator, inputs, outputs, kernel=3)}
            stats[name] = initial_stats(inputs)

        for name, inputs, outputs, _ in self._blocks():
            add_unit(f"{name}a", inputs, outputs)
            add_unit(f"{name}b", outputs, outputs)
            if inputs != outputs:
                params[f"{name}shortcut"] = {"conv": kaiming(generator, inputs, outputs, kernel=1)}
        last_channels = 4 * STEM_CHANNELS * self.width  # of the third group: each is twice as wide as the one before
        params["final"] = {"norm": affine(last_channels)}
        stats["final"] = initial_stats(last_channels)
        params["head"] = {**linear(generator, last_channels, self.classes), "bias": torch.zeros(self.classes)}
        if self.norm == "none":
            convolutions = {name: {"conv": layer["conv"]} for name, layer in params.items() if "conv" in layer}
            params = {**convolutions, "head": {"weight": params["head"]["weight"]}}
        return {"params": params, "stats": stats if self.norm == "batch" else {}}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        """Apply the layers of a Wide ResNet to images x (B, C, H, W); `run` computes each of them.

        Returns:
            Logits (B, classes).
        """
        z = run.conv("stem", x)
        for name, _, _, stride in self._blocks():
            # Pre-activation: normalization and ReLU come before each convolution, and the shortcut starts after them.
            inputs = run.relu(run.norm(f"{name}a", z))
            inner = run.relu(run.norm(f"{name}b", run.conv(f"{name}a", inputs, stride)))
            if f"{name}shortcut" in run.params:
                z = run.conv(f"{name}shortcut", inputs, stride)
            z = z + run.conv(f"{name}b", inner)
        return run.linear("head", run.relu(run.norm("final", z)).mean((-2, -1)))

    def check(self, shape: tuple[int, int, int]) -> None:
        check_sides("A Wide ResNet", shape, multiple=4, minimum=8)


def residual_blocks(inputs: int, width: int, groups: int, depth: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield the residual blocks of a network: groups of blocks, each group twice as wide as the one before.

    Args:
        inputs: channels before the first block.
        width: channels of the first group.
        groups: number of groups.
        depth: number of blocks in a group.

    Yields:
        Name, input channels, output channels and stride; the first block of each group but the first has stride 2.
    """
    for number in range(groups * depth):
        group, index = divmod(number, depth)
        outputs = width * 2**group
        yield f"block{number + 1}", inputs, outputs, 2 if group and not index else 1
        inputs = outputs


def kaiming(generator: torch.Generator, inputs: int, outputs: int, kernel: int) -> Tree:
    """Draw the weight of a convolution, normal with variance 2 / fan out (He et al. 2015, their Eq. 14)."""
    weight = torch.empty(outputs, inputs, kernel, kernel)
    fan_out = outputs * kernel * kernel
    return {"weight": weight.normal_(mean=0.0, std=(2 / fan_out) ** 0.5, generator=generator)}


@dataclass(frozen=True)
class ResidualNetwork(Network):
    """A stem of `width` channels and `groups` groups of `depth` residual blocks, each group twice as wide as the last.

    Convolutions have no bias. A block is relu(z + norm(conv(relu(norm(conv(z)))))); the first of each group but the
    first halves the sides (rounded up), and a 1x1 convolution with normalization replaces z there. The
    features are means over the image.
    """

    groups: ClassVar[int]
    depth: ClassVar[int]
    kernel: ClassVar[int] = 3  # the side of the stem's

    width: int = 64

    def _blocks(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, input channels, output channels and stride of each residual block."""
        return residual_blocks(self.width, self.width, self.groups, self.depth)

    def init(self, generator: torch.Generator) -> Tree:
        """Draw the initial weights of a residual network: convolutions after He et al., the head like PyTorch.

        Args:
            generator: draws the weights layer by layer, in the order of the forward pass.

        Returns:
            "params", and the initial running statistics "stats". Without normalization the head has no bias.
        """
        params: Tree = {}
        stats: Tree = {}

        def add_unit(name: str, inputs: int, outputs: int, kernel: int = 3) -> None:
            """Add a convolution and the normalization after it."""
            params[name] = {"conv": kaiming(generator, inputs, outputs, kernel)}
            if self.norm != "none":
                params[name]["norm"] = affine(outputs)
            stats[name] = initial_stats(outputs)

        add_unit("stem", self.channels, self.width, self.kernel)
        for name, inputs, outputs, _ in self._blocks():
            add_unit(f"{name}a", inputs, outputs)
            add_unit(f"{name}b", outputs, outputs)
            if inputs != outputs:
                add_unit(f"{name}shortcut", inputs, outputs, kernel=1)
        last_channels = self.width * 2 ** (self.groups - 1)  # each group is twice as wide as the one before
        params["head"] = linear(generator, last_channels, self.classes)
        if self.norm == "none":  # as FedMatch's networks, which have no biases
            del params["head"]["bias"]
        return {"params": params, "stats": stats if self.norm == "batch" else {}}

    def stem(self, x: Tensor, run: ForwardPass) -> Tensor:
        """Apply the first convolution to images, with its normalization and ReLU."""
        return run.relu(run.norm("stem", run.conv("stem", x)))

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        """Apply the layers of a residual network to images x (B, C, H, W); `run` computes each of them.

        Returns:
            Logits (B, classes).
        """
        z = self.stem(x, run)
        for name, _, _, stride in self._blocks():
            inner = run.relu(run.norm(f"{name}a", run.conv(f"{name}a", z, stride)))
            if f"{name}shortcut" in run.params:
                z = run.norm(f"{name}shortcut", run.conv(f"{name}shortcut", z, stride))
            z = run.relu(z + run.norm(f"{name}b", run.conv(f"{name}b", inner)))
        return run.linear("head", z.mean((-2, -1)))


@dataclass(frozen=True)
class ResNet8(ResidualNetwork):
    """The ResNet-8 of SAGE and ProxyFL (CVPR 2025, 2026), four times as wide as He et al.'s for small images.

    A stem of `width` channels and three residual blocks of width, 2 width and 4 width; 16 is the width of He et al..
    1,227,594 parameters at width 64 with 3 channels and 10 classes: the 1.23 million of the papers.
    """

    groups: ClassVar[int] = 3
    depth: ClassVar[int] = 1

    def check(self, shape: tuple[int, int, int]) -> None:
        check_sides("ResNet-8", shape, multiple=4, minimum=8)


_BLOCK_LAYERS = {
    "conv1": ("a", "conv"),
    "bn1": ("a", "norm"),
    "conv2": ("b", "conv"),
    "bn2": ("b", "norm"),
    "downsample/0": ("shortcut", "conv"),
    "downsample/1": ("shortcut", "norm"),
}
"""Layers of a residual block: torchvision's name, to the suffix of the block's name here and the kind of layer.

For example "conv2" of block 3 is "block3b/conv"."""


@dataclass(frozen=True)
class ResNet18(ResidualNetwork):
    """ResNet-18 (He, Zhang, Ren and Sun, CVPR 2016).

    A stem of `width` channels and four groups of two residual blocks of width, 2, 4 and 8 times width. The stem is a
    3x3 convolution that preserves 32x32 pixels: 11,173,962 parameters at width 64 with 3 channels and 10 classes.
    """

    groups: ClassVar[int] = 4
    depth: ClassVar[int] = 2
    min_side: ClassVar[int] = 8  # smallest height and width of an image

    def tree_path(self, name: str) -> str | None:
        """Convert the name of a tensor of torchvision's ResNet-18 to its path in the model here.

        timm's ResNet-18 has the same names. For example "layer2.0.conv1.weight" is params/block3a/conv/weight, and
        "fc.bias" is params/head/bias.

        Args:
            name: a key of the state dict.

        Returns:
            The path; None if the model has no such tensor.
        """
        path = super().tree_path(name)
        if path is None:
            return None
        # `path` has torchvision's layer names, such as "params/layer2/0/conv1/weight"; the section is "params" or "stats".
        section, *layers, tensor_name = path.split("/")
        if layers == ["fc"]:
            return f"{section}/head/{tensor_name}"
        block_match = re.fullmatch(r"layer([1-4])/([01])/(.+)", "/".join(layers))
        if block_match is None:
            layer = "/".join(layers)  # "conv1" and "bn1" outside of a block are the stem
            name = "stem"
        else:
            group, index, layer = block_match.groups()
            # torchvision has four groups of two blocks, here all eight are numbered from 1.
            name = f"block{2 * int(group) - 1 + int(index)}"
        if layer not in _BLOCK_LAYERS:
            return path
        suffix, kind = _BLOCK_LAYERS[layer]
        if block_match is not None:
            name += suffix
        # Statistics belong to normalizations only, so that their paths do not name the kind of layer.
        return f"{section}/{name}/{tensor_name}" if section == "stats" else f"{section}/{name}/{kind}/{tensor_name}"

    def check(self, shape: tuple[int, int, int]) -> None:
        if min(shape[1:]) < self.min_side:
            raise UserError(
                f"This ResNet-18 takes images of at least {self.min_side}x{self.min_side} pixels, not "
                f"{shape[1]}x{shape[2]}; set image_size or resize, or use network = 'small'."
            )


@dataclass(frozen=True)
class ResNet18ImageNet(ResNet18):
    """ResNet-18 as on ImageNet: the stem is a 7x7 convolution and a maximum over 3x3, which quarter the sides.

    11,689,512 parameters at width 64 with 3 channels and 1,000 classes; layer by layer torchvision's `resnet18`.
    """

    kernel: ClassVar[int] = 7
    min_side: ClassVar[int] = 32

    def stem(self, x: Tensor, run: ForwardPass) -> Tensor:
        """Apply the first convolution with stride 2, and a maximum over 3x3 with stride 2."""
        z = run.relu(run.norm("stem", run.conv("stem", x, stride=2)))
        return run.pool(z, size=3, stride=2, padding=1)
