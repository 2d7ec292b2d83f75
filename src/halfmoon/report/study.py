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
    """One value of an axis.

    Attributes:
        name: its name in `GridCell.at`.
        title: its title in tables and charts.
    """

    name: str
    title: str


CONFIGURATION = "configuration"
"""Name of the axis that merges several options. The name of its values lists the options, the title is a letter."""


@dataclass(frozen=True)
class Axis:
    """Something that varies over a study, such as the method, with its values in the order of the tables."""

    name: str
    values: list[AxisValue]

    def title(self, name: str) -> str:
        """Get the title of a value."""
        return next((value.title for value in self.values if value.name == name), name)


@dataclass(frozen=True)
class PublishedAccuracy:
    """A published number: mean and standard deviation of test accuracy, in percent."""

    mean: float
    deviation: float | None = None
    note: str = ""


@dataclass(frozen=True)
class RunAccuracy:
    """Accuracy of a run, or another measure of the sweep, as shares from 0 to 1.

    Attributes:
        last: that of the final model.
        best: that of the best round.
        best_round: number of this round.
    """

    last: float
    best: float | None = None
    best_round: int | None = None


@dataclass(frozen=True)
class CellRun:
    """One run of a cell.

    Attributes:
        seed: its seed.
        identity: hash of its options; "" if unknown.
        folder: path of its folder, relative to the folder of sweep.json. The folder may be missing.
        finished: whether it has finished.
        failed: the error message if it failed.
        accuracy: its accuracy, None if it is not finished or has no test images.
        cost: costs by name, as in summary.json.
        seconds: its duration.
    """

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
    """One cell of the grid.

    Attributes:
        at: its coordinates, the name of a value for each axis.
        runs: its runs, one for each seed.
        published: the published accuracy.
    """

    at: dict[str, str]
    runs: list[CellRun]
    published: PublishedAccuracy | None = None


@dataclass(frozen=True)
class StudyScale:
    """A reduced size of a paper's experiment: its name and a description."""

    name: str
    about: str


@dataclass(frozen=True)
class SweepFile:
    """The contents of sweep.json.

    Attributes:
        format: version of the file format.
        title: title of the study.
        kind: how results are shown; "splits" is a study of splits without training.
        rows: the axis of the rows.
        columns: axes of the columns, outermost first.
        axes: all axes.
        cells: all cells.
        recipe: name of the recipe.
        paper: the paper.
        item: table or figure of the paper.
        about: description of the study.
        reading: the interpretation of what the paper leaves open.
        scale: the size of the study, None for that of the paper.
        x: for lines, the axis of x.
        measure: what is measured.
        command: the command that ran the sweep.
        machine: "cpu", "cores" and "gpu".
        versions: versions of software by name.
    """

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
    """A sweep with its run folders.

    Attributes:
        sweep: the contents of sweep.json.
        runs: existing run folders by `CellRun.folder`.
        notes: sentences about missing or replaced run folders.
    """

    sweep: SweepFile
    runs: Mapping[str, StoredRun]
    notes: tuple[str, ...] = ()

    def axis(self, name: str) -> Axis:
        """Get an axis by its name."""
        return next(axis for axis in self.sweep.axes if axis.name == name)

    @property
    def row_values(self) -> list[AxisValue]:
        return self.axis(self.sweep.rows).values

    @property
    def column_axes(self) -> list[str]:
        """Axes of the columns, outermost first: those in `SweepFile.columns`, then others with several values."""
        sweep = self.sweep
        rest = [axis.name for axis in sweep.axes if axis.name not in (sweep.rows, *sweep.columns)]
        return [*sweep.columns, *(name for name in rest if len(self.axis(name).values) > 1)]

    @cached_property
    def columns(self) -> list[Column]:
        """Columns that have a cell, in the order of their axes."""
        axes = self.column_axes
        # Columns are sorted by the positions of their values on the axes, not by name.
        ranks = [{value.name: n for n, value in enumerate(self.axis(name).values)} for name in axes]
        columns = {tuple(cell.at[name] for name in axes) for cell in self.sweep.cells}
        return sorted(columns, key=lambda key: [rank[name] for rank, name in zip(ranks, key, strict=True)])

    def column_of(self, cell: GridCell) -> int:
        """Find the index of a cell's column in `columns`."""
        return self.columns.index(tuple(cell.at[name] for name in self.column_axes))

    @property
    def measured(self) -> str:
        """The measure of the sweep with a capital letter."""
        return self.sweep.measure[:1].upper() + self.sweep.measure[1:]

    def legend(self) -> dict[str, str]:
        """Collect the options of each configuration by its letter; {} without configurations."""
        axis = next((axis for axis in self.sweep.axes if axis.name == CONFIGURATION), None)
        return {value.title: value.name for value in axis.values} if axis else {}

    def column_title(self, column: Column) -> str:
        """Join the titles of a column's values."""
        return ", ".join(self.value_title(axis, name) for axis, name in zip(self.column_axes, column, strict=True))

    def value_title(self, axis: str, name: str) -> str:
        """Get the title of a value, with the name of its axis if the title is only a number."""
        title = self.axis(axis).title(name)
        return f"{axis} {title}" if is_number(title) else title

    def cell(self, row: str, column: Column) -> GridCell | None:
        """Find the cell of a row and a column."""
        return self._cells.get((row, column))

    @cached_property
    def _cells(self) -> dict[tuple[str, Column], GridCell]:
        return {(cell.at[self.sweep.rows], self.columns[self.column_of(cell)]): cell for cell in self.sweep.cells}

    def run(self, entry: CellRun) -> StoredRun | None:
        """Find the run folder of a finished run; None if it does not exist."""
        return self.runs.get(entry.folder) if entry.finished else None

    def finished(self) -> Iterator[tuple[GridCell, CellRun]]:
        """Iterate over all finished runs with their cells."""
        for cell in self.sweep.cells:
            for entry in cell.runs:
                if entry.finished:
                    yield cell, entry


def read_sweep(file: Path) -> Study:
    """Read a sweep.json, the grid of a sweep with the state of its runs, and the run folders beside it.

    Raises:
        UserError: the file is damaged or has another `format`, or a run folder cannot be read.
    """
    try:
        data = file.read_bytes()
        content = atomic_io.parse_json(data)
        # Only an object may have a checksum line.
        if isinstance(content, dict):
            content = integrity.parse_checked_lines(data)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({error}); restore it, or start the sweep again.") from error
    if not isinstance(content, dict) or content.get("format") != SWEEP_FORMAT:
        number = content.get("format") if isinstance(content, dict) else None
        raise UserError(
            f"{file} has format {number!r}, and this version of halfmoon reads format {SWEEP_FORMAT}: these results "
            "were made by another version; start the sweep again, or use that version."
        )
    try:
        # From JSON, so that lists of objects become dataclasses in strict mode as well.
        sweep = TypeAdapter(SweepFile).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        raise damage_error(error, file) from error
    _check_sweep(sweep, file)
    return _read_runs(sweep, file.parent)


def _check_sweep(sweep: SweepFile, file: Path) -> None:
    """Check that the axes and cells of a sweep.json are consistent; raise `UserError` if they are not.

    An axis has the values of something that varies, such as methods; a cell has a value of each axis, and its runs.
    """
    axes = {axis.name: {value.name for value in axis.values} for axis in sweep.axes}
    for name in [sweep.rows, *sweep.columns, *([sweep.x] if sweep.x else [])]:
        if name not in axes:
            raise UserError(f"{file} is damaged: {name!r} is not one of its axes; restore it.")
    if sweep.kind == "lines":
        if sweep.x is None:
            raise UserError(f"{file} is damaged: a study of lines needs an axis as x; restore it.")
        if not all(is_number(name) for name in axes[sweep.x]):
            raise UserError(f"{file} is damaged: the values of {sweep.x!r}, its x, are not numbers; restore it.")
    coordinates_so_far = set()
    for number, cell in enumerate(sweep.cells):
        prefix = f"{file} is damaged: cell {number}"
        if cell.at.keys() != axes.keys() or any(value not in axes[name] for name, value in cell.at.items()):
            raise UserError(f"{prefix} does not name one value of each axis; restore it.")
        coordinates = tuple(sorted(cell.at.items()))
        if coordinates in coordinates_so_far:
            raise UserError(f"{prefix} has the coordinates of another cell; restore it.")
        coordinates_so_far.add(coordinates)
        if sweep.kind == "splits":
            continue  # its runs only draw splits: they train nothing, and have neither accuracy nor cost
        for entry in cell.runs:
            if entry.finished and (entry.accuracy is None or entry.cost is None):
                raise UserError(f"{prefix}, seed {entry.seed}, is finished but has no accuracy or cost; restore it.")


def is_number(text: str) -> bool:
    """Check whether a text is a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def number_to_letters(number: int) -> str:
    """Convert a number from 0 to letters: A to Z, AA, AB, ..."""
    prefix = number_to_letters(number // 26 - 1) if number >= 26 else ""
    return prefix + chr(ord("A") + number % 26)


def _read_runs(sweep: SweepFile, root: Path) -> Study:
    """Read the folders of a sweep's finished runs, and note those that are missing or now contain another run.

    Args:
        sweep: the contents of sweep.json, with the folder and the identity (a hash of the options) of each run.
        root: the folder of sweep.json, in which the paths of run folders start.
    """
    runs: dict[str, StoredRun] = {}
    missing = 0
    replaced = 0
    entries = [entry for cell in sweep.cells for entry in cell.runs if entry.finished]
    for entry in entries:
        path = root / entry.folder
        if not entry.folder or not (path / "config.toml").exists():
            missing += 1
            continue
        run = StoredRun.read(path)
        # Another run may have been written into the folder since.
        if entry.identity and run.head.get("identity", entry.identity) != entry.identity:
            replaced += 1
            continue
        runs[entry.folder] = run
    notes = []
    if missing:
        notes.append(f"The folders of {missing} of {len(entries)} finished runs are missing: no charts of those.")
    if replaced:
        notes.append(f"The folders of {replaced} finished runs now contain another run: no charts of those.")
    return Study(sweep, runs, tuple(notes))


def describe_scale(scale: StudyScale | None) -> str:
    """Describe the size of a study, for a note at each table; "" for the paper's size."""
    if scale is None:
        return ""
    about = scale.about.rstrip(".")
    warning = "" if "not the paper's experiment" in about else "not the paper's experiment: "
    return f"Scale “{scale.name}”: {warning}{about}."


def has_numbers(studies: Sequence[Study]) -> bool:
    """Check whether any study has results: a finished run, or a split for studies of splits."""
    for study in studies:
        if not any(study.finished()):
            continue
        if study.sweep.kind != "splits" or any(run.split for run in study.runs.values()):
            return True
    return False
