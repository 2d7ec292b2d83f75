"""What a data set is once it is in memory: uint8 images, integer labels, class names, pixel statistics."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.groups import NO_GROUP_ON_BOTH_SIDES, drop_shared_groups
from halfmoon.data.partition.primitives import GroupHoldout, named_generator

UNKNOWN = -1
"""The label of a training image that nobody has labeled, not even to check pseudo-labels by."""


@dataclass(frozen=True, eq=False)
class Images:
    """Hold `images` uint8 (N, H, W, C), C = 1 or 3, and `labels` int64 (N,); raise UserError otherwise."""

    images: np.ndarray  # uint8 (N, H, W, C)
    labels: np.ndarray  # int64 (N,)
    spread: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # `channel_statistics` of the images, where known
    remark: str = ""  # how these came to be a part of the data set, where nobody said so
    groups: Sequence[str] | None = None  # whose image each is, "" for nobody known: a patient

    def rows(self, selection: np.ndarray) -> "Images":
        """Return the images of the rows in `selection`, numbers or bool (N,)."""
        groups = None if self.groups is None else np.array(self.groups)[selection].tolist()
        return Images(self.images[selection], self.labels[selection], groups=groups)

    def __post_init__(self) -> None:
        shape, dtype = self.images.shape, self.images.dtype
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
    """Hold a data set: `train` and `test`, class names, and what its pixels and classes are like.

    `mirror`: whether a mirrored image is still of its class (False for digits). `mean` and `std`: one number a
    channel, of the training pixels in 0..1. `validation`: training images that nobody trains on. `remark`: how test
    images were selected where the files do not say. A training image whose label nobody knows has `UNKNOWN`.
    Raise UserError where the parts and the classes disagree.
    """

    name: str  # for people
    train: Images
    test: Images
    classes: tuple[str, ...]  # their names, by label
    mirror: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    validation: Images | None = None
    remark: str = ""

    def __repr__(self) -> str:
        parts = ", ".join(f"{len(part):,} {name}" for name, part in self.parts.items())
        return f"<{self.name}: {parts} images of {_describe_size(self.train)}, {len(self.classes)} classes>"

    @property
    def parts(self) -> dict[str, Images]:
        """Return the parts that are there: train, test, validation."""
        parts = {"train": self.train, "test": self.test, "validation": self.validation}
        return {name: part for name, part in parts.items() if part is not None}

    def __post_init__(self) -> None:
        for word, part in self.parts.items():
            if not len(part):
                raise UserError(f"{self.name}: the {word} part has no images.")
            low, high = int(part.labels.min()), int(part.labels.max())
            if low == UNKNOWN and word != "train":
                row = int(np.flatnonzero(part.labels == UNKNOWN)[0])
                raise UserError(
                    f"{self.name}: row {row} of {word} has no label, but only training images can go without one."
                )
            if low < UNKNOWN or high >= len(self.classes):
                row = int(np.flatnonzero((part.labels < UNKNOWN) | (part.labels >= len(self.classes)))[0])
                raise UserError(
                    f"{self.name}: row {row} of {word} has label {int(part.labels[row])}, "
                    f"but the {len(self.classes)} classes are numbered 0 to {len(self.classes) - 1}."
                )
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            raise UserError(
                f"{self.name}: train images are {_describe_size(self.train)}, test images {_describe_size(self.test)}; "
                "both need one size and one number of channels."
            )


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and (population) standard deviation of each channel of uint8 (N, H, W, C), in 0..1.

    They come from a histogram of the 256 values, so they are exact and do not depend on the order of rows.
    """
    values = np.arange(256) / 255.0
    means, deviations = [], []
    counts = np.zeros((images.shape[3], 256), np.int64)
    for part in _iterate_chunks(images):
        for channel in range(images.shape[3]):
            counts[channel] += np.bincount(part[..., channel].reshape(-1), minlength=256)
    for channel in range(images.shape[3]):
        weight = counts[channel] / counts[channel].sum()
        mean = float(weight @ values)
        means.append(mean)
        deviations.append(float(np.sqrt(weight @ (values - mean) ** 2)))
    return tuple(means), tuple(deviations)


def _iterate_chunks(images: np.ndarray) -> Iterator[np.ndarray]:
    """Yield images a few at a time, as counting makes eight bytes of each; mapped ones are read past the map.

    A map's pages count as this process' memory for as long as the system leaves them there.
    """
    step = max(1, 2**24 // max(1, images[0].size)) if len(images) else 1
    whole = isinstance(images, np.memmap) and images.filename is not None and images.flags.c_contiguous
    with open(images.filename, "rb") if whole else nullcontext() as file:  # type: ignore[union-attr]
        if file is not None:
            file.seek(images.offset)  # type: ignore[union-attr]
        for first in range(0, len(images), step):
            shape = (min(step, len(images) - first), *images.shape[1:])
            if file is None:
                yield images[first : first + step]
            else:
                yield np.frombuffer(file.read(int(np.prod(shape))), np.uint8).reshape(shape)


def pad_to(images: np.ndarray, size: int) -> np.ndarray:
    """Return (N, H, W, C) centered in (N, size, size, C): zeros around it, never resampled, channels kept.

    An odd difference puts the extra row below and the extra column to the right. Raise UserError where an
    image is larger than `size`.
    """
    _, height, width, _ = images.shape
    if height > size or width > size:
        raise UserError(f"images of {width}x{height} do not fit into {size}x{size}; shrink them first.")
    top, left = (size - height) // 2, (size - width) // 2
    return np.pad(images, ((0, 0), (top, size - height - top), (left, size - width - left), (0, 0)))


def pad_source(source: Source, size: int) -> Source:
    """Return the source with images padded by `pad_to`; mean and std stay those of the unpadded pixels."""
    parts = {name: replace(part, images=pad_to(part.images, size), spread=None) for name, part in source.parts.items()}
    return replace(source, **parts)


def average_pool(images: np.ndarray, factor: int) -> np.ndarray:
    """Return uint8 (N, H, W, C) averaged over factor x factor blocks, rounded to nearest (a half goes up)."""
    count, height, width, channels = images.shape
    area = factor * factor
    result = np.empty((count, height // factor, width // factor, channels), np.uint8)
    for start in range(0, count, 512):  # as many as fit a processor's cache
        part = images[start : start + 512]
        # Whole numbers only: the same bytes on every machine.
        total = np.full((len(part), *result.shape[1:]), area // 2, np.uint32)
        for row in range(factor):
            for column in range(factor):
                total += part[:, row::factor, column::factor]
        result[start : start + 512] = total // area
    return result


def take_share(source: Source, share: float) -> Source:
    """Return the source with a share of the training images of every class, at least one; the test images all stay.

    The rows are the same for every run: a prefix of one permutation of each class, in their old order.
    """
    if share == 1:
        return source
    rows = _draw_class_share(source, share, "share")
    return replace(source, train=source.train.rows(rows))


def hold_out(source: Source, share: float) -> Source:
    """Return the source with a share of the training images of every class, at least one, set aside for validation.

    The rows are the same for every run. Raise UserError where a class would keep no training image.
    """
    if not share:
        return source
    train = source.train
    selection = _draw_class_share(source, share, "validation", train.groups) & (train.labels != UNKNOWN)
    lost = np.setdiff1d(train.labels[selection], train.labels[~selection])
    if len(lost):
        raise UserError(
            f"{source.name}: validation_share {share:g} leaves no training image of class {source.classes[lost[0]]!r}; "
            "choose a smaller share."
        )
    left = drop_shared_groups(np.flatnonzero(~selection), np.flatnonzero(selection), train.groups)
    parts = {"train": left, "validation": selection}
    source = replace(source, **{name: train.rows(rows) for name, rows in parts.items()})
    if train.groups is None:
        return source
    words = f"{selection.sum():,} images are set aside for validation; {NO_GROUP_ON_BOTH_SIDES}"
    return replace(source, remark="; ".join(filter(None, [source.remark, words])))


def _draw_class_share(source: Source, share: float, word: str, groups: Sequence[str] | None = None) -> np.ndarray:
    """Return which training images, bool (N,), are the share of every class, at least one, that `word` draws.

    With `groups` none has images on both sides.
    """
    mask = np.zeros(len(source.train), bool)
    sides = GroupHoldout()
    for label in np.unique(source.train.labels):
        rows = np.flatnonzero(source.train.labels == label)
        if groups is not None and label == UNKNOWN:
            continue
        order = named_generator(0, word, source.name, str(label)).permutation(rows)
        count = max(1, round(share * len(rows)))
        mask[order[:count] if groups is None else sides.draw(order, groups, count)] = True
    return mask


def shrink(source: Source, factor: int) -> Source:
    """Return the source at 1/factor of its height and width by average pooling, mean and std computed anew.

    A factor of 2 turns 32x32 into 16x16. Raise UserError where `factor` does not divide height and width.
    """
    _, height, width, _ = source.train.images.shape
    if factor < 1 or height % factor or width % factor:
        raise UserError(
            f"{source.name}: {factor} does not divide images of {width}x{height}; choose a factor that divides both."
        )
    if factor == 1:
        return source
    parts = {
        name: replace(part, images=average_pool(part.images, factor), spread=None)
        for name, part in source.parts.items()
    }
    mean, std = channel_statistics(parts["train"].images)
    return replace(source, **parts, mean=mean, std=std)


def _describe_size(part: Images) -> str:
    _, height, width, channels = part.images.shape
    return f"{width}x{height} with {channels} channel{'s' if channels > 1 else ''}"
