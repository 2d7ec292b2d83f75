"""The pools that RandAugment's operations are drawn from, as the released codes have them, and how strong each is.

A pool is numbers only: `tables` makes look-up tables and index maps of it, `operations` applies them.
"""

from dataclasses import dataclass
from functools import lru_cache

from halfmoon.core.errors import UserError

# The numbers keep the members of one family together: a comparison finds them.
OPERATION_NAMES = (
    *("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"),
    *("Posterize", "Solarize", "Brightness", "Contrast", "AutoContrast", "Equalize"),
    *("Color", "Sharpness", "Identity", "Cutout"),
)
"""The operations; an operation's number is its place here."""

ROTATE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y = range(5)
POSTERIZE, SOLARIZE, BRIGHTNESS, CONTRAST, AUTOCONTRAST, EQUALIZE, COLOR, SHARPNESS, IDENTITY, CUTOUT = range(5, 15)


@dataclass(frozen=True)
class OperationPool:
    """Which operations are drawn, each as often as it is named, and how strong they are: one entry a level.

    `degrees` is Rotate's angle, counterclockwise; `shear` ShearX's and ShearY's in pixels a pixel; `shift` the
    distance of TranslateX and TranslateY in sides of the image (in pixels where `pixels`), cut to whole pixels.
    Posterize keeps `bits`, Solarize inverts from `threshold` on. Brightness, Color, Contrast and Sharpness blend with
    `factor`, in the other direction with `opposite`: 0 gives the degenerate image, 1 the image itself, more than 1
    leaves the degenerate image behind. `bilinear` shears mix the two nearest pixels instead of taking the nearest.
    Cutout's gray box is `box` + 1 pixels a side.
    """

    operations: tuple[str, ...]
    degrees: tuple[float, ...]
    shear: tuple[float, ...]
    shift: tuple[float, ...]
    bits: tuple[int, ...]
    threshold: tuple[float, ...]
    factor: tuple[float, ...]
    opposite: tuple[float, ...]
    pixels: bool = False
    bilinear: bool = False
    box: int = 0

    @property
    def levels(self) -> int:
        return len(self.factor)


_TENTHS = range(11)
_FEDDURE_FACTOR = tuple(level * 0.9 / 10 + 0.05 for level in _TENTHS)

FEDDURE_POOL = OperationPool(
    operations=OPERATION_NAMES[:CUTOUT],
    degrees=tuple(int(level * 30 / 10) for level in _TENTHS),
    shear=tuple(level * 0.3 / 10 for level in _TENTHS),
    shift=tuple(level * 0.3 / 10 for level in _TENTHS),
    bits=tuple(int(level * 4 / 10) + 4 for level in _TENTHS),
    threshold=tuple(256 - int(level * 256 / 10) for level in _TENTHS),
    factor=_FEDDURE_FACTOR,
    opposite=_FEDDURE_FACTOR,  # it only ever fades
)
"""RandAugmentMC of FedDure's released code: 14 operations, the levels 0 to 10 are tenths of the largest magnitude."""

SEMIFL_POOL = OperationPool(
    # Solarize stands twice: from 0 on it inverts every value, so it is the pool's Invert as well.
    operations=(
        *("AutoContrast", "Brightness", "Color", "Contrast", "Cutout", "Equalize", "Solarize", "Posterize"),
        *("Rotate", "Sharpness", "ShearX", "ShearY", "Solarize", "TranslateX", "TranslateY"),
    ),
    degrees=(30.0,),
    shear=(0.3,),
    shift=(100.0,),
    bits=(4,),
    threshold=(0,),
    factor=(1.9,),
    opposite=(1.9,),
    pixels=True,
    bilinear=True,
    box=40,
)
"""RandAugment(n=2, m=10) of SemiFL's released code, which FedDB's repeats: 15 operations, all at their maximum.

Made for ImageNet: 100 pixels and a box of 40 leave nothing of many CIFAR images.
"""


@lru_cache(maxsize=32)
def fedloke_pool(magnitude: int) -> OperationPool:
    """Return torchvision's RandAugment pool at one of its magnitudes, 0 to 30: 14 operations, one level.

    Raises UserError for another magnitude.
    """
    if not 0 <= magnitude <= 30:
        raise UserError(f"RandAugment's magnitude is {magnitude}: choose 0 to 30.")
    share = magnitude / 30
    return OperationPool(
        operations=OPERATION_NAMES[:CUTOUT],
        degrees=(30 * share,),
        shear=(0.3 * share,),
        shift=(150 / 331 * share,),
        bits=(8 - round(4 * share),),
        threshold=(255 * (1 - share),),
        factor=(1 + 0.9 * share,),
        opposite=(1 - 0.9 * share,),
    )
