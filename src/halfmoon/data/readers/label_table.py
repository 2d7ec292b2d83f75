"""Read tables of labels: labels.csv or labels.tsv of a site's folder, or metadata.csv of Hugging Face's ImageFolder.

Spreadsheet programs write such tables in many dialects: other case of the file name, semicolons, tabs, byte order marks.
All of these are read, and reported. `halfmoon.sites.folders.labels` writes them. The spreadsheets themselves are refused.
"""

import codecs
import csv
import io
import os
import posixpath
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.core.spreadsheet import restore_cell
from halfmoon.data.class_names import is_missing_label, normalize_class_name, sort_class_names
from halfmoon.storage import atomic_io

LABELS_FILE = "labels.csv"

OTHER_NAMES = ("labels.tsv", "labels.txt")
"""Other names, in lower case, of `LABELS_FILE`; labels.txt only if it has its header."""

METADATA_FILE = "metadata.csv"
"""The table of Hugging Face's ImageFolder, with the column file_name; read if there is no labels.csv."""

SPREADSHEETS = tuple(f"labels{suffix}" for suffix in (".xlsx", ".xlsm", ".xls", ".ods", ".numbers"))
"""Names, in lower case, of tables of labels that are not read."""

METADATA_LINES_FILE = "metadata.jsonl"
"""Another form of `METADATA_FILE`, with a JSON object a line, which is not read."""

PATH_COLUMN, LABEL_COLUMN = "path", "label"

PATH_TITLES = ("path", "file_name", "filename", "file", "image", "image_path", "filepath")
"""Titles, in lower case, of the column with the paths of images; the first of them that a table has counts."""

LABEL_TITLES = ("label", "labels", "class", "class_name", "category", "target")
"""Titles, in lower case, of the column with the classes of images."""

SIGNATURE_COLUMNS = ("by", "at")
"""Optional columns of labels.csv: the person who gave the label, and the time."""

GROUP_COLUMN = "group"
"""Optional column of labels.csv: the patient (or another group) that an image belongs to."""

STANDARD_COLUMNS = (PATH_COLUMN, LABEL_COLUMN, GROUP_COLUMN, *SIGNATURE_COLUMNS)

MAX_QUOTE_LENGTH = 60
"""Characters of a line that an error quotes."""

MAX_LISTED_FAULTS = 10
"""Number of faulty lines in a message; further ones are counted."""

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
    extra_titles: tuple[str, ...] = ()  # titles of further columns
    extra_cells: tuple[tuple[str, ...], ...] = ()  # the cells of these columns, for each of `rows`
    remedy: str = "repair it: its header is path,label"  # what to do about the faults

    @property
    def is_unread(self) -> bool:
        """True if the only table of the folder is in a format that is not read, such as that of a spreadsheet."""
        return self.faults == [_UNREAD_FAULT]


def read_label_table(folder: Path) -> LabelTable:
    """Read labels.csv as far as possible, also if a spreadsheet program has changed its name, separator or encoding.

    Returns:
        The rows, the faults for which the file cannot be used, and what is unusual about it. A missing file gives an
        empty table.
    """
    names = _labels_file_names(folder)
    if not names:
        if unread := _find_unread_table(folder):
            return LabelTable(rows=[], faults=[_UNREAD_FAULT], oddities=[], file=unread, remedy=EXPORT_REMEDY)
        return LabelTable(rows=[], faults=[], oddities=[], file=None)
    name = find_labels_file(folder).name
    if len(names) > 1:
        fault = f"there are {' and '.join(names)}"
        return LabelTable(rows=[], faults=[fault], oddities=[], file=name, remedy="keep one of them")
    oddities = [] if name == LABELS_FILE else [f"it is called {name}"]
    text, faults, encoding = decode_text_file(folder / name)
    if text is None:
        return LabelTable([], faults, oddities, name, remedy="save it as UTF-8, and allow reading it")
    parsed = _parse_rows(clear_separator_line(text))
    # The descriptions of usual separators and encodings are empty.
    oddities += [oddity for oddity in (_SEPARATORS[parsed.separator], _ENCODINGS[encoding]) if oddity]
    return LabelTable(parsed.rows, parsed.faults, oddities, name, parsed.extra_titles, tuple(parsed.extra_cells))


_UNREAD_FAULT = "its format is not read, only text is"
"""The fault of a folder whose only table of labels is in a format that is not read."""

EXPORT_REMEDY = f"save it as CSV UTF-8 under the name {LABELS_FILE}, or rename it if it has no labels of these images"
"""What to do about such a table."""


def _find_unread_table(folder: Path) -> str | None:
    """Find the name of a folder's table of labels in a format that is not read; None if there is none."""
    try:
        paths = [path for path in sorted(folder.iterdir()) if path.is_file()]
    except OSError:
        return None
    if spreadsheets := [path.name for path in paths if path.name.lower() in SPREADSHEETS]:
        return spreadsheets[0]
    names = [path.name for path in paths if path.name.lower() == METADATA_LINES_FILE and _has_line_labels(path)]
    return names[0] if names else None


def _has_line_labels(path: Path) -> bool:
    """Check whether the first object of a metadata.jsonl has a path and a label; it may have captions instead."""
    try:
        with path.open("rb") as file:
            row = atomic_io.parse_json(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(row, dict) and is_header(list(row))


def find_labels_file(folder: Path) -> Path:
    """Locate the file of a folder's labels: labels.csv (which need not exist), one whose name differs in case,
    labels.tsv, labels.txt, or metadata.csv.
    """
    names = _labels_file_names(folder)
    return folder / (LABELS_FILE if LABELS_FILE in names or not names else names[0])


def _labels_file_names(folder: Path) -> list[str]:
    """List the files that are named labels.csv, .tsv or .txt in any case, otherwise metadata.csv; empty if there is none."""
    tables = (LABELS_FILE, *OTHER_NAMES, METADATA_FILE)
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.lower() in tables)
    except OSError:
        return []
    files = [name for name in names if (folder / name).is_file()]
    labels_files = [
        name
        for name in files
        if name.lower() in (LABELS_FILE, *OTHER_NAMES)
        and (not name.lower().endswith(".txt") or _has_labels(folder / name))
    ]
    return labels_files or [name for name in files if name.lower() == METADATA_FILE and _has_labels(folder / name)]


def _has_labels(path: Path) -> bool:
    """Check whether a metadata.csv has a column of file names and one of labels; it may have captions instead."""
    text, _, _ = decode_text_file(path)
    lines = clear_separator_line(text or "").splitlines()
    first_line = next((line for line in lines if line.strip()), "")
    return any(is_header(first_line.split(separator)) for separator in _SEPARATORS)


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
        return None, [f"byte {error.start} is not {kind}"], encoding


def normalize_path(path: str) -> str:
    """Normalize a path so that each image has one spelling: forward slashes, no ./, composed accents (NFC)."""
    return normalize_text(posixpath.normpath(path.strip().replace("\\", "/")))


def normalize_text(text: str) -> str:
    """Strip blanks and compose accents (NFC)."""
    return unicodedata.normalize("NFC", text.strip())


class _ParsedTable(NamedTuple):
    """The parsed text of a table of labels."""

    rows: list[tuple[str, str, str]]  # path as written, class name, group
    faults: list[str]  # by line; a wrong header is the only fault then, and there are no rows
    separator: str  # of the cells
    extra_titles: tuple[str, ...]  # the titles of other columns
    extra_cells: list[tuple[str, ...]]  # the cells of other columns, for each of `rows`


def _parse_rows(text: str) -> _ParsedTable:
    """Parse the text of labels.csv. Empty lines are skipped.

    The header is the first line. It names the columns path and label, in any order; group is optional, and the cells of
    other columns are kept as they are. A line that cannot be used is a fault, and the lines after it are still parsed.
    """
    separator = detect_separator(text)
    rows: list[tuple[str, str, str]] = []
    faults: list[str] = []
    header: list[str] = []
    extra_columns: list[int] = []
    extra_cells: list[tuple[str, ...]] = []
    lines = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    try:
        for raw_cells in lines:
            cells = [restore_cell(cell) for cell in raw_cells]
            stripped_cells = [cell.strip() for cell in cells]
            if not any(stripped_cells):
                continue
            if not header:
                if not is_header(stripped_cells):
                    line = _shorten(separator.join(stripped_cells))
                    fault = f"line {lines.line_num} is {line!r}, not path,label"
                    return _ParsedTable([], [fault], separator, (), [])
                header = normalize_header(stripped_cells)
                titles = ("", *STANDARD_COLUMNS)  # columns without a title are left out
                extra_columns = [column for column, title in enumerate(header) if title not in titles]
                continue
            row = dict(zip(header, stripped_cells, strict=False))
            if len(cells) != len(header) or not row[PATH_COLUMN]:
                faults.append(f"line {lines.line_num} is not one path and one label")
                continue
            class_name = normalize_class_name(row[LABEL_COLUMN])
            group = normalize_text(row.get(GROUP_COLUMN, ""))
            # The path is not stripped: file names may begin or end with blanks.
            rows.append((cells[header.index(PATH_COLUMN)], class_name, group))
            extra_cells.append(tuple(cells[column] for column in extra_columns))  # not stripped either
    except csv.Error as error:
        faults.append(f"line {lines.line_num}: {error}")
    if not header and not faults:
        faults.append("it has no header path,label")
    return _ParsedTable(rows, faults, separator, tuple(header[column] for column in extra_columns), extra_cells)


def _shorten(line: str) -> str:
    """Shorten a line that an error quotes."""
    return line if len(line) <= MAX_QUOTE_LENGTH else f"{line[: MAX_QUOTE_LENGTH - 3]}..."


def detect_separator(text: str) -> str:
    """Find the separator with which the first line that is not empty is a valid header; a comma if none is."""
    first_line = next((line for line in text.splitlines() if line.strip(" \t,;")), "")
    for separator in _SEPARATORS:
        if is_header(first_line.split(separator)):
            return separator
    return ","


def clear_separator_line(text: str) -> str:
    """Empty the first line if it only names the separator for Excel ("sep=;"); the numbers of other lines remain."""
    return re.sub(r'\A"?sep=.?"?(?=[\r\n])', "", text, flags=re.IGNORECASE)


def normalize_header(cells: Sequence[str]) -> list[str]:
    """Name the columns of a header: "path", "label", "group", "by" and "at", and others as they are written.

    Upper case, quotes and blanks do not matter for the standard names. Other usual titles of the columns of paths and
    labels, such as "file_name" and "class", are replaced by "path" and "label".
    """
    titles = [cell.strip().strip('"').strip() for cell in cells]
    names = [title.lower() if title.lower() in STANDARD_COLUMNS else title for title in titles]
    lowered = [title.lower() for title in titles]
    for name, candidates in ((PATH_COLUMN, PATH_TITLES), (LABEL_COLUMN, LABEL_TITLES)):
        title_in_use = next((title for title in candidates if title in lowered), None)
        if title_in_use is not None:
            names[lowered.index(title_in_use)] = name
    return names


def is_header(cells: Sequence[str]) -> bool:
    """Check whether cells are a header with a path and a label; author and time come together, and titles are unique."""
    names = normalize_header(cells)
    signed = [name in names for name in SIGNATURE_COLUMNS]
    titled = [name for name in names if name]  # spreadsheet programs write empty columns at the end
    return {PATH_COLUMN, LABEL_COLUMN} <= set(names) and len(set(titled)) == len(titled) and len(set(signed)) == 1


def read_paths_by_class(folder: Path) -> dict[str, list[Path]] | None:
    """Read the images of each class from a folder's labels.csv, both sorted; None if there is no such file.

    Args:
        folder: The folder of the images, to which the paths in the file are relative.

    Returns:
        The image files by class name.

    Raises:
        UserError: The table has a fault, or an image has no label, two labels, or no file.
    """
    table = read_label_table(folder)
    if table.file is None:
        return None
    if table.is_unread and any(path.is_dir() and not path.name.startswith(".") for path in folder.iterdir()):
        return None  # the names of the subfolders are the classes
    file = folder / table.file
    if table.faults:
        raise UserError(f"{file} cannot be read: {table.faults[0]}; {table.remedy}.")
    if not table.rows:
        raise UserError(f"{file} lists no image: add a line path,label for each.")
    class_of: dict[str, str] = {}
    faults: list[str] = []
    for path, label, _ in table.rows:
        normalized = normalize_path(path)
        # A file's name may have blanks at its ends, or accents that are not composed.
        name = path if (folder / path).is_file() and not (folder / normalized).is_file() else normalized
        # Also absolute paths, and paths with "..", whose images would belong to another part of the data set.
        if not Path(os.path.abspath(folder / name)).is_relative_to(os.path.abspath(folder)):
            raise UserError(f"{file}: {path} is not in its folder; give paths relative to {folder}.")
        name = os.path.relpath(folder / name, folder)
        if is_missing_label(label):
            faults.append(f"{path} has no label; label it, or take the line out")
        elif class_of.setdefault(name, label) != label:
            faults.append(f"{path} has the labels {class_of[name]} and {label}; leave one line for it")
        elif not (folder / name).is_file():
            faults.append(f"there is no file {path}; correct the path, or take the line out")
    if faults:
        more = f"; and {len(faults) - MAX_LISTED_FAULTS:,} more" if len(faults) > MAX_LISTED_FAULTS else ""
        raise UserError(f"{file}: {'; '.join(faults[:MAX_LISTED_FAULTS])}{more}.")
    paths_of: dict[str, list[Path]] = {name: [] for name in sort_class_names(set(class_of.values()))}
    for name, label in sorted(class_of.items()):
        paths_of[label].append(folder / name)
    return paths_of
