"""Check runs on disks that refuse the Nth call or lose power at it: resumed, they end with the same bytes or a UserError."""

import random
from pathlib import Path

import pytest
import torch
from disk_failures import ERROR_NUMBERS, count_calls, run_and_read, run_with_failure
from failing_disk import FailingDisk, PowerLoss, replace_file_calls
from text_log import TextLog

from halfmoon.core.tree import Tree
from halfmoon.federation.site.runtime import SiteMemory


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], int]:
    folder = tmp_path_factory.mktemp("straight")
    return run_and_read(folder / "run"), count_calls(folder / "counted")


@pytest.mark.parametrize("calls", [2, pytest.param(12, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("number", [*ERROR_NUMBERS, None], ids=["EIO", "ENOSPC", "EMFILE", "power"])
def test_run_survives_disk_failure(straight: tuple[list[bytes], int], tmp_path: Path, number: int | None, calls: int):
    """A few calls, spread over the whole run; benchmarks/faults.py tries random ones for minutes."""
    expected, count = straight
    assert count > 50
    for at in random.Random(number).sample(range(count), calls):
        assert run_with_failure(tmp_path / str(at), at, number, expected)


def test_simulated_disk_loses_unflushed_bytes(tmp_path: Path):
    """A write without a flush may be lost, in whole or in part; after a flush it never is."""
    import os

    lengths = set()
    for seed in range(30):
        path = tmp_path / str(seed)
        with replace_file_calls(FailingDisk(tmp_path)) as disk:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT)
            os.write(handle, b"safe")
            os.fsync(handle)
            os.write(handle, b"gone")
            os.close(handle)
        disk.drop_unflushed(random.Random(seed))
        assert path.read_bytes().startswith(b"safe")
        lengths.add(len(path.read_bytes()))
    assert len(lengths) > 2


@pytest.mark.parametrize("number", [*ERROR_NUMBERS, None])
def test_client_memory_is_the_old_or_the_new_one_after_a_disk_failure(tmp_path: Path, number: int | None):
    """A failure at any call of a write leaves the memory of the round before, or the complete new one."""

    def memory(folder: Path, round: int) -> SiteMemory:
        latest = (round - 1, 0, 0) if round else None
        return SiteMemory(folder, (round, 0, 0), latest, torch.device("cpu"), TextLog([]))

    def tree(value: float) -> Tree:
        return {"w": torch.full((100,), value)}

    for at in range(12):
        folder = tmp_path / str(at)
        memory(folder, 0).put("0", tree(1.0))
        disk = FailingDisk(folder, at, number)
        try:
            with replace_file_calls(disk):
                memory(folder, 1).put("0", tree(2.0))
        except (PowerLoss, OSError):
            pass
        if number is None:
            disk.drop_unflushed(random.Random(at))
        found = memory(folder, 2).get("0")
        assert float(found["w"][0]) in (1.0, 2.0)
        assert found["w"].unique().numel() == 1
