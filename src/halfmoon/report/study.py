"""A study: the cells of a sweep with their runs, read from sweep.json."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from halfmoon.core.errors import UserError
from halfmoon.report.run_reader import StoredRun, damage_error
from halfmoon.storage import atomic_io, integrity

Column = tuple[str, ...]
"""A column of a table: a value name for each of `Study.column_axes`."""

SWEEP_FORMAT = 1
"""The version of sweep.json that is read here."""

SWEEP_FILE = "sweep.json"
TEST_ACCURACY = "test accuracy"
"""The measure of most sweeps."""


@dataclass(frozen=True)
class AxisValue:
    """One value of an axis: its name in `Cell.at`, and how it is shown."""

    name: str
    title: str


CONFIGURATION = "configuration"
"""The axis of columns that stands for several options at once: a value's name lists them, its title is a letter."""


@dataclass(frozen=True)
class Axis:
    """One thing that varies over a study, with its values in the order of the tables."""

    name: str
    values: list[AxisValue]

    def title(self, name: str) -> str:
        return next((value.title for value in self.values if value.name == name), name)


@dataclass(frozen=True)
class PublishedAccuracy:
    """A published number: mean and standard deviation of test accuracy, in percent."""

    mean: float
    deviation: float | None = None
    note: str = ""


@dataclass(frozen=True)
class RunAccuracy:
    """The measure of a run as shares: of the final model and of the best round."""

    last: float
    best: float | None = None
    best_round: int | None = None


@dataclass(frozen=True)
class CellRun:
    """One run of a cell; `folder` is relative to the folder of sweep.json and may be absent."""

    seed: int
    identity: str = ""
    folder: str = ""
    finished: bool = False
    failed: str | None = None
    accuracy: RunAccuracy | None = None
    cost: dict[str, int | float | None] | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class GridCell:
    """One place of the grid: {axis: value name}, the published number, and the runs, one a seed."""

    at: dict[str, str]
    runs: list[CellRun]
    published: PublishedAccuracy | None = None


@dataclass(frozen=True)
class StudyScale:
    """How a study departs in size from the paper's experiment."""

    name: str
    about: str


@dataclass(frozen=True)
class SweepFile:
    """The content of sweep.json."""

    format: int
    title: str
    kind: Literal["table", "lines", "curves", "splits"]
    rows: str
    columns: list[str]
    axes: list[Axis]
    cells: list[GridCell]
    recipe: str = ""
    paper: str = ""
    item: str = ""
    about: str = ""
    reading: str = ""
    scale: StudyScale | None = None
    x: str | None = None
    measure: str = TEST_ACCURACY
    command: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Study:
    """A sweep with the run folders that are there, by `StudyCell.folder`.

    `notes` are sentences about what is missing, as far as reading found it.
    """

    sweep: SweepFile
    runs: Mapping[str, StoredRun]
    notes: tuple[str, ...] = ()

    def axis(self, name: str) -> Axis:
        return next(axis for axis in self.sweep.axes if axis.name == name)

    @property
    def row_values(self) -> list[AxisValue]:
        return self.axis(self.sweep.rows).values

    @property
    def column_axes(self) -> list[str]:
        """The axes of the columns, outermost first: those named, then any other that varies."""
        sweep = self.sweep
        rest = [axis.name for axis in sweep.axes if axis.name not in (sweep.rows, *sweep.columns)]
        return [*sweep.columns, *(name for name in rest if len(self.axis(name).values) > 1)]

    @cached_property
    def columns(self) -> list[Column]:
        """The columns that hold a cell, in the order of their axes."""
        axes = self.column_axes
        ranks = [{value.name: n for n, value in enumerate(self.axis(name).values)} for name in axes]
        columns = {tuple(cell.at[name] for name in axes) for cell in self.sweep.cells}
        return sorted(columns, key=lambda key: [rank[name] for rank, name in zip(ranks, key, strict=True)])

    def column_of(self, cell: GridCell) -> int:
        """Return the place of a cell's column in `columns`."""
        return self.columns.index(tuple(cell.at[name] for name in self.column_axes))

    @property
    def measured(self) -> str:
        return self.sweep.measure[:1].upper() + self.sweep.measure[1:]

    def legend(self) -> dict[str, str]:
        """Return the options behind the letters of configurations, {} where there are none."""
        axis = next((axis for axis in self.sweep.axes if axis.name == CONFIGURATION), None)
        return {value.title: value.name for value in axis.values} if axis else {}

    def column_title(self, column: Column) -> str:
        return ", ".join(self.value_title(axis, name) for axis, name in zip(self.column_axes, column, strict=True))

    def value_title(self, axis: str, name: str) -> str:
        """Return the title of a value; a bare number gets the name of its axis."""
        title = self.axis(axis).title(name)
        return f"{axis} {title}" if is_number(title) else title

    def cell(self, row: str, column: Column) -> GridCell | None:
        return self._cells.get((row, column))

    @cached_property
    def _cells(self) -> dict[tuple[str, Column], GridCell]:
        return {(cell.at[self.sweep.rows], self.columns[self.column_of(cell)]): cell for cell in self.sweep.cells}

    def run(self, entry: CellRun) -> StoredRun | None:
        """Return the run folder of a finished entry, None where it is not there."""
        return self.runs.get(entry.folder) if entry.finished else None

    def finished(self) -> Iterator[tuple[GridCell, CellRun]]:
        yield from ((cell, entry) for cell in self.sweep.cells for entry in cell.runs if entry.finished)


def read_sweep(file: Path) -> Study:
    """Read a sweep.json and the run folders that it names.

    Raise UserError if the file is damaged, has another `format`, or a run folder cannot be read.
    """
    try:
        data = file.read_bytes()
        head = atomic_io.parse_json(data)
        if isinstance(head, dict):
            head = integrity.unseal_lines(data)
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error}); restore it, or start the sweep again.") from error
    if not isinstance(head, dict) or head.get("format") != SWEEP_FORMAT:
        number = head.get("format") if isinstance(head, dict) else None
        raise UserError(
            f"{file} has format {number!r}, and this version of halfmoon reads format {SWEEP_FORMAT}: these results "
            "were made by another version; start the sweep again, or use that version."
        )
    try:
        sweep = TypeAdapter(SweepFile).validate_json(json.dumps(head), strict=True)
    except ValidationError as error:
        raise damage_error(error, file) from error
    _check_sweep(sweep, file)
    return _read_runs(sweep, file.parent)


def _check_sweep(sweep: SweepFile, file: Path) -> None:
    """Refuse a sweep whose parts do not belong together."""
    axes = {axis.name: {value.name for value in axis.values} for axis in sweep.axes}
    for name in [sweep.rows, *sweep.columns, *([sweep.x] if sweep.x else [])]:
        if name not in axes:
            raise UserError(f"{file} is damaged: {name!r} is no axis of it; restore it.")
    if sweep.kind == "lines":
        if sweep.x is None:
            raise UserError(f"{file} is damaged: a study of lines needs an axis as x; restore it.")
        if not all(is_number(name) for name in axes[sweep.x]):
            raise UserError(f"{file} is damaged: the values of {sweep.x!r}, its x, are no numbers; restore it.")
    places = set()
    for number, cell in enumerate(sweep.cells):
        where = f"{file} is damaged: cell {number}"
        if cell.at.keys() != axes.keys() or any(value not in axes[name] for name, value in cell.at.items()):
            raise UserError(f"{where} does not name one value of each axis; restore it.")
        place = tuple(sorted(cell.at.items()))
        if place in places:
            raise UserError(f"{where} is there twice; restore it.")
        places.add(place)
        for entry in cell.runs:
            if entry.finished and sweep.kind != "splits" and (entry.accuracy is None or entry.cost is None):
                raise UserError(f"{where}, seed {entry.seed}, is finished but has no accuracy or cost; restore it.")


def is_number(word: str) -> bool:
    """Return whether a word is a finite number."""
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False


def number_to_letters(number: int) -> str:
    """Return A to Z, AA, AB, ... for numbers from 0."""
    return (number_to_letters(number // 26 - 1) if number >= 26 else "") + chr(ord("A") + number % 26)


def _read_runs(sweep: SweepFile, root: Path) -> Study:
    """Read the folders of the finished runs, and note those that are absent or hold another run by now."""
    runs: dict[str, StoredRun] = {}
    absent, other = 0, 0
    entries = [entry for cell in sweep.cells for entry in cell.runs if entry.finished]
    for entry in entries:
        path = root / entry.folder
        if not entry.folder or not (path / "config.toml").exists():
            absent += 1
            continue
        run = StoredRun.read(path)
        if entry.identity and run.head.get("identity", entry.identity) != entry.identity:
            other += 1
            continue
        runs[entry.folder] = run
    notes = []
    if absent:
        notes.append(f"The folders of {absent} of {len(entries)} finished runs are not here: no charts of those.")
    if other:
        notes.append(f"The folders of {other} finished runs hold another run by now: no charts of those.")
    return Study(sweep, runs, tuple(notes))


def describe_scale(scale: StudyScale | None) -> str:
    """Return the sentence that every table of a scaled study carries, "" for the paper's own size."""
    if scale is None:
        return ""
    about = scale.about.rstrip(".")
    loud = "" if "not the paper's experiment" in about else "not the paper's experiment: "
    return f"Scale “{scale.name}”: {loud}{about}."


def has_numbers(studies: Sequence[Study]) -> bool:
    """Return whether any study has something to show: a finished run, or for kind splits a split."""
    return any(
        study.sweep.kind != "splits" or any(run.split for run in study.runs.values())
        for study in studies
        if any(study.finished())
    )
