"""Read and write parquet files with encoded images in Hugging Face's layout; read Arrow files of its save_to_disk."""

import io
import json
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from halfmoon.core.errors import ImageReadError, UserError, one_line
from halfmoon.data.class_names import is_missing_label, normalize_class_name, sort_class_names
from halfmoon.data.images import UNKNOWN, Images
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers.decode import decode_all
from halfmoon.data.readers.label_table import LABEL_TITLES
from halfmoon.storage import atomic_io

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = tuple(dict.fromkeys(("label", "labels", "fine_label", *LABEL_TITLES)))


class ArrowFile:
    """A memory-mapped file of save_to_disk, with the methods of `pq.ParquetFile` that this module needs."""

    def __init__(self, path: Path) -> None:
        """Open a file; errors are those of pyarrow."""
        self.table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        self.schema_arrow = self.table.schema

    def read(self, columns: list[str]) -> pa.Table:
        """Read these columns."""
        return self.table.select(columns)

    def iter_batches(self, batch_size: int, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """Iterate over batches of at most `batch_size` rows of these columns."""
        return iter(self.read(columns).to_batches(batch_size))


File = pq.ParquetFile | ArrowFile


def find_shards(folder: Path, subset: str) -> list[Path]:
    """Find the files of one subset of a data set, such as train-00000-of-00002.parquet, in order.

    Args:
        folder: The folder, in which or in whose usual subfolders the files are.
        subset: The subset: "train", "test" or "validation".

    Returns:
        The files SUBSET*.parquet, otherwise the files SUBSET/data-*.arrow; empty if there are none.

    Raises:
        UserError: If one of the numbered files is missing.
    """
    # The names of configurations that popular data sets on the Hugging Face hub use as a folder.
    subfolders = [folder / name for name in ("data", "plain_text", "default", "cropped_digits", folder.name)]
    paths: list[Path] = []
    for candidate in (folder, *subfolders):
        paths = paths or _list_files(candidate, f"{subset}*.parquet")
    # The hub's conversion of a data set has a folder for each subset; class folders in it would be a data set of files.
    paths = paths or ([] if _has_subfolders(folder / subset) else _list_files(folder / subset, "*.parquet"))
    paths = paths or sorted((folder / subset).glob("data-*.arrow"))
    for path in paths:
        numbered = re.search(r"-(\d+)-of-(\d+)(-[0-9a-f]+)?\.(?:parquet|arrow)$", path.name)
        if numbered and len(paths) != int(numbered[2]):
            raise UserError(
                f"{path.parent}: {path.name} is one of {int(numbered[2])} files, but {len(paths)} "
                f"{'is' if len(paths) == 1 else 'are'} there; fetch the missing ones."
            )
    return paths


def _has_subfolders(folder: Path) -> bool:
    return folder.is_dir() and any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir())


def _list_files(folder: Path, pattern: str) -> list[Path]:
    """List the files of a folder whose names match a pattern in any case, sorted."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if fnmatchcase(path.name.lower(), pattern) and path.is_file())


def read_text_classes(paths: Sequence[Path]) -> tuple[str, ...] | None:
    """Read the class names of files whose label column has texts, sorted; None if it has numbers.

    Raises:
        UserError: If the labels cannot be read.
    """
    names: set[str] = set()
    for path in paths:
        file = _open(path)
        values = _read_texts(path, file)
        if values is None:
            return None
        names.update(name for name in values if name is not None)
    return tuple(sort_class_names(names))


def read_parquet(
    paths: Sequence[Path],
    rgb: bool = False,
    preparation: Preparation = UNCHANGED,
    into: Path | None = None,
    classes: tuple[str, ...] | None = None,
) -> tuple[Images, tuple[str, ...] | None]:
    """Read the images of parquet or Arrow files in Hugging Face's layout.

    The image column is `image` or `img` (a struct with `bytes`, or plain binary), the label column `label`,
    `labels` or `fine_label` (integers, or names of classes). An image whose struct has only a path is read from this
    file, relative to the folder of the parquet file.

    Args:
        paths: The files of one subset of a data set, in order.
        rgb: True to convert gray images to RGB.
        preparation: The conversion of images.
        into: A file that pixels are written to, which is then mapped into memory; None for memory only.
        classes: The class names of a label column with texts (see `read_text_classes`).

    Returns:
        The images, and the class names; None if the files do not contain them.

    Raises:
        UserError: If a file or a row cannot be read.
    """
    opened = [(path, _open(path)) for path in paths]
    labels = np.concatenate([_read_labels(path, file, classes) for path, file in opened])
    if not len(labels):
        raise UserError(f"{paths[0]}: there are no rows in it.")
    encoded = (item for path, file in opened for item in iterate_encoded(path, file))
    path, file = opened[0]
    images = decode_all(encoded, labels, rgb, preparation, into)
    names = classes or _read_class_names(file, find_column(path, file.schema_arrow.names, LABEL_COLUMNS))
    return images, names


def find_column(location: object, names: Sequence[str], candidates: Sequence[str]) -> str:
    """Find the first of the candidates among the column names; raise UserError if there is none."""
    for candidate in candidates:
        matches = [candidate] if candidate in names else [name for name in names if name.lower() == candidate]
        if matches:
            if len(matches) > 1 or names.count(matches[0]) > 1:
                raise UserError(f"{location}: there are several columns {candidate}; keep one of them.")
            return matches[0]
    raise UserError(
        f"{location}: there is no column {' or '.join(candidates)}; it has {', '.join(names) or 'no columns'}. Rename one."
    )


def _open(path: Path) -> File:
    """Open a parquet or Arrow file; raise UserError if it cannot be read."""
    try:
        file = ArrowFile(path) if path.suffix == ".arrow" else pq.ParquetFile(path)
        _ = file.schema_arrow.names  # raises UnicodeDecodeError if a name is not UTF-8
        return file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: not a readable {path.suffix[1:]} file ({one_line(error)}); fetch it again."
        ) from error


def _read_column(path: Path, file: File) -> pa.ChunkedArray:
    """Read the label column of an open file; raise UserError if it is missing or damaged."""
    name = find_column(path, file.schema_arrow.names, LABEL_COLUMNS)
    try:
        return file.read(columns=[name]).column(name)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: column {name} cannot be read ({one_line(error)}); fetch the file again.") from error


def _read_texts(path: Path, file: File) -> list[str | None] | None:
    """Read labels that are texts, categories or booleans: normalized names, None for a missing label.

    Returns:
        The labels; None if the column has numbers.
    """
    name = find_column(path, file.schema_arrow.names, LABEL_COLUMNS)
    kind = file.schema_arrow.field(name).type
    value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
    text_checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_boolean)
    is_text = any(check(value_type) for check in text_checks)
    if not is_text:
        return None
    try:
        values = _read_column(path, file).to_pylist()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: column {name} cannot be read ({one_line(error)}); fetch the file again.") from error
    return normalize_text_labels(values)


def normalize_text_labels(values: Sequence[object]) -> list[str | None]:
    """Normalize labels that are texts; None for a missing label, such as an empty cell or NaN."""
    names = [None if value is None else normalize_class_name(str(value)) for value in values]
    return [None if name is None or is_missing_label(name) else name for name in names]


def number_text_labels(values: Sequence[str | None], classes: Sequence[str], location: object) -> np.ndarray:
    """Number labels by their class: int64 (N,), `UNKNOWN` for None.

    Raises:
        UserError: If a label is not among the classes, which are those of the training images.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    for row, value in enumerate(values):
        if value is not None and value not in numbers:
            raise UserError(f"{location}, row {row}: no training image has the label {value!r}; correct it.")
    return np.array([UNKNOWN if value is None else numbers[value] for value in values], np.int64)


def _convert_whole_floats(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert floats to integers if all are whole; pandas stores integers with missing values as floats and NaN."""
    numbers = np.array(values.to_pylist(), np.float64)
    present = numbers[~np.isnan(numbers)]
    if not (present == np.floor(present)).all():
        return values
    integers = [None if np.isnan(number) else int(number) for number in numbers.tolist()]
    return pa.chunked_array([pa.array(integers, pa.int64())])


def _read_labels(path: Path, file: File, classes: tuple[str, ...] | None) -> np.ndarray:
    """Read the label column of an open file: int64 (N,), `UNKNOWN` for a missing value.

    Raises:
        UserError: If the column is missing or cannot be read, a label is negative or no whole number, or a text is not
            among `classes`.
    """
    schema = file.schema_arrow
    name = find_column(path, schema.names, LABEL_COLUMNS)
    texts = _read_texts(path, file)
    if classes is not None:
        if texts is None:
            raise UserError(
                f"{path}: column {name} holds {schema.field(name).type}, but in the training files it has names; write "
                "names or numbers into both."
            )
        return number_text_labels(texts, classes, path)
    values = _read_column(path, file)
    if pa.types.is_floating(values.type):
        values = _convert_whole_floats(values)
    if not pa.types.is_integer(values.type):
        raise UserError(
            f"{path}: column {name} holds {values.type}, but labels must be whole numbers 0, 1, 2 ... or, in all files, "
            "names; number the classes first."
        )
    valid = values.is_valid().to_numpy()
    labels = np.full(len(values), UNKNOWN, np.int64)
    numbers = values.drop_null().to_numpy()
    if len(numbers) and numbers.max() > np.iinfo(np.int64).max:
        raise UserError(f"{path}: label {numbers.max()} is too large; number the classes from 0.")
    labels[valid] = numbers
    wrong = np.flatnonzero(labels < UNKNOWN)
    if len(wrong):
        raise UserError(
            f"{path}, row {wrong[0]}: label {labels[wrong[0]]} is negative; labels are numbered from 0, and -1 is unlabeled."
        )
    return labels


def _is_binary(column_type: pa.DataType) -> bool:
    """Check whether a column has bytes, in one of Arrow's four layouts."""
    types = pa.types
    return (
        types.is_binary(column_type)
        or types.is_large_binary(column_type)
        or types.is_binary_view(column_type)
        or types.is_fixed_size_binary(column_type)
    )


def iterate_encoded(path: Path, file: File) -> Iterator[tuple[bytes | ImageReadError, str]]:
    """Yield each encoded image of an open file, or the error that it has none, and its row for messages.

    Raises:
        UserError: If the image column is missing, has another type, or cannot be read.
    """
    schema = file.schema_arrow
    name = find_column(path, schema.names, IMAGE_COLUMNS)
    column_type = schema.field(name).type
    # Hugging Face stores an image as a struct of its bytes and the path of its file.
    is_struct = pa.types.is_struct(column_type) and column_type.get_field_index("bytes") >= 0
    has_paths = is_struct and column_type.get_field_index("path") >= 0
    content_type = column_type.field("bytes").type if is_struct else column_type
    # A struct whose images are all in files of their own has bytes of type null.
    has_no_content = is_struct and pa.types.is_null(content_type)
    if not _is_binary(content_type) and not has_no_content:
        raise UserError(
            f"{path}: column {name} holds {column_type}, but images must be encoded bytes "
            "(binary, or a struct with a field bytes)."
        )
    row = 0
    try:
        for batch in file.iter_batches(batch_size=1024, columns=[name]):
            column = batch.column(0)
            encoded = (column.field("bytes") if is_struct else column).to_pylist()
            files = column.field("path").to_pylist() if has_paths else [None] * len(encoded)
            for value, file_path in zip(encoded, files, strict=True):
                location = f"{path}, row {row}"
                yield _read_file(path, file_path, location) if value is None else value, location
                row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # a path may not be UTF-8
        raise UserError(f"{path}: unreadable after row {row} ({one_line(error)}); fetch the file again.") from error


def _read_file(path: Path, file_path: str | None, location: str) -> bytes | ImageReadError:
    """Read the image file that a row names instead of its content, in or below the folder of the parquet file."""
    file = path.parent / str(file_path).replace("\\", "/")
    if file_path is None or not file.resolve().is_relative_to(path.parent.resolve()):
        return ImageReadError(f"{location}: the image has no bytes; store the image itself, not a path.")
    try:
        return file.read_bytes()
    except OSError as error:
        reason = error.strerror or one_line(error)
        return ImageReadError(f"{location}: its file {file_path} cannot be read ({reason}); store the image itself.")


def _read_class_names(file: File, label: str) -> tuple[str, ...] | None:
    """Read the class names of the column `label` from the metadata that Hugging Face writes; None if there is none."""
    try:
        features = atomic_io.parse_json((file.schema_arrow.metadata or {})[b"huggingface"])["info"]["features"]
        names = features[label]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    if not isinstance(names, list):
        return None
    return tuple(normalize_class_name(str(name)) for name in names)


def encode_png(pixels: np.ndarray) -> bytes:
    """Encode an image, uint8 (H, W, 1 or 3), as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return file.getvalue()


def write_parquet(path: Path, rows: Sequence[tuple[bytes, int | None]], classes: Sequence[str]) -> None:
    """Write encoded images and labels (None if unknown) for `read_parquet`; an identical file is not rewritten."""
    # The metadata in which Hugging Face's library looks for class names.
    metadata: dict[str, Any] = {"info": {"features": {"label": {"names": list(classes)}}}}
    labels = pa.array([label for _, label in rows], pa.int64())
    table = pa.table({"image": [{"bytes": data} for data, _ in rows], "label": labels})
    file = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(metadata)}), file)
    data = file.getvalue().to_pybytes()
    if atomic_io.read(path) != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.write_atomically(path, data)


def iterate_files(paths: Sequence[Path]) -> Iterator[bytes]:
    """Yield the content of each image of parquet or Arrow files, except of those that cannot be read."""
    for path in paths:
        for data, _ in iterate_encoded(path, _open(path)):
            if isinstance(data, bytes):
                yield data
