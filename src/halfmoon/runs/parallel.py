"""Several runs of a comparison at once, each in a process of its own, while one process tells the user of all.

The runs are the same to the last byte as those played one after another: a run draws from its seed alone, and a process
computes with as many threads as it would alone. What they share is loaded once and sent to every process.
"""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.engine.driver import Diverged
from halfmoon.engine.loop import Row
from halfmoon.runs.callbacks import Callback, RunInfo
from halfmoon.runs.factory import device, threads
from halfmoon.runs.pools import processors, ready_context, terminate
from halfmoon.runs.workers import share

WORTHWHILE = 100
"""Rounds of all runs together below which starting processes takes longer than it saves."""

TICK = 0.1
"""Seconds between looks at what the processes tell."""

_STATE: dict[str, Any] = {}
"""In a process that plays runs: how it plays one, and where it tells of it."""


class Failed(NamedTuple):
    """What stopped a run; an error that is sent to another process loses its cause."""

    error: UserError | Diverged
    cause: BaseException | None


def processes(config: Config, runs: int) -> int:
    """Return in how many processes so many runs are played.

    "auto" is one for each processor where a run computes with one thread and there is enough to do; several on one GPU,
    or with several threads each, would only get into each other's way.
    """
    if isinstance(config.processes, int):
        return min(config.processes, runs)
    if device(config).type != "cpu" or threads(config) > 1 or runs * config.rounds < WORTHWHILE:
        return 1
    return min(len(processors()), runs)


def run_in_processes(
    play: Callable[[int, Callback], Row], numbers: Sequence[int], config: Config, watch: Callback
) -> dict[int, Row]:
    """Play runs in several processes, and return their summaries by number; `watch` is told of all of them.

    `play` is sent to every process. Return {}, with nothing played, where one process is enough. Raise what the first
    run raises that fails: the others are stopped, and can be resumed.
    """
    count = processes(config, len(numbers))
    if count < 2:
        return {}
    context = ready_context(__name__, "halfmoon.runs.runner")
    messages, begun = context.Queue(), {number: context.Event() for number in numbers}
    rows: dict[int, Row] = {}
    runs: dict[Path, RunInfo] = {}
    with ProcessPoolExecutor(count, context, _begin, (play, messages, begun, count)) as pool:
        waiting: dict[Future[Row | Failed], int] = {pool.submit(_play, number): number for number in numbers}
        try:
            while waiting:
                finished = wait(waiting, TICK, FIRST_COMPLETED).done
                _tell(messages, runs, begun, watch)
                for future in finished:
                    rows[waiting.pop(future)] = _summary(future)
        except BaseException:
            terminate(pool)
            raise
    _tell(messages, runs, begun, watch)  # all that was put before the processes ended
    return rows


def _summary(future: Future[Row | Failed]) -> Row:
    try:
        result = future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process that played a run was killed, or the memory is full: go on with the run folder, or choose fewer "
            "--processes."
        ) from error
    if isinstance(result, Failed):
        raise result.error from result.cause
    return result


def _tell(messages: Any, runs: dict[Path, RunInfo], begun: Mapping[int, Any], watch: Callback) -> None:
    while True:
        try:
            kind, of, what = messages.get_nowait()
        except Empty:
            return
        if kind == "begin":
            runs[what.folder] = what
            watch.begin(what)
            begun[of].set()
        elif kind == "say":
            watch.say(what)
        else:
            getattr(watch, kind)(runs[of], what)


class _Teller:
    """The watch of a run in another process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def begin(self, run: RunInfo) -> None:
        _STATE["messages"].put(("begin", self.number, run))
        begun = _STATE["begun"][self.number]
        while not begun.wait(1.0):  # a tracker reads the folder as it is before the first round
            _stay()
        begun.clear()

    def round(self, run: RunInfo, row: Row) -> None:
        _stay()
        _STATE["messages"].put(("round", run.folder, row))

    def end(self, run: RunInfo, summary: Row) -> None:
        _STATE["messages"].put(("end", run.folder, summary))

    def say(self, text: str) -> None:
        _STATE["messages"].put(("say", self.number, text))


def _stay() -> None:
    """End this process where the one that asked is gone: the folder must be free for whoever goes on with the run."""
    if os.getppid() != _STATE["parent"]:
        os._exit(1)


def _begin(play: Callable[[int, Callback], Row], messages: Any, begun: Mapping[int, Any], count: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the one that asked ends the others
    share(count)
    _STATE.update(play=play, messages=messages, begun=begun, parent=os.getppid())


def _play(number: int) -> Row | Failed:
    try:
        return _STATE["play"](number, _Teller(number))
    except (UserError, Diverged) as error:
        cause = error.__cause__
        return Failed(error, cause if isinstance(cause, OSError) else None)
