"""SemiFed: votes and loss by hand, the step compared with autograd, labels that stay, the models that travel."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from method_helpers import begin_update, simulate_with_both_executors
from recording_methods import RecordingMethod
from scripted_federation import LinearNetwork, make_linear_params
from torch import Tensor

from halfmoon.api.types import Batch, ClientData
from halfmoon.core import tree
from halfmoon.core.optim import SGD
from halfmoon.core.tree import Tree
from halfmoon.engine.sampling import Batching
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
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.semifed import SemiFed, SemiFedClient
from halfmoon.models import Network, SmallCNN

BARE = SmallCNN(1, CLASSES, 4, "none")
LINE = LinearNetwork(classes=3)


def model(*weights: float) -> Tree:
    """Return a model of `LinearNetwork`."""
    return {"params": make_linear_params(*weights), "stats": {}}


def images(*values: float) -> Tensor:
    """Return images of one pixel (n, 1, 1, 1), as a network sees them."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1, 1)


def client(seen: Tensor, labeled: int = 1, shade: int = 0) -> ClientData:
    """Return a client whose unlabeled rows look like this, all of one shade of pixel."""
    x = torch.zeros(labeled, 1, 1, 1, dtype=torch.uint8)
    u = torch.full(seen.shape, shade, dtype=torch.uint8)
    counts = torch.tensor(labeled), torch.tensor(len(seen))
    return ClientData(x, torch.zeros(labeled, dtype=torch.int64), u, *counts, {"plain": seen})


def work_of(method: SemiFed, labels: bool = False, network: Network = LINE, **shared: Any) -> SemiFedClient:
    """Return the client's work under plain SGD of rate 0.1."""
    return SemiFedClient(make_task(network, optimizer=SGD(0.1), **shared), method, labels)


def labeled(
    method: SemiFed, models: list[Tree], data: ClientData, memory: Tree | None = None, round: int = 0
) -> list[int]:
    """Return the labels after a labeling round with the first model as the server's, the others as peers."""
    client_update = work_of(method, True)
    client_update = replace(client_update, task=client_update.task.at(round))
    broadcast = {**models[0], "peers": tree.stack(models[1:])} if models[1:] else models[0]
    memory = client_update.initial_memory(broadcast, torch.Generator()) if memory is None else memory
    return client_update.begin(broadcast, memory, data)["labels"].tolist()


FIRM = model(3, 0, 0)
SOFT = model(1, 0, 0)
OTHER = model(0, 3, 0)
"""At x = 1: class 0 with e^3 / (e^3 + 2) = 0.909; class 0 with e / (e + 2) = 0.576; class 1 with 0.909."""


def test_votes_by_hand():
    """Four models at x = 1: FIRM, FIRM, SOFT and OTHER. With threshold 0.9 two vote for class 0, one for 1, one is
    unconfident.

    Half of the models is enough (2 of 4), more is not. With threshold 0.5 three of four agree. If all have to be confident,
    threshold 0.9 accepts nothing, and threshold 0.5 does at three quarters. At x = -1 FIRM is split between classes 1
    and 2 and OTHER between 0 and 2 (0.488 each): nobody is confident at 0.5.
    """
    models = [FIRM, FIRM, SOFT, OTHER]
    data = client(images(1, -1))
    cases: tuple[tuple[float, float, Any, int], ...] = (
        (0.9, 0.5, "agreeing", 0),
        (0.9, 0.51, "agreeing", -1),
        (0.5, 0.75, "agreeing", 0),
        (0.5, 0.76, "agreeing", -1),
        (0.9, 0.5, "all", -1),
        (0.5, 0.75, "all", 0),
        (0.5, 0.76, "all", -1),
    )
    for threshold, agree, confident, expected in cases:
        method = SemiFed(threshold=threshold, agree=agree, confident=confident)
        assert labeled(method, models, data) == [expected, -1]
    assert labeled(SemiFed(threshold=0.9, agree=1.0), [OTHER], data) == [1, -1]  # the server's model alone
    # A confidence equal to the threshold is enough: classes 0 and 1 have 0.5 each at x = 1. At x = -1 class 2 has 1.
    assert labeled(SemiFed(threshold=0.5, agree=1.0), [model(800, 800, 0)], data) == [0, 2]


def test_the_threshold_moves_in_a_straight_line():
    """From 0.95 to 0.5 over 10 rounds: 0.75 in round 4. SOFT's 0.576 is enough in round 8 (0.55), not in 7 (0.6)."""
    method = SemiFed(threshold=0.95, threshold_last=0.5, agree=1.0)
    shared = make_task(rounds=10)
    assert [method.threshold_in(shared.at(t)) for t in (0, 4, 9)] == pytest.approx([0.95, 0.75, 0.5])
    assert SemiFed(threshold=0.7).threshold_in(shared.at(5)) == 0.7
    client_update = work_of(method, True, rounds=10)
    for round, expected in ((7, -1), (8, 0)):
        now = replace(client_update, task=client_update.task.at(round))
        carry = begin_update(now, SOFT, client(images(1)))
        assert carry["labels"].tolist() == [expected]


def test_assigned_pseudo_label_is_unchanged():
    """What was accepted is retained against all later votes; what was not may still be; other rows begin without labels."""
    method = SemiFed(threshold=0.9, agree=1.0)
    data = client(images(1, 0), shade=3)
    client_update = work_of(method, True)
    carry = begin_update(client_update, OTHER, data)
    assert carry["labels"].tolist() == [1, -1]
    _, memory = client_update.finish(OTHER, carry, data)
    assert labeled(method, [FIRM], data._replace(views={"plain": images(1, 1)}), memory) == [1, 0]
    quiet = work_of(method).begin(FIRM, memory, data)
    assert quiet["labels"].tolist() == [1, -1]
    for streamed in (client(images(0, 0), shade=4), client(images(0, 0, 0), shade=3)):
        assert set(labeled(method, [FIRM], streamed, memory)) == {-1}


def step(method: SemiFed, at: Tree, batch: Batch, labels: list[int], **shared: Any) -> tuple[Tree, Any]:
    """Return the carry and the notes after a step at a model, with these labels of the rows."""
    client_update = work_of(method, **shared)
    data = client(torch.zeros(len(labels), 1, 1, 1), len(batch.x))
    carry = begin_update(client_update, at, data)
    return client_update.step(at, {**carry, "labels": torch.tensor(labels)}, batch)


def test_the_loss_by_hand():
    """Three classes, logits (x log 2, 0, 0). Labeled: x = 0, class 1: log 3. Accepted: x = 1, class 0: log 2.

    Not accepted: p = (1/2, 1/4, 1/4) at x = 1, and q = (1/3, 1/3, 1/3) at the strong x = 0: KL(p || q) =
    (1/2) log(3/2) + (1/2) log(3/4) = 0.0589. The loss is (log 3 + log 2) / 2 + 2 * 0.0589 with unlabeled_weight 2.
    Where no row is accepted, log 3 and a mean of KL over both rows, which look alike. Where both are: (log 3 + 2 log 2)
    / 3 and no KL.
    """
    at = model(log(2), 0, 0)
    distance = 0.5 * log(3 / 2) + 0.5 * log(3 / 4)
    u = {"plain": images(1, 1), "strong": images(0, 0)}
    batch = Batch(images(0), torch.tensor([1]), torch.tensor([0]), u, torch.tensor([2, 0]))
    for labels, expected in (
        ([-1, 2, 0], (log(3) + log(2)) / 2 + 2 * distance),
        ([-1, 2, -1], log(3) + 2 * distance),
        ([0, 2, 0], (log(3) + 2 * log(2)) / 3),
    ):
        _, notes = step(SemiFed(unlabeled_weight=2.0), at, batch, labels)
        assert float(notes.loss) == pytest.approx(expected)
        assert notes.pseudo[0].weight.tolist() == [float(labels[2] >= 0), float(labels[0] >= 0)]
        assert notes.pseudo[0].label.tolist() == [0, 0]
        assert notes.pseudo[0].confidence.tolist() == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("labeling", ["batch", "running"])
@pytest.mark.parametrize("count", [0, 5])
def test_the_step_is_autograds(count, labeling):
    """On the formula written image by image, with the target of KL held still; with and without labeled images."""
    method = SemiFed(unlabeled_weight=3.0, view="weak")
    g = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)  # noqa: E731
    x = draw(count)
    y = torch.arange(count) % CLASSES
    weak = draw(6)
    strong = draw(6)
    rows = torch.tensor([4, 0, 2, 1, 5, 3])
    labels = [2, -1, -1, 0, 3, -1]
    at = start_server(method, make_task(BARE))
    batch = Batch(x, y, torch.arange(count), {"weak": weak, "strong": strong}, rows)
    carry, notes = step(method, at, batch, labels, network=BARE, labeling=labeling)

    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), at["params"])
    say = lambda seen: BARE.predict(params, {}, seen).log_softmax(-1)  # noqa: E731
    trained = [-say(x[i : i + 1])[0, y[i]] for i in range(count)]
    distance = []
    for i, row in enumerate(rows.tolist()):
        quiet = say(weak[i : i + 1])[0]
        loud = say(strong[i : i + 1])[0]
        if labels[row] >= 0:
            trained.append(-quiet[labels[row]])
        else:
            distance.append((quiet.detach().exp() * (quiet.detach() - loud)).sum())
    assert len(trained) == count + 3
    loss = sum(trained) / len(trained) + 3.0 * sum(distance) / len(distance)
    names = tree.flatten(params)
    gradients = torch.autograd.grad(torch.as_tensor(loss), list(names.values()))
    moved = {name: leaf.detach() - 0.1 * d for (name, leaf), d in zip(names.items(), gradients, strict=True)}
    assert max_difference(carry["params"], tree.unflatten(moved)) < 1e-12
    assert max_difference(carry["params"], at["params"]) > 1e-3
    assert float(notes.loss) == pytest.approx(float(torch.as_tensor(loss).detach()), rel=1e-12)


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_without_votes_and_consistency_it_is_fedavg(norm):
    """No labeling round within the run, no weight on consistency: FedAvg on labels, though it looks at all images."""
    network = SmallCNN(1, CLASSES, 4, norm)
    shared = make_task(network, optimizer=SGD(0.1), statistics="separate")
    method = SemiFed(unlabeled_weight=0.0)
    server = start_server(method, shared)
    rule = Batching(3, "rest")
    actual = run_rounds(method, make_simulation(method, shared, batching=rule), server, range(3))
    expected_value = run_rounds(FedAvg(), make_simulation(FedAvg(), shared, batching=rule), server, range(3))
    for one, two in zip(actual, expected_value, strict=True):
        assert max_difference(one.server["params"], two.server["params"]) < 1e-12
    assert max_difference(actual[-1].server["params"], server["params"]) > 1e-2


def test_the_models_that_travel():
    """Cohorts of 2 of 4 clients, 3 models kept, votes every second round: those sent last, the server's beside them.

    Its bytes are those of as many models as are sent; in the other rounds of one.
    """
    method = SemiFed(interval=2, peers=3, threshold=0.3)
    shared = make_task(BARE, optimizer=SGD(0.1))
    recording = RecordingMethod(method)
    server = start_server(method, shared)
    simulation = make_simulation(recording, shared, cohort=2)
    last: dict[int, tuple[int, Tree]] = {}
    numbers = []
    spent = 0
    for number in range(8):
        recording.calls.clear()
        (result,) = run_rounds(recording, simulation, server, range(number, number + 1))
        downlinks = [broadcast for broadcast, _, _ in recording.list_calls("begin")]
        sent = [
            len(broadcast["peers"]["params"]["head"]["weight"]) if "peers" in broadcast else 0
            for broadcast in downlinks
        ]
        assert len(set(sent)) == 1
        if number % 2:
            numbers.append(sent[0])
            expected_value = [tree.index(downlinks[0]["peers"], k)["params"] for k in range(sent[0])]
            found = [[k for k, (_, params) in last.items() if trees_equal(params, each)] for each in expected_value]
            assert all(len(each) == 1 for each in found)
            assert len({each[0] for each in found}) == sent[0] == min(3, len(last))
            newest = sorted((when for when, _ in last.values()), reverse=True)[: sent[0]]
            assert sorted((last[each[0]][0] for each in found), reverse=True) == newest
        else:
            assert sent == [0, 0]
        assert all(trees_equal(broadcast["params"], server["params"]) for broadcast in downlinks)
        one = tree.nbytes(server["params"])
        assert result.report.cost["bytes_down"] - spent == 2 * (1 + sent[0]) * one
        spent = result.report.cost["bytes_down"]
        for k, (_, carry, _) in zip(result.report.cohort, recording.list_calls("finish"), strict=True):
            last[k] = (number, carry["params"])
        server = result.server
    assert max(numbers) == 3
    models = sorted(key for key in simulation.state_store.keys() if key != "book")  # noqa: SIM118
    assert models == ["model-0", "model-1", "model-2"]


def test_no_peers_leaves_the_vote_to_the_server():
    """With peers 0 no peers are stored, and only the received model gives pseudo-labels."""
    method = SemiFed(interval=1, peers=0, threshold=0.3)
    shared = make_task(BARE, optimizer=SGD(0.1))
    recording = RecordingMethod(method)
    simulation = make_simulation(recording, shared)
    result = run_rounds(recording, simulation, start_server(method, shared), range(2))
    assert simulation.state_store.keys() == []
    assert all("peers" not in broadcast for broadcast, _, _ in recording.list_calls("begin"))
    assert result[-1].report.pseudo is not None
    assert result[-1].report.pseudo["share_used"] > 0


def test_clients_of_one_size_are_lifted_together():
    """Equal clients, some met before and some not: loop and vmap agree, with labels given and used."""
    method = SemiFed(interval=1, threshold=0.3, agree=0.6)
    shared = make_task(BARE, optimizer=SGD(0.1))
    run = simulate_with_both_executors(method, shared, make_dataset(((4, 8),) * 4), rounds=4, cohort=2)
    labels = [memory["labels"] for memory in run[-1].state["client"].values()]
    assert all(len(each) == 8 for each in labels)
    assert 0 < sum(int((each >= 0).sum()) for each in labels) < 32


def test_clients_without_labels_follow_themselves():
    """Labels at some clients: one without any learns from consistency alone, and is finite and moves."""
    method = SemiFed()
    shared = make_task(BARE, optimizer=SGD(0.1))
    held = make_dataset(labels_at="some")
    simulation = make_simulation(method, shared, held)
    server = start_server(method, shared)
    simulation.open(0)
    upload = simulation.query("train", {**server, "stats": {}})
    for index, k in enumerate(simulation.responders.tolist()):
        sizes = held.training_size(k)
        assert float(upload.weight[index]) == sizes.labeled + sizes.unlabeled
        if not sizes.labeled:
            assert max_difference(upload.at(index).update["params"], server["params"]) > 1e-6
