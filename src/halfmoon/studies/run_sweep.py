"""A sweep: play the runs of a recipe's cells that are not finished, and keep its sweep.json up to date."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from halfmoon.config.schema import Config, identity, to_toml
from halfmoon.core.errors import UserError
from halfmoon.runs import runner
from halfmoon.studies.executors import Engine, SweepTask, TaskResult
from halfmoon.studies.grid import Cell, cells
from halfmoon.studies.sweep_folder import SweepFolder, entry

PAUSE = 2.0
"""Seconds between looks at a run that another process plays."""


@dataclass(frozen=True)
class Step:
    """A run that is over, for those who look on."""

    number: int
    runs: int
    words: str
    summary: dict[str, Any] | None
    failed: str | None
    before: bool  # it was finished when the sweep began


def sweep(folder: SweepFolder, requested: Sequence[Cell], engine: Engine, tell: Callable[[Step], None]) -> list[str]:
    """Play what is not finished, and return one sentence for every run that failed.

    Runs of an equal configuration are one run, whichever cell, recipe or sweep asked for them first. The cells of an
    earlier sweep in the same folder stay in its sweep.json where the recipe still says the same of them. All cells with
    the first seed come first.
    """
    named = _by_identity(requested)
    _write(folder, requested)
    failed: list[str] = []
    waiting: list[SweepTask] = []
    over = 0

    def tell_of(mark: str, summary: dict[str, Any] | None, why: str | None, before: bool) -> None:
        nonlocal over
        over += 1
        if why:
            failed.append(f"{named[mark][0]}: {why}")
        tell(Step(over, len(named), named[mark][0], summary, why, before))

    def note(outcome: TaskResult) -> None:
        if outcome.busy:
            waiting.append(outcome.task)
            return
        folder.results[tasks[outcome.task]] = entry(outcome.summary, outcome.failed)
        _write(folder, requested)
        tell_of(tasks[outcome.task], outcome.summary, outcome.failed, False)

    tasks: dict[SweepTask, str] = {}
    for mark, (_, config) in named.items():
        outcome = runner.finished_summary(folder.run(mark))
        if outcome is not None:
            tell_of(mark, outcome, None, True)
        else:
            tasks[SweepTask(folder.run(mark), to_toml(config), folder.recipe.kind == "splits")] = mark
    engine.play(list(tasks), note)
    while waiting:  # another process plays these: wait for it, or take over where it was stopped
        time.sleep(PAUSE)
        again, waiting[:] = list(waiting), []
        engine.play(again, note)
    return failed


def _write(folder: SweepFolder, requested: Sequence[Cell]) -> None:
    """Write sweep.json: the cells asked for, and those that it has, as another sweep may have added some by now."""
    everything = _with_kept(folder, requested)
    for mark in _by_identity(everything):
        if not folder.results.get(mark, {}).get("finished"):
            outcome = runner.finished_summary(folder.run(mark))
            if outcome is not None:
                folder.results[mark] = entry(outcome)
    folder.write(everything)


def _by_identity(requested: Sequence[Cell]) -> dict[str, tuple[str, Config]]:
    """Return the different runs of cells with their words, those of the first seed first."""
    runs: dict[str, tuple[str, Config]] = {}
    for seed in dict.fromkeys(seed for cell in requested for seed in cell.configs):
        for cell in requested:
            if seed in cell.configs:
                config = cell.configs[seed]
                runs.setdefault(identity(config, config.method), (f"{cell.words}, seed {seed}", config))
    return runs


def _with_kept(folder: SweepFolder, requested: Sequence[Cell]) -> list[Cell]:
    """Return the cells asked for and those of an earlier sweep.json, in the order of the axes.

    Kept are finished runs of cells that the recipe, as it is now, would play alike.
    """
    places = {tuple(cell.at.items()): cell for cell in requested}
    for old in folder.read().get("cells", ()):
        try:
            marks = {run["seed"]: run["identity"] for run in old["runs"] if run["finished"]}
            only = {axis: (name,) for axis, name in dict(old["at"]).items()}
            alike = cells(folder.recipe, only, list(marks), folder.scale) if marks else []
        except (UserError, LookupError, TypeError, ValueError):
            continue  # the recipe no longer has such a cell
        if len(alike) != 1:
            continue
        (cell,) = alike
        same = {seed: config for seed, config in cell.configs.items() if identity(config, config.method) == marks[seed]}
        here = tuple(cell.at.items())
        own = places.get(here, replace(cell, configs={}))
        if same:
            places[here] = replace(own, configs={**same, **own.configs})
    order = {axis: [value.name for value in values] for axis, values in folder.recipe.axes.items()}
    return sorted(places.values(), key=lambda cell: [order[axis].index(name) for axis, name in cell.at.items()])
