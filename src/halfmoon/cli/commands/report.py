"""`halfmoon report`: one page of runs, comparisons and sweeps; `halfmoon leaderboard`: that of committed results."""

import argparse
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import checked, command, complain, print_json, say
from halfmoon.core.errors import UserError

PAGE = Path("report.html")


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = command(commands, "report", "write one page of runs, comparisons and sweeps", "RUN... ", run)
    about = "the folder of a run, of a comparison or of a sweep, or a sweep.json"
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=about)
    about = f"the page; CSV and LaTeX go beside it under the same name (default: {PAGE})"
    checked(parser)
    parser.add_argument("--out", metavar="FILE", type=Path, default=PAGE, help=about)


def run(args: argparse.Namespace) -> int:
    """Write the page and say where it is, and what is missing in it."""
    from halfmoon.report.writer import write_report

    files, missing = write_report(args.runs, args.out)
    page, sheet, latex = (str(file) for file in files)
    if args.json:
        print_json({"page": page, "csv": sheet, "latex": latex, "missing": missing})
        return 0
    say("\n".join([f"page: {page}", f"csv: {sheet}", f"latex: {latex}", *missing]))
    return 0


RESULTS, BOARD = Path("results"), Path("results/published.md")


def add_leaderboard(commands: Any) -> None:
    """Add the command's parser."""
    parser = command(commands, "leaderboard", "write the page of committed results", "", _leaderboard)
    about = "first copy the summaries of these sweeps' folders into the results (default: those in runs/)"
    parser.add_argument("--add", metavar="SWEEP", nargs="+", type=Path, default=[], help=about)
    about = f"the folder of committed results (default: {RESULTS})"
    parser.add_argument("--results", metavar="DIR", type=Path, default=RESULTS, help=about)
    parser.add_argument("--out", metavar="FILE", type=Path, default=BOARD, help=f"the page (default: {BOARD})")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where page and results differ")


def _leaderboard(args: argparse.Namespace) -> int:
    from halfmoon.report import leaderboard
    from halfmoon.storage import atomic_io

    if args.check and args.add:
        raise UserError("--check writes nothing, so it cannot --add: give one of them.")
    here = (
        [] if args.check or args.results.is_dir() else sorted(path.parent for path in Path("runs").glob("*/sweep.json"))
    )
    added = [leaderboard.add(folder, args.results) for folder in args.add or here]
    page = leaderboard.board(args.results).encode()
    if args.check:
        if atomic_io.read(args.out) == page:
            return 0
        return complain(f"{args.out} is not what {args.results} says; write it anew: halfmoon leaderboard.", 1)
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        atomic_io.replace(args.out, page)
    except OSError as error:
        raise UserError(
            f"{args.out}: it cannot be written ({atomic_io.reason(error)}); choose another --out."
        ) from error
    if args.json:
        print_json({"page": str(args.out), "added": [str(path) for path in added]})
    else:
        say("\n".join([*(f"added: {path}" for path in added), f"page: {args.out}"]))
    return 0
