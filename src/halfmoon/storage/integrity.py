"""Checksums of a run folder: every file that a number is read from is compared with one before it is believed.

A disk may change a bit, cut a file or lose it, and JSON and tensors can look sound all the same: one digit of an
accuracy, one exponent of a weight. So there are

- `checksums.json`: the SHA-256 of files that are written once (the split, and at the end metrics, model and summary),
- the seal of a JSON object: its key "sha256" is the SHA-256 of the object's own text without it (`sweep.json` too),
- in a checkpoint's JSON the length and the SHA-256 of `metrics.jsonl` at that round (`halfmoon.storage.run_folder`).

This finds damage, not malice: whoever can write a folder can write its checksums.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.storage import atomic_io

CHECKSUMS = "checksums.json"
KEY = "sha256"
METRICS, SUMMARY = "metrics.jsonl", "summary.json"
_NOTE = re.compile(r"checkpoint-\d{6,}\.json")


class BrokenSeal(ValueError):
    """An object whose seal is missing or is not its own."""


def seal(facts: Mapping[str, Any]) -> bytes:
    """Return a line of JSON that carries the checksum of the rest of it."""
    return atomic_io.json_line({**facts, KEY: atomic_io.sha256(atomic_io.json_line(dict(facts)))})


def unseal(data: bytes) -> dict[str, Any]:
    """Return the object in a line of `seal`; raise `BrokenSeal` where a bit of it is another one."""
    try:
        facts = atomic_io.parse_json(data)
        checksum = facts.pop(KEY)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BrokenSeal("it is unreadable") from error
    # The bytes are compared, not the values: a changed blank would parse to the same values.
    if atomic_io.sha256(atomic_io.json_line(facts)) != checksum or seal(facts) != data:
        raise BrokenSeal("its checksum differs")
    return facts


def seal_lines(facts: Mapping[str, Any]) -> bytes:
    """Return JSON over several lines that carries the checksum of the rest of it, for a file that people read."""
    text = json.dumps(dict(facts), indent=1).encode()
    return json.dumps({**facts, KEY: atomic_io.sha256(text)}, indent=1).encode() + b"\n"


def unseal_lines(data: bytes) -> dict[str, Any]:
    """Return the object of `seal_lines`, or one without a checksum; raise `BrokenSeal` where a bit is another one."""
    try:
        facts = atomic_io.parse_json(data)
        checksum = facts.pop(KEY, None)
    except (ValueError, AttributeError, TypeError) as error:
        raise BrokenSeal("it is unreadable") from error
    if checksum is not None and seal_lines(facts) != data:
        raise BrokenSeal("its checksum differs")
    return facts


def file_sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file, None where there is none; raise OSError as the system does."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of a folder's files, by name; {} where none were written. Raise UserError for damage."""
    data = atomic_io.read(folder / CHECKSUMS)
    if data is None:
        return {}
    try:
        files = unseal(data)["files"]
    except (BrokenSeal, LookupError) as error:
        raise UserError(
            f"{folder / CHECKSUMS} is damaged ({error})",
            option="unchecked",
            hint="put it back from a backup, or remove it and use {unchecked} to read the folder as it is.",
        ) from error
    return {str(name): str(value) for name, value in files.items()}


def record_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write checksums of more files of a folder down; raise OSError as the system does."""
    try:
        files = read_checksums(folder)
    except UserError:  # it is about to be written anew
        files = {}
    atomic_io.write_atomically(folder / CHECKSUMS, seal({"files": dict(sorted({**files, **digests}.items()))}))


_UNCHECKED = [False]


@contextmanager
def allow_missing_checksums() -> Iterator[None]:
    """Let files without a checksum pass in this block: those of a folder that an older version wrote."""
    _UNCHECKED.append(True)
    try:
        yield
    finally:
        _UNCHECKED.pop()


def check_files(folder: Path, *names: str) -> None:
    """Raise UserError where one of these files is not the one that was written, or its checksum is missing.

    A file that is not there, and has no checksum, passes. So does any file of a run that has not begun: its checksums
    are written before its first checkpoint.
    """
    sums_by_name = read_checksums(folder)
    for name in names:
        if name not in sums_by_name:
            if not _UNCHECKED[-1] and (folder / name).exists() and _begun(folder):
                raise UserError(
                    f"{folder / CHECKSUMS} has no checksum of {name}, which may have been changed",
                    option="unchecked",
                    hint=f"put {CHECKSUMS} back from a backup, or use {{unchecked}} to read the folder as it is.",
                )
            continue
        try:
            digest = file_sha256(folder / name)
        except OSError as error:
            raise UserError(f"{folder / name} cannot be read ({atomic_io.error_reason(error)}).") from error
        if digest is None:
            raise UserError(f"{folder / name} is missing: put it back from a backup.")
        if digest != sums_by_name[name]:
            raise UserError(f"{folder / name} was changed since it was written (its checksum differs): restore it.")


def record_files(folder: Path, *names: str) -> None:
    record_checksums(folder, {name: digest for name in names if (digest := file_sha256(folder / name))})


def _begun(folder: Path) -> bool:
    return (folder / SUMMARY).exists() or any(_NOTE.fullmatch(path.name) for path in folder.iterdir())


def check_run(folder: Path) -> None:
    """Raise UserError where configuration, summary or rows of a run are not those that were written.

    Of a run that goes on, rows up to its newest checkpoint count; `run.json` has its configuration's checksum.
    """
    if (folder / SUMMARY).exists() or SUMMARY in read_checksums(folder):
        check_files(folder, "config.toml", SUMMARY, METRICS)
        return
    for name in ("config.toml", METRICS):
        if name in read_checksums(folder):
            check_files(folder, name)
    notes = sorted(path.name for path in folder.glob("checkpoint-*.json") if _NOTE.fullmatch(path.name))
    for name in reversed(notes):
        try:
            note = unseal(atomic_io.read(folder / name) or b"")
            length, digest = int(note["metrics"]), str(note["metrics_sha256"])
        except (BrokenSeal, LookupError, ValueError, TypeError):
            continue  # a damaged one, or one that is being removed: the one before counts
        if atomic_io.sha256((atomic_io.read(folder / METRICS) or b"")[:length]) != digest:
            raise UserError(
                f"{folder / METRICS} was changed since it was written (its first {length} bytes are not those that "
                f"{name} recorded)",
                option="run_dir",
                hint=f"restore it, {_OR_RESTART}.",
            )
        return


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Return what a finished run's summary says, None where it is not finished; raise UserError for a changed one."""
    facts = atomic_io.read_json(folder / SUMMARY)
    if facts is not None:
        check_files(folder, SUMMARY)
    return facts


class HashedLog:
    """A file that is only appended to, with a running hash of what this process knows to be in it."""

    def __init__(self, path: Path) -> None:
        self.path, self._hash = path, hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def add(self, data: bytes) -> None:
        self._hash.update(data)

    def verified(self) -> bytes:
        """Return what is in the file; raise UserError where it is not what was written."""
        data = atomic_io.read(self.path) or b""
        if atomic_io.sha256(data) != self.digest:
            raise UserError(
                f"{self.path} was changed while the run was in progress",
                option="run_dir",
                hint=f"restore it, {_OR_RESTART}.",
            )
        return data

    def rewind(self, length: int, digest: str) -> None:
        """Begin with the first bytes of the file as it is; raise UserError where they are not those of a checkpoint."""
        data = atomic_io.read(self.path) or b""
        if len(data) < length:
            raise UserError(
                f"{self.path} has {len(data)} bytes, but the checkpoint was written at {length}: rows are missing",
                option="run_dir",
                hint=f"restore the file, {_OR_RESTART}.",
            )
        self._hash = hashlib.sha256(data[:length])
        if self.digest != digest:
            raise UserError(
                f"{self.path} was changed since it was written (its first {length} bytes are not those that the "
                "checkpoint recorded)",
                option="run_dir",
                hint=f"restore it, {_OR_RESTART}.",
            )


_OR_RESTART = "or start the run again in another {run_dir}"


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a file with a seal or without, None where there is none or it is cut or changed."""
    facts = atomic_io.read_json(path)
    if facts is None or KEY not in facts:
        return facts
    try:
        return unseal(atomic_io.read(path) or b"")
    except BrokenSeal:
        return None
