"""Follow run folders while they grow: read new rows once, describe the progress, and find problems."""

import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon.core import toml
from halfmoon.pages import federation_events
from halfmoon.report.bands import pick_evenly, six_digits
from halfmoon.report.metrics import METRICS
from halfmoon.report.run_reader import read_title
from halfmoon.report.styles import line_styles, style_to_json
from halfmoon.storage import atomic_io, locks
from halfmoon.storage.folder_writer import LOCK

METRICS_FILE = "metrics.jsonl"
TIMINGS_FILE = "timings.jsonl"
SUMMARY_FILE = "summary.json"
RUN_FILE = "run.json"
CONFIG_FILE = "config.toml"
SWEEP_FILE = "sweep.json"
COMPARISON_FILE = "comparison.json"

MAX_TABLE_ROWS = 200
"""Number of rounds in a table, the last ones."""

RECENT_ROUNDS = 5
"""Number of rounds whose mean duration gives the remaining time."""

STOPPED_SECONDS = 120.0
"""Time without new rows after which a run counts as stopped, if its rounds are short."""

DEFAULT_ROUND_TIMEOUT_SECONDS = 3600.0
"""Time that a server waits for a reply if its options do not set `round_timeout`."""

SCAN_SECONDS = 3.0
"""Time between two searches for new runs."""

MAX_RUNS = 64
"""Number of runs that are followed at once."""

UNUSED_ROUNDS = 5
"""Number of successive rounds without used pseudo-labels that give an alarm."""

MIN_SHARE_USED = 0.005
"""Share of used pseudo-labels below which a round counts as one without."""

ACCURACY_FALL = 0.15
"""Accuracy below the best one that gives an alarm."""

QUANTITIES = {
    **{name: METRICS[name] for name in ("accuracy", "loss", "pseudo", "above", "share_above", "share_used")},
    "evaluation": ("evaluation", "accuracy", 100.0),
    "epsilon": METRICS["epsilon"],
}
"""Quantities that are drawn by round: group and name in metrics.jsonl, and the factor by which they are shown."""


def _drop_invalid(row: dict[str, Any]) -> dict[str, Any]:
    """Drop the groups and numbers of a row that are of another type, as in a damaged file or one of another program."""
    for group in {"cost", *(group for group, _, _ in QUANTITIES.values())} & row.keys():
        values = row[group]
        if not isinstance(values, dict):
            del row[group]
            continue
        names = {name for other, name, _ in QUANTITIES.values() if other == group}
        # A number that is not finite is written as null, which the page reports.
        invalid = [name for name in names & values.keys() if isinstance(values[name], str | bool | list | dict)]
        row[group] = {name: value for name, value in values.items() if name not in invalid}
    return row


@dataclass
class JsonLinesFile:
    """A growing file of JSON lines with a round each. Complete lines are read once.

    Attributes:
        path: the file.
        rows: the rows so far, with increasing rounds.
        offset: the bytes that are read.
        stamp: size in bytes and time of change in nanoseconds at the last read.
    """

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    offset: int = 0
    stamp: tuple[int, int] = (0, 0)

    def update(self) -> bool:
        """Read the lines that a run has appended since the last call; return True if the file has changed.

        A file that is shorter than before, because its run was resumed, is read from the beginning.
        """
        try:
            status = self.path.stat()
        except OSError:
            return False
        stamp = (status.st_size, status.st_mtime_ns)
        if stamp == self.stamp:
            return False
        if status.st_size < self.offset:
            self.rows = []
            self.offset = 0
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                # The last line may be incomplete while the run writes it.
                complete, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            return False
        for line in complete.split(b"\n") if newline else ():
            try:
                row = atomic_io.parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict) and type(row.get("round")) is int:
                # A resumed run repeats rounds. The file may have outgrown its old length since the last read.
                while self.rows and self.rows[-1]["round"] >= row["round"]:
                    self.rows.pop()
                self.rows.append(_drop_invalid(row))
        self.offset += len(complete) + len(newline)
        self.stamp = stamp
        return True


class FollowedRun:
    """A run folder that is read while the run writes it. The folder is neither changed nor locked.

    Attributes:
        path: the folder.
        name: a short name of the run.
        metrics: the rows of metrics.jsonl.
        timings: the rows of timings.jsonl.
        options: the options of the run, {} until they are written.
        summary: the contents of summary.json, None until the run has finished.
        title: the title of the method, "" if the folder has none.
        version: a number that grows with every change.
    """

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.metrics = JsonLinesFile(path / METRICS_FILE)
        self.timings = JsonLinesFile(path / TIMINGS_FILE)
        self.options: dict[str, Any] = {}
        self.summary: dict[str, Any] | None = None
        self.title = ""
        self.version = 0

    def update(self) -> bool:
        """Read the files of the run folder that have changed; return True if there are any."""
        metrics_changed = self.metrics.update()
        timings_changed = self.timings.update()
        options_found = False
        if not self.options:
            try:
                text = atomic_io.read(self.path / CONFIG_FILE) or b""
            except OSError:
                text = b""  # such as a file that this user may not read
            self.options = toml.parse_or_empty(text.decode("utf-8", "replace"))
            self.title = read_title(self.path)
            options_found = bool(self.options)
        summary = atomic_io.read_json(self.path / SUMMARY_FILE)
        summary_changed = summary != self.summary
        self.summary = summary
        changed = metrics_changed or timings_changed or options_found or summary_changed
        if changed:
            self.version += 1  # the page requests curves again only if this number has changed
        return changed

    @property
    def method(self) -> str:
        return str(self.options.get("method", self.path.name))

    @property
    def rounds(self) -> int:
        """Number of rounds of the whole run, 0 if it is unknown."""
        value = (self.summary or self.options).get("rounds")
        return value if type(value) is int else 0

    @property
    def round(self) -> int:
        """Number of finished rounds."""
        return self.metrics.rows[-1]["round"] if self.metrics.rows else 0

    def series(self, key: str) -> dict[int, float]:
        """Collect one of `QUANTITIES` by round, without rounds that do not have it."""
        values = {row["round"]: _quantity(row, key) for row in self.metrics.rows}
        return {round: value for round, value in values.items() if value is not None}

    def seconds(self) -> dict[int, float]:
        """Collect the duration of each timed round."""
        values = {row["round"]: row.get("seconds") for row in self.timings.rows}
        return {round: float(value) for round, value in values.items() if isinstance(value, int | float)}

    def state(self, now: float) -> tuple[str, float]:
        """Determine from the files of a run folder whether the run is "finished", "running", "stopped" or "waiting".

        Args:
            now: the time in seconds since 1970.

        Returns:
            The state, and the seconds since the last change. "waiting" is a run before its first round, or a federation
            that waits for sites. "stopped" is one that neither finished nor wrote for longer than it should.
        """
        # Both files get a line after each round; a stamp has the time of the last change in nanoseconds, 0 for none.
        last = max(self.metrics.stamp[1], self.timings.stamp[1])
        if not last:
            try:
                last = (self.path / RUN_FILE).stat().st_mtime_ns
            except OSError:
                last = 0
        age = max(0.0, now - last / 1e9)
        if self.summary is not None:
            return "finished", age
        # Rounds may be long, and nothing is written within them.
        # So a run may be silent for ten times its longest recent round.
        max_age = max(STOPPED_SECONDS, 10 * max(self._recent_seconds(), default=0.0))
        event_time = federation_events.last_event_time(self.path)
        wait = federation_events.describe_wait(self.path)
        if event_time is not None:
            age = max(0.0, min(age, now - event_time))
            federation = self.options.get("federation")
            value = federation.get("round_timeout") if isinstance(federation, dict) else None
            timeout = float(value) if isinstance(value, int | float) else DEFAULT_ROUND_TIMEOUT_SECONDS
            # A server that waits for sites repeats this event every 30 s. One that waits for replies is silent.
            max_age = STOPPED_SECONDS if wait.startswith("waiting for sites") else max(max_age, timeout)
        # A run holds the lock while it trains. A free lock (False) means that the run has ended, unless it is just
        # starting. None if the system cannot tell; then only a long silence shows the end.
        is_locked = locks.is_held(self.path / LOCK)
        if is_locked is None:
            has_stopped = age > max_age
        else:
            has_stopped = not is_locked and age > STOPPED_SECONDS
        if has_stopped:
            return "stopped", age
        return ("running" if self.metrics.rows and not wait else "waiting"), age

    def _recent_seconds(self) -> list[float]:
        return list(self.seconds().values())[-RECENT_ROUNDS:]

    def seconds_left(self, age: float) -> float | None:
        """Estimate the remaining time from the duration of the last rounds.

        Args:
            age: the seconds since the last finished round.

        Returns:
            Seconds; None if the run is finished, or the duration or number of rounds is unknown.
        """
        recent = self._recent_seconds()
        if self.summary is not None or not recent or self.rounds <= 0:
            return None
        return max(0.0, statistics.fmean(recent) * (self.rounds - self.round) - age)

    def describe(self, now: float) -> dict[str, Any]:
        """Describe the run for the list of runs of a page: its options, progress, accuracy and problems.

        Args:
            now: the time in seconds since 1970.

        Returns:
            Among others "age", the seconds since the last change; "seconds_left", the estimated time to the end; "accuracy",
            the last one in percent; "version", which grows with every change of the files.
        """
        state, age = self.state(now)
        accuracy = list((self.series("accuracy") or self.series("evaluation")).values())
        command = "resume" if federation_events.last_event_time(self.path) is None else "serve"
        alarms = find_alarms(self.metrics.rows, state, age, command)
        return {
            "name": self.name,
            "method": self.method,
            "title": str((self.summary or {}).get("title") or self.title or self.method),
            "data": Path(str(self.options.get("data", ""))).name,
            "seed": self.options.get("seed", 0),
            "rounds": self.rounds,
            "round": self.round,
            "state": state,
            "waiting": federation_events.describe_wait(self.path) if state == "waiting" else "",
            "age": round(age),
            "seconds_left": None if state != "running" else self.seconds_left(age),
            "accuracy": accuracy[-1] if accuracy else None,
            "best": max(accuracy, default=None),
            "alarms": [alarm.to_json() for alarm in alarms],
            "version": self.version,
        }

    def collect_plot_data(self) -> dict[str, Any]:
        """Collect the curves and the table of rounds that the page shows for this run.

        Returns:
            "lines": a curve {"x": rounds, "y": values} for each quantity that has values, such as "accuracy", "sent"
            (uploaded MB of a round) and "seconds"; "sites": the accuracy curve of each site of a federation, with its
            "style"; "rows": the table of the last `MAX_TABLE_ROWS` rounds.
        """
        uploads = _uploaded_megabytes(self.metrics.rows)
        seconds = self.seconds()
        curves = {key: self.series(key) for key in QUANTITIES} | {"sent": uploads, "seconds": seconds}
        lines = {key: _line(values) for key, values in curves.items() if values}
        by_round = [(row["round"], (row.get("evaluation") or {}).get("by_site") or {}) for row in self.metrics.rows]
        names = sorted({name for _, accuracies in by_round for name in accuracies})
        sites = []
        # The first style is that of the run's curve.
        for name, style in zip(names, line_styles([self.method, *names])[1:], strict=True):
            values = {round: 100 * accuracies[name] for round, accuracies in by_round if name in accuracies}
            sites.append({"style": {**style_to_json(style), "title": name}, **_line(values)})
        table = [_table_row(row, uploads, seconds) for row in self.metrics.rows[-MAX_TABLE_ROWS:]]
        return {"lines": lines, "sites": sites, "rows": table}


def _quantity(row: Mapping[str, Any], key: str) -> float | None:
    """Read a quantity of `QUANTITIES` from a row of metrics.jsonl; None if the row does not have it."""
    group, name, factor = QUANTITIES[key]
    value = row[group].get(name) if isinstance(row.get(group), dict) else None
    return value * factor if isinstance(value, int | float) and not isinstance(value, bool) else None


def _line(values: Mapping[int, float]) -> dict[str, Any]:
    """Convert the values of a quantity by round to a curve, with fewer points if there are too many to draw."""
    rounds = pick_evenly(list(values))
    return {"x": rounds, "y": [six_digits(values[round]) for round in rounds]}


def _uploaded_megabytes(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Compute the megabytes (10^6 bytes) that all clients uploaded in each round, by round.

    The rows of metrics.jsonl have the total bytes since the start of the run.
    """
    megabytes = {}
    previous = 0
    for row in rows:
        total = (row.get("cost") or {}).get("bytes_up")
        if isinstance(total, int):
            megabytes[row["round"]] = (total - previous) / 1e6
            previous = total
    return megabytes


def _table_row(row: Mapping[str, Any], uploads: Mapping[int, float], seconds: Mapping[int, float]) -> dict[str, Any]:
    """Build one row of the page's table of rounds.

    Args:
        row: the round's line of metrics.jsonl.
        uploads: megabytes that all clients uploaded, by round.
        seconds: duration by round.

    Returns:
        The round; each of `QUANTITIES` (accuracy, loss, shares of pseudo-labels in percent, ...); "cohort", the number
        of its clients; "sent" in megabytes; "seconds". None for missing numbers.
    """
    cells: dict[str, Any] = {"round": row["round"]}
    for key in QUANTITIES:
        value = _quantity(row, key)
        cells[key] = None if value is None else six_digits(value)  # more digits are only traffic
    cohort = row.get("cohort")
    cells["cohort"] = len(cohort) if isinstance(cohort, list) else None
    cells["sent"] = uploads.get(row["round"])
    cells["seconds"] = seconds.get(row["round"])
    return cells


def find_runs(root: Path) -> list[tuple[Path, str]]:
    """Find the run folders that a folder is, has up to two levels below it, or names in its sweep.json.

    Baselines of these runs are found as well.

    Returns:
        The folders with a short name each, those of the sweep first.
    """
    names: dict[Path, str] = {}
    sweep = atomic_io.read_json(root / SWEEP_FILE)
    if sweep is not None:
        for path, name in _runs_of_sweep(root, sweep):
            names.setdefault(path.resolve(), name)
    # `os.path.isfile` is False, and no error, for a file in a folder that this user may not read.
    run_files = [root / RUN_FILE] if os.path.isfile(root / RUN_FILE) else []
    run_files += sorted(root.glob(f"*/{RUN_FILE}"))
    run_files += sorted([*root.glob(f"*/*/{RUN_FILE}"), *root.glob(f"*/baselines/*/{RUN_FILE}")])
    for run_file in run_files:
        name = run_file.parent.relative_to(root).as_posix()
        # Runs of the sweep have better names already.
        names.setdefault(run_file.parent.resolve(), root.resolve().name if name == "." else name)
    return list(names.items())


def _runs_of_sweep(root: Path, sweep: Mapping[str, Any]) -> Iterable[tuple[Path, str]]:
    """Yield the existing run folders of a sweep with their names, such as "feddure, cifar10, seed 0".

    Args:
        root: the folder of the sweep.
        sweep: the contents of its sweep.json: "cells" with the values "at" which options were set, and their "runs".
            Damaged entries are skipped.
    """
    cells = sweep.get("cells")
    for cell in cells if isinstance(cells, list) else ():
        try:
            coordinates = ", ".join(str(value) for value in cell["at"].values())
            for run in cell["runs"]:
                path = root / str(run["folder"])
                if run["folder"] and os.path.isfile(path / RUN_FILE):
                    yield path, f"{coordinates}, seed {run['seed']}"
        except (KeyError, TypeError, AttributeError):
            continue


class Follower:
    """All runs of a folder, including those that start later.

    Attributes:
        root: the folder.
        runs: the followed runs by their folder.
        left_out: the number of runs beyond `MAX_RUNS`, which are not followed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.runs: dict[Path, FollowedRun] = {}
        self.left_out = 0
        self._scan_time = 0.0

    def update(self) -> None:
        """Read what all runs of the folder have written, and search for new runs every `SCAN_SECONDS`."""
        now = time.monotonic()
        if not self.runs or now - self._scan_time > SCAN_SECONDS:
            self._scan_time = now
            runs = find_runs(self.root)
            self.left_out = max(0, len(runs) - MAX_RUNS)
            for path, name in runs[:MAX_RUNS]:
                if path not in self.runs:
                    self.runs[path] = FollowedRun(path, name)
        for run in self.runs.values():
            run.update()

    def planned(self) -> int:
        """Count the planned runs of a sweep or a comparison; 0 for other folders."""
        sweep = atomic_io.read_json(self.root / SWEEP_FILE) or {}
        cells = sweep.get("cells")
        if isinstance(cells, list):
            runs = [cell.get("runs") for cell in cells if isinstance(cell, dict)]
            return sum(len(each) for each in runs if isinstance(each, list))
        jobs = (atomic_io.read_json(self.root / COMPARISON_FILE) or {}).get("jobs")
        return len(jobs) if isinstance(jobs, list) else 0


class Alarm(NamedTuple):
    """A problem of a run: its kind, and a text for people."""

    kind: str
    text: str

    def to_json(self) -> dict[str, str]:
        """Convert the alarm to the fields that the page reads."""
        return {"kind": self.kind, "text": self.text}


def find_alarms(rows: Sequence[Mapping[str, Any]], state: str, age: float, command: str = "resume") -> list[Alarm]:
    """Find the problems of a run that its user should know: divergence, unused pseudo-labels, lost accuracy, a stop.

    Args:
        rows: the rows of its metrics.jsonl.
        state: the state of the run, as of `FollowedRun.state`.
        age: seconds since the last change.
        command: the subcommand of halfmoon that continues the run.
    """
    accuracies = [row["test"]["accuracy"] for row in rows if (row.get("test") or {}).get("accuracy") is not None]
    alarms = [*_find_divergence(rows, accuracies)]
    last_shares = [(row.get("pseudo") or {}).get("share_used") for row in rows[-UNUSED_ROUNDS:]]
    few_are_used = all(share is not None and share < MIN_SHARE_USED for share in last_shares)
    if len(last_shares) == UNUSED_ROUNDS and few_are_used:
        text = (
            f"unlabeled images are not used: in the last {UNUSED_ROUNDS} rounds less than {100 * MIN_SHARE_USED:g} % "
            "of the pseudo-labels were confident enough"
        )
        alarms.append(Alarm("none used", text))
    # One bad evaluation may be noise; two in a row are not.
    if len(accuracies) >= 4 and max(accuracies[-2:]) < max(accuracies) - ACCURACY_FALL:
        text = f"the accuracy fell from {100 * max(accuracies):.1f} to {100 * accuracies[-1]:.1f} %"
        alarms.append(Alarm("fallen", text))
    if state == "stopped":
        minutes = round(age / 60)
        duration = f"{minutes} minutes" if minutes < 120 else f"{minutes // 60} hours"
        text = f"no progress for {duration}: the run was stopped or its machine sleeps; continue it with halfmoon {command}"
        alarms.append(Alarm("stopped", text))
    return alarms


def _find_divergence(rows: Sequence[Mapping[str, Any]], accuracies: Sequence[float]) -> Iterator[Alarm]:
    """Yield an alarm if the last loss is not a number, or if losses are much larger than at first.

    Args:
        rows: the rows of metrics.jsonl.
        accuracies: all test accuracies so far.
    """
    losses = [row["train"]["loss"] for row in rows if isinstance(row.get("train"), dict) and "loss" in row["train"]]
    if not losses:
        return
    number = rows[-1]["round"]
    if losses[-1] is None:
        yield Alarm("diverged", f"diverged: the loss of round {number} is not a number; try a smaller lr or clip_norm")
        return
    finite = [loss for loss in losses if loss is not None]
    # Methods that use more and more pseudo-labels have growing losses, so the accuracy must have fallen as well, by 5
    # points.
    worse = not accuracies or accuracies[-1] < max(accuracies) - 0.05
    # The last three losses are larger than three times the first ones; 1 is added for first losses near zero.
    if len(finite) >= 6 and worse and min(finite[-3:]) > 3 * max(finite[:3]) + 1:
        text = f"the loss rose from {finite[0]:.2f} to {finite[-1]:.2f}: the training diverges; try a smaller lr"
        yield Alarm("diverged", text)


def find_ceiling_alarms(runs: Sequence[FollowedRun], ceilings: set[str], floors: set[str]) -> list[Alarm]:
    """Find finished upper bounds that are worse than the lower bound on the same data and seed.

    Args:
        runs: all runs.
        ceilings: methods that train with all labels.
        floors: methods that train with the labeled images only.
    """
    alarms = []
    # All pairs of an upper bound (high) and a lower bound (low).
    for high in runs:
        for low in runs:
            if high.method not in ceilings or low.method not in floors or not (high.summary and low.summary):
                continue
            if any(high.options.get(key) != low.options.get(key) for key in ("data", "seed", "rounds", "clients")):
                continue
            high_accuracy = _last_accuracy(high.summary)
            low_accuracy = _last_accuracy(low.summary)
            if high_accuracy is not None and low_accuracy is not None and high_accuracy < low_accuracy:
                text = (
                    f"{high.name}: all labels give {100 * high_accuracy:.1f} %, below labels only "
                    f"({100 * low_accuracy:.1f} %): use more rounds or another learning rate before you compare methods"
                )
                alarms.append(Alarm("ceiling", text))
    return alarms


def _last_accuracy(summary: Mapping[str, Any] | None) -> float | None:
    accuracy = (summary or {}).get("accuracy")
    value = accuracy.get("last") if isinstance(accuracy, dict) else None
    return float(value) if isinstance(value, int | float) else None
