"""Results as objects: what runs, comparisons and sweeps came to, as a line, a table, a data frame or a picture."""

import io
from collections.abc import Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from halfmoon.core.errors import UserError, suggest
from halfmoon.engine.loop import Row
from halfmoon.methods import registry
from halfmoon.notebook.trained import Model, load_model
from halfmoon.report import frame, gather, study, tables
from halfmoon.report.headline import write_headline
from halfmoon.report.paired import compare_methods
from halfmoon.report.remarks import describe_gain, list_remarks
from halfmoon.report.run_reader import StoredRun
from halfmoon.runs.runner import CSV, CURVES, MARKDOWN
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import DECISION, MODEL
from halfmoon.studies import sweep_folder

NAMES = 4  # methods that a line names at most


class Results:
    """The runs of a folder, finished or not: `halfmoon.run`, `compare`, `resume` and `load_run` return them."""

    def __init__(self, folder: Path, runs: Sequence[Path]) -> None:
        """Look at the `runs` of a `folder`; they are read when they are first asked for."""
        self.folder, self.runs = folder, list(runs)
        self.curves, self.tables = folder / CURVES, [folder / CSV, folder / MARKDOWN]

    @property
    def _place(self) -> str:
        near = self.folder.absolute().is_relative_to(Path.cwd())
        return str(self.folder.absolute().relative_to(Path.cwd()) if near else self.folder)

    @cached_property
    def _read(self) -> list[StoredRun]:
        return [StoredRun.read(path) for path in self.runs]

    @property
    def summaries(self) -> list[Row]:
        """What each finished run says of itself (summary.json), in the order of `runs`."""
        return [run.summary for run in self._read if run.summary is not None]

    @cached_property
    def _table(self) -> tables.ComparisonTable:
        return tables.comparison_table([each for each in self.summaries if each["accuracy"]])

    @property
    def summary(self) -> pd.DataFrame:
        """A row a method over its seeds: accuracies in percent, costs, and their standard deviations, as table.csv."""
        return pd.read_csv(io.StringIO(self._table.as_csv()), index_col="method")

    @property
    def differences(self) -> pd.DataFrame:
        """Each method against labels alone: points, 95 % interval and p, paired by seed; empty for a single seed."""
        paired = compare_methods(self.summaries, registry.ceilings())
        return pd.DataFrame(paired.as_json()["rows"] if paired else [])

    @property
    def decision(self) -> Row | None:
        """Whether unlabeled images help, of images of one's own: "sentence", "mean", "low", "high" and others.

        None where it was not asked, or one split was played.
        """
        return atomic_io.read_json(self.folder / DECISION)

    @property
    def model(self) -> Model:
        """The trained model of the first finished run; `halfmoon.load_model(results.runs[1])` is another one."""
        first = self.runs[0] if self.runs else self.folder
        return load_model(next((path for path in self.runs if (path / MODEL).exists()), first))

    def to_frame(self) -> pd.DataFrame:
        """Return a row for each run, round and metric: run, method, seed, round, metric, value.

        Accuracies and shares are percent, "megabytes" and "seconds" are since the beginning.
        """
        rows = [
            (run.path.name, str(run.options.get("method")), run.options.get("seed", 0), *point)
            for run in self._read
            for point in frame.iterate_points(run)
        ]
        return pd.DataFrame(rows, columns=["run", "method", "seed", "round", "metric", "value"])

    def plot(self, metric: str = "accuracy", axes: Any = None) -> Any:
        """Draw a metric of `to_frame` against the rounds, several seeds as their mean in a band; return the axes.

        Args:
            metric: accuracy, loss and others, as `to_frame` has them.
            axes: of Matplotlib, to draw into.

        Raises:
            UserError: there is no such metric.
        """
        from halfmoon.report.curves import draw_metric  # Matplotlib is slow to import

        if metric not in frame.METRICS:
            raise UserError(f"there is no metric {metric!r}: {suggest(metric, frame.METRICS)}")
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")[1]
        draw_metric(self._read, metric, axes)
        return axes

    def __repr__(self) -> str:
        words = [f"{name} {value:.1f} %" for name, value in self.summary["last_percent"].items()]
        open_runs = [f"{run.title}: {len(run.rows)} rounds so far" for run in self._read if run.summary is None]
        words = [*words[:NAMES], *(["..."] if len(words) > NAMES else []), *open_runs[:NAMES]]
        words += [decision["sentence"]] if (decision := self.decision) else []
        count = f"{len(self.runs)} run{'s'[: len(self.runs) != 1]}"
        return f"<{count} in {self._place}{': ' if words else ''}{', '.join(words)}>"

    def _repr_html_(self) -> str:
        table = tables.ComparisonTable(self._table.lines, wide=False)
        parts = [html_table(table.headings, table.cells)] if table.lines else []
        ceilings = registry.ceilings()
        if paired := compare_methods(self.summaries, ceilings):
            parts += [html_table(paired.headings, paired.cells), f"<p>{escape(paired.sentence)}</p>"]
        sentences = [describe_gain(self.summaries, ceilings), *list_remarks(self.summaries, ceilings)]
        sentences += [f"{run.title}: {len(run.rows)} rounds, not finished." for run in self._read if not run.summary]
        sentences += [decision["sentence"]] if (decision := self.decision) else []
        parts += [f"<p>{escape(words)}</p>" for words in sentences if words]
        return "".join([*parts, f"<p><code>{escape(self._place)}</code></p>"])


class SweepResults(Results):
    """The cells of a sweep with their runs: `halfmoon.sweep` and `load_run` return them."""

    def __init__(self, folder: Path) -> None:
        """Read the `folder` of a sweep."""
        self.study = study.read_sweep(folder / study.SWEEP_FILE)  # the sweep as its file has it
        entries = [entry for _, entry in self.study.finished()]
        super().__init__(folder, [run.path for entry in entries if (run := self.study.run(entry)) is not None])

    @property
    def summary(self) -> pd.DataFrame:
        """A row a cell: its axes, accuracies over seeds beside the published one."""
        names, cells = self._cells
        return pd.DataFrame(cells, columns=names)

    @property
    def _cells(self) -> tuple[list[str], list[list[str]]]:
        path = self.folder / study.SWEEP_FILE
        return sweep_folder.table(sweep_folder.parse(path.read_bytes(), path))

    def to_frame(self) -> pd.DataFrame:
        """Return what runs have, with the axes of the sweep as columns behind: "axis:NAME"."""
        runs = ((cell, self.study.run(entry)) for cell, entry in self.study.finished())
        parts = [
            Results(self.folder, [run.path]).to_frame().assign(**{f"axis:{axis}": at for axis, at in cell.at.items()})
            for cell, run in runs
            if run is not None
        ]
        return pd.concat(parts, ignore_index=True) if parts else super().to_frame()

    def __repr__(self) -> str:
        count = sum(1 for _ in self.study.finished())
        return f"<sweep in {self._place}: {count} runs of {len(self.study.sweep.cells)} cells. {write_headline(self.study)}>"

    def _repr_html_(self) -> str:
        words = [write_headline(self.study), study.describe_scale(self.study.sweep.scale), *self.study.notes]
        lines = "".join(f"<p>{escape(each)}</p>" for each in words if each)
        return f"{html_table(*self._cells)}{lines}<p><code>{escape(self._place)}</code></p>"


def html_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a table of texts as HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells]
    return f"<table><thead><tr>{head}</tr></thead><tbody><tr>{'</tr><tr>'.join(rows)}</tr></tbody></table>"


def results_in(folder: Path) -> Results:
    """Return what a folder holds: a run, a comparison, a sweep or a federation; raise `UserError` where it is none."""
    if (folder / study.SWEEP_FILE).is_file():
        return SweepResults(folder)
    here = [run.path for run in gather.read_runs(folder)]
    jobs = [path for path in gather.list_job_folders(folder) if path in here]
    return Results(folder, jobs or here)
