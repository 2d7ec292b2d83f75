"""The runs of a sweep as tasks of an executor (`halfmoon.engine.executors`).

A run is one `SweepTask`, which is only plain data, so it can be sent to another process or to a machine that shares
the same folders. The progress of a worker that is killed is in the run's folder; the next worker resumes from there.
"""

import tomllib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from halfmoon.config.schema import Config, resolve
from halfmoon.core.errors import RESUME, Diverged, OptionText, UserError, as_flag, as_keyword
from halfmoon.runs import runner
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback
from halfmoon.storage.folder_writer import FolderInUse, advise_for_parent

TRACEBACK_FILE = "defect.txt"
"""End of the name of the file, next to a run's folder, with the traceback of an unexpected exception."""


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

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @property
    def uses_gpu(self) -> bool:
        """Whether the run trains on a GPU if its machine has one."""
        return not self.split_only and tomllib.loads(self.config_toml).get("device", "auto") != "cpu"


class TaskResult(NamedTuple):
    """The outcome of a task.

    Attributes:
        summary: The run's summary, or None if it failed.
        failed: The reason of a failure, one sentence.
        busy: Another process is executing the run; the task has neither finished nor failed.
    """

    summary: dict[str, Any] | None
    failed: str | None = None
    busy: bool = False


def run_task(task: SweepTask, callback: Callback = NULL_CALLBACK) -> TaskResult:
    """Run one task in this process to its end, resuming from the state in its folder.

    Expected errors become failed results, so that one failed run does not end the sweep.
    """
    try:
        config = _parse_config(task)
        if task.split_only:
            return TaskResult(runner.write_split(config, task.folder))
        with advise_for_parent(task.folder.parent, resumable=False):
            return TaskResult(runner.run_in_folder(config, task.folder, callback))
    except FolderInUse as error:
        return TaskResult(summary=None, failed=error.as_text(), busy=True)
    except UserError as error:
        return TaskResult(summary=None, failed=describe_error(error))
    except Diverged as error:
        return TaskResult(summary=None, failed=str(error))
    except (MemoryError, torch.OutOfMemoryError) as error:
        reason = f"out of memory ({_first_line(error)}); use fewer {{jobs}}, or a smaller scale."
        return TaskResult(summary=None, failed=OptionText(reason, "jobs"))
    except Exception as error:  # a defect costs one cell, not a sweep of days
        path = task.folder.with_name(f"{task.folder.name}-{TRACEBACK_FILE}")
        reason = f"{type(error).__name__}: {_first_line(error)}"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(traceback.format_exc(), encoding="utf-8")
        except OSError:  # such as a full disk, which may be the error itself
            return TaskResult(summary=None, failed=f"{reason}.")
        reason = f"{reason}; the traceback is in {path}."
        return TaskResult(summary=None, failed=reason)


SWEEP_OPTIONS = frozenset({"data_dir", "cache", "device", "executor", "threads", "workers", "memory_cap"})
"""Options of a run that a sweep has, too."""


def describe_error(error: UserError) -> OptionText:
    """Word the error of a run for a sweep, where most options of a run are in the recipe."""

    def write(write_sweep_option: Callable[[str, str], str], option: str, value: str) -> str:
        if option == "run_dir":
            return write_sweep_option("out", value)
        if option == RESUME or option in SWEEP_OPTIONS:
            return write_sweep_option(option, value)
        return f"{option} = {value} in the recipe" if value else f"{option} in the recipe"

    text = OptionText(error.render(partial(write, as_flag)))
    text.python_text = error.render(partial(write, as_keyword))
    return text


def _parse_config(task: SweepTask) -> Config:
    """Parse the configuration of a task."""
    return resolve(tomllib.loads(task.config_toml), {"run_dir": str(task.folder)}, task.folder / "config.toml")


def _first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, without its full stop."""
    lines = str(error).splitlines() or ["no message"]
    return lines[0].removesuffix(".")
