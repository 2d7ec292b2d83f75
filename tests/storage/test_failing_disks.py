"""Check runs on disks that refuse the Nth call or lose power at it: resumed, they end with the same bytes or a UserError."""

import errno
import random
from pathlib import Path

import pytest
import torch
from disk_failures import ERROR_NUMBERS, RUN_OPTIONS, count_calls, run_and_read, run_with_failure
from failing_disk import FailingDisk, PowerLoss, replace_file_calls
from text_log import TextLog

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.federation.site.runtime import SiteMemory
from halfmoon.report.figures import new_figure, save_figure
from halfmoon.runs import runner
from halfmoon.storage.folder_writer import WriteError, advise_for_parent


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


def test_advice_is_for_the_whole_command(tmp_path: Path):
    """For a run of a comparison it was to resume this run only, so that the others were not trained."""
    message = "metrics.jsonl cannot be written. First free some space, then go on with: {resume}"
    for resumable, advice in ((True, f"halfmoon resume {tmp_path}"), (False, "start it again in the same folder.")):
        with pytest.raises(WriteError) as caught, advise_for_parent(tmp_path, resumable):
            raise WriteError(message, resume=tmp_path / "splits" / "2") from OSError(errno.ENOSPC, "full")
        assert str(caught.value).endswith(f"First free some space, then {'go on with: ' if resumable else ''}{advice}")
        assert isinstance(caught.value.__cause__, OSError)  # by which the command line knows that the disk is full
        with pytest.raises(WriteError, match=f"halfmoon resume {tmp_path}$"), advise_for_parent(tmp_path, resumable):
            raise WriteError(message, resume=tmp_path)


def test_a_comparison_on_a_full_disk_resumes_as_its_error_states(tmp_path: Path):
    root = tmp_path / "compared"
    config = Config(**{**RUN_OPTIONS, "method": "fedavg", "run_dir": root})
    disk = FailingDisk(root, 40, errno.ENOSPC)
    with replace_file_calls(disk), pytest.raises(UserError, match=f"free some space, then go on with: .* {root}$"):
        runner.compare(config, ["fedavg", "fedloke"])
    assert disk.count > 40
    assert len(runner.resume(root).summaries) == 2


def test_a_figure_is_complete_or_not_there(tmp_path: Path):
    (tmp_path / "figure.png").write_bytes(b"before")
    for at in range(20):
        disk = FailingDisk(tmp_path, at, errno.ENOSPC)
        error = ""
        with replace_file_calls(disk):
            try:
                save_figure(new_figure(1, 1), tmp_path / "figure.png")
            except UserError as raised:
                error = str(raised)
        assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]
        if disk.count <= at:
            break
        assert error.startswith(
            f"{tmp_path / 'figure.png'}: the figure cannot be written (No space left on device); free"
        )
        if at < 3:  # later the file is in its place, and only its folder is not flushed
            assert (tmp_path / "figure.png").read_bytes() == b"before"
    assert at >= 3
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
