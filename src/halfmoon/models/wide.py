"""Wide ResNets as SemiFL and FedDB use them (Zagoruyko and Komodakis, BMVC 2016): WRN-28-2, WRN-28-8."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.models.network import Network, affine, fresh_stats, linear
from halfmoon.models.passes import Run

STEM = 16


@dataclass(frozen=True)
class WideResNet(Network):
    """WRN-`depth`-`width`: three groups of (depth - 4) / 6 pre-activation blocks of 16, 32, 64 times `width` channels.

    1,467,610 parameters for WRN-28-2 with 10 classes, 23,401,012 for WRN-28-8 with 100. Convolutions have no bias. A
    block is z + conv(relu(norm(conv(relu(norm(z)))))); where it changes the channels, a 1x1 convolution of its first
    relu stands in for z, without a normalization of its own. The second and third group start with stride 2.
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
        inputs, each = STEM, (self.depth - 4) // 6
        for number in range(3 * each):
            group, place = divmod(number, each)
            outputs = STEM * 2**group * self.width
            yield f"block{number + 1}", inputs, outputs, 2 if group and not place else 1
            inputs = outputs

    def init(self, generator: torch.Generator) -> Tree:
        params: Tree = {"stem": {"conv": kaiming(generator, self.channels, STEM, 3)}}
        stats: Tree = {}

        def unit(name: str, inputs: int, outputs: int) -> None:
            params[name] = {"norm": affine(inputs), "conv": kaiming(generator, inputs, outputs, 3)}
            stats[name] = fresh_stats(inputs)

        for name, inputs, outputs, _ in self._blocks():
            unit(f"{name}a", inputs, outputs)
            unit(f"{name}b", outputs, outputs)
            if inputs != outputs:
                params[f"{name}shortcut"] = {"conv": kaiming(generator, inputs, outputs, 1)}
        last = 4 * STEM * self.width
        params["final"], stats["final"] = {"norm": affine(last)}, fresh_stats(last)
        params["head"] = {**linear(generator, last, self.classes), "bias": torch.zeros(self.classes)}
        if self.norm == "none":
            params = {name: {"conv": unit["conv"]} for name, unit in params.items() if "conv" in unit} | {
                "head": {"weight": params["head"]["weight"]}
            }
        return {"params": params, "stats": stats if self.norm == "batch" else {}}

    def layers(self, x: Tensor, run: Run) -> Tensor:
        z = run.conv("stem", x)
        for name, _, _, stride in self._blocks():
            seen = run.relu(run.norm(f"{name}a", z))
            inner = run.relu(run.norm(f"{name}b", run.conv(f"{name}a", seen, stride)))
            if f"{name}shortcut" in run.params:
                z = run.conv(f"{name}shortcut", seen, stride)
            z = z + run.conv(f"{name}b", inner)
        return run.linear("head", run.relu(run.norm("final", z)).mean((-2, -1)))

    def check(self, shape: tuple[int, int, int]) -> None:
        if min(shape[1:]) < 8 or shape[1] % 4 or shape[2] % 4:
            raise UserError(
                f"A Wide ResNet takes images whose sides are multiples of 4 and at least 8, not {shape[1]}x{shape[2]}; "
                "set image_size to the next such size, or use network = 'small'."
            )


def kaiming(generator: torch.Generator, inputs: int, outputs: int, kernel: int) -> Tree:
    """Return the weight of a convolution, normal with variance 2 / fan out (He et al. 2015, their Eq. 14)."""
    weight = torch.empty(outputs, inputs, kernel, kernel)
    return {"weight": weight.normal_(0.0, (2 / (outputs * kernel * kernel)) ** 0.5, generator=generator)}
