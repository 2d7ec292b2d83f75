"""`halfmoon serve`: play a federation with sites over the network, from its file to its model."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfmoon.cli.commands.base import command, complain, print_json
from halfmoon.core.errors import UserError

if TYPE_CHECKING:
    from halfmoon.federation.flower.launch import Server

HOST, PORT, RESTARTS = "127.0.0.1", 9092, 5


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "play a federation with sites over the network"
    parser = command(commands, "serve", about, "CONFIG.toml ", run)
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, help="options of a run, and a table [federation]")
    about = "the run folder, a new one or one to go on with (default: runs/NAME)"
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help=about)
    about = "a folder of `halfmoon federation`: only sites with a key in it may come in, through its proxy"
    parser.add_argument("--access", metavar="FOLDER", type=Path, help=about)
    about = f"where to listen; 0.0.0.0: at every address of this machine (default: {HOST})"
    parser.add_argument("--host", metavar="HOST", help=about)
    parser.add_argument("--port", metavar="N", help=f"the port (default: {PORT}, or that of --access)")
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


def run(args: argparse.Namespace) -> int:
    """Serve until the run is finished; return 1 where it cannot go on, 130 where it was interrupted."""
    from halfmoon.federation.flower.launch import MODEL, Halted, finished, lacking, serve
    from halfmoon.federation.flower.processes import interruptible, require_flower
    from halfmoon.federation.server.plan import load
    from halfmoon.federation.server.server import FederationServer

    port = None if args.port is None else whole("--port", args.port, 1, 2**16 - 1)
    restarts = whole("--restarts", args.restarts, 0, 10**6)
    _agreeing(args)
    require_flower()
    plan = load(args.config)
    folder = args.run_dir or plan.config.run_dir or Path("runs", plan.terms.name)
    server = _server(args, folder, port, plan.terms.sites, restarts)
    show = shower(args.json)
    # Before anything of Flower's lies in it: a folder that holds something else is not a run's.
    host = FederationServer(plan, folder)
    host.make()
    for name in args.readmit or ():
        host.readmit(name)
        show(f"{name} is let back in.")
    away = lacking(folder)
    if finished(folder) and not away:
        show(f"{folder} is finished already.")
    else:
        if away:
            show(f"{folder} is finished; it is served until {', '.join(away)} have the model (Ctrl-C ends this).")
            server = replace(server, again=True)
        try:
            with interruptible(), _page(args, folder, show):
                serve(server, show)
        except KeyboardInterrupt:
            if args.debug:
                raise
            return complain(f"stopped; go on with: {shlex.join(['halfmoon', *args.words])}", 130)
        except Halted as error:
            if args.debug:
                raise
            return complain(str(error), 1)
    model = folder / MODEL
    if args.json:
        print_json({"folder": str(folder), "model": str(model)})
    else:
        show(f"model: {model}")
    return 0


def _page(args: argparse.Namespace, folder: Path, show: Callable[[str], None]) -> AbstractContextManager[object]:
    if args.page is None:
        return nullcontext()
    from halfmoon.pages.server import beside
    from halfmoon.pages.watch import Watching

    return beside(Watching(folder).app(), "page", whole("--page", args.page, 0, 2**16 - 1) or None, show)


def _agreeing(args: argparse.Namespace) -> None:
    """Raise UserError for a flag that contradicts --access."""
    flags = {"--host": args.host, "--ca": args.ca, "--certificate": args.certificate, "--key": args.key}
    for flag, value in {**flags, "--insecure": args.insecure or None}.items():
        if args.access is not None and value is not None:
            raise UserError(f"--access and {flag} contradict each other: the folder says it; leave {flag} out.")


def _server(args: argparse.Namespace, folder: Path, port: int | None, sites: Sequence[str], restarts: int) -> Server:
    """Return how the flags say that the federation is served; raise UserError where that cannot be."""
    from halfmoon.federation.flower.launch import Server
    from halfmoon.sites.keys import Access

    if args.access is None:
        tls = {"ca": args.ca, "certificate": args.certificate, "key": args.key}
        where = args.host or HOST, port or PORT
        return Server(args.config, folder, *where, **tls, insecure=args.insecure, restarts=restarts)
    access = Access.open(args.access)
    if port not in (None, access.port):
        raise UserError(
            f"--port is {port}, but the proxy of {args.access} calls port {access.port}: leave --port out, or make "
            "another folder with that port."
        )
    return Server.guarded(args.config, folder, access, sites, restarts)


def whole(flag: str, words: str, least: int, most: int) -> int:
    """Return the whole number that a flag was given; raise UserError where it is none, or out of its range."""
    if not words.isdecimal() or not least <= int(words) <= most:
        raise UserError(f"{flag} is {words!r}: it must be a whole number from {least} to {most}.")
    return int(words)


def shower(json: bool) -> Callable[[str], None]:
    """Return what writes a line at once: to stdout, or to stderr where stdout is kept for `--json`."""
    stream = sys.stderr if json else sys.stdout

    def show(line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    return show
