"""A small federation to try methods in: random images of 8x8 pixels, unequal clients, a tiny network."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch

from halfmoon.aggregation import Aggregator
from halfmoon.api.types import Method, Task
from halfmoon.core import rng, tree
from halfmoon.core.optim import Adam
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import Executor, FederatedDataset, Training
from halfmoon.engine.loop import RoundReport
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Batching, Views
from halfmoon.engine.simulation import Simulation
from halfmoon.models import Network, SmallCNN
from halfmoon.models.network import Normalize
from halfmoon.storage.state_store import TreeStore

SIZES = ((5, 11), (3, 6), (6, 14), (4, 9))
"""(labeled, unlabeled) rows of each client: unequal, one with fewer labels than a batch of 4."""

CLASSES = 4
NETWORK = SmallCNN(1, CLASSES, 4)
ADAM = Adam(1e-2, eps=1e-3)
"""With a large eps: a bias in front of a batch normalization has the gradient zero, of which rounding leaves 1e-17. At
the usual eps, 1e-8, Adam and a proximal term blow that up (each step overshoots by lr * prox / eps) until such biases
differ between executors, though nothing that the network says depends on them."""


def examples(count: int, channels: int = 1, side: int = 8, classes: int = CLASSES, seed: int = 0) -> Examples:
    """Return random images with random labels."""
    g = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, channels, side, side), generator=g, dtype=torch.uint8)
    return Examples(images, torch.randint(0, classes, (count,), generator=g))


def split(sizes: Sequence[tuple[int, int]] = SIZES, seed: int = 0, place: str = "clients") -> Split:
    """Return a split with these (labeled, unlabeled) counts; the rows of a client stand anywhere.

    With the labels at "some" clients, the even ones keep theirs, the other labeled rows are nobody's; at the "server",
    it has them all.
    """
    client = np.concatenate([np.full(a + b, k) for k, (a, b) in enumerate(sizes)]).astype(np.int64)
    labeled = np.concatenate([np.arange(a + b) < a for a, b in sizes])
    if place == "server":
        client = np.where(labeled, SERVER, client)
    elif place == "some":
        client = np.where(labeled & (client % 2 == 1), -1, client)
    order = np.random.default_rng(seed).permutation(len(client))
    return Split(client[order], labeled[order], len(sizes))


def dataset(
    sizes: Sequence[tuple[int, int]] = SIZES,
    all_labels: bool = False,
    place: str = "clients",
    pooled: bool = False,
    **images: Any,
) -> FederatedDataset:
    """Return who holds what."""
    train = examples(sum(a + b for a, b in sizes), **images)
    return FederatedDataset(train, split(sizes, place=place), all_labels, pooled)


def task(network: Network = NETWORK, dtype: torch.dtype = torch.float64, **shared: Any) -> Task:
    """Return a task in double precision with Adam."""
    normalize = Normalize((0.5,) * network.channels, (0.5,) * network.channels, dtype)
    return replace(Task(network, ADAM, normalize), **shared)


def simulate(
    method: Method,
    shared: Task,
    federation: FederatedDataset | None = None,
    *,
    views: Views | None = None,
    batching: Batching | None = None,
    budget: Budget | None = None,
    server_batching: Batching | None = None,
    executor: Executor = "loop",
    store: TreeStore | None = None,
    aggregators: Sequence[Aggregator] = (),
    **settings: Any,
) -> Simulation:
    """Return a federation of the four clients, three a round, in batches of 4 + 4; lifted, all are one program."""
    training = Training(
        batching or Batching(4, 4), budget or Budget(), server_batching, executor, max_padding=Fraction(1)
    )
    setup = RuntimeSettings(**{"cohort": 3, "seed": 3, **settings})
    return Simulation(method, shared, federation or dataset(), views or Views(), training, setup, store, aggregators)


class Snapshot(NamedTuple):
    """What there is after a round."""

    server: Tree
    state: Tree
    report: RoundReport


def begin(method: Method, shared: Task, seed: int = 0) -> Tree:
    """Return the server's tree before the first round."""
    return method.start(
        shared, tree.to(shared.network.init(rng.generator(seed, "model")), dtype=shared.normalize.dtype)
    )


def play(method: Method, simulation: Simulation, server: Tree, rounds: range) -> list[Snapshot]:
    """Play rounds and keep what each leaves."""
    results = []
    for number in rounds:
        simulation.open(number)
        server = method.round(simulation.task, server, simulation)
        results.append(Snapshot(server, simulation.state(), simulation.close()))
    return results


def same(ours: Tree, theirs: Tree) -> bool:
    """Say whether two trees hold the same bits under the same names."""
    a, b = tree.flatten(ours), tree.flatten(theirs)
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def furthest(ours: Tree, theirs: Tree) -> float:
    """Return the largest difference between two trees of the same names, in units of the larger of 1 and the leaf."""
    a, b = tree.flatten(ours), tree.flatten(theirs)
    assert a.keys() == b.keys()
    gaps = [float(((a[k] - b[k]).abs() / b[k].abs().clamp_min(1)).max()) for k in a if a[k].numel()]
    return max(gaps, default=0.0)
