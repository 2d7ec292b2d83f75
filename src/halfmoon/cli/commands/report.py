"""The command `halfmoon report`: write one page of runs, comparisons and sweeps."""

import argparse
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import add_command, add_unchecked_flag, print_json, print_text

DEFAULT_PAGE = Path("report.html")


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "report", "write one page of runs, comparisons and sweeps", "RUN... ", run)
    about = "the folder of a run, of a comparison or of a sweep, or a sweep.json"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=about)
    about = f"the page; CSV and LaTeX files get the same name (default: {DEFAULT_PAGE})"
    add_unchecked_flag(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, default=DEFAULT_PAGE, help=about)


def run(args: argparse.Namespace) -> int:
    """Run `halfmoon report`: write a page and tables about runs, and print their paths and the missing runs."""
    from halfmoon.report.writer import write_report

    files, missing = write_report(args.runs, args.out)
    page, sheet, latex = (str(file) for file in files)
    if args.json:
        print_json({"page": page, "csv": sheet, "latex": latex, "missing": missing})
        return 0
    print_text("\n".join([f"page: {page}", f"csv: {sheet}", f"latex: {latex}", *missing]), wrap=False)
    return 0
