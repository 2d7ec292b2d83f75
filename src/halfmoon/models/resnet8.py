"""ResNet-8 as SAGE and ProxyFL use it (CVPR 2025, 2026), four times as wide as He et al.'s for small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from halfmoon.core.errors import UserError
from halfmoon.models.residual import ResidualNetwork


@dataclass(frozen=True)
class ResNet8(ResidualNetwork):
    """A stem of `width` channels and three residual blocks of width, 2 width and 4 width; 16 is He et al.'s own width.

    1,227,594 parameters at width 64 with 3 channels and 10 classes: the 1.23 million of the papers.
    """

    groups: ClassVar[int] = 3
    depth: ClassVar[int] = 1

    def check(self, shape: tuple[int, int, int]) -> None:
        if min(shape[1:]) < 8 or shape[1] % 4 or shape[2] % 4:
            raise UserError(
                f"ResNet-8 takes images whose sides are multiples of 4 and at least 8, not {shape[1]}x{shape[2]}; "
                "set image_size to the next such size, or use network = 'small'."
            )
