"""What a user reads when runs are over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from halfmoon.cli.commands.base import print_json, say, show

if TYPE_CHECKING:
    from halfmoon.runs.runner import RunResult
    from halfmoon.sweeps.decision import Decision


def print_outcome(outcome: RunResult, as_json: bool, wide: bool, decision: Decision | None = None) -> None:
    """Print the table, what was won and where all of it lies; as JSON, everything, with a `decision` where one was
    made."""
    from halfmoon.methods import registry
    from halfmoon.report import tables
    from halfmoon.report.gain import gain
    from halfmoon.report.paired import ONE_SEED, differences
    from halfmoon.report.remarks import remarks

    table = tables.comparison([tables.Result.of(summary) for summary in outcome.summaries])
    paired = differences(outcome.summaries, registry.ceilings())
    sentence = gain(outcome.summaries, registry.ceilings())
    notes = remarks(outcome.summaries, registry.ceilings())
    if as_json:
        print_json(
            {
                "folder": str(outcome.folder),
                "curves": str(outcome.curves),
                "tables": [str(path) for path in outcome.tables],
                "comparison": table.as_json(),
                "differences": paired and paired.as_json(),
                "gain": sentence,
                **({} if decision is None else {"decision": decision.as_json()}),
                "remarks": notes,
                "runs": [
                    {**summary, "folder": str(path)}
                    for summary, path in zip(outcome.summaries, outcome.runs, strict=True)
                ],
            }
        )
        return
    wide_table = replace(table, wide=wide)
    show(wide_table.headings, wide_table.cells)
    if paired:
        show(paired.headings, paired.cells)
        say(paired.sentence)
    elif decision is None and len(table.lines) > 1 and len({summary["seed"] for summary in outcome.summaries}) == 1:
        say(ONE_SEED)
    for words in (*([sentence] if sentence else ()), *notes):
        say(words)
    say(f"curves: {outcome.curves}\nrun folder: {outcome.folder}")
