"""Folder of a sweep: `sweep.json` has all data for a table of it, and is rewritten whenever a run is over."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from halfmoon.config.schema import identity
from halfmoon.core.errors import UserError
from halfmoon.core.versions import installed_version
from halfmoon.report import tables
from halfmoon.report.study import SWEEP_FILE, SWEEP_FORMAT
from halfmoon.storage import atomic_io, integrity
from halfmoon.studies.grid import RecipeCell
from halfmoon.studies.recipe import MEASURES, Recipe, Scale

RUNS_FOLDER = "cells"
"""Name of the folder with the runs of all sweeps."""

SPLITS_FOLDER = "splits"
"""Name of the folder with the splits that recipes of kind "splits" make."""

IDENTITY_DIGITS = 16
"""Leading hexadecimal digits of a run's identity that name its folder."""

RunEntries = dict[str, dict[str, Any]]
"""The outcomes of runs by identity: the fields of a run's entry in sweep.json that depend on its result."""


@dataclass(frozen=True)
class SweepFolder:
    """The folder `<out>/<recipe>[-<scale>]` of a sweep.

    The runs are in `<out>/cells`, named by identity, and shared with other sweeps. A recipe of kind "splits" does not
    train: its splits are in `<out>/splits`, so that other recipes do not mistake them for finished runs.

    Attributes:
        out: The parent folder.
        recipe: The recipe.
        scale: The scaled-down version, or None for the full experiment.
        command: The command that runs the sweep, for its report.
        results: The outcomes of runs that this process knows; updated in place.
    """

    out: Path
    recipe: Recipe
    scale: Scale | None
    command: str = ""
    results: RunEntries = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The sweep's folder."""
        return self.out / (f"{self.recipe.name}-{self.scale.name}" if self.scale else self.recipe.name)

    def run_path(self, run_id: str) -> Path:
        """Return the folder of the run with this identity."""
        parent = SPLITS_FOLDER if self.recipe.kind == "splits" else RUNS_FOLDER
        return self.out / parent / run_id[:IDENTITY_DIGITS]

    def read(self) -> dict[str, Any]:
        """Read sweep.json; return an empty table if there is none.

        Raises:
            UserError: If it is damaged or has another format.
        """
        data = atomic_io.read(self.path / SWEEP_FILE)
        return {} if data is None else parse_sweep_file(data, self.path / SWEEP_FILE)

    def write(self, cells: Sequence[RecipeCell]) -> None:
        """Write sweep.json with these cells of the recipe's table, and the results of their finished runs.

        Raises:
            UserError: If the file cannot be written.
        """
        data = integrity.format_checked_lines(atomic_io.replace_nonfinite(self._contents(cells)))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            atomic_io.write_atomically(self.path / SWEEP_FILE, data)
        except OSError as error:
            raise UserError(
                f"{self.path}: it cannot be written ({atomic_io.error_reason(error)})",
                option="out",
                hint="choose another {out}.",
            ) from error

    def _contents(self, cells: Sequence[RecipeCell]) -> dict[str, Any]:
        """Build the contents of sweep.json: the table that is reproduced, how and where it was run, and its cells."""
        recipe = self.recipe
        axes: list[dict[str, Any]] = []
        for axis, values in recipe.axes.items():
            used_names = {cell.at[axis] for cell in cells}
            used_values = [{"name": value.name, "title": value.title} for value in values if value.name in used_names]
            axes.append({"name": axis, "values": used_values})
        return {
            "format": SWEEP_FORMAT,
            **{name: getattr(recipe, name) for name in ("title", "paper", "item", "about", "kind", "rows", "x")},
            "reading": recipe.describe_reading(self.scale),
            "recipe": recipe.name,
            "measure": MEASURES[recipe.measure],
            "columns": list(recipe.columns),
            "scale": self.scale and {"name": self.scale.name, "about": self.scale.about},
            "axes": axes,
            "command": self.command,
            "machine": detect_machine(),
            "versions": {
                **{name: installed_version(name) for name in ("halfmoon", "torch")},
                "python": platform.python_version(),
            },
            "cells": [self._cell_entry(cell) for cell in cells],
        }

    def _cell_entry(self, cell: RecipeCell) -> dict[str, Any]:
        """Build the entry of a table's cell in sweep.json: its values, the paper's number, and a run for each seed."""
        runs = []
        for seed, config in cell.configs.items():
            run_id = identity(config, config.method)
            # A relative path, so that the output folder can be moved as a whole.
            folder = os.path.relpath(self.run_path(run_id), self.path)
            entry = self.results.get(run_id, {"finished": False, "failed": None})
            result = select_measure(entry, cell.measure)
            runs.append({"seed": seed, "identity": run_id, "folder": folder, **result})
        return {"at": dict(cell.at), "published": cell.published and cell.published._asdict(), "runs": runs}


def parse_sweep_file(data: bytes, path: Path) -> dict[str, Any]:
    """Parse the contents of a sweep.json.

    Args:
        data: The file's bytes.
        path: The file, for messages.

    Returns:
        Its fields.

    Raises:
        UserError: If it is damaged or has another format.
    """
    try:
        contents = integrity.parse_checked_lines(data)
        file_format = contents["format"]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove it and run the sweep again: finished runs are reused."
        ) from error
    if file_format != SWEEP_FORMAT:
        raise UserError(
            f"{path} has format {file_format}, but this halfmoon reads {SWEEP_FORMAT}; remove it and run the sweep again: "
            "finished runs of an equal configuration are reused."
        )
    return contents


def make_run_entry(summary: Mapping[str, Any] | None, failed: str | None = None) -> dict[str, Any]:
    """Make the entry of a run for sweep.json.

    Args:
        summary: The summary of a finished run, or None.
        failed: The reason of a failure.

    Returns:
        The entry, without the run's seed, identity and folder.
    """
    if summary is None:
        return {"finished": False, "failed": failed}
    names = ("accuracy", "measured", "cost", "seconds")
    return {"finished": True, "failed": None, **{name: summary[name] for name in names if name in summary}}


def select_measure(entry: Mapping[str, Any], measure: str) -> dict[str, Any]:
    """Replace the "accuracy" of a run's entry by the quantity that its cell compares.

    Args:
        entry: The run's entry.
        measure: The quantity, one of `halfmoon.studies.recipe.MEASURES`.

    Returns:
        The entry; that of a failed run if the run did not record the quantity.
    """
    selected = {name: value for name, value in entry.items() if name != "measured"}
    if measure == "test" or not entry["finished"]:
        return selected
    accuracy = entry.get("measured", {}).get(measure)
    if accuracy is None:
        return {"finished": False, "failed": f"it has recorded no {MEASURES[measure]}"}
    return {**selected, "accuracy": accuracy}


def detect_machine() -> dict[str, Any]:
    """Detect this machine's processor, its cores that this process may use, and its GPU."""
    import torch  # slow to import

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {"cpu": _processor_name(), "cores": count_cores(), "gpu": gpu}


def count_cores() -> int:
    """Count the cores that this process may use."""
    # In a container or a batch job the process may be bound to fewer cores than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_name() -> str:
    """Return the processor's model name, or its architecture if the system does not report a model."""
    # On Linux platform.processor() returns only the architecture, or an empty text.
    for line in (atomic_io.read(Path("/proc/cpuinfo")) or b"").decode(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def build_table(contents: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Build a text table of a sweep.

    Args:
        contents: The contents of sweep.json.

    Returns:
        Headings and rows, one row a cell: its accuracies in percent over seeds and the published one. For a recipe of
        kind "splits", its number of splits.
    """
    axes = [axis["name"] for axis in contents["axes"]]
    if contents["kind"] == "splits":
        rows = [[*(cell["at"][axis] for axis in axes), str(len(cell["runs"]))] for cell in contents["cells"]]
        return [*axes, "splits"], rows
    rows = [[*(cell["at"][axis] for axis in axes), *_accuracy_texts(cell)] for cell in contents["cells"]]
    return [*axes, "last %", "best %", "seeds", "published %"], rows


def _accuracy_texts(cell: dict[str, Any]) -> list[str]:
    """Format the last four columns of a cell's row in `build_table`.

    Returns:
        The accuracy after the last round and that of the best round, as mean and deviation over seeds in percent, "-"
        without any; the number of finished seeds; and the published accuracy, "" if the paper has none.
    """
    # A run without an accuracy is not finished, or has failed.
    accuracies = [run["accuracy"] for run in cell["runs"] if run.get("accuracy")]
    measured: list[str] = []
    for name in ("last", "best"):
        percent = [100 * accuracy[name] for accuracy in accuracies]
        mean = tables.mean_and_deviation(percent) if percent else None
        measured.append(tables.format_mean(mean) or "-")
    published = cell["published"]
    published_text = ""
    if published is not None:
        published_text = tables.format_mean(tables.MeanDeviation(published["mean"], published["deviation"]))
    return [*measured, str(len(accuracies)), published_text]
