"""Read Tiny ImageNet in the layout of its archive tiny-imagenet-200 (Stanford CS231n): 200 classes of ImageNet, 64x64.

train/WNID/images/*.JPEG are the training images, val/images/*.JPEG with val/val_annotations.txt the test images
(those of `test` have no labels); wnids.txt lists the classes, words.txt explains WordNet ids. Scripts often
move the images of val into class folders: val/WNID/*.JPEG is read as well.
"""

import re
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.images import Images
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers import class_folders

WNID = re.compile(r"n\d{8}")
ANNOTATIONS = "val_annotations.txt"


def has_files(folder: Path) -> bool:
    """Check whether a folder has the official files."""
    if (folder / "wnids.txt").is_file() or (folder / "val" / ANNOTATIONS).is_file():
        return True
    return (
        (folder / "val").is_dir() and _has_class_folders(folder / "train") and not _has_class_folders(folder / "test")
    )


def read(
    folder: Path, test: str, cache: Path | None, preparation: Preparation = UNCHANGED
) -> tuple[Images, Images, tuple[str, ...]]:
    """Read the folder of Tiny ImageNet. Its validation images are the test, as its test images have no labels.

    Classes are numbered in the order of their WordNet ids, and images are sorted by name.

    Args:
        folder: The folder, with train and val.
        test: The name of the test subset: `test` or `val`, which are the same.
        cache: The folder for decoded images; None for the default one.
        preparation: The conversion of images.

    Returns:
        Training images, test images (both RGB), and class names such as `n01443537 goldfish`.

    Raises:
        UserError: If folders, wnids.txt and val_annotations.txt disagree, one is missing, or an image cannot be read.
    """
    if test not in ("test", "val"):
        raise UserError(f"{folder}: Tiny ImageNet has no part {test!r}, only train and val, which is the test.")
    train = class_folders.list_classes(folder / "train")
    _check_ids(folder / "wnids.txt", train)
    return (
        class_folders.read_classes(train, cache, rgb=True, preparation=preparation),
        _read_validation(folder, train, cache, preparation),
        _read_class_names(folder / "words.txt", tuple(train)),
    )


def _has_class_folders(subset: Path) -> bool:
    return subset.is_dir() and any(WNID.fullmatch(path.name) and path.is_dir() for path in subset.iterdir())


def _check_ids(path: Path, train: dict[str, list[Path]]) -> None:
    """Raise UserError if the list of WordNet ids (wnids.txt, if it exists) differs from the folders in `train`."""
    if not path.is_file():
        return
    listed = set(_read_lines(path))
    for name in sorted(listed ^ train.keys()):
        if name in listed:
            raise UserError(f"{path}: it lists {name}, but there is no folder train/{name}; unpack the archive again.")
        raise UserError(f"{path}: it does not list {name}, which is a folder of train; unpack the archive again.")


def _read_validation(
    folder: Path, train: dict[str, list[Path]], cache: Path | None, preparation: Preparation
) -> Images:
    """Read the images of `val`, labeled by the annotations, or by class folders if val/images does not exist."""
    images = class_folders.list_images(folder / "val" / "images")
    if not images:
        paths = class_folders.list_classes(folder / "val")
        class_folders.check_same_classes(folder, train, paths, "val")
        return class_folders.read_classes(paths, cache, rgb=True, preparation=preparation)
    path = folder / "val" / ANNOTATIONS
    if not path.is_file():
        raise UserError(f"{path} is missing; it says which class each image of val/images has.")
    label_of = _read_annotations(path, list(train))
    names = {image.name for image in images}
    missing = sorted(label_of.keys() - names)
    if missing:
        raise UserError(f"{path}: it names {missing[0]}, which is not in val/images; unpack the archive again.")
    extra = sorted(names - label_of.keys())
    if extra:
        raise UserError(f"{path}: it has no line for {extra[0]} of val/images; unpack the archive again.")
    labels = np.array([label_of[image.name] for image in images], np.int64)
    return class_folders.read_images(images, labels, cache, rgb=True, preparation=preparation)


def _read_annotations(path: Path, wnids: list[str]) -> dict[str, int]:
    """Read the labels of the validation images.

    Args:
        path: A file with a line for each image: its name, its class's WordNet id and a bounding box, separated by tabs.
        wnids: The WordNet ids of the classes, by label.

    Returns:
        The label of each image, by the image's file name.

    Raises:
        UserError: If a line is incomplete or repeated, or its class is unknown.
    """
    label_of_wnid = {wnid: label for label, wnid in enumerate(wnids)}
    labels: dict[str, int] = {}
    for row, line in enumerate(_read_lines(path), 1):
        name, wnid, *_ = [*line.split("\t"), "", ""]  # the empty strings stand for missing columns
        if not name or not wnid:
            raise UserError(f"{path}, line {row}: expected an image and a class apart by a tab, but it is {line!r}.")
        if wnid not in label_of_wnid:
            raise UserError(f"{path}, line {row}: {name} is of class {wnid}, which is no folder of train.")
        if name in labels:
            raise UserError(f"{path}, line {row}: {name} has a line before; an image has one class.")
        labels[name] = label_of_wnid[wnid]
    return labels


def _read_class_names(path: Path, wnids: tuple[str, ...]) -> tuple[str, ...]:
    """Return each id with the first of its words (`goldfish` of `goldfish, Carassius auratus`), if they are there."""
    if not path.is_file():
        return wnids
    words = dict(line.split("\t", 1) for line in _read_lines(path) if "\t" in line)
    # Two ids may share a word (crane is a bird and a machine), so the id remains.
    return tuple(f"{wnid} {words[wnid].split(',')[0].strip()}" if wnid in words else wnid for wnid in wnids)


def _read_lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the file cannot be read ({error}); unpack the archive again.") from error
