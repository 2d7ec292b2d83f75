"""RandAugment's fourteen operations on uint8 batches, every pixel equal to Pillow's.

The rows are sorted by operation, so that every operation and every family of operations has one slice of the
batch: the geometric ones are one gather through index maps, the tonal ones one look-up in 256-entry tables, Color
and Sharpness a blend with another image. `tables` holds all that does not depend on the pixels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from halfmoon.augment import tables
from halfmoon.augment.pixelmaps import move
from halfmoon.augment.tables import AUTOCONTRAST, COLOR, CONTRAST, EQUALIZE, IDENTITY, POSTERIZE, SHARPNESS


def operate(images: Tensor, operation: Tensor, level: Tensor, negative: Tensor) -> Tensor:
    """Return images uint8 (n, C, H, W) changed by each row's operations, one after the other; all (n, operations).

    `operation` numbers `tables.NAMES`, `level` counts tenths of the largest magnitude from 0 to 10, `negative`
    takes the other direction of Rotate, Shear and Translate. On gray images Color is the identity. Leave the three
    on the CPU: the rows are sorted there without waiting for the device of the images.
    """
    kinds, levels, negatives = (leaf.cpu().numpy() for leaf in (operation, level, negative))
    standing = np.arange(len(kinds))  # which row stands at each place by now
    for slot in range(kinds.shape[1]):
        order = np.argsort(kinds[standing, slot], kind="stable")
        standing = standing[order]
        images = images.index_select(0, _placed(order, images))
        _operate_sorted_(images, kinds[standing, slot], levels[standing, slot], negatives[standing, slot])
    back = np.empty_like(standing)
    back[standing] = np.arange(len(standing))
    return images.index_select(0, _placed(back, images))


def _operate_sorted_(images: Tensor, kind: np.ndarray, level: np.ndarray, negative: np.ndarray) -> None:
    """Change images (n, C, H, W), sorted by `kind`, in place; kind, level, negative (n,)."""
    first = np.searchsorted(kind, np.arange(IDENTITY + 1)).tolist()  # the first row of every operation
    if (stop := first[POSTERIZE]) > 0:
        number = (kind[:stop] * 2 + negative[:stop]) * tables.LEVELS + level[:stop]
        images[:stop] = _geometric(images[:stop], number)
    start, stop = first[POSTERIZE], first[COLOR]
    if start < stop:
        number = tables.first_tones()[kind[start:stop] - POSTERIZE, level[start:stop]]
        images[start:stop] = _tonal(images[start:stop], number, [row - start for row in first])
    start, stop = first[COLOR], first[SHARPNESS]
    if start < stop and images.shape[1] == 3:
        images[start:stop] = _blended(_gray(images[start:stop]), images[start:stop], level[start:stop])
    start, stop = first[SHARPNESS], first[IDENTITY]
    if start < stop:
        images[start:stop] = _blended(_smooth(images[start:stop]), images[start:stop], level[start:stop])


def _geometric(images: Tensor, number: np.ndarray) -> Tensor:
    maps = tables.geometric_maps(images.shape[2], images.shape[3], images.device)
    return move(images, maps.index_select(0, _placed(number, images)), inside=False)


def _tonal(images: Tensor, number: np.ndarray, first: list[int]) -> Tensor:
    """Return the images with their tones changed; `number` (n,) of tone tables, `first` row of every operation."""
    pixels = images.flatten(2)
    table = _placed(number, images)
    rows = slice(first[CONTRAST], first[AUTOCONTRAST])
    if rows.start < rows.stop:
        table[rows] += _mean(_gray(images[rows]))
    tones = tables.tones(images.device).index_select(0, table)[:, None].repeat(1, pixels.shape[1], 1)
    rows = slice(first[AUTOCONTRAST], first[EQUALIZE])
    if rows.start < rows.stop:
        tones[rows] = _autocontrast(pixels[rows])
    rows = slice(first[EQUALIZE], first[COLOR])
    if rows.start < rows.stop:
        tones[rows] = _equalize(pixels[rows])
    return tones.gather(2, pixels.long()).view_as(images)


def _autocontrast(pixels: Tensor) -> Tensor:
    """Return the tone tables (n, C, 256) that stretch each channel of pixels (n, C, H * W) over 0 to 255."""
    low, high = pixels.amin(2), pixels.amax(2)
    stretch = tables.stretches(pixels.device)[(high - low).long()]
    scale, step = stretch[..., :1], stretch[..., 1:]
    value = torch.arange(256, dtype=torch.float64, device=pixels.device)
    # Multiplied, then added, then cut off, as Pillow does: a fused multiply-add would round differently.
    return (value * scale + low[..., None] * step).clamp_(0, 255).to(torch.uint8)


def _equalize(pixels: Tensor) -> Tensor:
    """Return the tone tables (n, C, 256) that flatten the histogram of each channel of pixels (n, C, H * W)."""
    histogram = torch.zeros(*pixels.shape[:2], 256, dtype=torch.long, device=pixels.device)
    index = pixels.long()
    histogram.scatter_add_(2, index, torch.ones_like(index))
    below = histogram.cumsum(2) - histogram
    step = below.gather(2, index.amax(2, keepdim=True)) // 255  # of the pixels darker than the brightest value
    flat = (below + step // 2) // step.clamp(min=1)
    value = torch.arange(256, device=pixels.device)
    return torch.where(step > 0, flat.clamp_(max=255), value).to(torch.uint8)


def _blended(degenerate: Tensor, images: Tensor, level: np.ndarray) -> Tensor:
    factor = tables.factors(images.device).index_select(0, _placed(level, images))
    return tables.blend(degenerate, images, factor.view(-1, 1, 1, 1))


def _gray(images: Tensor) -> Tensor:
    """Return the luma (n, 1, H, W), whole numbers in float32: ITU-R 601 in Pillow's 16-bit fixed point."""
    values = images.to(torch.float32)
    if images.shape[1] == 1:
        return values
    # Every sum is a whole number below 2**24, so float32 loses nothing in whatever order it adds.
    total = values.mul_(tables.luma(images.device)).sum(1, keepdim=True)
    return total.add_(32768).mul_(2.0**-16).floor_()


def _mean(gray: Tensor) -> Tensor:
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


def _placed(values: np.ndarray, images: Tensor) -> Tensor:
    return torch.from_numpy(values).to(images.device)
