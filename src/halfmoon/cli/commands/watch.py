"""`halfmoon watch`: a page that follows runs, sweeps, federations, or a site's part in one."""

import argparse
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import command, complain
from halfmoon.cli.commands.paged import place, served, tell


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "follow a run, a comparison, a sweep, a federation or a site's part in the browser"
    parser = command(commands, "watch", about, "FOLDER ", run)
    about = "the folder of a run, a comparison, a sweep, or a server's run; or a site's folder"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    served(parser)


def run(args: argparse.Namespace) -> int:
    """Serve the page until interrupted, then return 130."""
    from halfmoon.pages.watch import run as watch

    port = place(args)
    try:
        watch(args.folder, port, not args.no_browser, tell)
    except KeyboardInterrupt:
        if args.debug:
            raise
        return complain("the page is closed; what it showed goes on.", 130)
    return 0
