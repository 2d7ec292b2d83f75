"""A picture of many small images: what a network will see of a folder."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from halfmoon.core.errors import UserError
from halfmoon.data.preparation import Preparation
from halfmoon.data.readers.decode import prepared
from halfmoon.storage import atomic_io

ACROSS, MOST = 12, 96
"""Images in a row, and in all."""

SIDE, GAP = 64, 4
"""Pixels of an image that has no size of its own, and between two."""


class ContactSheet:
    """Collects images as a network sees them, evenly from the whole folder, and writes one PNG file."""

    def __init__(self, total: int, how: Preparation) -> None:
        """Take up to `MOST` of `total` images, evenly from the first to the last."""
        size = how.size or (SIDE, SIDE)
        self.how = Preparation(size, how.channels or 3, how.crop, how.window)
        self.every = max(1, -(-total // MOST))
        self.met = 0
        self.images: list[np.ndarray] = []

    def add(self, name: str, data: bytes) -> None:
        if self.met % self.every == 0:
            self.images.append(prepared(data, name, self.how))
        self.met += 1

    def write(self, path: Path) -> int:
        """Write the PNG file and return how many images are on it; raise UserError where there are none."""
        if not self.images:
            raise UserError(f"{path}: there is no image to show.")
        height, width = self.how.size or (SIDE, SIDE)
        rows = -(-len(self.images) // ACROSS)
        page = np.full((rows * (height + GAP) + GAP, ACROSS * (width + GAP) + GAP, 3), 128, np.uint8)
        for place, image in enumerate(self.images):
            top, left = GAP + place // ACROSS * (height + GAP), GAP + place % ACROSS * (width + GAP)
            page[top : top + height, left : left + width] = image
        file = io.BytesIO()
        Image.fromarray(page).save(file, "PNG")
        try:
            atomic_io.replace(path, file.getvalue())
        except OSError as error:
            raise UserError(f"{path} cannot be written ({atomic_io.reason(error)}); choose another --sheet.") from error
        return len(self.images)
