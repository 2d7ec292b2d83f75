"""The accuracy tables of a report as LaTeX for the package booktabs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from halfmoon.report.judge import Mark, Score, equal, final
from halfmoon.report.study import Published, Study, scale_words
from halfmoon.report.tables import Spread

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "_": r"\_",
    "%": r"\%",
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
    "\N{GREEK SMALL LETTER ALPHA}": r"$\alpha$",
    "\N{GREEK SMALL LETTER BETA}": r"$\beta$",
    "\N{GREEK SMALL LETTER GAMMA}": r"$\gamma$",
    "\N{GREEK SMALL LETTER DELTA}": r"$\delta$",
    "\N{GREEK SMALL LETTER SIGMA}": r"$\sigma$",
    "\N{GREEK SMALL LETTER TAU}": r"$\tau$",
}


WIDE = 6
"""Columns of numbers that fit on a page; a wider table is scaled to the width of the text."""


def escaped(words: str) -> str:
    """Return plain text as LaTeX; a line break becomes a space."""
    return "".join(_SPECIAL.get(letter, letter) for letter in " ".join(words.split()))


def as_latex(studies: Sequence[Study]) -> str:
    r"""Return a table of each study, and the same at equal labeled steps; needs booktabs and graphicx."""
    parts = ["% Tables of halfmoon report. The preamble needs \\usepackage{booktabs} and \\usepackage{graphicx}.\n"]
    for study in studies:
        if study.sweep.kind == "splits":
            continue
        parts.append(table(study, final(study), "Test accuracy (\\%) of the final model"))
        score = equal(study)
        if any((score.steps or {}).values()):
            parts.append(table(study, score, "Test accuracy (\\%) at equal labeled steps"))
    return "\n".join(parts)


def table(study: Study, score: Score, what: str) -> str:
    """Return one table environment: rows and columns by the axes, two columns each where something is published.

    An asterisk is behind a measured number that lies within two standard deviations of the published one.
    """
    beside = [any(score.mark(row.name, column).published for row in study.row_values) for column in study.columns]
    widths = [2 if published else 1 for published in beside]
    lines = [r"\begin{table}", r"\centering\small", rf"\caption{{{_caption(study, what, score, any(beside))}}}"]
    wide = sum(widths) > WIDE
    lines += [r"\resizebox{\linewidth}{!}{%"] if wide else []
    lines += [rf"\begin{{tabular}}{{l{'r' * sum(widths)}}}", r"\toprule", *_heads(study, widths)]
    if any(beside):
        lines.append(
            " & ".join(["", *(w for two in beside for w in (["here", "paper"] if two else ["here"]))]) + r" \\"
        )
    lines.append(r"\midrule")
    for row in study.row_values:
        cells = [escaped(row.title)]
        for column, two in zip(study.columns, beside, strict=True):
            mark = score.mark(row.name, column)
            cells += [_measured(mark), *([_number(mark.published)] if two else [])]
        lines.append(" & ".join(cells) + r" \\")
    if score.steps is not None:
        numbers = (f"{score.steps[column] or 0:,.0f}" for column in study.columns)
        spans = (rf"\multicolumn{{{width}}}{{r}}{{{n}}}" for n, width in zip(numbers, widths, strict=True))
        lines += [r"\midrule", " & ".join(["labeled steps", *spans]) + r" \\"]
    end = r"\end{tabular}}" if wide else r"\end{tabular}"
    return "\n".join([*lines, r"\bottomrule", end, r"\end{table}", ""])


def _heads(study: Study, widths: Sequence[int]) -> list[str]:
    """Return a line of headings for each axis of the columns, with rules below those that span several."""
    lines = []
    for depth, name in enumerate(study.column_axes):
        cells, rules, place = [""], [], 2
        numbered = zip(study.columns, widths, strict=True)
        for key, same in groupby(numbered, key=lambda each, d=depth: each[0][: d + 1]):
            width = sum(each[1] for each in same)
            cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escaped(study.value_title(name, key[-1]))}}}")
            rules.append(rf"\cmidrule(lr){{{place}-{place + width - 1}}}")
            place += width
        lines += [" & ".join(cells) + r" \\", "".join(rules)]
    return lines


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


def _measured(mark: Mark) -> str:
    star = "$^{\\ast}$" if mark.verdict and mark.verdict.within else ""
    return _number(mark.last) + star


def _number(value: Spread | Published | None) -> str:
    if value is None:
        return "--"
    if value.deviation is None:
        return f"{value.mean:.2f}"
    return f"{value.mean:.2f} $\\pm$ {value.deviation:.2f}"
