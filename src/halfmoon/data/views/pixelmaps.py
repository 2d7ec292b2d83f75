"""Movements of pixels as index maps: which source pixel stands at each place of the result.

An image of H * W pixels has one more, number H * W, which stands for everything outside of it and is black; so a
map needs no mask.
"""

from functools import lru_cache

import torch
from torch import Tensor


def crop_map(top: Tensor, left: Tensor, flip: Tensor, pad: int, size: tuple[int, int], reflect: bool) -> Tensor:
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
        y, x = _reflected(y, height), _reflected(x, width)
        flipped = width - 1 - x
    else:
        y = torch.where((y >= 0) & (y < height), y, height)
        x = torch.where((x >= 0) & (x < width), x, height * width)
        flipped = x.flip(1)
    return (y * width).to(device), torch.cat([x, flipped]).to(device)


def _reflected(position: Tensor, length: int) -> Tensor:
    """Fold positions in (-length, 2 * length - 1) back into [0, length), the border pixel not repeated."""
    return length - 1 - (length - 1 - position.abs()).abs()


def move(images: Tensor, maps: Tensor, inside: bool) -> Tensor:
    """Return images (n, C, H, W) whose pixel p is the source's pixel maps[:, p]; maps (n, H * W).

    `inside` promises that no map leaves the image, which spares a copy.
    """
    n, channels, height, width = images.shape
    source = images.reshape(n, channels, height * width)
    if not inside:
        source = torch.nn.functional.pad(source, (0, 1))
    index = maps.long()[:, None, :].expand(n, channels, height * width)
    return source.gather(2, index).view(n, channels, height, width)


def box(start: Tensor, length: int, size: tuple[int, int]) -> Tensor:
    """Return masks (n, 1, H, W), uint8 255 in the boxes from start (n, 2), rows then columns, `length` long.

    Boxes may begin up to `length` before the image and are cut at its border.
    """
    rows, columns = (_spans(length, side, start.device) for side in size)
    places = start + length
    y, x = rows.index_select(0, places[:, 0]), columns.index_select(0, places[:, 1])
    return (y[:, :, None] & x[:, None, :])[:, None]


def gray_box_(images: Tensor, start: Tensor, length: int) -> Tensor:
    """Set boxes of images uint8 (n, C, H, W) to gray 127, in place; start (n, 2) and `length` as in `box`."""
    mask = box(start, length, (images.shape[2], images.shape[3]))
    return images.bitwise_or_(mask).bitwise_and_(~(mask & 128))  # 255, then 127


@lru_cache(maxsize=16)
def _spans(length: int, side: int, device: torch.device) -> Tensor:
    """Return uint8 (starts, side), 255 from each start in [-length, side) for `length` pixels."""
    start = torch.arange(-length, side)[:, None]
    place = torch.arange(side)
    return (((place >= start) & (place < start + length)) * 255).to(torch.uint8).to(device)
