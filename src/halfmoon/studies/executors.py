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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from halfmoon.config.schema import Config, resolve
from halfmoon.core.errors import UserError
from halfmoon.engine.driver import Diverged
from halfmoon.runs import runner
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback
from halfmoon.runs.pools import ready_context, terminate
from halfmoon.runs.seeds import Seat, in_lockstep
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


Unit = tuple[SweepTask, ...]
"""Tasks that are played together: one, or several that say so (`seeds_together`) and differ in their seeds alone."""


def units(tasks: Sequence[SweepTask]) -> list[Unit]:
    """Return the tasks as they are played together, in the order of the first ones."""
    groups: dict[object, list[SweepTask]] = {}
    for number, task in enumerate(tasks):
        values = tomllib.loads(task.words)
        together = values.get("seeds_together") and not task.split_only
        alike = {name: value for name, value in values.items() if name not in ("seed", "split_seed")}
        groups.setdefault(repr(alike) if together else number, []).append(task)
    return [tuple(each) for each in groups.values()]


def play_unit(unit: Unit, watch: Callback = NULL_CALLBACK) -> list[TaskResult]:
    """Play one task in this process to its end, or several in lockstep; one that fails does not stop the others."""
    if len(unit) == 1:
        return [play(unit[0], watch)]
    try:
        config = _config(unit[0])
    except UserError as error:  # in the options that they have in common
        return [TaskResult(task, None, str(error)) for task in unit]
    return in_lockstep([partial(play, task, watch) for task in unit], config)


def _config(task: SweepTask) -> Config:
    return resolve(tomllib.loads(task.words), {"run_dir": str(task.folder)}, task.folder / "config.toml")


def play(task: SweepTask, watch: Callback = NULL_CALLBACK, seat: Seat | None = None) -> TaskResult:
    """Play one task in this process to its end, from where its folder says that it was left."""
    try:
        config = _config(task)
        if task.split_only:
            return TaskResult(task, runner.portray(config, task.folder))
        return TaskResult(task, runner.cell(config, task.folder, watch, seat=seat))
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
        for unit in units(tasks):
            for result in play_unit(unit, self.watch):
                note(result)


class ProcessExecutor:
    """Several tasks at once, each in a process of its own; a process that dies is replaced.

    `watch` looks on in each of these processes, so it must be possible to send it there.
    """

    def __init__(self, jobs: int, watch: Callback = NULL_CALLBACK) -> None:
        self.jobs = jobs
        self.watch = watch

    def play(self, tasks: Sequence[SweepTask], note: Note) -> None:
        """Play all tasks; one whose process dies (killed, out of memory) is begun again, `TRIES` times at most."""
        left = units(tasks)
        tries = dict.fromkeys(left, 0)
        while left:
            left = self._until_broken(left, tries, note)
            for unit in [unit for unit in left if tries[unit] >= TRIES]:
                left.remove(unit)
                for task in unit:
                    note(TaskResult(task, None, f"its process died {TRIES} times: killed, or out of memory."))

    def _until_broken(self, queue: Sequence[Unit], tries: dict[Unit, int], note: Note) -> list[Unit]:
        """Return the units that were not over when a process died; none where all are over."""
        waiting, running = list(queue), dict[Future[list[TaskResult]], Unit]()
        with ProcessPoolExecutor(self.jobs, ready_context(__name__)) as pool:
            try:
                while waiting or running:
                    while waiting and len(running) < self.jobs:
                        unit = waiting.pop(0)
                        running[pool.submit(play_unit, unit, self.watch)] = unit
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        results = future.result()
                        del running[future]
                        for result in results:
                            note(result)
            except BrokenProcessPool:
                # All that ran are suspects: nobody says whose process it was.
                for unit in running.values():
                    tries[unit] += 1
                return [*running.values(), *waiting]
            except BaseException:
                terminate(pool)
                raise
        return []
