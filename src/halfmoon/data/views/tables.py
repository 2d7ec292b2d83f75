"""Precomputed tables for views: look-up tables of pixel values, and geometric operations as index maps.

An index map has, for each pixel of the result, the number (row * W + column) of the source pixel. Number H * W is an
additional black pixel that represents everything outside the image, so that a map needs no mask.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfmoon.data.views.pools import COLOR, OPERATION_NAMES, POSTERIZE, OperationPool

GEOMETRIC = range(POSTERIZE)
"""Numbers of the operations that move pixels."""

TONAL = range(POSTERIZE, COLOR)
"""Numbers of the operations that map each pixel value to another one."""


@lru_cache(maxsize=16)
def blend_factors(pool: OperationPool, device: torch.device) -> Tensor:
    """Create the blending factors by direction and level, (2 * levels,), in float32 as in Pillow."""
    return torch.tensor(pool.factor + pool.opposite, dtype=torch.float32, device=device)


@lru_cache(maxsize=16)
def tone_tables(pool: OperationPool, device: torch.device) -> Tensor:
    """Create the tone tables (new value by old value) that do not depend on the image, uint8 (tables, 256).

    First one table per level for Posterize, then one per level for Solarize, then blends with a constant gray: for each
    direction and level, 256 tables, one per gray value. `first_tone_tables` has their numbers.
    """
    value = torch.arange(256)
    # Posterize clears the lowest bits: shifting right and left again fills them with zeros.
    cleared_bits = 8 - torch.tensor(pool.bits)[:, None]
    posterized = value >> cleared_bits << cleared_bits
    threshold = torch.tensor(pool.threshold)[:, None]
    solarized = torch.where(value < threshold, value, 255 - value)
    gray = value[:, None]
    factor = blend_factors(pool, torch.device("cpu")).view(-1, 1, 1)
    blended = blend(gray, value, factor)
    groups = (posterized.to(torch.uint8), solarized.to(torch.uint8), blended.flatten(0, 1))
    return torch.cat(groups).to(device)


@lru_cache(maxsize=16)
def first_tone_tables(pool: OperationPool) -> np.ndarray:
    """Compute the row of `tone_tables` that each operation uses, by operation, direction and level.

    The operations are those of `TONAL`, in order: Posterize, Solarize, Brightness, Contrast, AutoContrast, Equalize.
    Brightness blends with gray 0. Contrast has the same row: the caller adds the image's mean gray to it. The rows of
    AutoContrast and Equalize are placeholders (0); their tables depend on the image.

    Returns:
        int64 (operations, 2, levels).
    """
    variant = np.arange(2 * pool.levels).reshape(2, pool.levels)
    level = variant % pool.levels
    posterized = level
    solarized = pool.levels + level
    blended = 2 * pool.levels + 256 * variant
    placeholder = np.zeros_like(level)
    return np.stack([posterized, solarized, blended, blended, placeholder, placeholder])


@lru_cache(maxsize=8)
def autocontrast_stretches(device: torch.device) -> Tensor:
    """Create AutoContrast's scale and its offset per unit of the darkest value, float64 (256, 2).

    The first axis is the difference between the brightest and the darkest value of a channel. For 0, a channel of a
    single value, the operation is the identity: scale 1, offset 0.
    """
    scales = [255.0 / spread for spread in range(1, 256)]
    return torch.tensor([(1.0, 0.0), *((scale, -scale) for scale in scales)], dtype=torch.float64).to(device)


@lru_cache(maxsize=8)
def luma_weights(device: torch.device) -> Tensor:
    """Create the weights (3, 1, 1) of red, green and blue in Pillow's gray, in units of 1/65536."""
    return torch.tensor([19595.0, 38470.0, 7471.0], device=device).view(3, 1, 1)


def blend(degenerate: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """Compute degenerate + factor * (images - degenerate) in float32, clipped and truncated to uint8 as in Pillow."""
    start = degenerate.to(torch.float32)
    # Separate multiplication and addition: a fused multiply-add would round differently than Pillow.
    return ((images - start) * factor).add_(start).clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=16)
def geometric_maps(pool: OperationPool, height: int, width: int, device: torch.device) -> Tensor:
    """Create index maps for `gather_pixels`, int32 (operations * 2 * levels, H * W), by operation, direction and level.

    They equal Pillow's affine transform (Geometry.c) in nearest mode, with 16.16 fixed-point coordinates and black
    outside the image.
    """
    coefficients = [
        _affine_coefficients(pool, OPERATION_NAMES[operation], sign, level, width, height)
        for operation in GEOMETRIC
        for sign in (1, -1)
        for level in range(pool.levels)
    ]
    # Pixel (x, y) of the result is pixel (ax + by + c, dx + ey + f) of the source. Each coefficient has the shape
    # (operations * 2 * levels, 1, 1), to be broadcast over rows and columns.
    a, b, c, d, e, f = torch.tensor(coefficients, dtype=torch.float64)[..., None, None].unbind(1)
    y = torch.arange(height)[:, None]
    x = torch.arange(width)
    # Source coordinates of pixel centers (x + 0.5, y + 0.5) in fixed point. The shift by 16 bits rounds down.
    column = (_to_fixed_point(c + a * 0.5 + b * 0.5) + _to_fixed_point(a) * x + _to_fixed_point(b) * y) >> 16
    row = (_to_fixed_point(f + d * 0.5 + e * 0.5) + _to_fixed_point(d) * x + _to_fixed_point(e) * y) >> 16
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    black = height * width  # the index of an additional black pixel, after those of the image
    maps = torch.where(inside, row * width + column, black)
    return maps.flatten(1).int().to(device)


@lru_cache(maxsize=16)
def shear_maps(pool: OperationPool, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Create the tables of bilinear shears: for each pixel of the result its two source pixels, and their weights.

    They equal Pillow's affine transform (Geometry.c) in bilinear mode and double precision, with black outside. A shear
    changes one coordinate only, so that two source pixels instead of four determine each pixel.

    Args:
        pool: the levels and the shear of each.
        height: H, the height of images in pixels.
        width: W, their width.
        device: the device of the tables.

    Returns:
        The index map of the first source pixels, int64; that of the second ones, int64; and the weight of the second,
        0 to 1, float64. Each is (4 * levels, H * W). The order of the rows: ShearX with the shears of the pool by
        level, ShearX with their negatives, then ShearY likewise.
    """
    y = torch.arange(height)[:, None]
    x = torch.arange(width)
    opposite = [-value for value in pool.shear]
    shear = torch.tensor([pool.shear, opposite], dtype=torch.float64).view(-1, 1, 1)
    # Pixel centers are at (x + 0.5, y + 0.5). ShearX remains in the row of a pixel, ShearY in its column.
    columns = _neighbor_pixels((x + 0.5) + shear * (y + 0.5), width)
    rows = _neighbor_pixels(shear * (x + 0.5) + (y + 0.5), height)
    first = torch.cat([y * width + columns.first, rows.first * width + x])
    second = torch.cat([y * width + columns.second, rows.second * width + x])
    second_weight = torch.cat([columns.second_weight, rows.second_weight])
    outside = torch.cat([columns.outside, rows.outside])
    black = height * width  # the index of an additional black pixel, after those of the image
    first = torch.where(outside, black, first)
    second = torch.where(outside, black, second)
    return first.flatten(1).to(device), second.flatten(1).to(device), second_weight.flatten(1).to(device)


class _NeighborPixels(NamedTuple):
    """The two neighboring pixels, in a row or column of an image, between whose centers each position is.

    Attributes:
        first: the number of the pixel before the position, int64.
        second: the number of the pixel after it, int64. Beside the border both are the border pixel.
        second_weight: the weight of the second, 0 to 1; that of the first is 1 minus this.
        outside: whether the position is outside the image, bool.
    """

    first: Tensor
    second: Tensor
    second_weight: Tensor
    outside: Tensor


def _neighbor_pixels(position: Tensor, length: int) -> _NeighborPixels:
    """Find the neighboring pixels of positions in a row or column of `length` pixels, for linear interpolation."""
    # Pixel i has its center at i + 0.5.
    lower = (position - 0.5).floor()
    return _NeighborPixels(
        first=lower.clamp(0, length - 1).long(),
        second=(lower + 1).clamp(0, length - 1).long(),
        second_weight=(position - 0.5) - lower,
        outside=(position < 0) | (position >= length),
    )


def _to_fixed_point(value: Tensor) -> Tensor:
    """Convert to 16.16 fixed point, rounded to nearest."""
    return (value * 65536.0 + 0.5).floor().long()


def _affine_coefficients(
    pool: OperationPool, name: str, sign: int, level: int, width: int, height: int
) -> tuple[float, ...]:
    """Compute the affine transform of a geometric operation, as the coefficients (a, b, c, d, e, f) of Pillow.

    Pixel (x, y) of the result is pixel (ax + by + c, dx + ey + f) of the source.

    Args:
        pool: The magnitudes by level. Its shifts are in pixels if `pool.pixels`, otherwise in sides of the image.
        name: Rotate, ShearX, ShearY, TranslateX or TranslateY.
        sign: 1, or -1 for the opposite direction.
        level: The level in the pool.
        width: The width of images in pixels.
        height: Their height.
    """
    shear = sign * pool.shear[level]
    shift = sign * pool.shift[level]
    shift_x = int(shift if pool.pixels else shift * width)
    shift_y = int(shift if pool.pixels else shift * height)
    match name:
        case "Rotate":
            return _rotation_coefficients(sign * pool.degrees[level], width, height)
        case "ShearX":
            return (1, shear, 0, 0, 1, 0)
        case "ShearY":
            return (1, 0, 0, shear, 1, 0)
        case "TranslateX":
            return (1, 0, shift_x, 0, 1, 0)
        case "TranslateY":
            return (1, 0, 0, 0, 1, shift_y)
        case _:
            raise ValueError(f"{name} is no geometric operation")


def _rotation_coefficients(degrees: float, width: int, height: int) -> tuple[float, ...]:
    """Compute the affine coefficients (a, b, c, d, e, f) of a rotation about the center of an image.

    Cosine and sine are rounded like those of Pillow's `Image.rotate`, so that all pixels are equal.
    """
    angle = -math.radians(degrees % 360)
    cos = round(math.cos(angle), 15)
    sin = round(math.sin(angle), 15)
    center_x = width / 2
    center_y = height / 2
    offset_x = cos * -center_x + sin * -center_y + center_x
    offset_y = -sin * -center_x + cos * -center_y + center_y
    return (cos, sin, offset_x, -sin, cos, offset_y)


def crop_maps(top: Tensor, left: Tensor, flip: Tensor, pad: int, size: tuple[int, int], reflect: bool) -> Tensor:
    """Create the index maps of random crops from padded images, combined with random mirroring.

    Returns the source pixel (row * W + column) of each pixel of each crop, (n, H * W), for `gather_pixels`.

    Args:
        top: The first row of the crop in the padded image, (n,), 0 to 2 * pad.
        left: The first column, (n,), 0 to 2 * pad.
        flip: True to mirror the image horizontally, bool (n,).
        pad: The padding on each side in pixels.
        size: (H, W).
        reflect: True to mirror the image first and crop it with reflection padding (the weak view); False to crop it
            with black padding and mirror the crop (the labeled view). The orders are those of the papers' code; with them
            the same draws give other crops.
    """
    height, width = size
    row_table, column_table = _crop_tables(pad, size, reflect, top.device)
    row_start = row_table.index_select(0, top)  # (n, H): number of the first pixel in the source row
    # The second half of the table has the mirrored columns, in as many rows as there are values of `left`.
    positions = 2 * pad + 1
    column = column_table.index_select(0, left + positions * flip)  # (n, W): number within the source row
    maps = (row_start[:, :, None] + column[:, None, :]).flatten(1)
    # Rows outside have number H * W and columns outside too, so that a sum with either is at least H * W, which is the
    # number of the black pixel.
    black = height * width
    return maps if reflect else maps.clamp_(max=black)


@lru_cache(maxsize=16)
def _crop_tables(pad: int, size: tuple[int, int], reflect: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Create the two terms of the pixel number row * W + column for every possible crop of a padded image.

    Args:
        pad: The padding of each side in pixels.
        size: (H, W).
        reflect: True for reflection padding, False for black padding: pixels outside then have a number of at least H * W.
        device: The device of the tables.

    Returns:
        row * W for each first row of a crop, (2 * pad + 1, H); and the column for each first column of a crop, (2 * (2 *
        pad + 1), W), whose second half is mirrored.
    """
    height, width = size
    offset = torch.arange(-pad, pad + 1)[:, None]
    y = offset + torch.arange(height)
    x = offset + torch.arange(width)
    if reflect:
        y = _reflect(y, height)
        x = _reflect(x, width)
        flipped = width - 1 - x
    else:
        y = torch.where((y >= 0) & (y < height), y, height)
        x = torch.where((x >= 0) & (x < width), x, height * width)
        flipped = x.flip(1)
    return (y * width).to(device), torch.cat([x, flipped]).to(device)


def _reflect(position: Tensor, length: int) -> Tensor:
    """Fold positions in (-length, 2 * length - 1) back into [0, length) by reflection, without repeating the border pixel."""
    return length - 1 - (length - 1 - position.abs()).abs()


def gather_pixels(images: Tensor, maps: Tensor, inside: bool) -> Tensor:
    """Apply index maps to images: pixel p of the result is pixel maps[:, p] of the source.

    Args:
        images: (n, C, H, W).
        maps: (n, H * W).
        inside: True if no map contains the number H * W of the black pixel, which saves a copy of the images.

    Returns:
        (n, C, H, W).
    """
    n, channels, height, width = images.shape
    source = images.reshape(n, channels, height * width)
    if not inside:
        source = torch.nn.functional.pad(source, (0, 1))
    index = maps.long()[:, None, :].expand(n, channels, height * width)
    return source.gather(2, index).view(n, channels, height, width)


def box_masks(start: Tensor, length: int, size: tuple[int, int]) -> Tensor:
    """Create masks of square boxes, uint8 (n, 1, H, W): 255 inside and 0 outside.

    Args:
        start: The first row and column of each box, (n, 2). It may be as low as -length; boxes are clipped.
        length: The side in pixels.
        size: (H, W).
    """
    height, width = size
    indices = start + length  # the tables begin at start -length
    in_rows = _span_masks(length, height, start.device).index_select(0, indices[:, 0])
    in_columns = _span_masks(length, width, start.device).index_select(0, indices[:, 1])
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def paint_gray_boxes_(images: Tensor, start: Tensor, length: int) -> Tensor:
    """Set boxes of images uint8 (n, C, H, W) to gray 127, in place; start (n, 2) and `length` as in `box_masks`."""
    mask = box_masks(start, length, (images.shape[2], images.shape[3]))
    return images.bitwise_or_(mask).bitwise_and_(~(mask & 128))  # inside: 255, then 255 & ~128 = 127


@lru_cache(maxsize=16)
def _span_masks(length: int, side: int, device: torch.device) -> Tensor:
    """Create one-dimensional masks, uint8 (length + side, side): 255 for `length` pixels from each start in [-length, side)."""
    start = torch.arange(-length, side)[:, None]
    position = torch.arange(side)
    return (((position >= start) & (position < start + length)) * 255).to(torch.uint8).to(device)
