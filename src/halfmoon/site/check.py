"""What is in a site folder, and whether it can take part in a federation: nothing is changed or sent anywhere."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from halfmoon.data.decode import converted, upright
from halfmoon.errors import UserError
from halfmoon.site.folder import CLASSES, LABELS, Finding, Site, look

if TYPE_CHECKING:
    from halfmoon.catalog import Place

Progress = Callable[[int, int], None]
"""Told how many images are done, and of how many."""


@dataclass(frozen=True)
class Survey:
    """Hold what `check` found in a folder.

    images: files that are images by their names; readable: those that can be opened
    labeled: readable images with a label; mix: how many of each class, by name
    sizes: images of each (height, width, Pillow mode), turned upright, the most frequent first
    findings: what is odd, in groups; those with `blocks` must be mended first
    methods: the methods that the folder can serve, by where a federation expects labels (halfmoon.catalog.Place)
    """

    folder: Path
    images: int
    readable: int
    labeled: int
    mix: Mapping[str, int]
    sizes: Mapping[tuple[int, int, str], int]
    findings: tuple[Finding, ...]
    methods: Mapping[Place, tuple[str, ...]]

    @property
    def can_take_part(self) -> bool:
        """Return whether an image is readable and nothing must be mended first."""
        return bool(self.methods)

    def as_json(self) -> dict[str, Any]:
        """Return everything, ready for JSON; of equal files each group is a list of names."""
        return {
            "folder": str(self.folder),
            "images": self.images,
            "readable": self.readable,
            "labeled": self.labeled,
            "share_labeled": self.labeled / self.readable if self.readable else None,
            "classes": dict(self.mix),
            "sizes": [
                {"height": height, "width": width, "mode": mode, "images": count}
                for (height, width, mode), count in self.sizes.items()
            ],
            "findings": [
                {
                    "kind": each.kind,
                    "remedy": each.remedy,
                    "blocks": each.blocks,
                    "names": [name if isinstance(name, str) else list(name) for name in each.names],
                    "reasons": list(each.reasons),
                }
                for each in self.findings
            ],
            "can_take_part": self.can_take_part,
            "methods": {place: list(names) for place, names in self.methods.items()},
        }


def check(folder: Path, progress: Progress | None = None) -> Survey:
    """Return what a site folder holds; every image is decoded once, and no two are in memory at a time.

    Images are equal where they have one size and equal pixels as 8-bit RGB, whatever their files look like. Raise
    UserError where there is no such folder.
    """
    site, findings = look(folder)
    sizes: Counter[tuple[int, int, str]] = Counter()
    equal: dict[bytes, list[int]] = {}
    broken: dict[str, str] = {}
    for row, path in enumerate(site.paths):
        try:
            size, key = _image(folder / path, path)
        except UserError as error:
            broken[path] = str(error).removeprefix(f"{path}: ")
        else:
            sizes[size] += 1
            equal.setdefault(key, []).append(row)
        if progress is not None:
            progress(row + 1, len(site))
    labels = np.array([-1 if path in broken else label for path, label in zip(site.paths, site.labels, strict=True)])
    mix = {name: int((labels == number).sum()) for number, name in enumerate(site.classes)}
    labeled, readable = sum(mix.values()), len(site) - len(broken)
    findings.append(
        Finding(
            "files that cannot be read",
            "they are left out; replace or remove them",
            tuple(broken),
            tuple(broken.values()),
        )
    )
    findings += _duplicates(site, [rows for rows in equal.values() if len(rows) > 1])
    findings += _classes(site, mix, labeled)
    findings = [each for each in findings if each.names]
    fit = readable > 0 and not any(each.blocks for each in findings)
    methods = _methods(labeled > 0) if fit else {}
    ordered = dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0])))
    return Survey(folder, len(site), readable, labeled, mix, ordered, tuple(findings), methods)


def _image(path: Path, name: str) -> tuple[tuple[int, int, str], bytes]:
    """Return an image's height, width and mode, and a key that equal pixels share."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{name}: {error.strerror or error}.") from error
    image = upright(data, name)
    pixels = converted(image, name, 3)
    key = hashlib.blake2b(f"{pixels.size}".encode() + pixels.tobytes(), digest_size=16).digest()
    return (image.height, image.width, image.mode), key


def _duplicates(site: Site, groups: list[list[int]]) -> list[Finding]:
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
    return [Finding(kind, "keep one of each group", tuple(found)) for kind, found in kinds.items()]


def _classes(site: Site, mix: Mapping[str, int], labeled: int) -> list[Finding]:
    """Return what the class names lack."""
    empty = [name for name, count in mix.items() if not count] if labeled else []
    found = [Finding("classes without a label", "label an image of each, if there is one", tuple(empty))]
    if labeled and not (site.folder / CLASSES).exists():
        remedy = f"numbered as sorted in {LABELS}; all sites of a federation need the same {CLASSES}"
        found.append(Finding(f"{CLASSES} is not there", remedy, (f"classes: {', '.join(site.classes)}",)))
    return found


def _methods(labeled: bool) -> dict[Place, tuple[str, ...]]:
    """Return the methods that a readable folder can serve: the server's labels are no site's business."""
    from halfmoon import catalog  # slow to import: it brings torch

    places: tuple[Place, ...] = ("clients", "some") if labeled else ("some", "server")
    return {place: tuple(catalog.names_at(place)) for place in places}
