"""Run on a disk that fails once, and resume. Used by tests/storage and by benchmarks/faults.py."""

import errno
import random
from pathlib import Path
from typing import Any

from failing_disk import FailingDisk, PowerLoss, replace_file_calls

from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.runs import runner

RUN_OPTIONS: dict[str, Any] = {
    "data": "digits", "clients": 3, "cohort": 2, "network": "small", "width": 2, "steps": 1, "method": "fedloke",
    "device": "cpu", "executor": "loop", "threads": 1, "labels_per_class": 3.0, "rounds": 2, "evaluate_every": 2,
}  # fmt: skip
ERROR_NUMBERS = (errno.EIO, errno.ENOSPC, errno.EMFILE)
RESULT_FILES = ("model.safetensors", "metrics.jsonl", "split.parquet")


def run_and_read(folder: Path) -> list[bytes]:
    """Run or resume a run, and return the content of its result files."""
    runner.run_in_folder(Config(**RUN_OPTIONS), folder)
    return [(folder / name).read_bytes() for name in RESULT_FILES]


def count_calls(folder: Path) -> int:
    """Run, and return how many calls change the run folder."""
    with replace_file_calls(FailingDisk(folder)) as disk:
        run_and_read(folder)
    return disk.count


def run_with_failure(folder: Path, failing_call: int, error_number: int | None, expected: list[bytes]) -> str:
    """Run on a disk that fails at a call, then resume; return "same" or the message of a UserError.

    Args:
        folder: a new run folder.
        failing_call: the index of the call that fails.
        error_number: the errno of the failure, None for a loss of power.
        expected: the result files of an undisturbed run.
    """
    disk = FailingDisk(folder, failing_call, error_number)
    try:
        with replace_file_calls(disk):
            run_and_read(folder)
    except (PowerLoss, UserError, OSError):
        pass
    if error_number is None:
        disk.drop_unflushed(random.Random(failing_call))
    try:
        assert run_and_read(folder) == expected, f"other bytes after call {failing_call} with {error_number}"
    except UserError as error:
        return str(error)
    return "same"
