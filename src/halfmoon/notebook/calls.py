"""What people call: run, compare, sweep, resume, load_run, with keywords or a `Config`, and progress to see."""

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
from halfmoon.notebook.progress import paths, python_errors, warn, watcher
from halfmoon.notebook.results import Results, SweepResults, results_in
from halfmoon.report.paired import ONE_SEED_HINT
from halfmoon.report.remarks import list_remarks
from halfmoon.runs import factory, outside, runner
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback, Callbacks
from halfmoon.runs.jobs import parsed
from halfmoon.runs.runner import RunResult
from halfmoon.storage.run_folder import BASELINES, RunFolder
from halfmoon.studies import executors, grid, recipe, run_plan, run_sweep
from halfmoon.studies import plan as planning
from halfmoon.studies.plan import Plan
from halfmoon.studies.sweep_folder import SweepFolder

load_data = python_errors(data.load)
save_data = python_errors(data.save)
problem = python_errors(factory.problem)


@python_errors
def run(
    config: Config | None = None,
    watch: Callback = NULL_CALLBACK,
    method: outside.OwnMethod | str | None = None,
    minutes: float | None = None,
    **options: Any,
) -> Results:
    """Train `method`, and the `baselines` of its options beside it, in a new run folder or in `run_dir`.

    Without `run_dir` each call starts anew. With it the same call again goes on where it was stopped, and reads what is
    finished. Where `data` is a folder of images of your own, and no method, recipe or split is named, labels only and
    the recommended method are played, and `decision` says whether unlabeled images help.

    Args:
        config: the options of the run; without it they are `options`.
        watch: is told of each run and round.
        method: a name, or an object of your own.
        minutes: to which a plan for images of your own is fitted; None: 10.
        options: those of `Config`; beside a `config` they change it.

    Raises:
        UserError: an option does not fit, or `run_dir` holds another configuration.
        Diverged: a loss or a weight is no finite number.
    """
    own: dict[str, Any] = {}
    if config is None and method is None and (plan := _plan(options, minutes)) is not None:
        return _start_plan(plan, watch)
    if minutes is not None:
        raise UserError("minutes goes with data=FOLDER, images of your own, and without a method, recipe or split.")
    if method is not None:
        options["method"], own = outside.stated(method)
    config = _configured(config, options, own)
    entry = registry.entry(config.method)
    if entry.pooled:
        warn(f"{config.method} is centralized: it trains on all rows in one place.")
    with _watched(watch) as eyes:
        if config.run_dir is not None and _begun(config.run_dir, config):
            return _ended(runner.resume(config.run_dir, eyes))
        return _ended(runner.start(config, eyes))


@python_errors
def compare(
    methods: Sequence[outside.OwnMethod | str],
    config: Config | None = None,
    seeds: int | Sequence[int] = 1,
    watch: Callback = NULL_CALLBACK,
    **options: Any,
) -> Results:
    """Train several methods, each with every seed, on the same split and cohorts. A call again does what `run` does.

    The shared budget is that of `reference` or, without one, of the method that takes most by its own rule.

    Args:
        methods: their names, or objects of your own, of different classes.
        config: the options that all share; without it they are `options`.
        seeds: of training; 3 are 0, 1 and 2.
        watch: is told of each run and round.
        options: those of `Config`; beside a `config` they change it.

    Raises:
        UserError: an option does not fit, or `run_dir` holds another comparison.
        Diverged: a loss or a weight is no finite number.
    """
    if isinstance(methods, str):
        raise UserError(f"methods is {methods!r}: it must be a list of names.")
    parts = [outside.stated(each) for each in methods]
    names = [name for name, _ in parts]
    options = {"method": names[0] if names else Config.method, "baselines": (), **options}
    config = _configured(config, options, {name: own for name, own in parts if own})
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    with _watched(watch) as eyes:
        result = _ended(runner.compare(config, names, numbers, eyes, again=True))
    if len(numbers) == 1:
        warn(ONE_SEED_HINT.replace("halfmoon compare --seeds 0 1 2 3 4", "seeds=5"))
    return result


@python_errors
def resume(folder: Path | str, watch: Callback = NULL_CALLBACK, method: outside.OwnMethod | None = None) -> Results:
    """Go on with a run or a comparison where it was left; what is finished is only read.

    Args:
        folder: the run's, or the comparison's.
        watch: is told of each run and round.
        method: the object of your own that `run` was given, where its class cannot be imported by its name.

    Raises:
        UserError: nothing is there that can go on.
        Diverged: a loss or a weight is no finite number.
    """
    root = paths(folder)
    if (plan := run_plan.load_plan(root)) is not None:
        return _play_plan(plan, root, watch, again=True)
    with _watched(watch) as eyes:
        return _ended(runner.resume(root, eyes, method))


@python_errors
def load_run(folder: Path | str) -> Results:
    """Return the results of a run, a comparison, a sweep or a federation, finished or not; nothing is trained.

    Args:
        folder: where it is.

    Raises:
        UserError: the folder holds none of these.
    """
    return results_in(paths(folder))


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
    """Play a paper's table or figure, or a TOML file of your own. A call again goes on; a run that failed is a warning.

    Args:
        name: of the recipe (`halfmoon recipes` lists them), or the file.
        only: the cells to play, by axis: {"method": ["fedavg", "feddure"]}.
        seeds: instead of the recipe's; 2 are 0 and 1.
        scale: the name of a smaller version.
        out: the folder of the sweep's folder; finished runs there are read.
        watch: is told of each run and round.
        options: those that change no number, such as threads.

    Raises:
        UserError: there is no such recipe, axis, value or scale, or an option changes numbers.
    """
    plan = recipe.load(str(name))
    size = plan.scale(scale) if scale else None
    words = [
        f"{axis}={value}"
        for axis, values in (only or {}).items()
        for value in ([values] if isinstance(values, str) else values)
    ]
    numbers = list(range(seeds)) if isinstance(seeds, int) else seeds
    changing = sorted(options.keys() - schema.EXECUTION_OPTIONS)
    if changing:
        raise UserError(f"{changing[0]} changes a sweep's numbers: it belongs into the recipe.")
    over = schema.resolve_paths(options, Path())
    folder = SweepFolder(paths(out), plan, size, f"halfmoon.sweep({str(name)!r})")
    with _watched(watch) as eyes:
        cells = grid.cells(plan, grid.selection(plan, words), numbers, size, over)
        for failed in run_sweep.sweep(folder, cells, executors.SerialExecutor(eyes), lambda step: None):
            warn(f"failed: {failed}")
    return SweepResults(folder.path)


def _plan(options: Mapping[str, Any], minutes: float | None) -> Plan | None:
    """Return the plan for images of one's own, None where `data` is no folder of them, or others say what is played."""
    if not isinstance(place := options.get("data"), str | Path) or not Path(place).is_dir():
        return None
    return planning.plan_if_folder(schema.resolve_paths(options, Path()), minutes)


def _start_plan(plan: Plan, watch: Callback) -> Results:
    """Play a plan in its folder, or go on with the run on these images that is there."""
    root = plan.config.run_dir or schema.next_free_folder(plan.config, plan.config.method)
    before = run_plan.load_plan(root)
    if before is None or before.contents.folder != plan.contents.folder:
        warn(f"{plan.contents.sentence}; {dict(plan.reasons)['methods']}; about {plan.seconds / 60:.1f} minutes")
        return _play_plan(plan, root, watch)
    warn(f"{root} holds a run on these images: it goes on, or is read; another run_dir starts anew.")
    return _play_plan(before, root, watch, again=True)


def _play_plan(plan: Plan, root: Path, watch: Callback, again: bool = False) -> Results:
    """Play a plan in the folder `root`, or go on with it `again`."""
    with _watched(watch) as eyes:
        result = run_plan.run_plan(plan, root, eyes, again)
    if result.outcome is not None:
        return _ended(result.outcome)
    return Results(root, [root, *(root / BASELINES / name for name in plan.config.baselines)])


def _configured(config: Config | None, options: dict[str, Any], own: dict[str, Any]) -> Config:
    """Return a configuration with these options, those of its methods joined with the `own` of objects."""
    if not isinstance(options.get("data", ""), str | Path):
        raise UserError("data must be a name or a folder: halfmoon.save_data(FOLDER, ...) writes images as one.")
    options = {name: paths(value) if name == "run_dir" else value for name, value in options.items()}
    options["options"] = schema.merge_method_options(
        options.get("options", config.options if config else {}), own, "options"
    )
    return Config.of(**options) if config is None else replace(config, **options) if options else config


@contextmanager
def _watched(watch: Callback) -> Iterator[Callbacks]:
    with watcher() as screen:
        yield Callbacks(screen, watch, warn=warn)


def _begun(root: Path, config: Config) -> bool:
    """Return whether a folder holds a run of this configuration, with these baselines."""
    if not RunFolder.exists(root):
        return False
    with RunFolder.open(root) as folder:
        same = folder.identity == schema.identity(config, config.method)
        if same and folder.finished:
            warn(f"{root} holds this run, finished: it is read, not played again; another run_dir starts anew.")
        return same and parsed(folder.config, root).baselines == config.baselines


def _ended(outcome: RunResult) -> Results:
    for words in list_remarks(outcome.summaries, registry.ceilings()):
        if not words.startswith("Budget"):
            warn(words)
    return Results(outcome.folder, outcome.runs)
