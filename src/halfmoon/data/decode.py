"""Encoded image files (PNG, JPEG, WebP ...) into one uint8 array; errors name file and row."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageMode, ImageOps, UnidentifiedImageError

from halfmoon.errors import UserError, one_line

MODES = ("L", "RGB")
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
"""What is opened: no formats that start other programs (EPS) or are hardly tested."""

MOST_PIXELS = 2**26
"""Of one image: 8192x8192. A file of 100 kB can claim hundreds of times as many."""


_ORIENTATION = 0x0112
"""EXIF's tag; from 5 on it swaps height and width."""


def decode(data: bytes, place: str) -> np.ndarray:
    """Return one encoded image, uint8 (H, W, 1) for gray or (H, W, 3) for RGB, turned as its EXIF tag says.

    `place` names the file (and row) in messages. Raise UserError for bytes that are no image or are cut off,
    of another format than `FORMATS`, for a mode other than L and RGB, and for an image of over `MOST_PIXELS`.
    """
    image = _open(data, place)
    if image.mode not in MODES:
        raise UserError(
            f"{place}: the image has mode {image.mode}; convert all images to 8-bit gray (L) or to RGB first."
        )
    pixels = np.asarray(_turned(image) if "exif" in image.info else image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def fitted(data: bytes, place: str, height: int, width: int, channels: int) -> np.ndarray:
    """Return one encoded image (PNG, JPEG, WebP, TIFF, BMP) of any size and mode as uint8 (height, width, channels).

    The image is turned as its EXIF tag says, made gray (`channels` 1) or RGB (3), then resampled (bilinear with
    antialiasing; the sides are not kept in proportion). One that has that size and mode keeps its exact pixels.
    Transparency is left out, 16-bit gray is scaled by 255 / 65535, CMYK is converted without a color profile; of
    several frames the first counts. `place` names the file in messages. Raise UserError for bytes that are no
    image or are cut off, for an image of over `MOST_PIXELS` (or Pillow's own, lower limit), and for pixels
    without a known range (32-bit).
    """
    image = converted(upright(data, place), place, channels)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def upright(data: bytes, place: str) -> Image.Image:
    """Return one encoded image in its own size and mode, turned as its EXIF tag says; raise UserError as `fitted`."""
    return _turned(_open(data, place))


def _turned(image: Image.Image) -> Image.Image:
    """Return an image turned as its EXIF tag says, as it is where there is none that can be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ImageOps.exif_transpose(image)
    except Exception:  # EXIF data that is no EXIF data says nothing about the image, which was read
        return image


def header(path: Path) -> tuple[int, int, bool] | None:
    """Return an image file's upright height and width, and whether it is gray, without decoding; None for no image."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path, formats=FORMATS) as image:
                gray = ImageMode.getmode(image.mode).basemode == "L"
                if image.format == "TIFF":  # Pillow says its size turned or not, as its version and the file have it
                    turned = upright(path.read_bytes(), str(path))
                    return turned.height, turned.width, gray
                # A PNG's tag may stand behind its pixels, where Pillow would decode to look for it.
                tagged = image.format != "PNG" or "exif" in image.info
                lying = tagged and _lies(image)
                return (image.width, image.height, gray) if lying else (image.height, image.width, gray)
    except MemoryError:
        raise
    except Exception:  # as in `_open`; whoever decodes it says what is wrong
        return None


def _lies(image: Image.Image) -> bool:
    """Say whether an image's EXIF tag swaps its sides; what is no EXIF data swaps nothing, as in `_turned`."""
    try:
        return image.getexif().get(_ORIENTATION, 1) >= 5
    except Exception:
        return False


def converted(image: Image.Image, place: str, channels: int) -> Image.Image:
    """Return an image in its own size as 8-bit gray (`channels` 1) or RGB (3); raise UserError as `fitted`."""
    mode = {1: "L", 3: "RGB"}[channels]
    if image.mode == "F" or image.mode.startswith("I"):
        image = _eight_bit(image, place)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about palettes with transparency, which is left out on purpose
            return image if image.mode == mode else image.convert(mode)
    except ValueError as error:
        raise UserError(f"{place}: an image of mode {image.mode} cannot be converted; make it gray or RGB.") from error


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


def _open(data: bytes, place: str) -> Image.Image:
    """Return an image that is read to its end; raise UserError where it is none, is cut off or is too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about odd metadata, which Pillow leaves out
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            # Pillow itself only warns up to twice its limit, and what a warning does is one thing for all threads.
            most = min(MOST_PIXELS, Image.MAX_IMAGE_PIXELS or MOST_PIXELS)
            if image.width * image.height > most:
                raise Image.DecompressionBombError(f"{image.width}x{image.height} pixels, of {most:,} at most")
            image.load()
    except Image.DecompressionBombError as error:
        raise UserError(f"{place}: the image is too large to open safely ({error}); make it smaller.") from error
    except UnidentifiedImageError as error:  # its own words name an object in memory
        raise UserError(f"{place}: not a readable image (no known format); replace or remove it.") from error
    except MemoryError:
        raise
    except Exception as error:  # damaged files make Pillow's readers fail in ways that it does not list
        raise UserError(f"{place}: not a readable image ({one_line(error)}); replace or remove it.") from error
    return image


def _eight_bit(image: Image.Image, place: str) -> Image.Image:
    """Return 16-bit gray as 8-bit gray: Pillow's own conversion would cut off everything above 255."""
    pixels = np.asarray(image)
    if pixels.dtype.kind == "f" or pixels.min() < 0 or pixels.max() > 65535:
        raise UserError(f"{place}: its pixels have 32 bits and no known range; convert the image to 8 or 16 bits.")
    return Image.fromarray(((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8))


def _form(shape: tuple[int, ...]) -> str:
    height, width, channels = shape
    return f"{width}x{height} {'gray' if channels == 1 else 'RGB'}"
