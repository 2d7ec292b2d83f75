"""Read the binary version of CIFAR-10 and CIFAR-100, whose files consist of records of equal length.

A record is one label byte (CIFAR-10) or two, coarse then fine (CIFAR-100), and 3,072 pixel bytes: red, green and
blue, each 32 rows of 32 (https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.datasets import DATASETS
from halfmoon.data.images import Images

PIXEL_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class BinaryLayout:
    """The files and records of a data set.

    Attributes:
        train: The names of the training files.
        test: The name of the test file.
        names: The name of the file with class names.
        classes: The number of classes of each label byte; the last one is the label.
    """

    train: tuple[str, ...]
    test: str
    names: str
    classes: tuple[int, ...]


LAYOUTS = {
    "cifar10": BinaryLayout(
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin", "batches.meta.txt", (10,)
    ),
    "cifar100": BinaryLayout(("train.bin",), "test.bin", "fine_label_names.txt", (20, 100)),
}

PICKLES = {
    "cifar10": ("cifar-10-batches-py", ("data_batch_1", "test_batch", "batches.meta")),
    "cifar100": ("cifar-100-python", ("train", "test", "meta")),
}
"""The Python (pickle) versions: the folder in the archive, and the files that identify it."""


def has_files(folder: Path, name: str) -> bool:
    """Check whether a folder has files of the data set `name`."""
    layout = LAYOUTS[name]
    return any((folder / file).is_file() for file in (*layout.train, layout.test))


def read(folder: Path, name: str) -> tuple[Images, Images, tuple[str, ...]]:
    """Read train and test images, each uint8 (N, 32, 32, 3), and class names of the data set `name`.

    Class names are read from batches.meta.txt or fine_label_names.txt if it exists.

    Raises:
        UserError: If a file is missing, incomplete, or has an invalid label, or the number of class names is wrong.
    """
    layout = LAYOUTS[name]
    missing = [file for file in (*layout.train, layout.test) if not (folder / file).is_file()]
    if missing:
        raise UserError(f"{folder / missing[0]} is missing; the binary version of {name} is {DATASETS[name].files}.")
    batches = [read_records(folder / file, layout.classes) for file in layout.train]
    train = Images(
        images=np.concatenate([batch.images for batch in batches]),
        labels=np.concatenate([batch.labels for batch in batches]),
    )
    test = read_records(folder / layout.test, layout.classes)
    return train, test, _read_class_names(folder / layout.names, name)


def read_records(path: Path, classes: Sequence[int]) -> Images:
    """Read the images of one file of the binary version of CIFAR-10 or CIFAR-100.

    A record is one or two label bytes, and the pixels of an image.

    Args:
        path: The file.
        classes: The number of classes of each label byte of a record; the last one is the label.

    Raises:
        UserError: If the file is incomplete or a label is out of range.
    """
    try:
        data = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise UserError(f"{path}: the file cannot be read ({error.strerror}).") from error
    record_bytes = len(classes) + PIXEL_BYTES
    if not data.size or data.size % record_bytes:
        raise UserError(
            f"{path}: {data.size} bytes are no whole number of records of {record_bytes} bytes "
            f"({len(classes)} label byte{'s' if len(classes) > 1 else ''}, {PIXEL_BYTES} pixel bytes); "
            "download it again."
        )
    records = data.reshape(-1, record_bytes)
    labels = records[:, : len(classes)].astype(np.int64)
    wrong = np.argwhere(labels >= np.array(classes))
    if len(wrong):
        row, byte = wrong[0]
        raise UserError(
            f"{path}, record {row}: label byte {byte + 1} is {labels[row, byte]}, but there are {classes[byte]} "
            "classes, numbered from 0; download it again."
        )
    # Pixels are stored as (channels, rows, columns); images have their channels last.
    pixels = records[:, len(classes) :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(pixels), np.ascontiguousarray(labels[:, -1]))


def refuse_pickles(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError if a folder has the Python version of a data set in `names`: pickles can run any program."""
    for name in names:
        archive_folder, files = PICKLES[name]
        for candidate in (folder, folder / archive_folder):
            if all((candidate / file).is_file() for file in files):
                raise UserError(
                    f"{candidate}: this is the Python version of {name}, whose files are pickles, and opening a pickle "
                    f"can run any program hidden in it; take the binary version ({DATASETS[name].files}) or parquet "
                    "files instead."
                )


def _read_class_names(path: Path, name: str) -> tuple[str, ...]:
    """Read the class names of data set `name`, one a line; the known names if there is no such file."""
    classes = DATASETS[name].classes
    if not path.is_file():
        return classes
    try:
        names = tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the class names cannot be read ({error}); download or remove it.") from error
    if len(names) != len(classes) or len(set(names)) != len(names):
        raise UserError(
            f"{path}: it has {len(set(names))} different class names, but {name} has {len(classes)}; "
            "download or remove it."
        )
    return names
