"""Gradients and lifted programs against `torch.func`, which they must equal bit by bit."""

import subprocess
import sys
from typing import Any, Literal, cast

import pytest
import torch
import torch.func
import torch.nn.functional as F
from torch import Tensor

from halfmoon.api.types import PseudoLabels, StepMetrics, WeightedMetric
from halfmoon.core import tree
from halfmoon.core.autodiff import cross_entropy, grad_and_value, inside_transform, vjp, vmap_clients
from halfmoon.federation.contract.small_federation import trees_equal
from halfmoon.models import SmallCNN

NETWORK = SmallCNN(1, 4, 4)


def make_inputs(seed: int = 0) -> tuple[tree.Tree, Tensor]:
    """Return parameters in double precision, one of them used by nobody, and images."""
    g = torch.Generator().manual_seed(seed)
    params = tree.to(NETWORK.init(g)["params"], dtype=torch.float64)
    return {**params, "idle": {"weight": torch.ones(3, dtype=torch.float64)}}, torch.randn(
        5, 1, 8, 8, generator=g, dtype=torch.float64
    )


def loss(params: tree.Tree, x: Tensor) -> tuple[Tensor, Any]:
    logits, moments = NETWORK.train(params, x)
    return logits.square().sum(), {"moments": [moments], "logits": logits, "none": ()}


def parts(params: tree.Tree, x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return two outputs of which the second depends on no parameter, and something beside them."""
    logits, _ = NETWORK.train(params, x)
    return (logits, x.mean((1, 2, 3))), logits


@pytest.mark.parametrize("quiet", [False, True])
def test_a_gradient_is_that_of_torch_func(quiet: bool):
    """Gradient, loss and aside have the same bits, with or without no_grad; nothing keeps a graph, inputs stay."""
    params, x = make_inputs()
    with torch.set_grad_enabled(not quiet):
        actual, value, aside = grad_and_value(loss, params, x)
        expected_value, (expected, baselines) = torch.func.grad_and_value(loss, has_aux=True)(params, x)
    assert trees_equal(actual, expected_value)
    assert torch.equal(value, expected)
    assert torch.equal(aside["logits"], baselines["logits"])
    assert trees_equal(aside["moments"][0], baselines["moments"][0])
    assert aside["none"] == ()
    assert not actual["idle"]["weight"].any()
    found = [*tree.leaves(actual), value, aside["logits"], *tree.leaves(params)]
    assert not any(leaf.requires_grad for leaf in found)


def test_empty_loss_has_a_zero_gradient():
    params, x = make_inputs()
    gradient, _, _ = grad_and_value(lambda p: (x.sum(), ()), params)
    assert trees_equal(gradient, tree.zeros_like(params))


def test_pulls_are_those_of_torch_func():
    """Two pulls of one pass, under no_grad as in a local update; an output without a graph takes a cotangent as well."""
    params, x = make_inputs()
    cotangents = [
        (torch.full((5, 4), scale, dtype=torch.float64), torch.ones(5, dtype=torch.float64)) for scale in (1.0, 2.0)
    ]
    with torch.no_grad():
        outputs, pull, aside = vjp(lambda p: parts(p, x), params)
        expected, expected_value, baselines = cast(Any, torch.func.vjp(lambda p: parts(p, x), params, has_aux=True))
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        assert torch.equal(aside, baselines)
        assert trees_equal(pull(cotangents[0], True), expected_value(cotangents[0])[0])
        assert trees_equal(pull(cotangents[1], False), expected_value(cotangents[1])[0])
    assert not outputs[0].requires_grad
    assert not aside.requires_grad


def test_both_work_inside_other_transforms():
    """Under vmap three clients get the gradients they get alone; a gradient of a gradient is torch.func's."""
    scenes = [make_inputs(seed) for seed in range(3)]
    params = tree.stack([p for p, _ in scenes])
    x = torch.stack([x for _, x in scenes])

    def both(p: tree.Tree, x: Tensor) -> tuple[tree.Tree, tree.Tree]:
        assert inside_transform()
        (logits, _), pull, _ = vjp(lambda q: parts(q, x), p)
        return grad_and_value(loss, p, x)[0], pull((torch.ones_like(logits), torch.ones_like(x[:, 0, 0, 0])), False)

    many = vmap_clients(both)(params, x)
    assert not inside_transform()
    for k, (p, images) in enumerate(scenes):
        (logits, _), pull, _ = vjp(lambda q, images=images: parts(q, images), p)
        single = grad_and_value(loss, p, images)[0], pull((torch.ones_like(logits), torch.ones(5).double()), False)
        for actual, expected_value in zip(many, single, strict=True):
            for a, b in zip(tree.leaves(actual), tree.leaves(expected_value), strict=True):
                torch.testing.assert_close(a[k], b, rtol=1e-11, atol=1e-12)
    cube = torch.func.grad(lambda z: grad_and_value(lambda p: (p["z"] ** 3, ()), {"z": z})[0]["z"])
    assert float(cube(torch.tensor(2.0))) == 12


def test_a_lifted_program_is_that_of_vmap():
    base = torch.arange(6.0).view(3, 2)
    sample = WeightedMetric(base[:, 0], base[:, 1], torch.ones(3))

    def one(carry: tree.Tree, sample: WeightedMetric) -> tuple[tree.Tree, StepMetrics]:
        pseudo = PseudoLabels(carry["a"]["b"].argmax(), carry["a"]["b"], carry["a"]["b"] * 2)
        return {"first": carry, "nothing": {}}, StepMetrics(sample.total + sample.count, {"m": sample}, (pseudo,))

    carry = {"a": {"b": base, "c": {}}, "d": base[:, 0]}
    (state, notes), (expected, expected_value) = vmap_clients(one)(carry, sample), torch.func.vmap(one)(carry, sample)
    assert trees_equal(state, expected)
    assert list(state) == ["first", "nothing"]
    assert state["first"]["a"]["c"] == {}
    assert isinstance(notes, StepMetrics)
    assert isinstance(notes.samples["m"], WeightedMetric)
    assert torch.equal(notes.loss, expected_value.loss)
    assert all(torch.equal(a, b) for a, b in zip(notes.pseudo[0], expected_value.pseudo[0], strict=True))
    assert vmap_clients(lambda carry: {})(carry) == {}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_lifted_cross_entropy_is_pytorchs(reduction: Literal["mean", "none"]) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5, 4, generator=g, dtype=torch.float64)
    labels = torch.randint(4, (3, 5), generator=g)
    single = [F.cross_entropy(z, y, reduction=reduction) for z, y in zip(logits, labels, strict=True)]
    many = torch.func.vmap(lambda z, y: cross_entropy(z, y, reduction))(logits, labels)
    assert torch.allclose(many, torch.stack(single), rtol=0, atol=1e-14)
    assert torch.equal(cross_entropy(logits[0], labels[0], reduction), single[0])


STEP = """
import sys
import torch
from halfmoon.core.autodiff import cross_entropy, grad_and_value, vmap_clients
step = vmap_clients(lambda p, y: grad_and_value(lambda q: (cross_entropy(q["z"], y), ()), p)[:2])
step({"z": torch.ones(2, 3, 4)}, torch.zeros(2, 3, dtype=torch.int64))
print({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules))
"""


def test_a_lifted_step_does_not_import_sympy() -> None:
    """It takes most of a second, of a run's first step."""
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
