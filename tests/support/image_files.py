"""Encoded images, parquet files of them, and the hub's library as far as its reader uses it."""

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


def encode_image(image: np.ndarray | Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """Return an image file of pixels (H, W), (H, W, 1) or (H, W, 3), or of Pillow's image."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image[..., 0] if image.shape[2:] == (1,) else image)
    file = io.BytesIO()
    image.save(file, form, **options)
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
    """Write encoded images, or pixels, as Hugging Face does; `more` are columns beside the label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [encode_image(each) if isinstance(each, np.ndarray) else each for each in images]
    if binary:
        column = pa.array(files, pa.binary())
    else:
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        column = pa.array([{"bytes": data, "path": None} for data in files], kind)
    table = pa.table({image: column, label: pa.array(labels, label_type or pa.int64()), **more})
    if classes:
        facts = {"info": {"features": {label: {"names": classes, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(facts)})
    pq.write_table(table, path)
    return path


class FakeHubDataset:
    """As much of `datasets.Dataset` as the reader uses; its images come undecoded."""

    def __init__(
        self, images: Sequence[Any], image: str, classes: list[str] | None = None, **labels: list[Any]
    ) -> None:
        """Take pixels, or what stands in their place, and columns of labels."""
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
        assert self.raw, "images must be asked for undecoded"
        for row in zip(*self.columns.values(), strict=True):
            yield dict(zip(self.columns, row, strict=True))


def install_fake_hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., FakeHubDataset]) -> None:
    """Put a library `datasets` in the place of the real one."""
    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    module.Image = lambda decode: {"decode": decode}
    monkeypatch.setitem(sys.modules, "datasets", module)


def assert_load_refused(words: str, *source: Any, **how: Any) -> None:
    """Assert that a data set cannot be loaded, and that the sentence has these words (a regular expression)."""
    with pytest.raises(UserError, match=words):
        load(*source, **how)
