"""How much the runs of a comparison work: their shared budget, and how often that allows an evaluation."""

import math
from collections.abc import Sequence

from halfmoon.api.types import ClientUpdate, Method, Task
from halfmoon.config.schema import Config
from halfmoon.engine.budget import Budget, batch_rule_amount, find_largest_update, images_per_step
from halfmoon.engine.local_clients import FederatedDataset
from halfmoon.methods import registry
from halfmoon.runs.factory import Problem, method

EVALUATION = 0.1
"""The share of a run's work that evaluations may take, in passes through the network."""

SMALL_TEST = 1_000
"""Test images below which every round is evaluated."""


def budget(config: Config, task: Task) -> Budget:
    """Return what the client updates of a configuration's method are measured by."""
    name = config.reference or config.method
    return Budget(config.budget, _training(registry.make(name), task), registry.entry(name).all_labels)


def _training(method: Method, task: Task) -> ClientUpdate:
    """Return the client update that trains: a method's first."""
    return next(iter(method.client_updates(task).values()))


def largest_of(configs: Sequence[Config], shared: Problem) -> str:
    """Return which of the configurations' methods takes most by its own rule; centralized ones have no clients."""
    client_updates: dict[str, tuple[ClientUpdate, bool]] = {}
    for config in configs:
        entry = registry.entry(config.method)
        if not entry.pooled:
            client_updates[config.method] = (_training(method(config), shared.task), entry.all_labels)
    dataset = FederatedDataset(shared.train, shared.split, reuse_labeled=configs[0].reuse_labeled)
    sizes = [dataset.split_size(client) for client in range(dataset.clients)]
    return (
        find_largest_update(configs[0].budget, shared.batching, client_updates, sizes)
        if client_updates
        else configs[0].method
    )


def evaluation_interval(config: Config, shared: Problem) -> int:
    """Return the rounds between evaluations: those of the configuration, or as many as keep them to `EVALUATION`.

    The work of a round is that of the method that sets the budget, so that all rows of a comparison are evaluated in
    the same rounds; it is counted and not timed, so that a run does not depend on the machine.
    """
    images = sum(len(part.images) for part in (shared.test, shared.validation) if part is not None)
    if config.evaluate_every is not None or images < SMALL_TEST:
        return config.evaluate_every or 1
    entry = registry.entry(config.reference or config.method)
    rule = _training(registry.make(entry.name), shared.task)
    dataset = FederatedDataset(shared.train, shared.split, entry.all_labels, entry.pooled, config.reuse_labeled)
    sizes = [dataset.training_size(client) for client in range(dataset.clients)]
    amounts = [batch_rule_amount(shared.batching, rule, size) for size in sizes]
    all_clients = sum(amount.steps * images_per_step(rule, amount) for amount in amounts)
    round_cost = all_clients * min(config.cohort, len(sizes)) / len(sizes)
    return min(config.rounds, math.ceil(images / (EVALUATION * max(round_cost, 1))))
