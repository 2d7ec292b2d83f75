"""What is left when all jobs of a run or a comparison are through, and the picture and tables of it."""

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from halfmoon.core.errors import UserError
from halfmoon.engine.loop import Row
from halfmoon.methods import registry
from halfmoon.report.remarks import remarks
from halfmoon.report.run_reader import Run
from halfmoon.report.tables import comparison
from halfmoon.storage import atomic_io

CURVES, CSV, MARKDOWN = "curves.png", "table.csv", "table.md"


@dataclass(frozen=True)
class RunResult:
    """What is left when all jobs are through; `summaries` and `runs` are in the order of the jobs."""

    folder: Path
    summaries: list[Row]
    curves: Path
    runs: list[Path]
    tables: list[Path]


def show(outcome: RunResult) -> None:
    """Write the picture and the tables of what came out; each is there whole or not at all."""
    from halfmoon.report.curves import curves  # Matplotlib is slow to import, and workers draw nothing

    table = comparison(outcome.summaries)
    notes = "".join(f"\n{each}\n" for each in remarks(outcome.summaries, registry.ceilings()))
    staged = outcome.curves.with_name(f".{CURVES}{atomic_io.PARTIAL}")
    try:
        for path, words in zip(outcome.tables, (table.as_csv(), table.as_markdown() + notes), strict=True):
            atomic_io.replace(path, words.encode())
        curves([Run.read(path) for path in outcome.runs], staged)
        staged.replace(outcome.curves)
    except OSError as error:
        raise UserError(
            f"{outcome.folder}: tables and curves cannot be written ({atomic_io.reason(error)}); "
            f"the runs are finished: first mend that, then: {resuming(outcome.folder)}"
        ) from error
    finally:
        with suppress(OSError):
            staged.unlink(missing_ok=True)


def resuming(root: Path) -> str:
    """Return the command that goes on with what is in a folder."""
    return shlex.join(["halfmoon", "resume", str(root)])
