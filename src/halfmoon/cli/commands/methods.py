"""`halfmoon methods`: list methods and their options; `halfmoon check-method`: test a method of yours."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import add_command, line_writer, print_json
from halfmoon.config.option_types import describe_type, parse_value
from halfmoon.core import toml
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from halfmoon.methods.registry import MethodEntry


def add(commands: Any) -> None:
    """Add the parser of `methods`."""
    parser = add_command(commands, "methods", "list the methods and their options", "[NAME ...] ", run)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these methods")


def run(args: argparse.Namespace) -> int:
    """Run `halfmoon methods`: list the methods, with their options and defaults."""
    from halfmoon.methods import registry

    entries = [registry.entry(name) for name in args.names or registry.names()]
    if args.json:
        print_json([_describe_method(entry.name) for entry in entries])
        return 0
    options = {}
    for entry in entries:
        defaults = [
            f"{name} = {toml.format_text(option.default)}" for name, option in registry.options(entry.name).items()
        ]
        options[entry.name] = ", ".join(defaults)
    from rich.console import Console

    print_methods(Console(), entries, options)
    return 0


def _describe_method(name: str) -> dict[str, Any]:
    """Describe a method and its options as fields of the JSON output."""
    from halfmoon.methods import registry

    entry = registry.entry(name)
    options = {
        key: {"default": option.default, "type": describe_type(option.type)}
        for key, option in registry.options(name).items()
    }
    return {
        "name": name,
        "title": entry.title,
        "paper": entry.paper,
        "about": entry.about,
        "labels": entry.labels,
        "labels_at": list(entry.label_locations),
        "oracle": entry.all_labels,
        "centralized": entry.pooled,
        "options": options,
    }


def print_methods(console: Console, entries: Sequence[MethodEntry], options: Mapping[str, str]) -> None:
    """Print a table of federated and one of centralized methods, then the label locations and options of each.

    Args:
        console: the console to print on.
        entries: the methods.
        options: the options of each method as one text, by its name.
    """
    from halfmoon.cli.console import print_table, wrap_text
    from halfmoon.runs.progress import print_line

    pooled = [entry for entry in entries if entry.pooled]
    federated = [entry for entry in entries if not entry.pooled]
    header = ["name", "title", "labels needed", "paper"]
    for heading, group in (("", federated), ("centralized, all rows in one place:", pooled)):
        if group and heading:
            print_line(console, f"\n{heading}" if federated else heading)
        if group:
            rows = [[entry.name, entry.title, entry.labels, entry.paper] for entry in group]
            print_table(console, header, rows, wrap=True)
    for entry in [*federated, *pooled]:
        print_line(console, f"\n{entry.name}: {entry.about}")
        print_line(console, wrap_text(console, f"labels_at: {', '.join(entry.label_locations)}"))
        print_line(console, wrap_text(console, options[entry.name]))


def add_check(commands: Any) -> None:
    """Add the command's parser."""
    about = (
        "test your method in a small federation: batching of clients, resume, messages, and the data that sites send"
    )
    parser = add_command(commands, "check-method", about, "my_module:Mine ", _check)
    parser.add_argument("method", metavar="METHOD", help="my_module:Mine, or the name of any method")
    about = "the method's options, such as threshold=0.5"
    parser.add_argument("--option", metavar="NAME=VALUE", action="append", default=[], help=about)
    about = "a network for gray images of 8x8 pixels to test it with (default: the small network)"
    parser.add_argument("--network", metavar="MODULE:MAKE", help=about)


def _check(args: argparse.Namespace) -> int:
    """Run `check-method`: run all checks of the contract, and print each result at once."""
    from halfmoon.federation.contract import check_method

    write_line = line_writer(args.json)
    results = []
    for result in check_method(args.method, _options(args), args.network):  # one promise of the contract each
        results.append(result)
        if not args.json:
            detail = f": {result.said}" if result.said else ""
            write_line(f"{'kept' if result.kept else 'BROKEN':7} {result.promise}{detail}")
            if args.debug and result.trace:
                write_line(result.trace)
    broken = [result for result in results if not result.kept]
    if args.json:
        print_json({"method": args.method, "kept": not broken, "promises": [asdict(result) for result in results]})
    elif broken:
        write_line(f"\n{args.method} breaks {len(broken)} of {len(results)} promises.")
    else:
        write_line(f"\n{args.method} keeps all {len(results)} promises: it can be simulated, resumed and deployed.")
    return 1 if broken else 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Parse the values of `--option NAME=VALUE` to the types of the method's options."""
    from halfmoon.methods import registry

    options = registry.options(args.method)
    values = {}
    for text in args.option:
        name, equals, value = text.partition("=")
        if not equals or name not in options:
            raise UserError(f"--option {text}: write NAME=VALUE, NAME one of: {', '.join(options) or '(none)'}.")
        values[name] = parse_value(f"--option {name}", options[name].type, value)
    return values
