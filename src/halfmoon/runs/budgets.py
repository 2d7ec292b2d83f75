"""The shared training budget of compared methods, and an evaluation interval that keeps evaluation cheap."""

import math
from collections.abc import Sequence

from halfmoon.api.types import ClientUpdate, Method, Task
from halfmoon.config.schema import Config
from halfmoon.engine.budget import Budget, compute_amount, find_largest_update, images_per_step
from halfmoon.engine.local_clients import FederatedDataset
from halfmoon.methods import registry
from halfmoon.runs.factory import Problem, build_method

MAX_EVALUATION_SHARE = 0.1
"""The largest cost of evaluation relative to training, in passes through the network."""

MIN_IMAGES_FOR_INTERVAL = 1_000
"""With fewer test and validation images every round is evaluated."""


def build_budget(config: Config, task: Task) -> Budget:
    """Create the training budget of a configuration, by which methods of different cost get a fair number of steps.

    Args:
        config: the configuration. Its `budget` names what is counted, such as labeled steps. Its method `reference`
            sets the amount: what this method uses with the configured batch sizes and epochs.
        task: the task that the methods share.
    """
    # A run of one method needs no reference: the method gets its own amount.
    name = config.reference or config.method
    return Budget(
        rule=config.budget,
        reference=_training_update(registry.make(name), task),  # the work of one of its clients in a round
        all_labels=registry.entry(name).all_labels,  # whether all images count as labeled for it (an upper bound)
    )


def _training_update(method: Method, task: Task) -> ClientUpdate:
    """Return the client update that trains: the first one of a method."""
    return next(iter(method.client_updates(task).values()))


def find_costliest_method(configs: Sequence[Config], problem: Problem) -> str:
    """Find the method whose clients have the highest cost over all clients; it sets the training budget of a comparison.

    The cost is counted in steps, or in images through the network, as the option `budget` says.

    Args:
        configs: one configuration for each method; all but the method and its options are equal. Centralized methods have
            no clients, and do not count unless there are no others.
        problem: the data and batch rule of all methods.

    Returns:
        The method's name.
    """
    # The client update that trains, and whether all images count as labeled for it (an upper bound).
    client_updates: dict[str, tuple[ClientUpdate, bool]] = {}
    for config in configs:
        entry = registry.entry(config.method)
        if not entry.pooled:
            update = _training_update(build_method(config), problem.task)
            client_updates[config.method] = (update, entry.all_labels)
    if not client_updates:
        return configs[0].method
    # With `reuse_labeled` labeled images are also trained on without their labels, and count twice.
    dataset = FederatedDataset(problem.train, problem.split, reuse_labeled=configs[0].reuse_labeled)
    sizes = [dataset.split_size(client) for client in range(dataset.clients)]
    return find_largest_update(configs[0].budget, problem.batching, client_updates, sizes)


def choose_evaluation_interval(config: Config, problem: Problem) -> int:
    """Compute the number of rounds between evaluations.

    Without the option `evaluate_every`, evaluation costs at most `MAX_EVALUATION_SHARE` of the training. The cost of a
    round is that of the method that sets the budget, so that all methods of a comparison are evaluated in the same
    rounds. It is counted in images and not timed, so that a run does not depend on the machine.

    Args:
        config: the configuration.
        problem: the data and batch rule (batch sizes and epochs).
    """
    evaluated = [examples for examples in (problem.test, problem.validation) if examples is not None]
    images = sum(len(examples.images) for examples in evaluated)
    if config.evaluate_every is not None:
        return config.evaluate_every
    if images < MIN_IMAGES_FOR_INTERVAL:
        return 1
    # The method that sets the budget: that of the comparison, or the only one.
    entry = registry.entry(config.reference or config.method)
    update = _training_update(registry.make(entry.name), problem.task)
    # On `all_labels` every image is labeled; `pooled` data are those of all clients in one set.
    dataset = FederatedDataset(
        problem.train,
        problem.split,
        all_labels=entry.all_labels,
        pooled=entry.pooled,
        reuse_labeled=config.reuse_labeled,
    )
    sizes = [dataset.training_size(client) for client in range(dataset.clients)]
    # Steps of each client in a round, and images of a step; `images_per_step` counts passes through the network.
    amounts = [compute_amount(problem.batching, update, size) for size in sizes]
    images_of_all_clients = sum(amount.steps * images_per_step(update, amount) for amount in amounts)
    # The expected cost of a cohort drawn uniformly from all clients.
    images_per_round = images_of_all_clients * min(config.cohort, len(sizes)) / len(sizes)
    allowed_per_round = MAX_EVALUATION_SHARE * max(images_per_round, 1)
    return min(config.rounds, math.ceil(images / allowed_per_round))
