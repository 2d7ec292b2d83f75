"""From a configuration to runs on disk: assemble the pieces, play every method, draw and tabulate what came out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from halfmoon import catalog
from halfmoon.augment import Labeled, Normalize, Plain, Strong, Weak
from halfmoon.budget import Budget
from halfmoon.config import Config, check_methods, identity, method_options, resolve, text
from halfmoon.data import Images, Scenario, Source, Split, fit, shrink
from halfmoon.data import load as load_source
from halfmoon.data.draw import Batching, Views
from halfmoon.errors import UserError
from halfmoon.evaluate import Examples
from halfmoon.experiment import Experiment, Row, play
from halfmoon.models import NETWORKS, Network
from halfmoon.optim import SGD, Adam, Optimizer
from halfmoon.record import RunFolder
from halfmoon.report.curves import curves
from halfmoon.report.reading import Run
from halfmoon.sim import Holdings, Simulation
from halfmoon.types import Task

SPLIT, CURVES, COMPARISON = "split.parquet", "curves.png", "comparison.json"


class Watch(Protocol):
    """Somebody who looks on while runs are played."""

    def begin(self, title: str, rounds: int, first: int) -> None:
        """A method begins at round `first` of `rounds`."""
        ...

    def round(self, row: Row) -> None:
        """A round is over; `row` is its line of metrics.jsonl."""
        ...

    def end(self, summary: Row) -> None:
        """A method is through; `summary` is its summary.json."""
        ...

    def say(self, words: str) -> None:
        """Something the user should know."""
        ...


class Silence:
    """Look on without a word."""

    def begin(self, title: str, rounds: int, first: int) -> None:
        """Say nothing."""

    def round(self, row: Row) -> None:
        """Say nothing."""

    def end(self, summary: Row) -> None:
        """Say nothing."""

    def say(self, words: str) -> None:
        """Say nothing."""


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


@dataclass(frozen=True)
class World:
    """What the methods of a comparison share: data, split, task, views and batch rule."""

    source: Source
    split: Split
    train: Examples
    test: Examples
    task: Task
    views: Views
    batching: Batching


def start(config: Config, watch: Watch | None = None) -> Outcome:
    """Play `config.method` and those `beside` it in a new run folder.

    Raises `UserError` for a configuration or data that cannot work, before anything is written, and
    `halfmoon.client.Diverged` when a loss is not a number.
    """
    check_methods(config)
    root = config.run_dir or _free(config)
    return _play_all(root, _jobs(config), watch or Silence())


def compare(config: Config, methods: Sequence[str], seeds: Sequence[int] = (0,), watch: Watch | None = None) -> Outcome:
    """Play several methods, each with every seed, on the same split and cohorts; the first sets the shared budget."""
    for words, names in (("methods", methods), ("seeds", seeds)):
        if not names or len(set(names)) < len(names):
            raise UserError(f"compare needs one or more different {words}, not {list(names)}.")
    jobs = [
        Job(f"{m}-seed{seed}", replace(config, method=m, beside=(), seed=seed, reference=methods[0]))
        for m in methods
        for seed in seeds
    ]
    for job in jobs:
        check_methods(job.config)
    root = config.run_dir or _free(replace(config, method="compare"))
    if root.exists() and any(root.iterdir()):
        raise UserError(f"{root} is not empty; choose another --run-dir, or go on with: halfmoon resume {root}")
    watch = watch or Silence()
    world = _world(jobs[0].config, None)
    _check(jobs, world, watch)
    root.mkdir(parents=True, exist_ok=True)
    plan = {"jobs": [{"folder": job.folder, "config": text(job.config)} for job in jobs]}
    (root / COMPARISON).write_text(json.dumps(plan, indent=1))
    return _play_all(root, jobs, watch)


def resume(root: Path, watch: Watch | None = None) -> Outcome:
    """Go on with a run or a comparison where it was left; finished methods are not played again."""
    watch = watch or Silence()
    if (root / COMPARISON).exists():
        plan = json.loads((root / COMPARISON).read_text())
        return _play_all(root, [Job(each["folder"], _parsed(each["config"], root)) for each in plan["jobs"]], watch)
    folder = RunFolder.open(root)
    config = _parsed(folder.config, root)
    if identity(config, config.method) != folder.identity:
        raise UserError(
            f"{root} belongs to another configuration than its {'config.toml'} says now; start a new run instead."
        )
    return _play_all(root, _jobs(config), watch)


def world(config: Config, split: Split | None = None) -> World:
    """Return data, split, task, views and batch rule of a configuration; raises `UserError` where they do not fit."""
    return _world(config, split)


def source(config: Config) -> Source:
    """Return the images of a configuration, shrunk and padded as it says and as its network needs."""
    found = load_source(config.data, config.data_dir, cache=config.cache)
    found = shrink(found, config.shrink)
    size = config.image_size
    _, height, width, _ = found.train.images.shape
    if size is None and _network_name(config) == "resnet9":
        size = max(16, -(-max(height, width) // 8) * 8)
    return fit(found, size) if size is not None and (height, width) != (size, size) else found


def scenario(config: Config) -> Scenario:
    """Return the rule of the split."""
    return Scenario(
        setting=config.setting,
        clients=config.clients,
        gamma=config.gamma,
        labels_per_class=config.labels_per_class,
        label_ratio=config.label_ratio,
        min_size=config.min_size,
        seed=config.split_seed,
    )


def split_of(config: Config, data: Source) -> Split:
    """Return the split of a configuration: the saved one it names, or a new one."""
    if config.split is not None:
        split = Split.load(config.split)
        split.check(data)
        return split
    return scenario(config).split(data.train.labels, data.classes, data.name)


def _jobs(config: Config) -> list[Job]:
    jobs = [Job(".", config)]
    for method in config.beside:
        alone = replace(config, method=method, beside=(), options=method_options(config, method))
        jobs.append(Job(f"beside/{method}", replace(alone, reference=config.reference or config.method)))
    return jobs


def _play_all(root: Path, jobs: Sequence[Job], watch: Watch) -> Outcome:
    """Play what is not finished, job by job, and draw the curves of all."""
    if jobs[0].config.threads:
        torch.set_num_threads(jobs[0].config.threads)
    kept = root / jobs[0].folder / SPLIT
    shared = _world(jobs[0].config, Split.load(kept) if kept.exists() else None)
    _check(jobs, shared, watch)
    summaries = [_play(root / job.folder, job, shared, watch) for job in jobs]
    paths = [root / job.folder for job in jobs]
    picture = root / CURVES
    curves([Run.read(path) for path in paths], picture)
    return Outcome(root, summaries, picture, paths)


def _play(path: Path, job: Job, shared: World, watch: Watch) -> Row:
    """Play one job to its end, from its newest checkpoint if it has one."""
    config = job.config
    entry = catalog.entry(config.method)
    with _folder(path, config) as folder:
        done = folder.summary()
        if done is not None:
            return done
        if not (path / SPLIT).exists():
            shared.split.save(path / SPLIT)
        experiment = _experiment(config, shared)
        loaded = folder.load()
        for warning in loaded.warnings if loaded else []:
            watch.say(warning)
        watch.begin(entry.title, config.rounds, loaded.round if loaded else 0)
        played = play(experiment, folder, loaded, watch.round)
        summary = _summary(config, folder, played)
        folder.finish(played["model"], _model_card(config, shared), summary)
    watch.end(summary)
    return summary


@contextmanager
def _folder(path: Path, config: Config) -> Iterator[RunFolder]:
    """Open the folder of a run, or make it."""
    mark = identity(config, config.method)
    if (path / "run.json").exists():
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


def _world(config: Config, split: Split | None) -> World:
    data = source(config)
    if split is None:
        split = split_of(config, data)
    else:
        split.check(data)
    device = _device(config)
    task = Task(
        network=_network(config, data),
        optimizer=_optimizer(config),
        normalize=Normalize(data.mean, data.std),
        statistics=config.statistics,
        labeling=config.labeling,
        rounds=config.rounds,
    )
    flip = data.mirror if config.flip is None else config.flip
    labeled = {"cutout": Labeled(flip=flip), "weak": Weak(flip=flip), "plain": Plain()}[config.labeled_view]
    views = Views(labeled, {"plain": Plain(), "weak": Weak(flip=flip), "strong": Strong(flip=flip)})
    batching = Batching(config.labeled_batch, config.unlabeled_batch, config.epochs, config.epoch, config.steps)
    return World(data, split, _examples(data.train, device), _examples(data.test, device), task, views, batching)


def _check(jobs: Sequence[Job], shared: World, watch: Watch) -> None:
    """Refuse what could only fail later: a cohort larger than the federation, a client without labels."""
    config, split = jobs[0].config, shared.split
    if config.cohort > split.clients:
        raise UserError(f"cohort is {config.cohort}, but the split has {split.clients} clients; choose a smaller one.")
    needing = [job.config.method for job in jobs if not catalog.entry(job.config.method).all_labels]
    counts = np.bincount(split.client[split.labeled & (split.client >= 0)], minlength=split.clients)
    empty = np.flatnonzero(counts == 0)
    if needing and len(empty):
        raise UserError(
            f"client {empty[0]} ({len(empty)} of {split.clients} in all) has no labeled image, but {needing[0]} needs "
            "some at every client; give more labels_per_class or a larger min_size."
        )
    bare = [k for k in range(split.clients) if not len(split.rows(k, False))]
    looking = [m for m in needing if catalog.make(m).works(shared.task)["train"].views]
    if looking and bare:
        raise UserError(
            f"client {bare[0]} ({len(bare)} of {split.clients} in all) has no unlabeled image, but {looking[0]} needs "
            "some at every client; give fewer labels_per_class or a larger min_size."
        )
    few = int((counts < config.labeled_batch).sum())
    if needing and few:
        watch.say(
            f"{few} of {split.clients} clients have fewer labeled images than a batch of {config.labeled_batch}: "
            "their images repeat within a batch."
        )


def _experiment(config: Config, shared: World) -> Experiment:
    entry = catalog.entry(config.method)
    method = catalog.make(config.method, method_options(config, config.method))
    reference = catalog.make(config.reference or config.method).works(shared.task)["train"]
    runtime = Simulation(
        method,
        shared.task,
        Holdings(shared.train, shared.split, entry.all_labels),
        views=shared.views,
        batching=shared.batching,
        budget=Budget(config.budget, reference),
        seed=config.seed,
        cohort=config.cohort,
        executor=_executor(config),
        confident=config.confident,
    )
    return Experiment(
        method, shared.task, runtime, shared.test, config.seed, config.evaluate_every, config.checkpoint_every
    )


def _summary(config: Config, folder: RunFolder, played: Row) -> Row:
    seconds = sum(row.get("seconds", 0.0) for row in _timings(folder.path))
    return {
        "method": config.method,
        "title": catalog.entry(config.method).title,
        "data": config.data,
        "setting": config.setting,
        "seed": config.seed,
        "rounds": config.rounds,
        "accuracy": played["accuracy"],
        "cost": played["cost"],
        "seconds": round(seconds, 1),
        "finished": True,
    }


def _model_card(config: Config, shared: World) -> dict[str, str]:
    """Return what a model file says of itself."""
    network = shared.task.network
    return {
        "classes": json.dumps(shared.source.classes),
        "image": json.dumps(list(shared.train.images.shape[1:])),
        "mean": json.dumps(shared.source.mean),
        "std": json.dumps(shared.source.std),
        "network": json.dumps({"name": _network_name(config), **asdict(network)}),
        "method": config.method,
        "config": text(config),
    }


def _timings(path: Path) -> list[dict[str, Any]]:
    lines = (path / "timings.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _examples(images: Images, device: torch.device) -> Examples:
    pixels = torch.from_numpy(images.images).permute(0, 3, 1, 2).contiguous()
    return Examples(pixels.to(device), torch.from_numpy(images.labels).to(device))


def _network_name(config: Config) -> str:
    if config.network != "auto":
        return config.network
    return "small" if config.data == "digits" else "resnet9"


def _network(config: Config, data: Source) -> Network:
    _, height, width, channels = data.train.images.shape
    make = partial(NETWORKS[_network_name(config)], channels=channels, classes=len(data.classes))
    network = make() if config.width is None else make(width=config.width)
    network.check((channels, height, width))
    return network


def _optimizer(config: Config) -> Optimizer:
    if config.optimizer == "adam":
        return Adam(config.lr, weight_decay=config.weight_decay)
    return SGD(config.lr, config.momentum, config.weight_decay)


def _device(config: Config) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device is 'cuda', but this PyTorch sees no GPU; use device = 'auto' or 'cpu'.")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _executor(config: Config) -> Any:
    if config.executor != "auto":
        return config.executor
    return "vmap" if _device(config).type == "cuda" else "loop"


def _parsed(words: str, root: Path) -> Config:
    """Return the configuration that a run folder holds."""
    import tomllib

    return resolve(tomllib.loads(words), {"run_dir": str(root)}, root / "config.toml")


def _free(config: Config) -> Path:
    """Return the next free runs/<data>-<method>-seed<seed>-<n>."""
    name = Path(config.data).name
    for number in range(1, 10**6):
        path = Path("runs") / f"{name}-{config.method}-seed{config.seed}-{number}"
        if not path.exists():
            return path
    raise UserError("the folder runs/ is full of runs; choose a --run-dir.")
