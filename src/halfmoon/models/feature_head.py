"""A linear head on features that a frozen backbone has computed once: the network trained on cached features."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import jvp

from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.models.efficientnet import centered
from halfmoon.models.finetuned import FineTuned
from halfmoon.models.network import Network, Normalize


@dataclass(frozen=True)
class FeatureHead(Network):
    """The head of `inner`, whose backbone is frozen: features (B, F) -> logits (B, classes), each pass one product.

    Its parameters are those of `inner`, at the same paths: what travels, is averaged and saved does not change.
    """

    inner: FineTuned = field(kw_only=True)

    @property
    def head(self) -> str | None:
        return self.inner.head

    def init(self, generator: torch.Generator) -> Tree:
        return self.inner.init(generator)

    def whole(self, model: Tree) -> tuple[Network, Tree]:
        return self.inner.whole(model)

    @property
    def exact(self) -> Network:
        return self

    def unseen(self, params: Tree) -> Tree:
        return {}

    def products(self, shape: tuple[int, int, int]) -> int | None:
        return shape[-1] * self.classes

    def check(self, shape: tuple[int, int, int]) -> None:
        return None

    def train(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        return self.predict(params, {}, x), {}

    def embed(
        self, params: Tree, x: Tensor, settled: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        return *self.represent(params, {}, x), {}

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        return self.predict(params, {}, x), []

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        if self._leaf(params, "center") is None:
            return self.predict(direction, {}, x)  # logits are linear in the head
        return jvp(lambda p: self.predict(p, {}, x), (params,), (direction,))[1]

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        flat, center = tree.flatten(params), self._leaf(params, "center")
        h = x if center is None else centered(x.to(center.dtype), center)
        return F.linear(h, flat[f"{self.head}/weight"], flat[f"{self.head}/bias"]), x

    def _leaf(self, params: Tree, name: str) -> Tensor | None:
        return tree.flatten(params).get(f"{self.head}/{name}")


@dataclass(frozen=True)
class FirstView(Normalize):
    """Of features (n, views, 1, F) the plain view, in float32 (n, F): what stands in the place of normalization."""

    def __call__(self, images: Tensor) -> Tensor:
        return images[:, 0, 0].float()


def on_features(network: Network) -> FeatureHead | None:
    """Return the head that can be trained on features in the network's place, None where it is no frozen backbone's."""
    if not isinstance(network, FineTuned) or network.patterns != ("backbone",) or network.head is None:
        return None
    with torch.device("meta"):
        trained = tree.flatten(network.init(torch.Generator()))
    names = {path.removeprefix(f"params/{network.head}/") for path in trained}
    if names not in ({"weight", "bias"}, {"weight", "bias", "center"}):
        return None
    return FeatureHead(network.channels, network.classes, network.width, "none", inner=network)
