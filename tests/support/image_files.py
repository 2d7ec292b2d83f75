"""Encode images, write parquet files, and replace the Hugging Face library `datasets` for tests of readers."""

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from halfmoon.core.errors import UserError
from halfmoon.data import load


def make_noise_images(count: int, size: int = 6, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size, size, channels), np.uint8)


def encode_image(image: np.ndarray | Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    """Encode pixels (H, W), (H, W, 1) or (H, W, 3), or a Pillow image, as an image file."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def write_parquet(
    path: Path,
    images: Sequence[Any],
    labels: Sequence[Any],
    *,
    image: str = "image",
    label: str = "label",
    binary: bool = False,
    label_type: pa.DataType | None = None,
    classes: list[str] | None = None,
    **more: list[int],
) -> Path:
    """Write a parquet file of images in the layout of Hugging Face.

    Args:
        path: where to write it.
        images: encoded images, or pixels to encode.
        labels: the label of each image.
        image: name of the column of images.
        label: name of the column of labels.
        binary: whether to write the images as plain bytes instead of a struct of bytes and path.
        label_type: type of the column of labels, by default int64.
        classes: names of the classes, for the metadata.
        more: additional columns.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [encode_image(each) if isinstance(each, np.ndarray) else each for each in images]
    if binary:
        column = pa.array(files, pa.binary())
    else:
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        column = pa.array([{"bytes": data, "path": None} for data in files], kind)
    table = pa.table({image: column, label: pa.array(labels, label_type or pa.int64()), **more})
    if classes:
        metadata = {"info": {"features": {label: {"names": classes, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(metadata)})
    pq.write_table(table, path)
    return path


class FakeHubDataset:
    """The part of `datasets.Dataset` that the reader uses. It returns images undecoded."""

    def __init__(
        self, images: Sequence[Any], image: str, classes: list[str] | None = None, **labels: list[Any]
    ) -> None:
        """Store images as pixels or as encoded cells, and columns of labels."""
        cells = [{"bytes": encode_image(x), "path": None} if isinstance(x, np.ndarray) else x for x in images]
        self.columns = {image: cells, **labels}
        self.raw = False
        self.column_names = list(self.columns)
        self.features = dict.fromkeys(self.columns, SimpleNamespace(names=classes) if classes else SimpleNamespace())

    def cast_column(self, column: str, kind: dict[str, bool]) -> "FakeHubDataset":
        assert kind == {"decode": False}
        self.raw = True
        return self

    def __len__(self) -> int:
        return len(self.columns[self.column_names[0]])

    def __getitem__(self, column: str) -> list[Any]:
        return self.columns[column]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        assert self.raw, "images must be read undecoded"
        for row in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, row, strict=True))


def install_fake_hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., FakeHubDataset]) -> None:
    """Replace the library `datasets` by a module with this function."""
    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    module.Image = lambda decode: {"decode": decode}
    monkeypatch.setitem(sys.modules, "datasets", module)


def assert_load_refused(pattern: str, *source: Any, **options: Any) -> None:
    """Assert that `load` raises a UserError whose message matches a pattern."""
    with pytest.raises(UserError, match=pattern):
        load(*source, **options)
