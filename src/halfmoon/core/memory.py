"""The memory of this machine, and control of the C library's: retain that of freed tensors, or return it to the system."""

import ctypes
import os
import sys
from collections.abc import Callable
from contextlib import suppress

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of mallopt in glibc's malloc.h."""

LARGE_MODEL_BYTES = 2**25
"""Size of a model from which free memory matters more than the time to allocate it once more."""


def machine_memory() -> int | None:
    """Return the bytes of this machine's memory; None where the system does not tell, as on Windows."""
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def retain_freed_memory() -> bool:
    """Let glibc retain freed memory, in pieces of up to 1 GiB.

    By default it maps every tensor of more than some MiB and unmaps it when it is freed, so that each step of a network
    waits for the kernel to zero the same pages. Retained, they are zeroed once, and the process retains the largest
    amount that it has used. This changes speed and resident memory of the whole process, never a result.

    Returns:
        Whether it does; False for other C libraries.
    """
    mallopt = _libc("mallopt")
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, 2**30) == 1 and mallopt(M_TRIM_THRESHOLD, 2**31 - 1) == 1


def release_memory(nbytes: int) -> None:
    """Return the memory of freed tensors to the system if the model is large.

    From then on, the memory of each large tensor is returned as soon as it is freed. Otherwise the gaps that freed
    tensors leave rarely fit the next ones, so the process would grow.

    Args:
        nbytes: size of the model.
    """
    mallopt = _libc("mallopt")
    trim = _libc("malloc_trim")
    if nbytes >= LARGE_MODEL_BYTES and mallopt and trim:
        mallopt(M_MMAP_THRESHOLD, 2**24)
        trim(0)


def _libc(name: str) -> Callable[..., int] | None:
    """Get a function of glibc; None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError, AttributeError):
        return getattr(ctypes.CDLL(None), name)
    return None
