"""Scan a user's image folder: class folders, or a site's folder with labels.csv; and load its images."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import Source, memory
from halfmoon.data.groups import (
    describe_equal_images,
    describe_only_equal_images,
    hash_pixels,
    merge_equal_images,
)
from halfmoon.data.groups import find_groups as groups_of
from halfmoon.data.images import Images, SkippedImage, channel_statistics
from halfmoon.data.near_duplicates import describe_near_duplicates, find_near_duplicates, join_near_duplicates
from halfmoon.data.partition.primitives import named_generator
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers.class_folders import (
    check_same_classes,
    count_nested,
    find_subset,
    find_unlabeled,
    has_classes,
    list_classes,
    refuse_unlabeled,
)
from halfmoon.data.readers.decode import check_skipped, decode_prepared, read_header
from halfmoon.data.readers.label_table import read_label_table
from halfmoon.data.sources import describe_skipped, has_official_files
from halfmoon.sites.folders import read_site
from halfmoon.sites.folders.labels import LABELS_FILE
from halfmoon.sites.folders.site_folder import is_site_folder
from halfmoon.storage.events import EventRecorder

HEAD_BYTES = 4096
"""Bytes that are compared first to find equal files."""

MAX_HEADERS = 200
"""Images whose size and color mode are read from their headers."""


@dataclass(frozen=True, eq=False)
class FolderContents:
    """The images of a folder, their labels, and the sizes that their headers declare.

    Attributes:
        folder: the scanned folder.
        classes: class names, in the order of the label numbers.
        paths: the training images, N of them.
        labels: int64 (N,), -1 for an image without a label.
        tests: the number of images in a test folder.
        sizes: (height, width) and its count among the read headers, the most frequent size first.
        gray: the number of gray images among the read headers.
        headers: the number of images whose headers were read.
        site: a site's folder, where few images have labels; otherwise each image is in the folder of its class.
        groups: the patient or group of each training image, or None.
        nested: the number of training images in subfolders of class folders.
        copies: the number of training files that are equal to another one, byte by byte.
    """

    folder: Path
    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: np.ndarray
    tests: int
    sizes: Mapping[tuple[int, int], int]
    gray: int
    headers: int
    site: bool
    groups: Sequence[str] | None = None
    nested: int = 0
    copies: int = 0

    def decode(self, row: int, preparation: Preparation) -> np.ndarray:
        """Decode and prepare the image of a row, uint8 (H, W, C).

        Raises:
            UserError: its content is no image.
            OSError: its file cannot be read.
        """
        path = self.paths[row]
        return decode_prepared(path.read_bytes(), str(path), preparation)

    @property
    def in_memory(self) -> bool:
        """True if the images are those of a Python program, and `folder` is only their name."""
        return False

    @property
    def labeled(self) -> int:
        """The number of training images with a label."""
        return int((self.labels >= 0).sum())

    @property
    def side(self) -> int:
        """The longer side of the most frequent size, in pixels."""
        return max(next(iter(self.sizes)))

    @property
    def channels(self) -> int:
        """1 if all images are gray, otherwise 3."""
        return 1 if self.gray == self.headers else 3

    @property
    def sentence(self) -> str:
        """A one-line description of the folder for people, such as "pets: 90 images, ...; 3 classes; 64x64, RGB"."""
        if self.site:
            labels = f"{self.labeled:,} with a label"
        elif self.in_memory:
            labels = "each with a label"
        else:
            labels = "each in the folder of its class"
        tests = f", {self.tests:,} of them for the test" if self.tests else ""
        group_count = len(set(self.groups or ()) - {""})
        groups = f", of {group_count:,} patients or groups" if group_count else ""
        nested = f", {self.nested:,} of them in its subfolders" if self.nested else ""
        copies = f"; {self.copies:,} files are copies of others" if self.copies else ""
        name = "data" if self.in_memory else self.folder.name
        return (
            f"{name}: {len(self.paths) + self.tests:,} images, {labels}{nested}{tests}{groups}{copies}; "
            f"{len(self.classes)} classes; {self._describe_sizes()}, {self._describe_colors()}"
        )

    def _describe_sizes(self) -> str:
        """List the three most frequent sizes, and count the others."""
        sizes = ", ".join(f"{width}x{height}" for height, width in list(self.sizes)[:3])
        return f"{sizes} and {len(self.sizes) - 3} more sizes" if len(self.sizes) > 3 else sizes

    def _describe_colors(self) -> str:
        """Describe whether images are gray, as far as their headers were read."""
        if self.gray == self.headers:
            colors = "gray"
        elif self.gray:
            colors = "gray and RGB"
        else:
            colors = "RGB"
        return f"{colors} ({self.headers} headers read)" if self.headers < len(self.paths) else colors


@dataclass(frozen=True, eq=False)
class MemoryContents(FolderContents):
    """The images of a data set in memory (`halfmoon.data.memory`); `paths` are their names, for messages."""

    @property
    def in_memory(self) -> bool:
        """True: there is no folder."""
        return True

    def decode(self, row: int, preparation: Preparation) -> np.ndarray:
        """Prepare the image of a row, uint8 (H, W, C)."""
        return memory.find(str(self.folder)).train.read(row, preparation)


def scan_folder(folder: Path, group_pattern: str | None = None) -> FolderContents | None:
    """Scan a folder of images, or a data set in memory.

    Args:
        folder: class folders, or a site's folder; or the name of a data set in memory.
        group_pattern: a regular expression that finds an image's patient or group in its name.

    Returns:
        The contents; None for a folder that another reader handles (parquet, idx, official files).

    Raises:
        UserError: the labels have a fault, no image has a label, or a data set in memory is not registered.
    """
    if memory.is_memory_name(str(folder)):
        return _scan_memory(str(folder))
    tests = 0
    nested = 0
    is_site = is_site_folder(folder) and not _has_only_class_names(folder)
    if is_site:
        site_folder = read_site(folder)
        classes = site_folder.classes
        paths = [folder / path for path in site_folder.paths]
        labels = site_folder.labels
        used = np.unique(labels[labels >= 0])
        if not len(used):
            raise UserError(
                f"{folder}: no image has a label: `halfmoon site label {folder}` labels a few, or write {LABELS_FILE} with "
                "the header path,label."
            )
        if len(used) < 2:
            raise UserError(
                f"{folder}: all its labels are {classes[used[0]]!r}, so there is nothing to tell apart; label images of "
                "another class, too."
            )
        groups = site_folder.image_groups(group_pattern)
    elif has_official_files(folder) or not has_classes(folder):
        return None
    else:
        train_folder = find_subset(folder, "train")
        images_by_class = list_classes(train_folder or folder)
        if train_folder is not None:
            refuse_unlabeled(folder, train_folder)
            test_folder = find_subset(folder, "test") or find_subset(folder, "validation")
            if test_folder is not None:
                tests_by_class = list_classes(test_folder)
                check_same_classes(folder, images_by_class, tests_by_class, test_folder.name)
                tests = sum(map(len, tests_by_class.values()))
        classes = tuple(images_by_class)
        paths = [path for images in images_by_class.values() for path in images]
        labels = np.repeat(np.arange(len(classes)), [len(images) for images in images_by_class.values()])
        groups = groups_of(paths, group_pattern)
        nested = count_nested(images_by_class, train_folder or folder)
    headers = read_headers(folder, paths)
    return FolderContents(
        folder=folder,
        classes=tuple(classes),
        paths=tuple(paths),
        labels=labels,
        tests=tests,
        sizes=headers.sizes,
        gray=headers.gray,
        headers=headers.count,
        site=is_site,
        groups=groups,
        nested=nested,
        copies=count_equal_files(paths),
    )


def _scan_memory(name: str) -> MemoryContents:
    """Describe the images of a data set in memory, by the sizes of up to `MAX_HEADERS` of them."""
    data = memory.find(name)
    rows = range(0, len(data.train), -(-len(data.train) // MAX_HEADERS))
    shapes = [data.train.read(row, UNCHANGED).shape for row in rows]
    sizes = Counter((height, width) for height, width, _ in shapes)
    return MemoryContents(
        folder=Path(name),
        classes=data.train.classes,
        paths=tuple(Path(f"image {row}") for row in range(len(data.train))),
        labels=data.train.labels,
        tests=0 if data.test is None else len(data.test),
        sizes=dict(sizes.most_common()),
        gray=sum(channels == 1 for _, _, channels in shapes),
        headers=len(shapes),
        site=not data.train.is_fully_labeled,
    )


def _has_only_class_names(folder: Path) -> bool:
    """Check whether a folder has parquet or official files, and of a site's files only those that name classes."""
    return has_official_files(folder) and read_label_table(folder).file is None and find_unlabeled(folder) is None


def count_equal_files(paths: Sequence[Path]) -> int:
    """Count the files that are equal to an earlier one of the list.

    Reading all files would be slow: only files of the same size are read, first their beginnings, and a file as a whole
    only if another has the same beginning.
    """
    sizes = Counter[int]()
    size_of: dict[Path, int] = {}
    for path in paths:
        with suppress(OSError):  # reported when all images are read
            size_of[path] = path.stat().st_size
            sizes[size_of[path]] += 1
    similar_files: dict[tuple[int, bytes], list[Path]] = {}  # by size and beginning
    for path, size in size_of.items():
        if size and sizes[size] > 1:
            with suppress(OSError), path.open("rb") as file:
                similar_files.setdefault((size, file.read(HEAD_BYTES)), []).append(path)
    copies = 0
    for (size, _), group in similar_files.items():
        if size <= HEAD_BYTES:  # the beginning is the whole file
            copies += len(group) - 1
        elif len(group) > 1:
            with suppress(OSError):
                different_contents = {hashlib.sha256(path.read_bytes()).digest() for path in group}
                copies += len(group) - len(different_contents)
    return copies


class ImageHeaders(NamedTuple):
    """Sizes and colors that the headers of some images declare.

    Attributes:
        sizes: (height, width) and its count, the most frequent size first.
        gray: the number of gray images.
        count: the number of images whose headers were read.
    """

    sizes: Mapping[tuple[int, int], int]
    gray: int
    count: int


def read_headers(folder: Path, paths: Sequence[Path]) -> ImageHeaders:
    """Read sizes and color modes from the headers of up to `MAX_HEADERS` images, evenly spaced in the list.

    Args:
        folder: the folder of the images, for the message.
        paths: the images.

    Raises:
        UserError: none of these images is readable.
    """
    step = -(-len(paths) // MAX_HEADERS)  # rounded up, so that at most MAX_HEADERS are read
    headers = [image_header for path in paths[::step] if (image_header := read_header(path)) is not None]
    if not headers:
        raise UserError(f"{folder}: none of its {len(paths):,} images can be read; see halfmoon site check.")
    sizes = Counter(image_header[:2] for image_header in headers)
    return ImageHeaders(
        sizes=dict(sizes.most_common()),
        gray=sum(image_header[2] for image_header in headers),
        count=len(headers),
    )


def decode_images(
    contents: FolderContents, rows: np.ndarray, preparation: Preparation, display: EventRecorder
) -> tuple[list[np.ndarray], np.ndarray, tuple[SkippedImage, ...]]:
    """Decode images of a folder, without those that are unreadable or of another size.

    Args:
        contents: the scanned folder.
        rows: int64, indices into its paths.
        preparation: the resizing and the channels.
        display: receives an event for each image that is left out.

    Returns:
        The images, each uint8 (H, W, C), their rows, int64, and the images that were left out.

    Raises:
        UserError: more images are unreadable than `preparation` permits.
    """
    skipped: list[SkippedImage] = []
    images: list[np.ndarray] = []
    decoded_rows: list[int] = []
    for row in rows.tolist():
        path = contents.paths[row]
        try:
            image = contents.decode(row, preparation)
            if images and image.shape != images[0].shape:
                raise UserError(
                    f"{path}: it is {image.shape[1]}x{image.shape[0]}, the others are not; give {{resize}}.",
                    option="resize",
                )
        except (UserError, OSError) as error:
            display.record("image_left_out", f"left out: {error}", image=str(path))
            skipped.append(SkippedImage(row, str(path), str(error).removeprefix(f"{path}: ")))
            continue
        images.append(image)
        decoded_rows.append(row)
    check_skipped(skipped, len(rows), preparation)
    return images, np.array(decoded_rows, np.int64), tuple(skipped)


def load_site_source(
    contents: FolderContents, preparation: Preparation, share: float, flip: bool, display: EventRecorder
) -> Source:
    """Load the images of a site's folder, of which few have labels, as a data set in memory.

    It needs test images, and has no others with labels: the labeled images are both. A caller that tests on them
    replaces both by folds of a cross-validation.

    Args:
        contents: the scanned folder.
        preparation: the resizing and the channels.
        share: the share of the unlabeled images to use, 0 to 1. They are drawn at random, the same ones every time.
        flip: whether images may be mirrored.
        display: receives an event for each image that is left out.

    Raises:
        UserError: none of its images is readable.
    """
    # The name of the random stream decides which images are drawn: it must not change.
    unlabeled = named_generator(0, "own folder").permutation(np.flatnonzero(contents.labels < 0))
    used = unlabeled[: round(share * len(unlabeled))]
    rows = np.sort(np.concatenate([np.flatnonzero(contents.labels >= 0), used]))
    images, rows, skipped = decode_images(contents, rows, preparation, display)
    if not images:
        raise UserError(f"{contents.folder}: none of its images can be read; see halfmoon site check.")
    groups = None if contents.groups is None else [contents.groups[int(row)] for row in rows]
    pixels = np.stack(images)
    hashes = hash_pixels(pixels)
    if len(set(hashes)) == 1 < len(hashes):
        raise UserError(f"{contents.folder}: {describe_only_equal_images(f'{len(hashes):,} images')}.")
    notes = describe_equal_images(hashes, contents.labels[rows])
    pairs = find_near_duplicates([pixels], hashes)
    notes += describe_near_duplicates(pairs, len(images))
    for note in notes:
        display.record("data_note", note)
    # Equal images form a group, so that no fold trains on a copy of a test image.
    groups = merge_equal_images(groups, join_near_duplicates(pairs, hashes))
    train = Images(pixels, contents.labels[rows], groups=groups)
    labeled = train.labels >= 0
    test = Images(train.images[labeled], train.labels[labeled])
    mean, std = channel_statistics(train.images)
    return Source(
        name=contents.folder.name,
        train=train,
        test=test,
        classes=contents.classes,
        mirror=flip,
        mean=mean,
        std=std,
        notes=(*describe_skipped(skipped, len(images)), *notes),
        skipped=skipped,
    )
