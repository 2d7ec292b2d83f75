"""Movements of pixels as index maps: which source pixel stands at each place of the result.

An image of H * W pixels has one more, number H * W, which stands for everything outside of it and is black. With it
a map needs no mask, and two maps compose by one gather.
"""

from __future__ import annotations

import torch
from torch import Tensor


def crop_map(
    top: Tensor, left: Tensor, flip: Tensor, pad: int, size: tuple[int, int], reflect: bool
) -> Tensor:
    """Return the map (n, H * W) of a random crop from an image padded by `pad` pixels, with a mirror where `flip`.

    `reflect` mirrors the image first and then crops it from its own reflection (the weak view); otherwise the
    image is cropped from black surroundings and then mirrored (the labeled view). top, left (n,) count from the
    padded image's corner; flip (n,) is boolean.
    """
    height, width = size
    y = torch.arange(height, device=top.device) + (top - pad)[:, None]  # (n, H)
    x = torch.arange(width, device=top.device)
    if reflect:
        y, x = _reflected(y, height), _reflected(x + (left - pad)[:, None], width)
        x = torch.where(flip[:, None], width - 1 - x, x)
        return (y[:, :, None] * width + x[:, None, :]).flatten(1)
    x = torch.where(flip[:, None], width - 1 - x, x) + (left - pad)[:, None]
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None, :]
    number = y[:, :, None] * width + x[:, None, :]
    return torch.where(inside, number, height * width).flatten(1)


def _reflected(position: Tensor, length: int) -> Tensor:
    """Fold positions in (-length, 2 * length - 1) back into [0, length), the border pixel not repeated."""
    return length - 1 - (length - 1 - position.abs()).abs()


def move(images: Tensor, maps: Tensor) -> Tensor:
    """Return images (n, C, H, W) whose pixel p is the source's pixel maps[:, p]; maps (n, H * W)."""
    n, channels, height, width = images.shape
    source = torch.nn.functional.pad(images.reshape(n, channels, height * width), (0, 1))
    index = maps[:, None, :].expand(n, channels, height * width)
    return source.gather(2, index).view(n, channels, height, width)
