"""Load data sets by name or path, from folders, the Hugging Face hub, or the package itself."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path, PureWindowsPath

import numpy as np

from halfmoon.core.errors import UserError, escape_name, suggest
from halfmoon.data import memory
from halfmoon.data.class_names import describe_near_equal, refuse_near_equal
from halfmoon.data.copies import group_copies
from halfmoon.data.datasets import DATASETS, DatasetInfo
from halfmoon.data.images import UNKNOWN, Images, SkippedImage, Source, channel_statistics
from halfmoon.data.partition.primitives import apportion, draw_labeled, named_generator
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers import binary, class_folders, hub, idx, parquet, tinyimagenet
from halfmoon.data.readers import cache as store
from halfmoon.data.readers.decode import check_skipped, refuse_unused_options
from halfmoon.data.readers.label_table import find_labels_file
from halfmoon.storage import atomic_io

__all__ = ["DATASETS", "DIGITS_DESCRIPTION", "DatasetInfo", "list_datasets", "load", "save"]

HUB_NAME = r"\w[\w.-]*/\w[\w.-]*"
"""A regular expression for the name of a data set on the Hugging Face hub, owner/name."""

NESTED_NOTE = "images are in subfolders of class folders; the class is the first level"

DIGITS_DESCRIPTION = (
    "1,437 + 360 gray images, 8x8, 10 classes (UCI's handwritten digits, embedded); always there, the default"
)


def list_datasets() -> dict[str, str]:
    """List the data sets that can be loaded by name, with a description in one line."""
    return {"digits": DIGITS_DESCRIPTION} | {name: info.about for name, info in DATASETS.items()}


def load(
    name: str,
    data_dir: Path | None = None,
    *,
    cache: Path | None = None,
    test: str = "test",
    mirror: bool | None = None,
    preparation: Preparation = UNCHANGED,
) -> Source:
    """Load a data set into memory.

    Mean and std of a known data set are the published ones if its images are not converted, otherwise those of the
    training pixels.

    Args:
        name: a name of `list_datasets()`, a Hugging Face name `owner/name`, or a folder that contains train*.parquet and
            test*.parquet; train/CLASS/*.png and test/CLASS/*.png; CLASS/*.png only; or the official files of
            Fashion-MNIST or MNIST (idx), CIFAR-10 or CIFAR-100 (binary version), or Tiny ImageNet.
        data_dir: the folder of a known data set, or its parent folder; None to download from the hub.
        cache: a folder for decoded images.
        test: the subset for evaluation (`validation` if a data set has it).
        mirror: True if a mirrored image has the same class; None: False for digits and svhn, True otherwise.
        preparation: the conversion of images while they are decoded.

    Raises:
        UserError: If the name is unknown or a file cannot be read; the message names file and row.

    Examples:
        >>> digits = halfmoon.load_data("digits")
        >>> X, y = digits.train.images, digits.train.labels
    """
    if memory.is_memory_name(name):
        return memory.load_memory(name, preparation)
    info = DATASETS.get(name)
    folder = None if name == "digits" else _find_folder(name, data_dir, info)
    default_mirror = name != "digits" and (info is None or info.mirror)
    official: str | None = None
    if name == "digits":
        if test != "test":
            raise UserError(f"digits has no part {test!r}, only train and test.")
        train, tests, classes = _load_digits()
    elif folder is not None:
        official = _detect_official(folder, name)
        default_mirror = default_mirror and (official is None or DATASETS[official].mirror)
        train, tests, classes = _read_folder(folder, name, official, test, cache, preparation)
    elif info is not None:
        test_part = info.test_part if test == "test" else test
        train, tests, classes = hub.read(info.hub, test_part, info.config, info.gray, preparation)
    elif Path(name).is_file():
        raise UserError(f"{name} is a file: give the folder that holds the images.")
    elif re.fullmatch(HUB_NAME, name):
        train, tests, classes = hub.read(name, test, preparation=preparation)
    else:
        raise describe_unknown(name)
    if classes is None:
        classes = info.classes if info else _number_classes(name, train.labels)
    if info:
        _check_known_dataset(folder or name, name, train, classes, preparation)
    title = name if info else Path(name).name if folder else name
    keeps_class = default_mirror if mirror is None else mirror
    repeated = [name for name, count in Counter(classes).items() if count > 1]
    if repeated:
        raise UserError(f"{name}: two classes are called {repeated[0]!r}; rename one, or give both one number.")
    skipped = (*train.skipped, *tests.skipped)
    check_skipped(skipped, len(train) + len(tests) + len(skipped), preparation)
    present = np.unique(train.labels[train.labels != UNKNOWN])
    if len(present) < 2:
        only = f"of one class, {classes[int(present[0])]!r}" if len(present) else "without a label"
        raise UserError(
            f"{folder or name}: all training images are {only}; a classifier needs images of two or more classes."
        )
    notes = describe_skipped(skipped, len(train) + len(tests))
    if info and not preparation.converts:
        mean, std = info.mean, info.std
    else:
        train, tests = (replace(each, images=preparation.convert(each.images)) for each in (train, tests))
        mean, std = train.spread or channel_statistics(train.images)
    if folder is not None and info is None and official is None:
        train, tests, copies = group_copies(train, tests)
        notes += copies
        if _has_class_folders(folder):
            notes += _describe_nested(folder)
            notes += [f"left out: {note}" for note in class_folders.describe_left_out(folder)]
        elif unused := class_folders.count_images(folder):
            notes.append(f"left out: image files ({unused:,}), because the data set has parquet, Arrow or idx files")
        notes += describe_near_equal(classes)
    return Source(
        title,
        train,
        tests,
        classes,
        keeps_class,
        mean,
        std,
        selection_note=tests.selection_note,
        notes=tuple(notes),
        skipped=skipped,
    )


def check_image_options(name: str, data_dir: Path | None, preparation: Preparation) -> None:
    """Raise UserError if the options `crop` or `window` have no effect on the images of a data set.

    Args:
        name: as for `load`.
        data_dir: as for `load`.
        preparation: the conversion of images.
    """
    if not preparation.crop and preparation.window is None:
        return
    if memory.is_memory_name(name):
        memory.check_crop(name, preparation)
        return
    info = DATASETS.get(name)
    folder = None if name == "digits" else _find_folder(name, data_dir, info)
    if folder is None and info is None and name != "digits":
        return  # images on the hub, whose sizes are not known
    if folder is not None and (shards := parquet.find_shards(folder, "train")):
        refuse_unused_options(parquet.iterate_files(shards), preparation, folder)
        return
    if folder is not None and not has_official_files(folder):
        refuse_unused_options(filter(class_folders.is_image, class_folders.walk_files(folder)), preparation, folder)
        return
    # Published data sets consist of square images of 8 bits.
    option = "crop" if preparation.window is None else "window"
    if option == "window" or preparation.size is None or preparation.size[0] == preparation.size[1]:
        raise UserError(
            f"{name}: {{{option}}} has no effect on its square images of 8 bits; leave it out.", option=option
        )


def describe_skipped(skipped: Sequence[SkippedImage], count: int) -> list[str]:
    """Describe in a sentence the images that were left out, next to `count` readable ones; no sentence without any."""
    if not skipped:
        return []
    names = f"{escape_name(skipped[0].path)} ({skipped[0].reason.removesuffix('; replace or remove it.').removesuffix('.')})"
    more = f" and {len(skipped) - 1:,} more" if len(skipped) > 1 else ""
    images = f"images cannot be read and {'is' if len(skipped) == 1 else 'are'}"
    return [f"{len(skipped):,} of {count + len(skipped):,} {images} left out: {names}{more}"]


def _has_class_folders(folder: Path) -> bool:
    """Check whether a folder is read as class folders, and not as parquet or other files."""
    if has_official_files(folder):
        return False
    return class_folders.find_subset(folder, "train") is not None or class_folders.has_classes(folder)


def _describe_nested(folder: Path) -> list[str]:
    """Describe in a sentence how many images are in subfolders of class folders."""
    train = class_folders.find_subset(folder, "train")
    nested = class_folders.count_nested(class_folders.list_classes(train or folder), train or folder)
    return [f"{nested:,} {NESTED_NOTE}"] if nested else []


def save(
    folder: Path | str, train: Images, test: Images, classes: Sequence[str], validation: Images | None = None
) -> Path:
    """Write images in memory to a folder that `data=FOLDER` reads, and return this folder.

    Args:
        folder: the folder for train.parquet and test.parquet, with the images as PNG.
        train: the training images, uint8 (N, H, W, 1 or 3); label -1 if the label is unknown.
        test: the test images.
        classes: the class names, by label.
        validation: images to select the best round with, for `validation_part=True`.

    Raises:
        UserError: If images and classes disagree, or the folder cannot be written.

    Examples:
        >>> halfmoon.save_data("small", train=digits.train, test=digits.test, classes=digits.classes)
    """
    path = Path(folder)
    names = tuple(classes)
    # The source checks its arguments; mirror, mean and std do not matter here.
    source = Source(path.name, train, test, names, mirror=True, mean=(), std=(), validation=validation)
    try:
        for name, images in source.parts.items():
            labels = [None if label == UNKNOWN else int(label) for label in images.labels]
            rows = list(zip(map(parquet.encode_png, images.images), labels, strict=True))
            parquet.write_parquet(path / f"{name}.parquet", rows, names)
    except OSError as error:
        raise UserError(
            f"{path}: it cannot be written ({atomic_io.error_reason(error)}); choose another folder."
        ) from error
    return path


def _find_folder(name: str, data_dir: Path | None, info: DatasetInfo | None) -> Path | None:
    """Find the folder of a data set.

    Args:
        name: The data set's name, or a path.
        data_dir: The folder in which the user has data sets, if given.
        info: The metadata of a data set that is known by name.

    Returns:
        The folder; None if the data set must be downloaded.

    Raises:
        UserError: If `data_dir` does not exist or does not contain the data set.
    """
    if data_dir is None:
        return Path(name) if info is None and Path(name).is_dir() else None
    if not data_dir.is_dir():
        raise UserError(
            f"{data_dir}: there is no such folder; {{data_dir}} is the folder that contains {name}.", option="data_dir"
        )
    if info:
        folder = data_dir / name if (data_dir / name).is_dir() else data_dir
        # An official archive may have been unpacked into a folder of its own inside.
        if info.folder and (folder / info.folder).is_dir():
            return folder / info.folder
        return folder
    for candidate in (data_dir / name, Path(name)):
        if candidate.is_dir():
            return candidate
    raise UserError(f"{data_dir}: it has no folder {name}; {suggest(name, list_datasets())}")


def _detect_official(folder: Path, name: str) -> str | None:
    """Detect CIFAR-10, CIFAR-100 or Tiny ImageNet by the official files in a folder.

    Args:
        folder: the folder.
        name: what the user calls the data set. The name of a public data set restricts the search to this one.

    Returns:
        The name of the data set; None if the folder has none of the files in which these data sets were published.
    """
    candidates = [name] if name in DATASETS else ["cifar10", "cifar100", "tiny_imagenet"]
    for dataset in candidates:
        if dataset in binary.LAYOUTS and binary.has_files(folder, dataset):
            return dataset
        if dataset == "tiny_imagenet" and tinyimagenet.has_files(folder):
            return dataset
    return None


def _read_folder(
    folder: Path, name: str, official: str | None, test: str, cache: Path | None, preparation: Preparation
) -> tuple[Images, Images, tuple[str, ...] | None]:
    """Read train images, test images and class names (None if unknown) of a folder in any supported format.

    The formats are tried in turn: each is recognized by the names of its files.

    Args:
        folder: The folder.
        name: The name of the data set, which may be a known one.
        official: The known data set of which the folder has the files as they were published; None if it has not.
        test: The name of the test subset, such as "test" or "validation"; some formats have only one test subset.
        cache: The folder for decoded images; None for the default one.
        preparation: The conversion of images.

    Raises:
        UserError: If no format fits, the data are damaged, or the format has no subset `test`.
    """
    info = DATASETS.get(name)
    rgb = info is not None and info.gray  # some images of the data set are gray, and are converted to RGB
    if idx.has_files(folder):
        _require_test_subset(folder, "an idx set", test)
        return idx.read_pair(folder, "train"), idx.read_pair(folder, "t10k"), None
    if files := parquet.find_shards(folder, "train"):
        return _read_parquet(folder, files, info, test, cache, preparation)
    if official in binary.LAYOUTS:
        _require_test_subset(folder, f"the binary version of {official}", test)
        return binary.read(folder, official)
    if official == "tiny_imagenet":
        return tinyimagenet.read(folder, test, cache, preparation)
    if class_folders.find_subset(folder, "train") is not None:
        # Copies in a published data set remain as they are, so that results are comparable.
        return class_folders.read_folders(folder, test, cache, rgb, preparation, group_copies=info is None)
    binary.refuse_pickles(folder, [key for key in binary.PICKLES if name == key or info is None])
    if info:
        raise UserError(
            f"{folder}: {name} was not found; expected {info.files}, or train*.parquet and {info.test_part}*.parquet."
        )
    _refuse_other_formats(folder)
    if class_folders.has_classes(folder):
        _require_test_subset(folder, "a folder of class folders only", test)
        return class_folders.read_folders(folder, test, cache, rgb, preparation)
    raise _describe_missing_data(folder, test)


def has_official_files(folder: Path) -> bool:
    """Check whether a folder holds parquet or Arrow files, or the official files of a known data set."""
    return bool(
        idx.has_files(folder) or parquet.find_shards(folder, "train") or _detect_official(folder, "") is not None
    )


def describe_unknown(name: str) -> UserError:
    """Describe the name of data that is neither a folder nor a data set, in an error."""
    if os.name != "nt" and PureWindowsPath(name).drive:
        return UserError(
            f"{name} is a path of Windows, but this is another system: give its path here (in WSL, the drive C: is /mnt/c)."
        )
    return UserError(f"no data set or folder is called {name!r}; {suggest(name, list_datasets())}")


def refuse_without_data(folder: Path) -> None:
    """Raise UserError, with instructions, for a folder that no reader can read; do nothing for official files."""
    if not has_official_files(folder):
        raise _describe_missing_data(folder, "test")


def _describe_missing_data(folder: Path, test: str) -> UserError:
    """Describe why a folder without official files is no data set; raise UserError for unsorted images."""
    class_folders.refuse_unsorted(folder)
    return UserError(
        f"{folder}: no data set was found; expected train*.parquet and {test}*.parquet, or train/CLASS/*.png and "
        f"{test}/CLASS/*.png, or the official files of MNIST, CIFAR or Tiny ImageNet (docs/data.md names them)."
    )


def _refuse_other_formats(folder: Path) -> None:
    """Raise UserError, with instructions, for two kinds of folders that look like a data set and are none.

    The first has no training images: `save_to_disk` of Hugging Face's library datasets wrote it without a subset train.
    The second is the folder of a federation's site, such as a hospital. It has a table of labels (labels.csv), or a
    subfolder of images without labels, and no test images.
    """
    was_saved_to_disk = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if was_saved_to_disk:
        raise UserError(
            f"{folder} was written by save_to_disk of the library datasets, but has no part train: save a DatasetDict "
            "with train and test, such as dataset.train_test_split(0.2).save_to_disk(FOLDER)."
        )
    unlabeled_folder = class_folders.find_unlabeled(folder)
    labels_file = find_labels_file(folder)
    if unlabeled_folder is not None:
        content = f"images without a label in {unlabeled_folder.name}"
    elif labels_file.is_file():
        content = labels_file.name
    else:
        content = None
    if content is not None:
        raise UserError(
            f"{folder} is a site's folder, with {content} and no test images: `halfmoon run --data {folder}` chooses "
            f"methods and tests itself, `halfmoon run --sites {folder} OTHER --method NAME` runs one on two or more; "
            "for other calls sort labeled images into train/CLASS and test/CLASS."
        )


def _find_test_shards(folder: Path, test: str, info: DatasetInfo | None) -> tuple[list[Path], str]:
    """Find the parquet or Arrow files of the subset `test`, and write a note if they have another name.

    Raises:
        UserError: If there are none.
    """
    tests = parquet.find_shards(folder, test)
    # Some known data sets have another name for their test subset.
    if not tests and info and test == "test":
        tests = parquet.find_shards(folder, info.test_part)
    if tests:
        return tests, ""
    for name in ("validation", "valid", "val") if test == "test" else ():
        tests = parquet.find_shards(folder, name)
        if tests:
            return tests, f"{folder} has no test*.parquet, so the images of {tests[0].name} are the test"
    raise UserError(f"{folder}: there is no {test}*.parquet next to train*.parquet.")


def _read_parquet(
    folder: Path, files: list[Path], info: DatasetInfo | None, test: str, cache: Path | None, preparation: Preparation
) -> tuple[Images, Images, tuple[str, ...] | None]:
    """Read the training files, and the files of the subset `test`, of a folder of parquet or Arrow files.

    Args:
        folder: The folder.
        files: The training files.
        info: The metadata of a data set that is known by name.
        test: The name of the test subset.
        cache: The folder for decoded images; None for the default one.
        preparation: The conversion of images.

    Returns:
        Training images, test images, and class names if the files have them.
    """
    # Some images of a known color data set are gray files.
    convert_to_rgb = info is not None and info.gray
    # Decoded images are cached under the files and this text, which differs where their pixels or labels would differ.
    cache_id = f"{'rgb' if convert_to_rgb else ''}{preparation.cache_id}"
    tests, selection_note = _find_test_shards(folder, test, info)
    text_classes = parquet.read_text_classes(files)
    if text_classes is not None:
        # Names like "cat" and "Cat" are refused, unless the user lists both in classes.txt.
        listed_names = class_folders.read_confirmed_names(folder)
        how_to_confirm = f"name all classes in {folder / class_folders.CLASSES_FILE}, one a line"
        refuse_near_equal(text_classes, f"{files[0]}, column of labels", listed_names, how_to_confirm)
        # A label is stored as the number of its name among the names of the training files, in test files as well.
        cache_id += repr(text_classes)

    def load(paths: list[Path]) -> store.Decoded:
        """Load the decoded images of these files from the cache, or decode and store them."""

        def decode(destination: Path | None) -> store.Decoded:
            return parquet.read_parquet(paths, convert_to_rgb, preparation, destination, text_classes)

        return store.load_or_decode(cache, paths, decode, cache_id)

    train, classes = load(files)
    test_images, _ = load(tests)
    return train, replace(test_images, selection_note=selection_note), classes


def _require_test_subset(folder: Path, what: str, test: str) -> None:
    if test != "test":
        raise UserError(f"{folder}: {what} has no part {test!r}, only train and test.")


def _check_known_dataset(
    location: object, name: str, train: Images, classes: tuple[str, ...], preparation: Preparation
) -> None:
    """Raise UserError if channels or classes show that these images are not the known data set `name`."""
    info = DATASETS[name]
    channels = train.images.shape[3]
    if channels != len(info.mean) and preparation.channels is None:
        raise UserError(
            f"{location}: images of {name} have {len(info.mean)} channel(s), but these have {channels}; check the folder."
        )
    if len(classes) > len(info.classes):
        raise UserError(
            f"{location}: {name} has {len(info.classes)} classes, but {len(classes)} were found; check the folder."
        )


def _number_classes(name: str, labels: np.ndarray) -> tuple[str, ...]:
    """Name classes by their labels; raise UserError if a label between 0 and the largest does not occur."""
    present = np.unique(labels[labels != UNKNOWN])
    gaps = np.flatnonzero(present != np.arange(len(present)))
    if len(gaps):
        raise UserError(
            f"{name}: labels run from 0 to {present[-1]}, but no training image has label {gaps[0]}; "
            "number the classes without gaps."
        )
    return tuple(str(label) for label in present)


def _load_digits() -> tuple[Images, Images, tuple[str, ...]]:
    """Load the 1,797 embedded digits: train images, 360 test images, and class names.

    Pixels are scaled from 0..16 to 0..255. The test images are the same in every run: each class has its share of 360
    (largest remainders), the first rows of a permutation of the class with seed 0.
    """
    embedded = resources.files("halfmoon.data") / "digits.npz"
    with embedded.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        images = np.rint(arrays["images"].astype(np.float64) * 255 / 16).astype(np.uint8)[..., None]
        labels = arrays["labels"].astype(np.int64)
    test_counts = apportion(np.bincount(labels), total=360)
    is_test = draw_labeled(labels, test_counts, named_generator(0, "digits", "test"))
    train = Images(images[~is_test], labels[~is_test])
    tests = Images(images[is_test], labels[is_test])
    return train, tests, tuple(str(digit) for digit in range(10))
