"""List and label the images of a folder, of any size and mode, and read them a batch at a time."""

import os
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data.readers.class_folders import SUFFIXES
from halfmoon.data.readers.decode import fitted
from halfmoon.sites.folders.site_folder import LABELS, read
from halfmoon.sites.inference.load import Model
from halfmoon.storage import atomic_io

READERS = 4
"""Threads that decode: Pillow lets others run while it reads an image."""


class UnreadableImage(NamedTuple):
    """An image that could not be read."""

    path: str  # relative to the folder, with forward slashes
    reason: str


class ImageBatch(NamedTuple):
    """One batch of a folder."""

    rows: list[int]  # the places of the images in the list of paths
    images: np.ndarray  # uint8 (len(rows), H, W, C)
    unreadable: list[UnreadableImage]


def image_paths(folder: Path) -> list[str]:
    """Return the paths of all images in a folder and below it, relative to it with forward slashes, sorted.

    What is hidden (a leading dot) is left out. Raise `UserError` where there is no such folder or no image in it.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; give a folder of images.")
    paths = []
    for place, folders, files in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        near = Path(place).relative_to(folder)
        paths += [
            (near / name).as_posix() for name in files if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    if not paths:
        raise UserError(f"{folder}: there is no image in it or below it ({', '.join(SUFFIXES)}).")
    return sorted(paths)


def labeled_paths(folder: Path, classes: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Return the paths of the labeled images of a folder, relative to it and sorted, and their labels, int64 (N,).

    Where there is a labels.csv it says the labels (`halfmoon.sites.folders.read`), and images that it does not
    name are left out; else each folder in it is a class with images in or below it. Raise `UserError` where there is
    neither, and for a class that is not in `classes`.
    """
    if (folder / LABELS).is_file():
        site = read(folder)
        names = [site.classes[label] if label >= 0 else "" for label in site.labels]
        pairs = [(path, name) for path, name, label in zip(site.paths, names, site.labels, strict=True) if label >= 0]
        if not pairs:
            raise UserError(f"{folder / LABELS} names no image; write a line with path and label for each labeled one.")
    else:
        pairs = [(path, path.split("/")[0]) for path in image_paths(folder) if "/" in path]
        if not pairs:
            raise UserError(
                f"{folder} has neither a {LABELS} nor class folders; sort the images into a folder for each class, "
                f"or write a {LABELS} (path,label)."
            )
    numbers = {_plain(name): number for number, name in enumerate(classes)}
    unknown = Counter(name for _, name in pairs if _plain(name) not in numbers)
    if unknown:
        (name, count), others = unknown.most_common(1)[0], len(unknown) - 1
        more = f" ({others} more besides)" if others else ""
        raise UserError(
            f"{folder}: the model does not know the class {name!r} of {count} images{more}; its classes are: "
            f"{_listed(classes)}."
        )
    return [path for path, _ in pairs], np.array([numbers[_plain(name)] for _, name in pairs], np.int64)


def batches(model: Model, folder: Path, paths: Sequence[str]) -> Iterator[ImageBatch]:
    """Yield the images at `paths`, of any size and mode, as the model takes them; no more than a batch is in memory.

    Those that cannot be read are named with the reason, and do not stop the others.
    """

    def pixels(path: str) -> np.ndarray | UnreadableImage:
        try:
            return fitted((folder / path).read_bytes(), path, *model.shape, model.card.crop, model.card.window)
        except OSError as error:
            return UnreadableImage(path, atomic_io.reason(error))
        except UserError as error:
            return UnreadableImage(path, str(error).removeprefix(f"{path}: "))

    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers:
        for first in range(0, len(paths), model.batch):
            results = list(readers.map(pixels, paths[first : first + model.batch]))
            rows = [first + k for k, result in enumerate(results) if isinstance(result, np.ndarray)]
            readable = [result for result in results if isinstance(result, np.ndarray)]
            images = np.stack(readable) if readable else np.empty((0, *model.shape), np.uint8)
            yield ImageBatch(rows, images, [result for result in results if isinstance(result, UnreadableImage)])


def _plain(name: str) -> str:
    """Return a name with accents in one way: some systems split them off in names of folders."""
    return unicodedata.normalize("NFC", name)


def _refuse(error: OSError) -> None:
    raise UserError(
        f"{error.filename}: the folder cannot be read ({atomic_io.reason(error)}); make it readable."
    ) from error


def _listed(names: Sequence[str], most: int = 20) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
