"""`halfmoon federation`: manage the certificates and keys of a federation, which lie in one folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import Parser, command, print_json, say, show
from halfmoon.cli.commands.serve import whole
from halfmoon.core.errors import UserError, nearest
from halfmoon.sites.keys.key_folder import DAYS, LISTEN, MOST_DAYS, PORT

if TYPE_CHECKING:
    from halfmoon.sites.keys.make import Done

FOLDER = "FOLDER "


def add(commands: Any) -> None:
    """Add the command's parser and those of its actions."""
    about = "manage certificates and keys of a federation: make, show and replace them"
    parser = commands.add_parser(
        "federation",
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        usage="halfmoon federation ACTION [options]",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser)

    init = _action(actions, "init", "make a folder with all that server and sites need to know each other", FOLDER)
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

    more = _action(actions, "add-site", "let one more site come in", "FOLDER NAME ")
    more.add_argument("name", metavar="NAME", help="the site's name in the federation's file")
    more.add_argument("--public-key", metavar="FILE", type=Path, help=_PUBLIC)

    less = _action(actions, "remove-site", "let a site come in no more; its key never comes back", "FOLDER NAME ")
    less.add_argument("name", metavar="NAME", help="the site's name in the federation's file")

    rotate = _action(actions, "rotate", "replace certificates and keys by new ones", FOLDER)
    rotate.add_argument("--server", action="store_true", help="the server's key and certificate")
    rotate.add_argument("--ca", action="store_true", help="the authority, and the server's certificate under it")
    rotate.add_argument("--site", metavar="NAME", help="the key of this site")
    rotate.add_argument("--public-key", metavar="FILE", type=Path, help=_PUBLIC)
    rotate.add_argument("--host", metavar="HOST", nargs="+", default=[], help=f"{_HOSTS} (default: as before)")
    about = "how long the server's new certificate is valid (default: as before)"
    rotate.add_argument("--days", metavar="N", help=about)

    _action(actions, "show", "list certificates and keys, and how long they are valid", FOLDER)


_HOSTS = "names and addresses by which sites call the server"
_PUBLIC = "the site's public key, made at the site: no private key is ever here"


def run(given: argparse.Namespace) -> int:
    """Do what is asked for; what runs out within a month is said on stderr."""
    actions = {"init": _init, "add-site": _add, "remove-site": _remove, "rotate": _rotate, "show": _show}
    if given.action is None:
        raise UserError(f"federation needs to know what to do: {nearest('', actions)}")
    actions[given.action](given)
    return 0


def _action(actions: Any, name: str, about: str, usage: str) -> argparse.ArgumentParser:
    parser = command(actions, name, about)
    parser.usage = f"halfmoon federation {name} {usage}[options]"
    about = "a new folder" if name == "init" else "the folder that halfmoon federation init has made"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    return parser


def _init(given: argparse.Namespace) -> None:
    from halfmoon.sites.keys.make import init

    days = whole("--days", given.days, 1, MOST_DAYS)
    port, listen = whole("--port", given.port, 1, 2**16 - 1), whole("--listen", given.listen, 1, 2**16 - 1)
    done = init(given.folder, given.sites, given.host, days, port, listen, given.images)
    _tell(given, f"{done.facts['folder']} is made.", done)


def _add(given: argparse.Namespace) -> None:
    from halfmoon.sites.keys.make import add

    done = add(given.folder, given.name, given.public_key)
    _tell(given, f"{given.name} may come in.", done)


def _remove(given: argparse.Namespace) -> None:
    from halfmoon.sites.keys.make import remove

    done = remove(given.folder, given.name)
    _tell(given, f"{given.name} may not come in any more, and its key never again.", done)


def _rotate(given: argparse.Namespace) -> None:
    from halfmoon.sites.keys.make import rekey, renew

    renewing = given.server or given.ca
    if renewing == (given.site is not None):
        raise UserError("rotate replaces one thing at a time: give --server, --ca or --site NAME.")
    if renewing and given.public_key is not None:
        raise UserError("--public-key is that of a site: it goes with --site NAME.")
    if not renewing and (given.host or given.days is not None):
        raise UserError("--host and --days stand in the server's certificate: they go with --server or --ca.")
    if given.site is not None:
        done = rekey(given.folder, given.site, given.public_key)
        _tell(given, f"the key of {given.site} is new; the one before never comes back.", done)
        return
    days = None if given.days is None else whole("--days", given.days, 1, MOST_DAYS)
    done = renew(given.folder, given.host, days, given.ca)
    what = "the authority and the server's certificate are" if given.ca else "the server's certificate is"
    _tell(given, f"{what} new.", done)


def _tell(given: argparse.Namespace, words: str, done: Done) -> None:
    """Print what was done, its fingerprints, and what is to be done now."""
    from halfmoon.sites.keys import Access

    if given.json:
        print_json({**done.facts, "advice": list(done.advice)})
    else:
        say("\n".join([words, *done.advice]))
    try:
        _warn(Access.open(given.folder).warnings())
    except UserError as error:  # something else is wrong with the folder; what was asked for is done
        _warn([str(error)])


def _show(given: argparse.Namespace) -> None:
    from halfmoon.sites.keys.listing import listing

    found = listing(given.folder)
    if given.json:
        print_json(found)
    else:
        hosts = ", ".join(found["hosts"]) or "this machine alone"
        say(f"{found['folder']}: sites call {hosts}, port {found['listen']}")
        show(["what", "runs out", "fingerprint (SHA-256)"], _rows(found))
    _warn(found["warnings"])


def _rows(found: dict[str, Any]) -> list[list[str]]:
    """Return what is shown of certificates and keys."""
    rows = [
        [f"certificate of the {name}", f"{found[name]['left']} ({found[name]['until']})", found[name]["fingerprint"]]
        for name in ("authority", "server")
    ]
    for site in found["sites"]:
        still = "; the private key is still here" if site["private_key"] else ""
        rows.append([f"key of {site['name']}", f"never{still}", site["fingerprint"]])
    for key in found["refused"]:
        rows.append([f"key of {key['name']}", f"{key['why'].upper()} on {key['since'][:10]}", key["fingerprint"]])
    return rows


def _warn(warnings: list[str]) -> None:
    for words in warnings:
        sys.stderr.write(f"halfmoon: {words}\n")
