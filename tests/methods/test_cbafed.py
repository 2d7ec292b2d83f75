"""CBAFed: thresholds, tails, shares and residual weights by hand; a local update compared with a torch module."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from method_helpers import assert_params_match, begin_update, make_random_images, make_torch_module, simulate_rounds

from halfmoon.api.types import Batch, ClientData
from halfmoon.core import tree
from halfmoon.core.optim import SGD
from halfmoon.engine.budget import ClientSize, compute_amount
from halfmoon.engine.sampling import Batching
from halfmoon.federation.contract.small_federation import (
    make_dataset,
    make_task,
    max_difference,
    start_server,
    trees_equal,
)
from halfmoon.methods.cbafed import CBAFed, CBAFedClient, blend_with_saved


def test_thresholds_by_hand():
    """Ten classes: r is the share. One has 0.55, nine 0.05: std^2 = 0.9 * 0.05^2 + 0.1 * 0.45^2 = 0.0225, std 0.15.

    0.05 + 0.84 - 0.15 = 0.74, and 0.55 + 0.84 - 0.15 = 1.24 is cut at 0.95. With four classes r is 0.4 of the share:
    all alike, 0.1 + 0.84; a class of share 0.07 has r = 0.028 and is in the tail.
    """
    share = torch.tensor([0.55, *[0.05] * 9], dtype=torch.float64)
    minimum, tail = CBAFed().thresholds(share)
    assert minimum.tolist() == pytest.approx([0.95, *[0.74] * 9], rel=1e-12)
    assert not tail.any()
    assert CBAFed().thresholds(torch.full((4,), 0.25))[0].tolist() == pytest.approx([0.94] * 4)
    tails = CBAFed().thresholds(torch.tensor([0.07, 0.08, 0.4, 0.45]))[1]
    assert tails.tolist() == [True, False, False, False]
    assert not CBAFed(tail=None).thresholds(torch.tensor([0.0, 1.0]))[1].any()
    assert CBAFed(adaptive=False).thresholds(share)[0].tolist() == pytest.approx([0.84] * 10)


def test_first_and_second_classes():
    """Shares (0, 1): class 0 is in the tail, r = (0, 0.2), std 0.1, T = (threshold - 0.1, threshold + 0.1) = (0.6,
    0.8).

    Class 0 with 0.7 passes; class 1 with 0.9 passes; class 1 with 0.75 does not, its second class does; 0 with 0.55
    does not, and its second class, 1, is in no tail.
    """
    client_update = CBAFedClient(make_task(), CBAFed(threshold=0.7, threshold_most=0.9))
    p = torch.tensor([[0.7, 0.3], [0.1, 0.9], [0.25, 0.75], [0.55, 0.45]]).double()
    pseudo = client_update.pseudo_label(p, torch.tensor([0.0, 1.0]).double())
    assert pseudo.label.tolist() == [0, 1, 0, 0]
    assert pseudo.weight.tolist() == [1, 1, 1, 0]
    assert pseudo.confidence.tolist() == pytest.approx([0.7, 0.9, 0.25, 0.55])


def test_local_update_with_labels_applies_the_residual():
    """Four labeled images in batches of two, back by 0.8 after every second epoch: after steps 4 and 8 of 9."""
    options = CBAFed(local_residual_every=2)
    shared = make_task(optimizer=SGD(0.5))
    client_update = options.client_updates(shared)["train"]
    broadcast = start_server(options, shared)
    x = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    nobody = ClientData(
        x, torch.zeros(4).long(), x[:0], torch.tensor(4), torch.tensor(0), {"weak": make_random_images(0, 0)}
    )
    carry = begin_update(client_update, broadcast, nobody)
    model = make_torch_module(broadcast)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    saved = {name: leaf.clone() for name, leaf in model.state_dict().items() if leaf.is_floating_point()}
    for number in range(9):
        y = torch.tensor([number % 4, 1])
        none = torch.zeros(0, dtype=torch.int64)
        batch = Batch(make_random_images(2, number), y, torch.arange(2), {"weak": make_random_images(0, 0)}, none)
        carry, _ = client_update.step(broadcast, carry, batch)
        optimizer.zero_grad()
        F.cross_entropy(model(batch.x), batch.y).backward()
        optimizer.step()
        if number in (3, 7):
            state = model.state_dict()
            saved = {name: 0.8 * old + 0.2 * state[name] for name, old in saved.items()}
            model.load_state_dict({**state, **saved})
    assert_params_match(carry["params"], model)
    for layer, stats in carry["stats"].items():
        mean = model.get_buffer(f"{layer}.norm.running_mean")
        torch.testing.assert_close(stats["mean"], mean, rtol=1e-8, atol=1e-10)


def test_a_client_with_labels_trains_eleven_epochs_in_the_authors_code():
    """4,750 labeled images in batches of 64: 11 * 74 steps, in which the local residual acts after 5 and 10 epochs; an
    epoch of a client without labels is one pass over what it accepts."""
    client_update = CBAFed(labeled_epochs=11).client_updates(make_task())["train"]
    rule = Batching(64, 64, epoch="larger")
    assert compute_amount(rule, client_update, ClientSize(4750, 250)) == (11 * 74, 64, 64, 0)
    assert compute_amount(rule, client_update, ClientSize(0, 5000)) == (79, 0, 64, 1)
    assert compute_amount(Batching(64, 64, steps=20), client_update, ClientSize(4750, 250)).steps == 20
    assert [11 * 74 * 64 // (4750 * 5), 74 * 64 // (4750 * 5)] == [2, 0]


def test_shares_are_those_of_all_labels_together():
    """Two clients of 3 labels + 1 pseudo-label and of 0 + 2: the mean by weight of their shares is counts / 6."""
    client_update = CBAFedClient(make_task(), CBAFed())
    broadcast = {"share": torch.full((4,), 0.25).double()}
    x = torch.zeros(5, 1, 1, 1, dtype=torch.uint8)
    given = [
        (
            ClientData(x[:3], torch.tensor([0, 0, 1]), x, torch.tensor(3), torch.tensor(5)),
            [0, 3, 0, 0, 0],
            [0, 1, 0, 0, 0],
        ),
        (
            ClientData(x[:0], torch.zeros(0).long(), x, torch.tensor(0), torch.tensor(5)),
            [2, 2, 1, 1, 1],
            [1, 1, 0, 0, 0],
        ),
    ]
    ups = []
    for data, label, weight in given:
        carry = {"params": {}, "stats": {}, "optimizer": {}, "label": torch.tensor(label)}
        carry["weight"] = torch.tensor(weight).double()
        ups.append(client_update.finish(broadcast, carry, data)[0])
    assert [float(upload.weight) for upload in ups] == [4, 2]
    mean = tree.weighted_mean(
        tree.stack([{"share": upload.update["share"]} for upload in ups]), torch.tensor([4.0, 2.0])
    )
    assert mean["share"].tolist() == pytest.approx([2 / 6, 1 / 6, 2 / 6, 1 / 6])


def test_server_applies_the_residual():
    """Every second round by a quarter of the way to what it kept: the model it started with, then the one of round 2."""
    shared = make_task(rounds=4)
    result = {}
    for share in (0.0, 0.25):
        method = CBAFed(residual=share, residual_every=2, threshold=0.3, warmup=0.0)
        result[share] = simulate_rounds(method, shared, make_dataset(labels_at="some"), rounds=4)
    plain = result[0.0]
    slow = result[0.25]
    first = start_server(CBAFed(), shared)
    assert trees_equal(plain[0].server["params"], slow[0].server["params"])
    wanted = blend_with_saved({"params": plain[1].server["params"]}, {"params": first["params"]}, 0.25)
    assert max_difference(slow[1].server["params"], wanted["params"]) < 1e-12
    assert trees_equal(slow[1].server["saved"]["params"], slow[1].server["params"])
    assert trees_equal(slow[2].server["saved"], slow[1].server["saved"])
    assert not trees_equal(slow[3].server["saved"], slow[1].server["saved"])
    assert trees_equal(plain[3].server["saved"]["params"], first["params"])


def test_warm_up_uses_only_labels():
    """No pseudo-label counts in it; clients without labels then weigh nothing."""
    method = CBAFed(threshold=0.1)
    shared = make_task(rounds=2)
    first, second = simulate_rounds(method, shared, make_dataset(labels_at="some"), cohort=4, rounds=2)
    assert first.report.pseudo is None or first.report.pseudo["share_used"] == 0
    assert second.report.pseudo["share_used"] > 0


@pytest.mark.parametrize(("share", "first"), [(0.5, 5), (0.3, 3), (0.25, 3), (0.0, 0), (1.0, 10)])
def test_the_warm_up_is_a_share_of_the_rounds(share, first):
    """Of ten rounds, `first` is the first one (from 0) with pseudo-labels; a threshold of 0 accepts all of them."""
    method = CBAFed(threshold=0.0, adaptive=False, warmup=share)
    x = torch.zeros(4, 1, 8, 8, dtype=torch.uint8)
    views = {"weak": make_random_images(4, 0)}
    data = ClientData(x[:0], torch.zeros(0).long(), x, torch.tensor(0), torch.tensor(4), views)
    for number in range(10):
        shared = replace(make_task(rounds=10), round=number)
        broadcast = start_server(method, shared)
        carry = method.client_updates(shared)["train"].begin(broadcast, {}, data)
        assert carry["weight"].tolist() == [float(number >= first)] * 4
