"""Read one frame of a DICOM file (extra `dicom`) as an image of full depth, in which larger values are lighter.

Files are recognized by their content, not by their suffix. Gray values pass through the modality rescale or its table,
and the file's window sets black and white. A presentation table (VOI LUT Sequence) is not applied. Of the header, only
these fields are read, and two identifiers for `find_patients`, which are never written to a file.
"""

import io
import zlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from halfmoon.core.errors import UserError, install_command, one_line
from halfmoon.data.preparation import MAX_PIXELS, ROWS_PER_STRIP, estimate_window

SUFFIXES = (".dcm", ".dicom")
MAGIC = b"DICM"
_SOP_CLASS_TAG = b"\x02\x00\x02\x00UI"
"""What stands before the kind of object in a file's first bytes."""

_DEFLATED, _NOT_DEFLATED = b"1.2.840.10008.1.2.1.99", b"1.2.840.10008.1.2.1\0\0\0"
"""Explicit VR Little Endian, deflated and not."""

MAX_UNPACKED_BYTES = 2**28
"""Bytes that a deflated file may unpack to, for a thousandth of them can claim to."""

_STORAGE_CLASS = b"1.2.840.10008.5.1.4.1.1."
_CLASSES_WITHOUT_PIXELS = (
    b"1.2.840.10008.1.3.10",
    *(_STORAGE_CLASS + kind for kind in (b"11.", b"88.", b"104.", b"481.3", b"481.5", b"66\0", b"66.1", b"9.")),
)
"""Kinds of objects without pixels: indexes of a medium, presentation states, reports, documents, plans, raw data,
waveforms."""


def is_dicom(data: bytes) -> bool:
    return data[128:132] == MAGIC


def holds_image(path: Path | str) -> bool:
    """Return whether a file is a DICOM file by its content, and none of a kind that has no pixels."""
    try:
        with open(path, "rb") as file:
            head = file.read(400)
    except OSError:
        return False
    kind = head[head.find(_SOP_CLASS_TAG) + 8 :] if _SOP_CLASS_TAG in head else b""
    return is_dicom(head) and not kind.startswith(_CLASSES_WITHOUT_PIXELS)


def read(data: BinaryIO, place: str) -> Image.Image:
    """Return the frame that stands for a DICOM file: the one that the file names, else the middle one.

    Color is 8-bit RGB. Gray has mode I;16 or F; `info` says what a gray means, value = slope * gray + intercept
    (`rescale`), and how it is shown (`window`: the values of black and white). Raise UserError for what cannot be read.
    """
    data = _inflate(data, place)
    file = _read_dataset(data, place)
    try:
        if not file.get("Rows") or not file.get("Columns"):
            raise UserError(f"{place}: a DICOM file without an image; remove it.")
        if int(file.Rows) * int(file.Columns) > MAX_PIXELS:
            size = f"{file.Columns}x{file.Rows}"
            raise UserError(f"{place}: the image has {size} pixels, of {MAX_PIXELS:,} at most; make it smaller.")
        return _decode_frame(file, data, place)
    except (MemoryError, UserError):
        raise
    except Exception as error:  # a damaged header makes pydicom and its decoders raise whatever they like
        raise UserError(_describe_failure(file, place, error)) from error


def _decode_frame(file: Any, data: BinaryIO, place: str) -> Image.Image:
    tools: Any = import_module("pydicom.pixels")
    count, named = _count_frames(file), file.get("RepresentativeFrameNumber")
    frame = int(named) - 1 if named and 1 <= int(named) <= count else count // 2
    kind = str(file.get("PhotometricInterpretation", ""))
    data.seek(0)
    pixels = tools.pixel_array(data, index=frame)
    if kind == "PALETTE COLOR":
        pixels = tools.apply_color_lut(pixels, file)
    if pixels.ndim == 3:
        depth = 8 * pixels.dtype.itemsize if kind == "PALETTE COLOR" else int(file.get("BitsStored", 8))
        image = Image.new("RGB", pixels.shape[1::-1])
        for top in range(0, len(pixels), ROWS_PER_STRIP):  # Pillow makes two more copies on the way
            strip = pixels[top : top + ROWS_PER_STRIP, :, :3] >> max(0, depth - 8)
            image.paste(Image.fromarray(strip.astype(np.uint8)), (0, top))
        return image
    if "ModalityLUTSequence" in file:
        pixels = tools.apply_modality_lut(pixels, file)
    return _make_gray_image(file, frame, np.asarray(pixels), kind == "MONOCHROME1", place)


def _make_gray_image(file: Any, frame: int, pixels: np.ndarray, inverted: bool, place: str) -> Image.Image:
    """Return gray values as an image whose larger values are lighter, with their meaning."""
    parts = list(_iterate_headers(file, frame))
    slope, intercept = _first_number(parts, "RescaleSlope", 1.0) or 1.0, _first_number(parts, "RescaleIntercept", 0.0)
    if "ModalityLUTSequence" in file:
        slope, intercept = 1.0, 0.0
    if pixels.dtype.itemsize > 2 or pixels.dtype.kind == "f":
        if not np.isfinite(pixels).all():
            raise UserError(f"{place}: some of its values are no numbers; leave it out.")
        pixels = pixels.astype(np.float32)
    else:
        low = min(0, int(pixels.min()))  # signed values become unsigned ones: 16 bits wrap around
        pixels = np.require(pixels.astype(np.int16 if low else np.uint16, copy=False), requirements="W").view(np.uint16)
        pixels -= np.uint16(low % 65536)
        intercept += slope * low
    top = float(pixels.max())
    if inverted:
        np.subtract(pixels.max(), pixels, out=pixels)
        slope, intercept = -slope, intercept + slope * top
    image = Image.fromarray(pixels)
    center, width = _first_number(parts, "WindowCenter", None), _first_number(parts, "WindowWidth", None)
    if center is not None and width is not None and width >= 1:
        exact = _first_value(parts, "VOILUTFunction") == "LINEAR_EXACT"
        half, center = (width / 2, center) if exact else ((width - 1) / 2, center - 0.5)  # PS3.3 C.11.2.1.2
        ends = center - half, center + max(half, 1e-9)
    elif int(file.get("BitsStored", 16)) <= 8 and file.get("PixelRepresentation", 0) == 0:
        most = 2 ** int(file.BitsStored) - 1  # all that 8 bits can say, as in other files of 8 bits
        stored = (top - most, top) if inverted else (0.0, most)
        ends = tuple(end * slope + intercept for end in stored)
    else:
        ends = tuple(end * slope + intercept for end in estimate_window([pixels], pixels.size))
    image.info |= {"rescale": (slope, intercept), "window": (min(ends), max(ends)), "frames": _count_frames(file)}
    image.info["modality"] = str(file.get("Modality", ""))
    return image


def read_header(path: Path, place: str) -> tuple[int, int, bool, int, int]:
    """Return height, width, whether it is gray, the number of frames, and the bytes a pixel that decoding takes."""
    try:
        with path.open("rb") as data:
            file = _read_dataset(_inflate(data, place), place)
    except OSError as error:
        raise UserError(f"{place}: not a readable DICOM file ({one_line(error)[:200]}).") from error
    try:
        kind = str(file.get("PhotometricInterpretation", ""))
        gray, syntax = kind.startswith("MONOCHROME"), file.file_meta.get("TransferSyntaxUID")
        packed = bool(syntax and syntax.is_compressed)
        cost = (20 if packed else 8) if gray else (9 if kind == "RGB" and not packed else 36)
        return int(file.get("Rows") or 0), int(file.get("Columns") or 0), gray, _count_frames(file), cost
    except Exception as error:
        raise UserError(_describe_failure(file, place, error)) from error


def find_patients(paths: Sequence[Path]) -> list[str] | None:
    """Return what groups the images of files: the patient, or the study where all are of one patient.

    A file without either, or of another format, is "". None where no file has any. Identifiers are nowhere written.
    """
    identifiers = [_read_identifiers(path) for path in paths]
    who = 1 if len({patient for patient, _ in identifiers} - {""}) == 1 else 0
    names = [each[who] or each[1 - who] for each in identifiers]
    return names if any(names) else None


def _read_identifiers(path: Path) -> tuple[str, str]:
    if not holds_image(path):
        return "", ""
    try:
        with path.open("rb") as data:
            tags = ["PatientID", "StudyInstanceUID"]
            file = import_module("pydicom").dcmread(_inflate(data, ""), stop_before_pixels=True, specific_tags=tags)
        return str(file.get("PatientID") or "").strip(), str(file.get("StudyInstanceUID") or "").strip()
    except Exception:  # whoever decodes it says what is wrong
        return "", ""


def _inflate(data: BinaryIO, place: str) -> BinaryIO:
    """Inflate a deflated file; return any other as it is.

    Raises:
        UserError: if the file is damaged or inflates to more than `MAX_UNPACKED_BYTES`.
    """
    head = data.read(1024)
    data.seek(0)
    start = 144 + int.from_bytes(head[140:144], "little")  # behind group 2, whose first element is its length
    if _DEFLATED not in head[:start]:
        return data
    content, unpacker = data.read(), zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        body = unpacker.decompress(content[start:], MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise UserError(f"{place}: not a readable DICOM file ({error}).") from error
    if unpacker.unconsumed_tail:
        raise UserError(f"{place}: it unpacks to over {MAX_UNPACKED_BYTES:,} bytes; convert, replace or remove it.")
    return io.BytesIO(content[:start].replace(_DEFLATED, _NOT_DEFLATED) + body)


def _read_dataset(data: BinaryIO, place: str) -> Any:
    try:
        pydicom = import_module("pydicom")  # an extra, needed here only
    except ImportError as error:
        raise UserError(f"{place} is a DICOM file: {install_command('dicom')} to read it.") from error
    try:
        return pydicom.dcmread(data, stop_before_pixels=True)
    except Exception as error:  # whatever a damaged file makes it raise
        raise UserError(f"{place}: not a readable DICOM file ({one_line(error)[:200]}).") from error


def _describe_failure(file: Any, place: str, error: Exception) -> str:
    """Return a sentence about pixels that cannot be decoded."""
    words = one_line(error)
    syntax = file.file_meta.get("TransferSyntaxUID")
    if "missing" in words and "dependencies" in words:
        return f"{place}: its pixels are compressed ({syntax.name}): {install_command('dicom')} to read them."
    if "exceptions were raised by all" in words:  # a list of what each decoder says
        return f"{place}: no decoder can read its pixels ({syntax.name}); convert, replace or remove it."
    return f"{place}: its pixels cannot be read ({words[:200]}); replace or remove it."


def _count_frames(file: Any) -> int:
    try:
        return max(1, int(file.get("NumberOfFrames") or 1))
    except (TypeError, ValueError):
        return 1


def _iterate_headers(file: Any, frame: int) -> Iterator[Any]:
    """Yield the file, and what it says of all frames and of one."""
    yield file
    shared, each = (file.get(f"{name}FunctionalGroupsSequence") or () for name in ("Shared", "PerFrame"))
    for group in (*shared, *each[frame : frame + 1]):
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            yield from (group.get(name) or ())[:1]


def _first_value(parts: Sequence[Any], name: str) -> Any:
    """Return the first value of an attribute that a part has."""
    for part in parts:
        value = part.get(name)
        if value is not None and value != "":
            return value[0] if hasattr(value, "__getitem__") and not isinstance(value, str) and len(value) else value
    return None


def _first_number(parts: Sequence[Any], name: str, default: Any) -> Any:
    try:
        return default if (value := _first_value(parts, name)) is None else float(value)
    except (TypeError, ValueError):
        return default
