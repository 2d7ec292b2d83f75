"""The views made with Pillow, image by image, from the same draws: the tests' oracle and the benchmark's rival.

Written from the released recipe (RandAugmentMC with its 14 operations) on Pillow's own calls; it shares no code
with `halfmoon.augment` except the names of the operations.
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from halfmoon.augment.tables import NAMES

ENHANCERS = {
    "Brightness": ImageEnhance.Brightness,
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Sharpness": ImageEnhance.Sharpness,
}


def to_image(array: np.ndarray) -> Image.Image:
    """Return the Pillow image of uint8 (C, H, W): mode L for one channel, RGB for three."""
    return Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))


def to_array(image: Image.Image) -> np.ndarray:
    """Return uint8 (C, H, W)."""
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def operation(image: Image.Image, name: str, level: int, negative: bool) -> Image.Image:
    """Return one RandAugment operation at a level of 0 to 10 (tenths of its largest magnitude)."""
    sign = -1 if negative else 1
    shear = sign * (float(level) * 0.3 / 10)
    if name in ENHANCERS:
        return ENHANCERS[name](image).enhance(float(level) * 0.9 / 10 + 0.05)
    match name:
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Equalize":
            return ImageOps.equalize(image)
        case "Posterize":
            return ImageOps.posterize(image, int(level * 4 / 10) + 4)
        case "Solarize":
            return ImageOps.solarize(image, 256 - int(level * 256 / 10))
        case "Rotate":
            return image.rotate(sign * int(level * 30 / 10))
        case "ShearX":
            return _affine(image, (1, shear, 0, 0, 1, 0))
        case "ShearY":
            return _affine(image, (1, 0, 0, shear, 1, 0))
        case "TranslateX":
            return _affine(image, (1, 0, int(shear * image.width), 0, 1, 0))
        case "TranslateY":
            return _affine(image, (1, 0, 0, 0, 1, int(shear * image.height)))
        case "Identity":
            return image
    raise ValueError(name)


def crop(array: np.ndarray, flip: bool, top: int, left: int, pad: int) -> np.ndarray:
    """Return uint8 (C, H, W), mirrored where `flip` and cropped from its reflection."""
    _, height, width = array.shape
    mirrored = array[:, :, ::-1] if flip else array
    padded = np.pad(mirrored, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
    return padded[:, top : top + height, left : left + width]


def cutout(image: Image.Image, top: int, left: int, side: int) -> Image.Image:
    """Return the image with a rectangle of 127 whose corners (both inclusive) are `side` apart."""
    image = image.copy()
    grey = 127 if image.mode == "L" else (127, 127, 127)
    corners = (left, top, min(image.width, left + side), min(image.height, top + side))
    ImageDraw.Draw(image).rectangle(corners, grey)
    return image


def strong_pixels(array: np.ndarray, row: dict, pad: int, side: int) -> np.ndarray:
    """Return the strong view uint8 (C, H, W) of one image and one row of the draws (plain Python values)."""
    image = to_image(crop(array, row["flip"], row["top"], row["left"], pad))
    for kind, level, negative in zip(row["operation"], row["level"], row["negative"], strict=True):
        image = operation(image, NAMES[kind], level, negative)
    return to_array(cutout(image, *row["corner"], side))


def rows_of(drawn: dict[str, Tensor]) -> list[dict]:
    """Return the draws as one dict of plain values a row."""
    names = list(drawn)
    columns = [drawn[name].tolist() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def strong(images: np.ndarray, rows: list[dict], mean: np.ndarray, std: np.ndarray) -> Tensor:
    """Return the normalized strong views float32 (n, C, H, W) of uint8 images (n, C, H, W), one by one."""
    pad, side = images.shape[2] // 8, images.shape[2] // 2
    scaled = []
    for array, row in zip(images, rows, strict=True):
        pixels = torch.from_numpy(np.ascontiguousarray(strong_pixels(array, row, pad, side)))
        scaled.append(pixels.to(torch.float32).div_(255).sub_(torch.from_numpy(mean)).div_(torch.from_numpy(std)))
    return torch.stack(scaled)


def _affine(image: Image.Image, matrix: tuple[float, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix)
