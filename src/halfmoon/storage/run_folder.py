"""The run folder: everything one run leaves on disk, in an order that survives being killed at any instant.

A file is written under a temporary name, flushed to the disk and renamed, so that a name that exists is whole. Of
a checkpoint's two files the JSON comes last and carries the checksum of the other; it commits the checkpoint. What
the clients keep lies in a folder of its own, of which a checkpoint writes what has changed
(`halfmoon.storage.state_store`).
"""

from __future__ import annotations

import errno
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io, checkpoint, integrity, locks
from halfmoon.storage.checkpoint import CLIENTS
from halfmoon.storage.manifest import START, Commit, Contents, Damaged, sweep
from halfmoon.storage.serialization import pack, with_seal
from halfmoon.storage.state_store import Store

KEPT = 2
"""How many checkpoints stay: the newest and the one to fall back on."""

CONFIG, RUN, METRICS, TIMINGS = "config.toml", "run.json", "metrics.jsonl", "timings.jsonl"
MODEL, SUMMARY, LOCK = "model.safetensors", "summary.json", ".lock"
# What a creation leaves that was killed before its config.toml.
_BEGUN = {LOCK, f"{LOCK}{locks.OWNER}", RUN, f".{RUN}{atomic_io.PARTIAL}", f".{CONFIG}{atomic_io.PARTIAL}"}
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
        self._lock: locks.Lock | None = None
        self._saved: int | None = None  # the newest round known to be intact
        self._metrics = integrity.Appended(path / METRICS)

    @classmethod
    def create(cls, path: Path, config: str, identity: str) -> RunFolder:
        """Make the folder of a new run with its `config.toml`; `identity` is a sha256 of what changes the numbers.

        Raise UserError if the folder holds a run or anything else, is in use, or cannot be written.
        """
        folder = cls(path, config, identity)
        cls.refuse(path, identity)
        with _making(path):
            path.mkdir(parents=True, exist_ok=True)
        folder._own()
        try:
            cls.refuse(path, identity)  # again: another process may have been faster
            head = {"identity": identity, "config": atomic_io.digest(config.encode()), **checkpoint.versions()}
            # The head first: a folder with a config.toml alone may be the user's own.
            folder._write(RUN, integrity.seal(head))
            folder._write(CONFIG, config.encode())
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def refuse(cls, path: Path, identity: str) -> None:
        """Raise UserError where a new run cannot have this folder: it holds a run, or anything else."""
        with _making(path):
            _refuse_taken(path, identity)

    @staticmethod
    def made(path: Path) -> bool:
        """Return whether a run was begun here; one that was killed while its folder was made was not."""
        return (path / RUN).exists() and not {entry.name for entry in path.iterdir()} <= _BEGUN

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of a run that exists; raise UserError if it is none or its configuration was changed."""
        head = integrity.object_of(path / RUN)
        if head is not None and not cls.made(path):
            raise UserError(f"{path}: the run was stopped before its {CONFIG} was written; start it again.")
        if head is None or not isinstance(head.get("identity"), str):
            raise UserError(f"{path} is not a run folder (it has no readable {RUN}); give the folder of a run.")
        try:
            config = (path / CONFIG).read_bytes()
        except OSError as error:
            raise UserError(
                f"{path}: {CONFIG} cannot be read ({atomic_io.reason(error)}); put it back or start a new run."
            ) from error
        if atomic_io.digest(config) != head.get("config"):
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
            self._lock.free()
            self._lock = None

    @property
    def remark(self) -> str:
        """What there is to say of the folder's lock; nothing where the system keeps it."""
        return "" if self._lock is None else self._lock.remark

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.summary() is not None

    def summary(self) -> dict[str, Any] | None:
        """Return what `finish` wrote, None before; raise UserError where it was changed since."""
        return integrity.summary(self.path)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl`; a last line that was cut off is left out."""
        return atomic_io.read_rows(self.path / METRICS)

    def verified_rows(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl`; raise UserError where they are not those that were written from here."""
        return atomic_io.rows(self._metrics.verified(), self.path / METRICS)

    def log(self, row: dict[str, Any]) -> None:
        """Add a row to `metrics.jsonl`; a number that is not finite becomes null. Raise UserError if it cannot."""
        self._append(METRICS, row)

    def time(self, row: dict[str, Any]) -> None:
        """Add a row to `timings.jsonl`, which nothing depends on: where it cannot be written it is lost."""
        with suppress(Unwritable):
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
            length = atomic_io.flushed_length(self.path / METRICS)
        mark = self._committed(clients, round)
        note = {
            "round": round,
            "tensors": atomic_io.digest(data),
            "shape": shape,
            "metrics": length,
            "metrics_sha256": self._metrics.digest,
            "clients": mark._asdict(),
            "meta": meta,
            **checkpoint.versions(),
        }
        unparsed = integrity.seal(note)
        if round == self._saved:
            if atomic_io.read(self.path / f"{name}.json") == unparsed:
                return
            raise ValueError(f"round {round} cannot be saved: round {round} is on disk already")
        try:
            self._write(f"{name}.safetensors", data)
            self._write(f"{name}.json", unparsed)
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
            self._rewind(note["metrics"], note["metrics_sha256"])
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
            warnings += [f"{CLIENTS}/{name} was damaged: it is whole again from its copy." for name in clients.mended]
            return Loaded(round, state, note["meta"], warnings + _version_warning(note), clients)
        if len(rounds) > 1 or (rounds and (self.path / f"{checkpoint.name(rounds[0])}.json").exists()):
            what = "; ".join(f"{checkpoint.name(bad)}: {why}" for bad, why in problems)
            raise UserError(
                f"{self.path}: every checkpoint is damaged ({what}); restore one from a backup, "
                "or start the run again in another --run-dir."
            )
        # One file without its JSON is a first save that was killed: the run starts again.
        self._rewind(0, atomic_io.digest(b""))
        for round in rounds:
            self._remove(round)
        with self._writing(CLIENTS):
            sweep(Contents(self.path / CLIENTS, START, -1, {}, []), 0)
        return None

    def finish(self, model: Tree, meta: dict[str, str], summary: dict[str, Any]) -> None:
        """Write `model.safetensors` with `meta` as its metadata, then `summary.json`, which ends the run."""
        self._own()
        data = with_seal(pack(model)[0], meta)
        self._write(MODEL, data)
        self._note({MODEL: atomic_io.digest(data), METRICS: self._metrics.digest})
        self.conclude(summary)

    def conclude(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`, which ends the run."""
        self._own()
        data = _summarized(summary)
        # Before the summary, which ends the run: one that is there always has its checksum.
        self._note({SUMMARY: atomic_io.digest(data), CONFIG: atomic_io.digest(self.config.encode())})
        self._write(SUMMARY, data)

    def _note(self, digests: dict[str, str]) -> None:
        with self._writing(integrity.SUMS):
            integrity.note(self.path, digests)

    def _own(self) -> None:
        if self._lock is None:
            self._lock = _locked(self.path)

    def _refuse_old(self, round: int, changed: bool) -> None:
        """Raise ValueError for a round that is not after the newest on disk, or equal to it as far as can be known."""
        if self._saved is None:
            if self._rounds():
                raise ValueError(f"{self.path} holds checkpoints: load the newest before saving another")
        elif round < self._saved or (round == self._saved and changed):
            raise ValueError(f"round {round} cannot be saved: round {self._saved} is on disk already")

    def _committed(self, clients: Store | None, round: int) -> Commit:
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

    def _rewind(self, length: int, digest: str) -> None:
        path = self.path / METRICS
        self._metrics.rewind(length, digest)
        with self._writing(METRICS):
            atomic_io.cut(path, length)
            with suppress(OSError):
                timings = self.path / TIMINGS
                atomic_io.cut(timings, (atomic_io.read(timings) or b"").rfind(b"\n") + 1)
            for entry in list(self.path.iterdir()):
                if entry.name.endswith(atomic_io.PARTIAL):
                    entry.unlink()

    def _append(self, name: str, row: dict[str, Any]) -> None:
        line = (json.dumps(atomic_io.finite(row), allow_nan=False) + "\n").encode()
        self._own()
        with self._writing(name):
            atomic_io.append(self.path / name, line)
        if name == METRICS:
            self._metrics.add(line)

    def _write(self, name: str, data: bytes) -> None:
        with self._writing(name):
            atomic_io.replace(self.path / name, data)

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
                f"{self.path}: {what} cannot be written ({atomic_io.reason(error)}); {intact}. "
                f"First {cure}, then {f'go on with: {_resume(self.path)}' if made else 'start the run again.'}"
            ) from error


def _locked(path: Path) -> locks.Lock:
    try:
        return locks.take(path / LOCK)
    except locks.Held as error:
        who = f" ({error.strerror})" if error.strerror and locks.OWNER in error.strerror else ""
        raise Busy(f"another process is running in {path}{who}; wait for it, or choose another --run-dir.") from error
    except OSError as error:
        raise Unwritable(
            f"{path}: the folder cannot be written ({atomic_io.reason(error)}); make it writable "
            "or choose another --run-dir."
        ) from error


def _summarized(summary: dict[str, Any]) -> bytes:
    """Return a summary with a key a line: a confusion of 200 classes would have 40,000 lines."""
    parts = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in atomic_io.finite(summary).items())
    return ("{\n " + ",\n ".join(parts) + "\n}\n").encode()


@contextmanager
def _making(path: Path) -> Iterator[None]:
    """Say what the system does not want of a new folder."""
    try:
        yield
    except OSError as error:
        raise Unwritable(
            f"{path}: the run folder cannot be made ({atomic_io.reason(error)}); choose another --run-dir."
        ) from error


def _refuse_taken(path: Path, identity: str) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file, not a folder; choose another --run-dir.")
    head = atomic_io.read_json(path / RUN)
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
    state = "an unfinished" if atomic_io.read_json(path / SUMMARY) is None else "a finished"
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
