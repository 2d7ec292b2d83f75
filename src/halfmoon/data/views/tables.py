"""What a pool's operations need that no pixel decides: look-up tables and index maps."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from halfmoon.data.views.pools import COLOR, NAMES, POSTERIZE, Pool

GEOMETRIC, TONAL = range(POSTERIZE), range(POSTERIZE, COLOR)


@lru_cache(maxsize=16)
def factors(pool: Pool, device: torch.device) -> Tensor:
    """Return the blending factors by direction and level (2 * levels,), float32 as in Pillow."""
    return torch.tensor(pool.factor + pool.opposite, dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def tones(pool: Pool, device: torch.device) -> Tensor:
    """Return all tone tables that no pixel decides, uint8 (tables, 256); `first_tones` numbers them.

    Posterize and Solarize have one a level; the blends with a uniform gray one a direction, level and gray value
    (256 in a row).
    """
    value = torch.arange(256)
    bits = torch.tensor(pool.bits)[:, None]
    posterized = value >> (8 - bits) << (8 - bits)
    solarized = torch.where(value < torch.tensor(pool.threshold)[:, None], value, 255 - value)
    blended = blend(value[:, None], value, factors(pool, torch.device("cpu")).view(-1, 1, 1))
    parts = (posterized.to(torch.uint8), solarized.to(torch.uint8), blended.flatten(0, 1))
    return torch.cat(parts).to(device)


@lru_cache(maxsize=16)
def first_tones(pool: Pool) -> np.ndarray:
    """Return the number (operations, 2, levels) of the tone table of each operation in TONAL by direction and level.

    Contrast's is the one of gray 0: the image's mean gray is to be added. AutoContrast and Equalize have none.
    """
    variant = np.arange(2 * pool.levels).reshape(2, pool.levels)
    level = variant % pool.levels
    posterized, solarized, blended = level, pool.levels + level, 2 * pool.levels + 256 * variant
    nothing = np.zeros_like(level)
    return np.stack([posterized, solarized, blended, blended, nothing, nothing])


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
    """Return degenerate + factor * (images - degenerate) as uint8, in float32, clipped and cut off as Pillow does.

    Multiplied and added apart: a fused multiply-add would round differently.
    """
    start = degenerate.to(torch.float32)
    return ((images - start) * factor).add_(start).clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=16)
def geometric_maps(pool: Pool, height: int, width: int, device: torch.device) -> Tensor:
    """Return index maps (operations * 2 * levels, H * W) for `pixelmaps.move`: by operation, direction and level.

    Pillow's affine transform in its nearest mode and 16.16 fixed point (Geometry.c), black outside.
    """
    matrices = [
        [[_matrix(pool, NAMES[kind], sign, level, width, height) for level in range(pool.levels)] for sign in (1, -1)]
        for kind in GEOMETRIC
    ]
    # (operations, directions, levels, 1, 1) for each of the six coefficients
    a, b, c, d, e, f = torch.tensor(matrices, dtype=torch.float64)[..., None, None].unbind(-3)
    y, x = torch.arange(height)[:, None], torch.arange(width)
    column = (_fixed(c + a * 0.5 + b * 0.5) + _fixed(a) * x + _fixed(b) * y) >> 16
    row = (_fixed(f + d * 0.5 + e * 0.5) + _fixed(d) * x + _fixed(e) * y) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return torch.where(inside, row * width + column, height * width).view(-1, height * width).int().to(device)


@lru_cache(maxsize=16)
def shear_maps(pool: Pool, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a bilinear shear mixes: two index maps and the second's weight, all (2 * 2 * levels, H * W).

    By operation (ShearX, ShearY), direction and level. Pillow's affine transform in its bilinear mode and double
    precision (Geometry.c), black outside: a shear leaves one coordinate alone, so two pixels are enough.
    """
    y, x = torch.arange(height)[:, None], torch.arange(width)
    shear = torch.tensor([pool.shear, [-each for each in pool.shear]], dtype=torch.float64).view(-1, 1, 1)
    across = _neighbors((x + 0.5) + shear * (y + 0.5), width)
    down = _neighbors(shear * (x + 0.5) + (y + 0.5), height)
    outside = torch.cat([across[3], down[3]])
    maps = [
        torch.where(outside, height * width, torch.cat([y * width + across[side], down[side] * width + x]))
        for side in (0, 1)
    ]
    weight = torch.cat([across[2], down[2]])
    return maps[0].flatten(1).to(device), maps[1].flatten(1).to(device), weight.flatten(1).to(device)


def _neighbors(place: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the two pixels around each place, the second's weight, and whether the place is outside the image."""
    lower = (place - 0.5).floor()
    first, second = (pixel.clamp(0, length - 1).long() for pixel in (lower, lower + 1))
    return first, second, (place - 0.5) - lower, (place < 0) | (place >= length)


def _fixed(value: Tensor) -> Tensor:
    return (value * 65536.0 + 0.5).floor().long()


def _matrix(pool: Pool, name: str, sign: int, level: int, width: int, height: int) -> tuple[float, ...]:
    """Return Pillow's six coefficients: the source of the result's (x, y) is (ax + by + c, dx + ey + f)."""
    shear, shift = sign * pool.shear[level], sign * pool.shift[level]
    match name:
        case "Rotate":
            return _rotation(sign * pool.degrees[level], width, height)
        case "ShearX":
            return (1, shear, 0, 0, 1, 0)
        case "ShearY":
            return (1, 0, 0, shear, 1, 0)
        case "TranslateX":
            return (1, 0, int(shift * (1 if pool.pixels else width)), 0, 1, 0)
        case _:
            return (1, 0, 0, 0, 1, int(shift * (1 if pool.pixels else height)))


def _rotation(degrees: float, width: int, height: int) -> tuple[float, ...]:
    angle = -math.radians(degrees % 360)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return (cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y)
