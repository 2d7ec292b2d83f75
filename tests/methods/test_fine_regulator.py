"""F-reg's derivatives in closed form against those of `torch.func` and of autograd, and what a run then imports."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jvp, vmap

from halfmoon.core import tree
from halfmoon.methods.fine_regulator import WeightedLoss, compute_instance_weights
from halfmoon.models.network import linear

READINGS = [(seen, through) for seen in ("centered", "logits", "softmax") for through in ("product", "detached")]
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5}


def scene(dtype: torch.dtype, seed: int = 0):
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
    scenes = [scene(dtype, seed) for seed in range(2)]

    def theirs(regulator, z, label, tangent):
        def moved(w):
            return jvp(lambda at: weighted(w, at, label, seen, through), (z,), (tangent,))[1]

        return grad(moved)(regulator), grad(lambda at: weighted(regulator, at, label, seen, through))(z)

    def ours(regulator, z, label, tangent):
        loss = WeightedLoss.from_logits(z, label, seen, through)
        return loss.regulator_gradient(regulator, tangent), loss.logit_gradient(regulator)

    alone = [ours(*each) for each in scenes]
    both = vmap(ours)(tree.stack([each[0] for each in scenes]), *map(torch.stack, list(zip(*scenes, strict=True))[1:]))
    for k, each in enumerate(scenes):
        weight_gradient, logit_gradient = theirs(*each)
        for found, found_logit_gradient in (alone[k], (tree.index(both[0], k), both[1][k])):
            assert tree.flatten(found).keys() == tree.flatten(weight_gradient).keys()
            for name, leaf in {**tree.flatten(weight_gradient), "logits": logit_gradient}.items():
                mine = found_logit_gradient if name == "logits" else tree.flatten(found)[name]
                assert mine.shape == leaf.shape
                assert float((mine - leaf).norm()) <= ROUNDING[dtype] * float(leaf.norm()), name


RUN = """
import sys
from pathlib import Path

import halfmoon

for method in ("fedavg", "feddure"):
    halfmoon.run(halfmoon.Config(method=method, rounds=1, steps=1, cohort=2, run_dir=Path(sys.argv[1]) / method))
late = {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)
assert not late, late
"""


def test_a_run_does_not_import_the_compiler(tmp_path):
    """A gradient of torch.func imports `torch._dynamo`, a cotangent SymPy: a second and more of every short run."""
    done = subprocess.run([sys.executable, "-c", RUN, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
