"""What a user reads when runs are over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from halfmoon.cli.commands.base import print_json

if TYPE_CHECKING:
    from halfmoon.runs.runner import RunResult


def print_outcome(outcome: RunResult, as_json: bool, wide: bool) -> None:
    """Print the table, what was won and where all of it lies; as JSON, everything."""
    from rich.console import Console

    from halfmoon.cli.console import say, show
    from halfmoon.methods import registry
    from halfmoon.report import tables
    from halfmoon.report.gain import gain
    from halfmoon.report.remarks import remarks

    table = tables.comparison([tables.Result.of(summary) for summary in outcome.summaries])
    said = gain(outcome.summaries, registry.ceilings())
    notes = remarks(outcome.summaries, registry.ceilings())
    if as_json:
        print_json(
            {
                "folder": str(outcome.folder),
                "curves": str(outcome.curves),
                "tables": [str(path) for path in outcome.tables],
                "comparison": table.as_json(),
                "gain": said,
                "remarks": notes,
                "runs": [
                    {**summary, "folder": str(path)}
                    for summary, path in zip(outcome.summaries, outcome.runs, strict=True)
                ],
            }
        )
        return
    console = Console()
    shown = replace(table, wide=wide)
    show(console, shown.headings, shown.cells)
    for sentence in (*([said] if said else ()), *notes):
        say(console, sentence)
    say(console, f"curves: {outcome.curves}\nrun folder: {outcome.folder}")
