"""Runs that are disturbed: stopped after a round, and gone on with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from halfmoon.config.schema import Config
from halfmoon.runs import runner
from halfmoon.runs.callbacks import NullCallback, RunInfo


class InterruptAfterRound(NullCallback):
    """Press Ctrl-C when so many rounds are over, of a run with these options where there are several."""

    def __init__(self, after: int = 1, **options: Any) -> None:
        self.after = after
        self.options = options

    def round(self, run: RunInfo, row: dict[str, Any]) -> None:
        fits = all(getattr(run.config, name) == value for name, value in self.options.items())
        if fits and row["round"] == self.after:
            raise KeyboardInterrupt


def run_with_interruption(config: Config, folder: Path, after: int = 1) -> Path:
    """Return the folder of a run; one that was stopped after so many rounds, and resumed, has ended in its bytes."""
    straight = runner.start(replace(config, run_dir=folder / "straight")).folder
    with pytest.raises(KeyboardInterrupt):
        runner.start(replace(config, run_dir=folder / "stopped"), InterruptAfterRound(after))
    runner.resume(folder / "stopped")
    for name in ("model.safetensors", "metrics.jsonl"):
        assert (folder / "stopped" / name).read_bytes() == (straight / name).read_bytes()
    return straight
