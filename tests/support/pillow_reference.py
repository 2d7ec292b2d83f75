"""Implement the views with Pillow, image by image, from the same random draws.

Reference for the tests and baseline of the benchmark, written from the published code of the methods. It shares no code
with `halfmoon.data.views` except the names of the operations.
"""

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from torch import Tensor

from halfmoon.data.views.pools import OPERATION_NAMES

ENHANCERS = {
    "Brightness": ImageEnhance.Brightness,
    "Color": ImageEnhance.Color,
    "Contrast": ImageEnhance.Contrast,
    "Sharpness": ImageEnhance.Sharpness,
}


def make_test_images(channels: int, size: tuple[int, int]) -> Tensor:
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
    noise[14, 0] = 40  # one constant channel next to channels that vary
    return noise


def to_image(array: np.ndarray) -> Image.Image:
    """Return the Pillow image of uint8 (C, H, W): mode L for one channel, RGB for three."""
    return Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(array.transpose(1, 2, 0)))


def to_array(image: Image.Image) -> np.ndarray:
    """Return uint8 (C, H, W)."""
    array = np.asarray(image)
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def apply_operation(
    image: Image.Image,
    name: str,
    *,
    factor: float,
    bits: int,
    threshold: float,
    degrees: float,
    shear: float,
    shift: tuple[float, float],
    resample: Image.Resampling = Image.Resampling.NEAREST,
    corner: tuple[int, int] = (0, 0),
) -> Image.Image:
    """Apply one operation. Each keyword is the strength of the operations that use it.

    Args:
        image: the image.
        name: name of the operation.
        factor: of Pillow's enhancers.
        bits: to keep per channel, for Posterize.
        threshold: for Solarize.
        degrees: for Rotate.
        shear: for ShearX and ShearY.
        shift: pixels (across, down) for TranslateX and TranslateY.
        resample: interpolation of shears and translations.
        corner: (top, left) corner for Cutout.
    """
    if name in ENHANCERS:
        return ENHANCERS[name](image).enhance(factor)
    matrices = {
        "ShearX": (1, shear, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, shear, 1, 0),
        "TranslateX": (1, 0, shift[0], 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, shift[1]),
    }
    if name in matrices:
        return image.transform(image.size, Image.Transform.AFFINE, matrices[name], resample)
    match name:
        case "AutoContrast":
            return ImageOps.autocontrast(image)
        case "Cutout":
            return cutout(image, top=corner[0], left=corner[1], side=40)
        case "Equalize":
            return ImageOps.equalize(image)
        case "Identity":
            return image
        case "Invert":
            return ImageOps.invert(image)
        case "Posterize":
            return ImageOps.posterize(image, bits)
        case "Rotate":
            return image.rotate(degrees)
        case "Solarize":
            return ImageOps.solarize(image, threshold)
    raise ValueError(name)


def apply_feddure_operation(image: Image.Image, name: str, level: int, negative: bool) -> Image.Image:
    """Apply an operation of FedDure's RandAugmentMC at a level of 0 to 10 (tenths of its largest magnitude)."""
    sign = -1 if negative else 1
    shear = sign * (float(level) * 0.3 / 10)
    return apply_operation(
        image,
        name,
        factor=float(level) * 0.9 / 10 + 0.05,
        bits=int(level * 4 / 10) + 4,
        threshold=256 - int(level * 256 / 10),
        degrees=sign * int(level * 30 / 10),
        shear=shear,
        shift=(int(shear * image.width), int(shear * image.height)),
    )


def apply_semifl_operation(image: Image.Image, name: str, negative: bool, corner: tuple[int, int]) -> Image.Image:
    """Apply an operation of SemiFL's RandAugment(n=2, m=10), always at its maximum: v = 10 of 10."""
    sign = -1 if negative else 1
    return apply_operation(
        image,
        name,
        factor=1.8 * 10 / 10 + 0.1,
        bits=4,
        threshold=256 - 256,
        degrees=sign * 30.0,
        shear=sign * 0.3,
        shift=(sign * 100.0, sign * 100.0),
        resample=Image.Resampling.BILINEAR,
        corner=corner,
    )


def apply_fedloke_operation(image: Image.Image, name: str, negative: bool, magnitude: int) -> Image.Image:
    """Apply an operation of torchvision's RandAugment at a magnitude of 0 to 30.

    `negative` has Pillow's sign. torchvision's translations have the opposite one, which makes no difference because the
    sign is random.
    """
    sign = -1 if negative else 1
    across, broadcast = (sign * int(150.0 / 331.0 * side * magnitude / 30) for side in image.size)
    return apply_operation(
        image,
        name,
        factor=1.0 + sign * 0.9 * magnitude / 30,
        bits=8 - round(magnitude / (30 / 4)),
        threshold=255.0 - 255.0 / 30 * magnitude,
        degrees=sign * 30.0 * magnitude / 30,
        shear=sign * 0.3 * magnitude / 30,
        shift=(across, broadcast),
    )


def crop(array: np.ndarray, flip: bool, top: int, left: int, pad: int) -> np.ndarray:
    """Return uint8 (C, H, W), mirrored if `flip`, and cropped at (top, left) after reflection padding."""
    _, height, width = array.shape
    mirrored = array[:, :, ::-1] if flip else array
    padded = np.pad(mirrored, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
    return padded[:, top : top + height, left : left + width]


def cutout(image: Image.Image, top: int, left: int, side: int) -> Image.Image:
    """Return the image with a gray square of value 127. Its corners, both inclusive, differ by `side`."""
    image = image.copy()
    grey = 127 if image.mode == "L" else (127, 127, 127)
    corners = (left, top, min(image.width, left + side), min(image.height, top + side))
    ImageDraw.Draw(image).rectangle(corners, grey)
    return image


def make_strong_view(array: np.ndarray, row: dict, pad: int, side: int) -> np.ndarray:
    """Return the strong view uint8 (C, H, W) of one image and one row of the draws (plain Python values)."""
    image = to_image(crop(array, row["flip"], row["top"], row["left"], pad))
    for kind, level, negative in zip(row["operation"], row["level"], row["negative"], strict=True):
        image = apply_feddure_operation(image, OPERATION_NAMES[kind], level, negative)
    top, left = row["corner"]
    return to_array(cutout(image, top=top, left=left, side=side))


def make_semifl_view(array: np.ndarray, row: dict, pad: int) -> np.ndarray:
    """Return SemiFL's strong view uint8 (C, H, W) of one image and one row of the draws (plain Python values)."""
    image = to_image(crop(array, row["flip"], row["top"], row["left"], pad))
    for kind, negative, corner in zip(row["operation"], row["negative"], row["corner"], strict=True):
        image = apply_semifl_operation(image, OPERATION_NAMES[kind], negative, corner)
    return to_array(image)


def make_fedloke_view(array: np.ndarray, row: dict, pad: int, magnitude: int) -> np.ndarray:
    """Return FedLoKe's strong view uint8 (C, H, W) of one image and one row of the draws (plain Python values)."""
    image = to_image(crop(array, row["flip"], row["top"], row["left"], pad))
    for kind, negative in zip(row["operation"], row["negative"], strict=True):
        image = apply_fedloke_operation(image, OPERATION_NAMES[kind], negative, magnitude)
    return to_array(image)


def split_draws(drawn: dict[str, Tensor]) -> list[dict]:
    """Convert the draws of a batch to one dict of Python values for each image."""
    names = list(drawn)
    columns = [drawn[name].tolist() for name in names]
    return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def make_strong_views(images: np.ndarray, rows: list[dict], mean: np.ndarray, std: np.ndarray) -> Tensor:
    """Return the normalized strong views float32 (n, C, H, W) of uint8 images (n, C, H, W), one by one."""
    pad = images.shape[2] // 8
    side = images.shape[2] // 2
    scaled = []
    for array, row in zip(images, rows, strict=True):
        pixels = torch.from_numpy(np.ascontiguousarray(make_strong_view(array, row, pad, side)))
        scaled.append(pixels.to(torch.float32).div_(255).sub_(torch.from_numpy(mean)).div_(torch.from_numpy(std)))
    return torch.stack(scaled)
