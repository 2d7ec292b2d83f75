"""Decode image files (PNG, JPEG, WebP, TIFF, BMP, GIF, HEIC, AVIF, DICOM) into one uint8 array; errors name file and row."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import Image, ImageMode, ImageOps, UnidentifiedImageError

from halfmoon.core.errors import ImageReadError, UnknownRangeError, UserError, escape_name, one_line
from halfmoon.core.quiet import IGNORE_WARNINGS
from halfmoon.data import dicom
from halfmoon.data.images import Images, SkippedImage
from halfmoon.data.preparation import (
    MAX_PIXELS,
    MAX_SKIPPED_SHARE,
    ROWS_PER_STRIP,
    UNCHANGED,
    Preparation,
    to_eight_bits,
)
from halfmoon.data.readers.cache import collect_rows
from halfmoon.data.readers.formats import HEAD_BYTES, find_formats

MODES = ("L", "RGB")

_ORIENTATION_TAG = 0x0112
"""EXIF's orientation tag; values from 5 on swap height and width."""


def decode_image(data: bytes, location: str) -> np.ndarray:
    """Decode an image without conversion: uint8 (H, W, 1) for gray or (H, W, 3) for RGB, rotated by its EXIF tag.

    Only a gray DICOM image, which may have more than 8 bits, is converted to 8 bits by its window.

    Args:
        data: The file's content.
        location: The file (and row), for messages.

    Raises:
        UserError: If the data are no complete image in a supported format, the mode is neither L nor RGB, the values are
            floats (`UnknownRangeError`), or the image has more than `MAX_PIXELS` pixels.
    """
    image = _open(data, location)
    # A gray DICOM image has the slope and intercept that `dicom.read` stores. Floats are refused there: their file does
    # not state which values are black and white.
    if "rescale" in image.info or image.mode == "F":
        image = convert_channels(image, location, channels=1)
    if image.mode not in MODES:
        raise UserError(
            f"{location}: the image has mode {image.mode}; give {{channels=1}} (gray) or 3 (RGB), and all are converted.",
            option="channels",
        )
    pixels = np.asarray(_apply_orientation(image) if "exif" in image.info else image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def decode_to_shape(
    data: bytes,
    location: str,
    height: int,
    width: int,
    channels: int,
    crop: bool = False,
    window: tuple[float, float] | None = None,
) -> np.ndarray:
    """Decode an image of any size and mode and convert it to uint8 (height, width, channels).

    The image is rotated by its EXIF tag, converted to gray or RGB, and resampled (bilinear with antialiasing). An image
    that has this size and mode already has exactly its pixels. Transparency is ignored, and CMYK is converted without a
    color profile. Of several frames the first is used, in DICOM files the representative one.

    Args:
        data: The file's content.
        location: The file (and row), for messages.
        height: The height of the result.
        width: The width of the result.
        channels: 1 (gray) or 3 (RGB).
        crop: True to preserve the aspect ratio and crop to the center; False to stretch.
        window: The values that become 0 and 255 for gray values of more than 8 bits; None: the window of a DICOM file,
            otherwise `halfmoon.data.preparation.estimate_window`.

    Raises:
        UserError: If the data are no complete image, the image has more than `MAX_PIXELS` pixels (or Pillow's lower
            limit), or the range of its pixels is unknown (32 bits).
    """
    return decode_prepared(data, location, Preparation((height, width), channels, crop, window))


def decode_prepared(data: bytes, location: str, preparation: Preparation) -> np.ndarray:
    """Decode an image and convert it as `preparation` defines, uint8 (H, W, C); raise UserError like `decode_to_shape`."""
    return _convert(open_upright(data, location), location, preparation)


def prepare_image(image: Image.Image, location: str, preparation: Preparation) -> np.ndarray:
    """Convert an image that is open already as `decode_prepared` does; the image itself is not changed.

    Args:
        image: The image, of any size and mode.
        location: Its origin, for messages.
        preparation: The conversion.

    Raises:
        UserError: If its pixels cannot be decoded, or their range is unknown.
    """
    try:
        image.load()
        upright = image
        if "exif" in image.info:
            upright = _apply_orientation(image.copy())
    except (OSError, SyntaxError, ValueError) as error:
        raise ImageReadError(f"{location}: the image cannot be decoded ({one_line(error)}).") from error
    return _convert(upright, location, preparation)


def _convert(image: Image.Image, location: str, preparation: Preparation) -> np.ndarray:
    """Convert an upright image to 8-bit gray or RGB and resize it: uint8 (H, W, C)."""
    if image.mode not in MODES or preparation.channels is not None:
        gray = ImageMode.getmode(image.mode).basemode == "L" or has_over_8_bits(image)
        image = convert_channels(image, location, preparation.channels or (1 if gray else 3), preparation.window)
    pixels = np.asarray(preparation.resize(image))
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def load_pixels(image: Image.Image) -> Image.Image:
    """Load the pixels of an opened image without rotating it by its EXIF tag, as Pillow would do with a TIFF.

    The image is changed and returned.
    """
    # Remove the tag while the pixels are loaded, and restore it afterwards.
    exif = image.getexif() if image.format == "TIFF" else Image.Exif()
    tag = exif.pop(_ORIENTATION_TAG, None)
    image.load()
    if tag is not None:
        image._size = image.im.size  # for a TIFF, Pillow has set the size after rotation
        exif[_ORIENTATION_TAG] = tag
        image.info["exif"] = exif.tobytes()
    return image


def open_upright(
    data: bytes | BinaryIO, location: str, load: Callable[[Image.Image], Image.Image] = load_pixels
) -> Image.Image:
    """Decode an image in its mode and depth, rotated by its EXIF tag; raise UserError like `decode_to_shape`.

    Args:
        data: The file or its content.
        location: The file (and row), for messages.
        load: Loads the pixels of an opened image. It may also reduce the image (for thumbnails), before rotation
            doubles its memory.
    """
    image = _open(data, location, load)
    is_gray_dicom = "rescale" in image.info  # `dicom.read` stores slope and intercept; DICOM has no EXIF tag
    return image if is_gray_dicom else _apply_orientation(image)


def _apply_orientation(image: Image.Image) -> Image.Image:
    """Rotate an image by its EXIF tag; leave it unchanged if the tag is missing or unreadable."""
    try:
        with IGNORE_WARNINGS:
            ImageOps.exif_transpose(image, in_place=True)
    except Exception:  # damaged EXIF data; the pixels were decoded successfully
        pass
    return image


class ImageHeader(NamedTuple):
    """What the header of an image file states.

    Attributes:
        height: in pixels, after rotation by the EXIF tag.
        width: the same.
        gray: True for gray values.
        is_deep: True for gray values to which a window applies: those of more than 8 bits, and of DICOM files.
    """

    height: int
    width: int
    gray: bool
    is_deep: bool


def read_header(path: Path) -> tuple[int, int, bool] | None:
    """Read height and width (rotated by the EXIF tag) of an image file, and whether it is gray, without decoding it.

    Returns:
        Height and width in pixels, and True if it is gray; None if the file is no image or cannot be read.
    """
    header = read_image_header(path)
    return None if header is None else header[:3]


def read_image_header(source: Path | bytes) -> ImageHeader | None:
    """Read the header of an image file, or of its content; None if it is no image or cannot be read."""
    try:
        if isinstance(source, Path) and dicom.holds_image(source):
            height, width, gray = dicom.read_header(source, str(source))[:3]
            # None: a report or a radiotherapy plan
            return ImageHeader(height, width, gray, is_deep=gray) if height and width else None
        with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
            formats = find_formats(file.read(HEAD_BYTES), str(source)[:100])
            file.seek(0)
            with IGNORE_WARNINGS, Image.open(file, formats=formats) as image:
                gray = ImageMode.getmode(image.mode).basemode == "L"
                is_deep = has_over_8_bits(image)
                # Pillow's size is that before or after rotation, depending on its version and the file.
                if image.format == "TIFF":
                    upright = open_upright(source.read_bytes() if isinstance(source, Path) else source, "")
                    return ImageHeader(upright.height, upright.width, gray, is_deep)
                # A PNG's tag may follow its pixels; `getexif` would decode all of them to find it.
                may_have_tag = image.format != "PNG" or "exif" in image.info
                if may_have_tag and _is_sideways(image):
                    return ImageHeader(image.width, image.height, gray, is_deep)
                return ImageHeader(image.height, image.width, gray, is_deep)
    except MemoryError:
        raise
    except Exception:  # any error, as in `_open`; decoding reports it
        return None


def refuse_unused_options(sources: Iterable[Path | bytes], preparation: Preparation, location: object) -> None:
    """Raise UserError if the options `crop` or `window` change none of the images, as their headers show.

    Reading ends at the first image that the options change.

    Args:
        sources: The image files, or their contents.
        preparation: The conversion.
        location: The folder of the images, for the message.
    """
    unused = {"crop"} if preparation.crop else set()
    if preparation.window is not None:
        unused.add("window")
    count = 0
    for source in sources if unused else ():
        header = read_image_header(source)
        if header is None:
            continue  # reported when all images are read
        count += 1
        if header.is_deep:
            unused.discard("window")
        # The proportions of image and result, without division.
        if preparation.size is not None and header.height * preparation.size[1] != header.width * preparation.size[0]:
            unused.discard("crop")
        if not unused:
            return
    if not count:
        return
    if "window" in unused:
        raise UserError(
            f"{location}: {{window}} has no effect, because no image has gray values of more than 8 bits; leave it out.",
            option="window",
        )
    if "crop" in unused:
        reason = "all images have the proportions of the result" if preparation.size else "it needs {resize=N}"
        raise UserError(f"{location}: {{crop}} has no effect: {reason}; leave it out.", option=("crop", "resize"))


def _is_sideways(image: Image.Image) -> bool:
    """Check whether an image's EXIF tag swaps height and width; unreadable EXIF data counts as none."""
    try:
        return image.getexif().get(_ORIENTATION_TAG, 1) >= 5
    except Exception:
        return False


def convert_channels(
    image: Image.Image, location: str, channels: int, window: tuple[float, float] | None = None
) -> Image.Image:
    """Convert an image of any mode to 8-bit gray or RGB; its size remains.

    A gray image of more than 8 bits is converted by a window: the values that become black and white. A DICOM file
    stores integers, and a slope and intercept that give the real values, such as Hounsfield units. Instead of a window,
    it may have a table or a sigmoid that maps the values to grays, which `dicom.read` has applied.

    Args:
        image: The image.
        location: The file (and row), for messages.
        channels: 1 for gray, 3 for RGB.
        window: The (real) values that become black and white; None: those of the file, or an estimate.

    Raises:
        UserError: If the mode cannot be converted, or the range of its values is unknown (32 bits).
    """
    mode = "L" if channels == 1 else "RGB"
    # A given window replaces a DICOM file's table or sigmoid, so it applies to the values before that step. The reader
    # of DICOM files attaches those as a second image.
    image = choose_windowed_image(image, window)
    if has_over_8_bits(image):
        # The window is given in real values, but the image has stored ones.
        stored_window = compute_stored_window(image, window)
        image = Image.fromarray(to_eight_bits(read_values(image), stored_window, location))
    try:
        with IGNORE_WARNINGS:  # about transparency in palettes, which is ignored intentionally
            return image if image.mode == mode else image.convert(mode)
    except ValueError as error:
        raise UserError(
            f"{location}: an image of mode {image.mode} cannot be converted; make it gray or RGB."
        ) from error


def iterate_strips(image: Image.Image, rows: int = ROWS_PER_STRIP) -> Iterator[np.ndarray]:
    """Yield an image's values in strips of `rows` rows, (rows, W).

    Strips limit memory: Pillow makes two temporary copies of the values that it exports.
    """
    for top in range(0, image.height, rows):
        yield np.asarray(image.crop((0, top, image.width, min(top + rows, image.height))))


def read_values(image: Image.Image) -> np.ndarray:
    """Copy an image's values into an array (H, W), strip by strip."""
    values = np.empty((image.height, image.width), np.asarray(image.crop((0, 0, 1, 1))).dtype)
    for number, strip in enumerate(iterate_strips(image)):
        values[number * ROWS_PER_STRIP : number * ROWS_PER_STRIP + len(strip)] = strip
    return values


def choose_windowed_image(image: Image.Image, window: tuple[float, float] | None) -> Image.Image:
    """Return the image to which a window applies: that of the values before a DICOM file's table or sigmoid.

    `dicom.read` keeps it in `info["values"]`. Without a given window, it is the image itself.
    """
    return image if window is None else image.info.get("values", image)


def compute_stored_window(image: Image.Image, window: tuple[float, float] | None) -> tuple[float, float] | None:
    """Convert the window of an image from real values, such as Hounsfield units, to the values stored in the image.

    A DICOM file defines value = slope * stored value + intercept, and may define a window.

    Args:
        image: The image; its `info` may have "rescale" (slope, intercept) and "window".
        window: The real values that become black and white; None for the window of the image.

    Returns:
        The stored values, the smaller first; None if neither the caller nor the image has a window.
    """
    window = window or image.info.get("window")
    slope, intercept = image.info.get("rescale", (1.0, 0.0))
    if window is None:
        return None
    low, high = sorted((end - intercept) / slope for end in window)
    return low, high


def has_over_8_bits(image: Image.Image) -> bool:
    """Check whether an image has more than 8 bits per value."""
    return image.mode == "F" or image.mode.startswith("I")


def decode_all(
    images: Iterable[tuple[bytes | ImageReadError, str]],
    labels: np.ndarray,
    rgb: bool = False,
    preparation: Preparation = UNCHANGED,
    into: Path | None = None,
) -> Images:
    """Decode images, uint8 (N, H, W, C), without those that cannot be read.

    Args:
        images: The content of each file, or the error that reading it raised, and its name for messages.
        labels: The label of each image, int64.
        rgb: True to convert gray images to RGB: data sets such as Tiny ImageNet contain both.
        preparation: The conversion: channels, size and window of gray values.
        into: A file that images are written to one by one; the pixels are then this file, mapped into memory.

    Returns:
        The readable images with their labels, and the list of those that were left out.

    Raises:
        UserError: If no image can be read, or size or channels differ from those of the first image. The caller limits
            the number of unreadable images by `check_skipped`.
    """
    skipped: list[SkippedImage] = []

    def iterate_readable() -> Iterator[np.ndarray]:
        """Set skipped images aside, and pass the others on one by one: all of them may not fit into memory."""
        for image in _decode_same_shape(images, len(labels), rgb, preparation):
            if isinstance(image, SkippedImage):
                skipped.append(image)
            else:
                yield image

    pixels = collect_rows(iterate_readable(), len(labels), into)
    return Images(pixels, drop_skipped(labels, skipped), skipped=tuple(skipped))


def drop_skipped(values: np.ndarray, skipped: Sequence[SkippedImage]) -> np.ndarray:
    """Drop the rows (N, ...) of images that were left out."""
    return np.delete(values, [image.row for image in skipped], axis=0) if skipped else values


def check_skipped(skipped: Sequence[SkippedImage], count: int, preparation: Preparation) -> None:
    """Check that few of `count` images were left out because they cannot be read, or that the user permits it.

    Args:
        skipped: The images that were left out, with the reasons.
        count: The number of all images.
        preparation: The preparation, whose option `skip_unreadable` permits any number but all.

    Raises:
        UserError: If more than `MAX_SKIPPED_SHARE` were left out without `skip_unreadable`, or all of them.
    """
    all_skipped = 0 < len(skipped) == count
    if not all_skipped and preparation.skip_unreadable:
        return
    if len(skipped) <= MAX_SKIPPED_SHARE * count:
        return
    if count == 1:
        raise UserError(f"{skipped[0].path}: {skipped[0].reason}")
    # The advice of each reason is dropped, because the message ends with one for all images.
    reasons = [
        f"{escape_name(image.path)}: {image.reason.removesuffix('; replace or remove it.').removesuffix('.')}"
        for image in skipped
    ]
    listed = "; ".join(reasons[:MAX_LISTED])
    more = f" and {len(skipped) - MAX_LISTED:,} more" if len(skipped) > MAX_LISTED else ""
    message = f"{listed}{more}. {len(skipped):,} of {count:,} images cannot be read"
    if all_skipped:
        raise UserError(f"{message}; replace them.")
    raise UnreadableImagesError(
        message, option="skip_unreadable", hint="replace or remove them, or leave them out with {skip_unreadable}."
    )


class UnreadableImagesError(UserError):
    """Too many images cannot be read; the option `skip_unreadable` leaves them out."""


MAX_LISTED = 10
"""Number of unreadable images in a message; further ones are counted."""


def _decode_same_shape(
    images: Iterable[tuple[bytes | ImageReadError, str]],
    count: int,
    rgb: bool,
    preparation: Preparation,
) -> Iterator[np.ndarray | SkippedImage]:
    """Yield decoded images, uint8 (H, W, C), all of the shape of the first one, or why an image cannot be read.

    Args:
        images: The content of each file, or the error that reading it raised, and its name for messages.
        count: The number of images.
        rgb: True to convert gray images to RGB, unless the preparation defines the channels.
        preparation: The conversion.

    Raises:
        UserError: If no image can be read, or an image has another shape than the first one.
    """
    shape = None
    first = ""  # the location of the first readable image
    skipped: list[SkippedImage] = []
    range_errors: list[UnknownRangeError] = []
    for row, (data, location) in enumerate(images):
        try:
            if isinstance(data, ImageReadError):
                raise data
            pixels = (
                decode_prepared(data, location, preparation) if preparation.converts else decode_image(data, location)
            )
        except ImageReadError as error:
            if isinstance(error, UnknownRangeError):
                range_errors.append(error)
            skipped.append(SkippedImage(row, location, str(error).removeprefix(f"{location}: ")))
            yield skipped[-1]
            continue
        if rgb and preparation.channels is None and pixels.shape[2] == 1:
            pixels = np.repeat(pixels, 3, axis=2)
        shape = shape or pixels.shape
        first = first or location
        if pixels.shape != shape:
            raise UserError(
                f"{location}: the image is {_describe_shape(pixels.shape)}, but {first} is {_describe_shape(shape)}; "
                # `option` makes {resize=N} a flag (--resize N) or a keyword (resize=N), as the user's interface needs.
                "all images need one size and one mode: give them {resize=N}, {channels=1} or 3, or both.",
                option=("channels", "resize"),
            )
        yield pixels
    if count and len(range_errors) == count:
        # Replacing all files is the wrong remedy: a window makes them readable.
        raise range_errors[0]
    if len(skipped) == count:
        check_skipped(skipped, count, preparation)


def _open(
    data: bytes | BinaryIO, location: str, load: Callable[[Image.Image], Image.Image] = load_pixels
) -> Image.Image:
    """Open an image and load all of its pixels; a JPEG of up to twice the limit of pixels is decoded at half its size.

    Args:
        data: The file or its content.
        location: The file (and row), for messages.
        load: Loads the pixels of an opened image, and returns it.

    Raises:
        UserError: If the image is damaged, incomplete or too large.
    """
    data = io.BytesIO(data) if isinstance(data, bytes) else data
    head = data.read(HEAD_BYTES)
    data.seek(0)
    if dicom.is_dicom(head):
        return load(dicom.read(data, location))
    formats = find_formats(head, location)
    try:
        with IGNORE_WARNINGS:  # about invalid metadata, which Pillow ignores
            image = Image.open(data, formats=formats)
            # Pillow only warns up to twice its limit, and filters of warnings are shared by all threads: check it here.
            limit = min(MAX_PIXELS, Image.MAX_IMAGE_PIXELS or MAX_PIXELS)
            if image.format == "JPEG" and limit < image.width * image.height <= 2 * limit:
                # The decoder halves both sides, so that memory remains below that of the limit (108-megapixel cameras).
                image.draft(image.mode, (image.width // 2, image.height // 2))
            if image.width * image.height > limit:
                raise Image.DecompressionBombError(f"{image.width}x{image.height} pixels, of {limit:,} at most")
            image = load(image)
    except Image.DecompressionBombError as error:
        raise ImageReadError(
            f"{location}: the image is too large to open safely ({error}); make it smaller."
        ) from error
    except UnidentifiedImageError as error:  # Pillow's message contains the address of an object
        raise ImageReadError(f"{location}: not a readable image (no known format); replace or remove it.") from error
    except MemoryError:
        raise
    except Exception as error:  # damaged files make Pillow's readers raise undocumented exceptions
        raise ImageReadError(f"{location}: not a readable image ({one_line(error)}); replace or remove it.") from error
    return image


def _describe_shape(shape: tuple[int, ...]) -> str:
    height, width, channels = shape
    return f"{width}x{height} {'gray' if channels == 1 else 'RGB'}"
