"""What a user sees while runs are played and when they are over: live rows, plain lines, tables."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from halfmoon.config.schema import security_options
from halfmoon.storage.toml import format_text as toml_text

if TYPE_CHECKING:
    from halfmoon.runs.callbacks import RunInfo

Row = dict[str, Any]
BAR, BAR_WIDTH = "bar", 12  # of progress, where a terminal has room for it
SHORTEST, GAP = 16, 2  # columns that a method's name has at least, and that lie between two columns
STEPS = 10  # lines a method prints where there is no terminal


@dataclass
class Progress:
    """How far one method is."""

    folder: Path
    title: str
    rounds: int
    first: int
    began: float
    round: int = field(init=False)
    accuracy: float | None = field(default=None, init=False)  # of the last evaluation
    pseudo: float | None = field(default=None, init=False)
    used: float | None = field(default=None, init=False)
    took: float | None = field(default=None, init=False)  # seconds, once it is through
    aggregator: Row = field(default_factory=dict, init=False)  # what stands before the method says of the last round

    def __post_init__(self) -> None:
        self.round = self.first

    def add(self, row: Row) -> None:
        """Take over a round's line of metrics.jsonl."""
        self.round = row["round"]
        pseudo = row.get("pseudo") or {}
        self.pseudo, self.used = pseudo.get("accuracy"), pseudo.get("share_used")
        self.aggregator = row.get("aggregation") or {}
        if "test" in row:
            self.accuracy = row["test"]["accuracy"]

    def left(self, now: float) -> float | None:
        """Return the seconds this method still needs at its mean pace, None before its first round."""
        rounds = self.round - self.first
        return (now - self.began) / rounds * (self.rounds - self.round) if rounds else None


@dataclass(eq=False)
class Quiet:
    """Note how far every method is, and show nothing but what has to be said.

    It is a `halfmoon.runs.callbacks.Callback` that owns a part of the screen while it is entered.
    """

    console: Console
    clock: Callable[[], float] = time.monotonic
    rows: int = 0
    after: float = 0.0
    runs: list[Progress] = field(default_factory=list, init=False)
    _sentences: set[str] = field(default_factory=set, init=False)

    def __enter__(self) -> Quiet:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def begin(self, run: RunInfo) -> None:
        self.runs.append(Progress(run.folder, run.title, run.rounds, run.first, self.clock()))

    def round(self, run: RunInfo, row: Row) -> None:
        self.of(run).add(row)

    def end(self, run: RunInfo, summary: Row) -> None:
        """A method is through; a run that was over before its last round says why."""
        progress = self.of(run)
        progress.took = self.clock() - progress.began
        if summary.get("ended"):
            self.say(f"{run.title}: {summary['ended']}")

    def say(self, words: str) -> None:
        if words not in self._sentences:  # each of many runs would say the same
            self._sentences.add(words)
            say(self.console, f"halfmoon: {words}")

    def of(self, run: RunInfo) -> Progress:
        return next(each for each in reversed(self.runs) if each.folder == run.folder)

    def all_left(self) -> float | None:
        """Return the seconds that all `rows` still need, and what comes `after` them; None before the first round.

        A row that has not begun takes as long as the others in their mean, and as many are played at once.
        """
        now = self.clock()
        lefts = [each.left(now) for each in self.runs if each.took is None]
        times = [left for left in lefts if left is not None]
        if len(times) < len(lefts) or not self.runs:
            return None
        lengths = [each.took or now - each.began + (each.left(now) or 0) for each in self.runs]
        waiting = max(0, self.rows - len(self.runs)) * sum(lengths) / len(lengths)
        return max(times, default=0) + waiting / max(1, len(times)) + self.after

    def tell_guards(self, run: RunInfo) -> None:
        """Say which defenses, privacy and attacks a run has, where it has some."""
        guards = [f"{name} {toml_text(value)}" for name, value in security_options(run.config).items()]
        if guards:
            self.say(f"{run.title}: {', '.join(guards)}.")


class Lines(Quiet):
    """Print a plain line about every tenth of the rounds."""

    def begin(self, run: RunInfo) -> None:
        super().begin(run)
        if run.first:
            self.say(f"{run.title}: going on after round {run.first} of {run.rounds}.")
        self.tell_guards(run)

    def round(self, run: RunInfo, row: Row) -> None:
        super().round(run, row)
        now = self.of(run)
        if now.round * STEPS // now.rounds > (now.round - 1) * STEPS // now.rounds:
            left = self.all_left() if self.rows > 1 else None
            whole = f"; all rows: {duration(left)} left" if left else ""
            say(self.console, f"{line(now, self.clock())}{whole}")


class Rows(Quiet):
    """Keep one live row a method on a terminal."""

    def __enter__(self) -> Rows:
        self._live = Live(console=self.console, get_renderable=self.table, refresh_per_second=4, transient=True)
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def begin(self, run: RunInfo) -> None:
        super().begin(run)
        self.tell_guards(run)

    def table(self) -> Table:
        """Return the rows as they are now."""
        table = Table(box=None, pad_edge=False, caption_justify="left")
        if not self.runs:
            return table
        if self.rows > 1:
            table.caption = f"all rows: {duration(self.all_left())} left"
        cells = [self._cells(each) for each in self.runs]
        names, room = fitting(cells, self.console.width)
        table.add_column("method", no_wrap=True, overflow="ellipsis", max_width=room)
        if BAR in names:
            table.add_column("")
        columns = [name for name in cells[0] if name in names and name != BAR]
        for name in columns:
            width = max(len(name), *(len(each[name]) for each in cells))
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
        for each, values in zip(self.runs, cells, strict=True):
            bar = [ProgressBar(each.rounds, each.round, width=BAR_WIDTH)] if BAR in names else []
            table.add_row(Text(each.title), *bar, *(values[name] for name in columns))
        return table

    def _cells(self, each: Progress) -> dict[str, str]:
        left = f"{duration(each.left(self.clock()))} left" if each.took is None else duration(each.took)
        values = {BAR: " " * BAR_WIDTH, "round": f"{each.round}/{each.rounds}", "accuracy": percent(each.accuracy)}
        values |= {"pseudo-labels": percent(each.pseudo), "used": percent(each.used)}
        if any("epsilon" in other.aggregator for other in self.runs):
            epsilon = each.aggregator.get("epsilon")
            values["epsilon"] = "-" if epsilon is None else f"{epsilon:.4g}"
        return {**values, "time": left}


def fitting(cells: Sequence[Mapping[str, str]], width: int) -> tuple[set[str], int]:
    """Return the columns that a terminal has room for beside the methods' names, and how much room these have.

    Round and time are always there.
    """
    columns = {"round", "time"}
    room = width - SHORTEST
    order = [*columns, "accuracy", "epsilon", "pseudo-labels", "used", BAR]
    for name in order:
        if name in cells[0]:
            needed = GAP + max(len(name) if name != BAR else 0, *(len(each[name]) for each in cells))
            if needed <= room or name in ("round", "time"):
                columns.add(name)
                room -= needed
    return columns, max(1, SHORTEST + room)


def watcher(console: Console, json: bool = False, rows: int = 0, after: float = 0.0) -> Quiet:
    terminal = console.is_terminal and not console.is_dumb_terminal
    return (Rows if terminal else Quiet if json else Lines)(console, rows=rows, after=after)


def line(progress: Progress, now: float) -> str:
    """Return how far a method is, in words."""
    parts = [f"round {progress.round}/{progress.rounds}", f"accuracy {percent(progress.accuracy)}"]
    if progress.pseudo is not None:
        parts.append(f"pseudo-labels {percent(progress.pseudo)}")
    if progress.used is not None:
        parts.append(f"used {percent(progress.used)}")
    numbers = {name: value for name, value in progress.aggregator.items() if isinstance(value, int | float)}
    parts += [f"{name.replace('_', ' ')} {value:.4g}" for name, value in numbers.items()]
    if progress.round < progress.rounds:
        parts.append(f"{duration(progress.left(now))} left")
    return f"{progress.title}: {', '.join(parts)}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def duration(seconds: float | None) -> str:
    """Return seconds as minutes:seconds, with hours where there are some, `-` for none."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def show(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], wrap: bool = False) -> None:
    """Print a table, ruled on a terminal with room for it, else plain; columns of numbers are flush right.

    With `wrap` a table of words stays ruled on a narrow terminal: all but the first column go on below themselves.
    """
    right = [all(_number(row[k]) for row in rows) for k in range(len(header))]
    widths = [
        max(map(len, [*name.split(), *(row[k] for row in rows if right[k])]), default=1)
        for k, name in enumerate(header)
    ]
    narrow = sum(widths) + 2 * len(widths) > console.width
    if not console.is_terminal or (narrow and not wrap):
        say(console, plain(header, rows, right))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, flush, width in zip(header, right, widths, strict=True):
        first = name == header[0]
        if wrap:
            table.add_column(Text(name), no_wrap=first)
        else:
            table.add_column(Text(name), justify="right" if flush else "left", min_width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def plain(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a table as aligned text."""
    widths = [max(len(each[k]) for each in (header, *rows)) for k in range(len(header))]
    lines = [
        "  ".join(
            f"{cell:{'>' if flush else '<'}{width}}" for cell, flush, width in zip(each, right, widths, strict=True)
        )
        for each in (header, *rows)
    ]
    return "\n".join(each.rstrip() for each in lines)


def wrapped(console: Console, words: str) -> str:
    """Return words behind two blanks; a terminal gets lines that end between words."""
    if not console.is_terminal:
        return f"  {words}"
    wrap = textwrap.TextWrapper(max(20, console.width), initial_indent="  ", subsequent_indent="    ")
    wrap.break_long_words = wrap.break_on_hyphens = False
    return wrap.fill(words)


def say(console: Console, words: str) -> None:
    console.print(words, markup=False, emoji=False, highlight=False, soft_wrap=True)


def _number(words: str) -> bool:
    return words[:1].isdigit() or words in ("-", "")
