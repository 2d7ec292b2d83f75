"""Encode the images of a folder for a browser: thumbnails in 8 bits as in training, full images in all their bits.

Memory is bounded: large images are decoded one at a time, and few requests may wait for them.
"""

import hashlib
import io
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.data.preparation import MAX_PIXELS, estimate_window, to_eight_bits
from halfmoon.data.readers.decode import (
    IGNORE_WARNINGS,
    choose_windowed_image,
    compute_stored_window,
    convert_channels,
    has_over_8_bits,
    iterate_strips,
    load_pixels,
    open_upright,
    read_values,
)
from halfmoon.data.readers.formats import HEAD_BYTES, find_formats
from halfmoon.sites.folders.labels import STATE_FOLDER
from halfmoon.storage import atomic_io

THUMBNAIL_PIXELS = 160
"""Longer side of a thumbnail."""

MAX_SIDE_PIXELS = 2048
"""Longer side of a full image; larger ones are reduced."""

MIN_JPEG_PIXELS = 96
"""Thumbnails whose longer side is larger are sent as JPEG, smaller ones without loss."""

CACHE_BYTES = 32 * 2**20
"""Encoded images that are cached in memory."""

MAX_DECODING_BYTES = 8 * MAX_PIXELS
"""Memory that the decoder of one image may need."""

MAX_WAITING_IMAGES = 8
"""Number of large images that requests may wait for at once; any number of requests may wait for the same image."""

MIN_LARGE_FILE_BYTES = 2**22
"""Files of more bytes are decoded one at a time."""

MIN_LARGE_IMAGE_PIXELS = 2**20
"""Images of more pixels are decoded one at a time."""

MIN_STORED_FILE_BYTES = 2**16
"""Thumbnails of larger files are stored on the disk; smaller files are decoded as fast."""


class TooManyRequests(UserError):
    """Too many large images are requested at once."""


@dataclass(frozen=True)
class BrowserImage:
    """An encoded image.

    Attributes:
        data: a PNG or JPEG file. If `grays` is given, red and green are the high and low byte of a 16-bit gray.
        grays: "slope" and "intercept", which convert the 16-bit grays to values; "low" and "high", the values of black
            and white; "modality", that of DICOM. None for images of 8 bits.
    """

    data: bytes
    grays: dict[str, Any] | None = None

    @property
    def media_type(self) -> str:
        return "image/png" if self.data.startswith(b"\x89PNG") else "image/jpeg"


def encode_for_browser(
    path: Path, name: str, small: bool = False, window: tuple[float, float] | None = None
) -> BrowserImage:
    """Decode an image file and encode it for a browser.

    A full deep image (more than 8 bits for each gray, such as from a scanner) is sent with all its bits and a window:
    the values that the browser shows as black and white. All other images are sent with 8 bits.

    Args:
        path: the file.
        name: its name in error messages.
        small: whether to encode a thumbnail, in 8 bits as in training.
        window: the values of black and white in a deep image, instead of those in the file.

    Returns:
        The bytes of a PNG or JPEG file and, for a deep image, how the browser converts its pixels to grays.

    Raises:
        UserError: the file cannot be read.
    """
    max_side = THUMBNAIL_PIXELS if small else MAX_SIDE_PIXELS
    try:
        with path.open("rb") as file:
            # Thumbnails are decoded at twice their size, so that the final resize still has pixels to average.
            load = partial(_load_reduced, max_side=2 * max_side if small else max_side, window=window)
            image = open_upright(file, name, load)
    except OSError as error:
        raise UserError(f"{name}: {atomic_io.error_reason(error)}.") from error
    if has_over_8_bits(image):
        pixels = read_values(image)
        stored_window = _choose_window(image, pixels, window)
        if not small:
            return _encode_grays(pixels, stored_window, image.info)
        image = Image.fromarray(to_eight_bits(pixels, stored_window, name))
    image = convert_channels(image, name, 1 if image.mode in ("1", "L", "LA") else 3)
    image.thumbnail((max_side, max_side), Image.Resampling.BILINEAR)
    # Small images are sent without loss. In large thumbnails the loss is invisible, and JPEG is faster to transfer.
    file_format = "JPEG" if small and max(image.size) > MIN_JPEG_PIXELS else "PNG"
    return BrowserImage(_encode(image, file_format))


def _choose_window(image: Image.Image, pixels: np.ndarray, window: tuple[float, float] | None) -> tuple[float, float]:
    """Choose the stored values of a deep image that are shown as black and white.

    The user's window is the first choice, then that of the file, then one that is estimated from the pixels.

    Args:
        image: the image, whose `info` may have the window of the file.
        pixels: its stored values, (H, W).
        window: the values that the user has chosen; None without a choice.
    """
    stored_window = compute_stored_window(image, window)  # that of the user or of the file
    if stored_window is not None:
        return stored_window
    if "extremes" in image.info:  # estimated by `_load_reduced`, before it reduced the image
        return image.info["extremes"]
    return estimate_window([pixels], pixels.size)


def _load_reduced(image: Image.Image, max_side: int, window: tuple[float, float] | None = None) -> Image.Image:
    """Load the pixels of an opened image, reduced by an integer factor if it is much larger than `max_side`.

    A reduced image has no alpha channel, as the page shows none. An image of more than 8 bits for each gray is shown
    through a window, the range of values from black to white; its `info["extremes"]` has the window of all its pixels,
    because a reduced image has lost its smallest and largest values.

    Args:
        image: the image.
        max_side: the longer side in pixels; images are never reduced below it, but may remain larger.
        window: the values of black and white that the user has chosen; None for those of the file.
    """
    # JPEG files are decoded at a reduced size, which saves time and memory; other formats ignore this.
    image.draft(None, (max_side, max_side))
    # A window applies to the values that are stored in a DICOM file, before its lookup table (LUT) of grays.
    image = choose_windowed_image(load_pixels(image), window)
    if has_over_8_bits(image) and max(image.size) > max_side:
        reduced = Image.fromarray(shrink_by_mean(image, max_side))
        # Estimated from all pixels of the full image, strip by strip to limit memory.
        extremes = estimate_window(iterate_strips(image), image.width * image.height)
        reduced.info = image.info | {"extremes": extremes}
        return reduced
    factor = max(image.size) // max_side
    # Pixels of other modes cannot be averaged: the numbers of a palette are not colors.
    if factor < 2 or image.mode not in ("L", "LA", "RGB", "RGBA", "CMYK"):
        return image
    if image.mode in ("LA", "RGBA"):
        channels = [image.getchannel(name).reduce(factor) for name in image.mode[:-1]]
        reduced = Image.merge(image.mode[:-1], channels)
        reduced.info = image.info  # includes the EXIF orientation
        return reduced
    return image.reduce(factor)


def shrink_by_mean(image: Image.Image, max_side: int) -> np.ndarray:
    """Shrink a deep image (more than 8 bits for each gray), which Pillow cannot average, to at most `max_side` pixels.

    Grays are averaged over squares.

    Returns:
        The means (H, W), in the image's type. Rows and columns that do not fill a square are dropped.
    """
    factor = -(-max(image.size) // max_side)  # ceiling division
    if min(image.size) < factor:
        return read_values(image)
    width = image.width // factor
    means = []
    for rows in iterate_strips(image, factor):
        if len(rows) == factor:
            squares = rows[:, : width * factor].reshape(factor, width, factor)
            means.append(squares.mean((0, 2), dtype=np.float64))
    return np.stack(means).astype(np.float32) if image.mode == "F" else np.rint(means).astype(rows.dtype)


def _encode_grays(pixels: np.ndarray, stored_window: tuple[float, float], info: Mapping[Any, Any]) -> BrowserImage:
    """Encode a deep image as a PNG that a browser can read: the high byte of a gray in red, the low byte in green.

    The page computes value = slope * gray + intercept and shows the values of a window, which the user can move.

    Args:
        pixels: the stored grays (H, W) of any type.
        stored_window: the grays that are black and white at first.
        info: metadata of the image: "rescale", slope and intercept of a DICOM file, and its "modality", such as "CT".
    """
    slope, intercept = info.get("rescale", (1.0, 0.0))
    low, high = sorted(end * slope + intercept for end in stored_window)
    if pixels.dtype != np.uint16:
        # Spread any other type over 16 bits; slope and intercept undo it in the browser.
        smallest = float(np.nanmin(pixels))
        largest = float(np.nanmax(pixels))
        step = (largest - smallest) / 65535 or 1.0
        pixels = np.nan_to_num((pixels.astype(np.float64) - smallest) / step).clip(0, 65535).round().astype(np.uint16)
        intercept = intercept + slope * smallest
        slope = slope * step
    channels = np.stack([pixels >> 8, pixels & 255, np.zeros_like(pixels)], 2).astype(np.uint8)
    grays = {"slope": slope, "intercept": intercept, "low": low, "high": high, "modality": info.get("modality", "")}
    return BrowserImage(_encode(Image.fromarray(channels), "PNG"), grays)


def _encode(image: Image.Image, file_format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, quality=85, compress_level=1)
    return file.getvalue()


def needs_queue(path: Path, name: str) -> bool:
    """Decide from an image's header whether it is so large that it must not be decoded beside other large images.

    The browser asks for many images at once, whose decoders together could fill the memory.

    Args:
        path: the file.
        name: its name in error messages.

    Raises:
        UserError: the image is too large to be shown.
    """
    large_file = False
    try:
        large_file = path.stat().st_size > MIN_LARGE_FILE_BYTES
        if dicom.holds_image(path):
            height, width, _, _, bytes_per_pixel = dicom.read_header(path, name)
        else:
            with path.open("rb") as file:
                formats = find_formats(file.read(HEAD_BYTES), name)
            with IGNORE_WARNINGS, Image.open(path, formats=formats) as image:
                width, height = image.size
                # Bytes that the decoder needs for a pixel.
                bytes_per_pixel = 20 if image.format == "WEBP" else 8
    except MemoryError:
        raise
    except Exception:  # the decoder will report the error
        return large_file
    max_pixels = MAX_DECODING_BYTES // bytes_per_pixel
    if width * height > max_pixels:
        raise UserError(
            f"{name}: the image has {width}x{height} pixels, more than the limit of {max_pixels:,} for its format; "
            "make it smaller."
        )
    return large_file or width * height > MIN_LARGE_IMAGE_PIXELS


class ImageCache:
    """A cache of a folder's encoded images.

    The images used last are in memory, up to `CACHE_BYTES`. Thumbnails of large files are also stored on the disk.

    Attributes:
        folder: the folder of the images.
        window: the values of black and white in deep images, None for those in the files.
        bytes: the bytes in memory.
    """

    def __init__(self, folder: Path, window: tuple[float, float] | None = None) -> None:
        self.folder = folder
        self.window = window
        self.bytes = 0
        self._images: OrderedDict[tuple[str, bool], BrowserImage] = OrderedDict()
        self._lock = threading.Lock()
        self._decoding_lock = threading.Lock()  # held while one large image is decoded
        self._waiting: Counter[tuple[str, bool]] = Counter()

    def get(self, path: str, small: bool) -> BrowserImage:
        """Get an image as the browser receives it, or its thumbnail, from the cache in memory, the disk or its file.

        Args:
            path: the path of the image relative to the folder.
            small: whether to get its thumbnail.

        Raises:
            UserError: the image cannot be read.
            TooManyRequests: requests wait for too many large images.
        """
        key = (path, small)
        if (image := self._find(key)) is not None:
            return image
        thumbnail = self._thumbnail_path(path) if small else None
        if thumbnail is not None and (data := atomic_io.read(thumbnail)):
            return self._store(key, BrowserImage(data))
        if not needs_queue(self.folder / path, path):
            return self._decode(key, thumbnail)
        # Large images are decoded one after the other. `_waiting` counts the requests that wait for each of them.
        with self._lock:
            if key not in self._waiting and len(self._waiting) >= MAX_WAITING_IMAGES:
                raise TooManyRequests(f"{path}: too many large images are requested at once; reload the page.")
            self._waiting[key] += 1
        try:
            with self._decoding_lock:
                # Another request may have decoded it while this one waited.
                return self._find(key) or self._decode(key, thumbnail)
        finally:
            with self._lock:
                self._waiting[key] -= 1
                self._waiting += Counter()  # drops entries whose count is 0

    def _thumbnail_path(self, path: str) -> Path | None:
        """Build the path at which a thumbnail is stored; None for files that are so small that none is stored."""
        try:
            status = (self.folder / path).stat()
        except OSError:
            return None
        # Size and time are part of the name, so that a changed file gets a new thumbnail; "1" is the version of the
        # encoding.
        identity = f"1 {path} {status.st_size} {status.st_mtime_ns} {self.window}"
        name = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return self.folder / STATE_FOLDER / "thumbnails" / name if status.st_size > MIN_STORED_FILE_BYTES else None

    def _find(self, key: tuple[str, bool]) -> BrowserImage | None:
        with self._lock:
            if key in self._images:
                self._images.move_to_end(key)
            return self._images.get(key)

    def _decode(self, key: tuple[str, bool], thumbnail: Path | None) -> BrowserImage:
        """Decode and encode an image, and store it in memory; a thumbnail is also written to the path `thumbnail`."""
        path, small = key
        image = encode_for_browser(self.folder / path, path, small, self.window)
        if thumbnail is not None:
            with suppress(OSError):  # images of a read-only folder are shown as well
                thumbnail.parent.mkdir(parents=True, exist_ok=True)
                # Renamed when it is complete, as another process may read it meanwhile.
                temporary = thumbnail.with_name(f".{thumbnail.name}-{os.getpid()}-{threading.get_ident()}")
                try:
                    temporary.write_bytes(image.data)
                    os.replace(temporary, thumbnail)
                finally:
                    temporary.unlink(missing_ok=True)  # remains if the disk is full
        return self._store(key, image)

    def _store(self, key: tuple[str, bool], image: BrowserImage) -> BrowserImage:
        with self._lock:
            if key not in self._images:
                self._images[key] = image
                self.bytes += len(image.data)
            while self.bytes > CACHE_BYTES and len(self._images) > 1:
                self.bytes -= len(self._images.popitem(last=False)[1].data)
        return image
