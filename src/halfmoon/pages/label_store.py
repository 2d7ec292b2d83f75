"""A folder's labels as they stand on the disk, while people answer."""

import threading
from collections.abc import Sequence
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


class LabelStore:
    """The labels and the not-sure marks of a site's N images, read again whenever a file has changed.

    `labels` is int64 (N,), -1 for none; `unsure` bool (N,); `version` grows with every change, whoever made it.
    """

    def __init__(self, site: SiteFolder, classes: Sequence[str], table: str = LABELS_FILE) -> None:
        """Open the labels of a site; `classes` may name more than its files do. `table` is the file of another reader,
        who sees nobody else's labels.
        """
        self.table = table
        self.doubts = UNDECIDED_FILE if table == LABELS_FILE else f"{table.removesuffix('.csv')}.not-sure.csv"
        self.folder: Path = site.folder
        self.paths = site.paths
        self.classes = list(dict.fromkeys([*classes, *site.classes]))
        self.labels = np.full(len(site), UNLABELED, np.int64)
        self.undecided = np.zeros(len(site), bool)
        self.version = 0
        self.answers = 0  # by this page
        self._changes: list[tuple[int, int]] = []  # (version, row)
        self._rows = {normalize_path(path): row for row, path in enumerate(site.paths)}
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._lock = threading.RLock()
        self.refresh()
        # Labels that are names of folders: the first answer writes all of them, as a labels.csv alone counts then.
        self.foldered = table == LABELS_FILE and not file_stamp(self.folder) and bool((site.labels >= 0).any())
        if self.foldered:
            numbers = np.array([self.classes.index(name) for name in site.classes] + [UNLABELED])
            self.labels = numbers[site.labels]

    def refresh(self) -> None:
        """Take over what has been written since the last time; raise UserError where labels.csv is broken."""
        with self._lock:
            for name in (self.table, self.doubts):
                now = file_stamp(self.folder, name)
                if now == self._stamps.get(name):
                    continue
                self._replace(read_labels(self.folder, name), name)
                self._stamps[name] = now

    def _replace(self, table: dict[str, str], name: str) -> None:
        numbers = {normalize_text(word): number for number, word in enumerate(self.classes)}
        new = np.full(len(self.paths), UNLABELED, np.int64)
        for path, word in table.items():
            row = self._rows.get(path)
            if row is None:
                continue
            if name == self.table and word not in numbers:
                numbers[word] = len(self.classes)
                self.classes.append(word)
            new[row] = numbers.get(word, 0)
        old = self.labels if name == self.table else np.where(self.undecided, 0, UNLABELED)
        changed = np.flatnonzero(new != old)
        if not len(changed):
            return
        self.version += 1
        self._changes += [(self.version, int(row)) for row in changed]
        if name == self.table:
            self.labels = new
        else:
            self.undecided = new >= 0

    def changes(self, since: int) -> list[list[int]]:
        """Return [row, label, not sure] of every row that has changed after the version `since`."""
        with self._lock:
            rows = sorted({row for version, row in self._changes if version > since})
            return [[row, int(self.labels[row]), int(self.undecided[row])] for row in rows]

    def answer(self, row: int, label: str, previous: str, by: str | None) -> None:
        """Write an image's label, as `answers` does."""
        self.answers_of([(row, label, previous)], by)

    def answers_of(self, entries: Sequence[tuple[int, str, str]], by: str | None) -> None:
        """Write labels, all or none, each as (row, label, what the person saw); the label "" takes one back.

        Raise Changed where one has another label by now, UserError for an unknown row or class.
        """
        names = {"", *map(normalize_text, self.classes)}
        for _, label, _ in entries:
            if normalize_text(label) not in names:
                raise UserError(f"there is no class {label!r} here.")
        answers = [LabelEdit(self._path(row), label, previous, by) for row, label, previous in entries]
        if self.foldered:
            rows = np.flatnonzero(self.labels >= 0)
            write_labels(self.folder, *(LabelEdit(self.paths[n], self.classes[self.labels[n]]) for n in rows))
            self.foldered = False
        try:
            write_labels(self.folder, *answers, name=self.table)
        except LabelConflict:
            self.refresh()
            raise
        named = [
            LabelEdit(self.paths[row], "", "not sure") for row, label, _ in entries if label and self.undecided[row]
        ]
        if named:
            write_labels(self.folder, *named, name=self.doubts)
        self.answers += len(answers)
        self.refresh()

    def notes(self) -> dict[int, str]:
        """Return what people noted about images, by row."""
        return {
            self._rows[path]: words
            for path, words in read_labels(self.folder, NOTES_FILE).items()
            if path in self._rows
        }

    def note(self, row: int, words: str, by: str | None) -> None:
        """Write a note of one line about an image; "" takes it back."""
        before = self.notes().get(row, "")
        write_labels(self.folder, LabelEdit(self._path(row), words, before, by), name=NOTES_FILE)

    def doubt(self, row: int, on: bool, by: str | None) -> None:
        """Note that somebody could not name an image, or take that back."""
        path = self._path(row)
        words = ("not sure", "") if on else ("", "not sure")
        write_labels(self.folder, LabelEdit(path, words[0], words[1], by), name=self.doubts)
        self.refresh()

    def _path(self, row: int) -> str:
        if not 0 <= row < len(self.paths):
            raise UserError(f"there is no image {row}.")
        return self.paths[row]

    def counts(self) -> list[int]:
        return np.bincount(self.labels[self.labels >= 0], minlength=len(self.classes)).tolist()

    def starved(self) -> list[int]:
        """Return the classes with fewer labels than a third of the mean, once there are two a class on average."""
        counts = np.array(self.counts())
        if counts.sum() < 2 * len(counts):
            return []
        return np.flatnonzero(counts * 3 < counts.mean()).tolist()

    def facts(self, since: int) -> dict[str, Any]:
        """Return what every page shows of the labels, and what has changed after the version `since`."""
        self.refresh()
        with self._lock:
            return {
                "version": self.version,
                "changes": self.changes(since),
                "classes": list(self.classes),
                "counts": self.counts(),
                "starved": self.starved(),
                "labeled": int((self.labels >= 0).sum()),
                "unsure": int((self.undecided & (self.labels < 0)).sum()),
                "total": len(self.paths),
            }
