"""Encoded image files (PNG, JPEG, WebP ...) into one uint8 array; errors name file and row."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from halfmoon.errors import UserError

MODES = ("L", "RGB")


def decode(data: bytes, place: str) -> np.ndarray:
    """Return one encoded image, uint8 (H, W, 1) for gray or (H, W, 3) for RGB, turned as its EXIF tag says.

    `place` names the file (and row) in messages. Raise UserError for bytes that are no image or are cut off,
    for a mode other than L and RGB, and for an image so large that Pillow takes it for a decompression bomb.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data))
        image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise UserError(f"{place}: the image is too large to open safely ({error}); make it smaller.") from error
    except UnidentifiedImageError as error:  # its own words name an object in memory
        raise UserError(f"{place}: not a readable image (no known format); replace or remove it.") from error
    except (OSError, SyntaxError, ValueError, EOFError, struct.error) as error:
        raise UserError(f"{place}: not a readable image ({error}); replace or remove it.") from error
    if image.mode not in MODES:
        raise UserError(
            f"{place}: the image has mode {image.mode}; convert all images to 8-bit gray (L) or to RGB first."
        )
    if "exif" in image.info:
        image = ImageOps.exif_transpose(image)
    pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def stack(images: Iterable[tuple[bytes, str]], count: int, rgb: bool = False) -> np.ndarray:
    """Return `count` encoded images, each with the place it comes from, as uint8 (count, H, W, C).

    With `rgb` a gray image gets three equal channels; sets such as Tiny ImageNet mix both modes.
    Raise UserError as `decode` does, and where size or channels differ from the first image.
    """
    result: np.ndarray | None = None
    first = ""
    for row, (data, place) in enumerate(images):
        pixels = decode(data, place)
        if rgb and pixels.shape[2] == 1:
            pixels = np.repeat(pixels, 3, axis=2)
        if result is None:
            result, first = np.empty((count, *pixels.shape), np.uint8), place
        if pixels.shape != result.shape[1:]:
            raise UserError(
                f"{place}: the image is {_form(pixels.shape)}, but {first} is {_form(result.shape[1:])}; "
                "all images need one size and one mode."
            )
        result[row] = pixels
    if result is None:
        raise UserError("there are no images to read.")
    return result


def _form(shape: tuple[int, ...]) -> str:
    height, width, channels = shape
    return f"{width}x{height} {'gray' if channels == 1 else 'RGB'}"
