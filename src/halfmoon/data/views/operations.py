"""RandAugment's operations on uint8 batches, every pixel equal to Pillow's.

The rows are sorted by operation, so that every operation and every family of operations has one slice of the
batch: the geometric ones are one gather through index maps, the tonal ones one look-up in 256-entry tables, Color
and Sharpness a blend with another image. `pools` says how strong they are, `tables` holds all that does not depend on
the pixels.
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
    """Return images uint8 (n, C, H, W) changed by each row's operations, one after the other; all (n, operations).

    `operation` numbers `pools.NAMES`, `level` the levels of the pool, `negative` takes the other direction of Rotate,
    Shear, Translate and of the blends. `corner` (n, operations, 2), row and column in pixels, is where the boxes of
    Cutout begin: a pool with Cutout raises UserError without them. On gray images Color is the identity. Leave all but
    the images on the CPU: the rows are sorted there without waiting for the device of the images.
    """
    kinds, levels, negatives = (leaf.cpu().numpy() for leaf in (operation, level, negative))
    if corner is None and pool.box:
        raise UserError("operate got no corners: draw where the boxes of the pool's Cutout begin.")
    corners = None if corner is None else corner.cpu().numpy()
    standing = np.arange(len(kinds))  # which row stands at each place by now
    for slot in range(kinds.shape[1]):
        order = np.argsort(kinds[standing, slot], kind="stable")
        standing = standing[order]
        images = images.index_select(0, _to_device(order, images))
        kind = kinds[standing, slot]
        _apply_sorted_(images, kind, levels[standing, slot], negatives[standing, slot], pool)
        cut = int(np.searchsorted(kind, CUTOUT))
        if corners is not None and cut < len(kind):
            tables.paint_gray_boxes_(images[cut:], _to_device(corners[standing[cut:], slot], images), pool.box + 1)
    back = np.empty_like(standing)
    back[standing] = np.arange(len(standing))
    return images.index_select(0, _to_device(back, images))


def _apply_sorted_(
    images: Tensor, kind: np.ndarray, level: np.ndarray, negative: np.ndarray, pool: OperationPool
) -> None:
    """Change images (n, C, H, W), sorted by `kind`, in place; kind, level, negative (n,)."""
    first = np.searchsorted(kind, np.arange(IDENTITY + 1)).tolist()  # the first row of every operation
    variant = negative * pool.levels + level
    if (stop := first[POSTERIZE]) > 0:
        images[:stop] = _apply_geometric(images[:stop], kind[:stop] * 2 * pool.levels + variant[:stop], first, pool)
    start, stop = first[POSTERIZE], first[COLOR]
    if start < stop:
        rows = slice(start, stop)
        number = tables.first_tone_tables(pool)[kind[rows] - POSTERIZE, negative[rows].astype(np.int64), level[rows]]
        images[rows] = _apply_tonal(images[rows], number, [row - start for row in first], pool)
    start, stop = first[COLOR], first[SHARPNESS]
    if start < stop and images.shape[1] == 3:
        images[start:stop] = _blend(_to_gray(images[start:stop]), images[start:stop], variant[start:stop], pool)
    start, stop = first[SHARPNESS], first[IDENTITY]
    if start < stop:
        images[start:stop] = _blend(_smooth(images[start:stop]), images[start:stop], variant[start:stop], pool)


def _apply_geometric(images: Tensor, number: np.ndarray, first: list[int], pool: OperationPool) -> Tensor:
    """Return the images moved; `number` (n,) of index maps, `first` row of every operation."""
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
    """Return near + weight * (far - near), uint8 (n, C, H, W), cut off; weight float64 (n, H * W)."""
    start = near.to(torch.float64)
    # Multiplied, then added: a fused multiply-add would round differently.
    return ((far - start) * weight.view(len(near), 1, *near.shape[2:])).add_(start).to(torch.uint8)


def _apply_tonal(images: Tensor, number: np.ndarray, first: list[int], pool: OperationPool) -> Tensor:
    """Return the images with their tones changed; `number` (n,) of tone tables, `first` row of every operation."""
    pixels = images.flatten(2)
    table = _to_device(number, images)
    rows = slice(first[CONTRAST], first[AUTOCONTRAST])
    if rows.start < rows.stop:
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
    """Return the tone tables (n, C, 256) that stretch each channel of pixels (n, C, H * W) over 0 to 255."""
    low, high = pixels.amin(2), pixels.amax(2)
    stretch = tables.autocontrast_stretches(pixels.device)[(high - low).long()]
    scale, step = stretch[..., :1], stretch[..., 1:]
    value = torch.arange(256, dtype=torch.float64, device=pixels.device)
    # Multiplied, then added, then cut off, as Pillow does: a fused multiply-add would round differently.
    return (value * scale + low[..., None] * step).clamp_(0, 255).to(torch.uint8)


def _equalize_tables(pixels: Tensor) -> Tensor:
    """Return the tone tables (n, C, 256) that flatten the histogram of each channel of pixels (n, C, H * W)."""
    histogram = torch.zeros(*pixels.shape[:2], 256, dtype=torch.long, device=pixels.device)
    index = pixels.long()
    histogram.scatter_add_(2, index, torch.ones_like(index))
    below = histogram.cumsum(2) - histogram
    step = below.gather(2, index.amax(2, keepdim=True)) // 255  # of the pixels darker than the brightest value
    flat = (below + step // 2) // step.clamp(min=1)
    value = torch.arange(256, device=pixels.device)
    return torch.where(step > 0, flat.clamp_(max=255), value).to(torch.uint8)


def _blend(degenerate: Tensor, images: Tensor, variant: np.ndarray, pool: OperationPool) -> Tensor:
    factor = tables.blend_factors(pool, images.device).index_select(0, _to_device(variant, images))
    return tables.blend(degenerate, images, factor.view(-1, 1, 1, 1))


def _to_gray(images: Tensor) -> Tensor:
    """Return the luma (n, 1, H, W), whole numbers in float32: ITU-R 601 in Pillow's 16-bit fixed point."""
    values = images.to(torch.float32)
    if images.shape[1] == 1:
        return values
    # Every sum is a whole number below 2**24, so float32 loses nothing in whatever order it adds.
    total = values.mul_(tables.luma_weights(images.device)).sum(1, keepdim=True)
    return total.add_(32768).mul_(2.0**-16).floor_()


def _mean_gray(gray: Tensor) -> Tensor:
    """Return the mean value (n,) of gray images (n, 1, H, W), rounded half up."""
    total = gray.sum((1, 2, 3), dtype=torch.float64)
    return total.div_(gray[0].numel()).add_(0.5).long()


def _smooth(images: Tensor) -> Tensor:
    """Return the images under Pillow's SMOOTH, float32 (n, C, H, W): nine ones, four more at the centre, over 13."""
    smooth = images.to(torch.float32)
    across = smooth[..., :-2] + smooth[..., 1:-1] + smooth[..., 2:]
    total = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :]
    centre = smooth[..., 1:-1, 1:-1]
    # 13 is odd, so the sum is never half way between two values: 1/26 is left, far more than float32 loses.
    centre.mul_(4).add_(total).div_(13).add_(0.5).floor_()
    return smooth  # its border is the image's


def _to_device(values: np.ndarray, images: Tensor) -> Tensor:
    return torch.from_numpy(values).to(images.device)
