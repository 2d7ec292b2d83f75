"""Trackers: what metrics.jsonl says, shown by programs of others while a run is played or after it.

metrics.jsonl stays the source: a tracker is a `halfmoon.runs.callbacks.Callback` that writes a copy, in a folder of its
own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.config.schema import identity
from halfmoon.core.errors import UserError, install_command, suggest
from halfmoon.engine.loop import Row
from halfmoon.report.run_reader import StoredRun
from halfmoon.runs.callbacks import Callback, NullCallback, RunInfo
from halfmoon.storage import atomic_io
from halfmoon.storage.checkpoints import METRICS, TIMINGS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

EVENTS = "tensorboard"
"""The folder of a run's event files, in the run's own."""


class TensorBoard(NullCallback):
    """Write every run's rows for TensorBoard, into `tensorboard/` of the run's folder.

    A number of a row becomes a scalar of the step `round`, under the names of its keys: `test/accuracy`, `train/loss`,
    `cost/down`. Lists, such as accuracies of classes, and null stay out. The configuration is the text `config` at step
    0. A run that goes on begins its event files anew, with the rows of metrics.jsonl up to its checkpoint, so that no
    step is there twice and none is missing, whether or not the run was tracked before.
    """

    def __init__(self) -> None:
        self._open = _writer_type()
        self._writers: dict[Path, SummaryWriter] = {}

    def begin(self, run: RunInfo) -> None:
        if run.folder in self._writers:  # it was stopped, and goes on in the same process
            self._writers.pop(run.folder).close()
        self._writers[run.folder] = _begun(self._open, run.folder)

    def round(self, run: RunInfo, row: Row) -> None:
        writer = self._writers[run.folder]
        _write(writer, row, None)
        writer.flush()

    def end(self, run: RunInfo, summary: Row) -> None:
        self._writers.pop(run.folder).close()


class WandB(NullCallback):
    """Log every run's rows to Weights & Biases, in the project `halfmoon` or that of WANDB_PROJECT.

    A run that goes on is the same run there. WANDB_MODE=offline writes into `wandb/` of the run's folder alone.
    """

    def __init__(self) -> None:
        _package("wandb")
        self._open: dict[Path, Any] = {}

    def begin(self, run: RunInfo) -> None:
        """Begin the run with its configuration, or go on with it."""
        self._open[run.folder] = _package("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "halfmoon"),
            dir=run.folder,
            id=_mark(run),
            resume="allow",
            name=run.folder.name,
            config=StoredRun.read(run.folder).options,
            reinit="create_new",
        )

    def round(self, run: RunInfo, row: Row) -> None:
        self._open[run.folder].log(scalars(atomic_io.replace_nonfinite(row)), step=row["round"])

    def end(self, run: RunInfo, summary: Row) -> None:
        self._open.pop(run.folder).finish()


class MLflow(NullCallback):
    """Log every run's rows to MLflow, in the experiment `halfmoon`, at MLFLOW_TRACKING_URI or into ./mlruns.

    A run that goes on is the same run there.
    """

    def __init__(self) -> None:
        _package("mlflow")
        self._client: Any = None
        self._runs: dict[Path, str] = {}

    def begin(self, run: RunInfo) -> None:
        """Begin the run with its configuration, or go on with it."""
        if self._client is None:
            self._client = _package("mlflow").MlflowClient()
        record = self._client.get_experiment_by_name("halfmoon")
        experiment = record.experiment_id if record else self._client.create_experiment("halfmoon")
        same = self._client.search_runs([experiment], f"tags.halfmoon = '{_mark(run)}'")
        if same:
            self._runs[run.folder] = same[0].info.run_id
            return
        begun = self._client.create_run(experiment, tags={"halfmoon": _mark(run)}, run_name=run.folder.name)
        self._runs[run.folder] = begun.info.run_id
        for name, value in StoredRun.read(run.folder).options.items():
            self._client.log_param(begun.info.run_id, name, value)

    def round(self, run: RunInfo, row: Row) -> None:
        for name, value in scalars(atomic_io.replace_nonfinite(row)).items():
            self._client.log_metric(self._runs[run.folder], name, value, step=row["round"])

    def end(self, run: RunInfo, summary: Row) -> None:
        self._client.set_terminated(self._runs.pop(run.folder))


TRACKERS: dict[str, Callable[[], Callback]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""The trackers by their names on the command line."""


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"{name} is not installed; {install_command(name)} to use it.") from error


def _mark(run: RunInfo) -> str:
    """Return what a run is called for good: its folder and its configuration."""
    return atomic_io.sha256(f"{run.folder.resolve()} {identity(run.config, run.config.method)}".encode())[:16]


def tracker(name: str) -> Callback:
    """Return a tracker, for `watch`.

    Args:
        name: tensorboard, wandb or mlflow.

    Raises:
        UserError: for another name, and where its package is not installed.
    """
    if name not in TRACKERS:
        raise UserError(f"unknown tracker {name!r}: {suggest(name, TRACKERS)}")
    return TRACKERS[name]()


def replay(folder: Path) -> Path:
    """Write the event files of a run that was played, from its metrics.jsonl, and return their folder.

    Those that are there are emptied. Raise UserError where `folder` is no run or cannot be written, or TensorBoard is
    not installed.
    """
    try:
        _begun(_writer_type(), folder).close()
    except OSError as error:
        raise UserError(
            f"{folder / EVENTS}: the event files cannot be written ({atomic_io.error_reason(error)}); make the "
            "folder writable."
        ) from error
    return folder / EVENTS


def scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row of metrics.jsonl by their place in it: {"test/accuracy": 0.5}, without the round."""
    numbers: dict[str, float] = {}
    waiting: list[tuple[str, Any]] = [(key, value) for key, value in row.items() if key != "round"]
    while waiting:
        name, value = waiting.pop(0)
        if isinstance(value, dict):
            waiting += [(f"{name}/{key}", inner) for key, inner in value.items()]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def _writer_type() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(f"TensorBoard is not installed; {install_command('tensorboard')} to use it.") from error
    return SummaryWriter


def _begun(writer_type: type[SummaryWriter], folder: Path) -> SummaryWriter:
    run = StoredRun.read(folder)
    events = folder / EVENTS
    # Emptied, not removed: a TensorBoard that reads them would wait for them to come back. On the purge it drops
    # what it has read.
    for old in events.glob("events.out.tfevents.*"):
        os.truncate(old, 0)
    writer = writer_type(str(events), purge_step=0)
    writer.add_text("config", f"```toml\n{run.config}```", 0)
    ends = _ends(folder)
    for row in run.rows:
        _write(writer, row, ends.get(row["round"]))
    writer.flush()
    return writer


def _write(writer: SummaryWriter, row: Row, when: float | None) -> None:
    for name, value in scalars(atomic_io.replace_nonfinite(row)).items():
        writer.add_scalar(name, value, row["round"], when)


def _ends(folder: Path) -> dict[int, float]:
    """Return when each round ended, in seconds since 1970, as if all were played without a break up to the last."""
    path = folder / METRICS
    took = dict(atomic_io.read_number_pairs(folder / TIMINGS, "round", "seconds"))  # the latest of a round
    now = path.stat().st_mtime if path.exists() else 0.0
    ends = {}
    for number in sorted(took, reverse=True):
        ends[number] = now
        now -= took[number]
    return ends
