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
"""The operations; an operation's number is its index."""

ROTATE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y = range(5)
POSTERIZE, SOLARIZE, BRIGHTNESS, CONTRAST, AUTOCONTRAST, EQUALIZE, COLOR, SHARPNESS, IDENTITY, CUTOUT = range(5, 15)


@dataclass(frozen=True)
class OperationPool:
    """The operations of a RandAugment variant and their magnitudes, one entry per level.

    Attributes:
        operations: The operations to draw from, uniformly; one that occurs twice is twice as likely.
        degrees: Rotate's angle, counterclockwise.
        shear: The shear of ShearX and ShearY in pixels per pixel.
        shift: The distance of TranslateX and TranslateY in sides of the image, truncated to whole pixels.
        bits: The number of bits that Posterize retains.
        threshold: The value from which Solarize inverts.
        factor: The blending factor of Brightness, Color, Contrast and Sharpness: 0 gives the degenerate image (such as
            gray), 1 the image itself, more than 1 the opposite of the degenerate image.
        opposite: The factor in the negative direction.
        pixels: True if `shift` is in pixels.
        bilinear: True if shears interpolate between the two nearest pixels; False for the nearest pixel.
        box: The side of Cutout's gray box minus 1, in pixels; 0 without Cutout.
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
    opposite=_FEDDURE_FACTOR,  # this variant only ever reduces color, contrast, ...
)
"""RandAugmentMC of FedDure's released code: 14 operations, the levels 0 to 10 are tenths of the largest magnitude."""

SEMIFL_POOL = OperationPool(
    # Solarize occurs twice: with threshold 0 it inverts every value, so it is the pool's Invert too.
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

Designed for ImageNet: shifts by 100 pixels and a box of 40 remove many CIFAR images completely.
"""


@lru_cache(maxsize=32)
def fedloke_pool(magnitude: int) -> OperationPool:
    """Create torchvision's RandAugment pool at one of its magnitudes, 0 to 30: 14 operations, one level.

    FedLoKe's code uses it. The factors below are torchvision's largest magnitudes; see `OperationPool` for the fields.

    Raises:
        UserError: For another magnitude.
    """
    if not 0 <= magnitude <= 30:
        raise UserError(f"RandAugment's magnitude is {magnitude}: choose 0 to 30.")
    share = magnitude / 30
    return OperationPool(
        operations=OPERATION_NAMES[:CUTOUT],
        degrees=(30 * share,),
        shear=(0.3 * share,),
        shift=(150 / 331 * share,),  # of the side: AutoAugment's 150 pixels of images of 331
        bits=(8 - round(4 * share),),
        threshold=(255 * (1 - share),),
        factor=(1 + 0.9 * share,),
        opposite=(1 - 0.9 * share,),
    )
