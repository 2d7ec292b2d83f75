"""Read a site's folder: images in nested folders, a labels.csv for some of them, and optionally a classes.txt."""

import difflib
import os
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from halfmoon.core.errors import UserError, escape_name
from halfmoon.data import dicom
from halfmoon.data.class_names import find_near_equal, is_missing_label, normalize_class_name, sort_class_names
from halfmoon.data.groups import find_groups
from halfmoon.data.readers.class_folders import (
    CLASSES_FILE,
    SUFFIXES,
    advise_formats,
    describe_unsupported_formats,
    find_unlabeled,
    has_classes,
    is_hidden,
    is_unsupported_suffix,
)
from halfmoon.data.readers.label_table import (
    LABELS_FILE,
    METADATA_FILE,
    LabelTable,
    decode_text_file,
    normalize_path,
    normalize_text,
    read_label_table,
)
from halfmoon.storage import atomic_io

MODEL_FOLDER = "halfmoon-model"
"""Subfolder for a federation's final model and its card; it is not searched for images."""

UNLABELED = -1
"""Label of an image without one."""

MAX_LISTED_NAMES = 10
"""Number of names in a message; further ones are counted."""

MIN_TYPO_RATIO = 10
"""A class may be a misspelled other one if that has so many times the images."""

MIN_TYPO_LENGTH = 5
"""Letters of the shortest name that may be misspelled."""

Progress = Callable[[int, int], None]
"""Receives the number of images done, and of all images."""


@dataclass(frozen=True, eq=False)
class SiteFolder:
    """The images and labels of a site.

    Attributes:
        folder: the site's folder.
        paths: the images, relative to `folder`, sorted.
        labels: class index of each image, int64 (N,), `UNLABELED` for none.
        classes: the class names.
        images: uint8 (N, H, W, C) after `open_prepared_site`, otherwise None.
        groups: the group (such as the patient) of images by path, from labels.csv.
    """

    folder: Path
    paths: tuple[str, ...]
    labels: np.ndarray
    classes: tuple[str, ...]
    images: np.ndarray | None = None
    groups: Mapping[str, str] = field(default_factory=dict[str, str])

    def __len__(self) -> int:
        """Count the images."""
        return len(self.paths)

    def image_groups(self, pattern: str | None = None) -> list[str] | None:
        """Return the group (such as the patient) of each image.

        Args:
            pattern: a regular expression for file names; see `halfmoon.data.groups.find_groups`.

        Returns:
            A group for each image, from labels.csv, else from DICOM headers or file names; None if there are none.
        """
        if self.groups:
            return [self.groups.get(path, "") for path in self.paths]
        return find_groups([self.folder / path for path in self.paths], pattern)


@dataclass(frozen=True)
class Finding:
    """A peculiarity of a site's folder.

    Attributes:
        kind: what was found.
        remedy: what to do about it.
        blocks: whether the folder cannot be used until it is resolved.
        names: the files concerned; a tuple of names is a group of equal files.
        reasons: a detail for each of `names`, or empty.
    """

    kind: str
    remedy: str
    blocks: bool = field(default=False, kw_only=True)
    names: tuple[str | tuple[str, ...], ...]
    reasons: tuple[str, ...] = ()

    def describe_images(self) -> list[str]:
        """Describe each of `names` in a line, with its reason; equal files are joined by "="."""
        lines = [escape_name(name if isinstance(name, str) else " = ".join(name)) for name in self.names]
        if not self.reasons:
            return lines
        return [f"{line}: {reason}" for line, reason in zip(lines, self.reasons, strict=True)]


def report(
    kind: str, remedy: str, names: Mapping[str, str] | Sequence[str | tuple[str, ...]], *, blocks: bool = False
) -> list[Finding]:
    """Make a list of one finding; [] if it concerns no file.

    Args:
        kind: what was found.
        remedy: what to do about it.
        names: the files concerned, or a dict with a reason for each of them.
        blocks: whether the folder cannot be used until it is resolved.
    """
    if not names:
        return []
    reasons = tuple(names.values()) if isinstance(names, Mapping) else ()
    return [Finding(kind, remedy, tuple(names), reasons, blocks=blocks)]


def is_site_folder(folder: Path) -> bool:
    """Check whether a folder states which images are labeled: by labels.csv, classes.txt or a folder "unlabeled"."""
    table = read_label_table(folder)
    # A spreadsheet, which is not read, does not stop class folders from giving the labels.
    if table.file is not None and not (table.is_unread and has_classes(folder)):
        return True
    if (folder / CLASSES_FILE).exists():
        return True
    return find_unlabeled(folder) is not None


def read_site(folder: Path) -> SiteFolder:
    """Read the names and labels of a site's images (`scan_site`), without opening the images.

    Args:
        folder: the site's folder.

    Raises:
        UserError: there is no image, or the folder has a fault for which it cannot be used, such as an image with two
            labels.
    """
    site, findings = scan_site(folder)
    fault = next((finding for finding in findings if finding.blocks), None)
    if fault is not None:
        raise UserError(f"{folder}: {fault.kind}: {join_names(fault.describe_images(), limit=3)}; {fault.remedy}.")
    if not site.paths:
        formats = describe_unsupported_formats(folder)  # "" if there are none
        if formats:
            raise UserError(f"{folder}: there is no image in it, only {formats}.")
        raise UserError(f"{folder}: there is no image in it ({', '.join(SUFFIXES)}); give the folder of a site.")
    return site


def scan_site(folder: Path) -> tuple[SiteFolder, list[Finding]]:
    """Read the names and labels of a site's images as far as possible, and list the peculiarities of its folder.

    Labels and classes are in these files, or follow from folders:

    - labels.csv has the columns path and label, and optionally by, at and group. Without it, folders named like the
      classes of classes.txt give the labels.
    - classes.txt has a class name a line. Without it, the sorted names in labels.csv are the classes.
    - Without both files, a folder "unlabeled" makes its sibling folders classes.

    Raises:
        UserError: there is no such folder.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; give the folder of a site.")
    table = _drop_missing_labels(read_label_table(folder), folder)
    files = _list_files(folder, table.file)
    images = files.images
    classes, class_faults = _read_classes(folder, table, images)
    class_index = {name: index for index, name in enumerate(classes)}
    names_by_path, image_groups, missing = _match_labels(images, table)
    if table.file is None:
        # Without labels.csv, top-level folders that are named like classes give the labels.
        for path in images:
            top_folder = normalize_class_name(path.partition("/")[0])
            if "/" in path and top_folder in class_index:
                names_by_path[path] = [top_folder]
    labels = np.full(len(images), UNLABELED, np.int64)
    for row, path in enumerate(images):
        names = names_by_path.get(path, ())
        if len(names) == 1:
            labels[row] = class_index.get(names[0], UNLABELED)
    two_labels = {path: ", ".join(names) for path, names in names_by_path.items() if len(names) > 1}
    unknown_labels: dict[str, str] = {}
    if not class_faults:  # a damaged classes.txt would make every label unknown; it is reported once instead
        for path, names in names_by_path.items():
            if set(names) - class_index.keys():
                unknown_labels[path] = ", ".join(f"{name}{suggest_class(name, classes)}" for name in names)
    typos = []
    if not (folder / CLASSES_FILE).exists():
        typos = [*_find_similar_names(labels, classes), *_find_likely_typos(labels, classes)]
    table_name = table.file if table.file is not None and table.file.lower() != LABELS_FILE else LABELS_FILE
    unsupported = [path for path in files.others if is_unsupported_suffix(_suffix(path))]
    remedy = f"correct {table_name}" if table.file is not None else "move their images into one folder"
    findings = [
        *report("folders that cannot be opened", "make them readable", files.closed_folders, blocks=True),
        *report(
            f"{table_name} cannot be read",
            table.remedy,
            table.faults,
            blocks=not (table.is_unread and has_classes(folder)),  # class folders give the labels
        ),
        *report(
            f"{CLASSES_FILE} cannot be read", "repair it: one class name a line, in UTF-8", class_faults, blocks=True
        ),
        *report("files with two labels", f"leave one line for each in {table_name}", two_labels, blocks=True),
        *report(
            f"labels that {CLASSES_FILE} does not have",
            f"correct {table_name}, or add the class to {CLASSES_FILE}",
            unknown_labels,
            blocks=True,
        ),
        *report(
            "class names that are nearly the same",
            f"{remedy}; if both are meant, name all classes in a {CLASSES_FILE}",
            typos,
            blocks=True,
        ),
        *report(f"how {table_name} was read", "no action is needed", table.oddities),
        *report(
            "labels without a file",
            f"correct {table_name}, whose paths are relative to its folder, or take the lines out",
            missing,
            blocks=True,
        ),
        *report(_UNNAMED, "they are ignored; rename them", files.unnamed),
        *report(_LINKS, "they are not followed; copy the images into the folder", files.links),
        *report("images of formats that are not read", advise_formats(map(_suffix, unsupported)), unsupported),
        *report(
            "files that are no images", "they are ignored", [path for path in files.others if path not in unsupported]
        ),
    ]
    return SiteFolder(folder, tuple(images), labels, classes, groups=image_groups), findings


def _suffix(path: str) -> str:
    """Return the suffix of a file in lower case, such as ".heic"."""
    return os.path.splitext(path)[1].lower()


_UNNAMED = "images whose names are not UTF-8"
_LINKS = "links to folders and missing files"


def describe_ignored(folder: Path) -> list[str]:
    """Describe in sentences the images that `read_site` ignores, although they may be meant: by their name or a link."""
    files = _list_files(folder, None)
    notes = []
    if files.unnamed:
        notes.append(f"{_UNNAMED} ({len(files.unnamed):,}): rename them")
    if files.links:
        notes.append(f"{_LINKS} ({len(files.links):,}), which are not followed: copy the images into the folder")
    return notes


def suggest_class(name: str, classes: Iterable[str]) -> str:
    """Return " (did you mean x?)" for the class with the most similar name, "" if none is similar."""
    matches = difflib.get_close_matches(name, list(classes), n=1, cutoff=0.7)
    return f" (did you mean {matches[0]}?)" if matches else ""


def _drop_missing_labels(table: LabelTable, folder: Path) -> LabelTable:
    """Replace labels that mean a missing value, such as NaN, by "", unless they are classes of classes.txt.

    Spreadsheet and data-frame programs write such values for empty cells; each would otherwise become a class.

    Args:
        table: the rows (path, label, group) of labels.csv.
        folder: the site's folder, which may have a classes.txt.

    Returns:
        The table with the new labels, and in its `oddities`, which the user reads, a count of the replaced ones.
    """
    # A class of classes.txt may be called "None" on purpose.
    text, _, _ = decode_text_file(folder / CLASSES_FILE)
    classes = {normalize_class_name(line) for line in (text or "").splitlines()}
    missing = Counter(label for _, label, _ in table.rows if is_missing_label(label) and label not in classes)
    if not missing:
        return table
    rows = [(path, "" if label in missing else label, group) for path, label, group in table.rows]
    oddities = list(table.oddities)
    # "" is missing too, but needs no mention.
    counts = ", ".join(f"{count:,} {label}" for label, count in missing.most_common() if label)
    if counts:
        oddities.append(f"labels that mean no label: {counts}")
    return table._replace(rows=rows, oddities=oddities)


def _find_similar_names(labels: np.ndarray, classes: Sequence[str]) -> list[str]:
    """Describe class names that differ only in case, blanks, dashes, underscores, or in the form of a number.

    Args:
        labels: class index of each image, int64 (N,); negative for none.
        classes: the class names.

    Returns:
        A question for each group of such names, which suggests the most frequent one.
    """
    questions = []
    for group in find_near_equal(classes):
        counts = {name: int((labels == classes.index(name)).sum()) for name in group}
        most_frequent = max(group, key=lambda name: counts[name])
        rarer = [f"{name} ({counts[name]:,} labels)" for name in group if name != most_frequent]
        questions.append(f"{' and '.join(rarer)}: did you mean {most_frequent} ({counts[most_frequent]:,})?")
    return questions


def _find_likely_typos(labels: np.ndarray, classes: Sequence[str]) -> list[str]:
    """Describe rare class names that are a typing error away from the name of a much more frequent class.

    Args:
        labels: class index of each image, int64 (N,); negative for none.
        classes: the class names.

    Returns:
        A question for each such name.
    """
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    questions = []
    for rare_index, rare in enumerate(classes):
        for frequent_index, frequent in enumerate(classes):
            if rare_index == frequent_index or find_near_equal((rare, frequent)):
                continue  # nearly equal names are reported by `_find_similar_names`
            rare_count = counts[rare_index]
            frequent_count = counts[frequent_index]
            max_rare_count = max(1, frequent_count // MIN_TYPO_RATIO)
            is_rare = rare_count < frequent_count and rare_count <= max_rare_count
            if is_rare and _is_likely_typo(rare, frequent):
                questions.append(f"{rare} ({rare_count:,} labels): did you mean {frequent} ({frequent_count:,})?")
    return questions


def _is_likely_typo(name: str, other: str) -> bool:
    """Check whether two class names differ by at most one letter that is replaced, added or missing ("cat", "caat").

    Different digits are deliberate (grade 1, grade 2), and so are differences in short names.
    """
    simplified = [re.sub(r"[\s_-]+", "", text).casefold() for text in (name, other)]
    short, long = sorted(simplified, key=len)
    if len(short) < MIN_TYPO_LENGTH or len(long) - len(short) > 1:
        return False
    if re.sub(r"\d", "", short) == re.sub(r"\d", "", long):
        return False
    prefix_length = 0
    while prefix_length < len(short) and short[prefix_length] == long[prefix_length]:
        prefix_length += 1
    # After the common beginning, skip the letter that differs: in both names if it is replaced, else in the longer one.
    is_replaced = len(short) == len(long)
    short_rest = short[prefix_length + 1 :] if is_replaced else short[prefix_length:]
    return short_rest == long[prefix_length + 1 :]


def _index_loosely(paths: Iterable[str]) -> dict[str, list[str]]:
    """Index paths of images by what a mistaken path may have in common: lower case, with and without the suffix."""
    index: dict[str, list[str]] = {}
    for path in paths:
        lowered = normalize_text(path).lower()
        for key in {lowered, os.path.splitext(lowered)[0]}:
            index.setdefault(key, []).append(path)
    return index


def _match_labels(images: Iterable[str], table: LabelTable) -> tuple[dict[str, list[str]], dict[str, str], list[str]]:
    """Match the rows of labels.csv to images.

    Args:
        images: paths of the images, relative to the site's folder.
        table: the rows. A path in them may have backslashes, "./" or accents in another form than the image's.

    Returns:
        The labels of each image that is in a row (sorted by path; two different ones are a fault), the group of each
        image that has one, and the paths in the table that belong to no image.
    """
    exact_paths = set(images)
    # Tables that another program wrote often have the full paths of that machine.
    images_by_name: dict[str, list[str]] = {}
    for path in exact_paths:
        images_by_name.setdefault(normalize_text(posixpath.basename(path)).lower(), []).append(path)
    similar_images = _index_loosely(exact_paths)
    path_by_normalized = {normalize_text(path): path for path in exact_paths}
    labels: dict[str, list[str]] = {}
    image_groups: dict[str, str] = {}
    missing: dict[str, None] = {}  # a dict preserves the order
    for path, label, group in table.rows:
        image = path if path in exact_paths else path_by_normalized.get(normalize_path(path))
        if image is None:
            lowered = normalize_path(path).lower()
            similar = similar_images.get(lowered) or similar_images.get(os.path.splitext(lowered)[0])
            similar = similar or images_by_name.get(posixpath.basename(lowered), [])
            missing[f"{path} (did you mean {similar[0]}?)" if len(similar) == 1 else path] = None
            continue
        if group:
            image_groups[image] = group
        if label and label not in labels.setdefault(image, []):
            labels[image].append(label)
    return {path: labels[path] for path in sorted(labels)}, image_groups, list(missing)


def join_names(names: Iterable[str], limit: int = MAX_LISTED_NAMES) -> str:
    """Join the first `limit` names by commas, and count the rest: "a, b and 12 more"."""
    all_names = list(names)
    text = ", ".join(all_names[:limit])
    if len(all_names) > limit:
        text += f" and {len(all_names) - limit:,} more"
    return text


class _Files(NamedTuple):
    """The contents of a site's folder: sorted paths relative to it, with forward slashes, other bytes than UTF-8 escaped."""

    images: list[str]
    others: list[str]  # files that are no images
    unnamed: list[str]  # images whose names are not UTF-8: a table of labels could not name them
    links: list[str]  # links to folders, and links with an image's suffix to a missing file
    closed_folders: list[str]  # folders that cannot be opened


def _list_files(folder: Path, table: str | None) -> _Files:
    """List the images of a site, other files, and folders that cannot be opened.

    Hidden files, tables of labels or classes, and the folder of a federation's model are left out.

    Args:
        folder: the site's folder.
        table: the name of its table of labels; None if there is none.
    """
    files = _Files([], [], [], [], [])

    def note_closed_folder(error: OSError) -> None:
        files.closed_folders.append(_printable(Path(error.filename).relative_to(folder).as_posix()))

    # A site may have a million files, and each start lists all of them: strings are much faster than Path objects.
    for current, subfolders, names in os.walk(folder, onerror=note_closed_folder):
        # In place: os.walk then visits only these.
        subfolders[:] = sorted(name for name in subfolders if not is_hidden(name) and name != MODEL_FOLDER)
        relative = Path(current).relative_to(folder).as_posix()
        prefix = "" if relative == "." else f"{relative}/"
        # os.walk does not follow links to folders, which could form circles or leave the site.
        linked_folders = [name for name in subfolders if os.path.islink(os.path.join(current, name))]
        files.links.extend(_printable(prefix + name) for name in linked_folders)
        for name in names:
            path = prefix + name
            is_table = path in (table, CLASSES_FILE) or path.lower() in (LABELS_FILE, METADATA_FILE)
            if name.startswith(".") or is_table:
                continue
            is_utf8 = _printable(path) == path
            is_dead_link = path.lower().endswith(SUFFIXES) and os.path.islink(os.path.join(current, name))
            if _is_image(current, name):
                kind = files.images if is_utf8 else files.unnamed
            else:
                kind = files.links if is_dead_link else files.others
            kind.append(_printable(path))
    for paths in files:
        paths.sort()
    return files


def _is_image(folder: str, name: str) -> bool:
    """Check for an image by the suffix, or for a DICOM file by its content; pipes and dead links are no images."""
    path = os.path.join(folder, name)
    if os.path.splitext(name)[1].lower() not in SUFFIXES:
        return os.path.isfile(path) and dicom.holds_image(path)
    # Path.is_file raises for a file that may not be accessed, where os.path.isfile returns False.
    return os.path.isfile(path) or Path(path).is_file()


def _printable(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()


def read_image_bytes(folder: Path, path: str) -> bytes:
    """Read an image file of a site; raise UserError if it cannot be read."""
    try:
        return (folder / path).read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {atomic_io.error_reason(error)}.") from error


def _read_classes(folder: Path, table: LabelTable, images: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Find the class names of a site, in the order of their numbers.

    They are the lines of classes.txt. Without that file they are the sorted labels in labels.csv, or without both the
    names of the folders next to a folder "unlabeled".

    Args:
        folder: the site's folder.
        table: the rows of labels.csv.
        images: paths of the images, relative to `folder`.

    Returns:
        The class names, and the faults of classes.txt.
    """
    text, faults, _ = decode_text_file(folder / CLASSES_FILE)
    if text is not None:
        lines = [normalize_class_name(line) for line in re.split(r"\r\n|\r|\n", text)]
        names = [line for line in lines if line]
        unique_names = tuple(dict.fromkeys(names))
        if not names:
            return unique_names, ["it names no class"]
        return unique_names, [f"class {name} is listed twice" for name in unique_names if names.count(name) > 1]
    unlabeled_folder = find_unlabeled(folder) if table.file is None and images else None
    if unlabeled_folder is not None:
        top_folders = {normalize_class_name(path.partition("/")[0]) for path in images if "/" in path}
        class_folders = top_folders - {normalize_class_name(unlabeled_folder.name)}
        return tuple(sort_class_names(class_folders)), faults
    labels = {label for _, label, _ in table.rows} - {""}
    return tuple(sort_class_names(labels)), faults
