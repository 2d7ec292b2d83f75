"""Read class folders: train/CLASS/*.png and test/CLASS/*.png, or CLASS/images/*.png instead of CLASS/*.png."""

import mimetypes
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from operator import attrgetter
from pathlib import Path

import numpy as np
from PIL import Image

from halfmoon.core.errors import ImageReadError, UserError
from halfmoon.data import dicom
from halfmoon.data.class_names import (
    find_near_equal,
    match_class_name,
    normalize_class_name,
    refuse_near_equal,
    sort_class_names,
)
from halfmoon.data.groups import NO_GROUP_ON_BOTH_SIDES, find_groups, hash_pixels, merge_equal_images
from halfmoon.data.images import Images
from halfmoon.data.near_duplicates import find_near_duplicates, join_near_duplicates
from halfmoon.data.partition.primitives import GroupHoldout, named_generator
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers import cache as store
from halfmoon.data.readers.decode import decode_all, drop_skipped
from halfmoon.data.readers.formats import AVIF_SUFFIXES, HEIF_SUFFIXES, list_suffixes
from halfmoon.data.readers.label_table import (
    EXPORT_REMEDY,
    LABELS_FILE,
    decode_text_file,
    read_label_table,
    read_paths_by_class,
)

SUFFIXES = list_suffixes()
SUBSET_NAMES = (("train", "training"), ("test", "testing"), ("validation", "valid", "val"))
"""Accepted folder names, in lower case, of each subset of a data set."""

HELD_OUT_SHARE = 0.2
"""Share of the images of every class that are held out for testing if there is no test folder."""

CLASSES_FILE = "classes.txt"
"""The file that names the classes, one a line, where names are nearly equal or their order matters."""

UNLABELED_NAMES = ("unlabeled", "unlabelled")
"""Names, in lower case, of a folder whose images have no label."""

SYSTEM_FOLDERS = frozenset({"__macosx", "@eadir", "$recycle.bin", "system volume information", "lost+found"})
"""Names, in lower case, of folders that contain no data set: of macOS archives, Synology, Windows and Linux."""

ARCHIVE_SUFFIXES = (".zip", ".tar", ".tgz", ".gz", ".7z", ".rar")
OTHER_SUFFIXES = (*ARCHIVE_SUFFIXES, ".npy", ".npz", ".nii", ".mha", ".nrrd", ".svs", ".dng", ".cr2", ".nef", ".psd")
"""Suffixes of files that may hold images in a format that is not read."""

GROUPS_HINT = "where images share a patient or an object, make folders train and test yourself"


def read_folders(
    folder: Path,
    test: str,
    cache: Path | None,
    rgb: bool = False,
    preparation: Preparation = UNCHANGED,
    group_copies: bool = True,
) -> tuple[Images, Images, tuple[str, ...]]:
    """Read train images, test images and the sorted class names of a folder.

    Without a test folder, the validation folder is the test. Without any of these, `HELD_OUT_SHARE` of the images of
    every class are held out, the same ones in every run. The `selection_note` of the test images states either. Images with equal
    pixels are one group (`Images.groups`), and none of them is held out without the others.

    Args:
        folder: The folder.
        test: The name of the test subset.
        cache: The folder for decoded images.
        rgb: True to convert gray images to RGB.
        preparation: The conversion of images.
        group_copies: False for published data sets, whose copies remain separate images.

    Raises:
        UserError: If a subset or a class is missing or empty, train and test have different classes, or an image cannot be
            read.
    """
    selection_note = ""
    held_out: tuple[dict[str, list[Path]], list[str] | None] | None = None
    train_folder = find_subset(folder, "train")
    if train_folder is not None:
        refuse_unlabeled(folder, train_folder)
        test_folder = find_subset(folder, test)
        if test_folder is None and test == "test":
            test_folder = find_subset(folder, "validation")
            if test_folder is not None:
                selection_note = f"{folder} has no folder test, so the images of {test_folder.name} are the test"
        train = list_classes(train_folder)
        test_paths = list_classes(test_folder or folder / test)
        check_same_classes(folder, train, test_paths, test)
    else:
        classes = list_classes(folder)
        paths = [path for group in classes.values() for path in group]
        groups = find_groups(paths, preparation.group_pattern)
        grouped = groups is not None
        held_out = (classes, groups)
        train, test_paths = _hold_out(classes, groups)
        count = sum(map(len, test_paths.values()))
        selection_note = (
            f"{folder} has no folder test, so {HELD_OUT_SHARE:.0%} of the images of every class, {count:,} in all, "
            f"are held out as the test; {NO_GROUP_ON_BOTH_SIDES if grouped else GROUPS_HINT}"
        )
    test_images = read_classes(test_paths, cache, rgb, preparation)
    train_images = read_classes(train, cache, rgb, preparation)
    if held_out is not None and group_copies:
        sides = ((train, train_images), (test_paths, test_images))
        divided = _draw_without_copies(*held_out, sides)
        if divided is not None:
            train_images, test_images = (read_classes(files, cache, rgb, preparation) for files in divided)
    return train_images, replace(test_images, selection_note=selection_note), tuple(train)


def _draw_without_copies(
    classes: Mapping[str, Sequence[Path]],
    groups: Sequence[str] | None,
    sides: Sequence[tuple[Mapping[str, Sequence[Path]], Images]],
) -> tuple[dict[str, list[Path]], dict[str, list[Path]]] | None:
    """Divide the files into train and test once more if equal images, or near-duplicates, are in both.

    Copies of training images in the test would make the accuracy too high. The first division is by files, because only
    decoded images show copies. In the second one, copies are a group, which is never divided. Near-duplicates are grouped
    only if every class then still has images for train and test.

    Args:
        classes: The files of each class.
        groups: The group (such as the patient) of each file, one class after the other; None for none.
        sides: The files of train and of test by class, and their decoded images, without unreadable ones.

    Returns:
        Train and test files by class; None if no image is on both sides.
    """
    readable: list[Path] = []  # the files of train and then of test
    hashes: list[bytes] = []  # of their pixels
    for files, images in sides:
        readable += remaining_paths([path for class_files in files.values() for path in class_files], images)
        hashes += hash_pixels(images.images)
    train_count = len(sides[0][1])
    pairs = find_near_duplicates([images.images for _, images in sides], hashes)
    paths = [path for group in classes.values() for path in group]

    def divide(keys: Sequence[bytes]) -> tuple[dict[str, list[Path]], dict[str, list[Path]]] | None:
        """Divide the files so that images with one key are on one side; None if they are already."""
        if set(keys[:train_count]).isdisjoint(keys[train_count:]):
            return None
        key_of = dict(zip(readable, keys, strict=True))
        # An unreadable image is equal to no other one: its path stands for its hash.
        merged = merge_equal_images(groups, [key_of.get(path, os.fsencode(path)) for path in paths])
        return _hold_out(classes, merged, copies=True)

    if len(pairs):
        with suppress(UserError):
            return divide(join_near_duplicates(pairs, hashes))
    return divide(hashes)


def find_subset(folder: Path, subset: str) -> Path | None:
    """Find the folder of train, test or validation images, also under another usual name (`Training`, `valid`).

    Returns None if there is none. A folder with exactly the name of the subset has priority.
    """
    if (folder / subset).is_dir():
        return folder / subset
    accepted_names = next((names for names in SUBSET_NAMES if subset in names), (subset,))
    folders = {path.name.lower(): path for path in sorted(folder.iterdir()) if path.is_dir()}
    return next((folders[name] for name in accepted_names if name in folders), None)


def describe_left_out(folder: Path) -> list[str]:
    """Describe in sentences the files in a data set of class folders that are not used.

    These are images in no class folder, images that a table of labels does not list, files of formats that are not read,
    and frames of animations.

    Args:
        folder: The folder, with class folders or with the folders train and test.
    """
    train = find_subset(folder, "train")
    candidates = [find_subset(folder, names[0]) for names in SUBSET_NAMES]
    parts = [folder] if train is None else [folder, *(subset for subset in candidates if subset is not None)]
    loose = 0
    unlisted = 0
    notes: list[str] = []
    for subset in parts:
        table = read_label_table(subset)
        if table.is_unread:
            notes.append(f"{subset / str(table.file)}, whose format is not read: {EXPORT_REMEDY}")
        listed = read_paths_by_class(subset)
        if listed is None:
            loose += len(list_images(subset))
        else:
            used = {path.resolve() for paths in listed.values() for path in paths}
            unlisted += sum(is_image(path) and path.resolve() not in used for path in walk_files(subset))
    if loose:
        target = (
            "a folder unlabeled, and they train without a label" if train is None else "the folders of their classes"
        )
        notes.append(f"images in no class folder ({loose:,}): put them into {target}")
    if unlisted:
        notes.append(f"images that {LABELS_FILE} does not list ({unlisted:,}): add them, or remove them")
    if formats := describe_unsupported_formats(folder):
        notes.append(formats)
    if animations := count_animations(folder):
        notes.append(f"all frames but the first of files that have several ({animations:,})")
    return notes


def count_animations(folder: Path) -> int:
    """Count the GIF, WebP and TIFF files in and below a folder that have several frames; only the first one is read."""
    animations = 0
    for path in walk_files(folder):
        if path.suffix.lower() in (".gif", ".webp", ".tif", ".tiff"):
            # Pillow raises many kinds of errors for damaged files; they are reported when all images are read.
            with suppress(Exception), Image.open(path, formats=("GIF", "WEBP", "TIFF")) as image:
                animations += bool(getattr(image, "is_animated", False))
    return animations


def find_unlabeled(folder: Path) -> Path | None:
    """Find the folder of unlabeled images next to class folders; None if there is none, or a train folder exists."""
    return None if find_subset(folder, "train") else _find_unlabeled_folder(folder)


def refuse_unlabeled(folder: Path, train: Path) -> None:
    """Raise UserError if a folder of unlabeled images is in or next to `train`, all images of which have labels."""
    unlabeled = _find_unlabeled_folder(folder) or _find_unlabeled_folder(train)
    if unlabeled is not None:
        raise UserError(
            f"{unlabeled}: with a folder {train.name}, images without a label need a labels.csv in {folder} that names "
            "the labeled ones (path,label)."
        )


def _find_unlabeled_folder(folder: Path) -> Path | None:
    for path in sorted(folder.iterdir()):
        if path.name.lower() in UNLABELED_NAMES and path.is_dir():
            return path
    return None


def has_classes(folder: Path) -> bool:
    """Check whether a folder has a train folder, or at least two class folders with images."""
    if find_subset(folder, "train") is not None:
        return True
    classes = _list_folders(folder)
    return len(classes) > 1 and not _find_collections(classes) and all(map(_has_class_images, classes))


def refuse_unsorted(folder: Path) -> None:
    """Raise UserError, with instructions, for images that are not sorted into at least two class folders.

    A data set is a folder of class folders (`cat/1.png`, `dog/2.png`). The checks are for frequent mistakes: an empty
    class, a single class, one folder or several sites above the class folders, no readable image, no class folders.
    """
    subfolders = _list_folders(folder)
    empty = next((path for path in subfolders if not _has_class_images(path)), None)
    if len(subfolders) > 1 and empty is not None and any(map(_has_class_images, subfolders)):
        formats = describe_unsupported_formats(empty)
        only = f", only {formats}" if formats else ", as in a class folder; fill or remove it"
        raise UserError(f"{empty}: there is no image in it{only}.")
    if len(subfolders) == 1 and empty is None:
        only = subfolders[0]
        if _lists_direct_images(only) or not has_classes(only):
            raise UserError(f"{folder}: {only.name} is its only class folder; sort images of another class, too.")
    datasets = [path for path in map(_skip_wrappers, subfolders) if has_classes(path)]  # class folders a level deeper
    if len(datasets) > 1:
        names = " and ".join(path.relative_to(folder).as_posix() for path in datasets[:2])
        raise UserError(
            f"{folder}: class folders lie in {names}: give one of these folders, or run them as sites: `halfmoon run "
            f"--sites {shlex.join(map(str, datasets))}`. If {names} are classes, move them into a folder train."
        )
    if datasets:
        raise UserError(
            f"{folder}: class folders lie in {datasets[0].name}: give the folder {datasets[0]}, or move them up."
        )
    if not any(is_image(path) for path in walk_files(folder)) and (formats := describe_unsupported_formats(folder)):
        raise UserError(f"{folder}: there is no image that can be read, only {formats}.")
    if unsorted_images := list_images(folder):
        raise UserError(
            f"{folder}: its {len(unsorted_images):,} images have no label: `halfmoon site label {folder}` labels a few, or sort "
            "them into a folder for each class."
        )


def _list_folders(folder: Path) -> list[Path]:
    """List the subfolders that may hold images, sorted; links to a folder that contains them are left out."""
    # `os.scandir` knows the type of most entries, where `Path.is_dir` would query the file system for every image.
    with os.scandir(folder) as entries:
        paths = [folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False) or entry.is_symlink()]
    return sorted(path for path in paths if path.is_dir() and not is_hidden(path.name) and not is_circular_link(path))


def is_hidden(name: str) -> bool:
    """Check whether a file or folder is hidden, or a folder that an operating system or archive program adds."""
    return name.startswith(".") or name.lower() in SYSTEM_FOLDERS


def is_circular_link(path: Path) -> bool:
    """Check whether a path is a link to a folder that contains it, which a search for images must not follow."""
    if not path.is_symlink():
        return False
    target = path.resolve()
    return any(parent.resolve().is_relative_to(target) for parent in path.absolute().parents)


def walk_files(folder: Path, onerror: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yield the files in and below a folder, except hidden ones; links to folders are followed.

    Args:
        folder: The folder.
        onerror: Receives the error of a folder that cannot be opened; None to skip such folders.
    """
    for current, folders, files in os.walk(folder, onerror=onerror, followlinks=True):
        # os.walk descends into the folders that remain in this list.
        folders[:] = [name for name in folders if not is_hidden(name) and not is_circular_link(Path(current, name))]
        yield from (Path(current, name) for name in files if not name.startswith("."))


def count_images(folder: Path) -> int:
    """Count the images in and below a folder."""
    return sum(map(is_image, walk_files(folder)))


def count_unsupported_formats(folder: Path) -> Counter[str]:
    """Count the image files in and below a folder whose formats are not supported, by suffix."""
    suffixes = Counter(path.suffix.lower() for path in walk_files(folder))
    return Counter({suffix: count for suffix, count in suffixes.items() if is_unsupported_suffix(suffix)})


@cache
def is_unsupported_suffix(suffix: str) -> bool:
    """Check whether a suffix, such as ".heic", is that of images or archives that are not read here."""
    if suffix in SUFFIXES:
        return False
    # Some systems do not list those of the second kind as images.
    is_listed = str(mimetypes.guess_type(f"a{suffix}")[0]).startswith("image/")
    return is_listed or suffix in {*HEIF_SUFFIXES, *AVIF_SUFFIXES, *OTHER_SUFFIXES}


def describe_unsupported_formats(folder: Path) -> str:
    """Describe the image files in and below a folder that are not read, and what to do; "" if there are none."""
    formats = count_unsupported_formats(folder)
    if not formats:
        return ""
    counts = ", ".join(f"{count:,} {suffix}" for suffix, count in formats.most_common(3))
    return f"files of formats that are not read ({counts}): {advise_formats(formats)}"


def advise_formats(suffixes: Iterable[str]) -> str:
    """Advise what to do about files with these suffixes, which are not read."""
    advice = "convert them to PNG or JPEG"
    if set(suffixes) & set(HEIF_SUFFIXES):
        advice += ", or read HEIC by pip install 'halfmoon[heif]'"
    if set(suffixes) & set(ARCHIVE_SUFFIXES):
        advice += ", and unpack archives"
    return advice


def _list_class_images(folder: Path) -> list[Path]:
    """List the images in and below a class folder, except in hidden folders."""
    images = list_images(folder)
    subfolders = _list_folders(folder)
    for subfolder in subfolders:
        images += _list_class_images(subfolder)
    return sorted(images) if subfolders else images


def _has_class_images(folder: Path) -> bool:
    """Check whether an image is in or below a class folder, without listing all of them."""
    return any(_iterate_images(folder)) or any(map(_has_class_images, _list_folders(folder)))


def _lists_direct_images(folder: Path) -> bool:
    """Check whether images are in a class folder itself, or in its folder `images`."""
    return any(_iterate_images(folder)) or any(_iterate_images(folder / "images"))


def count_nested(classes: Mapping[str, Sequence[Path]], subset: Path) -> int:
    """Count the images in subfolders of the class folders of `subset`, apart from subfolders `images`."""
    parents = [path.relative_to(subset).parts[1:-1] for paths in classes.values() for path in paths]
    return sum(parent not in ((), ("images",)) for parent in parents)


def _find_collections(classes: Sequence[Path]) -> list[Path]:
    """Find folders that look like data sets of several sites, each with class folders, and not like classes.

    These are two or more folders without images of their own whose subfolders have names in common, such as
    `hospital1/cat` and `hospital2/cat`, or `hospital1/data/cat` and `hospital2/data/cat`. At least two names must be
    common, as a data set has two classes or more. Names that begin with a digit (`cat/2023`, `dog/2023`) are no classes.

    Args:
        classes: The subfolders of a folder, which may be classes or sites.

    Returns:
        The folders of sites; empty if `classes` are classes.
    """
    subfolder_names: dict[Path, set[str]] = {}
    for folder in classes:
        inner = _skip_wrappers(folder)
        if not _lists_direct_images(inner):
            subfolder_names[inner] = {path.name for path in _list_folders(inner) if _has_class_images(path)}
    counts = Counter(name for names in subfolder_names.values() for name in names if not name[:1].isdigit())
    common = {name for name, count in counts.items() if count > 1}
    return [folder for folder, names in subfolder_names.items() if len(names & common) > 1]


def _skip_wrappers(folder: Path) -> Path:
    """Return the first folder at or below `folder` that is more than a folder around a single one, such as `data`."""
    while not _lists_direct_images(folder):
        subfolders = _list_folders(folder)
        if len(subfolders) != 1 or subfolders[0].name[:1].isdigit():
            break
        folder = subfolders[0]
    return folder


def _hold_out(
    classes: Mapping[str, Sequence[Path]], all_groups: Sequence[str] | None, copies: bool = False
) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """Divide the files of every class into train and test files; a share of `HELD_OUT_SHARE` are test files.

    Args:
        classes: The files of each class.
        all_groups: The group of each file, one class after the other; None for none. A group is never divided.
        copies: True if images with equal pixels are groups, which changes error messages only.

    Returns:
        Train files and test files by class.

    Raises:
        UserError: If all images of a class would be on one side.
    """
    train: dict[str, list[Path]] = {}
    test: dict[str, list[Path]] = {}
    holdout = GroupHoldout()
    first = 0  # index in `all_groups` of the class's first file
    for name, paths in classes.items():
        if len(paths) < 2:
            raise UserError(f"{paths[0].parent}: a class of one image has none to test on; add another, or remove it.")
        groups = all_groups[first : first + len(paths)] if all_groups else [""] * len(paths)
        first += len(paths)
        count = max(1, round(HELD_OUT_SHARE * len(paths)))
        # Seeded by the class's name, so that the same files are held out in every run.
        order = named_generator(0, "held out", name).permutation(len(paths))
        rows = set(holdout.draw(order, groups, count).tolist())
        train[name] = [path for row, path in enumerate(paths) if row not in rows]
        test[name] = [path for row, path in enumerate(paths) if row in rows]
        if not train[name] or not test[name]:
            if copies:
                raise UserError(
                    f"{paths[0].parent}: too few of its {len(paths):,} images are different ones to train and test on "
                    "(the others are copies with equal pixels); add other images, or make folders train and test yourself."
                )
            raise UserError(
                f"{paths[0].parent}: its images are of too few patients or groups to train and test on; add images of "
                "another, or make folders train and test yourself."
            )
    return train, test


def list_classes(subset: Path) -> dict[str, list[Path]]:
    """List the image files of each class in a folder, both sorted by name.

    Args:
        subset: The folder, such as "train": with a folder for each class, or with a table (labels.csv) of images and
            classes, which has priority.

    Returns:
        The files by class name.

    Raises:
        UserError: If there are no classes, a class has no image, or names of classes are nearly equal.
    """
    if not subset.is_dir():
        raise UserError(f"{subset}: there is no such folder; expected {subset.name}/CLASS/*.png.")
    paths_from_table = read_paths_by_class(subset)
    if paths_from_table is not None:
        refuse_near_equal(
            list(paths_from_table),
            subset / str(read_label_table(subset).file),
            read_confirmed_names(subset),
            f"name all classes in {subset / CLASSES_FILE}, one a line",
        )
        return paths_from_table
    folders = _list_folders(subset)
    if not folders:
        raise UserError(f"{subset}: it has no class folders; expected {subset.name}/CLASS/*.png.")
    for folder in folders:
        try:
            folder.name.encode()
        except UnicodeEncodeError:  # Python reads bytes that are no UTF-8 as surrogates
            raise UserError(
                f"{subset}: the class folder {os.fsencode(folder.name)!r} has a name that is not UTF-8; rename it, or set "
                "LANG=C.UTF-8."
            ) from None
    _refuse_similar_names(subset, [folder.name for folder in folders])
    folder_of = {normalize_class_name(folder.name): folder for folder in folders}
    paths_of = {name: _list_class_images(folder_of[name]) for name in sort_class_names(folder_of)}
    for name, paths in paths_of.items():
        if not paths:
            formats = describe_unsupported_formats(folder_of[name])
            only = f", only {formats}" if formats else f" ({', '.join(SUFFIXES)}); fill or remove it"
            raise UserError(f"{folder_of[name]}: there is no image in it{only}.")
    return paths_of


def _refuse_similar_names(subset: Path, names: Sequence[str]) -> None:
    """Raise UserError for class folders whose names are nearly equal, unless a classes.txt names all of them.

    Names such as "Cat" and "cat" are usually one class by mistake; the file confirms that they are different ones.
    """
    groups = find_near_equal(names)
    if not groups:
        return
    listed = read_confirmed_names(subset)
    for group in groups:
        distinct = {normalize_class_name(name) for name in group}
        indistinguishable = len(distinct) < len(group)
        if indistinguishable or not distinct <= listed:
            confirmation = f"; if both are meant, name all classes in {subset / CLASSES_FILE}, one a line"
            raise UserError(
                f"{subset}: the class folders {' and '.join(map(ascii if indistinguishable else repr, group))} differ only in "
                "case, blanks, dashes, underscores, Unicode forms or the form of a number: move their images into one of "
                f"them{'' if indistinguishable else confirmation}."
            )


def read_confirmed_names(folder: Path) -> set[str]:
    """Read the class names that a classes.txt in a folder lists; empty if there is none that can be read."""
    text, _, _ = decode_text_file(folder / CLASSES_FILE)
    return {normalize_class_name(line) for line in (text or "").splitlines()} - {""}


def check_same_classes(folder: Path, train: Mapping[str, object], other: Mapping[str, object], test: str) -> None:
    """Raise UserError if the training images and those of another subset have different classes.

    Args:
        folder: The folder of the data set.
        train: The training images by class name.
        other: The images of the other subset by class name.
        test: The name of the other subset, such as "test".
    """
    differing = sorted(train.keys() ^ other.keys())
    if not differing:
        return
    name = differing[0]
    if name in train:
        present, absent, candidates = "train", test, other
    else:
        present, absent, candidates = test, "train", train
    similar = match_class_name(name, candidates)
    hint = f" (there it is {similar}: rename one)" if similar else ""
    raise UserError(
        f"{folder}: class folder {name} is in {present} but not in {absent}{hint}; both need the same classes."
    )


def list_images(folder: Path) -> list[Path]:
    # By name: all are in one folder, and comparing whole paths takes several times as long.
    return sorted(_iterate_images(folder), key=attrgetter("name"))


def _iterate_images(folder: Path) -> Iterator[Path]:
    """Yield the images in a folder, in the order of the file system; none if it is no folder."""
    if folder.is_dir():
        yield from filter(is_image, folder.iterdir())


def read_classes(
    classes: Mapping[str, Sequence[Path]], cache: Path | None, rgb: bool, preparation: Preparation = UNCHANGED
) -> Images:
    """Read the images of all classes, one class after the other.

    Args:
        classes: The files of each class.
        cache: The folder for decoded images; None for the default one.
        rgb: True to convert gray images to RGB.
        preparation: The conversion of images.

    Returns:
        Images whose labels are the indices of the classes, without those that cannot be read.

    Raises:
        UserError: If no image of a class can be read.
    """
    paths = [path for group in classes.values() for path in group]
    labels = np.repeat(np.arange(len(classes)), [len(group) for group in classes.values()])
    images = read_images(paths, labels.astype(np.int64), cache, rgb, preparation)
    unreadable = np.setdiff1d(np.arange(len(classes)), images.labels)
    if len(unreadable):
        name = list(classes)[unreadable[0]]
        first = next(image for image in images.skipped if Path(image.path) in classes[name])
        raise UserError(
            f"{first.path}: {first.reason.removesuffix('; replace or remove it.')}. No image of class {name} can be read; "
            "replace them, or remove the class."
        )
    return images


def read_images(
    paths: Sequence[Path], labels: np.ndarray, cache: Path | None, rgb: bool, preparation: Preparation = UNCHANGED
) -> Images:
    """Read the images of files, without those that cannot be read.

    Args:
        paths: The N files.
        labels: Their labels, int64 (N,).
        cache: The folder for decoded images; None for the default one.
        rgb: True to convert gray images to RGB.
        preparation: The conversion of images.

    Raises:
        UserError: If none can be read, or they have different sizes.
    """
    stored, _ = store.load_or_decode(
        cache,
        paths,
        lambda into: (decode_all(map(_read_file, paths), labels, rgb, preparation, into), None),
        cache_id=f"{'rgb' if rgb else ''}{preparation.cache_id}",
    )
    # Use the labels of this call, not the cached ones: the cache key does not depend on them.
    groups = find_groups(remaining_paths(paths, stored), preparation.group_pattern)
    labels = drop_skipped(labels, stored.skipped)
    return Images(stored.images, labels, stored.spread, groups=groups, skipped=stored.skipped)


def remaining_paths(paths: Sequence[Path], images: Images) -> list[Path]:
    """List the files of `images`, which are those of `paths` without the ones that were left out."""
    skipped = {image.row for image in images.skipped}
    return [path for row, path in enumerate(paths) if row not in skipped]


def is_image(path: Path) -> bool:
    """Check whether a file is an image by its suffix, or a DICOM image by its content; hidden files are not."""
    if path.name.startswith("."):
        return False
    has_suffix = path.suffix.lower() in SUFFIXES
    if not path.is_file():
        return has_suffix and path.is_symlink() and not path.exists()  # a dead link is reported as unreadable
    return has_suffix or dicom.holds_image(path)


def _read_file(path: Path) -> tuple[bytes | ImageReadError, str]:
    """Read an image file: its content, or the error that reading it raised, and its name for messages."""
    try:
        return path.read_bytes(), str(path)
    except OSError as error:
        return ImageReadError(f"{path}: the file cannot be read ({error.strerror})."), str(path)
