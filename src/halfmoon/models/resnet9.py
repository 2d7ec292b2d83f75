"""ResNet-9 as FedDure, FedRGD and FedMatch use it: eight 3x3 convolutions, each with its normalization or none."""

from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.models.network import Network, chain
from halfmoon.models.passes import Run


@dataclass(frozen=True)
class ResNet9(Network):
    """ResNet-9; 6,575,370 parameters at width 64 with 3 channels and 10 classes, 6,568,640 without normalization.

    Three halvings and a global maximum take images of 16x16, 32x32 or any larger multiple of 8; at 32x32 the global
    maximum is the MaxPool(4) of the papers.
    """

    def _blocks(self) -> dict[str, tuple[int, int]]:
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

    def init(self, generator: torch.Generator) -> Tree:
        return chain(self, generator, self._blocks())

    def layers(self, x: Tensor, run: Run) -> Tensor:
        def block(name: str, z: Tensor) -> Tensor:
            return run.relu(run.norm(name, run.conv(name, z)))

        z = block("prep", x)
        z = run.pool(block("layer1", z), 2)
        z = z + block("res1b", block("res1a", z))
        z = run.pool(block("layer2", z), 2)
        z = run.pool(block("layer3", z), 2)
        z = z + block("res3b", block("res3a", z))
        z = run.pool(z, list(z.shape[-2:])).flatten(1)
        return run.linear("head", z)

    def check(self, shape: tuple[int, int, int]) -> None:
        if min(shape[1:]) < 16 or shape[1] % 8 or shape[2] % 8:
            raise UserError(
                f"ResNet-9 takes images whose sides are multiples of 8 and at least 16, not {shape[1]}x{shape[2]}; "
                "set image_size to the next such size, or use network = 'small'."
            )
