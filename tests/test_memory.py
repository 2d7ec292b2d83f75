"""What `keep_memory` promises: pages that are freed and taken again are not faulted in again."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from halfmoon import memory

FAULTS = """
import resource, sys
import torch
from halfmoon.memory import keep_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_memory() and keep_memory()
torch.ones(16 * 2**20)  # 64 MiB, freed at once
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(16 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    """Return the page faults of four 64 MiB tensors, one after the other, in a process of its own."""
    run = subprocess.run([sys.executable, "-c", FAULTS, mode], check=True, capture_output=True, text=True)
    return int(run.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
def test_memory_taken_again_costs_no_fault():
    """Kept, the four tensors lie where the first lay: less than a tenth of the faults that they cost otherwise."""
    assert faults("keep") < faults("default") / 10


def test_elsewhere_it_does_nothing(monkeypatch):
    """On another system, or with a C library that has no such switch, it says no and raises nothing."""
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not memory.keep_memory()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.keep_memory()
