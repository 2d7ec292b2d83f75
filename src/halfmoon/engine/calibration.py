"""Temperature scaling: the number by which a trained model's logits are divided to calibrate it.

Guo et al., On Calibration of Modern Neural Networks, ICML 2017, Section 4.2: one number for all classes.
"""

import math

import torch
from torch import Tensor

from halfmoon.core import tree
from halfmoon.core.tree import Tree
from halfmoon.engine.evaluation import Examples, at_once
from halfmoon.models import Network
from halfmoon.models.normalize import Normalize

COLDEST, HOTTEST = 0.05, 20.0
"""The range of temperatures: without a wrong answer among the images, the best one would be 0."""

HALVINGS = 60


def temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature of the least mean cross-entropy of logits float64 (N, classes) with labels int64 (N,).

    In 1 / temperature = b the cross-entropy is convex: the sign of its derivative, mean of E_p[z] - z_y with p the
    softmax of b z, is followed by bisection in log b, between `COLDEST` and `HOTTEST`.
    """
    z, right = logits, logits.gather(1, labels[:, None])[:, 0]

    def slope(b: float) -> float:
        return float((((b * z).softmax(1) * z).sum(1) - right).mean())

    low, high = math.log(1 / HOTTEST), math.log(1 / COLDEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(math.exp(middle)) < 0 else (low, middle)
    return math.exp(-(low + high) / 2)


@torch.no_grad()
def fitted(network: Network, model: Tree, normalize: Normalize, images: Examples, batch: int = 1000) -> float:
    """Return the temperature of `model` = {"params", "stats"} on labeled images that it was not trained on."""
    params = tree.channels_last(model["params"])
    some = torch.split(images.images, at_once(images.images, batch))
    parts = [network.exact.predict(params, model["stats"], normalize(each)).double() for each in some]
    return temperature(torch.cat(parts), images.labels)
