"""`halfmoon check-method`: try a method of one's own on a small federation, promise by promise."""

import argparse
from dataclasses import asdict
from typing import Any

from halfmoon.cli.commands.base import command, print_json
from halfmoon.cli.commands.serve import shower
from halfmoon.config.option_types import parse
from halfmoon.core.errors import UserError


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "try a method of your own on a small federation: loop = vmap, resume, messages, what leaves a site"
    parser = command(commands, "check-method", about, "my_module:Mine ", run)
    parser.add_argument("method", metavar="METHOD", help="my_module:Mine, or the name of any method")
    about = "the method's options, such as threshold=0.5"
    parser.add_argument("--option", metavar="NAME=VALUE", action="append", default=[], help=about)
    about = "a network of your own to try it on, for gray images of 8x8 pixels (default: the small network)"
    parser.add_argument("--network", metavar="MODULE:MAKE", help=about)


def run(args: argparse.Namespace) -> int:
    """Say of every promise whether it is kept; return 1 where one is not."""
    from halfmoon.contract import check

    show, promises = shower(args.json), []
    for each in check(args.method, _options(args), args.network):
        promises.append(each)
        if not args.json:
            words = f": {each.said}" if each.said else ""
            show(f"{'kept' if each.kept else 'BROKEN':7} {each.promise}{words}")
    broken = [each for each in promises if not each.kept]
    if args.json:
        print_json({"method": args.method, "kept": not broken, "promises": [asdict(each) for each in promises]})
    elif broken:
        show(f"\n{args.method} breaks {len(broken)} of {len(promises)} promises.")
    else:
        show(f"\n{args.method} keeps all {len(promises)} promises: it can be simulated, resumed and deployed.")
    return 1 if broken else 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of --option in the types of the method's options; raise UserError for an unknown one."""
    from halfmoon.methods import registry

    known = registry.options(args.method)
    chosen = {}
    for said in args.option:
        name, equals, words = said.partition("=")
        if not equals or name not in known:
            raise UserError(f"--option {said}: write NAME=VALUE, NAME one of: {', '.join(known) or '(none)'}.")
        chosen[name] = parse(f"--option {name}", known[name].type, words)
    return chosen
