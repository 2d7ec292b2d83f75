"""FedCon: two steps of the server and of a client compared with torch modules, and what is sent."""

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_helpers import (
    assert_params_match,
    begin_update,
    make_client_data,
    make_random_images,
    make_torch_module,
    simulate_rounds,
)
from torch import nn

import halfmoon
from halfmoon.api.types import Batch
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.optim import SGD
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    make_dataset,
    make_task,
    max_difference,
    start_server,
    trees_equal,
)
from halfmoon.methods.fedcon import FedCon


def test_two_steps_of_the_server():
    """Round 1 of 8, a ramp over 4: w = 2 exp(-5 (3 / 4)^2). The target is the mean of the models after one step."""
    options = FedCon(consistency_weight=2.0, ramp=0.5, server_decay=0.3)
    shared = make_task(optimizer=SGD(0.3), rounds=8)
    shared = shared.at(1)
    update = options.client_updates(shared)["fine-tune"]
    broadcast = start_server(options, shared)
    carry = begin_update(update, broadcast, make_client_data(6, 0))
    other = tree.map(lambda leaf: leaf + 0.1 * torch.randn(leaf.shape, dtype=leaf.dtype), broadcast["params"])
    carry["teacher"] = other
    model = make_torch_module(broadcast)
    target = make_torch_module({**broadcast, "params": other})
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for number in range(2):
        x = make_random_images(6, number)
        weak = make_random_images(6, number + 10)
        y = torch.arange(6) % CLASSES
        no_views = {"weak": make_random_images(0, 0)}
        batch = Batch(x, y, torch.arange(6), no_views, torch.arange(0), x_views={"weak": weak})
        carry, notes = update.step(broadcast, carry, batch)
        one, two = model(torch.cat([x, weak])).split(6)
        with torch.no_grad():
            slow = target(torch.cat([x, weak])).softmax(-1).split(6)
        distance = F.kl_div(one.log_softmax(-1), slow[1], reduction="batchmean")
        distance = distance + F.kl_div(two.log_softmax(-1), slow[0], reduction="batchmean")
        loss = F.cross_entropy(one, y) / 2 + F.cross_entropy(two, y) / 2 + math.exp(-5 * 0.75**2) * distance
        assert float(notes.loss) == pytest.approx(loss.item(), rel=1e-12)
        assert distance.item() > 1e-3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keep = (0.0, 0.3)[number]
        with torch.no_grad():
            for old, new in zip(target.parameters(), model.parameters(), strict=True):
                old.mul_(keep).add_((1 - keep) * new)
    assert_params_match(carry["params"], model)
    assert_params_match(carry["teacher"], target)
    buffers = dict(model.named_buffers())
    torch.testing.assert_close(carry["stats"]["conv1"]["mean"], buffers["conv1.norm.running_mean"])


def predictor_of(layers: dict[str, Any]) -> nn.Module:
    first = layers["first"]["weight"]
    last = layers["last"]["weight"]
    module = nn.Sequential(nn.Linear(first.shape[1], len(first), bias=False), nn.BatchNorm1d(len(first)), nn.ReLU(),
                           nn.Linear(*last.T.shape)).double()  # fmt: skip
    values = (first, layers["first"]["norm"]["weight"], layers["first"]["norm"]["bias"], last, layers["last"]["bias"])
    for parameter, leaf in zip(module.parameters(), values, strict=True):
        parameter.data.copy_(leaf)
    return module


@pytest.mark.parametrize("labeled", [0, 3])
def test_two_steps_of_a_client(labeled: int):
    """Features predict those of the target, which keeps 0.8 of itself; labels, where there are some, teach alone."""
    options = FedCon(target_decay=0.8)
    shared = make_task(optimizer=SGD(0.3, weight_decay=0.1), statistics="separate")
    update = options.client_updates(shared)["train"]
    broadcast = start_server(options, shared)
    memory = update.initial_memory(broadcast, torch.Generator().manual_seed(1))
    features = broadcast["params"]["head"]["weight"].shape[1]
    assert memory["predictor"]["first"]["weight"].shape == (3 * features, features)
    model = make_torch_module(broadcast)
    target = copy.deepcopy(make_torch_module(broadcast))
    head = predictor_of(memory["predictor"])
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], 0.3, weight_decay=0.1)
    data = make_client_data(labeled, 5)
    carry = update.begin(broadcast, memory, data)
    for number in range(2):
        x = make_random_images(labeled, number + 20)
        y = torch.arange(labeled)
        u = {"weak": make_random_images(5, number), "weak2": make_random_images(5, number + 10)}
        carry, notes = update.step(broadcast, carry, Batch(x, y, torch.arange(labeled), u, torch.arange(5)))
        loss = F.cross_entropy(model(x), y) if labeled else 0.0
        prediction = head(torch.cat([model.features(u["weak"]), model.features(u["weak2"])]))
        with torch.no_grad():
            slow = torch.cat([target.features(u["weak2"]), target.features(u["weak"])])
        for a, b in zip(prediction, slow, strict=True):
            loss = loss - a @ b / (a.norm() * b.norm()) / 10
        assert float(notes.loss) == pytest.approx(loss.item(), rel=1e-10)
        optimizer.zero_grad()
        loss.backward()
        for p in model.head.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), model.parameters(), strict=True):
                old.mul_(0.8).add_(0.2 * new)
    upload, memory = update.finish(broadcast, carry, data)
    assert_params_match(memory["target"], target)
    for parameter, p in zip(tree.leaves(memory["predictor"]["last"]), head[3].parameters(), strict=True):
        torch.testing.assert_close(parameter, p.detach(), rtol=1e-8, atol=1e-10)
    assert trees_equal(upload.update["params"]["head"], broadcast["params"]["head"]) == (not labeled)
    parameter = {name: layers for name, layers in upload.update["params"].items() if name != "head"}
    expected = {name: p.detach() for name, p in model.named_parameters() if not name.startswith("head")}
    for (name, p), leaf in zip(expected.items(), tree.leaves(parameter), strict=True):
        torch.testing.assert_close(leaf, p, rtol=1e-8, atol=1e-10, msg=name)
    assert float(upload.weight) == 1


def test_the_server_trains_before_the_first_round_and_last_in_each():
    """The head moves by the server's trainings: two by the end of the first round, three by that of the second."""
    shared = make_task(rounds=3)
    method = FedCon()
    start = start_server(method, shared)
    result = simulate_rounds(method, shared, make_dataset(labels_at="server"), rounds=2)
    heads = [each["params"]["head"] for each in (start, *(one.server for one in result))]
    assert all(max_difference(after, before) > 0 for before, after in itertools.pairwise(heads))
    assert all(one.report.pseudo is None for one in result)
    steps = [float(leaf) for path, leaf in tree.flatten(result[-1].state).items() if path.endswith("teacher_steps")]
    once = [float(leaf) for path, leaf in tree.flatten(result[0].state).items() if path.endswith("teacher_steps")]
    assert (steps[0] + 1) / (once[0] + 1) == 1.5


CUSTOM_NETWORK = """
from torch import nn

def make(classes, channels, size):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))
"""


@pytest.mark.parametrize("name", ["fedcon", "fedirm"])
def test_a_custom_module_is_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module accepts only its parameters, and its head is not called "head"."""
    (tmp_path / "custom_module.py").write_text(CUSTOM_NETWORK)
    monkeypatch.syspath_prepend(tmp_path)
    few = {"clients": 2, "rounds": 1, "steps": 1, "data_share": 0.2, "run_dir": tmp_path / "run"}
    run = halfmoon.run(network="custom_module:make", method=name, **few)
    assert 0 <= run.summaries[-1]["accuracy"]["last"] <= 1


def test_a_network_without_a_head_is_refused_in_a_sentence():
    class Headless:
        head = None

    shared = replace(make_task(), network=Headless())
    with pytest.raises(UserError, match="ends in a linear layer"):
        FedCon().client_updates(shared)["train"].initial_memory({"params": {}}, torch.Generator())
