"""Write the accuracy tables of a report as LaTeX for the package booktabs, by `pandas.io.formats.style.Styler`."""

import unicodedata
from collections.abc import Sequence

import pandas as pd

from halfmoon.report.headline import ALL_LABELS_SUFFIX
from halfmoon.report.scores import CellScore, ScoreTable, final_scores, scores_at_equal_steps
from halfmoon.report.study import CONFIGURATION, AxisValue, Column, Study, describe_scale
from halfmoon.report.tables import format_mean

_GREEK = ("alpha", "beta", "gamma", "delta", "sigma", "tau")
_ESCAPES = str.maketrans(
    {
        **{letter: f"\\{letter}" for letter in "{}$&#_%"},
        **{unicodedata.lookup(f"GREEK SMALL LETTER {name}"): rf"$\{name}$" for name in _GREEK},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': "''",
        "\N{LEFT DOUBLE QUOTATION MARK}": "``",
        "\N{RIGHT DOUBLE QUOTATION MARK}": "''",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{EN DASH}": "--",
        "\N{PLUS-MINUS SIGN}": r"$\pm$",
        "\N{MULTIPLICATION SIGN}": r"$\times$",
        "\N{MINUS SIGN}": "$-$",
    }
)

MAX_COLUMNS = 6
"""Columns of numbers that fit on a page."""

MAX_ROWS = 40
"""Rows that fit on a page."""


def escape_latex(text: str) -> str:
    """Escape plain text for LaTeX; a line break becomes a space.

    The escaping of `Styler` does not change Greek letters, quotes and signs such as ±, which pdflatex cannot print
    without further packages.
    """
    return " ".join(text.split()).translate(_ESCAPES)


def format_latex(studies: Sequence[Study]) -> str:
    r"""Format the accuracies of each study as LaTeX tables, at the end of the runs and at equal labeled steps.

    At equal labeled steps methods are compared after the same training on labels, however long each of them trained.
    The text is meant for `\input`; the document needs booktabs.
    """
    blocks = ["% Tables of halfmoon report. The preamble needs \\usepackage{booktabs}.\n"]
    for study in studies:
        if study.sweep.kind == "splits":
            continue
        blocks.append(format_tables(study, final_scores(study), f"{study.measured} (\\%) of the final model"))
        score = scores_at_equal_steps(study)
        if any((score.steps or {}).values()):
            blocks.append(format_tables(study, score, "Test accuracy (\\%) at equal labeled steps"))
    return "\n".join(blocks)


def format_tables(study: Study, score: ScoreTable, quantity: str) -> str:
    """Format accuracies as one or more LaTeX tables of at most `MAX_COLUMNS` columns and `MAX_ROWS` rows.

    A column of the study with published numbers becomes two: measured ("here") and published ("paper"). An asterisk
    marks a measured number within two standard deviations of the published one. The best method of a column is in bold,
    or several with the same number; methods that train on all labels are upper bounds and do not compete.

    Args:
        study: gives the rows (usually methods) and the columns (usually data sets).
        score: the accuracies of each row and column.
        quantity: the start of the caption, in LaTeX.
    """
    has_published = {
        column: any(score.get(row.name, column).published for row in study.row_values) for column in study.columns
    }
    rows = study.row_values
    pages = [
        (columns, rows[first : first + MAX_ROWS])
        for columns in _split_columns(study.columns, has_published)
        for first in range(0, len(rows), MAX_ROWS)
    ]
    caption = _caption(study, quantity, score, any(has_published.values()))
    tables = []
    for number, (columns, page_rows) in enumerate(pages, start=1):
        page_note = f" Part {number} of {len(pages)}." if len(pages) > 1 else ""
        published_columns = [column for column in columns if has_published[column]]
        lines = [
            r"\begin{table}",
            r"\centering\small",
            rf"\caption{{{caption}{page_note}}}",
            _format_tabular(study, score, columns, page_rows, published_columns).rstrip(),
            *_format_legend(study, columns),
            r"\end{table}",
            "",
        ]
        tables.append("\n".join(lines))
    return "\n".join(tables)


def _split_columns(columns: Sequence[Column], has_published: dict[Column, bool]) -> list[list[Column]]:
    """Split the columns of a table into groups of at most `MAX_COLUMNS` columns of numbers, one for each page.

    A column with published accuracies takes two columns of numbers: measured and published.
    """
    groups: list[list[Column]] = []
    free = 0
    # A column with its published numbers is not divided between two groups.
    for column in columns:
        width = 2 if has_published[column] else 1
        if width > free or not groups:
            groups.append([])
            free = MAX_COLUMNS
        groups[-1].append(column)
        free -= width
    return groups


def _format_tabular(
    study: Study,
    score: ScoreTable,
    columns: Sequence[Column],
    rows: Sequence[AxisValue],
    published_columns: Sequence[Column],
) -> str:
    r"""Format one LaTeX `tabular` of accuracies, mean ± deviation over seeds.

    Args:
        study: the study. Several things may vary over its columns, such as data set and clients: each gives a line of
            headings.
        score: the accuracies of each row and column; with `steps`, a last line has the labeled steps.
        columns: the columns of this table.
        rows: its rows.
        published_columns: those of `columns` that are split into "here" (measured) and "paper" (published).
    """
    # Without headings of axes, "here" is the only heading.
    names_sources = bool(published_columns) or not study.column_axes
    headings: list[tuple[str, ...]] = []
    table: list[list[str]] = []  # one list for each column of numbers
    for column in columns:
        titles = [study.value_title(axis, name) for axis, name in zip(study.column_axes, column, strict=True)]
        escaped_titles = [escape_latex(title) for title in titles]
        cells = [score.get(row.name, column) for row in rows]
        best_measured, best_published = _best_means(study, score, column)
        headings.append((*escaped_titles, "here") if names_sources else tuple(escaped_titles))
        table.append([_format_measured(row, cell, best_measured) for row, cell in zip(rows, cells, strict=True)])
        if score.steps is not None:  # the last line
            table[-1].append(f"{score.steps[column] or 0:,.0f}")
        if column in published_columns:
            headings.append((*escaped_titles, "paper"))
            table.append([_format_published(row, cell, best_published) for row, cell in zip(rows, cells, strict=True)])
            if score.steps is not None:
                table[-1].append("")
    index = [escape_latex(row.title) for row in rows]
    if score.steps is not None:
        index.append("labeled steps")
    lines = [list(line) for line in zip(*table, strict=True)]  # transposed
    # Equal adjacent headings of a level are merged by the Styler.
    frame = pd.DataFrame(lines, index=index, columns=pd.MultiIndex.from_tuples(headings))
    return frame.style.to_latex(column_format="l" + "r" * len(headings), hrules=True, multicol_align="c")


def _format_legend(study: Study, columns: Sequence[Column]) -> list[str]:
    r"""Format what the letters of configurations in these columns stand for, as lines of LaTeX below the table.

    Columns that differ in many options are headed "configuration a", and the legend lists the options of a.

    Args:
        study: the study.
        columns: the columns of the table; a key is a tuple of axis values, of which the configuration is the last.

    Returns:
        The lines; [] if no column has a letter.
    """
    legend = study.legend()  # the options of each configuration by its letter
    if not legend:
        return []
    shown_letters = {study.axis(CONFIGURATION).title(key[-1]) for key in columns}
    sentences = [
        rf"\textbf{{{escape_latex(letter)}}}: {escape_latex(options)}."
        for letter, options in legend.items()
        if letter in shown_letters
    ]
    if not sentences:
        return []
    return [r"\par\smallskip", rf"\parbox{{\linewidth}}{{\footnotesize {' '.join(sentences)}}}"]


def _caption(study: Study, quantity: str, score: ScoreTable, with_published: bool) -> str:
    """Write the caption of a table: title, quantity, the meaning of an asterisk, the scale, and unfinished seeds.

    Args:
        study: the study; its `scale` describes how much smaller it is than the paper's experiment, None if it is not.
        quantity: what the table shows, in LaTeX.
        score: the accuracies, with the numbers of finished and planned seeds.
        with_published: whether the table has published numbers.
    """
    sweep = study.sweep
    sentences = [f"{escape_latex(sweep.title)}. {quantity}, mean $\\pm$ standard deviation over seeds."]
    if with_published:
        sentences.append("An asterisk: within two standard deviations of the published number.")
    if sweep.scale:
        sentences.append(rf"\textbf{{{escape_latex(describe_scale(sweep.scale))}}}")
    unfinished_cells = [cell for cell in score.scores.values() if cell.seeds < cell.planned]
    unfinished = sorted({f"{cell.seeds} of {cell.planned}" for cell in unfinished_cells})
    if unfinished:
        sentences.append(f"Not every run is finished (seeds of a cell: {', '.join(unfinished)}).")
    return " ".join(sentences)


def _best_means(study: Study, score: ScoreTable, column: Column) -> tuple[str, str]:
    """Find the best measured and the best published mean of a column, as the table shows them.

    Returns:
        Both numbers with two decimals; "" if there is nothing to compare: fewer than two methods, or rows that are not
        methods.
    """
    if study.sweep.rows != "method":
        return "", ""
    cells = [score.get(row.name, column) for row in study.row_values if _competes(row)]
    measured = [cell.last.mean for cell in cells if cell.last]
    published = [cell.published.mean for cell in cells if cell.published]
    return (
        f"{max(measured):.2f}" if len(measured) > 1 else "",
        f"{max(published):.2f}" if len(published) > 1 else "",
    )


def _competes(row: AxisValue) -> bool:
    """Check whether a row is no upper bound, which trains on all labels."""
    return not row.title.endswith(ALL_LABELS_SUFFIX)


def _format_measured(row: AxisValue, cell: CellScore, best: str) -> str:
    asterisk = r"$^{\ast}$" if cell.verdict and cell.verdict.within else ""
    is_best = cell.last is not None and _competes(row) and f"{cell.last.mean:.2f}" == best
    return _format_number(format_mean(cell.last), is_best) + asterisk


def _format_published(row: AxisValue, cell: CellScore, best: str) -> str:
    is_best = cell.published is not None and _competes(row) and f"{cell.published.mean:.2f}" == best
    return _format_number(format_mean(cell.published), is_best)


def _format_number(text: str, is_best: bool = False) -> str:
    number = text.replace("\N{PLUS-MINUS SIGN}", r"$\pm$") or "--"
    return rf"\textbf{{{number}}}" if is_best else number
