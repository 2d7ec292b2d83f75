"""`halfmoon review`: a page with a model's predictions on a folder, to look through and to correct."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import command, complain
from halfmoon.cli.commands.paged import loader, place, served, tell
from halfmoon.cli.commands.trained import of_model, on_device


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "look through a model's predictions in the browser, and correct labels"
    parser = command(commands, "review", about, "MODEL FOLDER ")
    of_model(parser)
    about = "images, and perhaps a labels.csv or a folder for each class"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    on_device(parser)
    served(parser)


def run(given: argparse.Namespace) -> int:
    """Serve the page until interrupted, then return 130."""
    from halfmoon.pages.review import run as review

    port = place(given)
    model = loader(given.model, given.device, given.network)()
    try:
        review(model, given.model.resolve().name, given.folder, port, not given.no_browser, tell)
    except KeyboardInterrupt:
        if given.debug:
            raise
        return complain("the page is closed.", 130)
    return 0
