"""One answer at a time into a site's labels.csv: whole or not at all, and no two writers lose each other's."""

import codecs
import csv
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.sites.folders.label_file import (
    GROUP,
    LABELS,
    SIGNED,
    columns,
    decoded,
    file_of,
    is_header,
    nfc,
    plain,
    separator_of,
)
from halfmoon.sites.folders.prepare import HOME
from halfmoon.storage import atomic_io, locks

LOCK = "labels.lock"
UNSURE = f"{HOME}/not-sure.csv"
"""The file of those images that somebody has looked at and could not name, with the columns of labels.csv."""

NOTES = f"{HOME}/notes.csv"
"""The file of what people noted about images: the note stands where labels.csv has the label."""

PATIENCE = 10.0
"""Seconds to wait for others who write."""


class Changed(UserError):
    """A label that is no longer what the writer saw; `present` is the one that stands there, "" for none."""

    def __init__(self, message: str, present: str) -> None:
        super().__init__(message)
        self.present = present


@dataclass(frozen=True)
class Answer:
    """One label ("" takes it back), the `previous` one there, and `by` whom it is, where that is written down."""

    path: str
    label: str
    previous: str = ""
    by: str | None = None


_WITHIN = threading.Lock()  # where a file system has no locks, the threads of one process still take turns


def write(folder: Path, *answers: Answer, name: str = LABELS) -> None:
    """Write answers into labels.csv under a lock; other lines stay.

    Raise `Changed` where an image has got another label since, UserError where the file is broken or cannot be written.
    """
    with _WITHIN, _locked(folder):
        file = _file(folder, name)
        try:
            table = _Lines.read(file)
            for answer in answers:
                table.put(answer)
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.replace(file, table.render())
        except OSError as error:
            raise UserError(f"{file} cannot be written ({atomic_io.reason(error)}); the answer is not kept.") from error


def labels(folder: Path, name: str = LABELS) -> dict[str, str]:
    """Return the label of each path in a folder's labels.csv, by `plain` paths; raise UserError as `write` does."""
    try:
        rows = _Lines.read(_file(folder, name)).rows
    except OSError as error:
        raise UserError(f"{folder / name} cannot be read ({atomic_io.reason(error)}).") from error
    return {plain(row[0]): nfc(row[1]) for row in rows if len(row) > 1 and row[1].strip()}


def stamp(folder: Path, name: str = LABELS) -> tuple[int, ...]:
    """Return what changes whenever labels.csv does; () where there is none."""
    try:
        facts = _file(folder, name).stat()
    except OSError:
        return ()
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's labels for one writer at a time, in this process or another."""
    home = folder / HOME
    try:
        home.mkdir(exist_ok=True)
        with locks.hold(home / LOCK, PATIENCE):
            yield
    except locks.Conflict as error:
        raise UserError(f"{folder / LABELS} is being written by another process; try again.") from error
    except OSError as error:
        raise UserError(f"{home} cannot be written ({atomic_io.reason(error)}); the answer is not kept.") from error


class _Lines:
    """The lines of a labels.csv as they were written: separator, byte order mark and unknown lines are kept."""

    def __init__(self, header: list[str], rows: list[list[str]], separator: str, encoding: str) -> None:
        self.header, self.rows, self.separator, self.encoding = header, rows, separator, encoding
        self.places: dict[str, list[int]] = {}  # of each image's lines; a line that was taken out is empty
        for place, row in enumerate(rows):
            self.places.setdefault(plain(row[0]), []).append(place)

    @classmethod
    def read(cls, file: Path) -> "_Lines":
        """Read a file; raise UserError where it is none that can be added to."""
        text, faults, _ = decoded(file)
        if text is None and faults:
            raise UserError(f"{file} cannot be read ({faults[0]}); mend it: its header is path,label.")
        if not (text or "").strip():
            return cls(["path", "label"], [], ",", "utf-8")
        assert text is not None, "it is no blank"
        separator = separator_of(text)
        try:
            lines = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True) if row]
        except csv.Error as error:
            raise UserError(f"{file} cannot be read ({error}); mend it: its header is path,label.") from error
        header = columns(lines[0])
        if not is_header(header):
            raise UserError(f"{file} does not begin with path,label; mend it, and answer again.")
        return cls(header, lines[1:], separator, _encoding(file))

    def put(self, answer: Answer) -> None:
        """Take over an answer, in the place of the image's present line or at the end."""
        places = self.places.get(plain(answer.path), [])
        last = self.rows[places[-1]] if places else []
        present = last[1].strip() if len(last) > 1 else ""
        if nfc(present) not in (nfc(answer.previous), nfc(answer.label)):
            raise Changed(f"{answer.path} has been labeled {present or 'by nobody'} meanwhile.", present)
        if answer.by is not None and SIGNED[0] not in self.header:
            self.header += SIGNED
            self.rows = [[*row, *[""] * (len(self.header) - len(row))] if row else row for row in self.rows]
        signed = ["", ""] if answer.by is None else [answer.by, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")]
        cells = {"path": answer.path, **dict(zip(self.header, last, strict=False)), "label": answer.label}
        cells |= dict(zip(SIGNED, signed, strict=True))
        line = [cells.get(name, "") for name in self.header]
        for place in places:
            self.rows[place] = []
        if not places:
            places = self.places[plain(answer.path)] = [len(self.rows)]
            self.rows.append([])
        self.places[plain(answer.path)] = places[:1]
        self.rows[places[0]] = line if answer.label or cells.get(GROUP) else []

    def render(self) -> bytes:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self.separator, lineterminator="\n")
        writer.writerows([self.header, *filter(None, self.rows)])
        return text.getvalue().encode(self.encoding)


def _encoding(file: Path) -> str:
    """Return in what a file is written: with the byte order mark that it had."""
    data = atomic_io.read(file) or b""
    marks = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    return next((name for mark, name in marks.items() if data.startswith(mark)), "utf-8")


def _file(folder: Path, name: str) -> Path:
    return file_of(folder) if name == LABELS else folder / name
