"""What the commands share that serve a page to this machine's browser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from halfmoon.cli.commands.serve import shower, whole
from halfmoon.config import schema as settings
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from halfmoon.sites.inference import Model


def served(parser: argparse.ArgumentParser) -> None:
    about = "the port of the page, which only this machine can open (default: a free one)"
    parser.add_argument("--port", metavar="N", help=about)
    parser.add_argument("--no-browser", action="store_true", help="print the page's address, and open no browser")


def place(args: argparse.Namespace) -> int | None:
    """Return the port that was given, None for a free one; raise UserError where no page can be served."""
    from halfmoon.pages.server import require_pages

    port = None if args.port is None else whole("--port", args.port, 1, 2**16 - 1)
    if args.json:
        raise UserError(
            "--json goes with --list, which prints: a page is looked at." if "list" in args else "a page has no --json."
        )
    require_pages()
    return port


def loader(path: Path, device: str, network: str | None) -> Callable[[], Model]:
    """Return what loads a model: slow, so it is done where nobody waits."""
    where = settings.parse("device", device)

    def load() -> Model:
        from halfmoon.runs.factory import device as chosen
        from halfmoon.sites.inference import load_model

        return load_model(path, chosen(settings.Config(device=where)), network)

    return load


def tell(words: str) -> None:
    shower(False)(words)


def note(words: str) -> None:
    sys.stderr.write(f"halfmoon: {words}\n")
