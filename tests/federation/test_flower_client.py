"""What a site's warm process has done before it forks for the first message."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("flwr")

LATE = """
import sys

import halfmoon.federation.flower.client_app

import torch
from torch.func import grad

before = set(sys.modules)
grad(torch.square)(torch.ones(()))
late = sorted(set(sys.modules) - before)
assert not late, f"{len(late)} modules, such as {late[:3]}"
"""


def test_a_fork_imports_nothing_for_its_first_gradient() -> None:
    """torch.func imports 800 modules with the first gradient of a process: a second of every message to a site."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
