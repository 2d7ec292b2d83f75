"""`halfmoon federation`: manage the certificates and keys of a federation, which lie in one folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import Command, actions, command, print_json, say, show
from halfmoon.cli.commands.serve import whole
from halfmoon.core.errors import UserError
from halfmoon.sites.keys.key_folder import DAYS, LISTEN, MOST_DAYS, PORT

if TYPE_CHECKING:
    from halfmoon.sites.keys.make import Done

FOLDER = "FOLDER "


def add(commands: Any) -> None:
    """Add the command's parser and those of its actions."""
    about = "manage certificates and keys of a federation: make, show and replace them"
    group = actions(commands, "federation", about)

    init = _action(group, "init", "make a folder with all that server and sites need to know each other", FOLDER, _init)
    init.add_argument("--sites", metavar="NAME", nargs="+", default=[], help="sites that get a key made here")
    init.add_argument("--host", metavar="HOST", nargs="+", default=[], help=_HOSTS)
    about = "how many images each of --sites has, as known here: it counts for no more"
    init.add_argument("--images", metavar="NAME=COUNT", nargs="+", default=[], help=about)
    about = f"how long the server's certificate is valid (default: {DAYS})"
    init.add_argument("--days", metavar="N", default=str(DAYS), help=about)
    about = f"the SuperLink's port, for this machine alone (default: {PORT})"
    init.add_argument("--port", metavar="N", default=str(PORT), help=about)
    about = f"the port where nginx listens for the sites (default: {LISTEN})"
    init.add_argument("--listen", metavar="N", default=str(LISTEN), help=about)

    more = _action(group, "add-site", "let one more site come in", "FOLDER NAME ", _add)
    more.add_argument("name", metavar="NAME", help="the site's name in the federation's file")
    more.add_argument("--public-key", metavar="FILE", type=Path, help=_PUBLIC)

    less = _action(group, "remove-site", "refuse a site from now on; its key never comes back", "FOLDER NAME ", _remove)
    less.add_argument("name", metavar="NAME", help="the site's name in the federation's file")

    rotate = _action(group, "rotate", "replace certificates and keys by new ones", FOLDER, _rotate)
    rotate.add_argument("--server", action="store_true", help="the server's key and certificate")
    rotate.add_argument("--ca", action="store_true", help="the authority, and the server's certificate under it")
    rotate.add_argument("--site", metavar="NAME", help="the key of this site")
    rotate.add_argument("--public-key", metavar="FILE", type=Path, help=_PUBLIC)
    rotate.add_argument("--host", metavar="HOST", nargs="+", default=[], help=f"{_HOSTS} (default: as before)")
    about = "how long the server's new certificate is valid (default: as before)"
    rotate.add_argument("--days", metavar="N", help=about)

    _action(group, "show", "list certificates and keys, and how long they are valid", FOLDER, _show)


_HOSTS = "names and addresses by which sites call the server"
_PUBLIC = "the site's public key, made at the site: no private key is ever here"


def _action(group: Any, name: str, about: str, usage: str, do: Command) -> argparse.ArgumentParser:
    parser = command(group, name, about, usage, do)
    about = "a new folder" if name == "init" else "the folder that halfmoon federation init has made"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    return parser


def _init(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import init

    days = whole("--days", args.days, 1, MOST_DAYS)
    port, listen = whole("--port", args.port, 1, 2**16 - 1), whole("--listen", args.listen, 1, 2**16 - 1)
    done = init(args.folder, args.sites, args.host, days, port, listen, args.images)
    return _tell(args, f"{done.facts['folder']} is made.", done)


def _add(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import add

    done = add(args.folder, args.name, args.public_key)
    return _tell(args, f"{args.name} may come in.", done)


def _remove(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import remove

    done = remove(args.folder, args.name)
    return _tell(args, f"{args.name} may not come in any more, and its key never again.", done)


def _rotate(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import rekey, renew

    renewing = args.server or args.ca
    if renewing == (args.site is not None):
        raise UserError("rotate replaces one thing at a time: give --server, --ca or --site NAME.")
    if renewing and args.public_key is not None:
        raise UserError("--public-key is that of a site: it goes with --site NAME.")
    if not renewing and (args.host or args.days is not None):
        raise UserError("--host and --days stand in the server's certificate: they go with --server or --ca.")
    if args.site is not None:
        done = rekey(args.folder, args.site, args.public_key)
        return _tell(args, f"the key of {args.site} is new; the one before never comes back.", done)
    days = None if args.days is None else whole("--days", args.days, 1, MOST_DAYS)
    done = renew(args.folder, args.host, days, args.ca)
    what = "the authority and the server's certificate are" if args.ca else "the server's certificate is"
    return _tell(args, f"{what} new.", done)


def _tell(args: argparse.Namespace, words: str, done: Done) -> int:
    """Print what was done, its fingerprints, and what is to be done now."""
    from halfmoon.sites.keys import Access

    if args.json:
        print_json({**done.facts, "advice": list(done.advice)})
    else:
        say("\n".join([words, *done.advice]))
    try:
        _warn(Access.open(args.folder).warnings())
    except UserError as error:  # something else is wrong with the folder; what was asked for is done
        _warn([str(error)])
    return 0


def _show(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import listing

    result = listing(args.folder)
    if args.json:
        print_json(result)
    else:
        hosts = ", ".join(result["hosts"]) or "this machine alone"
        say(f"{result['folder']}: sites call {hosts}, port {result['listen']}")
        show(["what", "runs out", "fingerprint (SHA-256)"], _rows(result))
    _warn(result["warnings"])
    return 0


def _rows(result: dict[str, Any]) -> list[list[str]]:
    """Return what is shown of certificates and keys."""
    rows = [
        [f"certificate of the {name}", f"{result[name]['left']} ({result[name]['until']})", result[name]["fingerprint"]]
        for name in ("authority", "server")
    ]
    for site in result["sites"]:
        still = "; the private key is still here" if site["private_key"] else ""
        rows.append([f"key of {site['name']}", f"never{still}", site["fingerprint"]])
    for key in result["refused"]:
        rows.append([f"key of {key['name']}", f"{key['why'].upper()} on {key['since'][:10]}", key["fingerprint"]])
    return rows


def _warn(warnings: list[str]) -> None:
    for words in warnings:
        sys.stderr.write(f"halfmoon: {words}\n")
