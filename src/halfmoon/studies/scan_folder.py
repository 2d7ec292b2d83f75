"""What a folder of images of one's own holds, and the images themselves: class folders, or a site's with labels.csv."""

import mimetypes
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import Source
from halfmoon.data.groups import groups as groups_of
from halfmoon.data.images import Images, statistics
from halfmoon.data.partition.primitives import stream
from halfmoon.data.preparation import Preparation
from halfmoon.data.readers.class_folders import SUFFIXES, in_classes, in_parts, part_of, refuse_unlabeled
from halfmoon.data.readers.decode import header, prepared
from halfmoon.sites.folders import read_site
from halfmoon.sites.folders.labels import LABELS_FILE
from halfmoon.sites.folders.site_folder import is_site_folder

HEADERS = 200
"""Images whose size and mode are read from their headers."""


@dataclass(frozen=True, eq=False)
class Contents:
    """What a folder holds: images to train on, their `labels` int64 (N,) with -1 for none, and images of a test part.

    `sizes` counts (height, width) and `gray` the gray ones of the `headers` images whose headers were read. `site`: it
    is a site's folder, in which labels are few; else every image lies in the folder of its class.
    """

    folder: Path
    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: np.ndarray
    tests: int
    sizes: Mapping[tuple[int, int], int]
    gray: int
    headers: int
    site: bool
    groups: Sequence[str] | None = None  # whose image each of `paths` is

    @property
    def labeled(self) -> int:
        return int((self.labels >= 0).sum())

    @property
    def side(self) -> int:
        """The longest side of the most frequent size."""
        return max(next(iter(self.sizes)))

    @property
    def channels(self) -> int:
        return 1 if self.gray == self.headers else 3

    @property
    def sentence(self) -> str:
        """What is there, in words."""
        sizes = [f"{width}x{height}" for height, width in list(self.sizes)[:3]]
        more = f" and {len(self.sizes) - 3} more sizes" if len(self.sizes) > 3 else ""
        colors = "gray" if self.gray == self.headers else "gray and RGB" if self.gray else "RGB"
        of = f" ({self.headers} looked at)" if self.headers < len(self.paths) else ""
        count = len(self.paths) + self.tests
        labels = f"{self.labeled:,} with a label" if self.site else "each in the folder of its class"
        tests = f", {self.tests:,} of them for the test" if self.tests else ""
        owners = len(set(self.groups or ()) - {""})
        tests += f", of {owners:,} patients or groups" if owners else ""
        return (
            f"{self.folder.name}: {count:,} images, {labels}{tests}; {len(self.classes)} classes; "
            f"{', '.join(sizes)}{more}, {colors}{of}"
        )


def contents_of(folder: Path, pattern: str | None = None) -> Contents | None:
    """Return what a folder holds, None for one that is read in another way (parquet, idx, official files).

    `pattern` finds an image's group in its name. Raise UserError where its labels have a fault.
    """
    tests = 0
    site = is_site_folder(folder)
    if site:
        site_folder = read_site(folder)
        if not (site_folder.labels >= 0).any():
            raise UserError(
                f"{folder}: no image has a label: `halfmoon site label {folder}` labels a few, or write {LABELS_FILE} with "
                "the header path,label."
            )
        paths, labels, classes = [folder / path for path in site_folder.paths], site_folder.labels, site_folder.classes
        owners = site_folder.image_groups(pattern)
    elif in_parts(folder):
        place = part_of(folder, "train")
        groups = in_classes(place or folder)
        if place is not None:
            refuse_unlabeled(folder, place)
            test_part = part_of(folder, "test") or part_of(folder, "validation")
            tests = sum(map(len, in_classes(test_part).values())) if test_part is not None else 0
        paths = [path for group in groups.values() for path in group]
        labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups.values()])
        classes, owners = tuple(groups), groups_of(paths, pattern)
    else:
        return None
    return looked_at(folder, classes, paths, labels, tests, site, owners)


def other_formats(folder: Path) -> Counter[str]:
    """Return how many image files in and below a folder, by suffix, are of formats that are not read."""
    suffixes = Counter[str]()
    for _, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        suffixes.update(os.path.splitext(name)[1].lower() for name in files if not name.startswith("."))
    images = {each for each in suffixes if str(mimetypes.guess_type(f"a{each}")[0]).startswith("image/")}
    return Counter({each: suffixes[each] for each in images.difference(SUFFIXES)})


def looked_at(
    folder: Path,
    classes: Sequence[str],
    paths: Sequence[Path],
    labels: np.ndarray,
    tests: int = 0,
    site: bool = True,
    owners: Sequence[str] | None = None,
) -> Contents:
    """Return what a folder holds, with the sizes of its images; raise UserError where none of them can be read."""
    step = -(-len(paths) // HEADERS)
    headers = [each for each in map(header, paths[::step]) if each is not None]
    if not headers:
        raise UserError(f"{folder}: none of its {len(paths):,} images can be read; see halfmoon site check.")
    sizes = dict(Counter(each[:2] for each in headers).most_common())
    gray = sum(each[2] for each in headers)
    return Contents(folder, tuple(classes), tuple(paths), labels, tests, sizes, gray, len(headers), site, owners)


def readable(
    contents: Contents, rows: np.ndarray, how: Preparation, say: Callable[[str], None]
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the images of rows, each uint8 (H, W, C), and which rows these are; what cannot be read is left out."""
    pixels, indices = list[np.ndarray](), list[int]()
    for row in rows.tolist():
        path = contents.paths[row]
        try:
            image = prepared(path.read_bytes(), str(path), how)
            if pixels and image.shape != pixels[0].shape:
                raise UserError(f"{path}: it is {image.shape[1]}x{image.shape[0]}, the others are not; give --resize.")
        except (UserError, OSError) as error:
            say(f"left out: {error}")
            continue
        pixels.append(image)
        indices.append(row)
    return pixels, np.array(indices, np.int64)


def site_source(contents: Contents, how: Preparation, share: float, flip: bool, say: Callable[[str], None]) -> Source:
    """Return a site's images, all of them to train on; its test part is those with a label.

    Of images without a label the `share` is read, always the same ones. One that cannot be read is left out, and said.
    """
    bare = stream(0, "own folder").permutation(np.flatnonzero(contents.labels < 0))
    rows = np.sort(np.concatenate([np.flatnonzero(contents.labels >= 0), bare[: round(share * len(bare))]]))
    pixels, rows = readable(contents, rows, how, say)
    if not pixels:
        raise UserError(f"{contents.folder}: none of its images can be read; see halfmoon site check.")
    owners = None if contents.groups is None else [contents.groups[int(row)] for row in rows]
    train = Images(np.stack(pixels), contents.labels[rows], groups=owners)
    labeled = train.labels >= 0
    mean, std = statistics(train.images)
    test = Images(train.images[labeled], train.labels[labeled])
    return Source(contents.folder.name, train, test, contents.classes, flip, mean, std)
