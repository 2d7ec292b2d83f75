"""Print the progress of runs on a console: live rows on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from halfmoon.config.schema import security_options
from halfmoon.core.toml import format_text as toml_text

if TYPE_CHECKING:
    from halfmoon.runs.callbacks import RunInfo

Row = dict[str, Any]

_LOG_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ")
"""The time at the beginning of a line of a server's or a site's log."""

BAR = "bar"
"""The key of the cell with the progress bar."""

BAR_COLUMNS = 12
"""Terminal columns of the progress bar."""

MIN_TITLE_COLUMNS = 16
"""Terminal columns that the title of a method has at least."""

GAP_COLUMNS = 2
"""Terminal columns between two cells."""

LINES_PER_METHOD = 10
"""Progress lines that a method prints without a terminal."""

REQUIRED_CELLS = ("round", "time")
"""Cells of a live row that are shown on any terminal."""


@dataclass
class Progress:
    """Rounds, metrics and timing of one method of a run.

    Attributes:
        folder: the run folder.
        title: the title of the method.
        rounds: the number of rounds of the run.
        first: the number of rounds that were finished before this process, if the run is resumed.
        start_time: the time of its start by the clock of the console, in seconds.
        round: the last finished round.
        accuracy: test accuracy of the last evaluation, 0 to 1.
        pseudo: accuracy of the pseudo-labels in the last round, 0 to 1.
        used: share of the unlabeled images whose pseudo-label was used in the last round.
        took: seconds of the whole method; None until it is finished.
        aggregator: metrics of the aggregator in the last round.
    """

    folder: Path
    title: str
    rounds: int
    first: int
    start_time: float
    round: int = field(init=False)
    accuracy: float | None = field(default=None, init=False)
    pseudo: float | None = field(default=None, init=False)
    used: float | None = field(default=None, init=False)
    took: float | None = field(default=None, init=False)
    aggregator: Row = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.round = self.first

    def add(self, row: Row) -> None:
        """Update the displayed metrics from those of a finished round, a row of metrics.jsonl."""
        self.round = row["round"]
        pseudo_labels = row.get("pseudo") or {}
        self.pseudo = pseudo_labels.get("accuracy")
        self.used = pseudo_labels.get("share_used")
        self.aggregator = row.get("aggregation") or {}
        # Rounds between two evaluations have no test metrics: the last accuracy is still the newest.
        if "test" in row:
            self.accuracy = row["test"]["accuracy"]

    def seconds_left(self, now: float) -> float | None:
        """Estimate the remaining seconds from the mean time of a round; None before the first round is finished."""
        # Rounds before a resume were not timed by this process.
        rounds = self.round - self.first
        if not rounds:
            return None
        return (now - self.start_time) / rounds * (self.rounds - self.round)


@dataclass(eq=False)
class NullProgress:
    """Record the progress of every method, and print only messages.

    It is a `halfmoon.runs.callbacks.Callback`, and a context manager whose subclasses use a part of the screen while
    they are entered.

    Attributes:
        console: the console to print on.
        clock: returns seconds.
        rows: the number of methods that will run; 0 if it is not known.
        seconds_after_runs: seconds of other work after the last run.
        runs: the methods that have started, in this order.
    """

    console: Console
    clock: Callable[[], float] = time.monotonic
    rows: int = 0
    seconds_after_runs: float = 0.0
    runs: list[Progress] = field(default_factory=list, init=False)
    _messages: set[str] = field(default_factory=set, init=False)

    def __enter__(self) -> NullProgress:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def begin(self, run: RunInfo) -> None:
        """Add a method that starts."""
        self.runs.append(Progress(run.folder, run.title, run.rounds, run.first, self.clock()))

    def round(self, run: RunInfo, row: Row) -> None:
        """Update the progress of a method after a round."""
        self.find(run).add(row)

    def end(self, run: RunInfo, summary: Row) -> None:
        """Mark a method as finished, and print why if it stopped before its last round."""
        progress = self.find(run)
        progress.took = self.clock() - progress.start_time
        if summary.get("ended"):
            self.record("run_stopped", f"{run.title}: {summary['ended']}")

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Print the sentence of an event once, even if several runs report it."""
        # Each method of a comparison reports, for example, the same missing file.
        if text not in self._messages:
            self._messages.add(text)
            message = f"halfmoon: {text}"
            print_line(self.console, wrap_lines(message, self.console.width) if self.console.is_terminal else message)

    def find(self, run: RunInfo) -> Progress:
        """Return the progress of a run; of the last one if its folder was used twice."""
        return next(progress for progress in reversed(self.runs) if progress.folder == run.folder)

    def total_seconds_left(self) -> float | None:
        """Estimate the seconds until all methods, `rows` of them, and the work after them are finished.

        Methods that have not started get the mean time of the others, and run as many at once as run now.

        Returns:
            The estimate, or None until every method that has started has finished a round.
        """
        now = self.clock()
        seconds_left = [progress.seconds_left(now) for progress in self.runs if progress.took is None]
        known_seconds = [seconds for seconds in seconds_left if seconds is not None]
        if len(known_seconds) < len(seconds_left) or not self.runs:
            return None
        # `took`, the seconds of a method, is None while it runs: its total is then the elapsed and the remaining time.
        totals = []
        for progress in self.runs:
            elapsed = now - progress.start_time
            totals.append(progress.took or elapsed + (progress.seconds_left(now) or 0))
        waiting_runs = max(0, self.rows - len(self.runs))  # `rows` is 0 if the number of methods is not known
        waiting_seconds = waiting_runs * sum(totals) / len(totals)
        # The running methods end in parallel, so the slowest counts. The waiting ones then run as many at once.
        running_seconds = max(known_seconds, default=0)
        parallel_runs = max(1, len(known_seconds))
        return running_seconds + waiting_seconds / parallel_runs + self.seconds_after_runs

    def print_security_options(self, run: RunInfo) -> None:
        """Print the defenses, privacy options and attacks of a run that has some."""
        options = [f"{name} {toml_text(value)}" for name, value in security_options(run.config).items()]
        if options:
            self.record("security_options", f"{run.title}: {', '.join(options)}.")


class LineProgress(NullProgress):
    """Print a plain line after about every tenth of a method's rounds."""

    def begin(self, run: RunInfo) -> None:
        """Print the security options of a method, and the round from which it is resumed."""
        super().begin(run)
        if run.first:
            text = f"{run.title}: going on after round {run.first} of {run.rounds}."
            self.record("resumed", text, round=run.first)
        self.print_security_options(run)

    def round(self, run: RunInfo, row: Row) -> None:
        """Print a line if this round completes the next tenth."""
        super().round(run, row)
        progress = self.find(run)
        # Integer division gives the number of complete tenths; it grows in the rounds that print.
        tenths = progress.round * LINES_PER_METHOD // progress.rounds
        tenths_before = (progress.round - 1) * LINES_PER_METHOD // progress.rounds
        if tenths > tenths_before:
            seconds_left = self.total_seconds_left() if self.rows > 1 else None
            total = f"; all rows: {duration(seconds_left)} left" if seconds_left else ""
            print_line(self.console, f"{describe_progress(progress, self.clock())}{total}")


class LiveProgress(NullProgress):
    """Update one row for each method on a terminal."""

    def __enter__(self) -> LiveProgress:
        # Transient: the rows disappear at the end, and the table of results takes their lines.
        self._live = Live(console=self.console, get_renderable=self.build_table, refresh_per_second=4, transient=True)
        self._live.start(refresh=True)
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def begin(self, run: RunInfo) -> None:
        """Add a row, and print the security options of the method."""
        super().begin(run)
        self.print_security_options(run)

    def build_table(self) -> Table:
        """Build the table that the live display shows now: one row for each method that has started.

        Columns that do not fit on the terminal are left out (`choose_cells`).
        """
        table = Table(box=None, pad_edge=False, caption_justify="left")
        if not self.runs:
            return table
        if self.rows > 1:
            table.caption = f"all rows: {duration(self.total_seconds_left())} left"
        cells_by_run = [self._format_cells(progress) for progress in self.runs]
        names, title_columns = choose_cells(cells_by_run, self.console.width)
        table.add_column("method", no_wrap=True, overflow="ellipsis", max_width=title_columns)
        if BAR in names:
            table.add_column("")
        # The bar is no text: it is added to each row below.
        columns = [name for name in cells_by_run[0] if name in names and name != BAR]
        for name in columns:
            # A minimum width, because rich would otherwise shrink numbers before the title of the method.
            width = max(len(name), *(len(cells[name]) for cells in cells_by_run))
            table.add_column(name, justify="right", no_wrap=True, min_width=width)
        for progress, cells in zip(self.runs, cells_by_run, strict=True):
            row: list[Any] = [Text(progress.title)]
            if BAR in names:
                row.append(ProgressBar(progress.rounds, progress.round, width=BAR_COLUMNS))
            row += [cells[name] for name in columns]
            table.add_row(*row)
        return table

    def _format_cells(self, progress: Progress) -> dict[str, str]:
        """Format the cells of a method's row by heading, without the title."""
        if progress.took is None:
            time_text = f"{duration(progress.seconds_left(self.clock()))} left"
        else:
            time_text = duration(progress.took)
        cells = {
            BAR: " " * BAR_COLUMNS,  # reserves the width of the bar
            "round": f"{progress.round}/{progress.rounds}",
            "accuracy": percent(progress.accuracy),
            "pseudo-labels": percent(progress.pseudo),
            "used": percent(progress.used),
        }
        # All rows of a table have the same cells, so one private method gives the others an empty one.
        if any("epsilon" in other.aggregator for other in self.runs):
            epsilon = progress.aggregator.get("epsilon")
            cells["epsilon"] = "-" if epsilon is None else f"{epsilon:.4g}"
        cells["time"] = time_text
        return cells


def choose_cells(cells: Sequence[Mapping[str, str]], width: int) -> tuple[set[str], int]:
    """Choose which cells of the live rows, one for each method, fit on a terminal, most important first.

    A column has the width of its longest text or of its heading, the name of the cell. A cell that does not fit is left
    out, and a narrower one of less importance may still be shown.

    Args:
        cells: for each row the texts of its cells by name; all rows have the same names.
        width: columns of the terminal.

    Returns:
        The names of the cells, always with round and time, and the columns that are left for the methods' titles.
    """
    names: set[str] = set(REQUIRED_CELLS)
    free_columns = width - MIN_TITLE_COLUMNS
    for name in (*REQUIRED_CELLS, "accuracy", "epsilon", "pseudo-labels", "used", BAR):
        if name not in cells[0]:
            continue
        heading_columns = 0 if name == BAR else len(name)  # the bar has no heading
        needed = GAP_COLUMNS + max(heading_columns, *(len(values[name]) for values in cells))
        if needed <= free_columns or name in REQUIRED_CELLS:
            names.add(name)
            free_columns -= needed
    return names, max(1, MIN_TITLE_COLUMNS + free_columns)


def make_progress(
    console: Console, as_json: bool = False, rows: int = 0, seconds_after_runs: float = 0.0
) -> NullProgress:
    """Create the progress display that suits a console: live rows on a terminal, else lines, or none for JSON.

    Args:
        console: the console to print on.
        as_json: print nothing unless it is a terminal.
        rows: the number of methods that will run; 0 if it is not known.
        seconds_after_runs: seconds of other work after the last method, for the estimate of the remaining time.
    """
    display: type[NullProgress]
    # A dumb terminal cannot move its cursor, so it cannot update rows.
    if console.is_terminal and not console.is_dumb_terminal:
        display = LiveProgress
    elif as_json:
        display = NullProgress
    else:
        display = LineProgress
    return display(console, rows=rows, seconds_after_runs=seconds_after_runs)


def describe_progress(progress: Progress, now: float) -> str:
    """Describe the progress of a method in one line; values that no round has measured yet are left out."""
    items = [f"round {progress.round}/{progress.rounds}"]
    if progress.accuracy is not None:
        items.append(f"accuracy {percent(progress.accuracy)}")
    if progress.pseudo is not None:
        items.append(f"pseudo-labels {percent(progress.pseudo)}")
    if progress.used is not None:
        items.append(f"used {percent(progress.used)}")
    for name, value in progress.aggregator.items():
        if isinstance(value, int | float):
            items.append(f"{name.replace('_', ' ')} {value:.4g}")
    seconds_left = progress.seconds_left(now)
    if progress.round < progress.rounds and seconds_left is not None:
        items.append(f"{duration(seconds_left)} left")
    return f"{progress.title}: {', '.join(items)}"


def percent(share: float | None) -> str:
    """Format a share of 0 to 1 in percent; `-` for None."""
    return "-" if share is None else f"{100 * share:.1f} %"


def duration(seconds: float | None) -> str:
    """Format seconds as minutes:seconds, or hours:minutes:seconds from one hour on; `-` for None."""
    if seconds is None:
        return "-"
    # Round first: 59.6 s must become 1:00, not 0:60.
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def wrap_lines(text: str, width: int) -> str:
    """Wrap the lines of a text that are too long between words; other lines are not changed.

    Further lines are indented as the first one and two spaces more, and those of a log below the text after its time.

    Args:
        text: one or more lines.
        width: columns of the terminal.
    """
    lines = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        if stamp := _LOG_TIME.match(line):
            indent = stamp.end()
        elif indent:
            indent += 2
        wrapper = textwrap.TextWrapper(
            max(20 + indent, width), subsequent_indent=" " * indent, replace_whitespace=False
        )
        # Paths and option names stay in one piece, so that they can be copied.
        wrapper.break_long_words = False
        wrapper.break_on_hyphens = False
        lines.append(wrapper.fill(line) if len(line) > width else line)
    return "\n".join(lines)


def print_line(console: Console, text: str) -> None:
    """Print a text without markup, highlighting or wrapping."""
    # The text may contain paths and names of the user: rich must neither interpret brackets nor break lines in them.
    console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)
