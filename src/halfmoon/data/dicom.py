"""DICOM files (extra `medical`): gray images by rescale slope, window and photometric interpretation, and nothing else.

Of the header only what makes pixels into gray values is read: no name, number or date of a person is ever looked at or
copied.
"""

import io
from importlib import import_module
from typing import Any

import numpy as np

from halfmoon.core.errors import UserError, install, one_line
from halfmoon.data.preparation import eight_bits

SUFFIXES = (".dcm", ".dicom")
FRAMES = "cut it into files of one image each first"


def is_dicom(data: bytes) -> bool:
    return data[128:132] == b"DICM"


def read(data: bytes, place: str, window: tuple[float, float] | None) -> np.ndarray:
    """Return the image of a DICOM file, uint8 (H, W), white where the scanner's people meant white.

    Values go through rescale slope and intercept; `window` says which of them are black and white, else the file's own
    window does, else the extremes of the image. MONOCHROME1 is inverted. Raise UserError for several frames, for color,
    and for what cannot be read.
    """
    file = _opened(data, place, pixels=True)
    frames = int(file.get("NumberOfFrames") or 1)
    if frames > 1:
        raise UserError(f"{place}: it has {frames} frames; {FRAMES}.")
    kind = str(file.get("PhotometricInterpretation", ""))
    if kind not in ("MONOCHROME1", "MONOCHROME2"):
        raise UserError(f"{place}: its pixels are {kind or 'of no known kind'}, not gray; convert it to PNG first.")
    try:
        pixels = np.asarray(file.pixel_array)
    except Exception as error:  # pydicom's decoders raise whatever they like
        raise UserError(f"{place}: its pixels cannot be read ({one_line(error)[:200]}).") from error
    slope, intercept = _number(file, "RescaleSlope", 1.0), _number(file, "RescaleIntercept", 0.0)
    values = pixels.astype(np.float64) * slope + intercept
    center, width = _number(file, "WindowCenter", None), _number(file, "WindowWidth", None)
    if window is None and center is not None and width is not None and width >= 1:
        window = (center - 0.5 - (width - 1) / 2, center - 0.5 + (width - 1) / 2 + 1e-9)  # PS3.3 C.11.2.1.2
    if window is None:
        window = (float(values.min()), max(float(values.max()), float(values.min()) + 1))
    gray = eight_bits(values, window, place)
    return 255 - gray if kind == "MONOCHROME1" else gray


def sides(data: bytes, place: str) -> tuple[int, int]:
    """Return height and width, without the pixels."""
    file = _opened(data, place, pixels=False)
    return int(file.get("Rows", 0)), int(file.get("Columns", 0))


def _opened(data: bytes, place: str, pixels: bool) -> Any:
    try:
        pydicom = import_module("pydicom")  # an extra, needed here only
    except ImportError as error:
        raise UserError(f"{place} is a DICOM file: {install('medical')} to read it.") from error
    try:
        return pydicom.dcmread(io.BytesIO(data), stop_before_pixels=not pixels)
    except Exception as error:  # whatever a damaged file makes it raise
        raise UserError(f"{place}: not a readable DICOM file ({one_line(error)[:200]}).") from error


def _number(file: Any, name: str, default: Any) -> Any:
    """Return a number of the header, the first where there are several."""
    value = file.get(name)
    try:
        if value is None or value == "":
            return default
        return float(value[0] if hasattr(value, "__getitem__") and not isinstance(value, str) else value)
    except (TypeError, ValueError, IndexError):
        return default
