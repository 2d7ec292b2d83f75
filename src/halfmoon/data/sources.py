"""Data sets by name or path: what can be loaded, and where each is looked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfmoon.data import cache as store
from halfmoon.data import folders, hub, idx, parquet
from halfmoon.data.images import Images, Source, statistics
from halfmoon.data.partition import apportion, stream
from halfmoon.errors import UserError, nearest


@dataclass(frozen=True)
class Known:
    """What is known of a public data set before its files are read."""

    about: str
    hub: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


KNOWN: Mapping[str, Known] = {
    "cifar10": Known(
        "50,000 + 10,000 color images, 32x32, 10 classes (Krizhevsky 2009); parquet, class folders or hub",
        "uoft-cs/cifar10",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        (0.49139968, 0.48215827, 0.44653124),
        (0.24703233, 0.24348505, 0.26158768),
    ),
    "fashion_mnist": Known(
        "60,000 + 10,000 gray images, 28x28, 10 classes (Zalando 2017); four idx files, parquet or hub",
        "zalando-datasets/fashion_mnist",
        (
            "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
            "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
        ),
        (0.2860,),
        (0.3530,),
    ),
}  # fmt: skip
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
    A folder holds train*.parquet and test*.parquet, or train/CLASS/*.png and test/CLASS/*.png, or four idx
    files as MNIST does. `test` names the part that evaluates (`validation` where a set has it). `cache` is a
    folder that keeps decoded images; without it nothing is written. `mirror` says whether a mirrored image is
    still of its class; None means False for digits and True for the rest. Mean and std of cifar10 and
    fashion_mnist are the published ones, of every other set those of its training pixels. Raise UserError
    where the name is unknown or a file cannot be read; the message names file and row.
    """
    if name == "digits":
        if test != "test":
            raise UserError(f"digits has no part {test!r}, only train and test.")
        return _digits(bool(mirror))
    known = KNOWN.get(name)
    folder = _folder(name, data_dir, known is not None)
    if folder is not None:
        train, held, classes = _read(folder, test, cache)
    elif known is not None or re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        train, held, classes = hub.read(known.hub if known else name, test)
    else:
        raise UserError(f"no data set or folder is called {name!r}; {nearest(name, names())}")
    if classes is None:
        classes = known.classes if known else _numbered(name, train.labels)
    mean, std = (known.mean, known.std) if known else statistics(train.images)
    if len(mean) != train.images.shape[3]:
        raise UserError(
            f"{folder or name}: images of {name} have {len(mean)} channel(s), but these have "
            f"{train.images.shape[3]}; check the folder."
        )
    title = name if known else Path(name).name if folder else name
    return Source(title, train, held, classes, True if mirror is None else mirror, mean, std)


def _folder(name: str, data_dir: Path | None, known: bool) -> Path | None:
    if data_dir is None:
        return Path(name) if not known and Path(name).is_dir() else None
    if not data_dir.is_dir():
        raise UserError(f"{data_dir}: there is no such folder; --data-dir is where {name} lies.")
    if (data_dir / name).is_dir():
        return data_dir / name
    if known:
        return data_dir
    if Path(name).is_dir():
        return Path(name)
    raise UserError(f"{data_dir}: it has no folder {name}; {nearest(name, names())}")


def _read(folder: Path, test: str, cache: Path | None) -> tuple[Images, Images, tuple[str, ...] | None]:
    if idx.is_here(folder):
        if test != "test":
            raise UserError(f"{folder}: an idx set has no part {test!r}, only train and test.")
        return idx.read_pair(folder, "train"), idx.read_pair(folder, "t10k"), None
    files = {part: parquet.shards(folder, part) for part in ("train", test)}
    if files["train"]:
        if not files[test]:
            raise UserError(f"{folder}: there is no {test}*.parquet beside train*.parquet.")
        train, classes = store.keep(cache, files["train"], lambda: parquet.read_parquet(files["train"]))
        held, _ = store.keep(cache, files[test], lambda: parquet.read_parquet(files[test]))
        return train, held, classes
    if (folder / "train").is_dir():
        return folders.read_folders(folder, test, cache)
    raise UserError(
        f"{folder}: no data set is here; expected train*.parquet and {test}*.parquet, or "
        f"train/CLASS/*.png and {test}/CLASS/*.png, or four idx files (train-images-idx3-ubyte.gz ...)."
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
    from sklearn.datasets import load_digits  # slow to import, and needed here only

    pixels, target = load_digits(return_X_y=True)
    images = np.rint(np.asarray(pixels) * 255 / 16).astype(np.uint8).reshape(-1, 8, 8, 1)
    labels = np.asarray(target).astype(np.int64)
    draw = stream(0, "digits", "test")
    quota = apportion(np.bincount(labels), 360)
    held = np.zeros(len(labels), bool)
    for label, count in enumerate(quota):
        held[draw.permutation(np.flatnonzero(labels == label))[:count]] = True
    train = Images(images[~held], labels[~held])
    mean, std = statistics(train.images)
    classes = tuple(str(digit) for digit in range(10))
    return Source("digits", train, Images(images[held], labels[held]), classes, mirror, mean, std)
