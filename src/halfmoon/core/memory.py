"""What the C library does with the memory of freed tensors: keep it, for speed, or give it back."""

import ctypes
import sys
from collections.abc import Callable
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names and numbers of glibc's malloc.h
LARGE = 2**25
"""Bytes of a model from which memory that is free counts for more than the time to have it again."""


def retain_freed_memory() -> bool:
    """Let glibc keep freed memory up to 1 GiB a piece; return whether it does (elsewhere than on Linux with glibc: no).

    By default it maps every tensor of more than some MiB afresh and unmaps it when it is freed, so that each step of a
    network pays for the same pages, zeroed by the kernel, again. Kept, they cost once; the process then holds on to the
    most it has ever used. Affects speed and resident memory of the whole process, never a result; may be called again.
    """
    mallopt = _libc("mallopt")
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, 2**30) == 1 and mallopt(M_TRIM_THRESHOLD, 2**31 - 1) == 1


def release_memory(nbytes: int) -> None:
    """Where a model is `LARGE`, give the pages of freed tensors back, and from now on of those of 16 MiB at once.

    The holes that they leave fit little of what comes next, which adds to them.
    """
    mallopt, trim = _libc("mallopt"), _libc("malloc_trim")
    if nbytes >= LARGE and mallopt and trim:
        mallopt(M_MMAP_THRESHOLD, 2**24)
        trim(0)


def _libc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc; None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError, AttributeError):
        return getattr(ctypes.CDLL(None), name)
    return None
