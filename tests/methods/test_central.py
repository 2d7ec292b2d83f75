"""The centralized rows: a federation of one that holds everything is an ordinary training loop, step by step."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_helpers import make_torch_module
from recording_methods import RecordingMethod
from reference_objectives import ReferenceModel, mean_teacher
from torch_models import make_state_dict

from halfmoon.api.types import Batch, Method
from halfmoon.core.optim import SGD, CosineSchedule
from halfmoon.engine.sampling import Batching
from halfmoon.federation.contract.small_federation import (
    SIZES,
    make_dataset,
    make_simulation,
    make_task,
    run_rounds,
    start_server,
)
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch

ROUNDS = 3
CENTRAL = [name for name in registry.names() if registry.entry(name).pooled]
ALL = sum(labeled + unlabeled for labeled, unlabeled in SIZES)


def visits(method: Method, all_labels: bool, labels_at: str = "clients") -> tuple[dict, dict, list[list[Batch]], Any]:
    """Return the first and the last server of a pooled run, the batches of each of its rounds, and its task.

    SGD with Nesterov momentum and weight decay, on a cosine schedule: all that could be forgotten between rounds.
    """
    shared = make_task(optimizer=SGD(0.05, 0.9, 1e-2, nesterov=True), schedule=CosineSchedule(), rounds=ROUNDS)
    recording = RecordingMethod(method)
    held = make_dataset(all_labels=all_labels, pooled=True, labels_at=labels_at)
    simulation = make_simulation(recording, shared, held, batching=Batching(6, 8))
    server = start_server(method, shared)
    rounds = []
    last = server
    for number in range(ROUNDS):
        before = len(recording.list_calls("step"))
        (result,) = run_rounds(recording, simulation, last, range(number, number + 1))
        last = result.server
        rounds.append([batch for _, _, batch in recording.list_calls("step")[before:]])
    return server, last, rounds, shared


def compare(server: dict, module: torch.nn.Module) -> None:
    """Compare parameters and running statistics with a module's."""
    expected = module.state_dict()
    for name, leaf in make_state_dict(server).items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(leaf, expected[name], rtol=1e-9, atol=1e-11, msg=name)


def loop(server: dict) -> tuple[Any, torch.optim.Optimizer, Any]:
    """Return a module, its optimizer and its schedule, as a script on one machine has them."""
    module = make_torch_module(server)
    optimizer = torch.optim.SGD(module.parameters(), 0.05, 0.9, weight_decay=1e-2, nesterov=True)
    return module, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS)


@pytest.mark.parametrize("name", ["supervised", "partially-supervised"])
def test_the_supervised_rows_are_a_plain_loop(name):
    """Every step of three rounds: one optimizer that lives on, one schedule, nothing in between."""
    entry = registry.entry(name)
    server, last, rounds, _ = visits(entry.method, entry.all_labels)
    rows = ALL if entry.all_labels else sum(labeled for labeled, _ in SIZES)
    assert [len(steps) for steps in rounds] == [round(rows / 6)] * ROUNDS
    module, optimizer, schedule = loop(server)
    for steps in rounds:
        for batch in steps:
            optimizer.zero_grad()
            F.cross_entropy(module(batch.x), batch.y).backward()
            optimizer.step()
        schedule.step()
    compare({"params": last["params"], "stats": last["stats"]}, module)


def test_mean_teacher_is_a_plain_loop():
    """Model, statistics and teacher; the weight is 0, then 0.83 of 50, then 50 over rounds (a ramp over 1.2 rounds)."""
    entry = registry.entry("mean-teacher")
    server, last, rounds, _ = visits(entry.method, False)
    assert [len(steps) for steps in rounds] == [-(-sum(unlabeled for _, unlabeled in SIZES) // 8)] * ROUNDS
    module, optimizer, schedule = loop(server)
    teacher: Any = copy.deepcopy(module)
    done = 0
    for number, steps in enumerate(rounds):
        for batch in steps:
            optimizer.zero_grad()
            weight = 50 * min(1.0, number / 1.2)
            mean_teacher(ReferenceModel(module), teacher, batch, weight).backward()
            optimizer.step()
            done += 1
            keep = min(1 - 1 / (done + 1), 0.999)
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), module.parameters(), strict=True):
                    slow.mul_(keep).add_(fast, alpha=1 - keep)
        schedule.step()
    compare({"params": last["params"], "stats": last["stats"]}, module)
    evaluated = entry.method.solution(make_task(), last)
    named = dict(teacher.named_parameters())
    for name, leaf in make_state_dict({"params": evaluated["params"], "stats": {}}).items():
        torch.testing.assert_close(leaf, named[name].detach(), rtol=1e-9, atol=1e-11, msg=name)
    for layer in teacher.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = 1.0  # the running statistics become those of one pass over all rows
    images = make_dataset().train.images.double() / 255
    teacher.train()((images - 0.5) / 0.5)
    counted = {name: leaf for name, leaf in teacher.named_buffers() if "running" in name}
    for layer, stats in evaluated["stats"].items():
        for name, leaf in stats.items():
            torch.testing.assert_close(leaf, counted[f"{layer}.norm.running_{name}"], rtol=1e-9, atol=1e-11)
            assert float((leaf - last["stats"][layer][name]).abs().max()) > 1e-3  # the student's are others


def test_fixmatch_is_a_plain_loop():
    """The threshold lets some pseudo-labels through and not others."""
    server, last, rounds, _ = visits(FedAvg(FixMatch(0.5), keep_optimizer=True), False)
    module, optimizer, schedule = loop(server)
    through = []
    for steps in rounds:
        for batch in steps:
            optimizer.zero_grad()
            sizes = [len(batch.x), len(batch.u["strong"]), len(batch.u["weak"])]
            x, strong, weak = module(torch.cat([batch.x, batch.u["strong"], batch.u["weak"]])).split(sizes)
            confident, label = F.softmax(weak.detach(), -1).max(-1)
            mask = (confident >= 0.5).double()
            through.append(float(mask.mean()))
            (F.cross_entropy(x, batch.y) + (F.cross_entropy(strong, label, reduction="none") * mask).mean()).backward()
            optimizer.step()
        schedule.step()
    assert 0.05 < sum(through) / len(through) < 0.95
    compare({"params": last["params"], "stats": last["stats"]}, module)


@pytest.mark.parametrize("name", CENTRAL)
def test_central_training_does_not_depend_on_the_location_of_labels(name):
    """One client, with all labeled rows of the split, be they at clients or at the server."""
    entry = registry.entry(name)
    rows = sum(labeled for labeled, _ in SIZES)
    for labels_at in entry.label_locations:
        held = make_dataset(all_labels=entry.all_labels, pooled=True, labels_at=labels_at)
        client_sizes = held.training_size(0)
        there = ALL if labels_at != "some" else ALL - SIZES[1][0] - SIZES[3][0]
        assert held.clients == 1
        assert client_sizes.labeled + client_sizes.unlabeled == there
        assert client_sizes.labeled == (there if entry.all_labels else rows - (ALL - there))
        assert entry.method.keep_optimizer
    assert {"clients", "some", "server"} == set(entry.label_locations)


def test_the_rows_of_table_1():
    """SemiFL's Table 1, centralized part."""
    wanted = "supervised partially-supervised pi-model pseudo-label mean-teacher mixmatch uda remixmatch fixmatch"
    assert sorted(CENTRAL) == sorted(wanted.split())
