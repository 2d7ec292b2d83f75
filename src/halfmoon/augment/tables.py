"""What RandAugment's operations need that no pixel decides: numbers, ranges, look-up tables, index maps.

The ranges are those of RandAugmentMC in FedDure's released code. At a level v (tenths of the largest magnitude)
Brightness, Color, Contrast and Sharpness take the factor 0.09 v + 0.05, Posterize keeps int(0.4 v) + 4 bits,
Solarize inverts from 256 - int(25.6 v), Rotate turns by int(3 v) degrees, the shears take 0.03 v, the
translations move by int(0.03 v side) pixels.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

# The numbers keep the members of one family together: a comparison finds them.
NAMES = (
    *("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"),
    *("Posterize", "Solarize", "Brightness", "Contrast", "AutoContrast", "Equalize"),
    *("Color", "Sharpness", "Identity"),
)
POSTERIZE, SOLARIZE, BRIGHTNESS, CONTRAST, AUTOCONTRAST, EQUALIZE, COLOR, SHARPNESS, IDENTITY = range(5, 14)
GEOMETRIC, TONAL = range(POSTERIZE), range(POSTERIZE, COLOR)
LEVELS = 11

_POSTERIZED, _SOLARIZED, _BLENDED = 0, LEVELS, 2 * LEVELS  # the first tone table of each kind


def factor(level: int) -> float:
    """Return the blending factor of a level: 0 gives the degenerate image, 1 the image itself."""
    return level * 0.9 / 10 + 0.05


@lru_cache(maxsize=8)
def factors(device: torch.device) -> Tensor:
    """Return the blending factors of all levels (LEVELS,), float32 as in Pillow."""
    return torch.tensor([factor(level) for level in range(LEVELS)], dtype=torch.float32, device=device)


@lru_cache(maxsize=8)
def tones(device: torch.device) -> Tensor:
    """Return all tone tables that no pixel decides, uint8 (tables, 256); `first_tones` numbers them.

    Posterize and Solarize have one a level; the blends with a uniform gray one a level and gray value (256 in a row).
    """
    value = torch.arange(256)
    bits = torch.tensor([int(level * 4 / 10) + 4 for level in range(LEVELS)])[:, None]
    posterized = value >> (8 - bits) << (8 - bits)
    threshold = torch.tensor([256 - int(level * 256 / 10) for level in range(LEVELS)])[:, None]
    solarized = torch.where(value < threshold, value, 255 - value)
    blended = blend(value[:, None], value, factors(torch.device("cpu")).view(LEVELS, 1, 1))
    parts = (posterized.to(torch.uint8), solarized.to(torch.uint8), blended.flatten(0, 1))
    return torch.cat(parts).to(device)


@lru_cache(maxsize=1)
def first_tones() -> np.ndarray:
    """Return the number (operations, LEVELS) of the tone table of each operation in TONAL at each level.

    Contrast's is the one of gray 0: the image's mean gray is to be added. AutoContrast and Equalize have none.
    """
    level = np.arange(LEVELS)
    blended, nothing = _BLENDED + 256 * level, np.zeros_like(level)
    return np.stack([_POSTERIZED + level, _SOLARIZED + level, blended, blended, nothing, nothing])


@lru_cache(maxsize=8)
def stretches(device: torch.device) -> Tensor:
    """Return AutoContrast's scale and its offset by the darkest value, float64 (256, 2), by brightest - darkest.

    A channel of one value stays as it is: scale 1, offset 0.
    """
    scales = [255.0 / spread for spread in range(1, 256)]
    return torch.tensor([(1.0, 0.0), *((scale, -scale) for scale in scales)], dtype=torch.float64).to(device)


@lru_cache(maxsize=8)
def luma(device: torch.device) -> Tensor:
    """Return the weights (3, 1, 1) of red, green and blue in Pillow's gray, in 1/65536."""
    return torch.tensor([19595.0, 38470.0, 7471.0], device=device).view(3, 1, 1)


def blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Return degenerate + factor * (images - degenerate) as uint8, in float32 and cut off as Pillow does.

    For factors from 0 to 1, where nothing has to be clipped. Multiplied and added apart: a fused multiply-add
    would round differently.
    """
    start = degenerate.to(torch.float32)
    return ((images - start) * factor).add_(start).to(torch.uint8)


@lru_cache(maxsize=8)
def geometric_maps(height: int, width: int, device: torch.device) -> Tensor:
    """Return index maps (operations * 2 * LEVELS, H * W) for `pixelmaps.move`: by operation, direction and level.

    Pillow's affine transform in its nearest mode and 16.16 fixed point (Geometry.c), black outside.
    """
    matrices = [
        [[_matrix(NAMES[kind], sign, level, width, height) for level in range(LEVELS)] for sign in (1, -1)]
        for kind in GEOMETRIC
    ]
    # (operations, directions, levels, 1, 1) for each of the six coefficients
    a, b, c, d, e, f = torch.tensor(matrices, dtype=torch.float64)[..., None, None].unbind(-3)
    y, x = torch.arange(height)[:, None], torch.arange(width)
    column = (_fixed(c + a * 0.5 + b * 0.5) + _fixed(a) * x + _fixed(b) * y) >> 16
    row = (_fixed(f + d * 0.5 + e * 0.5) + _fixed(d) * x + _fixed(e) * y) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return torch.where(inside, row * width + column, height * width).view(-1, height * width).int().to(device)


def _fixed(value: Tensor) -> Tensor:
    return (value * 65536.0 + 0.5).floor().long()


def _matrix(name: str, sign: int, level: int, width: int, height: int) -> tuple[float, ...]:
    """Return Pillow's six coefficients: the source of the result's (x, y) is (ax + by + c, dx + ey + f)."""
    shear, shift = sign * (level * 0.3 / 10), sign * (level * 0.3 / 10)
    match name:
        case "Rotate":
            return _rotation(sign * int(level * 30 / 10), width, height)
        case "ShearX":
            return (1, shear, 0, 0, 1, 0)
        case "ShearY":
            return (1, 0, 0, shear, 1, 0)
        case "TranslateX":
            return (1, 0, int(shift * width), 0, 1, 0)
        case _:
            return (1, 0, 0, 0, 1, int(shift * height))


def _rotation(degrees: int, width: int, height: int) -> tuple[float, ...]:
    angle = -math.radians(degrees % 360)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return (cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y)
