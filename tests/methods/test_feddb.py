"""FedDB: APP-U, debiased labels and the clients' weights by hand; what it comes to where nothing is debiased."""

from dataclasses import dataclass, replace
from math import exp, log, sqrt
from typing import Any

import pytest
import torch
from method_helpers import begin_update, simulate_rounds
from test_objectives import Line, W
from torch import Tensor
from torch.func import grad

from halfmoon.api.types import Batch, ClientData, Task
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import SGD
from halfmoon.federation.contract.small_federation import (
    ADAM,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods.averaging import average_uploads
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.feddb import FedDB, compute_aggregation_weights, distance_from_uniform
from halfmoon.methods.objectives import FixMatch
from halfmoon.methods.objectives.base import debias_logits

WAYS = pytest.mark.parametrize("dma", ["paper", "released", "logits", "uniform", "size"])
DPL = FixMatch(0.39, labels="round", debias=True, mean="used")


def pixels(*values: float) -> Tensor:
    """Return one-pixel images."""
    return torch.tensor(values, dtype=torch.float64).view(-1, 1, 1, 1)


def line(method: FedDB, lr: float = 0.5) -> tuple[Any, dict]:
    """Return the work of a method, and a model of the one weight ln 3 (probabilities (3/4, 1/4) at x = 1)."""
    shared = Task(Line(1), SGD(lr), Normalize((0.5,), (0.5,), torch.float64))
    return method.client_updates(shared)["train"], shared.network.init(torch.Generator())


def client(*weak: float, labeled: int = 1) -> ClientData:
    """Return a client whose unlabeled rows have these weak views."""
    no_images = torch.zeros(len(weak), 1, 1, 1, dtype=torch.uint8)
    counts = torch.tensor(labeled), torch.tensor(len(weak))
    return ClientData(no_images[:labeled], torch.zeros(labeled), no_images, *counts, {"weak": pixels(*weak)})


def given(strong: list[float], weak: list[float], rows: list[int]) -> Batch:
    """Return a batch with one labeled image x = 1 of class 0."""
    return Batch(
        pixels(1),
        torch.tensor([0]),
        torch.tensor([0]),
        {"weak": pixels(*weak), "strong": pixels(*strong)},
        torch.tensor(rows),
    )


def test_app_u_and_labels_by_hand():
    """Weak views 1, 1, -1 and 2 have class 0 with 3/4, 3/4, 1/4 and 9/10: APP-U is (2.65, 1.35) / 4.

    Over it, (3/4, 1/4) has the odds 3 * 1.35 / 2.65 = 1.528 and is class 0 with 0.604; x = -1 has (1/3) * 0.509 = 0.17,
    class 1 with 0.855; x = 2 has 9 * 0.509, class 0 with 0.821. threshold = 0.7 lets rows 2 and 3 through;
    undebiased, 0 too. The loss of rows (2, 0) is ln(4/3) + CE of class 1 at its strong view x = -1, ln(4/3), over the
    one that is used.
    """
    client_update, model = line(FedDB(threshold=0.7))
    carry = begin_update(client_update, model, client(1, 1, -1, 2))
    appu = torch.tensor([2.65 / 4, 1.35 / 4], dtype=torch.float64)
    torch.testing.assert_close(carry["appu"], appu, rtol=1e-12, atol=0)
    _, notes = client_update.step(model, carry, given([-1, 5], [-1, 1], [2, 0]))
    odds = 1.35 / 2.65
    (pseudo,) = notes.pseudo
    assert pseudo.label.tolist() == [1, 0]
    assert pseudo.confidence.tolist() == pytest.approx([1 / (1 + odds / 3), 3 * odds / (1 + 3 * odds)], rel=1e-9)
    assert pseudo.weight.tolist() == [1.0, 0.0]
    assert float(notes.loss) == pytest.approx(2 * log(4 / 3), rel=1e-9)
    plain, _ = line(FedDB(threshold=0.7, debias=False))
    carry = begin_update(plain, model, client(1, 1, -1, 2))
    assert plain.step(model, carry, given([-1, 5], [-1, 1], [2, 0]))[1].pseudo[0].weight.tolist() == [1.0, 1.0]


def test_a_gradient_by_hand():
    """-1/4 of the labeled image, and of class 1 at x = -1, where class 0 has 1/4: (1/4) * -1. SGD at 1/2 adds 1/4."""
    client_update, model = line(FedDB(threshold=0.7))
    carry = begin_update(client_update, model, client(1, 1, -1, 2))
    new, _ = client_update.step(model, carry, given([-1, 5], [-1, 1], [2, 0]))
    assert float(new["params"]["w"]) == pytest.approx(W + 0.5 * 0.5, rel=1e-12)


def test_accumulation_by_hand():
    """A whole set in a step is an epoch: p <- gamma p + (1 - gamma) p_e, p_e with the model in front of the step.

    Views 1 and 2 of weight ln 3: p = (0.825, 0.175), and so p_e in the first step. After it the weight is w, and
    p_e = (s(w) + s(2 w)) / 2 with the logistic s. A minibatch of one of two images is half an epoch: sqrt(gamma).
    """
    client_update, model = line(FedDB(threshold=0.7, gamma=0.25))
    data = client(1, 2)
    carry = begin_update(client_update, model, data)
    carry, _ = client_update.step(model, carry, given([1, 1], [1, 2], [0, 1]))
    assert carry["appu"].tolist() == pytest.approx([0.825, 0.175], rel=1e-12)
    w = float(carry["params"]["w"])
    assert w > W + 0.1
    s = lambda z: 1 / (1 + exp(-z))  # noqa: E731
    second, _ = client_update.step(model, carry, given([1, 1], [1, 2], [0, 1]))
    moved = 0.25 * 0.825 + 0.75 * (s(w) + s(2 * w)) / 2
    assert float(second["appu"][0]) == pytest.approx(moved, rel=1e-12)
    half, _ = client_update.step(model, carry, given([1], [2], [1]))
    assert float(half["appu"][0]) == pytest.approx(0.5 * 0.825 + 0.5 * s(2 * w), rel=1e-12)
    upload, _ = client_update.finish(model, half, data)
    assert float(upload.aux["appu"][0]) == float(half["appu"][0])
    assert upload.aux["appu"].shape == (2,)


def test_other_accumulations_by_hand():
    """ "finish": one sweep with the trained model, weighted by the epochs seen. "none": the round's start.

    "used" counts only the views of used pseudo-labels (of rows 2 and 0 the first: see the test of labels), and leaves APP-U
    where there is none.
    """
    s = lambda z: 1 / (1 + exp(-z))  # noqa: E731
    data = client(1, 2)
    for how, epochs in (("finish", 1), ("finish", 1.5), ("none", 1)):
        client_update, model = line(FedDB(threshold=0.7, gamma=0.25, accumulate=how))
        assert client_update.requirements.views == ("strong",)
        carry = begin_update(client_update, model, data)
        carry, _ = client_update.step(model, carry, given([1, 1], [], [0, 1]))
        if epochs > 1:
            carry, _ = client_update.step(model, carry, given([1], [], [0]))
        assert carry["appu"].tolist() == pytest.approx([0.825, 0.175], rel=1e-12)
        upload, _ = client_update.finish(model, carry, data)
        w = float(carry["params"]["w"])
        keep = 0.25**epochs if how == "finish" else 1.0
        assert float(upload.aux["appu"][0]) == pytest.approx(
            keep * 0.825 + (1 - keep) * (s(w) + s(2 * w)) / 2, rel=1e-12
        )
    client_update, model = line(FedDB(threshold=0.7, gamma=0.25, accumulate_over="used"))
    carry = begin_update(client_update, model, client(1, 1, -1, 2))
    before = float(carry["appu"][0])
    new, _ = client_update.step(model, carry, given([1, 1], [-1, 1], [2, 0]))  # of these two, the first
    keep = sqrt(0.25)
    assert float(new["appu"][0]) == pytest.approx(keep * before + (1 - keep) * 0.25, rel=1e-12)
    new, _ = client_update.step(model, carry, given([1], [1], [0]))  # none
    assert float(new["appu"][0]) == before


def test_no_confident_image_leaves_the_labeled_loss():
    """Above 1 no pseudo-label counts: the step is that of the labeled image alone, and nothing is divided by zero."""
    for mean in ("used", "all"):
        client_update, model = line(FedDB(threshold=1.01, mean=mean))
        carry = begin_update(client_update, model, client(1, 2))
        new, notes = client_update.step(model, carry, given([1, 1], [1, 2], [0, 1]))
        assert float(notes.loss) == pytest.approx(log(4 / 3), rel=1e-12)
        assert float(new["params"]["w"]) == pytest.approx(W + 0.5 / 4, rel=1e-12)


def test_a_uniform_app_u_changes_no_label():
    """Logits over a flat prior have the same softmax; a client without unlabeled rows has a flat one, and sends it."""
    logits = torch.randn(20, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    flat = torch.full((7,), 1 / 7, dtype=torch.float64)
    torch.testing.assert_close(debias_logits(logits, flat).softmax(-1), logits.softmax(-1), rtol=1e-12, atol=1e-14)
    client_update, model = line(FedDB(accumulate="finish"))
    data = client()
    carry = begin_update(client_update, model, data)
    upload, _ = client_update.finish(model, carry, data)
    assert upload.aux["appu"].tolist() == [0.5, 0.5]


def average_by_rows(*, keep: bool, **options: Any) -> tuple[Any, Any]:
    """Return FedDB without what sets it apart, and FedAvg of its loss."""
    method = FedDB(threshold=0.39, dma="size", accumulate="none", keep_optimizer=keep, **options)
    return method, FedAvg(replace(DPL, **options), keep_optimizer=keep)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("rule", [{}, {"statistics": "separate", "labeling": "running"}])
@pytest.mark.parametrize("options", [{}, {"labels": "step"}, {"debias": False}, {"mean": "all"}], ids=str)
def test_by_rows_and_without_accumulation_it_is_fedavg_bit_by_bit(keep, rule, options):
    """Two rounds: FedDB(dma="size") and FedAvg(FixMatch(labels="round", debias=True, mean="used"))."""
    shared = make_task(**rule)
    runs = [simulate_rounds(method, shared, rounds=2)[-1] for method in average_by_rows(keep=keep, **options)]
    assert trees_equal(runs[0].server, runs[1].server)
    assert trees_equal(runs[0].state, runs[1].state)
    assert runs[0].report.pseudo == runs[1].report.pseudo


@pytest.mark.parametrize("how", ["step", "finish"])
def test_accumulating_changes_no_step(how):
    """What is accumulated goes to the server: with weights by rows, the model is the same in every bit."""
    shared = make_task()
    plain = FedDB(threshold=0.39, dma="size", accumulate="none")
    one, two = (
        simulate_rounds(method, shared, rounds=2)[-1].server for method in (plain, replace(plain, accumulate=how))
    )
    assert trees_equal(one, two)


@WAYS
def test_equal_app_u_weights_all_clients_equally(dma):
    """Whatever it is: nothing can be balanced. (By rows, rows decide.)"""
    for row in ([0.25] * 4, [0.7, 0.1, 0.1, 0.1]):
        appu = torch.tensor([row] * 3, dtype=torch.float64)
        if dma != "size":
            torch.testing.assert_close(
                compute_aggregation_weights(appu, dma), torch.full((3,), 1 / 3, dtype=torch.float64)
            )


def test_the_weights_by_hand():
    """Two clients, two classes: (1, 0) and (1/4, 3/4). The mean is (5/8, 3/8), its distance from even sqrt(2) / 8.

    The slope of the norm is (p - even . r) / |r|: r = (1, -1) / 8, so p . r = 1/8 and -1/16; over sqrt(2) / 8 that is
    1 / sqrt(2) and -1 / (2 sqrt(2)). "paper": softmax of (1/2 - 0.7071, 1/2 + 0.3536), whose odds are exp(1.0607).
    "released": the mean of squares has slopes r . p = 1/8 and -1/16, and decay adds 0.45: the weights' difference
    becomes -1.9 * 3/16. "logits": beta_1 beta_2 (g_1 - g_2) = 1.0607 / 4 down and up: a difference of 1.0607 / 2.
    Even weights would be 1/3 and 2/3: p = (1/3 + 1/6, 1/2).
    """
    appu = torch.tensor([[1.0, 0.0], [0.25, 0.75]], dtype=torch.float64)
    even = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert float(distance_from_uniform(even, appu)) == pytest.approx(sqrt(2) / 8, rel=1e-12)
    slopes = grad(distance_from_uniform)(even, appu).tolist()
    assert slopes == pytest.approx([1 / sqrt(2), -1 / (2 * sqrt(2))], rel=1e-12)
    gap = 1.5 / sqrt(2)
    for dma, odds in (("paper", gap), ("released", 1.9 * 3 / 16), ("logits", gap / 2)):
        weights = compute_aggregation_weights(appu, dma, steps=1)
        assert float(weights[1] / weights[0]) == pytest.approx(exp(odds), rel=1e-9)
        assert float(weights.sum()) == pytest.approx(1)
    half = compute_aggregation_weights(appu, "paper", steps=1, lr=0.5)
    assert float(half[1] / half[0]) == pytest.approx(exp(gap / 2), rel=1e-9)
    assert compute_aggregation_weights(appu, "uniform").tolist() == [0.5, 0.5]
    best = compute_aggregation_weights(appu, "logits", steps=1000, lr=0.02)
    assert best.tolist() == pytest.approx([1 / 3, 2 / 3], abs=1e-2)
    assert float(distance_from_uniform(torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), appu)) < 1e-12


def test_released_code_equals_a_new_torch_optimizer_in_each_iteration():
    """100 times: MSE, SGD(lr 1, momentum 0.9, Nesterov, weight decay 0.9) from scratch, softmax of the weights."""
    g = torch.Generator().manual_seed(1)
    appu = torch.rand(6, 5, generator=g, dtype=torch.float64)
    appu = appu / appu.sum(-1, keepdim=True)
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    for _ in range(100):
        leaf = weights.clone().requires_grad_()
        optimizer = torch.optim.SGD([leaf], lr=1.0, momentum=0.9, nesterov=True, weight_decay=0.9)
        torch.nn.functional.mse_loss(leaf @ appu, torch.full((5,), 0.2, dtype=torch.float64)).backward()
        optimizer.step()
        weights = leaf.detach().softmax(0)
    torch.testing.assert_close(compute_aggregation_weights(appu, "released"), weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("classes", "concentration", "wanted"),
    [
        (10, 0.1, {"uniform": 0.21, "released": 0.21, "paper": 0.18, "logits": 0.14}),
        (10, 1.0, {"uniform": 0.085, "released": 0.085, "paper": 0.075, "logits": 0.05}),
        (100, 1.0, {"uniform": 0.032, "released": 0.032, "paper": 0.032, "logits": 0.031}),
    ],
)
def test_the_readings_of_dma_on_random_clients(classes, concentration, wanted):
    """20 sets of 10 clients with APP-U ~ Dirichlet: the distance that each reading leaves, to within a tenth.

    Uniform weights leave sqrt((1 - 1/K) / (K a + 1) / 10) on average (each client's distance squared is
    (1 - 1/K) / (K a + 1)): 0.21, 0.090 and 0.031. The released reading is uniform to 2 %; Algorithm 2 gains a little;
    descending on logits gains most. Worked out apart from this code: .198 .196 .172 .133, .073 .073 .066 .045,
    and .032 .032 .032 .031, from other draws.
    """
    g = torch.Generator().manual_seed(0)
    left: dict[str, list[float]] = {name: [] for name in wanted}
    for _ in range(20):
        gammas = torch._standard_gamma(torch.full((10, classes), concentration, dtype=torch.float64), generator=g)
        appu = gammas / gammas.sum(-1, keepdim=True)
        for name, found in left.items():
            weights = compute_aggregation_weights(appu, name)  # pyright: ignore
            assert float(weights.sum()) == pytest.approx(1.0, rel=1e-12)
            assert name != "released" or 0.93 < float((weights * 10).min()) <= float((weights * 10).max()) < 1.07
            found.append(float(distance_from_uniform(weights, appu)))
    means = {name: sum(found) / 20 for name, found in left.items()}
    assert means == pytest.approx(wanted, rel=0.15)
    assert means["logits"] < means["paper"] < means["released"] <= means["uniform"] * 1.0001


@WAYS
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_server_by_hand(dma, momentum):
    """Two rounds: params move by v <- momentum v + old - mean; statistics are the weighted mean."""
    shared = make_task(optimizer=ADAM)
    method = FedDB(threshold=0.39, dma=dma, server_momentum=momentum)
    server = start_server(method, shared)
    assert ("momentum" in server) == bool(momentum)
    params = server["params"]
    v = tree.zeros_like(server["params"])
    twin = make_simulation(method, shared)
    simulation = make_simulation(method, shared)
    for number in range(2):
        twin.open(number)
        upload = twin.query("train", {"params": server["params"], "stats": server["stats"]})
        weights = upload.weight if dma == "size" else compute_aggregation_weights(upload.aux["appu"], dma)
        mean = average_uploads(upload._replace(weight=weights))
        v = tree.map(lambda v, p, m: momentum * v + p - m, v, params, mean["params"])
        params = tree.map(torch.sub, params, v)
        (result,) = run_rounds(method, simulation, server, range(number, number + 1))
        server = result.server
        assert max_difference(server["params"], params) < 1e-12
        assert max_difference(server["stats"], mean["stats"]) < 1e-12


@dataclass
class Answers:
    """A federation whose clients have replied already."""

    upload: Upload

    def query(self, client_update: str, broadcast: tree.Tree) -> Upload:
        return self.upload


@WAYS
def test_client_without_rows_has_no_weight(dma):
    """Its model is the one it was sent; where nobody has rows, the server's remains."""
    server = {"params": {"w": torch.tensor([7.0])}, "stats": {}}
    appu = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]])
    upload = {"params": {"w": torch.tensor([[1.0], [1.0], [7.0]])}, "stats": {}}
    federation: Any = Answers(Upload(upload, torch.tensor([3.0, 2.0, 0.0]), {"appu": appu}))
    assert FedDB(dma=dma).round(make_task(), server, federation)["params"]["w"].tolist() == pytest.approx([1.0])
    federation = Answers(Upload(upload, torch.zeros(3), {"appu": appu}))
    assert FedDB(dma=dma).round(make_task(), server, federation)["params"]["w"].tolist() == [7.0]


def test_uploads_and_costs_are_counted():
    """`classes` floats more than FedAvg up, nothing more down; sweeps and accumulation are counted.

    Each of the three clients sweeps its unlabeled rows once, "finish" twice; "step" passes the minibatch once more.
    """
    shared = make_task()
    held = make_dataset()
    costs = {}
    for how in ("none", "step", "finish"):
        method = FedDB(threshold=0.39, accumulate=how)
        costs[how] = simulate_rounds(method, shared)[-1]
    base = FedAvg(DPL, keep_optimizer=True)
    reference = simulate_rounds(base, shared)[-1]
    first = costs["none"].report.cost
    cohort = costs["none"].report.cohort
    swept = sum(held.split_size(k).unlabeled for k in cohort)
    assert first["bytes_down"] == reference.report.cost["bytes_down"]
    assert first["bytes_up"] == reference.report.cost["bytes_up"] + 3 * 4 * 8
    assert first["forward"] == reference.report.cost["forward"]
    assert costs["finish"].report.cost["forward"] == first["forward"] + swept
    assert costs["step"].report.cost["forward"] == first["forward"] + first["unlabeled_images"]
    assert costs["step"].report.cost["backward"] == first["backward"]
