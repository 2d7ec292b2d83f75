"""(FL)^2: a step against ASAM on a torch module, thresholds and weights by hand, and its switches."""

import pytest
import torch
import torch.nn.functional as F
from method_helpers import begin_update, make_client_data, make_random_images, make_torch_module, simulate_rounds

from halfmoon.api.types import Batch
from halfmoon.core import tree
from halfmoon.core.optim import SGD
from halfmoon.federation.contract.small_federation import (
    NETWORK,
    make_dataset,
    make_task,
    max_difference,
    start_server,
    trees_equal,
)
from halfmoon.methods.fl2 import FL2, compute_asam_step
from halfmoon.methods.semifl import SemiFL


def test_a_step_up_by_hand():
    """Weight -3 with eta 1 has T = 4, bias 5 has 1. g = (1, 3): T g = (4, 3), of length 5; rho 10: 10 (16, 3) / 5."""
    params = {"a": {"weight": torch.tensor(-3.0), "bias": torch.tensor(5.0)}}
    gradient = {"a": {"weight": torch.tensor(1.0), "bias": torch.tensor(3.0)}}
    step = compute_asam_step(params, gradient, 10.0, 1.0)["a"]
    assert (float(step["weight"]), float(step["bias"])) == pytest.approx((32.0, 6.0))
    assert not compute_asam_step(params, tree.zeros_like(gradient), 10.0, 1.0)["a"]["weight"].any()


def test_a_step_as_asam_does_it():
    """On a module: climb in place, take the KL's gradient there, go back, add that of the CE, and step.

    Six rows: two with confidence 0.96 and 0.99, which alone count for the climb and for the KL.
    """
    options = FL2(rho=0.5, eta=0.05, sharpness_weight=0.7)
    shared = make_task(optimizer=SGD(0.3))
    broadcast = start_server(options, shared)
    confidence = torch.tensor([0.5, 0.96, 0.7, 0.99, 0.6, 0.4]).double()
    label = torch.tensor([0, 1, 2, 3, 0, 1])
    strong = make_random_images(6, 3)
    rows = torch.tensor([5, 1, 3, 0])
    carry = {
        "params": broadcast["params"], "optimizer": {}, "status": confidence.mean(), "label": label,
        "confidence": confidence, "weight": torch.ones(6).double(), "real": {},
    }  # fmt: skip
    none = make_random_images(0, 0)
    batch = Batch(none, label[:0], label[:0], {"strong": strong[rows]}, rows)
    client_update = options.client_updates(shared)["train"]
    new, notes = client_update.step(broadcast, carry, batch)

    model = make_torch_module(broadcast)
    leaves = list(model.named_parameters())
    y = label[rows]
    hard = (confidence[rows] >= 0.95).double()
    z = model(strong[rows])
    ce = F.cross_entropy(z, y, reduction="none")
    climb = torch.autograd.grad((ce * hard).mean(), [p for _, p in leaves], retain_graph=True)
    teach = torch.autograd.grad(ce.mean(), [p for _, p in leaves])
    scale = [p.detach().abs() + 0.05 if name.endswith("weight") else torch.ones_like(p) for name, p in leaves]
    length = sum((t * g).square().sum() for t, g in zip(scale, climb, strict=True)).sqrt()
    before = [p.detach().clone() for _, p in leaves]
    with torch.no_grad():
        for (_, p), t, g in zip(leaves, scale, climb, strict=True):
            p.add_(0.5 * t * t * g / length)
    kl = F.kl_div(model(strong[rows]).log_softmax(-1), z.detach().softmax(-1), reduction="none").sum(-1)
    flat = torch.autograd.grad((kl * hard).mean(), [p for _, p in leaves])
    expected = [p - 0.3 * (g + 0.7 * h) for p, g, h in zip(before, teach, flat, strict=True)]
    for (name, _), p, leaf in zip(leaves, expected, tree.leaves(new["params"]), strict=True):
        torch.testing.assert_close(leaf, p, rtol=1e-9, atol=1e-11, msg=name)
    assert float(notes.loss) == pytest.approx(float((ce.mean() + 0.7 * (kl * hard).mean()).detach()), rel=1e-9)
    assert float((kl * hard).mean().detach()) > 1e-4
    plain = FL2(sharpness=False).client_updates(shared)["train"].step(broadcast, carry, batch)[0]
    for p, g, leaf in zip(before, teach, tree.leaves(plain["params"]), strict=True):
        torch.testing.assert_close(leaf, p - 0.3 * g, rtol=1e-9, atol=1e-11)


def test_status_and_thresholds():
    """t is the mean confidence of the weak views under the received statistics; a client weighs 1 - t, or 1."""
    shared = make_task()
    broadcast = start_server(FL2(), shared)
    data = make_client_data(0, 5, weak=make_random_images(5, 1))
    p = NETWORK.predict(broadcast["params"], broadcast["stats"], data.views["weak"]).softmax(-1)
    t = p.max(-1).values.mean()
    q = p.mean(0)
    for options, weight in ((FL2(), float(1 - t)), (FL2(status_aware=False), 1.0)):
        client_update = options.client_updates(shared)["train"]
        carry = begin_update(client_update, broadcast, data)
        wanted = p.max(-1).values >= t * q[p.argmax(-1)] / q.max()
        assert client_update.drawable_rows(carry, data).tolist() == wanted.tolist()
        assert wanted.any()
        upload, _ = client_update.finish(broadcast, carry, data)
        assert float(upload.weight) == pytest.approx(weight, rel=1e-12)
    client_update = FL2(adaptive=False).client_updates(shared)["train"]  # nothing reaches 0.95
    carry = begin_update(client_update, broadcast, data)
    assert not client_update.drawable_rows(carry, data).any()
    assert float(client_update.finish(broadcast, carry, data)[0].weight) == 0


def test_without_its_parts_it_is_semifl_without_a_mix():
    """Two rounds, labels at the server: the same bits but for rounding, statistics and momentum included."""
    shared = make_task(rounds=2)
    runs = []
    for method in (
        FL2(adaptive=False, sharpness=False, status_aware=False, warmup=0, threshold=0.39),
        SemiFL(mix_weight=0.0, threshold=0.39),
    ):
        runs.append(simulate_rounds(method, shared, make_dataset(labels_at="server"), rounds=2)[-1])
    assert max_difference(runs[0].server, runs[1].server) < 1e-9
    assert runs[0].report.cost == runs[1].report.cost


def test_each_switch_changes_the_run():
    """With labels at the server; the server's training before the first round too."""
    shared = make_task(rounds=1)
    options = {"threshold": 0.3, "warmup": 1}
    every = [FL2(**options, **{name: False}) for name in ("adaptive", "sharpness", "status_aware")]
    methods = (FL2(**options), *every, FL2(threshold=0.3, warmup=2))
    servers = [simulate_rounds(method, shared, make_dataset(labels_at="server"))[-1].server for method in methods]
    assert not any(trees_equal(one, other) for k, one in enumerate(servers) for other in servers[:k])
