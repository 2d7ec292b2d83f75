"""Data sets by name or path: what can be loaded, and where each is looked for."""

from __future__ import annotations

import gzip
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from halfmoon.data import binary, folders, hub, idx, mat, parquet, tinyimagenet
from halfmoon.data import cache as store
from halfmoon.data.images import Images, Source, statistics
from halfmoon.data.known import KNOWN, Known
from halfmoon.data.partition import apportion, stream
from halfmoon.errors import UserError, nearest

__all__ = ["DIGITS", "KNOWN", "Known", "load", "names"]

DIGITS = "1,437 + 360 gray images, 8x8, 10 classes (UCI digits inside scikit-learn); always there, the default"


def names() -> dict[str, str]:
    """Return every data set known by name with one line about it."""
    return {"digits": DIGITS} | {name: known.about for name, known in KNOWN.items()}


def load(
    name: str,
    data_dir: Path | None = None,
    *,
    cache: Path | None = None,
    test: str = "test",
    mirror: bool | None = None,
) -> Source:
    """Return a data set by name (`names()`), by path of a folder, or by its Hugging Face name `owner/name`.

    A known name is read from `data_dir` or `data_dir`/name where `data_dir` is given, otherwise from the hub.
    A folder holds train*.parquet and test*.parquet, or train/CLASS/*.png and test/CLASS/*.png, or the official
    files of Fashion-MNIST or MNIST (idx), CIFAR-10 or CIFAR-100 (binary version), SVHN (.mat) or Tiny ImageNet.
    `test` names the part that evaluates (`validation` where a set has it). `cache` is a folder that keeps decoded
    images; without it nothing is written. `mirror` says whether a mirrored image is still of its class; None means
    False for digits and svhn and True for the rest. Mean and std of a known name are the published ones, of every
    other set those of its training pixels. Raise UserError where the name is unknown or a file cannot be read; the
    message names file and row.
    """
    if name == "digits":
        if test != "test":
            raise UserError(f"digits has no part {test!r}, only train and test.")
        return _digits(bool(mirror))
    known = KNOWN.get(name)
    folder = _folder(name, data_dir, known)
    mirrors = known is None or known.mirror
    if folder is not None:
        official = _official(folder, name)
        mirrors = mirrors and (official is None or KNOWN[official].mirror)
        train, held, classes = _read(folder, name, official, test, cache)
    elif known is not None:
        part = known.held if test == "test" else test
        train, held, classes = hub.read(known.hub, part, known.config, known.gray)
    elif re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        train, held, classes = hub.read(name, test)
    else:
        raise UserError(f"no data set or folder is called {name!r}; {nearest(name, names())}")
    if classes is None:
        classes = known.classes if known else _numbered(name, train.labels)
    if known:
        _check_known(folder or name, name, train, classes)
    mean, std = (known.mean, known.std) if known else statistics(train.images)
    title = name if known else Path(name).name if folder else name
    return Source(title, train, held, classes, mirrors if mirror is None else mirror, mean, std)


def _folder(name: str, data_dir: Path | None, known: Known | None) -> Path | None:
    if data_dir is None:
        return Path(name) if known is None and Path(name).is_dir() else None
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: there is no such folder; --data-dir is where {name} lies.")
    if known:
        place = data_dir / name if (data_dir / name).is_dir() else data_dir
        inside = known.folder and place / known.folder
        return inside if inside and inside.is_dir() else place
    for place in (data_dir / name, Path(name)):
        if place.is_dir():
            return place
    raise UserError(f"{data_dir}: it has no folder {name}; {nearest(name, names())}")


def _official(folder: Path, name: str) -> str | None:
    """Return the set whose official files are in the folder; under a known name, that one or none."""
    found = {
        "cifar10": lambda: binary.is_here(folder, "cifar10"),
        "cifar100": lambda: binary.is_here(folder, "cifar100"),
        "svhn": lambda: mat.is_here(folder),
        "tiny_imagenet": lambda: tinyimagenet.is_here(folder),
    }
    return next((key for key, here in found.items() if (name == key or name not in KNOWN) and here()), None)


def _read(
    folder: Path, name: str, official: str | None, test: str, cache: Path | None
) -> tuple[Images, Images, tuple[str, ...] | None]:
    known = KNOWN.get(name)
    rgb = known is not None and known.gray
    if idx.is_here(folder):
        _only_test(folder, "an idx set", test)
        return idx.read_pair(folder, "train"), idx.read_pair(folder, "t10k"), None
    if files := parquet.shards(folder, "train"):
        return _read_parquet(folder, files, known, test, cache)
    if official in binary.LAYOUTS:
        _only_test(folder, f"the binary version of {official}", test)
        return binary.read(folder, official)
    if official == "svhn":
        _only_test(folder, "svhn", test)
        return *mat.read(folder), KNOWN["svhn"].classes
    if official == "tiny_imagenet":
        return tinyimagenet.read(folder, test, cache)
    if (folder / "train").is_dir():
        return folders.read_folders(folder, test, cache, rgb)
    binary.refuse_pickles(folder, [key for key in binary.PICKLES if name == key or known is None])
    if known:
        raise UserError(
            f"{folder}: {name} is not here; expected {known.files}, or train*.parquet and {known.held}*.parquet."
        )
    raise UserError(
        f"{folder}: no data set is here; expected train*.parquet and {test}*.parquet, or train/CLASS/*.png and "
        f"{test}/CLASS/*.png, or the official files of MNIST, CIFAR, SVHN or Tiny ImageNet (docs/data.md names them)."
    )


def _read_parquet(
    folder: Path, files: list[Path], known: Known | None, test: str, cache: Path | None
) -> tuple[Images, Images, tuple[str, ...] | None]:
    rgb = known is not None and known.gray
    form = "rgb" if rgb else ""
    # A known set may call its test part otherwise, but a file that is called test is meant to be it.
    held = parquet.shards(folder, test)
    if not held and known and test == "test":
        held = parquet.shards(folder, known.held)
    if not held:
        raise UserError(f"{folder}: there is no {test}*.parquet beside train*.parquet.")
    train, classes = store.keep(cache, files, lambda: parquet.read_parquet(files, rgb), form)
    return train, store.keep(cache, held, lambda: parquet.read_parquet(held, rgb), form)[0], classes


def _only_test(folder: Path, what: str, test: str) -> None:
    if test != "test":
        raise UserError(f"{folder}: {what} has no part {test!r}, only train and test.")


def _check_known(place: object, name: str, train: Images, classes: tuple[str, ...]) -> None:
    """Raise UserError where channels or classes tell that this is another set than the one that is asked for."""
    known, channels = KNOWN[name], train.images.shape[3]
    if channels != len(known.mean):
        raise UserError(
            f"{place}: images of {name} have {len(known.mean)} channel(s), but these have {channels}; check the folder."
        )
    if len(classes) > len(known.classes):
        raise UserError(
            f"{place}: {name} has {len(known.classes)} classes, but there are {len(classes)} here; check the folder."
        )


def _numbered(name: str, labels: np.ndarray) -> tuple[str, ...]:
    counts = np.bincount(labels)
    if not counts.all():
        empty = int(np.flatnonzero(counts == 0)[0])
        raise UserError(
            f"{name}: labels run from 0 to {len(counts) - 1}, but no training image has label {empty}; "
            "number the classes without gaps."
        )
    return tuple(str(label) for label in range(len(counts)))


def _digits(mirror: bool) -> Source:
    """Return scikit-learn's 1,797 digits, 0..16 scaled to 0..255, with 360 rows for the test.

    The test rows are drawn once and for all: each class gives its share of 360 (largest remainders), the
    first rows of a permutation inside the class with seed 0.
    """
    table = _digits_table()
    images = np.rint(table[:, :-1] * 255 / 16).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = table[:, -1].astype(np.int64)
    draw = stream(0, "digits", "test")
    quota = apportion(np.bincount(labels), 360)
    held = np.zeros(len(labels), bool)
    for label, count in enumerate(quota):
        held[draw.permutation(np.flatnonzero(labels == label))[:count]] = True
    train = Images(images[~held], labels[~held])
    mean, std = statistics(train.images)
    classes = tuple(str(digit) for digit in range(10))
    return Source("digits", train, Images(images[held], labels[held]), classes, mirror, mean, std)


def _digits_table() -> np.ndarray:
    """Return scikit-learn's digits, an image a row: its 64 pixels, then its label.

    The file is read as scikit-learn reads it, but without importing that, which costs two seconds.
    """
    found = find_spec("sklearn")
    for folder in (found.submodule_search_locations if found else None) or ():
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            with gzip.open(path, "rt", encoding="ascii") as file:
                return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # a version that has it elsewhere

    pixels, target = load_digits(return_X_y=True)
    return np.column_stack([np.asarray(pixels), np.asarray(target)])
