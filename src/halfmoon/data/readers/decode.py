"""Encoded image files (PNG, JPEG, WebP ...) into one uint8 array; errors name file and row."""

import io
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageMode, ImageOps, UnidentifiedImageError

from halfmoon.core.errors import UserError, one_line
from halfmoon.data import dicom
from halfmoon.data.preparation import MAX_PIXELS, ROWS_PER_STRIP, UNCHANGED, Preparation, to_eight_bits
from halfmoon.data.readers.cache import collect_rows

MODES = ("L", "RGB")
FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
"""What is opened: no formats that start other programs (EPS) or are hardly tested."""

_ORIENTATION_TAG = 0x0112
"""EXIF's tag; from 5 on it swaps height and width."""


class _IgnoreWarnings:
    """Ignores warnings while a thread is inside.

    `warnings.catch_warnings`, which threads leave in another order than they came, would ignore them for good.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._filters = threading.Lock(), 0, warnings.catch_warnings()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._filters = warnings.catch_warnings()
                self._filters.__enter__()
                warnings.simplefilter("ignore")
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._filters.__exit__(*error)


IGNORE_WARNINGS = _IgnoreWarnings()


def decode_image(data: bytes, place: str) -> np.ndarray:
    """Return one encoded image, uint8 (H, W, 1) for gray or (H, W, 3) for RGB, turned as its EXIF tag says.

    `place` names the file (and row) in messages. Raise UserError for bytes that are no image or are cut off,
    of another format than `FORMATS`, for a mode other than L and RGB, and for an image of over `MAX_PIXELS`.
    """
    image = _open(data, place)
    if "rescale" in image.info:
        image = convert_channels(image, place, 1)
    if image.mode not in MODES:
        raise UserError(
            f"{place}: the image has mode {image.mode}; give --channels 1 (gray) or 3 (RGB), and all are converted."
        )
    pixels = np.asarray(_apply_orientation(image) if "exif" in image.info else image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def decode_to_shape(
    data: bytes,
    place: str,
    height: int,
    width: int,
    channels: int,
    crop: bool = False,
    window: tuple[float, float] | None = None,
) -> np.ndarray:
    """Return one encoded image (PNG, JPEG, WebP, TIFF, BMP) of any size and mode as uint8 (height, width, channels).

    The image is turned as its EXIF tag says, made gray (`channels` 1) or RGB (3), then resampled (bilinear with
    antialiasing; the sides are not kept in proportion, or with `crop` what is beyond the middle is cut off). One that
    has that size and mode keeps its exact pixels. Transparency is left out, gray of more than 8 bits is scaled to 0 and
    255 from the `window`, a DICOM file's own, or its `extremes`, CMYK is converted without a color profile; of several
    frames the first counts, of a DICOM file's the one that stands for it. `place` names the file in messages. Raise
    UserError for bytes that are no image or are cut off, for an image of over `MAX_PIXELS` (or Pillow's own, lower
    limit), and for pixels without a known range (32-bit).
    """
    return decode_prepared(data, place, Preparation((height, width), channels, crop, window))


def decode_prepared(data: bytes, place: str, how: Preparation) -> np.ndarray:
    """Return one encoded image as a preparation says, uint8 (H, W, C); without a number of channels it keeps its own.

    Raise UserError as `decode_to_shape`.
    """
    image = open_upright(data, place)
    if image.mode not in MODES or how.channels is not None:
        gray = ImageMode.getmode(image.mode).basemode == "L" or is_deep(image)
        image = convert_channels(image, place, how.channels or (1 if gray else 3), how.window)
    pixels = np.asarray(how.resized(image))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def load_pixels(image: Image.Image) -> Image.Image:
    """Return an opened image with its pixels as they lie in the file: Pillow itself turns a TIFF."""
    exif = image.getexif() if image.format == "TIFF" else Image.Exif()
    tag = exif.pop(_ORIENTATION_TAG, None)
    image.load()
    if tag is not None:
        image._size = image.im.size  # of a TIFF it is the turned one until then
        exif[_ORIENTATION_TAG] = tag
        image.info["exif"] = exif.tobytes()
    return image


def open_upright(
    data: bytes | BinaryIO, place: str, load: Callable[[Image.Image], Image.Image] = load_pixels
) -> Image.Image:
    """Open one encoded image in its mode and depth, turned upright by its EXIF tag; raise as `decode_to_shape` does.

    `load` reads the pixels and may make them fewer: turning a large image takes its memory twice.
    """
    image = _open(data, place, load)
    return image if "rescale" in image.info else _apply_orientation(image)


def _apply_orientation(image: Image.Image) -> Image.Image:
    """Return an image turned as its EXIF tag says, as it is where there is none that can be read."""
    try:
        with IGNORE_WARNINGS:
            ImageOps.exif_transpose(image, in_place=True)
    except Exception:  # EXIF data that is no EXIF data says nothing about the image, which was read
        pass
    return image


def read_header(path: Path) -> tuple[int, int, bool] | None:
    """Return an image file's upright height and width, and whether it is gray, without decoding; None for no image."""
    try:
        if dicom.holds_image(path):
            facts = dicom.read_header(path, str(path))[:3]
            return facts if all(facts[:2]) else None  # a report, or a plan of radiation
        with IGNORE_WARNINGS, Image.open(path, formats=FORMATS) as image:
            gray = ImageMode.getmode(image.mode).basemode == "L"
            if image.format == "TIFF":  # Pillow says its size turned or not, as its version and the file have it
                turned = open_upright(path.read_bytes(), str(path))
                return turned.height, turned.width, gray
            # A PNG's tag may stand behind its pixels, where Pillow would decode to look for it.
            tagged = image.format != "PNG" or "exif" in image.info
            lying = tagged and _is_sideways(image)
            return (image.width, image.height, gray) if lying else (image.height, image.width, gray)
    except MemoryError:
        raise
    except Exception:  # as in `_open`; whoever decodes it says what is wrong
        return None


def _is_sideways(image: Image.Image) -> bool:
    """Check whether an image's EXIF tag swaps height and width; unreadable EXIF data counts as none."""
    try:
        return image.getexif().get(_ORIENTATION_TAG, 1) >= 5
    except Exception:
        return False


def convert_channels(
    image: Image.Image, place: str, channels: int, window: tuple[float, float] | None = None
) -> Image.Image:
    """Return an image in its own size as 8-bit gray (`channels` 1) or RGB (3); raise UserError as `decode_to_shape`."""
    mode = {1: "L", 3: "RGB"}[channels]
    if is_deep(image):
        image = Image.fromarray(to_eight_bits(read_values(image), window_in_stored_values(image, window), place))
    try:
        with IGNORE_WARNINGS:  # about palettes with transparency, which is left out on purpose
            return image if image.mode == mode else image.convert(mode)
    except ValueError as error:
        raise UserError(f"{place}: an image of mode {image.mode} cannot be converted; make it gray or RGB.") from error


def iterate_strips(image: Image.Image, rows: int = ROWS_PER_STRIP) -> Iterator[np.ndarray]:
    """Yield an image's values a few rows at a time, as Pillow gives them away in two copies."""
    for top in range(0, image.height, rows):
        yield np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))


def read_values(image: Image.Image) -> np.ndarray:
    """Return an image's values (H, W)."""
    values = np.empty((image.height, image.width), np.asarray(image.crop((0, 0, 1, 1))).dtype)
    for number, strip in enumerate(iterate_strips(image)):
        values[number * ROWS_PER_STRIP : number * ROWS_PER_STRIP + len(strip)] = strip
    return values


def window_in_stored_values(image: Image.Image, window: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return a window, or else the image's own, in the grays as the image has them."""
    window = window or image.info.get("window")
    slope, intercept = image.info.get("rescale", (1.0, 0.0))
    if window is None:
        return None
    low, high = sorted((end - intercept) / slope for end in window)
    return low, high


def is_deep(image: Image.Image) -> bool:
    """Return whether an image has more than 8 bits a value."""
    return image.mode == "F" or image.mode.startswith("I")


def decode_all(
    images: Iterable[tuple[bytes, str]],
    count: int,
    rgb: bool = False,
    how: Preparation = UNCHANGED,
    into: Path | None = None,
) -> np.ndarray:
    """Return `count` encoded images, each with the place it comes from, as uint8 (count, H, W, C).

    With `rgb` a gray image gets three equal channels; sets such as Tiny ImageNet mix both modes. They go through the
    file `into`, one by one, where there is one: the result is that file, mapped into memory.
    Raise UserError as `decode_image` does, and where size or channels differ from the first image.
    """
    return collect_rows(_decode_same_shape(images, rgb, how), count, into)


def _decode_same_shape(images: Iterable[tuple[bytes, str]], rgb: bool, how: Preparation) -> Iterator[np.ndarray]:
    shape, first = None, ""
    for data, place in images:
        pixels = decode_prepared(data, place, how) if how.converts else decode_image(data, place)
        if rgb and how.channels is None and pixels.shape[2] == 1:
            pixels = np.repeat(pixels, 3, axis=2)
        shape, first = shape or pixels.shape, first or place
        if pixels.shape != shape:
            raise UserError(
                f"{place}: the image is {_describe_shape(pixels.shape)}, but {first} is {_describe_shape(shape)}; "
                "all images need one size and one mode: give them --resize N, --channels 1 or 3, or both."
            )
        yield pixels


def _open(data: bytes | BinaryIO, place: str, load: Callable[[Image.Image], Image.Image] = load_pixels) -> Image.Image:
    """Return an image that is read to its end; raise UserError where it is none, is cut off or is too large."""
    data = io.BytesIO(data) if isinstance(data, bytes) else data
    head = data.read(132)
    data.seek(0)
    if dicom.is_dicom(head):
        return load(dicom.read(data, place))
    try:
        with IGNORE_WARNINGS:  # about odd metadata, which Pillow leaves out
            image = Image.open(data, formats=FORMATS)
            # Pillow itself only warns up to twice its limit, and what a warning does is one thing for all threads.
            most = min(MAX_PIXELS, Image.MAX_IMAGE_PIXELS or MAX_PIXELS)
            if image.width * image.height > most:
                raise Image.DecompressionBombError(f"{image.width}x{image.height} pixels, of {most:,} at most")
            image = load(image)
    except Image.DecompressionBombError as error:
        raise UserError(f"{place}: the image is too large to open safely ({error}); make it smaller.") from error
    except UnidentifiedImageError as error:  # its own words name an object in memory
        raise UserError(f"{place}: not a readable image (no known format); replace or remove it.") from error
    except MemoryError:
        raise
    except Exception as error:  # damaged files make Pillow's readers fail in ways that it does not list
        raise UserError(f"{place}: not a readable image ({one_line(error)}); replace or remove it.") from error
    return image


def _describe_shape(shape: tuple[int, ...]) -> str:
    height, width, channels = shape
    return f"{width}x{height} {'gray' if channels == 1 else 'RGB'}"
