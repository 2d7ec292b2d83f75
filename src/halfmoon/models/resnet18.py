"""ResNet-18 (He, Zhang, Ren and Sun, CVPR 2016), with the stem of ImageNet or the one for images of 32x32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.models.passes import Run
from halfmoon.models.residual import ResidualNetwork

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
    """A stem of `width` channels and four groups of two residual blocks of width, 2, 4 and 8 times width.

    The stem is a 3x3 convolution that keeps the sides, for images of 32x32: 11,173,962 parameters at width 64 with 3
    channels and 10 classes.
    """

    groups: ClassVar[int] = 4
    depth: ClassVar[int] = 2

    @property
    def least(self) -> int:
        """Return the least side of an image."""
        return 8

    def path_of(self, name: str) -> str | None:
        """Return where a tensor lies of a state dict of torchvision's or timm's ResNet-18, which name it alike."""
        path = super().path_of(name)
        if path is None:
            return None
        part, *layers, last = path.split("/")
        if layers == ["fc"]:
            return f"{part}/head/{last}"
        group, number = layers[:2] if len(layers) > 2 else ("", "")
        unit = "/".join(layers[2:] if group else layers)
        known = not group or (group in ("layer1", "layer2", "layer3", "layer4") and number in ("0", "1"))
        if unit not in _UNITS or not known:
            return path
        suffix, kind = _UNITS[unit]
        name = f"block{2 * int(group[-1]) - 1 + int(number)}{suffix}" if group else "stem"
        return f"{part}/{name}/{last}" if part == "stats" else f"{part}/{name}/{kind}/{last}"

    def check(self, shape: tuple[int, int, int]) -> None:
        """Raise `UserError` for images that are too small."""
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

    @property
    def kernel(self) -> int:
        return 7

    @property
    def least(self) -> int:
        return 32

    def stem(self, x: Tensor, run: Run) -> Tensor:
        return run.pool(run.relu(run.norm("stem", run.conv("stem", x, 2))), 3, 2, 1)
