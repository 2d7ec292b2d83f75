"""Images of a folder for a browser: small ones by the rule of training, whole ones in full depth.

Large images are decoded one at a time, and few requests wait for them, so that memory stays bounded.
"""

import hashlib
import io
import os
import threading
import warnings
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
from halfmoon.data.preparation import MOST_PIXELS, eight_bits, extremes
from halfmoon.data.readers.decode import FORMATS, converted, deep, grays, in_stored, upright
from halfmoon.sites.folders.prepare import HOME
from halfmoon.storage import atomic_io

SMALL, WHOLE = 160, 2048
"""Pixels of the longer side: of a wall's picture, and of the largest that is sent."""

CACHE_BYTES = 32 * 2**20
"""Bytes of pictures that stay in memory, encoded."""

LARGE_FILE, LARGE_PIXELS = 2**22, 2**20
"""Bytes and pixels above which an image takes its turn."""

QUEUE = 8
"""Large images that are waited for at once; any number of requests may wait for one."""

THUMBNAILS, WORTH = f"{HOME}/thumbnails", 2**16
"""Where small pictures are kept, and the bytes of a file from which it is worth it."""


class Busy(UserError):
    """Too many large images are waited for."""


@dataclass(frozen=True)
class Picture:
    """An encoded image; with `grays` red and green are the bytes of a 16-bit gray.

    `grays`: slope and intercept make values of these, `low` and `high` are black and white, and the modality.
    """

    data: bytes
    grays: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        return "image/png" if self.data.startswith(b"\x89PNG") else "image/jpeg"


def picture(path: Path, name: str, small: bool = False, window: tuple[float, float] | None = None) -> Picture:
    """Return an image file for a browser; `window` goes before the file's own.

    A small one is 8-bit, as training sees it. Raise UserError where it cannot be read.
    """
    most = SMALL if small else WHOLE
    try:
        image = upright(path.read_bytes(), name, partial(_reduced, most=2 * most if small else most))
    except OSError as error:
        raise UserError(f"{name}: {atomic_io.reason(error)}.") from error
    if deep(image):
        pixels = grays(image)
        about, ends = image.info, in_stored(image, window)
        del image
        ends = extremes(pixels) if ends is None else ends
        pixels = shrunk(pixels, 2 * most if small else most)
        if not small:
            return _packed(pixels, ends, about)
        image = Image.fromarray(eight_bits(pixels, ends, name))
    image = converted(image, name, 1 if image.mode in ("1", "L", "LA") else 3)
    image.thumbnail((most, most), Image.Resampling.BILINEAR)
    # Small pictures stay exact; of large ones nobody sees the difference, and they come faster.
    return Picture(_encoded(image, "JPEG" if small and max(image.size) > 96 else "PNG"))


def _reduced(image: Image.Image, most: int) -> Image.Image:
    """Return an image of 8 bits with a longer side of about `most`, without its alpha; others as they are."""
    factor = max(image.size) // most
    if factor < 2 or image.mode not in ("L", "LA", "RGB", "RGBA"):
        return image
    if image.mode in ("LA", "RGBA"):
        parts = [image.getchannel(name).reduce(factor) for name in image.mode[:-1]]
        less = Image.merge(image.mode[:-1], parts)
        less.info = image.info  # with its EXIF tags
        return less
    return image.reduce(factor)


def shrunk(pixels: np.ndarray, most: int) -> np.ndarray:
    """Return grays (H, W) averaged over squares so that no side is longer than `most`."""
    factor = -(-max(pixels.shape) // most)
    if factor == 1 or min(pixels.shape) < factor:
        return pixels
    height, width = (side // factor for side in pixels.shape)
    rows = (pixels[row * factor : (row + 1) * factor, : width * factor] for row in range(height))
    means = np.stack([row.reshape(factor, width, factor).mean((0, 2), dtype=np.float64) for row in rows])
    return means.astype(np.float32) if pixels.dtype.kind == "f" else np.rint(means).astype(pixels.dtype)


def _packed(pixels: np.ndarray, window: tuple[float, float], about: Mapping[Any, Any]) -> Picture:
    slope, intercept = about.get("rescale", (1.0, 0.0))
    ends = sorted(end * slope + intercept for end in window)
    if pixels.dtype != np.uint16:
        low, high = float(np.nanmin(pixels)), float(np.nanmax(pixels))
        step = (high - low) / 65535 or 1.0
        pixels = np.nan_to_num((pixels.astype(np.float64) - low) / step).clip(0, 65535).round().astype(np.uint16)
        slope, intercept = slope * step, intercept + slope * low
    parts = np.stack([pixels >> 8, pixels & 255, np.zeros_like(pixels)], 2).astype(np.uint8)
    grays = {"slope": slope, "intercept": intercept, "low": ends[0], "high": ends[1]}
    return Picture(_encoded(Image.fromarray(parts), "PNG"), {**grays, "modality": about.get("modality", "")})


def _encoded(image: Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form, quality=85, compress_level=1)
    return file.getvalue()


def is_large(path: Path, name: str) -> bool:
    """Return whether an image has to take its turn, from its header; raise UserError if it is too large to show."""
    try:
        if path.stat().st_size > LARGE_FILE:
            return True
        data = path.read_bytes()
        if dicom.is_dicom(data):
            height, width = dicom.header(data, name)[:2]
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                    width, height = image.size
    except MemoryError:
        raise
    except Exception:  # the decoder says what is wrong
        return False
    if width * height > MOST_PIXELS:
        raise UserError(f"{name}: the image has {width}x{height} pixels, of {MOST_PIXELS:,} at most; make it smaller.")
    return width * height > LARGE_PIXELS


class Pictures:
    """The pictures of a folder's images, by `window` where one is given.

    Those used last stay in memory, up to `CACHE_BYTES`; small ones of large files are kept in `THUMBNAILS`.
    """

    def __init__(self, folder: Path, window: tuple[float, float] | None = None) -> None:
        self.folder, self.window = folder, window
        self.bytes = 0  # in memory
        self._cached: OrderedDict[tuple[str, bool], Picture] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # for the one large image that is decoded
        self._waiting: Counter[tuple[str, bool]] = Counter()

    def get(self, path: str, small: bool) -> Picture:
        """Return a picture; raise UserError if the image cannot be read, `Busy` if too many are waited for."""
        key = (path, small)
        if (found := self._from_cache(key)) is not None:
            return found
        kept = self._kept(path) if small else None
        if kept is not None and (data := atomic_io.read(kept)):
            return self._cache(key, Picture(data))
        if not is_large(self.folder / path, path):
            return self._decoded(key, kept)
        with self._lock:
            if key not in self._waiting and len(self._waiting) >= QUEUE:
                raise Busy(f"{path}: too many large images are requested at once; load the page again.")
            self._waiting[key] += 1
        try:
            with self._turn:
                return self._from_cache(key) or self._decoded(key, kept)
        finally:
            with self._lock:
                self._waiting[key] -= 1
                self._waiting += Counter()  # without those that nobody waits for

    def _kept(self, path: str) -> Path | None:
        """Return where a file's small picture is kept, None where it is not worth it."""
        try:
            facts = (self.folder / path).stat()
        except OSError:
            return None
        words = f"1 {path} {facts.st_size} {facts.st_mtime_ns} {self.window}"
        name = hashlib.sha256(words.encode("utf-8", "surrogateescape")).hexdigest()[:24]
        return self.folder / THUMBNAILS / name if facts.st_size > WORTH else None

    def _from_cache(self, key: tuple[str, bool]) -> Picture | None:
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
            return self._cached.get(key)

    def _decoded(self, key: tuple[str, bool], kept: Path | None) -> Picture:
        path, small = key
        made = picture(self.folder / path, path, small, self.window)
        if kept is not None:
            with suppress(OSError):  # a folder that cannot be written is shown all the same
                kept.parent.mkdir(parents=True, exist_ok=True)
                part = kept.with_name(f".{kept.name}-{os.getpid()}-{threading.get_ident()}")
                part.write_bytes(made.data)
                os.replace(part, kept)
        return self._cache(key, made)

    def _cache(self, key: tuple[str, bool], made: Picture) -> Picture:
        with self._lock:
            if key not in self._cached:
                self._cached[key] = made
                self.bytes += len(made.data)
            while self.bytes > CACHE_BYTES and len(self._cached) > 1:
                self.bytes -= len(self._cached.popitem(last=False)[1].data)
        return made
