"""From a configuration to runs on disk: play every method, go on where one was stopped, draw what came out."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon import catalog, disk, toml
from halfmoon import config as settings
from halfmoon.config import Config, check_methods, check_place, free_folder, identity, method_options, resolve, text
from halfmoon.data import Source, Split
from halfmoon.data import summary as portrait
from halfmoon.data.split import SERVER
from halfmoon.deploy.card import Card
from halfmoon.errors import UserError
from halfmoon.experiment import Experiment, Row, play
from halfmoon.guards.attacks import Hostile, hostile
from halfmoon.memory import keep_memory
from halfmoon.pieces import World, budget, computing, device, executor, guards, method, source, split_of, world
from halfmoon.record import CONFIG, SUMMARY, TIMINGS, RunFolder, Unwritable
from halfmoon.report.reading import Run, ended
from halfmoon.report.tables import Result, comparison
from halfmoon.sim import Holdings, Simulation
from halfmoon.store import Store
from halfmoon.watch import SILENCE, Running, Watch, guarded

SPLIT, HOLDINGS, COMPARISON = "split.parquet", "split.json", "comparison.json"
CURVES, CSV, MARKDOWN = "curves.png", "table.csv", "table.md"


@dataclass(frozen=True)
class Job:
    """One method to play, in a folder below the root."""

    folder: str
    config: Config


@dataclass(frozen=True)
class Outcome:
    """What is left when all jobs are through; `summaries` and `runs` are in the order of the jobs."""

    folder: Path
    summaries: list[Row]
    curves: Path
    runs: list[Path]
    tables: list[Path]


def start(config: Config, watch: Watch = SILENCE) -> Outcome:
    """Play `config.method` and those `beside` it in a new run folder.

    Raises `UserError` for a configuration or data that cannot work, before anything is written, and
    `halfmoon.client.Diverged` when a loss is not a number.
    """
    watch = guarded(watch)
    check_methods(config)
    root = config.run_dir or free_folder(config, config.method)
    _refuse_taken(root, identity(config, config.method))
    jobs = _jobs(config)
    return _play_all(root, jobs, _shared(jobs, None, watch), watch)


def compare(config: Config, methods: Sequence[str], seeds: Sequence[int] = (0,), watch: Watch = SILENCE) -> Outcome:
    """Play several methods, each with every seed, on the same split and cohorts; the first sets the shared budget."""
    watch = guarded(watch)
    for words, names in (("methods", methods), ("seeds", seeds)):
        if not names or len(set(names)) < len(names):
            raise UserError(f"compare needs one or more different {words}, not {', '.join(map(str, names)) or 'none'}.")
    jobs = [
        Job(
            f"{m}-seed{seed}", replace(config, method=m, beside=(), seed=seed, reference=config.reference or methods[0])
        )
        for m in methods
        for seed in seeds
    ]
    for job in jobs:
        check_methods(job.config)
    root = config.run_dir or free_folder(config, "compare")
    plan = _render_plan(jobs)
    _refuse_taken(root, "", plan)
    shared = _shared(jobs, None, watch)
    try:
        root.mkdir(parents=True, exist_ok=True)
        disk.replace(root / COMPARISON, plan)
    except OSError as error:
        raise UserError(
            f"{root}: the run folder cannot be made ({disk.reason(error)}); choose another --run-dir."
        ) from error
    return _play_all(root, jobs, shared, watch)


def resume(root: Path, watch: Watch = SILENCE) -> Outcome:
    """Go on with a run or a comparison where it was left; what is finished is neither played nor loaded again."""
    watch = guarded(watch)
    plan = disk.read(root / COMPARISON)
    if plan is not None:
        jobs = _parse_plan(plan, root)
    else:
        with RunFolder.open(root) as folder:
            config = _parsed(folder.config, root)
            if identity(config, config.method) != folder.identity:
                raise UserError(
                    f"{root} was made by another version of halfmoon, which read its {CONFIG} differently; "
                    "start a new run instead."
                )
        jobs = _jobs(config)
    if all(_finished(root / job.folder, job.config) for job in jobs):
        return _play_all(root, jobs, None, watch)
    kept = root / jobs[0].folder / SPLIT
    return _play_all(root, jobs, _shared(jobs, Split.load(kept) if kept.exists() else None, watch), watch)


def cell(config: Config, path: Path, watch: Watch = SILENCE) -> Row:
    """Play one method in the folder `path`, or go on there, and return its summary; a finished one is only read.

    Raise what `start` raises, and `halfmoon.record.Busy` where another process plays in that folder.
    """
    watch = guarded(watch)
    check_methods(config)
    job = Job(".", config)
    shared = None
    if not _finished(path, config):
        kept = path / SPLIT
        shared = _shared([job], Split.load(kept) if kept.exists() else None, watch)
        if device(config).type == "cpu":
            keep_memory()
    with computing(config):
        return _play(path, job, shared, watch)


def portray(config: Config, path: Path) -> Row:
    """Make a configuration's split in the folder `path`, train nothing, and return the folder's summary.

    Raise what `cell` raises.
    """
    done = finished(path)
    if done is not None:
        return done
    data = source(config)
    split = split_of(config, data)
    with _folder(path, config) as folder:
        _save_split(path, split, data)
        summary = {**_names(config), "classes": list(data.classes), "finished": True}
        folder.conclude(summary)
    return summary


def finished(path: Path) -> Row | None:
    """Return the summary of the finished run in a folder, None where there is none."""
    return disk.read_json(path / SUMMARY) if RunFolder.made(path) else None


def _jobs(config: Config) -> list[Job]:
    jobs = [Job(".", config)]
    for name in config.beside:
        alone = replace(config, method=name, beside=(), options=method_options(config, name))
        jobs.append(Job(f"beside/{name}", replace(alone, reference=config.reference or config.method)))
    return jobs


def _shared(jobs: Sequence[Job], split: Split | None, watch: Watch) -> World:
    """Return what all jobs share; raise `UserError`, before anything is written, where a job cannot work on it."""
    shared = world(jobs[0].config, split)
    _check(jobs, shared, watch)
    return shared


def _play_all(root: Path, jobs: Sequence[Job], shared: World | None, watch: Watch) -> Outcome:
    """Play what is not finished, job by job, and draw the curves of all; without `shared` all must be finished."""
    if shared is not None and device(jobs[0].config).type == "cpu":
        keep_memory()
    with computing(jobs[0].config):
        summaries = [_play(root / job.folder, job, shared, watch) for job in jobs]
    paths = [root / job.folder for job in jobs]
    outcome = Outcome(root, summaries, root / CURVES, paths, [root / CSV, root / MARKDOWN])
    if shared is not None or not all(path.exists() for path in (outcome.curves, *outcome.tables)):
        _show(outcome)
    return outcome


def _show(outcome: Outcome) -> None:
    """Write the picture and the tables of what came out; each is there whole or not at all."""
    from halfmoon.report.curves import curves  # Matplotlib is slow to import, and workers draw nothing

    table = comparison([Result.of(summary) for summary in outcome.summaries])
    draft = outcome.curves.with_name(f".{CURVES}{disk.PARTIAL}")
    try:
        for path, words in zip(outcome.tables, (table.as_csv(), table.as_markdown()), strict=True):
            disk.replace(path, words.encode())
        curves([Run.read(path) for path in outcome.runs], draft)
        draft.replace(outcome.curves)
    except OSError as error:
        raise UserError(
            f"{outcome.folder}: tables and curves cannot be written ({disk.reason(error)}); "
            f"the runs are finished: first mend that, then: {_resuming(outcome.folder)}"
        ) from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _play(path: Path, job: Job, shared: World | None, watch: Watch) -> Row:
    """Play one job to its end, from its newest checkpoint if it has one."""
    config = job.config
    entry = catalog.entry(config.method)
    with _folder(path, config) as folder:
        done = folder.summary()
        if done is not None:
            return ended(done, path / SUMMARY)
        assert shared is not None, "an unfinished job needs its data"
        loaded = folder.load()
        for warning in loaded.warnings if loaded else []:
            watch.say(warning)
        if not (path / SPLIT).exists():
            _save_split(path, shared.split, shared.source)
        experiment = _experiment(config, shared, path)
        run = Running(path, config, entry.title, loaded.round if loaded else 0)
        watch.begin(run)
        played = play(experiment, folder, loaded, lambda row: watch.round(run, row))
        summary = _summary(config, shared, folder, played)
        folder.finish(played["model"], _model_card(config, shared), summary)
    watch.end(run, summary)
    return summary


def _save_split(path: Path, split: Split, data: Source) -> None:
    """Write the split and what it holds; the parquet last, as a run that goes on looks for it."""
    counts = portrait(split, data.train.labels, data.classes)
    try:
        disk.replace(path / HOLDINGS, (json.dumps(counts) + "\n").encode())
    except OSError as error:
        raise Unwritable(
            f"{path}: {HOLDINGS} cannot be written ({disk.reason(error)}). "
            f"First mend that, then go on with: {_resuming(path)}"
        ) from error
    split.save(path / SPLIT)


def _finished(path: Path, config: Config) -> bool:
    if not RunFolder.made(path):
        return False
    with _folder(path, config) as folder:
        return folder.finished


def _refuse_taken(root: Path, mark: str, plan: bytes = b"") -> None:
    """Raise `UserError` where `root` holds a comparison, a run, or anything else."""
    there = disk.read(root / COMPARISON) if root.is_dir() else None
    if there is not None:
        of = "this" if there == plan else "another"
        raise UserError(
            f"{root} holds a comparison of {of} configuration; `{_resuming(root)}` goes on with it, "
            "or choose another --run-dir."
        )
    RunFolder.refuse(root, mark)


@contextmanager
def _folder(path: Path, config: Config) -> Iterator[RunFolder]:
    """Open the folder of a run, or make it."""
    mark = identity(config, config.method)
    if RunFolder.made(path):
        folder = RunFolder.open(path)
        if folder.identity != mark:
            raise UserError(
                f"{path} holds a run of another configuration ({folder.identity[:8]}, not {mark[:8]}); "
                "choose another --run-dir."
            )
    else:
        folder = RunFolder.create(path, text(config), mark)
    with folder:
        yield folder


def _check(jobs: Sequence[Job], shared: World, watch: Watch) -> None:
    """Refuse what could only fail later: too large a cohort, a client without labels, guards that do not fit."""
    config, split = jobs[0].config, shared.split
    if config.cohort > split.clients:
        raise UserError(f"cohort is {config.cohort}, but the split has {split.clients} clients; choose a smaller one.")
    entries = [catalog.entry(job.config.method) for job in jobs]
    for job, each in zip(jobs, entries, strict=True):
        method(job.config)
        if each.pooled and job.config.attack != "none":
            raise UserError(f"attack needs clients, but method {each.name} has all rows in one place; leave it out.")
    needing = [each for each in entries if not each.all_labels and not each.pooled]
    served = bool((split.client == SERVER).any())
    counts = np.bincount(split.client[split.labeled & (split.client >= 0)], minlength=split.clients)
    empty = np.flatnonzero(counts == 0)
    place = "server" if served else "some" if len(empty) else "clients"
    for each in needing:
        if place == "some" and each.places == ("clients",):
            raise UserError(
                f"client {empty[0]} ({len(empty)} of {split.clients} in all) has no labeled image, but {each.name} "
                f"needs some at every client; ask for more labels or a larger min_size, or choose one of: "
                f"{', '.join(catalog.names_at(place))}."
            )
        check_place(each.name, place)
    bare = [k for k in range(split.clients) if not len(split.rows(k, False))]
    looking = [each.name for each in needing if next(iter(each.method.works(shared.task).values())).views]
    if looking and bare:
        raise UserError(
            f"client {bare[0]} ({len(bare)} of {split.clients} in all) has no unlabeled image, but {looking[0]} needs "
            "some at every client; ask for fewer labels or a larger min_size."
        )
    if served or config.labeled_batch == "all":
        return
    few = int(((counts > 0) & (counts < config.labeled_batch)).sum())
    if needing and few:
        watch.say(
            f"{few} of {split.clients} clients have fewer labeled images than a batch of {config.labeled_batch}: "
            "their images repeat within a batch."
        )


def _experiment(config: Config, shared: World, path: Path) -> Experiment:
    """Return the experiment; what a simulation draws noise from is its seed, so that it can be played again."""
    entry = catalog.entry(config.method)
    made = method(config)
    bad = hostile(shared.split.clients, config.attackers, config.seed)
    liars = frozenset(bad if config.attack == "label-flip" else ())
    attacks = () if config.attack == "none" else (Hostile(config.attack, bad, config.seed),)
    runtime = Simulation(
        made,
        shared.task,
        Holdings(
            shared.train,
            shared.split,
            entry.all_labels,
            entry.pooled,
            config.reuse_labeled,
            liars,
            len(shared.source.classes),
        ),
        views=shared.views,
        batching=shared.batching,
        budget=budget(config, shared.task),
        seed=config.seed,
        cohort=config.cohort,
        executor=executor(config),
        confident=config.confident,
        serving=shared.serving,
        silent=config.silent,
        store=Store(cap=config.memory_cap * 1_000_000),
        guards=(*attacks, *guards(config, f"seed {config.seed}".encode(), path)),
    )
    return Experiment(
        made, shared.task, runtime, shared.test, config.seed, config.evaluate_every, config.checkpoint_every
    )


def _names(config: Config) -> Row:
    """Return what a summary says of any run."""
    return {
        "method": config.method,
        "title": catalog.entry(config.method).title,
        "data": config.data,
        "setting": config.setting,
        "seed": config.seed,
        "rounds": config.rounds,
    }


def _summary(config: Config, shared: World, folder: RunFolder, played: Row) -> Row:
    seconds = sum(row.get("seconds", 0.0) for row in disk.read_rows(folder.path / TIMINGS))
    return {
        **_names(config),
        "accuracy": played["accuracy"],
        "cost": played["cost"],
        "classes": list(shared.source.classes),
        "confusion": played["confusion"],
        "seconds": round(seconds, 1),
        **({"guards": chosen} if (chosen := settings.guarding(config)) else {}),
        **{name: played[name] for name in ("guard", "ended") if played[name] is not None},
        "finished": True,
    }


def _model_card(config: Config, shared: World) -> dict[str, str]:
    """Return what a model file says of itself."""
    channels, height, width = shared.train.images.shape[1:]
    return Card(
        classes=shared.source.classes,
        image=(channels, height, width),
        taken=shared.taken,
        shrink=config.shrink,
        mean=shared.source.mean,
        std=shared.source.std,
        network=shared.task.network,
        method=config.method,
        config=text(config),
    ).render()


def _resuming(root: Path) -> str:
    return shlex.join(["halfmoon", "resume", str(root)])


def _parsed(words: str, root: Path) -> Config:
    """Return the configuration that a run folder holds; raise UserError where a federation's server has made it."""
    try:
        values = toml.loads(words)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{root / CONFIG} is not valid TOML: {error}; restore it, or start a new run.") from error
    if settings.TABLE in values:
        going = shlex.join(["halfmoon", "serve", "CONFIG.toml", "--run-dir", str(root)])
        raise UserError(
            f"{root} is the run of a federation: `{going}` goes on with it, from the file it was begun with."
        )
    return resolve(values, {"run_dir": str(root)}, root / CONFIG)


def _render_plan(jobs: Sequence[Job]) -> bytes:
    """Return what `comparison.json` says of the jobs."""
    plan = {"jobs": [{"folder": job.folder, "config": text(job.config)} for job in jobs]}
    return (json.dumps(plan, indent=1) + "\n").encode()


def _parse_plan(plan: bytes, root: Path) -> list[Job]:
    """Return the jobs of a `comparison.json`."""
    try:
        jobs = [Job(_inside(each["folder"]), _parsed(str(each["config"]), root)) for each in disk.parsed(plan)["jobs"]]
        if not jobs:
            raise ValueError("it names no run")
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{root / COMPARISON} was changed or damaged ({error}); restore it, or start the comparison again in "
            "another --run-dir."
        ) from error
    return jobs


def _inside(folder: Any) -> str:
    """Return the name of a folder below the comparison's; raise ValueError for any other."""
    parts = Path(folder).parts if isinstance(folder, str) and folder.isprintable() else ("..",)
    if ".." in parts or Path(folder).is_absolute():
        raise ValueError(f"{str(folder)[:40]!r} is no folder in it")
    return folder
