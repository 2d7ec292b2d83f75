"""The files of a run folder that say who holds which rows, with their checksums."""

import json
import shlex
from pathlib import Path

from halfmoon.data import Source, Split
from halfmoon.data import summary as portrait
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.folder_writer import Unwritable

SPLIT, HOLDINGS = "split.parquet", "split.json"


def save(path: Path, split: Split, data: Source) -> None:
    """Write the split and what it holds; the parquet last, as a run that goes on looks for it."""
    counts = portrait(split, data.train.labels, data.classes)
    try:
        atomic_io.replace(path / HOLDINGS, (json.dumps(counts) + "\n").encode())
    except OSError as error:
        raise Unwritable(
            f"{path}: {HOLDINGS} cannot be written ({atomic_io.reason(error)}). "
            f"First mend that, then go on with: {shlex.join(['halfmoon', 'resume', str(path)])}"
        ) from error
    split.save(path / SPLIT)


def note(path: Path) -> None:
    """Write down the checksums of a split, where a kill has left it without them."""
    if SPLIT in integrity.sums(path):
        return
    try:
        integrity.note_files(path, HOLDINGS, SPLIT)
    except OSError as error:
        raise Unwritable(
            f"{path}: {integrity.SUMS} cannot be written ({atomic_io.reason(error)}). "
            f"First mend that, then go on with: {shlex.join(['halfmoon', 'resume', str(path)])}"
        ) from error
