"""Results of runs, comparisons and sweeps as objects: a line, a table, data frames and figures."""

import io
from collections.abc import Collection, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pandas as pd

from halfmoon.core.errors import UserError, suggest
from halfmoon.engine.loop import Row
from halfmoon.methods import registry
from halfmoon.report import frame, gather, study, tables
from halfmoon.report.headline import write_headline
from halfmoon.report.latex import escape_latex, format_latex
from halfmoon.report.metrics import METRIC_NAMES, METRICS
from halfmoon.report.paired import compare_methods
from halfmoon.report.remarks import describe_gain, list_remarks
from halfmoon.report.run_reader import StoredRun
from halfmoon.runs.python_progress import in_notebook
from halfmoon.runs.runner import CSV, CURVES, MARKDOWN
from halfmoon.sites.inference.model import Model, load_model
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import DECISION, MODEL, SCRATCH_TRIAL
from halfmoon.studies import sweep_folder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PSEUDO_LABELS_METRICS = ("pseudo_label_accuracy", "used_share")
"""Metrics of `plot(kind="pseudo_labels")`."""

MAX_NAMES = 4
"""Largest number of methods in one line."""


class Results:
    """The runs of a folder, finished or not: `halfmoon.run`, `compare`, `resume` and `load_run` return them.

    Attributes:
        folder: the folder of a run, a comparison or a sweep.
        runs: the run folders in it.
        curves: the figure of the learning curves.
        tables: the tables as CSV and Markdown.

    Examples:
        >>> print(results.summary)
        >>> results.model.evaluate(test)["accuracy"]
    """

    def __init__(self, folder: Path, runs: Sequence[Path]) -> None:
        """Refer to the results of runs in a folder; files are read at the first use.

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
        """A data frame of at most 80 characters with a row for each method, over its seeds.

        Columns: seeds; accuracy (%) of the final model on test images and its standard deviation over seeds; chosen (%),
        in the round that validation images choose; best (%) of all rounds; used (%), the share of unlabeled images whose
        pseudo-label was used; sent (MB) in both directions. Columns without a value are left out, and values are rounded
        to two decimals; `details` has unrounded values of more quantities.
        """
        details = self.details
        columns = {
            "seeds": details["seeds"],
            "accuracy (%)": details["last_percent"],
            "std": details["last_percent_deviation"],
            "chosen (%)": details.get("chosen_percent"),
            "best (%)": details["best_percent"],
            "used (%)": details.get("used_percent"),
            "sent (MB)": details["megabytes_down"] + details["megabytes_up"],
        }
        present = {name: values for name, values in columns.items() if values is not None and not values.isna().all()}
        return pd.DataFrame(present, index=details.index).round(2)

    @property
    def details(self) -> pd.DataFrame:
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
    def scratch_trial(self) -> Row | None:
        """The comparison of training from scratch with heads on features: "sentence", "methods", "head", ...

        "model" is the folder of the model from scratch if it is ahead, otherwise None. None where it was not tried.
        """
        return atomic_io.read_json(self.folder / SCRATCH_TRIAL)

    @property
    def model(self) -> Model:
        """The trained model of the first finished run; `halfmoon.load_model(results.runs[1])` is another one."""
        first = self.runs[0] if self.runs else self.folder
        return load_model(next((path for path in self.runs if (path / MODEL).exists()), first))

    def to_frame(self) -> pd.DataFrame:
        """Make a data frame in long form: a row for each run, round and metric.

        Columns are run, method, seed, round, metric, value and unit. Metrics are accuracy (on test images),
        training_loss, pseudo_label_accuracy, used_share (of the unlabeled images), and others in
        `halfmoon.report.metrics.METRIC_NAMES`. Accuracies and shares have the unit "%"; megabytes_sent and seconds are
        totals since the first round.

        Examples:
            >>> table = results.to_frame()
            >>> accuracy = table[table["metric"] == "accuracy"]
            >>> print(accuracy.pivot(index="round", columns=["method", "seed"], values="value"))
        """
        rows: list[tuple[Any, ...]] = []
        for run in self._stored_runs:
            origin = (run.path.name, str(run.options.get("method")), run.options.get("seed", 0))
            for number, metric, value in frame.iterate_points(run):
                name, unit = METRIC_NAMES[metric]
                rows.append((*origin, number, name, value, unit))
        return pd.DataFrame(rows, columns=["run", "method", "seed", "round", "metric", "value", "unit"])

    def plot(self, kind: str = "accuracy", axes: Any = None, path: Path | str | None = None) -> "Figure":
        """Draw a learning curve, with a color for each method, or accuracies by client; return the Matplotlib figure.

        Args:
            kind: "accuracy" on test images, "pseudo_labels" (accuracy if it is known, and share that is used), or another
                metric of `to_frame`, by round: the mean over seeds in a band from the smallest to the largest. "clients": the
                accuracy of the final model at each client.
            axes: axes to draw into, for kinds with one; None for a new figure.
            path: a file to write: PNG, PDF or SVG, by its suffix.

        Raises:
            UserError: there is no such kind, the runs have no values of it, or the file cannot be written.

        Examples:
            >>> results.plot(path="accuracy.pdf")
            >>> results.plot("pseudo_labels")
            >>> results.plot("clients", path="clients.svg")
        """
        # Matplotlib is slow to import.
        from halfmoon.report.curves import draw_client_accuracies, draw_metric
        from halfmoon.report.figures import save_figure

        metrics = [PSEUDO_LABELS_METRICS[0], PSEUDO_LABELS_METRICS[1]] if kind == "pseudo_labels" else [kind]
        if axes is not None and len(metrics) > 1:
            raise UserError("plot(kind='pseudo_labels') draws two axes: leave axes out.")
        if kind == "clients":
            runs = [run for run in self._stored_runs if (run.summary or {}).get("client_accuracy", {}).get("each")]
            if not runs:
                raise UserError(
                    "no finished run has accuracies of single clients: it has too few test images for them."
                )
            (client_axes,) = [axes] if axes is not None else _make_axes(1)
            draw_client_accuracies(runs, client_axes)
            figure = cast("Figure", client_axes.figure.figure)  # of a figure in a figure, the outer one
        else:
            # Without hidden true labels the accuracy of pseudo-labels is unknown, but the share that is used is not.
            keys = [key for key in map(_metric_key, metrics) if self._has_values(key)]
            if not keys:
                raise UserError(f"no run has values of {kind!r}: {', '.join(self._list_metrics())} have some.")
            all_axes = [axes] if axes is not None else _make_axes(len(keys))
            for key, each in zip(keys, all_axes, strict=True):
                draw_metric(self._stored_runs, key, each)
            figure = cast("Figure", all_axes[0].figure.figure)
        if path is not None:
            save_figure(figure, Path(path))
        return figure

    def _has_values(self, key: str) -> bool:
        """Check whether a run has values of a metric of `METRICS`."""
        group, name, _ = METRICS[key]
        return any(run.series(group, name) for run in self._stored_runs)

    def _list_metrics(self) -> list[str]:
        """List the metrics by round that a run has."""
        names: list[str] = []
        for key, (group, name, _) in METRICS.items():
            if any(run.series(group, name) for run in self._stored_runs):
                names.append(METRIC_NAMES[key][0])
        return names

    def to_latex(self, path: Path | str | None = None) -> str:
        r"""Format `summary` as a LaTeX table with mean and standard deviation over seeds, the best accuracy in bold.

        Equal accuracies are all in bold. Methods that train with all labels are upper bounds and do not compete. The
        document needs `\usepackage{booktabs}`.

        Args:
            path: a file to write as well.

        Raises:
            UserError: no run is finished, or the file cannot be written.

        Examples:
            >>> print(results.to_latex(path="table.tex"))
        """
        summary = self.summary
        if summary.empty:
            raise UserError("no run is finished: there is no accuracy for a table yet.")
        # Decimal digits of each column.
        digits = {"seeds": 0, "accuracy (%)": 2, "chosen (%)": 2, "best (%)": 2, "used (%)": 1, "sent (MB)": 2}
        columns: dict[str, list[str]] = {}
        for name, decimals in digits.items():
            if name not in summary:
                continue
            # One text for each method.
            cells = ["" if pd.isna(value) else f"{value:.{decimals}f}" for value in summary[name]]
            if name == "accuracy (%)":
                upper_bounds = registry.ceilings()
                bound_titles = {each["title"] for each in self.summaries if each["method"] in upper_bounds}
                cells = _format_accuracies(summary, cells, bound_titles)
            columns[escape_latex(name)] = cells
        table = pd.DataFrame(columns, index=[escape_latex(str(method)) for method in summary.index])
        table.index.name = "Method"
        text = (
            table.reset_index().style.hide(axis="index").to_latex(hrules=True, column_format="l" + "r" * len(columns))
        )
        _write_text(text, path)
        return text

    def __repr__(self) -> str:
        """Describe the results in a line: accuracy of each method, unfinished runs, whether unlabeled images help."""
        texts = [f"{name} {value:.1f} %" for name, value in self.details["last_percent"].items()]
        open_runs = [f"{run.title}: {len(run.rows)} rounds so far" for run in self._stored_runs if run.summary is None]
        if len(texts) > MAX_NAMES:  # a notebook shows this text in one line
            texts = [*texts[:MAX_NAMES], "..."]
        texts += open_runs[:MAX_NAMES]
        # Whether unlabeled images help, for a folder of images.
        if decision := self.decision:
            texts.append(decision["sentence"])
        if trial := self.scratch_trial:
            texts.append(trial["sentence"])
        count = f"{len(self.runs)} run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
        return f"<{count} in {self._short_folder}{': ' if texts else ''}{', '.join(texts)}>"

    def _repr_html_(self) -> str:
        """Format the results for a notebook, which calls this method: tables of accuracies and of differences.

        Sentences below them tell what to know about the numbers, and which runs are not finished.
        """
        table = tables.ComparisonTable(self._table.lines, wide=False)  # without costs that few readers need
        pieces = [html_table(table.headings, table.cells)] if table.lines else []
        ceilings = registry.ceilings()  # names of the methods that train with all labels, which are upper bounds
        # None if there are fewer than two methods or two seeds to compare.
        if paired := compare_methods(self.summaries, ceilings):
            pieces += [html_table(paired.headings, paired.cells), f"<p>{escape(paired.description)}</p>"]
        sentences = [describe_gain(self.summaries, ceilings), *list_remarks(self.summaries, ceilings)]
        sentences += [
            f"{run.title}: {len(run.rows)} rounds, not finished." for run in self._stored_runs if not run.summary
        ]
        if decision := self.decision:
            sentences.append(decision["sentence"])
        if trial := self.scratch_trial:
            sentences.append(trial["sentence"])
        pieces += [f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence]
        return "".join([*pieces, f"<p><code>{escape(self._short_folder)}</code></p>"])


class SweepResults(Results):
    """The cells of a sweep with their runs: `halfmoon.sweep` and `load_run` return them.

    Attributes:
        study: the sweep as stored in its file.

    Examples:
        >>> table = halfmoon.load_run("sweeps/feddure-table1-tiny")
        >>> accuracy = table.to_frame().query("metric == 'accuracy'")
        >>> accuracy.groupby(["axis:method", "round"])["value"].mean()
        >>> print(table.to_latex())
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
        # A frame without rows still has the columns of `Results.to_frame`.
        return pd.concat(frames, ignore_index=True) if frames else super().to_frame()

    def to_latex(self, path: Path | str | None = None) -> str:
        """Format the accuracies of the sweep as LaTeX tables, as `halfmoon report` writes them.

        Args:
            path: a file to write as well.

        Raises:
            UserError: the file cannot be written.
        """
        text = format_latex([self.study])
        _write_text(text, path)
        return text

    def __repr__(self) -> str:
        count = sum(1 for _ in self.study.finished())
        return f"<sweep in {self._short_folder}: {count} runs of {len(self.study.sweep.cells)} cells. {write_headline(self.study)}>"

    def _repr_html_(self) -> str:
        """Format the sweep for a notebook: the table of its cells, the headline, its scale, notes, and the folder."""
        sentences = [write_headline(self.study), study.describe_scale(self.study.sweep.scale), *self.study.notes]
        lines = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences if sentence)
        return f"{html_table(*self._cells)}{lines}<p><code>{escape(self._short_folder)}</code></p>"


def _format_accuracies(summary: pd.DataFrame, means: Sequence[str], bound_titles: Collection[str]) -> list[str]:
    """Add deviations to the formatted mean accuracies of methods, and print the best one in bold (LaTeX).

    Args:
        summary: the data frame `Results.summary`.
        means: the formatted mean accuracy of each method.
        bound_titles: titles of the methods that train with all labels, which do not compete.
    """
    values = summary["accuracy (%)"]
    deviations = summary["std"] if "std" in summary else [float("nan")] * len(means)
    # `summary` has rounded values, so that equal numbers of the table are both bold.
    competing = [value for title, value in values.items() if title not in bound_titles]
    best = max(competing, default=float("nan"))
    cells: list[str] = []
    for mean, (title, value), deviation in zip(means, values.items(), deviations, strict=True):
        cell = mean if pd.isna(deviation) else rf"{mean} $\pm$ {deviation:.2f}"
        is_best = len(competing) > 1 and title not in bound_titles and value == best
        cells.append(rf"\textbf{{{cell}}}" if is_best else cell)
    return cells


def _write_text(text: str, path: Path | str | None) -> None:
    """Write a text into a file, unless `path` is None; raise `UserError` if it cannot be written."""
    if path is None:
        return
    try:
        atomic_io.write_atomically(Path(path), text.encode())
    except OSError as error:
        raise UserError(
            f"{path}: it cannot be written ({atomic_io.error_reason(error)}); {atomic_io.write_remedy(error)}, or choose "
            "another file."
        ) from error


def _metric_key(name: str) -> str:
    """Return the key in `METRICS` of a metric's name in `to_frame`; keys themselves are accepted as well."""
    keys = {METRIC_NAMES[key][0]: key for key in METRICS}
    if name in keys:
        return keys[name]
    if name not in METRICS:
        raise UserError(f"there is no kind or metric {name!r}: {suggest(name, ['pseudo_labels', 'clients', *keys])}")
    return name


def _make_axes(count: int) -> "list[Axes]":
    """Make a figure with `count` axes side by side, and return the axes."""
    from matplotlib import pyplot

    size = (6.4 if count == 1 else 4.4 * count, 3.6)  # inches
    figure = pyplot.figure(figsize=size, layout="constrained")
    if in_notebook():
        # The notebook displays the figure that `plot` returns; pyplot would display an open one a second time.
        pyplot.close(figure)
    return [figure.add_subplot(1, count, number + 1) for number in range(count)]


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
