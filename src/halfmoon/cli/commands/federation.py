"""`halfmoon federation`: manage certificates and keys; `halfmoon serve`: run a federation with sites."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import (
    MAX_PORT,
    Command,
    CommandExit,
    add_actions,
    add_command,
    event_printer,
    exit_on_interrupt,
    parse_int,
    print_json,
    print_table,
    print_text,
    print_warning,
    refuse_windows,
)
from halfmoon.core.errors import UserError
from halfmoon.sites.keys.key_folder import AUTHORITY_DAYS, DEFAULT_CERTIFICATE_DAYS, DEFAULT_LISTEN_PORT, DEFAULT_PORT
from halfmoon.storage.events import EventRecorder

if TYPE_CHECKING:
    from halfmoon.federation.transport.launch import ServerOptions
    from halfmoon.sites.keys.make import KeyChange


MAX_RESTARTS = 10**6
"""Largest number of restarts of a server without a finished round."""

FOLDER_USAGE = "FOLDER "
"""The usage of actions on a folder of keys."""


def add_federation(commands: Any) -> None:
    """Add the command's parser and those of its actions."""
    about = "manage certificates and keys of a federation: make, show and replace them"
    group = add_actions(commands, "federation", about)

    init = _action(
        group, "init", "make a folder with the certificates and keys of server and sites", FOLDER_USAGE, _init
    )
    init.add_argument("--sites", metavar="NAME", nargs="+", default=[], help="sites that get a key made here")
    init.add_argument("--host", metavar="HOST", nargs="+", default=[], help=_HOSTS)
    about = "the number of images of each site, as the server knows it: it limits the weight of the site"
    init.add_argument("--images", metavar="NAME=COUNT", nargs="+", default=[], help=about)
    about = f"how long the server's certificate is valid (default: {DEFAULT_CERTIFICATE_DAYS})"
    init.add_argument("--days", metavar="N", default=str(DEFAULT_CERTIFICATE_DAYS), help=about)
    about = f"the SuperLink's port, for this machine only (default: {DEFAULT_PORT})"
    init.add_argument("--port", metavar="N", default=str(DEFAULT_PORT), help=about)
    about = f"the port where nginx listens for the sites (default: {DEFAULT_LISTEN_PORT})"
    init.add_argument("--listen", metavar="N", default=str(DEFAULT_LISTEN_PORT), help=about)

    add_site = _action(group, "add-site", "admit one more site", "FOLDER NAME ", _add)
    add_site.add_argument("name", metavar="NAME", help="the site's name in the federation's file")
    add_site.add_argument("--public-key", metavar="FILE", type=Path, help=_PUBLIC)

    remove_site = _action(
        group, "remove-site", "refuse a site from now on; its key is never accepted again", "FOLDER NAME ", _remove
    )
    remove_site.add_argument("name", metavar="NAME", help="the site's name in the federation's file")

    rotate = _action(group, "rotate", "replace certificates and keys with new ones", FOLDER_USAGE, _rotate)
    rotate.add_argument("--server", action="store_true", help="the server's key and certificate")
    rotate.add_argument("--ca", action="store_true", help="the authority, and the server's certificate under it")
    rotate.add_argument("--site", metavar="NAME", help="the key of this site")
    rotate.add_argument("--public-key", metavar="FILE", type=Path, help=_PUBLIC)
    rotate.add_argument("--host", metavar="HOST", nargs="+", default=[], help=f"{_HOSTS} (default: as before)")
    about = "how long the server's new certificate is valid (default: as before)"
    rotate.add_argument("--days", metavar="N", help=about)

    _action(group, "show", "list certificates and keys, and how long they are valid", FOLDER_USAGE, _show)


_HOSTS = "names and addresses at which sites reach the server"
_PUBLIC = "the site's public key, made at the site; its private key stays there"


def _action(group: Any, name: str, about: str, usage: str, do: Command) -> argparse.ArgumentParser:
    """Add the parser of an action on a folder of keys, such as `federation init FOLDER`."""

    @functools.wraps(do)
    def do_unless_windows(args: argparse.Namespace) -> int:
        refuse_windows()
        return do(args)

    parser = add_command(group, name, about, usage, do_unless_windows)
    about = "a new folder" if name == "init" else "the folder that halfmoon federation init has made"
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=about)
    return parser


def _init(args: argparse.Namespace) -> int:
    """Run `federation init`: create the keys and certificates of a federation."""
    from halfmoon.sites.keys.make import create_keys

    days = parse_int("--days", args.days, 1, AUTHORITY_DAYS)
    port = parse_int("--port", args.port, 1, MAX_PORT)
    listen = parse_int("--listen", args.listen, 1, MAX_PORT)
    change = create_keys(args.folder, args.sites, args.host, days, port, listen, args.images)
    return _print_change(args, f"{change.summary['folder']} is made.", change)


def _add(args: argparse.Namespace) -> int:
    """Run `federation add-site`: admit a site."""
    from halfmoon.sites.keys.make import add_site

    change = add_site(args.folder, args.name, args.public_key)
    return _print_change(args, f"{args.name} is admitted.", change)


def _remove(args: argparse.Namespace) -> int:
    """Run `federation remove-site`: refuse the key of a site."""
    from halfmoon.sites.keys.make import remove_site

    change = remove_site(args.folder, args.name)
    return _print_change(args, f"{args.name} is refused from now on, and its key is never accepted again.", change)


def _rotate(args: argparse.Namespace) -> int:
    """Run `federation rotate`: replace the server's certificate, the authority, or the key of a site."""
    from halfmoon.sites.keys.make import renew_certificates, replace_site_key

    # Both flags renew the server's certificate; --ca also replaces the authority that signs it.
    renews_server = args.server or args.ca
    if renews_server == (args.site is not None):
        raise UserError("rotate replaces one thing at a time: give --server, --ca or --site NAME.")
    if renews_server and args.public_key is not None:
        raise UserError("--public-key is the key of a site: it needs --site NAME.")
    if not renews_server and (args.host or args.days is not None):
        raise UserError("--host and --days are for the server's certificate: they need --server or --ca.")
    if args.site is not None:
        change = replace_site_key(args.folder, args.site, args.public_key)
        return _print_change(args, f"the key of {args.site} is new; the old one is never accepted again.", change)
    days = None if args.days is None else parse_int("--days", args.days, 1, AUTHORITY_DAYS)
    change = renew_certificates(args.folder, args.host, days, args.ca)
    renewed = "the authority and the server's certificate are" if args.ca else "the server's certificate is"
    return _print_change(args, f"{renewed} new.", change)


def _print_change(args: argparse.Namespace, message: str, change: KeyChange) -> int:
    """Print a change of a federation's keys, and warnings about the state of its folder.

    Args:
        args: the parsed command line.
        message: one sentence about the change.
        change: the fields to print as JSON, and advice on what people must do now, such as to restart the server.

    Returns:
        The exit code: 0 also with warnings, as the change is done.
    """
    from halfmoon.sites.keys import Access

    if args.json:
        print_json({**change.summary, "advice": list(change.advice)})
    else:
        print_text("\n".join([message, *change.advice]))
    try:
        warnings = Access.open(args.folder).warnings()
    except UserError as error:
        # The change is done; another fault of the folder is only reported.
        warnings = [str(error)]
    for warning in warnings:
        print_warning(warning)
    return 0


def _show(args: argparse.Namespace) -> int:
    """Run `federation show`: print the keys of a federation."""
    from halfmoon.sites.keys.make import list_keys

    result = list_keys(args.folder)
    if args.json:
        print_json(result)
    else:
        hosts = ", ".join(result["hosts"]) or "this machine only"
        print_text(f"{result['folder']}: sites reach {hosts}, port {result['listen']}")
        print_table(["what", "runs out", "fingerprint (SHA-256)"], _key_rows(result))
    for warning in result["warnings"]:
        print_warning(warning)
    return 0


def _key_rows(result: dict[str, Any]) -> list[list[str]]:
    """Format a federation's certificates, and its admitted and refused keys, as rows of the table of `federation show`.

    Args:
        result: the keys and certificates, as `list_keys` returns them.

    Returns:
        The name, how long it is valid, and the fingerprint of each.
    """
    rows = []
    for name in ("authority", "server"):
        certificate = result[name]
        validity = f"{certificate['left']} ({certificate['until']})"
        rows.append([f"certificate of the {name}", validity, certificate["fingerprint"]])
    for site in result["sites"]:
        note = "; the private key is still here" if site["private_key"] else ""
        rows.append([f"key of {site['name']}", f"never{note}", site["fingerprint"]])
    for key in result["refused"]:
        rows.append([f"key of {key['name']}", f"{key['why'].upper()} on {key['since'][:10]}", key["fingerprint"]])
    return rows


DEFAULT_HOST = "127.0.0.1"

DEFAULT_RESTARTS = 5
"""Restarts of a process that dies, without a finished round in between."""


def add_serve(commands: Any) -> None:
    """Add the parser of `serve`."""
    about = "run a federation with sites over the network"
    parser = add_command(commands, "serve", about, "CONFIG.toml ", _serve)
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, help="options of a run, and a table [federation]")
    about = "the run folder, new or to be continued (default: runs/NAME)"
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help=about)
    about = "a folder of `halfmoon federation`: only sites with a key in it are admitted, through its proxy"
    parser.add_argument("--access", metavar="FOLDER", type=Path, help=about)
    about = f"where to listen; 0.0.0.0: at every address of this machine (default: {DEFAULT_HOST})"
    parser.add_argument("--host", metavar="HOST", help=about)
    parser.add_argument("--port", metavar="N", help=f"the port (default: {DEFAULT_PORT}, or that of --access)")
    parser.add_argument("--ca", metavar="FILE", type=Path, help="TLS: the authority that signed the certificate (PEM)")
    parser.add_argument("--certificate", metavar="FILE", type=Path, help="TLS: the certificate of this machine (PEM)")
    parser.add_argument("--key", metavar="FILE", type=Path, help="TLS: the certificate's private key (PEM)")
    parser.add_argument("--insecure", action="store_true", help="listen to other machines without TLS")
    about = "also serve a read-only page about the federation to this machine, at this port or a free one"
    parser.add_argument("--page", metavar="N", nargs="?", const="0", help=about)
    about = "readmit a site that was excluded for its invalid replies"
    parser.add_argument("--readmit", metavar="NAME", action="append", help=about)
    about = f"how often a process that dies is restarted before a new round is finished (default: {DEFAULT_RESTARTS})"
    parser.add_argument("--restarts", metavar="N", default=str(DEFAULT_RESTARTS), help=about)
    about = "where messages wait: in memory (the default, faster) or on disk; rounds survive a crash in both"
    parser.add_argument("--queue", choices=("memory", "disk"), default="memory", help=about)


def _serve(args: argparse.Namespace) -> int:
    """Run `halfmoon serve CONFIG.toml`: start the server of a federation, or resume it, until it is finished.

    The server's process and Flower's are started by `serve`, and restarted if they die. Everything of the run is in its
    folder, so the same command continues after a stop.
    """
    from halfmoon.federation.server.plan import load_plan
    from halfmoon.federation.server.server import FederationServer
    from halfmoon.federation.transport.launch import MODEL_FILE, Halted, is_finished, serve, sites_without_model
    from halfmoon.federation.transport.processes import interruptible, require_flower

    refuse_windows()
    port = None if args.port is None else parse_int("--port", args.port, 1, MAX_PORT)
    restarts = parse_int("--restarts", args.restarts, 0, MAX_RESTARTS)
    _check_access_flags(args)
    require_flower()
    plan = load_plan(args.config)
    folder = args.run_dir or plan.config.run_dir or Path("runs", plan.terms.name)
    server_options = _server_options(args, folder, port, plan.terms.sites, restarts)
    display = event_printer(args.json)
    # Check the folder before Flower writes into it: a folder with other files is not a run folder.
    server = FederationServer(plan, folder)
    server.prepare()
    for name in args.readmit or ():
        server.readmit(name)
        display.record("site_readmitted", f"{name} is readmitted.", site=name)
    # Sites fetch the final model themselves, so a finished federation is served until all of them have it.
    waiting_sites = sites_without_model(folder)
    if is_finished(folder) and not waiting_sites:
        display.record("finished_before", f"{folder} is finished already.")
    else:
        if waiting_sites:
            names = ", ".join(waiting_sites)
            text = f"{folder} is finished; it is served until {names} have the model (Ctrl-C ends this)."
            display.record("waiting_to_deliver", text, sites=waiting_sites)
            server_options = replace(server_options, redeliver=True)
        # The same command continues the run: `serve` resumes a folder that is not finished.
        message = f"stopped; go on with: {shlex.join(['halfmoon', *args.words])}"
        try:
            with exit_on_interrupt(message), interruptible(), _serve_page(args, folder, display):
                serve(server_options, display)
        except Halted as error:
            raise CommandExit(str(error)) from error
    model = folder / MODEL_FILE
    if args.json:
        print_json({"folder": str(folder), "model": str(model)})
    else:
        print_text(f"model: {model}")
    return 0


def _serve_page(args: argparse.Namespace, folder: Path, display: EventRecorder) -> AbstractContextManager[object]:
    """Serve the page of the run in the background, if `--page` is given; close it at the end of the block."""
    if args.page is None:
        return nullcontext()
    from halfmoon.pages.server import serve_in_background
    from halfmoon.pages.watch import WatchPage

    port = parse_int("--page", args.page, 0, MAX_PORT) or None  # 0: any free port
    return serve_in_background(WatchPage(folder).app(), "page", port, display)


def _check_access_flags(args: argparse.Namespace) -> None:
    """Raise UserError for flags that contradict the folder of `--access`."""
    # None means not given. --insecure is False then, so it is mapped to None for the same test.
    flags = {"--host": args.host, "--ca": args.ca, "--certificate": args.certificate, "--key": args.key}
    for flag, value in {**flags, "--insecure": args.insecure or None}.items():
        if args.access is not None and value is not None:
            raise UserError(
                f"--access and {flag} contradict each other: the folder of --access sets it; leave {flag} out."
            )


def _server_options(
    args: argparse.Namespace, folder: Path, port: int | None, sites: Sequence[str], restarts: int
) -> ServerOptions:
    """Build the options of the server's process from the flags, or from the folder of keys that `--access` names.

    Args:
        args: the parsed command line.
        folder: the run folder.
        port: the port of `--port`; None for the default, or that of the folder of keys.
        sites: the names of the federation's sites.
        restarts: how often a process that dies is restarted before a new round is finished.
    """
    from halfmoon.federation.transport.launch import ServerOptions
    from halfmoon.sites.keys import Access

    if args.access is None:
        tls = {"ca": args.ca, "certificate": args.certificate, "key": args.key}
        return ServerOptions(
            args.config,
            folder,
            args.host or DEFAULT_HOST,
            port or DEFAULT_PORT,
            **tls,
            insecure=args.insecure,
            restarts=restarts,
            queue=args.queue,
        )
    access = Access.open(args.access)
    # The proxy's configuration in the folder contains the port, so the server must listen there.
    if port not in (None, access.port):
        raise UserError(
            f"--port is {port}, but the proxy of {args.access} connects to port {access.port}: leave --port out, or make "
            "another folder with that port."
        )
    return ServerOptions.with_access(args.config, folder, access, sites, restarts, args.queue)
