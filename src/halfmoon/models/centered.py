"""A linear layer on the square roots of features, centered and of unit length."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def roots(features: Tensor) -> Tensor:
    """Return the square roots of features (B, F) that are not negative, with a finite gradient at 0."""
    return (features.clamp_min(0) + 1e-12).sqrt()


def centered(features: Tensor, center: Tensor) -> Tensor:
    """Return h (B, F): the square roots of features (B, F) minus `center` (F,), scaled to length one."""
    return F.normalize(roots(features) - center, dim=1)


class CenteredLinear(nn.Linear):
    """Features (B, inputs), none negative -> logits (B, outputs) = h W' + b, where h is `centered`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.center = nn.Parameter(torch.zeros(inputs))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(centered(input, self.center), self.weight, self.bias)
