"""Progress of the runs that a Python program starts: rows on a terminal, a table in a notebook, no output elsewhere.

Messages are plain text, printed to stderr, in a notebook below the cell. Only what the user should change is a Python
warning (`halfmoon.core.python_names.warn`).
"""

import sys
import time
from collections.abc import Callable
from html import escape
from importlib import import_module
from types import TracebackType
from typing import Any

from rich.console import Console

from halfmoon.core.errors import in_python
from halfmoon.runs.callbacks import RunInfo
from halfmoon.runs.progress import LiveProgress, NullProgress, Progress, Row, duration, percent

REFRESH_SECONDS = 0.25
"""Time between two updates of a notebook's table."""


class QuietProgress(NullProgress):
    """Show nothing."""

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Ignore an event."""


class MessageProgress(NullProgress):
    """Print only messages."""

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Print the sentence of an event once, with options as Python's keywords."""
        super().record(name, in_python(text), **fields)


class TerminalProgress(LiveProgress):
    """Show one live row for each method on a terminal, and print messages above."""

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Print the sentence of an event once, with options as Python's keywords."""
        super().record(name, in_python(text), **fields)


class NotebookProgress(MessageProgress):
    """Show one table below a notebook's cell."""

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
        if self.clock() - self._last >= REFRESH_SECONDS:
            self._draw()

    def _draw(self) -> None:
        """Show the table of all runs below the notebook's cell, or replace the one that is shown."""
        if not self.runs:
            return
        self._last = self.clock()
        ipython = import_module("IPython.display")  # installed in every notebook
        page = ipython.HTML(progress_table(self.runs, self._last))
        if self._handle is None:
            self._handle = ipython.display(page, display_id=True)
        else:
            self._handle.update(page)


def progress_table(runs: list[Progress], now: float) -> str:
    """Render the progress of runs as an HTML table with a row for each: method, bar, rounds, accuracy and time.

    Args:
        runs: the progress of each run; `took` is its duration in seconds, None while it trains.
        now: the time, in seconds of the progress's clock.
    """
    lines = []
    for run in runs:
        time_text = f"{duration(run.seconds_left(now))} left" if run.took is None else duration(run.took)
        title = escape(run.title)
        bar = f'<progress value="{run.round}" max="{run.rounds}" aria-label="rounds of {title}"></progress>'
        cells = [title, bar, f"{run.round}/{run.rounds}", percent(run.accuracy), time_text]
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    heads = "".join(f"<th>{name}</th>" for name in ("method", "progress", "round", "accuracy", "time"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{'</tr><tr>'.join(lines)}</tr></tbody></table>"


def make_progress(show: bool = True) -> QuietProgress | MessageProgress | TerminalProgress:
    """Make the display of progress and messages that fits where the program runs.

    Args:
        show: False for a display that shows nothing.

    Returns:
        A table in a notebook, rows that change on a terminal, otherwise (such as in a log) only messages.
    """
    console = Console(stderr=True)
    if not show:
        return QuietProgress(console)
    if in_notebook():
        # Notebooks color the background of stderr as if it were an error. Plain text needs no HTML of rich.
        return NotebookProgress(Console(file=sys.stdout, force_jupyter=False))
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalProgress(console)
    return MessageProgress(console)


def in_notebook() -> bool:
    """Check whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def print_message(text: str, show: bool = True) -> None:
    """Print a message, outside of a run's progress display, unless `show` is False."""
    make_progress(show).record("message", text)
