"""A small convolutional network for the embedded digits and for tests."""

from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.models.network import Network, chain
from halfmoon.models.passes import Run


@dataclass(frozen=True)
class SmallCNN(Network):
    """Three 3x3 convolutions (width, 2 width, 2 width) with normalization, two halvings, global mean."""

    width: int = 16

    def _blocks(self) -> dict[str, tuple[int, int]]:
        w = self.width
        return {"conv1": (self.channels, w), "conv2": (w, 2 * w), "conv3": (2 * w, 2 * w)}

    def init(self, generator: torch.Generator) -> Tree:
        return chain(self, generator, self._blocks())

    def layers(self, x: Tensor, run: Run) -> Tensor:
        z = x
        for name in ("conv1", "conv2", "conv3"):
            z = run.relu(run.norm(name, run.conv(name, z)))
            if name != "conv3":
                z = run.pool(z, 2)
        return run.linear("head", z.mean((-2, -1)))

    def check(self, shape: tuple[int, int, int]) -> None:
        if min(shape[1:]) < 4:
            raise UserError(f"The small network takes images of at least 4x4 pixels, not {shape[1]}x{shape[2]}.")
