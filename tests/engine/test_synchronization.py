"""Nothing within a client update waits for the device: numbers are read when a round ends, however long it was."""

from collections import Counter
from typing import Any

import pytest
from scenes import begin, dataset, simulate, task
from torch.utils._python_dispatch import TorchDispatchMode

from halfmoon.api.types import Method
from halfmoon.engine.local_clients import Executor
from halfmoon.engine.sampling import Batching
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.feddure import FedDure
from halfmoon.methods.objectives import FixMatch

WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
"""What a device has to be waited for: `.item()`, `float`, `bool`, `if` and `x[mask]` come to these."""


class Waits(TorchDispatchMode):
    """Counts the calls for which a device would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in WAITING:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def waits(method: Method, executor: Executor, steps: int) -> Counter[str]:
    """Return what one round of three clients with so many steps waits for, the first round left out."""
    shared = task()
    simulation = simulate(method, shared, dataset(), batching=Batching(4, 4, steps=steps), executor=executor)
    server = begin(method, shared)
    for number in range(2):
        simulation.open(number)
        with Waits() as counted:
            server = method.round(simulation.task, server, simulation)
        simulation.close()
    return counted.seen


METHODS = {
    "fixmatch": FedAvg(FixMatch(threshold=0.3)),
    "fixmatch-round": FedAvg(FixMatch(threshold=0.3, labels="round")),
    "feddure": FedDure(),
}

EACH = 5
"""Reads of each client when its update is over: two of its pseudo-labels, one of its losses, of its upload and of its
weight."""


@pytest.mark.parametrize("name", METHODS)
def test_a_program_of_clients_waits_at_its_end_alone(name):
    """Under vmap, which a GPU runs, a round of six steps waits as often as one of two: a few times a client."""
    short, long = (waits(METHODS[name], "vmap", steps) for steps in (2, 6))
    assert short == long
    assert 0 < sum(long.values()) <= EACH * 3
