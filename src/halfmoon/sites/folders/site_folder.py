"""A site folder: images in any nested folders, a labels.csv that names a few of them, and perhaps a classes.txt."""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.data.groups import groups
from halfmoon.data.readers.class_folders import SUFFIXES, unlabeled_in
from halfmoon.sites.folders.labels import (
    LABELS_FILE,
    LabelTable,
    decode_text_file,
    normalize_path,
    normalize_text,
    read_label_table,
)
from halfmoon.storage import atomic_io

CLASSES_FILE = "classes.txt"
MODEL_FOLDER = "halfmoon-model"
"""The folder of a federation's last model and its card, which holds no images."""

UNLABELED = -1  # the label of an image that has none
MAX_LISTED_NAMES = 10  # names that a message lists before it counts

Progress = Callable[[int, int], None]  # told how many images are done, and of how many


@dataclass(frozen=True, eq=False)
class SiteFolder:
    """A site: sorted `paths` relative to `folder`, `labels` int64 with -1 for none, and the class names.

    `images` is uint8 (N, H, W, C) after `open_prepared_site`, else None. `groups` is the column of labels.csv, by path.
    """

    folder: Path
    paths: tuple[str, ...]
    labels: np.ndarray
    classes: tuple[str, ...]
    images: np.ndarray | None = None
    groups: Mapping[str, str] = field(default_factory=dict[str, str])

    def __len__(self) -> int:
        return len(self.paths)

    def image_groups(self, pattern: str | None = None) -> list[str] | None:
        """Return whose image each is, by labels.csv or else by `halfmoon.data.groups.groups`."""
        if self.groups:
            return [self.groups.get(path, "") for path in self.paths]
        return groups([self.folder / path for path in self.paths], pattern)


@dataclass(frozen=True)
class Finding:
    """Something odd about a folder: files (or groups of equal ones), a remedy, and whether it `blocks`."""

    kind: str
    remedy: str
    blocks: bool = field(default=False, kw_only=True)
    names: tuple[str | tuple[str, ...], ...]
    reasons: tuple[str, ...] = ()

    def describe_images(self) -> list[str]:
        """Return every name in words, with its reason."""
        names = (each if isinstance(each, str) else " = ".join(each) for each in self.names)
        if not self.reasons:
            return list(names)
        return [f"{name}: {reason}" for name, reason in zip(names, self.reasons, strict=True)]


def is_site_folder(folder: Path) -> bool:
    """Return whether a folder says which of its images have a label: by a table, or by a folder of those without."""
    named = read_label_table(folder).file is not None or (folder / CLASSES_FILE).exists()
    return named or unlabeled_in(folder) is not None


def read_site(folder: Path) -> SiteFolder:
    """Return a site by its names and labels, without a look into the images.

    labels.csv has path,label and perhaps by,at and group. Without it, folders called like classes of classes.txt give
    labels; without classes.txt the sorted names in labels.csv number the classes. Without both, a folder `unlabeled`
    makes classes of the folders beside it. Raise UserError where there is no image, or for what blocks.
    """
    site, findings = scan_site(folder)
    fault = next((each for each in findings if each.blocks), None)
    if fault is not None:
        raise UserError(f"{folder}: {fault.kind}: {join_names(fault.describe_images(), 3)}; {fault.remedy}.")
    if not site.paths:
        raise UserError(f"{folder}: there is no image in it ({', '.join(SUFFIXES)}); give the folder of a site.")
    return site


def scan_site(folder: Path) -> tuple[SiteFolder, list[Finding]]:
    """Return a site as far as it can be read, and its oddities; raise UserError where there is no folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; give the folder of a site.")
    images, others, closed = _walk(folder)
    table = read_label_table(folder)
    classes, faults = _classes(folder, table, images)
    number = {name: place for place, name in enumerate(classes)}
    names_by_path, owners, missing = _labels_of(images, table)
    if table.file is None:  # folders called like classes of classes.txt give labels
        tops = {path: normalize_text(path.partition("/")[0]) for path in images if "/" in path}
        names_by_path = {path: [name] for path, name in tops.items() if name in number}
    labels = np.full(len(images), UNLABELED, np.int64)
    for place, path in enumerate(images):
        names = names_by_path.get(path, ())
        if len(names) == 1:
            labels[place] = number.get(names[0], UNLABELED)
    twice = {path: ", ".join(names) for path, names in names_by_path.items() if len(names) > 1}
    # A broken classes.txt has every label wrong; it is named alone.
    strange = {
        path: ", ".join(f"{name}{suggest_class(name, classes)}" for name in names)
        for path, names in names_by_path.items()
        if set(names) - number.keys() and not faults
    }
    findings = [
        Finding("folders that cannot be opened", "let them be read", tuple(closed), blocks=True),
        Finding(f"{LABELS_FILE} cannot be read", "mend it: its header is path,label", tuple(table.faults), blocks=True),
        Finding(f"{CLASSES_FILE} cannot be read", "mend it: one class name a line", tuple(faults), blocks=True),
        _labeled("files with two labels", f"leave one line for each in {LABELS_FILE}", twice),
        _labeled(
            f"labels that {CLASSES_FILE} does not have",
            f"correct {LABELS_FILE}, or add the class to {CLASSES_FILE}",
            strange,
        ),
        Finding(
            "class names that are nearly the same",
            f"correct {LABELS_FILE}; where both are meant, name all classes in a {CLASSES_FILE}",
            tuple(_near(labels, classes) if not (folder / CLASSES_FILE).exists() else ()),
            blocks=True,
        ),
        Finding(f"how {LABELS_FILE} was read", "nothing is to be done", tuple(table.oddities)),
        Finding("labels without a file", f"correct {LABELS_FILE}, or take the lines out", tuple(missing), blocks=True),
        Finding("files that are no images", "they are ignored", tuple(others)),
    ]
    return SiteFolder(folder, tuple(images), labels, classes, groups=owners), [each for each in findings if each.names]


def suggest_class(name: str, classes: Iterable[str]) -> str:
    """Return ": did you mean x?" for the class whose name is nearest, "" where none is near."""
    near = difflib.get_close_matches(name, list(classes), n=1, cutoff=0.7)
    return f" (did you mean {near[0]}?)" if near else ""


def _near(labels: np.ndarray, classes: Sequence[str]) -> list[str]:
    """Return the rare class names that are a slip of the pen away from one that is ten times as frequent.

    Digits count as meant (grade 1, grade 2), and so do differences in words of less than five letters.
    """
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    questions = []
    for a, rare in enumerate(classes):
        for b, frequent in enumerate(classes):
            few = counts[a] < counts[b] and counts[a] <= max(1, counts[b] // 10)
            if a != b and few and _a_slip(rare, frequent):
                questions.append(f"{rare} ({counts[a]:,} labels): did you mean {frequent} ({counts[b]:,})?")
    return questions


def _a_slip(one: str, other: str) -> bool:
    plain = [re.sub(r"[\s_-]+", "", each).casefold() for each in (one, other)]
    if plain[0] == plain[1]:
        return True
    short, long = sorted(plain, key=len)
    if len(short) < 5 or len(long) - len(short) > 1 or re.sub(r"\d", "", short) == re.sub(r"\d", "", long):
        return False
    start = next((k for k, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    return short[start + (len(short) == len(long)) :] == long[start + 1 :]


def _labels_of(images: Iterable[str], table: LabelTable) -> tuple[dict[str, list[str]], dict[str, str], list[str]]:
    """Return the labels of each image that has any, sorted by path, groups, and the paths that are no image's."""
    exact = set(images)
    others = {normalize_text(path): path for path in exact}
    labels: dict[str, list[str]] = {}
    owners: dict[str, str] = {}
    missing: dict[str, None] = {}
    for path, label, group in table.rows:
        image = path if path in exact else others.get(normalize_path(path))
        if image is None:
            missing[path] = None
            continue
        owners |= {image: group} if group else {}
        if label and label not in labels.setdefault(image, []):
            labels[image].append(label)
    return {path: labels[path] for path in sorted(labels)}, owners, list(missing)


def _labeled(kind: str, remedy: str, labels: Mapping[str, str]) -> Finding:
    return Finding(kind, remedy, tuple(labels), tuple(labels.values()), blocks=True)


def join_names(names: Iterable[str], most: int = MAX_LISTED_NAMES) -> str:
    listed = list(names)
    more = len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more:,} more" if more > 0 else "")


def _walk(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the images, other files and closed folders below a folder, sorted, without hidden ones and its tables."""
    images: list[str] = []
    others: list[str] = []
    closed: list[str] = []

    def refused(error: OSError) -> None:
        closed.append(_printable(Path(error.filename).relative_to(folder).as_posix()))

    # A folder may have a million files, and is walked at every start: paths are plain words here, not Path objects.
    for place, inside, names in os.walk(folder, onerror=refused):
        inside[:] = sorted(name for name in inside if not name.startswith(".") and name != MODEL_FOLDER)
        above = Path(place).relative_to(folder).as_posix()
        start = "" if above == "." else f"{above}/"
        # os.walk does not follow links to folders: they can lead in circles or out of the site.
        others += [_printable(start + name) for name in inside if os.path.islink(os.path.join(place, name))]
        for name in names:
            path = start + name
            if name.startswith(".") or path.lower() == LABELS_FILE or path == CLASSES_FILE:
                continue
            if _is_image(place, name) and _printable(path) == path:
                images.append(path)
            else:  # a name that is not UTF-8 could not stand in a table
                others.append(_printable(path))
    return sorted(images), sorted(others), sorted(closed)


def _is_image(place: str, name: str) -> bool:
    """Say whether a file is an image by its suffix, or a DICOM file by its content; a pipe and a dead link are none."""
    whole = os.path.join(place, name)
    if os.path.splitext(name)[1].lower() not in SUFFIXES:
        return os.path.isfile(whole) and dicom.holds_image(whole)
    # Path tells a file that cannot be looked at, which is an error, from one that is none.
    return os.path.isfile(whole) or Path(whole).is_file()


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def read_image_bytes(folder: Path, path: str) -> bytes:
    """Return the bytes of an image of a site; raise UserError where it cannot be read."""
    try:
        return (folder / path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {atomic_io.reason(error)}.") from error


def _classes(folder: Path, table: LabelTable, images: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    text, faults, _ = decode_text_file(folder / CLASSES_FILE)
    if text is None and table.file is None and images and (without := unlabeled_in(folder)) is not None:
        tops = {normalize_text(path.partition("/")[0]) for path in images if "/" in path}
        return tuple(sorted(tops - {normalize_text(without.name)})), faults
    if text is None:
        return tuple(sorted({label for _, label, _ in table.rows} - {""})), faults
    lines = [normalize_text(line) for line in re.split(r"\r\n|\r|\n", text)]
    names = [line for line in lines if line]
    faults = [f"class {name} stands there twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    return tuple(dict.fromkeys(names)), faults if names else ["it names no class"]
