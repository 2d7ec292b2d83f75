"""`halfmoon site terms`: what the sites of a federation's file are asked to take part in, and the hash that says so."""

import argparse
import json
from pathlib import Path

from halfmoon.cli.commands.base import print_json, say, show


def add(parser: argparse.ArgumentParser) -> None:
    about = "the server's file: options of a run, and a table [federation]"
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, help=about)


def run(args: argparse.Namespace) -> int:
    """Print the terms."""
    from halfmoon.federation.server.plan import load

    terms = load(args.config).terms
    offered = terms.summary()
    if args.json:
        print_json({"hash": offered.hash, "said": offered.sentence, "terms": json.loads(terms.text)})
        return 0
    say(f"{offered.sentence}\n")
    show(["option", "value", "meaning"], offered.rows)
    say(f"\nhash: {offered.hash}")
    return 0
