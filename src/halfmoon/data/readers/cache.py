"""Decoded images on the disk, so that decoding is paid for once; they are mapped into memory.

Pixels lie in images-KEY.npy, and beside them images-KEY.json says how the pixels are spread: what is asked of them at
every start is read there, and the pixels themselves only where somebody looks at them.
"""

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.core.user_cache import trim, user_cache
from halfmoon.data.images import Images, channel_statistics
from halfmoon.storage import atomic_io

Decoded = tuple[Images, tuple[str, ...] | None]
Reader = Callable[[Path | None], Decoded]
"""Given a file that pixels are to go through, or None: into memory."""

# Part of every key: raise it when a reader starts to give other pixels.
READER_VERSION = 3

NO_CACHE = Path("off")
"""The folder of those who want nothing on the disk."""

MIN_CACHED_BYTES = 8 * 2**20
"""Bytes of image files from which on decoding takes long enough to be paid for once."""


def load_or_decode(folder: Path | None, files: Sequence[Path], read: Reader, form: str = "") -> Decoded:
    """Return what `read` gives for `files`, from `folder` where an earlier call wrote it, and write it there.

    The cache key is a hash of the files' paths, sizes and modification times, and of `form`, which differs between
    readers that give different pixels for the same files. A damaged cache file is replaced.

    Args:
        folder: cache folder. None: the user's cache, if it can be written and the files have at least
            `MIN_CACHED_BYTES`. `NO_CACHE`: write nothing.
        files: the image files that `read` decodes.
        read: the reader.
        form: a string that identifies the preparation of the images.

    Raises:
        UserError: if a folder that the user named cannot be written.
    """
    if folder == NO_CACHE or (folder is None and sum(path.stat().st_size for path in files) < MIN_CACHED_BYTES):
        return read(None)
    if folder is not None:
        return _load_through(folder, files, read, form)
    try:
        cache = user_cache("images")
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        result = _load_through(cache, files, read, form)
    except UserError as error:
        if isinstance(error.__cause__, OSError):  # a full disk, or a home that cannot be written
            return read(None)
        raise
    except OSError:
        return read(None)
    trim(cache, f"images-{cache_key(files, form)}")
    return result


def _load_through(folder: Path, files: Sequence[Path], read: Reader, form: str) -> Decoded:
    path = folder / f"images-{cache_key(files, form)}.npy"
    stored = _read_stored(path)
    if stored is not None:
        return stored
    partial = path.with_name(f".{path.name}-{os.getpid()}.part")
    try:
        images, names = read(partial)
        spread = channel_statistics(images.images)
        facts = {"names": names, "statistics": spread, "bytes": partial.stat().st_size}
        with write_atomically(path.with_suffix(".labels.npy")) as file:
            np.save(file, images.labels)
        atomic_io.write_atomically(path.with_suffix(".json"), (json.dumps(facts) + "\n").encode())
        os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{folder}: decoded images cannot be kept there ({error}); choose another folder.") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    stored = _read_stored(path)
    return stored if stored is not None else (images, names)


def _read_stored(path: Path) -> Decoded | None:
    """Return what was kept, None where it is not whole."""
    facts: Any = atomic_io.read_json(path.with_suffix(".json"))
    try:
        if path.stat().st_size != facts["bytes"]:
            return None
        os.utime(path)  # what is used stays longest
        mean, std = (tuple(float(value) for value in each) for each in facts["statistics"])
        names = None if facts["names"] is None else tuple(str(name) for name in facts["names"])
        labels = np.load(path.with_suffix(".labels.npy"), allow_pickle=False)
        return Images(memory_map(path), labels, (mean, std)), names
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None


def cache_key(files: Sequence[Path], form: str = "") -> str:
    """Return 16 hexadecimal digits that change with `form` and the path, size or time of change of any file."""
    digest = hashlib.sha256(f"{READER_VERSION}{form}".encode())
    for path in files:
        facts = path.stat()
        digest.update(f"\0{os.path.abspath(path)}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


@contextmanager
def write_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Give a binary file that takes the place of `path` when the block ends well, else vanishes.

    It is written in the same folder (made where missing), flushed to the disk and renamed. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp files are private; a data file is as readable as its folder lets it be.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def collect_rows(rows: Iterator[np.ndarray], count: int, into: Path | None) -> np.ndarray:
    """Return `count` rows of uint8 of one shape as one array: in memory, or in a file `into` that is mapped.

    The rows are written to the file one by one. Raise UserError where there are none, OSError as the system does.
    """
    first = next(rows, None)
    if first is None:
        raise UserError("there are no images to read.")
    shape, every = (count, *first.shape), chain([first], rows)
    if into is None:
        array = np.empty(shape, np.uint8)
        for number, row in enumerate(every):
            array[number] = row
        return array
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.open("wb") as file:
        file.write(npy_header(shape))
        for row in every:
            file.write(row.tobytes())
        file.flush()
        os.fsync(file.fileno())
    return memory_map(into)


def npy_header(shape: tuple[int, ...]) -> bytes:
    """Return the head of a .npy file of uint8."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def memory_map(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="c", allow_pickle=False)
