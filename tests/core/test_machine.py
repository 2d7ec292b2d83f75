"""What lies outside: memory that the C library keeps, a cache that is bounded, a folder of somebody else's model."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halfmoon.core import hubs, memory
from halfmoon.core.errors import UserError
from halfmoon.core.user_cache import trim

FAULTS = """
import ctypes, resource, sys
from halfmoon.core.memory import retain_freed_memory
c = ctypes.CDLL(None)
c.malloc.argtypes, c.malloc.restype, c.free.argtypes = (ctypes.c_size_t,), ctypes.c_void_p, (ctypes.c_void_p,)
def take(size):
    piece = c.malloc(size)
    ctypes.memset(piece, 1, size)
    c.free(piece)
if sys.argv[1] == "keep":
    assert retain_freed_memory() and retain_freed_memory()
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
def test_reused_memory_causes_no_page_fault():
    """Kept, the pages are there already: less than a tenth of the faults that they cost otherwise."""
    assert faults("keep") < faults("default") / 10


def test_on_another_system_it_has_no_effect(monkeypatch):
    """On another system, or with a C library that has no such switch, it says no and raises nothing."""
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: object())
    assert not memory.retain_freed_memory()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert not memory.retain_freed_memory()


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """Three pairs of 10 + 1 bytes under a limit of 25: the oldest goes, the one that is retained counts, too."""
    for age, name in enumerate(("new", "kept", "old")):
        for suffix, size in ((".npy", 10), (".json", 1)):
            path = tmp_path / f"{name}{suffix}"
            path.write_bytes(bytes(size))
            os.utime(path, (1000 - age, 1000 - age))
    os.utime(tmp_path / "new.json", (1, 1))  # files of one name go together, by the one that was used last
    trim(tmp_path, "kept", cap=25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "kept.npy", "new.json", "new.npy"]
    trim(tmp_path, "kept", cap=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "kept.npy"]


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{"], ids=["deep", "a list", "cut"])
def test_a_configuration_that_is_none_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match="is no configuration of a model of transformers"):
        hubs.portable_name(f"transformers:{tmp_path}")
