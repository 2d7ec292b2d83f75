"""RandAugment's fourteen operations on uint8 batches, every pixel equal to Pillow's.

They fall into families, each done at once for all of its rows: the geometric ones are one gather through an index
map, the tonal ones one look-up in 256-entry tables, Color and Sharpness a blend with another image. `tables` holds
all that does not depend on the pixels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halfmoon.augment import tables
from halfmoon.augment.pixelmaps import move
from halfmoon.augment.tables import AUTOCONTRAST, COLOR, CONTRAST, EQUALIZE, SHARPNESS


def operate_(images: Tensor, operation: Tensor, level: Tensor, negative: Tensor) -> Tensor:
    """Change images uint8 (n, C, H, W) in place by each row's operation, at its level and direction (n,).

    `operation` numbers `tables.NAMES`, `level` counts tenths of the largest magnitude from 0 to 10, `negative`
    takes the other direction of Rotate, Shear and Translate. On gray images Color is the identity. Leave the three on
    the CPU: the rows are sorted there without waiting for the device of the images.
    """
    color = COLOR if images.shape[1] == 3 else -1
    families: tuple[tuple[Tensor, Callable[..., Tensor]], ...] = (
        (operation < tables.TONAL.start, _geometric),
        ((operation >= tables.TONAL.start) & (operation < tables.TONAL.stop), _tonal),
        (operation == color, _color),
        (operation == SHARPNESS, _sharpness),
    )
    for members, family in families:
        rows = members.nonzero().squeeze(1)
        if len(rows) == 0:
            continue
        there = rows.to(images.device)
        images[there] = family(images.index_select(0, there), operation[rows], level[rows], negative[rows])
    return images


def _geometric(images: Tensor, operation: Tensor, level: Tensor, negative: Tensor) -> Tensor:
    maps = tables.geometric_maps(images.shape[2], images.shape[3], images.device).flatten(0, 2)
    number = (operation * 2 + negative) * tables.LEVELS + level
    return move(images, maps.index_select(0, number.to(images.device)))


def _tonal(images: Tensor, operation: Tensor, level: Tensor, negative: Tensor) -> Tensor:
    device, pixels = images.device, images.flatten(2)
    number = tables.first_tones(operation.device)[operation - tables.TONAL.start, level].to(device)
    rows = _rows(operation == CONTRAST, device)
    if len(rows):
        number[rows] += _mean(_gray(images[rows]))
    tones = tables.tones(device)[number][:, None].repeat(1, pixels.shape[1], 1)
    for kind, tabulate in ((AUTOCONTRAST, _autocontrast), (EQUALIZE, _equalize)):
        rows = _rows(operation == kind, device)
        if len(rows):
            tones[rows] = tabulate(pixels[rows])
    return tones.gather(2, pixels.long()).view_as(images)


def _autocontrast(pixels: Tensor) -> Tensor:
    """Return the tone tables (n, C, 256) that stretch each channel of pixels (n, C, H * W) over 0 to 255."""
    low, high = (bound.double()[..., None] for bound in pixels.aminmax(dim=2))
    value = torch.arange(256, dtype=torch.float64, device=pixels.device)
    # A number divided by a tensor would be its reciprocal times the number, which rounds differently from Pillow;
    # so would a fused multiply-add. A channel of one value stays as it is.
    scale = torch.full_like(low, 255.0) / (high - low)
    stretched = (value * scale + -low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, value).to(torch.uint8)


def _equalize(pixels: Tensor) -> Tensor:
    """Return the tone tables (n, C, 256) that flatten the histogram of each channel of pixels (n, C, H * W)."""
    histogram = torch.zeros(*pixels.shape[:2], 256, dtype=torch.long, device=pixels.device)
    index = pixels.long()
    histogram.scatter_add_(2, index, torch.ones_like(index))
    below = histogram.cumsum(2) - histogram
    step = below.gather(2, index.amax(2, keepdim=True)) // 255  # the pixels darker than the brightest value
    flat = (below + step // 2) // step.clamp(min=1)
    value = torch.arange(256, device=pixels.device)
    return torch.where(step > 0, flat.clamp_(max=255), value).to(torch.uint8)


def _color(images: Tensor, operation: Tensor, level: Tensor, negative: Tensor) -> Tensor:
    return tables.blend(_gray(images), images, _factor(level, images))


def _sharpness(images: Tensor, operation: Tensor, level: Tensor, negative: Tensor) -> Tensor:
    # The kernel's nine ones and its four more at the centre, over 13; the border stays as it is.
    wide = images.to(torch.int32)
    across = wide[..., :-2] + wide[..., 1:-1] + wide[..., 2:]
    total = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :]
    smooth = images.clone()
    # 13 is odd, so no sum lies half way between two values: integers round as Pillow's floats do.
    smooth[..., 1:-1, 1:-1] = (2 * (total + 4 * wide[..., 1:-1, 1:-1]) + 13) // 26
    return tables.blend(smooth, images, _factor(level, images))


def _gray(images: Tensor) -> Tensor:
    """Return the luma (n, 1, H, W), uint8: ITU-R 601 in Pillow's 16-bit fixed point."""
    if images.shape[1] == 1:
        return images
    red, green, blue = images.to(torch.int32).unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16).to(torch.uint8)[:, None]


def _mean(gray: Tensor) -> Tensor:
    """Return the mean value (n,) of gray images (n, 1, H, W), rounded half up."""
    count = gray[0].numel()
    return (2 * gray.flatten(1).sum(1, dtype=torch.long) + count) // (2 * count)


def _factor(level: Tensor, images: Tensor) -> Tensor:
    return tables.factors(images.device)[level.to(images.device)].view(-1, 1, 1, 1)


def _rows(members: Tensor, device: torch.device) -> Tensor:
    return members.nonzero().squeeze(1).to(device)
