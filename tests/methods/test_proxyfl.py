"""ProxyFL: the client's loss compared with loops over images, the server's tuning compared with autograd and torch's SGD."""

from dataclasses import replace
from math import exp

import pytest
import torch
import torch.nn.functional as F
from method_helpers import make_random_images, simulate_rounds
from torch import Tensor

from halfmoon.api.types import Batch
from halfmoon.core import tree
from halfmoon.core.autodiff import grad_and_value
from halfmoon.core.tree import Tree
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    NETWORK,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods import registry
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import ICPL
from halfmoon.methods.proxyfl import ProxyTuning, compute_margin, compute_tuning_gradient, tune_classifier


def given() -> Batch:
    u = {"weak": make_random_images(5, 1), "strong": make_random_images(5, 2)}
    return Batch(make_random_images(3, 0), torch.tensor([0, 2, 1]), torch.arange(3), u, torch.arange(5))


def textbook(objective: ICPL, params: Tree, stats: Tree, came: Tree, prior: Tensor, batch: Batch) -> Tensor:
    """Return the loss, image by image and pair by pair."""
    weak = batch.u["weak"]
    strong = batch.u["strong"]
    order = torch.cat([batch.x, strong, weak])
    logits, features, _ = NETWORK.embed(params, order)
    p = logits.detach().softmax(-1)
    rows = [0, 1, 2, *range(8, 13)]  # the labeled images and the weak views
    g = NETWORK.predict(came["params"], came["stats"], order[rows]).softmax(-1)
    head = params["feature_head"]
    proxies = []
    for row in params["head"]["weight"]:
        v = params["proxy_head"]["weight"] @ row
        proxies.append(v / v.norm())
    z = []
    for f in features:
        v = head["weight"] @ f + head["bias"]
        z.append(v / v.norm())
    confident = []
    sets = []
    pull = []
    for k, row in enumerate(rows):
        wide = float(g[k].max()) >= objective.threshold
        confident.append(wide or (objective.sure == "either" and float(p[row].max()) >= objective.threshold))
        top = int(g[k].argmax())
        sets.append({top} if confident[-1] else {c for c in range(CLASSES) if g[k][c] > prior[c]})
        pull.append(proxies[top] if confident[-1] else sum(g[k][c] * proxies[c] for c in sets[-1]))
    if objective.labeled_sets == "label":
        sets[:3] = [{int(c)} for c in batch.y]
    of = [0, 1, 2, *[3 + i for i in range(5)] * 2]  # the image behind each row of `order`
    loss = F.cross_entropy(logits[:3], batch.y)
    for i in range(5):
        if confident[3 + i]:
            loss = loss + F.cross_entropy(logits[3 + i : 4 + i], g[3 + i].argmax()[None]) / 5
    contrast = torch.zeros((), dtype=torch.float64)
    for a in range(3, 13):
        positive = z[a] @ pull[of[a]]
        total = positive.exp()
        for b in range(13):
            if not sets[of[a]] & sets[of[b]] and float((z[a] @ z[b]).detach()) > 1e-6:
                total = total + (z[a] @ z[b]).exp()
        contrast = contrast + (total.log() - positive) / 10
    return loss + objective.proxy_weight * contrast


@pytest.mark.parametrize(
    "objective",
    [
        ICPL(threshold=0.42),
        ICPL(threshold=0.42, sure="global", labeled_sets="label"),
        ICPL(threshold=0.9, proxy_weight=0.5),
    ],
    ids=["code", "paper", "unsure"],
)
def test_the_loss_image_by_image(objective: ICPL):
    """Loss and gradient, which reaches the classifier through the proxies."""
    shared = make_task()
    g = torch.Generator().manual_seed(5)
    broadcast = start_server(FedAvg(objective), shared)
    head = broadcast["params"]["head"]["weight"]
    other = {"weight": 8 * torch.randn(head.shape, generator=g, dtype=head.dtype)}
    every = torch.cat([given().x, given().u["weak"]])
    text = NETWORK.predict({**broadcast["params"], "head": other}, broadcast["stats"], every)
    other["bias"] = -text.mean(0)  # so that the received model tells images apart
    came = {"params": {**broadcast["params"], "head": other}, "stats": broadcast["stats"]}
    params = tree.map(
        lambda leaf: leaf + 0.3 * torch.randn(leaf.shape, generator=g, dtype=leaf.dtype), broadcast["params"]
    )
    prior = torch.tensor([0.4, 0.2, 0.2, 0.2], dtype=torch.float64)
    aux = {"prior": prior, "counts": torch.zeros(CLASSES, dtype=torch.float64)}
    cached = {"received": came}
    gradient, loss, seen = grad_and_value(
        lambda p: objective(shared, p, broadcast["stats"], given(), aux, cached), params
    )
    wanted, expected, _ = grad_and_value(
        lambda p: (textbook(objective, p, broadcast["stats"], came, prior, given()), ()), params
    )
    assert float(loss) == pytest.approx(float(expected), rel=1e-12)
    assert max_difference(gradient, wanted) < 1e-12
    assert gradient["proxy_head"]["weight"].abs().max() > 1e-4
    (pseudo,) = seen.pseudo
    used = float(pseudo.weight.sum())
    assert float(seen.aux["counts"].sum()) == pytest.approx(3 + used)
    assert (0 < used < 5) == (objective.threshold < 0.9)


def test_the_prior_runs_by_hand():
    """decay 0.99 and counts (3, 1, 0, 0) from uniform: 0.99 / 4 + 0.01 (3/4, 1/4, 0, 0)."""
    uniform = torch.full((4,), 0.25, dtype=torch.float64)
    counts = torch.tensor([3.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    new = ICPL().finish(make_task(), {"prior": uniform, "counts": counts})["prior"]
    assert new.tolist() == pytest.approx([0.255, 0.25, 0.2475, 0.2475], rel=1e-12)
    assert trees_equal(ICPL().finish(make_task(), {"prior": new, "counts": counts * 0}), {"prior": new})


def test_tuning_by_autograd_and_sgd():
    """40 batches of rows of three clients: torch's SGD on the loss as it is written."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    mean = rows.mean(0)
    margin = compute_margin(mean)
    distances = (mean[:, None] - mean).norm(dim=-1) + torch.eye(5).double() * 1e9
    assert margin == pytest.approx(float(distances.min(-1).values.max()), rel=1e-12)
    actual = tune_classifier(mean, rows, 10, 0.05, 4, torch.Generator().manual_seed(2))
    weight = mean.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.05)
    orders = torch.Generator().manual_seed(2)
    for _ in range(10):
        for rows_of_batch in torch.randperm(15, generator=orders).split(4):
            points = rows.reshape(15, 4)[rows_of_batch]
            labels = rows_of_batch % 5
            away = (points[:, None] - weight).norm(dim=-1)
            away = away + margin * F.one_hot(labels, 5).double()
            optimizer.zero_grad()
            F.cross_entropy(-away, labels).backward()
            optimizer.step()
    torch.testing.assert_close(actual, weight.detach(), rtol=1e-10, atol=1e-12)
    assert (actual - mean).abs().max() > 1e-2


def test_a_step_by_hand():
    """Rows 0 and 2 on a line, a point of class 0 at 1, margin 2: distances 1 + 2 and 1, so p(0) = e^-3 / (e^-3 + e^-1).

    The slope of row 0 is (1 - p)(0 - 1)/1 = -(1 - p): it goes up, to the point; row 1 goes up by (1 - p), away from it.
    """
    mean = torch.tensor([[0.0], [2.0]], dtype=torch.float64)
    q = 1 - exp(-3) / (exp(-3) + exp(-1))
    assert compute_margin(mean) == 2.0
    found = compute_tuning_gradient(mean, torch.tensor([[1.0]], dtype=torch.float64), torch.tensor([0]), 2.0)
    assert found.flatten().tolist() == pytest.approx([-q, -q], rel=1e-12)
    assert compute_margin(mean * 1e6) == 100.0
    on = compute_tuning_gradient(
        mean, mean, torch.tensor([0, 1]), 0.0
    )  # a row on its point is pushed by the other's alone
    assert on.flatten().tolist() == pytest.approx([1 / (1 + exp(2)) / 2 * k for k in (1, -1)], rel=1e-12)


def test_any_averaging_method_can_take_the_step():
    """Zero passes change nothing; a hundred move the classifier's weight alone, in every method that averages."""
    for name in ("fedavg-fixmatch", "feddure", "fedloke"):
        inner = registry.entry(name).method
        runs = []
        for method in (inner, ProxyTuning(inner, tuning_passes=0), ProxyTuning(inner, tuning_lr=0.1)):
            shared = make_task(rounds=1)
            runs.append(simulate_rounds(method, shared)[-1].server)
        plain, none, tuned = runs
        assert trees_equal(plain, none)
        assert not torch.equal(plain["params"]["head"]["weight"], tuned["params"]["head"]["weight"])
        tuned["params"]["head"] = {**tuned["params"]["head"], "weight": plain["params"]["head"]["weight"]}
        assert trees_equal(plain, tuned)


def test_clients_without_weight_have_no_influence():
    """With nobody to learn from, the averaged classifier is what it was."""
    method = ProxyTuning(FedAvg())
    shared = replace(make_task(), rounds=1)
    held = make_simulation(method, shared).dataset
    empty = replace(held, split=replace(held.split, labeled=held.split.labeled & False))
    server = start_server(method, shared)
    assert trees_equal(run_rounds(method, make_simulation(method, shared, empty), server, range(1))[-1].server, server)


def test_the_solution_has_no_heads():
    server = start_server(ProxyTuning(), make_task())
    assert {"feature_head", "proxy_head"} < set(server["params"])
    assert not {"feature_head", "proxy_head"} & set(ProxyTuning().solution(make_task(), server)["params"])
