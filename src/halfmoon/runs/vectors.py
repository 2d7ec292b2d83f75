"""Federated training of a linear classifier on vectors, in memory and without a run folder.

Clients send sums (the heads of `halfmoon.methods.analytic`) or train the classifier by steps (`fedavg`). All see vectors
that are standardized by the mean and spread of all clients, which are sums, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from halfmoon.api.types import Method, Task
from halfmoon.config.option_types import convert_value
from halfmoon.core.errors import UserError, suggest
from halfmoon.core.optim import SGD
from halfmoon.core.ranges import POSITIVE
from halfmoon.core.tree import Tree
from halfmoon.data.partition.split import Split
from halfmoon.data.views import Plain
from halfmoon.engine.budget import Budget
from halfmoon.engine.evaluation import Examples
from halfmoon.engine.local_clients import FederatedDataset, Training
from halfmoon.engine.loop import initial_model
from halfmoon.engine.runtime import RuntimeSettings
from halfmoon.engine.sampling import Batching, Views
from halfmoon.engine.simulation import Simulation
from halfmoon.methods import registry
from halfmoon.methods.analytic import NO_SOLUTION, MixtureHead, RidgeHead
from halfmoon.methods.standardization import Standardization
from halfmoon.models.vectors import LinearClassifier, Standardize

STEP_OPTIONS = {"lr": 1.0, "labeled_batch": 10, "epochs": 1}
"""Options of methods that train by steps, with their defaults.

The mean squared norm of a standardized vector is 1, so that the loss has a curvature of 1/2 at most, and the learning
rate 1 fits any data."""

STEP_ROUNDS = 50
"""Default number of rounds of methods that train by steps."""


@dataclass(frozen=True, eq=False)
class LinearModel:
    """A linear classifier of standardized vectors.

    Attributes:
        center: (F,) float64, the mean of the training vectors.
        scale: (F,) float64, the factor of each coordinate.
        weight: (K, F) float64.
        bias: (K,) float64.
    """

    center: np.ndarray
    scale: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    def logits(self, vectors: np.ndarray) -> np.ndarray:
        """Compute the logits (n, K) of vectors (n, F)."""
        return ((vectors - self.center) * self.scale) @ self.weight.T + self.bias


@dataclass(frozen=True)
class VectorTraining:
    """A method with the length of its training.

    Attributes:
        method: the method.
        rounds: number of rounds.
        lr: learning rate of steps.
        batching: batch rule of steps.
    """

    method: Method
    rounds: int
    lr: float
    batching: Batching

    @property
    def is_solved(self) -> bool:
        """True if a head is solved from sums, False if the classifier is trained by steps."""
        return isinstance(self.method, RidgeHead)


def build_training(name: str, options: Mapping[str, Any], rounds: int | None) -> VectorTraining:
    """Build a method that trains a linear classifier on vectors, with the length of its training, from its options.

    Args:
        name: a method of the catalog that needs no views of images, such as ridge-head, mixture-head or fedavg.
        options: the method's options and, for a method that trains by steps, those in `STEP_OPTIONS`.
        rounds: number of rounds of a method that trains by steps; None: `STEP_ROUNDS`.

    Raises:
        UserError: the method cannot run on vectors, or an option is unknown or has no effect.
    """
    entry = registry.entry(name)
    if entry.pooled or entry.all_labels:
        raise UserError(
            f"{name} is a baseline of comparisons that ignores clients or hidden labels: choose ridge-head, mixture-head "
            "or fedavg."
        )
    is_solved = isinstance(entry.method, RidgeHead)
    allowed = {*registry.options(name), *({} if is_solved else STEP_OPTIONS)}
    for option in sorted(set(options) - allowed):
        hint = suggest(option, allowed) if allowed else "leave it out."
        raise UserError(f"{name} on vectors has no option {option!r}: {hint}")
    if rounds is not None and is_solved:
        raise UserError(
            f"rounds is {rounds}, but {name} is solved from sums and not trained by steps: leave rounds out"
            + (", or set em_rounds in options." if isinstance(entry.method, MixtureHead) else ".")
        )
    if rounds is not None and rounds < 1:
        raise UserError(f"rounds is {rounds}: it must be at least 1.")
    types = {option: declared.type for option, declared in registry.options(name).items()}
    types |= {option: type(default) for option, default in STEP_OPTIONS.items()}
    values: dict[str, Any] = {}
    for option, value in options.items():
        plain = value.item() if isinstance(value, np.generic) else value
        values[option] = convert_value(f"{option} in options", types[option], plain)
    # The options of training by steps are not those of the method: they are taken out of `values`.
    steps = {option: values.pop(option, default) for option, default in STEP_OPTIONS.items()}
    POSITIVE.check("lr", steps["lr"])
    method = registry.make(name, values)
    training = VectorTraining(
        method,
        rounds=STEP_ROUNDS if rounds is None else rounds,
        lr=steps["lr"],
        batching=Batching(labeled=steps["labeled_batch"], epochs=steps["epochs"]),
    )
    # A solved head needs one round, and another one for each step of expectation-maximization (EM).
    if isinstance(method, RidgeHead):
        return replace(training, rounds=1 + getattr(method, "em_rounds", 0))
    _refuse_views(name, training)
    return training


def train(training: VectorTraining, vectors: np.ndarray, labels: np.ndarray, split: Split, seed: int) -> LinearModel:
    """Train a linear classifier by a federated method on feature vectors, standardized by statistics of all clients.

    The head is either solved in closed form from sums of the clients (`training.is_solved`), or trained by steps.

    Args:
        training: the method and its number of rounds.
        vectors: float64 (N, F).
        labels: int64 (N,), from 0; -1 for an unlabeled vector.
        split: the client of each vector, and which vectors are labeled.
        seed: the seed of batches.

    Raises:
        UserError: no vector is labeled, or the sums have no solution.
        Diverged: a loss is not finite.
    """
    # Vectors are passed as the cached features of images, which they replace in all methods.
    # Cached features have the shape of images with one row and one column. They are only read, but torch warns about arrays
    # that are not writable, such as a memory map.
    writable = vectors if vectors.flags.writeable else vectors.copy()
    examples = Examples(torch.from_numpy(writable)[:, None, None], torch.from_numpy(labels))
    features = vectors.shape[1]
    classes = int(labels.max(initial=0)) + 1
    identity = Standardize(
        center=torch.zeros(features, dtype=torch.float64), scale=torch.ones(features, dtype=torch.float64)
    )
    # A centered classifier has the mean of the features among its parameters.
    task = _make_task(training, features, classes, identity, centered=True)
    # One round computes the mean of each feature over all clients ("center"), and the inverse of its standard deviation
    # ("scale"), which is also divided by the root of the number of features.
    statistics = _run(Standardization(), task, examples, split, training.batching, seed, rounds=1)["head"]
    standardize = Standardize(center=statistics["center"], scale=statistics["scale"])
    task = _make_task(training, features, classes, standardize, centered=training.is_solved)
    try:
        server = _run(training.method, task, examples, split, training.batching, seed, training.rounds)
    except UserError as error:
        if str(error) != NO_SOLUTION:
            raise
        raise UserError(
            "the head cannot be solved: labeled rows do not determine it, or values are too large; set strength in options "
            "above 0, or scale the features."
        ) from error
    head = training.method.solution(task, server)["params"]["head"]
    center = statistics["center"]
    if training.is_solved:
        # A head that is solved in closed form subtracts its own center from (x - center) * scale. Both are one center:
        # (x - center) * scale - own = (x - (center + own / scale)) * scale.
        center = center + head["center"] / statistics["scale"]
    return LinearModel(center.numpy(), statistics["scale"].numpy(), head["weight"].numpy(), head["bias"].numpy())


def _make_task(training: VectorTraining, features: int, classes: int, standardize: Standardize, centered: bool) -> Task:
    network = LinearClassifier(classes=classes, norm="none", features=features, centered=centered)
    return Task(network, SGD(lr=training.lr), standardize, rounds=training.rounds)


def _run(
    method: Method, task: Task, examples: Examples, split: Split, batching: Batching, seed: int, rounds: int
) -> Tree:
    """Run a method for some rounds with all clients in each.

    Args:
        method: the method.
        task: its network, optimizer and normalization.
        examples: the vectors and labels of all clients.
        split: the client of each vector, and which vectors are labeled.
        batching: batch sizes and epochs.
        seed: the seed of batches.
        rounds: number of rounds.

    Returns:
        The server's tensors after the last round.
    """
    simulation = Simulation(
        method=method,
        task=task,
        dataset=FederatedDataset(examples, split),
        views=Views(labeled=Plain(), unlabeled={"plain": Plain()}),
        training=Training(batching=batching, budget=Budget()),
        settings=RuntimeSettings(cohort=split.clients, seed=seed),
    )
    server = method.start(task, initial_model(task, seed, torch.device("cpu")))
    for number in range(rounds):
        simulation.open(number)  # draws the cohort of the round
        server = method.round(task.at(number), server, simulation)
        simulation.close()
    return server


def _refuse_views(name: str, training: VectorTraining) -> None:
    """Raise `UserError` if a method needs augmented views of images, which vectors do not have.

    Args:
        name: the method's name, for the error.
        training: the method.
    """
    # Which views a method needs does not depend on the data, so the smallest task will do.
    network = LinearClassifier(classes=2, norm="none", features=1, centered=False)
    zero = torch.zeros(1, dtype=torch.float64)
    task = Task(network, SGD(lr=training.lr), Standardize(center=zero, scale=zero))
    names: set[str] = set()
    for update in training.method.client_updates(task).values():
        needed = update.requirements
        names |= {*needed.views, *needed.labeled_views, *needed.second_batch, *needed.precomputed_views}
    # "strong2" is a second draw of "strong"; a "plain" view is the vector itself.
    views = sorted({view.rstrip("0123456789") for view in names} - {"plain"})
    if views:
        raise UserError(
            f"{name} needs {' and '.join(views)} views of images, which vectors do not have: choose ridge-head, "
            "mixture-head or fedavg."
        )
