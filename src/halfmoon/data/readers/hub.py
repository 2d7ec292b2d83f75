"""Load data sets by name from the Hugging Face hub, with its library `datasets` (extra `hub`)."""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import numpy as np

from halfmoon.core.errors import ImageReadError, UserError, install_command
from halfmoon.data.class_names import normalize_class_name, refuse_near_equal, sort_class_names
from halfmoon.data.images import UNKNOWN, Images
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers.decode import decode_all
from halfmoon.data.readers.parquet import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    find_column,
    normalize_text_labels,
    number_text_labels,
)

LAYOUT_HINT = (
    "or give {data_dir} a folder with train*.parquet and test*.parquet, with train/CLASS/*.png and "
    "test/CLASS/*.png, or with the set's official files (docs/data.md names them)"
)


def read(
    repository: str, test: str, config: str | None = None, rgb: bool = False, preparation: Preparation = UNCHANGED
) -> tuple[Images, Images, tuple[str, ...] | None]:
    """Read train images, test images and class names (None if there are none) of a repository.

    Args:
        repository: `owner/name`.
        test: The name of the test split.
        config: The configuration, if the repository has several.
        rgb: True to convert gray images to RGB.
        preparation: The conversion of images.

    Raises:
        UserError: If the library is not installed, the data set cannot be downloaded, or a row cannot be read.
    """
    try:
        # An optional dependency, imported by name because it may be missing for the type checker.
        datasets = import_module("datasets")
    except ImportError as error:
        raise UserError(
            f"{repository} is no folder here, so it is looked up on the Hugging Face hub, which needs the library datasets: "
            f"correct the path, {install_command('hub')}, {LAYOUT_HINT}.",
            option="data_dir",
        ) from error
    parts = []
    names: tuple[str, ...] | None = None
    for subset in ("train", test):
        try:
            rows: Any = datasets.load_dataset(repository, config, split=subset)
        except Exception as error:  # the library raises whatever its network layer raises
            raise UserError(
                f"{repository}: its {subset} part could not be fetched from the Hugging Face hub "
                f"({type(error).__name__}: {error}); go online, {LAYOUT_HINT}.",
                option="data_dir",
            ) from error
        location = f"{repository}, {subset}"
        image_column = find_column(location, rows.column_names, IMAGE_COLUMNS)
        label_column = find_column(location, rows.column_names, LABEL_COLUMNS)
        names = names or _class_names(rows.features[label_column])
        # Without decoding, so that every image passes the same checks as a file.
        rows = rows.cast_column(image_column, datasets.Image(decode=False))
        values = list(rows[label_column])
        if any(isinstance(value, str) for value in values):
            texts = normalize_text_labels(values)
            if names is None:
                names = tuple(sort_class_names({name for name in texts if name is not None}))
                hint = "load it by datasets.load_dataset, and pass it with a column of ClassLabel"
                refuse_near_equal(names, f"{location}, column of labels", hint=hint)
            labels = number_text_labels(texts, names, location)
        else:
            labels = _check_labels(values, location)
        encoded = _iterate_encoded(rows, image_column, location)
        parts.append(decode_all(encoded, labels, rgb, preparation))
    return parts[0], parts[1], names


def _class_names(feature: Any) -> tuple[str, ...] | None:
    names = feature.names if hasattr(feature, "names") else None
    return tuple(normalize_class_name(str(name)) for name in names) if names else None


def _iterate_encoded(rows: Any, image: str, location: str) -> Iterator[tuple[bytes | ImageReadError, str]]:
    for row, record in enumerate(rows):
        data = (record[image] or {}).get("bytes")
        name = f"{location}, row {row}"
        yield ImageReadError(f"{name}: the image has no bytes.") if data is None else data, name


def _check_labels(values: Any, location: str) -> np.ndarray:
    values = [UNKNOWN if value is None else value for value in values]
    for row, value in enumerate(values):
        if type(value) is not int or value < UNKNOWN:
            raise UserError(
                f"{location}, row {row}: label {value!r} is not a whole number from 0, and not -1 or None (unlabeled)."
            )
    return np.array(values, np.int64)
