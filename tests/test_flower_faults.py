"""What faults of real federations have shown (benchmarks/federation_faults.py), each in its smallest form."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from halfmoon.flower import child


def test_a_full_disk_does_not_keep_a_process_from_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a disk without a free block a file keeps those it has and gets no other one, so it is never emptied first.

    A site answers each message in a new process, and each writes its number into the lock: one that failed there could
    not even say that its disk is full.
    """
    lock = tmp_path / "flwr-clientapp.lock"
    child._hold(lock)
    honest = os.write

    def write(handle: int, data: bytes) -> int:
        if os.lseek(handle, 0, os.SEEK_CUR) + len(data) > os.fstat(handle).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(handle, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(child.disk, "flock", lambda handle: None)  # the first one is still held, by this process
    child._hold(lock)
    assert int(lock.read_bytes()) == 7
    assert lock.read_bytes().isdigit()
