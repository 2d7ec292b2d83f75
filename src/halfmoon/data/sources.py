"""Data sets by name or path: what can be loaded, and where each is looked for."""

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError, suggest
from halfmoon.data.datasets import DATASETS, DatasetInfo
from halfmoon.data.images import UNKNOWN, Images, Source, channel_statistics
from halfmoon.data.partition.primitives import apportion, draw_labeled, named_generator
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers import binary, class_folders, hub, idx, parquet, tinyimagenet
from halfmoon.data.readers import cache as store
from halfmoon.storage import atomic_io

__all__ = ["DATASETS", "DIGITS_DESCRIPTION", "DatasetInfo", "list_datasets", "load", "save"]

DIGITS_DESCRIPTION = (
    "1,437 + 360 gray images, 8x8, 10 classes (UCI's handwritten digits, embedded); always there, the default"
)


def list_datasets() -> dict[str, str]:
    return {"digits": DIGITS_DESCRIPTION} | {name: info.about for name, info in DATASETS.items()}


def load(
    name: str,
    data_dir: Path | None = None,
    *,
    cache: Path | None = None,
    test: str = "test",
    mirror: bool | None = None,
    how: Preparation = UNCHANGED,
) -> Source:
    """Return a data set in memory.

    Mean and std of a known name are the published ones where its images stay as they are, else those of the training
    pixels.

    Args:
        name: a name of `names()`, a Hugging Face name `owner/name`, or a folder. It holds train*.parquet and
            test*.parquet; train/CLASS/*.png and test/CLASS/*.png; CLASS/*.png alone; or the official files of
            Fashion-MNIST or MNIST (idx), CIFAR-10 or CIFAR-100 (binary version), or Tiny ImageNet.
        data_dir: where a known name is read, there or in its folder `name`; without it, on the hub.
        cache: a folder that keeps decoded images.
        test: the part that evaluates (`validation` where a set has it).
        mirror: whether a mirrored image is still of its class; None: False for digits and svhn, True for the rest.
        how: brings images to one size and mode while they are decoded.

    Raises:
        UserError: the name is unknown or a file cannot be read; the message names file and row.
    """
    info = DATASETS.get(name)
    folder = None if name == "digits" else _find_folder(name, data_dir, info)
    mirrors = name != "digits" and (info is None or info.mirror)
    if name == "digits":
        if test != "test":
            raise UserError(f"digits has no part {test!r}, only train and test.")
        train, tests, classes = _load_digits()
    elif folder is not None:
        official = _detect_official(folder, name)
        mirrors = mirrors and (official is None or DATASETS[official].mirror)
        train, tests, classes = _read_folder(folder, name, official, test, cache, how)
    elif info is not None:
        part = info.test_part if test == "test" else test
        train, tests, classes = hub.read(info.hub, part, info.config, info.gray, how)
    elif Path(name).is_file():
        raise UserError(f"{name} is a file: give the folder that holds the images.")
    elif re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        train, tests, classes = hub.read(name, test, how=how)
    else:
        raise UserError(f"no data set or folder is called {name!r}; {suggest(name, list_datasets())}")
    if classes is None:
        classes = info.classes if info else _number_classes(name, train.labels)
    if info:
        _check_known_dataset(folder or name, name, train, classes, how)
    title = name if info else Path(name).name if folder else name
    mirrored = mirrors if mirror is None else mirror
    if info and not how.converts:
        return Source(title, train, tests, classes, mirrored, info.mean, info.std, remark=tests.remark)
    train, tests = (replace(each, images=how.applied(each.images)) for each in (train, tests))
    mean, std = train.spread or channel_statistics(train.images)
    return Source(title, train, tests, classes, mirrored, mean, std, remark=tests.remark)


def save(
    folder: Path | str, train: Images, test: Images, classes: Sequence[str], validation: Images | None = None
) -> Path:
    """Write images in memory as a data set that `data=FOLDER` reads, and return its folder.

    Args:
        folder: where train.parquet and test.parquet are written, with the images as PNG.
        train: the images to train on, uint8 (N, H, W, 1 or 3); label -1 is one that nobody knows.
        test: those to test on.
        classes: their names, by label.
        validation: images that choose the round, with `validation_part=True`.

    Raises:
        UserError: parts and classes disagree, or the folder cannot be written.
    """
    place, names = Path(folder), tuple(classes)
    source = Source(place.name, train, test, names, True, (), (), validation)
    try:
        for name, part in source.parts.items():
            labels = [None if label == UNKNOWN else int(label) for label in part.labels]
            rows = list(zip(map(parquet.encode_png, part.images), labels, strict=True))
            parquet.write_parquet(place / f"{name}.parquet", rows, names)
    except OSError as error:
        raise UserError(
            f"{place}: it cannot be written ({atomic_io.error_reason(error)}); choose another folder."
        ) from error
    return place


def _find_folder(name: str, data_dir: Path | None, info: DatasetInfo | None) -> Path | None:
    if data_dir is None:
        return Path(name) if info is None and Path(name).is_dir() else None
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: there is no such folder; --data-dir is where {name} lies.")
    if info:
        place = data_dir / name if (data_dir / name).is_dir() else data_dir
        inside = info.folder and place / info.folder
        return inside if inside and inside.is_dir() else place
    for place in (data_dir / name, Path(name)):
        if place.is_dir():
            return place
    raise UserError(f"{data_dir}: it has no folder {name}; {suggest(name, list_datasets())}")


def _detect_official(folder: Path, name: str) -> str | None:
    """Return the set whose official files are in the folder; under a known name, that one or none."""
    checks = {
        "cifar10": lambda: binary.has_files(folder, "cifar10"),
        "cifar100": lambda: binary.has_files(folder, "cifar100"),
        "tiny_imagenet": lambda: tinyimagenet.has_files(folder),
    }
    return next((key for key, here in checks.items() if (name == key or name not in DATASETS) and here()), None)


def _read_folder(
    folder: Path, name: str, official: str | None, test: str, cache: Path | None, how: Preparation
) -> tuple[Images, Images, tuple[str, ...] | None]:
    info = DATASETS.get(name)
    rgb = info is not None and info.gray
    if idx.has_files(folder):
        _require_test_part(folder, "an idx set", test)
        return idx.read_pair(folder, "train"), idx.read_pair(folder, "t10k"), None
    if files := parquet.find_shards(folder, "train"):
        return _read_parquet(folder, files, info, test, cache, how)
    if official in binary.LAYOUTS:
        _require_test_part(folder, f"the binary version of {official}", test)
        return binary.read(folder, official)
    if official == "tiny_imagenet":
        return tinyimagenet.read(folder, test, cache, how)
    if class_folders.find_part(folder, "train") is not None:
        return class_folders.read_folders(folder, test, cache, rgb, how)
    binary.refuse_pickles(folder, [key for key in binary.PICKLES if name == key or info is None])
    if info:
        raise UserError(
            f"{folder}: {name} is not here; expected {info.files}, or train*.parquet and {info.test_part}*.parquet."
        )
    _refuse_other_formats(folder)
    if class_folders.has_classes(folder):
        _require_test_part(folder, "a folder of class folders alone", test)
        return class_folders.read_folders(folder, test, cache, rgb, how)
    class_folders.refuse_unsorted(folder)
    raise UserError(
        f"{folder}: no data set is here; expected train*.parquet and {test}*.parquet, or train/CLASS/*.png and "
        f"{test}/CLASS/*.png, or the official files of MNIST, CIFAR or Tiny ImageNet (docs/data.md names them)."
    )


def _refuse_other_formats(folder: Path) -> None:
    """Raise UserError for a folder that another program or another command reads, with the way to it."""
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise UserError(
            f"{folder} was written by save_to_disk of the library datasets, but has no part train: save a DatasetDict "
            "with train and test, such as dataset.train_test_split(0.2).save_to_disk(FOLDER)."
        )
    without = class_folders.find_unlabeled(folder)
    if (folder / "labels.csv").is_file() or without is not None:
        what = "labels.csv" if without is None else f"images without a label in {without.name}"
        raise UserError(
            f"{folder} is a site's folder, with {what} and no test images: `halfmoon run --data {folder}` chooses "
            f"methods and tests itself, `halfmoon run --sites {folder} OTHER --method NAME` plays one on two and more; "
            "for other calls sort labeled images into train/CLASS and test/CLASS."
        )


def _read_parquet(
    folder: Path, files: list[Path], info: DatasetInfo | None, test: str, cache: Path | None, how: Preparation
) -> tuple[Images, Images, tuple[str, ...] | None]:
    rgb = info is not None and info.gray
    form = f"{'rgb' if rgb else ''}{how.form}"
    # A known set may call its test part otherwise, but a file that is called test is meant to be it.
    tests = parquet.find_shards(folder, test)
    if not tests and info and test == "test":
        tests = parquet.find_shards(folder, info.test_part)
    if not tests:
        raise UserError(f"{folder}: there is no {test}*.parquet beside train*.parquet.")
    train, classes = store.load_or_decode(cache, files, lambda into: parquet.read_parquet(files, rgb, how, into), form)
    return (
        train,
        store.load_or_decode(cache, tests, lambda into: parquet.read_parquet(tests, rgb, how, into), form)[0],
        classes,
    )


def _require_test_part(folder: Path, what: str, test: str) -> None:
    if test != "test":
        raise UserError(f"{folder}: {what} has no part {test!r}, only train and test.")


def _check_known_dataset(place: object, name: str, train: Images, classes: tuple[str, ...], how: Preparation) -> None:
    """Raise UserError where channels or classes tell that this is another set than the one that is asked for."""
    info, channels = DATASETS[name], train.images.shape[3]
    if channels != len(info.mean) and how.channels is None:
        raise UserError(
            f"{place}: images of {name} have {len(info.mean)} channel(s), but these have {channels}; check the folder."
        )
    if len(classes) > len(info.classes):
        raise UserError(
            f"{place}: {name} has {len(info.classes)} classes, but there are {len(classes)} here; check the folder."
        )


def _number_classes(name: str, labels: np.ndarray) -> tuple[str, ...]:
    present = np.unique(labels[labels != UNKNOWN])
    gaps = np.flatnonzero(present != np.arange(len(present)))
    if len(gaps):
        raise UserError(
            f"{name}: labels run from 0 to {present[-1]}, but no training image has label {gaps[0]}; "
            "number the classes without gaps."
        )
    return tuple(str(label) for label in present)


def _load_digits() -> tuple[Images, Images, tuple[str, ...]]:
    """Return the embedded 1,797 digits, 0..16 scaled to 0..255, with 360 rows for the test, and the classes.

    The test rows are drawn once and for all: each class gives its share of 360 (largest remainders), the
    first rows of a permutation inside the class with seed 0.
    """
    embedded = resources.files("halfmoon.data") / "digits.npz"
    with embedded.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images = np.rint(arrays["images"].astype(np.float64) * 255 / 16).astype(np.uint8)[..., None]
        labels = arrays["labels"].astype(np.int64)
    test = draw_labeled(labels, apportion(np.bincount(labels), 360), named_generator(0, "digits", "test"))
    train, tests = (Images(images[part], labels[part]) for part in (~test, test))
    return train, tests, tuple(str(digit) for digit in range(10))
