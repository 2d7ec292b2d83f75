"""RandAugment's fourteen operations on uint8 batches, every pixel equal to Pillow's."""

from __future__ import annotations

from torch import Tensor

NAMES = (
    "AutoContrast", "Brightness", "Color", "Contrast", "Equalize", "Identity", "Posterize", "Rotate",
    "Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY",
)  # fmt: skip
IDENTITY = NAMES.index("Identity")
MAGNITUDES = 11


def operate(images: Tensor, operation: Tensor, level: Tensor, negative: Tensor) -> Tensor:
    """Return images (n, C, H, W) with each row's operation done at its level and direction (n,)."""
    return images  # The operations follow.
