"""EfficientNet-Lite0 to 2 (Tan and Le 2019; the Lite variants of 2020): no squeeze-and-excitation, ReLU6.

Lite0 has 4.65 million parameters, and all have 1,280 features. The ImageNet weights of each are an ordinary package,
whose file is compared with `Variant.sha256` before it is read. Strided convolutions are padded as TensorFlow pads even sizes.

With `middle_blocks` there are features of middle blocks as well. Those of the top distinguish the classes of ImageNet;
middle blocks describe strokes and textures, which matter where images are unlike photographs.
"""

import hashlib
import io
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from halfmoon.core import hubs
from halfmoon.core.errors import UserError
from halfmoon.core.user_cache import user_cache

FEATURES = 1280
STEM_CHANNELS = 32
SIDE = 112
"""Pixels to which images are resampled: a quarter of the time of 224, and small images gain nothing by more."""

MEAN, STD = (0.498, 0.498, 0.498), (0.502, 0.502, 0.502)
"""Of the pixels, scaled to 0..1, on which the weights were trained: (p - 127) / 128."""


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


class Stage(NamedTuple):
    """Blocks in a row, of which the first has the stride; `expansion` is the factor of channels inside of a block."""

    kernel: int
    stride: int
    expansion: int
    channels: int
    blocks: int


STAGES = (
    Stage(3, 1, 1, 16, 1),
    Stage(3, 2, 6, 24, 2),
    Stage(5, 2, 6, 40, 2),
    Stage(3, 2, 6, 80, 3),
    Stage(5, 1, 6, 112, 3),
    Stage(5, 2, 6, 192, 4),
    Stage(3, 1, 6, 320, 1),
)


class Variant(NamedTuple):
    """A member of the family.

    Attributes:
        width: factor of the channels of all stages.
        depth: factor of the number of blocks of all stages but the first and the last.
        sha256: hash of the published file of weights.
    """

    width: float
    depth: float
    sha256: str


VARIANTS = {
    "efficientnet-lite0": Variant(1.0, 1.0, "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"),
    "efficientnet-lite1": Variant(1.0, 1.1, "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850"),
    "efficientnet-lite2": Variant(1.1, 1.2, "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d"),
}


class MiddleBlock(NamedTuple):
    """A block whose output is pooled to features.

    Attributes:
        number: number of the block, from 0.
        scale: factor of the pooled features. Their square roots then vary over images as much as a third of those of the
            top, so that three blocks together weigh as much as the top.
    """

    number: int
    scale: float


MIDDLE_BLOCKS = (MiddleBlock(5, 9.4), MiddleBlock(8, 8.0), MiddleBlock(11, 1.14))
"""The first blocks of Lite0 with 80, 112 and 192 channels."""


def backbone_name(name: str) -> str:
    """Return the name in `VARIANTS` of a pretrained network."""
    return "efficientnet-lite0" if name == hubs.MULTILAYER else name


def scale_stages(variant: Variant) -> tuple[Stage, ...]:
    """Scale the stages of Lite0; channels are rounded to multiples of 8."""
    stages: list[Stage] = []
    for number, stage in enumerate(STAGES):
        fixed_depth = number in (0, len(STAGES) - 1)
        blocks = stage.blocks if fixed_depth else math.ceil(variant.depth * stage.blocks)
        channels = int(variant.width * stage.channels + 4) // 8 * 8  # to the nearest multiple of 8
        stages.append(stage._replace(channels=channels, blocks=blocks))
    return tuple(stages)


def unit(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, active: bool = True
) -> nn.Sequential:
    """Build the unit of which EfficientNet-Lite is made: a convolution, a batch normalization and, if `active`, ReLU6.

    `inputs` and `outputs` are channels; with `groups` as many as these the convolution is depthwise.

    Images of an even side are padded as TensorFlow does ("same"), in which the weights were trained: an odd number of
    zeros has one more right and below. `nn.Conv2d` pads both sides equally only.
    """
    total = kernel - stride
    left, right = total // 2, total - total // 2  # also above and below
    layers: dict[str, nn.Module] = {}
    padding = left
    if left != right:
        layers["pad"] = nn.ZeroPad2d((left, right, left, right))
        padding = 0
    layers["conv"] = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    layers["norm"] = nn.BatchNorm2d(outputs, eps=1e-3)  # TensorFlow's epsilon
    if active:
        layers["act"] = nn.ReLU6()
    return nn.Sequential(OrderedDict(layers))


class Block(nn.Module):
    """An inverted residual block: expand, filter each channel, project."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        middle = inputs * stage.expansion
        self.expand = unit(inputs, middle, 1) if stage.expansion > 1 else nn.Identity()
        self.depthwise = unit(middle, middle, stage.kernel, stride, groups=middle)
        self.project = unit(middle, stage.channels, 1, active=False)
        self.residual = stride == 1 and inputs == stage.channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.residual else y


class EfficientNetLite(nn.Module):
    """Images (B, 1 or 3, H, W) of any size -> logits (B, classes).

    They are resampled to `side` pixels, gray ones count three times. The features of each of `middle_blocks` follow those
    of the top.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        side: int = SIDE,
        variant: Variant = VARIANTS["efficientnet-lite0"],
        middle_blocks: tuple[MiddleBlock, ...] = (),
    ) -> None:
        """Build an EfficientNet-Lite.

        Args:
            channels: channels of images, 1 or 3. The stem has 3 in any case, as the pretrained weights do: `features`
                repeats a gray channel.
            classes: number of classes.
            side: pixels to which images are resampled.
            variant: factors of the channels and of the number of blocks.
            middle_blocks: blocks whose pooled outputs are features, too. Each gives two features a channel: the means of
                its positive and of its negative parts.
        """
        super().__init__()
        self.channels, self.side = channels, side
        self.middle_scales = {block.number: block.scale for block in middle_blocks}
        self.stem = unit(3, STEM_CHANNELS, kernel=3, stride=2)
        blocks: list[nn.Module] = []
        inputs = STEM_CHANNELS
        features = FEATURES  # those of the top
        for stage in scale_stages(variant):
            for number_in_stage in range(stage.blocks):
                if len(blocks) in self.middle_scales:
                    features += 2 * stage.channels
                blocks.append(Block(inputs, stage, stride=stage.stride if number_in_stage == 0 else 1))
                inputs = stage.channels
        self.blocks = nn.Sequential(*blocks)
        self.top = unit(inputs, FEATURES, kernel=1)
        self.head = CenteredLinear(features, classes)

    def features(self, x: Tensor) -> Tensor:
        """Return the mean-pooled features (B, F) of images (B, 1 or 3, H, W).

        F is the 1,280 channels of the top, and twice the channels of each middle block: the means of a channel's positive
        part and of its negative part. Both are kept because a mean of signed values would cancel, and no feature may be
        negative: the heads on features take square roots. `middle_scales` has the scale of each middle block
        (see `MiddleBlock`).
        """
        x = x if self.channels == 3 else x.expand(-1, 3, -1, -1)  # gray images: the pretrained stem has 3 channels
        if x.shape[-2:] != (self.side, self.side):
            x = F.interpolate(x, (self.side, self.side), mode="bicubic", antialias=True)
        x = self.stem(x)
        middle: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number in self.middle_scales:
                scale = self.middle_scales[number]
                middle += [scale * F.relu(x).mean((2, 3)), scale * F.relu(-x).mean((2, 3))]
        return torch.cat([self.top(x).mean((2, 3)), *middle], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def make_network(name: str, channels: int, classes: int) -> EfficientNetLite:
    """Make a pretrained network of `halfmoon.core.hubs.PRETRAINED` without its weights."""
    middle_blocks = MIDDLE_BLOCKS if name == hubs.MULTILAYER else ()
    return EfficientNetLite(channels, classes, variant=VARIANTS[backbone_name(name)], middle_blocks=middle_blocks)


_NAMES = {
    "_conv_stem": "stem.conv", "_bn0": "stem.norm", "_conv_head": "top.conv", "_bn1": "top.norm", "_fc": "head",
}  # fmt: skip
_BLOCK = {
    "_expand_conv": "expand.conv", "_bn0": "expand.norm", "_depthwise_conv": "depthwise.conv",
    "_bn1": "depthwise.norm", "_project_conv": "project.conv", "_bn2": "project.norm",
}  # fmt: skip


def renamed(name: str) -> str:
    """Convert the name of a tensor in the published file to its name in the module."""
    parts = name.split(".")
    if parts[0] != "_blocks":
        return ".".join([_NAMES[parts[0]], *parts[1:]])
    return ".".join(["blocks", parts[1], _BLOCK[parts[2]], *parts[3:]])


def convert_published_weights(source: Path, name: str = "efficientnet-lite0") -> Path:
    """Convert the published weights to a safetensors file in the user's cache, unless it is there, and return its path.

    The published file is a pickle, which can run code when it is opened: its hash is checked first.

    Args:
        source: the published file.
        name: the network, a name in `VARIANTS`.

    Raises:
        UserError: the published file is not the one that is known.
    """
    sha256 = VARIANTS[name].sha256
    path = user_cache("weights") / f"{name}-{sha256[:16]}.safetensors"
    if path.is_file():
        return path
    data = source.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"weights {source} are not those that were published: install the package again.")
    tensors = torch.load(io.BytesIO(data), weights_only=True)  # known bytes, read without running code
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may read or write the cache at the same time: the file appears at once and complete.
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    save_file({renamed(key): value.contiguous() for key, value in sorted(tensors.items())}, unfinished)
    os.replace(unfinished, path)
    return path
