"""The run folder: all files of one run, written in an order that survives a kill at any time.

`halfmoon.storage.folder_writer` writes the files, `halfmoon.storage.checkpoints` defines the checkpoints.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io, integrity, locks
from halfmoon.storage.checkpoints import METRICS, TIMINGS, Checkpoints, LoadedCheckpoint, software_versions
from halfmoon.storage.folder_writer import CONFIG, LOCK, FolderWriter, WriteError
from halfmoon.storage.serialization import pack, with_checksum
from halfmoon.storage.state_store import TreeStore

RUN = "run.json"
MODEL = "model.safetensors"
SKIPPED = "skipped.csv"
"""Lists images that were left out because they cannot be read."""

SUMMARY = "summary.json"
# Files of the baselines of a run: another process may create some of them before the run itself exists.
BASELINES = "baselines"
PLAN = "plan.json"
DECISION = "decision.json"
SCRATCH_TRIAL = "from_scratch.json"
"""The result of training from scratch next to heads on features."""

PENDING = "pending.json"
"""File of a run or comparison whose features are being computed: what `halfmoon resume` starts again."""

# Possible files in a folder whose creation was killed before its config.toml was written.
_CREATION_FILES = {
    BASELINES,
    LOCK,
    f"{LOCK}{locks.OWNER_SUFFIX}",
    RUN,
    f".{RUN}{atomic_io.PARTIAL}",
    f".{CONFIG}{atomic_io.PARTIAL}",
}
_CREATION_FILES |= {PENDING, f".{PENDING}{atomic_io.PARTIAL}"}
_CREATION_FILES |= {SKIPPED, f".{SKIPPED}{atomic_io.PARTIAL}"}
_CREATION_FILES |= {PLAN, f".{PLAN}{atomic_io.PARTIAL}", f".comparison.json{atomic_io.PARTIAL}"}


class RunFolder:
    """One run on disk.

    The first write acquires the folder's lock; `close`, or the end of the process, frees it.

    Attributes:
        path: the folder.
        config: text of `config.toml`.
        identity: SHA-256 of all options that affect results.
        writer: writes files, and has the lock.
        metrics: the rows of finished rounds.
        checkpoints: the newest checkpoints.
    """

    def __init__(self, path: Path, config: str, identity: str) -> None:
        """Describe a folder that exists; use `create` or `open`."""
        self.path = path
        self.config = config
        self.identity = identity
        self.writer = FolderWriter(path)
        self.metrics = integrity.HashedLog(path / METRICS)
        self.checkpoints = Checkpoints(self.writer, self.metrics)

    @classmethod
    def create(cls, path: Path, config: str, identity: str, title: str = "") -> "RunFolder":
        """Create the folder of a new run with its `config.toml`.

        Args:
            path: the folder, which may exist if it is empty.
            config: text of `config.toml`.
            identity: SHA-256 of all options that affect results.
            title: title of the method, for pages that show the run before it is finished.

        Raises:
            UserError: if the folder is not empty, is in use, or cannot be written.
        """
        folder = cls(path, config, identity)
        cls.check_unused(path, identity)
        with _report_creation_error(path):
            path.mkdir(parents=True, exist_ok=True)
        folder.writer.acquire_lock()
        try:
            cls.check_unused(path, identity)  # repeated under the lock: another process may have created the run since
            head = {"identity": identity, "config": atomic_io.sha256(config.encode()), **software_versions()}
            if title:
                head["title"] = title
            # run.json first: a folder with only a config.toml may belong to the user.
            folder.writer.write(RUN, integrity.format_checked(head))
            folder.writer.write(CONFIG, config.encode())
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def check_unused(cls, path: Path, identity: str) -> None:
        """Raise UserError if a folder cannot be used for a new run, because it contains a run or other files.

        Args:
            path: the folder, which may be missing.
            identity: SHA-256 of the options of the new run, by which a stored run of the same options is recognized.
        """
        with _report_creation_error(path):
            if not path.exists():
                return
            if not path.is_dir():
                raise UserError(f"{path} is a file, not a folder", option="run_dir", hint="choose another {run_dir}.")
            head = atomic_io.read_json(path / RUN)  # identity and versions of a stored run, written first
            other_files = {entry.name for entry in path.iterdir()} - _CREATION_FILES
            if not other_files:
                return  # empty, or its creation was killed between run.json and config.toml
            if head is None:
                raise UserError(
                    f"{path} is not empty and holds no run", option="run_dir", hint="choose another {run_dir}."
                )
            if head.get("identity") != identity:
                raise UserError(
                    f"{path} holds a run of another configuration ({str(head.get('identity'))[:8]}, this one is "
                    f"{identity[:8]})",
                    option="run_dir",
                    hint="choose another {run_dir}, or `{resume}` to go on with that one.",
                    resume=path,
                )
            state = "an unfinished" if atomic_io.read_json(path / SUMMARY) is None else "a finished"
            raise UserError(
                f"{path} holds {state} run of this configuration",
                option="run_dir",
                hint="`{resume}` goes on with it, or choose another {run_dir}.",
                resume=path,
            )

    @staticmethod
    def exists(path: Path) -> bool:
        """Return True if the folder has a run, and False if it has none or its creation was killed."""
        return (path / RUN).exists() and not {entry.name for entry in path.iterdir()} <= _CREATION_FILES

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open the folder of an existing run; raise UserError if it has no run or its configuration was changed."""
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
        """Free the folder's lock."""
        self.writer.close()

    @property
    def lock_warning(self) -> str:
        """A warning about the folder's lock, or ""."""
        return self.writer.lock_warning

    @property
    def finished(self) -> bool:
        """Whether the run has ended: it has a summary."""
        return self.summary() is not None

    def summary(self) -> dict[str, Any] | None:
        """Read the summary, after a check of its checksum; None if the run is not finished."""
        return integrity.read_summary(self.path)

    def rows(self) -> list[dict[str, Any]]:
        """Read the rows of `metrics.jsonl`."""
        return atomic_io.read_rows(self.path / METRICS)

    def verified_rows(self) -> list[dict[str, Any]]:
        """Read the rows of `metrics.jsonl`; raise UserError if another process changed the file."""
        return atomic_io.parse_rows(self.metrics.read_verified(), self.path / METRICS)

    def log(self, row: dict[str, Any]) -> None:
        """Add a row to `metrics.jsonl`; a number that is not finite becomes null. Raise UserError if it cannot be written."""
        line = atomic_io.json_line(atomic_io.replace_nonfinite(row))
        self.writer.append(METRICS, line)
        self.metrics.add(line)

    def log_timing(self, row: dict[str, Any]) -> None:
        """Add a row to `timings.jsonl`; ignore write errors, because no result depends on timings."""
        with suppress(WriteError):
            self.writer.append(TIMINGS, atomic_io.json_line(atomic_io.replace_nonfinite(row)))

    def save(self, round: int, state: Tree, meta: dict[str, Any], clients: TreeStore | None = None) -> None:
        """Write the checkpoint of a round and remove all but the last two.

        Args:
            round: number of the round.
            state: the server's state.
            meta: further values that JSON can represent.
            clients: client memory, of which the changes since the last save are written. Its files are in this folder
                from now on.

        Raises:
            UserError: if the disk refuses; older checkpoints are intact.
            ValueError: if the round was saved before with other content, because existing files are never replaced.
        """
        self.checkpoints.save(round, state, meta, clients)

    def load(self) -> LoadedCheckpoint | None:
        """Load the newest intact checkpoint and truncate `metrics.jsonl` to it; None if no checkpoint was written.

        Damaged checkpoints are removed and listed in `warnings`. All client files are read now, while an older
        checkpoint is still available as a fallback.

        Raises:
            UserError: if the run is finished, all checkpoints are damaged, or `metrics.jsonl` lost rows.
        """
        if self.finished:
            raise UserError(f"{self.path}: the run is finished; it cannot be resumed.")
        return self.checkpoints.load()

    def finish(self, model: Tree, meta: dict[str, str], summary: dict[str, Any]) -> None:
        """Write the final model and the summary of a run, which is finished then.

        Checkpoints and client memory, which only a resume needs, are removed.

        Args:
            model: the model's tensors, for model.safetensors.
            meta: the metadata of model.safetensors.
            summary: the content of summary.json.
        """
        self.writer.acquire_lock()
        data = with_checksum(pack(model)[0], meta)
        self.writer.write(MODEL, data)
        self.writer.record_checksums({MODEL: atomic_io.sha256(data), METRICS: self.metrics.digest})
        self.write_summary(summary)
        self.checkpoints.clear()

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write `summary.json`, which ends the run."""
        self.writer.acquire_lock()
        data = _format_summary(summary)
        # The checksum first: an existing summary must always have one.
        self.writer.record_checksums({SUMMARY: atomic_io.sha256(data), CONFIG: atomic_io.sha256(self.config.encode())})
        self.writer.write(SUMMARY, data)


def _format_summary(summary: dict[str, Any]) -> bytes:
    """Format a summary with one key per line; indented JSON of a confusion matrix of 200 classes has 40,000 lines."""
    lines = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in atomic_io.replace_nonfinite(summary).items())
    return ("{\n " + ",\n ".join(lines) + "\n}\n").encode()


@contextmanager
def _report_creation_error(path: Path) -> Iterator[None]:
    """Convert an OSError while a folder is created to a `WriteError`."""
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{path}: the run folder cannot be made ({atomic_io.error_reason(error)})",
            option="run_dir",
            hint="choose another {run_dir}.",
        ) from error
