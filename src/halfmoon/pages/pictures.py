"""Show images of a folder in a browser: small on a wall or whole, with more contrast on request.

Large images are decoded one at a time, and few requests wait for them, so that memory stays bounded.
"""

import io
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.data.readers.decode import FORMATS, MOST_PIXELS, converted, upright
from halfmoon.storage import atomic_io

SMALL, WHOLE = 160, 2048
"""Pixels of the longer side: of a wall's picture, and of the largest that is sent."""

CACHE_BYTES = 32 * 2**20
"""Bytes of pictures that stay in memory, encoded."""

LARGE_FILE, LARGE_PIXELS = 2**22, 2**20
"""Bytes and pixels above which an image takes its turn."""

QUEUE = 8
"""Requests for large images at once, the one that is served included; a browser sends up to six."""

STRIP = 256
"""Rows that are stretched together: only they are in memory as float64."""


class Busy(UserError):
    """Too many requests for large images are waiting."""


def stretched(pixels: np.ndarray) -> np.ndarray:
    """Return gray values (H, W) as uint8, the 1st percentile black and the 99th white."""
    low, high = np.percentile(pixels, (1, 99))
    if high <= low:
        low, high = float(pixels.min()), float(pixels.max())
    scale = 255 / (high - low) if high > low else 0.0
    gray = np.empty(pixels.shape, np.uint8)
    for first in range(0, len(pixels), STRIP):
        rows = slice(first, first + STRIP)
        gray[rows] = np.clip((pixels[rows].astype(np.float64) - low) * scale, 0, 255).round()
    return gray


def plain(image: Image.Image) -> Image.Image:
    """Return an image as 8-bit gray or RGB; gray of more than 8 bits is stretched: it rarely uses its whole range."""
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(stretched(np.asarray(image)))
    gray = image.mode in ("1", "L", "LA")
    return converted(image, "the image", 1 if gray else 3)


def _stretch(image: Image.Image) -> Image.Image:
    if image.mode == "L":
        return Image.fromarray(stretched(np.asarray(image)))
    return ImageOps.autocontrast(image, cutoff=1, preserve_tone=True)


LOOKS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "plain": lambda image: image,
    "stretch": _stretch,
    "equalize": ImageOps.equalize,
    "invert": ImageOps.invert,
}
"""Ways to show an image, by name."""


def picture(path: Path, name: str, look: str = "plain", small: bool = False) -> bytes:
    """Return an image file as PNG or JPEG for a browser; raise UserError where it cannot be read."""
    if look not in LOOKS:
        raise UserError(f"there is no look {look!r}.")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{name}: {atomic_io.reason(error)}.") from error
    image = plain(upright(data, name))
    most = SMALL if small else WHOLE
    if max(image.size) > most:
        image.thumbnail((most, most), Image.Resampling.BILINEAR)
    image = LOOKS[look](image)
    file = io.BytesIO()
    # Small pictures stay exact; of large ones nobody sees the difference, and they come faster.
    if small and max(image.size) > 96:
        image.save(file, "JPEG", quality=85)
    else:
        image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def kind(data: bytes) -> str:
    """Return the media type of a picture."""
    return "image/png" if data.startswith(b"\x89PNG") else "image/jpeg"


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
    """The pictures of a folder's images; those used last stay in memory, up to `CACHE_BYTES`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bytes = 0  # in memory
        self._cached: OrderedDict[tuple[str, str, bool], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # for the one large image that is decoded
        self._queue = threading.BoundedSemaphore(QUEUE)

    def get(self, path: str, look: str, small: bool) -> bytes:
        """Return a picture; raise UserError if the image cannot be read, `Busy` if too many are waiting."""
        key = (path, look, small)
        data = self._from_cache(key)
        if data is not None:
            return data
        if not is_large(self.folder / path, path):
            return self._decoded(key)
        if not self._queue.acquire(blocking=False):
            raise Busy(f"{path}: too many large images are requested at once; load the page again.")
        try:
            with self._turn:
                return self._from_cache(key) or self._decoded(key)
        finally:
            self._queue.release()

    def _from_cache(self, key: tuple[str, str, bool]) -> bytes | None:
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
            return self._cached.get(key)

    def _decoded(self, key: tuple[str, str, bool]) -> bytes:
        path, look, small = key
        data = picture(self.folder / path, path, look, small)
        with self._lock:
            if key not in self._cached:
                self._cached[key] = data
                self.bytes += len(data)
            while self.bytes > CACHE_BYTES and len(self._cached) > 1:
                self.bytes -= len(self._cached.popitem(last=False)[1])
        return data
