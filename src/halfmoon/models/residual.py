"""What ResNet-8 and ResNet-18 share: a stem, groups of residual blocks of growing width, and a linear head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halfmoon.core.tree import Tree
from halfmoon.models.network import Network, affine, fresh_stats, linear
from halfmoon.models.passes import Run
from halfmoon.models.wide import kaiming


@dataclass(frozen=True)
class ResidualNetwork(Network):
    """A stem of `width` channels and `groups` groups of `depth` residual blocks, each group twice as wide as the last.

    Convolutions have no bias. A block is relu(z + norm(conv(relu(norm(conv(z)))))); the first of each group but the
    first halves the sides (rounded up), and a 1x1 convolution with its normalization stands in for z there. The
    features are means over the image.
    """

    groups: ClassVar[int]
    depth: ClassVar[int]

    width: int = 64

    @property
    def kernel(self) -> int:
        """Return the side of the stem's kernel."""
        return 3

    def _blocks(self) -> Iterator[tuple[str, int, int, int]]:
        inputs = self.width
        for number in range(self.groups * self.depth):
            outputs = self.width * 2 ** (number // self.depth)
            yield f"block{number + 1}", inputs, outputs, 2 if inputs != outputs else 1
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

    def stem(self, x: Tensor, run: Run) -> Tensor:
        """Return what the first block is given, of images x (B, C, H, W)."""
        return run.relu(run.norm("stem", run.conv("stem", x)))

    def layers(self, x: Tensor, run: Run) -> Tensor:
        """Return logits (B, classes) for x (B, C, H, W)."""
        z = self.stem(x, run)
        for name, _, _, stride in self._blocks():
            inner = run.relu(run.norm(f"{name}a", run.conv(f"{name}a", z, stride)))
            if f"{name}shortcut" in run.params:
                z = run.norm(f"{name}shortcut", run.conv(f"{name}shortcut", z, stride))
            z = run.relu(z + run.norm(f"{name}b", run.conv(f"{name}b", inner)))
        return run.linear("head", z.mean((-2, -1)))
