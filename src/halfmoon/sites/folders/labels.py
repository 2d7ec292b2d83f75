"""labels.csv, as people write it and one answer at a time, and the labels of further readers.

Other names' cases, semicolons, tabs and byte order marks are read, and said. An answer is written whole or not at all,
and no two writers lose each other's.
"""

import codecs
import csv
import io
import posixpath
import threading
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.storage import atomic_io, locks

STATE_FOLDER = ".halfmoon"
"""The folder in a site's that holds what halfmoon writes there, besides labels.csv and classes.txt."""

LABELS_FILE = "labels.csv"
SIGNATURE_COLUMNS, GROUP_COLUMN = ("by", "at"), "group"
"""Columns that labels.csv may have besides path and label: who said it, and when; whose image it is."""

UNDECIDED_FILE = f"{STATE_FOLDER}/not-sure.csv"
"""The file of those images that somebody has looked at and could not name, with the columns of labels.csv."""

NOTES_FILE = f"{STATE_FOLDER}/notes.csv"
"""The file of what people noted about images: the note stands where labels.csv has the label."""

READERS_FOLDER = f"{STATE_FOLDER}/readers"
"""The folder of the labels of other readers, one file each, with the columns of labels.csv."""

_SEPARATORS = {",": "", ";": "semicolons between its cells", "\t": "tabs between its cells"}
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_ENCODINGS = {"utf-8": "", "utf-8-sig": "a byte order mark", "utf-16": "a byte order mark of UTF-16"}


class LabelTable(NamedTuple):
    """What labels.csv says."""

    rows: list[tuple[str, str, str]]  # path as written, label, group; with a group a label may be ""
    faults: list[str]
    oddities: list[str]  # of the file, which was read all the same
    file: str | None  # its name, None where there is none


def read_label_table(folder: Path) -> LabelTable:
    """Return the lines of labels.csv, whatever the case of its name; an absent file has none."""
    names = _labels_file_names(folder)
    if not names:
        return LabelTable([], [], [], None)
    name = find_labels_file(folder).name
    if len(names) > 1 and name != LABELS_FILE:
        return LabelTable([], [f"there are {' and '.join(names)}: keep one of them"], [], name)
    oddities = [] if name == LABELS_FILE else [f"it is called {name}"]
    text, faults, encoding = decode_text_file(folder / name)
    if text is None:
        return LabelTable([], faults, oddities, name)
    rows, faults, separator = _parse_rows(text)
    return LabelTable(rows, faults, [*oddities, *filter(None, (_SEPARATORS[separator], _ENCODINGS[encoding]))], name)


def find_labels_file(folder: Path) -> Path:
    """Return the file that holds a folder's labels, or will: labels.csv, or one whose name differs in case."""
    names = _labels_file_names(folder)
    return folder / (LABELS_FILE if LABELS_FILE in names or not names else names[0])


def _labels_file_names(folder: Path) -> list[str]:
    """Return the names of a folder's files that are labels.csv in any case, none where it cannot be opened."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.name.lower() == LABELS_FILE and path.is_file())
    except OSError:
        return []


def decode_text_file(path: Path) -> tuple[str | None, list[str], str]:
    """Return the text of a file, or None and what is wrong, and its encoding; an absent file is no fault."""
    encoding = "utf-8"
    try:
        data = path.read_bytes()
        encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), encoding)
        return data.decode(encoding), [], encoding
    except FileNotFoundError:
        return None, [], encoding
    except OSError as error:
        return None, [atomic_io.reason(error)], encoding
    except UnicodeDecodeError as error:
        kind = "UTF-16" if encoding == "utf-16" else "UTF-8"
        return None, [f"byte {error.start} is not {kind}: save the file as UTF-8"], encoding


def normalize_path(path: str) -> str:
    """Return a path in the one way that names its image: forward slashes, no ./, accents in one character."""
    return normalize_text(posixpath.normpath(path.strip().replace("\\", "/")))


def normalize_text(words: str) -> str:
    return unicodedata.normalize("NFC", words.strip())


def _parse_rows(text: str) -> tuple[list[tuple[str, str, str]], list[str], str]:
    """Return the rows, the faults, and what separates the cells."""
    separator = _detect_separator(text)
    rows: list[tuple[str, str, str]] = []
    faults: list[str] = []
    header: list[str] = []
    lines = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    try:
        for cells in lines:
            stripped = [cell.strip() for cell in cells]
            if not any(stripped):
                continue
            if not header:
                if not _is_header(stripped):
                    words = separator.join(stripped)
                    words = words if len(words) <= 60 else f"{words[:57]}..."
                    return [], [f"line {lines.line_num} is {words!r}, not path,label"], separator
                header = _normalize_header(stripped)
                continue
            row = dict(zip(header, stripped, strict=False))
            group = row.get(GROUP_COLUMN, "")
            if len(cells) != len(header) or not row["path"] or not (row["label"] or group):
                faults.append(f"line {lines.line_num} is not one path and one label")
            else:
                rows.append((cells[0], normalize_text(row["label"]), normalize_text(group)))
    except csv.Error as error:
        faults.append(f"line {lines.line_num}: {error}")
    if not header and not faults:
        faults.append("it has no header path,label")
    return rows, faults, separator


def _detect_separator(text: str) -> str:
    first = next((line for line in text.splitlines() if line.strip(" \t,;")), "")
    return next((each for each in _SEPARATORS if _is_header(first.split(each))), ",")


def _normalize_header(cells: list[str]) -> list[str]:
    return [cell.strip().strip('"').strip().lower() for cell in cells]


def _is_header(cells: list[str]) -> bool:
    """Return whether cells are path and label, and after them, in any order, what else labels.csv may have."""
    names = _normalize_header(cells)
    others = [name for name in names[2:] if name != GROUP_COLUMN]
    return names[:2] == ["path", "label"] and others in ([], list(SIGNATURE_COLUMNS)) and names.count(GROUP_COLUMN) < 2


class LabelConflict(UserError):
    """A label that is no longer what the writer saw; `current` is the one that stands there, "" for none."""

    def __init__(self, message: str, current: str) -> None:
        super().__init__(message)
        self.current = current


@dataclass(frozen=True)
class LabelEdit:
    """One label ("" takes it back), the `previous` one there, and `by` whom it is, where that is written down."""

    path: str
    label: str
    previous: str = ""
    by: str | None = None


_THREAD_LOCK = threading.Lock()  # where a file system has no locks, the threads of one process still take turns


def write_labels(folder: Path, *answers: LabelEdit, name: str = LABELS_FILE) -> None:
    """Write answers into labels.csv under a lock; other lines stay.

    Raise `Changed` where an image has got another label since, UserError where the file is broken or cannot be written.
    """
    with _THREAD_LOCK, _lock_labels(folder):
        file = _resolve_file(folder, name)
        try:
            table = _LabelsFile.read(file)
            for answer in answers:
                table.put(answer)
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.replace(file, table.render())
        except OSError as error:
            raise UserError(f"{file} cannot be written ({atomic_io.reason(error)}); the answer is not kept.") from error


def read_labels(folder: Path, name: str = LABELS_FILE) -> dict[str, str]:
    """Return the label of each path in a folder's labels.csv, by `plain` paths; raise UserError as `write` does."""
    rows = _LabelsFile.read(_resolve_file(folder, name)).rows
    return {normalize_path(row[0]): normalize_text(row[1]) for row in rows if len(row) > 1 and row[1].strip()}


def file_stamp(folder: Path, name: str = LABELS_FILE) -> tuple[int, ...]:
    """Return what changes whenever labels.csv does; () where there is none."""
    try:
        facts = _resolve_file(folder, name).stat()
    except OSError:
        return ()
    return facts.st_mtime_ns, facts.st_size, facts.st_ino


@contextmanager
def _lock_labels(folder: Path) -> Iterator[None]:
    """Hold the folder's labels for one writer at a time, in this process or another."""
    home = folder / STATE_FOLDER
    try:
        home.mkdir(exist_ok=True)
        with locks.hold(home / "labels.lock", 10.0):
            yield
    except locks.Conflict as error:
        raise UserError(f"{folder / LABELS_FILE} is being written by another process; try again.") from error
    except OSError as error:
        raise UserError(f"{home} cannot be written ({atomic_io.reason(error)}); the answer is not kept.") from error


class _LabelsFile:
    """The lines of a labels.csv as they were written: separator, byte order mark and unknown lines are kept."""

    def __init__(self, header: list[str], rows: list[list[str]], separator: str = ",", encoding: str = "utf-8") -> None:
        self.header, self.rows, self.separator, self.encoding = header, rows, separator, encoding
        self.places: dict[str, list[int]] = {}  # of each image's lines; a line that was taken out is empty
        for place, row in enumerate(rows):
            self.places.setdefault(normalize_path(row[0]), []).append(place)

    @classmethod
    def read(cls, file: Path) -> "_LabelsFile":
        """Read a file; raise UserError where it is none that can be added to."""
        text, faults, encoding = decode_text_file(file)
        if faults:
            raise UserError(f"{file} cannot be read ({faults[0]}); mend it: its header is path,label.")
        if text is None or not text.strip():
            return cls(["path", "label"], [])
        separator = _detect_separator(text)
        try:
            lines = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True) if row]
        except csv.Error as error:
            raise UserError(f"{file} cannot be read ({error}); mend it: its header is path,label.") from error
        header = _normalize_header(lines[0])
        if not _is_header(header):
            raise UserError(f"{file} does not begin with path,label; mend it, and answer again.")
        return cls(header, lines[1:], separator, encoding)

    def put(self, answer: LabelEdit) -> None:
        """Take over an answer, in the place of the image's current line or at the end."""
        places = self.places.get(normalize_path(answer.path), [])
        last = self.rows[places[-1]] if places else []
        current = last[1].strip() if len(last) > 1 else ""
        if normalize_text(current) not in (normalize_text(answer.previous), normalize_text(answer.label)):
            raise LabelConflict(f"{answer.path} has been labeled {current or 'by nobody'} meanwhile.", current)
        if answer.by is not None and SIGNATURE_COLUMNS[0] not in self.header:
            self.header += SIGNATURE_COLUMNS
            self.rows = [[*row, *[""] * (len(self.header) - len(row))] if row else row for row in self.rows]
        signed = ["", ""] if answer.by is None else [answer.by, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")]
        cells = {"path": answer.path, **dict(zip(self.header, last, strict=False)), "label": answer.label}
        cells |= dict(zip(SIGNATURE_COLUMNS, signed, strict=True))
        line = [cells.get(name, "") for name in self.header]
        for place in places:
            self.rows[place] = []
        if not places:
            places = self.places[normalize_path(answer.path)] = [len(self.rows)]
            self.rows.append([])
        self.places[normalize_path(answer.path)] = places[:1]
        self.rows[places[0]] = line if answer.label or cells.get(GROUP_COLUMN) else []

    def render(self) -> bytes:
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self.separator, lineterminator="\n")
        writer.writerows([self.header, *filter(None, self.rows)])
        return text.getvalue().encode(self.encoding)


def _resolve_file(folder: Path, name: str) -> Path:
    return find_labels_file(folder) if name == LABELS_FILE else folder / name


def reader_labels_file(name: str) -> str:
    """Return where a reader's labels are, within a site's folder; raise UserError for a name that is no file's."""
    if not name or name != "".join(c for c in name if c.isalnum() or c in "-_") or len(name) > 40:
        raise UserError(f"the reader {name!r} needs a name of letters, digits, - and _, 40 at most.")
    return f"{READERS_FOLDER}/{name}.csv"


def find_disagreements(folder: Path) -> list[str]:
    """List the images to which two readers of a folder gave different labels, sorted, by `plain` path."""
    files = sorted(file.stem for file in (folder / READERS_FOLDER).glob("*.csv") if not file.stem.endswith(".not-sure"))
    answers = [read_labels(folder), *(read_labels(folder, reader_labels_file(name)) for name in files)]
    given: dict[str, set[str]] = {}
    for by_path in answers:
        for path, label in by_path.items():
            given.setdefault(path, set()).add(label)
    return sorted(path for path, names in given.items() if len(names) > 1)
