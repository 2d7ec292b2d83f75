"""Several runs of a comparison at the same time, one in each process; the main process reports their progress.

Runs are equal to the last byte to those that run one after another: a run depends on its seed only, and a process
computes with as many threads as a single run. The data is loaded once and sent to every process.
"""

import signal
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple

from halfmoon.config.schema import Config
from halfmoon.core.errors import Diverged, UserError
from halfmoon.core.parents import exit_with_parent
from halfmoon.engine.executors.pools import available_processors, make_process_context, terminate_pool
from halfmoon.engine.loop import Row
from halfmoon.runs.callbacks import Callback, RunInfo
from halfmoon.runs.factory import count_threads, select_device
from halfmoon.runs.jobs import Job
from halfmoon.runs.workers import share_processors
from halfmoon.storage.events import Event

MIN_ROUNDS = 100
"""With fewer rounds of all runs together, starting processes takes longer than it saves."""

POLL_SECONDS = 0.1
"""Seconds between two reads of the processes' messages."""

_STATE: dict[str, Any] = {}
"""The state of a process that trains runs: the function that trains one, and the queue of its messages."""


class RunFailure(NamedTuple):
    """The error that stopped a run, with its cause: an error that is sent to another process loses its cause."""

    error: UserError | Diverged
    cause: BaseException | None


def count_processes(config: Config, runs: int) -> int:
    """Choose the number of processes in which several runs are trained at the same time.

    "auto" is one for each processor if runs compute with one thread and have `MIN_ROUNDS` together, because processes
    start slowly. Several runs on one GPU, or with several threads each, would only slow each other down.

    Args:
        config: the configuration of the first run.
        runs: the number of runs.
    """
    if isinstance(config.processes, int):
        return min(config.processes, runs)
    if select_device(config).type != "cpu" or count_threads(config) > 1 or runs * config.rounds < MIN_ROUNDS:
        return 1
    return min(len(available_processors()), runs)


def run_in_processes(
    run_job: Callable[[Job, Callback], Row], jobs: Mapping[int, Job], config: Config, watch: Callback
) -> tuple[dict[int, Row], dict[int, Exception]]:
    """Train several runs at the same time, each in a process, and report their progress to one callback.

    Args:
        run_job: trains a job, reports to a callback, and returns the summary. It is pickled and sent to every process.
        jobs: the jobs by number.
        config: the configuration of the first run, also if it is finished.
        watch: receives the events of all runs.

    Returns:
        Summaries by number, and the `UserError` or `Diverged` of each run that raised one; both are empty if nothing
        was trained because one process is enough.

    Raises:
        UserError: a process was killed. The other runs are stopped, and can be resumed.
    """
    count = count_processes(config, len(jobs))
    if count < 2:
        return {}, {}
    context = make_process_context(__name__, "halfmoon.runs.runner")
    messages = context.Queue()
    acknowledged = {number: context.Event() for number in jobs}
    summaries: dict[int, Row] = {}
    failures: dict[int, Exception] = {}
    runs: dict[Path, RunInfo] = {}
    initial_arguments = (run_job, messages, acknowledged, count)
    with ProcessPoolExecutor(count, context, _initialize_process, initial_arguments) as pool:
        pending: dict[Future[Row | RunFailure], int] = {
            pool.submit(_run_in_process, number, job): number for number, job in jobs.items()
        }
        try:
            while pending:
                finished = wait(pending, POLL_SECONDS, FIRST_COMPLETED).done
                _forward_messages(messages, runs, acknowledged, watch)
                for future in finished:
                    number = pending.pop(future)
                    result = _read_result(future)
                    if isinstance(result, RunFailure):
                        result.error.__cause__ = result.cause
                        failures[number] = result.error
                    else:
                        summaries[number] = result
        except BaseException:
            terminate_pool(pool)
            raise
    # Messages may arrive after the future of their run.
    _forward_messages(messages, runs, acknowledged, watch)
    return summaries, failures


def _read_result(future: Future[Row | RunFailure]) -> Row | RunFailure:
    """Return the summary of a finished run, or the error that stopped it.

    Raises:
        UserError: the process was killed.
    """
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process that trained a run was killed, or the memory is full: go on with the run folder, or choose "
            "fewer {processes}.",
            option="processes",
        ) from error


def _forward_messages(
    messages: Any, runs: dict[Path, RunInfo], acknowledged: Mapping[int, Any], watch: Callback
) -> None:
    """Pass all events that worker processes have put into a queue to the callback of the main process.

    Args:
        messages: the queue of (event, sender, content). Events are named like the methods of a callback. The sender is
            the number of the run for "begin" and "record", otherwise its folder.
        runs: the runs that have started, by folder; updated.
        acknowledged: by number, an event to set when the callback knows of a run's start, for which the run waits.
        watch: the callback.
    """
    while True:
        try:
            event, sender, content = messages.get_nowait()
        except Empty:
            return
        if event == "begin":
            runs[content.folder] = content
            watch.begin(content)
            acknowledged[sender].set()
        elif event == "record":
            watch.record(content.name, content.text, **content.fields)
        elif event == "round":
            watch.round(runs[sender], content)
        else:
            watch.end(runs[sender], content)


class _MessageCallback:
    """Send the events of a run to the main process.

    Args:
        number: the run's number.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def begin(self, run: RunInfo) -> None:
        _STATE["messages"].put(("begin", self.number, run))
        acknowledged = _STATE["acknowledged"][self.number]
        # A tracker reads the folder as it is before the first round, so the run waits for it.
        acknowledged.wait()
        acknowledged.clear()

    def round(self, run: RunInfo, row: Row) -> None:
        _STATE["messages"].put(("round", run.folder, row))

    def end(self, run: RunInfo, summary: Row) -> None:
        _STATE["messages"].put(("end", run.folder, summary))

    def record(self, name: str, text: str, /, **fields: Any) -> None:
        _STATE["messages"].put(("record", self.number, Event(name, text, fields)))


def _initialize_process(
    run_job: Callable[[Job, Callback], Row], messages: Any, acknowledged: Mapping[int, Any], count: int
) -> None:
    """Prepare a worker process that trains runs.

    Args:
        run_job: trains a job, and passes its events to a callback.
        messages: the queue of events for the main process.
        acknowledged: by number, an event that the main process sets when it knows of a run's start. The run waits for
            it, because trackers read its folder as it is before the first round.
        count: the number of processes that share the processors.
    """
    # Ctrl-C reaches the whole process group; the main process handles it and ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Otherwise it would continue to train, and its lock on the folder would refuse a process that resumes the run.
    exit_with_parent()
    share_processors(count)
    _STATE.update(run_job=run_job, messages=messages, acknowledged=acknowledged)


def _run_in_process(number: int, job: Job) -> Row | RunFailure:
    """Train a job, whose number names it in messages, in this process."""
    try:
        return _STATE["run_job"](job, _MessageCallback(number))
    except (UserError, Diverged) as error:
        cause = error.__cause__
        # Other exceptions may not be picklable; the command line looks for the error number of an OSError.
        return RunFailure(error, cause if isinstance(cause, OSError) else None)
