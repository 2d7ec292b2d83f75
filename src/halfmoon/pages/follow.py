"""Run folders while they grow: rows read once, as far as they are written, what they say so far, and what is odd."""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from halfmoon.pages import federation_events
from halfmoon.report.bands import pick_evenly, six_digits
from halfmoon.report.styles import line_styles, style_to_json
from halfmoon.storage import atomic_io, locks, toml
from halfmoon.storage.folder_writer import LOCK

METRICS, TIMINGS, SUMMARY, RUN, CONFIG = "metrics.jsonl", "timings.jsonl", "summary.json", "run.json", "config.toml"
SWEEP = "sweep.json"
LIMIT = 200  # rows of a table at most, the last ones
PACE = 5  # rounds by whose mean the time that is left is told

STOPPED_SECONDS = 120.0
"""Seconds without a word after which a run is taken for stopped, where its rounds are short."""

MAX_RUNS = 64  # runs that are followed at once at most
QUIET = 5  # rounds in a row without a pseudo-label in use that are worth a word

QUANTITIES = {
    "accuracy": ("test", "accuracy", 100.0),
    "loss": ("train", "loss", 1.0),
    "pseudo": ("pseudo", "accuracy", 100.0),
    "above": ("pseudo", "accuracy_above", 100.0),
    "share_above": ("pseudo", "share_above", 100.0),
    "share_used": ("pseudo", "share_used", 100.0),
    "evaluation": ("evaluation", "accuracy", 100.0),
    "epsilon": ("aggregation", "epsilon", 1.0),
}
"""What is drawn by round: part and name in metrics.jsonl, and the factor under which it is shown."""


@dataclass
class JsonLinesFile:
    """The rows of a file of JSON lines, as far as they are whole; each is read once."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    at: int = 0
    stamp: tuple[int, int] = (0, 0)

    def update(self) -> bool:
        """Read what was added; a file that became shorter, as when a run is resumed, is read anew."""
        try:
            facts = self.path.stat()
        except OSError:
            return False
        stamp = (facts.st_size, facts.st_mtime_ns)
        if stamp == self.stamp:
            return False
        if facts.st_size < self.at:
            self.rows, self.at = [], 0
        try:
            with self.path.open("rb") as file:
                file.seek(self.at)
                whole, end, _ = file.read().rpartition(b"\n")
        except OSError:
            return False
        for line in whole.split(b"\n") if end else ():
            try:
                row = atomic_io.parse_json(line)
            except ValueError:
                continue
            if isinstance(row, dict) and type(row.get("round")) is int:
                # A resumed run writes its rounds again where the file was not shorter meanwhile.
                while self.rows and self.rows[-1]["round"] >= row["round"]:
                    self.rows.pop()
                self.rows.append(row)
        self.at += len(whole) + len(end)
        self.stamp = stamp
        return True


class FollowedRun:
    """One run folder; nothing in it is changed or locked."""

    def __init__(self, path: Path, name: str) -> None:
        """Follow the run in `path`, called `name`."""
        self.path, self.name = path, name
        self.metrics, self.timings = JsonLinesFile(path / METRICS), JsonLinesFile(path / TIMINGS)
        self.options: dict[str, Any] = {}
        self.summary: dict[str, Any] | None = None
        self.version = 0

    def update(self) -> bool:
        """Read what is new; return whether anything is."""
        new = self.metrics.update()
        new = self.timings.update() or new
        if not self.options:
            text = atomic_io.read(self.path / CONFIG) or b""
            self.options = toml.parse_or_empty(text.decode("utf-8", "replace"))
            new = new or bool(self.options)
        summary = atomic_io.read_json(self.path / SUMMARY)
        if summary != self.summary:
            self.summary, new = summary, True
        self.version += new
        return new

    @property
    def method(self) -> str:
        return str(self.options.get("method", self.path.name))

    @property
    def rounds(self) -> int:
        """Return how many rounds the run has, 0 where its configuration does not say."""
        value = (self.summary or self.options).get("rounds")
        return value if type(value) is int else 0

    @property
    def round(self) -> int:
        return self.metrics.rows[-1]["round"] if self.metrics.rows else 0

    def series(self, key: str) -> dict[int, float]:
        """Return one of `QUANTITIES` by round, where it is a number."""
        values = {row["round"]: _quantity(row, key) for row in self.metrics.rows}
        return {round: value for round, value in values.items() if value is not None}

    def seconds(self) -> dict[int, float]:
        """Return the seconds of each round that is timed."""
        values = {row["round"]: row.get("seconds") for row in self.timings.rows}
        return {round: float(value) for round, value in values.items() if isinstance(value, int | float)}

    def state(self, now: float) -> tuple[str, float]:
        """Return "finished", "running", "stopped" or "waiting", and the seconds since its last word."""
        last = max((self.metrics.stamp[1], self.timings.stamp[1]))
        if not last:
            try:
                last = (self.path / RUN).stat().st_mtime_ns
            except OSError:
                last = 0
        age = max(0.0, now - last / 1e9)
        if self.summary is not None:
            return "finished", age
        patience = max(STOPPED_SECONDS, 10 * max(self._pace(), default=0.0))
        log, words = federation_events.last_event_time(self.path), federation_events.describe_wait(self.path)
        if log is not None:
            age = max(0.0, min(age, now - log))
            # Of sites that are missing it says so every half minute.
            table = self.options.get("federation")
            value = table.get("round_timeout") if isinstance(table, dict) else None
            timeout = float(value) if isinstance(value, int | float) else 3600.0  # of a site's answer
            patience = STOPPED_SECONDS if words.startswith("waiting for sites") else max(patience, timeout)
        lock = locks.is_held(self.path / LOCK)
        if not lock and age > (patience if lock is None else STOPPED_SECONDS):
            return "stopped", age
        return ("running" if self.metrics.rows and not words else "waiting"), age

    def _pace(self) -> list[float]:
        return list(self.seconds().values())[-PACE:]

    def left(self, age: float) -> float | None:
        """Return the seconds that are left at the pace of the last rounds; None where nobody can know."""
        recent = self._pace()
        if self.summary is not None or not recent or self.rounds <= 0:
            return None
        return max(0.0, statistics.fmean(recent) * (self.rounds - self.round) - age)

    def facts(self, now: float) -> dict[str, Any]:
        """Return what the list of runs says of it."""
        state, age = self.state(now)
        accuracy = list((self.series("accuracy") or self.series("evaluation")).values())
        again = "resume" if federation_events.last_event_time(self.path) is None else "serve"
        return {
            "name": self.name,
            "method": self.method,
            "title": str((self.summary or {}).get("title", self.method)),
            "data": Path(str(self.options.get("data", ""))).name,
            "seed": self.options.get("seed", 0),
            "rounds": self.rounds,
            "round": self.round,
            "state": state,
            "waiting": federation_events.describe_wait(self.path) if state == "waiting" else "",
            "age": round(age),
            "left": None if state != "running" else self.left(age),
            "accuracy": accuracy[-1] if accuracy else None,
            "best": max(accuracy, default=None),
            "alarms": [each._asdict() for each in find_alarms(self.metrics.rows, state, age, again)],
            "version": self.version,
        }

    def plot(self) -> dict[str, Any]:
        """Return its lines and the last rows of its table."""
        uploads, seconds = _uploads(self.metrics.rows), self.seconds()
        curves = {key: self.series(key) for key in QUANTITIES} | {"sent": uploads, "seconds": seconds}
        lines = {key: _line(values) for key, values in curves.items() if values}
        rows = [(row["round"], (row.get("evaluation") or {}).get("by_site") or {}) for row in self.metrics.rows]
        names = sorted({name for _, shared in rows for name in shared})
        sites = []
        for name, style in zip(names, line_styles([self.method, *names])[1:], strict=True):
            values = {round: 100 * shared[name] for round, shared in rows if name in shared}
            sites.append({"look": {**style_to_json(style), "title": name}, **_line(values)})
        table = [_row(each, uploads, seconds) for each in self.metrics.rows[-LIMIT:]]
        return {"lines": lines, "sites": sites, "rows": table}


def _quantity(row: Mapping[str, Any], key: str) -> float | None:
    part, name, factor = QUANTITIES[key]
    value = row[part].get(name) if isinstance(row.get(part), dict) else None
    return value * factor if isinstance(value, int | float) and not isinstance(value, bool) else None


def _line(values: Mapping[int, float]) -> dict[str, Any]:
    rounds = pick_evenly(list(values))
    return {"x": rounds, "y": [six_digits(values[round]) for round in rounds]}


def _uploads(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the megabytes that went up in each round: what left the clients."""
    megabytes, before = {}, 0
    for row in rows:
        total = (row.get("cost") or {}).get("bytes_up")
        if isinstance(total, int):
            megabytes[row["round"]], before = (total - before) / 1e6, total
    return megabytes


def _row(row: Mapping[str, Any], uploads: Mapping[int, float], seconds: Mapping[int, float]) -> dict[str, Any]:
    """Return a line of the table: numbers, None where there is none."""
    result: dict[str, Any] = {"round": row["round"]}
    for key in QUANTITIES:
        value = _quantity(row, key)
        result[key] = None if value is None else six_digits(value)
    cohort = row.get("cohort")
    result["cohort"] = len(cohort) if isinstance(cohort, list) else None
    result["sent"], result["seconds"] = uploads.get(row["round"]), seconds.get(row["round"])
    return result


def find_runs(root: Path) -> list[tuple[Path, str]]:
    """Return the run folders at, below, or named by a folder, with short names, in their order."""
    names: dict[Path, str] = {}
    facts = atomic_io.read_json(root / SWEEP) if (root / SWEEP).is_file() else None
    if facts is not None:
        for path, name in _of_sweep(root, facts):
            names.setdefault(path.resolve(), name)
    marks = [root / RUN] if (root / RUN).is_file() else []
    marks += sorted(root.glob(f"*/{RUN}")) + sorted(root.glob(f"*/*/{RUN}"))
    for mark in marks:
        where = mark.parent.relative_to(root).as_posix()
        names.setdefault(mark.parent.resolve(), root.resolve().name if where == "." else where)
    return list(names.items())


def _of_sweep(root: Path, facts: Mapping[str, Any]) -> Iterable[tuple[Path, str]]:
    """Yield the folders that a sweep.json names and that are there; a damaged entry names none."""
    cells = facts.get("cells")
    for cell in cells if isinstance(cells, list) else ():
        try:
            at = ", ".join(str(value) for value in cell["at"].values())
            for run in cell["runs"]:
                path = root / str(run["folder"])
                if run["folder"] and (path / RUN).is_file():
                    yield path, f"{at}, seed {run['seed']}"
        except (KeyError, TypeError, AttributeError):
            continue


class Follower:
    """All runs of a folder, found anew now and then."""

    def __init__(self, root: Path) -> None:
        """Follow the runs in and below `root`."""
        self.root = root
        self.runs: dict[Path, FollowedRun] = {}
        self.left_out = 0
        self._scan_time = 0.0

    def update(self) -> None:
        """Read what is new in all runs; look for new ones every few seconds."""
        now = time.monotonic()
        if not self.runs or now - self._scan_time > 3.0:
            self._scan_time = now
            pairs = find_runs(self.root)
            self.left_out = max(0, len(pairs) - MAX_RUNS)
            for path, name in pairs[:MAX_RUNS]:
                if path not in self.runs:
                    self.runs[path] = FollowedRun(path, name)
        for run in self.runs.values():
            run.update()

    def planned(self) -> int:
        """Return how many runs a sweep or a comparison plans, 0 for anything else."""
        facts = atomic_io.read_json(self.root / SWEEP) or {}
        cells = facts.get("cells")
        if isinstance(cells, list):
            return sum(len(cell.get("runs") or ()) for cell in cells if isinstance(cell, dict))
        jobs = (atomic_io.read_json(self.root / "comparison.json") or {}).get("jobs")
        return len(jobs) if isinstance(jobs, list) else 0


class Alarm(NamedTuple):
    """Something odd: which rule, and what it saw."""

    kind: str
    words: str


def find_alarms(rows: Sequence[Mapping[str, Any]], state: str, age: float, command: str = "resume") -> list[Alarm]:
    """Return what is odd about a run's rows; `state` and `age` (seconds since its last word) are those of its files.

    `command` goes on with it where it was stopped.
    """
    tested = [row["test"]["accuracy"] for row in rows if (row.get("test") or {}).get("accuracy") is not None]
    result = [*_diverged(rows, tested)]
    shares = [(row.get("pseudo") or {}).get("share_used") for row in rows[-QUIET:]]
    if len(shares) == QUIET and all(share is not None and share < 0.005 for share in shares):
        words = f"unlabeled images teach nothing: in {QUIET} rounds under 0.5 % of the pseudo-labels were used"
        result.append(Alarm("none used", words))
    # Far below its best for two evaluations.
    if len(tested) >= 4 and max(tested[-2:]) < max(tested) - 0.15:
        words = f"the accuracy fell from {100 * max(tested):.1f} to {100 * tested[-1]:.1f} %"
        result.append(Alarm("fallen", words))
    if state == "stopped":
        minutes = round(age / 60)
        ago = f"{minutes} minutes" if minutes < 120 else f"{minutes // 60} hours"
        words = f"no word for {ago}: it was stopped, or its machine sleeps (halfmoon {command} goes on)"
        result.append(Alarm("stopped", words))
    return result


def _diverged(rows: Sequence[Mapping[str, Any]], tested: Sequence[float]) -> Iterator[Alarm]:
    """The loss is no number any more, or has stayed far above where it began while the accuracy fell."""
    losses = [row["train"]["loss"] for row in rows if isinstance(row.get("train"), dict) and "loss" in row["train"]]
    if not losses:
        return
    number = rows[-1]["round"]
    if losses[-1] is None:
        yield Alarm("diverged", f"diverged: the loss of round {number} is no number; try a smaller lr or clip_norm")
        return
    finite = [loss for loss in losses if loss is not None]
    # Some methods weigh more and more rows: a growing loss is bad news where the accuracy is below its best.
    worse = not tested or tested[-1] < max(tested) - 0.05
    if len(finite) >= 6 and worse and min(finite[-3:]) > 3 * max(finite[:3]) + 1:
        yield Alarm("diverged", f"the loss rose from {finite[0]:.2f} to {finite[-1]:.2f}: it is diverging")


def find_ceiling_alarms(runs: Sequence[FollowedRun], ceilings: set[str], floors: set[str]) -> list[Alarm]:
    """Return an alarm for each finished upper bound that ended below the labels alone, on the same data and seed."""
    result = []
    for high in runs:
        for low in runs:
            if high.method not in ceilings or low.method not in floors or not (high.summary and low.summary):
                continue
            if any(high.options.get(key) != low.options.get(key) for key in ("data", "seed", "rounds", "clients")):
                continue
            top, bottom = (_last(each.summary) for each in (high, low))
            if top is not None and bottom is not None and top < bottom:
                words = (
                    f"{high.name}: all labels end at {100 * top:.1f} %, below labels only ({100 * bottom:.1f} %): "
                    "more rounds, or another learning rate, before anything is compared"
                )
                result.append(Alarm("ceiling", words))
    return result


def _last(summary: Mapping[str, Any] | None) -> float | None:
    accuracy = (summary or {}).get("accuracy")
    value = accuracy.get("last") if isinstance(accuracy, dict) else None
    return float(value) if isinstance(value, int | float) else None
