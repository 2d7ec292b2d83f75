"""The accuracy tables of a report as LaTeX for the package booktabs."""

import unicodedata
from collections.abc import Mapping, Sequence

from halfmoon.report.scores import Score, column_heads, equal, final
from halfmoon.report.study import CONFIGURATION, Column, Published, Study, Value, scale_words
from halfmoon.report.tables import Spread, plus_minus

GREEK = ("alpha", "beta", "gamma", "delta", "sigma", "tau")
SPECIAL = {
    **{letter: f"\\{letter}" for letter in "{}$&#_%"},
    **{unicodedata.lookup(f"GREEK SMALL LETTER {name}"): rf"$\{name}$" for name in GREEK},
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

WIDE, LONG = 6, 40
"""Columns of numbers, and rows, that fit on a page."""


def escaped(words: str) -> str:
    """Return plain text as LaTeX; a line break becomes a space."""
    return " ".join(words.split()).translate(str.maketrans(SPECIAL))


def as_latex(studies: Sequence[Study]) -> str:
    r"""Return a table of each study, and the same at equal labeled steps; needs booktabs."""
    parts = ["% Tables of halfmoon report. The preamble needs \\usepackage{booktabs}.\n"]
    for study in studies:
        if study.sweep.kind == "splits":
            continue
        parts.append(table(study, final(study), f"{study.measured} (\\%) of the final model"))
        score = equal(study)
        if any((score.steps or {}).values()):
            parts.append(table(study, score, "Test accuracy (\\%) at equal labeled steps"))
    return "\n".join(parts)


def table(study: Study, score: Score, what: str) -> str:
    """Return the table environments: rows and columns by the axes, two columns each where something is published.

    No table has more than `WIDE` columns of numbers or `LONG` rows: what is larger goes on in another one. An asterisk
    is behind a measured number that lies within two standard deviations of the published one.
    """
    beside = {
        column: any(score.mark(row.name, column).published for row in study.row_values) for column in study.columns
    }
    rows = study.row_values
    pages = [
        (columns, rows[first : first + LONG])
        for columns in _fitting(study.columns, beside)
        for first in range(0, len(rows), LONG)
    ]
    caption = _caption(study, what, score, any(beside.values()))
    parts = []
    for number, (columns, some) in enumerate(pages):
        goes_on = f" Part {number + 1} of {len(pages)}." if len(pages) > 1 else ""
        lines = [r"\begin{table}", r"\centering\small", rf"\caption{{{caption}{goes_on}}}"]
        lines += _tabular(study, score, columns, some, beside)
        parts.append("\n".join([*lines, *_legend(study, columns), r"\end{table}", ""]))
    return "\n".join(parts)


def _fitting(columns: Sequence[Column], beside: Mapping[Column, bool]) -> list[list[Column]]:
    groups: list[list[Column]] = []
    room = 0
    for column in columns:
        width = 2 if beside[column] else 1
        if width > room or not groups:
            groups.append([])
            room = WIDE
        groups[-1].append(column)
        room -= width
    return groups


def _tabular(
    study: Study, score: Score, columns: Sequence[Column], rows: Sequence[Value], beside: Mapping[Column, bool]
) -> list[str]:
    widths = [2 if beside[column] else 1 for column in columns]
    lines = [rf"\begin{{tabular}}{{l{'r' * sum(widths)}}}", r"\toprule", *_heads(study, columns, beside)]
    if any(width == 2 for width in widths):
        heads = [word for width in widths for word in (["here", "paper"] if width == 2 else ["here"])]
        lines.append(" & ".join(["", *heads]) + r" \\")
    lines.append(r"\midrule")
    for row in rows:
        cells = [escaped(row.title)]
        for column in columns:
            mark = score.mark(row.name, column)
            star = r"$^{\ast}$" if mark.verdict and mark.verdict.within else ""
            cells += [_number(mark.last) + star, *([_number(mark.published)] if beside[column] else [])]
        lines.append(" & ".join(cells) + r" \\")
    if score.steps is not None:
        numbers = (f"{score.steps[column] or 0:,.0f}" for column in columns)
        spans = (rf"\multicolumn{{{width}}}{{r}}{{{n}}}" for n, width in zip(numbers, widths, strict=True))
        lines += [r"\midrule", " & ".join(["labeled steps", *spans]) + r" \\"]
    return [*lines, r"\bottomrule", r"\end{tabular}"]


def _heads(study: Study, columns: Sequence[Column], beside: Mapping[Column, bool]) -> list[str]:
    """Return a line of headings for each axis of the columns, with rules below those that span several."""
    lines = []
    for heads in column_heads(study, columns):
        cells, rules, place = [""], [], 2
        for title, below in heads:
            width = sum(2 if beside[column] else 1 for column in below)
            cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escaped(title)}}}")
            # A rule below a single column would only repeat the one below the head.
            rules += [rf"\cmidrule(lr){{{place}-{place + width - 1}}}"] if width > 1 else []
            place += width
        lines += [" & ".join(cells) + r" \\", *(["".join(rules)] if rules else [])]
    return lines


def _legend(study: Study, columns: Sequence[Column]) -> list[str]:
    """Return what the configurations of these columns are, below the table."""
    legend = study.legend()
    titles = {study.axis(CONFIGURATION).title(key[-1]) for key in columns} if legend else set()
    words = [rf"\textbf{{{escaped(name)}}}: {escaped(legend[name])}." for name in legend if name in titles]
    return [r"\par\smallskip", rf"\parbox{{\linewidth}}{{\footnotesize {' '.join(words)}}}"] if words else []


def _caption(study: Study, what: str, score: Score, beside: bool) -> str:
    sweep = study.sweep
    words = [f"{escaped(sweep.title)}. {what}, mean $\\pm$ standard deviation over seeds."]
    if beside:
        words.append("An asterisk: within two standard deviations of the published number.")
    if sweep.scale:
        words.append(rf"\textbf{{{escaped(scale_words(sweep.scale))}}}")
    short = sorted({f"{m.seeds} of {m.planned}" for m in score.marks.values() if m.seeds < m.planned})
    if short:
        words.append(f"Not every run is finished (seeds of a cell: {', '.join(short)}).")
    return " ".join(words)


def _number(value: Spread | Published | None) -> str:
    return plus_minus(value).replace("\N{PLUS-MINUS SIGN}", r"$\pm$") or "--"
