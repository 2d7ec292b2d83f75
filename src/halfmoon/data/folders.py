"""Class folders: train/CLASS/*.png and test/CLASS/*.png."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from halfmoon.data import cache as store
from halfmoon.data.decode import stack
from halfmoon.data.images import Images
from halfmoon.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


def read_folders(folder: Path, test: str, cache: Path | None) -> tuple[Images, Images, tuple[str, ...]]:
    """Return train and test images and the class names, sorted, of a folder of class folders.

    Raise UserError where a part or a class is missing or empty, where train and test differ in classes, or
    where an image cannot be read.
    """
    train, held = _classes(folder / "train"), _classes(folder / test)
    differing = sorted(train.keys() ^ held.keys())
    if differing:
        here, there = ("train", test) if differing[0] in train else (test, "train")
        raise UserError(
            f"{folder}: class folder {differing[0]} is in {here} but not in {there}; both need the same classes."
        )
    return _images(train, cache), _images(held, cache), tuple(train)


def _classes(part: Path) -> dict[str, list[Path]]:
    if not part.is_dir():
        raise UserError(f"{part}: there is no such folder; expected {part.name}/CLASS/*.png.")
    found = {
        folder.name: sorted(path for path in folder.iterdir() if _is_image(path))
        for folder in sorted(part.iterdir())
        if folder.is_dir() and not folder.name.startswith(".")
    }
    if not found:
        raise UserError(f"{part}: it has no class folders; expected {part.name}/CLASS/*.png.")
    for name, paths in found.items():
        if not paths:
            raise UserError(f"{part / name}: there is no image in it ({', '.join(SUFFIXES)}); fill or remove it.")
    return found


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and not path.name.startswith(".") and path.is_file()


def _images(classes: dict[str, list[Path]], cache: Path | None) -> Images:
    paths = [path for group in classes.values() for path in group]
    labels = np.repeat(np.arange(len(classes)), [len(group) for group in classes.values()]).astype(np.int64)

    def read() -> store.Decoded:
        return Images(stack(((_bytes(path), str(path)) for path in paths), len(paths)), labels), tuple(classes)

    return store.keep(cache, paths, read)[0]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: the file cannot be read ({error.strerror}).") from error
