"""Files that are there whole or not at all, and arrays that are written row by row."""

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
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


class Rows:
    """Rows of uint8 of one shape, written one by one: into memory, or into a .npy file that is mapped afterwards."""

    def __init__(self, count: int, path: Path | None = None) -> None:
        """Take `count` rows; `path` is where they go, None: memory."""
        self.count, self.path, self.written = count, path, 0
        self._array: np.ndarray | None = None
        self._file: Any = None

    def __enter__(self) -> "Rows":
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("wb")
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def add(self, row: np.ndarray) -> None:
        """Take the next row."""
        if not self.written and self._file is not None:
            self._file.write(npy_head((self.count, *row.shape)))
        if self._file is not None:
            self._file.write(row.tobytes())
        else:
            if self._array is None:
                self._array = np.empty((self.count, *row.shape), np.uint8)
            self._array[self.written] = row
        self.written += 1

    def array(self) -> np.ndarray:
        """Return all rows."""
        if self.path is not None:
            return mapped(self.path)
        assert self._array is not None, "there is a row"
        return self._array


def npy_head(shape: tuple[int, ...]) -> bytes:
    """Return the head of a .npy file of uint8."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def mapped(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="c", allow_pickle=False)
