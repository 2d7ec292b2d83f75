"""How far runs are, live: rows on a terminal, a table in a notebook, nothing elsewhere; remarks are Python warnings.

Errors and remarks have the words of whoever reads them: an option is `clients=2` in Python, not `--clients 2`.
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
EVERY = 0.25  # seconds between two pictures of a notebook's table


def warn(words: str) -> None:
    """Warn with the line of the caller's own code, whatever of this package lies between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(in_python(words), RuntimeWarning, stacklevel=level)


class WarningProgress(NullProgress):
    """Show nothing, and warn."""

    def say(self, words: str) -> None:
        warn(words)


class Terminal(LiveProgress):
    """Keep one live row a method on a terminal, and warn."""

    def say(self, words: str) -> None:
        warn(words)


class Cell(WarningProgress):
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
        left = f"{duration(each.seconds_left(now))} left" if each.took is None else duration(each.took)
        bar = f'<progress value="{each.round}" max="{each.rounds}" aria-label="rounds of {escape(each.title)}">'
        cells = [escape(each.title), f"{bar}</progress>", f"{each.round}/{each.rounds}", percent(each.accuracy), left]
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    heads = "".join(f"<th>{name}</th>" for name in ("method", "", "round", "accuracy", "time"))
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{'</tr><tr>'.join(lines)}</tr></tbody></table>"


def watcher() -> WarningProgress | Terminal | Cell:
    """Return what shows progress here."""
    console = Console(stderr=True)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        return Cell(console)
    return Terminal(console) if console.is_terminal and not console.is_dumb_terminal else WarningProgress(console)


P = ParamSpec("P")
R = TypeVar("R")

_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)((?: -?\d[\w.-]*)+(?<!\.)| [A-Z]+\b| [a-z][\w-]*)?")
_COMMAND = re.compile(r"(`halfmoon [^`]+`)")
_RESUME = re.compile(r"`?halfmoon resume ([^\s`;,]+)`?(?<!\.)")


def in_python(words: str) -> str:
    """Return a sentence with options as Python has them; a command in backticks stays one of the shell."""
    parts = _COMMAND.split(_RESUME.sub(r'halfmoon.resume("\1")', words))
    return "".join(each if number % 2 else _FLAG.sub(_option, each) for number, each in enumerate(parts))


def _option(match: re.Match[str]) -> str:
    name, values = match[1].replace("-", "_"), (match[2] or "").split()
    if values and values[0][0].islower():
        if values[0] not in _choices(name):
            return name + match[2]
        values = [f'"{values[0]}"']
    listed = ", ".join(values)
    return f"{name}=[{listed}]" if len(values) > 1 else f"{name}={listed}" if values else name


def _choices(name: str) -> set[str]:
    """Return the words that an option can be, {} where they are not listed."""
    waiting, words = [schema.option_types().get(name)], set[str]()
    while waiting:
        kind = waiting.pop()
        words |= {kind} if isinstance(kind, str) else set()
        waiting += get_args(kind)
    return words | (set(schema.NETWORKS) if name == "network" else set())


def python_errors(call: Callable[P, R]) -> Callable[P, R]:
    """Return a function whose `UserError`s name arguments, not flags."""

    @wraps(call)
    def translated(*args: P.args, **options: P.kwargs) -> R:
        try:
            return call(*args, **options)
        except UserError as error:
            error.args = (in_python(error.in_python()),)
            raise

    return translated


def paths(value: Any) -> Any:
    """Return a text as a path, anything else as it is: people write folders as texts."""
    return Path(value) if isinstance(value, str) else value
