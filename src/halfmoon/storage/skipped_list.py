"""The list of images that were left out because they cannot be read."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from halfmoon.core.spreadsheet import escape_formulas
from halfmoon.storage import atomic_io


def write_skipped_list(path: Path, reasons: Iterable[tuple[str, str]]) -> None:
    """Write the paths of images that cannot be read, with the reasons, as a CSV file.

    Args:
        path: the file to write.
        reasons: path and reason of each image.

    Raises:
        OSError: the file cannot be written.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("path", "reason"))
    for image_path, reason in sorted(reasons, key=lambda item: item[0]):
        # A file name that starts with "=" would be a formula in a spreadsheet.
        table.writerow(escape_formulas([image_path, reason]))
    # File names may contain bytes that are no UTF-8.
    atomic_io.write_atomically(path, text.getvalue().encode("utf-8", "surrogateescape"))
