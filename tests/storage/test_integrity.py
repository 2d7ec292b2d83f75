"""Check checksums: a file that changed on disk is refused with one sentence, or changes no number."""

import random
from pathlib import Path
from typing import Any

import pytest
from damaged_folders import (
    DAMAGES,
    ROUNDS,
    RUN_OPTIONS,
    copy_folder,
    list_files,
    read_damaged,
    read_numbers,
    resume_and_read_numbers,
)
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    runner.run_in_folder(Config(**RUN_OPTIONS, rounds=ROUNDS), folder)
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the same run, stopped after two rounds."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(KeyboardInterrupt):
        runner.run_in_folder(Config(**RUN_OPTIONS, rounds=ROUNDS), folder, InterruptAfterRound(ROUNDS - 1))
    return folder


def test_checksum_detects_every_changed_bit():
    """A bit of a value, of a key, of the checksum or of white space; the intact object is parsed."""
    data = format_checked({"a": [1, 2.5], "b": {"c": "ä"}})
    assert parse_checked(data) == {"a": [1, 2.5], "b": {"c": "ä"}}
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            with pytest.raises(ChecksumError):
                parse_checked(bytes(changed))
    for cut in (data[:-1], b"", b"[]", b"{}", b"7"):
        with pytest.raises(ChecksumError):
            parse_checked(cut)


def test_changed_digit_of_an_accuracy_is_detected(stopped: Path, finished: Path, tmp_path: Path):
    """In a stopped run by the checkpoint (resume and report), in a finished one by its checksum."""
    for source, calls in ((stopped, (runner.resume, StoredRun.read)), (finished, (StoredRun.read,))):
        for call in calls:
            path = copy_folder(source, tmp_path / "run") / "metrics.jsonl"
            text = path.read_text()
            at = text.index('"accuracy": ') + len('"accuracy": 0.')
            path.write_text(text[:at] + str((int(text[at]) + 3) % 10) + text[at + 1 :])
            with pytest.raises(UserError, match=r"metrics\.jsonl was changed since it was written"):
                call(tmp_path / "run")


def test_changed_bit_of_a_finished_model_is_detected(finished: Path, tmp_path: Path):
    whole = (finished / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    for at in (len(whole) - 1, len(whole) // 2, 20):
        changed = bytearray(whole)
        changed[at] ^= 0x40
        path.write_bytes(changed)
        with pytest.raises(UserError):
            load_model(path)
    path.write_bytes(whole)
    assert load_model(path).classes
    with pytest.raises(ValueError, match="nested too deeply"):
        check_checksum((100_000).to_bytes(8, "little") + b"[" * 100_000)


def test_damaged_timings_do_not_stop_a_run(stopped: Path, finished: Path, tmp_path: Path):
    folder = copy_folder(stopped, tmp_path / "run")
    timings = (folder / "timings.jsonl").read_bytes()
    large = b'{"round": 1, "seconds": 1%s}\n' % (400 * b"0")
    (folder / "timings.jsonl").write_bytes(b"{nonsense\n\xff\xfe\n" + large + timings[5:])
    runner.resume(folder)
    assert (folder / "model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    assert StoredRun.read(folder).seconds() is not None


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damaged_file_is_refused_or_changes_no_number(stopped: Path, finished: Path, tmp_path: Path, damage: str):
    """Damage each file of a finished run, and some of a stopped one that resumes; benchmarks/faults.py tries hundreds."""
    generator = random.Random(damage)
    expected = read_numbers(finished)
    for name in list_files(finished):
        read_damaged(finished, tmp_path / "run", name, damage, generator, read_numbers, expected)
    for name in generator.sample(list_files(stopped), 3):
        read_damaged(stopped, tmp_path / "run", name, damage, generator, resume_and_read_numbers, expected)


@pytest.mark.parametrize("deleted", ["file", "line"])
def test_a_forged_summary_is_refused_without_its_checksum(finished: Path, tmp_path: Path, deleted: str):
    """An edited summary is refused whether its checksum differs or is missing."""
    folder = copy_folder(finished, tmp_path / "run")
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
    """A resumed run needs the split; before the first checkpoint a killed run may not have stored its checksum."""
    folder = copy_folder(stopped, tmp_path / "run")
    (folder / integrity.CHECKSUMS).unlink()
    with pytest.raises(UserError, match=r"no checksum of split\.parquet"):
        runner.resume(folder)
    for path in folder.glob("checkpoint-*"):
        path.unlink()
    (folder / "metrics.jsonl").unlink()
    assert runner.resume(folder).summaries[0]["finished"]


def test_a_folder_of_an_older_version_is_read_with_a_flag(finished: Path, tmp_path: Path, capsys: Any):
    """--unchecked skips the comparison, with a warning; damaged checksums are refused nevertheless."""
    folder = copy_folder(finished, tmp_path / "run")
    (folder / integrity.CHECKSUMS).unlink()
    arguments = ["report", str(folder), "--out", str(tmp_path / "page.html")]
    assert cli.main(arguments) == 2
    assert "use --unchecked" in capsys.readouterr().err
    assert cli.main([*arguments, "--unchecked"]) == 0
    assert "files without a checksum are not checked" in capsys.readouterr().err
    with integrity.allow_missing_checksums():
        assert read_numbers(folder) == read_numbers(finished)
        (folder / integrity.CHECKSUMS).write_text("{}")
        with pytest.raises(UserError, match=r"checksums\.json is damaged"):
            StoredRun.read(folder)


def test_changed_byte_of_a_sweep_file_is_detected(tmp_path: Path):
    """`sweep.json` contains its checksum: flipped or truncated at 100 positions it is refused, by sweep and report."""
    from halfmoon.report.study import read_sweep
    from halfmoon.studies.sweep_folder import parse_sweep_file

    path = tmp_path / "sweep.json"
    metadata = {"format": 1, "cells": [{"accuracy": 0.9112}] * 9, "title": "a sweep"}
    whole = integrity.format_checked_lines(metadata)
    assert parse_sweep_file(whole, path) == metadata
    generator = random.Random(5)
    for at in range(100):
        data = bytearray(whole)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        damaged = bytes(data) if at % 2 else whole[: generator.randrange(len(whole) - 1)]
        path.write_bytes(damaged)
        try:
            found = parse_sweep_file(damaged, path)
        except UserError:
            with pytest.raises(UserError, match=r"its checksum differs|cannot be read|has format"):
                read_sweep(path)
        else:  # the key of the checksum itself was changed: the file is read as one without a checksum
            assert {name: found[name] for name in metadata} == metadata
