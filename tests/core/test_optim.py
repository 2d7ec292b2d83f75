"""The pure optimizers against `torch.optim`, alone and lifted by vmap."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from halfmoon.api.types import Task
from halfmoon.core import tree
from halfmoon.core.autodiff import vmap_clients
from halfmoon.core.optim import (
    SGD,
    SMALL_MODEL_BYTES,
    Adam,
    ConstantSchedule,
    CosineSchedule,
    GradientClipping,
    LayerwiseLearningRate,
    StepSchedule,
    gradient_step,
)
from halfmoon.federation.contract.small_federation import NETWORK

RULES = [
    (SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
    (SGD(0.05, momentum=0.9), torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    (SGD(0.05, weight_decay=0.3), torch.optim.SGD, {"lr": 0.05, "weight_decay": 0.3}),
    (
        SGD(0.05, momentum=0.8, weight_decay=0.01, nesterov=True),
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.01, "nesterov": True},
    ),
    (Adam(1e-2), torch.optim.Adam, {"lr": 1e-2}),
    (
        Adam(3e-3, beta1=0.7, beta2=0.95, eps=1e-4, weight_decay=0.1),
        torch.optim.Adam,
        {"lr": 3e-3, "betas": (0.7, 0.95), "eps": 1e-4, "weight_decay": 0.1},
    ),
]
EVERY = pytest.mark.parametrize(("tested", "theirs", "options"), RULES, ids=lambda value: str(value)[:40])
STEPS = 6


def make_inputs(seed: int = 0):
    """Return parameters and a gradient for every step; one parameter's gradient is zero throughout."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)  # noqa: E731
    params = {"a": draw(3, 2), "b": {"c": draw(4), "still": draw(2)}}
    gradients = [
        {"a": draw(3, 2) * 10.0**-step, "b": {"c": draw(4), "still": torch.zeros(2, dtype=torch.float64)}}
        for step in range(STEPS)
    ]
    return params, gradients


def follow(tested, expected, options, close: float, clip=lambda references: None) -> None:
    """Take steps with an optimizer and with torch's, which are to be equal; torch clips its gradients by `clip`."""
    params, gradients = make_inputs()
    references = [leaf.clone() for leaf in tree.leaves(params)]
    oracle = expected(references, **options)
    state = tested.init(params)
    for gradient in gradients:
        params, state = tested.step(params, gradient, state)
        for reference, g in zip(references, tree.leaves(gradient), strict=True):
            reference.grad = g.clone()
        clip(references)
        oracle.step()
        for leaf, reference in zip(tree.leaves(params), references, strict=True):
            torch.testing.assert_close(leaf, reference, rtol=close, atol=1e-12)


@EVERY
def test_steps_equal_torch_optim(tested, theirs, options):
    """Six steps with gradients of falling size, float64, 1e-12."""
    follow(tested, theirs, options, 1e-12)


@EVERY
def test_lifted_steps_equal_single_ones(tested, theirs, options):
    single = []
    for seed in range(3):
        params, gradients = make_inputs(seed)
        state = tested.init(params)
        for gradient in gradients[:3]:
            params, state = tested.step(params, gradient, state)
        single.append((params, state))
    scenes = [make_inputs(seed) for seed in range(3)]
    params = tree.stack([params for params, _ in scenes])
    state = vmap(tested.init)(params)
    for step in range(3):
        params, state = vmap(tested.step)(params, tree.stack([g[step] for _, g in scenes]), state)
    for k, (one, memory) in enumerate(single):
        for a, b in zip(tree.leaves(tree.index(params, k)), tree.leaves(one), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for a, b in zip(tree.leaves(tree.index(state, k)), tree.leaves(memory), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@EVERY
@pytest.mark.parametrize("lift", [lambda function: function, vmap], ids=["alone", "lifted"])
def test_a_rate_that_is_a_tensor_is_the_same_rate(tested, theirs, options, lift):
    """Three steps, 1e-12."""
    other = tested.with_lr(torch.tensor(tested.lr, dtype=torch.float64))
    (params, gradients), found = make_inputs(), []
    if lift is vmap:
        params = tree.stack([params])
        gradients = [tree.stack([each]) for each in gradients]
    for rule in (tested, other):
        new = params
        state = lift(rule.init)(params)
        for gradient in gradients[:3]:
            new, state = lift(rule.step)(new, gradient, state)
        found.append(new)
    for a, b in zip(*(tree.leaves(each) for each in found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@EVERY
def test_step_does_not_modify_its_inputs(tested, theirs, options):
    params, (gradient, *_) = make_inputs()
    params, state = tested.step(params, gradient, tested.init(params))
    trees = (params, gradient, state)
    copies = [tree.map(torch.clone, each) for each in trees]
    tested.step(params, gradient, state)
    for each, copy in zip(trees, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(each), tree.leaves(copy), strict=True))


def test_float32_is_preserved():
    """Adam counts its steps in double precision, but what it moves retains its type."""
    for optimizer in (Adam(), SGD(momentum=0.9)):
        params = {"a": torch.ones(2)}
        params, state = optimizer.step(params, {"a": torch.ones(2)}, optimizer.init(params))
        assert params["a"].dtype == torch.float32
        assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(state) if leaf.dim())


def test_adams_first_step_is_the_learning_rate():
    """m / (1 - beta1) = g and sqrt(v / (1 - beta2)) = |g|: the first step is lr * g / (|g| + eps) = 0.01 here."""
    params = {"a": torch.tensor([1.0, 1.0], dtype=torch.float64)}
    moved, _ = Adam(1e-2).step(params, {"a": torch.tensor([5.0, -0.003], dtype=torch.float64)}, Adam().init(params))
    assert moved["a"].tolist() == pytest.approx([0.99, 1.01], rel=1e-6)


def test_descend_is_differentiable():
    """d/dp of (p - 0.1 g)^2 at p = 2, g = 10 is 2 * (2 - 1) = 2, in g it is -0.1 * 2."""
    p = torch.tensor(2.0, requires_grad=True)
    g = torch.tensor(10.0, requires_grad=True)
    gradient_step({"a": p}, {"a": g}, 0.1)["a"].square().backward()
    assert p.grad is not None
    assert g.grad is not None
    assert float(p.grad) == pytest.approx(2.0)
    assert float(g.grad) == pytest.approx(-0.2)


@pytest.mark.parametrize(("norm", "value"), [(0.7, None), (None, 0.3), (0.7, 0.3), (1e6, 1e6)])
def test_clipping_equals_torchs(norm, value):
    """By value, then by norm, then a step with momentum and weight decay: torch's two functions and its SGD, 1e-12."""
    clipped = []

    def clip(references: list[torch.Tensor]) -> None:
        if value is not None:
            torch.nn.utils.clip_grad_value_(references, value)
        if norm is not None:
            clipped.append(float(torch.nn.utils.clip_grad_norm_(references, norm)) > norm)

    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    follow(GradientClipping(SGD(0.1, 0.9, 0.01, nesterov=True), norm, value), torch.optim.SGD, options, 1e-9, clip)
    assert sum(clipped) == (STEPS if norm == 0.7 else 0) or value == 0.3


def test_a_clipped_optimizer_changes_its_rate_like_the_one_inside():
    actual = GradientClipping(Adam(0.1), 1.0, 2.0)
    assert actual.with_lr(0.3) == GradientClipping(Adam(0.3), 1.0, 2.0)
    assert actual.with_lr(0.3).lr == 0.3


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (ConstantSchedule(), lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
        (CosineSchedule(), lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)),
        (
            CosineSchedule(0.1),
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40, eta_min=0.02),
        ),
        (StepSchedule(), lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 30])),
        (StepSchedule((0.25,), 0.5), lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [10], 0.5)),
    ],
)
def test_schedules_equal_torchs(actual, expected):
    """The learning rate of each of 40 rounds, set from the task of the run or from that of the round before."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    scheduler = expected(optimizer)
    run = Task(NETWORK, SGD(0.2, momentum=0.9), None, rounds=40, schedule=actual)
    before = run
    for number in range(40):
        now = run.at(number)
        assert now.optimizer.lr == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9)
        assert before.at(number).optimizer.lr == pytest.approx(now.optimizer.lr, rel=1e-9)
        assert now.optimizer.with_lr(0.2) == run.optimizer
        assert now.round == number
        before = now
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_slower_group_is_torchs_parameter_group(kind: str) -> None:
    """Three steps with momentum or moments and weight decay, the backbone at a tenth of the rate, as torch.optim's."""
    g = torch.Generator().manual_seed(0)
    params = {"deep": {"w": torch.randn(3, generator=g)}, "head": {"w": torch.randn(2, generator=g)}}
    references = {name: torch.nn.Parameter(layer["w"].clone()) for name, layer in params.items()}
    groups = [{"params": [references["deep"]], "lr": 0.01}, {"params": [references["head"]], "lr": 0.1}]
    if kind == "sgd":
        expected = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
        inner = SGD(0.05, 0.9, 0.01)
    else:
        expected = torch.optim.Adam(groups, lr=0.1, weight_decay=0.01)
        inner = Adam(0.05, weight_decay=0.01)
    actual = LayerwiseLearningRate(inner, 0.1, frozenset({"deep/w"})).with_lr(0.1)
    state = actual.init(params)
    for _ in range(3):
        gradient = {name: {"w": torch.randn(layer["w"].shape, generator=g)} for name, layer in params.items()}
        for name, reference in references.items():
            reference.grad = gradient[name]["w"].clone()
        expected.step()
        params, state = actual.step(params, gradient, state)
    for name, reference in references.items():
        torch.testing.assert_close(params[name]["w"], reference.data)


def test_adam_of_one_client_equals_a_vmapped_one_in_any_order_of_state():
    """All leaves in one call, or each under vmap: the same bits; a state from a file has keys in another order."""
    g = torch.Generator().manual_seed(0)
    params, gradient = ({"b": {"w": torch.randn(4, 3, generator=g)}, "a": torch.randn(4, generator=g)} for _ in "pg")
    optimizer = Adam(0.1, weight_decay=0.01)
    single = (params, optimizer.init(params))
    lifted = vmap(lambda p: (p, optimizer.init(p)))(tree.stack([params]))
    for _ in range(3):
        shuffled = {k: {n: v[n] for n in reversed(v)} if isinstance(v, dict) else v for k, v in single[1].items()}
        single = optimizer.step(single[0], gradient, shuffled)
        lifted = vmap(optimizer.step)(lifted[0], tree.stack([gradient]), lifted[1])
    for actual, expected in zip(single, lifted, strict=True):
        for name, leaf in tree.flatten(actual).items():
            assert torch.equal(leaf, tree.flatten(expected)[name][0]), name


def test_large_model_steps_equal_steps_of_single_leaves():
    """Leaf by leaf from 16 MiB on, all at once below: the same bits; with what is not needed any more used up, too."""
    g = torch.Generator().manual_seed(0)
    params = {name: torch.randn(count, generator=g) for name, count in {"large": 2**22, "a": 7, "b": 1000}.items()}
    whole = params
    parts = {name: {name: leaf} for name, leaf in params.items()}
    state = Adam(1e-2).init(whole)
    states = {name: Adam(1e-2).init(layer) for name, layer in parts.items()}
    lean = whole
    rest = Adam(1e-2).init(whole)
    for _ in range(2):
        gradient = tree.map(lambda leaf: torch.randn(leaf.shape, generator=g), whole)
        whole, state = Adam(1e-2).step(whole, gradient, state)
        for name in parts:
            parts[name], states[name] = Adam(1e-2).step(parts[name], {name: gradient[name]}, states[name])
        lean, rest = Adam(1e-2).step(lean, gradient, rest, consume=True)
        assert not gradient, "its leaves are free"
    assert all(torch.equal(whole[name], parts[name][name]) and torch.equal(whole[name], lean[name]) for name in parts)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(rest), strict=True))


@pytest.mark.parametrize(("device", "at_once"), [("cpu", False), ("cuda", True)])
def test_on_a_gpu_adam_updates_all_leaves_of_a_large_model_in_one_call(device, at_once, monkeypatch):
    calls: list[float] = []

    def record_call(self, params, gradient, state, lr):
        calls.append(lr)
        return params, state

    monkeypatch.setattr(Adam, "_step_all_leaves", record_call)
    optimizer = Adam()
    # Fake tensors have a device and a shape, but no memory, so that no GPU is needed.
    with FakeTensorMode():
        params = {name: torch.empty(2, SMALL_MODEL_BYTES // 8, device=device) for name in "ab"}
        optimizer.step(params, tree.map(torch.ones_like, params), optimizer.init(params))
    assert bool(calls) == at_once


class CountCalls(TorchDispatchMode):
    """Count the operators that are called, each of which starts a kernel on a GPU."""

    VIEWS = ("detach", "alias", "view", "movedim", "expand", "_to_copy")

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in self.VIEWS:
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clients", [1, 3])
def test_vmapped_adam_makes_one_call_for_all_leaves_where_each_would_make_one(clients):
    """Of the seven operators of a step five are called once for all leaves; two have a factor for each client."""
    leaves = 20
    params = {str(number): torch.ones(clients, 4, number + 1) for number in range(leaves)}
    optimizer = Adam()
    state = vmap(optimizer.init)(params)
    with CountCalls() as counted:
        vmap_clients(optimizer.step)(params, params, state)
    assert sum(name.startswith("_foreach_") for name in counted.calls) == 7
    assert len(counted.calls) < 20


def test_clients_that_took_other_numbers_of_steps_step_together():
    """Their bias corrections differ."""
    g = torch.Generator().manual_seed(0)
    optimizer = Adam(0.1)
    clients = []
    for steps in (0, 1, 5):
        params = {"w": torch.randn(4, 3, generator=g), "b": torch.randn((), generator=g)}
        state = optimizer.init(params)
        for _ in range(steps):
            params, state = optimizer.step(params, tree.map(lambda leaf: leaf.sin(), params), state)
        clients.append((params, tree.map(lambda leaf: leaf.cos(), params), state))
    params, gradient, state = (tree.stack(list(each)) for each in zip(*clients, strict=True))
    lifted = vmap_clients(optimizer.step)(params, gradient, state)
    for k, client in enumerate(clients):
        for actual, expected in zip(lifted, optimizer.step(*client), strict=True):
            for name, leaf in tree.flatten(expected).items():
                assert torch.equal(tree.flatten(actual)[name][k], leaf), name
