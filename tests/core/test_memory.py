"""What `keep_memory` promises: pages that are freed and taken again are not faulted in again."""

import ctypes
import subprocess
import sys

import pytest

from halfmoon.core import memory

FAULTS = """
import ctypes, resource, sys
from halfmoon.core.memory import keep_memory
c = ctypes.CDLL(None)
c.malloc.argtypes, c.malloc.restype, c.free.argtypes = (ctypes.c_size_t,), ctypes.c_void_p, (ctypes.c_void_p,)
def take(size):
    piece = c.malloc(size)
    ctypes.memset(piece, 1, size)
    c.free(piece)
if sys.argv[1] == "keep":
    assert keep_memory() and keep_memory()
take(2**26)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    take(2**26)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    """Return the page faults of taking, filling and freeing 64 MiB four times more, in a process of its own."""
    run = subprocess.run([sys.executable, "-c", FAULTS, mode], check=True, capture_output=True, text=True)
    return int(run.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="the C library is not glibc")
def test_memory_taken_again_costs_no_fault():
    """Kept, the pages are there already: less than a tenth of the faults that they cost otherwise."""
    assert faults("keep") < faults("default") / 10


def test_elsewhere_it_does_nothing(monkeypatch):
    """On another system, or with a C library that has no such switch, it says no and raises nothing."""
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not memory.keep_memory()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.keep_memory()
