"""Train clients on PyTorch's `meta` device, which has shapes but no numbers: no step may wait for a GPU.

A tensor on `meta` cannot be read, and an operation on tensors of different devices raises. A client update that works
there leaves all its tensors on its device, and a GPU can be given all its work without a pause.

Values are read at these places only, each once a client and query, and never in a step:

- `driver._check_losses`: whether a loss was too large;
- `driver.is_finite`: whether an upload is finite;
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
from halfmoon.core.tree import Tree
from halfmoon.engine import driver, local_clients, vmapped_clients
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
    groups: list[tuple[driver.ClientContext, Tree, list[driver.ClientTask]]] = []
    draws: list[Any] = []

    class Recorder(SerialExecutor):
        def map(self, train: Any, items: Any) -> Any:
            for item in items:
                # With vmap an item is a group, and `train` binds the functions for one client and for several.
                tasks, train_one = ([item], train) if executor == "loop" else (list(item), train.args[0])
                groups.append((*train_one.args, tasks))
                yield train(item)

    draw = local_clients.draw
    method, task, simulation = build_simulation(name, "both", executor, cohort=1 if executor == "loop" else 2)
    recorder = Recorder() if executor == "loop" else VmapExecutor(Recorder(), max_padding=Fraction(1))
    simulation.local_clients.training = replace(simulation.local_clients.training, executor=recorder)
    with monkeypatch.context() as patch:
        for module in (local_clients, vmapped_clients):
            patch.setattr(module, "draw", lambda *args, **flags: draws.append(draw(*args, **flags)) or draws[-1])
        run_rounds(method, simulation, start_server(method, task), range(1))
    assert groups

    remaining_draws = iter(draws)
    losses_checked: list[int] = []
    uploads_checked: list[bool] = []
    monkeypatch.setattr(driver, "_check_losses", lambda context, client, losses: losses_checked.append(client))
    monkeypatch.setattr(driver, "is_finite", lambda upload: uploads_checked.append(True) or True)
    monkeypatch.setattr(vmapped_clients, "is_finite", driver.is_finite)
    for module in (local_clients, vmapped_clients):
        monkeypatch.setattr(module, "draw", lambda *args, **flags: next(remaining_draws))
    monkeypatch.setattr(torch, "_foreach_add_", add_one_by_one)
    for client_update in {type(context.client_update) for context, _, _ in groups}:
        monkeypatch.setattr(client_update, "traffic", lambda update, broadcast, upload: (0, 0))
    for context, broadcast, group in groups:
        tasks = [
            task._replace(private=tree.to(task.private, META), memory=tree.to(task.memory, META), data=move(task.data))
            for task in group
        ]
        received = tree.to(broadcast, META)
        if len(tasks) == 1:
            results = [local_clients.update_one(context, received, tasks[0])]
        else:
            results = vmapped_clients.update_many(context, received, tasks)
        for result in results:
            assert {leaf.device for leaf in tree.leaves(result.upload.tree)} <= {META}
            assert {leaf.device for leaf in tree.leaves(result.memory)} <= {META}
    clients = sum(len(group) for _, _, group in groups)
    assert len(losses_checked) <= clients
    assert len(uploads_checked) <= len(groups)
