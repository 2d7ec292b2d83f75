"""Gather the inputs of a report: sweeps, and single runs, which are arranged in a grid by the options that differ."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halfmoon.core import toml
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
from halfmoon.storage import atomic_io

DATA_OPTIONS = (
    *("data", "data_share", "unknown_classes", "validation_share", "validation_part", "image_size", "shrink"),
    *("pixel_mean", "pixel_std"),
    *("clients", "setting", "dirichlet_alpha", "labels_per_class", "label_ratio", "labels", "labels_at"),
    *("labeled_clients", "classes_per_client", "stages", "unlabeled_share", "unknown_share", "min_size", "split"),
    "split_seed",
)
"""Options of the data and the split. Runs that differ in one of them are in different columns."""

MAX_HEADING_LINES = 2
"""Largest number of lines in a table's head. If more options differ, they are merged."""

IGNORED_OPTIONS = {
    *("method", "baselines", "options", "seed", "run_dir", "data_dir", "cache", "device", "executor", "compile"),
    *("threads", "workers", "processes", "memory_cap", "checkpoint_every", "evaluate_every", "reference"),
    "seeds_together",  # run folders made before 0.3 list it, as they list `compile`
}
"""Options that do not change a run's numbers, belong to the row, or are a seed."""


def gather_studies(paths: Sequence[Path]) -> list[Study]:
    """Read what a report shows: a study for each sweep, in the order of the paths, and one for all other runs together.

    A study is a table of runs, usually of methods by data sets, with several seeds.

    Args:
        paths: run folders, folders of comparisons or of sweeps, or files like sweep.json.

    Raises:
        UserError: a path is none of these or cannot be read, or no run is finished.
    """
    studies: list[Study] = []
    run_paths: list[Path] = []
    # All runs outside of sweeps are one study, so that they are compared with each other.
    for path in paths:
        if not path.exists():
            raise UserError(f"{path} does not exist; give the folder of a run, of a comparison or of a sweep.")
        file = path / SWEEP_FILE if path.is_dir() else path
        if path.is_file() and path.suffix != ".json":
            raise UserError(f"{path} is no run; give the folder of a run, of a comparison or of a sweep.")
        if file.is_file():
            studies.append(read_sweep(file))
        else:
            run_paths.append(path)
    if run_paths:
        studies.append(study_from_runs(run_paths))
    if not has_numbers(studies):
        federated = any(run.federated for study in studies for run in study.runs.values())
        command = "halfmoon serve FILE --run-dir FOLDER" if federated else "halfmoon resume or halfmoon sweep"
        raise UserError(
            f"{', '.join(map(str, paths))}: nothing is finished, so there is nothing to report; go on with {command}."
        )
    return studies


@dataclass(frozen=True)
class LooseRun:
    """A run outside of a sweep.

    Attributes:
        run: the stored run.
        seed: its seed.
        method: its method.
        method_options: the options of the method.
        options: the options of the run that may distinguish it from other runs.
    """

    run: StoredRun
    seed: int
    method: str
    method_options: dict[str, Any]
    options: dict[str, Any]

    @classmethod
    def from_stored(cls, run: StoredRun) -> "LooseRun":
        """Read the options of a run, and separate those of the method, which make a row of the report, from the others.

        Raises:
            UserError: the seed or the options are not valid.
        """
        options = run.options
        seed = options.get("seed", 0)
        method_options = options.get("options", {})
        if type(seed) is not int or not isinstance(method_options, Mapping):
            raise UserError(f"{run.path / 'config.toml'} was changed: its seed or its options are none; restore it.")
        # The options of other methods of the comparison are tables in the same table.
        method_options = {key: value for key, value in method_options.items() if not isinstance(value, Mapping)}
        # The options that may distinguish data, split or training of two runs.
        run_options = {key: value for key, value in options.items() if key not in IGNORED_OPTIONS}
        # Of a federation's table of addresses and timeouts only its name distinguishes it.
        if isinstance(run_options.get("federation"), Mapping):
            run_options["federation"] = run_options["federation"].get("name")
        return cls(run, seed, str(options.get("method", run.path.name)), method_options, run_options)


def study_from_runs(paths: Sequence[Path]) -> Study:
    """Arrange runs in a grid: a row for each method and its options, a column for each data set, split and setting.

    Options in `DATA_OPTIONS` make columns if runs differ in them. Any other option does so only if one row was run with
    several of its values.

    Args:
        paths: folders of runs or comparisons that are not part of a sweep, in any order.

    Raises:
        UserError: a path has no run, or two different runs would be the same seed of one cell.
    """
    runs, notes = _read_loose_runs(paths)
    names = _name_rows(runs)  # of each run: its method with the options in which it differs
    rows = _list_rows(runs, names)
    keys = _find_column_options(runs, names)
    positions = [{key: _format_option(run.options.get(key)) for key in keys} for run in runs]
    # Too many options for headings become one axis "configuration" of letters, which a legend explains.
    if len(keys) > MAX_HEADING_LINES:
        positions = [_merge_axes(position) for position in positions]
    columns = list(positions[0]) if positions else []
    cells: dict[tuple[str, ...], GridCell] = {}
    for run, name, position in zip(runs, names, positions, strict=True):
        coordinates = {"method": name} | position
        cell = cells.setdefault(tuple(coordinates.values()), GridCell(coordinates, []))
        # The same run may be given by two paths; a different run with the same seed is an error.
        same_seed = [other for other in cell.runs if other.seed == run.seed]
        entry = _make_cell_run(run)
        if any(other.identity != entry.identity for other in same_seed):
            raise UserError(f"{name} comes twice with seed {run.seed} ({run.run.path}); report one of them.")
        if not same_seed:
            cell.runs.append(entry)
    folders = [path.name or str(path) for path in (path.resolve() for path in paths)]
    sweep = SweepFile(
        format=SWEEP_FORMAT,
        title=_make_title(runs, [row.title for row in rows]),
        kind="table",
        rows="method",
        columns=columns,
        axes=[Axis("method", rows), *(_make_axis(key, [position[key] for position in positions]) for key in columns)],
        cells=list(cells.values()),
        recipe=", ".join(folders),
        about=_describe_common(runs, keys),
        versions=_list_versions(runs),
    )
    return Study(sweep, {_run_key(run.run): run.run for run in runs}, tuple(notes))


def _read_loose_runs(paths: Sequence[Path]) -> tuple[list[LooseRun], list[str]]:
    """Read the runs of all folders, each once.

    Args:
        paths: folders of runs or comparisons that are not part of a sweep.

    Returns:
        The runs, and a note about each comparison that has runs which have not started.
    """
    runs: dict[Path, StoredRun] = {}
    notes = []
    for path in paths:
        jobs = list_job_folders(path)
        by_folder = {run.path.resolve(): run for run in read_runs(path)}
        # First the runs of a comparison, in the order of its methods.
        runs |= {job.resolve(): by_folder[job.resolve()] for job in jobs if job.resolve() in by_folder} | by_folder
        missing = [job.name for job in jobs if job.resolve() not in by_folder]
        if missing:
            notes.append(f"Not begun: {', '.join(missing)}.")
    return _with_data_names([LooseRun.from_stored(run) for run in runs.values()]), notes


def _with_data_names(runs: Sequence[LooseRun]) -> list[LooseRun]:
    """Replace the folders of data sets by their names; for equal names the parent folder is added.

    "/home/a/scans" becomes "scans", or "a/scans" if another run has the folder "/home/b/scans".
    """
    paths = {str(run.options["data"]) for run in runs if run.options.get("data")}
    name_counts = Counter(dataset_name(path) for path in paths)
    names = {
        path: dataset_name(path, parts=1 if name_counts[dataset_name(path)] == 1 else 2)  # parts of the path
        for path in paths
    }
    return [
        replace(run, options=run.options | {"data": names[str(run.options["data"])]})
        if run.options.get("data")
        else run
        for run in runs
    ]


def common_options(study: Study) -> dict[str, Any]:
    """Collect the options that have the same value in all runs of a study, without paths and devices."""
    runs = _with_data_names([LooseRun.from_stored(run) for run in study.runs.values()])
    first, *others = [run.options for run in runs] or [{}]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _merge_axes(position: Mapping[str, str]) -> dict[str, str]:
    """Merge a column's position into two axes: the data set, and all other options."""
    merged = {"data": position["data"]} if "data" in position else {}
    merged[CONFIGURATION] = ", ".join(f"{key} {value}" for key, value in position.items() if key != "data")
    return merged


def _make_axis(key: str, values: Sequence[str]) -> Axis:
    names = list(dict.fromkeys(values))
    if key == CONFIGURATION:
        return Axis(key, [AxisValue(name, f"configuration {number_to_letters(n)}") for n, name in enumerate(names)])
    # A number is shown with the name of its axis.
    bare = {name for name in names if key in ("data", "setting") or is_number(name)}
    return Axis(key, [AxisValue(name, name if name in bare else f"{key} {name}") for name in names])


def _make_title(runs: Sequence[LooseRun], rows: Sequence[str]) -> str:
    """Write a title with the methods and the data sets."""
    rows = list(dict.fromkeys(rows))
    data = list(dict.fromkeys(str(run.options["data"]) for run in runs if run.options.get("data")))
    methods = _join_names(rows) if len(rows) <= 3 else f"{len(rows)} methods"
    if not data:
        return methods
    return f"{methods} on {_join_names(data) if len(data) <= 3 else f'{len(data)} data sets'}"


def _join_names(names: Sequence[str]) -> str:
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _name_rows(runs: Sequence[LooseRun]) -> list[str]:
    """Name the row of every run in the table of a report: its method, and its options that differ between runs.

    A name is "feddure", or "feddure (threshold 0.9)" if another run of this method has another threshold.
    """
    names = []
    for run in runs:
        same = [other for other in runs if other.method == run.method]
        differing = []
        for key in sorted({key for other in same for key in other.method_options}):
            if len({_format_option(other.method_options.get(key)) for other in same}) > 1:
                differing.append(f"{key} {_format_option(run.method_options.get(key))}")
        names.append(f"{run.method} ({', '.join(differing)})" if differing else run.method)
    return names


def _list_rows(runs: Sequence[LooseRun], names: Sequence[str]) -> list[AxisValue]:
    titles = {run.method: run.run.title for run in runs if run.run.summary is not None}
    rows = {
        name: titles.get(run.method, run.method) + name.removeprefix(run.method)
        for run, name in zip(runs, names, strict=True)
    }
    return [AxisValue(name, title) for name, title in rows.items()]


def _find_column_options(runs: Sequence[LooseRun], names: Sequence[str]) -> list[str]:
    """Find the options that make columns of the table because runs differ in them, those of data and split first.

    Args:
        runs: the runs.
        names: the row of each run, its method with its options.
    """
    columns = []
    for key in dict.fromkeys([*DATA_OPTIONS, *(key for run in runs for key in run.options)]):
        values = {(name, _format_option(run.options.get(key))) for run, name in zip(runs, names, strict=True)}
        several = len({value for _, value in values}) > 1
        # More pairs than rows: one row was run with several values of the option.
        if several and (key in DATA_OPTIONS or len(values) > len({name for name, _ in values})):
            columns.append(key)
    return columns


def _make_cell_run(loose: LooseRun) -> CellRun:
    """Convert a run outside of a sweep to the entry that a sweep.json would have for it.

    A run that has not finished has neither accuracy nor cost.

    Raises:
        UserError: its summary.json describes a split without training.
    """
    summary = loose.run.summary
    entry = CellRun(seed=loose.seed, identity=str(loose.run.head.get("identity", "")), folder=_run_key(loose.run))
    # A run writes its summary at the end.
    if summary is None:
        return entry
    if "accuracy" not in summary or "cost" not in summary:
        raise UserError(f"{loose.run.path / 'summary.json'} has no accuracy or no cost: it is of a split only.")
    measured = summary["accuracy"]  # None for a federation without test images
    accuracy = None
    if measured:
        accuracy = RunAccuracy(last=measured["last"], best=measured.get("best"), best_round=measured.get("best_round"))
    return replace(
        entry,
        finished=True,
        accuracy=accuracy,
        cost=summary["cost"],
        seconds=summary.get("seconds"),
    )


def _run_key(run: StoredRun) -> str:
    return str(run.path.resolve())


def _format_option(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return toml.format_value(value) if isinstance(value, int) else str(value)


def _describe_common(runs: Sequence[LooseRun], columns: Sequence[str]) -> str:
    """Describe the data, the split and the rounds that all runs share, in a sentence.

    Args:
        runs: the runs.
        columns: the options that make columns of the table because runs differ in them; they are left out.
    """
    # Options of data and split that are no columns are equal in all runs, so those of the first run will do.
    first = runs[0].options
    formats = {
        "data": "{}",
        "setting": "{}",
        "dirichlet_alpha": "Dirichlet \N{GREEK SMALL LETTER ALPHA} = {}",
        "clients": "{} clients",
        "rounds": "{} rounds",
    }
    texts = []
    for key, text in formats.items():
        if key in first and key not in columns:
            texts.append(text.format(_format_option(first[key])))
    return ", ".join(texts) + "." if texts else ""


def _list_versions(runs: Sequence[LooseRun]) -> dict[str, str]:
    heads = [run.run.head for run in runs]
    versions = {
        name: dict.fromkeys(str(head[name]) for head in heads if name in head) for name in ("halfmoon", "torch")
    }
    return {name: ", ".join(numbers) for name, numbers in versions.items() if numbers}


def list_job_folders(path: Path) -> list[Path]:
    """List the run folders of a comparison in the order of its methods; [] for other folders."""
    try:
        jobs = atomic_io.parse_json((path / "comparison.json").read_bytes())["jobs"]
        return [path / job["folder"] for job in jobs if Path(job["folder"]).parts]
    except FileNotFoundError:
        return []
    except (ValueError, LookupError, TypeError, OSError) as error:
        raise UserError(f"{path / 'comparison.json'} was changed or damaged ({error}); restore it.") from error
