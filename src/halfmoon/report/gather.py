"""The inputs of a report: sweeps as they are, and loose runs put together into one grid by what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halfmoon import disk, toml
from halfmoon.errors import UserError
from halfmoon.report.reading import Run, find
from halfmoon.report.study import (
    FORMAT,
    SWEEP,
    Accuracy,
    Axis,
    Cell,
    Entry,
    Study,
    Sweep,
    Value,
    has_numbers,
    is_number,
    read_sweep,
)

WORLD = (
    *("data", "data_share", "image_size", "shrink", "clients", "setting", "gamma", "labels_per_class", "label_ratio"),
    *("labels", "labels_at", "labeled_clients", "classes_per_client", "stages", "unlabeled_share", "min_size"),
    *("split", "split_seed"),
)
"""Options that say on what a method is tried; runs that differ in one of them never share a column."""

# What does not change a run's numbers, is said by the row, or is a seed.
_SILENT = {
    *("method", "beside", "options", "seed", "run_dir", "data_dir", "cache", "device", "executor", "threads"),
    *("memory_cap", "checkpoint_every", "evaluate_every", "reference"),
}


def gather(paths: Sequence[Path]) -> list[Study]:
    """Return a study for each sweep, and one for all other runs together, in the order of the paths.

    A path is a run folder, the folder of a comparison, the folder of a sweep, or a sweep.json under any name. Raise
    UserError if one is none of these, cannot be read, or if nothing in them is finished.
    """
    studies: list[Study] = []
    loose: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist; give the folder of a run, of a comparison or of a sweep.")
        file = path / SWEEP if path.is_dir() else path
        if path.is_file() and path.suffix != ".json":
            raise UserError(f"{path} is no run; give the folder of a run, of a comparison or of a sweep.")
        if file.is_file():
            studies.append(read_sweep(file))
        else:
            loose.append(path)
    if loose:
        studies.append(from_runs(loose))
    if not has_numbers(studies):
        raise UserError(
            f"{', '.join(map(str, paths))}: nothing is finished, so there is nothing to report; "
            "go on with halfmoon resume or halfmoon sweep."
        )
    return studies


@dataclass(frozen=True)
class _Loose:
    """A run with the options that may tell it from others, flat."""

    run: Run
    method: str
    own: dict[str, Any]  # options of the method
    options: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> _Loose:
        options = run.options
        given = options.get("options", {})
        if type(options.get("seed", 0)) is not int or not isinstance(given, Mapping):
            raise UserError(f"{run.path / 'config.toml'} was changed: its seed or its options are none; restore it.")
        method = str(options.get("method", run.path.name))
        own = {key: value for key, value in given.items() if not isinstance(value, Mapping)}
        return cls(run, method, own, {key: value for key, value in options.items() if key not in _SILENT})

    @property
    def seed(self) -> int:
        return int(self.run.options.get("seed", 0))


def from_runs(paths: Sequence[Path]) -> Study:
    """Put runs into one grid: a row a method (and its own options, where they differ), a column a different world.

    An option other than those of `WORLD` makes columns where one row was played with several values of it. Raise
    UserError if a path holds no run, or two different runs would be the same seed of one cell.
    """
    runs: dict[Path, Run] = {}
    notes = []
    for path in paths:
        plan = _plan(path)
        found = {run.path.resolve(): run for run in find(path)}
        runs |= {job.resolve(): found[job.resolve()] for job in plan if job.resolve() in found} | found
        lost = [job.name for job in plan if job.resolve() not in found]
        if lost:
            notes.append(f"Not begun: {', '.join(lost)}.")
    each = [_Loose.of(run) for run in runs.values()]
    names = _row_names(each)
    axes = [Axis("method", _row_values(each, names))]
    columns = _columns(each, names)
    for key in columns:
        shown = dict.fromkeys(_shown(one.options.get(key)) for one in each)
        axes.append(Axis(key, [Value(name, _value_title(key, name)) for name in shown]))
    cells: dict[tuple[str, ...], Cell] = {}
    for one, name in zip(each, names, strict=True):
        at = {"method": name} | {key: _shown(one.options.get(key)) for key in columns}
        cell = cells.setdefault(tuple(at.values()), Cell(at, []))
        twins = [other for other in cell.runs if other.seed == one.seed]
        entry = _entry(one)
        if any(other.identity != entry.identity for other in twins):
            raise UserError(f"{name} comes twice with seed {one.seed} ({one.run.path}); report one of them.")
        if not twins:
            cell.runs.append(entry)
    folders = [path.name or str(path) for path in (path.resolve() for path in paths)]
    sweep = Sweep(
        format=FORMAT,
        title=("Run " if len(each) == 1 else "Runs of ") + ", ".join(folders),
        kind="table",
        rows="method",
        columns=columns,
        axes=axes,
        cells=list(cells.values()),
        recipe=", ".join(folders),
        about=_about(each, columns),
        versions=_versions(each),
    )
    return Study(sweep, {_key(one.run): one.run for one in each}, tuple(notes))


def common_options(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the options that all runs have alike, without those that say where and not what."""
    flat = [_Loose.of(run).options for run in runs]
    first, *others = flat or [{}]
    return {key: value for key, value in first.items() if all(each.get(key) == value for each in others)}


def _row_names(each: Sequence[_Loose]) -> list[str]:
    """Return a name for the row of every run: the method, with those of its own options that differ between runs."""
    names = []
    for one in each:
        same = [other for other in each if other.method == one.method]
        keys = sorted({key for other in same for key in other.own})
        differing = [key for key in keys if len({_shown(other.own.get(key)) for other in same}) > 1]
        words = ", ".join(f"{key} {_shown(one.own.get(key))}" for key in differing)
        names.append(f"{one.method} ({words})" if words else one.method)
    return names


def _row_values(each: Sequence[_Loose], names: Sequence[str]) -> list[Value]:
    titles = {one.method: one.run.title for one in each if one.run.summary is not None}
    rows = {
        name: titles.get(one.method, one.method) + name.removeprefix(one.method)
        for one, name in zip(each, names, strict=True)
    }
    return [Value(name, title) for name, title in rows.items()]


def _columns(each: Sequence[_Loose], names: Sequence[str]) -> list[str]:
    """Return the options that make columns, those of the world first."""
    keys = list(dict.fromkeys([*WORLD, *(key for one in each for key in one.options)]))
    found = []
    for key in keys:
        values = {(name, _shown(one.options.get(key))) for one, name in zip(each, names, strict=True)}
        several = len({value for _, value in values}) > 1
        if several and (key in WORLD or len(values) > len({name for name, _ in values})):
            found.append(key)
    return found


def _entry(one: _Loose) -> Entry:
    summary = one.run.summary
    entry = Entry(one.seed, str(one.run.head.get("identity", "")), _key(one.run))
    if summary is None:
        return entry
    if "accuracy" not in summary or "cost" not in summary:
        raise UserError(f"{one.run.path / 'summary.json'} has no accuracy or no cost: it is of a split alone.")
    tested = summary["accuracy"]  # None for a federation without test images
    return replace(
        entry,
        finished=True,
        accuracy=tested and Accuracy(tested["last"], tested.get("best"), tested.get("best_round")),
        cost=summary["cost"],
        seconds=summary.get("seconds"),
    )


def _key(run: Run) -> str:
    return str(run.path.resolve())


def _shown(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return toml.value(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _about(each: Sequence[_Loose], columns: Sequence[str]) -> str:
    """Return what all runs were played on, in a sentence."""
    first = each[0].options
    known = [key for key in ("data", "setting", "gamma", "clients", "rounds") if key in first and key not in columns]
    words = [("" if key in ("data", "setting") else f"{key} ") + _shown(first[key]) for key in known]
    return ", ".join(words) + "." if words else ""


def _value_title(key: str, name: str) -> str:
    # Numbers get the name of their axis wherever they are shown.
    return name if key in ("data", "setting") or is_number(name) else f"{key} {name}"


def _versions(each: Sequence[_Loose]) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for one in each:
        for name in ("halfmoon", "torch"):
            if name in one.run.head:
                found.setdefault(name, []).append(str(one.run.head[name]))
    return {name: ", ".join(dict.fromkeys(versions)) for name, versions in found.items()}


def _plan(path: Path) -> list[Path]:
    """Return the run folders of a comparison in the order of its methods, nothing for other folders."""
    try:
        jobs = disk.parsed((path / "comparison.json").read_bytes())["jobs"]
        return [path / job["folder"] for job in jobs if Path(job["folder"]).parts]
    except FileNotFoundError:
        return []
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise UserError(f"{path / 'comparison.json'} was changed or damaged ({error}); restore it.") from error
