"""Callbacks that disturb a run."""

from typing import Any

from halfmoon.runs.callbacks import NullCallback, RunInfo


class Stop(NullCallback):
    """Press Ctrl-C after the first round, of a run with these options where there are several."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def round(self, run: RunInfo, row: dict[str, Any]) -> None:
        if all(getattr(run.config, name) == value for name, value in self.options.items()):
            raise KeyboardInterrupt
