"""Implement the networks as ordinary `torch.nn` modules, as a reference for the functional ones."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfmoon.core import rng, tree
from halfmoon.models import Network, ResNet8, ResNet9, SmallCNN, WideResNet


def build_norm(channels: int, norm: str) -> nn.Module:
    """Return a normalization layer. Group normalization has the most groups, up to 32, that divide the channels."""
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "none":
        return nn.Identity()
    groups = min(32, channels)
    while channels % groups:
        groups -= 1
    return nn.GroupNorm(groups, channels)


class ConvBlock(nn.Module):
    """A convolution, a normalization and a ReLU."""

    def __init__(self, inputs: int, outputs: int, norm: str = "batch") -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1, bias=norm != "none")
        self.norm = build_norm(outputs, norm)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


class TorchResNet9(nn.Module):
    """ResNet-9 with the layers of the papers."""

    def __init__(self, channels: int, classes: int, w: int, norm: str = "batch") -> None:
        super().__init__()
        self.prep = ConvBlock(channels, w, norm)
        self.layer1 = ConvBlock(w, 2 * w, norm)
        self.res1a = ConvBlock(2 * w, 2 * w, norm)
        self.res1b = ConvBlock(2 * w, 2 * w, norm)
        self.layer2 = ConvBlock(2 * w, 4 * w, norm)
        self.layer3 = ConvBlock(4 * w, 8 * w, norm)
        self.res3a = ConvBlock(8 * w, 8 * w, norm)
        self.res3b = ConvBlock(8 * w, 8 * w, norm)
        self.head = nn.Linear(8 * w, classes, bias=norm != "none")
        self.pool = nn.MaxPool2d(2)

    def features(self, x: Tensor) -> Tensor:
        z = self.pool(self.layer1(self.prep(x)))
        z = z + self.res1b(self.res1a(z))
        z = self.pool(self.layer3(self.pool(self.layer2(z))))
        z = z + self.res3b(self.res3a(z))
        return nn.AdaptiveMaxPool2d(1)(z).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class TorchSmall(nn.Module):
    """The small network."""

    def __init__(self, channels: int, classes: int, w: int, norm: str = "batch") -> None:
        super().__init__()
        self.conv1 = ConvBlock(channels, w, norm)
        self.conv2 = ConvBlock(w, 2 * w, norm)
        self.conv3 = ConvBlock(2 * w, 2 * w, norm)
        self.head = nn.Linear(2 * w, classes, bias=norm != "none")
        self.pool = nn.MaxPool2d(2)

    def features(self, x: Tensor) -> Tensor:
        return self.conv3(self.pool(self.conv2(self.pool(self.conv1(x))))).mean((-2, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class PreNormConv(nn.Module):
    """A convolution without bias, and optionally the normalization before it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, norm: str | None = None) -> None:
        super().__init__()
        if norm is not None:
            self.norm = build_norm(inputs, norm)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


class ConvNorm(nn.Module):
    """A convolution without bias and the normalization after it."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, norm: str = "batch") -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = build_norm(outputs, norm)

    def forward(self, z: Tensor) -> Tensor:
        return self.norm(self.conv(z))


class TorchResNet(nn.Module):
    """A residual network. Block n has the modules block{n}a, block{n}b and, if channels change, block{n}shortcut."""

    def add_blocks(
        self, widths: list[int], unit: type[PreNormConv | ConvNorm], norm: str, shortcut_norm: str | None
    ) -> None:
        """Add a block from each width to the next. Blocks that change the width have stride 2, except for the first."""
        self.blocks: list[list[nn.Module]] = []
        for n, (old, new) in enumerate(itertools.pairwise(widths), 1):
            stride = 2 if n > 1 and old != new else 1
            block: list[nn.Module] = [unit(old, new, 3, stride, norm), unit(new, new, 3, 1, norm)]
            if old != new:
                block.append(unit(old, new, 1, stride, shortcut_norm))
            for name, module in zip(("a", "b", "shortcut"), block, strict=False):
                self.add_module(f"block{n}{name}", module)
            self.blocks.append(block)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class TorchWideResNet(TorchResNet):
    """WRN-depth-k."""

    def __init__(self, channels: int, classes: int, k: int, depth: int = 28, norm: str = "batch") -> None:
        super().__init__()
        self.stem = PreNormConv(channels, 16, 3)
        widths = [16] + [w * k for w in (16, 32, 64) for _ in range((depth - 4) // 6)]
        self.add_blocks(widths, PreNormConv, norm, None)
        self.final = nn.ModuleDict({"norm": build_norm(widths[-1], norm)})
        self.head = nn.Linear(widths[-1], classes, bias=norm != "none")

    def features(self, x: Tensor) -> Tensor:
        z = self.stem.conv(x)
        for first, second, *shortcut in self.blocks:
            activated = F.relu(first.norm(z))
            inner = second.conv(F.relu(second.norm(first.conv(activated))))
            z = inner + (shortcut[0].conv(activated) if shortcut else z)
        return nn.AdaptiveAvgPool2d(1)(F.relu(self.final["norm"](z))).flatten(1)


class TorchResNet8(TorchResNet):
    """ResNet-8: a stem and three blocks of w, 2 w and 4 w channels."""

    def __init__(self, channels: int, classes: int, w: int, norm: str = "batch") -> None:
        super().__init__()
        self.stem = ConvNorm(channels, w, 3, norm=norm)
        self.add_blocks([w, w, 2 * w, 4 * w], ConvNorm, norm, norm)
        self.head = nn.Linear(4 * w, classes, bias=norm != "none")

    def features(self, x: Tensor) -> Tensor:
        z = F.relu(self.stem(x))
        for first, second, *shortcut in self.blocks:
            z = F.relu(second(F.relu(first(z))) + (shortcut[0](z) if shortcut else z))
        return z.mean((2, 3))


def build_module(network: Network) -> nn.Module:
    """Return a newly initialized module with the layers of `network`."""
    if isinstance(network, WideResNet):
        return TorchWideResNet(network.channels, network.classes, network.width, network.depth, network.norm)
    make = {ResNet8: TorchResNet8, ResNet9: TorchResNet9, SmallCNN: TorchSmall}[type(network)]
    return make(network.channels, network.classes, network.width, network.norm)


def make_state_dict(model: dict) -> dict[str, Tensor]:
    """Convert a model {"params", "stats"} to a state dict of the modules."""
    named = {path.replace("/", "."): leaf.clone() for path, leaf in tree.flatten(model["params"]).items()}
    for layer, stats in model["stats"].items():
        named[f"{layer}.norm.running_mean"] = stats["mean"].clone()
        named[f"{layer}.norm.running_var"] = stats["var"].clone()
        named[f"{layer}.norm.num_batches_tracked"] = torch.tensor(0)
    return named


def load_weights(module: nn.Module, model: dict) -> nn.Module:
    """Load the parameters and statistics of `model` into a module and return it in training mode."""
    weight = model["params"]["head"]["weight"]
    module = module.to(weight.dtype)
    module.load_state_dict(make_state_dict(model))
    return module.train()


def make_example(network: Network, side: int, seed: int = 0, rows: int = 5) -> tuple[dict, Tensor, Tensor]:
    """Return a model with perturbed parameters and statistics, images (rows, C, side, side) and labels, in float64."""
    g = rng.generator(seed, "models")
    model = tree.to(network.init(g), dtype=torch.float64)
    model = tree.map(lambda leaf: leaf + 0.2 * torch.rand(leaf.shape, generator=g, dtype=leaf.dtype), model)
    x = torch.randn(rows, network.channels, side, side, generator=g, dtype=torch.float64)
    return model, x, torch.arange(rows) % network.classes
