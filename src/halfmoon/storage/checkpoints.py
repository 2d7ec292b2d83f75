"""The checkpoints of a run folder: the newest two, with what clients keep and the length of the metrics.

Of a checkpoint's two files the JSON comes last and carries the checksum of the other; it commits the checkpoint. What
the clients keep lies in a folder of its own, of which a checkpoint writes what has changed
(`halfmoon.storage.state_store`).
"""

import re
from contextlib import suppress
from typing import Any, NamedTuple

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io, checkpoint, integrity
from halfmoon.storage.checkpoint import CLIENTS
from halfmoon.storage.folder_writer import FolderWriter, Unwritable
from halfmoon.storage.manifest import START, Commit, Contents, Damaged, sweep
from halfmoon.storage.serialization import pack
from halfmoon.storage.state_store import Store

KEPT = 2
"""How many checkpoints stay: the newest and the one to fall back on."""

METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"
_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})\.(safetensors|json)")


class Loaded(NamedTuple):
    """A checkpoint that was read back."""

    round: int
    state: Tree
    meta: dict[str, Any]
    warnings: list[str]  # one sentence each: what was damaged and skipped
    clients: Contents  # for `Store.restore`


class Checkpoints:
    """Saves and loads the checkpoints in a writer's folder, and cuts `metrics`, the rows of the run, back to them."""

    def __init__(self, writer: FolderWriter, metrics: integrity.Appended) -> None:
        self.writer, self.metrics, self.path = writer, metrics, writer.path

    def save(self, round: int, state: Tree, meta: dict[str, Any], clients: Store | None = None) -> None:
        """Write the checkpoint of a round, as `halfmoon.storage.run_folder.RunFolder.save` says."""
        self.writer.own()
        name = checkpoint.name(round)
        self._refuse_old(round, clients is not None and clients.changed)
        data, shape = pack(state)
        with self.writer.writing(name):
            length = atomic_io.flushed_length(self.path / METRICS)
        mark = self._committed(clients, round)
        note = {
            "round": round,
            "tensors": atomic_io.digest(data),
            "shape": shape,
            "metrics": length,
            "metrics_sha256": self.metrics.digest,
            "clients": mark._asdict(),
            "meta": meta,
            **checkpoint.versions(),
        }
        unparsed = integrity.seal(note)
        if round == self.writer.saved:
            if atomic_io.read(self.path / f"{name}.json") == unparsed:
                return
            raise ValueError(f"round {round} cannot be saved: round {round} is on disk already")
        try:
            self.writer.write(f"{name}.safetensors", data)
            self.writer.write(f"{name}.json", unparsed)
        except Unwritable:
            with suppress(OSError):
                self._remove(round)  # a half would take the place that is missing
            raise
        self.writer.saved = round
        with self.writer.writing("the folder"):
            rounds = self._rounds()
            for old in rounds[:-KEPT]:
                self._remove(old)
            if clients is not None:
                clients.prune(rounds[-KEPT:][0])

    def load(self) -> Loaded | None:
        """Return the newest checkpoint that is whole, as `halfmoon.storage.run_folder.RunFolder.load` says."""
        self.writer.own()
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
            self.writer.saved = round
            older = [each for each in rounds if each < round]
            for old in older[: 1 - KEPT]:  # a kill after a save has left them
                self._remove(old)
            with self.writer.writing(CLIENTS):
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
        with self.writer.writing(CLIENTS):
            sweep(Contents(self.path / CLIENTS, START, -1, {}, []), 0)
        return None

    def _refuse_old(self, round: int, changed: bool) -> None:
        """Raise ValueError for a round that is not after the newest on disk, or equal to it as far as can be known."""
        if self.writer.saved is None:
            if self._rounds():
                raise ValueError(f"{self.path} holds checkpoints: load the newest before saving another")
        elif round < self.writer.saved or (round == self.writer.saved and changed):
            raise ValueError(f"round {round} cannot be saved: round {self.writer.saved} is on disk already")

    def _committed(self, clients: Store | None, round: int) -> Commit:
        if clients is None:
            return START
        with self.writer.writing(CLIENTS):
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
        self.metrics.rewind(length, digest)
        with self.writer.writing(METRICS):
            atomic_io.cut(path, length)
            with suppress(OSError):
                timings = self.path / TIMINGS
                atomic_io.cut(timings, (atomic_io.read(timings) or b"").rfind(b"\n") + 1)
            for entry in list(self.path.iterdir()):
                if entry.name.endswith(atomic_io.PARTIAL):
                    entry.unlink()


def _version_warning(note: dict[str, Any]) -> list[str]:
    changed = [f"{name} {note[name]} (now {now})" for name, now in checkpoint.versions().items() if note[name] != now]
    if not changed:
        return []
    return [f"the checkpoint was written by {' and '.join(changed)}; the last digits may differ from here on."]
