"""Executors for the runs of a sweep: serial, in several processes, or on a Ray cluster (`studies.ray_executor`).

A run is one `SweepTask`, which is only plain data, so it can be sent to another process or to a machine that shares
the same folders. The progress of a worker that is killed is in the run's folder; the next worker resumes from there.
"""

import tomllib
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from halfmoon.config.schema import Config, resolve
from halfmoon.core.errors import UserError
from halfmoon.core.parents import exit_with_parent
from halfmoon.engine.driver import Diverged
from halfmoon.runs import runner
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback
from halfmoon.runs.pools import make_process_context, terminate_pool
from halfmoon.storage.folder_writer import FolderInUse

TRACEBACK_FILE = "defect.txt"
"""End of the name of the file, next to a run's folder, with the traceback of an unexpected exception."""

MAX_ATTEMPTS = 3
"""How often a task is started before it counts as failed because its worker died."""


@dataclass(frozen=True)
class SweepTask:
    """One run of a sweep.

    Attributes:
        folder: The run's folder.
        config_toml: The run's configuration as TOML text.
        split_only: Make and write the split without training.
    """

    folder: Path
    config_toml: str
    split_only: bool = False


class TaskResult(NamedTuple):
    """The outcome of a task.

    Attributes:
        task: The task.
        summary: The run's summary, or None if it failed.
        failed: The reason of a failure, one sentence.
        busy: Another process is executing the run; the task has neither finished nor failed.
    """

    task: SweepTask
    summary: dict[str, Any] | None
    failed: str | None = None
    busy: bool = False


ResultCallback = Callable[[TaskResult], None]
"""A function that receives the result of every task, called in the process that started the executor."""


class Executor(Protocol):
    """The interface of all executors."""

    def run_tasks(self, tasks: Sequence[SweepTask], on_result: ResultCallback) -> None:
        """Run all tasks, in any order; a task that fails does not stop the rest."""
        ...


def run_task(task: SweepTask, callback: Callback = NULL_CALLBACK) -> TaskResult:
    """Run one task in this process to its end, resuming from the state in its folder.

    Expected errors become failed results, so that one failed run does not end the sweep.
    """
    try:
        config = _parse_config(task)
        if task.split_only:
            return TaskResult(task, runner.write_split(config, task.folder))
        return TaskResult(task, runner.run_in_folder(config, task.folder, callback))
    except FolderInUse as error:
        return TaskResult(task, summary=None, failed=str(error), busy=True)
    except (UserError, Diverged) as error:
        return TaskResult(task, summary=None, failed=str(error))
    except (MemoryError, torch.OutOfMemoryError) as error:
        reason = f"out of memory ({_first_line(error)}); use fewer --jobs, or a smaller scale."
        return TaskResult(task, summary=None, failed=reason)
    except Exception as error:  # a defect costs one cell, not a sweep of days
        path = task.folder.with_name(f"{task.folder.name}-{TRACEBACK_FILE}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8")
        reason = f"{type(error).__name__}: {_first_line(error)}; the traceback is in {path}."
        return TaskResult(task, summary=None, failed=reason)


def _parse_config(task: SweepTask) -> Config:
    """Parse the configuration of a task."""
    return resolve(tomllib.loads(task.config_toml), {"run_dir": str(task.folder)}, task.folder / "config.toml")


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, without its full stop."""
    lines = str(error).splitlines() or ["no message"]
    return lines[0].removesuffix(".")


class SerialExecutor:
    """Executor that runs one task after another in this process."""

    def __init__(self, callback: Callback = NULL_CALLBACK) -> None:
        """Create an executor whose runs report their progress to `callback`."""
        self.callback = callback

    def run_tasks(self, tasks: Sequence[SweepTask], on_result: ResultCallback) -> None:
        """Run all tasks in order."""
        for task in tasks:
            on_result(run_task(task, self.callback))


class ProcessExecutor:
    """Executor that runs several tasks at once, each in its process; a process that dies is replaced."""

    def __init__(self, jobs: int, callback: Callback = NULL_CALLBACK) -> None:
        """Create an executor of `jobs` processes.

        Args:
            jobs: The number of runs at the same time.
            callback: Receives the progress of every run, inside the worker processes, so it must be picklable.
        """
        self.jobs = jobs
        self.callback = callback

    def run_tasks(self, tasks: Sequence[SweepTask], on_result: ResultCallback) -> None:
        """Run all tasks; retry one whose process dies (killed, out of memory), up to `MAX_ATTEMPTS` attempts."""
        remaining = list(tasks)
        deaths = dict.fromkeys(remaining, 0)
        while remaining:
            remaining = self._run_until_broken(remaining, deaths, on_result)
            given_up = [task for task in remaining if deaths[task] >= MAX_ATTEMPTS]
            for task in given_up:
                remaining.remove(task)
                reason = f"its process died {MAX_ATTEMPTS} times: killed, or out of memory."
                on_result(TaskResult(task, summary=None, failed=reason))

    def _run_until_broken(
        self, queue: Sequence[SweepTask], deaths: dict[SweepTask, int], on_result: ResultCallback
    ) -> list[SweepTask]:
        """Run tasks in one pool until all are done or a process dies; return the tasks that are not done.

        Args:
            queue: The tasks, in the order in which they start.
            deaths: The number of pool failures during each task; updated here.
            on_result: Receives every result.
        """
        waiting = list(queue)
        running: dict[Future[TaskResult], SweepTask] = {}
        with ProcessPoolExecutor(self.jobs, make_process_context(__name__), exit_with_parent) as pool:
            try:
                while waiting or running:
                    # Submit only as many tasks as there are processes: when the pool breaks, all submitted tasks fail,
                    # and those that had not started must not be counted as suspects.
                    while waiting and len(running) < self.jobs:
                        task = waiting.pop(0)
                        running[pool.submit(run_task, task, self.callback)] = task
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        result = future.result()
                        del running[future]
                        on_result(result)
            except BrokenProcessPool:
                # The pool does not report which process died, so all running tasks are suspects.
                for task in running.values():
                    deaths[task] += 1
                return [*running.values(), *waiting]
            except BaseException:
                terminate_pool(pool)
                raise
        return []
