"""The run folder: everything one run leaves on disk, in an order that survives being killed at any instant.

A file is written under a temporary name, flushed to the disk and renamed, so that a name that exists is whole. Of
a checkpoint's two files the JSON comes last and carries the checksum of the other; it commits the checkpoint. What
the clients keep lies in a folder of its own, of which a checkpoint writes what has changed (`halfmoon.store`).
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from halfmoon import checkpoint, disk
from halfmoon.checkpoint import CLIENTS
from halfmoon.errors import UserError
from halfmoon.manifest import START, Contents, Damaged, Mark, sweep
from halfmoon.packing import pack, with_metadata
from halfmoon.store import Store
from halfmoon.tree import Tree

KEPT = 2
"""How many checkpoints stay: the newest and the one to fall back on."""

CONFIG, RUN, METRICS, TIMINGS = "config.toml", "run.json", "metrics.jsonl", "timings.jsonl"
MODEL, SUMMARY, LOCK = "model.safetensors", "summary.json", ".lock"
# What a creation leaves that was killed before its config.toml.
_BEGUN = {LOCK, RUN, f".{RUN}{disk.PARTIAL}", f".{CONFIG}{disk.PARTIAL}"}
_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})\.(safetensors|json)")


class Unwritable(UserError):
    """The disk refused: it is full, or the folder may not be written; what was saved before is intact."""


class Busy(UserError):
    """Another process is running in the folder."""


class Loaded(NamedTuple):
    """A checkpoint that was read back."""

    round: int
    state: Tree
    meta: dict[str, Any]
    warnings: list[str]  # one sentence each: what was damaged and skipped
    clients: Contents  # for `Store.restore`


class RunFolder:
    """One run on disk; the first call that writes takes the folder's lock, `close` (or the process' end) frees it."""

    def __init__(self, path: Path, config: str, identity: str) -> None:
        """Describe a folder that exists; use `create` or `open`."""
        self.path = path
        self.config = config
        self.identity = identity
        self._lock: int | None = None
        self._saved: int | None = None  # the newest round known to be intact

    @classmethod
    def create(cls, path: Path, config: str, identity: str) -> RunFolder:
        """Make the folder of a new run with its `config.toml`; `identity` is a sha256 of what changes the numbers.

        Raise UserError if the folder holds a run or anything else, is in use, or cannot be written.
        """
        folder = cls(path, config, identity)
        cls.refuse(path, identity)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unwritable(
                f"{path}: the run folder cannot be made ({disk.reason(error)}); choose another --run-dir."
            ) from error
        folder._own()
        try:
            cls.refuse(path, identity)  # again: another process may have been faster
            head = {"identity": identity, "config": disk.digest(config.encode()), **checkpoint.versions()}
            # The head first: a folder with a config.toml alone may be the user's own.
            folder._write(RUN, disk.render(head))
            folder._write(CONFIG, config.encode())
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def refuse(cls, path: Path, identity: str) -> None:
        """Raise UserError where a new run cannot have this folder: it holds a run, or anything else."""
        try:
            _refuse_taken(path, identity)
        except OSError as error:
            raise Unwritable(
                f"{path}: the run folder cannot be made ({disk.reason(error)}); choose another --run-dir."
            ) from error

    @staticmethod
    def made(path: Path) -> bool:
        """Return whether a run was begun here; one that was killed while its folder was made was not."""
        return (path / RUN).exists() and not {entry.name for entry in path.iterdir()} <= _BEGUN

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of a run that exists; raise UserError if it is none or its configuration was changed."""
        head = disk.read_json(path / RUN)
        if head is not None and not cls.made(path):
            raise UserError(f"{path}: the run was stopped before its {CONFIG} was written; start it again.")
        if head is None or not isinstance(head.get("identity"), str):
            raise UserError(f"{path} is not a run folder (it has no readable {RUN}); give the folder of a run.")
        try:
            config = (path / CONFIG).read_bytes()
        except OSError as error:
            raise UserError(
                f"{path}: {CONFIG} cannot be read ({disk.reason(error)}); put it back or start a new run."
            ) from error
        if disk.digest(config) != head.get("config"):
            raise UserError(
                f"{path}: {CONFIG} was changed, so the folder belongs to another configuration "
                f"(it was made for {head['identity'][:8]}); undo the change, or start a run in another --run-dir."
            )
        try:
            return cls(path, config.decode(), head["identity"])
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: {CONFIG} is no text; put it back or start a new run.") from error

    def __enter__(self) -> RunFolder:
        """Return the folder; leaving the block closes it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the folder."""
        self.close()

    def __del__(self) -> None:
        """Close the folder."""
        self.close()

    def close(self) -> None:
        """Free the lock; the folder can still be read."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary() is not None

    def summary(self) -> dict[str, Any] | None:
        """Return what `finish` wrote, None before."""
        return disk.read_json(self.path / SUMMARY)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl`; a last line that was cut off is left out."""
        return disk.read_rows(self.path / METRICS)

    def log(self, row: dict[str, Any]) -> None:
        """Add a row to `metrics.jsonl`; a number that is not finite becomes null. Raise UserError if it cannot."""
        self._append(METRICS, row)

    def time(self, row: dict[str, Any]) -> None:
        """Add a row to `timings.jsonl`, which a resumed run need not repeat. Raise UserError if it cannot."""
        self._append(TIMINGS, row)

    def save(self, round: int, state: Tree, meta: dict[str, Any], clients: Store | None = None) -> None:
        """Write the checkpoint of a round and remove all but the last two.

        `meta` is anything JSON can hold. Of `clients`, which keeps its files in this folder from now on, what has
        changed since the last save is written. Raise UserError if the disk refuses; the checkpoints before are intact.
        A round may be saved again only with the same content (ValueError), as no older file is ever put at risk.
        """
        self._own()
        name = checkpoint.name(round)
        self._refuse_old(round, clients is not None and clients.changed)
        data, shape = pack(state)
        with self._writing(name):
            length = disk.flushed_length(self.path / METRICS)
        mark = self._committed(clients, round)
        note = {
            "round": round,
            "tensors": disk.digest(data),
            "shape": shape,
            "metrics": length,
            "clients": mark._asdict(),
            "meta": meta,
            **checkpoint.versions(),
        }
        sealed = checkpoint.seal(note)
        if round == self._saved:
            if disk.read(self.path / f"{name}.json") == sealed:
                return
            raise ValueError(f"round {round} cannot be saved: round {round} is on disk already")
        try:
            self._write(f"{name}.safetensors", data)
            self._write(f"{name}.json", sealed)
        except Unwritable:
            with suppress(OSError):
                self._remove(round)  # a half would take the place that is missing
            raise
        self._saved = round
        with self._writing("the folder"):
            rounds = self._rounds()
            for old in rounds[:-KEPT]:
                self._remove(old)
            if clients is not None:
                clients.prune(rounds[-KEPT:][0])

    def load(self) -> Loaded | None:
        """Return the newest checkpoint that is whole and cut `metrics.jsonl` back to it; None if none was written.

        Damaged checkpoints are skipped, removed and said in `warnings`; all that the clients keep is read once, as
        there is no checkpoint to fall back on later. Raise UserError if the run is finished, all
        checkpoints are damaged, or `metrics.jsonl` lost rows.
        """
        if self.finished:
            raise UserError(f"{self.path}: the run is finished; there is nothing to go on with.")
        self._own()
        rounds = self._rounds()
        problems: list[tuple[int, str]] = []
        for round in reversed(rounds):
            try:
                note, state, clients = checkpoint.read(self.path, round)
            except Damaged as damage:
                problems.append((round, str(damage)))
                continue
            self._rewind(note["metrics"])
            for bad, _ in problems:
                self._remove(bad)
            self._saved = round
            older = [each for each in rounds if each < round]
            for old in older[: 1 - KEPT]:  # a kill after a save has left them
                self._remove(old)
            with self._writing(CLIENTS):
                clients = sweep(clients, older[-1] if older else round)
            going = f"going on from {checkpoint.name(round)}"
            warnings = [f"{checkpoint.name(bad)} is damaged ({why}); {going}." for bad, why in problems]
            return Loaded(round, state, note["meta"], warnings + _version_warning(note), clients)
        if len(rounds) > 1 or (rounds and (self.path / f"{checkpoint.name(rounds[0])}.json").exists()):
            what = "; ".join(f"{checkpoint.name(bad)}: {why}" for bad, why in problems)
            raise UserError(
                f"{self.path}: every checkpoint is damaged ({what}); restore one from a backup, "
                "or start the run again in another --run-dir."
            )
        # One file without its JSON is a first save that was killed: the run starts again.
        self._rewind(0)
        for round in rounds:
            self._remove(round)
        with self._writing(CLIENTS):
            sweep(Contents(self.path / CLIENTS, START, -1, {}, []), 0)
        return None

    def finish(self, model: Tree, meta: dict[str, str], summary: dict[str, Any]) -> None:
        """Write `model.safetensors` with `meta` as its metadata, then `summary.json`, which ends the run."""
        self._own()
        self._write(MODEL, with_metadata(pack(model)[0], meta))
        self.conclude(summary)

    def conclude(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`, which ends the run."""
        self._own()
        # A key a line: a confusion of 200 classes would have 40,000 lines.
        parts = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in disk.finite(summary).items())
        self._write(SUMMARY, ("{\n " + ",\n ".join(parts) + "\n}\n").encode())

    def _own(self) -> None:
        if self._lock is not None:
            return
        try:
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise Unwritable(
                f"{self.path}: the folder cannot be written ({disk.reason(error)}); make it writable "
                "or choose another --run-dir."
            ) from error
        try:
            disk.flock(handle)
        except OSError as error:
            os.close(handle)
            raise Busy(
                f"another process is running in {self.path}; wait for it, or choose another --run-dir."
            ) from error
        self._lock = handle

    def _refuse_old(self, round: int, changed: bool) -> None:
        """Raise ValueError for a round that is not after the newest on disk, or equal to it as far as can be known."""
        if self._saved is None:
            if self._rounds():
                raise ValueError(f"{self.path} holds checkpoints: load the newest before saving another")
        elif round < self._saved or (round == self._saved and changed):
            raise ValueError(f"round {round} cannot be saved: round {self._saved} is on disk already")

    def _committed(self, clients: Store | None, round: int) -> Mark:
        if clients is None:
            return START
        with self._writing(CLIENTS):
            clients.settle(self.path / CLIENTS)
            return clients.commit(round)

    def _rounds(self) -> list[int]:
        found = (_CHECKPOINT.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted({int(match[1]) for match in found if match})

    def _remove(self, round: int) -> None:
        # The JSON first: without it the other file is nothing.
        for suffix in ("json", "safetensors"):
            (self.path / f"{checkpoint.name(round)}.{suffix}").unlink(missing_ok=True)

    def _rewind(self, length: int) -> None:
        path = self.path / METRICS
        present = path.stat().st_size if path.exists() else 0
        if present < length:
            raise UserError(
                f"{path} has {present} bytes, but the checkpoint was written at {length}: rows are missing; "
                "restore the file, or start the run again in another --run-dir."
            )
        with self._writing(METRICS):
            disk.cut(path, length)
            timings = self.path / TIMINGS
            disk.cut(timings, (disk.read(timings) or b"").rfind(b"\n") + 1)
            for entry in list(self.path.iterdir()):
                if entry.name.endswith(disk.PARTIAL):
                    entry.unlink()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        line = (json.dumps(disk.finite(row), allow_nan=False) + "\n").encode()
        self._own()
        with self._writing(name):
            disk.append(self.path / name, line)

    def _write(self, name: str, data: bytes) -> None:
        with self._writing(name):
            disk.replace(self.path / name, data)

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            intact = (
                "no checkpoint was written yet"
                if self._saved is None
                else f"the checkpoint of round {self._saved} is intact"
            )
            cure = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
            made = (self.path / CONFIG).exists()
            raise Unwritable(
                f"{self.path}: {what} cannot be written ({disk.reason(error)}); {intact}. "
                f"First {cure}, then {f'go on with: {_resume(self.path)}' if made else 'start the run again.'}"
            ) from error


def _refuse_taken(path: Path, identity: str) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a folder; choose another --run-dir.")
    head = disk.read_json(path / RUN)
    others = {e.name for e in path.iterdir()} - _BEGUN
    if head is None or not others:
        # Without others: empty, or a creation that was killed before its config.toml.
        if others:
            raise UserError(f"{path} is not empty and holds no run; choose another --run-dir.")
        return
    if head.get("identity") != identity:
        raise UserError(
            f"{path} holds a run of another configuration ({str(head.get('identity'))[:8]}, this one is "
            f"{identity[:8]}); choose another --run-dir, or `{_resume(path)}` to go on with that one."
        )
    state = "an unfinished" if disk.read_json(path / SUMMARY) is None else "a finished"
    raise UserError(
        f"{path} holds {state} run of this configuration; `{_resume(path)}` goes on with it, "
        "or choose another --run-dir."
    )


def _version_warning(note: dict[str, Any]) -> list[str]:
    changed = [f"{name} {note[name]} (now {now})" for name, now in checkpoint.versions().items() if note[name] != now]
    if not changed:
        return []
    return [f"the checkpoint was written by {' and '.join(changed)}; the last digits may differ from here on."]


def _resume(path: Path) -> str:
    return f"halfmoon resume {shlex.quote(str(path))}"
