"""SimCLR, BYOL with FedEMA and SimSiam: a step against torch modules and sums over pairs, and the mixing by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scenes import CLASSES, NETWORK, begin, task
from torch import Tensor, nn
from torch_models import TorchSmall, twin

import halfmoon
from halfmoon.api.types import Batch
from halfmoon.contract import check
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.optim import SGD
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives.self_supervised import BYOL, SelfSupervised, SimCLR, SimSiam

KINDS = [SimCLR(hidden=6, projected=5), BYOL(hidden=6, projected=5, target_decay=0.9), SimSiam(hidden=6, projected=5)]
EACH = pytest.mark.parametrize("objective", KINDS, ids=lambda each: type(each).__name__)


class Learner(nn.Module):
    """The small network with a projector and, where there is one, a predictor, as torch has them."""

    def __init__(self, params: dict[str, Any], stats: dict[str, Any]) -> None:
        super().__init__()
        own = {name: part for name, part in params.items() if name not in SelfSupervised.heads}
        self.network = twin(TorchSmall(1, CLASSES, NETWORK.width), {"params": own, "stats": stats}).train()
        self.heads = nn.ModuleDict({name: head(params[name]) for name in SelfSupervised.heads if name in params})

    def project(self, views: list[Tensor], statistics: str) -> Tensor:
        groups = [torch.cat(views)] if statistics == "joint" else views
        return self.heads["projector"](torch.cat([self.network.features(group) for group in groups]))


def head(params: dict[str, Any]) -> nn.Module:
    first, last = params["first"]["weight"], params["last"]["weight"]
    module = nn.Sequential(nn.Linear(first.shape[1], len(first), bias=False), nn.BatchNorm1d(len(first)), nn.ReLU(),
                           nn.Linear(last.shape[1], len(last))).double()  # fmt: skip
    norm = params["first"]["norm"]
    for own, given in zip(
        module.parameters(), (first, norm["weight"], norm["bias"], *params["last"].values()), strict=True
    ):
        own.data.copy_(given)
    return module


def cosine(one: Tensor, other: Tensor) -> Tensor:
    return one @ other / (one.norm() * other.norm())


def simclr(z: Tensor) -> Tensor:
    n, total = len(z), 0.0
    for i in range(n):
        others = sum((cosine(z[i], z[k]) / 0.5).exp() for k in range(n) if k != i)
        total = total - ((cosine(z[i], z[(i + n // 2) % n]) / 0.5).exp() / others).log() / n
    return total


def alike(predicted: Tensor, target: Tensor) -> Tensor:
    n = len(predicted) // 2
    return sum(cosine(predicted[i], target[n + i]) + cosine(predicted[n + i], target[i]) for i in range(n)) / n


@EACH
@pytest.mark.parametrize("statistics", ["joint", "separate"])
def test_a_step_on_modules(objective: SelfSupervised, statistics: str):
    """The loss, every parameter after a step of SGD, and BYOL's target after it."""
    shared, method = task(optimizer=SGD(0.2), statistics=statistics), FedAvg(objective)
    down, client_update = begin(method, shared), method.client_updates(shared)["train"]
    g = torch.Generator().manual_seed(3)
    memory = client_update.remember(down, g)
    if "target" in memory:
        memory["target"] = tree.map(lambda leaf: leaf + 0.1 * torch.randn(leaf.shape, generator=g), memory["target"])
    views = [torch.randn(4, 1, 8, 8, generator=g, dtype=torch.float64) for _ in range(2)]
    batch = Batch(views[0][:0], torch.zeros(0).long(), torch.zeros(0).long(),
                  dict(zip(("strong", "strong2"), views, strict=True)), torch.arange(4))  # fmt: skip
    carry, notes = client_update.step(down, client_update.begin(down, memory, None), batch)

    learner = Learner(down["params"], down["stats"])
    z = learner.project(views, statistics)
    if isinstance(objective, SimCLR):
        loss = simclr(z)
    elif isinstance(objective, SimSiam):
        loss = -alike(learner.heads["predictor"](z), z.detach()) / 2
    else:
        target = Learner(memory["target"], down["stats"]).project(views, statistics)
        loss = 4 - 2 * alike(learner.heads["predictor"](z), target.detach())
    assert float(notes.loss) == pytest.approx(float(loss.detach()), rel=1e-9)
    loss.backward()
    expected = {name: p.detach() - 0.2 * (0 if p.grad is None else p.grad) for name, p in learner.named_parameters()}
    own, heads = tree.flatten(carry["params"]), {name: carry["params"][name] for name in objective.heads}
    for name, module in learner.heads.items():
        first, last = heads[name]["first"], heads[name]["last"]
        got = (first["weight"], *first["norm"].values(), *last.values())
        for (place, _), leaf in zip(module.named_parameters(), got, strict=True):
            torch.testing.assert_close(leaf, expected[f"heads.{name}.{place}"], rtol=1e-7, atol=1e-9)
    for name, value in expected.items():
        if name.startswith("network."):
            path = name.removeprefix("network.").replace(".", "/")
            torch.testing.assert_close(own[path], value, rtol=1e-7, atol=1e-9, msg=name)
    torch.testing.assert_close(carry["stats"]["conv1"]["mean"], learner.network.get_buffer("conv1.norm.running_mean"))
    if isinstance(objective, BYOL):
        wanted = tree.map(lambda old, new: 0.9 * old + 0.1 * new, memory["target"], carry["params"])
        assert all(torch.allclose(a, b) for a, b in zip(*map(tree.leaves, (carry["target"], wanted)), strict=True))


def place(numbers: list[float], predictor: float = 0.0) -> dict[str, Any]:
    """Return parameters that are these numbers, with a predictor."""
    leaves = (torch.tensor(numbers, dtype=torch.float64), torch.tensor([predictor], dtype=torch.float64))
    return {"conv": {"weight": leaves[0]}, "predictor": {"weight": leaves[1]}}


def test_the_share_of_a_client_s_own_network_by_hand():
    """W_g - W_k = (3, 4) has the norm 5: lambda = 0.7 / 5 = 0.14, mu = 0.7. Later norms are 2.5, mu 0.35, and 10, mu 1.

    The predictor is no part of the norm, and is mixed with the same mu.
    """
    objective, zero = BYOL(autoscale=0.7), torch.zeros((), dtype=torch.float64)

    def mixed(own: dict[str, Any], received: dict[str, Any], scale: Tensor) -> dict[str, Any]:
        memory = {"params": own, "target": own, "scale": scale}
        return objective.begin(task(), memory, None, {"received": received})

    first = mixed(place([1.0, 2.0]), place([1.0, 2.0]), zero)
    assert float(first["scale"]) == 0
    assert first["params"]["conv"]["weight"].tolist() == [1, 2]
    then = mixed(place([0.0, 0.0], 10.0), place([3.0, 4.0], 20.0), first["scale"])
    assert float(then["scale"]) == pytest.approx(0.14, rel=1e-12)
    assert then["params"]["conv"]["weight"].tolist() == pytest.approx([0.9, 1.2], rel=1e-12)
    assert then["params"]["predictor"]["weight"].tolist() == pytest.approx([13.0], rel=1e-12)
    near = mixed(place([0.0, 0.0]), place([1.5, 2.0]), then["scale"])
    assert near["params"]["conv"]["weight"].tolist() == pytest.approx([0.65 * 1.5, 0.65 * 2], rel=1e-12)
    far = mixed(place([0.0, 0.0]), place([6.0, 8.0]), then["scale"])
    assert far["params"]["conv"]["weight"].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert float(near["scale"]) == float(far["scale"]) == float(then["scale"])


@pytest.mark.parametrize("name", registry.STARTS)
def test_keeps_every_promise(name: str):
    """Loop = vmap, resuming bit by bit, sites behind messages, and the others of the contract."""
    assert [kept for kept in check(name) if not kept.kept] == []


NETWORK_OF_ONES_OWN = """
from torch import nn

def make(classes, channels, size):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes))
"""


@pytest.mark.parametrize("name", [*registry.STARTS, "fedcon", "fedirm"])
def test_a_module_of_ones_own_is_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module takes no parameters but its own, and its head has another name than ours."""
    (tmp_path / "module_of_ones_own.py").write_text(NETWORK_OF_ONES_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    way = {"method": "fedavg", "start": name, "start_rounds": 1} if name in registry.STARTS else {"method": name}
    few = {"clients": 2, "rounds": 1, "steps": 1, "data_share": 0.2, "run_dir": tmp_path / "run"}
    run = halfmoon.run(network="module_of_ones_own:make", **few, **way)
    assert 0 <= run.summaries[-1]["accuracy"]["last"] <= 1


def test_a_network_without_a_head_is_refused_in_a_sentence():
    class Headless:
        head = None

    shared = replace(task(), network=Headless())
    with pytest.raises(UserError, match="ends in a linear layer"):
        SimCLR().start(shared, {"params": {}, "stats": {}})


@EACH
def test_the_solution_is_the_network_with_its_head_as_it_was(objective: SelfSupervised):
    shared = task()
    model = tree.to(shared.network.init(torch.Generator().manual_seed(1)), dtype=torch.float64)
    server = objective.start(shared, model)
    assert set(objective.heads) < set(server["params"])
    assert tree.flatten(objective.solution(server)).keys() == tree.flatten(model).keys()
