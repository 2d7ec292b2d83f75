"""Read one frame of a DICOM file (extra `dicom`) as an image of full depth, in which larger values are lighter.

Files are recognized by their content, not by their suffix. Gray values pass through the modality rescale or its table.
The file's window sets black and white, or its presentation table (VOI LUT Sequence) if it has no window. Padding is black
and does not count for an estimated window. A file with an attribute that changes the meaning of its pixels and is not
applied is refused. Of the header, only these fields are read, and two identifiers for `find_patients`, which are never
written to a file.
"""

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from halfmoon.core.errors import ImageReadError, UserError, install_command, one_line
from halfmoon.core.quiet import IGNORE_WARNINGS
from halfmoon.data.preparation import MAX_PIXELS, ROWS_PER_STRIP, estimate_window
from halfmoon.data.stream_size import stream_sizes

SUFFIXES = (".dcm", ".dicom")
MAGIC = b"DICM"
_SOP_CLASS_TAG = b"\x02\x00\x02\x00UI"
"""The element header before the SOP class (the kind of object) in a file's first bytes."""

_DEFLATED, _NOT_DEFLATED = b"1.2.840.10008.1.2.1.99", b"1.2.840.10008.1.2.1\0\0\0"
"""UIDs of the transfer syntax Explicit VR Little Endian, deflated and not, of equal length."""

MAX_UNPACKED_BYTES = 2**28
"""Largest size of an inflated file, because deflated data can be a thousand times smaller."""

MAX_VALUE = 1e15
"""Largest rescale slope, intercept and window of a file: larger ones make every pixel black, or are no numbers."""

_GRAY_KINDS = ("MONOCHROME1", "MONOCHROME2")
_COLOR_KINDS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT")
"""Photometric interpretations (PS3.3 C.7.6.3.1.2) that pydicom converts to RGB. Others have another meaning: YBR_PARTIAL,
HSV, ARGB, CMYK."""

_WINDOW_FUNCTIONS = ("LINEAR", "LINEAR_EXACT", "SIGMOID")

_PIXEL_ELEMENT_BYTES = 12
"""Tag, type and length of the element with compressed pixels, before its items."""

_STORAGE_CLASS = b"1.2.840.10008.5.1.4.1.1."
_CLASSES_WITHOUT_PIXELS = (
    b"1.2.840.10008.1.3.10",
    *(_STORAGE_CLASS + kind for kind in (b"11.", b"88.", b"104.", b"481.3", b"481.5", b"66\0", b"66.1", b"9.")),
)
"""SOP classes without pixels: media directories, presentation states, reports, documents, radiotherapy plans, raw data,
waveforms."""


def is_dicom(data: bytes) -> bool:
    return data[128:132] == MAGIC


def holds_image(path: Path | str) -> bool:
    """Check by its content whether a file is a DICOM file of a kind that has pixels."""
    try:
        with open(path, "rb") as file:
            head = file.read(400)
    except OSError:
        return False
    kind = head[head.find(_SOP_CLASS_TAG) + 8 :] if _SOP_CLASS_TAG in head else b""
    return is_dicom(head) and not kind.startswith(_CLASSES_WITHOUT_PIXELS)


def read(data: BinaryIO, location: str) -> Image.Image:
    """Decode the representative frame of a DICOM file: the one that the file names, otherwise the middle one.

    Args:
        data: The file.
        location: Its name, for messages.

    Returns:
        An RGB image of 8 bits, or a gray image of mode I;16 or F. The `info` has "frames", the number of frames, and
        "modality". That of a gray image also has "rescale", the slope and intercept of value = slope * pixel +
        intercept, and "window", the values of black and white. If the file maps values to grays by a table or a
        sigmoid, the image has these grays, from 0 to 1, and "values" is a second image with the values before that, to
        which another window may be applied.

    Raises:
        UserError: If the file has no image, or cannot be read.
    """
    with IGNORE_WARNINGS:
        data = _inflate(data, location)
        file = _read_dataset(data, location)
        pixels_start = data.tell()  # reading the header ends before the element with the pixels
        try:
            if not file.get("Rows") or not file.get("Columns"):
                raise ImageReadError(f"{location}: a DICOM file without an image; remove it.")
            if int(file.Rows) * int(file.Columns) > MAX_PIXELS:
                size = f"{int(file.Columns)}x{int(file.Rows)}"
                message = f"{location}: the image has {size} pixels, of {MAX_PIXELS:,} at most; make it smaller."
                raise ImageReadError(message)
            return _decode_frame(file, data, location, pixels_start)
        except (MemoryError, UserError):
            raise
        except Exception as error:  # a damaged header makes pydicom and its decoders raise undocumented exceptions
            raise _describe_failure(file, location, error) from None


def _decode_frame(file: Any, data: BinaryIO, location: str, pixels_start: int) -> Image.Image:
    """Decode the representative frame of a DICOM file as an RGB or gray image (see `read`).

    Args:
        file: The header, as pydicom's data set.
        data: The file's content.
        location: The file, for messages.
        pixels_start: Position in `data` of the element with the pixels, in bytes.

    Returns:
        The image. Its `info`, and that of the image in `info["values"]`, have the number of frames and the modality
        (such as "CT").
    """
    tools: Any = import_module("pydicom.pixels")
    _check_pixel_attributes(file, location)
    count = _count_frames(file)
    representative = file.get("RepresentativeFrameNumber")  # from 1
    has_representative = representative and 1 <= int(representative) <= count
    frame = int(representative) - 1 if has_representative else count // 2
    kind = str(file.PhotometricInterpretation)  # the meaning of pixel values, such as "MONOCHROME2" or "RGB"
    _check_stream_size(file, data, location, pixels_start, frame)
    data.seek(0)
    pixels = tools.pixel_array(data, index=frame)
    if kind in _GRAY_KINDS:
        image = _make_gray_image(file, frame, np.asarray(pixels), location)
    else:
        if kind == "PALETTE COLOR":
            pixels = tools.apply_color_lut(pixels, file)
            bits = 8 * pixels.dtype.itemsize  # those of the palette's colors, not of the stored indices
        else:
            bits = int(file.BitsStored)
        image = _make_color_image(pixels, bits)
    # "values" is a second image, which a gray image has if the file maps its values by a table or a sigmoid.
    for each in (image, image.info.get("values", image)):
        each.info |= {"frames": count, "modality": str(file.get("Modality", ""))}
    return image


def _check_pixel_attributes(file: Any, location: str) -> None:
    """Raise ImageReadError for attributes that change the meaning of pixels in a way that is not implemented."""
    reason = _find_unsupported_attribute(file)
    if reason is not None:
        raise ImageReadError(f"{location}: {reason}; convert, replace or remove it.")


def _find_unsupported_attribute(file: Any) -> str | None:
    """Describe the first attribute for which the pixels of a file cannot be interpreted; None if there is none."""
    kind = str(file.get("PhotometricInterpretation") or "")
    is_gray = kind in _GRAY_KINDS
    is_color = kind in _COLOR_KINDS
    if not kind:
        return "it does not state its Photometric Interpretation"
    if not is_gray and not is_color and kind != "PALETTE COLOR":
        return "its Photometric Interpretation is not supported (only gray, palette, RGB and YBR are)"
    samples = int(file.get("SamplesPerPixel") or 1)
    if samples != (3 if is_color else 1):
        return f"it has {samples} samples per pixel, which does not fit its Photometric Interpretation"
    if not is_gray and int(file.get("PixelRepresentation") or 0):
        return "its colors are signed"
    stored_bits = int(file.get("BitsStored") or 0)
    high_bit = file.get("HighBit")
    syntax = file.file_meta.get("TransferSyntaxUID")
    is_compressed = syntax and syntax.is_compressed  # then the stream itself defines the bits
    if high_bit is not None and stored_bits and int(high_bit) != stored_bits - 1 and not is_compressed:
        return f"its values of {stored_bits} bits are stored at an unusual position (High Bit {int(high_bit)})"
    if kind == "MONOCHROME2" and file.get("PresentationLUTShape") == "INVERSE":
        return "its Presentation LUT Shape contradicts its Photometric Interpretation"
    if file.get("PresentationLUTSequence"):
        return "it has a Presentation LUT Sequence"
    if is_gray and file.get("PixelPresentation") in ("COLOR", "MIXED"):
        return "a part of its gray values stands for colors (Pixel Presentation)"
    return None


def _make_color_image(pixels: np.ndarray, bits: int) -> Image.Image:
    """Create an RGB image of 8 bits from decoded pixels; of values with more bits, the highest 8 remain.

    Args:
        pixels: unsigned integers (H, W, 3 or 4); a fourth channel is ignored.
        bits: the number of bits that are used of each value.
    """
    image = Image.new("RGB", pixels.shape[1::-1])
    for top in range(0, len(pixels), ROWS_PER_STRIP):  # in strips, because Pillow makes two temporary copies
        strip = pixels[top : top + ROWS_PER_STRIP, :, :3]
        if bits < 8:
            strip = np.rint(strip * (255 / (2**bits - 1)))
        else:
            strip = strip >> (bits - 8)
        image.paste(Image.fromarray(strip.astype(np.uint8)), (0, top))
    return image


def _check_stream_size(file: Any, data: BinaryIO, location: str, pixels_start: int, frame: int) -> None:
    """Compare the size in a frame's compressed stream with the header's; raise UserError if they differ.

    A compressed frame states its size itself, and a decoder allocates that size, which may be far more than that of the
    header. Files without compression pass.

    Args:
        file: the header, as pydicom's data set.
        data: the file's content.
        location: the file's name, for messages.
        pixels_start: position in `data` of the element with the pixels, in bytes.
        frame: number of the frame, from 0.
    """
    syntax = file.file_meta.get("TransferSyntaxUID")
    if not (syntax and syntax.is_encapsulated):  # not compressed
        return
    # Optional: where each frame starts, and its length.
    offsets = file.get("ExtendedOffsetTable"), file.get("ExtendedOffsetTableLengths")
    data.seek(pixels_start + _PIXEL_ELEMENT_BYTES)
    stream = import_module("pydicom.encaps").get_frame(
        data,
        frame,
        number_of_frames=_count_frames(file),
        extended_offsets=offsets if offsets[0] and offsets[1] else None,
    )
    declared = int(file.Rows), int(file.Columns), int(file.get("SamplesPerPixel") or 1)
    for size in stream_sizes(bytes(stream)):
        if size != declared:
            stated, actual = (f"{columns}x{rows} pixels of {channels}" for rows, columns, channels in (declared, size))
            raise ImageReadError(
                f"{location}: its header states {stated} channels, and its compressed image has {actual}; export it again or "
                "remove it."
            )


def _make_gray_image(file: Any, frame: int, pixels: np.ndarray, location: str) -> Image.Image:
    """Create an image whose larger values are lighter.

    Its `info` has "rescale", the slope and intercept of value = slope * gray + intercept, and "window", the values of
    black and white. If the file maps values by a table or a sigmoid, the image has grays from 0 to 1, and `info` has
    the image before that as "values".

    Args:
        file: the header of the file, as pydicom's data set.
        frame: number of the frame, from 0; it may have different attributes than the file.
        pixels: the stored values of the frame, (H, W).
        location: the file's name, for messages.
    """
    headers = list(_iterate_headers(file, frame))
    for name in ("RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth"):
        value = _first_number(headers, name, 0.0)
        is_plausible = value == 0 or 1 / MAX_VALUE <= abs(value) <= MAX_VALUE  # False for NaN
        if not is_plausible:
            raise ImageReadError(
                f"{location}: its {name} is {value:g}, which no image has; export it again or remove it."
            )
    slope = _first_number(headers, "RescaleSlope", 1.0) or 1.0
    intercept = _first_number(headers, "RescaleIntercept", 0.0)
    padding = _find_padding(file, pixels)
    table = _first_table(file, headers, "ModalityLUTSequence", signed=pixels.dtype.kind == "i")
    if table is not None:  # it replaces slope and intercept
        pixels = table.apply(pixels)
        slope = 1.0
        intercept = 0.0
    if pixels.dtype.kind == "f" and not np.isfinite(pixels).all():
        raise ImageReadError(f"{location}: some of its values are no numbers; leave it out.")
    inverted = str(file.PhotometricInterpretation) == "MONOCHROME1"  # small values are white
    plain = _make_plain_image(file, headers, pixels, padding, slope, intercept, inverted)
    if "window" not in plain.info:
        raise ImageReadError(f"{location}: its VOI LUT Function is unknown; convert, replace or remove it.")
    presentation = _presentation_values(file, headers, pixels, slope, intercept)
    if presentation is None:
        return plain
    if inverted:
        presentation = 1 - presentation
    if padding is not None:
        presentation[padding] = 0
    image = Image.fromarray(presentation)
    # A window that the user gives replaces the file's table or curve: it applies to these values.
    image.info |= {"rescale": (1.0, 0.0), "window": (0.0, 1.0), "values": plain}
    return image


def _make_plain_image(
    file: Any,
    headers: Sequence[Any],
    pixels: np.ndarray,
    padding: np.ndarray | None,
    slope: float,
    intercept: float,
    inverted: bool,
) -> Image.Image:
    """Create a gray image whose real values are slope * pixels + intercept, and that has a linear window.

    Args:
        file: the header.
        headers: the data sets that may have attributes of the frame.
        pixels: the stored values (H, W), or those of the modality table.
        padding: bool (H, W), the pixels that are no part of the picture.
        slope: the factor of real values.
        intercept: the summand of real values.
        inverted: whether small real values are white.

    Returns:
        The image; without "window" in `info` if the window's function is unknown.
    """
    picture = pixels if padding is None else pixels[~padding]
    if pixels.dtype.itemsize > 2 or pixels.dtype.kind == "f":
        pixels = pixels.astype(np.float32)
    else:
        low = min(0, int(picture.min()))  # shift signed values to start at 0; uint16 wraps around correctly
        pixels = np.require(pixels.astype(np.int16 if low else np.uint16, copy=False), requirements="W").view(np.uint16)
        pixels = pixels - np.uint16(low % 65536)
        intercept += slope * low
    if padding is not None:
        pixels[padding] = pixels[~padding].min()
    top = float(pixels.max())
    # With a negative slope, small stored values are large real ones.
    reverse = inverted != (slope < 0)
    if reverse:
        np.subtract(pixels.max(), pixels, out=pixels)
        # value = slope * (top - reversed) + intercept
        intercept = intercept + slope * top
        slope = -slope
    if padding is not None:
        pixels[padding] = min(0, pixels.min())
    image = Image.fromarray(pixels)
    image.info["rescale"] = (slope, intercept)
    center = _first_number(headers, "WindowCenter", None)
    width = _first_number(headers, "WindowWidth", None)
    function = str(_first_value(headers, "VOILUTFunction") or "LINEAR").upper()
    if function not in _WINDOW_FUNCTIONS:
        return image
    if center is not None and width is not None and (width >= 1 or (width > 0 and function != "LINEAR")):
        # DICOM PS3.3 C.11.2.1.2: the default function LINEAR has a shift by half a value, LINEAR_EXACT does not.
        if function == "LINEAR":
            half = (width - 1) / 2
            center = center - 0.5
        else:
            half = width / 2
        ends = center - half, center + max(half, 1e-9)
    elif int(file.get("BitsStored", 16)) <= 8 and file.get("PixelRepresentation", 0) == 0:
        largest = 2 ** int(file.BitsStored) - 1  # the full range, as in other formats of 8 bits
        stored = (top - largest, top) if reverse else (0.0, largest)
        ends = tuple(end * slope + intercept for end in stored)
    else:
        image_values = pixels if padding is None else pixels[~padding]
        ends = tuple(end * slope + intercept for end in estimate_window([image_values], image_values.size))
    image.info["window"] = (min(ends), max(ends))
    return image


def _presentation_values(
    file: Any, headers: Sequence[Any], pixels: np.ndarray, slope: float, intercept: float
) -> np.ndarray | None:
    """Compute the grays of a DICOM file that maps its values by a sigmoid or a table instead of a linear window.

    Section C.11.2 of part PS3.3 of the standard defines these.

    Args:
        file: the header of the file.
        headers: the data sets that may have attributes of the frame; the first one with an attribute counts.
        pixels: the stored values (H, W).
        slope: slope of value = slope * pixel + intercept.
        intercept: intercept of the same.

    Returns:
        Grays from 0 to 1, float32 (H, W), by the sigmoid of a window, or by the presentation table (VOI LUT) of a file
        without a window; None for a linear window or neither.
    """
    center = _first_number(headers, "WindowCenter", 0.0)
    width = _first_number(headers, "WindowWidth", 0.0)
    has_window = _first_number(headers, "WindowCenter", None) is not None and width > 0
    function = str(_first_value(headers, "VOILUTFunction") or "LINEAR").upper()
    if has_window and function == "SIGMOID":
        real = pixels.astype(np.float64) * slope + intercept
        exponents = np.clip(-4 * (real - center) / width, -700, 700)  # exp of more overflows
        return (1 / (1 + np.exp(exponents))).astype(np.float32)
    if has_window:
        return None
    # A table has an entry for each integer value, so real values are rounded.
    real = np.rint(pixels * slope + intercept) if (slope, intercept) != (1, 0) else pixels
    table = _first_table(file, headers, "VOILUTSequence", signed=bool(real.min() < 0))
    if table is None:
        return None
    return (table.apply(real) / np.float32(2**table.bits - 1)).astype(np.float32)


class _Table(NamedTuple):
    """A lookup table of the header (PS3.3 C.11.1.1)."""

    first: int  # the smallest value that is mapped; smaller ones are mapped as this one
    values: np.ndarray  # (entries,)
    bits: int  # of each entry

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """Map values (H, W) to entries."""
        largest = self.first + len(self.values) - 1
        return self.values[np.clip(pixels, self.first, largest).astype(np.int64) - self.first]


def _first_table(file: Any, headers: Sequence[Any], name: str, signed: bool) -> _Table | None:
    """Read the lookup table (LUT) of the first data set that has one; None if there is none (PS3.3 C.11.1.1).

    Args:
        file: the header of the file.
        headers: the data sets that may have the table: those of the frame, and `file`.
        name: keyword of the sequence whose first item is the table, such as "VOILUTSequence".
        signed: whether the mapped values are signed; the table does not tell.
    """
    item = next((sequence[0] for header in headers if (sequence := header.get(name))), None)
    if item is None or item.get("LUTDescriptor") is None or item.get("LUTData") is None:
        return None
    # The number of entries, the first mapped value, and the bits of an entry.
    count, first, bits = (int(value) for value in item.LUTDescriptor)
    count = count or 2**16  # 65536 does not fit into 16 bits and is written as 0
    if signed and first >= 2**15:  # a negative value, which pydicom has read as an unsigned one
        first -= 2**16
    data = item.LUTData
    if isinstance(data, bytes):
        is_little_endian = file.original_encoding[1]
        word = np.dtype(np.uint16).newbyteorder("<" if is_little_endian else ">")
        has_byte_entries = len(data) in (count, count + 1)  # an odd number of bytes is padded by one
        data = np.frombuffer(data, np.uint8 if has_byte_entries else word)
    values = np.asarray(data).astype(np.uint16)[:count]
    if len(values) < count:
        raise ValueError("a table is incomplete")
    return _Table(first, values, bits)


def _find_padding(file: Any, pixels: np.ndarray) -> np.ndarray | None:
    """Find the pixels that fill the area around the picture: those of one value or a range (PS3.3 C.7.5.1.1.2).

    Args:
        file: the header, as pydicom's data set.
        pixels: the stored values (H, W).

    Returns:
        bool (H, W), True for padding; None if no pixel is padding, or all are.
    """
    # The attributes for floating-point pixels have other keywords.
    prefix = {"f4": "Float", "f8": "DoubleFloat"}.get(pixels.dtype.str[1:], "")
    ends: list[Any] = []  # the value, and the other end of the range if there is one
    for name in (f"{prefix}PixelPaddingValue", f"{prefix}PixelPaddingRangeLimit"):
        value = file.get(name)
        if value is None or value == "":
            continue
        if isinstance(value, bytes):
            is_little_endian = file.original_encoding[1]
            value = int.from_bytes(value, "little" if is_little_endian else "big")
        if pixels.dtype.kind == "f":
            ends.append(float(value))
        else:
            # Some writers store a signed value as an unsigned one: keep its bits and read them as the pixels' type.
            value_bits = int(value) % 2 ** (8 * pixels.itemsize)
            ends.append(np.array(value_bits, np.uint64).astype(pixels.dtype))
    if not ends or file.get(f"{prefix}PixelPaddingValue") is None:
        return None
    padding = (pixels >= min(ends)) & (pixels <= max(ends))
    return padding if padding.any() and not padding.all() else None


def read_header(path: Path, location: str) -> tuple[int, int, bool, int, int]:
    """Read a DICOM file's header.

    Args:
        path: The file.
        location: Its name for messages.

    Returns:
        Height and width in pixels (0 for a file without an image), True if it is gray, the number of frames, and the
        bytes per pixel that decoding needs.

    Raises:
        UserError: If it is no readable DICOM file.
    """
    with IGNORE_WARNINGS:
        return _read_header(path, location)


def _read_header(path: Path, location: str) -> tuple[int, int, bool, int, int]:
    """Read a DICOM file's header without suppressing pydicom's warnings, as `read_header` does.

    Returns:
        Height and width in pixels (0 for a file without an image), True if it is gray, the number of frames, and the
        bytes per pixel that decoding needs.
    """
    try:
        with path.open("rb") as data:
            file = _read_dataset(_inflate(data, location), location)
    except OSError as error:
        raise ImageReadError(f"{location}: not a readable DICOM file ({error.strerror}).") from error
    try:
        kind = str(file.get("PhotometricInterpretation", ""))
        gray = kind.startswith("MONOCHROME")
        syntax = file.file_meta.get("TransferSyntaxUID")
        compressed = bool(syntax and syntax.is_compressed)
        # Peak memory of pydicom and its decoders for each pixel; conversions of color spaces need the most.
        if gray:
            bytes_per_pixel = 20 if compressed else 8
        else:
            bytes_per_pixel = 9 if kind == "RGB" and not compressed else 36
        height = int(file.get("Rows") or 0)
        width = int(file.get("Columns") or 0)
        return height, width, gray, _count_frames(file), bytes_per_pixel
    except Exception as error:
        raise _describe_failure(file, location, error) from None


def find_patients(paths: Sequence[Path]) -> list[str] | None:
    """Find the groups of DICOM files that a split into train and test must not divide.

    These are patients, or studies (examinations) if all files are of one patient. Identifiers are never written to a
    file.

    Returns:
        The identifier of each file, "" for a file without one or of another format; None if no file has one.
    """
    identifiers = [_read_identifiers(path) for path in paths]
    one_patient = len({patient for patient, _ in identifiers} - {""}) == 1
    names = [(study or patient) if one_patient else (patient or study) for patient, study in identifiers]
    return names if any(names) else None


def _read_identifiers(path: Path) -> tuple[str, str]:
    """Read the identifiers of patient and study; "" for a missing one."""
    patient, study = read_text_values(path, ("PatientID", "StudyInstanceUID")) or ("", "")
    return patient, study


def read_text_values(path: Path, names: Sequence[str]) -> tuple[str, ...] | None:
    """Read attributes of a DICOM file's header as texts without blanks at their ends; "" for a missing one.

    Args:
        path: The file.
        names: Keywords of the attributes.

    Returns:
        The texts; None if the file is no image in DICOM or cannot be read.
    """
    if not holds_image(path):
        return None
    try:
        # Values are converted, with warnings, when they are read from the data set.
        with path.open("rb") as data, IGNORE_WARNINGS:
            tags = list(names)
            file = import_module("pydicom").dcmread(_inflate(data, ""), stop_before_pixels=True, specific_tags=tags)
            return tuple(str("" if file.get(name) is None else file.get(name)).strip() for name in names)
    except Exception:  # decoding reports the error
        return None


def _inflate(data: BinaryIO, location: str) -> BinaryIO:
    """Decompress a DICOM file of the deflated transfer syntax; return any other file unchanged.

    Returns:
        A file of the same header, whose transfer syntax is the uncompressed one.

    Raises:
        UserError: If the file is damaged or inflates to more than `MAX_UNPACKED_BYTES`.
    """
    head = data.read(1024)
    data.seek(0)
    # The header's group 2 is never compressed. Its first element has the group's length, in bytes 140 to 143.
    start = 144 + int.from_bytes(head[140:144], "little")
    if _DEFLATED not in head[:start]:
        return data
    content = data.read()
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS)  # negative: without a zlib header
    try:
        body = unpacker.decompress(content[start:], MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ImageReadError(f"{location}: not a readable DICOM file ({error}).") from error
    if unpacker.unconsumed_tail:
        raise ImageReadError(
            f"{location}: it unpacks to over {MAX_UNPACKED_BYTES:,} bytes; convert, replace or remove it."
        )
    return io.BytesIO(content[:start].replace(_DEFLATED, _NOT_DEFLATED) + body)


def _read_dataset(data: BinaryIO, location: str) -> Any:
    """Read a DICOM header with pydicom, up to the pixels; raise UserError if pydicom is missing or cannot read it."""
    try:
        pydicom = import_module("pydicom")  # an optional dependency
    except ImportError as error:
        raise UserError(f"{location} is a DICOM file: {install_command('dicom')} to read it.") from error
    try:
        return pydicom.dcmread(data, stop_before_pixels=True)
    except Exception as error:  # damaged files make it raise undocumented exceptions
        raise ImageReadError(f"{location}: not a readable DICOM file ({_describe_cause(error)}).") from None


def _describe_cause(error: Exception) -> str:
    """Describe an exception without values of the header, which messages of pydicom quote.

    The messages of these classes consist of fixed words and of numbers of bytes.
    """
    if type(error).__name__ in ("InvalidDicomError", "EOFError", "BytesLengthException"):
        return re.sub(r"'[^']*'|\"[^\"]*\"", "...", one_line(error))[:200]
    return type(error).__name__


def _describe_failure(file: Any, location: str, error: Exception) -> UserError:
    """Create the error for pixels that cannot be decoded.

    Raise it `from None`: its cause quotes the header, which has the patient's name.
    """
    reason = one_line(error)
    syntax = file.file_meta.get("TransferSyntaxUID")
    if "missing" in reason and "dependencies" in reason:
        return UserError(
            f"{location}: its pixels are compressed ({syntax.name}): {install_command('dicom')} to read them."
        )
    if "exceptions were raised by all" in reason:  # followed by a long list of all decoders' errors
        return ImageReadError(
            f"{location}: no decoder can read its pixels ({syntax.name}); convert, replace or remove it."
        )
    return ImageReadError(f"{location}: its pixels cannot be read ({_describe_cause(error)}); replace or remove it.")


def _count_frames(file: Any) -> int:
    """Read the number of frames from a DICOM header; 1 if it is missing or invalid."""
    try:
        return max(1, int(file.get("NumberOfFrames") or 1))
    except (TypeError, ValueError):
        return 1


def _iterate_headers(file: Any, frame: int) -> Iterator[Any]:
    """Yield the DICOM data sets that may define the gray values of a frame, the most general first.

    These are the file's header and, in files of several frames, the functional groups that all frames share and those of
    frame number `frame` (from 0).
    """
    yield file
    shared = file.get("SharedFunctionalGroupsSequence") or ()
    per_frame = file.get("PerFrameFunctionalGroupsSequence") or ()
    for group in (*shared, *per_frame[frame : frame + 1]):
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            yield from (group.get(name) or ())[:1]


def _first_value(headers: Sequence[Any], name: str) -> Any:
    """Return the first value of an attribute in the first data set that has it; None if there is none."""
    for header in headers:
        value = header.get(name)
        if value is None or value == "":
            continue
        has_several = hasattr(value, "__getitem__") and not isinstance(value, str) and len(value)
        return value[0] if has_several else value
    return None


def _first_number(headers: Sequence[Any], name: str, default: Any) -> Any:
    """Return `_first_value` as a number; `default` if it is missing or no number."""
    value = _first_value(headers, name)
    if value is None:
        return default
    try:
        return float(value)
    except (TypeError, ValueError):
        return default
