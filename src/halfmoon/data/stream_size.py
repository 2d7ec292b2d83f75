"""Read the size of a compressed image from its stream, without decoding it.

A decoder allocates what the stream declares. In a DICOM file that may be far more than what the file's header declares,
which is all that a reader of headers sees.
"""

import io
import struct
from collections.abc import Iterator

from PIL import Image

JPEG_START = b"\xff\xd8"
JPEG2000_START = b"\xff\x4f\xff\x51"
"""Start of a JPEG 2000 codestream and its SIZ segment. In compressed data no 0xff is followed by such bytes but by chance."""

_SIZ_BYTES = 42
"""Bytes from the start of a JPEG 2000 codestream to the end of the number of its channels."""

_FRAME_MARKERS = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
"""Second bytes of the markers of frame headers: those of JPEG (SOF0 to SOF15), and SOF55 of JPEG-LS."""

_MARKERS_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}
_SCAN_MARKER = 0xDA
_END_MARKER = 0xD9

_OTHER_FORMATS = {b"\x89PNG": "PNG", b"RIFF": "WEBP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
"""First bytes of the formats whose size Pillow reads, and their names."""


def stream_sizes(data: bytes) -> set[tuple[int, int, int]]:
    """Find the sizes that a compressed stream declares.

    Args:
        data: JPEG, JPEG-LS, JPEG 2000 (with or without boxes), PNG, TIFF or WebP. It may be hostile.

    Returns:
        Every (height, width, channels) that the stream declares: more than one if it contradicts itself. Empty for
        other formats, and for a stream that ends before its size.
    """
    if data.startswith(JPEG_START):
        return set(_jpeg_sizes(data))
    pillow_format = next((name for start, name in _OTHER_FORMATS.items() if data.startswith(start)), None)
    if pillow_format is not None:
        try:
            with Image.open(io.BytesIO(data), formats=(pillow_format,)) as image:
                return {(image.height, image.width, len(image.getbands()))}
        except Exception:  # Pillow raises many kinds of errors; the decoder reports this one
            return set()
    return set(_jpeg2000_sizes(data))


def _jpeg_sizes(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the (height, width, channels) in each frame header of a JPEG file, up to its compressed pixels."""
    position = len(JPEG_START)
    while position + 4 <= len(data):
        # A segment is 0xff, a marker byte, and usually its length in two bytes and its content.
        if data[position] != 0xFF:
            position += 1  # decoders skip bytes between segments
            continue
        marker = data[position + 1]
        if marker == 0xFF:
            position += 1  # fill bytes
        elif marker in (_SCAN_MARKER, _END_MARKER):
            return
        elif marker in _MARKERS_WITHOUT_LENGTH or marker == 0:
            position += 2
        else:
            (length,) = struct.unpack_from(">H", data, position + 2)  # ">H": an unsigned big-endian 16-bit integer
            if marker in _FRAME_MARKERS and position + 10 <= len(data):
                # Marker (2 bytes), length (2), bits of a sample (1), height (2), width (2), channels (1).
                height, width, channels = struct.unpack_from(">HHB", data, position + 5)
                yield height, width, channels
            position += 2 + max(2, length)  # the length counts its own two bytes


def _jpeg2000_sizes(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the (height, width, channels) in each SIZ segment of a JPEG 2000 file.

    All segments are read, not only the first, as a box before the codestream may contain a false one.
    """
    start = data.find(JPEG2000_START)
    while start >= 0:
        if start + _SIZ_BYTES <= len(data):
            # After the length and the capabilities: the corners of the reference grid, the tiles, and the components.
            right, bottom, left, top = struct.unpack_from(">4I", data, start + 8)
            (channels,) = struct.unpack_from(">H", data, start + 40)
            yield max(0, bottom - top), max(0, right - left), channels
        start = data.find(JPEG2000_START, start + 4)
