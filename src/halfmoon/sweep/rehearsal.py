"""What a method asks of whom in a round, found out by playing it on a tiny federation; and what it costs beside images.

A method is ordinary Python: whom it asks, and for which work, stands nowhere but in its `round`. So the real method
plays a few rounds with a few clients of the embedded digits, on a tiny network, before a federation that takes notes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfmoon import catalog, tree
from halfmoon.budget import Budget
from halfmoon.config import Config, method_options
from halfmoon.data.split import SERVER, Split
from halfmoon.experiment import initial_model
from halfmoon.pieces import World, device, executor, world
from halfmoon.sim import Holdings, Simulation
from halfmoon.sweep.timing import Signature, Speed, computing, now
from halfmoon.tree import Tree
from halfmoon.types import Method, Shelf, Work

WIDTH, ROWS, STEPS = 8, 2, 5
"""Of the tiny network; labeled, and unlabeled, images of a step; steps of a long visit."""
ROUNDS = (1, 1, STEPS)
"""Steps of a visit in each round that is played: the first one warms up."""


@dataclass(frozen=True)
class Asked:
    """A work that a method asks for in a round, and of whom.

    `share` is how many visits there are for each client of the cohort, or of all that are registered where `every` is
    true, or in all where it is the `server` that works. `size` is the model sent, as a share of the whole one.
    """

    work: str
    share: float
    every: bool
    server: bool
    size: float


@dataclass(frozen=True)
class Rehearsal:
    """What a method asks for in its first round, and in the mean of later ones; and seconds that no image accounts for.

    `visit` and `step` hold seconds of a visit and of a step by work, `rest` is what a round takes beside its visits.
    """

    first: tuple[Asked, ...]
    later: tuple[Asked, ...]
    visit: Mapping[str, float]
    step: Mapping[str, float]
    rest: float

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Rehearsal:
        """Return one from its fields as JSON keeps them."""
        first, later = (tuple(Asked(**each) for each in kept[name]) for name in ("first", "later"))
        visit, step = ({str(k): float(v) for k, v in kept[name].items()} for name in ("visit", "step"))
        return cls(first, later, visit, step, float(kept["rest"]))


@dataclass(frozen=True)
class Trip:
    """One question: the work, who was asked, the model's size, and the seconds until the answers were there."""

    work: str
    clients: tuple[int, ...]
    every: bool
    size: float
    seconds: float


class Ledger:
    """A `halfmoon.types.Federation` that passes everything on to a simulation and keeps the trips of the round."""

    def __init__(self, simulation: Simulation, whole: int) -> None:
        """Take notes; `whole` counts the parameters of the whole model."""
        self._simulation, self._whole = simulation, whole
        self._device = simulation.holdings.train.labels.device
        self.shelf: Shelf = simulation.shelf
        self.clients, self.trips = simulation.clients, list[Trip]()
        self.cohort = self.answered = torch.zeros(0, dtype=torch.int64)

    @property
    def labeled(self) -> int:
        """Return how many labeled images the server has."""
        return self._simulation.labeled

    def open(self, round: int) -> None:
        """Begin a round."""
        self._simulation.open(round)
        self.trips = []
        self.cohort, self.answered = self._simulation.cohort, self._simulation.answered

    def ask(self, work: str, down: Tree, each: Tree | None = None, to: Tensor | None = None) -> Tree:
        """Pass a question on, and note it."""
        asked = self.cohort if to is None else to.cpu()
        every = not bool(torch.isin(asked, self.cohort).all())
        up = self._noted(work, asked.tolist(), every, down, lambda: self._simulation.ask(work, down, each, to))
        self.cohort, self.answered = self._simulation.cohort, self._simulation.answered
        return up

    def ask_server(self, work: str, down: Tree) -> Tree:
        """Pass a question to the server on, and note it."""
        return self._noted(work, [SERVER], False, down, lambda: self._simulation.ask_server(work, down))

    def _noted(self, work: str, clients: Sequence[int], every: bool, down: Tree, ask: Callable[[], Tree]) -> Tree:
        sent = down.get("params")
        size = min(1.0, tree.size(sent) / self._whole) if isinstance(sent, dict) else 1.0
        began = now(self._device)
        up = ask()
        self.trips.append(Trip(work, tuple(clients), every, size, now(self._device) - began))
        return up


def tiny(config: Config) -> Config:
    """Return a configuration of digits on a tiny network that asks its clients for what `config` asks.

    It keeps nothing that does not matter to that: configurations that ask alike are equal here.
    """
    many = executor(config) == "vmap"  # there the clients of a cohort are one program
    cohort = min(config.cohort, 8 if many else 2)
    return Config(
        method=config.method,
        options={config.method: method_options(config, config.method)},
        data="digits",
        clients=cohort if config.cohort == config.clients else cohort + 2,
        cohort=cohort,
        rounds=len(ROUNDS),
        reuse_labeled=config.reuse_labeled,
        labeled_batch=ROWS,
        unlabeled_batch=ROWS,
        steps=1,
        statistics=config.statistics,
        labeling=config.labeling,
        network="small",
        width=WIDTH,
        norm=config.norm,
        optimizer=config.optimizer,
        momentum=config.momentum,
        strong_view=config.strong_view,
        shared_views=config.shared_views,
        labeled_view=config.labeled_view,
        device=config.device,
        executor=config.executor,
    )


def together(config: Config) -> int:
    """Return how many clients train as one program."""
    return config.cohort if executor(config) == "vmap" and not catalog.entry(config.method).pooled else 1


def rehearse(config: Config, place: str, speed: Callable[[Signature], Speed]) -> Rehearsal:
    """Play the method of `config`, which is `tiny`, with labels at `place`, and return what it asked and took.

    From the times of its visits, what its images through the tiny network cost at their `speed` is taken off. All of it
    is done by one thread: there is nothing here that is worth waking a second one.
    """
    entry = catalog.entry(config.method)
    method = catalog.make(config.method, method_options(config, config.method))
    with computing(1):
        shared = world(config, _split(config.clients, place))
        signature = Signature(
            *("small", WIDTH, config.norm), (1, 8, 8), together(config), config.optimizer,
            device(config).type, 1,
        )  # fmt: skip
        held = Holdings(shared.train, shared.split, entry.all_labels, entry.pooled, config.reuse_labeled)
        simulation = Simulation(
            method, shared.task, held, views=shared.views, batching=shared.batching, budget=Budget(), seed=0,
            cohort=config.cohort, executor=executor(config),
        )  # fmt: skip
        rounds, rests = _play(method, shared, simulation)
    visit, step = _overheads(rounds, simulation, speed(signature))
    first, later = _summed(rounds[:1], config), _summed(rounds[1:], config)
    return Rehearsal(first, later, visit, step, min(rests[1:]))


def _play(method: Method, shared: World, simulation: Simulation) -> tuple[list[list[Trip]], list[float]]:
    """Return the trips of every round, and the seconds that it took beside them."""
    place = shared.train.labels.device
    model = initial_model(shared.task, 0, place)
    ledger = Ledger(simulation, tree.size(model["params"]))
    server = tree.to(method.start(shared.task, model), place)
    rounds, rests = list[list[Trip]](), list[float]()
    for number, steps in enumerate(ROUNDS):
        simulation.ground.batching = simulation.ground.serving = replace(shared.batching, steps=steps)
        began = now(place)
        ledger.open(number)
        server = method.round(shared.task.at(number), server, ledger)
        simulation.close()
        rests.append(now(place) - began - sum(trip.seconds for trip in ledger.trips))
        rounds.append(ledger.trips)
    return rounds, rests


def _overheads(
    rounds: Sequence[Sequence[Trip]], simulation: Simulation, speed: Speed
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of a visit, and of each of its steps, that its images do not account for, by work."""
    taken: dict[str, dict[int, float]] = {}
    for steps, trips in list(zip(ROUNDS, rounds, strict=True))[1:]:
        for trip in trips:
            each = taken.setdefault(trip.work, {})
            each[steps] = min(each.get(steps, float("inf")), trip.seconds / max(1, len(trip.clients)))
    visit, step = dict[str, float](), dict[str, float]()
    for name, times in taken.items():
        work: Work = simulation.works[name]
        passes = work.passes(ROWS, ROWS if work.views else 0)
        one = speed.training(passes.forward, passes.backward, 2 * ROWS) + speed.update
        short, long = times.get(1, 0.0), times.get(STEPS, 0.0)
        slope = max(0.0, long - short) / (STEPS - 1) if work.trains else 0.0
        step[name] = max(0.0, slope - one) if work.trains else 0.0
        visit[name] = max(0.0, short - slope)
    return visit, step


def _summed(rounds: Sequence[Sequence[Trip]], config: Config) -> tuple[Asked, ...]:
    """Return the mean trips of a round by work and kind; a work that goes beyond the cohort is asked of all."""
    trips = [trip for each in rounds for trip in each]
    wide = {trip.work for trip in trips if trip.every}
    sums: dict[tuple[str, bool, bool, float], int] = {}
    for trip in trips:
        server = trip.clients == (SERVER,)
        key = trip.work, trip.work in wide and not server, server, trip.size
        sums[key] = sums.get(key, 0) + len(trip.clients)
    pooled = catalog.entry(config.method).pooled
    asked = []
    for (work, every, server, size), count in sums.items():
        of = 1 if server or pooled else config.clients if every else config.cohort
        asked.append(Asked(work, count / of / len(rounds), every, server, size))
    return tuple(asked)


def _split(clients: int, place: str) -> Split:
    """Return a split of digits of which clients and server hold next to nothing, with labels at `place`."""
    client, labeled = np.full(1437, -1, np.int64), np.zeros(1437, bool)
    rows = 3 * ROWS
    for k in range(clients):
        client[k * rows : (k + 1) * rows] = k
        labeled[k * rows : k * rows + ROWS] = True
        if place == "server" or (place == "some" and k % 2):
            client[k * rows : k * rows + ROWS] = SERVER if place == "server" and not k else -1
    return Split(client, labeled, clients)
