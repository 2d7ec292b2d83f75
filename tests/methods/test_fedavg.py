"""FedAvg and FedProx: hand-derived averages, the proximal gradient, and the identity with centralized training."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from method_helpers import (
    assert_params_match,
    make_batches,
    make_client_data,
    make_torch_module,
    simulate_rounds,
    simulate_with_both_executors,
)
from scripted_federation import OneWeightNetwork, ScriptedFederation, get_weight, make_one_weight_params

from halfmoon.api.uploads import Upload, stack
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.optim import SGD, Adam
from halfmoon.core.tree import Tree
from halfmoon.data.views import Plain
from halfmoon.engine.sampling import Batching, Views
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods import registry
from halfmoon.methods.averaging import average_uploads
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.feddb import FedDB
from halfmoon.methods.fedrgd import FedRGD
from halfmoon.methods.objectives import UDA, FixMatch
from halfmoon.methods.objectives.pseudo import PseudoLabel
from halfmoon.methods.proxyfl import ProxyTuning
from halfmoon.models import SmallCNN


def test_the_average_by_hand():
    """Clients with (2 + 2) and (3 + 9) rows weigh 4 and 12: (4 * 1 + 12 * 5) / 16 = 4 and (4 * 10 + 12 * 2) / 16 = 4.

    Statistics are averaged like parameters.
    """
    shared = make_task()
    client_update = FedAvg().client_updates(shared)["train"]
    ups = []
    for p, s, counts in ((1.0, 10.0, (2, 2)), (5.0, 2.0, (3, 9))):
        broadcast = {"params": {"w": torch.tensor([p])}, "stats": {"n": {"mean": torch.tensor([s])}}}
        upload, memory = client_update.finish(
            broadcast, client_update.begin(broadcast, {}, make_client_data(*counts)), make_client_data(*counts)
        )
        assert memory == {}
        assert float(upload.weight) == sum(counts)
        ups.append(upload)
    mean = average_uploads(stack(ups))
    assert mean["params"]["w"].tolist() == [4.0]
    assert mean["stats"]["n"]["mean"].tolist() == [4.0]
    assert set(mean) == {"params", "stats"}


def test_the_server_averages_its_cohort_by_all_rows():
    """One round of three clients: the server's tree is the mean of their uploads by |labeled| + |unlabeled|."""
    method = FedAvg()
    shared = make_task()
    held = make_dataset()
    simulation = make_simulation(method, shared, held)
    server = start_server(method, shared)
    simulation.open(0)
    upload = simulation.query("train", server)
    weights = [held.split_size(int(k)).labeled + held.split_size(int(k)).unlabeled for k in simulation.cohort]
    assert upload.weight.tolist() == weights
    (result,) = run_rounds(method, make_simulation(method, shared, held), server, range(1))
    for path, leaf in tree.flatten({"params": upload.update["params"], "stats": upload.update["stats"]}).items():
        expected = sum(w / sum(weights) * each for w, each in zip(weights, leaf, strict=True))
        torch.testing.assert_close(tree.flatten(result.server)[path], expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("pair", [("fedavg-sl", "fedprox-sl"), ("fedavg-uda", "fedprox-uda")])
def test_prox_of_zero_is_fedavg_bit_by_bit(pair):
    """FedProx of the catalog with prox = 0 runs the very rounds of FedAvg; with its prox it does not."""
    runs = []
    for name, chosen in ((pair[0], {}), (pair[1], {"prox": 0.0}), (pair[1], {"prox": 0.5})):
        method = registry.make(name, chosen)
        shared = make_task()
        held = make_dataset(all_labels=registry.entry(name).all_labels)
        runs.append(simulate_rounds(method, shared, held, rounds=2)[-1].server)
    assert trees_equal(runs[0], runs[1])
    assert max_difference(runs[2], runs[0]) > 1e-4


@pytest.mark.parametrize("objective", [None, FixMatch(threshold=0.3)], ids=["supervised", "fixmatch"])
def test_the_proximal_gradient_is_autograds(objective):
    """Three steps of SGD equal autograd on objective + (prox / 2) ||params - received||^2, written as a loss."""
    prox = 0.7
    lr = 0.1
    method = FedAvg(prox=prox) if objective is None else FedAvg(objective, prox=prox)
    shared = make_task(optimizer=SGD(lr))
    client_update = method.client_updates(shared)["train"]
    broadcast = start_server(method, shared)
    carry = client_update.begin(broadcast, {}, make_client_data())
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), broadcast["params"])
    stats = broadcast["stats"]
    for batch in make_batches(("weak", "strong")):
        before = stats
        carry, notes = client_update.step(broadcast, carry, batch)
        plain, seen = method.objective(shared, params, before, batch)
        far = sum(
            (p - q).square().sum() for p, q in zip(tree.leaves(params), tree.leaves(broadcast["params"]), strict=True)
        )
        gradients = torch.autograd.grad(plain + prox / 2 * far, list(tree.leaves(params)))
        moved = [p.detach() - lr * g for p, g in zip(tree.leaves(params), gradients, strict=True)]
        names = tree.flatten(params)
        params = tree.unflatten({name: p.requires_grad_() for name, p in zip(names, moved, strict=True)})
        stats = carry["stats"]
        assert float(notes.loss) == pytest.approx(float(plain.detach()), rel=1e-12)
        assert len(seen.moments) == 1
        assert max_difference(carry["params"], tree.map(torch.detach, params)) < 1e-12
    assert max_difference(carry["params"], broadcast["params"]) > 1e-2


def test_every_local_update_starts_with_a_new_optimizer_from_the_download():
    """Momentum is not carried from local update to local update, and nothing remains at the client."""
    method = FedAvg()
    shared = make_task(optimizer=SGD(0.1, momentum=0.9))
    client_update = method.client_updates(shared)["train"]
    broadcast = start_server(method, shared)
    carry, _ = client_update.step(
        broadcast, client_update.begin(broadcast, {}, make_client_data()), make_batches(("weak", "strong"), 1)[0]
    )
    assert any(leaf.any() for leaf in tree.leaves(carry["optimizer"]))
    repeated = client_update.begin(broadcast, {}, make_client_data())
    assert not any(leaf.any() for leaf in tree.leaves(repeated["optimizer"]))
    assert repeated["params"] is broadcast["params"]


@pytest.mark.parametrize(
    ("actual", "expected_value", "options"),
    [
        (SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (Adam, torch.optim.Adam, {"lr": 1e-2, "eps": 1e-3}),
    ],
)
def test_one_client_with_everything_is_centralized_training(actual, expected_value, options):
    """A round of one client that contains all rows, whole-batch steps: the same as a module, its optimizer and a loop.

    Two epochs of one step each on all 20 images without augmentation. The rows come in another order each time, which
    changes a mean by rounding only. Parameters and running statistics agree.
    """
    held = make_dataset(((20, 0),), all_labels=True)
    shared = make_task(optimizer=actual(**options))
    views = Views(labeled=Plain())
    method = FedAvg()
    server = start_server(method, shared)
    simulation = make_simulation(method, shared, held, views=views, batching=Batching(20, epochs=2), cohort=1)
    (result,) = run_rounds(method, simulation, server, range(1))
    assert result.report.cost["labeled_steps"] == 2

    oracle = make_torch_module(server)
    optimizer = expected_value(oracle.parameters(), **options)
    images = held.train.images.double() / 255 * 2 - 1
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(oracle(images), held.train.labels).backward()
        optimizer.step()
    assert_params_match(result.server["params"], oracle, rtol=1e-9)
    for path, leaf in tree.flatten(result.server["stats"]).items():
        layer, name = path.split("/")
        torch.testing.assert_close(leaf, oracle.get_buffer(f"{layer}.norm.running_{name}"), rtol=1e-9, atol=1e-10)


def test_equal_clients_come_back_as_one():
    """Clients that hold the same images and take one whole-batch step, unaugmented: their mean is any of them."""
    held = make_dataset(((6, 0),) * 3)
    copies = held.train.images[torch.from_numpy(held.split.rows(0, True))]
    labels = held.train.labels[torch.from_numpy(held.split.rows(0, True))]
    images = held.train.images.clone()
    classes = held.train.labels.clone()
    for k in range(3):
        images[torch.from_numpy(held.split.rows(k, True))] = copies
        classes[torch.from_numpy(held.split.rows(k, True))] = labels
    held = type(held)(type(held.train)(images, classes), held.split)
    shared = make_task()
    method = FedAvg()
    options = {"views": Views(labeled=Plain()), "batching": Batching(6)}
    one, three = (simulate_rounds(method, shared, held, cohort=size, **options)[-1].server for size in (1, 3))
    assert max_difference(one, three) < 1e-12
    assert max_difference(one, start_server(method, shared)) > 1e-3


def test_the_average_of_the_servers_models_by_hand():
    """The server comes to 1, .4 and .1. The average: 1; (1 + .4) / 2 = .7; (1 + .4 + .1) / 3 = .5, as .9 > 2 / 3.

    With a decay of .25: 1; .25 + .75 * .4 = .55; .25 * .55 + .75 * .1 = .2125. It goes down next to the model.
    """
    for keep, averages in ((0.9, (1.0, 0.7, 0.5)), (0.25, (1.0, 0.55, 0.2125))):
        weights = iter((1.0, 0.4, 0.1))

        def train(broadcast: Tree, clients: list[int], weights: Iterator[float] = weights) -> list[Upload]:
            return [Upload({"params": make_one_weight_params(next(weights))}, torch.ones(()))]

        fed = ScriptedFederation({"train": train})
        shared = make_task(OneWeightNetwork())
        method = FedAvg(FixMatch(teacher="average", teacher_decay=keep))
        server = method.start(shared, {"params": make_one_weight_params(9.0), "stats": {}})
        for number, expected in enumerate(averages):
            server = method.round(shared.at(number), server, fed)
            assert get_weight(server["average"]["params"]) == pytest.approx(expected)
            assert get_weight(method.solution(shared, {"stats": {}, **server})["params"]) == (1.0, 0.4, 0.1)[number]


@pytest.mark.parametrize("objective", [FixMatch, UDA, PseudoLabel])
@pytest.mark.parametrize(("labels", "like"), [("step", "global"), ("round", "local")])
def test_an_average_of_one_model_teaches_as_the_received_one(objective, labels, like):
    """Before the second round has ended the average is the server's model; with a decay of 0 it always is."""
    held = make_dataset(((2, 8),) * 4)
    shared = make_task(labeling="running", optimizer=SGD(0.5))
    runs = {}
    for name, options in {
        "received": {"teacher": like},
        "average": {"teacher": "average"},
        "newest": {"teacher": "average", "teacher_decay": 0.0},
    }.items():
        method = FedAvg(objective(threshold=0.3, labels=labels, **options))
        runs[name] = simulate_rounds(method, shared, held, rounds=4)
    ends = {name: [each.server["params"] for each in result] for name, result in runs.items()}
    for number in range(4):
        assert trees_equal(ends["newest"][number], ends["received"][number])
        assert number > 1 or trees_equal(ends["average"][number], ends["received"][number])
    assert not trees_equal(ends["average"][-1], ends["received"][-1])
    sent = [result[-1].report.cost for result in (runs["average"], runs["received"])]
    assert sent[0]["bytes_up"] == sent[1]["bytes_up"]
    assert sent[0]["bytes_down"] == 2 * sent[1]["bytes_down"]


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_loop_and_vmap_agree_where_the_average_teaches(norm):
    """As everywhere, to rounding, with statistics and without."""
    method = FedAvg(FixMatch(threshold=0.3, teacher="average", debias=True))
    simulate_with_both_executors(method, make_task(SmallCNN(1, CLASSES, 4, norm)), rounds=3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: FedRGD(FixMatch(teacher="average")),
        lambda: FedDB(teacher="average"),
        lambda: ProxyTuning(FedAvg(FixMatch(teacher="average"))),
        lambda: FixMatch(teacher="average", teacher_decay=1.0),
    ],
)
def test_unused_average_is_refused(make):
    """By methods whose servers keep none, and with a decay that would never change."""
    with pytest.raises(UserError, match=r"average|teacher_decay"):
        make()
