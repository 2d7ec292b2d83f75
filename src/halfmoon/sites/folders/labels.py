"""Read and write labels.csv, and the labels of further readers.

Spreadsheet programs write labels.csv in many dialects: other case of the file name, semicolons, tabs, byte order marks.
All of these are read, and reported. An edit is written completely or not at all, under a lock, so that two writers do
not overwrite each other's labels.
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
from halfmoon.data.class_names import normalize_class_name
from halfmoon.report.spreadsheet import protect_cell, restore_cell
from halfmoon.storage import atomic_io, locks

STATE_FOLDER = ".halfmoon"
"""Subfolder of a site for everything that halfmoon writes there, except labels.csv and classes.txt."""

LABELS_FILE = "labels.csv"

SIGNATURE_COLUMNS = ("by", "at")
"""Optional columns of labels.csv: the person who gave the label, and the time."""

GROUP_COLUMN = "group"
"""Optional column of labels.csv: the patient (or another group) that an image belongs to."""

UNDECIDED_FILE = f"{STATE_FOLDER}/not-sure.csv"
"""Images that a person could not classify, with the columns of labels.csv."""

NOTES_FILE = f"{STATE_FOLDER}/notes.csv"
"""Notes about images; the column "label" contains the note."""

READERS_FOLDER = f"{STATE_FOLDER}/readers"
"""Labels of further readers, one file each, with the columns of labels.csv."""

MAX_QUOTE_LENGTH = 60
"""Characters of a line that an error quotes."""

LOCK_TIMEOUT_SECONDS = 10.0

_SEPARATORS = {",": "", ";": "semicolons between its cells", "\t": "tabs between its cells"}
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_ENCODINGS = {"utf-8": "", "utf-8-sig": "a byte order mark", "utf-16": "a byte order mark of UTF-16"}


class LabelTable(NamedTuple):
    """The contents of labels.csv."""

    rows: list[tuple[str, str, str]]  # path as written, label, group; with a group the label may be ""
    faults: list[str]  # reasons why the file cannot be used
    oddities: list[str]  # deviations of the format that did not prevent reading
    file: str | None  # the file's name, None if there is no such file


def read_label_table(folder: Path) -> LabelTable:
    """Read labels.csv as far as possible, also if a spreadsheet program has changed its name, separator or encoding.

    Returns:
        The rows, the faults for which the file cannot be used, and what is unusual about it. A missing file gives an
        empty table.
    """
    names = _labels_file_names(folder)
    if not names:
        return LabelTable(rows=[], faults=[], oddities=[], file=None)
    name = find_labels_file(folder).name
    if len(names) > 1 and name != LABELS_FILE:
        fault = f"there are {' and '.join(names)}: keep one of them"
        return LabelTable(rows=[], faults=[fault], oddities=[], file=name)
    oddities = [] if name == LABELS_FILE else [f"it is called {name}"]
    text, faults, encoding = decode_text_file(folder / name)
    if text is None:
        return LabelTable([], faults, oddities, name)
    rows, faults, separator = _parse_rows(text)
    # The descriptions of usual separators and encodings are empty.
    oddities += [oddity for oddity in (_SEPARATORS[separator], _ENCODINGS[encoding]) if oddity]
    return LabelTable(rows, faults, oddities, name)


def find_labels_file(folder: Path) -> Path:
    """Locate the file of a folder's labels: labels.csv (which need not exist), or one whose name differs in case."""
    names = _labels_file_names(folder)
    return folder / (LABELS_FILE if LABELS_FILE in names or not names else names[0])


def _labels_file_names(folder: Path) -> list[str]:
    """List the files that are named labels.csv in any case; empty if the folder cannot be opened."""
    try:
        return sorted(path.name for path in folder.iterdir() if path.name.lower() == LABELS_FILE and path.is_file())
    except OSError:
        return []


def decode_text_file(path: Path) -> tuple[str | None, list[str], str]:
    """Read a text file in UTF-8, or in UTF-16 if it begins with a byte order mark.

    Returns:
        The text (None if it cannot be read), the reasons why it cannot be read, and the encoding. A missing file has
        no text and no reason.
    """
    encoding = "utf-8"
    try:
        data = path.read_bytes()
        for byte_order_mark, mark_encoding in _BYTE_ORDER_MARKS.items():
            if data.startswith(byte_order_mark):
                encoding = mark_encoding
                break
        return data.decode(encoding), [], encoding
    except FileNotFoundError:
        return None, [], encoding
    except OSError as error:
        return None, [atomic_io.error_reason(error)], encoding
    except UnicodeDecodeError as error:
        kind = "UTF-16" if encoding == "utf-16" else "UTF-8"
        return None, [f"byte {error.start} is not {kind}: save the file as UTF-8"], encoding


def normalize_path(path: str) -> str:
    """Normalize a path so that each image has one spelling: forward slashes, no ./, composed accents (NFC)."""
    return normalize_text(posixpath.normpath(path.strip().replace("\\", "/")))


def normalize_text(text: str) -> str:
    """Strip blanks and compose accents (NFC)."""
    return unicodedata.normalize("NFC", text.strip())


def _parse_rows(text: str) -> tuple[list[tuple[str, str, str]], list[str], str]:
    """Parse the text of labels.csv. Empty lines are skipped.

    Returns:
        Rows of (path as written, class name, group), the faults by line, and the separator of the cells. A wrong header
        is the only fault then, and there are no rows.
    """
    separator = _detect_separator(text)
    rows: list[tuple[str, str, str]] = []
    faults: list[str] = []
    header: list[str] = []
    lines = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    try:
        for raw_cells in lines:
            cells = [restore_cell(cell) for cell in raw_cells]
            stripped_cells = [cell.strip() for cell in cells]
            if not any(stripped_cells):
                continue
            if not header:
                if not _is_header(stripped_cells):
                    line = _shorten(separator.join(stripped_cells))
                    return [], [f"line {lines.line_num} is {line!r}, not path,label"], separator
                header = _normalize_header(stripped_cells)
                continue
            row = dict(zip(header, stripped_cells, strict=False))
            if len(cells) != len(header) or not row["path"]:
                faults.append(f"line {lines.line_num} is not one path and one label")
                continue
            class_name = normalize_class_name(row["label"])
            group = normalize_text(row.get(GROUP_COLUMN, ""))
            # The path is not stripped: file names may begin or end with blanks.
            rows.append((cells[0], class_name, group))
    except csv.Error as error:
        faults.append(f"line {lines.line_num}: {error}")
    if not header and not faults:
        faults.append("it has no header path,label")
    return rows, faults, separator


def _shorten(line: str) -> str:
    """Shorten a line that an error quotes."""
    return line if len(line) <= MAX_QUOTE_LENGTH else f"{line[: MAX_QUOTE_LENGTH - 3]}..."


def _detect_separator(text: str) -> str:
    """Find the separator with which the first line that is not empty is a valid header; a comma if none is."""
    first_line = next((line for line in text.splitlines() if line.strip(" \t,;")), "")
    for separator in _SEPARATORS:
        if _is_header(first_line.split(separator)):
            return separator
    return ","


def _normalize_header(cells: list[str]) -> list[str]:
    return [cell.strip().strip('"').strip().lower() for cell in cells]


def _is_header(cells: list[str]) -> bool:
    """Check whether cells are a header: path, label, and optionally the group, and the author with the time."""
    names = _normalize_header(cells)
    optional = [name for name in names[2:] if name != GROUP_COLUMN]
    if names[:2] != ["path", "label"] or names.count(GROUP_COLUMN) > 1:
        return False
    return optional in ([], list(SIGNATURE_COLUMNS))


class LabelConflict(UserError):
    """An image's label is no longer the one that the writer saw.

    Attributes:
        current: the label in the file, "" for none.
    """

    def __init__(self, message: str, current: str) -> None:
        """Store the message and the current label."""
        super().__init__(message)
        self.current = current


@dataclass(frozen=True)
class LabelEdit:
    """A change of one image's label.

    Attributes:
        path: the image, relative to the site's folder.
        label: the new label, "" to remove it.
        previous: the label that the author saw, "" for none.
        by: the author; None if authors are not recorded.
    """

    path: str
    label: str
    previous: str = ""
    by: str | None = None


_THREAD_LOCK = threading.Lock()
"""Serializes the threads of this process on file systems without locks."""


def write_labels(folder: Path, *edits: LabelEdit, name: str = LABELS_FILE) -> None:
    """Change the labels of images in labels.csv, all or none, and preserve all other lines.

    A lock on the folder prevents that two writers overwrite each other's labels.

    Args:
        folder: the site's folder.
        edits: the changes; all are written, or none.
        name: the file, relative to `folder`.

    Raises:
        LabelConflict: an image has received another label since its author saw it.
        UserError: the file is invalid or cannot be written.
    """
    with _THREAD_LOCK, _lock_labels(folder):
        file = _resolve_file(folder, name)
        try:
            labels_file = _LabelsFile.read(file)
            for edit in edits:
                labels_file.apply(edit)
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.write_atomically(file, labels_file.render())
        except OSError as error:
            raise UserError(
                f"{file} cannot be written ({atomic_io.error_reason(error)}); the label is not saved."
            ) from error


def read_labels(folder: Path, name: str = LABELS_FILE) -> dict[str, str]:
    """Read the label of each path in a folder's labels.csv.

    Returns:
        Labels by normalized path (`normalize_path`); images without a label are absent.

    Raises:
        UserError: the file is invalid.
    """
    rows = _LabelsFile.read(_resolve_file(folder, name)).rows
    return {normalize_path(row[0]): normalize_text(row[1]) for row in rows if len(row) > 1 and row[1].strip()}


def file_stamp(folder: Path, name: str = LABELS_FILE) -> tuple[int, ...]:
    """Return a value that changes with every change of a file, to poll for changes; () if it does not exist."""
    try:
        status = _resolve_file(folder, name).stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


@contextmanager
def _lock_labels(folder: Path) -> Iterator[None]:
    """Lock a folder's labels during the `with` block, against other processes."""
    state_folder = folder / STATE_FOLDER
    try:
        state_folder.mkdir(exist_ok=True)
        with locks.hold(state_folder / "labels.lock", LOCK_TIMEOUT_SECONDS):
            yield
    except locks.LockConflict as error:
        raise UserError(f"{folder / LABELS_FILE} is being written by another process; try again.") from error
    except OSError as error:
        raise UserError(
            f"{state_folder} cannot be written ({atomic_io.error_reason(error)}); the label is not saved."
        ) from error


class _LabelsFile:
    """The lines of a labels.csv; separator, encoding and lines of unknown images are preserved.

    Attributes:
        rows: the cells of each line without the header; a removed line is an empty list.
        row_numbers: the indices in `rows` of each image's lines, by normalized path.
    """

    def __init__(self, header: list[str], rows: list[list[str]], separator: str = ",", encoding: str = "utf-8") -> None:
        """Index the lines by image."""
        self.header = header
        self.rows = rows
        self.separator = separator
        self.encoding = encoding
        self.row_numbers: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            self.row_numbers.setdefault(normalize_path(row[0]), []).append(number)

    @classmethod
    def read(cls, file: Path) -> "_LabelsFile":
        """Read a file; raise UserError if it is no valid labels.csv."""
        text, faults, encoding = decode_text_file(file)
        if faults:
            raise UserError(f"{file} cannot be read ({faults[0]}); repair it: its header is path,label.")
        if text is None or not text.strip():
            return cls(["path", "label"], [])
        separator = _detect_separator(text)
        try:
            lines = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True) if row]
        except csv.Error as error:
            raise UserError(f"{file} cannot be read ({error}); repair it: its header is path,label.") from error
        header = _normalize_header(lines[0])
        if not _is_header(header):
            raise UserError(f"{file} does not begin with path,label; repair it, and label the image again.")
        rows = [[restore_cell(cell) for cell in row] for row in lines[1:]]
        return cls(header, rows, separator, encoding)

    def apply(self, edit: LabelEdit) -> None:
        """Replace the line of an image by one with the new label, or append a line.

        Args:
            edit: the change. Removing the label removes the line, unless it also has a group.

        Raises:
            LabelConflict: the label is neither the one that the author of the change saw nor the new one.
        """
        image = normalize_path(edit.path)
        numbers = self.row_numbers.get(image, [])
        last_row = self.rows[numbers[-1]] if numbers else []
        current = last_row[1].strip() if len(last_row) > 1 else ""
        if normalize_text(current) not in (normalize_text(edit.previous), normalize_text(edit.label)):
            change = f"has been labeled {current}" if current else "has lost its label"
            raise LabelConflict(f"{edit.path} {change} meanwhile.", current)
        cells = {"path": edit.path, **dict(zip(self.header, last_row, strict=False)), "label": edit.label}
        if edit.by is None:
            cells |= dict.fromkeys(SIGNATURE_COLUMNS, "")
        else:
            self._add_signature_columns()
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            cells |= dict(zip(SIGNATURE_COLUMNS, (edit.by, now), strict=True))
        new_row = [cells.get(name, "") for name in self.header]
        # An image may have several equal lines: one remains. Rows are emptied, not deleted, so that indices remain valid.
        for number in numbers:
            self.rows[number] = []
        if not numbers:
            numbers = [len(self.rows)]
            self.rows.append([])
        self.row_numbers[image] = numbers[:1]
        self.rows[numbers[0]] = new_row if edit.label or cells.get(GROUP_COLUMN) else []

    def _add_signature_columns(self) -> None:
        """Add the columns for the author and the time of a label, unless the file has them."""
        if SIGNATURE_COLUMNS[0] in self.header:
            return
        self.header += SIGNATURE_COLUMNS
        for row in self.rows:
            if row:
                row += [""] * (len(self.header) - len(row))

    def render(self) -> bytes:
        """Write the lines as CSV in the encoding and with the separator of the file that was read."""
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self.separator, lineterminator="\n")
        # Paths and notes are other people's texts, and spreadsheet programs execute formulas in them.
        rows = [[protect_cell(cell) for cell in row] for row in self.rows if row]
        writer.writerows([self.header, *rows])
        return text.getvalue().encode(self.encoding)


def _resolve_file(folder: Path, name: str) -> Path:
    return find_labels_file(folder) if name == LABELS_FILE else folder / name


def reader_labels_file(name: str) -> str:
    """Return the file of a further reader's labels, relative to the site's folder; raise UserError for a bad name."""
    allowed = "".join(letter for letter in name if letter.isalnum() or letter in "-_")
    if not name or name != allowed or len(name) > 40:
        raise UserError(f"the reader {name!r} needs a name of letters, digits, - and _, 40 at most.")
    return f"{READERS_FOLDER}/{name}.csv"


def find_disagreements(folder: Path) -> list[str]:
    """List the images to which two readers gave different labels. A reader is a person who labels the same images.

    Args:
        folder: the site's folder. The first reader's labels are in labels.csv, those of others in a file for each.

    Returns:
        Normalized paths, sorted.
    """
    reader_files = (folder / READERS_FOLDER).glob("*.csv")
    reader_names = sorted(file.stem for file in reader_files if not file.stem.endswith(".not-sure"))
    tables = [read_labels(folder)]
    tables += [read_labels(folder, reader_labels_file(name)) for name in reader_names]
    labels_by_path: dict[str, set[str]] = {}
    for table in tables:
        for path, label in table.items():
            labels_by_path.setdefault(path, set()).add(label)
    return [path for path, labels in sorted(labels_by_path.items()) if len(labels) > 1]
