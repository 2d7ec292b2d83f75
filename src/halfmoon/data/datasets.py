"""Metadata of the public data sets that can be loaded by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from halfmoon.core import toml


@dataclass(frozen=True)
class DatasetInfo:
    """Metadata of a public data set, known before its files are read.

    Attributes:
        about: A description in one line.
        hub: The Hugging Face repository.
        classes: The class names, by label.
        mean: The mean of each channel of the training pixels, 0 to 1.
        std: The standard deviation of each channel.
        train: The number of training images.
        test: The number of test images.
        shape: (height, width, channels) of an image.
        files: A description of the official files.
        folder: The folder of these files in the official archive.
        config: The configuration, if the repository has several.
        test_part: The hub's name of the test subset.
        gray: True if some images are gray and must be converted to RGB.
        mirror: True if a mirrored image has the same class.
    """

    about: str
    hub: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: int
    test: int
    shape: tuple[int, int, int]
    files: str
    folder: str | None = None
    config: str | None = None
    test_part: str = "test"
    gray: bool = False
    mirror: bool = True


def _read_datasets() -> dict[str, DatasetInfo]:
    """Read datasets.toml, which has a table of `DatasetInfo` fields for each data set."""
    content = (resources.files("halfmoon.data") / "datasets.toml").read_text("utf-8")
    tables: dict[str, dict[str, Any]] = toml.parse(content)
    for table in tables.values():
        table |= {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
    return {name: DatasetInfo(**table) for name, table in tables.items()}


DATASETS: Mapping[str, DatasetInfo] = _read_datasets()
