"""From a configuration to runs on disk: play every method, go on where one was stopped, draw what came out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from halfmoon.aggregation.attacks import Hostile, hostile
from halfmoon.config.schema import (
    Config,
    check_methods,
    count_rounds,
    explicit_method_options,
    identity,
    next_free_folder,
    to_toml,
)
from halfmoon.core.errors import UserError
from halfmoon.core.memory import retain_freed_memory
from halfmoon.core.plugins import folder_name
from halfmoon.core.tree import Tree
from halfmoon.data import Split
from halfmoon.engine import evaluation
from halfmoon.engine.evaluation import ParallelMap
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.loop import Experiment, Row, run_rounds
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.simulation import Simulation
from halfmoon.methods import registry
from halfmoon.models.finetuned import training_summary
from halfmoon.report.run_reader import check_finished
from halfmoon.runs import assembly, checks, factory, outside, workers
from halfmoon.runs.assembly import CSV, CURVES, MARKDOWN, SPLIT, RunResult, write_comparison
from halfmoon.runs.budgets import budget, evaluation_interval, find_costliest_method
from halfmoon.runs.callbacks import NULL_CALLBACK, Callback, RunInfo, feature_progress, isolate_failures
from halfmoon.runs.factory import ImageSpec, Problem
from halfmoon.runs.jobs import COMPARISON, Job, is_same_plan, parse_config, parse_jobs, render_jobs
from halfmoon.runs.parallel import run_in_processes
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.folder_writer import CONFIG, resume_command
from halfmoon.storage.run_folder import BASELINES, SUMMARY, RunFolder
from halfmoon.storage.state_store import TreeStore


def start(config: Config, watch: Callback = NULL_CALLBACK, shared: Problem | None = None) -> RunResult:
    """Play `config.method` and those `baselines` it in a new run folder.

    `shared` is what `halfmoon.runs.factory.problem` has made of the configuration, where it was made before.

    Raises `UserError` for a configuration or data that cannot work, before anything is written, and
    `halfmoon.engine.driver.Diverged` when a loss is not a number.
    """
    watch = isolate_failures(watch)
    check_methods(config)
    root = config.run_dir or next_free_folder(config, config.method)
    _refuse_taken(root, identity(config, config.method))
    jobs = _jobs(config)
    shared = _shared(jobs, None, watch, shared=shared)
    return _play_all(root, _settled(jobs, shared), shared, watch)


def compare(
    config: Config,
    methods: Sequence[str],
    seeds: Sequence[int] = (0,),
    watch: Callback = NULL_CALLBACK,
    again: bool = False,
) -> RunResult:
    """Play several methods, each with every seed, on the same split and cohorts.

    The shared budget is that of `config.reference` or, without one, of the method that takes most by its own rule.
    With `again` a folder that holds this comparison already is gone on with.
    """
    watch = isolate_failures(watch)
    for words, names in (("methods", methods), ("seeds", seeds)):
        if not names or len(set(names)) < len(names):
            raise UserError(f"compare needs one or more different {words}, not {', '.join(map(str, names)) or 'none'}.")

    def planned(reference: str) -> list[Job]:
        return [
            Job(folder_name(f"{m}-seed{seed}"), _alone(config, m, reference, seed=seed))
            for m in methods
            for seed in seeds
        ]

    jobs = planned(config.reference or methods[0])
    for job in jobs:
        check_methods(job.config)
    root = config.run_dir or next_free_folder(config, "compare")
    begun = (root / COMPARISON).exists()  # refused below, in words that need the plan
    if not begun:
        _refuse_taken(root, "")
    shared = _shared(jobs, None, NULL_CALLBACK if begun else watch)
    if config.reference is None:
        jobs = planned(find_costliest_method([job.config for job in jobs], shared))
    jobs = _settled(jobs, shared)
    plan = render_jobs(jobs)
    if again and is_same_plan(atomic_io.read(root / COMPARISON), plan):
        return resume(root, watch)
    _refuse_taken(root, "", plan)
    try:
        root.mkdir(parents=True, exist_ok=True)
        atomic_io.write_atomically(root / COMPARISON, plan)
    except OSError as error:
        raise UserError(
            f"{root}: the run folder cannot be made ({atomic_io.error_reason(error)}); choose another --run-dir."
        ) from error
    return _play_all(root, jobs, shared, watch)


def resume(
    root: Path,
    watch: Callback = NULL_CALLBACK,
    method: outside.CustomMethod | None = None,
    shared: Problem | None = None,
) -> RunResult:
    """Go on with a run or a comparison where it was left; what is finished is neither played nor loaded again.

    `method` is the one of your own that `start` was given, where its class cannot be imported by its name, and `shared`
    what it was given as such.
    """
    watch = isolate_failures(watch)
    if method is not None:
        outside.register(method)
    plan = atomic_io.read(root / COMPARISON)
    if plan is not None:
        jobs = parse_jobs(plan, root)
        for job, each in zip(jobs, atomic_io.parse_json(plan)["jobs"], strict=True):
            outside.check_origins(job.config, each["config"], root)
    else:
        with RunFolder.open(root) as folder:
            config = parse_config(folder.config, root)
            outside.check_origins(config, folder.config, root)
            if identity(config, config.method) != folder.identity:
                raise UserError(
                    f"{root} was made by another version of halfmoon, which read its {CONFIG} differently; "
                    "start a new run instead."
                )
        jobs = _jobs(config)
    if all(_finished(root / job.folder, job.config) for job in jobs):
        return _play_all(root, jobs, None, watch)
    split = _stored_split(root / jobs[0].folder)
    return _play_all(root, jobs, _shared(jobs, split, watch, shared=shared), watch)


def _stored_split(path: Path) -> Split | None:
    integrity.check_files(path, SPLIT)
    return Split.load(path / SPLIT) if (path / SPLIT).exists() else None


def run_in_folder(
    config: Config,
    path: Path,
    watch: Callback = NULL_CALLBACK,
    tests: bool = True,
    shared: Problem | None = None,
) -> Row:
    """Play one method in the folder `path`, or go on there, and return its summary; a finished one is only read.

    Without `tests` no model is shown a test image: validation images alone say what it is worth. `shared` is
    what the configuration's problem is, where it was made before.
    Raise what `start` raises, and `halfmoon.storage.folder_writer.Busy` where another process plays in that folder.
    """
    watch = isolate_failures(watch)
    check_methods(config)
    job = Job(".", config)
    if not _finished(path, config):
        shared = _shared([job], _stored_split(path), watch, shared)
        shared = shared if tests else replace(shared, test=None)
        if not RunFolder.exists(path):
            (job,) = _settled([job], shared)
        if factory.device(config).type == "cpu":
            retain_freed_memory()
    return _play(path, job, shared, watch)


def write_split(config: Config, path: Path) -> Row:
    """Make a configuration's split in the folder `path`, train nothing, and return the folder's summary.

    Raise what `run_in_folder` raises.
    """
    summary = finished_summary(path)
    if summary is not None:
        return summary
    data = factory.source(config)
    split = factory.split_of(config, data)
    with _folder(path, config) as folder:
        assembly.save_split(path, split, data)
        assembly.record_split_checksums(path)
        summary = {
            **assembly.summary_header(config, {"setting": config.setting}),
            "classes": list(data.classes),
            "finished": True,
        }
        folder.conclude(summary)
    return summary


def finished_summary(path: Path) -> Row | None:
    return integrity.read_summary(path) if RunFolder.exists(path) else None


def _jobs(config: Config) -> list[Job]:
    jobs = [Job(".", config)]
    for name in config.baselines:
        alone = _alone(config, name, config.reference or config.method, options=explicit_method_options(config, name))
        jobs.append(Job(f"{BASELINES}/{folder_name(name)}", alone))
    return jobs


def _settled(jobs: Sequence[Job], shared: Problem) -> list[Job]:
    """Return the jobs of a new run with their executor chosen, where it was left open.

    A run's file says what was chosen, so that it goes on as it began: "auto" in one means what it does for large
    networks, and did for all before there was a choice.
    """
    network, image = shared.task.network, ImageSpec.of(shared.source).image
    return [replace(job, config=factory.choose_executor(job.config, network, image)) for job in jobs]


def _alone(config: Config, name: str, reference: str, **changes: Any) -> Config:
    """Return the configuration for one method of several; what a preset says of a run is written in it already."""
    preset = config.preset if registry.entry(name).paper_options else "none"
    return replace(config, method=name, baselines=(), preset=preset, reference=reference, **changes)


def _shared(jobs: Sequence[Job], split: Split | None, watch: Callback, shared: Problem | None = None) -> Problem:
    """Return what all jobs share; raise `UserError`, before anything is written, where a job cannot work on it."""
    if shared is None:
        methods = [job.config.method for job in jobs]
        shared = factory.problem(jobs[0].config, split, methods=methods, progress=feature_progress(watch))
    checks.check(jobs, shared, watch)
    if (words := training_summary(shared.task.network)) is not None:
        watch.say(words)
    return shared


def _play_all(root: Path, jobs: Sequence[Job], shared: Problem | None, watch: Callback) -> RunResult:
    """Play what is not finished, job by job, and draw the curves of all; without `shared` all must be finished."""
    rows = _play_jobs(root, jobs, shared, watch)
    summaries = [rows[number] for number in range(len(jobs))]
    paths = [root / job.folder for job in jobs]
    outcome = RunResult(root, summaries, root / CURVES, paths, [root / CSV, root / MARKDOWN])
    if shared is not None or not all(path.exists() for path in (outcome.curves, *outcome.tables)):
        write_comparison(outcome)
    return outcome


def _play_jobs(root: Path, jobs: Sequence[Job], shared: Problem | None, watch: Callback) -> dict[int, Row]:
    """Return the summaries of jobs by number; what is not finished is played."""
    left = [shared is not None and not _finished(root / job.folder, job.config) for job in jobs]
    waiting = [number for number in range(len(jobs)) if left[number]]
    if any(":" in job.config.method for job in jobs):
        waiting = []  # a method that was given as an object may be known to this process alone
    rows = run_in_processes(partial(_play_number, root, tuple(jobs), shared), waiting, jobs[0].config, watch)
    for number in range(len(jobs)):
        if number not in rows:
            rows[number] = _play_number(root, jobs, shared, number, watch)
    return rows


def _play_number(root: Path, jobs: Sequence[Job], shared: Problem | None, number: int, watch: Callback) -> Row:
    """Play one of several jobs, by its number."""
    if shared is not None and factory.device(jobs[number].config).type == "cpu":
        retain_freed_memory()
    return _play(root, jobs[number], shared, watch)


def _play(root: Path, job: Job, shared: Problem | None, watch: Callback) -> Row:
    """Play one job to its end, from its newest checkpoint if it has one."""
    path, config = root / job.folder, job.config
    entry = registry.entry(config.method)
    with _folder(path, config) as folder:
        summary = folder.summary()
        if summary is not None:
            folder.checkpoints.clear()  # a kill right after the summary has left some
            return check_finished(summary, path / SUMMARY)
        assert shared is not None, "an unfinished job needs its data"
        if config.executor == "auto":
            config = replace(config, executor=parse_config(folder.config, path).executor)
        loaded = folder.load()
        for warning in [*(loaded.warnings if loaded else []), *([folder.remark] if folder.remark else [])]:
            watch.say(warning)
        if not (path / SPLIT).exists():
            assembly.save_split(path, shared.split, shared.source)
        assembly.record_split_checksums(path)
        run = RunInfo(path, config, entry.title, loaded.round if loaded else 0)
        watch.begin(run)
        with workers.working(config) as parallel_map, factory.use_threads(factory.threads(config)):
            experiment = _experiment(config, shared, path, parallel_map, watch)
            results = run_rounds(experiment, folder, loaded, lambda row: watch.round(run, row))
        summary = assembly.build_summary(config, {"setting": config.setting}, shared.source.classes, folder, results)
        network, model = shared.task.network.full_model(results["model"])
        form, temperature = ImageSpec.of(shared.source), _temperature(config, shared, results["model"])
        card = assembly.build_card(config, form, network, to_toml(config), shared.input_size, temperature)
        folder.finish(model, card.render(), summary)
    watch.end(run, summary)
    return summary


def _temperature(config: Config, shared: Problem, model: Tree) -> float:
    """Return what logits are divided by: fitted on validation images where the model is used as it was tested."""
    if shared.validation is None or config.test_statistics != "running":
        return 1.0
    return evaluation.fit_temperature(shared.task.network, model, shared.task.normalize, shared.validation)


def _finished(path: Path, config: Config) -> bool:
    if not RunFolder.exists(path):
        return False
    with _folder(path, config) as folder:
        return folder.finished


def _refuse_taken(root: Path, mark: str, plan: bytes = b"") -> None:
    there = atomic_io.read(root / COMPARISON) if root.is_dir() else None
    if there is not None:
        of = "this" if is_same_plan(there, plan) else "another"
        raise UserError(
            f"{root} holds a comparison of {of} configuration; `{resume_command(root)}` goes on with it, "
            "or choose another --run-dir."
        )
    RunFolder.refuse(root, mark)


@contextmanager
def _folder(path: Path, config: Config) -> Iterator[RunFolder]:
    """Open the folder of a run, or make it."""
    mark = identity(config, config.method)
    if RunFolder.exists(path):
        folder = RunFolder.open(path)
        if folder.identity != mark:
            raise UserError(
                f"{path} holds a run of another configuration ({folder.identity[:8]}, not {mark[:8]}); "
                "choose another --run-dir."
            )
    else:
        folder = RunFolder.create(path, to_toml(config), mark)
    with folder:
        yield folder


def _experiment(config: Config, shared: Problem, path: Path, parallel_map: ParallelMap, watch: Callback) -> Experiment:
    """Return the experiment; what a simulation draws noise from is its seed, so that it can be played again."""
    entry, task = registry.entry(config.method), replace(shared.task, rounds=count_rounds(config))
    method = factory.method(config)
    bad = hostile(shared.split.clients, config.attackers, config.seed)
    label_flippers = frozenset(bad if config.attack == "label-flip" else ())
    attacks = () if config.attack == "none" else (Hostile(config.attack, bad, config.seed, config.attack_factor),)
    runtime = Simulation(
        method,
        task,
        FederatedDataset(
            shared.train,
            shared.split,
            entry.all_labels,
            entry.pooled,
            config.reuse_labeled,
            label_flippers,
            len(shared.source.classes),
        ),
        shared.views,
        Training(
            shared.batching,
            budget(config, task),
            shared.serving,
            factory.executor(config),
            parallel_map,
            factory.max_vmapped_clients(config),
        ),
        RuntimeSettings(
            config.cohort,
            config.seed,
            confidence_threshold=config.confidence_threshold,
            client_dropout=config.client_dropout,
            client_models=config.client_models,
        ),
        store=TreeStore(cap=config.memory_cap * 1_000_000),
        aggregators=(*attacks, *factory.aggregators(config, f"seed {config.seed}".encode(), path)),
    )
    every = evaluation_interval(config, shared)
    if every > 1 and config.evaluate_every is None:
        watch.say(f"Test images are evaluated every {every} rounds (--evaluate-every 1: after each).")
    method = assembly.build_experiment(config, task, runtime, shared.test, shared.validation)
    return replace(method, parallel_map=parallel_map, evaluate_every=every)
