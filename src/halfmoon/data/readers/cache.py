"""A cache of decoded images on disk, mapped into memory.

images-KEY.npy contains the pixels, images-KEY.labels.npy the labels, and images-KEY.json the class names and pixel
statistics, so that a start does not have to read all pixels.
"""

import hashlib
import io
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.core.user_cache import is_private, trim, user_cache
from halfmoon.data.images import Images, SkippedImage, channel_statistics
from halfmoon.storage import atomic_io

Decoded = tuple[Images, tuple[str, ...] | None]
"""Images, and their class names; None if the files do not contain names."""

Reader = Callable[[Path | None], Decoded]
"""Decodes images into a file, or into memory if the argument is None."""

READER_VERSION = 4
"""Part of every cache key. Increase it when a reader starts to produce other pixels."""

NO_CACHE = Path("off")
"""The value of `cache` to write no file."""

MIN_CACHED_BYTES = 2 * 2**20
"""Smallest size of the image files, in bytes, for which caching is worthwhile."""


def load_or_decode(folder: Path | None, files: Sequence[Path], read: Reader, cache_id: str = "") -> Decoded:
    """Load decoded images from the cache, or decode them and write them to the cache.

    The cache key is a hash of the files' paths, sizes and modification times, and of `cache_id`, which differs between
    readers that give different pixels for the same files. A damaged cache file is replaced. The user's cache is
    optional: if it cannot be written, nothing is cached, and its oldest files are removed when it becomes too large.

    Args:
        folder: cache folder. None: the user's cache, if it can be written and the files have at least
            `MIN_CACHED_BYTES`. `NO_CACHE`: write nothing.
        files: the image files that `read` decodes.
        read: the reader, which decodes into the file that is its argument, or into memory for None.
        cache_id: a string that identifies the preparation of the images.

    Raises:
        UserError: if a folder that the user named cannot be written.
    """
    if folder == NO_CACHE or (folder is None and sum(_status(path).st_size for path in files) < MIN_CACHED_BYTES):
        return read(None)
    if folder is not None:
        return _load_or_add(folder, files, read, cache_id)
    try:
        cache = user_cache("images")
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = cache / f"images-{cache_key(files, cache_id)}.npy"
        _remove_unless_private(path)
        result = _load_or_add(cache, files, read, cache_id)
    except UserError as error:
        if isinstance(error.__cause__, OSError):  # a full disk, or a home that cannot be written
            return read(None)
        raise
    except OSError:
        return read(None)
    trim(cache, path.stem)
    return result


def _remove_unless_private(path: Path) -> None:
    """Remove an entry of the user's cache that another user can have written, and close its folder to others.

    Otherwise others could plant images. It is not called for a folder that the user named, where they may write on
    purpose.

    Args:
        path: the entry's file of pixels, next to which are those of labels and metadata.
    """
    entry = [path, path.with_suffix(".labels.npy"), path.with_suffix(".json")]
    existing = [file for file in entry if file.is_symlink() or file.exists()]
    if all(is_private(file) for file in existing):
        return
    warnings.warn(f"{path} can be written by other users: its images are decoded again.", RuntimeWarning, stacklevel=2)
    path.parent.chmod(0o700)
    for file in existing:
        file.unlink()


def _load_or_add(folder: Path, files: Sequence[Path], read: Reader, cache_id: str) -> Decoded:
    """Load decoded images from the cache in `folder`; if they are not there, decode them and add them.

    Args:
        folder: the cache.
        files: the image files, whose paths, sizes and times identify the entry.
        read: decodes the images into a file.
        cache_id: a string that identifies the preparation of the images.
    """
    path = folder / f"images-{cache_key(files, cache_id)}.npy"
    stored = _read_stored(path)
    if stored is not None:
        return stored
    partial = path.with_name(f".{path.name}-{os.getpid()}.part")
    try:
        images, names = read(partial)
        statistics = channel_statistics(images.images)
        metadata = {"names": names, "statistics": statistics, "bytes": partial.stat().st_size}
        if images.skipped:
            metadata["skipped"] = images.skipped
        with write_atomically(path.with_suffix(".labels.npy")) as file:
            np.save(file, images.labels)
        atomic_io.write_atomically(path.with_suffix(".json"), (json.dumps(metadata) + "\n").encode())
        # The pixels last: an entry is complete only with them.
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{folder}: decoded images cannot be stored there ({error}); choose another folder.") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    # Load the new entry: its pixels are mapped from the file, not held in memory.
    stored = _read_stored(path)
    return stored if stored is not None else (images, names)


def _read_stored(path: Path) -> Decoded | None:
    """Load an entry of the cache: images and class names; None if it is missing or incomplete.

    `path` is the file of the pixels, next to which are the files of labels and metadata.
    """
    metadata: Any = atomic_io.read_json(path.with_suffix(".json"))
    try:
        if path.stat().st_size != metadata["bytes"]:
            return None
        os.utime(path)  # `trim` removes the least recently used entries
        mean, std = (tuple(float(value) for value in values) for values in metadata["statistics"])
        names = None if metadata["names"] is None else tuple(str(name) for name in metadata["names"])
        labels = np.load(path.with_suffix(".labels.npy"), allow_pickle=False)
        skipped = tuple(SkippedImage(int(row), str(name), str(why)) for row, name, why in metadata.get("skipped", ()))
        return Images(memory_map(path), labels, (mean, std), skipped=skipped), names
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError):
        return None


def cache_key(files: Sequence[Path], cache_id: str = "") -> str:
    """Hash `cache_id` and the path, size and modification time of each file to 16 hexadecimal digits."""
    digest = hashlib.sha256(f"{READER_VERSION}{cache_id}".encode())
    for path in files:
        status = _status(path)
        text = f"\0{os.path.abspath(path)}\0{status.st_size}\0{status.st_mtime_ns}"
        digest.update(os.fsencode(text))  # names may contain bytes that are no UTF-8
    return digest.hexdigest()[:16]


def _status(path: Path) -> os.stat_result:
    """Return the status of a file, or of a dead link itself: its image is then left out as unreadable."""
    try:
        return path.stat()
    except FileNotFoundError:
        return path.lstat()


@contextmanager
def write_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary binary file that replaces `path` if the block succeeds, and is removed otherwise.

    It is written in the same folder, which is created if necessary, flushed to disk and renamed.

    Raises:
        OSError: If it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp creates private files; access to data files is controlled by their folder.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def collect_rows(rows: Iterator[np.ndarray], count: int, into: Path | None) -> np.ndarray:
    """Collect rows of uint8 of one shape into one array, in memory or in a file that is then mapped into memory.

    Args:
        rows: The rows.
        count: Their number, at most: rows may be missing at the end.
        into: The file that rows are written to one by one; None: memory.

    Raises:
        UserError: If there are no rows.
        OSError: If the file cannot be written.
    """
    first = next(rows, None)
    if first is None:
        raise UserError("there are no images to read.")
    shape = (count, *first.shape)
    all_rows = chain([first], rows)
    if into is None:
        array = np.empty(shape, np.uint8)
        number = 0
        for row in all_rows:
            array[number] = row
            number += 1
        return array[:number]
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.open("wb") as file:
        file.write(npy_header(shape))
        number = 0
        for row in all_rows:
            file.write(row.tobytes())
            number += 1
        if number < count:
            # The header has the same length for a smaller count: numpy pads it.
            file.seek(0)
            file.write(npy_header((number, *shape[1:])))
        file.flush()
        os.fsync(file.fileno())
    return memory_map(into)


def npy_header(shape: tuple[int, ...]) -> bytes:
    """Create the header of a .npy file of uint8."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def memory_map(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="c", allow_pickle=False)
