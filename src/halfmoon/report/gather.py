"""The inputs of a report: sweeps as they are, and loose runs put together into one grid by what differs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.report.run_reader import StoredRun, dataset_name, read_runs
from halfmoon.report.study import (
    CONFIGURATION,
    SWEEP_FILE,
    SWEEP_FORMAT,
    Axis,
    AxisValue,
    CellRun,
    GridCell,
    RunAccuracy,
    Study,
    SweepFile,
    has_numbers,
    is_number,
    number_to_letters,
    read_sweep,
)
from halfmoon.storage import atomic_io, toml

DATA_OPTIONS = (
    *("data", "data_share", "validation_share", "validation_part", "image_size", "shrink", "pixel_mean", "pixel_std"),
    *("clients", "setting", "dirichlet_alpha", "labels_per_class", "label_ratio", "labels", "labels_at"),
    *("labeled_clients", "classes_per_client", "stages", "unlabeled_share", "min_size", "split", "split_seed"),
)
"""The options of the data and the split; runs that differ in one of them never share a column."""

MAX_HEADING_LINES = 2
"""Lines of a table's head at most: where more options differ, they are put together."""

IGNORED_OPTIONS = {
    *("method", "baselines", "options", "seed", "run_dir", "data_dir", "cache", "device", "executor", "compile"),
    *("threads", "workers", "processes", "memory_cap", "checkpoint_every", "evaluate_every", "reference"),
    "seeds_together",  # run folders made before 0.3 list it, as they list `compile`
}
"""Options that do not change a run's numbers, are the row's, or are a seed."""


def gather_studies(paths: Sequence[Path]) -> list[Study]:
    """Return a study for each sweep, and one for all other runs together, in the order of the paths.

    A path is a run folder, the folder of a comparison, the folder of a sweep, or a sweep.json under any name. Raise
    UserError if one is none of these, cannot be read, or if nothing in them is finished.
    """
    studies: list[Study] = []
    loose: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist; give the folder of a run, of a comparison or of a sweep.")
        file = path / SWEEP_FILE if path.is_dir() else path
        if path.is_file() and path.suffix != ".json":
            raise UserError(f"{path} is no run; give the folder of a run, of a comparison or of a sweep.")
        if file.is_file():
            studies.append(read_sweep(file))
        else:
            loose.append(path)
    if loose:
        studies.append(study_from_runs(loose))
    if not has_numbers(studies):
        sites = any(run.federated for study in studies for run in study.runs.values())
        going = "halfmoon serve FILE --run-dir FOLDER" if sites else "halfmoon resume or halfmoon sweep"
        raise UserError(
            f"{', '.join(map(str, paths))}: nothing is finished, so there is nothing to report; go on with {going}."
        )
    return studies


@dataclass(frozen=True)
class LooseRun:
    """A run with its seed, its method, the method's own options, and the options that may tell it from others."""

    run: StoredRun
    seed: int
    method: str
    own: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def of(cls, run: StoredRun) -> "LooseRun":
        """Read the options of a run; raise UserError where they were changed to something else."""
        options = run.options
        own, seed = options.get("options", {}), options.get("seed", 0)
        if type(seed) is not int or not isinstance(own, Mapping):
            raise UserError(f"{run.path / 'config.toml'} was changed: its seed or its options are none; restore it.")
        own = {key: value for key, value in own.items() if not isinstance(value, Mapping)}
        rest = {key: value for key, value in options.items() if key not in IGNORED_OPTIONS}
        if isinstance(rest.get("federation"), Mapping):
            rest["federation"] = rest["federation"].get("name")
        return cls(run, seed, str(options.get("method", run.path.name)), own, rest)


def study_from_runs(paths: Sequence[Path]) -> Study:
    """Put runs into one grid: a row a method (and its own options, where they differ), a column a different world.

    An option other than those of `DATA_OPTIONS` makes columns where one row was played with several values of it. Raise
    UserError if a path holds no run, or two different runs would be the same seed of one cell.
    """
    runs, notes = _read_loose_runs(paths)
    names = _name_rows(runs)
    rows = _list_rows(runs, names)
    keys = _find_column_options(runs, names)
    places = [{key: _format_option(run.options.get(key)) for key in keys} for run in runs]
    if len(keys) > MAX_HEADING_LINES:
        places = [_merge_axes(place) for place in places]
    columns = list(places[0]) if places else []
    cells: dict[tuple[str, ...], GridCell] = {}
    for run, name, place in zip(runs, names, places, strict=True):
        at = {"method": name} | place
        cell = cells.setdefault(tuple(at.values()), GridCell(at, []))
        twins = [other for other in cell.runs if other.seed == run.seed]
        entry = _make_cell_run(run)
        if any(other.identity != entry.identity for other in twins):
            raise UserError(f"{name} comes twice with seed {run.seed} ({run.run.path}); report one of them.")
        if not twins:
            cell.runs.append(entry)
    folders = [path.name or str(path) for path in (path.resolve() for path in paths)]
    sweep = SweepFile(
        format=SWEEP_FORMAT,
        title=_make_title(runs, [row.title for row in rows]),
        kind="table",
        rows="method",
        columns=columns,
        axes=[Axis("method", rows), *(_make_axis(key, [place[key] for place in places]) for key in columns)],
        cells=list(cells.values()),
        recipe=", ".join(folders),
        about=_describe_common(runs, keys),
        versions=_list_versions(runs),
    )
    return Study(sweep, {_run_key(run.run): run.run for run in runs}, tuple(notes))


def _read_loose_runs(paths: Sequence[Path]) -> tuple[list[LooseRun], list[str]]:
    """Return the runs of all folders, each once, and a note of those that a comparison has not begun."""
    runs: dict[Path, StoredRun] = {}
    notes = []
    for path in paths:
        jobs = list_job_folders(path)
        here = {run.path.resolve(): run for run in read_runs(path)}
        runs |= {job.resolve(): here[job.resolve()] for job in jobs if job.resolve() in here} | here
        missing = [job.name for job in jobs if job.resolve() not in here]
        if missing:
            notes.append(f"Not begun: {', '.join(missing)}.")
    return _with_data_names([LooseRun.of(run) for run in runs.values()]), notes


def _with_data_names(runs: Sequence[LooseRun]) -> list[LooseRun]:
    """Return the runs with the names of their data sets in place of folders; equal names get a folder more."""
    paths = {str(run.options["data"]) for run in runs if run.options.get("data")}
    short = Counter(dataset_name(path) for path in paths)
    names = {path: dataset_name(path, 1 if short[dataset_name(path)] == 1 else 2) for path in paths}
    return [
        replace(run, options=run.options | {"data": names[str(run.options["data"])]})
        if run.options.get("data")
        else run
        for run in runs
    ]


def common_options(study: Study) -> dict[str, Any]:
    """Return the options that all runs of a study have alike, without those that say where and not what."""
    runs = _with_data_names([LooseRun.of(run) for run in study.runs.values()])
    first, *others = [run.options for run in runs] or [{}]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _merge_axes(place: Mapping[str, str]) -> dict[str, str]:
    """Return a column's place on two axes: the data set, and all other options in one."""
    rest = ", ".join(f"{key} {value}" for key, value in place.items() if key != "data")
    return {**({"data": place["data"]} if "data" in place else {}), CONFIGURATION: rest}


def _make_axis(key: str, places: Sequence[str]) -> Axis:
    names = list(dict.fromkeys(places))
    if key == CONFIGURATION:
        return Axis(key, [AxisValue(name, f"configuration {number_to_letters(n)}") for n, name in enumerate(names)])
    # Numbers get the name of their axis wherever they are shown.
    bare = {name for name in names if key in ("data", "setting") or is_number(name)}
    return Axis(key, [AxisValue(name, name if name in bare else f"{key} {name}") for name in names])


def _make_title(runs: Sequence[LooseRun], rows: Sequence[str]) -> str:
    """Return the methods, and the data sets that they were played on."""
    rows = list(dict.fromkeys(rows))
    data = list(dict.fromkeys(str(run.options["data"]) for run in runs if run.options.get("data")))
    methods = _join_words(rows) if len(rows) <= 3 else f"{len(rows)} methods"
    return f"{methods} on {_join_words(data) if len(data) <= 3 else f'{len(data)} data sets'}" if data else methods


def _join_words(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _name_rows(runs: Sequence[LooseRun]) -> list[str]:
    """Return a name for the row of every run: the method, with those of its own options that differ between runs."""
    names = []
    for run in runs:
        same = [other for other in runs if other.method == run.method]
        keys = sorted({key for other in same for key in other.own})
        differing = [key for key in keys if len({_format_option(other.own.get(key)) for other in same}) > 1]
        words = ", ".join(f"{key} {_format_option(run.own.get(key))}" for key in differing)
        names.append(f"{run.method} ({words})" if words else run.method)
    return names


def _list_rows(runs: Sequence[LooseRun], names: Sequence[str]) -> list[AxisValue]:
    titles = {run.method: run.run.title for run in runs if run.run.summary is not None}
    rows = {
        name: titles.get(run.method, run.method) + name.removeprefix(run.method)
        for run, name in zip(runs, names, strict=True)
    }
    return [AxisValue(name, title) for name, title in rows.items()]


def _find_column_options(runs: Sequence[LooseRun], names: Sequence[str]) -> list[str]:
    """Return the options that make columns, those of the world first."""
    columns = []
    for key in dict.fromkeys([*DATA_OPTIONS, *(key for run in runs for key in run.options)]):
        values = {(name, _format_option(run.options.get(key))) for run, name in zip(runs, names, strict=True)}
        several = len({value for _, value in values}) > 1
        if several and (key in DATA_OPTIONS or len(values) > len({name for name, _ in values})):
            columns.append(key)
    return columns


def _make_cell_run(loose: LooseRun) -> CellRun:
    summary = loose.run.summary
    entry = CellRun(loose.seed, str(loose.run.head.get("identity", "")), _run_key(loose.run))
    if summary is None:
        return entry
    if "accuracy" not in summary or "cost" not in summary:
        raise UserError(f"{loose.run.path / 'summary.json'} has no accuracy or no cost: it is of a split alone.")
    accuracy = summary["accuracy"]  # None for a federation without test images
    return replace(
        entry,
        finished=True,
        accuracy=accuracy and RunAccuracy(accuracy["last"], accuracy.get("best"), accuracy.get("best_round")),
        cost=summary["cost"],
        seconds=summary.get("seconds"),
    )


def _run_key(run: StoredRun) -> str:
    return str(run.path.resolve())


def _format_option(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return toml.format_value(value)
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _describe_common(runs: Sequence[LooseRun], columns: Sequence[str]) -> str:
    """Return the data, the split and the rounds that all runs share, in a sentence."""
    first = runs[0].options
    keys = ("data", "setting", "dirichlet_alpha", "clients", "rounds")
    words = [
        ("" if key in ("data", "setting") else f"{key} ") + _format_option(first[key])
        for key in keys
        if key in first and key not in columns
    ]
    return ", ".join(words) + "." if words else ""


def _list_versions(runs: Sequence[LooseRun]) -> dict[str, str]:
    heads = [run.run.head for run in runs]
    versions = {
        name: dict.fromkeys(str(head[name]) for head in heads if name in head) for name in ("halfmoon", "torch")
    }
    return {name: ", ".join(numbers) for name, numbers in versions.items() if numbers}


def list_job_folders(path: Path) -> list[Path]:
    """Return the run folders of a comparison in the order of its methods, nothing for other folders."""
    try:
        jobs = atomic_io.parse_json((path / "comparison.json").read_bytes())["jobs"]
        return [path / job["folder"] for job in jobs if Path(job["folder"]).parts]
    except FileNotFoundError:
        return []
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise UserError(f"{path / 'comparison.json'} was changed or damaged ({error}); restore it.") from error
