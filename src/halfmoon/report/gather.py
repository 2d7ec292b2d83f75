"""The inputs of a report: sweeps as they are, and loose runs put together into one grid by what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.report.about import data_name
from halfmoon.report.run_reader import Run, find
from halfmoon.report.study import (
    CONFIGURATION,
    FORMAT,
    SWEEP,
    Accuracy,
    Axis,
    Cell,
    Study,
    StudyCell,
    Sweep,
    Value,
    has_numbers,
    is_number,
    read_sweep,
)
from halfmoon.storage import atomic_io, toml

WORLD = (
    *(
        "data",
        "data_share",
        "validation_share",
        "validation_part",
        "image_size",
        "shrink",
        "pixel_mean",
        "pixel_std",
        "clients",
        "setting",
        "dirichlet_alpha",
        "labels_per_class",
        "label_ratio",
    ),
    *("labels", "labels_at", "labeled_clients", "classes_per_client", "stages", "unlabeled_share", "min_size"),
    *("split", "split_seed"),
)
"""Options that say on what a method is tried; runs that differ in one of them never share a column."""

MOST_LINES = 2
"""Lines of a table's head at most: where more options differ, they are put together."""

# What does not change a run's numbers, is said by the row, or is a seed.
_SILENT = {
    *(
        "method",
        "baselines",
        "options",
        "seed",
        "run_dir",
        "data_dir",
        "cache",
        "device",
        "executor",
        "compile",
        "threads",
        "workers",
        "processes",
    ),
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
    each = _with_data_names([_Loose.of(run) for run in runs.values()])
    names = _row_names(each)
    keys = _columns(each, names)
    placed = [{key: _shown(one.options.get(key)) for key in keys} for one in each]
    if len(keys) > MOST_LINES:
        placed = [_merged(place) for place in placed]
    columns = list(placed[0]) if placed else []
    axes = [Axis("method", _row_values(each, names)), *(_axis(key, placed) for key in columns)]
    cells: dict[tuple[str, ...], Cell] = {}
    for one, name, place in zip(each, names, placed, strict=True):
        at = {"method": name} | place
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
        title=_title(each, names),
        kind="table",
        rows="method",
        columns=columns,
        axes=axes,
        cells=list(cells.values()),
        recipe=", ".join(folders),
        about=_about(each, keys),
        versions=_versions(each),
    )
    return Study(sweep, {_key(one.run): one.run for one in each}, tuple(notes))


def _with_data_names(each: Sequence[_Loose]) -> list[_Loose]:
    """Return the runs with the names of their data sets in place of folders; equal names get a folder more."""
    paths = {str(one.options["data"]) for one in each if one.options.get("data")}
    short = Counter(data_name(path) for path in paths)
    names = {path: data_name(path, 1 if short[data_name(path)] == 1 else 2) for path in paths}
    return [
        replace(one, options=one.options | {"data": names[str(one.options["data"])]})
        if one.options.get("data")
        else one
        for one in each
    ]


def _merged(place: Mapping[str, str]) -> dict[str, str]:
    """Return a column's place on two axes: the data set, and all other options in one."""
    rest = ", ".join(f"{key} {value}" for key, value in place.items() if key != "data")
    return {**({"data": place["data"]} if "data" in place else {}), CONFIGURATION: rest}


def _axis(key: str, placed: Sequence[Mapping[str, str]]) -> Axis:
    names = list(dict.fromkeys(place[key] for place in placed))
    if key == CONFIGURATION:
        return Axis(key, [Value(name, f"configuration {_letter(n)}") for n, name in enumerate(names)])
    return Axis(key, [Value(name, _value_title(key, name)) for name in names])


def _letter(number: int) -> str:
    return (_letter(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _title(each: Sequence[_Loose], names: Sequence[str]) -> str:
    """Return the methods, and the data sets that they were played on."""
    titles = list(dict.fromkeys(value.title for value in _row_values(each, names)))
    data = list(dict.fromkeys(str(one.options["data"]) for one in each if one.options.get("data")))
    what = _listed(titles) if len(titles) <= 3 else f"{len(titles)} methods"
    where = _listed(data) if len(data) <= 3 else f"{len(data)} data sets"
    return f"{what} on {where}" if data else what


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def common_options(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the options that all runs have alike, without those that say where and not what."""
    flat = [one.options for one in _with_data_names([_Loose.of(run) for run in runs])]
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


def _entry(one: _Loose) -> StudyCell:
    summary = one.run.summary
    entry = StudyCell(one.seed, str(one.run.head.get("identity", "")), _key(one.run))
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
    known = [
        key
        for key in ("data", "setting", "dirichlet_alpha", "clients", "rounds")
        if key in first and key not in columns
    ]
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
        jobs = atomic_io.parsed((path / "comparison.json").read_bytes())["jobs"]
        return [path / job["folder"] for job in jobs if Path(job["folder"]).parts]
    except FileNotFoundError:
        return []
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise UserError(f"{path / 'comparison.json'} was changed or damaged ({error}); restore it.") from error
