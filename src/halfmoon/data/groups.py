"""Groups of images, such as those of one patient or object, which must not be on both sides of a split."""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.data import dicom

NO_GROUP_ON_BOTH_SIDES = "no patient or group is on both sides"


def find_groups(paths: Sequence[Path], pattern: str | None = None) -> list[str] | None:
    """Find the group of each file: the match of a pattern, or by default the patient of DICOM files.

    A split into train and test must not divide a group, because its images resemble one another.

    Args:
        paths: The image files.
        pattern: A regular expression with one group, searched in "FOLDER/NAME" of each file.

    Returns:
        The group of each file, "" for none; None if no file has a group.

    Raises:
        UserError: If a file does not match the pattern.
    """
    if pattern is None:
        return dicom.find_patients(paths)
    expression = compile_pattern(pattern)
    names: list[str] = []
    for path in paths:
        match = expression.search("/".join(path.parts[-2:]))
        if match is None or match[1] is None:
            raise UserError(f"{path}: its folder and name do not fit group_pattern {pattern!r}; correct the pattern.")
        names.append(match[1])
    return names


def hash_pixels(images: np.ndarray) -> list[bytes]:
    """Hash each of the images uint8 (N, H, W, C) to 16 bytes; equal hashes are equal pixels."""
    return [hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=16).digest() for image in images]


def merge_equal_images(groups: Sequence[str] | None, hashes: Sequence[bytes]) -> list[str] | None:
    """Join the groups of images that have equal pixels, so that no image has a copy on the other side of a split.

    For example an image of patient A that equals one of patient B joins both: all images of both get the name of one.

    Args:
        groups: The group of each image, "" for none; None if no image has a group.
        hashes: A hash of each image's pixels.

    Returns:
        The groups, in which equal images and all images of their groups have one name; unchanged if no two images are
        equal.
    """
    if len(set(hashes)) == len(hashes):
        return None if groups is None else list(groups)
    names = [""] * len(hashes) if groups is None else groups
    # Union-find (disjoint sets) over group names and hashes: all keys with the same root belong together.
    parent: dict[str | bytes, str | bytes] = {}

    def find_root(key: str | bytes) -> str | bytes:
        while parent.setdefault(key, key) != key:
            parent[key] = parent[parent[key]]  # path halving, for short paths in later look-ups
            key = parent[key]
        return key

    counts = Counter(hashes)
    for name, image_hash in zip(names, hashes, strict=True):
        # A group's name becomes the root, so that merged groups have the name of one of them.
        if name and counts[image_hash] > 1:
            parent[find_root(image_hash)] = find_root(name)
    merged: list[str] = []
    for name, image_hash in zip(names, hashes, strict=True):
        if not name and counts[image_hash] == 1:
            merged.append("")
            continue
        root = find_root(name or image_hash)
        merged.append(root if isinstance(root, str) else f"equal images {root.hex()}")
    return merged


def count_conflicts(hashes: Sequence[bytes], labels: np.ndarray) -> int:
    """Count the groups of equal images that have different labels; `labels` is int64 (N,), negative for none."""
    labels_by_hash: dict[bytes, set[int]] = {}
    for image_hash, label in zip(hashes, labels.tolist(), strict=True):
        if label >= 0:
            labels_by_hash.setdefault(image_hash, set()).add(label)
    return sum(len(different) > 1 for different in labels_by_hash.values())


def describe_only_equal_images(subject: str) -> str:
    """Describe a data set without two different images; `subject` is "40 images" or "40 training images"."""
    return (
        f"all {subject} have equal pixels, so no class can be learned: export them again, without a transparency channel, "
        "which is not read"
    )


def describe_equal_images(hashes: Sequence[bytes], labels: np.ndarray, split_keeps_copies: bool = True) -> list[str]:
    """Describe images with equal pixels in sentences for the user.

    Args:
        hashes: A hash of each image's pixels.
        labels: The label of each image, int64 (N,), negative for none.
        split_keeps_copies: Whether every split leaves all copies of an image on one side.

    Returns:
        A sentence with the number of copies, and one with the number of images whose copies have another label, if
        there are such; none without copies. A single sentence if all images are equal, which is a fault of the export.
    """
    copies = len(hashes) - len(set(hashes))  # images beyond the first of each content
    if not copies:
        return []
    if copies == len(hashes) - 1:
        return [describe_only_equal_images(f"{len(hashes):,} images")]
    first_note = f"{copies:,} of {len(hashes):,} images are copies of others (equal pixels)"
    if split_keeps_copies:
        first_note += ": all copies are on one side of a split"
    notes = [first_note]
    if conflicts := count_conflicts(hashes, labels):
        subject = "image has" if conflicts == 1 else "images have"
        notes.append(f"{conflicts:,} {subject} copies with another label: correct the labels, or remove the copies")
    return notes


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; raise UserError if it is invalid, or does not have exactly one group."""
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise UserError(f"group_pattern is {pattern!r}, no regular expression: {error}.") from error
    if expression.groups != 1:
        raise UserError(f"group_pattern is {pattern!r}: it needs one group, such as '(p[0-9]+)_'.")
    return expression


def drop_shared_groups(rows: np.ndarray, others: np.ndarray, groups: Sequence[str] | None) -> np.ndarray:
    """Select the rows, int64, whose group has no row in `others`; rows without a group remain."""
    if groups is None:
        return rows
    names = np.array(groups)
    return rows[~np.isin(names[rows], sorted(set(names[others].tolist()) - {""}))]
