"""Progress of runs: rows on a terminal, a table in a notebook, no output elsewhere. Messages are plain text.

Messages are printed to stderr, in a notebook below the cell. Only what the user should change is a Python warning.

Errors and remarks name options as Python does: `clients=2`, not `--clients 2`.
"""

import re
import sys
import time
import warnings
from collections.abc import Callable
from functools import wraps
from html import escape
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, get_args

from rich.console import Console

from halfmoon.cli.console import LiveProgress, NullProgress, Progress, Row, duration, percent
from halfmoon.config import schema
from halfmoon.core.errors import UserError
from halfmoon.runs.callbacks import RunInfo

PACKAGE = str(Path(__file__).resolve().parents[1])
"""Folder of halfmoon's modules."""

REFRESH_SECONDS = 0.25
"""Time between two updates of a notebook's table."""


def warn(text: str) -> None:
    """Warn with the line of the user's code that called halfmoon, not a line of halfmoon."""
    frame = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
        level += 1
    warnings.warn(in_python(text), RuntimeWarning, stacklevel=level)


class QuietProgress(NullProgress):
    """Show nothing."""

    def say(self, text: str) -> None:
        """Ignore a message."""


class MessageProgress(NullProgress):
    """Print only messages."""

    def say(self, text: str) -> None:
        """Print a message once, with options as Python's keywords."""
        super().say(in_python(text))


class TerminalProgress(LiveProgress):
    """Show one live row for each method on a terminal, and print messages above."""

    def say(self, text: str) -> None:
        """Print a message once, with options as Python's keywords."""
        super().say(in_python(text))


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
    heads = "".join(f"<th>{name}</th>" for name in ("method", "", "round", "accuracy", "time"))
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


def note(text: str, show: bool = True) -> None:
    """Print a message, outside of a run's progress display, unless `show` is False."""
    make_progress(show).say(text)


P = ParamSpec("P")
R = TypeVar("R")

_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)((?: -?\d[\w.-]*)+(?<!\.)| [A-Z]+\b| [a-z][\w-]*)?")
"""A flag, and after it numbers, one word in capital letters, or one word in small letters."""

_COMMAND = re.compile(r"(`halfmoon [^`]+`)")
_RESUME = re.compile(r"`?halfmoon resume ([^\s`;,]+)`?(?<!\.)")


def in_python(text: str) -> str:
    """Replace flags in a sentence by Python's keywords; commands in backticks do not change."""
    # Split by a pattern with a group: the odd pieces are the commands.
    pieces = _COMMAND.split(_RESUME.sub(r'halfmoon.resume("\1")', text))
    return "".join(piece if number % 2 else _FLAG.sub(_format_option, piece) for number, piece in enumerate(pieces))


def _format_option(match: re.Match[str]) -> str:
    """Turn a flag in a message, with the values that follow it, into a Python argument.

    "--lr 0.1" becomes "lr=0.1", "--seeds 0 1" becomes "seeds=[0, 1]", "--data FOLDER" becomes "data=FOLDER".

    Args:
        match: a match of `_FLAG`: the flag's name without dashes, and the text after it that may be its values:
            several numbers, one placeholder in capital letters, or one word in small letters.
    """
    name = match[1].replace("-", "_")
    values = (match[2] or "").split()
    if values and values[0][0].islower():
        # The only word: a value if the option accepts it, otherwise the sentence goes on with it.
        if values[0] not in _list_choices(name):
            return name + match[2]
        values = [f'"{values[0]}"']
    if not values:
        return name
    return f"{name}={values[0]}" if len(values) == 1 else f"{name}=[{', '.join(values)}]"


def _list_choices(name: str) -> set[str]:
    """List the strings that an option accepts, from its type, such as `Literal["sgd", "adam"]`; none for any text."""
    # Types inside of others are looked through as well, such as those of `int | Literal["all"]`.
    types = [schema.option_types().get(name)]
    choices = set[str]()
    while types:
        option_type = types.pop()
        if isinstance(option_type, str):
            choices.add(option_type)
        types += get_args(option_type)
    return choices | (set(schema.NETWORKS) if name == "network" else set())


def python_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of the Python API so that its `UserError`s name arguments, not flags of the command line.

    The functions below it are shared with the command line, whose messages say `--run-dir`.
    """

    @wraps(call)
    def translated(*args: P.args, **options: P.kwargs) -> R:
        try:
            return call(*args, **options)
        except UserError as error:
            # The method fills in placeholders such as {run_dir}; `in_python` replaces flags that the text spells out.
            text = error.in_python()
            error.args = (in_python(text),)
            raise

    return translated


def to_path(value: Any) -> Any:
    """Turn a string into a path; other values are returned unchanged."""
    return Path(value) if isinstance(value, str) else value
