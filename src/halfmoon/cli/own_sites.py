"""`halfmoon run --sites`: a rehearsal with the sites' own folders, and the table that a manager needs."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from halfmoon.cli.commands.base import print_json
from halfmoon.config import schema as settings
from halfmoon.core.errors import UserError


def add(parser: argparse.ArgumentParser) -> None:
    """Let the command take --sites."""
    about = "simulate a federation of these site folders: each alone, labels together, the federation, fewer labels"
    parser.add_argument("--sites", metavar="FOLDER", nargs="+", type=Path, default=[], help=about)


def refuse_federation(file: Path | None, values: Mapping[str, Any], flags: Mapping[str, Any]) -> None:
    """Raise `UserError` for a file that describes a federation and names no data: another command was meant."""
    if file is None or "data" in {**values, **flags} or settings.TABLE not in settings.read(file):
        return
    name = shlex.quote(str(file))
    raise UserError(
        f"{file} describes a federation and names no data to simulate it on: `halfmoon serve {name}` plays it with its "
        f"sites, and `halfmoon run --config {name} --sites FOLDER FOLDER` simulates it on folders that are here."
    )


def run(given: argparse.Namespace, layer: Mapping[str, Any], file: Path | str) -> int:
    """Play the rehearsal and print its table."""
    values = {**layer}
    values.setdefault("method", "fedavg-fixmatch")
    folders = given.sites
    values |= {"data": "digits", "clients": max(1, len(folders)), "cohort": min(5, max(1, len(folders)))}
    config = settings.resolve({}, values, file)
    from halfmoon.sweep.own_sites import HELD_OUT, rehearse

    root = config.run_dir or Path("runs", f"sites-{config.method}-seed{config.seed}")
    table = rehearse(config, folders, root, lambda words: _say(words))
    if given.json:
        print_json({"folder": str(root), "rows": [asdict(each) for each in table]})
        return 0
    from rich.console import Console

    from halfmoon.cli.console import say, show

    console = Console()
    show(console, ["trained on", "labels", "right"], [[p.name, f"{p.labels:,}", f"{p.accuracy:.2%}"] for p in table])
    say(console, f"tested on one of {HELD_OUT} labeled images of every class and site; runs: {root}")
    return 0


def _say(words: str) -> None:
    sys.stderr.write(f"halfmoon: {words}\n")
