"""Residual networks: ResNet-8 of SAGE and ProxyFL, and ResNet-18 with the stem of ImageNet or for 32x32 images."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.models.network import Network, affine, check_sides, initial_stats, linear
from halfmoon.models.passes import ForwardPass

STEM = 16


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
        return residual_blocks(STEM, STEM * self.width, 3, (self.depth - 4) // 6)

    def init(self, generator: torch.Generator) -> Tree:
        params: Tree = {"stem": {"conv": kaiming(generator, self.channels, STEM, 3)}}
        stats: Tree = {}

        def unit(name: str, inputs: int, outputs: int) -> None:
            params[name] = {"norm": affine(inputs), "conv": kaiming(generator, inputs, outputs, 3)}
            stats[name] = initial_stats(inputs)

        for name, inputs, outputs, _ in self._blocks():
            unit(f"{name}a", inputs, outputs)
            unit(f"{name}b", outputs, outputs)
            if inputs != outputs:
                params[f"{name}shortcut"] = {"conv": kaiming(generator, inputs, outputs, 1)}
        last = 4 * STEM * self.width
        params["final"], stats["final"] = {"norm": affine(last)}, initial_stats(last)
        params["head"] = {**linear(generator, last, self.classes), "bias": torch.zeros(self.classes)}
        if self.norm == "none":
            params = {name: {"conv": unit["conv"]} for name, unit in params.items() if "conv" in unit} | {
                "head": {"weight": params["head"]["weight"]}
            }
        return {"params": params, "stats": stats if self.norm == "batch" else {}}

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
        z = run.conv("stem", x)
        for name, _, _, stride in self._blocks():
            inputs = run.relu(run.norm(f"{name}a", z))
            inner = run.relu(run.norm(f"{name}b", run.conv(f"{name}a", inputs, stride)))
            if f"{name}shortcut" in run.params:
                z = run.conv(f"{name}shortcut", inputs, stride)
            z = z + run.conv(f"{name}b", inner)
        return run.linear("head", run.relu(run.norm("final", z)).mean((-2, -1)))

    def check(self, shape: tuple[int, int, int]) -> None:
        check_sides("A Wide ResNet", shape, multiple=4, minimum=8)


def residual_blocks(inputs: int, width: int, groups: int, depth: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, inputs, outputs and stride of each block: groups of `depth`, each twice as wide as the last one."""
    for number in range(groups * depth):
        group, index = divmod(number, depth)
        outputs = width * 2**group
        yield f"block{number + 1}", inputs, outputs, 2 if group and not index else 1
        inputs = outputs


def kaiming(generator: torch.Generator, inputs: int, outputs: int, kernel: int) -> Tree:
    """Return the weight of a convolution, normal with variance 2 / fan out (He et al. 2015, their Eq. 14)."""
    weight = torch.empty(outputs, inputs, kernel, kernel)
    return {"weight": weight.normal_(0.0, (2 / (outputs * kernel * kernel)) ** 0.5, generator=generator)}


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
        return residual_blocks(self.width, self.width, self.groups, self.depth)

    def init(self, generator: torch.Generator) -> Tree:
        """Return {"params", "stats"}: convolutions `kaiming`, the head PyTorch's."""
        params: Tree = {}
        stats: Tree = {}

        def unit(name: str, inputs: int, outputs: int, kernel: int = 3) -> None:
            params[name] = {"conv": kaiming(generator, inputs, outputs, kernel)}
            if self.norm != "none":
                params[name]["norm"] = affine(outputs)
            stats[name] = initial_stats(outputs)

        unit("stem", self.channels, self.width, self.kernel)
        for name, inputs, outputs, _ in self._blocks():
            unit(f"{name}a", inputs, outputs)
            unit(f"{name}b", outputs, outputs)
            if inputs != outputs:
                unit(f"{name}shortcut", inputs, outputs, 1)
        params["head"] = linear(generator, self.width * 2 ** (self.groups - 1), self.classes)
        if self.norm == "none":
            del params["head"]["bias"]
        return {"params": params, "stats": stats if self.norm == "batch" else {}}

    def stem(self, x: Tensor, run: ForwardPass) -> Tensor:
        return run.relu(run.norm("stem", run.conv("stem", x)))

    def layers(self, x: Tensor, run: ForwardPass) -> Tensor:
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


_UNITS = {
    "conv1": ("a", "conv"),
    "bn1": ("a", "norm"),
    "conv2": ("b", "conv"),
    "bn2": ("b", "norm"),
    "downsample/0": ("shortcut", "conv"),
    "downsample/1": ("shortcut", "norm"),
}
"""The layers of a block as torchvision names them, and what they are here."""


@dataclass(frozen=True)
class ResNet18(ResidualNetwork):
    """ResNet-18 (He, Zhang, Ren and Sun, CVPR 2016).

    A stem of `width` channels and four groups of two residual blocks of width, 2, 4 and 8 times width. The stem is a
    3x3 convolution that preserves 32x32 pixels: 11,173,962 parameters at width 64 with 3 channels and 10 classes.
    """

    groups: ClassVar[int] = 4
    depth: ClassVar[int] = 2
    least: ClassVar[int] = 8  # smallest height and width of an image

    def tree_path(self, name: str) -> str | None:
        """Convert a name in a state dict of torchvision's or timm's ResNet-18, which use the same names, to a path."""
        path = super().tree_path(name)
        if path is None:
            return None
        part, *layers, last = path.split("/")
        if layers == ["fc"]:
            return f"{part}/head/{last}"
        group, number = layers[:2] if len(layers) > 2 else ("", "")
        unit = "/".join(layers[2:] if group else layers)
        valid = not group or (group in ("layer1", "layer2", "layer3", "layer4") and number in ("0", "1"))
        if unit not in _UNITS or not valid:
            return path
        suffix, kind = _UNITS[unit]
        name = f"block{2 * int(group[-1]) - 1 + int(number)}{suffix}" if group else "stem"
        return f"{part}/{name}/{last}" if part == "stats" else f"{part}/{name}/{kind}/{last}"

    def check(self, shape: tuple[int, int, int]) -> None:
        if min(shape[1:]) < self.least:
            raise UserError(
                f"This ResNet-18 takes images of at least {self.least}x{self.least} pixels, not {shape[1]}x{shape[2]}; "
                "set image_size or resize, or use network = 'small'."
            )


@dataclass(frozen=True)
class ResNet18ImageNet(ResNet18):
    """ResNet-18 as on ImageNet: the stem is a 7x7 convolution and a maximum over 3x3, which quarter the sides.

    11,689,512 parameters at width 64 with 3 channels and 1,000 classes; layer by layer torchvision's `resnet18`.
    """

    kernel: ClassVar[int] = 7
    least: ClassVar[int] = 32

    def stem(self, x: Tensor, run: ForwardPass) -> Tensor:
        return run.pool(run.relu(run.norm("stem", run.conv("stem", x, 2))), 3, 2, 1)
