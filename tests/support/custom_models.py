"""Custom networks and methods, as users register them."""

from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import TorchSmall

from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch, Objective


@dataclass(frozen=True)
class CustomFedAvg(FedAvg):
    """A custom method: FedAvg with FixMatch."""

    objective: Objective = field(default_factory=FixMatch)


def build_small(channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """Return a small network of width 4."""
    return TorchSmall(channels, classes, 4)


def build_small_group_norm(channels: int, classes: int, size: tuple[int, int]) -> nn.Module:
    """Return a small network of width 4 with group normalization."""
    return TorchSmall(channels, classes, 4, "group")


class PatchAttention(nn.Module):
    """A network with layer normalization and attention over patches of 4x4 pixels."""

    def __init__(self, channels: int, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.cut = nn.Conv2d(channels, 8, 4, 4)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 24)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        z = self.cut(x).flatten(2).transpose(1, 2)
        q, k, v = self.mix(self.norm(z)).chunk(3, -1)
        z = z + (q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ v
        return self.head(F.gelu(z).mean(1))


class ResidualBlock(nn.Module):
    """A residual block. Its first ReLU must not run in place, because the input is added afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Sequential(nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU6())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.row(x)


class ConvRows(nn.Sequential):
    """A convolution followed by its normalization, a normalization after another layer, and a residual block."""

    def __init__(self, channels: int, classes: int, size: tuple[int, int]) -> None:
        row = nn.Sequential(nn.Conv2d(channels, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.BatchNorm2d(6))
        super().__init__(row, ResidualBlock(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes))
