"""Images of a folder as a browser shows them: small for a wall, whole for a look, with more contrast where asked."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from halfmoon.core.errors import UserError
from halfmoon.data.readers.decode import converted, upright
from halfmoon.storage import atomic_io

SMALL, WHOLE = 160, 2048
"""Pixels of the longer side: of a wall's picture, and of the largest that is sent."""

KEPT_BYTES = 64 * 2**20
"""Bytes of pictures that are kept in memory."""


def stretched(pixels: np.ndarray) -> np.ndarray:
    """Return gray values (H, W) as uint8, the 1st percentile black and the 99th white."""
    low, high = np.percentile(pixels, (1, 99))
    if high <= low:
        low, high = float(pixels.min()), float(pixels.max())
    scale = 255 / (high - low) if high > low else 0.0
    return np.clip((pixels.astype(np.float64) - low) * scale, 0, 255).round().astype(np.uint8)


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


class Pictures:
    """The pictures of a folder's images, with the ones used last in memory."""

    def __init__(self, folder: Path) -> None:
        """Show images of `folder`."""
        self.folder = folder
        self._kept: OrderedDict[tuple[str, str, bool], bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, path: str, look: str, small: bool) -> bytes:
        """Return a picture; raise UserError where the image cannot be read."""
        key = (path, look, small)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        data = picture(self.folder / path, path, look, small)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = data
                self._bytes += len(data)
            while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return data
