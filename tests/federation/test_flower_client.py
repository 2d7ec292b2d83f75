"""What a site's warm process has done before it forks for the first message."""

import subprocess
import sys

import pytest

pytest.importorskip("flwr")

LATE = """
import sys

import halfmoon.federation.flower.client_app

import torch
from halfmoon.core.autodiff import grad_and_value

before = set(sys.modules)
grad_and_value(lambda params: (params["w"].square().sum(), ()), {"w": torch.ones(2)})
late = sorted(set(sys.modules) - before)
assert not late, f"{len(late)} modules, such as {late[:3]}"
"""


def test_a_fork_imports_nothing_for_its_first_gradient() -> None:
    """What is imported late is imported for every message to a site; torch.func's own gradient needs 800 modules."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
