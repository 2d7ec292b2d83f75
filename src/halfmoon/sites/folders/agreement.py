"""Two readers of the same images: where they disagree, and Cohen's kappa."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.sites.folders.labels import HOME, labels

READERS = f"{HOME}/readers"
"""The folder of the labels of other readers, one file each, with the columns of labels.csv."""


@dataclass(frozen=True)
class Agreement:
    """How the labels of two readers agree: on how many images of both, by chance corrected, and where they do not.

    `kappa` is Cohen's (1960): (agreement - chance) / (1 - chance), None where both gave one class alone.
    `differing` has (path, one's label, the other's label).
    """

    readers: tuple[str, str]
    images: int
    agreement: float
    kappa: float | None
    differing: tuple[tuple[str, str, str], ...]


def reader_file(name: str) -> str:
    """Return where a reader's labels are, within a site's folder; raise UserError for a name that is no file's."""
    if not name or name != "".join(c for c in name if c.isalnum() or c in "-_") or len(name) > 40:
        raise UserError(f"the reader {name!r} needs a name of letters, digits, - and _, 40 at most.")
    return f"{READERS}/{name}.csv"


def agreements(folder: Path) -> list[Agreement]:
    """Return how labels.csv and the readers agree, each pair that has an image in common."""
    by_reader = {"labels.csv": labels(folder)}
    files = sorted(file.stem for file in (folder / READERS).glob("*.csv") if not file.stem.endswith(".not-sure"))
    by_reader |= {name: labels(folder, reader_file(name)) for name in files}
    names = list(by_reader)
    pairs = [(one, other) for k, one in enumerate(names) for other in names[k + 1 :]]
    return [compared((a, b), by_reader[a], by_reader[b]) for a, b in pairs if by_reader[a].keys() & by_reader[b].keys()]


def compared(readers: tuple[str, str], one: Mapping[str, str], other: Mapping[str, str]) -> Agreement:
    """Return how two readers' labels by path agree on the images that both have."""
    paths = sorted(one.keys() & other.keys())
    classes = sorted({*(one[path] for path in paths), *(other[path] for path in paths)})
    a, b = (np.array([classes.index(reader[path]) for path in paths]) for reader in (one, other))
    agreement = float((a == b).mean())
    shares = [np.bincount(each, minlength=len(classes)) / len(paths) for each in (a, b)]
    chance = float(shares[0] @ shares[1])
    kappa = (agreement - chance) / (1 - chance) if chance < 1 else None
    differing = tuple((path, one[path], other[path]) for path in paths if one[path] != other[path])
    return Agreement(readers, len(paths), agreement, kappa, differing)
