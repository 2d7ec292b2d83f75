"""CIFAR-10 and -100 (binary), CINIC-10 and Tiny ImageNet from small files of the true format, written here.

Pixels are compared with what numpy drew or with what Pillow decodes, never with our own reader.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import (
    FakeHubDataset,
    assert_load_refused,
    encode_image,
    install_fake_hub,
    make_noise_images,
    write_parquet,
)
from PIL import Image

from halfmoon.core.errors import UserError
from halfmoon.data import load
from halfmoon.data.images import channel_statistics
from halfmoon.data.sources import DATASETS

FISH = "n01443537"
FROG = "n01641577"
CROC = "n01698640"


def write_image(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_image(pixels, "JPEG" if path.suffix == ".JPEG" else "PNG"))


def pillow_rgb(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def record(pixels: np.ndarray, *labels: int) -> bytes:
    """Return a record of CIFAR's binary version: label bytes, then the red, the green and the blue plane by rows."""
    return bytes(labels) + b"".join(pixels[..., channel].tobytes() for channel in range(3))


def cifar10(folder: Path, *, meta: bool = True) -> np.ndarray:
    """Write two images for each of six files, labels counting up; return the twelve in the order of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels = make_noise_images(12, 32)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pair = range(2 * number, 2 * number + 2)
        (folder / f"{name}.bin").write_bytes(b"".join(record(pixels[i], i % 10) for i in pair))
    if meta:
        (folder / "batches.meta.txt").write_text("\n".join(DATASETS["cifar10"].classes) + "\n\n")
    return pixels


def cifar100(folder: Path) -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = make_noise_images(5, 32)
    (folder / "train.bin").write_bytes(b"".join(record(pixels[i], 19 - i, 33 * i) for i in range(4)))
    (folder / "test.bin").write_bytes(record(pixels[4], 7, 42))
    (folder / "fine_label_names.txt").write_text("\n".join(DATASETS["cifar100"].classes) + "\n")
    return pixels


def tiny(folder: Path, *, wnids: bool = True, has_words: bool = True) -> Path:
    """Write Tiny ImageNet with three classes: two training JPEGs a class (one of them gray) and four test JPEGs."""
    for label, wnid in enumerate((FISH, FROG, CROC)):
        for i in range(2):
            pixels = make_noise_images(1, 64, 1 if (label, i) == (0, 0) else 3, seed=10 * label + i)[0]
            write_image(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", pixels)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t10\t63\t58\n")
    for i, channels in enumerate((3, 1, 3, 3)):
        write_image(folder / "val" / "images" / f"val_{i}.JPEG", make_noise_images(1, 64, channels, seed=100 + i)[0])
    lines = [f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n" for i, wnid in enumerate((CROC, FISH, CROC, FROG))]
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    write_image(folder / "test" / "images" / "test_0.JPEG", make_noise_images(1, 64)[0])
    if wnids:
        (folder / "wnids.txt").write_text(f"{CROC}\n{FISH}\n{FROG}\n")  # the real one is not sorted either
    if has_words:
        (folder / "words.txt").write_text(
            f"n00001740\tentity\n{FISH}\tgoldfish, Carassius auratus\n{FROG}\tbullfrog, Rana catesbeiana\n"
        )
    return folder


def test_sizes_of_known_sets() -> None:
    """The counts of the sets' own pages: CIFAR 50,000 + 10,000, SVHN 73,257 + 26,032, CINIC-10 a third of 270,000
    each, Fashion-MNIST 60,000 + 10,000, Tiny ImageNet 200 classes of 500 and 50."""
    assert {name: (known.train, known.test, known.shape, len(known.classes)) for name, known in DATASETS.items()} == {
        "cifar10": (50_000, 10_000, (32, 32, 3), 10),
        "cifar100": (50_000, 10_000, (32, 32, 3), 100),
        "svhn": (73_257, 26_032, (32, 32, 3), 10),
        "cinic10": (90_000, 90_000, (32, 32, 3), 10),
        "fashion_mnist": (60_000, 10_000, (28, 28, 1), 10),
        "tiny_imagenet": (100_000, 10_000, (64, 64, 3), 200),
    }
    for known in DATASETS.values():
        assert len(known.mean) == len(known.std) == known.shape[2]
        assert len(set(known.classes)) == len(known.classes)
    assert [name for name, known in DATASETS.items() if not known.mirror] == ["svhn"]
    assert DATASETS["cifar100"].classes[26] == "crab"  # the hub's own list says "cra"
    for name in ("cifar100", "tiny_imagenet"):  # so class folders have the official order
        assert list(DATASETS[name].classes) == sorted(DATASETS[name].classes)


@pytest.mark.parametrize("subfolder", ["", "cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_cifar10_binary(tmp_path: Path, subfolder: str) -> None:
    pixels = cifar10(tmp_path / subfolder, meta=subfolder != "")
    source = load("cifar10", tmp_path)
    np.testing.assert_array_equal(source.train.images, pixels[:10])
    np.testing.assert_array_equal(source.test.images, pixels[10:])
    assert source.train.labels.tolist() == list(range(10))
    assert source.test.labels.tolist() == [0, 1]
    assert source.classes == DATASETS["cifar10"].classes
    assert (source.name, source.mirror, source.mean) == ("cifar10", True, DATASETS["cifar10"].mean)


@pytest.mark.parametrize("subfolder", ["cifar100", "cifar-100-binary"])
def test_cifar100_binary_has_fine_labels(tmp_path: Path, subfolder: str) -> None:
    pixels = cifar100(tmp_path / subfolder)
    cifar10(tmp_path / "cifar-10-batches-bin")  # one folder may hold several archives
    source = load("cifar100", tmp_path)
    np.testing.assert_array_equal(source.train.images, pixels[:4])
    assert source.train.labels.tolist() == [0, 33, 66, 99]
    assert source.test.labels.tolist() == [42]
    assert (source.classes[0], source.classes[99]) == ("apple", "worm")


def test_a_folder_by_its_path_is_known_by_its_files(tmp_path: Path) -> None:
    pixels = cifar100(tmp_path)
    source = load(str(tmp_path))
    np.testing.assert_array_equal(source.test.images, pixels[4:])
    assert (source.name, len(source.classes)) == (tmp_path.name, 100)
    assert (source.mean, source.std) == channel_statistics(pixels[:4])


def test_names_are_those_of_the_names_file(tmp_path: Path) -> None:
    cifar10(tmp_path)
    names = [f"kind {i}" for i in range(10)]
    (tmp_path / "batches.meta.txt").write_text("\n".join(names))
    assert load("cifar10", tmp_path).classes == tuple(names)
    (tmp_path / "batches.meta.txt").write_text("\n".join([*names[:8], names[0]]))
    assert_load_refused(r"batches.meta.txt: it has 8 different class names, but cifar10 has 10", "cifar10", tmp_path)


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        ("cifar10", "data_batch_3.bin", lambda x: x[:-1], r"6145 bytes are no whole .* of 3073 bytes \(1 label byte,"),
        ("cifar10", "test_batch.bin", lambda x: x + b"\0", r"6147 bytes are no whole number of records"),
        ("cifar10", "data_batch_1.bin", lambda x: b"", r"0 bytes are no whole number of records"),
        ("cifar10", "test_batch.bin", lambda x: x[:3073] + b"\x0a" + x[3074:], r"record 1: label byte 1 is 10, but"),
        ("cifar100", "train.bin", lambda x: x[:5000], r"5000 bytes are no whole .* of 3074 bytes \(2 label bytes,"),
        ("cifar100", "train.bin", lambda x: b"\x14" + x[1:], r"record 0: label byte 1 is 20, but there are 20"),
        ("cifar100", "train.bin", lambda x: x[:6149] + b"\x64" + x[6150:], r"record 2: label byte 2 is 100, but"),
    ],
)
def test_a_damaged_binary_file_is_named(tmp_path, name, file, change, message):
    (cifar10 if name == "cifar10" else cifar100)(tmp_path)
    (tmp_path / file).write_bytes(change((tmp_path / file).read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        load(name, tmp_path)
    assert str(caught.value).startswith(str(tmp_path / file))


def test_a_missing_binary_file_is_named(tmp_path: Path) -> None:
    cifar10(tmp_path / "ten")
    (tmp_path / "ten" / "data_batch_4.bin").unlink()
    assert_load_refused(r"data_batch_4.bin is missing; .* data_batch_5.bin and test_batch.bin", str(tmp_path / "ten"))
    cifar100(tmp_path / "hundred")
    (tmp_path / "hundred" / "test.bin").unlink()
    assert_load_refused(r"hundred/test.bin is missing; .* train.bin and test.bin", "hundred", tmp_path)
    cifar100(tmp_path / "hundred")
    assert_load_refused(r"binary version of cifar100 has no part 'validation'", "hundred", tmp_path, test="validation")


@pytest.mark.parametrize("name", ["cifar10", "cifar100", None])
@pytest.mark.parametrize("inside", [True, False])
def test_pickles_are_refused_unopened(tmp_path: Path, name: str | None, inside: bool) -> None:
    """The files would write a marker when they are unpickled; it must not appear."""
    marker = tmp_path / "opened"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (marker,))

    hundred = name == "cifar100"
    subfolder = tmp_path / ("cifar-100-python" if hundred else "cifar-10-batches-py")
    subfolder.mkdir()
    for file in ("train", "test", "meta") if hundred else ("data_batch_1", "test_batch", "batches.meta"):
        (subfolder / file).write_bytes(pickle.dumps(Trap()))
    wanted = "train.bin and test.bin" if hundred else "data_batch_1.bin to data_batch_5.bin"
    with pytest.raises(UserError, match=rf"pickle can run any program .* binary version \({wanted}.* or parquet"):
        load(name, tmp_path if inside else subfolder) if name else load(str(tmp_path if inside else subfolder))
    assert not marker.exists()


def test_one_set_is_not_taken_for_another(tmp_path: Path) -> None:
    cifar100(tmp_path)
    assert_load_refused(r"cifar10 was not found; expected data_batch_1.bin to data_batch_5.bin", "cifar10", tmp_path)
    for subset in ("train", "test"):
        for label in range(11):
            write_image(tmp_path / "cinic10" / subset / f"c{label:02}" / "0.png", make_noise_images(1, 32)[0])
    assert_load_refused(r"cinic10 has 10 classes, but 11 were found", "cinic10", tmp_path)


def test_cinic10_folders(tmp_path: Path) -> None:
    """The names of its files begin with cifar10- or with a WordNet id, so sorted CIFAR's images come first; a gray
    one is made RGB, and the part `valid` is not read (here it could not be)."""
    names = ("n02691156_10.png", "cifar10-train-7.png", "cifar10-train-10.png")
    pixels = {
        (label, name): make_noise_images(1, 32, seed=10 * label + i)[0]
        for label in range(10)
        for i, name in enumerate(names)
    }
    pixels[3, names[0]] = pixels[3, names[0]][..., :1]
    for (label, name), image in pixels.items():
        for subset in ("train", "test"):
            write_image(tmp_path / subset / DATASETS["cinic10"].classes[label] / name, image)
    (tmp_path / "valid" / "airplane").mkdir(parents=True)
    (tmp_path / "valid" / "airplane" / "broken.png").write_bytes(b"no image")
    source = load("cinic10", tmp_path)
    wanted = [np.broadcast_to(pixels[label, name], (32, 32, 3)) for label in range(10) for name in sorted(names)]
    assert sorted(names)[2] == names[0]
    np.testing.assert_array_equal(source.train.images, wanted)
    assert source.train.labels.tolist() == [label for label in range(10) for _ in names]
    assert source.classes == DATASETS["cinic10"].classes
    assert_load_refused(r"class folder automobile is in train but not in valid", "cinic10", tmp_path, test="valid")


@pytest.mark.parametrize("subfolder", ["", "tiny_imagenet", "tiny-imagenet-200"])
def test_tiny_imagenet(tmp_path: Path, subfolder: str) -> None:
    folder = tiny(tmp_path / subfolder)
    source = load("tiny_imagenet", tmp_path)
    train = [folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG" for wnid in (FISH, FROG, CROC) for i in range(2)]
    np.testing.assert_array_equal(source.train.images, [pillow_rgb(path) for path in train])
    held = [pillow_rgb(folder / "val" / "images" / f"val_{i}.JPEG") for i in range(4)]
    np.testing.assert_array_equal(source.test.images, held)
    assert Image.open(train[0]).mode == "L"  # or the test shows nothing about gray images
    assert (source.train.images[0] == source.train.images[0][..., :1]).all()
    assert source.train.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert source.test.labels.tolist() == [2, 0, 2, 1]
    assert source.classes == (f"{FISH} goldfish", f"{FROG} bullfrog", CROC)
    assert source.mirror
    np.testing.assert_array_equal(load(str(folder), test="val").test.images, held)


def test_tiny_imagenet_images_are_sorted_by_name(tmp_path: Path) -> None:
    """val_10 comes before val_2, for any order of the annotations."""
    folder = tiny(tmp_path)
    write_image(folder / "val" / "images" / "val_10.JPEG", make_noise_images(1, 64, seed=7)[0])
    annotate(folder, lambda lines: [*lines, f"val_10.JPEG\t{FROG}\t0\t0\t1\t1\n"])
    source = load("tiny_imagenet", tmp_path)
    assert source.test.labels.tolist() == [2, 0, 1, 2, 1]
    np.testing.assert_array_equal(source.test.images[2], pillow_rgb(folder / "val" / "images" / "val_10.JPEG"))


@pytest.mark.parametrize("inside", ["", "images"])
@pytest.mark.parametrize("texts", [True, False])
def test_tiny_imagenet_in_class_folders(tmp_path: Path, inside: str, texts: bool) -> None:
    folder = tiny(tmp_path, wnids=texts, has_words=False)
    moved = {}
    for i, wnid in enumerate((CROC, FISH, CROC, FROG)):
        moved[wnid, i] = folder / "val" / wnid / inside / f"val_{i}.JPEG"
        moved[wnid, i].parent.mkdir(parents=True, exist_ok=True)
        (folder / "val" / "images" / f"val_{i}.JPEG").rename(moved[wnid, i])
    (folder / "val" / "images").rmdir()
    if not texts:
        (folder / "val" / "val_annotations.txt").unlink()
    source = load("tiny_imagenet", tmp_path)
    assert source.test.labels.tolist() == [0, 1, 2, 2]
    np.testing.assert_array_equal(source.test.images, [pillow_rgb(moved[key]) for key in sorted(moved)])
    assert source.classes == (FISH, FROG, CROC)


NOTES = "val/val_annotations.txt"


def annotate(folder: Path, change: Callable[[list[str]], list[str]]) -> None:
    path = folder / NOTES
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (lambda f: annotate(f, lambda x: x[:2] + x[3:]), NOTES, "no line for val_2.JPEG of val/"),
        (lambda f: annotate(f, lambda x: [*x, "val_9.JPEG\t" + FISH]), NOTES, "names val_9.JPEG,"),
        (
            lambda f: annotate(f, lambda x: [x[0].replace(CROC, "n99999999"), *x[1:]]),
            NOTES,
            "line 1: val_0.JPEG is of class n99999999, which is no folder of train",
        ),
        (lambda f: annotate(f, lambda x: [*x, x[1]]), NOTES, "line 5: val_1.JPEG has a line befo"),
        (lambda f: annotate(f, lambda x: [*x, "val_1.JPEG\n"]), NOTES, "line 5: expected an image"),
        (lambda f: (f / NOTES).unlink(), NOTES, "is missing; it says"),
        (lambda f: (f / NOTES).write_bytes(b"\xff"), NOTES, "cannot be re"),
        (lambda f: (f / "wnids.txt").write_text(f"{FISH}\n{FROG}\n"), "wnids.txt", f"it does not list {CROC}"),
        (
            lambda f: (f / "wnids.txt").write_text(f"{FISH}\n{FROG}\n{CROC}\nn12267677\n"),
            "wnids.txt",
            "it lists n12267677, but there is no folder train/n12267677",
        ),
        (
            lambda f: (f / "val" / "images" / "val_3.JPEG").write_bytes(b"?"),
            "val/images/val_3.JPEG",
            "not a readable image",
        ),
        (
            lambda f: write_image(f / "train" / FROG / "images" / "x.JPEG", make_noise_images(1, 63)[0]),
            f"train/{FROG}/images/x.JPEG",
            "the image is 63x63 RGB, but",
        ),
    ],
)
def test_a_damaged_tiny_imagenet_is_named(tmp_path, damage, file, message):
    damage(tiny(tmp_path))
    with pytest.raises(UserError, match=message) as caught:
        load("tiny_imagenet", tmp_path)
    assert str(caught.value).startswith(str(tmp_path / file))
    assert "\n" not in str(caught.value)


def test_tiny_imagenet_without_test_labels_is_reported(tmp_path: Path) -> None:
    folder = tiny(tmp_path)
    for path in (folder / "val" / "images").iterdir():
        path.unlink()
    (folder / "val" / "images").rmdir()
    assert_load_refused(r"val: it has no class folders", "tiny_imagenet", tmp_path)
    assert_load_refused(r"no part 'validation', only train and val", "tiny_imagenet", tmp_path, test="validation")


def test_stored_images_get_the_labels_of_the_annotations(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "tiny_imagenet")
    load("tiny_imagenet", tmp_path, cache=tmp_path / "cache")
    annotate(folder, lambda lines: [lines[0].replace(CROC, FISH), *lines[1:]])
    repeated = load("tiny_imagenet", tmp_path, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("images-????????????????.npy"))) == 2
    assert repeated.test.labels.tolist() == [0, 0, 2, 1]
    np.testing.assert_array_equal(repeated.test.images[1], pillow_rgb(folder / "val" / "images" / "val_1.JPEG"))


def test_cifar100_parquet_prefers_the_fine_label(tmp_path: Path) -> None:
    pixels = make_noise_images(3, 32)
    for subset in ("train", "test"):
        path = tmp_path / "cifar100" / "cifar100" / f"{subset}-00000-of-00001.parquet"
        write_parquet(path, pixels, [49, 99, 0], image="img", label="fine_label", coarse_label=[3, 2, 1])
    source = load("cifar100", tmp_path)
    np.testing.assert_array_equal(source.train.images, pixels)
    assert source.train.labels.tolist() == [49, 99, 0]
    assert source.classes == DATASETS["cifar100"].classes


@pytest.mark.parametrize(
    ("name", "folder", "held"),
    [
        ("svhn", "cropped_digits", "test-00000-of-00001"),
        ("cinic10", "data", "test-00000-of-00001"),
        ("tiny_imagenet", "data", "valid-00000-of-00001-70d52db3c749a935"),
        ("tiny_imagenet", "", "test"),
    ],
)
def test_parquet_files_of_the_hub_repositories(tmp_path: Path, name: str, folder: str, held: str) -> None:
    """Gray images are made RGB where a set has them; valid of Tiny ImageNet and cropped_digits of SVHN are found."""
    size = DATASETS[name].shape[0]
    pixels = [make_noise_images(1, size, 3, seed=i)[0] for i in range(3)]
    if DATASETS[name].gray:
        pixels[1] = pixels[1][..., :1]
    write_parquet(tmp_path / folder / "train-00000-of-00001.parquet", pixels, [1, 0, 2])
    write_parquet(tmp_path / folder / f"{held}.parquet", pixels[:2], [5, 4])
    source = load(name, tmp_path)
    shape = DATASETS[name].shape
    np.testing.assert_array_equal(source.train.images, [np.broadcast_to(image, shape) for image in pixels])
    assert source.test.labels.tolist() == [5, 4]
    assert source.classes == DATASETS[name].classes
    assert source.mirror == DATASETS[name].mirror


def test_cache_distinguishes_gray_from_gray_converted_to_color(tmp_path: Path) -> None:
    for subset in ("train", "valid"):
        write_parquet(tmp_path / f"{subset}.parquet", make_noise_images(2, 64, 1), [0, 1])
    cache = tmp_path / "cache"
    assert load(str(tmp_path), test="valid", cache=cache).train.images.shape == (2, 64, 64, 1)
    for _ in range(2):
        assert load("tiny_imagenet", tmp_path, cache=cache).train.images.shape == (2, 64, 64, 3)


@pytest.mark.parametrize(
    ("name", "image", "repository", "config", "held"),
    [
        ("cifar10", "img", "uoft-cs/cifar10", None, "test"),
        ("cifar100", "img", "uoft-cs/cifar100", None, "test"),
        ("svhn", "image", "ufldl-stanford/svhn", "cropped_digits", "test"),
        ("cinic10", "image", "flwrlabs/cinic10", None, "test"),
        ("tiny_imagenet", "image", "zh-plus/tiny-imagenet", None, "valid"),
    ],
)
def test_names_resolve_to_hub_repositories(monkeypatch, name, image, repository, config, held):
    """Repository, configuration and parts as the hub has them; CIFAR-100 has a coarse label too, which is not taken."""
    requests = []
    labels = {"coarse_label": [0, 1], "fine_label": [49, 4]} if name == "cifar100" else {"label": [9, 4]}
    size = DATASETS[name].shape[0]
    second = make_noise_images(1, size, 1 if DATASETS[name].gray else 3, seed=1)[0]

    def load_dataset(path: str, config: str | None, split: str) -> FakeHubDataset:
        requests.append((path, config, split))
        return FakeHubDataset([make_noise_images(1, size)[0], second], image, **labels)

    install_fake_hub(monkeypatch, load_dataset)
    source = load(name)
    assert requests == [(repository, config, "train"), (repository, config, held)]
    np.testing.assert_array_equal(source.train.images[1], np.broadcast_to(second, DATASETS[name].shape))
    assert source.test.labels.tolist()[1] == 4
    assert source.test.labels.tolist()[0] == (49 if name == "cifar100" else 9)
    assert source.classes == DATASETS[name].classes
    load(name, test="validation")
    assert requests[-1] == (repository, config, "validation")
