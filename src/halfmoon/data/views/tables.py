"""What views need that no pixel decides: look-up tables of tones, and movements of pixels as index maps.

A map says which source pixel stands at each place of the result. An image of H * W pixels has one more, number H * W,
which stands for everything outside of it and is black; so a map needs no mask.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from halfmoon.data.views.pools import COLOR, OPERATION_NAMES, POSTERIZE, OperationPool

GEOMETRIC, TONAL = range(POSTERIZE), range(POSTERIZE, COLOR)


@lru_cache(maxsize=16)
def blend_factors(pool: OperationPool, device: torch.device) -> Tensor:
    """Return the blending factors by direction and level (2 * levels,), float32 as in Pillow."""
    return torch.tensor(pool.factor + pool.opposite, dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def tone_tables(pool: OperationPool, device: torch.device) -> Tensor:
    """Return all tone tables that no pixel decides, uint8 (tables, 256); `first_tone_tables` numbers them.

    Posterize and Solarize have one a level; the blends with a gray one a direction, level and gray (256 in a row).
    """
    value = torch.arange(256)
    bits = torch.tensor(pool.bits)[:, None]
    posterized = value >> (8 - bits) << (8 - bits)
    solarized = torch.where(value < torch.tensor(pool.threshold)[:, None], value, 255 - value)
    blended = blend(value[:, None], value, blend_factors(pool, torch.device("cpu")).view(-1, 1, 1))
    parts = (posterized.to(torch.uint8), solarized.to(torch.uint8), blended.flatten(0, 1))
    return torch.cat(parts).to(device)


@lru_cache(maxsize=16)
def first_tone_tables(pool: OperationPool) -> np.ndarray:
    """Return the number (operations, 2, levels) of the tone table of each operation in TONAL by direction and level.

    Contrast's is the one of gray 0: the image's mean gray is to be added. AutoContrast and Equalize have none.
    """
    variant = np.arange(2 * pool.levels).reshape(2, pool.levels)
    level = variant % pool.levels
    posterized, solarized, blended = level, pool.levels + level, 2 * pool.levels + 256 * variant
    nothing = np.zeros_like(level)
    return np.stack([posterized, solarized, blended, blended, nothing, nothing])


@lru_cache(maxsize=8)
def autocontrast_stretches(device: torch.device) -> Tensor:
    """Return AutoContrast's scale and its offset by the darkest value, float64 (256, 2), by brightest - darkest.

    A channel of one value stays as it is: scale 1, offset 0.
    """
    scales = [255.0 / spread for spread in range(1, 256)]
    return torch.tensor([(1.0, 0.0), *((scale, -scale) for scale in scales)], dtype=torch.float64).to(device)


@lru_cache(maxsize=8)
def luma_weights(device: torch.device) -> Tensor:
    """Return the weights (3, 1, 1) of red, green and blue in Pillow's gray, in 1/65536."""
    return torch.tensor([19595.0, 38470.0, 7471.0], device=device).view(3, 1, 1)


def blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Return degenerate + factor * (images - degenerate) as uint8, in float32, clipped and cut off as Pillow does.

    Multiplied and added apart: a fused multiply-add would round differently.
    """
    start = degenerate.to(torch.float32)
    return ((images - start) * factor).add_(start).clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=16)
def geometric_maps(pool: OperationPool, height: int, width: int, device: torch.device) -> Tensor:
    """Return index maps (operations * 2 * levels, H * W) for `gather_pixels`: by operation, direction and level.

    Pillow's affine transform in its nearest mode and 16.16 fixed point (Geometry.c), black outside.
    """
    matrices = [
        [
            [
                _affine_coefficients(pool, OPERATION_NAMES[kind], sign, level, width, height)
                for level in range(pool.levels)
            ]
            for sign in (1, -1)
        ]
        for kind in GEOMETRIC
    ]
    # (operations, directions, levels, 1, 1) for each of the six coefficients
    a, b, c, d, e, f = torch.tensor(matrices, dtype=torch.float64)[..., None, None].unbind(-3)
    y, x = torch.arange(height)[:, None], torch.arange(width)
    column = (_to_fixed_point(c + a * 0.5 + b * 0.5) + _to_fixed_point(a) * x + _to_fixed_point(b) * y) >> 16
    row = (_to_fixed_point(f + d * 0.5 + e * 0.5) + _to_fixed_point(d) * x + _to_fixed_point(e) * y) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    return torch.where(inside, row * width + column, height * width).view(-1, height * width).int().to(device)


@lru_cache(maxsize=16)
def shear_maps(pool: OperationPool, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a bilinear shear mixes: two index maps and the second's weight, all (2 * 2 * levels, H * W).

    By operation (ShearX, ShearY), direction and level. Pillow's affine transform in its bilinear mode and double
    precision (Geometry.c), black outside: a shear leaves one coordinate alone, so two pixels are enough.
    """
    y, x = torch.arange(height)[:, None], torch.arange(width)
    shear = torch.tensor([pool.shear, [-each for each in pool.shear]], dtype=torch.float64).view(-1, 1, 1)
    across = _neighbor_pixels((x + 0.5) + shear * (y + 0.5), width)
    down = _neighbor_pixels(shear * (x + 0.5) + (y + 0.5), height)
    outside = torch.cat([across[3], down[3]])
    maps = [
        torch.where(outside, height * width, torch.cat([y * width + across[side], down[side] * width + x]))
        for side in (0, 1)
    ]
    weight = torch.cat([across[2], down[2]])
    return maps[0].flatten(1).to(device), maps[1].flatten(1).to(device), weight.flatten(1).to(device)


def _neighbor_pixels(place: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the two pixels around each place, the second's weight, and whether the place is outside the image."""
    lower = (place - 0.5).floor()
    first, second = (pixel.clamp(0, length - 1).long() for pixel in (lower, lower + 1))
    return first, second, (place - 0.5) - lower, (place < 0) | (place >= length)


def _to_fixed_point(value: Tensor) -> Tensor:
    return (value * 65536.0 + 0.5).floor().long()


def _affine_coefficients(
    pool: OperationPool, name: str, sign: int, level: int, width: int, height: int
) -> tuple[float, ...]:
    """Return Pillow's six coefficients: the source of the result's (x, y) is (ax + by + c, dx + ey + f)."""
    shear, shift = sign * pool.shear[level], sign * pool.shift[level]
    match name:
        case "Rotate":
            return _rotation_coefficients(sign * pool.degrees[level], width, height)
        case "ShearX":
            return (1, shear, 0, 0, 1, 0)
        case "ShearY":
            return (1, 0, 0, shear, 1, 0)
        case "TranslateX":
            return (1, 0, int(shift * (1 if pool.pixels else width)), 0, 1, 0)
        case _:
            return (1, 0, 0, 0, 1, int(shift * (1 if pool.pixels else height)))


def _rotation_coefficients(degrees: float, width: int, height: int) -> tuple[float, ...]:
    angle = -math.radians(degrees % 360)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return (cos, sin, cos * -x + sin * -y + x, -sin, cos, -sin * -x + cos * -y + y)


def crop_maps(top: Tensor, left: Tensor, flip: Tensor, pad: int, size: tuple[int, int], reflect: bool) -> Tensor:
    """Return the map (n, H * W) of a crop from an image padded by `pad` pixels, with a mirror where `flip`.

    `reflect` mirrors the image first and then crops it from its own reflection (the weak view); otherwise the
    image is cropped from black surroundings and then mirrored (the labeled view). top, left (n,) count from the
    padded image's corner; flip (n,) is boolean; all on the device of the map.
    """
    rows, columns = _crop_tables(pad, size, reflect, top.device)
    y = rows.index_select(0, top)
    x = columns.index_select(0, left + (2 * pad + 1) * flip)
    maps = (y[:, :, None] + x[:, None, :]).flatten(1)
    # What is outside in either direction has a number of at least H * W.
    return maps if reflect else maps.clamp_(max=size[0] * size[1])


@lru_cache(maxsize=16)
def _crop_tables(pad: int, size: tuple[int, int], reflect: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row's part of the pixel number by top (tops, H), and the column's by left and flip (both, W)."""
    height, width = size
    offset = torch.arange(-pad, pad + 1)[:, None]
    y, x = offset + torch.arange(height), offset + torch.arange(width)
    if reflect:
        y, x = _reflect(y, height), _reflect(x, width)
        flipped = width - 1 - x
    else:
        y = torch.where((y >= 0) & (y < height), y, height)
        x = torch.where((x >= 0) & (x < width), x, height * width)
        flipped = x.flip(1)
    return (y * width).to(device), torch.cat([x, flipped]).to(device)


def _reflect(position: Tensor, length: int) -> Tensor:
    """Fold positions in (-length, 2 * length - 1) back into [0, length), the border pixel not repeated."""
    return length - 1 - (length - 1 - position.abs()).abs()


def gather_pixels(images: Tensor, maps: Tensor, inside: bool) -> Tensor:
    """Return images (n, C, H, W) whose pixel p is the source's pixel maps[:, p]; maps (n, H * W).

    `inside` promises that no map leaves the image, which spares a copy.
    """
    n, channels, height, width = images.shape
    source = images.reshape(n, channels, height * width)
    if not inside:
        source = torch.nn.functional.pad(source, (0, 1))
    index = maps.long()[:, None, :].expand(n, channels, height * width)
    return source.gather(2, index).view(n, channels, height, width)


def box_masks(start: Tensor, length: int, size: tuple[int, int]) -> Tensor:
    """Return masks (n, 1, H, W), uint8 255 in the boxes from start (n, 2), rows then columns, `length` long.

    Boxes may begin up to `length` before the image and are cut at its border.
    """
    rows, columns = (_span_masks(length, side, start.device) for side in size)
    places = start + length
    y, x = rows.index_select(0, places[:, 0]), columns.index_select(0, places[:, 1])
    return (y[:, :, None] & x[:, None, :])[:, None]


def paint_gray_boxes_(images: Tensor, start: Tensor, length: int) -> Tensor:
    """Set boxes of images uint8 (n, C, H, W) to gray 127, in place; start (n, 2) and `length` as in `box_masks`."""
    mask = box_masks(start, length, (images.shape[2], images.shape[3]))
    return images.bitwise_or_(mask).bitwise_and_(~(mask & 128))  # 255, then 127


@lru_cache(maxsize=16)
def _span_masks(length: int, side: int, device: torch.device) -> Tensor:
    """Return uint8 (starts, side), 255 from each start in [-length, side) for `length` pixels."""
    start = torch.arange(-length, side)[:, None]
    place = torch.arange(side)
    return (((place >= start) & (place < start + length)) * 255).to(torch.uint8).to(device)
