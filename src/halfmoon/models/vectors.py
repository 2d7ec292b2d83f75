"""A linear classifier of vectors, such as embeddings of text or sound, or rows of a table.

The engine stores vectors like the cached features of images, as (N, 1, 1, F), but in float64.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from halfmoon.core import tree
from halfmoon.core.normalize import Normalize
from halfmoon.core.tree import Tree
from halfmoon.models.feature_classifier import FeatureClassifier


@dataclass(frozen=True)
class Standardize(Normalize):
    """Map vectors (n, 1, 1, F) to (x - center) * scale (n, F), instead of normalizing pixels.

    Attributes:
        center: the mean of all vectors, (F,).
        scale: the factor of each coordinate, (F,).
    """

    center: Tensor = field(kw_only=True, compare=False, repr=False)
    scale: Tensor = field(kw_only=True, compare=False, repr=False)

    def __call__(self, images: Tensor) -> Tensor:
        # A vector is stored as an image of one row, (1, 1, F).
        return (images[:, 0, 0] - self.center) * self.scale


@dataclass(frozen=True)
class LinearClassifier(FeatureClassifier):
    """Map standardized vectors (B, F) linearly to logits (B, classes), in float64. It starts at 0.

    Attributes:
        features: F, the length of a vector.
        centered: whether the layer subtracts a center, as the heads of `halfmoon.methods.analytic` need.
    """

    features: int = field(kw_only=True)
    centered: bool = field(kw_only=True)

    def init(self, generator: torch.Generator) -> Tree:
        # The loss of a linear classifier is convex, so training can start at 0.
        head = {
            "weight": torch.zeros(self.classes, self.features, dtype=torch.float64),
            "bias": torch.zeros(self.classes, dtype=torch.float64),
        }
        if self.centered:
            head["center"] = torch.zeros(self.features, dtype=torch.float64)
        return {"params": {"head": head}, "stats": {}}

    def count_products(self, shape: tuple[int, int, int]) -> int | None:
        return self.features * self.classes

    def represent(self, params: Tree, stats: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        leaves = tree.flatten(params)
        centered = x - leaves["head/center"] if self.centered else x
        return F.linear(centered, leaves["head/weight"], leaves["head/bias"]), x
