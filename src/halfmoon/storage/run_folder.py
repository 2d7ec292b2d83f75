"""The run folder: everything one run leaves on disk, in an order that survives being killed at any instant.

How files are written is in `halfmoon.storage.folder_writer`, what a checkpoint is in `halfmoon.storage.checkpoints`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io, integrity, locks
from halfmoon.storage.checkpoints import METRICS, TIMINGS, Checkpoints, LoadedCheckpoint, versions
from halfmoon.storage.folder_writer import CONFIG, LOCK, FolderWriter, WriteError, resume_command
from halfmoon.storage.serialization import pack, with_seal
from halfmoon.storage.state_store import TreeStore

RUN, MODEL, SUMMARY = "run.json", "model.safetensors", "summary.json"
# Where the runs beside a run lie: another process may begin with one of them before the folder is a run's.
BASELINES, PLAN, DECISION = "baselines", "plan.json", "decision.json"
# What a creation leaves that was killed before its config.toml.
_BEGUN = {
    BASELINES,
    LOCK,
    f"{LOCK}{locks.OWNER_SUFFIX}",
    RUN,
    f".{RUN}{atomic_io.PARTIAL}",
    f".{CONFIG}{atomic_io.PARTIAL}",
}
_BEGUN |= {PLAN, f".{PLAN}{atomic_io.PARTIAL}", f".comparison.json{atomic_io.PARTIAL}"}


class RunFolder:
    """One run on disk; the first call that writes takes the folder's lock, `close` (or the process' end) frees it."""

    def __init__(self, path: Path, config: str, identity: str) -> None:
        """Describe a folder that exists; use `create` or `open`."""
        self.path = path
        self.config = config
        self.identity = identity
        self.writer = FolderWriter(path)
        self.metrics = integrity.HashedLog(path / METRICS)
        self.checkpoints = Checkpoints(self.writer, self.metrics)

    @classmethod
    def create(cls, path: Path, config: str, identity: str) -> "RunFolder":
        """Make the folder of a new run with its `config.toml`; `identity` is a sha256 of what changes the numbers.

        Raise UserError if the folder holds a run or anything else, is in use, or cannot be written.
        """
        folder = cls(path, config, identity)
        cls.refuse(path, identity)
        with _making(path):
            path.mkdir(parents=True, exist_ok=True)
        folder.writer.own()
        try:
            cls.refuse(path, identity)  # again: another process may have been faster
            head = {"identity": identity, "config": atomic_io.sha256(config.encode()), **versions()}
            # The head first: a folder with a config.toml alone may be the user's own.
            folder.writer.write(RUN, integrity.seal(head))
            folder.writer.write(CONFIG, config.encode())
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def refuse(cls, path: Path, identity: str) -> None:
        """Raise UserError where a new run cannot have this folder: it holds a run, or anything else."""
        with _making(path):
            if not path.exists():
                return
            if not path.is_dir():
                raise UserError(f"{path} is a file, not a folder", option="run_dir", hint="choose another {run_dir}.")
            head = atomic_io.read_json(path / RUN)
            others = {e.name for e in path.iterdir()} - _BEGUN
            if head is None or not others:
                # Without others: empty, or a creation that was killed before its config.toml.
                if others:
                    raise UserError(
                        f"{path} is not empty and holds no run", option="run_dir", hint="choose another {run_dir}."
                    )
                return
            if head.get("identity") != identity:
                raise UserError(
                    f"{path} holds a run of another configuration ({str(head.get('identity'))[:8]}, this one is "
                    f"{identity[:8]})",
                    option="run_dir",
                    hint=f"choose another {{run_dir}}, or `{resume_command(path)}` to go on with that one.",
                )
            state = "an unfinished" if atomic_io.read_json(path / SUMMARY) is None else "a finished"
            raise UserError(
                f"{path} holds {state} run of this configuration",
                option="run_dir",
                hint=f"`{resume_command(path)}` goes on with it, or choose another {{run_dir}}.",
            )

    @staticmethod
    def exists(path: Path) -> bool:
        """Return whether a run was begun here; one that was killed while its folder was made was not."""
        return (path / RUN).exists() and not {entry.name for entry in path.iterdir()} <= _BEGUN

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open the folder of a run that exists; raise UserError if it is none or its configuration was changed."""
        head = integrity.read_object(path / RUN)
        if head is not None and not cls.exists(path):
            raise UserError(f"{path}: the run was stopped before its {CONFIG} was written; start it again.")
        if head is None or not isinstance(head.get("identity"), str):
            raise UserError(f"{path} is not a run folder (it has no readable {RUN}); give the folder of a run.")
        try:
            config = (path / CONFIG).read_bytes()
        except OSError as error:
            raise UserError(
                f"{path}: {CONFIG} cannot be read ({atomic_io.error_reason(error)}); put it back or start a new run."
            ) from error
        if atomic_io.sha256(config) != head.get("config"):
            raise UserError(
                f"{path}: {CONFIG} was changed, so the folder belongs to another configuration "
                f"(it was made for {head['identity'][:8]})",
                option="run_dir",
                hint="undo the change, or start a run in another {run_dir}.",
            )
        try:
            return cls(path, config.decode(), head["identity"])
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: {CONFIG} is no text; put it back or start a new run.") from error

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        self.writer.close()

    @property
    def remark(self) -> str:
        return self.writer.remark

    @property
    def finished(self) -> bool:
        return self.summary() is not None

    def summary(self) -> dict[str, Any] | None:
        return integrity.read_summary(self.path)

    def rows(self) -> list[dict[str, Any]]:
        return atomic_io.read_rows(self.path / METRICS)

    def verified_rows(self) -> list[dict[str, Any]]:
        """Return the rows of `metrics.jsonl`; raise UserError where they are not those that were written from here."""
        return atomic_io.parse_rows(self.metrics.verified(), self.path / METRICS)

    def log(self, row: dict[str, Any]) -> None:
        """Add a row to `metrics.jsonl`; a number that is not finite becomes null. Raise UserError if it cannot."""
        line = atomic_io.json_line(atomic_io.replace_nonfinite(row))
        self.writer.append(METRICS, line)
        self.metrics.add(line)

    def time(self, row: dict[str, Any]) -> None:
        """Add a row to `timings.jsonl`, which nothing depends on: where it cannot be written it is lost."""
        with suppress(WriteError):
            self.writer.append(TIMINGS, atomic_io.json_line(atomic_io.replace_nonfinite(row)))

    def save(self, round: int, state: Tree, meta: dict[str, Any], clients: TreeStore | None = None) -> None:
        """Write the checkpoint of a round and remove all but the last two.

        `meta` is anything JSON can hold. Of `clients`, which keeps its files in this folder from now on, what has
        changed since the last save is written. Raise UserError if the disk refuses; the checkpoints before are intact.
        A round may be saved again only with the same content (ValueError), as no older file is ever put at risk.
        """
        self.checkpoints.save(round, state, meta, clients)

    def load(self) -> LoadedCheckpoint | None:
        """Return the newest checkpoint that is whole and cut `metrics.jsonl` back to it; None if none was written.

        Damaged checkpoints are skipped, removed and said in `warnings`; all that the clients keep is read once, as
        there is no checkpoint to fall back on later. Raise UserError if the run is finished, all
        checkpoints are damaged, or `metrics.jsonl` lost rows.
        """
        if self.finished:
            raise UserError(f"{self.path}: the run is finished; there is nothing to go on with.")
        return self.checkpoints.load()

    def finish(self, model: Tree, meta: dict[str, str], summary: dict[str, Any]) -> None:
        """Write `model.safetensors` with `meta` as its metadata, then `summary.json`, which ends the run.

        What only going on would need is removed.
        """
        self.writer.own()
        data = with_seal(pack(model)[0], meta)
        self.writer.write(MODEL, data)
        self.writer.note({MODEL: atomic_io.sha256(data), METRICS: self.metrics.digest})
        self.conclude(summary)
        self.checkpoints.clear()

    def conclude(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`, which ends the run."""
        self.writer.own()
        data = _summarized(summary)
        # Before the summary, which ends the run: one that is there always has its checksum.
        self.writer.note({SUMMARY: atomic_io.sha256(data), CONFIG: atomic_io.sha256(self.config.encode())})
        self.writer.write(SUMMARY, data)


def _summarized(summary: dict[str, Any]) -> bytes:
    """Return a summary with a key a line: a confusion of 200 classes would have 40,000 lines."""
    parts = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in atomic_io.replace_nonfinite(summary).items())
    return ("{\n " + ",\n ".join(parts) + "\n}\n").encode()


@contextmanager
def _making(path: Path) -> Iterator[None]:
    """Say what the system does not want of a new folder."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path}: the run folder cannot be made ({atomic_io.error_reason(error)})",
            option="run_dir",
            hint="choose another {run_dir}.",
        ) from error
