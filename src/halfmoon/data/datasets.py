"""Public data sets that have a name here: what is known of them before their files are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from halfmoon.storage import toml


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a public data set before its files are read.

    `hub`, `config`: its Hugging Face repository and, where that holds several sets, which; `classes` in the order of
    the labels; `mean`, `std`: one number a channel, of the training pixels in 0..1; `train`, `test`: numbers of
    images; `shape`: (height, width, channels) of an image; `files`: its official files in words; `folder`: where
    its official archive puts them; `test_part`: what the hub calls the part that evaluates; `gray`: some images are
    gray and are made RGB; `mirror`: a mirrored image is still of its class.
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
    content = (resources.files("halfmoon.data") / "datasets.toml").read_text("utf-8")
    tables: dict[str, dict[str, Any]] = toml.parse(content)
    for table in tables.values():
        table |= {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
    return {name: DatasetInfo(**table) for name, table in tables.items()}


DATASETS: Mapping[str, DatasetInfo] = _read_datasets()
