"""Callbacks that follow runs while they train: user code, progress displays and trackers.

Everything that they receive is also stored in the run folder. metrics.jsonl is the source; no callback can change it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from halfmoon.config.schema import Config, count_rounds
from halfmoon.core.errors import UserError
from halfmoon.core.python_names import warn
from halfmoon.engine.loop import Row
from halfmoon.storage.events import EventRecorder


@dataclass(frozen=True)
class RunInfo:
    """A run that callbacks follow: one method with one seed.

    Attributes:
        folder: the run's folder; each run of a comparison has one.
        config: the configuration, with the method and the seed of this run.
        title: the method's name in tables and figures.
        first: rounds that were finished before: 0, or those of the checkpoint from which the run resumes.
        group: the folder of the comparison, the sweep or the run with baselines that the run is part of; None for a
            single run.

    Examples:
        >>> class Folders(halfmoon.NullCallback):
        ...     def begin(self, run):
        ...         print(run.config.method, run.first, run.rounds, run.folder.name)
        >>> results = halfmoon.run(data=(X, y), method="fedavg", rounds=1, clients=5, run_dir="runs/callback", watch=Folders())
        fedavg 0 1 callback
    """

    folder: Path
    config: Config
    title: str
    first: int = 0
    group: Path | None = None

    @property
    def rounds(self) -> int:
        """The number of rounds of the whole run."""
        return count_rounds(self.config)


class Callback(EventRecorder, Protocol):
    """Follow runs while they train; `run` distinguishes several runs.

    Messages for the user are events: `record(name, text, **fields)` displays the sentence `text`, and programs read the
    event's name and fields (`halfmoon.storage.events.EventRecorder`).

    Examples:
        >>> class Losses:
        ...     def begin(self, run):
        ...         self.losses = []
        ...
        ...     def round(self, run, row):
        ...         self.losses.append(row["train"]["loss"])
        ...
        ...     def end(self, run, summary):
        ...         print(len(self.losses), "losses of", summary["method"])
        ...
        ...     def record(self, name, text, /, **fields):
        ...         pass
        >>> results = halfmoon.run(data=(X, y), method="fedavg", rounds=2, clients=5, watch=Losses())
        2 losses of fedavg
    """

    def begin(self, run: RunInfo) -> None:
        """Handle the start of a run, or its resumption after round `run.first`; its folder and config.toml exist."""

    def round(self, run: RunInfo, row: Row) -> None:
        """Handle the end of a round; `row` is its line of metrics.jsonl, which is already written."""

    def end(self, run: RunInfo, summary: Row) -> None:
        """Handle the end of a run; `summary` is its summary.json, which is already written."""


class NullCallback(Callback):
    """Ignore runs, rounds and events: a base class for callbacks that handle only some of them.

    Examples:
        >>> class Rounds(halfmoon.NullCallback):
        ...     def round(self, run, row):
        ...         print("round", row["round"], "of", run.rounds)
        >>> results = halfmoon.run(data=(X, y), method="fedavg", rounds=2, clients=5, watch=Rounds())
        round 1 of 2
        round 2 of 2
    """

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Ignore an event.

        Args:
            name: the kind of event.
            text: one sentence about it, for people.
            fields: the same information for programs.
        """


NULL_CALLBACK = NullCallback()


class GroupedRuns(NullCallback):
    """Pass the events of runs on to another callback, as runs of one group.

    Args:
        watch: the callback.
        group: the folder that the runs are part of.
    """

    def __init__(self, watch: Callback, group: Path) -> None:
        self._watch = watch
        self._group = group

    def begin(self, run: RunInfo) -> None:
        self._watch.begin(replace(run, group=self._group))

    def round(self, run: RunInfo, row: Row) -> None:
        self._watch.round(replace(run, group=self._group), row)

    def end(self, run: RunInfo, summary: Row) -> None:
        self._watch.end(replace(run, group=self._group), summary)

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        self._watch.record(name, text, **fields)


FEATURE_PROGRESS_SECONDS = 10.0
"""Seconds between two messages about the progress of feature extraction."""


class _WarningRecorder:
    """Issue each event as a Python warning."""

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        warn(text)


class Callbacks:
    """Several callbacks as one, called in order. One that raises an exception is removed, and the run continues.

    An exception that is no `Exception`, such as KeyboardInterrupt, is not caught: with it a callback can stop a run,
    which can be resumed.

    Its methods are those of `Callback`: `begin(run)`, `round(run, row)`, `end(run, summary)` and `record(name, text,
    **fields)`.

    Examples:
        >>> class Rounds(halfmoon.NullCallback):
        ...     def round(self, run, row):
        ...         print("round", row["round"])
        >>> both = halfmoon.Callbacks(Rounds(), halfmoon.tracker("tensorboard"))
        >>> results = halfmoon.run(data=(X, y), method="fedavg", rounds=1, clients=5, watch=both)
        round 1
    """

    def __init__(self, *callbacks: Callback, failures: EventRecorder | None = None) -> None:
        """Combine callbacks.

        Args:
            callbacks: these, in the order of the calls.
            failures: receives an event for each callback that failed; None: it is a Python warning.

        Raises:
            UserError: a callback has the method `say` of halfmoon 0.1 instead of `record`.
        """
        for callback in callbacks:
            if hasattr(callback, "say"):
                raise UserError(
                    f"The callback {type(callback).__name__} has a method say(text), which is record(name, text, **fields) "
                    "now: rename it."
                )
        self._callbacks = list(callbacks)
        self._failures = _WarningRecorder() if failures is None else failures

    def begin(self, run: RunInfo) -> None:
        """Tell all callbacks that `run` starts or resumes."""
        self._call(lambda callback: callback.begin(run))

    def round(self, run: RunInfo, row: Row) -> None:
        """Tell all callbacks that a round of `run` ended; `row` is its line of metrics.jsonl."""
        self._call(lambda callback: callback.round(run, row))

    def end(self, run: RunInfo, summary: Row) -> None:
        """Tell all callbacks that `run` ended; `summary` is its summary.json."""
        self._call(lambda callback: callback.end(run, summary))

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        """Pass on an event of the kind `name`, with the sentence `text` and the values `fields`."""
        self._call(lambda callback: callback.record(name, text, **fields))

    def _call(self, event: Callable[[Callback], None]) -> None:
        """Pass an event of a run to all callbacks; remove one that raises an exception, with a warning.

        A callback only follows the run, so its failure must not stop the training.

        Args:
            event: calls the method of the event on the callback that it gets, such as `callback.round(run, row)`.
        """
        # A copy, because callbacks that fail are removed during the loop.
        for callback in tuple(self._callbacks):
            try:
                event(callback)
            except Exception as error:
                self._callbacks = [other for other in self._callbacks if other is not callback]
                text = (
                    f"The callback {type(callback).__name__} failed ({type(error).__name__}: {error}); the run "
                    "continues without it."
                )
                self._failures.record("callback_failed", text)


def isolate_failures(watch: Callback) -> Callbacks:
    """Wrap a callback so that its exceptions do not end the run."""
    return watch if isinstance(watch, Callbacks) else Callbacks(watch)


def feature_progress(watch: Callback, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """Create a function that reports the progress of feature extraction to a callback.

    Features are the outputs of a frozen backbone, computed once before training, which may take hours.

    Args:
        watch: receives an event every `FEATURE_PROGRESS_SECONDS`: the number of finished images and the time left.
        clock: returns the time in seconds.

    Returns:
        A function of the number of images that have features and the number of all images, called after each batch.
    """
    start_time = clock()
    last_message_time = start_time
    start_number: float = math.inf  # images that had features at `start_time`

    def report(number: int, count: int) -> None:
        """Report that `number` of `count` images have features."""
        nonlocal last_message_time, start_time, start_number
        now = clock()
        # The number falls when test images follow the training images: a new measurement of the speed begins.
        if number <= start_number:
            start_time = now
            start_number = number
        elif now - last_message_time >= FEATURE_PROGRESS_SECONDS and number < count:
            last_message_time = now
            seconds_per_image = (now - start_time) / (number - start_number)
            minutes, seconds = divmod(round(seconds_per_image * (count - number)), 60)
            text = f"features: {number:,} of {count:,} images, {minutes}:{seconds:02} left."
            watch.record("features_progress", text, done=number, images=count)

    return report
