"""The checkpoints of a run folder: the newest two, with what clients keep and the length of the metrics.

Of a checkpoint's two files the JSON comes last and carries the checksum of the other; it commits the checkpoint. What
the clients keep lies in a folder of its own, of which a checkpoint writes what has changed
(`halfmoon.storage.state_store`).
"""

import re
import shutil
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.folder_writer import FolderWriter, WriteError
from halfmoon.storage.manifest import START, Commit, DamagedFile, StoreContents, remove_unreferenced, verify
from halfmoon.storage.serialization import pack, unpack
from halfmoon.storage.state_store import TreeStore

CLIENTS = "clients"
"""The folder, in that of the run, of what clients keep."""

CHECKPOINTS = 2
"""How many checkpoints stay: the newest and the one to fall back on."""

METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})\.(safetensors|json)")


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was read back."""

    round: int
    state: Tree
    meta: dict[str, Any]
    warnings: list[str]  # one sentence each: what was damaged and skipped
    clients: StoreContents  # for `TreeStore.restore`


class Checkpoints:
    """Saves and loads the checkpoints in a writer's folder, and cuts `metrics`, the rows of the run, back to them."""

    def __init__(self, writer: FolderWriter, metrics: integrity.HashedLog) -> None:
        self.writer, self.metrics, self.path = writer, metrics, writer.path

    def save(self, round: int, state: Tree, meta: dict[str, Any], clients: TreeStore | None = None) -> None:
        """Write the checkpoint of a round, as `halfmoon.storage.run_folder.RunFolder.save` says."""
        self.writer.own()
        name = stem(round)
        self._refuse_old(round, clients is not None and clients.changed)
        data, shape = pack(state)
        with self.writer.writing(name):
            length = atomic_io.flush_and_measure(self.path / METRICS)
        mark = self._committed(clients, round)
        note = {
            "round": round,
            "tensors": atomic_io.sha256(data),
            "shape": shape,
            "metrics": length,
            "metrics_sha256": self.metrics.digest,
            "clients": mark._asdict(),
            "meta": meta,
            **versions(),
        }
        unparsed = integrity.seal(note)
        if round == self.writer.saved:
            if atomic_io.read(self.path / f"{name}.json") == unparsed:
                return
            raise ValueError(f"round {round} cannot be saved: round {round} is on disk already")
        try:
            self.writer.write(f"{name}.safetensors", data)
            self.writer.write(f"{name}.json", unparsed)
        except WriteError:
            with suppress(OSError):
                self._remove(round)  # a half would take the place that is missing
            raise
        self.writer.saved = round
        self._keep(clients)

    def _keep(self, clients: TreeStore | None = None) -> None:
        """Remove all checkpoints but the newest ones, and what only these say of the clients."""
        with self.writer.writing("the folder"):
            rounds = self._rounds()
            for old in rounds[:-CHECKPOINTS]:
                self._remove(old)
            if clients is not None:
                clients.prune(rounds[-CHECKPOINTS:][0])

    def clear(self) -> None:
        """Remove all checkpoints and what the clients keep: a finished run has nothing to go on with."""
        with self.writer.writing("the folder"):
            for round in self._rounds():
                self._remove(round)
            if (self.path / CLIENTS).exists():
                shutil.rmtree(self.path / CLIENTS)

    def load(self) -> LoadedCheckpoint | None:
        """Return the newest checkpoint that is whole, as `halfmoon.storage.run_folder.RunFolder.load` says."""
        self.writer.own()
        rounds = self._rounds()
        problems: list[tuple[int, str]] = []
        for round in reversed(rounds):
            try:
                note, state, clients = _read(self.path, round)
            except DamagedFile as damage:
                problems.append((round, str(damage)))
                continue
            self._rewind(note["metrics"], note["metrics_sha256"])
            for bad, _ in problems:
                self._remove(bad)
            self.writer.saved = round
            older = [each for each in rounds if each < round]
            self._keep()  # a kill after a save has left others
            with self.writer.writing(CLIENTS):
                clients = remove_unreferenced(clients, older[-1] if older else round)
            going = f"going on from {stem(round)}"
            warnings = [f"{stem(bad)} is damaged ({why}); {going}." for bad, why in problems]
            warnings += [f"{CLIENTS}/{name} was damaged: it is whole again from its copy." for name in clients.mended]
            return LoadedCheckpoint(round, state, note["meta"], warnings + _version_warning(note), clients)
        if len(rounds) > 1 or (rounds and (self.path / f"{stem(rounds[0])}.json").exists()):
            what = "; ".join(f"{stem(bad)}: {why}" for bad, why in problems)
            raise UserError(
                f"{self.path}: every checkpoint is damaged ({what})",
                option="run_dir",
                hint="restore one from a backup, or start the run again in another {run_dir}.",
            )
        # One file without its JSON is a first save that was killed: the run starts again.
        self._rewind(0, atomic_io.sha256(b""))
        for round in rounds:
            self._remove(round)
        with self.writer.writing(CLIENTS):
            remove_unreferenced(StoreContents(self.path / CLIENTS, START, -1, {}, []), 0)
        return None

    def _refuse_old(self, round: int, changed: bool) -> None:
        """Raise ValueError for a round that is not after the newest on disk, or equal to it as far as can be known."""
        if self.writer.saved is None:
            if self._rounds():
                raise ValueError(f"{self.path} holds checkpoints: load the newest before saving another")
        elif round < self.writer.saved or (round == self.writer.saved and changed):
            raise ValueError(f"round {round} cannot be saved: round {self.writer.saved} is on disk already")

    def _committed(self, clients: TreeStore | None, round: int) -> Commit:
        if clients is None:
            return START
        with self.writer.writing(CLIENTS):
            clients.settle(self.path / CLIENTS)
            return clients.commit(round)

    def _rounds(self) -> list[int]:
        matches = (_CHECKPOINT.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted({int(match[1]) for match in matches if match})

    def _remove(self, round: int) -> None:
        # The JSON first: without it the other file is nothing.
        for suffix in ("json", "safetensors"):
            (self.path / f"{stem(round)}.{suffix}").unlink(missing_ok=True)

    def _rewind(self, length: int, digest: str) -> None:
        path = self.path / METRICS
        self.metrics.rewind(length, digest)
        with self.writer.writing(METRICS):
            atomic_io.truncate(path, length)
            with suppress(OSError):
                timings = self.path / TIMINGS
                atomic_io.truncate(timings, (atomic_io.read(timings) or b"").rfind(b"\n") + 1)
            for entry in list(self.path.iterdir()):
                if entry.name.endswith(atomic_io.PARTIAL):
                    entry.unlink()


def _version_warning(note: dict[str, Any]) -> list[str]:
    changed = [f"{name} {note[name]} (now {now})" for name, now in versions().items() if note[name] != now]
    if not changed:
        return []
    return [f"the checkpoint was written by {' and '.join(changed)}; the last digits may differ from here on."]


def _read(folder: Path, round: int) -> tuple[dict[str, Any], Tree, StoreContents]:
    unparsed = atomic_io.read(folder / f"{stem(round)}.json")
    data = atomic_io.read(folder / f"{stem(round)}.safetensors")
    if unparsed is None:
        raise DamagedFile("it was not completed: the .json is missing")
    if data is None:
        raise DamagedFile("its .safetensors is missing")
    try:
        note = integrity.unseal(unparsed)
    except integrity.BrokenSeal as error:
        raise DamagedFile(f"its .json cannot be used: {error}") from error
    if atomic_io.sha256(data) != note.get("tensors"):
        raise DamagedFile("checksum differs")
    if "clients" not in note:
        raise DamagedFile("an older halfmoon wrote it, which kept the clients elsewhere")
    mark = _checked(note, round)
    try:
        state = unpack(data, note["shape"])
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedFile("its tensors are not those that its .json names") from error
    return note, state, verify(folder / CLIENTS, mark)


def _checked(note: dict[str, Any], round: int) -> Commit:
    kinds = {"shape": dict, "metrics": int, "metrics_sha256": str, "meta": dict, **dict.fromkeys(versions(), str)}
    wrong = [name for name, kind in kinds.items() if type(note.get(name)) is not kind]
    if wrong or note.get("round") != round or note["metrics"] < 0:
        raise DamagedFile(f"its .json has no usable {wrong[0] if wrong else 'round and metrics'}")
    mark = note["clients"]
    fine = isinstance(mark, dict) and set(mark) == set(Commit._fields)
    if not fine or type(mark["length"]) is not int or mark["length"] < 0 or type(mark["chain"]) is not str:
        raise DamagedFile("its .json does not say what the clients keep")
    return Commit(**mark)


def versions() -> dict[str, str]:
    return {"halfmoon": _own(), "torch": torch.__version__}


@cache
def _own() -> str:
    # Looked up once: finding and parsing a package's metadata takes as long as all the rest of a small checkpoint.
    try:
        return version("halfmoon")
    except PackageNotFoundError:  # run from its source
        return "unknown"


def stem(round: int) -> str:
    return f"checkpoint-{round:06d}"
