"""The labels of a folder, in memory and on the disk, while people label it."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.sites.folders.labels import (
    NOTES_FILE,
    UNDECIDED_FILE,
    LabelConflict,
    LabelEdit,
    file_stamp,
    normalize_path,
    normalize_text,
    read_labels,
    write_labels,
)
from halfmoon.sites.folders.site_folder import LABELS_FILE, UNLABELED, SiteFolder

UNDECIDED = "not sure"
"""The entry of an undecided image in the file of undecided images."""


class LabelStore:
    """The labels of a site's N images, and the images that a person could not label.

    Changed files are read again, as other programs may write them.

    Attributes:
        labels: int64 (N,), indices of `classes`, -1 for none.
        undecided: bool (N,), images that a person could not label.
        classes: names of the classes; classes in the files that are not listed are appended.
        version: a number that grows with every change in memory or on the disk.
        written_count: the number of labels that were written through this object.
        labels_from_folders: whether the labels are names of class folders and no labels file exists yet.
        labels_file: name of the labels file.
        undecided_file: name of the file of the undecided images.
        folder: the folder of the images.
        paths: paths of the images relative to the folder.
    """

    def __init__(self, site: SiteFolder, classes: Sequence[str], labels_file: str = LABELS_FILE) -> None:
        """Open the labels of a site's images, which are kept in memory and read again when a file has changed.

        Args:
            site: the site's folder.
            classes: class names in their order; those of the site's files are appended.
            labels_file: name of the labels file. A second reader has a separate one and does not see other labels.
        """
        self.labels_file = labels_file
        if labels_file == LABELS_FILE:
            self.undecided_file = UNDECIDED_FILE
        else:
            self.undecided_file = f"{labels_file.removesuffix('.csv')}.not-sure.csv"
        self.folder: Path = site.folder
        self.paths = site.paths
        self.classes = list(dict.fromkeys([*classes, *site.classes]))
        self.labels = np.full(len(site), UNLABELED, np.int64)
        self.undecided = np.zeros(len(site), bool)  # images that a person marked as not sure
        self.version = 0  # grows with every change, so that a page can ask for the changes since its last request
        self.written_count = 0
        self._changes: list[tuple[int, int]] = []  # (version, row) of each change of an image
        self._rows = {normalize_path(path): row for row, path in enumerate(site.paths)}
        self._stamps: dict[str, tuple[int, ...]] = {}  # time, size and inode of each file when it was read
        self._lock = threading.RLock()
        self.refresh()
        # Labels from class folders count only while there is no labels file. Therefore the first label that a person
        # gives writes all of them.
        is_first_reader = labels_file == LABELS_FILE
        # An empty stamp means that there is no labels file.
        self.labels_from_folders = is_first_reader and not file_stamp(self.folder) and bool((site.labels >= 0).any())
        if self.labels_from_folders:
            # The last entry maps the index -1 to "no label".
            numbers = np.array([self.classes.index(name) for name in site.classes] + [UNLABELED])
            self.labels = numbers[site.labels]

    def refresh(self) -> None:
        """Read the files of labels and of undecided images that have changed since the last call.

        Another program or person may write them while the page is open.

        Raises:
            UserError: a file is not valid.
        """
        with self._lock:
            for name in (self.labels_file, self.undecided_file):
                stamp = file_stamp(self.folder, name)
                if stamp == self._stamps.get(name):
                    continue
                self._apply_entries(read_labels(self.folder, name), name)
                self._stamps[name] = stamp

    def _apply_entries(self, entries: dict[str, str], name: str) -> None:
        """Replace the labels, or the undecided images, by the entries of their file, and record the changed images.

        The file lists all of them: an image without an entry has no label any more.

        Args:
            entries: the text of each image, by path. In the labels file it is a class name; classes that are not known
                yet are appended. In the file of undecided images only the path counts.
            name: the name of the file.
        """
        is_labels_file = name == self.labels_file
        numbers = {normalize_text(class_name): number for number, class_name in enumerate(self.classes)}
        new = np.full(len(self.paths), UNLABELED, np.int64)
        for path, text in entries.items():
            row = self._rows.get(path)
            if row is None:
                continue
            if is_labels_file and text not in numbers:
                numbers[text] = len(self.classes)
                self.classes.append(text)
            new[row] = numbers.get(text, 0)  # 0 for the entries of undecided images
        old = self.labels if is_labels_file else np.where(self.undecided, 0, UNLABELED)
        changed = np.flatnonzero(new != old)
        if not len(changed):
            return
        self.version += 1
        self._changes += [(self.version, int(row)) for row in changed]
        if is_labels_file:
            self.labels = new
        else:
            self.undecided = new >= 0

    def changes_since(self, version: int) -> list[list[int]]:
        """List [row, label, undecided] of every row that has changed after a version."""
        with self._lock:
            rows = sorted({row for number, row in self._changes if number > version})
            return [[row, int(self.labels[row]), int(self.undecided[row])] for row in rows]

    def set_label(self, row: int, label: str, previous: str, by: str | None) -> None:
        """Write the label of one image; see `set_labels`."""
        self.set_labels([(row, label, previous)], by)

    def set_labels(self, entries: Sequence[tuple[int, str, str]], by: str | None) -> None:
        """Write the labels of several images to the labels file, all or none.

        Args:
            entries: (row, label, the label that the person saw) of each image. The label "" removes a label.
            by: who gives the labels, None to record no name.

        Raises:
            LabelConflict: another program has changed one of these labels.
            UserError: there is no such row or class.
        """
        names = {"", *map(normalize_text, self.classes)}
        for _, label, _ in entries:
            if normalize_text(label) not in names:
                raise UserError(f"there is no class {label!r} here.")
        edits = [LabelEdit(self._path(row), label, previous, by) for row, label, previous in entries]
        # Names of class folders count as labels only until there is a file, so the file gets all of them.
        if self.labels_from_folders:
            rows = np.flatnonzero(self.labels >= 0)
            folder_labels = [LabelEdit(self.paths[n], self.classes[self.labels[n]]) for n in rows]
            write_labels(self.folder, *folder_labels)
            self.labels_from_folders = False
        try:
            write_labels(self.folder, *edits, name=self.labels_file)
        except LabelConflict:
            # The page shows the new label and asks the person.
            self.refresh()
            raise
        # A label ends the state "undecided".
        decided = [
            LabelEdit(self.paths[row], "", UNDECIDED) for row, label, _ in entries if label and self.undecided[row]
        ]
        if decided:
            # The labels are saved, and count more than this state. It is removed with the next label if the disk is full.
            with suppress(UserError):
                write_labels(self.folder, *decided, name=self.undecided_file)
        self.written_count += len(edits)
        self.refresh()

    def read_notes(self) -> dict[int, str]:
        """Read the notes that people wrote about images, by row."""
        notes = read_labels(self.folder, NOTES_FILE)
        return {self._rows[path]: text for path, text in notes.items() if path in self._rows}

    def set_note(self, row: int, text: str, by: str | None) -> None:
        """Write a note of one line about an image; "" removes it."""
        previous = self.read_notes().get(row, "")
        write_labels(self.folder, LabelEdit(self._path(row), text, previous, by), name=NOTES_FILE)

    def set_undecided(self, row: int, undecided: bool, by: str | None) -> None:
        """Record that a person could not label an image, or remove this record."""
        path = self._path(row)
        new = UNDECIDED if undecided else ""
        previous = "" if undecided else UNDECIDED
        write_labels(self.folder, LabelEdit(path, new, previous, by), name=self.undecided_file)
        self.refresh()

    def _path(self, row: int) -> str:
        if not 0 <= row < len(self.paths):
            raise UserError(f"there is no image {row}.")
        return self.paths[row]

    def count_labels(self) -> list[int]:
        """Count the labels of each class."""
        return np.bincount(self.labels[self.labels >= 0], minlength=len(self.classes)).tolist()

    def find_rare_classes(self) -> list[int]:
        """Find the classes with less than a third of the mean number of labels, which the page points out.

        Returns:
            Indices of the classes; [] before there are two labels per class on average.
        """
        counts = np.array(self.count_labels())
        if counts.sum() < 2 * len(counts):
            return []
        return np.flatnonzero(counts * 3 < counts.mean()).tolist()

    def describe(self, since: int) -> dict[str, Any]:
        """Describe the labels as JSON for a page, with the changes after the version `since` that it has.

        Returns:
            "version", to be sent as `since` next time; "classes", their names; "changes": [row, label, undecided] of
            changed images; "counts": labels by class; "rare_classes": classes with far fewer labels than others; "labeled",
            "undecided" (without a label) and "total" count images.
        """
        self.refresh()
        with self._lock:
            return {
                "version": self.version,
                "changes": self.changes_since(since),
                "classes": list(self.classes),
                "counts": self.count_labels(),
                "rare_classes": self.find_rare_classes(),
                "labeled": int((self.labels >= 0).sum()),
                "undecided": int((self.undecided & (self.labels < 0)).sum()),
                "total": len(self.paths),
            }
