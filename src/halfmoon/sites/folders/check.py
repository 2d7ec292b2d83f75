"""Check the contents of a site's folder, and whether it can join a federation, without changing or sending anything."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmoon.config.schema import list_methods_at
from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.data.preparation import used_range_share
from halfmoon.data.readers.decode import convert_channels, has_over_8_bits, open_upright
from halfmoon.sites.folders.site_folder import (
    CLASSES_FILE,
    UNLABELED,
    Finding,
    Progress,
    SiteFolder,
    is_site_folder,
    read_image_bytes,
    report,
    scan_site,
    suggest_class,
)

if TYPE_CHECKING:
    from halfmoon.core.label_locations import LabelLocation


MIN_USED_RANGE = 0.1
"""Share of the range of 16 bits below which an image is reported."""

MAX_CLASS_FOLDERS = 50
"""Largest number of folders that look like classes."""


@dataclass(frozen=True)
class Survey:
    """The contents of a site's folder.

    Attributes:
        folder: the site's folder.
        images: the number of image files.
        readable: the number of images that can be decoded.
        labeled: the number of readable images with a label.
        class_counts: labeled images of each class.
        sizes: images of each (height, width, Pillow mode), the most frequent first.
        findings: peculiarities of the folder.
        methods: the methods that the site can serve, by the location of labels; empty if it cannot join.
    """

    folder: Path
    images: int
    readable: int
    labeled: int
    class_counts: Mapping[str, int]
    sizes: Mapping[tuple[int, int, str], int]
    findings: tuple[Finding, ...]
    methods: Mapping[LabelLocation, tuple[str, ...]]

    @property
    def can_take_part(self) -> bool:
        """Check whether the site can join a federation."""
        return bool(self.methods)

    def as_json(self) -> dict[str, Any]:
        """Convert this survey of a site's folder to JSON types (tuples instead of lists, which `json` writes alike).

        "sizes" has an entry for each combination of height, width and Pillow mode. "methods" has the names of the
        training methods that the site can serve, by the location of the labels in a federation: "clients", "some"
        (clients) or "server".
        """
        return {
            "folder": str(self.folder),
            "images": self.images,
            "readable": self.readable,
            "labeled": self.labeled,
            "share_labeled": self.labeled / self.readable if self.readable else None,
            "classes": dict(self.class_counts),
            "sizes": [
                {"height": height, "width": width, "mode": mode, "images": count}
                for (height, width, mode), count in self.sizes.items()
            ],
            "findings": [asdict(finding) for finding in self.findings],
            "can_take_part": self.can_take_part,
            "methods": dict(self.methods),
        }


@dataclass(frozen=True)
class _ImageProperties:
    """Properties of a decoded image.

    Attributes:
        size: height, width and Pillow mode.
        pixel_hash: a hash of the pixels as 8-bit RGB; images with equal hashes are duplicates.
        used_range: share of the 16-bit range that the pixels use; None for 8-bit images and calibrated DICOM files.
        frames: the number of frames in the file.
    """

    size: tuple[int, int, str]
    pixel_hash: bytes
    used_range: float | None
    frames: int


def check_site(
    folder: Path,
    progress: Progress | None = None,
    *,
    classes: Sequence[str] = (),
    tests: Path | None = None,
) -> Survey:
    """Check the contents of a site's folder, decoding one image at a time.

    Args:
        folder: the site's folder.
        progress: receives the number of images done, and of all images.
        classes: the classes of a federation, to compare with the site's.
        tests: a folder of test images, none of which may be in `folder`.

    Raises:
        UserError: there is no such folder.
    """
    site, findings = scan_site(folder)
    test_site = None if tests is None else scan_site(tests)[0]
    sizes: Counter[tuple[int, int, str]] = Counter()
    rows_by_hash: dict[bytes, list[int]] = {}
    unreadable: dict[str, str] = {}
    narrow_range: dict[str, str] = {}
    multi_frame: dict[str, str] = {}
    for row, path in enumerate(site.paths):
        try:
            image = _read_properties(folder, path)
        except UserError as error:
            unreadable[path] = str(error).removeprefix(f"{path}: ")
        else:
            sizes[image.size] += 1
            rows_by_hash.setdefault(image.pixel_hash, []).append(row)
            if image.used_range is not None and image.used_range < MIN_USED_RANGE:
                narrow_range[path] = f"{image.used_range:.1%} of the 16 bits"
            if image.frames > 1:
                multi_frame[path] = f"one of {image.frames:,} frames"
        if progress is not None:
            progress(row + 1, len(site))
    findings += report(
        "images that use little of their range",
        "each is stretched from black to white separately; to give all the same range, set the option window",
        narrow_range,
    )
    findings += report(
        "files of several frames",
        "only the first frame is used, of DICOM the one that the file names, else the middle one; extract others with "
        "another program",
        multi_frame,
    )
    findings += _compare_classes(site, classes)
    if test_site is not None:
        test_images = _find_test_images(site, rows_by_hash, test_site)
        findings += report("images that are test images as well", "take them out of one of the two", test_images)
        of_test_patients = _find_test_patients(site, test_site)
        remedy = "take the patients out of one of the two"
        findings += report("images of patients of the test", remedy, of_test_patients)
    findings += _find_class_folders(site)
    readable_labels = np.array(
        [-1 if path in unreadable else label for path, label in zip(site.paths, site.labels, strict=True)]
    )
    class_counts = {name: int((readable_labels == index).sum()) for index, name in enumerate(site.classes)}
    labeled = sum(class_counts.values())
    readable = len(site) - len(unreadable)
    findings += report("files that cannot be read", "they are left out; replace or remove them", unreadable)
    findings += _find_duplicates(site, [rows for rows in rows_by_hash.values() if len(rows) > 1])
    if labeled:
        findings += _find_classes_without_labels(class_counts)
        findings += _find_missing_classes_file(site)
    usable = readable > 0 and not any(finding.blocks for finding in findings)
    return Survey(
        folder=folder,
        images=len(site),
        readable=readable,
        labeled=labeled,
        class_counts=class_counts,
        sizes=dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))),
        findings=tuple(findings),
        methods=_usable_methods(labeled > 0) if usable else {},
    )


def _read_properties(folder: Path, name: str) -> _ImageProperties:
    """Decode an image and measure its size, its range of values, and a hash by which equal images are found.

    Args:
        folder: the site's folder.
        name: path of the image, relative to `folder`.

    Returns:
        The properties. `used_range` is the share of the 16-bit range that the pixels use, by which images with little
        contrast are found.

    Raises:
        UserError: the image cannot be read.
    """
    image = open_upright(read_image_bytes(folder, name), name)  # upright: rotated as the EXIF data demand
    rgb = convert_channels(image, name, channels=3)  # RGB, so that a gray image equals its copy in color
    # The size is part of the hash: images of 2x8 and of 4x4 pixels may have the same bytes.
    pixel_hash = hashlib.blake2b(f"{rgb.size}".encode() + rgb.tobytes(), digest_size=16).digest()
    # The range tells something only if black and white are the ends of the 16 bits. Images of 8 bits are shown as they
    # are, and a DICOM file with a rescale has values in a physical unit.
    used_range = None
    if has_over_8_bits(image) and "rescale" not in image.info:
        used_range = used_range_share(np.asarray(image))
    return _ImageProperties(
        size=(image.height, image.width, image.mode),
        pixel_hash=pixel_hash,
        used_range=used_range,
        frames=image.info.get("frames", getattr(image, "n_frames", 1)),  # n_frames of GIF, WebP and TIFF
    )


def _compare_classes(site: SiteFolder, classes: Sequence[str]) -> list[Finding]:
    """Compare the class names of a site with those of a federation.

    Args:
        site: the site.
        classes: the class names of the federation; empty to skip this.

    Returns:
        Findings about names that only one of the two has. The site cannot take part with a class that is unknown.
    """
    if not classes:
        return []
    unknown = [f"{name}{suggest_class(name, classes)}" for name in site.classes if name not in classes]
    missing = [name for name in classes if name not in site.classes]
    remedy = "correct them, or agree on the classes"
    return [
        *report("classes that the federation does not have", remedy, unknown, blocks=True),
        *report("classes of the federation without a label here", "that is fine: others may have them", missing),
    ]


def _find_test_images(
    site: SiteFolder, rows_by_hash: Mapping[bytes, list[int]], test_site: SiteFolder
) -> list[tuple[str, ...]]:
    """Find images that are both in the site's folder and in a folder of test images.

    Args:
        site: the site.
        rows_by_hash: indices of the site's images by the hash of their pixels.
        test_site: the folder of test images.

    Returns:
        For each such test image the paths of the equal images of the site, and its path.
    """
    groups: list[tuple[str, ...]] = []
    for path in test_site.paths:
        try:
            pixel_hash = _read_properties(test_site.folder, path).pixel_hash
        except UserError:
            continue
        if pixel_hash in rows_by_hash:
            site_paths = [site.paths[row] for row in rows_by_hash[pixel_hash]]
            groups.append((*site_paths, f"{test_site.folder.name}/{path}"))
    return groups


def _find_test_patients(site: SiteFolder, test_site: SiteFolder) -> list[str]:
    """Find the site's images of patients who also have images in the test folder. They would make a test too optimistic.

    The column "group" of labels.csv identifies patients. If no image has one, DICOM headers do.

    Args:
        site: the site.
        test_site: the folder of test images.

    Returns:
        Paths of the site's images.
    """
    # Column and headers are not mixed: their identifiers of one patient differ.
    if site.groups or test_site.groups:
        test_groups = set(test_site.groups.values())
        return [path for path in site.paths if site.groups.get(path) in test_groups]
    # One call for all files, because `find_patients` chooses the same identifier for all of them.
    files = [folder.folder / path for folder in (site, test_site) for path in folder.paths]
    patients = dicom.find_patients(files)  # "" for an unknown patient
    if patients is None:
        return []
    site_patients = patients[: len(site)]
    test_patients = set(patients[len(site) :]) - {""}
    return [path for path, patient in zip(site.paths, site_patients, strict=True) if patient in test_patients]


def _find_class_folders(site: SiteFolder) -> list[Finding]:
    """Report top-level folders that look like classes, if the site's folder has none of the files that give labels.

    They look like classes if there are a few of them and each image is in one. Folder names are labels only if
    classes.txt contains them: they may also be patients or dates.
    """
    counts = Counter(path.partition("/")[0] for path in site.paths if "/" in path)  # images of each top-level folder
    look_like_classes = 2 <= len(counts) <= MAX_CLASS_FOLDERS and sum(counts.values()) == len(site)
    if not look_like_classes or is_site_folder(site.folder):
        return []
    names = [f"{name} ({count:,} images)" for name, count in sorted(counts.items())]
    remedy = f"if they are classes, name them in {CLASSES_FILE}, one a line: then they are the labels"
    return report("folders that look like classes", remedy, names)


def _find_duplicates(site: SiteFolder, groups: list[list[int]]) -> list[Finding]:
    """Report equal images, by the labels that they have: different ones are errors, others only bias the training.

    Args:
        site: the site.
        groups: groups of equal images, as indices of the site's images.
    """
    different_labels: list[tuple[str, ...]] = []
    labeled_and_unlabeled: list[tuple[str, ...]] = []
    all_labeled: list[tuple[str, ...]] = []
    all_unlabeled: list[tuple[str, ...]] = []
    for rows in groups:
        paths = tuple(site.paths[row] for row in rows)
        labels = {int(label) for label in site.labels[rows]}
        if len(labels - {UNLABELED}) > 1:
            different_labels.append(paths)
        elif len(labels) > 1:
            labeled_and_unlabeled.append(paths)
        elif labels == {UNLABELED}:
            all_unlabeled.append(paths)
        else:
            all_labeled.append(paths)
    remedy = "keep one of each group"
    return [
        *report("equal images with different labels", remedy, different_labels),
        *report("equal images, labeled and unlabeled", remedy, labeled_and_unlabeled),
        *report("equal images among the labeled", remedy, all_labeled),
        *report("equal images among the unlabeled", remedy, all_unlabeled),
    ]


def _find_classes_without_labels(class_counts: Mapping[str, int]) -> list[Finding]:
    """Report classes without a labeled image, from the number of labeled images of each class."""
    empty = [name for name, count in class_counts.items() if count == 0]
    return report("classes without a label", "label an image of each, if there is one", empty)


def _find_missing_classes_file(site: SiteFolder) -> list[Finding]:
    """Report that classes.txt is missing.

    Without it a site numbers the classes in the order of its sorted labels. Sites with different labels would then train
    with different numbers for one class.
    """
    if (site.folder / CLASSES_FILE).exists():
        return []
    remedy = f"numbered as sorted; all sites of a federation need the same {CLASSES_FILE}"
    return report(f"{CLASSES_FILE} is not there", remedy, [f"classes: {', '.join(site.classes)}"])


def _usable_methods(labeled: bool) -> dict[LabelLocation, tuple[str, ...]]:
    """List the methods that a site with or without labels can serve, by the location of labels."""
    locations: tuple[LabelLocation, ...] = ("clients", "some") if labeled else ("some", "server")
    return {location: tuple(list_methods_at(location)) for location in locations}
