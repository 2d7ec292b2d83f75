"""SemiFL: the loss and the server's step by hand, compared with autograd, and where it is another method or plain SGD."""

from dataclasses import replace
from math import log

import pytest
import torch
import torch.nn.functional as F
from method_helpers import (
    assert_params_match,
    begin_update,
    make_torch_module,
    simulate_rounds,
    simulate_with_both_executors,
)
from scripted_federation import (
    OneWeightNetwork,
    ScriptedFederation,
    get_weight,
    make_one_weight_params,
    make_pixel_images,
    make_upload,
)
from test_batchnorm_stats import counted

from halfmoon.api.types import Batch, ClientData
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.optim import SGD
from halfmoon.data.partition.split import SERVER
from halfmoon.data.views import Plain
from halfmoon.engine.driver import ClientContext, ClientTask
from halfmoon.engine.local_clients import update_one
from halfmoon.engine.sampling import Amount, Batching, Views
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    NETWORK,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.objectives import FixMatch
from halfmoon.methods.semifl import SemiFL, SemiFLClient, step_towards_mean
from halfmoon.models import SmallCNN

PLAIN = Views(Plain(), {"plain": Plain(), "weak": Plain(), "strong": Plain()})
FREE = SmallCNN(1, CLASSES, 4, "group")
"""A network whose predictions need no statistics."""


def client(views: torch.Tensor, labeled: int = 0) -> ClientData:
    """Return a client whose rows have these weak views."""
    n = len(views)
    x = torch.zeros(labeled, *views.shape[1:], dtype=torch.uint8)
    u = torch.zeros(views.shape, dtype=torch.uint8)
    counts = torch.tensor(labeled), torch.tensor(n)
    return ClientData(x, torch.zeros(labeled, dtype=torch.int64), u, *counts, {"weak": views})


def one_step(method: SemiFL, w: float, batch: Batch, rows: torch.Tensor, labeled: int = 0) -> tuple[float, float]:
    """Return the loss and the gradient of a first step of `OneWeightNetwork` at w, by SGD of rate 1."""
    client_update = method.client_updates(make_task(OneWeightNetwork(), optimizer=SGD(1.0), statistics="separate"))[
        "train"
    ]
    broadcast = {"params": make_one_weight_params(w), "stats": {}}
    carry = begin_update(client_update, broadcast, client(rows, labeled))
    carry, notes = client_update.step(broadcast, carry, batch)
    return float(notes.loss), w - get_weight(carry["params"])


def batch_of(
    strong: list[float],
    weak: list[float],
    others: list[float],
    rows: list[int],
    second_batch_rows: list[int],
    mix: float,
):
    """Return a batch of `OneWeightNetwork` images without labels."""
    drawn = {"second_batch_rows": torch.tensor(second_batch_rows), "mix": torch.tensor(mix, dtype=torch.float64)}
    u = {"weak": make_pixel_images(weak), "strong": make_pixel_images(strong)}
    no_rows = torch.zeros(0, dtype=torch.int64)
    return Batch(
        make_pixel_images([]), no_rows, no_rows, u, torch.tensor(rows), {"weak": make_pixel_images(others)}, drawn
    )


def test_the_loss_by_hand():
    """Logits (w x, 0) at w = 0: every probability is 1/2, every cross-entropy log 2, so the loss is 2 log 2 = 1.386.

    d CE(y) / dw = (1/2 - [y = 0]) x. The fix row has the label 0 (ties go to the first class), as has the other row.
    Strong view 2: -1. Mixed with l = 1/4 of 4 and 8: m = 1/4 * 4 + 3/4 * 8 = 7, and both labels are 0: -3.5. In all
    -4.5; with mix_weight 2, -8.
    """
    rows = make_pixel_images([0.0, 0.0])
    batch = batch_of([2.0], [4.0], [8.0], [0], [1], 0.25)
    assert one_step(SemiFL(threshold=0.5), 0.0, batch, rows) == pytest.approx((2 * log(2), -4.5))
    assert one_step(SemiFL(threshold=0.5, mix_weight=2.0), 0.0, batch, rows) == pytest.approx((3 * log(2), -8.0))
    assert one_step(SemiFL(threshold=0.5, unlabeled_weight=0.5), 0.0, batch, rows) == pytest.approx((log(2), -2.25))


def test_each_image_of_a_mixture_contributes_its_label():
    """At w = log 3 the weak views 1 and -1 are of class 0 and 1, each with probability 3/4.

    l = 1/4 of a weak view 1 and 3/4 of one -1/3 make 0: probability 1/2, log 2 for either label; its gradient times 0
    is 0. The strong view 1 costs -log(3/4), gradient (3/4 - 1) * 1. With the other view 1: m = 1, p = 3/4: gradient
    l (3/4 - 1) + (1 - l) 3/4 = 3/4 - l = 1/2, and the loss l log(4/3) + (1 - l) log 4. The coefficient is not folded.
    """
    rows = make_pixel_images([1.0, -1.0])
    w = log(3)
    flat = batch_of([1.0], [1.0], [-1 / 3], [0], [1], 0.25)
    assert one_step(SemiFL(threshold=0.7), w, flat, rows) == pytest.approx((log(4 / 3) + log(2), -0.25))
    steep = batch_of([1.0], [1.0], [1.0], [0], [1], 0.25)
    loss = log(4 / 3) + 0.25 * log(4 / 3) + 0.75 * log(4)
    assert one_step(SemiFL(threshold=0.7), w, steep, rows) == pytest.approx((loss, 0.25))


def test_confident_rows_are_drawn_and_mixed_with_any_rows():
    """p = 3/4 at the pixels 1 and -1, 0.634 at 1/2: above threshold = 0.7 stand the first two, with the labels 0 and 1.

    A client that is confident of nothing weighs 0; with labels of its it retains all rows and weighs 1.
    """
    client_update = SemiFL(threshold=0.7).client_updates(make_task(OneWeightNetwork()))["train"]
    requirements = client_update.requirements
    assert (requirements.precomputed_views, requirements.views, requirements.second_batch, requirements.mixup) == (
        ("weak",),
        ("weak", "strong"),
        ("weak",),
        0.75,
    )
    broadcast = {"params": make_one_weight_params(log(3)), "stats": {}}
    for values, labeled, stored, share in (
        ([1.0, 0.5, -1.0], 0, [True, False, True], 1),
        ([0.5, 0.2], 0, [False, False], 0),
        ([0.5, 0.2], 3, [True, True], 1),
        ([1.0, 0.2], 3, [True, False], 1),
        ([], 3, [], 0),
    ):
        data = client(make_pixel_images(values), labeled)
        carry = begin_update(client_update, broadcast, data)
        drawn = client_update.drawable_rows(carry, data)
        assert drawn is not None
        assert drawn.tolist() == stored
        assert float(client_update.finish(broadcast, carry, data)[0].weight) == share
    assert SemiFL(mix_weight=0).client_updates(make_task())["train"].requirements.second_batch == ()
    assert SemiFL(mix_weight=0).client_updates(make_task())["train"].requirements.mixup is None
    assert SemiFL(concentration=0.5).client_updates(make_task())["train"].requirements.mixup == 0.5


def test_debiasing_by_hand():
    """Pseudo-labels (.9, .1), (.8, .2), (.6, .4) have the mean (.7667, .2333).

    Divided by it, the third is (.6 / .7667, .4 / .2333) = (.7826, 1.7143): class 1 with 1.7143 / 2.4969 = .6866. The
    first remains class 0 with (1.1739, .4286): .7326; the second too, with (1.0435, .8571): .5490.
    """
    broadcast = {"params": make_one_weight_params(1.0), "stats": {}}
    rows = make_pixel_images([log(9), log(4), log(1.5)])
    found = {}
    for debias in (True, False):
        client_update = SemiFL(debias=debias).client_updates(make_task(OneWeightNetwork()))["train"]
        found[debias] = begin_update(client_update, broadcast, client(rows))
    assert found[True]["label"].tolist() == [0, 0, 1]
    assert found[True]["confidence"].tolist() == pytest.approx([0.7326, 0.5490, 0.6866], abs=1e-4)
    assert found[False]["label"].tolist() == [0, 0, 0]
    assert found[False]["confidence"].tolist() == pytest.approx([0.9, 0.8, 0.6])


def random_batch(labeled: int, seed: int) -> tuple[Batch, torch.Tensor]:
    """Return a batch of `labeled` + 6 images in random pixels, and the weak views of the client's nine rows."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)  # noqa: E731
    drawn = {"second_batch_rows": torch.tensor([8, 8, 0, 3, 1, 5]), "mix": torch.tensor(0.3, dtype=torch.float64)}
    y = torch.randint(0, CLASSES, (labeled,), generator=g)
    rows = torch.tensor([4, 1, 7, 0, 6, 2])
    u = {"weak": draw(6), "strong": draw(6)}
    return Batch(draw(labeled), y, torch.arange(labeled), u, rows, {"weak": draw(6)}, drawn), draw(9)


def spread(params: tree.Tree, images: torch.Tensor, g: torch.Generator) -> tree.Tree:
    """Return a head that gives images different classes: large weights, and logits whose mean over images is 0."""
    features = NETWORK.embed(params, images)[1]
    head = 20 * torch.randn(CLASSES, features.shape[-1], generator=g, dtype=features.dtype)
    return {"weight": head, "bias": -head @ features.mean(0)}


@pytest.mark.parametrize("labeled", [0, 5])
@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("labeling", ["batch", "running"])
@pytest.mark.parametrize("statistics", ["joint", "separate"])
@pytest.mark.parametrize("labels", ["round", "step"])
@pytest.mark.parametrize("drop", [True, False])
def test_the_gradient_is_autograds(drop, labels, statistics, labeling, debias, labeled):
    """A step equals autograd on the formula, for all readings of the labels, the statistics, and whence they come."""
    lr = 0.1
    o = {"labels": labels, "debias": debias, "mix_weight": 0.7, "unlabeled_weight": 1.3, "drop_unsure": drop}
    shared = make_task(optimizer=SGD(lr), statistics=statistics, labeling=labeling)
    batch, sweep = random_batch(labeled, 1)
    g = torch.Generator().manual_seed(2)
    model = start_server(SemiFL(), shared)
    model["params"]["head"] = spread(model["params"], sweep, g)
    near = NETWORK.train(model["params"], sweep)[1]
    stats = tree.map(lambda leaf: leaf + 0.01 * torch.rand(leaf.shape, generator=g, dtype=leaf.dtype), near)
    broadcast = {"params": model["params"], "stats": stats}

    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), broadcast["params"])
    mixed = 0.3 * batch.u["weak"] + 0.7 * batch.second_batch["weak"]
    whole = NETWORK.predict(broadcast["params"], stats, sweep)
    weak = (batch.u["weak"], batch.second_batch["weak"])
    if labels == "round":
        predictions = [whole[batch.u_rows], whole[batch.mixing["second_batch_rows"]]]
    elif labeling == "running":
        predictions = [NETWORK.predict(params, stats, each) for each in weak]
    else:
        predictions = [NETWORK.train(params, each)[0] for each in weak]
    probabilities = [each.detach().softmax(-1) for each in predictions]
    if debias:
        prior = whole.softmax(-1).mean(0)
        probabilities = [(each / prior) / (each / prior).sum(-1, keepdim=True) for each in probabilities]
    (confidence, fix), (_, mix) = (each.max(-1) for each in probabilities)
    threshold = float(confidence.sort().values[2:4].mean())
    confident = confidence >= threshold
    assert int(confident.sum()) == 3
    assert len(fix.unique()) > 1
    there = confident if drop and labels == "step" else torch.ones_like(confident)
    groups = [batch.x, batch.u["strong"][there], mixed[there]]
    if statistics == "joint":
        outs = NETWORK.train(params, torch.cat(groups))[0].split([len(each) for each in groups])
    else:
        outs = [NETWORK.train(params, each)[0] if len(each) else each.new_zeros(0, CLASSES) for each in groups]
    strong, mixture = (each[confident[there]] for each in outs[1:])
    loss = F.cross_entropy(strong, fix[confident]) + 0.7 * 0.3 * F.cross_entropy(mixture, fix[confident])
    loss = 1.3 * (loss + 0.7 * 0.7 * F.cross_entropy(mixture, mix[confident]))
    if labeled:
        loss = loss + F.cross_entropy(outs[0], batch.y)

    client_update = SemiFL(threshold=threshold, **o).client_updates(shared)["train"]
    data = client(sweep, labeled)
    started = client_update.begin(broadcast, client_update.initial_memory(broadcast, g), data)
    after, notes = client_update.step(broadcast, started, batch)
    gradient = torch.autograd.grad(loss, list(tree.leaves(params)))
    expected = [p.detach() - lr * each for p, each in zip(tree.leaves(params), gradient, strict=True)]
    assert float(notes.loss) == pytest.approx(float(loss.detach()), rel=1e-12)
    for actual, expected_value in zip(tree.leaves(after["params"]), expected, strict=True):
        torch.testing.assert_close(actual, expected_value, rtol=1e-10, atol=1e-13)
    assert torch.equal(notes.pseudo[0].weight, confident.double())
    assert torch.equal(notes.pseudo[0].label, fix)


@pytest.mark.parametrize("executor", ["step", "vmap"])
@pytest.mark.parametrize("confident", [1, 2, 4, 6])
def test_unconfident_images_are_not_in_the_pass(confident, executor):
    """The authors' step on a `torch.nn.Module`: batch statistics of weak views label, and what is unconfident is cut away.

    Loss and momentum of SGD with weight decay; they agree to 1e-14 of the longest step, with and without vmap.
    """
    shared = make_task(optimizer=SGD(0.1, momentum=0.9, weight_decay=0.01), statistics="separate", labeling="batch")
    (batch, sweep), model = random_batch(0, 7), start_server(SemiFL(), shared)
    model["params"]["head"] = spread(model["params"], batch.u["weak"], torch.Generator().manual_seed(2))
    oracle = make_torch_module(model)
    for layer in oracle.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.track_running_stats = False
            layer.running_mean = None
            layer.running_var = None
    confidence, label = oracle(batch.u["weak"]).softmax(-1).max(-1)
    threshold = float(confidence.detach().sort(descending=True).values[confident - 1])
    mask = confidence >= threshold
    assert int(mask.sum()) == confident
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    loss = F.cross_entropy(oracle(batch.u["strong"][mask]), label[mask])
    loss.backward()
    optimizer.step()

    client_update = SemiFL(threshold=threshold, labels="step", mix_weight=0.0).client_updates(shared)["train"]
    carry = begin_update(client_update, model, client(sweep))

    def step(carry, u):
        after, notes = client_update.step(model, carry, batch._replace(u=u, second_batch={}, mixing={}))
        return after["params"], notes.loss

    if executor == "step":
        params, found = step(carry, batch.u)
    else:  # beside a client whose images are others
        several = tree.map(lambda leaf: torch.stack([leaf.flip(0), leaf]), batch.u)
        params, found = torch.func.vmap(step, in_dims=(None, 0))(carry, several)
        params = tree.index(params, 1)
        found = found[1]
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-14)
    longest = max(float(p.grad.abs().max()) for p in oracle.parameters() if p.grad is not None) * 0.1
    assert_params_match(params, oracle, rtol=0, atol=1e-14 * longest)


def test_the_labels_of_a_step_follow_the_model_of_the_moment():
    """Labels of its push w from 0.1 below 0: row 1 changes its class with "step", and keeps it with "round"."""
    seen = {}
    for labels in ("round", "step"):
        client_update = SemiFL(threshold=0.5, labels=labels, unlabeled_weight=0.0).client_updates(
            make_task(OneWeightNetwork(), optimizer=SGD(1.0), statistics="separate")
        )["train"]
        broadcast = {"params": make_one_weight_params(0.1), "stats": {}}
        carry = begin_update(client_update, broadcast, client(make_pixel_images([1.0, 1.0]), 1))
        batch = batch_of([1.0], [1.0], [1.0], [0], [1], 0.5)
        batch = batch._replace(x=make_pixel_images([1.0]), y=torch.tensor([1]), x_rows=torch.tensor([0]))
        seen[labels] = []
        for _ in range(2):
            carry, notes = client_update.step(broadcast, carry, batch)
            seen[labels].append(int(notes.pseudo[0].label))
        assert get_weight(carry["params"]) < 0
    assert seen == {"round": [0, 0], "step": [0, 1]}


def test_step_without_confident_rows_is_skipped_but_its_client_counts():
    """With labels "step", momentum and weight decay: nothing moves without a label or a confident pseudo-label; weight 1."""
    optimizer = SGD(0.1, momentum=0.9, weight_decay=0.1)
    shared = make_task(optimizer=optimizer)
    method = SemiFL(threshold=1.1, labels="step")
    client_update = method.client_updates(shared)["train"]
    broadcast = start_server(SemiFL(), shared)
    assert client_update.requirements.precomputed_views == ()
    batch, sweep = random_batch(0, 4)
    memory = {"optimizer": tree.map(torch.ones_like, optimizer.init(broadcast["params"]))}
    carry = client_update.begin(broadcast, memory, client(sweep))
    after, _ = client_update.step(broadcast, carry, batch)
    assert trees_equal(after, carry)
    upload, stored = client_update.finish(broadcast, after, client(sweep))
    assert float(upload.weight) == 1
    assert trees_equal(stored, memory)
    confident = replace(method, threshold=0.0).client_updates(shared)["train"]
    assert not trees_equal(confident.step(broadcast, carry, batch)[0], carry)
    batch, sweep = random_batch(5, 4)
    assert not trees_equal(
        client_update.step(broadcast, client_update.begin(broadcast, memory, client(sweep, 5)), batch)[0], carry
    )


def make_federation(trained, fine, labeled: int = 1) -> ScriptedFederation:
    """Return clients that upload [(w, weight), ...] round by round, and a server whose own training ends at `fine`."""
    trained = iter(trained)
    fine = iter(fine)

    def train(broadcast, who):
        return [Upload({"params": make_one_weight_params(w)}, torch.tensor(float(n))) for w, n in next(trained)]

    def server(broadcast, who):
        return [make_upload({"params": make_one_weight_params(next(fine)(get_weight(broadcast["params"])))})]

    return ScriptedFederation({"train": train, "fine-tune": server}, labeled=labeled)


def test_the_servers_momentum_by_hand():
    """W = 1; uploads .6 and .8 (a third, 100, was confident of nothing): g = 1 - .7 = .3 = v, W = .7; fine-tuned to .6.

    Then uploads with the mean .2: g = .4, v = .5 * .3 + .4 = .55, W = .6 - .55 = .05; fine-tuned to -.05. Then nobody
    trained: W and v stay, and the fine-tuning makes it -.15.
    """
    rounds = [[(0.6, 1), (0.8, 1), (100, 0)], [(0.1, 1), (0.3, 1)], [(7, 0), (8, 0)]]
    fed = make_federation(rounds, [lambda w: w - 0.1] * 3)
    method = SemiFL()
    shared = make_task(OneWeightNetwork())
    server = {"params": make_one_weight_params(1.0), "stats": {}, "momentum": make_one_weight_params(0.0)}
    for w, v in ((0.6, 0.3), (-0.05, 0.55), (-0.15, 0.55)):
        server = method.round(shared, server, fed)
        assert [get_weight(server["params"]), get_weight(server["momentum"])] == pytest.approx([w, v])
    assert [client_update for client_update, _ in fed.queries] == ["train", "fine-tune"] * 3


def test_training_side_by_side_by_hand():
    """fine_tune False: W = 1, the server comes to .8, the clients to .4: half and half .6; g = .8 - .6 = v, W = .6.

    Then the server comes to .5, the clients to .1: g = .5 - .3 = .2, v = .5 * .2 + .2 = .3, W = .2. Then nobody but
    the server trained: W is its own. A server without labels has no share: from W = 1 to the clients' .4.
    """
    method = SemiFL(fine_tune=False)
    shared = make_task(OneWeightNetwork())
    losses = iter([0.8, 0.5, 0.4])
    fed = make_federation([[(0.3, 1), (0.5, 1)], [(0.1, 1)] * 2, [(9, 0)] * 2], [lambda w: next(losses)] * 3)
    server = {"params": make_one_weight_params(1.0), "stats": {}, "momentum": make_one_weight_params(0.0)}
    for w, v, sent in ((0.6, 0.2, 1.0), (0.2, 0.3, 0.6), (0.4, 0.3, 0.2)):
        server = method.round(shared, server, fed)
        assert [get_weight(server["params"]), get_weight(server["momentum"])] == pytest.approx([w, v])
        assert [get_weight(broadcast["params"]) for broadcast in fed.broadcasts[-2:]] == pytest.approx([sent, sent])
    for fine_tune in (True, False):
        bare = make_federation([[(0.3, 1), (0.5, 1)]], [], labeled=0)
        server = {"params": make_one_weight_params(1.0), "stats": {}, "momentum": make_one_weight_params(0.0)}
        server = SemiFL(fine_tune=fine_tune).round(shared, server, bare)
        assert get_weight(server["params"]) == pytest.approx(0.4)


def test_the_share_of_two_groups_by_hand():
    """FedRGD in SemiFL's code: the server comes to .7, four clients to .4; it weighs 1 / (4 / 2 + 1) = 1/3: .5.

    As two groups of two clients and a copy each: ((.3 + .4 + .7) / 3 + (.4 + .5 + .7) / 3) / 2 = .5. g = .7 - .5 = v.
    """
    fed = make_federation([[(0.3, 1), (0.4, 1), (0.4, 1), (0.5, 1)]], [lambda w: 0.7])
    server = {"params": make_one_weight_params(1.0), "stats": {}, "momentum": make_one_weight_params(0.0)}
    server = SemiFL(fine_tune=False, server_share="groups").round(make_task(OneWeightNetwork()), server, fed)
    assert [get_weight(server["params"]), get_weight(server["momentum"])] == pytest.approx([0.5, 0.2])


HALVES = SemiFL(threshold=0.3, labels="step", mix_weight=0.0, halves=True)


def test_halves_are_whole_networks_that_add_up():
    """sigma is the first model's kernels, psi those of another draw; head, biases and normalizations are in neither."""
    server = start_server(HALVES, make_task())
    model = start_server(FedAvg(), make_task())
    theta = tree.flatten(HALVES.solution(make_task(), server)["params"])
    sigma, psi = (tree.flatten(server[name]) for name in ("sigma", "psi"))
    assert sigma.keys() == psi.keys() == {path for path in theta if path.endswith("conv/weight")}
    for path, leaf in tree.flatten(model["params"]).items():
        if path in sigma:
            assert bool((theta[path] == leaf + psi[path]).all())
            assert 0.5 < float(psi[path].std() / leaf.std()) < 2
            assert not bool((psi[path] == leaf).any())
        else:
            assert bool((theta[path] == leaf).all())


def test_clients_train_psi_and_the_server_sigma():
    """One step of each, written out with autograd: FixMatch in psi, cross-entropy in sigma; SGD without momentum."""
    shared = make_task(NETWORK, optimizer=SGD(0.1), statistics="separate")
    client_updates = HALVES.client_updates(shared)
    server = start_server(HALVES, shared)
    broadcast = {name: model_name for name, model_name in server.items() if name != "momentum"}
    batch, sweep = random_batch(6, 4)
    for name, model_name, images in (("train", "psi", "strong"), ("fine-tune", "sigma", "x")):
        data = client(sweep, 0 if name == "train" else 6)
        given = batch if name == "fine-tune" else batch._replace(x=batch.x[:0], y=batch.y[:0], x_rows=batch.x_rows[:0])
        carry = client_updates[name].begin(
            broadcast, client_updates[name].initial_memory(broadcast, torch.Generator()), data
        )
        after, _ = client_updates[name].step(broadcast, carry, given)
        (sent, _), leaves = (
            client_updates[name].finish(broadcast, after, data),
            tree.map(torch.clone, broadcast[model_name]),
        )
        for leaf in tree.leaves(leaves):
            leaf.requires_grad_()
        theta = HALVES.parameters({**broadcast, model_name: leaves})
        if images == "x":
            loss = F.cross_entropy(shared.network.train(theta, batch.x)[0], batch.y)
        else:
            prediction = shared.network.train(theta, batch.u["weak"])[0].detach().softmax(-1)
            used = prediction.amax(-1) >= 0.3
            loss = F.cross_entropy(shared.network.train(theta, batch.u["strong"][used])[0], prediction.argmax(-1)[used])
        loss.backward()
        assert sent.update.keys() == {model_name}
        moved = tree.map(lambda leaf: (leaf - 0.1 * leaf.grad).detach(), leaves)
        assert max_difference(sent.update[model_name], moved) < 1e-12
        assert max_difference(sent.update[model_name], broadcast[model_name]) > 1e-4


def test_momentum_of_halves_applies_only_to_psi():
    """Labels at the server: psi moves by the momentum that the server keeps, sigma by its training, the rest not."""
    shared = make_task(NETWORK, optimizer=SGD(0.1), statistics="separate")
    one, two = simulate_rounds(HALVES, shared, make_dataset(labels_at="server"), rounds=2)
    first = start_server(HALVES, shared)
    assert max_difference(one.server["psi"], tree.map(torch.sub, first["psi"], one.server["momentum"])) < 1e-15
    assert max_difference(two.server["psi"], tree.map(torch.sub, one.server["psi"], two.server["momentum"])) < 1e-15
    for name in ("psi", "sigma"):
        assert max_difference(two.server[name], one.server[name]) > 1e-4
    assert trees_equal(two.server["rest"], first["rest"])


@pytest.mark.parametrize(("sbn", "who"), [("all", [[0, 1], [2, 3]]), ("cohort", [[0, 1]]), ("server", [])])
def test_statistics_come_before_the_first_labels_and_after_every_round(sbn, who):
    """Whose rows are counted; before round 1 for its labels, then once a round, for the next labels and the test."""
    fed = make_federation([[(1, 1), (1, 1)]] * 2, [lambda w: w] * 2)
    counts = {"pixel": {"mean": torch.tensor([6.0]), "var": torch.tensor([2.0])}}
    bn_statistics = lambda broadcast, who: [Upload({}, torch.tensor(2.0), {"moments": counts}) for _ in who]  # noqa: E731
    fed.replies = {**fed.replies, "census": bn_statistics}
    method = SemiFL(sbn=sbn)
    shared = make_task(OneWeightNetwork())
    fresh = {"pixel": {"mean": torch.zeros(1), "var": torch.ones(1)}}
    server = {"params": make_one_weight_params(1.0), "stats": fresh, "momentum": make_one_weight_params(0.0)}
    statistics_requirements = [("census", each) for each in [*who, [SERVER]]]
    training = [("train", [0, 1]), ("fine-tune", [SERVER])]
    server = method.round(shared.at(0), server, fed)
    assert fed.queries == statistics_requirements + training + statistics_requirements
    assert float(fed.broadcasts[len(statistics_requirements)]["stats"]["pixel"]["mean"]) == 3
    assert float(method.solution(shared, server)["stats"]["pixel"]["var"]) == 1
    fed.queries.clear()
    method.round(shared.at(1), server, fed)
    assert fed.queries == training + statistics_requirements


@pytest.mark.parametrize("labels_at", ["clients", "server"])
def test_without_mixing_it_is_fixmatch_on_the_clients(labels_at):
    """All rows kept (threshold 0): the uploads are those of FixMatch with round labels and the mean over those used.

    With labels at the clients, equal sizes and no server momentum, so are whole rounds; and so they are, with a
    threshold that nothing reaches, where clients train only on their labels.
    """
    held = make_dataset(((4, 8),) * 4, labels_at=labels_at)
    shared = make_task(FREE, optimizer=SGD(0.1, momentum=0.9))
    for threshold in (0.0, 1.1) if labels_at == "clients" else (0.0,):
        actual = SemiFL(threshold=threshold, mix_weight=0.0, server_momentum=0.0)
        expected_value = FedAvg(FixMatch(threshold=threshold, labels="round", mean="used"), keep_optimizer=True)
        if labels_at == "clients":
            one, two = (simulate_rounds(m, shared, held, rounds=3) for m in (actual, expected_value))
            assert max_difference(one[-1].server["params"], two[-1].server["params"]) < 1e-12
            assert max_difference(one[-1].state, two[-1].state) < 1e-12
            assert one[-1].report.cost["labeled_steps"] == two[-1].report.cost["labeled_steps"] > 0
            assert max_difference(one[-1].server["params"], start_server(actual, shared)["params"]) > 1e-2
            continue
        ups = []
        for method in (actual, expected_value):
            simulation = make_simulation(method, shared, held)
            simulation.open(0)
            model = start_server(method, shared)
            ups.append(simulation.query("train", {"params": model["params"], "stats": {}}))
        assert max_difference(ups[0].update["params"], ups[1].update["params"]) < 1e-12
        assert max_difference(ups[0].at(0).update["params"], start_server(actual, shared)["params"]) > 1e-2


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_a_threshold_beyond_reach_leaves_the_server_to_its_labels(executor):
    """threshold > 1: two rounds of two whole-batch steps are four steps of torch.optim on the server's images.

    With Nesterov momentum that lives on from round to round. The clients send their model back untouched and weigh
    nothing; v remains 0; statistics are counted for the new model over everybody's rows.
    """
    held = make_dataset(labels_at="server")
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    method = SemiFL(threshold=1.1)
    shared = make_task(optimizer=SGD(**options))
    serving = Batching("all", 4, epochs=2)
    simulation = make_simulation(method, shared, held, views=PLAIN, server_batching=serving, executor=executor)
    server = start_server(method, shared)
    result = run_rounds(method, simulation, server, range(2))

    oracle = make_torch_module(server)
    optimizer = torch.optim.SGD(oracle.parameters(), **options)
    data = held.client_data(SERVER)[0]
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(oracle(data.x.double() / 255 * 2 - 1), data.y).backward()
        optimizer.step()
    after = result[-1].server
    assert_params_match(after["params"], oracle, rtol=1e-9)
    holders = [held.client_data(k)[0].u for k in range(4)] + [data.x]
    assert max_difference(after["stats"], counted(after, holders)) < 1e-9
    assert not any(leaf.any() for leaf in tree.leaves(after["momentum"]))
    assert result[-1].report.cost["unlabeled_images"] == 0
    simulation.open(2)
    upload = simulation.query("train", {"params": after["params"], "stats": after["stats"]})
    assert upload.weight.tolist() == [0, 0, 0]
    assert all(trees_equal(tree.index(upload.update["params"], k), after["params"]) for k in range(3))


@pytest.mark.parametrize("executor", ["loop", "vmap"])
def test_one_client_is_confident_and_one_is_not(executor):
    """Bright images are surely of class 0, grey ones of none: the first client alone moves, steps and counts.

    Pixel 255 is 1 and w = log 3 gives it p = 3/4; 128 is near 0 and gives 1/2. Three confident rows in batches of two
    are two steps an epoch.
    """
    method = SemiFL(threshold=0.7)
    shared = make_task(OneWeightNetwork(), optimizer=SGD(0.1, momentum=0.9))
    held = make_dataset(((0, 4), (0, 4)), side=4, classes=2)
    rows = [torch.from_numpy(held.split.rows(k, False)) for k in range(2)]
    held.train.images[rows[0]] = 255
    held.train.images[rows[0][0]] = 128
    held.train.images[rows[1]] = 128
    simulation = make_simulation(
        method, shared, held, views=PLAIN, cohort=2, batching=Batching(2, 2, epochs=3), executor=executor
    )
    simulation.open(0)
    upload = simulation.query("train", {"params": make_one_weight_params(log(3)), "stats": {}})
    assert upload.weight.tolist() == [1, 0]
    moved = upload.update["params"]["pixel"]["norm"]["bias"].flatten().tolist()
    assert moved[0] > log(3)
    assert moved[1] == log(3)
    memories = simulation.state()["client"]
    momenta = [float(memories[k]["optimizer"]["momentum"]["pixel"]["norm"]["bias"]) for k in "01"]
    assert momenta[0] != 0
    assert momenta[1] == 0
    report = simulation.close()
    assert report.cost["labeled_steps"] == 6  # steps: 3 epochs of 2
    assert float(report.samples["kept"].total / report.samples["kept"].count) == 0.75


def test_client_momentum_is_retained_by_option():
    """The optimizer's state returns with the next local update, or restarts."""
    shared = make_task(FREE, optimizer=SGD(0.1, momentum=0.9))
    data = client(random_batch(0, 5)[1])
    for stored in (True, False):
        client_update = SemiFL(keep_optimizer=stored).client_updates(shared)["train"]
        broadcast = start_server(SemiFL(), shared)
        ones = {"optimizer": tree.map(torch.ones_like, shared.optimizer.init(broadcast["params"]))} if stored else {}
        assert bool(client_update.initial_memory(broadcast, torch.Generator())) == stored
        carry = client_update.begin(broadcast, ones, data)
        assert all(bool(leaf.all()) == stored for leaf in tree.leaves(carry["optimizer"]))
        assert client_update.finish(broadcast, carry, data)[1].keys() == ({"optimizer"} if stored else set())
        at_server = SemiFL(keep_optimizer=stored).client_updates(shared)["fine-tune"]
        assert bool(at_server.initial_memory(broadcast, torch.Generator())) == stored


VARIANTS = {
    "step-debias": SemiFL(threshold=0.3, labels="step", debias=True),
    "step-parallel": SemiFL(threshold=0.3, labels="step", mix_weight=0.0, fine_tune=False, sbn="cohort"),
    "parallel": SemiFL(threshold=0.3, keep_optimizer=False, server_momentum=0.0, fine_tune=False),
    "groups": SemiFL(threshold=0.3, fine_tune=False, server_share="groups"),
    "halves": SemiFL(threshold=0.3, halves=True),
    "step-halves": SemiFL(
        threshold=0.3, labels="step", debias=True, mix_weight=0.0, halves=True, sbn="cohort", keep_optimizer=False
    ),
}


@pytest.mark.parametrize(
    ("method", "labels_at"),
    [
        pytest.param(
            method, labels_at, id=f"{name}-{labels_at}", marks=[] if number % 3 == turn else [pytest.mark.nightly]
        )
        for number, (name, method) in enumerate(VARIANTS.items())
        for turn, labels_at in enumerate(("clients", "some", "server"))
    ],
)
def test_every_variant_lifts(method, labels_at):
    """Loop and vmap agree on the readings that are no row of the catalog, wherever labels lie; by default in one place."""
    last = simulate_with_both_executors(method, make_task(statistics="separate"), make_dataset(labels_at=labels_at))[-1]
    first = method.solution(make_task(), start_server(method, make_task()))
    assert max_difference(method.solution(make_task(), last.server)["params"], first["params"]) > 1e-3


def test_server_without_labels_stores_no_momentum():
    """With labels at the clients it takes no step and remembers no optimizer; at the server it does."""
    for labels_at in ("clients", "server"):
        (last,) = simulate_rounds(SemiFL(threshold=0.3), make_task(), make_dataset(labels_at=labels_at))
        assert (str(SERVER) in last.state["client"]) == (labels_at == "server")


@pytest.mark.parametrize(("labels", "mix_weight"), [("round", 1.0), ("round", 0.0), ("step", 1.0), ("step", 0.0)])
@pytest.mark.parametrize("statistics", ["joint", "separate"])
@pytest.mark.parametrize("labeling", ["batch", "running"])
def test_passes_count_the_images_through_the_network(labels, mix_weight, statistics, labeling):
    """The images of a step, counted where they are: forward in every pass, backward where a gradient comes through."""
    seen = {"forward": 0, "backward": 0}

    class Counting(SmallCNN):
        def train(self, params, x, real=None):
            seen["forward"] += len(x)
            if torch.is_grad_enabled():
                seen["backward"] += len(x)
            return super().train(params, x, real=real)

        def predict(self, params, stats, x):
            seen["forward"] += len(x)
            return super().predict(params, stats, x)

    shared = make_task(Counting(1, CLASSES, 4), statistics=statistics, labeling=labeling)
    method = SemiFL(labels=labels, mix_weight=mix_weight)
    client_update = method.client_updates(shared)["train"]
    broadcast = start_server(method, shared)
    assert isinstance(client_update, SemiFLClient)
    batch, sweep = random_batch(5, 6)
    batch = batch._replace(u={name: batch.u[name] for name in client_update.requirements.views})
    carry = begin_update(client_update, broadcast, client(sweep, 5))
    assert seen["forward"] == client_update.images_outside_steps(5, 9) == (9 if labels == "round" else 0)
    seen.update(forward=0, backward=0)
    client_update.step(broadcast, carry, batch)
    assert (seen["forward"], seen["backward"]) == tuple(client_update.passes(5, 6))


def test_local_update_counts_epochs_over_the_selected_rows():
    """Two confident rows of nine, in batches of four, for three epochs: three steps, not nine."""
    client_update = SemiFL(threshold=0.7).client_updates(make_task(OneWeightNetwork(), optimizer=SGD(0.1)))["train"]
    images = torch.full((9, 1, 4, 4), 128, dtype=torch.uint8)
    images[[2, 5]] = 255
    data = ClientData(images[:0], torch.zeros(0, dtype=torch.int64), images, torch.tensor(0), torch.tensor(9))
    broadcast = {"params": make_one_weight_params(log(3)), "stats": {}}
    outcome = update_one(
        ClientContext(client_update, PLAIN, 0, 0, 0),
        broadcast,
        ClientTask(0, {}, client_update.initial_memory(broadcast, torch.Generator()), data, Amount(9, 0, 4, epochs=3)),
    )
    assert outcome.amount.steps == 3
    (seen,) = outcome.observations  # the pseudo-labels of all rows are evaluated, those of the steps are some of them
    assert seen.rows.tolist() == list(range(9))
    assert seen.pseudo.weight.nonzero().flatten().tolist() == [2, 5]


@pytest.mark.parametrize(("keep", "left"), [(0.5, [0.5, 0.25, 0.125, 0.0625]), (0.0, [0.5, 0.5, 0.5, 0.5])])
def test_momentum_reverts_the_training_of_the_server(keep, left):
    """The server moves by 1 in the first round and no more, clients that are confident of nothing never.

    Without momentum its half of the weight leaves 1/2; with 0.5 the rounds after take back 1/4, 1/8, 1/16: in the end
    all of it. So the fall of `fine_tune` False is the momentum's, not that of training side by side.
    """
    params = {"w": torch.zeros((), dtype=torch.float64)}
    momentum = {"w": torch.zeros((), dtype=torch.float64)}
    found = []
    for learned in (1.0, 0.0, 0.0, 0.0):
        upload = Upload({"params": params}, torch.ones((), dtype=torch.float64))
        trained = {"w": params["w"] + learned}
        params, momentum = step_towards_mean(trained, upload, momentum, keep, share=0.5)
        found.append(float(params["w"]))
    assert found == pytest.approx(left, abs=1e-15)
