"""Print tables and wrapped texts on a console."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from halfmoon.runs.progress import print_line, wrap_lines


def print_table(console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], wrap: bool = False) -> None:
    """Print a table, with lines between header and rows on a wide terminal, else as plain text.

    Columns of numbers are right-aligned.

    Args:
        console: the console to print on.
        header: the headings of the columns.
        rows: the cells of each row, one for each heading.
        wrap: print lines on a narrow terminal too, and wrap the text of all columns but the first.
    """
    is_number = [all(_is_number(row[column]) for row in rows) for column in range(len(header))]
    widths = []  # the least width of each column
    for column, heading in enumerate(header):
        # A heading may wrap between its words, but a number has to fit on one line.
        texts = heading.split()
        if is_number[column]:
            texts += [row[column] for row in rows]
        widths.append(max(map(len, texts), default=1))
    # Rich puts one column of padding on both sides of a cell.
    is_too_wide = sum(widths) + 2 * len(widths) > console.width
    if not console.is_terminal or (is_too_wide and not wrap):
        print_line(console, format_plain_table(header, rows, is_number))
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading, flush_right, width in zip(header, is_number, widths, strict=True):
        if wrap:
            table.add_column(Text(heading), no_wrap=heading == header[0])
        else:
            table.add_column(Text(heading), justify="right" if flush_right else "left", min_width=width)
    for row in rows:
        # Text, because rich would read brackets in a string as markup.
        table.add_row(*map(Text, row))
    console.print(table)


def format_plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], right_aligned: Sequence[bool]) -> str:
    """Format a table as text with aligned columns.

    Args:
        header: the headings of the columns.
        rows: the cells of each row.
        right_aligned: for each column, whether its cells are right-aligned.
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = []
    for line in lines:
        cells = []
        for cell, flush_right, width in zip(line, right_aligned, widths, strict=True):
            cells.append(cell.rjust(width) if flush_right else cell.ljust(width))
        texts.append("  ".join(cells).rstrip())
    return "\n".join(texts)


def wrap_text(console: Console, text: str) -> str:
    """Indent a text by two spaces, and wrap it between words on a terminal."""
    return wrap_lines(f"  {text}", console.width) if console.is_terminal else f"  {text}"


def _is_number(text: str) -> bool:
    # Missing values do not make a column of numbers a column of texts.
    return text[:1].isdigit() or text in ("-", "")
