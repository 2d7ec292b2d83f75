"""labels.csv as people write it: other names' cases, semicolons, tabs and byte order marks are read, and said."""

import codecs
import csv
import io
import posixpath
import unicodedata
from pathlib import Path
from typing import NamedTuple

LABELS = "labels.csv"
SIGNED, GROUP = ("by", "at"), "group"
"""Columns that labels.csv may have besides path and label: who said it, and when; whose image it is."""

_SEPARATORS = {",": "", ";": "semicolons between its cells", "\t": "tabs between its cells"}


class Table(NamedTuple):
    """What labels.csv says."""

    rows: list[tuple[str, str, str]]  # path as written, label, group; with a group a label may be ""
    faults: list[str]
    oddities: list[str]  # of the file, which was read all the same
    file: str | None  # its name, None where there is none


def read(folder: Path) -> Table:
    """Return the lines of labels.csv, whatever the case of its name; an absent file has none."""
    names = _names(folder)
    if len(names) > 1 and LABELS not in names:
        return Table([], [f"there are {' and '.join(names)}: keep one of them"], [], names[0])
    if not names:
        return Table([], [], [], None)
    name = LABELS if LABELS in names else names[0]
    oddities = [] if name == LABELS else [f"it is called {name}"]
    text, fault, marked = decoded(folder / name)
    if text is None:
        return Table([], fault, oddities, name)
    rows, faults, separator = _parsed(text)
    oddities += [_SEPARATORS[separator]] if _SEPARATORS[separator] else []
    return Table(rows, faults, [*oddities, *marked], name)


def file_of(folder: Path) -> Path:
    """Return the file that holds a folder's labels, or will: labels.csv, or one whose name differs in case."""
    try:
        names = _names(folder)
    except OSError:
        names = []
    return folder / (LABELS if LABELS in names or not names else names[0])


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.lower() == LABELS and path.is_file())


def separator_of(text: str) -> str:
    first = next((line for line in text.splitlines() if line.strip(" \t,;")), "")
    return next((each for each in _SEPARATORS if is_header(first.split(each))), ",")


def decoded(path: Path) -> tuple[str | None, list[str], list[str]]:
    """Return the text of a file, or None and what is wrong, and its byte order mark; an absent file is no fault."""
    try:
        data = path.read_bytes()
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return data.decode("utf-16"), [], ["a byte order mark of UTF-16"]
        return data.decode("utf-8-sig"), [], ["a byte order mark"] if data.startswith(codecs.BOM_UTF8) else []
    except FileNotFoundError:
        return None, [], []
    except OSError as error:
        return None, [error.strerror or str(error)], []
    except UnicodeDecodeError as error:
        kind = "UTF-16" if error.encoding.startswith("utf-16") else "UTF-8"
        return None, [f"byte {error.start} is not {kind}: save the file as UTF-8"], []


def plain(path: str) -> str:
    """Return a path in the one way that names its image: forward slashes, no ./, accents in one character."""
    return nfc(posixpath.normpath(path.strip().replace("\\", "/")))


def nfc(words: str) -> str:
    return unicodedata.normalize("NFC", words.strip())


def _parsed(text: str) -> tuple[list[tuple[str, str, str]], list[str], str]:
    """Return the rows, the faults, and what separates the cells."""
    separator = separator_of(text)
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
                if not is_header(stripped):
                    return (
                        [],
                        [f"line {lines.line_num} is {_clip(separator.join(stripped))}, not path,label"],
                        separator,
                    )
                header = columns(stripped)
                continue
            row = dict(zip(header, stripped, strict=False))
            group = row.get(GROUP, "")
            if len(cells) != len(header) or not row["path"] or not (row["label"] or group):
                faults.append(f"line {lines.line_num} is not one path and one label")
            else:
                rows.append((cells[0], nfc(row["label"]), nfc(group)))
    except csv.Error as error:
        faults.append(f"line {lines.line_num}: {error}")
    if not header and not faults:
        faults.append("it has no header path,label")
    return rows, faults, separator


def columns(cells: list[str]) -> list[str]:
    return [cell.strip().strip('"').strip().lower() for cell in cells]


def is_header(cells: list[str]) -> bool:
    """Return whether cells are path and label, and after them, in any order, what else labels.csv may have."""
    names = columns(cells)
    others = [name for name in names[2:] if name != GROUP]
    return names[:2] == ["path", "label"] and others in ([], list(SIGNED)) and names.count(GROUP) < 2


def _clip(words: str) -> str:
    return repr(words if len(words) <= 60 else f"{words[:57]}...")
