"""Data sets that a Python program passes as objects: a registry by digest, in place of a folder.

A configuration stores a name such as "memory:1f3a9c07b2d4-77e0a1": a hash of the training images with their labels and
classes, and one of test images and clients. `halfmoon.data.conversion` makes collections from arrays, PIL images, and
data sets of other libraries.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from halfmoon.core.errors import ImageReadError, UnknownRangeError, UserError
from halfmoon.data.class_names import describe_near_equal
from halfmoon.data.copies import group_copies
from halfmoon.data.groups import hash_pixels, merge_equal_images
from halfmoon.data.images import UNKNOWN, Images, Source, channel_statistics
from halfmoon.data.near_duplicates import find_near_duplicates, join_near_duplicates
from halfmoon.data.partition.primitives import GroupHoldout, named_generator
from halfmoon.data.preparation import UNCHANGED, Preparation
from halfmoon.data.readers.class_folders import HELD_OUT_SHARE
from halfmoon.data.readers.decode import MAX_LISTED

PREFIX = "memory:"
"""Start of the names of data sets in memory."""

DIGEST_LENGTHS = (12, 6)
"""Hexadecimal digits of the two hashes in a name."""

TITLE = "arrays"
"""Name of a data set in memory, for messages and tables."""


@dataclass(frozen=True, eq=False)
class ImageCollection:
    """N images with labels, which are decoded when they are needed and may have several sizes.

    Attributes:
        read: decodes the image of a row: uint8 (H, W, 1 or 3).
        labels: int64 (N,), `UNKNOWN` for an unlabeled image.
        classes: class names by label.
        name: the argument that the images come from, for messages.
        pixels: the images as one array, uint8 (N, H, W, 1 or 3), if they are one already.
    """

    read: Callable[[int, Preparation], np.ndarray]
    labels: np.ndarray
    classes: tuple[str, ...]
    name: str = "data"
    pixels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_fully_labeled(self) -> bool:
        """True if every image has a label."""
        return bool((self.labels != UNKNOWN).all())

    def compute_digest(self) -> str:
        """Compute a SHA-256 of images, labels and class names."""
        digest = hashlib.sha256("\0".join(self.classes).encode())
        digest.update(np.ascontiguousarray(self.labels, "<i8").tobytes())
        for image in self._read_all(UNCHANGED):
            digest.update(str(image.shape).encode())
            digest.update(np.ascontiguousarray(image).tobytes())
        return digest.hexdigest()

    def _read_all(self, preparation: Preparation) -> Iterator[np.ndarray]:
        """Decode the images in turn; raise UserError that names all unreadable ones at the first of them."""
        for row in range(len(self)):
            try:
                image = self.read(row, preparation)
            except ImageReadError as error:
                raise self._describe_unreadable(row, error, preparation) from error
            yield image

    def _describe_unreadable(self, first: int, error: ImageReadError, preparation: Preparation) -> UserError:
        """Describe all images that cannot be read, of which `first` is the first row and `error` its error."""
        errors = [error]
        for row in range(first + 1, len(self)):
            try:
                self.read(row, preparation)
            except ImageReadError as later_error:
                errors.append(later_error)
        if len(errors) == 1 or isinstance(error, UnknownRangeError):
            return error
        # The advice of each error is dropped, because the message ends with one for all images.
        reasons = [str(each).removesuffix("; replace or remove it.").removesuffix(".") for each in errors]
        more = f" and {len(errors) - MAX_LISTED:,} more" if len(errors) > MAX_LISTED else ""
        return UserError(
            f"{'; '.join(reasons[:MAX_LISTED])}{more}. {len(errors):,} of {len(self):,} images of {self.name} cannot be "
            "read; leave them and their labels out."
        )

    def load(self, preparation: Preparation = UNCHANGED) -> np.ndarray:
        """Decode and prepare all images, uint8 (N, H, W, C).

        Args:
            preparation: the conversion: channels, size and window of gray values.

        Raises:
            UserError: the prepared images have different shapes. Its {resize=N} becomes the flag or the keyword of the
                option, depending on where the user reads it.
        """
        if self.pixels is not None:
            return preparation.convert(self.pixels)
        images: np.ndarray | None = None
        for row, image in enumerate(self._read_all(preparation)):
            if images is None:
                images = np.empty((len(self), *image.shape), np.uint8)
            if image.shape != images.shape[1:]:
                raise UserError(
                    f"{self.name}: image {row} is {_describe_shape(image.shape)}, but image 0 is "
                    f"{_describe_shape(images.shape[1:])}; give {{resize=N}} and {{channels=1}} or 3.",
                    option=("channels", "resize"),
                )
            images[row] = image
        assert images is not None, "a collection has at least one image"
        return images


@dataclass(frozen=True, eq=False)
class MemoryData:
    """A data set of a Python program.

    Attributes:
        train: the training images; some may be unlabeled.
        test: the test images; None to hold out `HELD_OUT_SHARE` of the labeled training images of every class.
        clients: the client of each training image, int64 (N,), from 0; None if a scenario assigns them.
        mirror: True if a mirrored image has the same class.
        notes: sentences for the user about what is not used.
    """

    train: ImageCollection
    test: ImageCollection | None = None
    clients: np.ndarray | None = None
    mirror: bool = True
    notes: tuple[str, ...] = ()

    def compute_name(self) -> str:
        """Compute the name: a hash of the training images, and one of test images and clients."""
        tests = "" if self.test is None else self.test.compute_digest()
        clients = b"" if self.clients is None else np.ascontiguousarray(self.clients, "<i8").tobytes()
        other = hashlib.sha256(tests.encode() + clients).hexdigest()
        train_length, other_length = DIGEST_LENGTHS
        return f"{PREFIX}{self.train.compute_digest()[:train_length]}-{other[:other_length]}"


_registered: dict[str, MemoryData] = {}


def register(data: MemoryData) -> str:
    """Register a data set for the rest of this process, and return its name for the option `data`."""
    name = data.compute_name()
    _registered[name] = data
    return name


@contextmanager
def registered(data: MemoryData) -> Iterator[str]:
    """Register a data set for a `with` block, and yield its name for the option `data`.

    At the end the registration before it (of equal images) is restored, so that the images of this one can be freed.
    """
    name = data.compute_name()
    before = _registered.get(name)
    _registered[name] = data
    try:
        yield name
    finally:
        del _registered[name]
        if before is not None:
            _registered[name] = before


def is_memory_name(name: str) -> bool:
    """Check whether the value of the option `data` is the name of a data set in memory."""
    return name.startswith(PREFIX)


def is_training_data(name: str, collection: ImageCollection) -> bool:
    """Check whether `name` is that of a data set whose training images are this collection."""
    digest = collection.compute_digest()[: DIGEST_LENGTHS[0]]
    return is_memory_name(name) and name.removeprefix(PREFIX).split("-")[0] == digest


def find(name: str) -> MemoryData:
    """Return the data set that this process has registered under a name, which contains a digest of its images.

    Raises:
        UserError: this process has registered no data set with this digest.
    """
    if name not in _registered:
        raise UserError(
            f"{name} is a data set of a Python program, which halfmoon does not store: pass the same data (and test, "
            "clients) again, as halfmoon.resume(FOLDER, data=...) or in the call that started the run."
        )
    return _registered[name]


def load_memory(name: str, preparation: Preparation = UNCHANGED) -> Source:
    """Load a data set that a Python program passed as arrays or images and that is registered under a name.

    Without test images, `HELD_OUT_SHARE` of the labeled images of every class are the test, drawn as for class folders.

    Args:
        name: its name, which contains a digest of its images.
        preparation: the conversion of images: channels, size and window of gray values.

    Raises:
        UserError: there is no such data set, or images have different sizes.
    """
    data = find(name)
    train = Images(data.train.load(preparation), data.train.labels, clients=data.clients)
    selection_note = ""
    notes: list[str] = [*data.notes]
    if data.test is not None:
        test = Images(data.test.load(preparation), data.test.labels)
        if test.images.shape[3] != train.images.shape[3]:
            raise UserError(
                "data and test have different numbers of channels; give {channels=1} or 3.", option="channels"
            )
    else:
        hashes = hash_pixels(train.images)
        pairs = find_near_duplicates([train.images], hashes)
        try:
            is_test, is_left_out = _draw_test_rows(data.train, join_near_duplicates(pairs, hashes))
        except UserError:  # too few images are different ones: near-duplicates are then only reported
            is_test, is_left_out = _draw_test_rows(data.train, hashes)
        selection_note = (
            f"no test was given, so {HELD_OUT_SHARE:.0%} of the labeled images of every class, {is_test.sum():,} in "
            "all, are held out as the test; where images share a patient or an object, give test yourself"
        )
        if is_left_out.any():
            notes.append(f"{is_left_out.sum():,} unlabeled images are copies of test images and are left out")
        test = replace(train.rows(is_test), clients=None)  # test images are at no client
        train = train.rows(~is_test & ~is_left_out)
    mean, std = channel_statistics(train.images)
    train, test, copy_notes = group_copies(train, test)
    notes += [*copy_notes, *describe_near_equal(data.train.classes)]
    return Source(
        TITLE,
        train,
        test,
        data.train.classes,
        data.mirror,
        mean,
        std,
        selection_note=selection_note,
        notes=tuple(notes),
    )


def check_crop(name: str, preparation: Preparation) -> None:
    """Raise UserError if the option `crop` has no effect on any training image of a data set."""
    train = find(name).train
    if not preparation.crop:
        return
    if preparation.size is None:
        raise UserError("{crop} has no effect: it needs {resize=N}; leave it out.", option=("crop", "resize"))
    height, width = preparation.size
    for row in range(len(train)):
        shape = train.read(row, UNCHANGED).shape
        if shape[0] * width != shape[1] * height:
            return
    raise UserError("{crop} has no effect: all images have the proportions of the result; leave it out.", option="crop")


def _draw_test_rows(collection: ImageCollection, hashes: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Draw `HELD_OUT_SHARE` of the labeled images of every class as test images, the same ones in every run.

    Images with one hash are all test images or all training images.

    Args:
        collection: the images, some of which may be unlabeled.
        hashes: a hash of each image's pixels, the same for near-duplicates.

    Returns:
        True for a test image, and True for an unlabeled image that is a copy of one, bool (N,) each.

    Raises:
        UserError: If a class has fewer than two different labeled images.
    """
    no_groups = [""] * len(collection)
    is_test = _hold_out(collection, no_groups)
    labeled = collection.labels != UNKNOWN
    test_hashes = {hashes[row] for row in np.flatnonzero(is_test).tolist()}
    # A draw that keeps copies together selects other images, so it is only made if the first one has divided copies:
    # data without copies keep the test images that they have always had. Class folders follow the same rule.
    if any(hashes[row] in test_hashes for row in np.flatnonzero(labeled & ~is_test).tolist()):
        merged = merge_equal_images(None, hashes)
        assert merged is not None, "there are copies"
        is_test = _hold_out(collection, merged)
        test_hashes = {hashes[row] for row in np.flatnonzero(is_test).tolist()}
    is_copy = np.array([image_hash in test_hashes for image_hash in hashes])
    return is_test, is_copy & ~labeled


def _hold_out(collection: ImageCollection, groups: Sequence[str]) -> np.ndarray:
    """Draw test images so that no group is divided; True for a test image, bool (N,).

    Args:
        collection: the images, some of which may be unlabeled.
        groups: the group of each image, "" for none: images with equal pixels.
    """
    is_test = np.zeros(len(collection), bool)
    holdout = GroupHoldout()
    for label, name in enumerate(collection.classes):
        rows = np.flatnonzero(collection.labels == label)
        if len(rows) < 2:
            raise UserError(
                f"{collection.name}: class {name!r} has {len(rows)} labeled image{'s' if len(rows) != 1 else ''}, "
                "too few to train and test on; add some, or give test."
            )
        # The random stream of class folders, so that the same images in a folder give the same test.
        order = named_generator(0, "held out", name).permutation(len(rows))
        count = max(1, round(HELD_OUT_SHARE * len(rows)))
        test_rows = holdout.draw(order, [groups[row] for row in rows.tolist()], count)
        if not 0 < len(test_rows) < len(rows):
            raise UserError(
                f"{collection.name}: too few of the {len(rows):,} labeled images of class {name!r} are different ones to "
                "train and test on (the others are copies with equal pixels); add other images, or give test."
            )
        is_test[rows[test_rows]] = True
    return is_test


def _describe_shape(shape: tuple[int, ...]) -> str:
    height, width, channels = shape
    return f"{width}x{height} with {channels} channel{'s' if channels > 1 else ''}"
