"""The cross-entropy that vmap lifts: PyTorch's own, and its gradient, for each client; and SymPy stays where it is."""

import subprocess
import sys
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from halfmoon.core.autodiff import cross_entropy

LIFTED = """
import sys
import torch
from halfmoon.core.autodiff import grad_and_value, lifted
from halfmoon.core.autodiff import cross_entropy
step = lifted(lambda p, y: grad_and_value(lambda q: (cross_entropy(q["z"], y), ()), p)[:2])
step({"z": torch.ones(2, 3, 4)}, torch.zeros(2, 3, dtype=torch.int64))
print({"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules))
"""


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_it_is_pytorchs(reduction: Literal["mean", "none"]) -> None:
    g = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(3, 5, 4, generator=g, dtype=torch.float64), torch.randint(4, (3, 5), generator=g)
    alone = [F.cross_entropy(z, y, reduction=reduction) for z, y in zip(logits, labels, strict=True)]
    lifted = torch.func.vmap(lambda z, y: cross_entropy(z, y, reduction))(logits, labels)
    assert torch.allclose(lifted, torch.stack(alone), rtol=0, atol=1e-14)
    assert torch.equal(cross_entropy(logits[0], labels[0], reduction), alone[0])


def test_a_lifted_step_does_not_import_sympy() -> None:
    """It takes most of a second, of a run's first step."""
    done = subprocess.run([sys.executable, "-c", LIFTED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
