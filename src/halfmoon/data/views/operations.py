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
    POSTERIZE,
    ROTATE,
    SHARPNESS,
    SHEAR_X,
    SHEAR_Y,
    TRANSLATE_Y,
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
        operation: The number of each image's operation in `pools.OPERATION_NAMES`, ascending, (n,).
        level: Its magnitude level, from 0 to pool.levels - 1, (n,).
        negative: True for its negative direction, such as a rotation to the other side, bool (n,).
        pool: The magnitude of each operation by level.
    """
    # Families of operations have consecutive numbers, so that one slice has all images of a family.
    geometric = _find_rows(operation, ROTATE, TRANSLATE_Y)
    tonal = _find_rows(operation, POSTERIZE, EQUALIZE)
    color = _find_rows(operation, COLOR, COLOR)
    sharpness = _find_rows(operation, SHARPNESS, SHARPNESS)
    # Direction and level as one number: tables are made for both directions, each with all levels.
    variant = negative * pool.levels + level
    if geometric.start < geometric.stop:
        images[geometric] = _apply_geometric(images[geometric], operation[geometric], variant[geometric], pool)
    if tonal.start < tonal.stop:
        direction = negative[tonal].astype(np.int64)
        table_number = tables.first_tone_tables(pool)[operation[tonal] - POSTERIZE, direction, level[tonal]]
        images[tonal] = _apply_tonal(images[tonal], operation[tonal], table_number, pool)
    is_rgb = images.shape[1] == 3  # on gray images Color is the identity
    if color.start < color.stop and is_rgb:
        images[color] = _blend(_to_gray(images[color]), images[color], variant[color], pool)
    if sharpness.start < sharpness.stop:
        images[sharpness] = _blend(_smooth(images[sharpness]), images[sharpness], variant[sharpness], pool)


def _find_rows(operation: np.ndarray, first: int, last: int) -> slice:
    """Find the images with an operation from `first` to `last`, if `operation` (n,) is ascending."""
    start = np.searchsorted(operation, first)
    stop = np.searchsorted(operation, last, side="right")
    return slice(int(start), int(stop))


def _apply_geometric(images: Tensor, operation: np.ndarray, variant: np.ndarray, pool: OperationPool) -> Tensor:
    """Rotate, shear or translate each image; pixels that come from outside are black.

    Args:
        images: uint8 (n, C, H, W), sorted by operation.
        operation: The number of each image's operation, ascending, (n,).
        variant: The direction and level of each image as one number, (n,).
        pool: The magnitude of each operation by level.

    Returns:
        uint8 (n, C, H, W).
    """
    height, width = images.shape[2:]
    # A map has the index of the source pixel for each pixel of the result. The maps of an operation follow one another.
    variants = 2 * pool.levels
    maps = tables.geometric_maps(pool, height, width, images.device)
    image_maps = maps.index_select(0, _to_device(operation * variants + variant, images))
    moved = tables.gather_pixels(images, image_maps, inside=False)
    shears = _find_rows(operation, SHEAR_X, SHEAR_Y)
    if pool.bilinear and shears.start < shears.stop:
        # Pillow interpolates between two source pixels here. The tables for this begin with ShearX.
        shear_number = _to_device((operation[shears] - SHEAR_X) * variants + variant[shears], images)
        shear_tables = tables.shear_maps(pool, height, width, images.device)
        near_map, far_map, weight = (table.index_select(0, shear_number) for table in shear_tables)
        near = tables.gather_pixels(images[shears], near_map, inside=False)
        far = tables.gather_pixels(images[shears], far_map, inside=False)
        moved[shears] = _interpolate(near, far, weight)
    return moved


def _interpolate(near: Tensor, far: Tensor, weight: Tensor) -> Tensor:
    """Interpolate linearly between two images: near + weight * (far - near), truncated to uint8 (n, C, H, W).

    `weight` is float64 (n, H * W), between 0 and 1.
    """
    start = near.to(torch.float64)
    # Separate multiplication and addition: a fused multiply-add would round differently than Pillow.
    return ((far - start) * weight.view(len(near), 1, *near.shape[2:])).add_(start).to(torch.uint8)


def _apply_tonal(images: Tensor, operation: np.ndarray, table_number: np.ndarray, pool: OperationPool) -> Tensor:
    """Replace each pixel value by that of its image's tone table: the new value of each of the 256 pixel values.

    The operations are Posterize, Solarize, Brightness, Contrast, AutoContrast and Equalize.

    Args:
        images: uint8 (n, C, H, W), sorted by operation.
        operation: The number of each image's operation, ascending, (n,).
        table_number: The number of each image's table in `tables.tone_tables`, (n,): `tables.first_tone_tables`.
        pool: The magnitude of each operation by level.

    Returns:
        uint8 (n, C, H, W).
    """
    pixels = images.flatten(2)
    channels = pixels.shape[1]
    image_table = _to_device(table_number, images)
    contrast = _find_rows(operation, CONTRAST, CONTRAST)
    if contrast.start < contrast.stop:
        # Contrast blends with the image's mean gray. `table_number` has its table for gray 0, and the tables for grays
        # 1 to 255 follow it.
        image_table[contrast] += _mean_gray(_to_gray(images[contrast]))
    tones = tables.tone_tables(pool, images.device).index_select(0, image_table)
    tones = tones[:, None].repeat(1, channels, 1)
    # The tables of these two operations depend on the pixels of each channel.
    autocontrast = _find_rows(operation, AUTOCONTRAST, AUTOCONTRAST)
    if autocontrast.start < autocontrast.stop:
        tones[autocontrast] = _autocontrast_tables(pixels[autocontrast])
    equalize = _find_rows(operation, EQUALIZE, EQUALIZE)
    if equalize.start < equalize.stop:
        tones[equalize] = _equalize_tables(pixels[equalize])
    return tones.gather(2, pixels.long()).view_as(images)


def _autocontrast_tables(pixels: Tensor) -> Tensor:
    """Create tone tables that stretch each channel of each image to the full range from 0 to 255.

    Args:
        pixels: uint8 (n, C, H * W).

    Returns:
        The new value of each pixel value, uint8 (n, C, 256); a channel of a single value remains unchanged.
    """
    darkest = pixels.amin(2)
    brightest = pixels.amax(2)
    # new value = value * scale + darkest * offset; scale and offset depend on the range of values only.
    stretch = tables.autocontrast_stretches(pixels.device)[(brightest - darkest).long()]
    scale = stretch[..., :1]
    offset = stretch[..., 1:]  # per unit of the darkest value
    value = torch.arange(256, dtype=torch.float64, device=pixels.device)
    # Truncated like Pillow's, and without a fused multiply-add, which would round differently.
    return (value * scale + darkest[..., None] * offset).clamp_(0, 255).to(torch.uint8)


def _equalize_tables(pixels: Tensor) -> Tensor:
    """Create tone tables, uint8 (n, C, 256), that equalize the histogram of each channel of pixels (n, C, H * W)."""
    histogram = torch.zeros(*pixels.shape[:2], 256, dtype=torch.long, device=pixels.device)
    index = pixels.long()
    histogram.scatter_add_(2, index, torch.ones_like(index))
    below = histogram.cumsum(2) - histogram  # the number of pixels that are darker than each value
    # Pillow's step: the number of pixels darker than the brightest value, divided by 255. For 0 the channel is unchanged.
    step = below.gather(2, index.amax(2, keepdim=True)) // 255
    equalized = (below + step // 2) // step.clamp(min=1)
    unchanged = torch.arange(256, device=pixels.device)
    return torch.where(step > 0, equalized.clamp_(max=255), unchanged).to(torch.uint8)


def _blend(degenerate: Tensor, images: Tensor, variant: np.ndarray, pool: OperationPool) -> Tensor:
    """Blend images with degenerate ones, by the factor of each image's direction and level."""
    factor = tables.blend_factors(pool, images.device).index_select(0, _to_device(variant, images))
    return tables.blend(degenerate, images, factor.view(-1, 1, 1, 1))


def _to_gray(images: Tensor) -> Tensor:
    """Convert RGB or gray images, uint8 (n, C, H, W), to gray (n, 1, H, W) with ITU-R 601's weights, like Pillow.

    The result has whole numbers in float32.
    """
    values = images.to(torch.float32)
    if images.shape[1] == 1:
        return values
    # Every sum is an integer below 2**24, which float32 represents exactly in any order of addition.
    total = values.mul_(tables.luma_weights(images.device)).sum(1, keepdim=True)
    # The weights are in units of 1/65536: add half a unit to round to the nearest, then divide.
    return total.add_(32768).mul_(2.0**-16).floor_()


def _mean_gray(gray: Tensor) -> Tensor:
    """Compute the mean value (n,) of gray images (n, 1, H, W), rounded half up."""
    total = gray.sum((1, 2, 3), dtype=torch.float64)
    return total.div_(gray[0].numel()).add_(0.5).long()


def _smooth(images: Tensor) -> Tensor:
    """Apply Pillow's SMOOTH filter to images uint8 (n, C, H, W); the result is float32, and borders are unchanged.

    The 3x3 kernel has the weight 1/13 at all neighbors, and 5/13 at the center.
    """
    smooth = images.to(torch.float32)
    # Sum each 3x3 block in two passes of additions, along rows and then columns, instead of nine terms.
    across = smooth[..., :-2] + smooth[..., 1:-1] + smooth[..., 2:]
    total = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :]
    centre = smooth[..., 1:-1, 1:-1]
    # 13 is odd, so that a quotient is at least 1/26 away from a half: much more than float32's rounding error.
    # The block contains the center once, so four more make five.
    centre.mul_(4).add_(total).div_(13).add_(0.5).floor_()
    return smooth  # `centre` is a view: the division changed its interior in place


def _to_device(values: np.ndarray, images: Tensor) -> Tensor:
    return torch.from_numpy(values).to(images.device)
