"""What the C library does with the memory of freed tensors: keep it, for speed, or give it back."""

import ctypes
import sys
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # names and numbers of glibc's malloc.h
LARGE = 2**25
"""Bytes of a model from which freed memory is given back."""


def keep_memory() -> bool:
    """Let glibc keep freed memory up to 1 GiB a piece; return whether it does (elsewhere than on Linux with glibc: no).

    By default it maps every tensor of more than some MiB afresh and unmaps it when it is freed, so that each step of a
    network pays for the same pages, zeroed by the kernel, again. Kept, they cost once; the process then holds on to the
    most it has ever used. Affects speed and resident memory of the whole process, never a result; may be called again.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return mallopt(M_MMAP_THRESHOLD, 2**30) == 1 and mallopt(M_TRIM_THRESHOLD, 2**31 - 1) == 1


def release_memory(nbytes: int) -> None:
    """Where a model is `LARGE`, give the pages of freed tensors back: their holes add to what comes next."""
    if nbytes >= LARGE:
        with suppress(OSError, AttributeError):  # elsewhere than with glibc
            ctypes.CDLL(None).malloc_trim(0)
