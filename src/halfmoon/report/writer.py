"""Write a report: the page, and the same numbers as CSV and LaTeX."""

from collections.abc import Sequence
from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.report.frame import format_csv
from halfmoon.report.gather import gather_studies
from halfmoon.report.latex import format_latex
from halfmoon.report.page import list_missing, render_html
from halfmoon.storage import atomic_io


def write_report(paths: Sequence[Path], out: Path) -> tuple[list[Path], list[str]]:
    """Write a report of runs, comparisons and sweeps as an HTML page, CSV and LaTeX, side by side under one name.

    Args:
        paths: their folders.
        out: the page, a .html file in an existing folder.

    Returns:
        The three files, and a sentence for everything that is missing in them.

    Raises:
        UserError: a path has no finished run, or `out` is invalid; no file is written then.
    """
    check_output_path(out)
    studies = gather_studies(paths)
    # All texts are made before the first file is written, so that an error leaves no incomplete report.
    contents = {".html": render_html(studies), ".csv": format_csv(studies), ".tex": format_latex(studies)}
    files = [out.with_suffix(suffix) if suffix != ".html" else out for suffix in contents]
    for file, text in zip(files, contents.values(), strict=True):
        try:
            atomic_io.write_atomically(file, text.encode(errors="replace"))
        except OSError as error:
            raise UserError(
                f"{file} cannot be written ({atomic_io.error_reason(error)}); choose another {{out}}.",
                option="out",
            ) from error
    return files, [note for study in studies for note in list_missing(study)]


def check_output_path(out: Path) -> None:
    """Raise `UserError` if no HTML page can be written at `out`, before the report is computed."""
    if out.is_dir():
        raise UserError(f"{{out}} {out} is a folder; name a file, such as {out / 'page.html'}.", option="out")
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"{{out}} {out} does not end in .html; name a page, such as {out.with_suffix('.html')}.", option="out"
        )
    if not out.parent.is_dir():
        raise UserError(
            f"{{out}} {out}: there is no folder {out.parent}; make it first, or choose another.", option="out"
        )
