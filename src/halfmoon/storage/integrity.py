"""Checksums of a run folder, which are compared before any result is read from its files.

A disk may change a bit, truncate a file or lose it, and the JSON or the tensors can still parse, with a wrong digit of an
accuracy or a wrong exponent of a weight. Therefore a run folder has

- `checksums.json`: the SHA-256 of files that are written once (the split, and at the end metrics, model and summary),
- JSON objects with a checksum (`sweep.json` too): the key "sha256" is the SHA-256 of the object's text without this key,
- in a checkpoint's JSON the length and the SHA-256 of `metrics.jsonl` at that round (`halfmoon.storage.run_folder`).

This detects damage, not tampering: a person who can write the folder can also write its checksums.
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
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
_CHECKPOINT_NAME = re.compile(r"checkpoint-\d{6,}\.json")


class ChecksumError(ValueError):
    """A JSON object has no checksum, or its checksum differs."""


def format_checked(content: Mapping[str, Any]) -> bytes:
    """Format an object as one line of JSON with a checksum of its other keys."""
    return atomic_io.json_line({**content, KEY: atomic_io.sha256(atomic_io.json_line(dict(content)))})


def parse_checked(data: bytes) -> dict[str, Any]:
    """Parse JSON that `format_checked` wrote with a checksum, and verify the checksum.

    Args:
        data: the file's content.

    Returns:
        The object without the checksum.

    Raises:
        ChecksumError: it is no such JSON, or any bit was changed.
    """
    try:
        content = atomic_io.parse_json(data)
        checksum = content.pop(KEY)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ChecksumError("it is unreadable") from error
    # Compare bytes rather than values: a changed blank would parse to the same values.
    if atomic_io.sha256(atomic_io.json_line(content)) != checksum or format_checked(content) != data:
        raise ChecksumError("its checksum differs")
    return content


def format_checked_lines(content: Mapping[str, Any]) -> bytes:
    """Format an object as indented JSON with a checksum of its other keys, for a file that people read."""
    text = json.dumps(dict(content), indent=1).encode()
    return json.dumps({**content, KEY: atomic_io.sha256(text)}, indent=1).encode() + b"\n"


def parse_checked_lines(data: bytes) -> dict[str, Any]:
    """Parse JSON that `format_checked_lines` wrote on several lines with a checksum, and verify the checksum if there is one.

    A file of an older version has no checksum and is accepted. Returns the object without the checksum.

    Raises:
        ChecksumError: it is no such JSON, or any bit was changed.
    """
    try:
        content = atomic_io.parse_json(data)
        checksum = content.pop(KEY, None)
    except (ValueError, AttributeError, TypeError) as error:
        raise ChecksumError("it is unreadable") from error
    # Compare bytes rather than values, as in `parse_checked`: a changed blank would parse to the same values.
    if checksum is not None and format_checked_lines(content) != data:
        raise ChecksumError("its checksum differs")
    return content


def file_sha256(path: Path) -> str | None:
    """Compute the SHA-256 of a file, None if it does not exist; raise OSError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def read_checksums(folder: Path) -> dict[str, str]:
    """Read the file of checksums in a folder.

    Returns:
        The SHA-256 of each file by its name; {} if no checksums were written.

    Raises:
        UserError: the file is damaged.
    """
    data = atomic_io.read(folder / CHECKSUMS)
    if data is None:
        return {}
    try:
        files = parse_checked(data)["files"]
    except (ChecksumError, LookupError) as error:
        raise UserError(
            f"{folder / CHECKSUMS} is damaged ({error})",
            option="unchecked",
            hint="put it back from a backup, or remove it and use {unchecked} to read the folder as it is.",
        ) from error
    return {str(name): str(value) for name, value in files.items()}


def record_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Add checksums of files to those of a folder; raise OSError if they cannot be written."""
    try:
        files = read_checksums(folder)
    except UserError:  # a damaged file is replaced below
        files = {}
    atomic_io.write_atomically(
        folder / CHECKSUMS, format_checked({"files": dict(sorted({**files, **digests}.items()))})
    )


_UNCHECKED = [False]
"""A stack, so that `allow_missing_checksums` can be nested: the last value applies."""


@contextmanager
def allow_missing_checksums() -> Iterator[None]:
    """Accept files without a checksum in this block, for folders that an older version wrote."""
    _UNCHECKED.append(True)
    try:
        yield
    finally:
        _UNCHECKED.pop()


def check_files(folder: Path, *names: str) -> None:
    """Compare files of a run folder with their checksums in `checksums.json`.

    A file that does not exist and has no checksum passes. So does any file of a run before its first checkpoint, since
    checksums are written just before that, and a file without a checksum inside of `allow_missing_checksums`.

    Args:
        folder: the run folder.
        names: names of the files in it.

    Raises:
        UserError: if a file is missing, unreadable or changed, or its checksum is missing.
    """
    checksums = read_checksums(folder)
    missing_is_allowed = _UNCHECKED[-1]  # of the innermost `allow_missing_checksums`
    for name in names:
        if name not in checksums:
            if not missing_is_allowed and (folder / name).exists() and _has_checkpoint_or_summary(folder):
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
        if digest != checksums[name]:
            raise UserError(f"{folder / name} was changed since it was written (its checksum differs): restore it.")


def record_files(folder: Path, *names: str) -> None:
    """Record the checksums of files as they are now; a file that does not exist is skipped."""
    record_checksums(folder, {name: digest for name in names if (digest := file_sha256(folder / name))})


def _has_checkpoint_or_summary(folder: Path) -> bool:
    """Check whether a run has written a checkpoint or its summary, and so must have checksums."""
    return (folder / SUMMARY).exists() or any(_CHECKPOINT_NAME.fullmatch(path.name) for path in folder.iterdir())


def check_run(folder: Path) -> None:
    """Check that configuration, summary and metrics of a run are unchanged; raise UserError if they are not.

    The metrics of an unfinished run grow, so `checksums.json` does not have them. They are checked up to the newest
    readable checkpoint instead, whose JSON file has their length and SHA-256 at that round.
    """
    # A finished run has a summary; a checksum of a missing one means that the file was lost.
    if (folder / SUMMARY).exists() or SUMMARY in read_checksums(folder):
        check_files(folder, "config.toml", SUMMARY, METRICS)
        return
    for name in ("config.toml", METRICS):
        if name in read_checksums(folder):
            check_files(folder, name)
    notes = sorted(path.name for path in folder.glob("checkpoint-*.json") if _CHECKPOINT_NAME.fullmatch(path.name))
    for name in reversed(notes):
        try:
            note = parse_checked(atomic_io.read(folder / name) or b"")
            length = int(note["metrics"])
            digest = str(note["metrics_sha256"])
        except (ChecksumError, LookupError, ValueError, TypeError):
            continue  # damaged, or being removed by its run: use the previous one
        metrics = atomic_io.read(folder / METRICS) or b""
        if atomic_io.sha256(metrics[:length]) != digest:
            raise UserError(
                f"{folder / METRICS} was changed since it was written (its first {length} bytes are not those that "
                f"{name} recorded)",
                option="run_dir",
                hint=f"restore it, {_OR_RESTART}.",
            )
        return


def read_summary(folder: Path) -> dict[str, Any] | None:
    """Read a finished run's summary, None if the run is unfinished; raise UserError if the file was changed."""
    content = atomic_io.read_json(folder / SUMMARY)
    if content is not None:
        check_files(folder, SUMMARY)
    return content


class HashedLog:
    """An append-only file with a running hash of its expected content, which shows whether someone else changed it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = hashlib.sha256()

    @property
    def digest(self) -> str:
        """The SHA-256 of the expected content."""
        return self._hash.hexdigest()

    def add(self, data: bytes) -> None:
        """Add bytes that were appended to the file to the running hash."""
        self._hash.update(data)

    def read_verified(self) -> bytes:
        """Read the file; raise UserError if its content differs from the running hash."""
        data = atomic_io.read(self.path) or b""
        if atomic_io.sha256(data) != self.digest:
            raise UserError(
                f"{self.path} was changed while the run was in progress",
                option="run_dir",
                hint=f"restore it, {_OR_RESTART}.",
            )
        return data

    def rewind(self, length: int, digest: str) -> None:
        """Reset the running hash to the file's first bytes, as recorded by a checkpoint.

        Args:
            length: bytes of the file at the checkpoint; the file may be longer.
            digest: SHA-256 of these bytes.

        Raises:
            UserError: if the file is shorter or its bytes differ.
        """
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
    """Read a JSON object with or without a checksum, None if it is missing, truncated or changed."""
    content = atomic_io.read_json(path)
    if content is None or KEY not in content:
        return content
    try:
        return parse_checked(atomic_io.read(path) or b"")
    except ChecksumError:
        return None
