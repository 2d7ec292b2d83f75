"""A small federation to test methods: random images of 8x8 pixels, clients of unequal size, a tiny network."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from halfmoon.aggregation import Aggregator
from halfmoon.api.types import Method, Task
from halfmoon.core import rng, tree
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import Adam
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import SERVER, Split
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.executors.base import Executor
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.runtime import RoundReport, RuntimeSettings
from halfmoon.engine.sampling import Batching, Views
from halfmoon.engine.simulation import SharedAverages, Simulation
from halfmoon.models import Network, SmallCNN
from halfmoon.storage.state_store import TreeStore

SIZES = ((5, 11), (3, 6), (6, 14), (4, 9))
"""(labeled, unlabeled) rows of each client: unequal, one with fewer labels than a batch of 4."""

CLASSES = 4
NETWORK = SmallCNN(1, CLASSES, 4)
ADAM = Adam(1e-2, eps=1e-3)
"""Adam with a large eps.

A bias before a batch normalization has the gradient zero, of which rounding leaves 1e-17. At the usual eps of 1e-8 Adam
and a proximal term amplify it (each step overshoots by lr * prox / eps) until these biases differ between executors,
although no prediction depends on them.
"""


ExecutorName = Literal["loop", "vmap"]


def make_executor(name: ExecutorName) -> Executor:
    """Make an executor by its name: "loop" trains clients one by one, "vmap" all of a cohort as one group."""
    # The share of padding has no limit, so that clients of any size are in one group.
    return VmapExecutor(max_padding=Fraction(1)) if name == "vmap" else SerialExecutor()


def make_examples(count: int, channels: int = 1, side: int = 8, classes: int = CLASSES, seed: int = 0) -> Examples:
    """Make random images with random labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, channels, side, side), generator=generator, dtype=torch.uint8)
    return Examples(images, torch.randint(0, classes, (count,), generator=generator))


def make_split(sizes: Sequence[tuple[int, int]] = SIZES, seed: int = 0, labels_at: str = "clients") -> Split:
    """Make a small split: the client of each row (image) of a data set, and whether the row is labeled.

    Args:
        sizes: (labeled, unlabeled) rows of each client.
        seed: the seed of the shuffling.
        labels_at: where labels are. "clients": each client has its labeled rows. "some": clients with an odd number have
            none; no client gets these rows. "server": the server has all labeled rows.
    """
    row_counts = [labeled_rows + unlabeled_rows for labeled_rows, unlabeled_rows in sizes]
    client = np.repeat(np.arange(len(sizes)), row_counts).astype(np.int64)
    # The first rows of each client are labeled.
    labeled = np.concatenate([np.arange(rows) < sizes[number][0] for number, rows in enumerate(row_counts)])
    if labels_at == "server":
        client = np.where(labeled, SERVER, client)
    elif labels_at == "some":
        client = np.where(labeled & (client % 2 == 1), -1, client)  # -1: rows that no client has
    # Shuffled, so that a method which relies on the order of rows fails.
    order = np.random.default_rng(seed).permutation(len(client))
    return Split(client[order], labeled[order], clients=len(sizes))


def make_dataset(
    sizes: Sequence[tuple[int, int]] = SIZES,
    all_labels: bool = False,
    labels_at: str = "clients",
    pooled: bool = False,
    **images: Any,
) -> FederatedDataset:
    """Make the images of a small federation, and their distribution to the clients.

    Args:
        sizes: (labeled, unlabeled) images of each client.
        all_labels: clients train on all their images as labeled ones, as supervised upper bounds do.
        labels_at: where labels are: "clients", "some" or "server", as in `make_split`.
        pooled: one client has the images of all, for methods that are not federated.
        **images: options of `make_examples`.
    """
    rows = sum(labeled + unlabeled for labeled, unlabeled in sizes)
    train = make_examples(rows, **images)
    return FederatedDataset(train, make_split(sizes, labels_at=labels_at), all_labels=all_labels, pooled=pooled)


def make_task(network: Network = NETWORK, dtype: torch.dtype = torch.float64, **shared: Any) -> Task:
    """Make a task in double precision with Adam; `shared` are other fields of the task."""
    normalize = Normalize((0.5,) * network.channels, (0.5,) * network.channels, dtype)
    return replace(Task(network, ADAM, normalize), **shared)


def make_simulation(
    method: Method,
    shared: Task,
    federation: FederatedDataset | None = None,
    *,
    views: Views | None = None,
    batching: Batching | None = None,
    budget: Budget | None = None,
    server_batching: Batching | None = None,
    executor: ExecutorName | Executor = "loop",
    store: TreeStore | None = None,
    aggregators: Sequence[Aggregator] = (),
    shared_averages: SharedAverages | None = None,
    **settings: Any,
) -> Simulation:
    """Make a simulation of a small federation, by default of four clients of which three train in each round.

    Args:
        method: the method.
        shared: the task: network, optimizer and settings that all methods share.
        federation: the images and their distribution; None for `make_dataset`.
        views: the augmentations; None for the defaults.
        batching: the batch rule; None for 4 labeled + 4 unlabeled images a step.
        budget: the rule by which different methods have equal cost; None for the steps of the batch rule.
        server_batching: the batch rule of the server; None for that of the clients.
        executor: "loop" trains the clients one after the other, "vmap" all of a cohort as one group; or an executor.
        store: stores the memories of clients; None for a new one.
        aggregators: steps between the uploads and the method.
        shared_averages: averages of other simulations of the same images and split.
        **settings: fields of `RuntimeSettings`.
    """
    training = Training(
        batching=batching or Batching(4, 4),
        budget=budget or Budget(),
        server_batching=server_batching,
        executor=make_executor(executor) if isinstance(executor, str) else executor,
    )
    runtime_settings = RuntimeSettings(**{"cohort": 3, "seed": 3, **settings})
    return Simulation(
        method,
        shared,
        federation or make_dataset(),
        views or Views(),
        training,
        runtime_settings,
        store,
        aggregators,
        shared_averages,
    )


class Snapshot(NamedTuple):
    """The state after a round."""

    server: Tree
    state: Tree  # the trees that the federation stores
    report: RoundReport


def start_server(method: Method, shared: Task, seed: int = 0) -> Tree:
    """Return the server's tree before the first round."""
    model = shared.network.init(rng.generator(seed, "model"))
    return method.start(shared, tree.to(model, dtype=shared.normalize.dtype))


def run_rounds(method: Method, simulation: Simulation, server: Tree, rounds: range) -> list[Snapshot]:
    """Run rounds and return the state after each of them."""
    snapshots: list[Snapshot] = []
    for number in rounds:
        simulation.open(number)
        server = method.round(simulation.task, server, simulation)
        snapshots.append(Snapshot(server, simulation.state(), simulation.close()))
    return snapshots


def trees_equal(first: Tree, second: Tree) -> bool:
    """Check whether two trees have the same names and the same bits."""
    a = tree.flatten(first)
    b = tree.flatten(second)
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def max_difference(first: Tree, second: Tree) -> float:
    """Compute the largest difference between two trees with the same names, relative to max(1, |second|)."""
    a = tree.flatten(first)
    b = tree.flatten(second)
    assert a.keys() == b.keys()
    differences = [float(((a[k] - b[k]).abs() / b[k].abs().clamp_min(1)).max()) for k in a if a[k].numel()]
    return max(differences, default=0.0)
