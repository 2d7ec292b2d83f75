"""FedDure against double back-propagation, and its hand-derived cases."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from textbook_feddure import Textbook
from torch import nn
from torch_models import TorchResNet9, TorchSmall, twin

from halfmoon import catalog, tree
from halfmoon.augment import Normalize
from halfmoon.methods.feddure import FedDure
from halfmoon.models import ResNet9, SmallCNN
from halfmoon.optim import SGD, Adam
from halfmoon.types import Batch, Local, Task

NORMALIZE = Normalize((0.5,), (0.5,))


def scene(
    network, optimizer, options: FedDure, dtype, b=10, u=12, size=16, seed=0, statistics="joint", labeling="batch"
):
    """Return the work, its first carry, the down tree and three batches."""
    g = torch.Generator().manual_seed(seed)
    task = Task(network, optimizer, NORMALIZE, statistics, labeling)
    model = tree.to(network.init(g), dtype=dtype)
    # statistics that differ from those of the batches, so that using the wrong ones shows
    model["stats"] = tree.map(
        lambda leaf: leaf + 0.3 * torch.rand(leaf.shape, generator=g, dtype=dtype), model["stats"]
    )
    work = options.works(task)["train"]
    down = {**model, "gate": torch.ones(())}
    memory = work.remember(down, torch.Generator().manual_seed(7))
    draw = lambda n: torch.randn(n, network.channels, size, size, generator=g, dtype=dtype)  # noqa: E731
    batches = [
        Batch(
            draw(b),
            torch.randint(0, network.classes, (b,), generator=g),
            torch.arange(b),
            {"weak": draw(u), "strong": draw(u)},
            torch.arange(u),
        )
        for _ in range(3)
    ]
    nothing = torch.zeros(0, 1, 1, 1, dtype=torch.uint8)
    local = Local(nothing, torch.zeros(0), nothing, torch.tensor(b), torch.tensor(u))
    return work, work.begin(down, memory, local), down, batches, model


def textbook(network, model, carry, options: FedDure, optimizer, lr, statistics="joint", labeling="batch") -> Textbook:
    """Return the oracle in the same state."""
    module = TorchResNet9 if isinstance(network, ResNet9) else TorchSmall
    regulator = None
    if options.fine:
        p = carry["regulator"]["params"]
        regulator = nn.Sequential(
            nn.Linear(network.classes, options.hidden), nn.ReLU(), nn.Linear(options.hidden, 1), nn.Sigmoid()
        ).to(p["out"]["weight"].dtype)
        regulator.load_state_dict(
            {
                "0.weight": p["hidden"]["weight"],
                "0.bias": p["hidden"]["bias"],
                "2.weight": p["out"]["weight"],
                "2.bias": p["out"]["bias"],
            }
        )
    return Textbook(
        twin(module(network.channels, network.classes, network.width), model),
        regulator,
        optimizer,
        lr,
        joint=statistics == "joint",
        product=options.through_weights == "product",
        softmax=options.regulator_input == "softmax",
        coarse=options.coarse,
        threshold=options.threshold,
        running_labels=labeling == "running",
        running_judge=options.judging == "running",
    )


def distance(ours, theirs) -> float:
    """Return ||ours - theirs|| / ||theirs|| over all tensors."""
    a = torch.cat([leaf.detach().flatten() for leaf in ours])
    b = torch.cat([leaf.detach().flatten() for leaf in theirs])
    return float((a - b).norm() / b.norm())


def parameters(params) -> list[torch.Tensor]:
    """Return the leaves in the order of a module's `named_parameters`."""
    return list(tree.leaves(params))


def compare(network, options, dtype, optimizer, torch_optimizer, lr, bound, steps=3, **rules) -> None:
    """Assert that `steps` iterations agree with the oracle in everything that is trained or reported."""
    options = replace(options, regulator_lr=None)  # the textbook has one rate for all
    work, carry, down, batches, model = scene(network, optimizer, options, dtype, **rules)
    oracle = textbook(network, model, carry, options, torch_optimizer, lr, **rules)
    for batch in batches[:steps]:
        carry, notes = work.step(down, carry, batch)
        said = oracle.step(batch.x, batch.y, batch.u["weak"], batch.u["strong"])
        # d is a difference of two losses: rounding is relative to them
        assert abs(float(notes.samples["d"].total - said["d"])) < bound * float(said["loss"])
        assert distance([notes.samples["m"].total / len(batch.u_rows)], [said["m"]]) < bound
        assert distance([notes.loss], [said["loss"]]) < bound
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


@pytest.mark.parametrize("through", ["product", "detached"])
def test_iteration_equals_the_textbook_in_float32(through):
    """1e-4 relative; with SGD, because Adam turns the rounding of gradients that are exactly zero into whole steps."""
    options = FedDure(through_weights=through)
    compare(ResNet9(3, 10, 8), options, torch.float32, SGD(0.05), torch.optim.SGD, 0.05, 1e-4, steps=1)


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        (FedDure(coarse=False), {}),
        (FedDure(coarse=False, through_weights="detached"), {"statistics": "separate"}),
        (FedDure(fine=False, threshold=0.3), {}),
        (FedDure(regulator_input="softmax"), {}),
        (FedDure(judging="running"), {"labeling": "running"}),
        (FedDure(), {"labeling": "running", "statistics": "separate"}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_ablations_and_switches_equal_the_textbook(options, rules):
    """Table 2's ablations and the switches, float64, 1e-9."""
    compare(SmallCNN(1, 5, 4), options, torch.float64, Adam(1e-2), torch.optim.Adam, 1e-2, 1e-9, **rules)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("through", ["product", "detached"])
def test_hypergradient_equals_double_backpropagation(dtype, bound, through):
    """Eq. 5's gradient itself: with plain SGD, F-reg moves by minus the gradient times its rate.

    The rate of 1e6 keeps the digits of a small gradient when it is taken from weights near 0.1; the step taken with the
    changed weights afterwards does not matter here.
    """
    options = FedDure(through_weights=through, regulator_lr=1e6, virtual_lr=0.05)
    network = ResNet9(3, 10, 8)
    work, carry, down, batches, model = scene(network, SGD(0.05), options, dtype)
    oracle = textbook(network, model, carry, options, torch.optim.SGD, 0.05)
    new, _ = work.step(down, carry, batches[0])
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
    network = SmallCNN(1, 5, 4)
    _, carry, _, batches, model = scene(network, Adam(1e-2), options, torch.float64, **rules)
    one, other = (textbook(network, model, carry, options, torch.optim.Adam, 1e-2, **rules) for _ in range(2))
    other.literal = True
    for batch in batches:
        for a, b in zip(*(each.step(batch.x, batch.y, **batch.u).values() for each in (one, other)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(nets(one), nets(other), strict=True):
        assert distance(a.state_dict().values(), b.state_dict().values()) < 1e-10


def nets(book: Textbook) -> list[nn.Module]:
    """Return the modules that a step trains."""
    return [book.local, *([book.student] if book.coarse else []), *([book.regulator] if book.regulator else [])]


def test_no_second_order_graph_is_built():
    """The step runs without autograd's help from outside: nothing it returns carries a graph."""
    work, carry, down, batches, _ = scene(SmallCNN(1, 5, 4), Adam(1e-2), FedDure(), torch.float32)
    new, notes = work.step(down, carry, batches[0])
    assert not any(leaf.requires_grad for leaf in tree.leaves(new))
    assert not notes.loss.requires_grad


def test_d_is_the_fall_of_the_labeled_loss():
    """Eq. 3 with its sign: old minus new loss of C-reg on the labeled minibatch; the code's sign is the opposite."""
    for sign, factor in (("old-new", 1), ("new-old", -1)):
        work, carry, down, batches, _ = scene(SmallCNN(1, 5, 4), Adam(1e-2), FedDure(sign=sign), torch.float64)
        new, notes = work.step(down, carry, batches[0])
        loss = [
            F.cross_entropy(work.task.network.train(c["coarse"]["params"], batches[0].x)[0], batches[0].y)
            for c in (carry, new)
        ]
        assert float(notes.samples["d"].total) == pytest.approx(factor * float(loss[0] - loss[1]), rel=1e-12)


def test_warmup_trains_on_labels_alone():
    """With the gate shut, the local model's step is that of the labeled loss (the joint pass still sees all images)."""
    work, carry, down, batches, _ = scene(SmallCNN(1, 5, 4), SGD(0.1), FedDure(), torch.float64, statistics="separate")
    new, _ = work.step({**down, "gate": torch.zeros(())}, carry, batches[0])
    labels = catalog.make("fedavg").works(work.task)["train"]
    alone, _ = labels.step(
        down, {**{k: carry[k] for k in ("params", "stats")}, "optimizer": {}, "ready": {}}, batches[0]
    )
    assert distance(list(tree.leaves(new["params"])), list(tree.leaves(alone["params"]))) < 1e-12


def test_server_opens_the_gate_after_the_warmup():
    """Rounds 1 and 2 of warmup=2 are shut, round 3 is open."""
    gates = []

    class Port:
        cohort = torch.arange(1)

        def ask(self, work, down, each=None):
            gates.append(float(down["gate"]))
            return tree.stack([{"params": down["params"], "stats": down["stats"], "weight": torch.ones(())}])

    method, task = FedDure(warmup=2), Task(SmallCNN(1, 5, 4), SGD(0.1), NORMALIZE)
    server = method.start(task, task.network.init(torch.Generator()))
    for _ in range(4):
        server = method.round(task, server, Port())
    assert gates == [0.0, 0.0, 1.0, 1.0]


def test_regulator_persists_and_is_the_same_at_first_for_all():
    """F-reg and its optimizer stay at the client; with keep_regulator off nothing stays."""
    work, carry, down, batches, _ = scene(SmallCNN(1, 5, 4), Adam(1e-2), FedDure(), torch.float32)
    nothing = torch.zeros(0, 1, 1, 1, dtype=torch.uint8)
    local = Local(nothing, torch.zeros(0), nothing, torch.tensor(3), torch.tensor(4))
    carry, _ = work.step(down, carry, batches[0])
    up, memory = work.finish(down, carry, local)
    assert float(up["weight"]) == 7
    again = work.begin(down, memory, local)
    assert distance(list(tree.leaves(again["regulator"])), list(tree.leaves(carry["regulator"]))) == 0
    assert float(again["regulator"]["optimizer"]["steps"]) == 1
    one = work.remember(down, torch.Generator().manual_seed(1))
    two = work.remember(down, torch.Generator().manual_seed(1))
    assert distance(list(tree.leaves(one["regulator"]["params"])), list(tree.leaves(two["regulator"]["params"]))) == 0
    assert tree.size(one["regulator"]["params"]) == 5 * 128 + 128 + 128 + 1
    free = FedDure(keep_regulator=False).works(work.task)["train"]
    assert free.finish(down, carry, local)[1] == {}
    fresh = FedDure(keep_regulator_optimizer=False).works(work.task)["train"]
    assert float(fresh.begin(down, memory, local)["regulator"]["optimizer"]["steps"]) == 0


def test_f_reg_has_1537_parameters_at_ten_classes():
    """10 * 128 + 128 + 128 + 1 (methods 3)."""
    _, carry, _, _, _ = scene(SmallCNN(1, 10, 4), Adam(1e-2), FedDure(), torch.float32)
    assert tree.size(carry["regulator"]["params"]) == 1537
