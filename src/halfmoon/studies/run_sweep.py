"""Run a sweep: train every run of a recipe's cells that is not finished, and keep its sweep.json up to date."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from halfmoon.config.schema import Config, identity, to_toml
from halfmoon.core.errors import UserError
from halfmoon.engine.executors.base import Executor, WorkerDied
from halfmoon.runs import checks, runner
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback, GroupedRuns
from halfmoon.studies.grid import RecipeCell, build_cells
from halfmoon.studies.sweep_folder import SweepFolder, make_run_entry
from halfmoon.studies.sweep_tasks import SweepTask, TaskResult, describe_error, run_task

POLL_SECONDS = 2.0
"""Seconds between checks of a run that another process executes."""


@dataclass(frozen=True)
class RunReport:
    """A finished or failed run of a sweep, for progress displays.

    Attributes:
        number: The number of runs that are over, this one included.
        runs: The number of runs of the sweep.
        label: The run's cell and seed.
        summary: The run's summary, or None if it failed.
        failed: The reason of a failure, one sentence.
        finished_before: The run was finished before the sweep started.
    """

    number: int
    runs: int
    label: str
    summary: dict[str, Any] | None
    failed: str | None
    finished_before: bool


def run_sweep(
    folder: SweepFolder,
    requested: Sequence[RecipeCell],
    executor: Executor,
    on_report: Callable[[RunReport], None],
    callback: Callback = NULL_CALLBACK,
    check_first: bool = True,
) -> list[str]:
    """Train the runs of the requested cells that are not finished, all cells with the first seed first.

    Runs of equal configurations are the same run, whichever cell, recipe or sweep requested it first. Cells of an
    earlier sweep in the same folder stay in its sweep.json if the recipe still defines them in the same way.

    Args:
        folder: The sweep's folder.
        requested: The cells.
        executor: Executes the runs.
        on_report: Receives every run that is over, those that were finished before included.
        callback: Receives the progress of every run, where the run is executed; an executor with other processes sends
            it there.
        check_first: Check on this machine that each run can start, before the first one trains.

    Returns:
        One sentence for every run that failed.
    """
    runs = _runs_by_identity(requested)
    _write_sweep_file(folder, requested)
    failures: list[str] = []
    busy_tasks: list[SweepTask] = []
    runs_over = 0

    def report(run_id: str, summary: dict[str, Any] | None, failed: str | None, finished_before: bool) -> None:
        nonlocal runs_over
        runs_over += 1
        label, _ = runs[run_id]
        if failed:
            failures.append(f"{label}: {failed}")
        on_report(RunReport(runs_over, len(runs), label, summary, failed, finished_before))

    def record_result(task: SweepTask, result: TaskResult) -> None:
        if result.busy:
            busy_tasks.append(task)
            return
        run_id = run_ids[task]
        folder.results[run_id] = make_run_entry(result.summary, result.failed)
        _write_sweep_file(folder, requested)
        report(run_id, result.summary, result.failed, finished_before=False)

    def run_all(tasks: list[SweepTask]) -> None:
        # Closed, so that all tasks stop if this process is interrupted while it records a result.
        with closing(
            executor.run_tasks(partial(run_task, callback=GroupedRuns(callback, folder.path.absolute())), tasks)
        ) as results:
            for task, result in results:
                died = isinstance(result, WorkerDied)
                record_result(task, TaskResult(summary=None, failed=result.reason) if died else result)

    run_ids: dict[SweepTask, str] = {}
    for run_id, (_, config) in runs.items():
        summary = runner.finished_summary(folder.run_path(run_id))
        if summary is not None:
            report(run_id, summary, failed=None, finished_before=True)
        else:
            # Absolute, because another machine may have another current folder.
            task = SweepTask(
                folder.run_path(run_id).absolute(), to_toml(config), split_only=folder.recipe.kind == "splits"
            )
            run_ids[task] = run_id
    if check_first and folder.recipe.kind != "splits":
        # Runs that cannot start are reported now, not after the hours of those before them.
        tasks = list(run_ids)
        for index, error in checks.find_errors([runs[run_ids[task]][1] for task in tasks]).items():
            record_result(tasks[index], TaskResult(summary=None, failed=describe_error(error)))
            del run_ids[tasks[index]]
    run_all(list(run_ids))
    # Another process executes the remaining runs. Wait for it, or resume them if it was stopped: a run that it has
    # finished returns its summary at once, and one whose folder is still locked remains busy.
    while busy_tasks:
        time.sleep(POLL_SECONDS)
        retried = list(busy_tasks)
        busy_tasks.clear()
        run_all(retried)
    return failures


def _write_sweep_file(folder: SweepFolder, requested: Sequence[RecipeCell]) -> None:
    """Write sweep.json: the requested cells, and the cells in the present file, to which another sweep may have added."""
    all_cells = _add_earlier_cells(folder, requested)
    for run_id in _runs_by_identity(all_cells):
        if not folder.results.get(run_id, {}).get("finished"):
            summary = runner.finished_summary(folder.run_path(run_id))
            if summary is not None:
                folder.results[run_id] = make_run_entry(summary)
    folder.write(all_cells)


def _runs_by_identity(cells: Sequence[RecipeCell]) -> dict[str, tuple[str, Config]]:
    """Collect the distinct runs of some cells of a table: cells with equal configurations share a run.

    Returns:
        By the hash of the configuration: the label, which names the first cell and its seed, and the configuration. All
        runs of the first seed come first, so that a stopped sweep has a whole table of one seed.
    """
    runs: dict[str, tuple[str, Config]] = {}
    seeds = dict.fromkeys(seed for cell in cells for seed in cell.configs)
    for seed in seeds:
        for cell in cells:
            if seed in cell.configs:
                config = cell.configs[seed]
                runs.setdefault(identity(config, config.method), (f"{cell.label}, seed {seed}", config))
    return runs


def _add_earlier_cells(folder: SweepFolder, requested: Sequence[RecipeCell]) -> list[RecipeCell]:
    """Add the cells of an earlier sweep in the same folder to the requested cells.

    Of the present sweep.json only finished runs remain whose configurations equal those that the recipe has now: the
    recipe may have been edited since. So several sweeps complete one table.

    Args:
        folder: the folder of the sweep, with its recipe and scale.
        requested: the cells of this sweep.

    Returns:
        The cells in the order of the axes of the recipe, each once.
    """
    cells_by_values = {tuple(cell.at.items()): cell for cell in requested}
    for entry in folder.read().get("cells", ()):
        try:
            identities = {run["seed"]: run["identity"] for run in entry["runs"] if run["finished"]}
            selection = {axis: (name,) for axis, name in dict(entry["at"]).items()}
            # One value of each axis is selected, so this builds one cell with the configurations of the recipe now.
            rebuilt = build_cells(folder.recipe, selection, list(identities), folder.scale) if identities else []
        except (UserError, LookupError, TypeError, ValueError):
            continue  # the recipe no longer has such a cell
        if len(rebuilt) != 1:
            continue
        (cell,) = rebuilt
        unchanged: dict[int, Config] = {}  # by seed
        for seed, config in cell.configs.items():
            if identity(config, config.method) == identities[seed]:
                unchanged[seed] = config
        if unchanged:
            values = tuple(cell.at.items())
            present = cells_by_values.get(values, replace(cell, configs={}))
            # A requested run may have execution options, such as threads, so its configuration wins.
            cells_by_values[values] = replace(present, configs={**unchanged, **present.configs})
    value_names = {axis: [value.name for value in values] for axis, values in folder.recipe.axes.items()}

    def position(cell: RecipeCell) -> list[int]:
        return [value_names[axis].index(name) for axis, name in cell.at.items()]

    return sorted(cells_by_values.values(), key=position)
