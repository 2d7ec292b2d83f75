"""Sources: pixels and labels as they are in the files, and messages that name the file and the row."""

import gzip
import struct
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis.extra import numpy as hnp
from image_files import (
    FakeHubDataset,
    assert_load_refused,
    encode_image,
    install_fake_hub,
    make_noise_images,
    write_parquet,
)
from PIL import Image
from scripts import load_script

from halfmoon.core.errors import UserError
from halfmoon.data import Images, Source, hide_last_classes, hold_out, load, pad_source, pad_to, shrink, take_share
from halfmoon.data.images import average_pool, channel_statistics
from halfmoon.data.readers import cache as decoded

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "data"


def encode_mode(mode: str, size: int = 6) -> bytes:
    return encode_image(Image.new(mode, (size, size)))


def parquet_set(folder: Path, images: list[Any], labels: list[Any], **options: Any) -> Path:
    write_parquet(folder / "train.parquet", images, labels, **options)
    write_parquet(folder / "test.parquet", make_noise_images(2, seed=9), [0, 1])
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def idx_set(folder: Path, count: int = 20, *, zipped: bool = True) -> tuple[np.ndarray, np.ndarray]:
    images = make_noise_images(count, 28, 1)[..., 0]
    labels = np.arange(count, dtype=np.uint8) % 10
    for prefix in ("train", "t10k"):
        for stem, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            data = idx_bytes(array)
            name = f"{prefix}-{stem}" + (".gz" if zipped else "")
            (folder / name).write_bytes(gzip.compress(data) if zipped else data)
    return images, labels


def class_folders(folder: Path, form: str = "png") -> np.ndarray:
    """Write train and test with classes ant and bee, two images each; return them in the order of reading."""
    pixels = make_noise_images(4)
    for subset in ("train", "test"):
        for label, name in enumerate(("ant", "bee")):
            (folder / subset / name).mkdir(parents=True)
            for i in range(2):
                (folder / subset / name / f"{i}.{form}").write_bytes(encode_image(pixels[2 * label + i]))
    return pixels


@pytest.mark.parametrize(
    ("images", "kind", "error"),
    [
        (make_noise_images(2).astype(np.float32), np.int64, "uint8"),
        (make_noise_images(2, channels=4), np.int64, "1 or 3"),
        (make_noise_images(2), np.int32, "int64"),
        (make_noise_images(3), np.int64, "one for each image"),
    ],
)
def test_images_refuse_other_types_and_shapes(images: np.ndarray, kind: type, error: str) -> None:
    with pytest.raises(UserError, match=error):
        Images(images, np.zeros(2, kind))


def test_a_source_refuses_parts_that_disagree() -> None:
    good = Images(make_noise_images(2), np.array([0, 1]))
    for test, text in (
        (Images(make_noise_images(2), np.array([0, 2])), r"row 1 of test has label 2"),
        (Images(make_noise_images(2, 5, 1), np.array([0, 1])), "6x6 with 3 channels, test images 5x5 with 1 channel;"),
        (Images(make_noise_images(0), np.zeros(0, np.int64)), "test part has no images"),
    ):
        with pytest.raises(UserError, match=text):
            Source("tiny", good, test, ("a", "b"), True, (0.5,) * 3, (0.2,) * 3)


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=4, max_dims=4, max_side=5)))
def test_statistics_equal_numpy(images: np.ndarray) -> None:
    mean, std = channel_statistics(images)
    np.testing.assert_allclose(mean, (images / 255).mean((0, 1, 2)), atol=1e-12)
    expected = (images / 255).std((0, 1, 2))
    # The deviation of a constant channel is replaced by 1, as images are divided by it.
    np.testing.assert_allclose(std, np.where(expected < 1e-9, 1.0, expected), atol=1e-9)


@pytest.mark.parametrize("factor", [1, 2])
def test_pool_equals_pillow(factor: int) -> None:
    """Pillow's `reduce` averages the same blocks and rounds the same way; 100 random images leave no luck."""
    images = make_noise_images(100, 12)[:, :6]
    for image, small in zip(images, average_pool(images, factor), strict=True):
        np.testing.assert_array_equal(np.asarray(Image.fromarray(image).reduce(factor)), small)


def test_shrink_changes_only_the_pixels() -> None:
    source = load("digits")
    small = shrink(source, 2)
    assert small.train.images.shape == (1437, 4, 4, 1)
    np.testing.assert_array_equal(small.test.labels, source.test.labels)
    assert (small.mean, small.std) == channel_statistics(small.train.images)
    assert small.classes == source.classes
    assert shrink(source, 1) is source
    for factor in (3, 0, -2):
        with pytest.raises(UserError, match=f"{factor} does not divide images of 8x8"):
            shrink(source, factor)


def test_padding_puts_zeros_around() -> None:
    images = make_noise_images(3, 5, 1) | 1
    padded = pad_to(images, 8)
    assert padded.shape == (3, 8, 8, 1)
    np.testing.assert_array_equal(padded[:, 1:6, 1:6], images)
    assert (padded > 0).sum() == images.size
    with pytest.raises(UserError, match="5x5 do not fit into 4x4"):
        pad_to(images, 4)


def test_fit_pads_all_subsets_and_preserves_the_statistics() -> None:
    source = load("digits")
    wide = pad_source(source, 12)
    np.testing.assert_array_equal(wide.train.images, pad_to(source.train.images, 12))
    assert wide.test.images.shape == (360, 12, 12, 1)
    assert (wide.mean, wide.std) == (source.mean, source.std)


def test_digits_are_scikit_learns_with_a_fixed_stratified_test() -> None:
    """Largest remainders: the classes have 178, 182, 177, 183, 181, 182, 181, 179, 174, 180 rows; times 360 / 1797
    that is 35.66, 36.46, 35.46, 36.66, 36.26, 36.46, 36.26, 35.86, 34.86, 36.06. The whole parts add up to 355;
    the five that are missing go to 7 and 8 (.86), 0 and 3 (.66), and to 1, the first of the two with .46."""
    from sklearn.datasets import load_digits

    source = load("digits")
    assert (len(source.train), len(source.test)) == (1437, 360)
    assert np.bincount(source.test.labels).tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    assert not source.mirror
    assert source.classes == tuple("0123456789")
    pixels, target = load_digits(return_X_y=True)
    wanted = sorted(
        (int(y), bytes(np.round(x * 255 / 16).astype(np.uint8))) for x, y in zip(pixels, target, strict=True)
    )
    both = [
        (int(y), x.tobytes())
        for subset in (source.train, source.test)
        for x, y in zip(subset.images, subset.labels, strict=True)
    ]
    assert sorted(both) == wanted
    repeated = load("digits")
    np.testing.assert_array_equal(source.test.images, repeated.test.images)
    assert_load_refused("no part 'validation'", "digits", test="validation")


def test_the_embedded_digits_are_what_the_script_writes() -> None:
    embed = load_script("tools/embed_digits.py")
    wanted = embed.arrays()
    with np.load(embed.DIGITS, allow_pickle=False) as embedded:
        assert set(embedded) == set(wanted)
        for name in wanted:
            assert embedded[name].dtype == np.uint8
            np.testing.assert_array_equal(embedded[name], wanted[name])


# idx files


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_idx_files_are_read_byte_for_byte(tmp_path: Path, zipped: bool, inside: bool) -> None:
    folder = tmp_path / "fashion_mnist" if inside else tmp_path
    folder.mkdir(exist_ok=True)
    images, labels = idx_set(folder, zipped=zipped)
    source = load("fashion_mnist", tmp_path)
    np.testing.assert_array_equal(source.train.images[..., 0], images)
    np.testing.assert_array_equal(source.test.labels, labels)
    assert source.classes[9] == "Ankle boot"
    assert source.mirror


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], r"20 x 28 x 28 = 15680 bytes, but 15679 follow"),
        (lambda data: data + b"x", r"but 15681 follow"),
        (lambda data: b"\0\0\x0d" + data[3:], r"starts with 00000d03, not 00000803"),
        (lambda data: data[:10], r"not an idx file"),
        (lambda data: b"", r"starts with nothing"),
        (lambda data: data[:4] + b"\xff" * 12 + data[16:], r"4294967295 x 4294967295 x 4294967295"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path: Path, change: Any, message: str) -> None:
    idx_set(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))
    with pytest.raises(UserError, match=message) as caught:
        load("fashion_mnist", tmp_path)
    assert str(path) in str(caught.value)


def test_a_truncated_or_false_gzip_is_named(tmp_path: Path) -> None:
    idx_set(tmp_path)
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 255
    for data in (whole[: len(whole) // 2], b"no gzip at all", bytes(flipped)):
        path.write_bytes(data)
        assert_load_refused(r"t10k-images-idx3-ubyte.gz: not a complete gzip", "fashion_mnist", tmp_path)


def test_idx_counts_must_agree_and_files_be_there(tmp_path: Path) -> None:
    idx_set(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(19, np.uint8))))
    assert_load_refused(r"19 labels, but train-images-idx3-ubyte.gz has 20 images", "fashion_mnist", tmp_path)
    labels.unlink()
    assert_load_refused(r"train-labels-idx1-ubyte.gz is missing", "fashion_mnist", tmp_path)
    assert_load_refused("no part 'validation'", "fashion_mnist", tmp_path, test="validation")


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
@pytest.mark.parametrize(
    "options",
    [{}, {"image": "img", "label": "labels"}, {"binary": True, "label": "fine_label", "label_type": pa.int32()}],
)
def test_parquet_gives_the_pixels_that_were_encoded(tmp_path: Path, form: str, options: dict[str, Any]) -> None:
    pixels = make_noise_images(5)
    encoded = [encode_image(image, form, lossless=True) for image in pixels]
    folder = tmp_path / "set"
    write_parquet(folder / "train-00000-of-00002.parquet", encoded[:3], [1, 0, 1], **options)
    write_parquet(folder / "train-00001-of-00002.parquet", encoded[3:], [0, 1], **options)
    write_parquet(folder / "test.parquet", pixels[:1], [1])
    source = load("set", tmp_path)
    np.testing.assert_array_equal(source.train.images, pixels)
    assert source.train.labels.tolist() == [1, 0, 1, 0, 1]
    assert (source.name, source.classes) == ("set", ("0", "1"))
    assert (source.mean, source.std) == channel_statistics(pixels)
    assert load(str(folder)).name == "set"
    (folder / "train-00001-of-00002.parquet").unlink()
    assert_load_refused("one of 2 files, but 1 is there", "set", tmp_path)


def test_class_names_come_from_the_file(tmp_path: Path) -> None:
    parquet_set(tmp_path, make_noise_images(2), [0, 1], classes=["normal", "ill"])
    source = load(str(tmp_path), mirror=False)
    assert source.classes == ("normal", "ill")
    assert not source.mirror


def test_validation_subset_is_read_only_if_selected(tmp_path: Path) -> None:
    parquet_set(tmp_path, make_noise_images(2), [0, 1])
    assert len(load(str(tmp_path)).test) == 2
    assert_load_refused(r"no validation\*.parquet next to", str(tmp_path), test="validation")
    write_parquet(tmp_path / "validation.parquet", make_noise_images(3), [0, 1, 1])
    assert len(load(str(tmp_path), test="validation").test) == 3


def good() -> bytes:
    return encode_image(make_noise_images(1)[0])


@pytest.mark.parametrize(
    ("images", "labels", "options", "message"),
    [
        ([good(), good()[:60]], [0, 1], {}, r"train.parquet, row 1: not a readable image"),
        ([good(), b"nothing"], [0, 1], {}, r"train.parquet, row 1: not a readable image \(no known format\)"),
        ([good(), None], [0, 1], {}, r"train.parquet, row 1: the image has no bytes"),
        ([good(), None], [0, 1], {"binary": True}, r"train.parquet, row 1: the image has no bytes"),
        ([good(), encode_mode("P")], [0, 1], {}, r"row 1: the image has mode P;"),
        ([good(), encode_mode("RGBA")], [0, 1], {}, r"row 1: the image has mode RGBA;"),
        ([encode_mode("I;16")], [0], {}, r"row 0: the image has mode I;16;"),
        (
            [good(), encode_mode("RGB", 7)],
            [0, 1],
            {},
            r"row 1: the image is 7x7 RGB, but .*train.parquet, row 0 is 6x6 RGB",
        ),
        ([good(), encode_mode("L")], [0, 1], {}, r"row 1: the image is 6x6 gray, but .*row 0 is 6x6 RGB"),
        ([good(), good()], [0, -2], {}, r"train.parquet, row 1: label -2 is negative"),
        (
            [good()],
            ["cat"],
            {"label_type": pa.string()},
            r"test.parquet: column label holds int64, but in the training files it has names",
        ),
        ([good()], [0.5], {"label_type": pa.float32()}, r"column label holds float, but labels must be whole"),
        ([good()], [0], {"label": "answer"}, r"no column label or labels or fine_label.*; it has image, answer"),
        ([good()], [0], {"image": "photo"}, r"no column image or img; it has photo, label"),
        ([good(), good()], [0, 2], {}, r"labels run from 0 to 2, but no training image has label 1"),
        ([good(), good()], [0, 10**12], {}, r"labels run from 0 to 10{12}, but no training image has label 1;"),
        ([], [], {}, r"train.parquet: there are no rows"),
    ],
)
def test_a_bad_row_is_named(tmp_path, images, labels, options, message):
    assert_load_refused(message, str(parquet_set(tmp_path, images, labels, **options)))


def test_an_image_column_of_numbers_is_refused(tmp_path: Path) -> None:
    parquet_set(tmp_path, [good()], [0])
    pq.write_table(pa.table({"image": [1.0], "label": [0]}), tmp_path / "train.parquet")
    assert_load_refused("column image holds double, but images must be encoded bytes", str(tmp_path))


@pytest.mark.parametrize("content", [{"a": b"x"}, [1, 2], "text", 1.5])
def test_bytes_of_another_type_are_refused(tmp_path: Path, content: object) -> None:
    parquet_set(tmp_path, [good()], [0])
    table = pa.table({"image": [{"bytes": content, "path": None}], "label": [0]})
    pq.write_table(table, tmp_path / "train.parquet")
    assert_load_refused("column image holds struct.*, but images must be encoded bytes", str(tmp_path))


def test_a_path_that_is_not_text_is_a_sentence(tmp_path: Path) -> None:
    parquet_set(tmp_path, [good()], [0])
    path = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff.png"]).buffers())
    images = pa.StructArray.from_arrays([pa.array([None], pa.binary()), path], ["bytes", "path"])
    pq.write_table(pa.table({"image": images, "label": [0]}), tmp_path / "train.parquet")
    assert_load_refused("unreadable after row 0", str(tmp_path))


def test_what_is_no_parquet_is_named(tmp_path: Path) -> None:
    path = parquet_set(tmp_path, [good(), good()], [0, 1]) / "train.parquet"
    whole = path.read_bytes()
    for data in (b"not parquet", b"", whole[: len(whole) // 2]):
        path.write_bytes(data)
        assert_load_refused(r"train.parquet: not a readable parquet file", str(tmp_path))


def test_damaged_pages_are_named(tmp_path: Path) -> None:
    """The footer is whole, the pages before it are zeros: only reading the column finds out."""
    path = parquet_set(tmp_path, [good(), good()], [0, 1]) / "train.parquet"
    data = bytearray(path.read_bytes())
    footer = 8 + struct.unpack("<I", data[-8:-4])[0]
    data[4:-footer] = bytes(len(data) - 4 - footer)
    path.write_bytes(data)
    assert_load_refused(r"train.parquet: ", str(tmp_path))


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow warns above its limit (here 20 of 36 pixels) and raises above twice it (here 10 of 36)."""
    parquet_set(tmp_path, [good()], [0])
    for limit in (20, 10):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        assert_load_refused(r"train.parquet, row 0: the image is too large", str(tmp_path))


def test_class_folders_are_read_in_sorted_order(tmp_path: Path) -> None:
    pixels = class_folders(tmp_path)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".hidden").mkdir()
    source = load(str(tmp_path))
    np.testing.assert_array_equal(source.train.images, pixels)
    assert source.train.labels.tolist() == [0, 0, 1, 1]
    assert source.classes == ("ant", "bee")


def test_photo_is_rotated_by_its_orientation_tag(tmp_path: Path) -> None:
    """Orientation 6: the camera lay on its side, the picture is to be turned clockwise by a quarter."""
    class_folders(tmp_path)
    pixels = make_noise_images(1, seed=3)[0]
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "train" / "ant" / "0.png", exif=exif)
    np.testing.assert_array_equal(load(str(tmp_path)).train.images[0], np.rot90(pixels, -1))


def test_class_folders_that_do_not_fit_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path)
    (tmp_path / "train" / "cat").mkdir()
    assert_load_refused(r"train/cat: there is no image in it", str(tmp_path))
    (tmp_path / "train" / "cat" / "0.png").write_bytes(good())
    assert_load_refused("class folder cat is in train but not in test", str(tmp_path))
    (tmp_path / "test" / "cat").mkdir()
    (tmp_path / "test" / "cat" / "0.png").write_bytes(good()[:50])
    assert_load_refused(r"test/cat/0.png: not a readable image", str(tmp_path))
    (tmp_path / "test" / "cat" / "0.png").write_bytes(encode_mode("RGB", 9))
    assert_load_refused(r"cat/0.png: the image is 9x9 RGB, but .*ant/0.png is 6x6 RGB", str(tmp_path))


def test_missing_parts_are_named(tmp_path: Path) -> None:
    assert_load_refused("no data set was found; expected train", str(tmp_path))
    (tmp_path / "train").mkdir()
    assert_load_refused("train: it has no class folders", str(tmp_path))
    (tmp_path / "train" / "ant").mkdir()
    (tmp_path / "train" / "ant" / "0.png").write_bytes(good())
    assert_load_refused("test: there is no such folder", str(tmp_path))


def test_class_folders_without_a_test_set_get_a_held_out_one(tmp_path: Path) -> None:
    """A fifth of each class, the same at any time, and nothing is in both parts."""
    pixels = make_noise_images(15)
    for row, image in enumerate(pixels):
        (tmp_path / ("ant" if row < 10 else "bee")).mkdir(exist_ok=True)
        (tmp_path / ("ant" if row < 10 else "bee") / f"{row:02}.png").write_bytes(encode_image(image))
    source = load(str(tmp_path))
    repeated = load(str(tmp_path))
    assert np.bincount(source.test.labels).tolist() == [2, 1]
    assert source.test.images.tobytes() == repeated.test.images.tobytes()
    both = np.concatenate([source.train.images, source.test.images])
    assert sorted(image.tobytes() for image in both) == sorted(image.tobytes() for image in pixels)
    assert "20% of the images of every class, 3 in all, are held out as the test" in source.selection_note
    assert_load_refused("no part 'validation', only train and test", str(tmp_path), test="validation")
    for path in sorted((tmp_path / "bee").iterdir())[1:]:
        path.unlink()
    assert_load_refused("bee: a class of one image has none to test on", str(tmp_path))


@pytest.mark.parametrize("names", [("Training", "Testing"), ("TRAIN", "test"), ("train", "valid")])
def test_parts_have_other_usual_names(names: tuple[str, str], tmp_path: Path) -> None:
    pixels = class_folders(tmp_path)
    for old, new in zip(("train", "test"), names, strict=True):
        (tmp_path / old).rename(tmp_path / new)
    source = load(str(tmp_path))
    np.testing.assert_array_equal(source.test.images, pixels)
    assert source.selection_note == (
        f"{tmp_path} has no folder test, so the images of valid are the test" * ("valid" in names)
    )


def test_a_folder_of_save_to_disk_is_read_as_the_parquet_files_of_its_parts(tmp_path: Path) -> None:
    """Its files are streams of Arrow, one or several for a part, with the schema that parquet files have."""
    images = [encode_image(pixels) for pixels in make_noise_images(4)]
    wanted = load(str(parquet_set(tmp_path / "parquet", images, [0, 1, 1, 0], classes=["normal", "ill"])))
    for subset, cuts in (("train", (0, 3, 4)), ("test", (0, 2))):
        table = pq.read_table(tmp_path / "parquet" / f"{subset}.parquet")
        (tmp_path / "saved" / subset).mkdir(parents=True)
        for n, (first, end) in enumerate(pairwise(cuts)):
            file = tmp_path / "saved" / subset / f"data-{n:05}-of-{len(cuts) - 1:05}.arrow"
            with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table.slice(first, end - first))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    source = load(str(tmp_path / "saved"))
    assert source.classes == ("normal", "ill")
    for subset in ("train", "test"):
        np.testing.assert_array_equal(source.parts[subset].images, wanted.parts[subset].images)
        np.testing.assert_array_equal(source.parts[subset].labels, wanted.parts[subset].labels)
    (tmp_path / "saved" / "train" / "data-00001-of-00002.arrow").write_bytes(b"ARROW")
    assert_load_refused("not a readable arrow file", str(tmp_path / "saved"))


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (["a.png", "b.png"], r": its 2 images have no label: `halfmoon site label .*` labels a few, or sort them"),
        (["cat/a.png"], r": cat is its only class folder; sort images of another class, too"),
        (["cat/a.png", "dog/a.png", "old/notes.txt"], r"/old: there is no image in it, as in a class folder"),
        (["all/cat/a.png", "all/dog/a.png"], r": class folders lie in all: give the folder .*/all, or move them up"),
        (
            ["b/cat/a.png", "b/dog/a.png", "a/cat/a.png", "a/dog/a.png"],
            r": class folders lie in a and b: give one of these folders, or run them as sites: "
            r"`halfmoon run --sites .*/a .*/b`",
        ),
        (
            ["b/in/cat/a.png", "b/in/dog/a.png", "a/in/cat/a.png", "a/in/dog/a.png"],
            r": class folders lie in a/in and b/in: give one of these .*`halfmoon run --sites .*/a/in .*/b/in`",
        ),
    ],
)
def test_images_that_are_not_sorted_are_refused_with_what_to_do(files: list[str], error: str, tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(good())
    assert_load_refused(error, str(tmp_path))
    assert_load_refused(f"{files[0]} is a file: give the folder that holds the images", str(tmp_path / files[0]))


def test_folders_of_other_programs_are_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert_load_refused("save_to_disk of the library datasets, but has no part train", str(tmp_path))
    (tmp_path / "dataset_dict.json").rename(tmp_path / "labels.csv")
    assert_load_refused(r"site's folder, with labels.csv and no test images: `halfmoon run --data ", str(tmp_path))


def test_unknown_name_or_folder_is_refused(tmp_path: Path) -> None:
    assert_load_refused("did you mean 'cifar10'", "cifar-10")
    assert_load_refused("it has no folder nothing", "nothing", tmp_path)
    assert_load_refused("there is no such folder; --data-dir", "cifar10", tmp_path / "absent")
    assert_load_refused("no data set or folder", "/nowhere/at/all")
    idx_set(tmp_path)
    assert_load_refused(r"images of cifar10 have 3 channel\(s\), but these have 1", "cifar10", tmp_path)


@pytest.mark.parametrize("layout", ["parquet", "folders"])
def test_a_cache_is_used_renewed_and_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    folder = tmp_path / "set"
    cache = tmp_path / "cache"
    if layout == "parquet":
        parquet_set(folder, make_noise_images(2), [0, 1], classes=["a", "b"])
    else:
        class_folders(folder)
    plain = load(str(folder))
    load(str(folder), cache=cache)
    stored = sorted(cache.glob("images-????????????????.npy"))
    assert len(stored) == 2
    assert len(list(cache.iterdir())) == 3 * len(stored)  # pixels, labels, and what is queried at every start
    assert not [path for path in folder.rglob("*") if path.suffix in (".npz", ".part")]
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", lambda *_: pytest.fail("decoded again"))
        repeated = load(str(folder), cache=cache)
    np.testing.assert_array_equal(repeated.train.images, plain.train.images)
    np.testing.assert_array_equal(repeated.test.labels, plain.test.labels)
    assert repeated.classes == plain.classes
    for path in stored:
        path.write_bytes(path.read_bytes()[:100])
    np.testing.assert_array_equal(load(str(folder), cache=cache).train.images, plain.train.images)
    assert all(path.stat().st_size > 100 for path in stored)
    # Two dark images: data sets whose images are all equal are refused.
    changed = [encode_image(np.full((6, 6, 3), value, np.uint8)) for value in (0, 1)]
    if layout == "parquet":
        write_parquet(folder / "train.parquet", changed, [0, 1])
    else:
        for number, path in enumerate(sorted((folder / "train").rglob("*.png"))):
            path.write_bytes(changed[number % 2])
    assert load(str(folder), cache=cache).train.images.max() <= 1


def test_cached_images_writable_by_another_user_are_decoded_anew(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "set"
    cache_folder = tmp_path / "home"
    parquet_set(folder, [good(), encode_image(make_noise_images(1, seed=5)[0])], [0, 1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))
    monkeypatch.setattr(decoded, "MIN_CACHED_BYTES", 1)
    plain = load(str(folder)).train.images.copy()
    cache = cache_folder / "halfmoon" / "images"
    for mode, harm in ((0o700, lambda path: path.chmod(0o666)), (0o777, lambda path: None)):
        for path in cache.glob("images-????????????????.npy"):
            np.save(path, 255 - np.load(path))
            harm(path)
        cache.chmod(mode)
        with pytest.warns(RuntimeWarning, match="can be written by other users: its images are decoded again"):
            np.testing.assert_array_equal(load(str(folder)).train.images, plain)
        assert cache.stat().st_mode & 0o777 == 0o700
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        np.testing.assert_array_equal(load(str(folder)).train.images, plain)


def test_unwritable_cache_is_reported(tmp_path: Path) -> None:
    parquet_set(tmp_path / "set", [good(), good()], [0, 1])
    (tmp_path / "file").write_text("in the way")
    assert_load_refused(
        "decoded images cannot be stored there", str(tmp_path / "set"), cache=tmp_path / "file" / "cache"
    )


def test_large_data_set_is_cached_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home that cannot be written, a set below the limit, and `off` change nothing but the time."""
    folder = tmp_path / "set"
    cache_folder = tmp_path / "home"
    parquet_set(folder, [good(), encode_image(make_noise_images(1, seed=5)[0])], [0, 1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))
    load(str(folder))
    assert not cache_folder.exists()
    monkeypatch.setattr(decoded, "MIN_CACHED_BYTES", 1)
    load(str(folder), cache=Path("off"))
    assert not cache_folder.exists()
    first = load(str(folder))
    assert (cache_folder / "halfmoon" / "images").stat().st_mode & 0o077 == 0
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", lambda *_: pytest.fail("decoded again"))
        np.testing.assert_array_equal(load(str(folder)).train.images, first.train.images)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    np.testing.assert_array_equal(load(str(folder)).train.images, first.train.images)


def test_hub_is_queried_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []
    pixels = make_noise_images(3, 32)

    def load_dataset(repository: str, config: str | None, split: str) -> FakeHubDataset:
        assert config is None
        requests.append((repository, split))
        return FakeHubDataset(pixels, "img", ["x", "y", "z"], label=[2, 0, 1])

    install_fake_hub(monkeypatch, load_dataset)
    source = load("someone/things")
    np.testing.assert_array_equal(source.train.images, pixels)
    assert source.train.labels.tolist() == [2, 0, 1]
    assert source.classes == ("x", "y", "z")
    assert requests == [("someone/things", "train"), ("someone/things", "test")]
    load("someone/things", test="validation")
    assert requests[-1] == ("someone/things", "validation")


def test_rows_of_the_hub_without_a_label_are_unlabeled(monkeypatch: pytest.MonkeyPatch) -> None:
    train = FakeHubDataset(make_noise_images(4), "img", label=[0, 1, None, -1])
    tests = FakeHubDataset(make_noise_images(2, seed=1), "img", label=[0, 1])
    install_fake_hub(monkeypatch, lambda repository, config, split: train if split == "train" else tests)
    assert load("someone/things").train.labels.tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            FakeHubDataset(make_noise_images(1), "img", label=[-2]),
            "someone/things, train, row 0: label -2 is not a whole number",
        ),
        (FakeHubDataset(make_noise_images(1), "img", label=[True]), "row 0: label True"),
        (FakeHubDataset([{"bytes": None, "path": "a.png"}], "img", label=[0]), "row 0: the image has no bytes"),
        (FakeHubDataset([None], "img", label=[0]), "row 0: the image has no bytes"),
        (FakeHubDataset([{"bytes": b"?", "path": None}], "img", label=[0]), "row 0: not a readable image"),
        (FakeHubDataset([None], "img", answer=[0]), "no column label or labels or fine_label.*; it has img, answer"),
    ],
)
def test_a_bad_row_of_the_hub_is_named(monkeypatch, rows, message):
    install_fake_hub(monkeypatch, lambda repository, config, split: rows)
    assert_load_refused(message, "someone/things")


def test_without_library_or_network_the_error_explains_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repository: str, config: str | None, split: str) -> FakeHubDataset:
        raise ConnectionError("no route to host")

    install_fake_hub(monkeypatch, offline)
    assert_load_refused(r"ConnectionError: no route to host.*--data-dir", "fashion_mnist")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert_load_refused(r"'\.\[hub\]'.*--data-dir", "cifar10")


def test_the_real_library_gives_what_the_fake_does(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `hub` is not installed")
    pixels = make_noise_images(4)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": encode_image(x), "path": None} for x in pixels], "label": [0, 1, 1, 0]}, features=features
    )
    monkeypatch.setattr(datasets, "load_dataset", lambda repository, config, split: rows)
    source = load("someone/things")
    np.testing.assert_array_equal(source.train.images, pixels)
    assert (source.train.labels.tolist(), source.classes) == ([0, 1, 1, 0], ("no", "yes"))


def shared(name: str) -> Path:
    if not (SHARED / name).is_dir():
        pytest.skip(f"../shared/data/{name} is not here")
    return SHARED


@pytest.mark.nightly  # the chest X-rays are small enough for the default suite
@pytest.mark.parametrize(
    ("name", "shape", "tolerance"),
    [("fashion_mnist", (60_000, 28, 28, 1), 5e-5), ("cifar10", (50_000, 32, 32, 3), 1e-6)],
)
def test_real_sets_have_the_published_statistics(name: str, shape: tuple[int, ...], tolerance: float) -> None:
    source = load(name, shared(name))
    assert source.train.images.shape == shape
    assert np.bincount(source.train.labels).tolist() == [shape[0] // 10] * 10
    assert np.bincount(source.test.labels).tolist() == [1000] * 10
    np.testing.assert_allclose(channel_statistics(source.train.images), (source.mean, source.std), atol=tolerance)


def test_real_chest_x_rays() -> None:
    source = load("pneumonia_mnist", shared("pneumonia_mnist"))
    assert source.classes == ("normal", "pneumonia")
    assert (len(source.train), len(source.test)) == (4708, 624)
    assert source.train.images.shape[1:] == (28, 28, 1)
    assert len(load(str(SHARED / "pneumonia_mnist"), test="validation").test) == 524


def test_validation_images_are_set_aside_of_every_class_and_never_of_the_test():
    """A fifth of each class of the digits, the same rows every time; the rest is what is trained on."""
    source = load("digits")
    held = hold_out(source, 0.2)
    assert held.validation is not None
    counts = np.bincount(source.train.labels)
    assert np.bincount(held.validation.labels).tolist() == [round(0.2 * count) for count in counts]
    both = np.concatenate([held.train.images, held.validation.images]).reshape(len(source.train), -1)
    whole = source.train.images.reshape(len(source.train), -1)
    assert sorted(map(bytes, both)) == sorted(map(bytes, whole))
    assert held.test is source.test
    assert (hold_out(source, 0.2).validation or source.test).images.tobytes() == held.validation.images.tobytes()
    assert hold_out(source, 0.0) is source


def test_validation_images_are_shrunk_and_padded_like_training_images():
    held = pad_source(shrink(hold_out(load("digits"), 0.2), 2), 6)
    assert {name: subset.images.shape[1:] for name, subset in held.parts.items()} == dict.fromkeys(
        ("train", "test", "validation"), (6, 6, 1)
    )


def test_validation_leaves_every_class_something_to_train_on():
    source = take_share(load("digits"), 0.01)
    with pytest.raises(UserError, match=r"validation_share 0\.6 leaves no training image of class"):
        hold_out(source, 0.6)


def test_the_last_classes_are_hidden_and_not_tested() -> None:
    source = load("digits")
    hidden = hide_last_classes(source, 3)
    assert hidden.classes == source.classes[:7]
    assert len(hidden.train) == len(source.train)
    assert ((hidden.train.labels == -1) == (source.train.labels >= 7)).all()
    assert (len(hidden.test), hidden.test.labels.max()) == (int((source.test.labels < 7).sum()), 6)
    assert hide_last_classes(source, 0) is source
    with pytest.raises(UserError, match="unknown_classes 9 leaves 1 of 10 classes to learn"):
        hide_last_classes(source, 9)
    with pytest.raises(UserError, match="leave unknown_classes out"):
        hide_last_classes(hidden, 1)
