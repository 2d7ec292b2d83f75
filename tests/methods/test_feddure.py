"""FedDure against double back-propagation, and its hand-derived cases."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from method_helpers import begin_update, make_client_data, simulate_with_both_executors
from reference_feddure import ReferenceFedDure
from torch import nn
from torch_models import TorchResNet9, TorchSmall, load_weights

from halfmoon.api.types import Batch, Task
from halfmoon.api.uploads import Upload
from halfmoon.contract import check_method
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.normalize import Normalize
from halfmoon.core.optim import SGD, Adam
from halfmoon.engine.driver import create_first_memory
from halfmoon.federation.contract.small_federation import CLASSES, make_task
from halfmoon.methods import registry
from halfmoon.methods.feddure import FedDure, compute_log_shares, look_up_signals, update_running_mean, update_signals
from halfmoon.methods.fine_regulator import compute_instance_weights
from halfmoon.models import ResNet9, SmallCNN

NORMALIZE = Normalize((0.5,), (0.5,))
LABELS = torch.tensor([0, 0, 0, 1, 2, 3, 3])
"""Five are the client's, the others repeat."""

DEFAULT = FedDure()
SMALL = SmallCNN(1, 5, 4)
STEEP = SGD(0.1)


def make_step(
    options=DEFAULT, network=SMALL, optimizer=STEEP, dtype=torch.float64, size=16, statistics="joint", labeling="batch"
):
    """Return the work, its first carry, the down tree and three batches."""
    g = torch.Generator().manual_seed(0)
    b = 10
    u = 12
    task = Task(network, optimizer, NORMALIZE, statistics, labeling)
    model = tree.to(network.init(g), dtype=dtype)
    # statistics that differ from those of the batches, so that using the wrong ones shows
    model["stats"] = tree.map(
        lambda leaf: leaf + 0.3 * torch.rand(leaf.shape, generator=g, dtype=dtype), model["stats"]
    )
    client_update = options.client_updates(task)["train"]
    broadcast = {**model, "gate": torch.ones(())}
    memory = client_update.initial_memory(broadcast, torch.Generator().manual_seed(7))
    draw = lambda n: torch.randn(n, network.channels, size, size, generator=g, dtype=dtype)  # noqa: E731
    batches = []
    for _ in range(3):
        x = draw(b)
        y = torch.randint(0, network.classes, (b,), generator=g)
        batches.append(Batch(x, y, torch.arange(b), {"weak": draw(u), "strong": draw(u)}, torch.arange(u)))
    return (
        client_update,
        client_update.begin(broadcast, memory, make_client_data(5, u, LABELS)),
        broadcast,
        batches,
        model,
    )


def textbook(
    network, model, carry, options: FedDure, optimizer, lr, statistics="joint", labeling="batch"
) -> ReferenceFedDure:
    """Return the oracle in the same state."""
    module = TorchResNet9 if isinstance(network, ResNet9) else TorchSmall
    regulator = None
    if options.fine:
        p = carry["regulator"]["params"]
        regulator = nn.Sequential(
            nn.Linear(network.classes, options.hidden), nn.ReLU(), nn.Linear(options.hidden, 1), nn.Sigmoid()
        ).to(p["out"]["weight"].dtype)
        layers = {"0": p["hidden"], "2": p["out"]}
        regulator.load_state_dict({f"{k}.{name}": layer[name] for k, layer in layers.items() for name in layer})
    return ReferenceFedDure(
        load_weights(module(network.channels, network.classes, network.width), model),
        regulator,
        optimizer,
        lr,
        joint=statistics == "joint",
        product=options.through_weights == "product",
        regulator_input=options.regulator_input,
        coarse=options.coarse,
        threshold=options.threshold,
        running_labels=labeling == "running",
        running_labeled_loss=options.judging == "running",
        plain_student=options.coarse_step == "plain",
        label_log_shares=carry.get("label_log_shares"),
    )


def distance(actual, expected_value) -> float:
    """Return ||ours - theirs|| / ||theirs|| over all tensors."""
    a = torch.cat([leaf.detach().flatten() for leaf in actual])
    b = torch.cat([leaf.detach().flatten() for leaf in expected_value])
    return float((a - b).norm() / b.norm())


def separate(actual, expected_value) -> float:
    """Return the distance of two trees."""
    return distance(tree.leaves(actual), tree.leaves(expected_value))


def parameters(params) -> list[torch.Tensor]:
    """Return the leaves in the order of a module's `named_parameters`."""
    return list(tree.leaves(params))


def compare(network, options, dtype, optimizer, torch_optimizer, lr, bound, steps=3, **rules) -> None:
    """Assert that `steps` iterations agree with the oracle in everything that is trained or reported."""
    options = replace(options, regulator_lr=None)  # the textbook has one rate for all
    client_update, carry, broadcast, batches, model = make_step(
        options, network=network, optimizer=optimizer, dtype=dtype, **rules
    )
    oracle = textbook(network, model, carry, options, torch_optimizer, lr, **rules)
    for batch in batches[:steps]:
        carry, notes = client_update.step(broadcast, carry, batch)
        text = oracle.step(batch.x, batch.y, batch.u["weak"], batch.u["strong"])
        # d is a difference of two losses: rounding is relative to them
        assert abs(float(notes.samples["d"].total - text["d"])) < bound * float(text["loss"])
        assert distance([notes.samples["m"].total / len(batch.u_rows)], [text["m"]]) < bound
        assert distance([notes.loss], [text["loss"]]) < bound
    assert distance(parameters(carry["params"]), list(oracle.local.parameters())) < bound
    stats = [s for name, s in oracle.local.named_buffers() if "num_batches" not in name]
    assert distance(list(tree.leaves(carry["stats"])), stats) < bound
    if options.fine:
        assert distance(parameters(carry["regulator"]["params"]), list(oracle.regulator.parameters())) < bound
    if options.coarse:
        assert distance(parameters(carry["coarse"]["params"]), list(oracle.student.parameters())) < bound


READINGS = list(itertools.product(["product", "detached"], ["joint", "separate"]))


@pytest.mark.parametrize(("through", "statistics"), READINGS)
def test_iteration_equals_the_textbook_in_float64(through, statistics):
    """Adam, ResNet-9 with batch normalization, both readings of the gradient through H: 1e-9."""
    options = FedDure(through_weights=through)
    compare(ResNet9(1, 5, 4), options, torch.float64, Adam(1e-2), torch.optim.Adam, 1e-2, 1e-9, statistics=statistics)


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        (FedDure(coarse=False), {}),
        (FedDure(coarse=False, through_weights="detached"), {"statistics": "separate"}),
        (FedDure(fine=False, threshold=0.3), {}),
        (FedDure(regulator_input="softmax"), {}),
        (FedDure(regulator_input="logits", through_weights="product"), {}),
        (FedDure(through_weights="product", coarse=False), {}),
        (FedDure(coarse_step="plain", judge_prior=True), {}),
        (FedDure(judge_prior=True, judging="running", coarse=False), {}),
        (FedDure(judging="running"), {"labeling": "running"}),
        (FedDure(), {"labeling": "running", "statistics": "separate"}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_ablations_and_switches_equal_the_textbook(options, rules):
    """Table 2's ablations and the switches, float64, 1e-9."""
    compare(SMALL, options, torch.float64, Adam(1e-2), torch.optim.Adam, 1e-2, 1e-9, **rules)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("through", ["product", "detached"])
def test_hypergradient_equals_double_backpropagation(dtype, bound, through):
    """Eq. 5's gradient itself: with plain SGD, F-reg moves by minus the gradient times its rate.

    The rate of 1e6 retains the digits of a small gradient when it is taken from weights near 0.1; the step taken with the
    changed weights afterwards does not matter here.
    """
    options = FedDure(through_weights=through, regulator_lr=1e6, virtual_lr=0.05)
    network = ResNet9(3, 10, 8)
    client_update, carry, broadcast, batches, model = make_step(
        options, network=network, optimizer=SGD(0.05), dtype=dtype
    )
    oracle = textbook(network, model, carry, options, torch.optim.SGD, 0.05)
    new, _ = client_update.step(broadcast, carry, batches[0])
    oracle.step(batches[0].x, batches[0].y, batches[0].u["weak"], batches[0].u["strong"])
    old, now = (parameters(each["regulator"]["params"]) for each in (carry, new))
    assert distance([(a - b) / 1e6 for a, b in zip(old, now, strict=True)], oracle.hypergradient) < bound


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        (FedDure(), {}),
        (FedDure(), {"statistics": "separate"}),
        (FedDure(coarse=False), {"labeling": "running"}),
        (FedDure(fine=False, threshold=0.3), {"labeling": "running", "statistics": "separate"}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_textbook_by_equation_equals_the_economical_one(options, rules):
    """The oracle's two forms, which the benchmark times: three steps in float64, everything trained to 1e-10."""
    network = SMALL
    _, carry, _, batches, model = make_step(options, network=network, optimizer=Adam(1e-2), **rules)
    one, other = (textbook(network, model, carry, options, torch.optim.Adam, 1e-2, **rules) for _ in range(2))
    other.literal = True
    for batch in batches:
        for a, b in zip(*(each.step(batch.x, batch.y, **batch.u).values() for each in (one, other)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(nets(one), nets(other), strict=True):
        assert distance(a.state_dict().values(), b.state_dict().values()) < 1e-10


def nets(reference: ReferenceFedDure) -> list[nn.Module]:
    """Return the modules that a step trains."""
    return [
        reference.local,
        *([reference.student] if reference.coarse else []),
        *([reference.regulator] if reference.regulator else []),
    ]


def test_no_second_order_graph_is_built():
    """The step runs without autograd's help from outside: nothing it returns carries a graph."""
    client_update, carry, broadcast, batches, _ = make_step(optimizer=Adam(1e-2), dtype=torch.float32)
    new, notes = client_update.step(broadcast, carry, batches[0])
    assert not any(leaf.requires_grad for leaf in tree.leaves(new))
    assert not notes.loss.requires_grad


def test_d_is_the_fall_of_the_labeled_loss():
    """Eq. 3 with its sign: old minus new loss of C-reg on the labeled minibatch; the code's sign is the opposite."""
    for sign, factor in (("old-new", 1), ("new-old", -1)):
        client_update, carry, broadcast, batches, _ = make_step(FedDure(sign=sign), optimizer=Adam(1e-2))
        new, notes = client_update.step(broadcast, carry, batches[0])
        loss = [
            F.cross_entropy(client_update.task.network.train(c["coarse"]["params"], batches[0].x)[0], batches[0].y)
            for c in (carry, new)
        ]
        assert float(notes.samples["d"].total) == pytest.approx(factor * float(loss[0] - loss[1]), rel=1e-12)


def test_warmup_trains_only_on_labels():
    """With the gate shut, the local model's step is that of the labeled loss (the joint pass still sees all images)."""
    client_update, carry, broadcast, batches, _ = make_step(statistics="separate")
    new, _ = client_update.step({**broadcast, "gate": torch.zeros(())}, carry, batches[0])
    labels = registry.make("fedavg").client_updates(client_update.task)["train"]
    single, _ = labels.step(
        broadcast, {**{k: carry[k] for k in ("params", "stats")}, "optimizer": {}, "cached": {}}, batches[0]
    )
    assert separate(new["params"], single["params"]) < 1e-12


@pytest.mark.parametrize(("seen", "moves"), [("centered", False), ("softmax", False), ("logits", True)])
def test_a_number_added_to_all_logits(seen, moves):
    """Cross-entropy does not see it; an untrained F-reg on raw logits replies near 1 or near 0, by how it starts."""
    z = torch.randn(50, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = [F.cross_entropy(each, torch.arange(50) % 10) for each in (z, z - 37.0)]
    torch.testing.assert_close(*loss, rtol=1e-12, atol=0)
    options = FedDure(regulator_input=seen)
    network = SmallCNN(1, 10, 4)
    client_update = options.client_updates(Task(network, SGD(0.1), NORMALIZE))["train"]
    model = tree.to(network.init(torch.Generator()), dtype=torch.float64)
    replies = []
    for seed in range(10):
        regulator = client_update.initial_memory(model, torch.Generator().manual_seed(seed))["regulator"]["params"]
        at, shifted = (compute_instance_weights(regulator, z - offset, seen) for offset in (0.0, 37.0))
        assert float(at.mean()) == pytest.approx(0.02, abs=0.02)
        if not moves:
            torch.testing.assert_close(at, shifted, rtol=1e-9, atol=0)
        replies.append(float(shifted.mean()))
    assert (max(replies) > 0.5 and min(replies) < 0.005) == moves


def test_log_shares_count_the_clients_labels():
    """Classes 0, 0, 0, 1, 2 of five own labels (two more repeat): 3/5, 1/5, 1/5; a class without labels has none."""
    shares = compute_log_shares(make_client_data(5, 0, LABELS), 4).exp()
    torch.testing.assert_close(shares[:3], torch.tensor([0.6, 0.2, 0.2]))
    assert float(shares[3]) < 1e-37


def test_prior_correction_removes_the_reward_of_the_class_mix():
    """With the log shares added, answering every image with the client's class mix is worse than answering nothing.

    Labels 0, 0, 0, 1: logits 0 get the shares alone, whose loss is the entropy of (3/4, 1/4), 0.562335; logits log 3/4,
    log 1/4 get odds of 9 : 1, whose loss is -3/4 log 9/10 - 1/4 log 1/10 = 0.654667. Without shares it is the reverse:
    log 2 = 0.693147 and 0.562335.
    """
    y = torch.tensor([0, 0, 0, 1])
    shares = compute_log_shares(make_client_data(4, 0, y), 2)
    replies = torch.zeros(2), torch.tensor([0.75, 0.25]).log()
    plain = [float(F.cross_entropy(each.expand(4, 2), y)) for each in replies]
    judged = [float(F.cross_entropy((each + shares).expand(4, 2), y)) for each in replies]
    assert plain == pytest.approx([0.693147, 0.562335], abs=1e-5)
    assert judged == pytest.approx([0.562335, 0.654667], abs=1e-5)


def test_reward_counts_from_the_mean_of_earlier_ones_and_is_clipped():
    """d = 4, 2, -6 with decay 0.5: means before 0, 4, 3 (plain mean), so rewards 4, -2, -9; clipped to 5: 4, -2, -5."""
    baseline = {"mean": torch.zeros((), dtype=torch.float64), "count": torch.zeros((), dtype=torch.float64)}
    rewards = []
    means = []
    for d in (4.0, 2.0, -6.0):
        value = torch.tensor(d, dtype=torch.float64)
        rewards.append(float(value - baseline["mean"]))
        baseline = update_running_mean(baseline, value, 0.5)
        means.append(float(baseline["mean"]))
    assert rewards == [4, -2, -9]
    assert means == [4, 3, -1.5]  # then the decay: 0.5 * 3 + 0.5 * -6


def test_baseline_and_bound_change_only_the_reward():
    """d is reported as Eq. 3 has it; the loss takes the reward: its difference is that of the weights times mean CE."""
    found = {}
    for name, options in {"plain": FedDure(), "bound": FedDure(reward_bound=1e-9)}.items():
        client_update, carry, broadcast, batches, _ = make_step(options)
        found[name] = (client_update.step(broadcast, carry, batches[0])[1], carry)
    (plain, _), (bound, _) = found["plain"], found["bound"]
    d = float(plain.samples["d"].total)
    assert float(bound.samples["d"].total) == d
    assert abs(d) > 1e-6
    trust = float((plain.pseudo[0].weight - bound.pseudo[0].weight).mean())
    assert trust == pytest.approx(d, abs=2e-9)


def test_mean_of_rewards_is_stored_at_the_client():
    """Two steps of one local update, then a second local update: it counts three rewards, and begins at the mean of two."""
    options = FedDure(reward_baseline=0.9)
    client_update, carry, broadcast, batches, _ = make_step(options)
    ds = []
    for batch in batches[:2]:
        carry, notes = client_update.step(broadcast, carry, batch)
        ds.append(float(notes.samples["d"].total))
    data = make_client_data(1, 4, torch.tensor([0]))
    _, memory = client_update.finish(broadcast, carry, data)
    assert float(memory["baseline"]["mean"]) == pytest.approx(sum(ds) / 2, rel=1e-12)
    repeated = client_update.begin(broadcast, memory, data)
    carry, notes = client_update.step(broadcast, repeated, batches[2])
    weight = notes.pseudo[0].weight.mean() - notes.samples["m"].total / len(batches[2].u_rows)
    assert float(weight) == pytest.approx(float(notes.samples["d"].total) - sum(ds) / 2, rel=1e-9)
    assert float(carry["baseline"]["count"]) == 3


def test_labeled_first_steps_learn_from_labels_and_leave_the_regulators():
    """Of three steps with labeled_first=2 two equal labels-only steps; the third is FedDure's from there."""
    options = FedDure(labeled_first=2)
    client_update, carry, broadcast, batches, _ = make_step(options, statistics="separate")
    started = carry
    labels = registry.make("fedavg").client_updates(client_update.task)["train"]
    single = {**{k: carry[k] for k in ("params", "stats")}, "optimizer": {}, "cached": {}}
    for batch in batches[:2]:
        carry, _ = client_update.step(broadcast, carry, batch)
        single, _ = labels.step(broadcast, single, batch)
    assert separate(carry["params"], single["params"]) < 1e-12
    for name in ("regulator", "coarse"):
        assert all(torch.equal(a, b) for a, b in zip(*map(tree.leaves, (carry[name], started[name])), strict=True))
    free = FedDure().client_updates(client_update.task)["train"]
    after, _ = client_update.step(broadcast, carry, batches[2])
    joint, _ = free.step(broadcast, {name: layer for name, layer in carry.items() if name != "steps"}, batches[2])
    for name in ("params", "regulator", "coarse"):
        assert separate(after[name], joint[name]) == 0


def test_option_draws_a_separate_regulator_for_each_client():
    """Algorithm 1, line 2: with regulator_start "client" clients differ, and one client always draws the same."""
    broadcast = {**SMALL.init(torch.Generator()), "gate": torch.ones(())}
    for start, differ in (("clients", False), ("client", True)):
        client_update = FedDure(regulator_start=start).client_updates(Task(SMALL, SGD(0.1), NORMALIZE))["train"]
        one, repeated, two = (
            create_first_memory(client_update, broadcast, 0, client)["regulator"]["params"] for client in (1, 1, 2)
        )
        assert distance(parameters(one), parameters(repeated)) == 0
        assert (distance(parameters(one), parameters(two)) > 0) == differ


def test_the_mean_logit_is_reported():
    """The mean over images and classes of the strong views' logits of the local model."""
    client_update, carry, broadcast, batches, _ = make_step(statistics="separate")
    _, notes = client_update.step(broadcast, carry, batches[0])
    strong = client_update.task.network.train(carry["params"], batches[0].u["strong"])[0]
    seen = notes.samples["mean_logit"]
    assert float(seen.total / seen.count) == pytest.approx(float(strong.mean()), rel=1e-12)


def test_server_opens_the_gate_after_the_warmup():
    """Rounds 1 and 2 of warmup=2 are shut, round 3 is open."""
    gates = []

    class Port:
        cohort = torch.arange(1)

        def average(self, client_update, broadcast):
            gates.append(float(broadcast["gate"]))
            return Upload({"params": broadcast["params"], "stats": broadcast["stats"]}, torch.ones(()))

    method = FedDure(warmup=2)
    task = Task(SMALL, SGD(0.1), NORMALIZE)
    server = method.start(task, task.network.init(torch.Generator()))
    for _ in range(4):
        server = method.round(task, server, Port())
    assert gates == [0.0, 0.0, 1.0, 1.0]


def test_regulator_persists_and_is_the_same_at_first_for_all():
    """F-reg and its optimizer stay at the client; with keep_regulator off nothing remains."""
    client_update, carry, broadcast, batches, _ = make_step(optimizer=Adam(1e-2), dtype=torch.float32)
    carry, _ = client_update.step(broadcast, carry, batches[0])
    upload, memory = client_update.finish(broadcast, carry, make_client_data(3, 4))
    assert float(upload.weight) == 7
    repeated = client_update.begin(broadcast, memory, make_client_data(3, 4))
    assert separate(repeated["regulator"], carry["regulator"]) == 0
    assert float(repeated["regulator"]["optimizer"]["steps"]) == 1
    one = client_update.initial_memory(broadcast, torch.Generator().manual_seed(1))
    two = client_update.initial_memory(broadcast, torch.Generator().manual_seed(1))
    assert separate(one["regulator"]["params"], two["regulator"]["params"]) == 0
    assert tree.numel(one["regulator"]["params"]) == 5 * 128 + 128 + 128 + 1
    free = FedDure(keep_regulator=False).client_updates(client_update.task)["train"]
    assert free.finish(broadcast, carry, make_client_data(3, 4))[1] == {}
    fresh = FedDure(keep_regulator_optimizer=False).client_updates(client_update.task)["train"]
    assert float(fresh.begin(broadcast, memory, make_client_data(3, 4))["regulator"]["optimizer"]["steps"]) == 0


def test_option_uses_pseudo_labels_of_the_received_model():
    """In the first step it is the model of the moment, so the step is the same; the weak views are not passed again."""
    network = SMALL
    optimizer = Adam(1e-2)
    rules = {"labeling": "running", "size": 8}
    step, before, broadcast, batches, _ = make_step(network=network, optimizer=optimizer, **rules)
    client_update = replace(step, options=FedDure(labels="round"))
    assert (step.requirements.precomputed_views, client_update.requirements.precomputed_views) == ((), ("weak",))
    assert FedDure(labels="round").client_updates(step.task)["train"].requirements.views == ("strong",)
    seen = make_client_data(10, 12, weak=batches[0].u["weak"])
    started = client_update.begin(broadcast, {"regulator": before["regulator"]}, seen)
    wanted, metrics = step.step(broadcast, before, batches[0])
    strong = batches[0]._replace(u={"strong": batches[0].u["strong"]})
    made, same = client_update.step(broadcast, started, strong)
    assert torch.equal(same.pseudo[0].label, metrics.pseudo[0].label)
    for name, leaf in tree.flatten(wanted["params"]).items():
        assert torch.allclose(tree.flatten(made["params"])[name], leaf, atol=1e-12)
    assert made["cached"] is started["cached"]
    assert client_update.passes(10, 12).forward == step.passes(10, 12).forward - 12


def test_option_divides_pseudo_labels_by_the_clients_mean_prediction():
    """FedDB, Eq. 8 and 14: p / (mean of p over the client's rows), normalized; F-reg and C-reg learn from these labels.

    The rows of the client are those of the minibatch, so p is written down here, under tracked statistics.
    """
    network = SMALL
    rules = {"labeling": "running", "size": 8}
    plain, before, broadcast, batches, _ = make_step(network=network, **rules)
    weak = batches[0].u["weak"]
    p = network.predict(broadcast["params"], broadcast["stats"], weak).softmax(-1)
    divided = p / p.mean(0)
    divided = divided / divided.sum(-1, keepdim=True)
    assert (divided.argmax(-1) != p.argmax(-1)).any()
    data = make_client_data(10, 12, weak=weak)
    for options in (FedDure(debias=True), FedDure(debias=True, labels="round"), FedDure(debias=True, coarse=False)):
        client_update = replace(plain, options=options)
        started = client_update.begin(broadcast, {"regulator": before["regulator"]}, data)
        _, notes = client_update.step(broadcast, started, batches[0])
        assert torch.equal(notes.pseudo[0].label, divided.argmax(-1))
        assert torch.allclose(notes.pseudo[0].confidence, divided.amax(-1), atol=1e-12)
    for coarse in (True, False):  # a mean prediction that is uniform changes nothing, weak views pass with the others
        step, carry, broadcast, batches, _ = make_step(FedDure(coarse=coarse), network=network)
        client_update = replace(step, options=FedDure(coarse=coarse, debias=True))
        uniform = {**carry, "cached": {"prior": torch.full((5,), 0.2, dtype=torch.float64)}}
        (one, _), (two, _) = step.step(broadcast, carry, batches[0]), client_update.step(broadcast, uniform, batches[0])
        for name in ("params", "regulator"):
            assert separate(one[name], two[name]) < 1e-12
    assert FedDure(debias=True).client_updates(plain.task)["train"].requirements.precomputed_views == ("weak",)
    assert FedDure(debias=True).client_updates(plain.task)["train"].requirements.views == ("weak", "strong")


def test_option_retains_the_optimizer_between_rounds():
    """Two local updates of a step each from one model are two steps of one Adam: its second step differs from a first one."""
    ends = {}
    for stored_values in (False, True):
        options = FedDure(keep_optimizer=stored_values)
        client_update, carry, broadcast, batches, _ = make_step(options, optimizer=Adam(1e-2))
        carry, _ = client_update.step(broadcast, carry, batches[0])
        _, memory = client_update.finish(broadcast, carry, make_client_data(3, 4))
        assert ("optimizer" in memory) == stored_values
        repeated = client_update.begin(broadcast, memory, make_client_data(3, 4))
        assert float(repeated["optimizer"]["steps"]) == (1 if stored_values else 0)
        if stored_values:
            assert separate(repeated["optimizer"], carry["optimizer"]) == 0
        ends[stored_values] = client_update.step(broadcast, repeated, batches[1])[0]["params"]
    assert separate(ends[True], ends[False]) > 1e-3


def test_one_half_of_the_labels_trains_and_the_other_measures():
    """With signal_labels "halves" a label of one half changes the labeled step only, one of the other half the rest.

    Rows of even number train in round 0 and measure in round 1. Without pseudo-labels in the loss (gate 0) the local
    model learns from labels only, so that the two do not mix.
    """
    client_update, carry, broadcast, batches, _ = make_step(FedDure(signal_labels="halves"), statistics="separate")
    batch = batches[0]
    shut = {**broadcast, "gate": torch.zeros(())}
    for round_number in (0, 1):
        update = replace(client_update, task=client_update.task.at(round_number))
        before, before_metrics = update.step(shut, carry, batch)
        for parity in (0, 1):
            changed_half = batch.x_rows % 2 == parity
            changed = batch._replace(y=torch.where(changed_half, (batch.y + 1) % SMALL.classes, batch.y))
            after, after_metrics = update.step(shut, carry, changed)
            trains = parity == round_number
            assert (separate(after["params"], before["params"]) > 1e-6) == trains
            assert (separate(after["regulator"]["params"], before["regulator"]["params"]) > 0) == (not trains)
            assert (float(after_metrics.samples["d"].total) != float(before_metrics.samples["d"].total)) == (not trains)


def test_client_with_one_label_participates_with_halves():
    """In every other round no image trains: the labeled loss is 0, and the model remains finite."""
    client_update, carry, broadcast, batches, _ = make_step(FedDure(signal_labels="halves"))
    batch = batches[0]._replace(x_rows=torch.zeros(10, dtype=torch.int64))
    for round_number in (0, 1):
        update = replace(client_update, task=client_update.task.at(round_number))
        new, metrics = update.step(broadcast, carry, batch)
        assert all(leaf.isfinite().all() for leaf in tree.leaves(new["params"]))
        assert metrics.loss.isfinite()


def test_a_shared_regulator_is_averaged_by_the_server():
    """The client starts from the server's F-reg, and uploads what it has learned; its optimizer's state remains."""
    method = FedDure(share_regulator=True)
    client_update = method.client_updates(Task(SMALL, Adam(1e-2), NORMALIZE))["train"]
    model = SMALL.init(torch.Generator().manual_seed(0))
    server = method.start(client_update.task, model)
    sent = []

    class Port:
        def average(self, name, broadcast):
            sent.append(broadcast)
            return Upload({**broadcast, "regulator": tree.map(lambda leaf: leaf + 1, broadcast["regulator"])}, None)

    new = method.round(client_update.task, server, Port())
    assert separate(sent[0]["regulator"], server["regulator"]) == 0
    assert separate(new["regulator"], tree.map(lambda leaf: leaf + 1, server["regulator"])) == 0
    broadcast = {**sent[0], "regulator": new["regulator"]}
    memory = client_update.initial_memory(broadcast, torch.Generator().manual_seed(1))
    carry = client_update.begin(broadcast, memory, make_client_data(3, 4))
    assert separate(carry["regulator"]["params"], new["regulator"]) == 0
    upload, stored = client_update.finish(broadcast, carry, make_client_data(3, 4))
    assert separate(upload.update["regulator"], new["regulator"]) == 0
    client_update.requirements.upload_spec.check(upload, broadcast, "train")
    assert "optimizer" in stored["regulator"]
    assert "regulator" not in FedDure().start(client_update.task, model)


def test_signals_are_averaged_by_image_while_its_pseudo_label_is_unchanged():
    """Image 1 has signals 1 and 3 in one minibatch (mean 2), then 5 (mean 3); with a new label it restarts with 7."""
    float_zeros = torch.zeros(3, dtype=torch.float64)
    signals = {"label": torch.full((3,), -1), "mark": torch.zeros(()), "mean": float_zeros, "count": float_zeros}

    def add(signals, values, labels, rows, real=None):
        return update_signals(signals, torch.tensor(values).double(), torch.tensor(labels), torch.tensor(rows), real)

    signals = add(signals, [1.0, 3.0, -1.0], [4, 4, 2], [1, 1, 0])
    assert signals["mean"].tolist() == [-1, 2, 0]
    assert (signals["count"].tolist(), signals["label"].tolist()) == ([1, 2, 0], [2, 4, -1])
    signals = add(signals, [5.0, 9.0], [4, 0], [1, 2], torch.tensor([True, False]))
    assert signals["mean"].tolist() == [-1, 3, 0]
    # Shrunk by count / (count + 5); an image whose label is another one has no signal.
    found = look_up_signals(signals, torch.tensor([4, 3, 2]), torch.tensor([1, 1, 0]))
    torch.testing.assert_close(found, torch.tensor([3 * 3 / 8, 0, -1 / 6]).double())
    signals = add(signals, [7.0], [3], [1])
    assert (signals["mean"].tolist(), signals["count"].tolist()) == ([-1, 7, 0], [1, 1, 0])


def test_signals_persist_and_change_the_weights():
    """The means stay at the client. Without a step of F-reg, weights move by `signal_weight` times the mean signal."""
    options = FedDure(signal_weight=2.0, regulator_bias=0.0, regulator_lr=0.0)
    client_update, carry, broadcast, batches, _ = make_step(options)
    plain, plain_carry, *_ = make_step(replace(options, signal_weight=0.0))
    images = torch.arange(12 * 16, dtype=torch.uint8).view(12, 1, 4, 4)
    data = make_client_data(5, 12, LABELS)._replace(u=images)
    carry["signals"] = begin_update(client_update, broadcast, data)["signals"]
    new, metrics = client_update.step(broadcast, carry, batches[0])
    plain_new, plain_metrics = plain.step(broadcast, plain_carry, batches[0])
    assert separate(new["coarse"]["params"], plain_new["coarse"]["params"]) == 0  # no signal before the first step
    d = [float(each.samples["d"].total) for each in (metrics, plain_metrics)]
    logits = [(each.pseudo[0].weight - shift).logit() for each, shift in zip((metrics, plain_metrics), d, strict=True)]
    label = metrics.pseudo[0].label
    expected = 2 * look_up_signals(new["signals"], label, batches[0].u_rows)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(logits[0] - logits[1], expected)
    _, memory = client_update.finish(broadcast, new, data)
    repeated = client_update.begin(broadcast, memory, data)
    assert torch.equal(repeated["signals"]["mean"], new["signals"]["mean"])
    other_images = data._replace(u=255 - data.u)
    assert (client_update.begin(broadcast, memory, other_images)["signals"]["label"] == -1).all()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"fine": False, "signal_weight": 1.0}, "signal_weight has no effect without F-reg"),
        ({"signal_weight": -1.0}, "it must be at least 0"),
        ({"fine": False, "share_regulator": True}, "share_regulator has no effect without F-reg"),
        ({"fine": False, "regulator_prior": "confidence"}, "regulator_prior has no effect without F-reg"),
        ({"fine": False, "coarse": False, "signal_labels": "halves"}, "signal_labels has no effect without regulators"),
        ({"share_regulator": True, "regulator_start": "client"}, "the server sends all clients one F-reg"),
        ({"regulator_input": "confidence", "through_weights": "product"}, "set through_weights to 'detached'"),
    ],
)
def test_options_without_effect_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        FedDure(**options)


def test_loop_equals_vmap_with_the_options_of_the_signal():
    """Unequal clients, with a shared F-reg that sees the confidence, mean signals by image, halves of padded labels."""
    method = FedDure(
        regulator_input="confidence", regulator_prior="confidence", share_regulator=True, signal_labels="halves",
        signal_weight=1.0,
    )  # fmt: skip
    simulate_with_both_executors(method, make_task(SmallCNN(1, CLASSES, 4)), cohort=4)


def test_the_options_of_the_signal_keep_the_contract():
    """Runs repeat and resume bit by bit, and sites behind messages compute the same with F-reg in the upload."""
    options = {
        "regulator_prior": "confidence",
        "share_regulator": True,
        "signal_labels": "halves",
        "signal_weight": 1.0,
    }
    results = list(check_method("feddure", options))
    assert [result for result in results if not result.kept] == []
    assert any("regulator (" in result.said for result in results)


def test_loop_equals_vmap_with_every_option():
    """Unequal clients, with padded labels, steps counted, a mean of rewards and a regulator of each client's own."""
    method = FedDure(
        regulator_start="client", coarse_step="plain", judge_prior=True, labeled_first=1, reward_baseline=0.9,
        reward_bound=0.1, debias=True, keep_optimizer=True,
    )  # fmt: skip
    simulate_with_both_executors(method, make_task(SmallCNN(1, CLASSES, 4)), cohort=4)
