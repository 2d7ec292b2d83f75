"""ResNet-8 as SAGE and ProxyFL use it (CVPR 2025, 2026), four times as wide as He et al.'s for small images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.models.network import Network, affine, fresh_stats, linear
from halfmoon.models.passes import Run
from halfmoon.models.wide import kaiming


@dataclass(frozen=True)
class ResNet8(Network):
    """A stem of `width` channels and three residual blocks of width, 2 width and 4 width; 16 is He et al.'s own width.

    1,227,594 parameters at width 64 with 3 channels and 10 classes: the 1.23 million of the papers. Convolutions have
    no bias. A block is relu(z + norm(conv(relu(norm(conv(z)))))); the second and third halve the sides, and a 1x1
    convolution with its normalization stands in for z there. The features are means over the image.
    """

    width: int = 64

    def _blocks(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield name, inputs, outputs and stride of each block."""
        inputs = self.width
        for number in range(3):
            outputs = self.width * 2**number
            yield f"block{number + 1}", inputs, outputs, 2 if number else 1
            inputs = outputs

    def init(self, generator: torch.Generator) -> Tree:
        """Return {"params", "stats"}: convolutions `kaiming`, the head PyTorch's."""
        params: Tree = {}
        stats: Tree = {}

        def unit(name: str, inputs: int, outputs: int, kernel: int = 3) -> None:
            params[name] = {"conv": kaiming(generator, inputs, outputs, kernel)}
            if self.norm != "none":
                params[name]["norm"] = affine(outputs)
            stats[name] = fresh_stats(outputs)

        unit("stem", self.channels, self.width)
        for name, inputs, outputs, _ in self._blocks():
            unit(f"{name}a", inputs, outputs)
            unit(f"{name}b", outputs, outputs)
            if inputs != outputs:
                unit(f"{name}shortcut", inputs, outputs, 1)
        params["head"] = linear(generator, 4 * self.width, self.classes)
        if self.norm == "none":
            del params["head"]["bias"]
        return {"params": params, "stats": stats if self.norm == "batch" else {}}

    def layers(self, x: Tensor, run: Run) -> Tensor:
        """Return logits (B, classes) for x (B, C, H, W)."""
        z = run.relu(run.norm("stem", run.conv("stem", x)))
        for name, _, _, stride in self._blocks():
            inner = run.relu(run.norm(f"{name}a", run.conv(f"{name}a", z, stride)))
            if f"{name}shortcut" in run.params:
                z = run.norm(f"{name}shortcut", run.conv(f"{name}shortcut", z, stride))
            z = run.relu(z + run.norm(f"{name}b", run.conv(f"{name}b", inner)))
        return run.linear("head", z.mean((-2, -1)))

    def check(self, shape: tuple[int, int, int]) -> None:
        """Raise `UserError` unless height and width are multiples of 4 of at least 8."""
        if min(shape[1:]) < 8 or shape[1] % 4 or shape[2] % 4:
            raise UserError(
                f"ResNet-8 takes images whose sides are multiples of 4 and at least 8, not {shape[1]}x{shape[2]}; "
                "set image_size to the next such size, or use network = 'small'."
            )
