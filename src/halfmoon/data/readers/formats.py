"""Choose the formats that Pillow may open: the common ones, and AVIF and HEIC where a decoder is installed."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec

from PIL import features

from halfmoon.core.errors import ImageReadError
from halfmoon.data import dicom

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
"""Pillow formats that are always opened: none that start other programs (EPS) or are hardly tested."""

HEIF_SUFFIXES = (".heic", ".heif")
AVIF_SUFFIXES = (".avif",)

HEAD_BYTES = 132
"""Number of bytes at the start of a file that tell its format."""

_HEIF_BRANDS = frozenset({b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"})
_AVIF_BRANDS = frozenset({b"avif", b"avis"})


def has_heif() -> bool:
    """Check whether pillow-heif is installed, without importing it."""
    return find_spec("pillow_heif") is not None


def has_avif() -> bool:
    """Check whether this Pillow decodes AVIF; it does from 11.3 on, if it was built with libavif."""
    # Older versions know no feature "avif" and would warn about it.
    return "avif" in features.modules and bool(features.check("avif"))


def list_suffixes() -> tuple[str, ...]:
    """List the suffixes, in lower case, of the formats that can be decoded here."""
    common = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", ".gif")
    heif = HEIF_SUFFIXES if has_heif() else ()
    avif = AVIF_SUFFIXES if has_avif() else ()
    return (*common, *heif, *avif, *dicom.SUFFIXES)


def find_formats(head: bytes, location: str) -> tuple[str, ...]:
    """Find the names of the image formats that Pillow may try when it opens a file.

    Args:
        head: The first `HEAD_BYTES` of the file, or all of it.
        location: The file (and row), for messages.

    Raises:
        ImageReadError: If it is a HEIC or AVIF file and its decoder is not installed.
    """
    brand = find_brand(head)
    if brand == "HEIF":
        if not has_heif():
            raise ImageReadError(
                f"{location}: HEIC images need pillow-heif; pip install 'halfmoon[heif]', or convert it to PNG or JPEG."
            )
        _register_heif()
        return ("HEIF",)
    if brand == "AVIF":
        if not has_avif():
            raise ImageReadError(
                f"{location}: AVIF images need Pillow 11.3 or later; pip install 'pillow>=11.3', "
                "or convert it to PNG or JPEG."
            )
        return ("AVIF",)
    return FORMATS


def find_brand(head: bytes) -> str | None:
    """Detect HEIF and AVIF files by the brands in their first box (ISO/IEC 14496-12, ftyp).

    Args:
        head: The first bytes of the file.

    Returns:
        "HEIF", "AVIF", or None for other files.
    """
    if head[4:8] != b"ftyp":
        return None
    # The box: its length (4 bytes), "ftyp", the major brand, a version of 4 bytes, and the compatible brands.
    box = head[: int.from_bytes(head[:4], "big")]
    major_brand = box[8:12]
    compatible_brands = [box[start : start + 4] for start in range(16, len(box), 4)]
    brands = {major_brand, *compatible_brands}
    # AVIF first: such a file may also be compatible with mif1, a brand of HEIF.
    if brands & _AVIF_BRANDS:
        return "AVIF"
    return "HEIF" if brands & _HEIF_BRANDS else None


@cache
def _register_heif() -> None:
    import_module("pillow_heif").register_heif_opener()
