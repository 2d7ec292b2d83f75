"""Images of a folder for a browser: small ones by the rule of training, whole ones in full depth.

Large images are decoded one at a time, and few requests wait for them, so that memory stays bounded.
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
    FORMATS,
    IGNORE_WARNINGS,
    convert_channels,
    is_deep,
    iterate_strips,
    load_pixels,
    open_upright,
    read_values,
    window_in_stored_values,
)
from halfmoon.sites.folders.labels import STATE_FOLDER
from halfmoon.storage import atomic_io

CACHE_BYTES = 32 * 2**20  # bytes of pictures that stay in memory, encoded
MAX_DECODING_BYTES = 8 * MAX_PIXELS  # what the decoder of one image may take
MAX_WAITING_IMAGES = 8  # large images that are waited for at once; any number of requests may wait for one


class TooManyRequests(UserError):
    """Too many large images are waited for."""


@dataclass(frozen=True)
class BrowserImage:
    """An encoded image; with `read_values` red and green are the bytes of a 16-bit gray.

    `read_values`: slope and intercept make values of these, `low` and `high` are black and white, and the modality.
    """

    data: bytes
    grays: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        return "image/png" if self.data.startswith(b"\x89PNG") else "image/jpeg"


def encode_for_browser(
    path: Path, name: str, small: bool = False, window: tuple[float, float] | None = None
) -> BrowserImage:
    """Return an image file for a browser; `window` goes before the file's own.

    A small one is 8-bit, as training sees it. Raise UserError where it cannot be read.
    """
    most = 160 if small else 2048  # pixels of the longer side
    try:
        with path.open("rb") as file:
            image = open_upright(file, name, partial(_reduced, most=2 * most if small else most))
    except OSError as error:
        raise UserError(f"{name}: {atomic_io.error_reason(error)}.") from error
    if is_deep(image):
        pixels = read_values(image)
        ends = (
            window_in_stored_values(image, window)
            or image.info.get("extremes")
            or estimate_window([pixels], pixels.size)
        )
        if not small:
            return _packed(pixels, ends, image.info)
        image = Image.fromarray(to_eight_bits(pixels, ends, name))
    image = convert_channels(image, name, 1 if image.mode in ("1", "L", "LA") else 3)
    image.thumbnail((most, most), Image.Resampling.BILINEAR)
    # Small pictures stay exact; of large ones nobody sees the difference, and they come faster.
    return BrowserImage(_encoded(image, "JPEG" if small and max(image.size) > 96 else "PNG"))


def _reduced(image: Image.Image, most: int) -> Image.Image:
    """Return an opened image with its pixels, where it can its longer side about `most`, without its alpha.

    `info` has the `estimate_window` of a deep image that was larger.
    """
    image.draft(None, (most, most))
    image = load_pixels(image)
    if is_deep(image) and max(image.size) > most:
        less = Image.fromarray(shrink_by_mean(image, most))
        less.info = image.info | {"extremes": estimate_window(iterate_strips(image), image.width * image.height)}
        return less
    factor = max(image.size) // most
    if factor < 2 or image.mode not in ("L", "LA", "RGB", "RGBA", "CMYK"):
        return image
    if image.mode in ("LA", "RGBA"):
        parts = [image.getchannel(name).reduce(factor) for name in image.mode[:-1]]
        less = Image.merge(image.mode[:-1], parts)
        less.info = image.info  # with its EXIF tags
        return less
    return image.reduce(factor)


def shrink_by_mean(image: Image.Image, most: int) -> np.ndarray:
    """Return a deep image's grays (H, W) averaged over squares so that no side is longer than `most`."""
    factor = -(-max(image.size) // most)
    if min(image.size) < factor:
        return read_values(image)
    width, means = image.width // factor, []
    for rows in iterate_strips(image, factor):
        if len(rows) == factor:
            squares = rows[:, : width * factor].reshape(factor, width, factor)
            means.append(squares.mean((0, 2), dtype=np.float64))
    return np.stack(means).astype(np.float32) if image.mode == "F" else np.rint(means).astype(rows.dtype)


def _packed(pixels: np.ndarray, window: tuple[float, float], about: Mapping[Any, Any]) -> BrowserImage:
    slope, intercept = about.get("rescale", (1.0, 0.0))
    ends = sorted(end * slope + intercept for end in window)
    if pixels.dtype != np.uint16:
        low, high = float(np.nanmin(pixels)), float(np.nanmax(pixels))
        step = (high - low) / 65535 or 1.0
        pixels = np.nan_to_num((pixels.astype(np.float64) - low) / step).clip(0, 65535).round().astype(np.uint16)
        slope, intercept = slope * step, intercept + slope * low
    parts = np.stack([pixels >> 8, pixels & 255, np.zeros_like(pixels)], 2).astype(np.uint8)
    grays = {"slope": slope, "intercept": intercept, "low": ends[0], "high": ends[1]}
    return BrowserImage(_encoded(Image.fromarray(parts), "PNG"), {**grays, "modality": about.get("modality", "")})


def _encoded(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form, quality=85, compress_level=1)
    return file.getvalue()


def needs_queue(path: Path, name: str) -> bool:
    """Return whether an image has to take its turn, from its header; raise UserError if it is too large to show."""
    large = False
    try:
        large = path.stat().st_size > 2**22
        if dicom.holds_image(path):
            height, width, _, _, cost = dicom.read_header(path, name)
        else:
            with IGNORE_WARNINGS, Image.open(path, formats=FORMATS) as image:
                (width, height), cost = image.size, 20 if image.format == "WEBP" else 8
    except MemoryError:
        raise
    except Exception:  # the decoder says what is wrong
        return large
    most = MAX_DECODING_BYTES // cost
    if width * height > most:
        raise UserError(
            f"{name}: the image has {width}x{height} pixels, of {most:,} at most in its format; make it smaller."
        )
    return large or width * height > 2**20


class ImageCache:
    """The pictures of a folder's images, by `window` where one is given.

    Those used last stay in memory, up to `CACHE_BYTES`; small ones of large files are kept on the disk.
    """

    def __init__(self, folder: Path, window: tuple[float, float] | None = None) -> None:
        self.folder, self.window = folder, window
        self.bytes = 0  # in memory
        self._cached: OrderedDict[tuple[str, bool], BrowserImage] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # for the one large image that is decoded
        self._waiting: Counter[tuple[str, bool]] = Counter()

    def get(self, path: str, small: bool) -> BrowserImage:
        """Return a picture; raise UserError if the image cannot be read, `Busy` if too many are waited for."""
        key = (path, small)
        if (image := self._from_cache(key)) is not None:
            return image
        thumbnail = self._thumbnail(path) if small else None
        if thumbnail is not None and (data := atomic_io.read(thumbnail)):
            return self._cache(key, BrowserImage(data))
        if not needs_queue(self.folder / path, path):
            return self._decoded(key, thumbnail)
        with self._lock:
            if key not in self._waiting and len(self._waiting) >= MAX_WAITING_IMAGES:
                raise TooManyRequests(f"{path}: too many large images are requested at once; load the page again.")
            self._waiting[key] += 1
        try:
            with self._turn:
                return self._from_cache(key) or self._decoded(key, thumbnail)
        finally:
            with self._lock:
                self._waiting[key] -= 1
                self._waiting += Counter()  # without those that nobody waits for

    def _thumbnail(self, path: str) -> Path | None:
        """Return where a file's small picture is kept, None for a small file, which is decoded as fast."""
        try:
            facts = (self.folder / path).stat()
        except OSError:
            return None
        words = f"1 {path} {facts.st_size} {facts.st_mtime_ns} {self.window}"
        name = hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return self.folder / STATE_FOLDER / "thumbnails" / name if facts.st_size > 2**16 else None

    def _from_cache(self, key: tuple[str, bool]) -> BrowserImage | None:
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
            return self._cached.get(key)

    def _decoded(self, key: tuple[str, bool], thumbnail: Path | None) -> BrowserImage:
        path, small = key
        image = encode_for_browser(self.folder / path, path, small, self.window)
        if thumbnail is not None:
            with suppress(OSError):  # a folder that cannot be written is shown all the same
                thumbnail.parent.mkdir(parents=True, exist_ok=True)
                part = thumbnail.with_name(f".{thumbnail.name}-{os.getpid()}-{threading.get_ident()}")
                part.write_bytes(image.data)
                os.replace(part, thumbnail)
        return self._cache(key, image)

    def _cache(self, key: tuple[str, bool], image: BrowserImage) -> BrowserImage:
        with self._lock:
            if key not in self._cached:
                self._cached[key] = image
                self.bytes += len(image.data)
            while self.bytes > CACHE_BYTES and len(self._cached) > 1:
                self.bytes -= len(self._cached.popitem(last=False)[1].data)
        return image
