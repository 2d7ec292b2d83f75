"""Decode a site's images once, into a memory-mapped array with an index that detects later changes of the images."""

import hashlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.preparation import Preparation
from halfmoon.data.readers.cache import npy_header
from halfmoon.data.readers.decode import decode_to_shape, read_header
from halfmoon.sites.folders.labels import STATE_FOLDER
from halfmoon.sites.folders.site_folder import Progress, SiteFolder, join_names, read_image_bytes, read_site
from halfmoon.storage import atomic_io, locks

INDEX_FILE = "index.json"
LOCK_FILE = "lock"

INDEX_VERSION = 3
"""Version of the index; it must be increased when decoding starts to give other pixels."""

MAX_SIDE_PIXELS = 4096

_ARRAY_FILE = re.compile(rf"images-[0-9a-f]{{16}}\.npy|\.images-[0-9a-f]{{16}}\.npy{re.escape(atomic_io.PARTIAL)}")
"""Names of the arrays that this module writes, complete or partial."""

Stamp = tuple[int, int]
"""Size in bytes and modification time in ns of an image file."""


@dataclass(frozen=True)
class PreparedSite:
    """The result of `prepare_site`.

    Attributes:
        site: the site with its decoded images.
        state_folder: the folder of the array and its index.
        written: whether the array or the index was written.
        decoded: the number of images that were decoded now.
        left_out: the reason for each image that cannot be read, by path.
    """

    site: SiteFolder
    state_folder: Path
    written: bool
    decoded: int
    left_out: Mapping[str, str]


def prepare_site(
    folder: Path,
    size: tuple[int, int] | None = None,
    channels: int | None = None,
    out: Path | None = None,
    progress: Progress | None = None,
    crop: bool = False,
    window: tuple[float, float] | None = None,
) -> PreparedSite:
    """Decode a site's images into one array on the disk, uint8 (N, H, W, channels).

    An image whose size and modification time are unchanged is copied from the previous array. If the process is killed,
    the previous or the new array is complete.

    Args:
        folder: the site's folder.
        size: height and width; None for those of the last time, at first those that all images have.
        channels: 1 (gray) or 3 (RGB); None for those of the last time, at first gray if all images are gray.
        out: the folder of the array; None for `STATE_FOLDER` in `folder`.
        progress: receives the number of images done, and of all images.
        crop: whether to keep the proportions and cut off the margins.
        window: the values of black and white in images of more than 8 bits.

    Raises:
        UserError: no image can be read, sizes differ and none is given, or `out` cannot be written.
    """
    site = read_site(folder)
    state_folder = out or folder / STATE_FOLDER
    if size is not None and not all(1 <= side <= MAX_SIDE_PIXELS for side in size):
        raise UserError(f"the size is {size[0]}x{size[1]}; each side must be from 1 to {MAX_SIDE_PIXELS} pixels.")
    if channels not in (None, 1, 3):
        raise UserError(f"channels is {channels}; it must be 1 (gray) or 3 (RGB).")
    stamps = _read_stamps(site)
    previous = _load_index(state_folder)
    shape = _choose_shape(site, previous, size, channels)
    preparation = Preparation(crop=crop, window=window)
    if previous is not None and previous.preparation != preparation.cache_id:
        previous = None
    up_to_date = previous is not None and previous.shape[1:] == shape and previous.stamps == stamps
    if previous is not None and up_to_date and previous.open_array() is not None:
        return _reuse_array(site, state_folder, previous)
    with _lock_state_folder(state_folder):
        index, decoded_count = _decode(site, stamps, shape, preparation, state_folder, previous, progress)
    return PreparedSite(
        site=_with_images(site, index),
        state_folder=state_folder,
        written=True,
        decoded=decoded_count,
        left_out=index.left_out,
    )


def open_prepared_site(folder: Path, out: Path | None = None, preparation: str | None = None) -> SiteFolder:
    """Open a site whose images were decoded by `prepare_site`, as a memory-mapped array without unreadable images.

    Args:
        folder: the site's folder.
        out: the folder of the array; None for `STATE_FOLDER` in `folder`.
        preparation: the `cache_id` of the `Preparation` that is required; None for any.

    Raises:
        UserError: the site was not prepared like this, or has changed since.
    """
    site = read_site(folder)
    state_folder = out or folder / STATE_FOLDER
    remedy = f"run halfmoon site prepare {folder}{f' --out {out}' if out is not None else ''}"
    index = _load_index(state_folder)
    if index is None:
        raise UserError(f"{folder} is not prepared: {remedy}.")
    if preparation is not None and index.preparation != preparation:
        raise UserError(f"{folder} is prepared in another way: {remedy} again.")
    stamps = _read_stamps(site)
    all_paths = stamps.keys() | index.stamps.keys()
    changed = sorted(path for path in all_paths if stamps.get(path) != index.stamps.get(path))
    if changed:
        names = join_names(changed, limit=3)
        raise UserError(f"{folder} has changed since it was prepared ({names}): {remedy} again.")
    if index.classes != site.classes or index.labels != _labels_by_path(site, index.left_out):
        raise UserError(f"{folder}: labels or classes have changed since it was prepared: {remedy} again.")
    if index.open_array() is None:
        raise UserError(f"{state_folder / index.array_file} is missing or damaged: {remedy} again.")
    return _with_images(site, index)


def read_left_out(state_folder: Path) -> dict[str, str]:
    """Read the reason for each image that `prepare_site` could not read, by path; {} if nothing was prepared there."""
    index = _load_index(state_folder)
    return {} if index is None else index.left_out


@dataclass(frozen=True)
class _Index:
    """The contents of index.json.

    Attributes:
        folder: the folder of the index and the array.
        array_file: the name of the array's file.
        shape: the array's shape, (N, H, W, C).
        classes: the class names.
        labels: class index of the images in the array, by path, in the order of its rows.
        stamps: size and time of all images, also of those left out, by path.
        left_out: the reason for each image that cannot be read, by path.
        preparation: the `cache_id` of the `Preparation`: crop and window, without size and channels.
    """

    folder: Path
    array_file: str
    shape: tuple[int, int, int, int]
    classes: tuple[str, ...]
    labels: dict[str, int]
    stamps: dict[str, Stamp]
    left_out: dict[str, str]
    preparation: str = ""

    def open_array(self) -> np.ndarray | None:
        """Map the array into memory; None if it is missing or does not match the index."""
        try:
            array = np.load(self.folder / self.array_file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return array if array.shape == self.shape and array.dtype == np.uint8 else None

    def write(self) -> None:
        """Write the index as index.json, atomically; `_load_index` reads it."""

        def describe_file(path: str, **properties: Any) -> dict[str, Any]:
            size_bytes, modified_ns = self.stamps[path]
            return {"path": path, **properties, "bytes": size_bytes, "mtime": modified_ns}

        value = {
            "version": INDEX_VERSION,
            "images": self.array_file,
            "shape": list(self.shape),
            "classes": list(self.classes),
            "form": self.preparation,
            "files": [describe_file(path, label=label) for path, label in self.labels.items()],
            "left_out": [describe_file(path, reason=reason) for path, reason in self.left_out.items()],
        }
        atomic_io.write_atomically(self.folder / INDEX_FILE, (json.dumps(value) + "\n").encode())


def _load_index(folder: Path) -> _Index | None:
    """Load the index of a folder's decoded images from index.json, and check the types of all values.

    Returns:
        The index; None if the file is missing, damaged or of another version, so that the images are decoded once more.
    """
    value: Any = atomic_io.read_json(folder / INDEX_FILE)
    try:
        if value["version"] != INDEX_VERSION:
            return None
        files = value["files"]
        left_out = value["left_out"]
        stamps = {file["path"]: (file["bytes"], file["mtime"]) for file in [*files, *left_out]}
        count, height, width, channels = value["shape"]
        index = _Index(
            folder=folder,
            array_file=Path(value["images"]).name,
            shape=(count, height, width, channels),
            classes=tuple(value["classes"]),
            labels={file["path"]: file["label"] for file in files},
            stamps=stamps,
            left_out={file["path"]: file["reason"] for file in left_out},
            preparation=value["form"],
        )
    except (KeyError, TypeError, ValueError):
        return None
    return index if _is_valid(index) else None


def _is_valid(index: _Index) -> bool:
    """Check the types of all values of an index from a file, and that its shape is possible."""
    numbers = [*index.shape, *index.labels.values()]
    for size_and_time in index.stamps.values():
        numbers += size_and_time
    texts = [*index.classes, *index.stamps, *index.left_out.values(), index.preparation]
    # `type(...) is`, not isinstance: bool is a subclass of int.
    if not all(type(number) is int for number in numbers) or not all(isinstance(text, str) for text in texts):
        return False
    count, height, width, channels = index.shape
    return count >= 0 and height > 0 and width > 0 and channels in (1, 3)


def _labels_by_path(site: SiteFolder, left_out: Mapping[str, str]) -> dict[str, int]:
    return {path: int(label) for path, label in zip(site.paths, site.labels, strict=True) if path not in left_out}


def _with_images(site: SiteFolder, index: _Index) -> SiteFolder:
    """Restrict a site to the images in the array, and add the array."""
    labels = np.array(list(index.labels.values()), np.int64)
    return replace(site, paths=tuple(index.labels), labels=labels, images=index.open_array())


def _reuse_array(site: SiteFolder, state_folder: Path, previous: _Index) -> PreparedSite:
    """Reuse images that were decoded earlier, and update their labels and classes in the index.

    Args:
        site: the site, with its present labels.
        state_folder: the folder of the array and its index.
        previous: the index.
    """
    index = replace(previous, labels=_labels_by_path(site, previous.left_out), classes=site.classes)
    changed = index != previous
    if changed:
        with _lock_state_folder(state_folder):
            index.write()
    return PreparedSite(
        site=_with_images(site, index),
        state_folder=state_folder,
        written=changed,
        decoded=0,
        left_out=previous.left_out,
    )


def _read_stamps(site: SiteFolder) -> dict[str, Stamp]:
    """Read (bytes, modification time in ns) of each image file by its path, by which changed images are detected."""
    stamps = {}
    for path in site.paths:
        try:
            status = os.stat(os.path.join(site.folder, path))
            stamps[path] = (status.st_size, status.st_mtime_ns)
        except OSError:  # deleted since the folder was listed: decoding reports it
            stamps[path] = (-1, -1)
    return stamps


def _count_sizes(site: SiteFolder) -> tuple[Counter[tuple[int, int]], bool]:
    """Count the images of each (height, width), and check whether all are gray, without decoding pixels."""
    sizes: Counter[tuple[int, int]] = Counter()
    all_gray = True
    for path in site.paths:
        image_header = read_header(site.folder / path)  # None for an unreadable image
        if image_header is not None:
            height, width, gray = image_header
            sizes[height, width] += 1
            all_gray = all_gray and gray
    return sizes, all_gray


def _choose_shape(
    site: SiteFolder, previous: _Index | None, size: tuple[int, int] | None, channels: int | None
) -> tuple[int, int, int]:
    """Choose the height, width and channels to which images are decoded.

    Args:
        site: the site.
        previous: the index of images that were decoded earlier, whose shape is the default; None for none.
        size: the required height and width; None to choose them: all images must then have the same.
        channels: the required number of channels, 1 or 3; None to choose it: 1 if all images are gray.

    Returns:
        Height, width, channels.

    Raises:
        UserError: no image can be read, or the images have several sizes and none is required.
    """
    if size is not None and channels is not None:
        return (*size, channels)
    if previous is not None:
        _, previous_height, previous_width, previous_channels = previous.shape
        height, width = size or (previous_height, previous_width)
        return height, width, channels or previous_channels
    sizes, all_gray = _count_sizes(site)
    if not sizes:
        raise UserError(f"{site.folder}: none of its {len(site):,} images can be read; see halfmoon site check.")
    if size is None and len(sizes) > 1:
        (height, width), count = sizes.most_common(1)[0]
        # UserError writes {size=HxW} as a flag or as a Python keyword.
        raise UserError(
            f"{site.folder}: its images have {len(sizes):,} sizes, most of them ({count:,}) {height}x{width}; give one "
            f"by {{size=HxW}}.",
            option="size",
        )
    height, width = size or next(iter(sizes))
    image_channels = 1 if all_gray else 3
    return height, width, channels or image_channels


@contextmanager
def _lock_state_folder(state_folder: Path) -> Iterator[None]:
    """Create and lock the folder of the decoded images during the `with` block.

    Args:
        state_folder: the folder: by default one in the site's folder, otherwise the one of the option "out".

    Raises:
        UserError: another process has the lock, or the folder cannot be written, also by the code of the `with` block.
    """
    try:
        state_folder.mkdir(parents=True, exist_ok=True)
        with locks.hold(state_folder / LOCK_FILE):
            yield
    except locks.LockConflict as error:
        raise UserError(
            f"{state_folder} is being prepared by another process; wait for it ({atomic_io.error_reason(error)})."
        ) from error
    except OSError as error:
        # UserError writes {out} as a flag or as a Python keyword.
        raise UserError(
            f"{state_folder} cannot be written ({atomic_io.error_reason(error)}); give another folder by {{out}}.",
            option="out",
        ) from error


def _decode(
    site: SiteFolder,
    stamps: Mapping[str, Stamp],
    shape: tuple[int, int, int],
    preparation: Preparation,
    state_folder: Path,
    previous: _Index | None,
    progress: Progress | None,
) -> tuple[_Index, int]:
    """Decode all images of a site into one array on the disk, and write the array's index.

    Args:
        site: the site.
        stamps: size and modification time of its image files, by path.
        shape: height, width and channels of the array's images.
        preparation: how images are cropped, and which values are black and white.
        state_folder: the folder of the array, which the caller has locked.
        previous: the index of an earlier array, from which unchanged images are copied; None for none.
        progress: receives the number of images done, and of all images.

    Returns:
        The index, and the number of images that were decoded (not copied from the previous array).

    Raises:
        UserError: no image can be read, or the disk has no space for the array.
    """
    required_bytes = len(site) * int(np.prod(shape))
    free_bytes = shutil.disk_usage(state_folder).free
    if required_bytes > free_bytes:
        raise UserError(
            f"{state_folder} has room for {free_bytes:,} bytes, but the decoded images need {required_bytes:,}; give "
            "another folder by {out} or a smaller {size}.",
            option=("size", "out"),
        )
    unchanged = _unchanged_images(previous, stamps, shape)
    content_hash = hashlib.sha256(json.dumps([shape, preparation.cache_id, stamps]).encode()).hexdigest()
    array_file = f"images-{content_hash[:16]}.npy"
    partial = state_folder / f".{array_file}{atomic_io.PARTIAL}"
    left_out: dict[str, str] = {}
    decoded = 0
    try:
        with partial.open("wb") as file:
            # The number of readable images is known at the end: numpy pads the header, so it can then be overwritten.
            file.write(npy_header((len(site), *shape)))
            for row, path in enumerate(site.paths):
                pixels = unchanged.get(path)
                try:
                    if pixels is None:
                        decoded += 1
                        data = read_image_bytes(site.folder, path)
                        pixels = decode_to_shape(data, path, *shape, preparation.crop, preparation.window)
                    file.write(pixels.tobytes())
                except UserError as error:
                    left_out[path] = str(error).removeprefix(f"{path}: ")
                if progress is not None:
                    progress(row + 1, len(site))
            if len(left_out) == len(site):
                raise UserError(f"{site.folder}: none of its {len(site):,} images can be read.")
            file.seek(0)
            labels = _labels_by_path(site, left_out)
            file.write(npy_header((len(labels), *shape)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, state_folder / array_file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    index = _Index(
        folder=state_folder,
        array_file=array_file,
        shape=(len(labels), *shape),
        classes=site.classes,
        labels=labels,
        stamps=dict(stamps),
        left_out=left_out,
        preparation=preparation.cache_id,
    )
    # The index is written after the array that it refers to, and before the previous array is deleted: if the process is
    # killed in between, the index always refers to a complete array.
    index.write()
    for path in state_folder.iterdir():
        if _ARRAY_FILE.fullmatch(path.name) and path.name != array_file:
            with suppress(OSError):  # Windows cannot delete a file that another process has open
                path.unlink(missing_ok=True)
    return index, decoded


def _unchanged_images(
    previous: _Index | None, stamps: Mapping[str, Stamp], shape: tuple[int, int, int]
) -> dict[str, np.ndarray]:
    """Collect the images that were decoded earlier and need not be decoded once more.

    Args:
        previous: the index of the earlier array; None for none.
        stamps: present size and modification time of the image files, by path.
        shape: the height, width and channels that are needed.

    Returns:
        Pixels, uint8 (H, W, C), by path, of the images whose files have not changed.
    """
    if previous is None or previous.shape[1:] != shape:
        return {}
    array = previous.open_array()  # None if its file is missing or damaged
    if array is None:
        return {}
    images = np.asarray(array)
    unchanged = {}
    # The labels of an index are in the order of the array's rows.
    for row, path in enumerate(previous.labels):
        if previous.stamps[path] == stamps.get(path):
            unchanged[path] = images[row]
    return unchanged
