"""The two newest checkpoints of a run folder, with the client memory and the length of the metrics.

A checkpoint has two files. Its JSON contains the checksum of the tensors and is written last, which commits the
checkpoint. The client memory is in a separate folder, in which a checkpoint writes only the changes
(`halfmoon.storage.state_store`).
"""

import re
import shutil
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.core.versions import installed_version
from halfmoon.storage import atomic_io, integrity
from halfmoon.storage.folder_writer import FolderWriter, WriteError
from halfmoon.storage.manifest import START, Commit, DamagedFile, StoreContents, remove_unreferenced, verify
from halfmoon.storage.serialization import pack, unpack
from halfmoon.storage.state_store import TreeStore

CLIENTS = "clients"
"""Subfolder of the client memory in the run folder."""

CHECKPOINTS = 2
"""Number of checkpoints on disk: the newest, and the previous one as a fallback."""

METRICS = "metrics.jsonl"
TIMINGS = "timings.jsonl"
_CHECKPOINT = re.compile(r"checkpoint-(\d{6,})\.(safetensors|json)")


class LoadedCheckpoint(NamedTuple):
    """A checkpoint read from disk."""

    round: int
    state: Tree
    meta: dict[str, Any]
    warnings: list[str]  # one sentence per damaged checkpoint or file
    clients: StoreContents  # for `TreeStore.restore`


class Checkpoints:
    """Saves and loads the checkpoints of a run folder, and truncates the metrics of the run to a loaded checkpoint."""

    def __init__(self, writer: FolderWriter, metrics: integrity.HashedLog) -> None:
        self.writer = writer
        self.metrics = metrics
        self.path = writer.path

    def save(self, round: int, state: Tree, meta: dict[str, Any], clients: TreeStore | None = None) -> None:
        """Write the checkpoint of a round: tensors, a JSON file with checksums, and the memory of clients.

        Args:
            round: the number of the round.
            state: the server's state.
            meta: further values that JSON can represent.
            clients: the client memory.

        Raises:
            WriteError: the disk refuses; older checkpoints are intact.
            ValueError: this round was saved with other content.
        """
        self.writer.acquire_lock()
        name = checkpoint_stem(round)
        self._refuse_old(round, clients is not None and clients.changed)
        data, shape = pack(state)
        # A resumed run truncates the metrics to this length, because rows of later rounds will be rewritten.
        with self.writer.convert_errors(name):
            length = atomic_io.flush_and_measure(self.path / METRICS)
        commit = self._commit_clients(clients, round)
        note = {
            "round": round,
            "tensors": atomic_io.sha256(data),
            "shape": shape,
            "metrics": length,
            "metrics_sha256": self.metrics.digest,
            "clients": commit._asdict(),
            "meta": meta,
            **software_versions(),
        }
        note_bytes = integrity.format_checked(note)
        if round == self.writer.saved:
            if atomic_io.read(self.path / f"{name}.json") == note_bytes:
                return
            raise ValueError(f"round {round} cannot be saved: round {round} is on disk already")
        try:
            # The JSON file last: a checkpoint without it was not completed.
            self.writer.write(f"{name}.safetensors", data)
            self.writer.write(f"{name}.json", note_bytes)
        except WriteError:
            with suppress(OSError):
                self._remove(round)  # free the disk space of the incomplete checkpoint
            raise
        self.writer.saved = round
        self._remove_old(clients)

    def _remove_old(self, clients: TreeStore | None = None) -> None:
        """Remove all but the newest checkpoints, and the client files that only the removed ones need."""
        with self.writer.convert_errors("the folder"):
            rounds = self._rounds()
            for old in rounds[:-CHECKPOINTS]:
                self._remove(old)
            if clients is not None:
                clients.prune(rounds[-CHECKPOINTS:][0])

    def clear(self) -> None:
        """Remove all checkpoints and the client memory, which a finished run does not need."""
        with self.writer.convert_errors("the folder"):
            for round in self._rounds():
                self._remove(round)
            if (self.path / CLIENTS).exists():
                shutil.rmtree(self.path / CLIENTS)

    def load(self) -> LoadedCheckpoint | None:
        """Load the newest intact checkpoint of the run, and restore the folder to its state at that round.

        The metrics are truncated to the checkpoint, and damaged newer checkpoints and unneeded files of the client
        memory are removed. None if no checkpoint was completed: the run starts from round 0. See `RunFolder.load`.
        """
        self.writer.acquire_lock()
        rounds = self._rounds()
        problems: list[tuple[int, str]] = []  # (round, reason) of damaged checkpoints
        for round in reversed(rounds):
            try:
                note, state, clients = _read_checkpoint(self.path, round)
            except DamagedFile as damage:
                problems.append((round, str(damage)))
                continue
            self._rewind(length=note["metrics"], digest=note["metrics_sha256"])
            for bad, _ in problems:
                self._remove(bad)
            self.writer.saved = round
            older_rounds = [number for number in rounds if number < round]
            self._remove_old()  # a process killed after a save may have left older ones
            # The previous checkpoint remains as a fallback, so its files of the client memory are needed as well. The
            # version of a commit of the client memory is the round of its checkpoint.
            oldest_needed = older_rounds[-1] if older_rounds else round
            with self.writer.convert_errors(CLIENTS):
                clients = remove_unreferenced(clients, version=oldest_needed)
            warnings = [
                f"{checkpoint_stem(bad)} is damaged ({why}); continuing from {checkpoint_stem(round)}."
                for bad, why in problems
            ]
            warnings += [
                f"{CLIENTS}/{name} was damaged and has been restored from its copy." for name in clients.repaired
            ]
            return LoadedCheckpoint(round, state, note["meta"], warnings + _version_warning(note), clients)
        # Without a JSON file, which is written last, a single checkpoint is an interrupted first save and no damage.
        was_completed = bool(rounds) and (self.path / f"{checkpoint_stem(rounds[0])}.json").exists()
        if len(rounds) > 1 or was_completed:
            reasons = "; ".join(f"{checkpoint_stem(bad)}: {why}" for bad, why in problems)
            raise UserError(
                f"{self.path}: every checkpoint is damaged ({reasons})",
                option="run_dir",
                hint="restore one from a backup, or start the run again in another {run_dir}.",
            )
        self._reset(rounds)
        return None

    def _reset(self, rounds: list[int]) -> None:
        """Remove metrics, the incomplete checkpoints of `rounds` and the client memory: the run starts from round 0."""
        self._rewind(length=0, digest=atomic_io.sha256(b""))
        for round in rounds:
            self._remove(round)
        no_clients = StoreContents(self.path / CLIENTS, commit=START, version=-1, entries={}, replaced=[])
        with self.writer.convert_errors(CLIENTS):
            remove_unreferenced(no_clients, version=0)

    def _refuse_old(self, round: int, changed: bool) -> None:
        """Raise ValueError unless the round is after the newest on disk, or is that round with unchanged clients."""
        if self.writer.saved is None:
            if self._rounds():
                raise ValueError(f"{self.path} contains checkpoints: load the newest before saving another")
        elif round < self.writer.saved or (round == self.writer.saved and changed):
            raise ValueError(f"round {round} cannot be saved: round {self.writer.saved} is on disk already")

    def _commit_clients(self, clients: TreeStore | None, round: int) -> Commit:
        """Write the changes of the client memory, and return their commit, which the checkpoint names."""
        if clients is None:
            return START
        with self.writer.convert_errors(CLIENTS):
            clients.use_folder(self.path / CLIENTS)
            return clients.commit(round)

    def _rounds(self) -> list[int]:
        """List the rounds of the checkpoints in the folder, ascending, also of incomplete ones."""
        matches = (_CHECKPOINT.fullmatch(entry.name) for entry in self.path.iterdir())
        return sorted({int(match[1]) for match in matches if match})

    def _remove(self, round: int) -> None:
        """Remove the files of a checkpoint."""
        # The JSON first: the tensors without their JSON do not count as a checkpoint.
        for suffix in ("json", "safetensors"):
            (self.path / f"{checkpoint_stem(round)}.{suffix}").unlink(missing_ok=True)

    def _rewind(self, length: int, digest: str) -> None:
        """Truncate the metrics to a checkpoint, and remove incomplete lines and files that a killed process left.

        Args:
            length: the size of the metrics at the checkpoint, in bytes.
            digest: the SHA-256 of these bytes.

        Raises:
            UserError: the metrics are shorter, or have other bytes.
        """
        path = self.path / METRICS
        self.metrics.rewind(length, digest)
        with self.writer.convert_errors(METRICS):
            atomic_io.truncate(path, length)
            with suppress(OSError):
                timings = self.path / TIMINGS
                atomic_io.truncate(timings, (atomic_io.read(timings) or b"").rfind(b"\n") + 1)
            for entry in list(self.path.iterdir()):
                if entry.name.endswith(atomic_io.PARTIAL):
                    entry.unlink()


def _version_warning(note: dict[str, Any]) -> list[str]:
    """Build a warning if other versions of halfmoon or torch wrote the checkpoint; an empty list if not."""
    changed = [f"{name} {note[name]} (now {now})" for name, now in software_versions().items() if note[name] != now]
    if not changed:
        return []
    return [f"the checkpoint was written by {' and '.join(changed)}; the last digits may differ from here on."]


def _read_checkpoint(folder: Path, round: int) -> tuple[dict[str, Any], Tree, StoreContents]:
    """Read and verify a checkpoint, which has a JSON file, a file of tensors and a part in the client memory.

    Returns:
        The JSON (the note, see `Checkpoints.save`), the server's state, and the contents of the client memory.

    Raises:
        DamagedFile: if any of them is missing or damaged.
    """
    note_bytes = atomic_io.read(folder / f"{checkpoint_stem(round)}.json")
    data = atomic_io.read(folder / f"{checkpoint_stem(round)}.safetensors")
    if note_bytes is None:
        raise DamagedFile("it was not completed: the .json is missing")
    if data is None:
        raise DamagedFile("its .safetensors is missing")
    try:
        note = integrity.parse_checked(note_bytes)
    except integrity.ChecksumError as error:
        raise DamagedFile(f"its .json cannot be used: {error}") from error
    if atomic_io.sha256(data) != note.get("tensors"):  # "tensors" is the SHA-256 of the file of tensors
        raise DamagedFile("checksum differs")
    if "clients" not in note:
        raise DamagedFile("an older halfmoon wrote it, which stored the client memory differently")
    commit = _parse_commit(note, round)
    try:
        state = unpack(data, note["shape"])
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedFile("its tensors are not those that its .json names") from error
    return note, state, verify(folder / CLIENTS, commit)


def _parse_commit(note: dict[str, Any], round: int) -> Commit:
    """Check the fields of a checkpoint's JSON file, and return the commit of the client memory that it records.

    Its checksum is verified before, so that invalid fields are those of another version or another round.

    Args:
        note: the parsed file: the arguments of `unpack` ("shape"), the length of the metrics in bytes ("metrics"),
            their SHA-256, further values of the run ("meta"), and the versions of the software that wrote it.
        round: the round in the file's name.

    Raises:
        DamagedFile: a field is missing or invalid.
    """
    types = {
        "shape": dict,
        "metrics": int,
        "metrics_sha256": str,
        "meta": dict,
        **dict.fromkeys(software_versions(), str),
    }
    invalid_fields = [name for name, expected in types.items() if type(note.get(name)) is not expected]
    if invalid_fields or note.get("round") != round or note["metrics"] < 0:
        subject = invalid_fields[0] if invalid_fields else "round and metrics"
        raise DamagedFile(f"its .json has no usable {subject}")
    commit = note["clients"]
    is_commit = isinstance(commit, dict) and set(commit) == set(Commit._fields)
    if not is_commit or type(commit["length"]) is not int or commit["length"] < 0 or type(commit["chain"]) is not str:
        raise DamagedFile("its .json has no usable state of the clients")
    return Commit(**commit)


def software_versions() -> dict[str, str]:
    """Return the versions of halfmoon and torch, which a checkpoint records."""
    return {"halfmoon": _find_version(), "torch": torch.__version__}


def _find_version() -> str:
    try:
        return installed_version("halfmoon")
    except PackageNotFoundError:  # run from source without installation
        return "unknown"


def checkpoint_stem(round: int) -> str:
    """Return the name of a checkpoint's files without their suffix."""
    return f"checkpoint-{round:06d}"
