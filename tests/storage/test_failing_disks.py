"""Disks that refuse the Nth call or lose their power at it: a run goes on to the same bytes, or says a sentence."""

import errno
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_disk import FailingDisk, PowerLoss, replace_file_calls

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.federation.site.runtime import SiteMemory
from halfmoon.runs import runner

RUN: dict[str, Any] = {
    "data": "digits", "clients": 3, "cohort": 2, "network": "small", "width": 2, "steps": 1, "method": "fedloke",
    "device": "cpu", "executor": "loop", "threads": 1, "labels_per_class": 3.0, "rounds": 2, "evaluate_every": 2,
}  # fmt: skip
REFUSALS = (errno.EIO, errno.ENOSPC, errno.EMFILE)
FILES = ("model.safetensors", "metrics.jsonl", "split.parquet")


def run_and_read(folder: Path) -> list[bytes]:
    """Run or resume a run, and return the content of its result files."""
    runner.run_in_folder(Config(**RUN), folder)
    return [(folder / name).read_bytes() for name in FILES]


def count_calls(folder: Path) -> int:
    with replace_file_calls(FailingDisk(folder)) as disk:
        run_and_read(folder)
    return disk.count


def run_with_failure(folder: Path, at: int, number: int | None, wanted: list[bytes]) -> str:
    """Run on a disk that fails at a call, then resume; return "same" or the message of a UserError."""
    disk = FailingDisk(folder, at, number)
    try:
        with replace_file_calls(disk):
            run_and_read(folder)
    except (PowerLoss, UserError, OSError):
        pass
    if number is None:
        disk.drop_unflushed(random.Random(at))
    try:
        assert run_and_read(folder) == wanted, f"other bytes after call {at} with {number}"
    except UserError as error:
        return str(error)
    return "same"


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], int]:
    folder = tmp_path_factory.mktemp("straight")
    return run_and_read(folder / "run"), count_calls(folder / "again")


@pytest.mark.parametrize("places", [2, pytest.param(12, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("number", [*REFUSALS, None], ids=["EIO", "ENOSPC", "EMFILE", "power"])
def test_a_run_survives_its_disk(straight: tuple[list[bytes], int], tmp_path: Path, number: int | None, places: int):
    """A few calls, spread over the whole run; benchmarks/failing_disks.py plays every one."""
    wanted, count = straight
    assert count > 50
    for at in random.Random(number).sample(range(count), places):
        assert run_with_failure(tmp_path / str(at), at, number, wanted)


def test_the_simulated_disk_loses_what_was_not_flushed(tmp_path: Path):
    """A write without a flush may be gone, whole or in part; after a flush it never is."""
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


@pytest.mark.parametrize("number", [*REFUSALS, None])
def test_a_sites_memory_is_the_old_one_or_the_new_one(tmp_path: Path, number: int | None):
    """At every call of a write: what a site remembers of the visit before is there, or all of the new one."""

    def memory(folder: Path, round: int) -> SiteMemory:
        return SiteMemory(
            folder, (round, 0, 0), (round - 1, 0, 0) if round else None, torch.device("cpu"), lambda _: None
        )

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
