"""Checksums: what was changed on a disk is refused with a sentence, or changes no number; the review's cases first."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from interrupted_runs import InterruptAfterRound

from halfmoon.cli import main as cli
from halfmoon.config.schema import Config
from halfmoon.core.errors import UserError
from halfmoon.report.run_reader import StoredRun
from halfmoon.runs import runner
from halfmoon.sites.inference import load_model
from halfmoon.storage import integrity
from halfmoon.storage.integrity import ChecksumError, format_checked, parse_checked
from halfmoon.storage.serialization import check_checksum

SMALL: dict[str, Any] = {
    "data": "digits", "clients": 4, "cohort": 2, "network": "small", "width": 2, "steps": 1, "method": "fedloke",
    "device": "cpu", "executor": "loop", "threads": 1, "evaluate_every": 1, "labels_per_class": 4.0,
}  # fmt: skip
ROUNDS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    runner.run_in_folder(Config(**SMALL, rounds=ROUNDS), folder)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run, stopped after two rounds."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        runner.run_in_folder(Config(**SMALL, rounds=ROUNDS), folder, InterruptAfterRound(ROUNDS - 1))
    return folder


def test_a_seal_finds_every_changed_bit():
    """Of the value, of the key, of the seal itself, of blanks; the whole object comes back otherwise."""
    data = format_checked({"a": [1, 2.5], "b": {"c": "ä"}})
    assert parse_checked(data) == {"a": [1, 2.5], "b": {"c": "ä"}}
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            with pytest.raises(ChecksumError):
                parse_checked(bytes(changed))
    for cut in (data[:-1], b"", b"[]", b"{}", b"7"):
        with pytest.raises(ChecksumError):
            parse_checked(cut)


def copy(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to


def test_one_digit_of_an_accuracy_is_found_before_it_is_believed(stopped: Path, finished: Path, tmp_path: Path):
    """In a stopped run by the checkpoint (resume and report), in a finished one by its checksum."""
    for source, calls in ((stopped, (runner.resume, StoredRun.read)), (finished, (StoredRun.read,))):
        for call in calls:
            path = copy(source, tmp_path / "run") / "metrics.jsonl"
            text = path.read_text()
            at = text.index('"accuracy": ') + len('"accuracy": 0.')
            path.write_text(text[:at] + str((int(text[at]) + 3) % 10) + text[at + 1 :])
            with pytest.raises(UserError, match=r"metrics\.jsonl was changed since it was written"):
                call(tmp_path / "run")


def test_one_bit_of_a_finished_model_is_found(finished: Path, tmp_path: Path):
    whole = (finished / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    for place in (len(whole) - 1, len(whole) // 2, 20):
        changed = bytearray(whole)
        changed[place] ^= 0x40
        path.write_bytes(changed)
        with pytest.raises(UserError):
            load_model(path)
    path.write_bytes(whole)
    assert load_model(path).classes
    with pytest.raises(ValueError, match="nested too deeply"):
        check_checksum((100_000).to_bytes(8, "little") + b"[" * 100_000)


def test_a_damaged_timing_stops_nothing(stopped: Path, finished: Path, tmp_path: Path):
    folder = copy(stopped, tmp_path / "run")
    timings = (folder / "timings.jsonl").read_bytes()
    large = b'{"round": 1, "seconds": 1%s}\n' % (400 * b"0")
    (folder / "timings.jsonl").write_bytes(b"{nonsense\n\xff\xfe\n" + large + timings[5:])
    runner.resume(folder)
    assert (folder / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    assert StoredRun.read(folder).seconds() is not None


def numbers(folder: Path) -> tuple[Any, ...]:
    """Return every number that somebody reads from a folder: of its rows, its summary, its split and its model."""
    run = StoredRun.read(folder)
    summary = {key: value for key, value in (run.summary or {}).items() if key != "seconds"}
    model: tuple[Any, ...] = ()
    if run.summary is not None:
        images = np.arange(2 * 64, dtype=np.uint8).reshape(2, 8, 8, 1)
        model = tuple(load_model(folder).probabilities(images).ravel().tolist())
    return json.dumps(run.rows), json.dumps(summary), json.dumps(run.split), model


def resumed(folder: Path) -> tuple[Any, ...]:
    """Go on with a run to its end, and return its numbers."""
    runner.resume(folder)
    return numbers(folder)


ACTS: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "flip": lambda data, chance: _flipped(data, chance),
    "cut": lambda data, chance: data[: chance.randrange(len(data))] if data else data,
    "delete": lambda data, chance: None,
}


def _flipped(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def damaged(folder: Path, to: Path, name: str, act: str, chance: random.Random, read: Callable[[Path], Any]) -> str:
    """Return what came of reading a copy in which one file is damaged: the sentence, or "equal"; fail else."""
    path = copy(folder, to) / name
    data = ACTS[act](path.read_bytes(), chance)
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    try:
        found = read(to)
    except UserError as error:
        return str(error)
    wanted = WANTED[0]
    if name == "split.json" and data is None:  # nothing is told of the split, which is no other number
        wanted = (*wanted[:2], "null", *wanted[3:])
    assert found == wanted, f"{name}, {act}: other numbers"
    return "equal"


WANTED: list[Any] = []


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("act", list(ACTS))
def test_a_damaged_file_is_refused_or_changes_no_number(stopped: Path, finished: Path, tmp_path: Path, act: str):
    """A place of each file of a finished run, and of a stopped one that goes on; the benchmark plays hundreds."""
    chance = random.Random(act)
    WANTED[:] = [numbers(finished)]
    for name in names(finished):
        damaged(finished, tmp_path / "run", name, act, chance, numbers)
    for name in chance.sample(names(stopped), 3):
        damaged(stopped, tmp_path / "run", name, act, chance, resumed)


@pytest.mark.parametrize("deleted", ["file", "line"])
def test_a_forged_summary_is_refused_without_its_checksum(finished: Path, tmp_path: Path, deleted: str):
    """The accuracy of an edited summary is no number of the run, whether its checksum differs or is gone."""
    folder = copy(finished, tmp_path / "run")
    path = folder / "summary.json"
    path.write_text(path.read_text().replace('"last": 0', '"last": 9'))
    sums = integrity.read_checksums(folder)
    (folder / integrity.CHECKSUMS).unlink()
    if deleted == "line":
        del sums["summary.json"]
        integrity.record_checksums(folder, sums)
    for read in (runner.resume, StoredRun.read, runner.finished_summary):
        with pytest.raises(UserError, match=r"checksums\.json has no checksum of \S+, .* --unchecked"):
            read(folder)
    with integrity.allow_missing_checksums():
        assert runner.resume(folder).summaries[0]["accuracy"]["last"] > 9


def test_a_split_without_its_checksum_is_refused(stopped: Path, tmp_path: Path):
    """A run that goes on deals the images by it; before the first checkpoint a kill may have left it without one."""
    folder = copy(stopped, tmp_path / "run")
    (folder / integrity.CHECKSUMS).unlink()
    with pytest.raises(UserError, match=r"no checksum of split\.parquet"):
        runner.resume(folder)
    for path in folder.glob("checkpoint-*"):
        path.unlink()
    (folder / "metrics.jsonl").unlink()
    assert runner.resume(folder).summaries[0]["finished"]


def test_a_folder_of_an_older_version_is_read_with_a_flag(finished: Path, tmp_path: Path, capsys: Any):
    """--unchecked says that nothing is compared; damaged checksums are refused all the same."""
    folder = copy(finished, tmp_path / "run")
    (folder / integrity.CHECKSUMS).unlink()
    arguments = ["report", str(folder), "--out", str(tmp_path / "page.html")]
    assert cli.main(arguments) == 2
    assert "use --unchecked" in capsys.readouterr().err
    assert cli.main([*arguments, "--unchecked"]) == 0
    assert "files without a checksum are not checked" in capsys.readouterr().err
    with integrity.allow_missing_checksums():
        assert numbers(folder) == numbers(finished)
        (folder / integrity.CHECKSUMS).write_text("{}")
        with pytest.raises(UserError, match=r"checksums\.json is damaged"):
            StoredRun.read(folder)


def test_a_digit_of_a_sweep_that_another_one_took_is_found(tmp_path: Path):
    """`sweep.json` carries its checksum: flipped or cut at 100 places it is refused, by sweep and report."""
    from halfmoon.report.study import read_sweep
    from halfmoon.studies.sweep_folder import parse_sweep_file

    path = tmp_path / "sweep.json"
    metadata = {"format": 1, "cells": [{"accuracy": 0.9112}] * 9, "title": "a sweep"}
    whole = integrity.format_checked_lines(metadata)
    assert parse_sweep_file(whole, path) == metadata
    chance = random.Random(5)
    for at in range(100):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        damaged = bytes(data) if at % 2 else whole[: chance.randrange(len(whole) - 1)]
        path.write_bytes(damaged)
        try:
            found = parse_sweep_file(damaged, path)
        except UserError:
            with pytest.raises(UserError, match=r"its checksum differs|cannot be read|has format"):
                read_sweep(path)
        else:  # the name of the checksum itself was hit: it reads as a file that has none
            assert {name: found[name] for name in metadata} == metadata
