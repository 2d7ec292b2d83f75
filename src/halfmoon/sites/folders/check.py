"""What is in a site folder, and whether it can take part in a federation: nothing is changed or sent anywhere."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import dicom
from halfmoon.data.preparation import used
from halfmoon.data.readers.decode import converted, deep, upright
from halfmoon.sites.folders.site_folder import (
    CLASSES_FILE,
    Finding,
    Progress,
    SiteFolder,
    is_site_folder,
    read_image_bytes,
    scan_site,
    suggest_class,
)

if TYPE_CHECKING:
    from halfmoon.api.requirements import LabelLocation


@dataclass(frozen=True)
class Survey:
    """The contents of a site folder: `images` by name, the `readable` ones, `labeled` ones, the `mix` of classes.

    `sizes` counts images of each (height, width, Pillow mode); `methods` are those it can serve, by place of labels.
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
        return bool(self.methods)

    def as_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON; of equal files each group is a tuple of names."""
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
            "findings": [asdict(each) for each in self.findings],
            "can_take_part": self.can_take_part,
            "methods": dict(self.methods),
        }


def check_site(
    folder: Path,
    progress: Progress | None = None,
    *,
    classes: Sequence[str] = (),
    tests: Path | None = None,
) -> Survey:
    """Return the contents of a site folder, one image at a time; raise UserError where there is none.

    Equal images have equal pixels as 8-bit RGB. `classes` are a federation's, `tests` is a folder of test images.
    """
    site, findings = scan_site(folder)
    test = None if tests is None else scan_site(tests)[0]
    sizes: Counter[tuple[int, int, str]] = Counter()
    equal: dict[bytes, list[int]] = {}
    broken: dict[str, str] = {}
    narrow: dict[str, str] = {}
    frames: dict[str, str] = {}
    for row, path in enumerate(site.paths):
        try:
            size, key, share, count = _image(folder, path)
        except UserError as error:
            broken[path] = str(error).removeprefix(f"{path}: ")
        else:
            sizes[size] += 1
            equal.setdefault(key, []).append(row)
            if share is not None and share < 0.1:
                narrow[path] = f"{share:.1%} of the 16 bits"
            if count > 1:
                frames[path] = f"one of {count:,} frames"
        if progress is not None:
            progress(row + 1, len(site))
    spread = "each is spread from black to white by itself; to give all the same black and white, say --window LOW HIGH"
    middle = "the frame that the file names, else the middle one, stands for all; cut out others by another program"
    findings += [
        Finding("images that use little of their range", spread, tuple(narrow), tuple(narrow.values())),
        Finding("files of several frames", middle, tuple(frames), tuple(frames.values())),
        *_compared(site, classes),
        Finding("images that are test images as well", "take them out of one of the two", _tested(site, equal, test)),
        Finding("images of patients of the test", "take the patients out of one of the two", _patients(site, test)),
        *_folders(site),
    ]
    labels = np.array([-1 if path in broken else label for path, label in zip(site.paths, site.labels, strict=True)])
    mix = {name: int((labels == number).sum()) for number, name in enumerate(site.classes)}
    labeled, readable = sum(mix.values()), len(site) - len(broken)
    remedy = "they are left out; replace or remove them"
    findings.append(Finding("files that cannot be read", remedy, tuple(broken), tuple(broken.values())))
    findings += _duplicates(site, [rows for rows in equal.values() if len(rows) > 1])
    findings += _classes(site, mix, labeled)
    findings = [each for each in findings if each.names]
    fit = readable > 0 and not any(each.blocks for each in findings)
    methods = _methods(labeled > 0) if fit else {}
    ordered = dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
    return Survey(folder, len(site), readable, labeled, mix, ordered, tuple(findings), methods)


def _image(folder: Path, name: str) -> tuple[tuple[int, int, str], bytes, float | None, int]:
    """Return an image's height, width and mode, a key of its pixels, what it uses of 16 bits, and its frames."""
    data = read_image_bytes(folder, name)
    image = upright(data, name)
    pixels = converted(image, name, 3)
    key = hashlib.blake2b(f"{pixels.size}".encode() + pixels.tobytes(), digest_size=16).digest()
    share = used(np.asarray(image)) if deep(image) and "rescale" not in image.info else None
    return (image.height, image.width, image.mode), key, share, image.info.get("frames", 1)


def _compared(site: SiteFolder, classes: Sequence[str]) -> list[Finding]:
    if not classes:
        return []
    strange = [f"{name}{suggest_class(name, classes)}" for name in site.classes if name not in classes]
    lacking = [name for name in classes if name not in site.classes]
    remedy = "correct them, or agree on the classes"
    return [
        Finding("classes that the federation does not have", remedy, tuple(strange), blocks=True),
        Finding("classes of the federation without a label here", "that is fine: others may have them", tuple(lacking)),
    ]


def _tested(site: SiteFolder, equal: Mapping[bytes, list[int]], test: SiteFolder | None) -> tuple[tuple[str, ...], ...]:
    """Return the images of a folder that are test images too, with those."""
    if test is None:
        return ()
    matches: list[tuple[str, ...]] = []
    for path in test.paths:
        try:
            key = _image(test.folder, path)[1]
        except UserError:
            continue
        if key in equal:
            matches.append((*(site.paths[row] for row in equal[key]), f"{test.folder.name}/{path}"))
    return tuple(matches)


def _patients(site: SiteFolder, test: SiteFolder | None) -> tuple[str, ...]:
    """Return the images whose patient, by labels.csv or DICOM files, has images in the test folder too."""
    if test is None:
        return ()
    if site.groups or test.groups:
        both = set(test.groups.values())
        return tuple(path for path in site.paths if site.groups.get(path) in both)
    files = [each.folder / path for each in (site, test) for path in each.paths]
    patients = dicom.patients(files) or [""] * len(files)
    both = set(patients[len(site) :]) - {""}
    return tuple(path for path, patient in zip(site.paths, patients, strict=False) if patient in both)


def _folders(site: SiteFolder) -> list[Finding]:
    """Return the folders that images lie in, where nothing else gives them labels and there are a few of them."""
    counts = Counter(path.partition("/")[0] for path in site.paths if "/" in path)
    few = 2 <= len(counts) <= 50 and sum(counts.values()) == len(site)
    unnamed = few and not is_site_folder(site.folder)
    names = [f"{name} ({count:,} images)" for name, count in sorted(counts.items())] if unnamed else []
    remedy = f"name them in {CLASSES_FILE}, one a line, and they are labels, where they are meant so"
    return [Finding("folders that look like classes", remedy, tuple(names))]


def _duplicates(site: SiteFolder, groups: list[list[int]]) -> list[Finding]:
    """Return groups of equal images by the labels that they have."""
    kinds: dict[str, list[tuple[str, ...]]] = {
        "equal images with different labels": [],
        "equal images, labeled and unlabeled": [],
        "equal images among the labeled": [],
        "equal images among the unlabeled": [],
    }
    differing, across, labeled, unlabeled = kinds.values()
    for rows in groups:
        labels = {int(label) for label in site.labels[rows]}
        if len(labels - {-1}) > 1:
            kind = differing
        elif len(labels) > 1:
            kind = across
        else:
            kind = unlabeled if labels == {-1} else labeled
        kind.append(tuple(site.paths[row] for row in rows))
    return [Finding(kind, "keep one of each group", tuple(names)) for kind, names in kinds.items()]


def _classes(site: SiteFolder, mix: Mapping[str, int], labeled: int) -> list[Finding]:
    empty = [name for name, count in mix.items() if not count] if labeled else []
    findings = [Finding("classes without a label", "label an image of each, if there is one", tuple(empty))]
    if labeled and not (site.folder / CLASSES_FILE).exists():
        remedy = f"numbered as sorted; all sites of a federation need the same {CLASSES_FILE}"
        findings.append(Finding(f"{CLASSES_FILE} is not there", remedy, (f"classes: {', '.join(site.classes)}",)))
    return findings


def _methods(labeled: bool) -> dict[LabelLocation, tuple[str, ...]]:
    """Return the methods that a readable folder can serve: the server's labels are no site's business."""
    from halfmoon.methods import registry  # slow to import: it brings torch

    places: tuple[LabelLocation, ...] = ("clients", "some") if labeled else ("some", "server")
    return {place: tuple(registry.names_at(place)) for place in places}
