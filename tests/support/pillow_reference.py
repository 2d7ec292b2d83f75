"""The views made with Pillow, image by image, from the same draws: the tests' oracle and the benchmark's rival.

Written from the released recipes on Pillow's own calls; it shares no code with `halfmoon.data.views` except the
names of the operations.
"""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from halfmoon.data.views.pools import NAMES

ENHANCERS = {
    "Brightness": ImageEnhance.Brightness,
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Sharpness": ImageEnhance.Sharpness,
}


def specimens(channels: int, size: tuple[int, int]) -> Tensor:
    """Return uint8 images (15, C, H, W): noise, narrow noise, smooth, constant, two-valued, sparse."""
    generator = torch.Generator().manual_seed(channels * 1000 + size[0])
    noise = torch.randint(0, 256, (15, channels, *size), dtype=torch.uint8, generator=generator)
    noise[3:5] = noise[3:5] // 9 + 60
    coarse = torch.rand((4, channels, 4, 4), generator=generator) * 255
    noise[5:9] = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 255).to(torch.uint8)
    for row, value in ((9, 0), (10, 77), (11, 255)):
        noise[row] = value
    noise[12] = torch.where(noise[12] > 100, 200, 30)
    noise[13] = torch.where(noise[13] > 250, 255, 0)
    noise[14, 0] = 40  # one constant channel beside others that vary
    return noise


def to_image(array: np.ndarray) -> Image.Image:
    """Return the Pillow image of uint8 (C, H, W): mode L for one channel, RGB for three."""
    return Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))


def to_array(image: Image.Image) -> np.ndarray:
    """Return uint8 (C, H, W)."""
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def operation(image: Image.Image, name: str, level: int, negative: bool) -> Image.Image:
    """Return one operation of FedDure's RandAugmentMC at a level of 0 to 10 (tenths of its largest magnitude)."""
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


def semifl_operation(image: Image.Image, name: str, negative: bool, corner: tuple[int, int]) -> Image.Image:
    """Return one operation of SemiFL's RandAugment(n=2, m=10), always at its maximum: v = 10 of 10."""
    sign, bilinear = -1 if negative else 1, Image.Resampling.BILINEAR
    if name in ENHANCERS:
        return ENHANCERS[name](image).enhance(1.8 * 10 / 10 + 0.1)
    match name:
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Cutout":
            return cutout(image, *corner, 40)
        case "Equalize":
            return ImageOps.equalize(image)
        case "Invert":
            return ImageOps.invert(image)
        case "Posterize":
            return ImageOps.posterize(image, 4)
        case "Rotate":
            return image.rotate(sign * 30.0)
        case "ShearX":
            return _affine(image, (1, sign * 0.3, 0, 0, 1, 0), bilinear)
        case "ShearY":
            return _affine(image, (1, 0, 0, sign * 0.3, 1, 0), bilinear)
        case "Solarize":
            return ImageOps.solarize(image, 256 - 256)
        case "TranslateX":
            return _affine(image, (1, 0, sign * 100.0, 0, 1, 0), bilinear)
        case "TranslateY":
            return _affine(image, (1, 0, 0, 0, 1, sign * 100.0), bilinear)
        case "Identity":
            return image
    raise ValueError(name)


def fedloke_operation(image: Image.Image, name: str, negative: bool, magnitude: int) -> Image.Image:
    """Return one operation of torchvision's RandAugment at a magnitude of 0 to 30, on Pillow images.
    Its `negative` is Pillow's: torchvision's translations have the other sign, which a random sign does not tell."""
    sign = -1 if negative else 1
    if name in ENHANCERS:
        return ENHANCERS[name](image).enhance(1.0 + sign * 0.9 * magnitude / 30)
    match name:
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Equalize":
            return ImageOps.equalize(image)
        case "Posterize":
            return ImageOps.posterize(image, 8 - round(magnitude / (30 / 4)))
        case "Solarize":
            return ImageOps.solarize(image, 255.0 - 255.0 / 30 * magnitude)
        case "Rotate":
            return image.rotate(sign * 30.0 * magnitude / 30)
        case "ShearX":
            return _affine(image, (1, sign * 0.3 * magnitude / 30, 0, 0, 1, 0))
        case "ShearY":
            return _affine(image, (1, 0, 0, sign * 0.3 * magnitude / 30, 1, 0))
        case "TranslateX":
            return _affine(image, (1, 0, sign * int(150.0 / 331.0 * image.width * magnitude / 30), 0, 1, 0))
        case "TranslateY":
            return _affine(image, (1, 0, 0, 0, 1, sign * int(150.0 / 331.0 * image.height * magnitude / 30)))
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


def semifl_pixels(array: np.ndarray, row: dict, pad: int) -> np.ndarray:
    """Return SemiFL's strong view uint8 (C, H, W) of one image and one row of the draws (plain Python values)."""
    image = to_image(crop(array, row["flip"], row["top"], row["left"], pad))
    for kind, negative, corner in zip(row["operation"], row["negative"], row["corner"], strict=True):
        image = semifl_operation(image, NAMES[kind], negative, corner)
    return to_array(image)


def fedloke_pixels(array: np.ndarray, row: dict, pad: int, magnitude: int) -> np.ndarray:
    """Return FedLoKe's strong view uint8 (C, H, W) of one image and one row of the draws (plain Python values)."""
    image = to_image(crop(array, row["flip"], row["top"], row["left"], pad))
    for kind, negative in zip(row["operation"], row["negative"], strict=True):
        image = fedloke_operation(image, NAMES[kind], negative, magnitude)
    return to_array(image)


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


def _affine(image, matrix, resample=Image.Resampling.NEAREST):
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample)
