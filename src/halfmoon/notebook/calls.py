"""Functions of the public API: run, compare, sweep, resume, load_run; options are keywords or a `Config`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfmoon import data
from halfmoon.config import schema
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.methods import registry
from halfmoon.notebook.progress import make_progress, python_errors, to_path, warn
from halfmoon.notebook.results import Results, SweepResults, load_results
from halfmoon.report.paired import ONE_SEED_HINT
from halfmoon.report.remarks import list_remarks
from halfmoon.runs import factory, outside, runner
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback, Callbacks
from halfmoon.runs.jobs import parse_config
from halfmoon.runs.runner import RunResult
from halfmoon.storage.run_folder import BASELINES, RunFolder
from halfmoon.studies import executors, grid, recipe, run_plan, run_sweep
from halfmoon.studies import plan as planning
from halfmoon.studies.plan import Plan
from halfmoon.studies.sweep_folder import SweepFolder

load_data = python_errors(data.load)
save_data = python_errors(data.save)
problem = python_errors(factory.build_problem)


@python_errors
def run(
    config: Config | None = None,
    watch: Callback = NULL_CALLBACK,
    method: outside.CustomMethod | str | None = None,
    minutes: float | None = None,
    **options: Any,
) -> Results:
    """Train a method, and the methods in the option `baselines`, in a new run folder or in `run_dir`.

    Each call without `run_dir` starts a new run. If `run_dir` contains an unfinished run of the same configuration, it is
    resumed; if the run is finished, its results are read. If `data` is a folder of images, and no method, recipe or split
    is named, labels only and the recommended method are run, and `decision` tells whether unlabeled images help.

    Args:
        config: the options of the run; None: those in `options`.
        watch: a callback for each run and round.
        method: a name, or an object of a custom method.
        minutes: time limit of a plan for a folder of images; None: 10.
        options: options of `Config`, which override those of `config`.

    Raises:
        UserError: an option is invalid, or `run_dir` contains another configuration.
        Diverged: a loss or a weight is not finite.
    """
    method_options: dict[str, Any] = {}
    if config is None and method is None and (plan := _plan_folder(options, minutes)) is not None:
        return _start_plan(plan, watch)
    if minutes is not None:
        raise UserError("minutes is only for data=FOLDER, a folder of images, without a method, recipe or split.")
    if method is not None:
        options["method"], method_options = outside.describe_method(method)
    config = _make_config(config, options, method_options)
    entry = registry.entry(config.method)
    if entry.pooled:
        warn(f"{config.method} is centralized: it trains on all rows in one place.")
    with _show_progress(watch) as callbacks:
        if config.run_dir is not None and _contains_run(config.run_dir, config):
            return _make_results(runner.resume(config.run_dir, callbacks))
        return _make_results(runner.start(config, callbacks))


@python_errors
def compare(
    methods: Sequence[outside.CustomMethod | str],
    config: Config | None = None,
    seeds: int | Sequence[int] = 1,
    watch: Callback = NULL_CALLBACK,
    **options: Any,
) -> Results:
    """Train several methods, each with every seed, on the same split and cohorts. `run_dir` is used as by `run`.

    The shared budget is that of `reference` or, without one, of the method with the largest cost under the batch rule.

    Args:
        methods: names, or objects of custom methods of different classes.
        config: the options of all methods; None: those in `options`.
        seeds: seeds of training; 3 are 0, 1 and 2.
        watch: a callback for each run and round.
        options: options of `Config`, which override those of `config`.

    Raises:
        UserError: an option is invalid, or `run_dir` contains another comparison.
        Diverged: a loss or a weight is not finite.
    """
    if isinstance(methods, str):
        raise UserError(f"methods is {methods!r}: it must be a list of names.")
    entries = [outside.describe_method(method) for method in methods]
    names = [name for name, _ in entries]
    options = {"method": names[0] if names else Config.method, "baselines": (), **options}
    config = _make_config(config, options, {name: values for name, values in entries if values})
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    with _show_progress(watch) as callbacks:
        result = _make_results(runner.compare(config, names, numbers, callbacks, again=True))
    if len(numbers) == 1:
        warn(ONE_SEED_HINT.replace("halfmoon compare --seeds 0 1 2 3 4", "seeds=5"))
    return result


@python_errors
def resume(folder: Path | str, watch: Callback = NULL_CALLBACK, method: outside.CustomMethod | None = None) -> Results:
    """Resume a run or a comparison from its last checkpoint; finished runs are read.

    Args:
        folder: the folder of the run or the comparison.
        watch: a callback for each run and round.
        method: the object of the custom method, if its class cannot be imported by its name.

    Raises:
        UserError: the folder contains no run that can be resumed.
        Diverged: a loss or a weight is not finite.
    """
    root = to_path(folder)
    if (plan := run_plan.load_plan(root)) is not None:
        return _run_plan(plan, root, watch, resume=True)
    with _show_progress(watch) as callbacks:
        return _make_results(runner.resume(root, callbacks, method))


@python_errors
def load_run(folder: Path | str) -> Results:
    """Load the results of a run, a comparison, a sweep or a federation, finished or not.

    Args:
        folder: its folder.

    Raises:
        UserError: the folder contains none of these.
    """
    return load_results(to_path(folder))


@python_errors
def sweep(
    name: str | Path,
    only: Mapping[str, str | Sequence[str]] | None = None,
    seeds: int | Sequence[int] | None = None,
    scale: str | None = None,
    out: Path | str = "runs",
    watch: Callback = NULL_CALLBACK,
    **options: Any,
) -> SweepResults:
    """Run the recipe of a paper's table or figure, or a custom TOML file. The same call resumes it.

    A run that fails is reported by a warning.

    Args:
        name: name of the recipe (`halfmoon recipes` lists them), or the file.
        only: the cells to run, by axis: {"method": ["fedavg", "feddure"]}.
        seeds: seeds instead of those of the recipe; 2 are 0 and 1.
        scale: name of a smaller version.
        out: parent of the sweep's folder; finished runs in it are read.
        watch: a callback for each run and round.
        options: options that change no number, such as threads.

    Raises:
        UserError: there is no such recipe, axis, value or scale, or an option changes numbers.
    """
    plan = recipe.load(str(name))
    size = plan.scale(scale) if scale else None
    selections = []
    for axis, values in (only or {}).items():
        for value in [values] if isinstance(values, str) else values:
            selections.append(f"{axis}={value}")
    numbers = list(range(seeds)) if isinstance(seeds, int) else seeds
    changing = sorted(options.keys() - schema.EXECUTION_OPTIONS)
    if changing:
        raise UserError(f"{changing[0]} changes a sweep's numbers: it belongs into the recipe.")
    machine_options = schema.resolve_paths(options, Path())
    folder = SweepFolder(to_path(out), plan, size, f"halfmoon.sweep({str(name)!r})")
    with _show_progress(watch) as callbacks:
        cells = grid.build_cells(plan, grid.parse_selection(plan, selections), numbers, size, machine_options)
        for failed in run_sweep.run_sweep(folder, cells, executors.SerialExecutor(callbacks), lambda step: None):
            warn(f"failed: {failed}")
    return SweepResults(folder.path)


def _plan_folder(options: Mapping[str, Any], minutes: float | None) -> Plan | None:
    """Plan a run on a folder of images; None if `data` is not one, or if a method, recipe or split is named."""
    data_folder = options.get("data")
    if not isinstance(data_folder, str | Path) or not Path(data_folder).is_dir():
        return None
    return planning.plan_if_folder(schema.resolve_paths(options, Path()), minutes)


def _start_plan(plan: Plan, watch: Callback) -> Results:
    """Run a plan in its folder, or resume the run on these images in that folder."""
    root = plan.config.run_dir or schema.next_free_folder(plan.config, plan.config.method)
    before = run_plan.load_plan(root)
    if before is None or before.contents.folder != plan.contents.folder:
        warn(f"{plan.contents.sentence}; {dict(plan.reasons)['methods']}; about {plan.seconds / 60:.1f} minutes")
        return _run_plan(plan, root, watch)
    warn(f"{root} contains a run on these images: it is resumed or read; set another run_dir for a new run.")
    return _run_plan(before, root, watch, resume=True)


def _run_plan(plan: Plan, root: Path, watch: Callback, resume: bool = False) -> Results:
    """Run or resume a plan in a folder."""
    with _show_progress(watch) as callbacks:
        result = run_plan.run_plan(plan, root, callbacks, resume)
    if result.outcome is not None:
        return _make_results(result.outcome)
    return Results(root, [root, *(root / BASELINES / name for name in plan.config.baselines)])


def _make_config(config: Config | None, options: dict[str, Any], method_options: dict[str, Any]) -> Config:
    """Make a configuration from options; `method_options` are those of objects of custom methods."""
    if not isinstance(options.get("data", ""), str | Path):
        raise UserError("data must be a name or a folder: halfmoon.save_data(FOLDER, ...) writes images as one.")
    options = {name: to_path(value) if name == "run_dir" else value for name, value in options.items()}
    named_options = options.get("options", config.options if config else {})
    options["options"] = schema.merge_method_options(named_options, method_options, "options")
    return Config.of(**options) if config is None else replace(config, **options)


@contextmanager
def _show_progress(watch: Callback) -> Iterator[Callbacks]:
    """Show progress on the screen, and pass events to a callback as well."""
    with make_progress() as screen:
        yield Callbacks(screen, watch, warn=warn)


def _contains_run(root: Path, config: Config) -> bool:
    """Check whether a folder contains a run of this configuration, with these baselines."""
    if not RunFolder.exists(root):
        return False
    with RunFolder.open(root) as folder:
        same = folder.identity == schema.identity(config, config.method)
        if same and folder.finished:
            warn(f"{root} contains this run, finished: its results are read; set another run_dir for a new run.")
        return same and parse_config(folder.config, root).baselines == config.baselines


def _make_results(outcome: RunResult) -> Results:
    for remark in list_remarks(outcome.summaries, registry.ceilings()):
        if not remark.startswith("Budget"):
            warn(remark)
    return Results(outcome.folder, outcome.runs)
