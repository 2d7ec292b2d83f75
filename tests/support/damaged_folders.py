"""Damage files of a run folder, and read what is left. Used by tests/storage and by benchmarks/faults.py."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from halfmoon.core.errors import UserError
from halfmoon.report.run_reader import StoredRun
from halfmoon.runs import runner
from halfmoon.sites.inference import load_model

RUN_OPTIONS: dict[str, Any] = {
    "data": "digits", "clients": 4, "cohort": 2, "network": "small", "width": 2, "steps": 1, "method": "fedloke",
    "device": "cpu", "executor": "loop", "threads": 1, "evaluate_every": 1, "labels_per_class": 4.0,
}  # fmt: skip
"""A small run, whose clients have memories."""
ROUNDS = 3

Damage = Callable[[bytes, random.Random], bytes | None]
"""(content, generator) -> damaged content, None to delete the file."""


def flip_bit(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    if changed:
        # One bit: the smallest damage, which a checksum has to find.
        changed[generator.randrange(len(changed))] ^= 1 << generator.randrange(8)
    return bytes(changed)


def truncate(data: bytes, generator: random.Random) -> bytes:
    return data[: generator.randrange(len(data))] if data else data


DAMAGES: dict[str, Damage] = {"flip": flip_bit, "cut": truncate, "delete": lambda data, generator: None}


def copy_folder(folder: Path, target: Path) -> Path:
    """Replace `target` by a copy of a folder."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder, target)
    return target


def list_files(folder: Path) -> list[str]:
    """Return the relative paths of all files in a folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def damage_file(path: Path, damage: str, generator: random.Random) -> bool:
    """Damage a file, and return whether it still exists."""
    data = DAMAGES[damage](path.read_bytes(), generator)
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    return data is not None


def read_numbers(folder: Path) -> tuple[Any, ...]:
    """Return every number that a reader of a run folder gets: rows, summary, split, and predictions of the model."""
    run = StoredRun.read(folder)
    # The time differs between a run and the same run after a resume.
    summary = {key: value for key, value in (run.summary or {}).items() if key != "seconds"}
    predictions: tuple[Any, ...] = ()
    if run.summary is not None:
        # Any two images will do: predictions depend on every weight.
        images = np.arange(2 * 64, dtype=np.uint8).reshape(2, 8, 8, 1)
        predictions = tuple(load_model(folder).probabilities(images).ravel().tolist())
    return json.dumps(run.rows), json.dumps(summary), json.dumps(run.split), predictions


def resume_and_read_numbers(folder: Path) -> tuple[Any, ...]:
    """Resume a run until it is finished, and return its numbers."""
    runner.resume(folder)
    return read_numbers(folder)


def read_damaged(
    folder: Path,
    target: Path,
    name: str,
    damage: str,
    generator: random.Random,
    read: Callable[[Path], tuple[Any, ...]],
    expected: tuple[Any, ...],
) -> str:
    """Damage one file in a copy of a run folder and read the copy.

    Args:
        folder: the intact run folder.
        target: where the copy is made.
        name: the file to damage, relative to the folder.
        damage: a key of `DAMAGES`.
        generator: chooses where the file is damaged.
        read: `read_numbers` or `resume_and_read_numbers`.
        expected: what `read` returns for the intact folder.

    Returns:
        "equal" if the numbers are the expected ones, else the message of the UserError.

    Raises:
        AssertionError: if the numbers differ and no error was raised.
    """
    exists = damage_file(copy_folder(folder, target) / name, damage, generator)
    try:
        found = read(target)
    except UserError as error:
        return str(error)
    if name == "split.json" and not exists:
        # Without the file the reader reports no split, which is not a different number.
        expected = (*expected[:2], "null", *expected[3:])
    assert found == expected, f"{name}, {damage}: different numbers"
    return "equal"
