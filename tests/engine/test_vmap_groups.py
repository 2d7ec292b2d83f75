"""Which clients train as one program, by sizes alone and with little padding; and that it waits for no device."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from halfmoon.api.types import ClientUpdate, Method
from halfmoon.engine.budget import ClientSize, compute_amount
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.engine.groups import MAX_PADDING, WorkSize, group_clients
from halfmoon.engine.sampling import Batching
from halfmoon.federation.contract.checks import compare_executors
from halfmoon.federation.contract.small_federation import (
    make_dataset,
    make_simulation,
    make_task,
    run_rounds,
    start_server,
)
from halfmoon.methods.batchnorm_stats import BatchNormStatistics
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.feddure import FedDure
from halfmoon.methods.objectives import FixMatch


def client_update(**options: object) -> ClientUpdate:
    return FedAvg(FixMatch(**options)).client_updates(make_task())["train"]  # pyright: ignore[reportArgumentType]


def extents(sizes: list[tuple[int, int]], batching: Batching, of: ClientUpdate) -> list[WorkSize]:
    held = [ClientSize(*each) for each in sizes]
    return [WorkSize(compute_amount(batching, of, each), each) for each in held]


ONE = Batching(1, 1)
"""One labeled and one unlabeled image a step, as many steps as there are unlabeled rows."""


@pytest.mark.parametrize(
    ("rows", "programs"),
    [
        ([6, 6, 6], [[0, 1, 2]]),  # nothing is padded
        ([6, 4, 6], [[0, 1, 2]]),  # 2 of 18 steps
        ([8, 6, 5, 5, 60], [[4], [0, 1, 2, 3]]),  # the large one alone: with the 8 it would be 52 of 120; 8 of 32
        ([9, 3], [[0, 1]]),  # 6 of 18: a third may be
        ([10, 3], [[0], [1]]),  # 7 of 20
        ([8, 4, 2, 1], [[0, 1], [2, 3]]),  # 4 of 16, with the 2 it would be 10 of 24; 1 of 4
        ([5], [[0]]),
    ],
)
def test_programs_of_hand_made_sizes(rows, programs):
    """Steps are as many as unlabeled rows, all of them alike: the padded share is that of steps not taken."""
    assert group_clients(client_update(), extents([(1, each) for each in rows], ONE, client_update())) == programs


def test_images_a_step_count_as_steps_do():
    """One step on all labeled and all unlabeled rows: 12 images of each kind beside 3 and 3 have 9 of 24 padded."""
    batching = Batching("all", "rest", steps=1)
    assert group_clients(client_update(), extents([(3, 3), (12, 12)], batching, client_update())) == [[1], [0]]
    assert group_clients(client_update(), extents([(6, 6), (12, 12)], batching, client_update())) == [[0, 1]]
    unlike = extents([(12, 1), (1, 12)], batching, client_update())  # in kind: half
    assert group_clients(client_update(), unlike) == [[1], [0]]


def test_rows_count_if_they_are_passed():
    """Six equal steps for a client of 400 rows and one of 12: alike, but for a work that sweeps all rows."""
    batching = Batching(2, 4, steps=6)
    sizes = [(4, 12), (4, 400)]
    for labels, programs in (("step", [[0, 1]]), ("round", [[1], [0]])):
        sweeping = client_update(labels=labels)
        assert group_clients(sweeping, extents(sizes, batching, sweeping)) == programs
    census = BatchNormStatistics(make_task())
    assert group_clients(census, extents([(2, 10), (3, 12), (4, 400)], batching, census)) == [[2], [0, 1]]


def test_no_program_is_padded_more_than_the_bound():
    """Of 300 random cohorts: every client is in one program, and each program within the bound."""
    drawn = random.Random(0)
    for _ in range(300):
        batching = drawn.choice([ONE, Batching("all", "rest"), Batching(4, 8, epochs=2), Batching(4, 8, steps=3)])
        of = client_update(labels=drawn.choice(["step", "round"]))
        sizes = [(drawn.randrange(9), drawn.randrange(1, 12) ** 2) for _ in range(drawn.randrange(1, 25))]
        held = extents(sizes, batching, of)
        groups = group_clients(of, held)
        assert sorted(index for group in groups for index in group) == list(range(len(sizes)))
        for indices in groups:
            widest = held[indices[0]]
            for index in indices:
                widest = widest.maximum(held[index])
            images = sum(held[index].count_images(of) for index in indices)
            whole = len(indices) * widest.count_images(of)
            assert whole - images <= MAX_PADDING * whole


def test_simulation_vmaps_equal_clients_and_returns_uploads_in_order(programs):
    """Five clients of which one is far larger: it trains in the loop, and the round is as without programs."""
    sizes = ((2, 4), (2, 40), (2, 5), (2, 4), (2, 5))
    method = FedAvg(FixMatch(threshold=0.3))
    shared = make_task()
    results = []
    for executor in ("loop", "vmap"):
        simulation = make_simulation(
            method, shared, make_dataset(sizes), batching=Batching(2, 4), executor=executor, cohort=5
        )
        if executor == "vmap":
            training = replace(simulation.local_clients.training, executor=VmapExecutor(max_padding=MAX_PADDING))
            simulation.local_clients.training = training
        results.append(run_rounds(method, simulation, start_server(method, shared), range(1))[0])
    assert programs == [[0, 2, 3, 4]]
    assert compare_executors(*([one] for one in results)) < 1e-12


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


def waits(method: Method, steps: int) -> Counter[str]:
    """Return what one lifted round of three clients with so many steps waits for, the first round left out."""
    shared = make_task()
    simulation = make_simulation(method, shared, make_dataset(), batching=Batching(4, 4, steps=steps), executor="vmap")
    server = start_server(method, shared)
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
def test_vmapped_program_synchronizes_only_at_its_end(name):
    """Under vmap, which a GPU runs, a round of six steps waits as often as one of two: a few times a client."""
    short, long = (waits(METHODS[name], steps) for steps in (2, 6))
    assert short == long
    assert 0 < sum(long.values()) <= EACH * 3
