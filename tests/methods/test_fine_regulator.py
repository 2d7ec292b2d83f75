"""F-reg's derivatives in closed form against those of `torch.func` and of autograd, and what a run then imports."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from halfmoon.core import tree
from halfmoon.methods.fine_regulator import WeightedLoss, compute_instance_weights, compute_log_odds
from halfmoon.models.network import linear

READINGS = [(seen, through) for seen in ("centered", "logits", "softmax") for through in ("product", "detached")]
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5}


def make_inputs(dtype: torch.dtype, seed: int = 0):
    """Return F-reg, logits, labels and a tangent of 30 images of 7 classes."""
    g = torch.Generator().manual_seed(seed)
    regulator = tree.to({"hidden": linear(g, 7, 16), "out": linear(g, 16, 1)}, dtype=dtype)
    z, tangent = (3 * torch.randn(30, 7, generator=g, dtype=dtype) for _ in range(2))
    return regulator, z, torch.randint(0, 7, (30,), generator=g), tangent


def weighted(regulator, z, label, seen, through):
    """Return the loss as Eq. 2 and 4 print it."""
    at = z.detach() if through == "detached" else z
    return (compute_instance_weights(regulator, at, seen) * F.cross_entropy(z, label, reduction="none")).mean()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(("seen", "through"), READINGS)
def test_closed_form_equals_nested_transforms(dtype, seen, through):
    """Eq. 5's derivative is a gradient of a `jvp`, that of Eq. 2 and 4 a gradient: to rounding, alone and lifted."""
    scenes = [make_inputs(dtype, seed) for seed in range(2)]

    def theirs(regulator, z, label, tangent):
        def moved(w):
            return jvp(lambda at: weighted(w, at, label, seen, through), (z,), (tangent,))[1]

        return grad(moved)(regulator), grad(lambda at: weighted(regulator, at, label, seen, through))(z)

    def compute_loss(regulator, z, label, tangent):
        loss = WeightedLoss.from_logits(z, label, seen, through)
        return loss.regulator_gradient(regulator, tangent), loss.logit_gradient(regulator)

    single = [compute_loss(*each) for each in scenes]
    both = vmap(compute_loss)(
        tree.stack([each[0] for each in scenes]), *map(torch.stack, list(zip(*scenes, strict=True))[1:])
    )
    for k, each in enumerate(scenes):
        weight_gradient, logit_gradient = theirs(*each)
        for found, found_logit_gradient in (single[k], (tree.index(both[0], k), both[1][k])):
            assert tree.flatten(found).keys() == tree.flatten(weight_gradient).keys()
            for name, leaf in {**tree.flatten(weight_gradient), "logits": logit_gradient}.items():
                actual_gradient = found_logit_gradient if name == "logits" else tree.flatten(found)[name]
                assert actual_gradient.shape == leaf.shape
                assert float((actual_gradient - leaf).norm()) <= ROUNDING[dtype] * float(leaf.norm()), name


@pytest.mark.parametrize(
    ("regulator_input", "has_offset", "through"),
    [
        ("confidence", False, "detached"),
        ("confidence", True, "detached"),
        ("centered", True, "detached"),
        ("logits", True, "product"),
    ],
)
def test_closed_form_with_the_confidence_equals_nested_transforms(regulator_input, has_offset, through):
    """The confidence is F-reg's input, or an offset is added to F-reg's output: both are constants."""
    regulator, z, label, tangent = make_inputs(torch.float64)
    generator = torch.Generator().manual_seed(3)
    if regulator_input == "confidence":
        regulator = tree.to({"hidden": linear(generator, 1, 16), "out": linear(generator, 16, 1)}, dtype=torch.float64)
    confidence = torch.rand(30, generator=generator, dtype=torch.float64)
    offset = torch.randn(30, generator=generator, dtype=torch.float64) if has_offset else None

    def weighted_loss(regulator, at):
        input_logits = at.detach() if through == "detached" else at
        weights = compute_instance_weights(regulator, input_logits, regulator_input, confidence, offset)
        return (weights * F.cross_entropy(at, label, reduction="none")).mean()

    expected = grad(lambda w: jvp(lambda at: weighted_loss(w, at), (z,), (tangent,))[1])(regulator)
    loss = WeightedLoss.from_logits(z, label, regulator_input, through, None, confidence, offset)
    found = tree.flatten(loss.regulator_gradient(regulator, tangent))
    for name, leaf in tree.flatten(expected).items():
        torch.testing.assert_close(found[name], leaf, rtol=1e-10, atol=1e-14)
    expected_logits = grad(lambda at: weighted_loss(regulator, at))(z)
    torch.testing.assert_close(loss.logit_gradient(regulator), expected_logits, rtol=1e-10, atol=1e-14)


def test_an_f_reg_without_output_weighs_an_image_by_its_confidence():
    """sigmoid(0 + log(p / (1 - p))) = p; without this offset it is one half."""
    regulator, z, _, _ = make_inputs(torch.float64)
    regulator["out"] = tree.map(torch.zeros_like, regulator["out"])
    confidence = torch.linspace(0.05, 0.95, 30, dtype=torch.float64)
    weights = compute_instance_weights(regulator, z, "centered", offset=compute_log_odds(confidence))
    torch.testing.assert_close(weights, confidence)
    assert (compute_instance_weights(regulator, z, "centered") == 0.5).all()
    offset = compute_log_odds(torch.tensor([0.0, 1.0], dtype=torch.float64))
    certain = compute_instance_weights(regulator, z[:2], "centered", offset=offset)
    torch.testing.assert_close(certain, torch.tensor([1e-4, 1 - 1e-4]).double())


def test_the_signal_is_the_fall_of_an_images_loss_per_unit_of_its_error():
    """By autograd: the derivative of each cross-entropy along the tangent, divided by the norm of its gradient."""
    _, z, label, tangent = make_inputs(torch.float64)
    real = torch.arange(30) < 28
    found = WeightedLoss.from_logits(z, label, "centered", "detached", real).compute_signal(tangent)
    expected = jvp(lambda at: F.cross_entropy(at, label, reduction="none"), (z,), (tangent,))[1]
    gradient = grad(lambda at: F.cross_entropy(at, label, reduction="sum"))(z)
    expected = (expected / gradient.norm(dim=-1))[:28]
    torch.testing.assert_close(found[:28], expected / expected.square().mean().sqrt())
    assert (found[28:] == 0).all()


RUN = """
import sys
from pathlib import Path

import halfmoon

for method in ("fedavg", "feddure"):
    folder = Path(sys.argv[1]) / method
    halfmoon.run(halfmoon.Config(method=method, rounds=1, steps=1, clients=4, cohort=2, width=4, run_dir=folder))
late = {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)
assert not late, late
"""


def test_a_run_does_not_import_the_compiler(tmp_path):
    """A gradient of torch.func imports `torch._dynamo`, a cotangent SymPy: a second and more of every short run."""
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
