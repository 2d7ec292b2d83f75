"""Data sets in memory: uint8 images, integer labels, class names, pixel statistics."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.groups import NO_GROUP_ON_BOTH_SIDES, drop_shared_groups
from halfmoon.data.partition.primitives import GroupHoldout, named_generator

UNKNOWN = -1
"""The label of a training image whose true label is unknown: it cannot serve to measure pseudo-labels."""


class SkippedImage(NamedTuple):
    """An image that was left out, because its file cannot be read."""

    row: int  # index among all images, with the unreadable ones
    path: str  # the file, and the row for a table of images
    reason: str


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one size with their labels.

    Attributes:
        images: uint8 (N, H, W, C), C = 1 or 3.
        labels: int64 (N,).
        spread: The `channel_statistics` of the images if they are known already.
        selection_note: A note on the selection of these images, if the files do not define it.
        groups: The group of each image, such as a patient; "" for none.
        clients: The client of each image, int64 (N,), if the data set defines it.
        skipped: The images that were left out, because their files cannot be read.

    Raises:
        UserError: If an array has another type or shape.

    Examples:
        >>> images = halfmoon.Images(np.zeros((10, 8, 8, 1), np.uint8), np.arange(10) // 5)
        >>> images.rows(images.labels == 1)
        <5 images of 8x8 with 1 channel>
    """

    images: np.ndarray
    labels: np.ndarray
    spread: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    selection_note: str = ""
    groups: Sequence[str] | None = None
    clients: np.ndarray | None = None
    skipped: tuple[SkippedImage, ...] = ()

    def rows(self, selection: np.ndarray) -> "Images":
        """Select images, with their labels, groups and clients.

        Args:
            selection: row numbers, or a mask, bool (N,).
        """
        groups = None if self.groups is None else np.array(self.groups)[selection].tolist()
        clients = None if self.clients is None else self.clients[selection]
        return Images(self.images[selection], self.labels[selection], groups=groups, clients=clients)

    def __post_init__(self) -> None:
        """Check the types and shapes of images and labels."""
        shape = self.images.shape
        dtype = self.images.dtype
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3):
            raise UserError(f"images must be uint8 (N, H, W, 1 or 3), but are {dtype} {shape}; convert them first.")
        if self.labels.dtype != np.int64 or self.labels.shape != shape[:1]:
            raise UserError(
                f"labels must be int64 ({shape[0]},), one for each image, "
                f"but are {self.labels.dtype} {self.labels.shape}."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"<{len(self):,} images of {_describe_size(self)}>"


@dataclass(frozen=True, eq=False)
class Source:
    """A data set in memory.

    Attributes:
        name: The name, for messages and tables.
        train: The training images; those without a label have the label `UNKNOWN`.
        test: The test images.
        classes: The class names, by label.
        mirror: True if a mirrored image has the same class (False for digits).
        mean: The mean of each channel of the training pixels, 0 to 1.
        std: The standard deviation of each channel.
        validation: Images that are not used for training.
        selection_note: A note on the selection of the test images, if the files do not define it.
        notes: Sentences about the images that a user should know: copies, images that were left out.
        skipped: The images that were left out, because their files cannot be read.

    Raises:
        UserError: If images and classes disagree.

    Examples:
        >>> halfmoon.load_data("digits")
        <digits: 1,437 train, 360 test images of 8x8 with 1 channel, 10 classes>
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mirror: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    validation: Images | None = None
    selection_note: str = ""
    notes: tuple[str, ...] = ()
    skipped: tuple[SkippedImage, ...] = ()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(images):,} {name}" for name, images in self.parts.items())
        return f"<{self.name}: {sizes} images of {_describe_size(self.train)}, {len(self.classes)} classes>"

    @property
    def parts(self) -> dict[str, Images]:
        """The images of train, test and, if it exists, validation, by name."""
        subsets = {"train": self.train, "test": self.test, "validation": self.validation}
        return {name: images for name, images in subsets.items() if images is not None}

    def __post_init__(self) -> None:
        """Check that every label of the data set has a class, and that train and test images have the same shape."""
        for subset, images in self.parts.items():
            if not len(images):
                raise UserError(f"{self.name}: the {subset} part has no images.")
            low = int(images.labels.min())
            high = int(images.labels.max())
            if low == UNKNOWN and subset != "train":
                row = int(np.flatnonzero(images.labels == UNKNOWN)[0])
                raise UserError(
                    f"{self.name}: row {row} of {subset} has no label, but only training images can go without one."
                )
            if low < UNKNOWN or high >= len(self.classes):
                row = int(np.flatnonzero((images.labels < UNKNOWN) | (images.labels >= len(self.classes)))[0])
                raise UserError(
                    f"{self.name}: row {row} of {subset} has label {int(images.labels[row])}, "
                    f"but the {len(self.classes)} classes are numbered 0 to {len(self.classes) - 1}."
                )
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise UserError(
                f"{self.name}: train images are {_describe_size(self.train)}, test images {_describe_size(self.test)}; "
                "both need one size and one number of channels."
            )


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Compute mean and (population) standard deviation of each channel of uint8 (N, H, W, C), scaled to 0 to 1.

    Both are computed from a histogram of the 256 values: exactly, and independently of the order of the images. The
    deviation of a channel with one value only is 1, because normalization divides by it.
    """
    values = np.arange(256) / 255.0
    means = []
    deviations = []
    counts = np.zeros((images.shape[3], 256), np.int64)  # the histogram of each channel
    for chunk in _iterate_chunks(images):
        for channel in range(images.shape[3]):
            counts[channel] += np.bincount(chunk[..., channel].reshape(-1), minlength=256)
    for channel in range(images.shape[3]):
        weight = counts[channel] / counts[channel].sum()
        mean = float(weight @ values)
        means.append(mean)
        deviation = float(np.sqrt(weight @ (values - mean) ** 2))
        deviations.append(deviation if np.count_nonzero(counts[channel]) > 1 else 1.0)
    return tuple(means), tuple(deviations)


_CHUNK_BYTES = 2**24
"""Largest number of bytes of images that are read at once, unless one image has more."""


def _iterate_chunks(images: np.ndarray) -> Iterator[np.ndarray]:
    """Yield images in chunks, because `bincount` converts each byte to eight.

    Memory-mapped arrays are read from their file instead: pages of the map would count as memory of this process.
    """
    if not len(images):
        return
    step = max(1, _CHUNK_BYTES // max(1, images[0].size))
    starts = range(0, len(images), step)
    is_mapped = isinstance(images, np.memmap) and images.filename is not None and images.flags.c_contiguous
    if not is_mapped:
        for start in starts:
            yield images[start : start + step]
        return
    with open(images.filename, "rb") as file:  # type: ignore[union-attr]
        file.seek(images.offset)  # type: ignore[union-attr]
        for start in starts:
            shape = (min(step, len(images) - start), *images.shape[1:])
            yield np.frombuffer(file.read(int(np.prod(shape))), np.uint8).reshape(shape)


def pad_to(images: np.ndarray, size: int) -> np.ndarray:
    """Pad images (N, H, W, C) with zeros to (N, size, size, C), centered.

    If the difference is odd, the additional row is at the bottom and the additional column on the right.

    Raises:
        UserError: If an image is larger than `size`.
    """
    height, width = images.shape[1:3]
    if height > size or width > size:
        raise UserError(f"images of {width}x{height} do not fit into {size}x{size}; shrink them first.")
    top = (size - height) // 2
    left = (size - width) // 2
    bottom = size - height - top
    right = size - width - left
    return np.pad(images, ((0, 0), (top, bottom), (left, right), (0, 0)))


def pad_source(source: Source, size: int) -> Source:
    """Pad all images of a data set with `pad_to`; mean and std remain those of the unpadded pixels."""
    parts = {
        name: replace(subset, images=pad_to(subset.images, size), spread=None) for name, subset in source.parts.items()
    }
    return replace(source, **parts)


_POOLED_IMAGES = 512
"""Number of images that are pooled at once: so many small ones fit into a processor's cache."""


def average_pool(images: np.ndarray, factor: int) -> np.ndarray:
    """Average images uint8 (N, H, W, C) over blocks of factor x factor pixels, rounded half up.

    Returns:
        uint8 (N, H // factor, W // factor, C).
    """
    count, height, width, channels = images.shape
    area = factor * factor
    result = np.empty((count, height // factor, width // factor, channels), np.uint8)
    for start in range(0, count, _POOLED_IMAGES):
        chunk = images[start : start + _POOLED_IMAGES]
        # Integers only, for the same bytes on every machine. Starting at half the divisor rounds to nearest.
        total = np.full((len(chunk), *result.shape[1:]), area // 2, np.uint32)
        for row in range(factor):
            for column in range(factor):
                total += chunk[:, row::factor, column::factor]
        result[start : start + _POOLED_IMAGES] = total // area
    return result


def take_share(source: Source, share: float) -> Source:
    """Reduce the training images of every class to a share, at least one image; keep all test images.

    The selection is the same in every run: a prefix of one permutation of each class, in the original order.
    """
    if share == 1:
        return source
    rows = _draw_class_share(source, share, "share")
    return replace(source, train=source.train.rows(rows))


def hide_last_classes(source: Source, count: int) -> Source:
    """Make the last `count` classes unknown: no label names them, and their images are not tested (an open set).

    Their training images remain, with the label `UNKNOWN`.

    Raises:
        UserError: If fewer than two classes would remain, or images without a label may be of any class already.
    """
    if not count:
        return source
    known_count = len(source.classes) - count
    if known_count < 2:
        raise UserError(
            f"{source.name}: unknown_classes {count} leaves {max(0, known_count)} of {len(source.classes)} classes to "
            "learn; choose a number that leaves two or more."
        )
    if (source.train.labels == UNKNOWN).any():
        raise UserError(
            f"{source.name} has images without a label, which may be of any class already; leave unknown_classes out."
        )
    labels = np.where(source.train.labels < known_count, source.train.labels, UNKNOWN)
    is_known_test = source.test.labels < known_count
    return replace(
        source,
        train=replace(source.train, labels=labels),
        test=source.test.rows(is_known_test),
        classes=source.classes[:known_count],
    )


def hold_out(source: Source, share: float) -> Source:
    """Move a share of the training images of every class, at least one image, to validation.

    The selection is the same in every run, regardless of its seed. No group (`Images.groups`), such as the images of a
    patient, has images on both sides.

    Args:
        source: The data set.
        share: The share of the images, 0 to 1; 0 returns the data set unchanged.

    Returns:
        A copy with fewer training images and with `validation`; its `selection_note` states the number of moved images.

    Raises:
        UserError: If no training image of a class would remain.
    """
    if not share:
        return source
    train = source.train
    selection = _draw_class_share(source, share, stream="validation", groups=train.groups)
    selection &= train.labels != UNKNOWN  # accuracy on an image without a label cannot be measured
    missing_classes = np.setdiff1d(train.labels[selection], train.labels[~selection])
    if len(missing_classes):
        raise UserError(
            f"{source.name}: validation_share {share:g} leaves no training image of class {source.classes[missing_classes[0]]!r}; "
            "choose a smaller share."
        )
    # An unlabeled image of a held-out group must not remain in training either.
    remaining = drop_shared_groups(np.flatnonzero(~selection), np.flatnonzero(selection), train.groups)
    source = replace(source, train=train.rows(remaining), validation=train.rows(selection))
    if train.groups is None:
        return source
    note = f"{selection.sum():,} images are set aside for validation; {NO_GROUP_ON_BOTH_SIDES}"
    return replace(source, selection_note="; ".join(filter(None, [source.selection_note, note])))


def _draw_class_share(source: Source, share: float, stream: str, groups: Sequence[str] | None = None) -> np.ndarray:
    """Draw a share of the training images of every class, at least one: a mask, bool (N,).

    The seed is fixed, so that every run has the same selection. Images without a label are drawn like a class, unless
    `groups` are given: then none of them is selected.

    Args:
        source: The data set.
        share: The share, between 0 and 1.
        stream: The name of the random stream; different names give independent selections.
        groups: The group of each image, such as its patient; all images of a group are on the same side.
    """
    mask = np.zeros(len(source.train), bool)
    holdout = GroupHoldout()  # remembers the side of each group over all classes
    for label in np.unique(source.train.labels):
        rows = np.flatnonzero(source.train.labels == label)
        if groups is not None and label == UNKNOWN:
            continue
        order = named_generator(0, stream, source.name, str(label)).permutation(rows)
        count = max(1, round(share * len(rows)))
        selected = order[:count] if groups is None else holdout.draw(order, groups, count)
        mask[selected] = True
    return mask


def shrink(source: Source, factor: int) -> Source:
    """Reduce height and width of all images by a factor with average pooling, and recompute mean and std of channels.

    A factor of 2 turns 32x32 into 16x16; 1 returns the data set unchanged. All parts (train, test, validation) are
    reduced; mean and std are those of the training images.

    Raises:
        UserError: If `factor` does not divide height and width.
    """
    _, height, width, _ = source.train.images.shape
    if factor < 1 or height % factor or width % factor:
        raise UserError(
            f"{source.name}: {factor} does not divide images of {width}x{height}; choose a factor that divides both."
        )
    if factor == 1:
        return source
    # `spread`, the mean and std of the pixels before, is cleared.
    parts = {
        name: replace(subset, images=average_pool(subset.images, factor), spread=None)
        for name, subset in source.parts.items()
    }
    mean, std = channel_statistics(parts["train"].images)
    return replace(source, **parts, mean=mean, std=std)


def _describe_size(images: Images) -> str:
    _, height, width, channels = images.images.shape
    return f"{width}x{height} with {channels} channel{'s' if channels > 1 else ''}"
