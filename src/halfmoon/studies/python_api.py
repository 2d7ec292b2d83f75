"""Functions of the public API: run, compare, sweep, resume, load_run; options are keywords or a `Config`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon import data
from halfmoon.config import schema
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError, in_python
from halfmoon.core.python_names import python_errors, to_path, warn
from halfmoon.data import Source, Split, memory
from halfmoon.data.conversion import make_memory_data
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.methods import registry
from halfmoon.report.paired import one_seed_hint
from halfmoon.report.remarks import list_remarks
from halfmoon.runs import factory, outside, runner
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback, Callbacks
from halfmoon.runs.factory import Problem
from halfmoon.runs.jobs import parse_config
from halfmoon.runs.python_progress import make_progress, print_message
from halfmoon.runs.runner import RunResult
from halfmoon.storage.run_folder import BASELINES, RunFolder
from halfmoon.studies import grid, recipe, run_plan, run_sweep
from halfmoon.studies import plan as planning
from halfmoon.studies.plan import Plan
from halfmoon.studies.sweep_folder import SweepFolder

# Results need pandas, whose import takes as long as a third of the way to the first step: it is imported after training.
if TYPE_CHECKING:
    from halfmoon.studies.results import Results, SweepResults

load_data = python_errors(data.load)
save_data = python_errors(data.save)

NO_FILE_OPTIONS = ("data_dir", "cache", "window", "group_pattern", "validation_part")
"""Options about files, which data in memory do not have."""

LABEL_OPTIONS = ("labels_per_class", "label_ratio", "labels")
"""Options that choose the images whose labels are used; with unlabeled images (-1), all labels are used."""

CLIENT_OPTIONS = ("setting", "dirichlet_alpha", "classes_per_client", "min_size", "split", "labeled_clients")
"""Options about the assignment of images to clients, which ids of clients replace."""


@python_errors
def run(
    config: Config | None = None,
    watch: Callback = NULL_CALLBACK,
    method: outside.CustomMethod | str | None = None,
    minutes: float | None = None,
    test: Any = None,
    progress: bool = True,
    scratch_trial: bool | None = None,
    **options: Any,
) -> "Results":
    """Train a method, and the methods in the option `baselines`, in a new run folder or in `run_dir`.

    Each call without `run_dir` starts a new run. If `run_dir` contains an unfinished run of the same configuration, it is
    resumed; if the run is finished, its results are read.

    The option `data` is the name of a data set, a folder, or labeled images in memory: `(X, y)` with arrays, tensors or a
    list of PIL images; a torch `Dataset` of (image, label); or a `Dataset` or `DatasetDict` of Hugging Face
    (`halfmoon.data.conversion` lists shapes and values). Images with y = -1 are unlabeled: clients train on them as
    unlabeled images, and no model is tested on them. Without `test`, a fifth of the labeled images of every class is the
    test. If no image is unlabeled, the options `labels_per_class`, `labels` or `label_ratio` choose the labels that are
    used; the others are hidden. The option `clients` is a number, or one id for each image of `data`.

    Images in memory are not stored in the run folder, only their digest: to resume, pass the same `data` again.

    If `data` is a folder of images or is in memory, and no method, recipe, split, ids of clients or test of partly
    labeled images is given, labels only and the recommended method are run, and `decision` tells whether unlabeled
    images help. If some images are unlabeled, it is found by cross-validation on the labeled ones.

    Args:
        config: the options of the run; None: those in `options`.
        watch: a callback for each run and round.
        method: a name, or an object of a custom method.
        minutes: time limit of a plan for a folder of images or images in memory; None: 10.
        test: labeled test images, if `data` is in memory: of any of its types.
        progress: print progress and messages; False: nothing but warnings.
        scratch_trial: whether a plan with a pretrained network also tries training from scratch; None to decide by the
            images, labels and minutes.
        options: options of `Config`, which override those of `config`.

    Raises:
        UserError: an option is invalid, or `run_dir` contains another configuration.
        Diverged: a loss or a weight is not finite.

    Examples:
        >>> results = halfmoon.run(data=(X, y), method="fedavg-soft-labels", rounds=10, clients=5)
        >>> results.model.predict(X[:3])
    """
    _check_config(config)
    method_options: dict[str, Any] = {}
    options, may_plan = _register_data(config, options, test)
    if config is None and method is None and may_plan:
        plan = _plan_folder(options, minutes, scratch_trial)
        if plan is not None:
            return _start_plan(plan, watch, progress)
    for name, value in (("minutes", minutes), ("scratch_trial", scratch_trial)):
        if value is not None:
            raise UserError(f"{name} is only for data=FOLDER, a folder of images, without a method, recipe or split.")
    if method is not None:
        options["method"], method_options = outside.describe_method(method)
    config = _make_config(config, options, method_options)
    entry = registry.entry(config.method)
    if entry.pooled:
        print_message(f"{config.method} is centralized: it trains on all rows in one place.", progress)
    with _show_progress(watch, progress) as callbacks:
        if config.run_dir is not None and _contains_run(config.run_dir, config, progress):
            return _make_results(runner.resume(config.run_dir, callbacks), progress)
        return _make_results(runner.start(config, callbacks), progress)


@python_errors
def compare(
    methods: Sequence[outside.CustomMethod | str],
    config: Config | None = None,
    seeds: int | Sequence[int] = 1,
    watch: Callback = NULL_CALLBACK,
    test: Any = None,
    progress: bool = True,
    **options: Any,
) -> "Results":
    """Train several methods, each with every seed, on the same split and cohorts. `run_dir` is used as by `run`.

    So that methods of different cost train equally long, the option `budget` gives all of them the steps or passes that
    one method has by its batch sizes and epochs: the method `reference` or, without one, the costliest.

    Args:
        methods: names, or objects of custom methods of different classes.
        config: the options of all methods; None: those in `options`.
        seeds: seeds of training; 3 are 0, 1 and 2.
        watch: a callback for each run and round.
        test: labeled test images, if `data` is in memory, as for `run`.
        progress: print progress and messages; False: nothing but warnings.
        options: options of `Config`, which override those of `config`; `data` and `clients` as for `run`.

    Raises:
        UserError: an option is invalid, or `run_dir` contains another comparison.
        Diverged: a loss or a weight is not finite.

    Examples:
        >>> results = halfmoon.compare(["fedavg-control", "fedavg-soft-labels"], data=(X, y), rounds=10, clients=5, seeds=2)
        >>> print(results.summary)
    """
    # A string is a sequence too: of methods with names of one letter.
    if isinstance(methods, str):
        raise UserError(f"methods is {methods!r}: it must be a list of names.")
    _check_config(config)
    options, _ = _register_data(config, options, test)
    # Of each method its name, and the options in which an object differs from the defaults of its class.
    entries = [outside.describe_method(method) for method in methods]
    names = [name for name, _ in entries]
    options = {"method": names[0] if names else Config.method, "baselines": (), **options}
    config = _make_config(config, options, {name: values for name, values in entries if values})
    numbers = list(range(seeds)) if isinstance(seeds, int) else list(seeds)
    with _show_progress(watch, progress) as callbacks:
        # `resume_existing`: a comparison that its folder contains already is resumed or read.
        result = _make_results(runner.compare(config, names, numbers, callbacks, resume_existing=True), progress)
    if len(numbers) == 1:
        print_message(one_seed_hint("seeds=5"), progress)
    return result


@python_errors
def problem(
    config: Config | None = None,
    split: Split | None = None,
    methods: Sequence[str] = (),
    raw: Source | None = None,
    test: Any = None,
    **options: Any,
) -> Problem:
    """Build data, split, task (network and optimizer), views (augmentations) and batch sizes, without training.

    Args:
        config: the options; None: those in `options`.
        split: a split to use instead of that of the configuration.
        methods: all methods that will run; views that none of them needs are left out of cached features.
        raw: the data set, if it is already loaded, as it was before images were fitted to the network.
        test: labeled test images, if `data` is in memory, as for `run`.
        options: options of `Config`, which override those of `config`; `data` and `clients` as for `run`.

    Raises:
        UserError: the data, the split or the network do not fit.

    Examples:
        >>> problem = halfmoon.problem(data=(X, y), clients=5)
        >>> print(problem.split)
    """
    _check_config(config)
    options, _ = _register_data(config, options, test)
    # A complete configuration is used as it is.
    if options or config is None:
        config = _make_config(config, options, {})
    return factory.build_problem(config, split, methods, raw)


@python_errors
def resume(
    folder: Path | str,
    watch: Callback = NULL_CALLBACK,
    method: outside.CustomMethod | None = None,
    data: Any = None,
    test: Any = None,
    clients: Any = None,
    progress: bool = True,
) -> "Results":
    """Resume a run or a comparison from its last checkpoint; finished runs are read.

    A folder may also be that of `run(data=FOLDER)` without a method. Such a run has a plan, which chose two methods and
    compares them.

    Args:
        folder: the folder of the run or the comparison.
        watch: a callback for each run and round.
        method: the object of the custom method, if its class cannot be imported by its name.
        data: the images in memory that the run was started with, which its folder does not contain.
        test: the test images that the run was started with, if any.
        clients: the ids of clients that the run was started with, if any.
        progress: print progress and messages; False: nothing but warnings.

    Raises:
        UserError: the folder contains no run that can be resumed, or `data` is missing or differs.
        Diverged: a loss or a weight is not finite.

    Examples:
        >>> halfmoon.resume("runs/first")
        >>> halfmoon.resume("runs/arrays", data=(X, y))
    """
    root = to_path(folder)
    if data is not None:
        # The configuration of the run names data in memory by their hash, under which they are registered here.
        memory.register(make_memory_data(data, test, clients))
    elif test is not None or clients is not None:
        raise UserError("test and clients are only for data in memory: pass data as well, as to the first call.")
    if (plan := run_plan.load_plan(root)) is not None:
        return _run_plan(plan, root, watch, resume=True, progress=progress)
    with _show_progress(watch, progress) as callbacks:
        return _make_results(runner.resume(root, callbacks, method), progress)


@python_errors
def load_run(folder: Path | str) -> "Results":
    """Load the results of a run, a comparison, a sweep or a federation, finished or not, from its folder.

    Args:
        folder: its folder.

    Returns:
        The results as tables, curves and models; for a sweep also its study.

    Raises:
        UserError: the folder contains none of these.

    Examples:
        >>> results = halfmoon.load_run("runs/first")
        >>> results.plot(path="accuracy.pdf")
    """
    from halfmoon.studies.results import load_results

    return load_results(to_path(folder))


@python_errors
def sweep(
    name: str | Path,
    only: Mapping[str, str | Sequence[str]] | None = None,
    seeds: int | Sequence[int] | None = None,
    scale: str | None = None,
    out: Path | str = "runs",
    watch: Callback = NULL_CALLBACK,
    progress: bool = True,
    **options: Any,
) -> "SweepResults":
    """Run the recipe of a paper's table or figure, or a custom TOML file. The same call resumes it.

    A run that fails is reported by a warning.

    Args:
        name: name of the recipe (`halfmoon recipes` lists them), or the file.
        only: the part to run, by what varies over the table: {"method": ["fedavg", "feddure"]}.
        seeds: seeds instead of those of the recipe; 2 are 0 and 1.
        scale: name of a smaller version of the experiment; None for that of the paper.
        out: parent of the sweep's folder; finished runs in it are read.
        watch: a callback for each run and round.
        progress: print progress and messages; False: nothing but warnings.
        options: options that change no number, such as threads.

    Raises:
        UserError: there is no such recipe, axis, value or scale, or an option changes numbers; so does data in memory.

    Examples:
        >>> table = halfmoon.sweep("feddure-table1", scale="tiny", only={"dataset": "digits", "method": ["fedavg", "feddure"]})
        >>> print(table.summary)
    """
    plan = recipe.load(str(name))
    # A smaller version of the paper's experiment, with fewer rounds, clients or images.
    size = plan.scale(scale) if scale else None
    selections = []  # as the command line has them, such as "method=fedavg"
    for axis, values in (only or {}).items():
        for value in [values] if isinstance(values, str) else values:
            selections.append(f"{axis}={value}")
    numbers = list(range(seeds)) if isinstance(seeds, int) else seeds
    if "data" in options:
        raise UserError(
            "sweep: a recipe names its data sets, so it takes no data=; compare(methods, data=..., seeds=...) trains methods "
            "on data in memory."
        )
    changing = sorted(options.keys() - schema.EXECUTION_OPTIONS)
    if changing:
        raise UserError(f"{changing[0]} changes a sweep's numbers: it belongs into the recipe.")
    machine_options = schema.resolve_paths(options, Path())  # paths start at the working directory
    folder = SweepFolder(to_path(out), plan, size, f"halfmoon.sweep({str(name)!r})")
    with _show_progress(watch, progress) as callbacks:
        cells = grid.build_cells(plan, grid.parse_selection(plan, selections), numbers, size, machine_options)
        run_sweep.run_sweep(folder, cells, SerialExecutor(), _warn_of_failure, callbacks)
    from halfmoon.studies.results import SweepResults

    return SweepResults(folder.path)


def _warn_of_failure(report: run_sweep.RunReport) -> None:
    """Warn that a run of a sweep failed; finished runs give no warning."""
    if report.failed:
        warn(f"failed: {report.label}: {in_python(report.failed)}")


def _check_config(config: Any) -> None:
    """Raise `UserError` if data were given in place of the configuration, as in `run(X, y)`."""
    if config is not None and not isinstance(config, Config):
        kind = type(config)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__.split('.')[0]}."
        raise UserError(
            f"config is {module}{kind.__qualname__}: it must be a halfmoon.Config; give images and labels as data=(X, y), "
            "the name of a data set or a folder as data=NAME, and options by name."
        )


def _register_data(config: Config | None, options: dict[str, Any], test: Any) -> tuple[dict[str, Any], bool]:
    """Register the option `data`, if it is in memory, and replace it and ids of clients in the options.

    A configuration contains no arrays: it has the name under which the data are registered in this process.

    Args:
        config: the configuration of the call, None without.
        options: the keyword options of the call. `data` is a name, a folder or images in memory; `clients` a number or,
            for images in memory, the id of the client of each image.
        test: test images in memory, if any.

    Returns:
        The options, with the registered name and the number of clients, and whether a plan may choose the method
        (`_start_plan`).

    Raises:
        UserError: the data are invalid, or an option has no effect on them.
    """
    data = options.get("data", "")
    clients = options.get("clients")
    has_ids = clients is not None and not isinstance(clients, int | float | str)
    if isinstance(data, str | Path):
        if test is not None:
            raise UserError("test is only for data in memory: a folder has its test images in a folder test.")
        if has_ids:
            raise UserError("ids of clients are only for data in memory: give the number of clients, or a split.")
        return options, True
    memory_data = make_memory_data(data, test, clients if has_ids else None)
    options = {**options, "data": memory.register(memory_data)}
    _refuse_options(config, options, NO_FILE_OPTIONS, "is for files, but data is in memory")
    if not memory_data.train.is_fully_labeled:
        _refuse_options(config, options, LABEL_OPTIONS, "hides labels, but data has unlabeled images (-1) already")
    if memory_data.clients is not None:
        _refuse_options(config, options, CLIENT_OPTIONS, "assigns images to clients, but clients has an id for each")
        options["clients"] = int(memory_data.clients.max()) + 1
    # A plan tests partly labeled images by cross-validation, and ignores test images and ids of clients.
    is_test_unused = memory_data.test is not None and not memory_data.train.is_fully_labeled
    return options, not is_test_unused and not has_ids


def _refuse_options(config: Config | None, options: Mapping[str, Any], names: Sequence[str], reason: str) -> None:
    """Raise `UserError` for an option without effect that a call or a configuration sets."""
    default = Config()
    for name in names:
        # The default is not an option that somebody has set.
        is_changed = config is not None and getattr(config, name) != getattr(default, name)
        if options.get(name) is not None or is_changed:
            raise UserError(f"{name} {reason}; leave {name} out.")


def _plan_folder(options: Mapping[str, Any], minutes: float | None, scratch_trial: bool | None) -> Plan | None:
    """Plan a run on images in a folder or in memory; None for other data, or a named method, recipe or split."""
    name = str(options.get("data", ""))
    if not memory.is_memory_name(name) and (not name or not Path(name).is_dir()):
        return None
    options = schema.resolve_paths(options, Path())
    return planning.plan_if_folder(options, minutes, scratch_trial=scratch_trial)


def _start_plan(plan: Plan, watch: Callback, progress: bool) -> "Results":
    """Run a plan, or resume the run that its folder contains already.

    Without a method, `run` plans from the images what is trained: a method with labels only and one with unlabeled
    images, how they are compared, and the time it takes.

    Args:
        plan: its `config` has the options of the run, `contents` describes the folder of images, and `reasons` has
            pairs of what was chosen and why, printed here.
        watch: a callback for each run and round.
        progress: print progress and messages.
    """
    root = plan.config.run_dir or schema.next_free_folder(plan.config, plan.config.method)
    before = run_plan.load_plan(root)
    if before is None or before.contents.folder != plan.contents.folder:
        reasons = dict(plan.reasons)
        # Without test images the methods are tested on the labeled images, by cross-validation.
        tests = reasons.get("test") or reasons["labels"]
        minutes = f"about {plan.seconds / 60:.1f} minutes"
        print_message(f"{plan.contents.sentence}; {reasons['methods']}; test: {tests}; {minutes}", progress)
        return _run_plan(plan, root, watch, progress=progress)
    print_message(
        f"{root} contains a run on these images: it is resumed or read; set another run_dir for a new run.", progress
    )
    return _run_plan(before, root, watch, resume=True, progress=progress)


def _run_plan(plan: Plan, root: Path, watch: Callback, resume: bool = False, progress: bool = True) -> "Results":
    """Run or resume a plan in a folder."""
    with _show_progress(watch, progress) as callbacks:
        result = run_plan.run_plan(plan, root, callbacks, resume)
    # None for a site's folder without test images: its runs are a method and its baseline, without a comparison.
    if result.outcome is not None:
        return _make_results(result.outcome, progress)
    from halfmoon.studies.results import Results

    return Results(root, [root, *(root / BASELINES / name for name in plan.config.baselines)])


def _make_config(config: Config | None, options: dict[str, Any], method_options: dict[str, Any]) -> Config:
    """Make a configuration from options; `method_options` are those of objects of custom methods."""
    options = {name: to_path(value) if name == "run_dir" else value for name, value in options.items()}
    named_options = options.get("options", config.options if config else {})
    options["options"] = schema.merge_method_options(named_options, method_options, "options")
    return Config.of(**options) if config is None else replace(config, **options)


@contextmanager
def _show_progress(watch: Callback, show: bool) -> Iterator[Callbacks]:
    """Show progress on the screen, unless `show` is False, and pass events to a callback as well."""
    with make_progress(show) as screen:
        yield Callbacks(screen, watch)


def _contains_run(root: Path, config: Config, progress: bool) -> bool:
    """Check whether a folder contains a run of this configuration, with these baselines, so that it can be resumed.

    If the run has finished, the user is told that it is read and not trained again. The identity is a hash of the
    options that change the results; baselines, which are runs beside it, are not part of it.
    """
    if not RunFolder.exists(root):
        return False
    with RunFolder.open(root) as folder:
        same = folder.identity == schema.identity(config, config.method)
        if same and folder.finished:
            text = f"{root} contains this run, finished: its results are read; set another run_dir for a new run."
            print_message(text, progress)
        return same and parse_config(folder.config, root).baselines == config.baselines


def _make_results(outcome: RunResult, progress: bool) -> "Results":
    """Make the results of a run, and print the remarks about them."""
    for remark in list_remarks(outcome.summaries, registry.ceilings()):
        if not remark.startswith("Budget"):
            print_message(remark, progress)
    from halfmoon.studies.results import Results

    return Results(outcome.folder, outcome.runs)
