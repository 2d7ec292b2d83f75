"""Interrupt runs after a round, and resume them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfmoon.config.schema import Config
from halfmoon.runs import runner
from halfmoon.runs.callbacks import NullCallback, RunInfo


class InterruptAfterRound(NullCallback):
    """Raise KeyboardInterrupt after a round of a run, or of the run with these options if there are several."""

    def __init__(self, after: int = 1, **options: Any) -> None:
        self.after = after
        self.options = options

    def round(self, run: RunInfo, row: dict[str, Any]) -> None:
        matches = all(getattr(run.config, name) == value for name, value in self.options.items())
        if matches and row["round"] == self.after:
            raise KeyboardInterrupt


def run_with_interruption(config: Config, folder: Path, after: int = 1) -> Path:
    """Run, and run again with an interruption after a round; assert that both write the same bytes.

    Returns:
        The folder of the uninterrupted run.
    """
    straight = runner.start(replace(config, run_dir=folder / "straight")).folder
    with pytest.raises(KeyboardInterrupt):
        runner.start(replace(config, run_dir=folder / "stopped"), InterruptAfterRound(after))
    runner.resume(folder / "stopped")
    # Only these: summaries have times, and timings differ.
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (folder / "stopped" / name).read_bytes() == (straight / name).read_bytes()
    return straight
