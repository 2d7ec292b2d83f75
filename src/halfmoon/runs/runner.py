"""Start, compare and resume runs on disk, and write their figures and tables."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from halfmoon.aggregation.attacks import HostileClients, draw_hostile_clients
from halfmoon.aggregation.base import Aggregator
from halfmoon.api.types import Method
from halfmoon.config.schema import (
    Config,
    check_effects,
    check_methods,
    count_rounds,
    identity,
    method_options,
    next_free_folder,
    to_toml,
)
from halfmoon.core.errors import OptionText, UserError
from halfmoon.core.memory import retain_freed_memory
from halfmoon.core.plugins import folder_name
from halfmoon.core.tree import Tree
from halfmoon.data import Split
from halfmoon.data.images import SkippedImage
from halfmoon.data.partition.client_tests import deal_test_images
from halfmoon.data.partition.split import SERVER
from halfmoon.engine import evaluation
from halfmoon.engine.executors.base import Executor
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.loop import Experiment, Row, initial_model, run_rounds
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import SharedAverages, Simulation
from halfmoon.methods import registry
from halfmoon.models.finetuned import training_summary
from halfmoon.report.run_reader import check_finished
from halfmoon.runs import assembly, checks, factory, outside, workers
from halfmoon.runs.assembly import CSV, CURVES, MARKDOWN, SPLIT, RunResult, write_comparison
from halfmoon.runs.budgets import build_budget, choose_evaluation_interval, find_costliest_method
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback, GroupedRuns, RunInfo, feature_progress, isolate_failures
from halfmoon.runs.factory import ImageSpec, Problem
from halfmoon.runs.jobs import COMPARISON, Job, is_same_plan, parse_config, parse_jobs, render_jobs
from halfmoon.runs.parallel import run_in_processes
from halfmoon.storage import atomic_io, image_digests, integrity
from halfmoon.storage.folder_writer import CONFIG, advise_for_parent
from halfmoon.storage.run_folder import BASELINES, PENDING, RUN, SKIPPED, SUMMARY, RunFolder
from halfmoon.storage.skipped_list import write_skipped_list
from halfmoon.storage.state_store import TreeStore

TIMED_STEPS = 5
"""Steps of each client in the trial that chooses between loop and vmap on a GPU."""


def start(
    config: Config,
    watch: Callback = NULL_CALLBACK,
    problem: Problem | None = None,
    resume_existing: bool = False,
) -> RunResult:
    """Train `config.method` and its `baselines` in a new run folder.

    Args:
        config: the configuration.
        watch: receives the events of all runs.
        problem: the result of `halfmoon.runs.factory.build_problem` for this configuration, if it is already built.
        resume_existing: resume the run that `config.run_dir` contains, if it does, instead of raising `UserError`.

    Raises:
        UserError: the configuration or the data does not fit; nothing has been written.
        Diverged: a loss is not finite.
    """
    if resume_existing and config.run_dir is not None and RunFolder.exists(config.run_dir):
        return resume(config.run_dir, watch, problem=problem)
    watch = isolate_failures(watch)
    check_methods(config)
    for method in (config.method, *config.baselines):
        check_effects(config, method)
    if problem is None:
        checks.check_image_options(config)
    root = config.run_dir or next_free_folder(config, config.method)
    _refuse_existing(root, identity(config, config.method))  # the identity is a hash of the options
    jobs = _create_jobs(config)  # one for each method, with its folder
    # Features of a frozen backbone may take hours: record the run before, so that it can be resumed after a kill.
    with _pending_record(root, config) as write_record:
        problem = _load_problem(jobs, split=None, watch=watch, problem=problem, before_features=write_record)
    return _run_all(root, _choose_executors(jobs, problem, watch), problem, watch)


def compare(
    config: Config,
    methods: Sequence[str],
    seeds: Sequence[int] = (0,),
    watch: Callback = NULL_CALLBACK,
    resume_existing: bool = False,
) -> RunResult:
    """Train several methods, each with every seed, on the same split and cohorts.

    The shared budget is that of `config.reference` or, without one, of the method whose batch rule costs most.

    Args:
        config: the options of all methods.
        methods: names of the methods.
        seeds: seeds of training.
        watch: receives the events of all runs.
        resume_existing: resume the comparison if the folder already contains it, instead of raising `UserError`.

    Raises:
        UserError: the configuration or the data does not fit.
        Diverged: a loss is not finite.
    """
    watch = isolate_failures(watch)
    for title, names in (("methods", methods), ("seeds", seeds)):
        if not names or len(set(names)) < len(names):
            raise UserError(f"compare needs one or more different {title}, not {', '.join(map(str, names)) or 'none'}.")

    def create_jobs(reference: str) -> list[Job]:
        """Create a job for each method and seed, trained as long as the method `reference`."""
        jobs = []
        for method in methods:
            for seed in seeds:
                method_config = _single_method_config(config, method, reference, seed=seed)
                jobs.append(Job(folder_name(f"{method}-seed{seed}"), method_config))
        return jobs

    jobs = create_jobs(config.reference or methods[0])
    for job in jobs:
        check_methods(job.config)
        check_effects(job.config, job.config.method)
    checks.check_image_options(config)
    root = config.run_dir or next_free_folder(config, "compare")
    # An existing comparison is refused only below: whether it is this one depends on the jobs.
    exists = (root / COMPARISON).exists()
    if not exists:
        _refuse_existing(root, run_identity="")
    with _pending_record(root, config, methods, seeds) as write_record:
        quiet_watch = NULL_CALLBACK if exists else watch  # `resume` reports the messages below
        problem = _load_problem(jobs, split=None, watch=quiet_watch, before_features=write_record)
    # The costliest method is known only now: it depends on the data.
    if config.reference is None:
        jobs = create_jobs(find_costliest_method([job.config for job in jobs], problem))
    jobs = _choose_executors(jobs, problem, watch)
    plan = render_jobs(jobs)
    if resume_existing and is_same_plan(atomic_io.read(root / COMPARISON), plan):
        return resume(root, watch)
    _refuse_existing(root, run_identity="", plan=plan)
    try:
        root.mkdir(parents=True, exist_ok=True)
        atomic_io.write_atomically(root / COMPARISON, plan)
    except OSError as error:
        raise UserError(
            f"{root}: the run folder cannot be made ({atomic_io.error_reason(error)}); choose another {{run_dir}}.",
            option="run_dir",
        ) from error
    return _run_all(root, jobs, problem, watch)


def resume(
    root: Path,
    watch: Callback = NULL_CALLBACK,
    method: outside.CustomMethod | None = None,
    problem: Problem | None = None,
) -> RunResult:
    """Resume a run or a comparison; finished runs are neither trained nor loaded again.

    A comparison has the plan of its jobs in `COMPARISON`. A run or comparison that was killed before its folder was
    complete has only its request in `PENDING`, and starts again.

    Args:
        root: the folder of the run or comparison.
        watch: receives the events of all runs.
        method: the custom method of the run, if its class cannot be imported by its name.
        problem: the data, split and batch rules that `start` was called with, if any; otherwise they are loaded.

    Raises:
        UserError: the folder contains no run that can resume, or plugins, weights or the split have changed.
        Diverged: a loss is not finite.
    """
    watch = isolate_failures(watch)
    if method is not None:
        outside.register(method)
    plan = atomic_io.read(root / COMPARISON)
    if plan is None and not RunFolder.exists(root):
        request = atomic_io.read_json(root / PENDING)
        if request is not None:
            return _start_again(root, request, watch)
    if plan is not None:
        jobs = parse_jobs(plan, root)
        for job, stored_job in zip(jobs, atomic_io.parse_json(plan)["jobs"], strict=True):
            outside.check_origins(job.config, stored_job["config"], root)
    else:
        with RunFolder.open(root) as folder:
            config = parse_config(folder.config, root)
            outside.check_origins(config, folder.config, root)
            # The folder has the hash of the options with which the run was started.
            if identity(config, config.method) != folder.identity:
                raise UserError(
                    f"{root} was made by another version of halfmoon, which read its {CONFIG} differently; "
                    "start a new run instead."
                )
        jobs = _create_jobs(config)
    if all(_is_finished(root / job.folder, job.config) for job in jobs):
        return _run_all(root, jobs, problem=None, watch=watch)
    split = _load_stored_split(root / jobs[0].folder)
    return _run_all(root, jobs, _load_problem(jobs, split, watch, problem=problem), watch)


@contextmanager
def _pending_record(
    root: Path, config: Config, methods: Sequence[str] = (), seeds: Sequence[int] = ()
) -> Iterator[Callable[[], None]]:
    """Yield a function that records the configuration of a run that has no run folder yet, so that it can be resumed.

    The block calls the function before it computes features, which may take hours. If an error ends the block, the record
    is removed, since nothing remains of the run then. After a kill or Ctrl-C it remains.

    Args:
        root: the folder of the run or comparison.
        config: its configuration.
        methods: the methods of a comparison; () for a run.
        seeds: the seeds of a comparison.
    """
    existed = root.exists()

    def write_record() -> None:
        """Write the record, unless the folder has the plan of a comparison already."""
        text = to_toml(replace(config, run_dir=None))
        record = {"config": text, "sha256": atomic_io.sha256(text.encode()), "methods": [*methods], "seeds": [*seeds]}
        root.mkdir(parents=True, exist_ok=True)
        if not (root / COMPARISON).exists():
            atomic_io.write_atomically(root / PENDING, json.dumps(record).encode())

    try:
        yield write_record
    except Exception:
        (root / PENDING).unlink(missing_ok=True)
        if not existed and root.exists() and not any(root.iterdir()):
            root.rmdir()
        raise


def _start_again(root: Path, record: Any, watch: Callback) -> RunResult:
    """Start a run or comparison again whose process was killed before it created the run folder.

    Args:
        root: the folder.
        record: what `_pending_record` has written about the run: its configuration, methods, seeds, and a checksum.
        watch: receives the events of all runs.

    Raises:
        UserError: the record is damaged.
    """
    try:
        text = str(record["config"])
        methods = [str(method) for method in record["methods"]]
        seeds = [int(seed) for seed in record["seeds"]]
        if atomic_io.sha256(text.encode()) != record["sha256"]:
            raise ValueError("its checksum differs")
    except (ValueError, LookupError, TypeError):
        raise UserError(f"{root / PENDING} is damaged; remove it and start the run again.") from None
    config = replace(parse_config(text, root), run_dir=root)
    if methods:
        return compare(config, methods, seeds, watch)
    return start(config, watch)


def _load_stored_split(path: Path) -> Split | None:
    """Load the split of a run folder after a check of its checksum; None if there is none yet."""
    integrity.check_files(path, SPLIT)
    return Split.load(path / SPLIT) if (path / SPLIT).exists() else None


def run_in_folder(
    config: Config,
    path: Path,
    watch: Callback = NULL_CALLBACK,
    tests: bool = True,
    problem: Problem | None = None,
) -> Row:
    """Train one method in a folder, or resume its run there, and return its summary.

    Args:
        config: the configuration.
        path: the run folder, new or with a run of this configuration; a finished run is only read.
        watch: receives the run's events.
        tests: evaluate on test images; without, models are evaluated on validation images only.
        problem: the result of `halfmoon.runs.factory.build_problem` for this configuration, if it is already built.

    Raises:
        UserError: the configuration or the data does not fit.
        Diverged: a loss is not finite.
        halfmoon.storage.folder_writer.Busy: another process trains in this folder.
    """
    watch = isolate_failures(watch)
    check_methods(config)
    if not RunFolder.exists(path):
        check_effects(config, config.method)
        if problem is None:
            checks.check_image_options(config)
    job = Job(".", config)
    if not _is_finished(path, config):
        problem = _load_problem([job], _load_stored_split(path), watch, problem)
        problem = problem if tests else replace(problem, test=None)
        if not RunFolder.exists(path):
            (job,) = _choose_executors([job], problem, watch)
    return _run_job(path, problem, job, watch)


def write_split(config: Config, path: Path) -> Row:
    """Write the split of a configuration into a run folder without training, for studies that only compare splits.

    Args:
        config: the configuration.
        path: the run folder; a finished one is only read.

    Returns:
        The folder's summary.json, which has no accuracy.

    Raises:
        UserError: the configuration or the data does not fit.
        halfmoon.storage.folder_writer.Busy: another process writes into this folder.
    """
    summary = finished_summary(path)
    if summary is not None:
        return summary
    data = factory.load_source_for_network(config)
    split = factory.get_split(config, data)
    with _open_folder(path, config) as folder:
        assembly.save_split(path, split, data)
        assembly.record_split_checksums(path)
        summary = {
            **assembly.summary_header(config, {"setting": config.setting}),
            "classes": list(data.classes),
            "finished": True,
        }
        folder.write_summary(summary)
    return summary


def finished_summary(path: Path) -> Row | None:
    """Read the summary of a run folder; None if it is no run folder, or its run is not finished."""
    return integrity.read_summary(path) if RunFolder.exists(path) else None


def _create_jobs(config: Config) -> list[Job]:
    """Create the jobs of a run, each a configuration and its folder: its method, and its baselines in folders below."""
    jobs = [Job(".", config)]
    reference = config.reference or config.method
    for name in config.baselines:
        options = method_options(config, name, with_preset=False)
        baseline_config = _single_method_config(config, name, reference, options=options)
        jobs.append(Job(f"{BASELINES}/{folder_name(name)}", baseline_config))
    return jobs


def _choose_executors(jobs: Sequence[Job], problem: Problem, watch: Callback = NULL_CALLBACK) -> list[Job]:
    """Choose the executor of new jobs whose option is "auto": on a CPU by the network's size, on a GPU by a timed trial.

    The run's file stores the choice, so that a run resumes as it started. "auto" in a stored file has the meaning for
    large networks: there was no choice when earlier versions wrote it.

    Args:
        jobs: the jobs.
        problem: their data.
        watch: receives the times of a trial.
    """
    network = problem.task.network
    image = ImageSpec.of(problem.source).image
    # Jobs that differ only in the seed are timed once.
    timed: dict[str, Literal["loop", "vmap"]] = {}
    jobs_with_executor: list[Job] = []
    for job in jobs:
        config = factory.choose_executor(job.config, network, image)
        if config.executor == "auto" and factory.select_device(config).type == "cuda":
            key = to_toml(replace(config, seed=0))
            if key not in timed:
                timed[key] = _choose_by_time(config, problem, watch)
            config = replace(config, executor=timed[key])
        jobs_with_executor.append(replace(job, config=config))
    return jobs_with_executor


def _choose_by_time(config: Config, problem: Problem, watch: Callback) -> Literal["loop", "vmap"]:
    """Choose between one client after the other and vmap by the time that a few steps of a cohort take with each.

    Which one is faster depends on the network, the cohort and the GPU. Runs that must give the same bits on every start
    (`deterministic`) and methods with a single client always take the loop.

    Args:
        config: the configuration, whose option `executor` is "auto".
        problem: data, split, task, views and batch rule.
        watch: receives a message with the times.
    """
    if config.deterministic or registry.entry(config.method).pooled:
        return "loop"
    loop_seconds = _time_cohort(replace(config, executor="loop"), problem)
    try:
        vmap_seconds = _time_cohort(replace(config, executor="vmap"), problem)
    except (RuntimeError, UserError) as error:  # too little memory, or a layer for which vmap has no rule
        reason = str(error).partition("\n")[0].rstrip(".")
        text = f"Clients train one by one, as they cannot be batched by vmap: {reason}."
        watch.record("executor_chosen", text, executor="loop")
        return "loop"
    faster: Literal["loop", "vmap"] = "vmap" if vmap_seconds < loop_seconds else "loop"
    text = (
        f"Clients train {'batched by vmap' if faster == 'vmap' else 'one by one'}: {TIMED_STEPS} steps of a cohort took "
        f"{loop_seconds:.2f} s one by one and {vmap_seconds:.2f} s by vmap ({{executor}} chooses without a trial)."
    )
    watch.record("executor_chosen", OptionText(text, "executor"), executor=faster)
    return faster


def _time_cohort(config: Config, problem: Problem) -> float:
    """Measure the seconds of a round with `TIMED_STEPS` steps a client, after one round that is not counted.

    The first round includes what happens once: PyTorch loads kernels, and cuDNN chooses its algorithms. The models are
    thrown away, and every draw is a function of the seed and the round, so that the run itself does not change.

    Args:
        config: the configuration, whose executor is "loop" or "vmap".
        problem: data, split, task, views and batch rule.

    Returns:
        Seconds.
    """
    few_steps = replace(problem.batching, steps=TIMED_STEPS)
    few_server_steps = replace(problem.server_batching, steps=TIMED_STEPS)
    problem = replace(problem, batching=few_steps, server_batching=few_server_steps)
    device = factory.select_device(config)
    seconds = 0.0
    with (
        workers.open_executor(config) as executor,
        factory.apply_compute_settings(config, factory.count_threads(config)),
    ):
        method = factory.build_method(config)
        simulation = _build_simulation(config, method, problem, executor, aggregators=())
        server = method.start(simulation.task, initial_model(simulation.task, config.seed, device))
        for number in range(2):
            _wait_for_gpu(device)
            started = time.perf_counter()
            simulation.open(number)
            server = method.round(simulation.task, server, simulation)
            _wait_for_gpu(device)
            seconds = time.perf_counter() - started
    return seconds


def _wait_for_gpu(device: torch.device) -> None:
    """Wait until a GPU has computed all that it was given; without that, a clock measures only the giving."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _single_method_config(config: Config, name: str, reference: str, **changes: Any) -> Config:
    """Build the configuration of one of several methods of a run or comparison.

    Args:
        config: the configuration of all; the options of its preset are already in it.
        name: the method.
        reference: the method whose cost (steps or passes) the training of all methods has to match.
        changes: other options to change.
    """
    # The preset "paper" stands for the options of a method's paper, which `config` has already. Its name remains in the
    # configuration, except for a method whose paper has no options: it would refuse the name.
    preset = config.preset if registry.entry(name).paper_options else "none"
    return replace(config, method=name, baselines=(), preset=preset, reference=reference, **changes)


def _load_problem(
    jobs: Sequence[Job],
    split: Split | None,
    watch: Callback,
    problem: Problem | None = None,
    before_features: Callable[[], None] = lambda: None,
) -> Problem:
    """Load the data and the split that all jobs share, unless they are given, and check that each job can run on them.

    Args:
        jobs: the jobs.
        split: their split; None to make it.
        watch: receives messages.
        problem: their data, if they are loaded already.
        before_features: called once before features of a frozen backbone are computed, if they are.

    Raises:
        UserError: a job cannot run; nothing has been written.
    """
    if problem is None:
        methods = [job.config.method for job in jobs]
        report = feature_progress(watch)
        started: list[bool] = []

        def report_progress(number: int, count: int) -> None:
            """Report the number of images that have features; call `before_features` before the first report."""
            if not started:
                started.append(True)
                before_features()
            report(number, count)

        # All jobs share the options of the data, so the configuration of the first one will do.
        problem = factory.build_problem(jobs[0].config, split, methods=methods, progress=report_progress)
        for note in problem.source.notes:
            watch.record("data_note", note)
    checks.check_jobs(jobs, problem, watch)
    text = training_summary(problem.task.network)  # how much of a pretrained network is trained
    if text is not None:
        watch.record("pretrained_network", text)
    return problem


def _run_all(root: Path, jobs: Sequence[Job], problem: Problem | None, watch: Callback) -> RunResult:
    """Run all jobs that are not finished, in one or several processes, and write the figure and tables of all.

    Args:
        root: the folder of the run or comparison.
        jobs: the jobs.
        problem: their data; None if all are finished.
        watch: receives the events of all runs.
    """
    if problem is not None and problem.source.skipped:
        write_skipped(root, problem.source.skipped)
    # A method "module:Class" may have been passed as an object, which only this process knows.
    other_processes_know_methods = not any(":" in job.config.method for job in jobs)
    for_processes: dict[int, Job] = {}  # the unfinished jobs by number
    if problem is not None and other_processes_know_methods:
        for number, job in enumerate(jobs):
            if not _is_finished(root / job.folder, job.config):
                for_processes[number] = job
    if len(jobs) > 1:
        watch = GroupedRuns(watch, root)
    # Runs in other processes share nothing: the averages are those of this process.
    run_job = partial(_run_job, root, problem, shared_averages=SharedAverages())
    # Both are empty if one process is enough.
    summaries, failures = run_in_processes(run_job, for_processes, jobs[0].config, watch)
    for number, job in enumerate(jobs):
        if number in summaries or number in failures:
            continue
        # In this process; of a finished job this reads the summary.
        try:
            summaries[number] = run_job(job, watch)
        except Exception as error:
            failures[number] = error
    finished = sorted(summaries)
    outcome = RunResult(
        folder=root,
        summaries=[summaries[number] for number in finished],
        curves=root / CURVES,
        runs=[root / jobs[number].folder for number in finished],
        tables=[root / CSV, root / MARKDOWN],
    )
    if failures:
        # The results of the finished methods are written before the error of the first failed one is raised.
        if finished:
            write_comparison(outcome)
            failed_methods = dict.fromkeys(jobs[number].config.method for number in sorted(failures))  # each once
            text = f"{', '.join(failed_methods)} failed; the results of the other methods are in {outcome.tables[1]}."
            watch.record("methods_failed", text)
        first_failure = failures[min(failures)]
        raise first_failure
    has_trained = problem is not None
    is_written = all(path.exists() for path in (outcome.curves, *outcome.tables))
    if has_trained or not is_written:
        write_comparison(outcome)
    return outcome


def write_skipped(root: Path, skipped: Sequence[SkippedImage]) -> None:
    """List the images that were left out because they cannot be read, with the reasons, in skipped.csv of a run folder.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        write_skipped_list(root / SKIPPED, [(image.path, image.reason) for image in skipped])
    except OSError as error:
        raise UserError(
            f"{root}: it cannot be written ({atomic_io.error_reason(error)})",
            option="run_dir",
            hint="choose another {run_dir}.",
        ) from error


def _iterate_training_images(problem: Problem) -> Iterator[np.ndarray]:
    """Iterate over the images that clients or the server have, uint8 (H, W, C), without the padding of the network."""
    images = problem.source.train.images
    height, width = problem.input_size
    top = max(0, images.shape[1] - height) // 2
    left = max(0, images.shape[2] - width) // 2
    for row in np.flatnonzero(problem.split.client != -1):
        yield images[row, top : top + height, left : left + width]


def _run_job(
    root: Path, problem: Problem | None, job: Job, watch: Callback, shared_averages: SharedAverages | None = None
) -> Row:
    """Train one job from its latest checkpoint, or from the start, to its end.

    Args:
        root: the folder of the run or comparison.
        problem: the data of the job; None if it is finished.
        job: the job.
        watch: receives the run's events.
        shared_averages: averages of other jobs with the same data.

    Returns:
        The summary, read from the folder if the job is finished.
    """
    path = root / job.folder
    config = job.config
    entry = registry.entry(config.method)
    with advise_for_parent(root), _open_folder(path, config) as folder:
        (root / PENDING).unlink(missing_ok=True)
        summary = folder.summary()
        if summary is not None:
            # Checkpoints remain if the process was killed right after it wrote the summary.
            folder.checkpoints.clear()
            return check_finished(summary, path / SUMMARY)
        assert problem is not None, "an unfinished job needs its data"
        if factory.select_device(config).type == "cpu":
            retain_freed_memory()
        # The stored file may name an executor where the option is "auto".
        if config.executor == "auto":
            config = replace(config, executor=parse_config(folder.config, path).executor)
        checkpoint = folder.load()
        if checkpoint is not None:
            for warning in checkpoint.warnings:
                watch.record("warning", warning)
            if factory.select_device(config).type == "cuda" and not config.deterministic:
                text = (
                    "some sums on a GPU have no fixed order, so a resumed run may differ from a straight one; new runs "
                    "with {deterministic} do not."
                )
                watch.record("warning", OptionText(text, "deterministic"))
        if folder.lock_warning:
            watch.record("warning", folder.lock_warning)
        with folder.writer.convert_errors(SPLIT):
            if not (path / SPLIT).exists():
                assembly.save_split(path, problem.split, problem.source)
            assembly.record_split_checksums(path)
        if Path(config.data).is_dir():
            with folder.writer.convert_errors(image_digests.DIGESTS):
                image_digests.write_digests(path, _iterate_training_images(problem))
        run = RunInfo(path, config, entry.title, first=checkpoint.round if checkpoint else 0)
        watch.begin(run)
        with (
            workers.open_executor(config) as executor,
            factory.apply_compute_settings(config, factory.count_threads(config)),
        ):
            method = factory.build_method(config)
            aggregators = _build_aggregators(config, problem, path)
            runtime = _build_simulation(config, method, problem, executor, aggregators, shared_averages)
            experiment = _build_experiment(config, problem, runtime, executor, watch)
            results = run_rounds(experiment, folder, checkpoint, lambda row: watch.round(run, row))
        summary = assembly.build_summary(config, {"setting": config.setting}, problem.source.classes, folder, results)
        # With cached features only the head was trained; the model file contains the backbone as well.
        network, model = problem.task.network.full_model(results["model"])
        card = assembly.build_card(
            config,
            ImageSpec.of(problem.source),
            network,
            to_toml(config),
            input_size=problem.input_size,
            temperature=_fit_temperature(config, problem, results["model"]),
        )
        folder.finish(model, card.render(), summary)
    watch.end(run, summary)
    return summary


def _fit_temperature(config: Config, problem: Problem, model: Tree) -> float:
    """Fit the divisor of the logits on validation images; 1 without them.

    It is 1 also if tests use statistics of test batches: the model file is used with running statistics, whose logits
    have another scale.
    """
    if problem.validation is None or config.test_statistics != "running":
        return 1.0
    return evaluation.fit_temperature(problem.task.network, model, problem.task.normalize, problem.validation)


def _is_finished(path: Path, config: Config) -> bool:
    """Check whether a folder contains a finished run; raise `UserError` if it is one of another configuration."""
    if not RunFolder.exists(path):
        return False
    with _open_folder(path, config) as folder:
        return folder.finished


def _refuse_existing(root: Path, run_identity: str, plan: bytes = b"") -> None:
    """Raise `UserError` if a folder already contains a run or comparison.

    Args:
        root: the folder.
        run_identity: the hash of the new run's options, "" for a comparison. The message of an existing run states
            whether it has the same options.
        plan: the comparison.json of a new comparison; b"" for a run.
    """
    # `COMPARISON` exists in the folder of a comparison only.
    stored_plan = atomic_io.read(root / COMPARISON) if root.is_dir() else None
    if stored_plan is not None:
        which = "this" if is_same_plan(stored_plan, plan) else "another"
        raise UserError(
            f"{root} holds a comparison of {which} configuration",
            option="run_dir",
            hint="`{resume}` continues it, or choose another {run_dir}.",
            resume=root,
        )
    RunFolder.check_unused(root, run_identity)


def check_same_run(path: Path, config: Config) -> None:
    """Raise `UserError` if a folder has a run of another configuration."""
    if not RunFolder.exists(path):
        return
    stored_identity = str((atomic_io.read_json(path / RUN) or {}).get("identity"))
    run_identity = identity(config, config.method)  # a hash of the options that change results
    if stored_identity != run_identity:
        raise UserError(
            f"{path} holds a run of another configuration ({stored_identity[:8]}, not {run_identity[:8]})",
            option="run_dir",
            hint="choose another {run_dir}.",
        )


@contextmanager
def _open_folder(path: Path, config: Config) -> Iterator[RunFolder]:
    """Open the folder of a run, or create it, and close it at the end of the block.

    Args:
        path: the folder.
        config: the configuration of the run.

    Raises:
        UserError: the folder contains a run of another configuration.
    """
    run_identity = identity(config, config.method)  # a hash of the options that change results
    if RunFolder.exists(path):
        check_same_run(path, config)
        folder = RunFolder.open(path)
    else:
        folder = RunFolder.create(path, to_toml(config), run_identity, registry.entry(config.method).title)
    with folder:
        yield folder


def _build_aggregators(config: Config, problem: Problem, path: Path) -> tuple[Aggregator, ...]:
    """Build the stages that the uploads of a simulation pass: simulated attacks, and then the server's aggregators.

    Args:
        config: the configuration.
        problem: the split, whose clients may be hostile.
        path: the run folder, for the ledger of differential privacy.
    """
    attacks: tuple[HostileClients, ...] = ()
    if config.attack != "none":
        hostile_clients = draw_hostile_clients(problem.split.clients, config.attackers, config.seed)
        attacks = (HostileClients(config.attack, hostile_clients, config.seed, config.attack_factor),)
    # The noise of a simulation is drawn from its seed, so that the run can be reproduced; a federation has a secret.
    noise_seed = f"seed {config.seed}".encode()
    return (*attacks, *factory.build_aggregators(config, noise_seed, path))


def _build_experiment(
    config: Config, problem: Problem, runtime: Simulation, executor: Executor, watch: Callback
) -> Experiment:
    """Build the experiment of a configuration: its simulation, test images and options of the round loop.

    Args:
        config: the configuration.
        problem: data, split, task, views and batch rule.
        runtime: the simulation.
        executor: computes test batches.
        watch: receives a message if not every round is evaluated.
    """
    interval = choose_evaluation_interval(config, problem)
    if interval > 1 and config.evaluate_every is None:
        text = f"Test images are evaluated every {interval} rounds ({{evaluate_every=1}}: after each)."
        watch.record("evaluation_interval", OptionText(text, "evaluate_every"), rounds=interval)
    experiment = assembly.build_experiment(config, runtime.task, runtime, problem.test, problem.validation)
    test_clients = None
    if problem.test is not None:
        test_clients = deal_test_images(
            problem.split,
            problem.train.labels.cpu().numpy(),
            problem.test.labels.cpu().numpy(),
            len(problem.source.classes),
        )
    return replace(experiment, executor=executor, evaluate_every=interval, test_clients=test_clients)


def _build_simulation(
    config: Config,
    method: Method,
    problem: Problem,
    executor: Executor,
    aggregators: Sequence[Aggregator],
    shared_averages: SharedAverages | None = None,
) -> Simulation:
    """Build the simulation of a configuration: its clients with their images, and the rules of a round.

    Args:
        config: the configuration.
        method: the method, with its options.
        problem: data, split, task, views and batch rule.
        executor: trains clients.
        aggregators: the stages that uploads pass before the method averages them.
        shared_averages: averages of other runs with the same data.
    """
    entry = registry.entry(config.method)
    task = replace(problem.task, rounds=count_rounds(config))
    hostile_clients = draw_hostile_clients(problem.split.clients, config.attackers, config.seed)
    dataset = FederatedDataset(
        problem.train,
        problem.split,
        all_labels=entry.all_labels,
        pooled=entry.pooled,
        reuse_labeled=config.reuse_labeled,
        label_flippers=frozenset(hostile_clients if config.attack == "label-flip" else ()),
        classes=len(problem.source.classes),
    )
    if config.class_weights == "balanced":
        # A pooled data set has all labels, also those of the server, at its only client.
        holders = [*range(dataset.clients)] if dataset.pooled else [SERVER, *range(dataset.clients)]
        rows = np.concatenate([dataset.rows(client, labeled=True) for client in holders])
        labels = problem.train.labels.cpu().numpy()[rows]
        weights = factory.balanced_weights(labels, len(problem.source.classes))
        task = replace(task, class_weights=weights)
    training = Training(
        batching=problem.batching,
        budget=build_budget(config, task),
        server_batching=problem.server_batching,
        executor=executor,
    )
    runtime_settings = RuntimeSettings(
        cohort=config.cohort,
        seed=config.seed,
        confidence_threshold=config.confidence_threshold,
        client_dropout=config.client_dropout,
        client_models=config.client_models,
    )
    return Simulation(
        method,
        task,
        dataset,
        problem.views,
        training,
        runtime_settings,
        store=TreeStore(cap=config.memory_cap * 1_000_000),  # the memories of clients, in bytes
        aggregators=tuple(aggregators),
        shared_averages=shared_averages,
    )
