"""RandAugment's operations on uint8 batches, every pixel equal to Pillow's.

The images are sorted by operation, so that every operation and every family of operations is one slice of the batch.
Geometric operations are one gather with index maps, tonal ones one look-up in tables of 256 entries, Color and Sharpness
a blend with another image. `pools` defines magnitudes; `tables` contains everything that does not depend on pixels.
"""

import numpy as np
import torch
from torch import Tensor

from halfmoon.core.errors import UserError
from halfmoon.data.views import tables
from halfmoon.data.views.pools import (
    AUTOCONTRAST,
    COLOR,
    CONTRAST,
    CUTOUT,
    EQUALIZE,
    FEDDURE_POOL,
    IDENTITY,
    POSTERIZE,
    SHARPNESS,
    SHEAR_X,
    TRANSLATE_X,
    OperationPool,
)


def apply_operations(
    images: Tensor,
    operation: Tensor,
    level: Tensor,
    negative: Tensor,
    pool: OperationPool = FEDDURE_POOL,
    corner: Tensor | None = None,
) -> Tensor:
    """Apply to each image its operations, one after another.

    For each of them the batch is sorted by operation, so that all images with the same operation are one slice, and are
    computed together. Leave all arguments except the images on the CPU: sorting there does not wait for a GPU.

    Args:
        images: uint8 (n, C, H, W). On gray images (C = 1) Color is the identity.
        operation: Numbers of operations in `pools.OPERATION_NAMES`, (n, operations).
        level: Levels of the pool, (n, operations).
        negative: True for the other direction of Rotate, Shear, Translate and blends, bool (n, operations).
        pool: The magnitudes.
        corner: The first row and column of each box of Cutout in pixels, (n, operations, 2).

    Returns:
        uint8 (n, C, H, W), in the order of `images`.

    Raises:
        UserError: If the pool has Cutout and `corner` is None.
    """
    operations, level_numbers, is_negative = (leaf.cpu().numpy() for leaf in (operation, level, negative))
    if corner is None and pool.box:
        raise UserError("apply_operations got no corners: draw the corners of Cutout's boxes, which the pool contains.")
    corners = None if corner is None else corner.cpu().numpy()
    original_rows = np.arange(len(operations))  # the row in the argument of the image at each position
    for slot in range(operations.shape[1]):
        order = np.argsort(operations[original_rows, slot], kind="stable")
        original_rows = original_rows[order]
        images = images.index_select(0, _to_device(order, images))
        sorted_operations = operations[original_rows, slot]
        _apply_sorted_(
            images, sorted_operations, level_numbers[original_rows, slot], is_negative[original_rows, slot], pool
        )
        # Not part of `_apply_sorted_`, because it needs corners. Its number is the highest, so its images are last.
        first_cutout = int(np.searchsorted(sorted_operations, CUTOUT))
        if corners is not None and first_cutout < len(sorted_operations):
            cutout_corners = _to_device(corners[original_rows[first_cutout:], slot], images)
            tables.paint_gray_boxes_(images[first_cutout:], cutout_corners, pool.box + 1)
    # Restore the order of the argument: position_of_row is the inverse permutation of original_rows.
    position_of_row = np.empty_like(original_rows)
    position_of_row[original_rows] = np.arange(len(original_rows))
    return images.index_select(0, _to_device(position_of_row, images))


def _apply_sorted_(
    images: Tensor, operation: np.ndarray, level: np.ndarray, negative: np.ndarray, pool: OperationPool
) -> None:
    """Apply one operation to each image, in place; Identity and Cutout change nothing here.

    Args:
        images: uint8 (n, C, H, W), sorted by operation.
        operation: The operation of each image, ascending, (n,).
        level: Its level, (n,).
        negative: True for its negative direction, (n,).
        pool: The magnitudes.
    """
    # Families of operations have consecutive numbers, so that one slice has all images of a family:
    # geometric < POSTERIZE <= tonal < COLOR < SHARPNESS < IDENTITY < CUTOUT.
    first = np.searchsorted(operation, np.arange(IDENTITY + 1)).tolist()  # the first row of every operation
    variant = negative * pool.levels + level  # index in tables by direction and level
    if (stop := first[POSTERIZE]) > 0:
        images[:stop] = _apply_geometric(
            images[:stop], operation[:stop] * 2 * pool.levels + variant[:stop], first, pool
        )
    start = first[POSTERIZE]
    stop = first[COLOR]
    if start < stop:
        rows = slice(start, stop)
        table_number = tables.first_tone_tables(pool)[
            operation[rows] - POSTERIZE, negative[rows].astype(np.int64), level[rows]
        ]
        images[rows] = _apply_tonal(images[rows], table_number, [row - start for row in first], pool)
    start = first[COLOR]
    stop = first[SHARPNESS]
    if start < stop and images.shape[1] == 3:
        images[start:stop] = _blend(_to_gray(images[start:stop]), images[start:stop], variant[start:stop], pool)
    start = first[SHARPNESS]
    stop = first[IDENTITY]
    if start < stop:
        images[start:stop] = _blend(_smooth(images[start:stop]), images[start:stop], variant[start:stop], pool)


def _apply_geometric(images: Tensor, number: np.ndarray, first: list[int], pool: OperationPool) -> Tensor:
    """Apply index maps; `number` (n,) are the numbers of the maps, `first` the first row of every operation."""
    size = (images.shape[2], images.shape[3])
    maps = tables.geometric_maps(pool, *size, images.device)
    moved = tables.gather_pixels(images, maps.index_select(0, _to_device(number, images)), inside=False)
    rows = slice(first[SHEAR_X], first[TRANSLATE_X])
    if pool.bilinear and rows.start < rows.stop:
        numbers = _to_device(number[rows] - SHEAR_X * 2 * pool.levels, images)
        near, far, weight = (table.index_select(0, numbers) for table in tables.shear_maps(pool, *size, images.device))
        moved[rows] = _interpolate(
            tables.gather_pixels(images[rows], near, False), tables.gather_pixels(images[rows], far, False), weight
        )
    return moved


def _interpolate(near: Tensor, far: Tensor, weight: Tensor) -> Tensor:
    """Compute near + weight * (far - near), truncated to uint8 (n, C, H, W); weight float64 (n, H * W)."""
    start = near.to(torch.float64)
    # Separate multiplication and addition: a fused multiply-add would round differently than Pillow.
    return ((far - start) * weight.view(len(near), 1, *near.shape[2:])).add_(start).to(torch.uint8)


def _apply_tonal(images: Tensor, number: np.ndarray, first: list[int], pool: OperationPool) -> Tensor:
    """Apply tone tables; `number` (n,) are the numbers of the tables, `first` the first row of every operation."""
    pixels = images.flatten(2)
    table = _to_device(number, images)
    rows = slice(first[CONTRAST], first[AUTOCONTRAST])
    if rows.start < rows.stop:
        # Contrast blends with the mean gray; the tables of all grays follow one another.
        table[rows] += _mean_gray(_to_gray(images[rows]))
    tones = tables.tone_tables(pool, images.device).index_select(0, table)[:, None].repeat(1, pixels.shape[1], 1)
    rows = slice(first[AUTOCONTRAST], first[EQUALIZE])
    if rows.start < rows.stop:
        tones[rows] = _autocontrast_tables(pixels[rows])
    rows = slice(first[EQUALIZE], first[COLOR])
    if rows.start < rows.stop:
        tones[rows] = _equalize_tables(pixels[rows])
    return tones.gather(2, pixels.long()).view_as(images)


def _autocontrast_tables(pixels: Tensor) -> Tensor:
    """Create tone tables, uint8 (n, C, 256), that stretch each channel of pixels (n, C, H * W) to 0 to 255."""
    low = pixels.amin(2)
    high = pixels.amax(2)
    stretch = tables.autocontrast_stretches(pixels.device)[(high - low).long()]
    scale = stretch[..., :1]
    offset = stretch[..., 1:]  # per unit of the darkest value
    value = torch.arange(256, dtype=torch.float64, device=pixels.device)
    # Truncated like Pillow's, and without a fused multiply-add, which would round differently.
    return (value * scale + low[..., None] * offset).clamp_(0, 255).to(torch.uint8)


def _equalize_tables(pixels: Tensor) -> Tensor:
    """Create tone tables, uint8 (n, C, 256), that equalize the histogram of each channel of pixels (n, C, H * W)."""
    histogram = torch.zeros(*pixels.shape[:2], 256, dtype=torch.long, device=pixels.device)
    index = pixels.long()
    histogram.scatter_add_(2, index, torch.ones_like(index))
    below = histogram.cumsum(2) - histogram
    # Pillow's step: the number of pixels darker than the brightest value, divided by 255. For 0 the channel is unchanged.
    step = below.gather(2, index.amax(2, keepdim=True)) // 255
    flat = (below + step // 2) // step.clamp(min=1)
    value = torch.arange(256, device=pixels.device)
    return torch.where(step > 0, flat.clamp_(max=255), value).to(torch.uint8)


def _blend(degenerate: Tensor, images: Tensor, variant: np.ndarray, pool: OperationPool) -> Tensor:
    """Blend images with degenerate ones, by the factor of each image's direction and level."""
    factor = tables.blend_factors(pool, images.device).index_select(0, _to_device(variant, images))
    return tables.blend(degenerate, images, factor.view(-1, 1, 1, 1))


def _to_gray(images: Tensor) -> Tensor:
    """Compute the luma (n, 1, H, W), integers in float32: ITU-R 601 in Pillow's 16-bit fixed point."""
    values = images.to(torch.float32)
    if images.shape[1] == 1:
        return values
    # Every sum is an integer below 2**24, which float32 represents exactly in any order of addition.
    total = values.mul_(tables.luma_weights(images.device)).sum(1, keepdim=True)
    return total.add_(32768).mul_(2.0**-16).floor_()


def _mean_gray(gray: Tensor) -> Tensor:
    """Compute the mean value (n,) of gray images (n, 1, H, W), rounded half up."""
    total = gray.sum((1, 2, 3), dtype=torch.float64)
    return total.div_(gray[0].numel()).add_(0.5).long()


def _smooth(images: Tensor) -> Tensor:
    """Apply Pillow's SMOOTH filter, float32 (n, C, H, W): weights 1/13, and 5/13 for the center; borders are unchanged."""
    smooth = images.to(torch.float32)
    # Two passes of additions instead of nine terms.
    across = smooth[..., :-2] + smooth[..., 1:-1] + smooth[..., 2:]
    total = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :]
    centre = smooth[..., 1:-1, 1:-1]
    # 13 is odd, so that a quotient is at least 1/26 away from a half: much more than float32's rounding error.
    centre.mul_(4).add_(total).div_(13).add_(0.5).floor_()
    return smooth  # `centre` is a view: the division changed its interior in place


def _to_device(values: np.ndarray, images: Tensor) -> Tensor:
    return torch.from_numpy(values).to(images.device)
