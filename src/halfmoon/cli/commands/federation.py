"""`halfmoon federation`: certificates and keys of a federation; `halfmoon serve`: play it, from file to model."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import (
    Command,
    CommandExit,
    add_actions,
    add_command,
    exit_on_interrupt,
    line_writer,
    parse_int,
    print_json,
    print_table,
    print_text,
    print_warning,
)
from halfmoon.core.errors import UserError
from halfmoon.sites.keys.key_folder import AUTHORITY_DAYS, DEFAULT_CERTIFICATE_DAYS, DEFAULT_LISTEN_PORT, DEFAULT_PORT

if TYPE_CHECKING:
    from halfmoon.federation.transport.launch import ServerOptions
    from halfmoon.sites.keys.make import KeyChange


FOLDER = "FOLDER "


def add_federation(commands: Any) -> None:
    """Add the command's parser and those of its actions."""
    about = "manage certificates and keys of a federation: make, show and replace them"
    group = add_actions(commands, "federation", about)

    init = _action(group, "init", "make a folder with all that server and sites need to know each other", FOLDER, _init)
    init.add_argument("--sites", metavar="NAME", nargs="+", default=[], help="sites that get a key made here")
    init.add_argument("--host", metavar="HOST", nargs="+", default=[], help=_HOSTS)
    about = "how many images each of --sites has, as known here: no site counts for more"
    init.add_argument("--images", metavar="NAME=COUNT", nargs="+", default=[], help=about)
    about = f"how long the server's certificate is valid (default: {DEFAULT_CERTIFICATE_DAYS})"
    init.add_argument("--days", metavar="N", default=str(DEFAULT_CERTIFICATE_DAYS), help=about)
    about = f"the SuperLink's port, for this machine alone (default: {DEFAULT_PORT})"
    init.add_argument("--port", metavar="N", default=str(DEFAULT_PORT), help=about)
    about = f"the port where nginx listens for the sites (default: {DEFAULT_LISTEN_PORT})"
    init.add_argument("--listen", metavar="N", default=str(DEFAULT_LISTEN_PORT), help=about)

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
    parser = add_command(group, name, about, usage, do)
    about = "a new folder" if name == "init" else "the folder that halfmoon federation init has made"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    return parser


def _init(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import create_keys

    days = parse_int("--days", args.days, 1, AUTHORITY_DAYS)
    port, listen = parse_int("--port", args.port, 1, 2**16 - 1), parse_int("--listen", args.listen, 1, 2**16 - 1)
    change = create_keys(args.folder, args.sites, args.host, days, port, listen, args.images)
    return _tell(args, f"{change.summary['folder']} is made.", change)


def _add(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import add_site

    change = add_site(args.folder, args.name, args.public_key)
    return _tell(args, f"{args.name} may come in.", change)


def _remove(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import remove_site

    change = remove_site(args.folder, args.name)
    return _tell(args, f"{args.name} may not come in any more, and its key never again.", change)


def _rotate(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import renew_certificates, replace_site_key

    renewing = args.server or args.ca
    if renewing == (args.site is not None):
        raise UserError("rotate replaces one thing at a time: give --server, --ca or --site NAME.")
    if renewing and args.public_key is not None:
        raise UserError("--public-key is that of a site: it goes with --site NAME.")
    if not renewing and (args.host or args.days is not None):
        raise UserError("--host and --days stand in the server's certificate: they go with --server or --ca.")
    if args.site is not None:
        change = replace_site_key(args.folder, args.site, args.public_key)
        return _tell(args, f"the key of {args.site} is new; the one before never comes back.", change)
    days = None if args.days is None else parse_int("--days", args.days, 1, AUTHORITY_DAYS)
    change = renew_certificates(args.folder, args.host, days, args.ca)
    what = "the authority and the server's certificate are" if args.ca else "the server's certificate is"
    return _tell(args, f"{what} new.", change)


def _tell(args: argparse.Namespace, words: str, change: KeyChange) -> int:
    from halfmoon.sites.keys import Access

    if args.json:
        print_json({**change.summary, "advice": list(change.advice)})
    else:
        print_text("\n".join([words, *change.advice]))
    try:
        warnings = Access.open(args.folder).warnings()
    except UserError as error:  # something else is wrong with the folder; what was asked for is done
        warnings = [str(error)]
    for warning in warnings:
        print_warning(warning)
    return 0


def _show(args: argparse.Namespace) -> int:
    from halfmoon.sites.keys.make import list_keys

    result = list_keys(args.folder)
    if args.json:
        print_json(result)
    else:
        hosts = ", ".join(result["hosts"]) or "this machine alone"
        print_text(f"{result['folder']}: sites call {hosts}, port {result['listen']}")
        print_table(["what", "runs out", "fingerprint (SHA-256)"], _rows(result))
    for warning in result["warnings"]:
        print_warning(warning)
    return 0


def _rows(result: dict[str, Any]) -> list[list[str]]:
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


HOST, RESTARTS = "127.0.0.1", 5


def add_serve(commands: Any) -> None:
    """Add the command's parser."""
    about = "play a federation with sites over the network"
    parser = add_command(commands, "serve", about, "CONFIG.toml ", _serve)
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, help="options of a run, and a table [federation]")
    about = "the run folder, a new one or one to go on with (default: runs/NAME)"
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help=about)
    about = "a folder of `halfmoon federation`: only sites with a key in it may come in, through its proxy"
    parser.add_argument("--access", metavar="FOLDER", type=Path, help=about)
    about = f"where to listen; 0.0.0.0: at every address of this machine (default: {HOST})"
    parser.add_argument("--host", metavar="HOST", help=about)
    parser.add_argument("--port", metavar="N", help=f"the port (default: {DEFAULT_PORT}, or that of --access)")
    parser.add_argument("--ca", metavar="FILE", type=Path, help="TLS: the authority that signed the certificate (PEM)")
    parser.add_argument("--certificate", metavar="FILE", type=Path, help="TLS: the certificate of this machine (PEM)")
    parser.add_argument("--key", metavar="FILE", type=Path, help="TLS: the certificate's private key (PEM)")
    parser.add_argument("--insecure", action="store_true", help="listen to other machines without TLS")
    about = "also show the federation on a page that this machine alone can open, read only, at this port or a free one"
    parser.add_argument("--page", metavar="N", nargs="?", const="0", help=about)
    about = "let a site back in that was set aside for its unusable answers"
    parser.add_argument("--readmit", metavar="NAME", action="append", help=about)
    about = f"how often what dies is started again without a new round in between (default: {RESTARTS})"
    parser.add_argument("--restarts", metavar="N", default=str(RESTARTS), help=about)


def _serve(args: argparse.Namespace) -> int:
    from halfmoon.federation.server.plan import load_plan
    from halfmoon.federation.server.server import FederationServer
    from halfmoon.federation.transport.launch import MODEL_FILE, Halted, is_finished, serve, sites_without_model
    from halfmoon.federation.transport.processes import interruptible, require_flower

    port = None if args.port is None else parse_int("--port", args.port, 1, 2**16 - 1)
    restarts = parse_int("--restarts", args.restarts, 0, 10**6)
    _agreeing(args)
    require_flower()
    plan = load_plan(args.config)
    folder = args.run_dir or plan.config.run_dir or Path("runs", plan.terms.name)
    server = _server(args, folder, port, plan.terms.sites, restarts)
    write_line = line_writer(args.json)
    # Before anything of Flower's lies in it: a folder that holds something else is not a run's.
    host = FederationServer(plan, folder)
    host.prepare()
    for name in args.readmit or ():
        host.readmit(name)
        write_line(f"{name} is let back in.")
    away = sites_without_model(folder)
    if is_finished(folder) and not away:
        write_line(f"{folder} is finished already.")
    else:
        if away:
            write_line(f"{folder} is finished; it is served until {', '.join(away)} have the model (Ctrl-C ends this).")
            server = replace(server, redeliver=True)
        again = f"stopped; go on with: {shlex.join(['halfmoon', *args.words])}"
        try:
            with exit_on_interrupt(again), interruptible(), _page(args, folder, write_line):
                serve(server, write_line)
        except Halted as error:
            raise CommandExit(str(error)) from error
    model = folder / MODEL_FILE
    if args.json:
        print_json({"folder": str(folder), "model": str(model)})
    else:
        write_line(f"model: {model}")
    return 0


def _page(args: argparse.Namespace, folder: Path, show: Callable[[str], None]) -> AbstractContextManager[object]:
    if args.page is None:
        return nullcontext()
    from halfmoon.pages.server import serve_in_background
    from halfmoon.pages.watch import WatchPage

    return serve_in_background(
        WatchPage(folder).app(), "page", parse_int("--page", args.page, 0, 2**16 - 1) or None, show
    )


def _agreeing(args: argparse.Namespace) -> None:
    flags = {"--host": args.host, "--ca": args.ca, "--certificate": args.certificate, "--key": args.key}
    for flag, value in {**flags, "--insecure": args.insecure or None}.items():
        if args.access is not None and value is not None:
            raise UserError(f"--access and {flag} contradict each other: the folder says it; leave {flag} out.")


def _server(
    args: argparse.Namespace, folder: Path, port: int | None, sites: Sequence[str], restarts: int
) -> ServerOptions:
    from halfmoon.federation.transport.launch import ServerOptions
    from halfmoon.sites.keys import Access

    if args.access is None:
        tls = {"ca": args.ca, "certificate": args.certificate, "key": args.key}
        where = args.host or HOST, port or DEFAULT_PORT
        return ServerOptions(args.config, folder, *where, **tls, insecure=args.insecure, restarts=restarts)
    access = Access.open(args.access)
    if port not in (None, access.port):
        raise UserError(
            f"--port is {port}, but the proxy of {args.access} calls port {access.port}: leave --port out, or make "
            "another folder with that port."
        )
    return ServerOptions.with_access(args.config, folder, access, sites, restarts)
