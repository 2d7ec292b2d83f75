"""Write labels.csv and the labels of further readers, and read them for this.

`halfmoon.data.readers.label_table` reads the dialects of spreadsheet programs. An edit is written completely or not at
all, under a lock, so that two writers do not overwrite each other's labels.
"""

import csv
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.core.spreadsheet import protect_cell, restore_cell
from halfmoon.data.readers.label_table import (
    LABEL_COLUMN,
    LABELS_FILE,
    PATH_COLUMN,
    SIGNATURE_COLUMNS,
    clear_separator_line,
    decode_text_file,
    detect_separator,
    find_labels_file,
    is_header,
    normalize_header,
    normalize_path,
    normalize_text,
)
from halfmoon.storage import atomic_io, locks

STATE_FOLDER = ".halfmoon"
"""Subfolder of a site for everything that halfmoon writes there, except labels.csv and classes.txt."""

UNDECIDED_FILE = f"{STATE_FOLDER}/not-sure.csv"
"""Images that a person could not classify, with the columns of labels.csv."""

NOTES_FILE = f"{STATE_FOLDER}/notes.csv"
"""Notes about images; the column "label" contains the note."""

READERS_FOLDER = f"{STATE_FOLDER}/readers"
"""Labels of further readers, one file each, with the columns of labels.csv."""

LOCK_TIMEOUT_SECONDS = 10.0


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

    Args:
        folder: the site's folder.
        name: another file of the same form in it, such as that of a further reader (`reader_labels_file`).

    Returns:
        Labels by normalized path (`normalize_path`); images without a label are absent.

    Raises:
        UserError: the file is invalid.
    """
    labels_file = _LabelsFile.read(_resolve_file(folder, name))
    labeled = [row for row in labels_file.rows if labels_file.label_of(row)]
    return {labels_file.path_of(row): normalize_text(labels_file.label_of(row)) for row in labeled}


def file_stamp(folder: Path, name: str = LABELS_FILE) -> tuple[int, ...]:
    """Return a value that changes with every change of a file, to poll for changes; () if it does not exist."""
    try:
        status = _resolve_file(folder, name).stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino


@contextmanager
def _lock_labels(folder: Path) -> Iterator[None]:
    """Lock a folder's labels during the `with` block, so that two processes do not overwrite each other's labels.

    Raises:
        UserError: another process has the lock for `LOCK_TIMEOUT_SECONDS`, or the folder cannot be written.
    """
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
        header: the names of the columns (`normalize_header`).
        titles: the columns as the file writes them.
        rows: the cells of each line without the header; a removed line is an empty list.
        row_numbers: the indices in `rows` of each image's lines, by normalized path.
    """

    def __init__(self, header: list[str], rows: list[list[str]], separator: str = ",", encoding: str = "utf-8") -> None:
        """Index the lines of a labels.csv by image.

        Columns have two names: `header` has those that this program looks up ("path", "label"), and `titles` those that
        are written back, as a file may use a synonym such as file_name.

        Args:
            header: the titles of the columns, as the file has them.
            rows: the cells of the other lines.
            separator: the separator of the cells.
            encoding: the encoding of the file.
        """
        self.header = normalize_header(header)
        # Written back: a title that the user has chosen remains; one that differs in case only is normalized.
        titles = [title.strip().strip('"').strip() for title in header]
        self.titles = [
            name if title.lower() == name else title for name, title in zip(self.header, titles, strict=True)
        ]
        self.rows = rows
        self.separator = separator
        self.encoding = encoding
        self.row_numbers: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            self.row_numbers.setdefault(self.path_of(row), []).append(number)

    def path_of(self, row: list[str]) -> str:
        """Return the normalized path of a line."""
        return normalize_path(self._cell(row, PATH_COLUMN))

    def label_of(self, row: list[str]) -> str:
        """Return the label of a line, "" for none."""
        return self._cell(row, LABEL_COLUMN).strip()

    def _cell(self, row: list[str], name: str) -> str:
        column = self.header.index(name)
        return row[column] if column < len(row) else ""

    @classmethod
    def read(cls, file: Path) -> "_LabelsFile":
        """Read all lines of a labels.csv, to change some of them; a missing file has only the header.

        Raises:
            UserError: the file cannot be read or has another header.
        """
        text, faults, encoding = decode_text_file(file)
        if faults:
            raise UserError(f"{file} cannot be read ({faults[0]}); save it as UTF-8 with the header path,label.")
        if text is None or not text.strip():
            return cls(["path", "label"], [], "\t" if file.suffix.lower() == ".tsv" else ",")
        text = clear_separator_line(text)
        separator = detect_separator(text)
        try:
            reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
            lines = [cells for cells in reader if any(cells)]
        except csv.Error as error:
            raise UserError(f"{file} cannot be read ({error}); repair it: its header is path,label.") from error
        header = lines[0] if lines else []
        if not is_header(header):
            raise UserError(f"{file} does not begin with path,label; repair it, and label the image again.")
        rows = [[restore_cell(cell) for cell in row] for row in lines[1:]]
        return cls(header, rows, separator, encoding)

    def apply(self, edit: LabelEdit) -> None:
        """Replace the line of an image by one with the new label, or append a line.

        Args:
            edit: the change: the new label, the one that its author saw, and the author's name, if it is recorded.
                Removing the label removes the line, unless it has further cells, such as a group.

        Raises:
            LabelConflict: the label is neither the one that the author saw nor the new one: somebody has changed it
                meanwhile.
        """
        image = normalize_path(edit.path)
        numbers = self.row_numbers.get(image, [])
        last_row = self.rows[numbers[-1]] if numbers else []
        current = self.label_of(last_row)
        if normalize_text(current) not in (normalize_text(edit.previous), normalize_text(edit.label)):
            change = f"has been labeled {current}" if current else "has lost its label"
            raise LabelConflict(f"{edit.path} {change} meanwhile.", current)
        present_cells = dict(zip(self.header, last_row, strict=False))  # a line may have fewer cells than columns
        cells = {"path": edit.path, **present_cells, "label": edit.label}
        # The signature is the author and the time of a label: that of the previous label must not remain.
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
        if not numbers:  # the image has no line yet
            numbers = [len(self.rows)]
            self.rows.append([])
        self.row_numbers[image] = numbers[:1]
        label_columns = (PATH_COLUMN, LABEL_COLUMN, *SIGNATURE_COLUMNS)
        has_more = any(cells.get(name) for name in self.header if name not in label_columns)
        self.rows[numbers[0]] = new_row if edit.label or has_more else []

    def _add_signature_columns(self) -> None:
        """Add the columns for the author and the time of a label, unless the file has them."""
        if SIGNATURE_COLUMNS[0] in self.header:
            return
        self.header += SIGNATURE_COLUMNS
        self.titles += SIGNATURE_COLUMNS
        for row in self.rows:
            if row:
                row += [""] * (len(self.header) - len(row))

    def render(self) -> bytes:
        """Write the lines as CSV in the encoding and with the separator of the file that was read."""
        text = io.StringIO()
        writer = csv.writer(text, delimiter=self.separator, lineterminator="\n")
        # Paths and notes are other people's texts, and spreadsheet programs execute formulas in them.
        rows = [[protect_cell(cell) for cell in row] for row in self.rows if row]
        writer.writerows([self.titles, *rows])
        return text.getvalue().encode(self.encoding)


def _resolve_file(folder: Path, name: str) -> Path:
    """Return the path of a file of labels; labels.csv may have another usual name, such as metadata.csv."""
    return find_labels_file(folder) if name == LABELS_FILE else folder / name


def reader_labels_file(name: str) -> str:
    """Return the file of a further reader's labels, relative to the site's folder; raise UserError for a bad name."""
    allowed = "".join(letter for letter in name if letter.isalnum() or letter in "-_")
    if not name or name != allowed or len(name) > 40:
        raise UserError(f"the reader {name!r} needs a name of letters, digits, - and _, 40 at most.")
    return f"{READERS_FOLDER}/{name}.csv"


def find_disagreements(folder: Path) -> list[str]:
    """List the images to which two readers gave different labels. A reader is a person who labels the same images.

    An image that a reader has not labeled is no disagreement.

    Args:
        folder: the site's folder. The first reader's labels are in labels.csv, those of others in a file for each in a
            subfolder. Next to it, NAME.not-sure.csv lists the images that the reader could not classify.

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
