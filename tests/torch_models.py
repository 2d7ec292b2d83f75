"""The networks once more as ordinary `torch.nn` modules: an oracle for the pure functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Convolution, batch normalization, ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class TorchResNet9(nn.Module):
    """ResNet-9 with the layers of the papers."""

    def __init__(self, channels: int, classes: int, w: int) -> None:
        super().__init__()
        self.prep, self.layer1 = Block(channels, w), Block(w, 2 * w)
        self.res1a, self.res1b = Block(2 * w, 2 * w), Block(2 * w, 2 * w)
        self.layer2, self.layer3 = Block(2 * w, 4 * w), Block(4 * w, 8 * w)
        self.res3a, self.res3b = Block(8 * w, 8 * w), Block(8 * w, 8 * w)
        self.head = nn.Linear(8 * w, classes)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.pool(self.layer1(self.prep(x)))
        z = z + self.res1b(self.res1a(z))
        z = self.pool(self.layer3(self.pool(self.layer2(z))))
        z = z + self.res3b(self.res3a(z))
        return self.head(nn.AdaptiveMaxPool2d(1)(z).flatten(1))


class TorchSmall(nn.Module):
    """The small network."""

    def __init__(self, channels: int, classes: int, w: int) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = Block(channels, w), Block(w, 2 * w), Block(2 * w, 2 * w)
        self.head = nn.Linear(2 * w, classes)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv3(self.pool(self.conv2(self.pool(self.conv1(x)))))
        return self.head(z.mean((-2, -1)))


def state_dict(model: dict) -> dict[str, Tensor]:
    """Name the leaves of {"params", "stats"} as the modules do."""
    from halfmoon import tree

    named = {path.replace("/", "."): leaf.clone() for path, leaf in tree.flatten(model["params"]).items()}
    for layer, stats in model["stats"].items():
        named[f"{layer}.norm.running_mean"] = stats["mean"].clone()
        named[f"{layer}.norm.running_var"] = stats["var"].clone()
        named[f"{layer}.norm.num_batches_tracked"] = torch.tensor(0)
    return named


def twin(module: nn.Module, model: dict) -> nn.Module:
    """Return the module with the parameters and statistics of `model`."""
    like = model["params"]["head"]["weight"]
    module = module.to(like.dtype)
    module.load_state_dict(state_dict(model))
    return module.train()
