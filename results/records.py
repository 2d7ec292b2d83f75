"""Read and append to the gzip-compressed records of finished runs: NAME.jsonl.gz, NAME.csv.gz and NAME.json.gz.

An append rewrites the file under a temporary name and renames it, so that a killed process loses no earlier record.
The scripts of benchmarks/ import this module, too. `gzip -dc results/NAME.jsonl.gz` prints a file.
"""

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfmoon.storage import atomic_io


def read_text(path: Path) -> str:
    """Decompress a file; return an empty text if it does not exist."""
    return gzip.decompress(path.read_bytes()).decode() if path.exists() else ""


def write_text(path: Path, text: str) -> None:
    """Compress a text into a file, atomically; the same text gives the same bytes."""
    atomic_io.write_atomically(path, gzip.compress(text.encode(), mtime=0))


def replace_table(page: Path, table: str, head: str) -> None:
    """Replace the first table of a Markdown page, keeping the text around it; write a page with `head` if there is none."""
    text = page.read_text() if page.exists() else f"{head}\n\n|\n"
    atomic_io.write_atomically(
        page, re.sub(r"(?:^\|.*\n)+", lambda _: f"{table}\n", text, count=1, flags=re.M).encode()
    )


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Wait until no other process appends to a file of a folder, and let none append during the block."""
    try:
        import fcntl
    except ImportError:  # Windows: run one script at a time
        yield
        return
    with atomic_io.open_file(folder, 0) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def append_text(path: Path, text: str) -> None:
    """Add a text to the end of a compressed file, which is created if it is missing."""
    with lock_folder(path.parent):
        write_text(path, read_text(path) + text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read a file of JSON lines; return an empty list if it does not exist."""
    return [json.loads(line) for line in read_text(path).splitlines()]


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add a record to a file of JSON lines."""
    append_text(path, json.dumps(record) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; return None if the file does not exist."""
    return json.loads(read_text(path)) if path.exists() else None


def read_rows(path: Path) -> list[dict[str, str]]:
    """Read a CSV table with a header; return an empty list if the file does not exist."""
    return list(csv.DictReader(io.StringIO(read_text(path), newline="")))


def format_rows(rows: Sequence[dict[str, Any]], header: bool) -> str:
    """Format rows with equal keys as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def append_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add rows with equal keys to a CSV table, which gets a header if it is new."""
    append_text(path, format_rows(rows, header=not path.exists()))
