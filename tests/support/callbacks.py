"""Callbacks that disturb a run."""

from typing import Any

from halfmoon.runs.callbacks import NullCallback, RunInfo


class Stop(NullCallback):
    """Press Ctrl-C after the first round."""

    def round(self, run: RunInfo, row: dict[str, Any]) -> None:
        raise KeyboardInterrupt
