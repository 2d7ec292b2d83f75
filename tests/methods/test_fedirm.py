"""FedIRM: a client update compared with a torch module with its teacher, and relations on the server."""

import pytest
import torch
import torch.nn.functional as F
from method_helpers import (
    assert_params_match,
    begin_update,
    make_client_data,
    make_random_images,
    make_torch_module,
    simulate_rounds,
)
from torch import Tensor

from halfmoon.api.types import Batch
from halfmoon.core.optim import SGD
from halfmoon.federation.contract.small_federation import CLASSES, make_dataset, make_task, start_server
from halfmoon.methods.fedirm import FedIRM


def matrix(z: Tensor, y: Tensor) -> Tensor:
    """Return the relations class by class, in a loop: a class that nobody is of has logits 0."""
    rows = [z[y == c].mean(0) if bool((y == c).any()) else torch.zeros(CLASSES).double() for c in range(CLASSES)]
    return torch.stack([F.softmax(row / 2, 0) for row in rows])


def test_a_client_update_with_its_teacher_and_relations():
    """Two steps, both on batch statistics; images that are not confident have no part in the relations."""
    options = FedIRM(unlabeled_weight=3.0, confidence=0.31, entropy=1.35, decay=0.6, ramp=0.0, warmup=0.0)
    shared = make_task(optimizer=SGD(0.3))
    client_update = options.client_updates(shared)["train"]
    broadcast = start_server(options, shared)
    wanted = matrix(
        3 * torch.randn(9, CLASSES, generator=torch.Generator().manual_seed(5)).double(), torch.arange(9) % 3
    )
    broadcast |= {"relation": wanted, "related": torch.ones(()).double()}
    carry = begin_update(client_update, broadcast, make_client_data(2, 12))
    model = make_torch_module(broadcast)
    teacher = make_torch_module(broadcast)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    seen = []
    stored = []
    for number in range(2):
        u = {"weak": make_random_images(12, number), "weak2": 4 * make_random_images(12, number + 10)}
        batch = Batch(
            make_random_images(2, number + 20), torch.tensor([0, number]), torch.arange(2), u, torch.arange(12)
        )
        carry, notes = client_update.step(broadcast, carry, batch)
        optimizer.zero_grad()
        z = model(torch.cat([batch.x, u["weak2"]]))
        x = z[:2]
        z = z[2:]
        with torch.no_grad():
            q = teacher(u["weak"]).softmax(-1)
        p = z.softmax(-1)
        confident = [
            i for i in range(12) if p[i].max() >= 0.31 and torch.distributions.Categorical(p[i]).entropy() < 1.35
        ]
        local_matrix = matrix(z[confident], z[confident].argmax(-1))
        both = F.kl_div(local_matrix.log(), wanted, reduction="batchmean") + F.kl_div(
            wanted.log(), local_matrix, reduction="batchmean"
        )
        loss = F.cross_entropy(x, batch.y) + 3 * (F.mse_loss(p, q, reduction="sum") / 12 + both / 2)
        assert float(notes.loss) == pytest.approx(loss.item(), rel=1e-12)
        loss.backward()
        optimizer.step()
        seen.append(matrix(x.detach(), batch.y))
        stored.append(len(confident))
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
                keep = (0.0, 0.5)[number]
                old.mul_(keep).add_((1 - keep) * new)
    assert min(stored) > 0
    assert max(stored) < 12
    assert_params_match(carry["params"], model)
    assert_params_match(carry["teacher"], teacher)
    upload, _ = client_update.finish(broadcast, carry, make_client_data(2, 12))
    torch.testing.assert_close(upload.update["relation"], (seen[0] + seen[1]) / 2)
    assert (float(upload.weight), float(upload.update["related"])) == (14, 1)


def test_relations_are_those_of_clients_with_labels():
    """During the warm-up clients without labels weigh nothing; relations are rows of probabilities, and stay."""
    shared = make_task(rounds=4)
    servers = [
        each.server for each in simulate_rounds(FedIRM(warmup=0.5), shared, make_dataset(labels_at="some"), rounds=4)
    ]
    for server in servers:
        assert float(server["related"]) == 1
        torch.testing.assert_close(server["relation"].sum(-1), torch.ones(CLASSES).double())
    floor = [
        each.server for each in simulate_rounds(FedIRM(warmup=1.0), shared, make_dataset(labels_at="some"), rounds=4)
    ]
    assert torch.equal(servers[1]["relation"], floor[1]["relation"])
    assert not torch.equal(servers[3]["relation"], floor[3]["relation"])
