"""Parquet files and hub data sets whose labels are names, and parquet files that name their images' files."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.image_files import FakeHubDataset, install_fake_hub, make_noise_images, write_parquet

from halfmoon import UserError
from halfmoon.data import load
from halfmoon.data.preparation import Preparation
from halfmoon.studies.scan_folder import scan_folder


@pytest.mark.parametrize("kind", ["string", "large_string", "dictionary", "bool", "float"])
def test_labels_of_parquet_may_be_names(kind: str, tmp_path: Path) -> None:
    """Names are sorted, and numbers as numbers; the test files need not have all of them. Missing values have no label."""
    texts = ["dog", None, "cat ", "dog", "nan", "cat"]
    values: dict[str, list[Any]] = {
        "bool": [True, None, False, True, None, False],
        "float": [1.0, None, 0.0, 1.0, None, 0.0],
    }
    types = {"string": pa.string(), "large_string": pa.large_string(), "bool": pa.bool_(), "float": pa.float64()}
    types["dictionary"] = pa.dictionary(pa.int32(), pa.string())
    labels = values.get(kind, texts)
    write_parquet(tmp_path / "train.parquet", list(make_noise_images(6)), labels, label_type=types[kind])
    write_parquet(
        tmp_path / "test.parquet", list(make_noise_images(2, seed=1)), [labels[0]] * 2, label_type=types[kind]
    )
    source = load(str(tmp_path))
    assert source.classes == {"bool": ("False", "True"), "float": ("0", "1")}.get(kind, ("cat", "dog"))
    assert source.train.labels.tolist() == [1, -1, 0, 1, -1, 0]
    assert source.test.labels.tolist() == [1, 1]


def test_numbers_as_texts_are_sorted_as_numbers_and_unknown_names_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", list(make_noise_images(3)), ["10", "9", "1"], label_type=pa.string())
    write_parquet(tmp_path / "test.parquet", list(make_noise_images(1)), ["9"], label_type=pa.string())
    assert load(str(tmp_path)).classes == ("1", "9", "10")
    write_parquet(tmp_path / "test.parquet", list(make_noise_images(2)), ["9", "2"], label_type=pa.string())
    with pytest.raises(UserError, match=r"test\.parquet, row 1: no training image has the label '2'; correct it"):
        load(str(tmp_path))
    write_parquet(tmp_path / "train.parquet", list(make_noise_images(1)), [0.5], label_type=pa.float64())
    with pytest.raises(UserError, match=r"train\.parquet: column label holds double, but labels must be"):
        load(str(tmp_path))


def test_nearly_equal_names_in_parquet_are_refused(tmp_path: Path) -> None:
    """They were only noted. A classes.txt that names them confirms that they are different classes."""
    for subset in ("train", "test"):
        names = ["Cat", "cat", "dog"]
        write_parquet(tmp_path / f"{subset}.parquet", list(make_noise_images(3)), names, label_type=pa.string())
    with pytest.raises(UserError, match=r"train\.parquet, column of labels: the class names 'Cat' and 'cat' differ"):
        load(str(tmp_path))
    (tmp_path / "classes.txt").write_text("Cat\ncat\ndog\n")
    assert load(str(tmp_path)).classes == ("Cat", "cat", "dog")
    assert scan_folder(tmp_path) is None  # the data set is the parquet files, and no site's folder


def test_image_files_next_to_parquet_are_counted(tmp_path: Path) -> None:
    for subset in ("train", "test"):
        write_parquet(tmp_path / f"{subset}.parquet", list(make_noise_images(2)), [0, 1])
    (tmp_path / "cat").mkdir()
    Image.fromarray(make_noise_images(1)[0]).save(tmp_path / "cat" / "0.png")
    assert any(note.startswith("left out: image files (1)") for note in load(str(tmp_path)).notes)


def test_images_of_parquet_may_be_files_next_to_it(tmp_path: Path) -> None:
    for subset in ("train", "test"):
        (tmp_path / subset).mkdir()
        for row, pixels in enumerate(make_noise_images(20)):
            Image.fromarray(pixels).save(tmp_path / subset / f"{row}.png")
        cells = [{"bytes": None, "path": f"{subset}/{row}.png"} for row in range(20)]
        cells[3]["path"] = "../secret.png" if subset == "train" else "test/3.png"
        column = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        pq.write_table(pa.table({"image": column, "label": [0, 1] * 10}), tmp_path / f"{subset}.parquet")
    Image.fromarray(make_noise_images(1)[0]).save(tmp_path.parent / "secret.png")
    source = load(str(tmp_path), preparation=Preparation(skip_unreadable=True))
    assert (source.test.images == make_noise_images(20)).all()
    assert len(source.train) == 19
    assert [image.reason for image in source.skipped] == ["the image has no bytes; store the image itself, not a path."]


def test_the_hub_reads_names_as_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"train": ["dog", "cat", None], "test": ["dog", "dog", "cat"]}
    install_fake_hub(
        monkeypatch, lambda name, config, split: FakeHubDataset(list(make_noise_images(3)), "image", label=parts[split])
    )
    source = load("owner/pets")
    assert source.classes == ("cat", "dog")
    assert (source.train.labels.tolist(), source.test.labels.tolist()) == ([1, 0, -1], [1, 1, 0])
