"""FedAvg and FedProx: hand-derived averages, the proximal gradient, and the identity with centralized training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from scenes import CLASSES, begin, dataset, furthest, play, same, simulate, task
from torch_models import TorchSmall, twin

from halfmoon.api.types import Batch, Local
from halfmoon.api.uploads import stack
from halfmoon.augment import Plain
from halfmoon.core import tree
from halfmoon.core.optim import SGD, Adam
from halfmoon.engine.sampling import Batching, Views
from halfmoon.methods import registry
from halfmoon.methods.averaging import average
from halfmoon.methods.fedavg import FedAvg
from halfmoon.objectives import FixMatch


def local(labeled: int, unlabeled: int) -> Local:
    """Return a client of these counts."""
    nothing = torch.zeros(0, 1, 8, 8, dtype=torch.uint8)
    return Local(nothing, torch.zeros(0), nothing, torch.tensor(labeled), torch.tensor(unlabeled))


def batches(count: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Return batches of 5 + 6 random images."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, 1, 8, 8, generator=g, dtype=dtype)  # noqa: E731
    return [
        Batch(
            draw(5),
            torch.randint(0, CLASSES, (5,), generator=g),
            torch.arange(5),
            {"weak": draw(6), "strong": draw(6)},
            torch.arange(6),
        )
        for _ in range(count)
    ]


def test_the_average_by_hand():
    """Clients with (2 + 2) and (3 + 9) rows weigh 4 and 12: (4 * 1 + 12 * 5) / 16 = 4 and (4 * 10 + 12 * 2) / 16 = 4.

    Statistics are averaged like parameters.
    """
    shared = task()
    work = FedAvg().client_updates(shared)["train"]
    ups = []
    for p, s, counts in ((1.0, 10.0, (2, 2)), (5.0, 2.0, (3, 9))):
        down = {"params": {"w": torch.tensor([p])}, "stats": {"n": {"mean": torch.tensor([s])}}}
        up, memory = work.finish(down, work.begin(down, {}, local(*counts)), local(*counts))
        assert memory == {}
        assert float(up.weight) == sum(counts)
        ups.append(up)
    mean = average(stack(ups))
    assert mean["params"]["w"].tolist() == [4.0]
    assert mean["stats"]["n"]["mean"].tolist() == [4.0]
    assert set(mean) == {"params", "stats"}


def test_the_server_averages_its_cohort_by_all_rows():
    """One round of three clients: the server's tree is the mean of their uploads by |labeled| + |unlabeled|."""
    method, shared, held = FedAvg(), task(), dataset()
    simulation = simulate(method, shared, held)
    server = begin(method, shared)
    simulation.open(0)
    up = simulation.ask("train", server)
    weights = [held.given(int(k)).labeled + held.given(int(k)).unlabeled for k in simulation.cohort]
    assert up.weight.tolist() == weights
    (played,) = play(method, simulate(method, shared, held), server, range(1))
    for path, leaf in tree.flatten({"params": up.update["params"], "stats": up.update["stats"]}).items():
        expected = sum(w / sum(weights) * each for w, each in zip(weights, leaf, strict=True))
        torch.testing.assert_close(tree.flatten(played.server)[path], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pair", [("fedavg-sl", "fedprox-sl"), ("fedavg-uda", "fedprox-uda")])
def test_prox_of_zero_is_fedavg_bit_by_bit(pair):
    """FedProx of the catalog with prox = 0 plays the very rounds of FedAvg; with its own prox it does not."""
    runs = []
    for name, chosen in ((pair[0], {}), (pair[1], {"prox": 0.0}), (pair[1], {"prox": 0.5})):
        method, shared = registry.make(name, chosen), task()
        held = dataset(all_labels=registry.entry(name).all_labels)
        runs.append(play(method, simulate(method, shared, held), begin(method, shared), range(2))[-1].server)
    assert same(runs[0], runs[1])
    assert furthest(runs[2], runs[0]) > 1e-4


@pytest.mark.parametrize("objective", [None, FixMatch(tau=0.3)], ids=["supervised", "fixmatch"])
def test_the_proximal_gradient_is_autograds(objective):
    """Three steps of SGD equal autograd on objective + (prox / 2) ||params - received||^2, written as a loss."""
    prox, lr = 0.7, 0.1
    method = FedAvg(prox=prox) if objective is None else FedAvg(objective, prox=prox)
    shared = task(optimizer=SGD(lr))
    work = method.client_updates(shared)["train"]
    down = begin(method, shared)
    carry = work.begin(down, {}, local(5, 6))
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), down["params"])
    stats = down["stats"]
    for batch in batches(3):
        before = stats
        carry, notes = work.step(down, carry, batch)
        plain, seen = method.objective(shared, params, before, batch)
        far = sum((p - q).square().sum() for p, q in zip(tree.leaves(params), tree.leaves(down["params"]), strict=True))
        gradients = torch.autograd.grad(plain + prox / 2 * far, list(tree.leaves(params)))
        moved = [p.detach() - lr * g for p, g in zip(tree.leaves(params), gradients, strict=True)]
        names = tree.flatten(params)
        params = tree.unflatten({name: p.requires_grad_() for name, p in zip(names, moved, strict=True)})
        stats = carry["stats"]
        assert float(notes.loss) == pytest.approx(float(plain.detach()), rel=1e-12)
        assert len(seen.moments) == 1
        assert furthest(carry["params"], tree.map(torch.detach, params)) < 1e-12
    assert furthest(carry["params"], down["params"]) > 1e-2


def test_every_visit_starts_with_a_fresh_optimizer_from_what_came_down():
    """Momentum is not carried from visit to visit, and nothing stays at the client."""
    method, shared = FedAvg(), task(optimizer=SGD(0.1, momentum=0.9))
    work = method.client_updates(shared)["train"]
    down = begin(method, shared)
    carry, _ = work.step(down, work.begin(down, {}, local(5, 6)), batches(1)[0])
    assert any(leaf.any() for leaf in tree.leaves(carry["optimizer"]))
    again = work.begin(down, {}, local(5, 6))
    assert not any(leaf.any() for leaf in tree.leaves(again["optimizer"]))
    assert again["params"] is down["params"]


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (
            SGD(0.1, momentum=0.9, weight_decay=0.01),
            torch.optim.SGD,
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
        ),
        (Adam(1e-2, eps=1e-3), torch.optim.Adam, {"lr": 1e-2, "eps": 1e-3}),
    ],
    ids=["sgd", "adam"],
)
def test_one_client_with_everything_is_centralized_training(ours, theirs, options):
    """A round of one client that holds all rows, whole-batch steps: the same as a module, its optimizer and a loop.

    Two epochs of one step each on all 20 images without augmentation. The rows come in another order each time, which
    changes a mean by rounding only. Parameters and running statistics agree.
    """
    held = dataset(((20, 0),), all_labels=True)
    shared = task(optimizer=ours)
    views = Views(labeled=Plain())
    method = FedAvg()
    server = begin(method, shared)
    simulation = simulate(method, shared, held, views=views, batching=Batching(20, epochs=2), cohort=1)
    (played,) = play(method, simulation, server, range(1))
    assert played.report.cost["labeled_steps"] == 2

    oracle = twin(TorchSmall(1, CLASSES, shared.network.width), server)
    optimizer = theirs(oracle.parameters(), **options)
    images = held.train.images.double() / 255 * 2 - 1
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(oracle(images), held.train.labels).backward()
        optimizer.step()
    for (name, p), leaf in zip(oracle.named_parameters(), tree.leaves(played.server["params"]), strict=True):
        torch.testing.assert_close(leaf, p.detach(), rtol=1e-9, atol=1e-10, msg=name)
    for layer, stats in played.server["stats"].items():
        torch.testing.assert_close(
            stats["mean"], oracle.get_buffer(f"{layer}.norm.running_mean"), rtol=1e-9, atol=1e-10
        )
        torch.testing.assert_close(stats["var"], oracle.get_buffer(f"{layer}.norm.running_var"), rtol=1e-9, atol=1e-10)


def test_equal_clients_come_back_as_one():
    """Clients that hold the same images and take one whole-batch step, unaugmented: their mean is any of them."""
    held = dataset(((6, 0),) * 3)
    copies = held.train.images[torch.from_numpy(held.split.rows(0, True))]
    labels = held.train.labels[torch.from_numpy(held.split.rows(0, True))]
    images, classes = held.train.images.clone(), held.train.labels.clone()
    for k in range(3):
        images[torch.from_numpy(held.split.rows(k, True))] = copies
        classes[torch.from_numpy(held.split.rows(k, True))] = labels
    held = type(held)(type(held.train)(images, classes), held.split)
    shared, method = task(), FedAvg()
    server = begin(method, shared)
    runs = [
        play(
            method,
            simulate(method, shared, held, views=Views(labeled=Plain()), batching=Batching(6), cohort=size),
            server,
            range(1),
        )[-1].server
        for size in (1, 3)
    ]
    assert furthest(runs[0], runs[1]) < 1e-12
    assert furthest(runs[0], server) > 1e-3
