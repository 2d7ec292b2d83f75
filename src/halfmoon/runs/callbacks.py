"""Those who look on while runs are played: a callback of one's own, the screen, a tracker.

What they are told stands in the run folder as well; metrics.jsonl is the source, and no watch can change it.
"""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from halfmoon.config.schema import Config, count_rounds
from halfmoon.engine.loop import Row


@dataclass(frozen=True)
class RunInfo:
    """The run that a watch is told of: one method with one seed, in its own folder."""

    folder: Path  # its own, also within a comparison
    config: Config  # with the method and the seed of this run
    title: str  # of the method, for people
    first: int = 0  # rounds that were played before: 0, or those of the checkpoint it goes on from

    @property
    def rounds(self) -> int:
        """Return how many rounds the whole run has."""
        return count_rounds(self.config)


class Callback(Protocol):
    """Somebody who looks on while runs are played; each call says which `run` it is about."""

    def begin(self, run: RunInfo) -> None:
        """A run begins, or goes on after round `run.first`; its folder and config.toml exist."""

    def round(self, run: RunInfo, row: Row) -> None:
        """A round is over; `row` is its line of metrics.jsonl, which is written already."""

    def end(self, run: RunInfo, summary: Row) -> None:
        """A run is through; `summary` is its summary.json, which is written already."""

    def say(self, text: str) -> None:
        """Show a message to the user.

        Args:
            text: the message.
        """


class NullCallback(Callback):
    """Say nothing of runs, rounds and messages; a callback of one's own says what differs."""


NULL_CALLBACK = NullCallback()
EVERY = 10.0
"""Seconds between two words about how far features are."""


def _warn(words: str) -> None:
    warnings.warn(words, RuntimeWarning, stacklevel=2)


class Callbacks:
    """Several `watches` at once, in their order. One that raises does not lose the run: it is told no more.

    Each gets every `run`, `row`, `summary` and all `words`. `warn` gets the sentence that says so; by default it is a
    Python warning. What is no `Exception`, such as
    KeyboardInterrupt, passes: so a callback can stop a run, which can be resumed.
    """

    def __init__(self, *watches: Callback, warn: Callable[[str], None] = _warn) -> None:
        self._left = list(watches)
        self._warn = warn

    def begin(self, run: RunInfo) -> None:
        self._tell(lambda each: each.begin(run))

    def round(self, run: RunInfo, row: Row) -> None:
        self._tell(lambda each: each.round(run, row))

    def end(self, run: RunInfo, summary: Row) -> None:
        self._tell(lambda each: each.end(run, summary))

    def say(self, text: str) -> None:
        """Pass a message on.

        Args:
            text: the message.
        """
        self._tell(lambda each: each.say(text))

    def _tell(self, call: Callable[[Callback], None]) -> None:
        for each in tuple(self._left):
            try:
                call(each)
            except Exception as error:
                self._left = [other for other in self._left if other is not each]
                self._warn(
                    f"{type(each).__name__} failed while looking on ({type(error).__name__}: {error}); the run goes on "
                    "without it."
                )


def isolate_failures(watch: Callback) -> Callbacks:
    return watch if isinstance(watch, Callbacks) else Callbacks(watch)


def feature_progress(watch: Callback, clock: Callable[[], float] = time.monotonic) -> Callable[[int, int], None]:
    """Return what tells a watch, every `EVERY` seconds, how many images have features, and how long the rest takes."""
    began = last = clock()
    first = math.inf  # images with features at the time `began`

    def tell(number: int, count: int) -> None:
        nonlocal last, began, first
        now = clock()
        if number <= first:  # training images begin, or those for the test after them
            began, first = now, number
        elif now - last >= EVERY and number < count:
            last = now
            left = round((now - began) / (number - first) * (count - number))
            watch.say(f"features: {number:,} of {count:,} images, {left // 60}:{left % 60:02} left.")

    return tell
