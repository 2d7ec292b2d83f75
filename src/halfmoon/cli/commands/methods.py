"""`halfmoon methods [NAME ...]`: the methods, the labels that each needs, and its options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import command, print_json
from halfmoon.config.option_types import expected
from halfmoon.storage import toml

if TYPE_CHECKING:
    from rich.console import Console

    from halfmoon.methods.registry import MethodEntry


def add(commands: Any) -> None:
    parser = command(commands, "methods", "list the methods and their options", "[NAME ...] ", run)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these methods")


def run(args: argparse.Namespace) -> int:
    """List the methods."""
    from halfmoon.methods import registry

    entries = [registry.entry(name) for name in args.names or registry.names()]
    if args.json:
        print_json([_method(each.name) for each in entries])
        return 0
    options = {
        each.name: ", ".join(
            f"{key} = {toml.shown(value.default)}" for key, value in registry.options(each.name).items()
        )
        for each in entries
    }
    from rich.console import Console

    show_methods(Console(), entries, options)
    return 0


def _method(name: str) -> dict[str, Any]:
    from halfmoon.methods import registry

    entry = registry.entry(name)
    options = {
        key: {"default": option.default, "type": expected(option.type)}
        for key, option in registry.options(name).items()
    }
    about = {"title": entry.title, "paper": entry.paper, "about": entry.about, "labels": entry.labels}
    about |= {"labels_at": list(entry.places), "oracle": entry.all_labels, "centralized": entry.pooled}
    return {"name": name, **about, "options": options}


def show_methods(console: Console, entries: Sequence[MethodEntry], options: Mapping[str, str]) -> None:
    """Print a table of methods, the centralized ones in one of their own; then each one's places and `options`."""
    from halfmoon.cli.console import say, show, wrapped

    pooled = [each for each in entries if each.pooled]
    federated = [each for each in entries if not each.pooled]
    header = ["name", "title", "labels needed", "paper"]
    for heading, group in (("", federated), ("centralized, all rows in one place:", pooled)):
        if group and heading:
            say(console, f"\n{heading}" if federated else heading)
        if group:
            rows = [[each.name, each.title, each.labels, each.paper] for each in group]
            show(console, header, rows, wrap=True)
    for each in [*federated, *pooled]:
        say(console, f"\n{each.name}: {each.about}")
        for words in (f"labels_at: {', '.join(each.places)}", options[each.name]):
            say(console, wrapped(console, words))
