"""Parquet files of other programs: types of columns, names in any case, parts in folders."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.image_files import encode_image, make_noise_images, write_parquet

from halfmoon import UserError
from halfmoon.data import load


def write_table(folder: Path, images: pa.DataType, labels: pa.DataType, values: Sequence[object]) -> None:
    """Write train.parquet and test.parquet with columns of these types."""
    for seed, part in enumerate(("train", "test")):
        encoded = [encode_image(image) for image in make_noise_images(len(values), 8, seed=seed)]
        folder.mkdir(exist_ok=True)
        table = pa.table({"Image": pa.array(encoded, images), "Label": pa.array(values, labels)})
        pq.write_table(table, folder / f"{part.title()}.parquet")


@pytest.mark.parametrize("images", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
@pytest.mark.parametrize(
    ("labels", "values", "classes"),
    [
        (pa.string_view(), ["dog", "cat", "dog", "cat"], ("cat", "dog")),
        (pa.large_string(), ["10", "9", "10", "9"], ("9", "10")),
        (pa.dictionary(pa.int8(), pa.large_string()), ["b", "a", "b", "a"], ("a", "b")),
        (pa.bool_(), [True, False, True, False], ("False", "True")),
        (pa.uint64(), [1, 0, 1, 0], ("0", "1")),
    ],
    ids=["string_view", "large_string", "dictionary", "bool", "uint64"],
)
def test_each_column_type_and_names_in_any_case(
    images: pa.DataType, labels: pa.DataType, values: list[object], classes: tuple[str, ...], tmp_path: Path
) -> None:
    write_table(tmp_path / "data", images, labels, values)
    source = load(str(tmp_path / "data"))
    assert source.classes == classes
    assert source.train.labels.tolist() == [1, 0, 1, 0]


def test_minus_one_is_unlabeled_in_training_files(tmp_path: Path) -> None:
    images = make_noise_images(4, 8)
    write_parquet(tmp_path / "train.parquet", list(images), [0, 1, -1, -1])
    write_parquet(tmp_path / "test.parquet", list(images), [0, 1, 0, 1])
    assert load(str(tmp_path)).train.labels.tolist() == [0, 1, -1, -1]


def test_parts_in_folders_and_a_validation_part_as_the_test(tmp_path: Path) -> None:
    images = list(make_noise_images(4, 8))
    write_parquet(tmp_path / "train" / "0000.parquet", images, [0, 1, 0, 1])
    write_parquet(tmp_path / "validation" / "0000.parquet", images[:2], [0, 1])
    source = load(str(tmp_path))
    assert (len(source.train), len(source.test)) == (4, 2)
    assert "0000.parquet are the test" in source.selection_note


@pytest.mark.parametrize(
    ("columns", "metadata", "sentence"),
    [
        (["image", "label", "label"], None, "several columns label"),
        (["image", "Label", "LABEL"], None, "several columns label"),
        (["image", "label", "id"], {"label": {"names": None}}, None),
    ],
)
def test_unusual_headers_of_parquet(
    columns: list[str], metadata: dict[str, object] | None, sentence: str | None, tmp_path: Path
) -> None:
    for part in ("train", "test"):
        encoded = [encode_image(image) for image in make_noise_images(4, 8)]
        arrays = [pa.array(encoded), pa.array([0, 1, 0, 1]), pa.array([0, 1, 0, 1])]
        table = pa.Table.from_arrays(arrays, names=columns)
        if metadata is not None:
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": metadata}})})
        pq.write_table(table, tmp_path / f"{part}.parquet")
    if sentence is None:
        assert load(str(tmp_path)).classes == ("0", "1")
    else:
        with pytest.raises(UserError, match=sentence):
            load(str(tmp_path))
