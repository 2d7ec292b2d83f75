"""RSCFed: weights by hand, a local update compared with a torch module with its teacher, groups on the server."""

from math import exp

import pytest
import torch
import torch.nn.functional as F
from method_helpers import assert_params_match, make_client_data, make_random_images, make_torch_module, simulate_rounds

from halfmoon.api.types import Batch
from halfmoon.api.uploads import Upload
from halfmoon.core import tree
from halfmoon.core.errors import UserError
from halfmoon.core.optim import SGD
from halfmoon.federation.contract.small_federation import (
    make_dataset,
    make_task,
    max_difference,
    start_server,
    trees_equal,
)
from halfmoon.methods.rscfed import RSCFed


def test_weights_by_hand():
    """Two clients of 1 and 3 rows, tensors (0) and (4): their mean is 3, away by 3 and 1; a second tensor adds 0.75 and
    0.25. With beta 2: 1/4 exp(-2 3.75 / 1) and 3/4 exp(-2 1.25 / 3). With labels at the first: beta 1, and it
    counts six times: the means are 12/9 and 3/9, away by 4/3 + 1/3 and 8/3 + 2/3. Statistics are tensors like others.
    """
    second = torch.tensor([[0.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    params = {"params": {"a": torch.tensor([[0.0], [4.0]]).double()}, "stats": {"b": second}}
    rows = torch.tensor([1.0, 3.0]).double()
    method = RSCFed(beta=2.0, beta_labeled=1.0)
    found = method.compute_group_weights(params, rows, torch.zeros(2).double())
    wanted = [0.25 * exp(-2 * 3.75), 0.75 * exp(-2 * 1.25 / 3)]
    assert float(found[0] / found[1]) == pytest.approx(wanted[0] / wanted[1], rel=1e-12)
    found = method.compute_group_weights(params, rows, torch.tensor([1.0, 0.0]).double())
    wanted = [6 / 9 * exp(-5 / 3), 3 / 9 * exp(-10 / 9)]
    assert float(found[0] / found[1]) == pytest.approx(wanted[0] / wanted[1], rel=1e-12)
    assert RSCFed(beta=1e9).compute_group_weights(params, rows, torch.zeros(2).double()).tolist() == [0.0, 1.0]
    assert (
        float(method.compute_group_weights(params, torch.tensor([0.0, 3.0]).double(), torch.zeros(2).double())[0]) == 0
    )


def test_local_update_with_its_teacher():
    """Three steps on a module and a copy that follows it, both on batch statistics; the teacher returns.

    After t steps it keeps min(0.6, 1 - 1 / t) of itself, as in the authors' `update_ema_variables`: 0, 1/2, 0.6.
    """
    options = RSCFed(unlabeled_weight=2.0, decay=0.6)
    shared = make_task(optimizer=SGD(0.3))
    client_update = options.client_updates(shared)["train"]
    broadcast = start_server(options, shared)
    memory = client_update.initial_memory(broadcast, torch.Generator())
    memory["teacher"] = tree.map(lambda leaf: leaf * 1.1 + 0.01, memory["teacher"])
    carry = client_update.begin(broadcast, memory, make_client_data(2, 3))
    model = make_torch_module(broadcast)
    teacher = make_torch_module({**broadcast, "params": memory["teacher"]})
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for number in range(3):
        u = {"weak": make_random_images(3, number), "weak2": make_random_images(3, number + 10)}
        batch = Batch(
            make_random_images(2, number + 20), torch.tensor([0, number]), torch.arange(2), u, torch.arange(3)
        )
        carry, _ = client_update.step(broadcast, carry, batch)
        optimizer.zero_grad()
        z = model(torch.cat([batch.x, u["weak2"]]))
        with torch.no_grad():
            q = teacher(u["weak"]).softmax(-1).square()
        loss = (
            F.cross_entropy(z[:2], batch.y) + 2 * (z[2:].softmax(-1) - q / q.sum(-1, keepdim=True)).square().sum() / 3
        )
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                keep = (0.0, 0.5, 0.6)[number]
                old.mul_(keep).add_((1 - keep) * new)
    assert_params_match(carry["params"], model)
    assert_params_match(carry["teacher"], teacher)
    upload, stored = client_update.finish(broadcast, carry, make_client_data(2, 3))
    assert trees_equal(stored["teacher"], carry["teacher"])
    assert stored["teacher_steps"] == 2
    assert (float(upload.weight), float(upload.aux["labels"])) == (5, 1)


def test_one_group_of_all_without_distance_is_fedavg():
    """beta 0 and factor 1: rows weigh; groups of one are a plain mean of the drawn; a run moves the model."""
    shared = make_task(rounds=1)
    servers = {}
    for name, options in {
        "all": {"groups": 1, "size": 9}, "twice": {"groups": 2, "size": 3}, "single": {"groups": 1, "size": 1},
    }.items():  # fmt: skip
        method = RSCFed(beta=0.0, beta_labeled=0.0, labeled_factor=1.0, **options)
        servers[name] = simulate_rounds(method, shared, make_dataset(labels_at="some"))[-1].server
    assert max_difference(servers["all"], servers["twice"]) < 1e-12
    assert max_difference(servers["all"], servers["single"]) > 1e-3


def test_a_group_of_clients_without_rows_is_left_out():
    """Groups of one of two clients, of which the first has no rows: the new model is the second one's."""
    update = {"params": {"a": torch.tensor([[1.0], [4.0]])}, "stats": {}}
    upload = Upload(update, torch.tensor([0.0, 3.0]), {"labels": torch.zeros(2)})

    class OneUpload:
        def query(self, client_update, broadcast):
            return upload

    server = {"params": {"a": torch.tensor([0.0])}, "stats": {}}
    new = RSCFed(groups=8, size=1).round(make_task(), server, OneUpload())  # pyright: ignore[reportArgumentType]
    assert new["params"]["a"].tolist() == [4.0]


def test_the_warm_up_averages_models_of_clients_with_labels():
    """In its rounds the server averages clients with labels by their rows, for any groups; teachers stay.

    After it RSCFed's own average follows. Without unlabeled loss a round equals that of groups of all, labels only.
    """
    shared = make_task(rounds=2)
    dataset = make_dataset(labels_at="some")
    warm = RSCFed(groups=1, size=1, warmup=0.5, unlabeled_weight=5.0)
    first, second = simulate_rounds(warm, shared, dataset, rounds=2)
    other = simulate_rounds(RSCFed(groups=3, size=2, warmup=0.5, unlabeled_weight=0.0), shared, dataset)[0]
    assert trees_equal(first.server, other.server)
    plain = simulate_rounds(RSCFed(groups=1, size=1, unlabeled_weight=5.0), shared, dataset)[0]
    assert max_difference(first.server, plain.server) > 1e-3
    assert max_difference(first.server, second.server) > 1e-3

    update = {"params": {"a": torch.tensor([[1.0], [4.0], [7.0]])}, "stats": {}}
    upload = Upload(update, torch.tensor([1.0, 3.0, 3.0]), {"labels": torch.tensor([1.0, 0.0, 1.0])})

    class OneUpload:
        def query(self, client_update, broadcast):
            return upload

    server = {"params": {"a": torch.tensor([0.0])}, "stats": {}}
    new = warm.round(make_task(rounds=2), server, OneUpload())  # pyright: ignore[reportArgumentType]
    assert new["params"]["a"].tolist() == [(1 + 3 * 7) / 4]
    no_labels = upload._replace(aux={"labels": torch.zeros(3)})
    upload = no_labels
    assert warm.round(make_task(rounds=2), server, OneUpload()) == server  # pyright: ignore[reportArgumentType]


def test_the_teacher_rests_in_the_warm_up():
    shared = make_task(rounds=2)
    client_update = RSCFed(warmup=0.5).client_updates(shared)["train"]
    broadcast = start_server(RSCFed(), shared)
    carry = client_update.begin(
        broadcast, client_update.initial_memory(broadcast, torch.Generator()), make_client_data(2, 3)
    )
    u = {"weak": make_random_images(3, 0), "weak2": make_random_images(3, 1)}
    batch = Batch(make_random_images(2, 2), torch.tensor([0, 1]), torch.arange(2), u, torch.arange(3))
    after, metrics = client_update.step(broadcast, carry, batch)
    assert trees_equal(after["teacher"], carry["teacher"])
    assert float(after["teacher_steps"]) == -1
    assert not metrics.pseudo[0].weight.any()
    assert not trees_equal(after["params"], carry["params"])
    _, stored = client_update.finish(broadcast, after, make_client_data(2, 3))
    received = tree.map(lambda leaf: leaf + 1, broadcast)
    later = client_update.begin(received, stored, make_client_data(2, 3))
    assert trees_equal(later["teacher"], received["params"])


def test_a_warm_up_beyond_the_rounds_is_refused():
    with pytest.raises(UserError, match=r"warmup is 3: it is a share of the rounds, from 0 to 1"):
        RSCFed(warmup=3.0)
