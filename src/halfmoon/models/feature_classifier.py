"""Base class of classifiers whose inputs are feature vectors."""

from dataclasses import dataclass

from torch import Tensor
from torch.func import jvp

from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.models.network import Network


@dataclass(frozen=True)
class FeatureClassifier(Network):
    """A network from features (B, F) to logits (B, classes) without statistics; a subclass defines `represent`.

    Without batch normalization a pass in training is the same as one in evaluation.
    """

    def extract_features(self, params: Tree, stats: Tree, x: Tensor) -> Tensor:
        return x

    def zero_moments(self, params: Tree) -> Tree:
        return {}

    def check(self, shape: tuple[int, int, int]) -> None:
        return None

    def train(
        self, params: Tree, x: Tensor, fixed_stats: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        return self.predict(params, {}, x), {}

    def embed(
        self, params: Tree, x: Tensor, fixed_stats: Tree | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tree]:
        return *self.represent(params, {}, x), {}

    def linearize(self, params: Tree, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
        return self.predict(params, {}, x), []

    def tangent(
        self, params: Tree, x: Tensor, tape: list[Tensor], direction: Tree, real: Tensor | None = None
    ) -> Tensor:
        # A gradient may be an expanded tensor, whose elements share memory: forward mode needs separate ones.
        params = tree.contiguous(params)
        direction = tree.contiguous(direction)
        return jvp(lambda p: self.predict(p, {}, x), (params,), (direction,))[1]
