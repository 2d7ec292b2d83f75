"""How far runs are, live: rows on a terminal, a table in a notebook, nothing elsewhere; remarks are Python warnings."""

import sys
import time
import warnings
from collections.abc import Callable
from html import escape
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from halfmoon.cli.console import Progress, Quiet, Row, Rows, duration, percent
from halfmoon.notebook.wording import in_python
from halfmoon.runs.callbacks import RunInfo

PACKAGE = str(Path(__file__).resolve().parents[1])
EVERY = 0.25
"""Seconds between two pictures of a notebook's table."""


def warn(words: str) -> None:
    """Warn with the line of the caller's own code, whatever of this package lies between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(in_python(words), RuntimeWarning, stacklevel=level)


class Silent(Quiet):
    """Show nothing, and warn."""

    def say(self, words: str) -> None:
        warn(words)


class Terminal(Rows):
    """Keep one live row a method on a terminal, and warn."""

    def say(self, words: str) -> None:
        warn(words)


class Cell(Silent):
    """Keep one table below a notebook's cell."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        self._handle: Any = None
        self._last = 0.0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw()

    def round(self, run: RunInfo, row: Row) -> None:
        super().round(run, row)
        if self.clock() - self._last >= EVERY:
            self._draw()

    def _draw(self) -> None:
        if not self.runs:
            return
        self._last = self.clock()
        ipython = import_module("IPython.display")  # it is there in a notebook
        page = ipython.HTML(progress_table(self.runs, self._last))
        if self._handle is None:
            self._handle = ipython.display(page, display_id=True)
        else:
            self._handle.update(page)


def progress_table(runs: list[Progress], now: float) -> str:
    """Return a line a method as HTML: its bar, rounds, accuracies and time."""
    lines = []
    for each in runs:
        left = f"{duration(each.left(now))} left" if each.took is None else duration(each.took)
        bar = f'<progress value="{each.round}" max="{each.rounds}" aria-label="rounds of {escape(each.title)}">'
        cells = [escape(each.title), f"{bar}</progress>", f"{each.round}/{each.rounds}", percent(each.accuracy), left]
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    heads = "".join(f"<th>{name}</th>" for name in ("method", "", "round", "accuracy", "time"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{'</tr><tr>'.join(lines)}</tr></tbody></table>"


def watcher() -> Silent | Terminal | Cell:
    """Return what shows progress here."""
    console = Console(stderr=True)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        return Cell(console)
    return Terminal(console) if console.is_terminal and not console.is_dumb_terminal else Silent(console)
