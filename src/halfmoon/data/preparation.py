"""How images are brought to one form while they are decoded: size, channels, cutting, what is black and white."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from halfmoon.core.errors import UserError

MAX_PIXELS = 2**26
"""Of one image: 8192x8192. A file of 100 kB can claim hundreds of times as many."""

OUTLIER_PERCENT, MAX_SAMPLED_VALUES, ROWS_PER_STRIP = 0.5, 2**22, 256
"""Percent of the values at either end that black and white leave out; values that are looked at; rows at a time."""


@dataclass(frozen=True)
class Preparation:
    """What is done to an image of any size and mode; without anything it has to be right already.

    size: height and width that every image gets, resampled (bilinear with antialiasing)
    channels: 1 (gray) or 3 (RGB)
    crop: whether the sides stay in proportion, and what is beyond the middle is cut off
    window: the values that become black and white in images of more than 8 bits; None: the window of a DICOM
        file, else each image's own `estimate_window`
    group_pattern: what finds an image's group in its name (`halfmoon.data.groups`); no pixel depends on it
    """

    size: tuple[int, int] | None = None
    channels: int | None = None
    crop: bool = False
    window: tuple[float, float] | None = None
    group_pattern: str | None = None

    @property
    def converts(self) -> bool:
        """Return whether images of any mode are taken."""
        return self != Preparation(group_pattern=self.group_pattern)

    @property
    def form(self) -> str:
        """Return a word that is another for every other preparation; "" where nothing is done."""
        return f"-{self.size}-{self.channels}-{self.crop}-{self.window}" if self.converts else ""

    def resized(self, image: Image.Image) -> Image.Image:
        """Return an image in the size that it gets."""
        if self.size is None or image.size == (self.size[1], self.size[0]):
            return image
        height, width = self.size
        box = center_box(image.height, image.width, height, width) if self.crop else None
        return image.resize((width, height), Image.Resampling.BILINEAR, box=box)

    def applied(self, images: np.ndarray) -> np.ndarray:
        """Return decoded images, uint8 (N, H, W, C), in this form; the same array where they have it."""
        count, height, width, channels = images.shape
        size, depth = self.size or (height, width), self.channels or channels
        if (height, width, channels) == (*size, depth):
            return images
        result = np.empty((count, *size, depth), np.uint8)
        for row, pixels in enumerate(images):
            image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
            image = self.resized(image if depth == channels else image.convert({1: "L", 3: "RGB"}[depth]))
            result[row] = np.asarray(image).reshape(*size, depth)
        return result


UNCHANGED = Preparation()


def center_box(height: int, width: int, tall: int, wide: int) -> tuple[float, float, float, float]:
    """Return the largest box (left, top, right, bottom) in the middle of an image whose sides are as tall : wide."""
    scale = min(height / tall, width / wide)
    left, top = (width - wide * scale) / 2, (height - tall * scale) / 2
    return left, top, width - left, height - top


def estimate_window(strips: Iterable[np.ndarray], count: int) -> tuple[float, float]:
    """Estimate the values of black and white of an image whose file names none.

    Half a percent of the values at either end is left out, so that one bright spot does not darken the rest. An image
    of more than `MAX_SAMPLED_VALUES` values is sampled evenly.

    Args:
        strips: the values of the image in pieces, in order.
        count: number of all values.

    Returns:
        The values that become black and white; white is larger.
    """
    step, at = max(1, count // MAX_SAMPLED_VALUES), 0
    parts, ends = [], []
    for strip in strips:
        parts.append(strip.reshape(-1)[-at % step :: step].copy())
        ends += [strip.min(), strip.max()]
        at += strip.size
    sample = np.concatenate(parts)
    low = np.percentile(sample, OUTLIER_PERCENT, method="lower")
    high = np.percentile(sample, 100 - OUTLIER_PERCENT, method="higher")
    if high <= low:
        low, high = min(ends), max(ends)
    return float(low), float(high if high > low else low + 1)


def to_eight_bits(pixels: np.ndarray, window: tuple[float, float] | None, place: str) -> np.ndarray:
    """Return gray values of any depth (H, W) as uint8: 0 and 255 are the window's ends, or those of `estimate_window`.

    Rounded to nearest; a few rows at a time, which alone are in memory as float64. Raise UserError, which names
    `place`, without a window for values that are not finite and for those of 32 bits, which have no known range.
    """
    if window is None and (pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 65535):
        raise UserError(
            f"{place}: its pixels have 32 bits and no known range; convert the image to 8 or 16 bits, or say which "
            "values are black and white (--window LOW HIGH)."
        )
    low, high = estimate_window([pixels], pixels.size) if window is None else window
    gray = np.empty(pixels.shape, np.uint8)
    for first in range(0, len(pixels), ROWS_PER_STRIP):
        rows = slice(first, first + ROWS_PER_STRIP)
        scaled = np.nan_to_num((pixels[rows].astype(np.float64) - low) / (high - low))
        gray[rows] = np.floor(np.clip(scaled, 0, 1) * 255 + 0.5)
    return gray


def used_range_share(pixels: np.ndarray) -> float:
    """Return which share of a 16-bit range the values of an image take."""
    return float(pixels.max() - pixels.min()) / 65535


def parse_window(window: Any) -> tuple[float, float] | None:
    """Return a window as given by a user; raise UserError unless it is two numbers, the second larger."""
    if window is None:
        return None
    values = tuple(window)
    if len(values) != 2 or not np.isfinite(values).all() or not values[0] < values[1]:
        raise UserError(f"window is {list(values)}: it must be two numbers, the values of black and, larger, of white.")
    return float(values[0]), float(values[1])
