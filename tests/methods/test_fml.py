"""FML: a step by hand, autograd on the formulas, and the two supervised runs that remain without distillation."""

from dataclasses import dataclass, replace
from math import log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from method_helpers import (
    TWO_WEIGHT_NETWORK,
    assert_params_match,
    autograd_step,
    copy_requiring_grad,
    forward_groups,
    make_batches,
    make_client_data,
    make_pixel_images,
    make_two_weight_model,
    simulate_rounds,
    update_running_stats,
)
from recording_methods import RecordingMethod
from torch import Tensor
from torch.distributions import Categorical
from torch_models import TorchSmall, load_weights

from halfmoon.api.types import Batch, Task
from halfmoon.core import rng, tree
from halfmoon.core.optim import SGD
from halfmoon.engine.driver import create_first_memory
from halfmoon.federation.contract.small_federation import (
    CLASSES,
    SIZES,
    make_dataset,
    make_simulation,
    make_task,
    max_difference,
    run_rounds,
    start_server,
    trees_equal,
)
from halfmoon.methods.fedavg import FedAvg
from halfmoon.methods.fml import FML
from halfmoon.models import SmallCNN


def test_one_step_by_hand():
    """Two weights, SGD with rate 1, a = b = 1/2, unlabeled weight 1/2: the meme (0, 0) and the private (ln 3, 0).

    One labeled image, pixel 1 of class 0, and one unlabeled one, pixel 2. The private model says (3/4, 1/4) and
    (9/10, 1/10), the meme (1/2, 1/2) of both. Derivatives in the first weight; the second's are their negatives.
    Meme: 1/2 (1/2 - 1) + 1/2 (1/2 - 3/4) + 1/2 (1/2 - 9/10) 2 = -0.25 - 0.125 - 0.4 = -0.775.
    Private: 1/2 (3/4 - 1) + 1/2 (3/4 - 1/2) + 1/2 (9/10 - 1/2) 2 = -0.125 + 0.125 + 0.4 = 0.4.
    """
    client_update = FML().client_updates(make_task(TWO_WEIGHT_NETWORK, optimizer=SGD(1.0)))["train"]
    carry = client_update.begin(make_two_weight_model(0, 0), make_two_weight_model(log(3), 0), make_client_data())
    batch = Batch(
        make_pixel_images(1), torch.tensor([0]), torch.tensor([0]), {"weak": make_pixel_images(2)}, torch.tensor([0])
    )
    carry, notes = client_update.step({}, carry, batch)
    upload, memory = client_update.finish({}, carry, make_client_data())
    assert upload.update["params"]["head"]["weight"].flatten().tolist() == pytest.approx([0.775, -0.775], rel=1e-12)
    assert memory["params"]["head"]["weight"].flatten().tolist() == pytest.approx([log(3) - 0.4, 0.4], rel=1e-12)
    kl = lambda p, q: p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))  # noqa: E731
    meme = (log(2) + kl(0.75, 0.5) + kl(0.9, 0.5)) / 2
    private = (-log(0.75) + kl(0.5, 0.75) + kl(0.5, 0.9)) / 2
    assert float(notes.loss) == pytest.approx(meme + private, rel=1e-12)
    (text,) = notes.pseudo
    assert (text.label.tolist(), text.weight.tolist()) == ([0], [1])
    assert text.confidence.tolist() == pytest.approx([0.9], rel=1e-12)


@dataclass(frozen=True)
class Formula:
    """L_i and L_v of Shen et al., and the same divergence on unlabeled images."""

    method: FML
    task: Task

    def loss(self, outputs: dict, own: str, other: str, share: float, y: Tensor) -> Tensor:
        """Return share * CE + (1 - share) * KL(other || own) + weight * mean of mask * KL(other || own)."""
        labels, unlabeled = outputs[own]
        trained, prediction = (each.detach().softmax(-1) for each in outputs[other])
        total = share * F.cross_entropy(labels, y)
        total = total + (1 - share) * F.kl_div(labels.log_softmax(-1), trained, reduction="batchmean")
        each = F.kl_div(unlabeled.log_softmax(-1), prediction, reduction="none").sum(-1)
        if self.method.delta is not None:
            each = each * (Categorical(probs=prediction).entropy() < self.method.delta)
        return total + self.method.unlabeled_weight * each.mean()

    def step(self, models: dict, batch: Batch) -> tuple[dict, float]:
        """Return both models after one backward pass through the sum of their losses, and that sum."""
        leaves = {name: copy_requiring_grad(one["params"]) for name, one in models.items()}
        passes = {name: forward_groups(self.task, leaves[name], batch.x, batch.u[self.method.view]) for name in models}
        text = {name: logits for name, (logits, _) in passes.items()}
        losses = {
            "meme": self.loss(text, "meme", "private", self.method.meme_share, batch.y),
            "private": self.loss(text, "private", "meme", self.method.private_share, batch.y),
        }
        moved = autograd_step(losses, leaves, self.task.optimizer.lr)
        new = {
            name: {"params": moved[name], "stats": update_running_stats(one["stats"], passes[name][1])}
            for name, one in models.items()
        }
        return new, sum(loss.item() for loss in losses.values())


@pytest.mark.parametrize("statistics", ["joint", "separate"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"private_share": 0.2, "meme_share": 0.7, "unlabeled_weight": 3.0},
        {"view": "strong"},
        {"delta": 1.1},
    ],
    ids=str,
)
def test_steps_are_autograds_on_the_formula(options: dict[str, Any], statistics):
    """Three steps of both models: parameters, running statistics and losses agree.

    The oracle adds both losses and differentiates once: a target that is not detached would show.
    """
    method = FML(**options)
    shared = make_task(optimizer=SGD(0.2), statistics=statistics)
    broadcast, memory = (
        {**one, "params": {**one["params"], "head": tree.map(lambda leaf: 3 * leaf, one["params"]["head"])}}
        for one in (start_server(method, shared), start_server(method, shared, seed=5))
    )
    client_update = method.client_updates(shared)["train"]
    oracle = Formula(method, shared)
    carry = client_update.begin(broadcast, memory, make_client_data())
    models = {"meme": broadcast, "private": memory}
    shares = []
    for batch in make_batches((method.view,)):
        carry, notes = client_update.step(broadcast, carry, batch)
        models, loss = oracle.step(models, batch)
        assert float(notes.loss) == pytest.approx(loss, rel=1e-11)
        for name, each in models.items():
            assert max_difference({"params": carry[name]["params"], "stats": carry[name]["stats"]}, each) < 1e-11
        shares.append(float(notes.pseudo[0].weight.mean()))
    assert max_difference(carry["meme"]["params"], broadcast["params"]) > 1e-2
    assert 0 < sum(shares) < 3 if method.delta is not None else sum(shares) == 3


ALONE = FML(private_share=1.0, meme_share=1.0, unlabeled_weight=0.0)


def test_without_distillation_the_meme_is_fedavgs():
    """a = b = 1 and no unlabeled loss: the very rounds of supervised FedAvg, bit by bit, at twice its passes.

    Of unequal clients with the weights of their sizes, and of equal ones with uniform weights.
    """
    shared = make_task()
    for weights, held in (("size", make_dataset()), ("uniform", make_dataset(((4, 7),) * 4))):
        method = replace(ALONE, weights=weights)
        start = start_server(method, shared)
        actual = run_rounds(method, make_simulation(method, shared, held), start, range(2))[-1]
        expected_value = run_rounds(FedAvg(), make_simulation(FedAvg(), shared, held), start, range(2))[-1]
        assert trees_equal(actual.server, expected_value.server)
        assert actual.report.pseudo is None
        assert actual.report.cost["forward"] == 2 * expected_value.report.cost["forward"]
        assert actual.report.cost["backward"] == 2 * expected_value.report.cost["backward"]
        assert actual.report.cost["bytes_up"] == expected_value.report.cost["bytes_up"]


@pytest.mark.parametrize("keep", [True, False])
def test_without_distillation_a_private_model_trains_independently(keep):
    """Over three rounds each is a module under torch.optim.SGD on its client's batches alone; the momentum lives on.

    Without `keep_optimizer` every local update has a new optimizer.
    """
    shared = make_task(optimizer=SGD(0.1, momentum=0.9))
    recording = RecordingMethod(replace(ALONE, keep_optimizer=keep))
    actual = simulate_rounds(recording, shared, rounds=3)
    seed = 3  # the scene's
    fresh = tree.to(shared.network.init(rng.generator(seed, "remember")), dtype=torch.float64)
    modules: dict[int, TorchSmall] = {}
    optimizers: dict[int, torch.optim.Optimizer] = {}
    visitors = iter([client for result in actual for client in result.report.cohort])
    client = -1
    updates = 0
    for kind, what in recording.calls:
        if kind == "begin":
            client = next(visitors)
            updates = updates + 1
            new = client not in modules
            if new:
                modules[client] = TorchSmall(1, CLASSES, shared.network.width)
                load_weights(modules[client], fresh)
            if new or not keep:
                optimizers[client] = torch.optim.SGD(modules[client].parameters(), lr=0.1, momentum=0.9)
        elif kind == "step":
            optimizers[client].zero_grad()
            F.cross_entropy(modules[client](what[2].x), what[2].y).backward()
            optimizers[client].step()
    assert updates == 9
    for client, module in modules.items():
        memory = actual[-1].state["client"][str(client)]
        assert ("optimizer" in memory) == keep
        assert_params_match(memory["params"], module, rtol=1e-10, atol=1e-12)
        for layer, stats in memory["stats"].items():
            torch.testing.assert_close(stats["mean"], module.get_buffer(f"{layer}.norm.running_mean"))


def test_optimizer_of_the_meme_is_new_in_every_local_update():
    """The private one is as it was left, the meme's is zero."""
    shared = make_task(optimizer=SGD(0.1, momentum=0.9))
    method = FML()
    client_update = method.client_updates(shared)["train"]
    broadcast = start_server(method, shared)
    memory = create_first_memory(client_update, broadcast, 0, 0)
    for batch in make_batches(("weak",), 2):
        carry = client_update.begin(broadcast, memory, make_client_data())
        assert not any(leaf.any() for leaf in tree.leaves(carry["meme"]["optimizer"]))
        carry, _ = client_update.step(broadcast, carry, batch)
        _, memory = client_update.finish(broadcast, carry, make_client_data())
        assert trees_equal(client_update.begin(broadcast, memory, make_client_data())["private"], memory)
        assert any(leaf.any() for leaf in tree.leaves(memory["optimizer"]))


def test_how_a_private_model_starts():
    """As a network of its own, in precision and place of the meme; or as its copy.

    With equal shares a copy remains the meme's twin for a whole local update, so neither teaches the other anything: their
    losses are those of labels only. A new model differs.
    """
    shared = make_task()
    broadcast = start_server(FML(), shared)
    client_update = FML().client_updates(shared)["train"]
    memory = create_first_memory(client_update, broadcast, 7, 0)
    drawn = tree.to(shared.network.init(rng.generator(7, "remember")), dtype=torch.float64)
    assert trees_equal({"params": memory["params"], "stats": memory["stats"]}, drawn)
    assert not trees_equal(memory["params"], broadcast["params"])
    for private in ("copy", "fresh"):
        method = FML(private=private)
        client_update = method.client_updates(shared)["train"]
        carry = client_update.begin(broadcast, create_first_memory(client_update, broadcast, 7, 0), make_client_data())
        for batch in make_batches(("weak",)):
            before = carry
            carry, notes = client_update.step(broadcast, carry, batch)
            losses = []
            for name in ("meme", "private"):
                (labels, _), _ = forward_groups(shared, before[name]["params"], batch.x, batch.u["weak"])
                losses.append(F.cross_entropy(labels, batch.y).item() / 2)
            assert (float(notes.loss) == pytest.approx(sum(losses), rel=1e-12)) == (private == "copy")
        assert trees_equal(carry["meme"], carry["private"]) == (private == "copy")


def test_filter_that_rejects_all_rows():
    """delta = 0: the unlabeled loss is gone, but its images share the labeled ones' statistics; apart, they do not.

    So in separate passes the parameters are those of unlabeled weight 0, where as many steps are taken.
    """
    shared = make_task(optimizer=SGD(0.1), statistics="separate")
    broadcast = start_server(FML(), shared)
    memory = start_server(FML(), shared, seed=5)
    ends = []
    for method in (FML(delta=0.0), FML(unlabeled_weight=0.0), FML()):
        client_update = method.client_updates(shared)["train"]
        carry = client_update.begin(broadcast, memory, make_client_data())
        for batch in make_batches(("weak",)):
            carry, _ = client_update.step(broadcast, carry, batch)
        ends.append({"meme": carry["meme"]["params"], "private": carry["private"]["params"]})
    assert max_difference(ends[0], ends[1]) < 1e-12
    assert max_difference(ends[2], ends[1]) > 1e-4


@pytest.mark.parametrize("labels_at", ["clients", "some"])
def test_the_weights(labels_at):
    """1 each, or the sizes; with labels only, a client without any has no weight."""
    shared = make_task()
    with_labels = [k for k in range(4) if labels_at == "clients" or k % 2 == 0]
    size = [sum(SIZES[k]) if k in with_labels else SIZES[k][1] for k in range(4)]
    for method, expected in (
        (FML(), [1] * 4),
        (FML(weights="size"), size),
        (FML(unlabeled_weight=0.0), [int(k in with_labels) for k in range(4)]),
        (FML(unlabeled_weight=0.0, weights="size"), [size[k] * (k in with_labels) for k in range(4)]),
    ):
        simulation = make_simulation(method, shared, make_dataset(labels_at=labels_at), cohort=4)
        simulation.open(0)
        assert simulation.query("train", start_server(method, shared)).weight.tolist() == expected


def test_first_memory_of_a_known_client_is_not_redrawn():
    """A round whose clients are all known draws one network, to learn that there is a memory at all."""
    drawn = []

    @dataclass(frozen=True)
    class Counted(SmallCNN):
        """Count what is drawn."""

        def init(self, generator: torch.Generator) -> tree.Tree:
            drawn.append(generator)
            return super().init(generator)

    method = FML()
    shared = make_task(Counted(1, CLASSES, 4))
    simulation = make_simulation(method, shared, cohort=4)
    counts = []
    server = start_server(method, shared)
    for number in range(3):
        drawn.clear()
        server = run_rounds(method, simulation, server, range(number, number + 1))[-1].server
        counts.append(len(drawn))
    assert counts == [5, 1, 1]
