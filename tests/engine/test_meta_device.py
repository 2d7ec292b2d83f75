"""Train clients on PyTorch's `meta` device, which has shapes but no numbers: no step may wait for a GPU.

A tensor on `meta` cannot be read, and an operation on tensors of different devices raises. A client update that works
there leaves all its tensors on its device, and a GPU can be given all its work without a pause.

Values are read at these places only, each once a client and query, and never in a step:

- `driver._check_losses`: whether a loss was too large;
- `driver._is_finite`: whether an upload is finite;
- `sampling.draw`: which unlabeled rows an update may use. Only CBAFed restricts them.
- `ClientUpdate.traffic`: how many entries of a sparse message are not zero. Only FedMatch has sparse messages.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from test_contract import build_simulation, in_turn

from halfmoon.api.types import ClientData
from halfmoon.core import tree
from halfmoon.engine import driver
from halfmoon.engine.executors.serial import SerialExecutor
from halfmoon.engine.executors.vmap import VmapExecutor
from halfmoon.federation.contract.small_federation import run_rounds, start_server

META = torch.device("meta")


def move(data: ClientData) -> ClientData:
    """Move the images of a client to `meta`."""
    leaves = [tree.to(leaf, META) if isinstance(leaf, dict) else leaf.to(META) for leaf in data]
    return ClientData(*leaves)


def add_one_by_one(leaves: list[torch.Tensor], summands: torch.Tensor | list[torch.Tensor]) -> None:
    """Add a tensor () to each leaf, or to each leaf its own.

    PyTorch's function has a kernel for CUDA, but reads the one summand on `meta`.
    """
    for number, leaf in enumerate(leaves):
        leaf.add_(summands if isinstance(summands, torch.Tensor) else summands[number])


@pytest.mark.parametrize(("name", "executor"), in_turn(("loop", "vmap")))
def test_no_step_reads_a_value_or_mixes_devices(name, executor, monkeypatch):
    queries: list[tuple[driver.Query, list[driver.ClientTask]]] = []
    draws: list[Any] = []

    class Recorder(SerialExecutor):
        def map(self, query: Any, groups: Any) -> Any:
            for group in groups:
                queries.append((query, list(group)))
                yield query(group)

    draw = driver.draw
    method, task, simulation = build_simulation(name, "both", executor, cohort=1 if executor == "loop" else 2)
    recorder = Recorder() if executor == "loop" else VmapExecutor(Recorder(), max_padding=Fraction(1))
    simulation.local_clients.training = replace(simulation.local_clients.training, executor=recorder)
    with monkeypatch.context() as patch:
        patch.setattr(driver, "draw", lambda *args: draws.append(draw(*args)) or draws[-1])
        run_rounds(method, simulation, start_server(method, task), range(1))
    assert queries

    remaining_draws = iter(draws)
    losses_checked: list[int] = []
    uploads_checked: list[bool] = []
    monkeypatch.setattr(driver, "draw", lambda *args: next(remaining_draws))
    monkeypatch.setattr(driver, "_check_losses", lambda context, client, losses: losses_checked.append(client))
    monkeypatch.setattr(driver, "_is_finite", lambda upload: uploads_checked.append(True) or True)
    monkeypatch.setattr(torch, "_foreach_add_", add_one_by_one)
    for client_update in {type(query.context.client_update) for query, _ in queries}:
        monkeypatch.setattr(client_update, "traffic", lambda update, broadcast, upload: (0, 0))
    for query, group in queries:
        tasks = [
            task._replace(private=tree.to(task.private, META), memory=tree.to(task.memory, META), data=move(task.data))
            for task in group
        ]
        results = driver.Query(query.context, tree.to(query.broadcast, META))(tasks)
        for task in tasks:
            result = results[task.client]
            assert {leaf.device for leaf in tree.leaves(result.upload.tree)} <= {META}
            assert {leaf.device for leaf in tree.leaves(result.memory)} <= {META}
    clients = sum(len(group) for _, group in queries)
    assert len(losses_checked) <= clients
    assert len(uploads_checked) <= len(queries)
