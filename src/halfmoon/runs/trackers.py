"""Trackers: log metrics to TensorBoard, Weights & Biases or MLflow, during a run or after it.

A tracker is a `halfmoon.runs.callbacks.Callback` that writes a copy of metrics.jsonl, which remains the source. The runs of
a comparison, of a sweep, or of a method with its baselines are one group there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.config.schema import identity
from halfmoon.core.errors import UserError, install_command, suggest
from halfmoon.core.plugins import folder_name
from halfmoon.engine.loop import Row
from halfmoon.report.run_reader import StoredRun
from halfmoon.runs.callbacks import Callback, NullCallback, RunInfo
from halfmoon.storage import atomic_io
from halfmoon.storage.checkpoints import METRICS, TIMINGS

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MAX_GROUP_LETTERS = 128
"""Largest length of a group's name, which is that of Weights & Biases."""

EVENTS = "tensorboard"
"""The folder of TensorBoard's event files, in the run folder; in a sweep's folder it has links to those of its runs."""

LINK_DIGITS = 8
"""Digits of a run's identity in the name of a link to its event files."""


class TensorBoard(NullCallback):
    """Write every run's rows for TensorBoard, into `tensorboard/` of the run's folder.

    A number of a row becomes a scalar of the step `round`, named by its keys: `test/accuracy`, `train/loss`,
    `cost/down`. Lists, such as accuracies of classes, and null are left out. The configuration is the text `config` at
    step 0. If a run is resumed, its event files are rewritten with the rows of metrics.jsonl up to its checkpoint, so
    that every step is there once, whether or not the run was tracked before.

    TensorBoard groups runs by their folders. The runs of a sweep are not below its folder, so `tensorboard/` of that folder
    gets a link to each, named by method and seed: `tensorboard --logdir SWEEP` shows them.
    """

    def __init__(self) -> None:
        self._open = _writer_type()
        self._writers: dict[Path, SummaryWriter] = {}

    def begin(self, run: RunInfo) -> None:
        # A run that was stopped may resume in the same process.
        if run.folder in self._writers:
            self._writers.pop(run.folder).close()
        self._writers[run.folder] = _start_writer(self._open, run.folder)
        if run.group is not None:
            _link_to_group(run.folder, run.group, f"{run.config.method}-seed{run.config.seed}")

    def round(self, run: RunInfo, row: Row) -> None:
        writer = self._writers[run.folder]
        _write(writer, row, None)
        writer.flush()

    def end(self, run: RunInfo, summary: Row) -> None:
        self._writers.pop(run.folder).close()


class WandB(NullCallback):
    """Log every run's rows to Weights & Biases, in the project `halfmoon` or that of WANDB_PROJECT.

    A resumed run is the same run there. WANDB_MODE=offline writes into `wandb/` of the run folder only. Runs of a group
    have its name as their group, and their method as the job type.

    Args:
        group: the name of the group of all runs; None for the name of the folder of their comparison or sweep.
    """

    def __init__(self, group: str | None = None) -> None:
        _import_package("wandb")
        self._open: dict[Path, Any] = {}
        self._group = group

    def begin(self, run: RunInfo) -> None:
        """Start a run of Weights & Biases with the options of this run, or resume it."""
        group = _group_name(run, self._group)
        self._open[run.folder] = _import_package("wandb").init(
            project=os.environ.get("WANDB_PROJECT", "halfmoon"),
            dir=run.folder,
            id=_tracker_id(run),
            resume="allow",  # continues the run of this id, if there is one
            name=run.folder.name,
            group=group,
            job_type=None if group is None else run.config.method,
            config=StoredRun.read(run.folder).options,
            reinit="create_new",  # several runs of a comparison are open at the same time in this process
        )

    def round(self, run: RunInfo, row: Row) -> None:
        self._open[run.folder].log(scalars(atomic_io.replace_nonfinite(row)), step=row["round"])

    def end(self, run: RunInfo, summary: Row) -> None:
        self._open.pop(run.folder).finish()


class MLflow(NullCallback):
    """Log every run's rows to MLflow, in the experiment `halfmoon`, at MLFLOW_TRACKING_URI or into ./mlruns.

    A resumed run is the same run there. Runs of a group have a common parent run, under which MLflow shows them, and its
    name as the tag `halfmoon.group`.

    Args:
        group: the name of the group of all runs; None for the name of the folder of their comparison or sweep.
    """

    def __init__(self, group: str | None = None) -> None:
        _import_package("mlflow")
        self._client: Any = None
        self._runs: dict[Path, str] = {}
        self._parents: dict[Path, str] = {}
        self._group = group

    def begin(self, run: RunInfo) -> None:
        """Start a run of MLflow with the options of this run, or resume it."""
        if self._client is None:
            self._client = _import_package("mlflow").MlflowClient()
        record = self._client.get_experiment_by_name("halfmoon")
        experiment = record.experiment_id if record else self._client.create_experiment("halfmoon")
        tags = {"halfmoon": _tracker_id(run)}
        group = _group_name(run, self._group)
        if group is not None:
            parent = self._open_parent(experiment, group, self._group or str((run.group or run.folder).resolve()))
            self._parents[run.folder] = parent
            tags |= {"halfmoon.group": group, "mlflow.parentRunId": parent}
        # A run that is resumed has a record already, which its tag identifies.
        existing_runs = self._client.search_runs([experiment], f"tags.halfmoon = '{_tracker_id(run)}'")
        if existing_runs:
            self._runs[run.folder] = existing_runs[0].info.run_id
            for name, value in tags.items():
                self._client.set_tag(existing_runs[0].info.run_id, name, value)
            return
        new_run = self._client.create_run(experiment, tags=tags, run_name=run.folder.name)
        self._runs[run.folder] = new_run.info.run_id
        for name, value in StoredRun.read(run.folder).options.items():
            self._client.log_param(new_run.info.run_id, name, value)

    def round(self, run: RunInfo, row: Row) -> None:
        for name, value in scalars(atomic_io.replace_nonfinite(row)).items():
            self._client.log_metric(self._runs[run.folder], name, value, step=row["round"])

    def end(self, run: RunInfo, summary: Row) -> None:
        self._client.set_terminated(self._runs.pop(run.folder))
        parent = self._parents.pop(run.folder, None)
        # Other runs of the group may still train in this process; those of other processes make it run again.
        if parent is not None and parent not in self._parents.values():
            self._client.set_terminated(parent)

    def _open_parent(self, experiment: str, name: str, key: str) -> str:
        """Return the id of the parent run of a group, and mark it as running; create it for the group's first run.

        Args:
            experiment: the id of the experiment.
            name: the group's name.
            key: identifies the group: its folder, or the name that the user gave.
        """
        identifier = atomic_io.sha256(key.encode())[:16]

        def find_oldest() -> Any:
            parents = self._client.search_runs([experiment], f"tags.`halfmoon.parent` = '{identifier}'")
            return min(parents, key=lambda each: (each.info.start_time, each.info.run_id), default=None)

        parent = find_oldest()
        if parent is None:
            tags = {"halfmoon.parent": identifier, "halfmoon.group": name}
            created = self._client.create_run(experiment, tags=tags, run_name=name)
            # Two processes of a sweep may create it at the same time: the older one remains.
            parent = find_oldest() or created
            if parent.info.run_id != created.info.run_id:
                self._client.delete_run(created.info.run_id)
        self._client.update_run(parent.info.run_id, status="RUNNING")
        return parent.info.run_id


TRACKERS: dict[str, Callable[..., Callback]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""The trackers by their names on the command line."""

GROUPING_TRACKERS = ("wandb", "mlflow")
"""The trackers whose groups have names; TensorBoard groups runs by their folders."""


def _import_package(name: str) -> Any:
    """Import a tracker's package; raise UserError if it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(f"{name} is not installed; {install_command(name)} to use it.") from error


def _tracker_id(run: RunInfo) -> str:
    """Compute an identifier from the folder and configuration of a run, equal when the run is resumed."""
    return atomic_io.sha256(f"{run.folder.resolve()} {identity(run.config, run.config.method)}".encode())[:16]


def _group_name(run: RunInfo, group: str | None) -> str | None:
    """Return the name of a run's group: `group`, or that of the folder that the run is part of; None for no group."""
    if group is not None:
        return group
    return None if run.group is None else run.group.resolve().name


def tracker(name: str, group: str | None = None) -> Callback:
    """Create a callback that logs the metrics of runs to a service, to pass to a run as `watch`.

    Args:
        name: tensorboard, wandb or mlflow.
        group: wandb and mlflow: the name of a group for all runs. None groups the runs of a comparison, of a sweep, and of
            a method with its baselines, under the name of their folder.

    Raises:
        UserError: the name is unknown, it is tensorboard and `group` is given, or the package is not installed.

    Examples:
        >>> halfmoon.run(data=(X, y), watch=halfmoon.tracker("tensorboard"))
    """
    if name not in TRACKERS:
        raise UserError(f"unknown tracker {name!r}: {suggest(name, TRACKERS)}")
    if group is None:
        return TRACKERS[name]()
    if name not in GROUPING_TRACKERS:
        raise UserError(f"{name} groups runs by their folders, so a group has no name there: leave the group out.")
    if not group.strip() or not group.isprintable() or len(group) > MAX_GROUP_LETTERS:
        raise UserError(f"the group {group!r} is no name: it must be one line of 1 to {MAX_GROUP_LETTERS} characters.")
    return TRACKERS[name](group)


def replay(folder: Path) -> Path:
    """Write TensorBoard's event files of a run from its metrics.jsonl, and return their folder.

    Event files of an earlier call are emptied, so that a TensorBoard that is running shows no round twice.

    Raises:
        UserError: `folder` is no run folder or cannot be written, or TensorBoard is not installed.
    """
    try:
        # Opening a writer writes all rows of metrics.jsonl.
        _start_writer(_writer_type(), folder).close()
    except OSError as error:
        raise UserError(
            f"{folder / EVENTS}: the event files cannot be written ({atomic_io.error_reason(error)}); make the "
            "folder writable."
        ) from error
    return folder / EVENTS


def scalars(row: Row) -> dict[str, float]:
    """Flatten the nested metrics of a round to numbers by name: {"test": {"accuracy": 0.5}} to {"test/accuracy": 0.5}.

    Args:
        row: a row of metrics.jsonl; its number "round", and texts and lists, are left out.
    """
    numbers: dict[str, float] = {}
    pending: list[tuple[str, Any]] = [(key, value) for key, value in row.items() if key != "round"]
    # Dicts are replaced by their entries, which may be dicts again, until none is left.
    while pending:
        name, value = pending.pop(0)
        if isinstance(value, dict):
            pending += [(f"{name}/{key}", inner) for key, inner in value.items()]
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def _writer_type() -> type[SummaryWriter]:
    """Import TensorBoard's writer; raise UserError if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(f"TensorBoard is not installed; {install_command('tensorboard')} to use it.") from error
    return SummaryWriter


def _start_writer(writer_type: type[SummaryWriter], folder: Path) -> SummaryWriter:
    """Open TensorBoard's event files of a run, and write its configuration and all rows of metrics.jsonl.

    A run that was resumed or tracked before so has each round once.
    """
    run = StoredRun.read(folder)
    events = folder / EVENTS
    # Files are emptied, not removed: a running TensorBoard would wait for removed ones. `purge_step` makes it drop
    # the steps that it has read.
    for old in events.glob("events.out.tfevents.*"):
        os.truncate(old, 0)
    writer = writer_type(str(events), purge_step=0)
    writer.add_text("config", f"```toml\n{run.config}```", 0)
    ends = _round_ends(folder)  # the time of each row, as it was written in an earlier process
    for row in run.rows:
        _write(writer, row, ends.get(row["round"]))
    writer.flush()
    return writer


def _link_to_group(folder: Path, group: Path, name: str) -> None:
    """Link the event files of a run into the folder of its group, unless the run is below that folder already.

    Args:
        folder: the run folder.
        group: the folder of the sweep.
        name: the name of the link; the start of the run folder's name is added, since several runs may have it.
    """
    if folder.resolve().is_relative_to(group.resolve()):
        return
    link = group / EVENTS / folder_name(f"{name}-{folder.name[:LINK_DIGITS]}")
    link.parent.mkdir(parents=True, exist_ok=True)
    # Not every file system has links, and no relative path leads to another drive; the run is shown in its folder then.
    with suppress(OSError, ValueError):
        link.symlink_to(os.path.relpath(folder.resolve() / EVENTS, link.parent.resolve()), target_is_directory=True)


def _write(writer: SummaryWriter, row: Row, when: float | None) -> None:
    """Write the numbers of a row; `when` is the time of the row in seconds since 1970, None for now."""
    for name, value in scalars(atomic_io.replace_nonfinite(row)).items():
        writer.add_scalar(name, value, row["round"], when)


def _round_ends(folder: Path) -> dict[int, float]:
    """Estimate the end of each round of a run, in seconds since 1970, as if there was no pause between rounds.

    The last round ended when metrics.jsonl was written; the times before follow from the durations of the rounds.
    """
    path = folder / METRICS
    # A round that was repeated after a crash has several durations; `dict` keeps the last.
    durations = dict(atomic_io.read_number_pairs(folder / TIMINGS, "round", "seconds"))
    now = path.stat().st_mtime if path.exists() else 0.0
    ends = {}
    for number in sorted(durations, reverse=True):
        ends[number] = now
        now -= durations[number]
    return ends
