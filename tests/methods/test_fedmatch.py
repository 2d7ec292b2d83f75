"""FedMatch: penalties, votes, neighbors, bytes by hand, its losses compared with autograd, and where it is another method."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_helpers import begin_update
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
from halfmoon.methods.fedmatch import (
    FedMatch,
    FedMatchClient,
    add_halves,
    draw_noise_image,
    nearest_clients,
    vote_on_labels,
)
from halfmoon.models import Network, SmallCNN
from halfmoon.models.network import kernels

BARE = SmallCNN(1, CLASSES, 4, "none")
"""Without normalization or bias, as FedMatch's authors have it: everything is a kernel."""

LINE = LinearNetwork()
RATE = 0.01
ALONE: dict[str, Any] = {
    "consistency_weight": 0.0,
    "unlabeled_weight": 0.0,
    "l2_weight": 0.0,
    "l1_weight": 0.0,
    "l1_threshold": 0.0,
}
"""Options under which nothing moves psi."""


def images(*values: float) -> Tensor:
    """Return images of one pixel (n, 1, 1, 1), as a network sees them."""
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1, 1, 1)


def client(labeled: int = 1, unlabeled: int = 1, side: int = 1) -> ClientData:
    """Return a client of so many rows."""
    x, u = (torch.zeros(n, 1, side, side, dtype=torch.uint8) for n in (labeled, unlabeled))
    counts = torch.tensor(labeled), torch.tensor(unlabeled)
    return ClientData(x, torch.zeros(labeled, dtype=torch.int64), u, *counts)


def batch_of(u: Tensor, strong: Tensor, x: Tensor | None = None, y: Tensor | None = None) -> Batch:
    """Return a batch; without x there are no labels."""
    x = u[:0] if x is None else x
    y = torch.zeros(len(x), dtype=torch.int64) if y is None else y
    return Batch(x, y, torch.arange(len(x)), {"plain": u, "weak": u, "strong": strong}, torch.arange(len(u)))


def work_of(method: FedMatch, network: Network = LINE, helpers: int = 0, **shared: Any) -> FedMatchClient:
    """Return the client's work with so many helpers, under plain SGD."""
    return FedMatchClient(make_task(network, optimizer=SGD(RATE), **shared), replace(method, helpers=helpers), helpers)


def down_of(sigma: Tree, psi: Tree, helpers: list[Tree] | None = None, there: list[float] | None = None) -> Tree:
    """Return what comes down."""
    broadcast = {"sigma": sigma, "psi": psi, "stats": {}}
    if helpers:
        broadcast |= {"helpers": tree.stack(helpers), "there": torch.tensor(there or [1.0] * len(helpers))}
    return broadcast


def run_update(
    client_update: FedMatchClient, broadcast: Tree, batch: Batch, memory: Tree | None = None
) -> tuple[Tree, Any]:
    """Return the carry and the notes after one step."""
    data = client(len(batch.x), batch.u_rows.numel(), batch.u["strong"].shape[-1])
    memory = client_update.initial_memory(broadcast, torch.Generator()) if memory is None else memory
    return client_update.step(broadcast, client_update.begin(broadcast, memory, data), batch)


def test_the_penalties_by_hand():
    """sigma (1, 2), psi (0.5, -1), l2_weight 10, l1_weight 0.1, nobody sure: the loss is

    10 (0.5^2 + 3^2) + 0.1 (0.5 + 1) = 92.5 + 0.15. Its gradient in psi is 20 (psi - sigma) + 0.1 sign(psi), so
    (-10 + 0.1, -60 - 0.1): at a rate of 0.01 psi becomes (0.5 + 0.099, -1 + 0.601). sigma remains.
    """
    client_update = work_of(FedMatch(threshold=1.01, l1_weight=0.1, l2_weight=10.0))
    carry, notes = run_update(
        client_update,
        down_of(make_linear_params(1, 2), make_linear_params(0.5, -1)),
        batch_of(images(1, 2), images(2, 1)),
    )
    assert float(notes.loss) == pytest.approx(92.65)
    assert float(notes.samples["penalty"].total) == pytest.approx(92.65)
    assert carry["psi"]["head"]["weight"].flatten().tolist() == pytest.approx([0.599, -0.399])
    assert carry["sigma"]["head"]["weight"].flatten().tolist() == [1, 2]
    assert notes.pseudo[0].weight.tolist() == [0, 0]


def test_votes_by_hand():
    """Image 0: 2 against 1, the majority wins. Image 1: all differ, the first class or the local one. Image 2: agreement.

    With the second helper away image 0 is a tie between 1 and 0.
    """
    local_labels = torch.tensor([1, 2, 3])
    helper_labels = torch.tensor([[0, 1, 3], [0, 3, 0]])
    both = torch.ones(2)
    one = torch.tensor([1.0, 0.0])
    none = torch.zeros(2)
    assert vote_on_labels(local_labels, helper_labels, both, 4, "first").tolist() == [0, 1, 3]
    assert vote_on_labels(local_labels, helper_labels, both, 4, "own").tolist() == [0, 2, 3]
    assert vote_on_labels(local_labels, helper_labels, one, 4, "first").tolist() == [0, 1, 3]
    assert vote_on_labels(local_labels, helper_labels, one, 4, "own").tolist() == [1, 2, 3]
    for ties in ("first", "own"):
        assert vote_on_labels(local_labels, helper_labels, none, 4, ties).tolist() == local_labels.tolist()


def test_neighbors_by_hand():
    """Clients on a line at 0, 1, 3 and 7: 1 is nearest to 0 (1), then 3 (2); of a tie the lower number."""
    known = {4: torch.tensor([0.0]), 9: torch.tensor([1.0]), 2: torch.tensor([3.0]), 11: torch.tensor([7.0])}
    assert nearest_clients(known, 9, 2) == [4, 2]
    assert nearest_clients(known, 11, 2) == [2, 9]
    assert nearest_clients(known, 4, 5) == [9, 2, 11]
    assert nearest_clients({**known, 1: torch.tensor([2.0])}, 1, 2) == [2, 9]
    assert nearest_clients(known, 5, 2) == []
    assert nearest_clients({5: torch.tensor([0.0])}, 5, 2) == []


def test_the_noise_is_one_fixed_image():
    """Always the same; of a normal distribution of mean and deviation 125, cut at 0 and 255.

    Its mean is 125 + 125 (phi(-1) - phi(1.04)) / (Phi(1.04) - Phi(-1)) = 125 + 125 * 0.00967 / 0.6922 = 126.7.
    """
    image = draw_noise_image(torch.zeros(5, 3, 32, 32, dtype=torch.uint8))
    assert image.shape == (1, 3, 32, 32)
    assert torch.equal(image, draw_noise_image(torch.zeros(0, 3, 32, 32, dtype=torch.uint8)))
    assert float(image.double().mean()) == pytest.approx(126.7, abs=4 * 70 / 3072**0.5)
    inside = ((image >= 63) & (image < 192)).double().mean()  # one half deviation: (0.7038 - 0.3098) / 0.6922 = 0.569
    assert float(inside) == pytest.approx(0.569, abs=4 * (0.25 / 3072) ** 0.5)


def written(
    network: Network, sigma: Tree, psi: Tree, received: Tree, helpers: list[Tree], batch: Batch, o: FedMatch
) -> tuple[Tensor, int]:
    """Return L_u as the paper writes it, image by image, and how many images the client is confident of."""
    say = lambda kernel, base, x: network.predict(add_halves(base, kernel), {}, x).log_softmax(-1)  # noqa: E731
    view = batch.u[o.view]
    strong = batch.u["strong"]
    local_labels = say(psi, sigma, view)
    loud = say(psi, sigma, strong)
    helper_labels = [say(each, received, view).detach() for each in helpers]
    total = torch.zeros((), dtype=torch.float64)
    confident = 0
    for i in range(len(view)):
        if float(local_labels[i].detach().exp().max()) < o.threshold:
            continue
        confident += 1
        votes = [int(local_labels[i].argmax()), *(int(each[i].argmax()) for each in helper_labels)]
        label = min(range(CLASSES), key=lambda c: (-votes.count(c), c))
        for each in helper_labels:
            distance = sum(each[i, c].exp() * (each[i, c] - local_labels[i, c]) for c in range(CLASSES))
            total = total + o.consistency_weight * distance / len(helper_labels)
        total = total - o.unlabeled_weight * loud[i, label]
    total = total / confident if confident else total
    flat = [torch.cat([leaf.flatten() for leaf in tree.leaves(part)]) for part in (psi, sigma)]
    return total + o.l2_weight * ((flat[0] - flat[1]) ** 2).sum() + o.l1_weight * flat[0].abs().sum(), confident


def learnable(params: Tree) -> Tree:
    """Return a copy that autograd watches."""
    return tree.map(lambda leaf: leaf.clone().requires_grad_(), params)


def descended(params: Tree, loss: Tensor) -> Tree:
    """Return params after a step of plain SGD on the loss, by torch.autograd."""
    names = tree.flatten(params)
    gradients = torch.autograd.grad(loss, list(names.values()))
    moved = {name: leaf.detach() - RATE * g for (name, leaf), g in zip(names.items(), gradients, strict=True)}
    return tree.unflatten(moved)


@pytest.mark.parametrize("helpers", [0, 1, 2])
@pytest.mark.parametrize(
    ("statistics", "labeling"), [("joint", "batch"), ("separate", "batch"), ("separate", "running")]
)
def test_both_steps_are_autograds(helpers, statistics, labeling):
    """sigma descends L_s alone, then psi L_u alone, at the new sigma: both as autograd on the formulas finds them.

    Strong weights on the terms over images, so that a gradient that is missing, or passes where it is stopped, shows.
    """
    method = FedMatch(
        threshold=0.4, labeled_weight=0.5, consistency_weight=3.0, unlabeled_weight=2.0, l2_weight=0.5, l1_weight=0.01
    )
    client_update = work_of(method, BARE, helpers, statistics=statistics, labeling=labeling)
    g = torch.Generator().manual_seed(0)
    draw = lambda n: 2 * torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)  # noqa: E731
    server = start_server(method, client_update.task)
    perturb = lambda leaf: leaf + 0.2 * torch.randn(leaf.shape, generator=g, dtype=leaf.dtype)  # noqa: E731
    other = [tree.map(perturb, server["psi"]) for _ in "ab"]
    batch = batch_of(draw(7), draw(7), draw(5), torch.arange(5) % CLASSES)
    broadcast = down_of(server["sigma"], server["psi"], other[:helpers])
    carry, notes = run_update(client_update, broadcast, batch)

    sigma = learnable(server["sigma"])
    logits = BARE.predict(add_halves(sigma, server["psi"]), {}, batch.x)
    labeled = method.labeled_weight * F.cross_entropy(logits, batch.y)
    sigma = descended(sigma, labeled)
    assert max_difference(carry["sigma"], sigma) < 1e-12
    assert max_difference(carry["sigma"], server["sigma"]) > 1e-3
    psi = learnable(server["psi"])
    loss, confident = written(BARE, sigma, psi, server["sigma"], other[:helpers], batch, method)
    assert 0 < confident < 7
    assert int(notes.pseudo[0].weight.sum()) == confident
    assert max_difference(carry["psi"], descended(psi, loss)) < 1e-12
    assert float(notes.loss) == pytest.approx(float((labeled + loss).detach()), rel=1e-12)
    if helpers:  # the terms over images are what moves psi here, not the penalties alone
        still = run_update(work_of(replace(method, consistency_weight=0.0), BARE, helpers), broadcast, batch)[0]
        assert max_difference(carry["psi"], still["psi"]) > 1e-3


def test_sigma_and_psi_train_on_their_images():
    """Other unlabeled images leave sigma's step as it is, in every bit; labeled ones reach psi through sigma only."""
    method = FedMatch(threshold=0.3, unlabeled_weight=1.0, l2_weight=0.0)
    client_update = work_of(method, BARE)
    g = torch.Generator().manual_seed(0)
    draw = lambda n: 2 * torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)  # noqa: E731
    server = start_server(method, client_update.task)
    x = draw(4)
    u = draw(6)
    strong = draw(6)
    y = torch.arange(4)
    broadcast = down_of(server["sigma"], server["psi"])
    one, two = (run_update(client_update, broadcast, batch_of(u, seen, x, y))[0] for seen in (strong, draw(6)))
    assert trees_equal(one["sigma"], two["sigma"])
    assert not trees_equal(one["psi"], two["psi"])
    frozen = work_of(replace(method, labeled_weight=0.0), BARE)
    one, two = (run_update(frozen, broadcast, batch_of(u, strong, seen, y))[0] for seen in (x, draw(4)))
    assert trees_equal(one["psi"], two["psi"])
    assert trees_equal(one["sigma"], server["sigma"])
    assert not trees_equal(one["psi"], server["psi"])


def test_missing_helpers_have_no_vote():
    """With one of two places empty: the term and the votes of one helper; with both: those of a client alone."""
    method = FedMatch(threshold=0.3, consistency_weight=2.0, unlabeled_weight=2.0, ties="own")
    server = start_server(method, make_task(BARE))
    g = torch.Generator().manual_seed(1)
    draw = lambda n: 2 * torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)  # noqa: E731
    friend = tree.map(lambda leaf: torch.randn(leaf.shape, generator=g, dtype=leaf.dtype), server["psi"])
    batch = batch_of(draw(6), draw(6))
    parts = (server["sigma"], server["psi"])
    nobody = tree.zeros_like(friend)
    pairs = (
        (down_of(*parts, [friend, nobody], [1.0, 0.0]), down_of(*parts, [friend])),
        (down_of(*parts, [nobody, nobody], [0.0, 0.0]), down_of(*parts)),
    )
    for count, (given, equal) in zip((1, 0), pairs, strict=True):
        (one, _), (two, _) = (
            run_update(work_of(method, BARE, 2), given, batch),
            run_update(work_of(method, BARE, count), equal, batch),
        )
        assert max_difference(one["psi"], two["psi"]) < 1e-14
    assert max_difference(*(run_update(work_of(method, BARE, 2), given, batch)[0]["psi"] for given, _ in pairs)) > 1e-3


def test_client_without_confident_predictions_trains_only_on_labels():
    """Nobody above threshold and no penalty: psi remains in every bit, sigma moves, and nothing is divided by zero."""
    client_update = work_of(FedMatch(threshold=1.01, l2_weight=0.0, l1_weight=0.0))
    broadcast = down_of(make_linear_params(1, 2), make_linear_params(0.2, 0.4))
    carry, notes = run_update(
        client_update, broadcast, batch_of(images(1, 2), images(2, 1), images(1, 2), torch.tensor([0, 0]))
    )
    assert trees_equal(carry["psi"], broadcast["psi"])
    assert not trees_equal(carry["sigma"], broadcast["sigma"])
    assert bool(notes.loss.isfinite())


def test_the_mean_over_all_images_or_over_those_used():
    """Logits (x, 0): at x = 2 the client is confident (0.88), at 0.5 and 0.1 it is not. CE(0 | strong 0) = log 2.

    Over the used one the mean is log 2 = 0.693, over all three log 2 / 3 = 0.231.
    """
    quiet: dict[str, Any] = {"threshold": 0.8, "unlabeled_weight": 1.0, "l2_weight": 0.0, "l1_weight": 0.0}
    batch = batch_of(images(2, 0.5, 0.1), images(0, 0, 0))
    means: tuple[tuple[Any, float], ...] = (("used", 0.693147), ("all", 0.231049))
    for mean, expected in means:
        _, notes = run_update(
            work_of(FedMatch(**quiet, mean=mean)), down_of(make_linear_params(1, 0), make_linear_params(0, 0)), batch
        )
        assert float(notes.loss) == pytest.approx(expected, rel=1e-5)


def test_debiasing_changes_the_clients_vote():
    """Rows at x = 2 (0.881, 0.119), three times, and at -1 (0.269, 0.731): the mean prediction is (0.728, 0.272).

    Divided by it, an image at x = 0.5, (0.622, 0.378), becomes (0.855, 1.390) / 2.245 = (0.381, 0.619): class 1.
    """
    plain, debias_logits = (work_of(FedMatch(debias=debias, threshold=0.6)) for debias in (False, True))
    assert plain.requirements.precomputed_views == ()
    assert debias_logits.requirements.precomputed_views == ("plain",)
    broadcast = down_of(make_linear_params(1, 0), make_linear_params(0, 0))
    data = client(0, 4)._replace(views={"plain": images(2, 2, 2, -1)})
    for client_update, label, confident in ((plain, 0, 0.622459), (debias_logits, 1, 0.6190)):
        carry = begin_update(client_update, broadcast, data)
        _, notes = client_update.step(broadcast, carry, batch_of(images(0.5), images(0.5)))
        assert notes.pseudo[0].label.tolist() == [label]
        assert notes.pseudo[0].confidence.tolist() == pytest.approx([confident], rel=1e-3)
        assert notes.pseudo[0].weight.tolist() == [1.0]


def finished(
    client_update: FedMatchClient, broadcast: Tree, memory: Tree, sigma: Tree, psi: Tree, labeled: int = 1
) -> tuple[Tree, Tree]:
    """Return upload and memory of a local update that ends with these parts."""
    data = client(labeled)
    carry = client_update.begin(broadcast, memory, data)
    return client_update.finish(broadcast, {**carry, "sigma": sigma, "psi": psi}, data)


def test_bytes_by_hand():
    """Ten classes, so ten values of 8 bytes a part, each 12 with its index; delta 0.1. An embedding is 80 bytes.

    First meeting: both parts whole, 160. sigma moves in two entries, psi in none: up 24 + 0 + 80. The server then
    changes six entries of sigma (72 of 80 bytes), seven of psi (84: whole, 80); three psi entries of it by 0.09: these
    stay as the client had them. Seven changed entries of the client's psi are more than the whole: 80.
    """
    client_update = work_of(FedMatch(delta_threshold=0.1, l1_threshold=0.05), LinearNetwork(classes=10))
    zero = [0.0] * 10
    ones = [1.0] * 10
    broadcast = down_of(make_linear_params(*ones), make_linear_params(*ones))
    memory = client_update.initial_memory(broadcast, torch.Generator())
    upload, memory = finished(
        client_update, broadcast, memory, make_linear_params(2.0, 0.5, 1.09, 0.91, *ones[4:]), make_linear_params(*ones)
    )
    assert client_update.traffic(broadcast, upload) == (160, 24 + 0 + 80)
    assert upload.update["sigma"]["head"]["weight"].flatten().tolist() == [2.0, 0.5, *ones[2:]]
    assert trees_equal(
        {"sigma": upload.update["sigma"], "psi": upload.update["psi"]},
        {name: memory[name] for name in ("sigma", "psi")},
    )

    sigma = make_linear_params(2.0, 0.5, *[3.0] * 6, 1.0, 1.0)
    broadcast = down_of(sigma, make_linear_params(*[2.0] * 7, 1.09, 0.91, 1.09))
    upload, after = finished(client_update, broadcast, memory, sigma, make_linear_params(*zero[:6], 0.04, *ones[:3]))
    assert client_update.traffic(broadcast, upload) == (72 + 80, 0 + 80 + 80)
    assert upload.update["psi"]["head"]["weight"].flatten().tolist() == [0.0] * 7 + [1.0] * 3
    assert trees_equal(
        {"sigma": upload.update["sigma"], "psi": upload.update["psi"]}, {name: after[name] for name in ("sigma", "psi")}
    )


def test_only_who_has_labels_sends_sigma():
    """A client without labels sends psi alone, with thresholds or without; without them, whole trees and no memory."""
    broadcast = down_of(make_linear_params(1, 2), make_linear_params(3, 4))
    for threshold, labeled, back in ((None, 1, 16 + 16), (None, 0, 16), (0.0, 1, 16 + 12), (0.0, 0, 12)):
        client_update = work_of(FedMatch(delta_threshold=threshold))
        memory = client_update.initial_memory(broadcast, torch.Generator())
        assert bool(memory) == (threshold is not None)
        upload, stored = finished(
            client_update, broadcast, memory, make_linear_params(0, 0), make_linear_params(3, 5), labeled
        )
        assert client_update.traffic(broadcast, upload) == (32, back + 16)
        assert bool(stored) == (threshold is not None)


def test_helpers_are_sent_as_differences_from_the_local_model():
    """Of ten entries one helper differs in two, another in eight, a third is not there: 24 + 80 + 0 bytes more."""
    local_labels = [1.0] * 10
    helpers = [
        make_linear_params(5, 5, *local_labels[2:]),
        make_linear_params(*[5.0] * 8, 1.05, 1.0),
        make_linear_params(*[0.0] * 10),
    ]
    broadcast = down_of(make_linear_params(*local_labels), make_linear_params(*local_labels), helpers, [1.0, 1.0, 0.0])
    for threshold, more in ((0.1, 24 + 80), (None, 80 + 80)):
        client_update = work_of(FedMatch(delta_threshold=threshold), LinearNetwork(classes=10), 3)
        upload, _ = finished(
            client_update,
            broadcast,
            client_update.initial_memory(broadcast, torch.Generator()),
            make_linear_params(*local_labels),
            make_linear_params(*local_labels),
        )
        assert client_update.traffic(broadcast, upload)[0] == 160 + more


def test_a_helper_is_its_psi_on_the_receivers_sigma():
    """sigma (1, 0), a helper's psi (0, 1.5): it says logits (x, 1.5 x), whatever its sigma was; at x = 1 class 1.

    The client (class 0) is outvoted by two of that kind, though sigma's step has just come to where they say class 0.
    """
    client_update = work_of(FedMatch(threshold=0.5, labeled_weight=500.0, delta_threshold=None), helpers=2)
    broadcast = down_of(
        make_linear_params(1, 0), make_linear_params(1, 0), [make_linear_params(0, 1.5), make_linear_params(0, 1.5)]
    )
    batch = batch_of(images(1), images(1), images(1), torch.tensor([0]))
    carry, notes = run_update(client_update, broadcast, batch)
    assert notes.pseudo[0].label.tolist() == [1]
    first, second = carry["sigma"]["head"]["weight"].flatten().tolist()
    assert first > second + 1.5


@pytest.mark.parametrize("threshold", [None, 5e-5])
def test_a_weight_that_is_no_number_is_not_left_out(threshold):
    """Not below any threshold, it goes up, where the driver sees it and stops."""
    client_update = work_of(FedMatch(delta_threshold=threshold))
    broadcast = down_of(make_linear_params(1, 2), make_linear_params(3, 4))
    nan = float("nan")
    upload, _ = finished(
        client_update,
        broadcast,
        client_update.initial_memory(broadcast, torch.Generator()),
        make_linear_params(nan, 0),
        make_linear_params(3, nan),
    )
    for name, row in (("sigma", 0), ("psi", 1)):
        assert upload.update[name]["head"]["weight"].isnan().flatten().tolist() == [row == 0, row == 1]


@pytest.mark.parametrize("threshold", [None, 0.0])
@pytest.mark.parametrize("norm", ["none", "batch"])
def test_with_psi_still_it_is_fedavg_at_a_higher_rate(threshold, norm):
    """No helpers, no weight on what moves psi: sigma is trained as FedAvg trains theta, at labeled_weight * rate."""
    network = SmallCNN(1, CLASSES, 4, norm)
    held = make_dataset(((6, 8),) * 4)
    method = FedMatch(helpers=0, labeled_weight=4.0, delta_threshold=threshold, **ALONE)
    slow, fast = (make_task(network, optimizer=SGD(rate)) for rate in (RATE, 4 * RATE))
    server = start_server(method, slow)
    options: dict[str, Any] = {"batching": Batching(3, "rest", epochs=2)}
    actual = run_rounds(method, make_simulation(method, slow, held, **options), server, range(3))
    expected_value = run_rounds(
        FedAvg(), make_simulation(FedAvg(), fast, held, **options), method.solution(slow, server), range(3)
    )
    for one, two in zip(actual, expected_value, strict=True):
        assert max_difference(method.solution(slow, one.server)["params"], two.server["params"]) < 1e-12
        assert max_difference(one.server["psi"], server["psi"]) < 1e-15  # a mean of equal numbers
        assert one.report.cost["labeled_images"] == two.report.cost["labeled_images"]
    assert max_difference(actual[-1].server["sigma"], server["sigma"]) > 1e-2


def test_the_server_teaches_sigma_and_clients_psi():
    """Labels at the server: its sigma after a round is SGD on its labels, written out; clients never move it."""
    method = FedMatch(threshold=0.3, labeled_weight=2.0)
    held = make_dataset(labels_at="server")
    shared = make_task(BARE, optimizer=SGD(RATE))
    simulation = make_simulation(method, shared, held, server_batching=Batching(4))
    recording = RecordingMethod(method)
    simulation.client_updates = recording.client_updates(shared)
    server = start_server(method, shared)
    simulation.method = recording
    (result,) = run_rounds(recording, simulation, server, range(1))
    steps = [what for what in recording.list_calls("step") if "helpers" not in what[0] and len(what[2].x)]
    sigma = server["sigma"]
    for _, _, batch in steps:
        sigma = learnable(sigma)
        logits = BARE.predict(add_halves(sigma, server["psi"]), {}, batch.x)
        sigma = descended(sigma, 2.0 * F.cross_entropy(logits, batch.y))
    assert len(steps) == round(18 / 4)
    assert max_difference(result.server["sigma"], sigma) < 1e-12
    assert max_difference(result.server["psi"], server["psi"]) > 1e-3
    upload = result.report.cost["bytes_up"]
    assert upload <= 3 * (tree.nbytes(server["psi"]) + CLASSES * 8)


def test_sigma_is_averaged_over_those_with_labels():
    """Labels at some clients: those without send back the sigma that they received, and it does not count."""
    method = FedMatch(delta_threshold=0.0)
    shared = make_task(BARE, optimizer=SGD(RATE))
    held = make_dataset(labels_at="some")
    server = start_server(method, shared)
    simulation = make_simulation(method, shared, held)
    simulation.open(0)
    upload = simulation.query("train", {**server, "stats": {}})
    has = [held.training_size(k).labeled > 0 for k in simulation.responders.tolist()]
    assert 0 < sum(has) < len(has)
    assert upload.aux["labels"].tolist() == [float(each) for each in has]
    (result,) = run_rounds(method, make_simulation(method, shared, held), server, range(1))
    for path, leaf in tree.flatten(upload.update["sigma"]).items():
        expected = torch.stack([each for each, has_value in zip(leaf, has, strict=True) if has_value]).mean(0)
        torch.testing.assert_close(tree.flatten(result.server["sigma"])[path], expected, rtol=1e-12, atol=1e-14)
        for each, has_value in zip(leaf, has, strict=True):
            assert torch.equal(each, tree.flatten(server["sigma"])[path]) == (not has_value)
    for path, leaf in tree.flatten(upload.update["psi"]).items():
        torch.testing.assert_close(tree.flatten(result.server["psi"])[path], leaf.mean(0), rtol=1e-12, atol=1e-14)


def test_helpers_come_every_interval_rounds_to_those_who_are_known():
    """With interval 2: none in rounds 0 and 2; in 1 and 3, the psi that the nearest others sent last, found afresh."""
    method = FedMatch(
        interval=2, threshold=0.3, delta_threshold=None, l1_threshold=0.0
    )  # what is sent is what was trained
    shared = make_task(BARE, optimizer=SGD(RATE))
    recording = RecordingMethod(method)
    server = start_server(method, shared)
    held = make_dataset()
    simulation = make_simulation(recording, shared, held)
    known: dict[int, tuple[Tensor, Tree]] = {}
    met: list[int] = []
    for number in range(4):
        recording.calls.clear()
        before = dict(known)
        (result,) = run_rounds(recording, simulation, server, range(number, number + 1))
        server = result.server
        for index, k in enumerate(result.report.cohort):
            broadcast = recording.list_calls("begin")[index][0]
            if number % 2 == 0:
                assert "helpers" not in broadcast
                continue
            nearest_two: list[int] = []
            if k in before:
                away = {j: float((before[j][0] - before[k][0]).norm()) for j in before if j != k}
                nearest_two = sorted(away, key=away.__getitem__)[:2]
            met.append(len(nearest_two))
            assert broadcast["there"].tolist() == [1.0] * len(nearest_two) + [0.0] * (2 - len(nearest_two))
            for position, j in enumerate(nearest_two):
                assert trees_equal(tree.index(broadcast["helpers"], position), before[j][1])
        for index, k in enumerate(result.report.cohort):
            vector = simulation.state_store.get(f"embedding-{k}")
            assert vector is not None
            known[k] = (vector["vector"], recording.list_calls("finish")[index][1]["psi"])
            theta = add_halves(recording.list_calls("finish")[index][1]["sigma"], known[k][1])
            image = draw_noise_image(held.train.images)
            text = BARE.predict(theta, {}, shared.normalize(image))[0].softmax(-1)
            torch.testing.assert_close(vector["vector"], text, rtol=1e-12, atol=1e-14)
    assert 0 in met
    assert 2 in met


def test_the_start_and_what_is_evaluated():
    """psi is 0.2 of every kernel, nothing else has one; entries of psi of at most l1_threshold do not count."""
    method = FedMatch(l1_threshold=0.3)
    shared = make_task()
    server = start_server(method, shared)
    model = start_server(FedAvg(), shared)
    assert set(tree.flatten(server["psi"])) == {
        name for name in tree.flatten(model["params"]) if name.endswith("conv/weight") or name == "head/weight"
    }
    assert trees_equal(server["sigma"], model["params"])
    assert max_difference(server["psi"], tree.map(lambda leaf: 0.2 * leaf, kernels(model["params"]))) == 0
    parts = {"sigma": make_linear_params(1, 2), "psi": make_linear_params(0.3, -0.31), "stats": {}}
    assert method.solution(shared, parts)["params"]["head"]["weight"].flatten().tolist() == [1.0, 1.69]
