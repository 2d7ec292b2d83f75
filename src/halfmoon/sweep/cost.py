"""What a recipe costs on this machine: the images that its runs send through their networks, times measured speeds.

Images are counted as a run counts them, by the method's own works, the batch rule and the budget, for every client of
the split that the configuration makes; only the true labels are not known before a data set is loaded, so that its
classes are taken as equally large. Rows that a method keeps or leaves by their confidence count as kept: SemiFL and
its kin may take less. Loading data, the first split and checkpoints are not counted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch

from halfmoon import catalog
from halfmoon.augment import Normalize
from halfmoon.budget import Holding, natural
from halfmoon.config import Config, identity, method_options
from halfmoon.data import SERVER, Images, Source, Split, subset
from halfmoon.data import load as load_source
from halfmoon.data.draw import Amount
from halfmoon.data.known import KNOWN
from halfmoon.errors import UserError
from halfmoon.evaluate import Examples
from halfmoon.models import SmallCNN
from halfmoon.optim import SGD
from halfmoon.pieces import batch_rules, budget, device, network_name, padded, split_of, threads, world
from halfmoon.sim import Holdings
from halfmoon.sim.simulation import LOOKED_AT
from halfmoon.sweep.grid import Cell
from halfmoon.sweep.rehearsal import Asked, Rehearsal, rehearse, tiny, together
from halfmoon.sweep.timing import Signature, Timings, view_seconds
from halfmoon.types import Task, Work


@dataclass(frozen=True)
class Flow:
    """What all visits of a run for one work come to; `size` is the model's share of the whole one.

    `rows` are the mean images of a step, `forward` and `backward` images of all steps, `swept` those outside of steps,
    and `views` counts images by the name of the view that is made of them.
    """

    work: str
    visits: float
    steps: float
    rows: float
    forward: float
    backward: float
    swept: float
    views: Mapping[str, float]
    size: float
    server: bool


@dataclass(frozen=True)
class Estimate:
    """Seconds of one run by what they are spent on."""

    network: float
    views: float
    evaluation: float
    beside: float  # what no image accounts for: a step's and a visit's own bookkeeping

    @property
    def seconds(self) -> float:
        """Return the sum."""
        return sum(astuple(self))


@dataclass(frozen=True)
class Price:
    """What the runs of some cells take: how many differ, and the seconds of each one; `reason` where it is unknown."""

    runs: int
    seconds: tuple[float, ...]
    reason: str | None = None

    @property
    def total(self) -> float | None:
        """Return the seconds of all runs one after another; None where not all are known."""
        return None if self.reason or len(self.seconds) < self.runs else sum(self.seconds)

    @property
    def mean(self) -> float | None:
        """Return the mean seconds of a run; None where none is known."""
        return fmean(self.seconds) if self.seconds else None


class Facts(NamedTuple):
    """What is known of a configuration's data: labels (N,) of the training images, and sizes."""

    labels: np.ndarray
    classes: tuple[str, ...]
    test: int
    image: tuple[int, int, int]  # (C, H, W) as the network sees it


class Held(NamedTuple):
    """How many rows the server has, and how many clients train on so many and were given so many.

    In a stream a client counts in every stage.
    """

    server: Holding
    clients: Counter[tuple[Holding, Holding]]
    pooled: bool


class Estimator:
    """Estimates runs on this machine; what has been worked out once serves all recipes."""

    def __init__(self, timings: Timings) -> None:
        """Take the speeds from `timings`, which measures what it does not know."""
        self.timings = timings
        self._facts: dict[str, Facts] = {}
        self._splits: dict[str, Split] = {}
        self._held: dict[str, Held] = {}
        self._works: dict[str, dict[tuple[Asked, Work], float]] = {}
        self._known: dict[str, Estimate] = {}

    def price(self, cells: Sequence[Cell], seeds: int = 1, trains: bool = True) -> Price:
        """Return what cells take with so many seeds each, equal runs counted once; without training, nothing.

        All seeds of a cell take what its first one does.
        """
        runs: dict[str, float | None] = {}
        reason = None
        for cell in cells:
            config = next(iter(cell.configs.values()))
            mark = identity(config, config.method)
            if mark in runs:
                continue
            runs[mark] = None
            try:
                runs[mark] = self.run(config).seconds if trains else 0.0
            except UserError as error:
                reason = reason or f"{cell.words}: {error}"
        known = [each for each in runs.values() if each is not None]
        return Price(seeds * len(runs), tuple(known * seeds), reason)

    def run(self, config: Config) -> Estimate:
        """Return what one run takes; raise UserError where its data are not known or cannot be split so."""
        alike = repr(replace(config, seed=0, split_seed=0))
        if alike not in self._known:
            self._known[alike] = self._run(config)
        return self._known[alike]

    def flows(self, config: Config) -> tuple[list[Flow], float]:
        """Return what a run sends through its network in visits, and the images looked at to evaluate it."""
        facts, held = self._fact(config), self._holds(config)
        flows = [_flow(config, held, asked, work, visits) for (asked, work), visits in self._weights(config).items()]
        evaluations = -(-config.rounds // config.evaluate_every)
        clients = sum(held.clients.values())
        unlabeled = sum(own.unlabeled * count for (own, _), count in held.clients.items()) / clients
        looked = facts.test + min(LOOKED_AT, (1 if held.pooled else config.cohort) * unlabeled)
        return flows, evaluations * looked

    def _run(self, config: Config) -> Estimate:
        flows, looked = self.flows(config)
        facts, kept, place = self._fact(config), self._rehearsal(config), device(config)
        made = self.timings.kept(
            "views",
            (config.labeled_view, config.strong_view, facts.image, place.type),
            lambda kept: ViewSeconds({str(k): float(v) for k, v in kept["seconds"].items()}),
            lambda: ViewSeconds(view_seconds(world(tiny(config)).views, facts.image, place)),
        ).seconds
        network = views = beside = 0.0
        for flow in flows:
            speed = self.timings.speed(self._signature(config, facts, flow))
            one = speed.training(flow.forward, flow.backward, max(1.0, flow.rows)) + flow.swept * speed.look
            network += flow.size * (one + flow.steps * speed.update)
            views += sum(count * made[name] for name, count in flow.views.items())
            beside += flow.visits * kept.visit.get(flow.work, 0.0) + flow.steps * kept.step.get(flow.work, 0.0)
        looking = self.timings.speed(self._signature(config, facts, max(flows, key=lambda flow: flow.forward)))
        return Estimate(network, views, looked * looking.look, beside + config.rounds * kept.rest)

    def _signature(self, config: Config, facts: Facts, flow: Flow) -> Signature:
        alone = 1 if flow.server else together(config)
        return Signature(
            network_name(config), config.width, config.norm, facts.image, alone, config.optimizer,
            device(config).type, threads(config),
        )  # fmt: skip

    def _fact(self, config: Config) -> Facts:
        mark = repr((config.data, config.data_share, config.image_size, config.shrink, network_name(config)))
        if mark not in self._facts:
            self._facts[mark] = facts_of(config)
        return self._facts[mark]

    def _holds(self, config: Config) -> Held:
        """Return who holds how many rows."""
        names = ("clients", "setting", "gamma", *("labels_per_class", "label_ratio", "labels", "labels_at"))
        names += ("labeled_clients", "classes_per_client", "stages", "unlabeled_share", "min_size", "split")
        said, entry, facts = config.__dict__, catalog.entry(config.method), self._fact(config)
        split = repr([config.data, config.data_share, *(said[name] for name in names)])
        if split not in self._splits:
            self._splits[split] = split_of(config, _ghost(config.data, facts.labels, facts.classes, facts.image[0]))
        mark = repr([split, entry.all_labels, entry.pooled, config.reuse_labeled])
        if mark not in self._held:
            self._held[mark] = _held(self._splits[split], entry, config.reuse_labeled)
        return self._held[mark]

    def _weights(self, config: Config) -> dict[tuple[Asked, Work], float]:
        """Return `weights` of a configuration, worked out once for those that differ in nothing that matters to it."""
        mark = repr([tiny(config), *(config.clients, config.cohort, config.rounds, config.silent, config.labels_at)])
        if mark not in self._works:
            self._works[mark] = weights(config, self._rehearsal(config))
        return self._works[mark]

    def _rehearsal(self, config: Config) -> Rehearsal:
        small = tiny(config)
        return self.timings.kept(
            "rehearsal",
            (repr(small), config.labels_at),
            Rehearsal.of,
            lambda: rehearse(small, config.labels_at, self.timings.speed),
        )


@dataclass(frozen=True)
class ViewSeconds:
    """Seconds that each view of an image takes, by name."""

    seconds: Mapping[str, float]


def facts_of(config: Config) -> Facts:
    """Return the sizes of a configuration's data, without loading any but the embedded digits.

    Raise UserError where they are not known.
    """
    known = KNOWN.get(config.data)
    if known is not None:
        height, width, channels = known.shape
        labels, classes, test = np.arange(known.train) % len(known.classes), known.classes, known.test
    elif config.data == "digits":
        source = load_source("digits")
        _, height, width, channels = source.train.images.shape
        labels, classes, test = source.train.labels, source.classes, len(source.test)
    else:
        raise UserError(
            f"the sizes of {config.data} are known only when it is loaded, so its cost cannot be estimated before."
        )
    kept = subset(_ghost(config.data, labels, classes, channels), config.data_share)
    return Facts(kept.train.labels, classes, test, seen(config, (height, width, channels)))


def seen(config: Config, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return (C, H, W) of images of `shape` (H, W, C) as the network gets them: `halfmoon.pieces.source` in numbers.

    Raise UserError where they cannot be shrunk so.
    """
    height, width, channels = shape
    if height % config.shrink or width % config.shrink:
        raise UserError(f"{config.data}: {config.shrink} does not divide images of {width}x{height}; choose another.")
    height, width = height // config.shrink, width // config.shrink
    size = padded(config, height, width)
    return (channels, height, width) if size is None else (channels, size, size)


def weights(config: Config, kept: Rehearsal) -> dict[tuple[Asked, Work], float]:
    """Return how many visits a run pays for each thing asked and for each work that it may be, as works differ."""
    method = catalog.make(config.method, method_options(config, config.method))
    task = _task(config)
    found: defaultdict[tuple[Asked, Work], float] = defaultdict(float)
    for number in range(config.rounds):
        works = method.works(task.at(number))
        for asked in kept.later if number else kept.first:
            of = config.clients if asked.every else config.cohort
            if asked.server or catalog.entry(config.method).pooled:
                of = 1
            answering = 1 if asked.server else 1 - config.silent
            found[asked, replace(works[asked.work], task=task)] += asked.share * of * answering
    return dict(found)


def _flow(config: Config, held: Held, asked: Asked, work: Work, visits: float) -> Flow:
    """Return what so many visits come to, as the mean over clients, or over the server alone, sends through."""
    of = _visits(config, held, work, asked.server)
    total = sum(of.values())
    steps = forward = backward = swept = rows = 0.0
    views: defaultdict[str, float] = defaultdict(float)
    for (amount, own), count in of.items():
        share = visits * count / total
        passes = work.passes(amount.labeled, amount.unlabeled)
        steps += share * amount.steps
        rows += share * amount.steps * (amount.labeled + amount.unlabeled)
        forward += share * amount.steps * passes.forward
        backward += share * amount.steps * passes.backward
        swept += share * work.swept(own.labeled, own.unlabeled)
        views["labeled"] += share * amount.steps * amount.labeled
        for name in work.labeled_views:
            views[name.rstrip("0123456789")] += share * amount.steps * amount.labeled
        for name in (*work.views, *work.others):
            views[name.rstrip("0123456789")] += share * amount.steps * amount.unlabeled
        for name in work.sweep:
            views[name.rstrip("0123456789")] += share * own.unlabeled
    return Flow(
        asked.work, visits, steps, rows / max(steps, 1.0), forward, backward, swept, views, asked.size, asked.server
    )


def _visits(config: Config, held: Held, work: Work, server: bool) -> Counter[tuple[Amount, Holding]]:
    """Return the amounts of a visit with what is held there: of the server, or of all clients in all stages."""
    batching, serving = batch_rules(config)
    if server:
        return Counter([(natural(serving, work, held.server), held.server)])
    rule = budget(config, _task(config))
    found: Counter[tuple[Amount, Holding]] = Counter()
    for (own, given), count in held.clients.items():
        amount = rule.amount(batching, work, own, given)
        found[amount if own.unlabeled or not work.views else amount._replace(steps=0), own] += count
    return found


def _held(split: Split, entry: catalog.Entry, reuse_labeled: bool) -> Held:
    """Return how many rows server and clients have."""
    nothing = Examples(torch.zeros(0, 1, 1, 1, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    holdings = Holdings(nothing, split, entry.all_labels, entry.pooled, reuse_labeled)
    clients = Counter(
        (holdings.own(k, stage), holdings.given(k, stage))
        for stage in range(split.stages)
        for k in range(holdings.clients)
    )
    return Held(Holding(0, 0) if entry.pooled else holdings.own(SERVER), clients, entry.pooled)


def _task(config: Config) -> Task:
    """Return what decides how many images a work sends through: the rules for batch statistics, and the rounds."""
    network = SmallCNN(1, 10, norm=config.norm)
    return Task(network, SGD(), Normalize((0.5,), (0.5,)), config.statistics, config.labeling, config.rounds)


def _ghost(name: str, labels: np.ndarray, classes: Sequence[str], channels: int) -> Source:
    """Return a source with these labels whose images are of one pixel and take no memory."""
    images = np.broadcast_to(np.zeros((1, 1, 1, channels), np.uint8), (len(labels), 1, 1, channels))
    some = [0.5] * channels
    return Source(
        name, Images(images, labels), Images(images[:1], labels[:1]), tuple(classes), True, tuple(some), tuple(some)
    )


def words_of(machine: Mapping[str, Any], config: Config | None = None) -> str:
    """Return what computes in words: "GPU NAME", or "N cores (NAME)"."""
    if machine["gpu"] is not None and (config is None or device(config).type == "cuda"):
        return f"GPU {machine['gpu']}"
    return f"{machine['cores']} core{'s' * (machine['cores'] > 1)} ({machine['cpu']})"
