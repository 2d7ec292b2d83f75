"""Preparation of images while they are decoded: resize, crop, convert channels and intensity windows."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from halfmoon.core.errors import UnknownRangeError, UserError

MAX_PIXELS = 2**26
"""Largest number of pixels of an image (8192x8192). A file of 100 kB can declare hundreds of times as many."""

OUTLIER_PERCENT = 0.5
"""Percentage of the darkest, and of the brightest, values that an estimated window excludes."""

MAX_SAMPLED_VALUES = 2**22
"""Largest number of values from which a window is estimated."""

MAX_SKIPPED_SHARE = 0.05
"""Largest share of unreadable images that are left out without the option `skip_unreadable`."""

ROWS_PER_STRIP = 256
"""Rows of an image that are converted at once, to limit memory."""


@dataclass(frozen=True)
class Preparation:
    """The conversion of images of any size and mode. By default, images are not converted and must have one shape.

    Attributes:
        size: (height, width) of the result, resampled (bilinear with antialiasing).
        channels: 1 (gray) or 3 (RGB).
        crop: True to preserve the aspect ratio and crop to the center; False to stretch.
        window: The values that become black and white in images of more than 8 bits; None: the window of a DICOM file,
            otherwise `estimate_window` of each image.
        group_pattern: The regular expression for an image's group (`halfmoon.data.groups`). Pixels do not depend on it.
        skip_unreadable: True to leave out any number of unreadable images; False for `MAX_SKIPPED_SHARE` of them.
    """

    size: tuple[int, int] | None = None
    channels: int | None = None
    crop: bool = False
    window: tuple[float, float] | None = None
    group_pattern: str | None = None
    skip_unreadable: bool = False

    @property
    def converts(self) -> bool:
        """True if images are converted."""
        return self != Preparation(group_pattern=self.group_pattern, skip_unreadable=self.skip_unreadable)

    @property
    def cache_id(self) -> str:
        """A string that identifies the conversion, for cache keys; "" for none."""
        return f"-{self.size}-{self.channels}-{self.crop}-{self.window}" if self.converts else ""

    def resize(self, image: Image.Image) -> Image.Image:
        """Resize an image to `size`; return it unchanged if it has this size already."""
        if self.size is None or image.size == (self.size[1], self.size[0]):
            return image
        height, width = self.size
        box = center_box(image.height, image.width, height, width) if self.crop else None
        return image.resize((width, height), Image.Resampling.BILINEAR, box=box)

    def convert(self, images: np.ndarray) -> np.ndarray:
        """Resize decoded images to `size` and convert them to gray or RGB (`channels`).

        Args:
            images: uint8 (N, H, W, C), C = 1 or 3.

        Returns:
            uint8 (N, *size, channels); the same array if it has this shape already.
        """
        count, height, width, channels = images.shape
        new_size = self.size or (height, width)
        new_channels = self.channels or channels
        if (height, width, channels) == (*new_size, new_channels):
            return images
        result = np.empty((count, *new_size, new_channels), np.uint8)
        for row, pixels in enumerate(images):
            image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
            if new_channels != channels:
                image = image.convert("L" if new_channels == 1 else "RGB")  # Pillow's modes of gray and color
            result[row] = np.asarray(self.resize(image)).reshape(*new_size, new_channels)
        return result


UNCHANGED = Preparation()


def center_box(height: int, width: int, target_height: int, target_width: int) -> tuple[float, float, float, float]:
    """Compute the largest centered box (left, top, right, bottom) of an image with the aspect ratio of the target."""
    scale = min(height / target_height, width / target_width)
    left = (width - target_width * scale) / 2
    top = (height - target_height * scale) / 2
    return left, top, width - left, height - top


def estimate_window(strips: Iterable[np.ndarray], count: int) -> tuple[float, float]:
    """Estimate the values that become black and white in an image whose file does not define them.

    Half a percent of the values at either end is excluded, so that a bright spot does not darken the rest. An image of
    more than `MAX_SAMPLED_VALUES` values is sampled evenly.

    Args:
        strips: the values of the image in pieces, in order.
        count: number of all values.

    Returns:
        The values that become black and white; white is larger.
    """
    step = max(1, count // MAX_SAMPLED_VALUES)
    position = 0  # index in the image of the strip's first value
    samples = []
    extremes = []
    for strip in strips:
        # Every `step`-th value of the image is sampled, also across strips. A copy, to release the strip's memory.
        first_sample = -position % step
        samples.append(strip.reshape(-1)[first_sample::step].copy())
        extremes += [strip.min(), strip.max()]
        position += strip.size
    sample = np.concatenate(samples)
    black = np.percentile(sample, OUTLIER_PERCENT, method="lower")
    white = np.percentile(sample, 100 - OUTLIER_PERCENT, method="higher")
    if white <= black:
        # Nearly all values are equal: use the full range instead.
        black = min(extremes)
        white = max(extremes)
    if white <= black:
        white = black + 1  # an image of one value
    return float(black), float(white)


def to_eight_bits(pixels: np.ndarray, window: tuple[float, float] | None, location: str) -> np.ndarray:
    """Convert gray values of any depth (H, W) to uint8, rounded to nearest.

    Args:
        pixels: The values, (H, W).
        window: The values that become 0 and 255; None to estimate them (`estimate_window`).
        location: The file (and row), for messages.

    Raises:
        UnknownRangeError: If there is no window and the values have 32 bits or are floats, whose range is unknown.
    """
    if window is None and (pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 65535):
        raise UnknownRangeError(
            f"{location}: its pixels have 32 bits and no known range; convert the image to 8 or 16 bits, or say which "
            "values are black and white ({window=LOW HIGH}).",
            option="window",
        )
    black, white = estimate_window([pixels], pixels.size) if window is None else window
    gray = np.empty(pixels.shape, np.uint8)
    for first in range(0, len(pixels), ROWS_PER_STRIP):  # strips, because float64 takes eight times the memory
        rows = slice(first, first + ROWS_PER_STRIP)
        scaled = np.nan_to_num((pixels[rows].astype(np.float64) - black) / (white - black))
        gray[rows] = np.floor(np.clip(scaled, 0, 1) * 255 + 0.5)
    return gray


def used_range_share(pixels: np.ndarray) -> float:
    """Compute the share of the 16-bit range that the values of an image span."""
    return float(pixels.max() - pixels.min()) / 65535


def parse_window(window: Any) -> tuple[float, float] | None:
    """Check a window from a user; raise UserError unless it consists of two finite numbers, the second larger."""
    if window is None:
        return None
    values = tuple(window)
    if len(values) != 2 or not np.isfinite(values).all() or not values[0] < values[1]:
        raise UserError(f"window is {list(values)}: it must be two numbers, the values of black and, larger, of white.")
    return float(values[0]), float(values[1])
