"""Convert the images of a Python program, of any of the usual types, into arrays, labels and class names.

Types: a pair (X, y) of NumPy arrays, torch tensors or lists of images; a torch `Dataset` or a list of (image, label)
pairs; a `Dataset` or `DatasetDict` of Hugging Face's `datasets`; `halfmoon.Images` and `halfmoon.Source`.

An image is an array or tensor, a PIL image, or the path of a file. A batch of images is (N, H, W), (N, H, W, C) or
(N, C, H, W), one image (H, W), (H, W, C) or (C, H, W), where C is 1 or 3. Values are uint8, or floats from 0 to 1, which
are multiplied by 255 and rounded.

Labels are whole numbers or strings. `-1` (in strings also "-1"), None, NaN and masked values mean "unlabeled". Class names
are the sorted different labels as text, unless the data set names its classes. Labels that are nearly equal, such as "Cat"
and "cat", are refused, unless the program declares them as names of different classes (`DECLARATION`).
"""

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from halfmoon.core.errors import ImageReadError, UnknownRangeError, UserError, one_line
from halfmoon.data import Images, Source
from halfmoon.data.class_names import (
    is_missing_label,
    match_class_name,
    normalize_class_name,
    refuse_near_equal,
    sort_class_names,
)
from halfmoon.data.images import UNKNOWN
from halfmoon.data.memory import ImageCollection, MemoryData
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers.class_folders import SUBSET_NAMES
from halfmoon.data.readers.decode import MAX_LISTED, decode_prepared, prepare_image
from halfmoon.data.readers.label_table import LABEL_TITLES, PATH_TITLES
from halfmoon.data.readers.parquet import IMAGE_COLUMNS, LABEL_COLUMNS, find_column

if TYPE_CHECKING:
    import pandas as pd

CHANNELS = (1, 3)
"""Numbers of channels of an image: gray and RGB."""

FLOAT_TOLERANCE = 1e-4
"""Distance from the range 0 to 1 that is a rounding error, such as of an interpolation, and is cut off."""

DECLARATION = (
    "declare them: as categories of pandas (y.astype('category')), a column of ClassLabel of Hugging Face, or the "
    "attribute `classes` of a torch Dataset"
)
"""How a program confirms that nearly equal names are different classes, after "if both are meant, "."""

ACCEPTED_TYPES = (
    "(X, y) of arrays or of a list of images and their labels, a torch Dataset of (image, label), or a Dataset or "
    "DatasetDict of Hugging Face"
)


@dataclass(frozen=True, eq=False)
class LabeledImages:
    """Images of one size, with labels and class names.

    Attributes:
        images: uint8 (N, H, W, C), C = 1 or 3.
        labels: int64 (N,), -1 for an unlabeled image.
        classes: class names by label.
    """

    images: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]


def convert_images(
    data: Any,
    *,
    classes: Sequence[str] | None = None,
    preparation: Preparation = UNCHANGED,
    name: str = "data",
) -> LabeledImages:
    """Convert labeled images of any type of Python's libraries into one array, labels and class names.

    Types are pairs of arrays, PIL images, and data sets of PyTorch and Hugging Face; this module lists them.

    Args:
        data: the images with their labels. Of a `DatasetDict` or a `Source`, the subset "train" is used.
        classes: the class names; None: those of the data.
        preparation: resizing and channels; images of different sizes need a size.
        name: the argument that `data` is, for errors.

    Raises:
        UserError: the type, a shape, a value, a length or a label is wrong.
    """
    collection = open_images(data, classes=classes, name=name)
    return LabeledImages(collection.load(preparation), collection.labels, collection.classes)


def open_images(data: Any, *, classes: Sequence[str] | None = None, name: str = "data") -> ImageCollection:
    """Convert labeled images as `convert_images` does, but decode them only when they are needed.

    Args:
        data: the images with their labels.
        classes: the class names; None: those of the data.
        name: the argument that `data` is, for errors.

    Raises:
        UserError: the type, a shape, a value, a length or a label is wrong.
    """
    if isinstance(data, Source):
        return open_images(data.train, classes=data.classes, name=name)
    if isinstance(data, Images):
        if classes is None:
            numbers = np.arange(int(data.labels.max(initial=0)) + 1)
            classes = [str(number) for number in numbers]
        labels = _number_labels(data.labels.tolist(), classes, name)
        return _array_collection(data.images, labels, tuple(classes), name)
    if isinstance(data, tuple) and len(data) == 2:
        return _open_pair(data[0], data[1], classes, name)
    if _is_hugging_face(data):
        return _open_hugging_face(data, classes, name)
    if _is_data_frame(data):
        columns = list(map(str, data.columns))
        image_column = columns.index(find_column(name, columns, (*IMAGE_COLUMNS, *PATH_TITLES)))
        label_column = columns.index(find_column(name, columns, LABEL_TITLES))
        return _open_pair(data.iloc[:, image_column].tolist(), data.iloc[:, label_column], classes, name)
    if isinstance(data, Mapping):
        subset = _find_subset(data, SUBSET_NAMES[0])
        columns = list(map(str, data))
        if subset is None and _has_columns(columns):  # the columns of a table, such as dataset[:] of Hugging Face
            image_column = find_column(name, columns, IMAGE_COLUMNS)
            label_column = find_column(name, columns, LABEL_COLUMNS)
            return _open_pair(list(data[image_column]), data[label_column], classes, name)
        if subset is None:
            parts = ", ".join(map(str, data)) or "no parts"
            raise UserError(f"{name} has {parts}, but no part 'train'; rename the part of the training images.")
        return open_images(data[subset], classes=classes, name=name)
    if _is_hugging_face_stream(data):
        return _open_pairs(_read_stream(data, name), classes, name)
    if (
        hasattr(data, "__getitem__")
        and isinstance(data, Sized)
        and not isinstance(data, str | np.ndarray | torch.Tensor)
    ):
        return _open_pairs(data, classes, name)
    if isinstance(data, torch.utils.data.IterableDataset):
        raise UserError(
            f"{name} is an iterable data set without a length: give list({name}) of its (image, label) pairs."
        )
    raise UserError(f"{name} is {_describe_type(data)}: it must be a name, a folder, {ACCEPTED_TYPES}.")


def make_memory_data(data: Any, test: Any = None, clients: Any = None) -> MemoryData:
    """Convert training images, test images and clients into a data set in memory.

    Args:
        data: training images with labels, of any type of `convert_images`. Of a `DatasetDict` the subset "test" (or
            "validation") is the test, and so is that of a `Source`.
        test: test images with labels, of any of these types; None: those in `data`, or held-out training images.
        clients: the client of each training image, numbers or strings; None: a scenario assigns them.

    Raises:
        UserError: an argument has a wrong type, shape, value or length, or there are fewer than two classes.
    """
    train_images = open_images(data, name="data")
    labels = train_images.labels
    present = np.unique(labels[labels != UNKNOWN])
    if len(present) == 0:
        raise UserError("data has no labeled image: every label is -1; label a few images of each class.")
    if len(train_images.classes) < 2 or len(present) < 2:
        only = train_images.classes[int(present[0])]
        raise UserError(f"data has labels of one class only, {only!r}: a classifier needs images of two or more.")
    if test is None:
        test = find_test(data)
    test_images = None
    if test is not None:
        test_images = open_images(test, classes=train_images.classes, name="test")
        unlabeled = np.flatnonzero(test_images.labels == UNKNOWN)
        if len(unlabeled):
            raise UserError(f"test: image {unlabeled[0]} has no label, but only training images can go without one.")
    notes: list[str] = []
    if unused := _list_unused_parts(data):
        notes.append(f"left out: parts of data that are neither training nor test images ({', '.join(unused)})")
    client_numbers = None if clients is None else _number_clients(clients, len(train_images))
    # Whether a mirrored image has the same class, the default of augmentation by mirroring.
    mirror = data.mirror if isinstance(data, Source) else True
    return MemoryData(train_images, test_images, client_numbers, mirror, tuple(notes))


def read_unlabeled(
    images: Any, preparation: Preparation, channels: int, name: str = "images"
) -> tuple[np.ndarray, bool]:
    """Convert images without labels: an array, a list, or one image; labels of a labeled type are ignored.

    A tuple of length 2 is (images, labels). An array is one image if it has two axes, or three of which the last one
    can be channels or the first one has the length `channels`.

    Args:
        images: a batch or list of images, one image, or a type of `convert_images`.
        preparation: resizing and channels.
        channels: the channels of the model: an array of this length and two more axes is one image (C, H, W).
        name: the argument that they are, for errors.

    Returns:
        The images, uint8 (N, H, W, C), and True if one image was given.

    Raises:
        UserError: the type, a shape or a value is wrong, or there are none.
    """
    if isinstance(images, Images):
        return preparation.convert(images.images), False
    if _has_mask(images):
        raise UserError(f"{name} has masked pixels: fill them, such as by X.filled(0).")
    if _is_data_frame(images):  # its labels are not needed
        columns = list(map(str, images.columns))
        images = images.iloc[:, columns.index(find_column(name, columns, (*IMAGE_COLUMNS, *PATH_TITLES)))]
    elif _is_hugging_face(images) and set(LABEL_COLUMNS).isdisjoint(images.column_names):
        images = list(images[find_column(name, images.column_names, IMAGE_COLUMNS)])
    images = _list_objects(images)
    if isinstance(images, bytes):
        return _read_image(images, preparation, name)[None], True
    if isinstance(images, Image.Image):
        return _read_image(images, preparation, name)[None], True
    if isinstance(images, np.ndarray | torch.Tensor):
        array = _to_numpy(images)
        pixels = math.prod(preparation.size) * channels if preparation.size else None
        if array.ndim == 2 and array.shape[1] == pixels:
            raise UserError(
                f"{name} has the shape {array.shape}, a row of numbers for each image: reshape it to (N, H, W) or "
                "(N, H, W, C)."
            )
        has_channel_axis = array.ndim == 3 and (array.shape[2] in CHANNELS or array.shape[0] == channels)
        is_one_image = array.ndim == 2 or has_channel_axis
        if is_one_image:
            return _read_image(array, preparation, name)[None], True
        return preparation.convert(_read_batch(array, name)), False
    is_list = isinstance(images, Sequence) and not isinstance(images, str | tuple)
    if (is_list or (isinstance(images, tuple) and len(images) != 2)) and not _is_hugging_face(images):
        if not len(images):
            raise UserError(f"{name} is empty: give at least one image.")
        if not isinstance(images[0], tuple):
            labels = np.full(len(images), UNKNOWN)
            collection = ImageCollection(_make_reader(images, name), labels, (), name)  # (): no class names
            return collection.load(preparation), False
    return open_images(images, name=name).load(preparation), False


# Types


def _open_pair(images: Any, labels: Any, classes: Sequence[str] | None, name: str) -> ImageCollection:
    """Open a pair (X, y): an array, tensor or list of images, and one label for each.

    Args:
        images: X, uint8 or floats (N, H, W), (N, H, W, C) or (N, C, H, W), or a list of images.
        labels: y, numbers or strings; -1 or None for an unlabeled image.
        classes: the class names; None: the sorted different labels.
        name: the argument that the pair is, for errors.
    """
    values = _list_labels(labels, name)
    declared = _declared_names(labels)
    if _has_mask(images):
        raise UserError(f"{name} has masked pixels: fill them, such as by X.filled(0).")
    images = _list_objects(images)
    if isinstance(images, np.ndarray | torch.Tensor):
        pixels = _read_batch(_to_numpy(images), name)
        _check_lengths(len(pixels), len(values), name)
        numbers, names = _classify(values, classes, names=None, name=name, declared=declared)
        return _array_collection(pixels, numbers, names, name)
    if isinstance(images, str | Path) or not isinstance(images, Sequence):
        raise UserError(
            f"{name} is a pair whose first element is {_describe_type(images)}: it must be an array, a tensor or a list "
            "of images."
        )
    _check_lengths(len(images), len(values), name)
    numbers, names = _classify(values, classes, names=None, name=name, declared=declared)
    return ImageCollection(_make_reader(images, name), numbers, names, name)


def _open_pairs(data: Any, classes: Sequence[str] | None, name: str) -> ImageCollection:
    """Open a torch `Dataset` or a list of (image, label) pairs: each pair is read once, and its image is stored.

    The images of a data set may be augmented at random, so that a second reading would give other pixels.

    Args:
        data: the data set; its attribute `classes` names the classes, if it has one.
        classes: the class names that are required; None: those of the data set.
        name: the argument that it is, for errors.
    """
    images: list[np.ndarray] = []
    values: list[Any] = []
    unreadable: dict[int, str] = {}
    for row in range(len(data)):
        try:
            pair = data[row]
        except OSError as error:  # a data set of files, such as torchvision's ImageFolder; also Pillow's errors
            unreadable[row] = _describe_read_error(error)
            continue
        if isinstance(pair, Mapping):
            location = f"{name}, item {row}"
            keys = list(map(str, pair))
            pair = pair[find_column(location, keys, IMAGE_COLUMNS)], pair[find_column(location, keys, LABEL_COLUMNS)]
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            hint = "; give (X, y) as a tuple" if isinstance(data, list) and len(data) == 2 else ""
            raise UserError(
                f"{name}: item {row} is {_describe_type(pair)}, not a pair (image, label); give a data set of such pairs"
                f"{hint}."
            )
        images.append(_read_image(pair[0], UNCHANGED, f"{name}, image {row}"))
        values.append(_to_scalar(pair[1], f"{name}, image {row}"))
    _refuse_unreadable_rows(unreadable, len(data), name)
    _check_lengths(len(images), len(values), name)
    class_names = getattr(data, "classes", None)
    if not isinstance(class_names, Sequence) or isinstance(class_names, str):
        class_names = None
    numbers, names = _classify(values, classes, class_names, name)
    return ImageCollection(_make_reader(images, name), numbers, names, name)


class _StreamRows(list[Any]):
    """The rows of a stream, with the class names of its labels."""

    classes: Sequence[str] | None = None


def _is_hugging_face_stream(data: Any) -> bool:
    """Check for an `IterableDataset` of Hugging Face, without importing the library."""
    return hasattr(data, "column_names") and hasattr(data, "features") and not isinstance(data, Sized | Mapping)


def _read_stream(data: Any, name: str) -> _StreamRows:
    """Read all rows of an `IterableDataset` of Hugging Face, which has no length and can be read in order only."""
    rows = _StreamRows(data)
    if data.features is not None:
        label_column = find_column(name, list(data.features), LABEL_COLUMNS)
        rows.classes = getattr(data.features[label_column], "names", None)
    return rows


def _has_columns(columns: Sequence[str]) -> bool:
    """Check whether names of columns contain one of images and one of labels."""
    lowered = {column.lower() for column in columns}
    return not lowered.isdisjoint(IMAGE_COLUMNS) and not lowered.isdisjoint(LABEL_COLUMNS)


def _list_unused_parts(data: Any) -> list[str]:
    """List the parts of a `DatasetDict` that are neither the training nor the test images."""
    train = _find_subset(data, SUBSET_NAMES[0]) if isinstance(data, Mapping) else None
    if train is None:
        return []
    test = _find_subset(data, (*SUBSET_NAMES[1], *SUBSET_NAMES[2]))
    return [str(key) for key in data if key not in (train, test)]


def _describe_read_error(error: Exception) -> str:
    """Describe why an image cannot be decoded; Pillow's message for an unknown format contains the address of an object."""
    return "no known format" if isinstance(error, UnidentifiedImageError) else one_line(error)


def _refuse_unreadable_rows(reasons: Mapping[int, str], count: int, name: str) -> None:
    """Raise UserError for the rows of a data set that cannot be read, with their reasons."""
    if not reasons:
        return
    listed = [f"{name}, image {row}: not a readable image ({reason})" for row, reason in reasons.items()]
    more = f" and {len(listed) - MAX_LISTED:,} more" if len(listed) > MAX_LISTED else ""
    raise UserError(
        f"{'; '.join(listed[:MAX_LISTED])}{more}. {len(listed):,} of {count:,} images of {name} cannot be read; leave "
        "them and their labels out."
    )


def _is_hugging_face(data: Any) -> bool:
    """Check for a `datasets.Dataset` without importing the library, which is optional."""
    return (
        isinstance(getattr(data, "column_names", None), list) and hasattr(data, "features") and hasattr(data, "__len__")
    )


def _open_hugging_face(data: Any, classes: Sequence[str] | None, name: str) -> ImageCollection:
    """Open a `Dataset` of Hugging Face with a column of images and a column of labels, found by their names.

    Images are decoded when they are needed.

    Args:
        data: the data set; the type of its labels may name the classes.
        classes: the class names that are required; None: those of the data set.
        name: the argument that it is, for errors.
    """
    if (getattr(data, "format", None) or {}).get("type") in ("pandas", "polars", "arrow"):
        data = data.with_format(None)  # rows would be tables
    image_column = find_column(name, data.column_names, IMAGE_COLUMNS)
    label_column = find_column(name, data.column_names, LABEL_COLUMNS)
    values = _list_labels(list(data[label_column]), name)
    _check_lengths(len(data), len(values), name)
    class_names = getattr(data.features[label_column], "names", None)  # those of the type `ClassLabel`
    numbers, names = _classify(values, classes, class_names, name)

    dtype = _find_pixel_type(data.features[image_column])

    def read(row: int, preparation: Preparation) -> np.ndarray:
        location = f"{name}, image {row}"
        try:
            image = data[row][image_column]  # decoded by Pillow
        except OSError as error:
            raise ImageReadError(f"{location}: not a readable image ({_describe_read_error(error)}).") from error
        if dtype is not None:
            image = np.asarray(
                image, dtype
            )  # lists of numbers, and formatted data sets, have lost the type of the column
        return _read_image(image, preparation, location)

    return ImageCollection(read, numbers, names, name)


def _find_pixel_type(feature: Any) -> str | None:
    """Find the type of the numbers in a column of arrays of Hugging Face (`Array2D`, `List`); None for other columns."""
    while hasattr(feature, "feature"):  # a list of lists
        feature = feature.feature
    dtype = getattr(feature, "dtype", None)
    return dtype if dtype in ("uint8", "float16", "float32", "float64", "bool") else None


def find_test(data: Any) -> Any:
    """Return the test images that a data set contains; None if there are none."""
    if isinstance(data, Source):
        return data.test
    # A `DatasetDict`: many data sets of Hugging Face call their only test subset "validation".
    if isinstance(data, Mapping):
        subset = _find_subset(data, (*SUBSET_NAMES[1], *SUBSET_NAMES[2]))
        return None if subset is None else data[subset]
    return None


def _find_subset(data: Mapping[Any, Any], names: Sequence[str]) -> Any:
    """Find the key of a subset of a data set, in any case, by the first of its usual names; None if there is none."""
    keys = {str(key).lower(): key for key in data}
    return next((keys[name] for name in names if name in keys), None)


# Images


def _array_collection(pixels: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], name: str) -> ImageCollection:
    def read(row: int, preparation: Preparation) -> np.ndarray:
        return preparation.convert(pixels[row : row + 1])[0]

    return ImageCollection(read, labels, classes, name, pixels)


def _make_reader(images: Sequence[Any], name: str) -> Callable[[int, Preparation], np.ndarray]:
    """Make the function that decodes the image of a row."""

    def read(row: int, preparation: Preparation) -> np.ndarray:
        return _read_image(images[row], preparation, f"{name}, image {row}")

    return read


def _read_batch(array: np.ndarray, name: str) -> np.ndarray:
    """Convert a batch of images (N, H, W), (N, H, W, C) or (N, C, H, W) into uint8 (N, H, W, C).

    Args:
        array: uint8, or floats from 0 to 1; C is 1 or 3.
        name: the argument that the images are, for errors.
    """
    shape = array.shape
    if not array.size:
        raise UserError(f"{name} has no images: its array has the shape {shape}.")
    if array.ndim == 3:
        array = array[..., None]
    elif array.ndim == 4:
        array = _move_channels(array, name, "N, ")
    elif array.ndim == 2:
        raise UserError(
            f"{name} has the shape {shape}, a row of numbers for each image: reshape it to (N, H, W) or (N, H, W, C)."
        )
    else:
        raise UserError(f"{name} has the shape {shape}: images are (N, H, W), (N, H, W, C) or (N, C, H, W).")
    return _to_bytes(array, name)


def _read_image(image: Any, preparation: Preparation, name: str) -> np.ndarray:
    """Convert one image of any supported type into uint8 (H, W, C).

    Args:
        image: a PIL image; the path of a file; a dictionary with the "bytes" of one; or an array, tensor or list
            (H, W), (H, W, C) or (C, H, W).
        preparation: resizing and channels.
        name: the image in errors, such as "data, image 3".
    """
    try:
        if isinstance(image, Image.Image):
            return prepare_image(image, name, preparation)
        if isinstance(image, str | Path):
            return decode_prepared(Path(image).read_bytes(), str(image), preparation)
        # Hugging Face's images that are not decoded have the bytes of a file, or only its path
        if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
            image = image["bytes"]
        elif isinstance(image, Mapping) and isinstance(image.get("path"), str):
            image = image["path"]
            return decode_prepared(Path(image).read_bytes(), image, preparation)
        if image is None:
            raise ImageReadError(f"{name}: there is no image.")
        if isinstance(image, bytes):
            return decode_prepared(image, name, preparation)
    except OSError as error:
        raise ImageReadError(f"{image}: the file cannot be read ({error.strerror}).") from error
    except UnknownRangeError as error:
        # The option `window`, which the message of files advises, is only for files.
        location = image if isinstance(image, str | Path) else name
        raise UserError(
            f"{location}: its pixels have 32 bits and no known range; give an array of uint8 or of floats from 0 to 1."
        ) from error
    if not isinstance(image, np.ndarray | torch.Tensor | list):
        raise UserError(f"{name} is {_describe_type(image)}: it must be a PIL image, an array, a tensor or a path.")
    try:
        array = _to_numpy(image)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is no image ({one_line(error)}).") from error
    if array.ndim == 2:
        array = array[..., None]
    elif array.ndim == 3:
        array = _move_channels(array, name, "")
    else:
        raise UserError(f"{name} has the shape {array.shape}: an image is (H, W), (H, W, C) or (C, H, W).")
    if not array.size:
        raise UserError(f"{name} has no pixels: its shape is {array.shape}.")
    return preparation.convert(_to_bytes(array, name)[None])[0]


def _move_channels(array: np.ndarray, name: str, batch: str) -> np.ndarray:
    """Move the channels of images to the last axis, if the third axis from the end has them; by their number, 1 or 3.

    Args:
        array: (H, W, C) or (C, H, W), or a batch of such images.
        name: the argument that the images are, for errors.
        batch: the beginning of shapes in errors: "N, " for a batch, "" for one image.
    """
    last = array.shape[-1] in CHANNELS
    first = array.shape[-3] in CHANNELS
    if last and not first:
        return array
    if first and not last:
        return np.moveaxis(array, -3, -1)
    if first and last:
        raise UserError(
            f"{name} has the shape {array.shape}, which may be ({batch}H, W, C) or ({batch}C, H, W); "
            "drop the axis of one channel, or resize the images."
        )
    raise UserError(
        f"{name} has the shape {array.shape}: images are ({batch}H, W), or ({batch}H, W, C) or ({batch}C, H, W) with 1 or "
        "3 channels."
    )


def _to_bytes(array: np.ndarray, name: str) -> np.ndarray:
    """Convert pixels to uint8; floats from 0 to 1 are multiplied by 255 and rounded to nearest."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return array.astype(np.uint8) * 255  # a mask: black and white
    if array.dtype.kind not in "iuf":
        raise UserError(
            f"{name} has pixels of type {array.dtype}: they must be uint8 (0 to 255) or floats from 0 to 1; convert them."
        )
    low = float(array.min())
    high = float(array.max())
    if array.dtype.kind != "f":
        fits = low >= 0 and 1 < high <= 255
        advice = "convert them with .astype('uint8')" if fits else "scale them"
        raise UserError(
            f"{name} has pixels of type {array.dtype} from {low:g} to {high:g}: they must be uint8 (0 to 255) or floats "
            f"from 0 to 1; {advice}."
        )
    if np.isnan(low):
        raise UserError(f"{name} has pixels that are nan: floats must be from 0 to 1; replace them.")
    if low < -FLOAT_TOLERANCE or high > 1 + FLOAT_TOLERANCE:
        raise UserError(
            f"{name} has pixels from {low:.7g} to {high:.7g}: floats must be from 0 to 1; scale them, or give uint8."
        )
    result = np.empty(array.shape, np.uint8)
    for row in range(len(array)):  # one by one, because float64 takes eight times the memory
        scaled = np.floor(array[row].astype(np.float64) * 255 + 0.5)  # halves are rounded up
        result[row] = scaled.clip(0, 255)
    return result


def _to_numpy(values: Any) -> np.ndarray:
    """Convert an array or tensor to NumPy's; types of torch that NumPy lacks, such as bfloat16, become float32."""
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach().cpu().resolve_neg().resolve_conj()
    if values.is_floating_point() and values.dtype not in (torch.float16, torch.float32, torch.float64):
        values = values.float()
    return values.to_dense().numpy() if values.layout != torch.strided else values.numpy()


# pandas is not imported to check for its types, because that takes a third of a second: a program that has such a value
# has imported it.


def _is_data_frame(value: Any) -> "TypeGuard[pd.DataFrame]":
    """Check whether a value is a table of pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.DataFrame)


def _is_series(value: Any) -> "TypeGuard[pd.Series]":
    """Check whether a value is a column of a table of pandas."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Series)


def _is_missing_in_pandas(value: Any) -> bool:
    """Check whether a value is one of those of pandas for a missing number, text or date."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and (value is pandas.NA or value is pandas.NaT)


def _list_objects(images: Any) -> Any:
    """Convert a column of a table or an array of objects, whose elements are images or paths, to a list."""
    if _is_series(images) or (isinstance(images, np.ndarray) and images.dtype.kind in "OUT"):
        return images.tolist()
    return images


def _has_mask(values: Any) -> bool:
    """Check whether some values of a masked array of NumPy are masked."""
    return bool(np.ma.is_masked(values))


# Labels and clients


def _list_labels(labels: Any, name: str) -> list[Any]:
    """Convert labels (N,) of any array or collection to a list of Python values, without types of NumPy or torch.

    Args:
        labels: numbers or strings.
        name: the argument that has them, for errors.
    """
    if isinstance(labels, str | bytes | Mapping | AbstractSet) or not isinstance(labels, Collection):
        raise UserError(
            f"{name}: the labels are {_describe_type(labels)}: give one number or string for each image, -1 for an "
            "unlabeled one."
        )
    if _is_data_frame(labels):
        labels = labels.to_numpy(dtype=object)
    if _has_mask(labels):
        masked = np.ma.asarray(labels)
        values = masked.data.astype(object)
        values[np.ma.getmask(masked)] = None  # a masked label is missing
        labels = values
    array: np.ndarray
    if isinstance(labels, np.ndarray | torch.Tensor):
        array = _to_numpy(labels)
    else:
        # As objects: NumPy would convert numbers among strings to strings.
        array = np.empty(len(labels), object)
        array[:] = [_to_scalar(item, f"{name}, image {row}") for row, item in enumerate(labels)]
    if array.ndim == 2 and array.shape[-1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise UserError(
            f"{name}: the labels have the shape {array.shape}: give one number or string for each image, such as "
            "y.argmax(1) for one-hot labels."
        )
    return array.tolist()


def _to_scalar(label: Any, location: str) -> Any:
    """Convert a label of one element of NumPy or torch to a Python value; other values are returned as they are.

    Args:
        label: the label.
        location: the image, for errors.
    """
    if not isinstance(label, torch.Tensor | np.generic | np.ndarray):
        return label
    array = _to_numpy(label)
    if array.size != 1:
        raise UserError(
            f"{location}: its label has the shape {array.shape}: give one number or string, such as y.argmax() for a "
            "one-hot label."
        )
    return array.item()


def _declared_names(labels: Any) -> set[str]:
    """Return the categories of labels of pandas, by which a program declares its class names; empty for others."""
    pandas = sys.modules.get("pandas")
    dtype: Any = getattr(labels, "dtype", None)
    if pandas is None or not isinstance(dtype, pandas.CategoricalDtype):
        return set()
    return {normalize_class_name(str(name)) for name in dtype.categories}


def _classify(
    values: Sequence[Any],
    classes: Sequence[str] | None,
    names: Sequence[str] | None,
    name: str,
    declared: Collection[str] = (),
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Convert labels of a user's data set to class indices.

    An integer is an index of `names`, if the data set has some. Otherwise it is itself a class name, and with `classes`
    it may also be an index of these (`_number_labels`).

    Args:
        values: the labels, integers or strings; -1 or None for an unlabeled image.
        classes: the class names that are required; None if the labels define them.
        names: class names of the data set by number; None if it has none.
        name: the argument, for errors.
        declared: names that the program has declared as different classes, although they may be nearly equal.

    Returns:
        Labels, int64 (N,), -1 for unlabeled images, and class names.

    Raises:
        UserError: a label is invalid, or names of classes are nearly equal, such as "Cat" and "cat".
    """
    # Integers remain integers here, all other labels become strings.
    labels = [_label_text(value, row, name) for row, value in enumerate(values)]
    if names:
        dataset_names = tuple(normalize_class_name(str(each)) for each in names)
        labels = [_name_integer(label, dataset_names) for label in labels]
        if classes is None:
            classes = dataset_names
    if classes is None:
        present = {label for label in labels if label != UNKNOWN}
        if len({type(label) for label in present}) > 1:
            raise UserError(f"{name}: some labels are numbers and some are strings; give one kind.")
        classes = sort_class_names(str(label) for label in present)
        refuse_near_equal(classes, f"{name}, labels", declared, DECLARATION)
    return _number_labels(labels, classes, name), tuple(classes)


def _name_integer(label: int | str, dataset_names: Sequence[str]) -> int | str:
    """Replace an integer by the class name of this number; strings and `UNKNOWN` (-1) remain.

    An integer without a name becomes a string, which `_number_labels` refuses unless it is a required class.
    """
    if isinstance(label, str) or label == UNKNOWN:
        return label
    return dataset_names[label] if label < len(dataset_names) else str(label)


def _number_labels(texts: Sequence[int | str], classes: Sequence[str], name: str) -> np.ndarray:
    """Convert labels to indices of class names, int64 (N,).

    An integer is a class name if one is equal to it as text. Otherwise it is an index of `classes`, from 0, provided
    that no class name is a number: among the classes "3", "5" and "7" the label 2 would be a mistake, and not "7".

    Args:
        texts: class names or integers; `UNKNOWN` (-1) remains -1.
        classes: the class names.
        name: the argument that has the labels, for errors.
    """
    number_of = {class_name: number for number, class_name in enumerate(classes)}
    allows_indices = not any(class_name.isdecimal() for class_name in classes)
    labels = np.empty(len(texts), np.int64)
    for row, text in enumerate(texts):
        if text == UNKNOWN:
            labels[row] = UNKNOWN
        elif str(text) in number_of:
            labels[row] = number_of[str(text)]
        elif isinstance(text, int) and allows_indices and 0 <= text < len(classes):
            labels[row] = text
        else:
            listing = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
            similar = match_class_name(str(text), classes)
            hint = f"; rename it to {similar!r}, if it is that class" if similar else ""
            raise UserError(f"{name}: image {row} has the label {text!r}, but the classes are {listing}{hint}.")
    return labels


def _label_text(value: Any, row: int, name: str) -> int | str:
    """Convert a label of a user's data set to a whole number or a string; `UNKNOWN` (-1) for an unlabeled image.

    Args:
        value: the label; -1, "-1", None, NaN and pandas' NA mean unlabeled.
        row: the image's number, for errors.
        name: the argument that has the label, for errors.
    """
    if value is None or _is_missing_in_pandas(value) or (isinstance(value, float) and np.isnan(value)):
        return UNKNOWN
    if isinstance(value, str):
        class_name = normalize_class_name(value)
        if not class_name:
            raise UserError(f"{name}: image {row} has an empty label; an unlabeled image has -1 or None.")
        if is_missing_label(class_name):
            raise UserError(
                f"{name}: image {row} has the label {value!r}, which tables write for a missing one; an unlabeled image has "
                "-1 or None. If it is a class, rename it."
            )
        return UNKNOWN if class_name == "-1" else class_name
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, Integral) or value < UNKNOWN:
        raise UserError(
            f"{name}: image {row} has the label {value!r}: labels are whole numbers from 0 or strings, -1 for unlabeled."
        )
    return int(value)


def _number_clients(clients: Any, count: int) -> np.ndarray:
    """Convert the client id of each image to a number from 0, in the order of the sorted ids.

    For example the ids ["lyon", "bonn", "lyon"] become [1, 0, 1].

    Args:
        clients: an id for each image, whole numbers or strings.
        count: the number of images.

    Returns:
        int64 (count,).
    """
    ids = _read_client_ids(clients, count).tolist()
    # Numbers and strings cannot be sorted together, so that one string makes all of them strings.
    if any(isinstance(client_id, str) for client_id in ids):
        ids = [normalize_class_name(str(client_id)) for client_id in ids]
    numbers = np.unique(np.array(ids), return_inverse=True)[1]
    return numbers.astype(np.int64)


def _read_client_ids(clients: Any, count: int) -> np.ndarray:
    """Convert client ids to an array (count,), and check that each is a whole number or a string.

    Raises:
        UserError: an id is missing or of another type, or their number is not `count`.
    """
    if _has_mask(clients):
        raise UserError("clients has ids that are masked; give a number or a string for each image.")
    try:
        # As objects: NumPy would convert a missing value among strings to a string.
        ids = _to_numpy(clients) if hasattr(clients, "dtype") else np.array(clients, object)
    except (TypeError, ValueError) as error:
        raise UserError(f"clients cannot be read as one id for each image ({one_line(error)}).") from error
    if ids.ndim != 1 or len(ids) != count:
        raise UserError(
            f"clients has the shape {ids.shape}, but data has {count:,} images; give a number of clients, or one id for "
            "each image."
        )
    # The kinds of NumPy that are numbers, strings or objects; dates, for example, are not.
    has_known_kind = ids.dtype.kind in "biufUSTO"
    if not has_known_kind or not all(_is_client_id(client_id) for client_id in ids.tolist()):
        raise UserError(
            "clients has ids that are missing or not whole numbers; give a number or a string for each image."
        )
    return ids


def _is_client_id(value: Any) -> bool:
    """Check whether a value is a string that is not empty, or a whole number."""
    if isinstance(value, str | bytes):
        return bool(value.strip())
    return isinstance(value, Integral) or (isinstance(value, float) and value.is_integer())


def _check_lengths(images: int, labels: int, name: str) -> None:
    if not images:
        raise UserError(f"{name} has no images.")
    if images != labels:
        raise UserError(
            f"{name} has {images:,} images, but {labels:,} labels; give one for each image, -1 for unlabeled."
        )


def _describe_type(value: Any) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}."
    length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return f"{module}{kind.__qualname__}{length}"
