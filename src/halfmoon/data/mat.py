"""SVHN's cropped digits: train_32x32.mat and test_32x32.mat, files of MATLAB (Netzer et al. 2011).

X holds the images as uint8 (32, 32, 3, N), y the labels (N, 1) from 1 to 10, where 10 stands for the digit 0
(http://ufldl.stanford.edu/housenumbers). Format 2 of that page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.data.images import Images
from halfmoon.errors import UserError, one_line

FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat"}


def is_here(folder: Path) -> bool:
    """Return whether the folder holds one of the two files."""
    return any((folder / file).is_file() for file in FILES.values())


def read(folder: Path) -> tuple[Images, Images]:
    """Return train and test images, uint8 (N, 32, 32, 3), labels 0 to 9 as the digits; raise as `read_mat` does."""
    for file in FILES.values():
        if not (folder / file).is_file():
            raise UserError(f"{folder / file} is missing; svhn is {' and '.join(FILES.values())}.")
    return read_mat(folder / FILES["train"]), read_mat(folder / FILES["test"])


def read_mat(path: Path) -> Images:
    """Return the images of one file; raise UserError where it cannot be read or X and y are not as they should be."""
    from scipy.io import loadmat  # slow to import, and needed here only

    try:
        held: dict[str, Any] = loadmat(path, variable_names=("X", "y"))
    except Exception as error:  # on damage scipy raises whatever its parser stumbles over
        raise UserError(
            f"{path}: not a readable MATLAB file ({type(error).__name__}: {one_line(error)}); download it again."
        ) from error
    for name in ("X", "y"):
        if not isinstance(held.get(name), np.ndarray):
            raise UserError(f"{path}: there is no array {name} in it; SVHN's cropped digits are arrays X and y.")
    images, labels = held["X"], held["y"].reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3) or not images.shape[3]:
        raise UserError(f"{path}: X is {images.dtype} {images.shape}, not uint8 (32, 32, 3, N); download it again.")
    if len(labels) != images.shape[3]:
        raise UserError(
            f"{path}: y has {len(labels)} labels, but X has {images.shape[3]} images; download the file again."
        )
    digits = _digits(path, labels)
    return Images(np.ascontiguousarray(images.transpose(3, 0, 1, 2)), digits)


def _digits(path: Path, labels: np.ndarray) -> np.ndarray:
    if not np.issubdtype(labels.dtype, np.number):
        raise UserError(f"{path}: y holds {labels.dtype}, not numbers; download it again.")
    wrong = np.flatnonzero(~np.isin(labels, np.arange(1, 11)))
    if wrong.size:
        raise UserError(
            f"{path}, image {wrong[0]}: y is {labels[wrong[0]]}, but labels are 1 to 10 (10 for the digit 0); "
            "download it again."
        )
    return labels.astype(np.int64) % 10
