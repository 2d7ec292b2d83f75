"""`halfmoon site join`: take part in a federation with the images of a site folder, which stay where they are."""

import argparse
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from halfmoon.cli.commands.base import complain
from halfmoon.cli.commands.serve import shower
from halfmoon.core import weight_files
from halfmoon.core.errors import UserError, nearest

DEVICES = ("auto", "cpu", "cuda")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the action."""
    required = parser.add_argument_group("who joins what")
    required.add_argument("--server", metavar="HOST:PORT", required=True, help="where the federation is served")
    about = "the site folder: images, labels.csv and perhaps classes.txt"
    required.add_argument("--site", metavar="FOLDER", type=Path, required=True, help=about)
    required.add_argument("--name", metavar="NAME", required=True, help="the site's name in the federation's file")
    about = "a folder for decoded images and what is remembered between rounds (default: FOLDER/.halfmoon)"
    parser.add_argument("--home", metavar="DIR", type=Path, help=about)
    parser.add_argument("--ca", metavar="FILE", type=Path, help="the authority that signed the server's certificate")
    parser.add_argument("--insecure", action="store_true", help="join a server on another machine without TLS")
    parser.add_argument("--key", metavar="FILE", type=Path, help="the site's private key, where the server wants one")
    about = "the public keys of all sites, for masked sums (default: a site's first key is remembered)"
    parser.add_argument("--site-keys", metavar="FILE", type=Path, help=about)
    about = f"where to train: {', '.join(DEVICES)} (default: auto)"
    parser.add_argument("--device", metavar="DEVICE", default=DEVICES[0], help=about)
    about = "a folder of labeled images that models are tested on, and never trained on (default: none)"
    parser.add_argument("--test", metavar="FOLDER", type=Path, help=about)
    about = "a folder of labeled images that choose the round whose model is kept, and are never trained on"
    parser.add_argument("--validation", metavar="FOLDER", type=Path, help=f"{about} (default: none)")
    about = (
        "the terms to take part on: the hash that halfmoon site terms shows, or 8 or more of its first digits; or any"
    )
    parser.add_argument("--terms", metavar="HASH|any", default="", help=f"{about} (default: you are asked)")
    about = "the methods to take part with (default: all)"
    parser.add_argument("--accept", metavar="METHOD", nargs="+", default=(), help=about)
    about = "parts from outside halfmoon (my_module:Mine) that a federation may make this site load (default: none)"
    parser.add_argument("--trust", metavar="PART", nargs="+", default=(), help=about)
    about = "your copy of the file of weights that the federation starts from (default: none)"
    parser.add_argument("--weights", metavar="FILE", nargs="+", type=Path, default=(), help=about)
    about = "show every option of the terms before asking, not ten lines"
    parser.add_argument("--all", action="store_true", help=about)


def run(args: argparse.Namespace) -> int:
    """Take part until interrupted, then return 130; 1 where the people here do not want to."""
    from halfmoon.federation.flower.contact import Address
    from halfmoon.federation.flower.processes import interruptible, require_flower
    from halfmoon.federation.flower.site_process import Declined, Ended, Joining, join
    from halfmoon.sites.folders.prepare import HOME
    from halfmoon.sites.folders.site_folder import read

    server = Address.parse(args.server)
    if args.device not in DEVICES:
        raise UserError(f"--device is {args.device!r}: it must be one of {', '.join(DEVICES)}.")
    require_flower()
    _check_methods(args.accept)
    for path in args.weights:
        weight_files.offer(path)  # one that cannot be read is told now
    result = read(args.site)
    for flag, folder in {"--test": args.test, "--validation": args.validation}.items():
        if folder is not None and not (read(folder).labels >= 0).any():
            raise UserError(f"{flag} {folder} has no labeled image: name some in its labels.csv.")
    site = Joining(
        server,
        args.name,
        args.site,
        images=len(result),
        labeled=int((result.labels >= 0).sum()),
        home=args.home or args.site / HOME,
        ca=args.ca,
        insecure=args.insecure,
        key=args.key,
        device=args.device,
        tests=args.test,
        validations=args.validation,
        terms=args.terms.lower(),
        methods=tuple(args.accept),
        trusted=tuple(args.trust),
        weights=tuple(args.weights),
        site_keys=args.site_keys,
        all=args.all,
    )
    try:
        with interruptible():
            join(site, shower(args.json), None if args.json else terminal())
    except Ended as over:
        if over.code:
            return complain(f"{over} This cannot change by waiting: {args.name} does not join.", over.code)
        if not args.json:
            shower(False)(str(over))
        return 0
    except Declined as error:
        if args.debug:
            raise
        return complain(f"{error} The same command asks again.", 1)
    except KeyboardInterrupt:
        if args.debug:
            raise
        return complain(f"{args.name} has left; the same command joins again, with all that it remembers.", 130)
    return 0


def _check_methods(names: Sequence[str]) -> None:
    """Raise UserError for a name that no method has."""
    if not names:
        return
    from halfmoon.methods import registry  # slow to import: it brings torch

    for name in names:
        if name not in (*registry.names(), *registry.STARTS):
            raise UserError(f"--accept names the unknown method {name!r}: {nearest(name, registry.names())}")


class Terminal:
    """A person who reads `screen` and types at `keys`."""

    def __init__(self, keys: TextIO, screen: TextIO) -> None:
        self.keys, self.screen = keys, screen

    def ask(self, question: str) -> None:
        self.screen.write(question)
        self.screen.flush()

    def answer(self) -> bool | None:
        """Return whether a line has been typed that says yes, None where none has; the end of what comes is a no."""
        if not select.select([self.keys], [], [], 0)[0]:
            return None
        return self.keys.readline().strip().lower() in ("y", "yes")


def terminal() -> Terminal | None:
    """Return who sits at this process' terminal, None where it has none."""
    keys, screen = sys.stdin, sys.stdout
    return None if keys is None or not (keys.isatty() and screen.isatty()) else Terminal(keys, screen)
