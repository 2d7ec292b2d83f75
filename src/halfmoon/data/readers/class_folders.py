"""Class folders: train/CLASS/*.png and test/CLASS/*.png; the images of a class may also lie in CLASS/images."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.data.groups import NO_GROUP_ON_BOTH_SIDES, find_groups
from halfmoon.data.images import Images
from halfmoon.data.partition.primitives import GroupHoldout, named_generator
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers import cache as store
from halfmoon.data.readers.decode import decode_all

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".tif", ".tiff", *dicom.SUFFIXES)
PART_NAMES = (("train", "training"), ("test", "testing"), ("validation", "valid", "val"))
"""The parts of a data set by the names, in lower case, that their folders have."""

HELD_OUT_SHARE = 0.2
"""The share of every class that is the test where no folder is."""

UNLABELED_NAMES = ("unlabeled", "unlabelled")
"""Names, in lower case, of a folder whose images have no label."""

GROUPS_HINT = "where images share a patient or an object, make folders train and test yourself"


def read_folders(
    folder: Path, test: str, cache: Path | None, rgb: bool = False, how: Preparation = UNCHANGED
) -> tuple[Images, Images, tuple[str, ...]]:
    """Return train and test images and the class names, sorted, of a folder of class folders.

    Without a test part, the validation part is the test. Without any parts, `HELD_OUT_SHARE` of the images of every
    class are held out, the same ones in every run. The test images' `remark` states either. With `rgb`, gray images are
    made RGB. Raise UserError where a part or a class is missing or empty, where train and test differ in classes, or
    where an image cannot be read.
    """
    remark = ""
    if (place := find_part(folder, "train")) is not None:
        refuse_unlabeled(folder, place)
        inside = find_part(folder, test)
        if inside is None and test == "test" and (inside := find_part(folder, "validation")) is not None:
            remark = f"{folder} has no folder test, so the images of {inside.name} are the test"
        train, test_paths = list_classes(place), list_classes(inside or folder / test)
        check_same_classes(folder, train, test_paths, test)
    else:
        train, test_paths, grouped = _hold_out(list_classes(folder), how.group_pattern)
        count = sum(map(len, test_paths.values()))
        remark = (
            f"{folder} has no folder test, so {HELD_OUT_SHARE:.0%} of the images of every class, {count:,} in all, "
            f"are held out as the test; {NO_GROUP_ON_BOTH_SIDES if grouped else GROUPS_HINT}"
        )
    tests = replace(read_classes(test_paths, cache, rgb, how), remark=remark)
    return read_classes(train, cache, rgb, how), tests, tuple(train)


def find_part(folder: Path, part: str) -> Path | None:
    """Return the folder of a part, which may have another usual name (`Training`, `valid`); None where there is none.

    A folder of the very name wins.
    """
    if (folder / part).is_dir():
        return folder / part
    names = next((names for names in PART_NAMES if part in names), (part,))
    folders = {each.name.lower(): each for each in sorted(folder.iterdir()) if each.is_dir()}
    return next((folders[name] for name in names if name in folders), None)


def find_unlabeled(folder: Path) -> Path | None:
    """Return the folder of images without a label beside class folders; None where there is none, or a folder train."""
    return None if find_part(folder, "train") else _find_unlabeled_folder(folder)


def refuse_unlabeled(folder: Path, train: Path) -> None:
    """Raise UserError where images without a label lie in or beside the folder `train`, whose images all have one."""
    if (without := _find_unlabeled_folder(folder) or _find_unlabeled_folder(train)) is not None:
        raise UserError(
            f"{without}: with a folder {train.name}, images without a label need a labels.csv in {folder} that names "
            "the labeled ones (path,label)."
        )


def _find_unlabeled_folder(folder: Path) -> Path | None:
    return next(
        (each for each in sorted(folder.iterdir()) if each.name.lower() in UNLABELED_NAMES and each.is_dir()), None
    )


def has_classes(folder: Path) -> bool:
    """Return whether a folder has a training part, or else class folders of images."""
    if find_part(folder, "train") is not None:
        return True
    classes = _list_folders(folder)
    return len(classes) > 1 and all(map(_list_class_images, classes))


def refuse_unsorted(folder: Path) -> None:
    """Raise UserError for images that no two class folders hold, with what to do."""
    classes = _list_folders(folder)
    empty = next((each for each in classes if not _list_class_images(each)), None)
    if len(classes) > 1 and empty is not None and any(map(_list_class_images, classes)):
        raise UserError(f"{empty}: there is no image in it, as in a class folder; fill or remove it.")
    if len(classes) == 1 and empty is None:
        raise UserError(f"{folder}: {classes[0].name} is its only class folder; sort images of another class, too.")
    inner = [each for each in classes if has_classes(each)]
    if len(inner) > 1:
        raise UserError(
            f"{folder}: class folders lie in {inner[0].name} and {inner[1].name}: give one of these folders, or play "
            f"them as sites: `halfmoon run --sites {shlex.join(map(str, inner))}`."
        )
    if inner:
        raise UserError(f"{folder}: class folders lie in {inner[0].name}: give the folder {inner[0]}, or move them up.")
    if loose := list_images(folder):
        raise UserError(
            f"{folder}: its {len(loose):,} images have no label: `halfmoon site label {folder}` labels a few, or sort "
            "them into a folder for each class."
        )


def _list_folders(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))


def _list_class_images(folder: Path) -> list[Path]:
    return list_images(folder) or list_images(folder / "images")


def _hold_out(
    classes: Mapping[str, Sequence[Path]], pattern: str | None
) -> tuple[dict[str, list[Path]], dict[str, list[Path]], bool]:
    """Return the files of every class in two parts, to train on and held out, and whether groups tell them apart."""
    train: dict[str, list[Path]] = {}
    test: dict[str, list[Path]] = {}
    every = find_groups([path for paths in classes.values() for path in paths], pattern)
    sides, first = GroupHoldout(), 0
    for name, paths in classes.items():
        if len(paths) < 2:
            raise UserError(f"{paths[0].parent}: a class of one image has none to test on; add another, or remove it.")
        own = every[first : first + len(paths)] if every else [""] * len(paths)
        first += len(paths)
        count = max(1, round(HELD_OUT_SHARE * len(paths)))
        rows = set(sides.draw(named_generator(0, "held out", name).permutation(len(paths)), own, count).tolist())
        train[name] = [path for row, path in enumerate(paths) if row not in rows]
        test[name] = [path for row, path in enumerate(paths) if row in rows]
        if not train[name] or not test[name]:
            raise UserError(
                f"{paths[0].parent}: its images are of too few patients or groups to train and test on; add images of "
                "another, or make folders train and test yourself."
            )
    return train, test, every is not None


def list_classes(part: Path) -> dict[str, list[Path]]:
    """Return the image files of each class folder in `part`, both sorted by name; raise UserError for none."""
    if not part.is_dir():
        raise UserError(f"{part}: there is no such folder; expected {part.name}/CLASS/*.png.")
    paths_of = {folder.name: _list_class_images(folder) for folder in _list_folders(part)}
    if not paths_of:
        raise UserError(f"{part}: it has no class folders; expected {part.name}/CLASS/*.png.")
    for name, paths in paths_of.items():
        if not paths:
            raise UserError(f"{part / name}: there is no image in it ({', '.join(SUFFIXES)}); fill or remove it.")
    return paths_of


def check_same_classes(folder: Path, train: Mapping[str, object], other: Mapping[str, object], test: str) -> None:
    """Raise UserError where a class of the training part has no folder in the part `test`, or the other way."""
    differing = sorted(train.keys() ^ other.keys())
    if differing:
        here, there = ("train", test) if differing[0] in train else (test, "train")
        raise UserError(
            f"{folder}: class folder {differing[0]} is in {here} but not in {there}; both need the same classes."
        )


def list_images(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if is_image(path)) if folder.is_dir() else []


def read_classes(
    classes: Mapping[str, Sequence[Path]], cache: Path | None, rgb: bool, how: Preparation = UNCHANGED
) -> Images:
    """Return the images of all classes, one class after the other, labeled by the place of their class."""
    paths = [path for group in classes.values() for path in group]
    labels = np.repeat(np.arange(len(classes)), [len(group) for group in classes.values()])
    return read_images(paths, labels.astype(np.int64), cache, rgb, how)


def read_images(
    paths: Sequence[Path], labels: np.ndarray, cache: Path | None, rgb: bool, how: Preparation = UNCHANGED
) -> Images:
    """Return the images of these files with `labels`, int64 (N,); raise UserError where one cannot be read."""

    def read(into: Path | None) -> store.Decoded:
        encoded = ((_read_bytes(path), str(path)) for path in paths)
        return Images(decode_all(encoded, len(paths), rgb, how, into), labels), None

    # Labels are known without decoding, so that those of kept images never are older than the folder's.
    stored = store.load_or_decode(cache, paths, read, f"{'rgb' if rgb else ''}{how.form}")[0]
    return Images(stored.images, labels, stored.spread, groups=find_groups(paths, how.group_pattern))


def is_image(path: Path) -> bool:
    """Return whether a file that is not hidden is an image by its suffix, or a DICOM file by its content."""
    if path.name.startswith(".") or not path.is_file():
        return False
    return path.suffix.lower() in SUFFIXES or dicom.holds_image(path)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: the file cannot be read ({error.strerror}).") from error
