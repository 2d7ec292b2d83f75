"""Where the runs of a sweep are played: in this process, in several, or (`sweeps.ray_engine`) on a Ray cluster.

A run is one `SweepTask`, which is data alone: it can be sent to another process or machine that sees the same folders.
What a worker had played when it was killed stands in the run's folder, and whoever takes the task next goes on from
there.
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
from halfmoon.engine.driver import Diverged
from halfmoon.runs import runner
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback
from halfmoon.runs.pools import ready_context, terminate
from halfmoon.storage.folder_writer import FolderInUse

DEFECT = "defect.txt"
"""Beside a run's folder, the traceback of a defect of the program that stopped it."""

TRIES = 3
"""How often a task whose worker dies is begun before it is given up."""


@dataclass(frozen=True)
class SweepTask:
    """One run: its folder, and its configuration as TOML; with `split_only` nothing but its split is made."""

    folder: Path
    words: str
    split_only: bool = False


class TaskResult(NamedTuple):
    """What became of a task: a summary, or one sentence about what is wrong; `busy` where another process plays it."""

    task: SweepTask
    summary: dict[str, Any] | None
    failed: str | None = None
    busy: bool = False


Note = Callable[[TaskResult], None]
"""Told of every task that is over, in the process that asked."""


class Engine(Protocol):
    """Something that plays tasks."""

    def play(self, tasks: Sequence[SweepTask], note: Note) -> None:
        """Play all tasks, in any order; a task that fails does not stop the others."""
        ...


def _config(task: SweepTask) -> Config:
    return resolve(tomllib.loads(task.words), {"run_dir": str(task.folder)}, task.folder / "config.toml")


def play(task: SweepTask, watch: Callback = NULL_CALLBACK) -> TaskResult:
    """Play one task in this process to its end, from where its folder says that it was left."""
    try:
        config = _config(task)
        if task.split_only:
            return TaskResult(task, runner.write_split(config, task.folder))
        return TaskResult(task, runner.run_in_folder(config, task.folder, watch))
    except FolderInUse as error:
        return TaskResult(task, None, str(error), busy=True)
    except (UserError, Diverged) as error:
        return TaskResult(task, None, str(error))
    except (MemoryError, torch.OutOfMemoryError) as error:
        return TaskResult(task, None, f"out of memory ({_first_line(error)}); play fewer --jobs, or a smaller scale.")
    except Exception as error:  # a defect costs one cell, not a sweep of days
        path = task.folder.with_name(f"{task.folder.name}-{DEFECT}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8")
        return TaskResult(task, None, f"{type(error).__name__}: {_first_line(error)}; the traceback is in {path}.")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0].removesuffix(".")


class SerialExecutor:
    """One task after another in this process; `watch` looks on."""

    def __init__(self, watch: Callback = NULL_CALLBACK) -> None:
        self.watch = watch

    def play(self, tasks: Sequence[SweepTask], note: Note) -> None:
        for task in tasks:
            note(play(task, self.watch))


class ProcessExecutor:
    """Several tasks at once, each in a process of its own; a process that dies is replaced.

    `watch` looks on in each of these processes, so it must be possible to send it there.
    """

    def __init__(self, jobs: int, watch: Callback = NULL_CALLBACK) -> None:
        self.jobs = jobs
        self.watch = watch

    def play(self, tasks: Sequence[SweepTask], note: Note) -> None:
        """Play all tasks; one whose process dies (killed, out of memory) is begun again, `TRIES` times at most."""
        left = list(tasks)
        tries = dict.fromkeys(left, 0)
        while left:
            left = self._until_broken(left, tries, note)
            for task in [task for task in left if tries[task] >= TRIES]:
                left.remove(task)
                note(TaskResult(task, None, f"its process died {TRIES} times: killed, or out of memory."))

    def _until_broken(self, queue: Sequence[SweepTask], tries: dict[SweepTask, int], note: Note) -> list[SweepTask]:
        """Return the tasks that were not over when a process died; none where all are over."""
        waiting = list(queue)
        running: dict[Future[TaskResult], SweepTask] = {}
        with ProcessPoolExecutor(self.jobs, ready_context(__name__)) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < self.jobs:
                        task = waiting.pop(0)
                        running[pool.submit(play, task, self.watch)] = task
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        result = future.result()
                        del running[future]
                        note(result)
            except BrokenProcessPool:
                # All that ran are suspects: nobody says whose process it was.
                for task in running.values():
                    tries[task] += 1
                return [*running.values(), *waiting]
            except BaseException:
                terminate(pool)
                raise
        return []
