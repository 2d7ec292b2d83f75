"""Twin-sight: its two terms by hand and by loops, the whole step against two torch modules."""

from math import exp, log

import pytest
import torch
import torch.nn.functional as F
from method_helpers import make_random_images, make_torch_module
from torch import Tensor
from torch_models import TorchSmall, load_weights

from halfmoon.api.types import Batch
from halfmoon.core import tree
from halfmoon.core.optim import SGD
from halfmoon.engine.sampling import Batching
from halfmoon.federation.contract.small_federation import (
    NETWORK,
    make_dataset,
    make_simulation,
    make_task,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.twinsight import TwinSight, compute_gram_distance, compute_info_nce


def test_info_nce_by_hand():
    """Two images whose views agree and are orthogonal, t = 1/2: each row has its partner at e^2 and two others at 1."""
    z = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 5.0]]).double()
    assert float(compute_info_nce(z, 0.5)) == pytest.approx(log((exp(2) + 2) / exp(2)), rel=1e-12)


def test_the_gram_term_by_hand():
    """Cosines 1 on the diagonal in both; 0 next to it in one and 0.6 in the other: the mean of (0, 0.36, 0.36, 0)."""
    one = torch.tensor([[3.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    other = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
    assert float(compute_gram_distance(one, other)) == pytest.approx(0.18, rel=1e-12)
    assert float(compute_gram_distance(one, one * 7)) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("statistics", ["joint", "separate"])
def test_a_step_on_two_modules(statistics):
    """Both networks after a step of SGD, their running statistics, and the loss, summed pair by pair."""
    options = TwinSight(hidden=6, projected=5)
    shared = make_task(optimizer=SGD(0.2), statistics=statistics)
    broadcast = start_server(options, shared)
    classifier = make_torch_module(options.solution(shared, broadcast))
    second = {"params": dict(broadcast["params"]["twin"]), "stats": broadcast["stats"]["twin"]}
    projector = second["params"].pop("projector")
    head = second["params"]["head"]
    other = TorchSmall(1, 6, NETWORK.width)
    other = load_weights(other, {"params": {**second["params"], "head": head}, "stats": second["stats"]}).train()
    weight, bias = (leaf.clone().requires_grad_() for leaf in (projector["weight"], projector["bias"]))
    seen: dict[str, Tensor] = {}
    for name, module in (("v", classifier), ("u", other)):
        last = [m for m in module.modules() if isinstance(m, torch.nn.Linear)][-1]
        last.register_forward_hook(lambda m, inputs, out, n=name: seen.update({n: seen.get(n, inputs[0])}))
    x = {"weak": make_random_images(3, 1), "weak2": make_random_images(3, 2)}
    u = {"weak": make_random_images(4, 3), "weak2": make_random_images(4, 4)}
    y = torch.tensor([0, 1, 3])
    batch = Batch(make_random_images(3, 9), y, torch.arange(3), u, torch.arange(4), x_views=x)
    client_update = options.client_updates(shared)["train"]
    carry, notes = client_update.step(broadcast, client_update.begin(broadcast, {}, None), batch)

    a, b = (torch.cat([x[view], u[view]]) for view in ("weak", "weak2"))
    loss = F.cross_entropy(classifier(a)[:3], y)
    hidden = other(torch.cat([a, b])) if statistics == "joint" else torch.cat([other(a), other(b)])
    z = [row / row.norm() for row in F.linear(hidden.relu(), weight, bias)]
    for i in range(14):
        pairs = [(z[i] @ z[j] / 0.07).exp() for j in range(14) if j != i]
        loss = loss + 0.5 * (sum(pairs).log() - z[i] @ z[(i + 7) % 14] / 0.07) / 14
    rows = {name: [f / f.norm() for f in seen[name][:7]] for name in "uv"}
    for i in range(7):
        for j in range(7):
            loss = loss + (rows["u"][i] @ rows["u"][j] - rows["v"][i] @ rows["v"][j]) ** 2 / 49
    assert float(notes.loss) == pytest.approx(float(loss.detach()), rel=1e-9)
    loss.backward()
    for module, part in ((classifier, options.solution(shared, carry)["params"]), (other, carry["params"]["twin"])):
        leaves = tree.flatten({name: leaf for name, leaf in part.items() if name != "projector"})
        for (name, p), leaf in zip(module.named_parameters(), leaves.values(), strict=True):
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            torch.testing.assert_close(leaf, (p - 0.2 * grad).detach(), rtol=1e-7, atol=1e-9, msg=name)
    new = carry["params"]["twin"]["projector"]["weight"]
    torch.testing.assert_close(new, (weight - 0.2 * weight.grad).detach(), rtol=1e-7, atol=1e-9)
    for module, stats in ((classifier, carry["stats"]), (other, carry["stats"]["twin"])):
        for layer in ("conv1", "conv3"):
            mean = module.get_buffer(f"{layer}.norm.running_mean")
            torch.testing.assert_close(stats[layer]["mean"], mean, rtol=1e-8, atol=1e-10)


def test_without_its_terms_the_classifier_learns_from_labels():
    """Weights 0: the classifier trains only on labels, in the weak view; the twin stands still; the solution is one."""
    method = TwinSight(contrast_weight=0.0, gram_weight=0.0)
    shared = make_task(rounds=1)
    server = start_server(method, shared)
    simulation = make_simulation(method, shared, make_dataset(labels_at="some"), batching=Batching(4, 4), cohort=4)
    new = run_rounds(method, simulation, server, range(1))[-1].server
    gap = [float((one - other).abs().max()) for one, other in zip(
        tree.leaves(new["params"]["twin"]), tree.leaves(server["params"]["twin"]), strict=True)]  # fmt: skip
    assert max(gap) < 1e-12
    assert set(method.solution(shared, new)["params"]) == set(start_server(FedAvg(), shared)["params"])
    assert not trees_equal(method.solution(shared, new)["params"], method.solution(shared, server)["params"])
