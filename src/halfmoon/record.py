"""The run folder: everything one run leaves on disk, in an order that survives being killed at any instant.

A file is written under a temporary name, flushed to the disk and renamed, so that a name that exists is whole. Of
a checkpoint's two files the JSON comes last and carries the checksum of the other; it commits the checkpoint.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from halfmoon import disk
from halfmoon.errors import UserError
from halfmoon.tree import Tree, flatten

KEPT = 2
"""How many checkpoints stay: the newest and the one to fall back on."""

CONFIG, RUN, METRICS, TIMINGS = "config.toml", "run.json", "metrics.jsonl", "timings.jsonl"
MODEL, SUMMARY, LOCK = "model.safetensors", "summary.json", ".lock"
# What a creation leaves that was killed before its config.toml.
_BEGUN = {LOCK, RUN, f".{RUN}{disk.PARTIAL}", f".{CONFIG}{disk.PARTIAL}"}
_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})\.(safetensors|json)")


class Unwritable(UserError):
    """The disk refused: it is full, or the folder may not be written; what was saved before is intact."""


class Loaded(NamedTuple):
    """A checkpoint that was read back."""

    round: int
    state: Tree
    meta: dict[str, Any]
    warnings: list[str]  # one sentence each: what was damaged and skipped


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
            head = {"identity": identity, "config": disk.digest(config.encode()), **_versions()}
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
        return cls(path, config.decode(), head["identity"])

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

    def save(self, round: int, state: Tree, meta: dict[str, Any]) -> None:
        """Write the checkpoint of a round and remove all but the last two.

        `meta` is anything JSON can hold. Raise UserError if the disk refuses; the checkpoints before are intact.
        A round may be saved again only with the same content (ValueError), as no older file is ever put at risk.
        """
        self._own()
        name = _name(round)
        data, shape = _pack(state)
        with self._writing(name):
            length = disk.flushed_length(self.path / METRICS)
        note = {
            "round": round,
            "tensors": disk.digest(data),
            "shape": shape,
            "metrics": length,
            "meta": meta,
            **_versions(),
        }
        sealed = _seal(note)
        if self._saved is not None and round <= self._saved:
            if round == self._saved and disk.read(self.path / f"{name}.json") == sealed:
                return
            raise ValueError(f"round {round} cannot be saved: round {self._saved} is on disk already")
        if self._saved is None and self._rounds():
            raise ValueError(f"{self.path} holds checkpoints: load the newest before saving another")
        try:
            self._write(f"{name}.safetensors", data)
            self._write(f"{name}.json", sealed)
        except Unwritable:
            with suppress(OSError):
                self._remove(round)  # a half would take the place that is missing
            raise
        self._saved = round
        with self._writing("the folder"):
            for old in self._rounds()[:-KEPT]:
                self._remove(old)

    def load(self) -> Loaded | None:
        """Return the newest checkpoint that is whole and cut `metrics.jsonl` back to it; None if none was written.

        Damaged checkpoints are skipped, removed and said in `warnings`. Raise UserError if the run is finished, all
        checkpoints are damaged, or `metrics.jsonl` lost rows.
        """
        if self.finished:
            raise UserError(f"{self.path}: the run is finished; there is nothing to go on with.")
        self._own()
        rounds = self._rounds()
        problems: list[tuple[int, str]] = []
        for round in reversed(rounds):
            try:
                note, state = _read_checkpoint(self.path, round)
            except _Damaged as damage:
                problems.append((round, str(damage)))
                continue
            self._rewind(note["metrics"])
            for bad, _ in problems:
                self._remove(bad)
            self._saved = round
            warnings = [f"{_name(bad)} is damaged ({why}); going on from {_name(round)}." for bad, why in problems]
            return Loaded(round, state, note["meta"], warnings + _version_warning(note))
        if len(rounds) > 1 or (rounds and (self.path / f"{_name(rounds[0])}.json").exists()):
            what = "; ".join(f"{_name(bad)}: {why}" for bad, why in problems)
            raise UserError(
                f"{self.path}: every checkpoint is damaged ({what}); restore one from a backup, "
                "or start the run again in another --run-dir."
            )
        # One file without its JSON is a first save that was killed: the run starts again.
        self._rewind(0)
        for round in rounds:
            self._remove(round)
        return None

    def finish(self, model: Tree, meta: dict[str, str], summary: dict[str, Any]) -> None:
        """Write `model.safetensors` with `meta` as its metadata, then `summary.json`, which ends the run."""
        self._own()
        self._write(MODEL, _with_metadata(safetensors.torch.save(_plain(model)), meta))
        self._write(SUMMARY, (json.dumps(disk.finite(summary), indent=1) + "\n").encode())

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
            raise UserError(
                f"another process is running in {self.path}; wait for it, or choose another --run-dir."
            ) from error
        self._lock = handle

    def _rounds(self) -> list[int]:
        found = (_CHECKPOINT.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted({int(match[1]) for match in found if match})

    def _remove(self, round: int) -> None:
        # The JSON first: without it the other file is nothing.
        for suffix in ("json", "safetensors"):
            (self.path / f"{_name(round)}.{suffix}").unlink(missing_ok=True)

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


class _Damaged(Exception):
    """Why a checkpoint cannot be used."""


def _read_checkpoint(folder: Path, round: int) -> tuple[dict[str, Any], Tree]:
    sealed, data = disk.read(folder / f"{_name(round)}.json"), disk.read(folder / f"{_name(round)}.safetensors")
    if sealed is None:
        raise _Damaged("it was not completed: the .json is missing")
    if data is None:
        raise _Damaged("its .safetensors is missing")
    note = _unseal(sealed)
    if disk.digest(data) != note["tensors"]:
        raise _Damaged("checksum differs")
    return note, _unpack(data, note["shape"])


def _seal(note: dict[str, Any]) -> bytes:
    return disk.render({**note, "sha256": disk.digest(disk.render(note))})


def _unseal(data: bytes) -> dict[str, Any]:
    try:
        note = json.loads(data)
        seal = note.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _Damaged("its .json is unreadable") from error
    # The bytes are compared, not the values: a changed blank would parse to the same values.
    if disk.digest(disk.render(note)) != seal or _seal(note) != data:
        raise _Damaged("checksum of its .json differs")
    return note


def _pack(state: Tree) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes of the tensors and the tree's shape, which safetensors does not keep.

    The shape is the tree with None at its leaves, or the order of dimensions in memory where a leaf lies permuted
    (channels last). The order of keys and of memory are part of the state: sums are taken in it, so a run that
    goes on without them would differ in the last digits.
    """
    return safetensors.torch.save(_plain(state)), _shape(state)


def _with_metadata(data: bytes, meta: dict[str, str]) -> bytes:
    """Put metadata into the header of a safetensors file.

    The library's own writer orders metadata by a hash that differs from process to process, and so would the file.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps({"__metadata__": meta, **json.loads(data[8:end])}).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[end:]


def _shape(state: Tree) -> dict[str, Any]:
    return {key: _shape(value) if isinstance(value, dict) else _order(value) for key, value in state.items()}


def _order(leaf: Tensor) -> list[int] | None:
    if leaf.is_contiguous():
        return None
    order = sorted(range(leaf.dim()), key=lambda d: (-leaf.stride(d), d))
    return order if leaf.permute(order).is_contiguous() else None


def _unpack(data: bytes, shape: dict[str, Any]) -> Tree:
    flat = safetensors.torch.load(data)

    def fill(node: dict[str, Any], prefix: str) -> Tree:
        return {
            key: fill(value, f"{prefix}{key}/") if isinstance(value, dict) else _laid(flat[f"{prefix}{key}"], value)
            for key, value in node.items()
        }

    return fill(shape, "")


def _laid(leaf: Tensor, order: list[int] | None) -> Tensor:
    if order is None:
        return leaf
    return leaf.permute(order).contiguous().permute([order.index(d) for d in range(leaf.dim())])


def _plain(tree: Tree) -> dict[str, Tensor]:
    # A clone a leaf: safetensors refuses tensors that share memory.
    return {
        path: leaf.detach().cpu().clone(memory_format=torch.contiguous_format) for path, leaf in flatten(tree).items()
    }


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
    changed = [f"{name} {note[name]} (now {now})" for name, now in _versions().items() if note[name] != now]
    if not changed:
        return []
    return [f"the checkpoint was written by {' and '.join(changed)}; the last digits may differ from here on."]


def _versions() -> dict[str, str]:
    try:
        own = version("halfmoon")
    except PackageNotFoundError:  # run from its source
        own = "unknown"
    return {"halfmoon": own, "torch": torch.__version__}


def _resume(path: Path) -> str:
    return f"halfmoon resume {shlex.quote(str(path))}"


def _name(round: int) -> str:
    return f"checkpoint-{round:06d}"
