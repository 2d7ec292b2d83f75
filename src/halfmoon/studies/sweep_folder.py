"""The folder of a sweep: `sweep.json`, all that a table of it needs, written anew whenever a run is over."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from halfmoon.config.schema import identity
from halfmoon.core.errors import UserError
from halfmoon.report import tables
from halfmoon.report.study import SWEEP_FILE, SWEEP_FORMAT
from halfmoon.storage import atomic_io, integrity
from halfmoon.studies.grid import Cell
from halfmoon.studies.recipe import MEASURES, Recipe, Scale

CELLS, SPLITS = "cells", "splits"

Results = dict[str, dict[str, Any]]
"""What became of runs, by identity: what a run's entry in sweep.json has beside its names."""


@dataclass(frozen=True)
class SweepFolder:
    """`<out>/<recipe>[-<scale>]`; the runs lie in `<out>/cells`, by identity, and are shared with other sweeps.

    A recipe of splits trains nothing: its cells lie in `<out>/splits`, as they are no finished runs to other recipes.
    """

    out: Path
    recipe: Recipe
    scale: Scale | None
    command: str = ""
    results: Results = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.out / (f"{self.recipe.name}-{self.scale.name}" if self.scale else self.recipe.name)

    def run(self, mark: str) -> Path:
        return self.out / (SPLITS if self.recipe.kind == "splits" else CELLS) / mark[:16]

    def read(self) -> dict[str, Any]:
        """Return what its sweep.json says, nothing where there is none.

        Raise UserError where it is damaged, or of another format.
        """
        data = atomic_io.read(self.path / SWEEP_FILE)
        return {} if data is None else parse(data, self.path / SWEEP_FILE)

    def write(self, cells: Sequence[Cell]) -> None:
        """Write sweep.json; raise UserError where the disk refuses."""
        words = integrity.seal_lines(atomic_io.replace_nonfinite(self._facts(cells)))
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            atomic_io.write_atomically(self.path / SWEEP_FILE, words)
        except OSError as error:
            raise UserError(
                f"{self.path}: it cannot be written ({atomic_io.error_reason(error)}); choose another --out."
            ) from error

    def _facts(self, cells: Sequence[Cell]) -> dict[str, Any]:
        recipe = self.recipe
        present = {axis: {cell.at[axis] for cell in cells} for axis in recipe.axes}
        return {
            "format": SWEEP_FORMAT,
            **{name: getattr(recipe, name) for name in ("title", "paper", "item", "about", "kind", "rows", "x")},
            "reading": recipe.words(self.scale),
            "recipe": recipe.name,
            "measure": MEASURES[recipe.measure],
            "columns": list(recipe.columns),
            "scale": self.scale and {"name": self.scale.name, "about": self.scale.about},
            "axes": [
                {
                    "name": axis,
                    "values": [{"name": v.name, "title": v.title} for v in values if v.name in present[axis]],
                }
                for axis, values in recipe.axes.items()
            ],
            "command": self.command,
            "machine": machine(),
            "versions": {
                **{name: metadata.version(name) for name in ("halfmoon", "torch")},
                "python": platform.python_version(),
            },
            "cells": [self._cell(cell) for cell in cells],
        }

    def _cell(self, cell: Cell) -> dict[str, Any]:
        runs = []
        for seed, config in cell.configs.items():
            mark = identity(config, config.method)
            folder = os.path.relpath(self.run(mark), self.path)
            result = measured(self.results.get(mark, {"finished": False, "failed": None}), cell.measure)
            runs.append({"seed": seed, "identity": mark, "folder": folder, **result})
        return {"at": dict(cell.at), "published": cell.published and cell.published._asdict(), "runs": runs}


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """Return what a sweep.json says; raise UserError where it is damaged, or of another format."""
    try:
        facts = integrity.unseal_lines(data)
        number = facts["format"]
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove it and run the sweep again: finished runs are kept."
        ) from error
    if number != SWEEP_FORMAT:
        raise UserError(
            f"{path} has format {number}, but this halfmoon reads {SWEEP_FORMAT}; remove it and run the sweep again: runs of "
            "an equal configuration are kept."
        )
    return facts


def entry(summary: Mapping[str, Any] | None, failed: str | None = None) -> dict[str, Any]:
    """Return what sweep.json says of a run that is over."""
    if summary is None:
        return {"finished": False, "failed": failed}
    names = ("accuracy", "measured", "cost", "seconds")
    return {"finished": True, "failed": None, **{name: summary[name] for name in names if name in summary}}


def measured(result: Mapping[str, Any], measure: str) -> dict[str, Any]:
    """Return an entry whose "accuracy" is the share that its cell compares, which may be another than the test's.

    A run without such a number has failed there.
    """
    data = {name: value for name, value in result.items() if name != "measured"}
    if measure == "test" or not result["finished"]:
        return data
    accuracy = result.get("measured", {}).get(measure)
    if accuracy is None:
        return {"finished": False, "failed": f"it has recorded no {MEASURES[measure]}"}
    return {**data, "accuracy": accuracy}


def machine() -> dict[str, Any]:
    """Return what this machine is: its processor, how many cores it gives, and its GPU."""
    import torch  # slow to import

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {"cpu": _processor(), "cores": cores(), "gpu": gpu}


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    for line in (atomic_io.read(Path("/proc/cpuinfo")) or b"").decode(errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def table(facts: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows: a cell's accuracies over seeds beside the published one, or how many splits it has."""
    axes = [axis["name"] for axis in facts["axes"]]
    if facts["kind"] == "splits":
        counts = [[*(cell["at"][axis] for axis in axes), str(len(cell["runs"]))] for cell in facts["cells"]]
        return [*axes, "splits"], counts
    rows = []
    for cell in facts["cells"]:
        scores = [run["accuracy"] for run in cell["runs"] if run.get("accuracy")]
        values = [
            tables.mean_and_deviation([100 * each[name] for each in scores]) if scores else None
            for name in ("last", "best")
        ]
        paper = cell["published"]
        published = "" if paper is None else tables.format_mean(tables.MeanDeviation(paper["mean"], paper["deviation"]))
        measured = [tables.format_mean(value) or "-" for value in values]
        rows.append([*(cell["at"][axis] for axis in axes), *measured, f"{len(scores)}", published])
    return [*axes, "last %", "best %", "seeds", "published %"], rows
