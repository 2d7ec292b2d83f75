"""Results of runs, comparisons and sweeps as objects: a line, a table, data frames and figures."""

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

MAX_NAMES = 4
"""Largest number of methods in one line."""


class Results:
    """The runs of a folder, finished or not: `halfmoon.run`, `compare`, `resume` and `load_run` return them.

    Attributes:
        folder: the folder of a run, a comparison or a sweep.
        runs: the run folders in it.
        curves: the figure of the learning curves.
        tables: the tables as CSV and Markdown.
    """

    def __init__(self, folder: Path, runs: Sequence[Path]) -> None:
        """Refer to the runs of a folder; they are read at the first use.

        Args:
            folder: the folder of a run, a comparison or a sweep.
            runs: the run folders in it.
        """
        self.folder = folder
        self.runs = list(runs)
        self.curves = folder / CURVES
        self.tables = [folder / CSV, folder / MARKDOWN]

    @property
    def _short_folder(self) -> str:
        is_below = self.folder.absolute().is_relative_to(Path.cwd())
        return str(self.folder.absolute().relative_to(Path.cwd()) if is_below else self.folder)

    @cached_property
    def _stored_runs(self) -> list[StoredRun]:
        return [StoredRun.read(path) for path in self.runs]

    @property
    def summaries(self) -> list[Row]:
        """The summary.json of each finished run, in the order of `runs`."""
        return [run.summary for run in self._stored_runs if run.summary is not None]

    @cached_property
    def _table(self) -> tables.ComparisonTable:
        return tables.comparison_table([summary for summary in self.summaries if summary["accuracy"]])

    @property
    def summary(self) -> pd.DataFrame:
        """A data frame with a row for each method over its seeds: accuracies in percent, costs, and standard deviations."""
        return pd.read_csv(io.StringIO(self._table.as_csv()), index_col="method")

    @property
    def differences(self) -> pd.DataFrame:
        """A data frame with the difference of each method to the control (without one: to labels only) in points.

        It has the 95 % interval and p, paired by seed; it is empty for a single seed.
        """
        paired = compare_methods(self.summaries, registry.ceilings())
        return pd.DataFrame(paired.as_json()["rows"] if paired else [])

    @property
    def decision(self) -> Row | None:
        """The decision whether unlabeled images help in a folder of images: "sentence", "mean", "low", "high", ...

        None for other runs, and if only one split was run.
        """
        return atomic_io.read_json(self.folder / DECISION)

    @property
    def model(self) -> Model:
        """The trained model of the first finished run; `halfmoon.load_model(results.runs[1])` is another one."""
        first = self.runs[0] if self.runs else self.folder
        return load_model(next((path for path in self.runs if (path / MODEL).exists()), first))

    def to_frame(self) -> pd.DataFrame:
        """Make a data frame with a row for each run, round and metric: run, method, seed, round, metric, value.

        Accuracies and shares are in percent; "megabytes" and "seconds" are totals since the first round.
        """
        rows = [
            (run.path.name, str(run.options.get("method")), run.options.get("seed", 0), *point)
            for run in self._stored_runs
            for point in frame.iterate_points(run)
        ]
        return pd.DataFrame(rows, columns=["run", "method", "seed", "round", "metric", "value"])

    def plot(self, metric: str = "accuracy", axes: Any = None) -> Any:
        """Draw a metric of `to_frame` by round, several seeds as their mean in a band; return the axes.

        Args:
            metric: accuracy, loss, or another metric of `to_frame`.
            axes: axes of Matplotlib to draw into; None for a new figure.

        Raises:
            UserError: there is no such metric.
        """
        from halfmoon.report.curves import draw_metric  # Matplotlib is slow to import

        if metric not in frame.METRICS:
            raise UserError(f"there is no metric {metric!r}: {suggest(metric, frame.METRICS)}")
        if axes is None:
            from matplotlib import pyplot

            axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")[1]
        draw_metric(self._stored_runs, metric, axes)
        return axes

    def __repr__(self) -> str:
        texts = [f"{name} {value:.1f} %" for name, value in self.summary["last_percent"].items()]
        open_runs = [f"{run.title}: {len(run.rows)} rounds so far" for run in self._stored_runs if run.summary is None]
        if len(texts) > MAX_NAMES:
            texts = [*texts[:MAX_NAMES], "..."]
        texts += open_runs[:MAX_NAMES]
        if decision := self.decision:
            texts.append(decision["sentence"])
        count = f"{len(self.runs)} run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        return f"<{count} in {self._short_folder}{': ' if texts else ''}{', '.join(texts)}>"

    def _repr_html_(self) -> str:
        table = tables.ComparisonTable(self._table.lines, wide=False)
        pieces = [html_table(table.headings, table.cells)] if table.lines else []
        ceilings = registry.ceilings()
        if paired := compare_methods(self.summaries, ceilings):
            pieces += [html_table(paired.headings, paired.cells), f"<p>{escape(paired.sentence)}</p>"]
        sentences = [describe_gain(self.summaries, ceilings), *list_remarks(self.summaries, ceilings)]
        sentences += [
            f"{run.title}: {len(run.rows)} rounds, not finished." for run in self._stored_runs if not run.summary
        ]
        if decision := self.decision:
            sentences.append(decision["sentence"])
        pieces += [f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence]
        return "".join([*pieces, f"<p><code>{escape(self._short_folder)}</code></p>"])


class SweepResults(Results):
    """The cells of a sweep with their runs: `halfmoon.sweep` and `load_run` return them.

    Attributes:
        study: the sweep as stored in its file.
    """

    def __init__(self, folder: Path) -> None:
        """Read the `folder` of a sweep."""
        self.study = study.read_sweep(folder / study.SWEEP_FILE)
        entries = [entry for _, entry in self.study.finished()]
        super().__init__(folder, [run.path for entry in entries if (run := self.study.run(entry)) is not None])

    @property
    def summary(self) -> pd.DataFrame:
        """A data frame with a row for each cell: its axes, accuracies over seeds, and the published accuracy."""
        names, cells = self._cells
        return pd.DataFrame(cells, columns=names)

    @property
    def _cells(self) -> tuple[list[str], list[list[str]]]:
        path = self.folder / study.SWEEP_FILE
        return sweep_folder.build_table(sweep_folder.parse_sweep_file(path.read_bytes(), path))

    def to_frame(self) -> pd.DataFrame:
        """Make the data frame of `Results.to_frame`, with a column "axis:NAME" for each axis of the sweep."""
        runs = ((cell, self.study.run(entry)) for cell, entry in self.study.finished())
        frames = []
        for cell, run in runs:
            if run is not None:
                axes = {f"axis:{axis}": value for axis, value in cell.at.items()}
                frames.append(Results(self.folder, [run.path]).to_frame().assign(**axes))
        return pd.concat(frames, ignore_index=True) if frames else super().to_frame()

    def __repr__(self) -> str:
        count = sum(1 for _ in self.study.finished())
        return f"<sweep in {self._short_folder}: {count} runs of {len(self.study.sweep.cells)} cells. {write_headline(self.study)}>"

    def _repr_html_(self) -> str:
        sentences = [write_headline(self.study), study.describe_scale(self.study.sweep.scale), *self.study.notes]
        lines = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence)
        return f"{html_table(*self._cells)}{lines}<p><code>{escape(self._short_folder)}</code></p>"


def html_table(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Render a table of texts as HTML."""
    head = "".join(f"<th>{escape(name)}</th>" for name in headings)
    rows = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells]
    return f"<table><thead><tr>{head}</tr></thead><tbody><tr>{'</tr><tr>'.join(rows)}</tr></tbody></table>"


def load_results(folder: Path) -> Results:
    """Load a run, a comparison, a sweep or a federation; raise `UserError` if a folder is none of these."""
    if (folder / study.SWEEP_FILE).is_file():
        return SweepResults(folder)
    run_paths = [run.path for run in gather.read_runs(folder)]
    # A comparison lists its runs in the order of its methods.
    jobs = [path for path in gather.list_job_folders(folder) if path in run_paths]
    return Results(folder, jobs or run_paths)
