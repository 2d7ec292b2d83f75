"""`halfmoon serve`: play a federation with sites over the network, from its file to its model."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from halfmoon.commands.base import command, complain, print_json
from halfmoon.errors import UserError

HOST, PORT, RESTARTS = "127.0.0.1", 9092, 5


def add(commands: Any) -> None:
    """Add the command's parser."""
    about = "play a federation with sites over the network"
    parser = command(commands, "serve", about, "CONFIG.toml ")
    parser.add_argument("config", metavar="CONFIG.toml", type=Path, help="options of a run, and a table [federation]")
    about = "the run folder, a new one or one to go on with (default: runs/NAME)"
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help=about)
    about = f"where to listen; 0.0.0.0: at every address of this machine (default: {HOST})"
    parser.add_argument("--host", metavar="HOST", default=HOST, help=about)
    parser.add_argument("--port", metavar="N", default=str(PORT), help=f"the port (default: {PORT})")
    parser.add_argument("--ca", metavar="FILE", type=Path, help="TLS: the authority that signed the certificate (PEM)")
    parser.add_argument("--certificate", metavar="FILE", type=Path, help="TLS: the certificate of this machine (PEM)")
    parser.add_argument("--key", metavar="FILE", type=Path, help="TLS: the certificate's private key (PEM)")
    parser.add_argument("--insecure", action="store_true", help="listen to other machines without TLS")
    about = "let a site back in that was set aside for its unusable answers"
    parser.add_argument("--readmit", metavar="NAME", action="append", help=about)
    about = f"how often what dies is started again without a new round in between (default: {RESTARTS})"
    parser.add_argument("--restarts", metavar="N", default=str(RESTARTS), help=about)


def run(given: argparse.Namespace) -> int:
    """Serve until the run is finished; return 1 where it cannot go on, 130 where it was interrupted."""
    from halfmoon.flower.launch import MODEL, Halted, Server, finished, serve
    from halfmoon.flower.processes import interruptible, require_flower
    from halfmoon.net.host import Host
    from halfmoon.net.plan import load

    port, restarts = whole("--port", given.port, 1, 2**16 - 1), whole("--restarts", given.restarts, 0, 10**6)
    require_flower()
    plan = load(given.config)
    folder = given.run_dir or plan.config.run_dir or Path("runs", plan.terms.name)
    tls = {"ca": given.ca, "certificate": given.certificate, "key": given.key}
    server = Server(given.config, folder, given.host, port, **tls, insecure=given.insecure, restarts=restarts)
    show = shower(given.json)
    # Before anything of Flower's lies in it: a folder that holds something else is not a run's.
    host = Host(plan, folder)
    host.make()
    for name in given.readmit or ():
        host.readmit(name)
        show(f"{name} is let back in.")
    if finished(folder):
        show(f"{folder} is finished already.")
    else:
        try:
            with interruptible():
                serve(server, show)
        except KeyboardInterrupt:
            if given.debug:
                raise
            return complain(f"stopped; go on with: {shlex.join(['halfmoon', *given.words])}", 130)
        except Halted as error:
            if given.debug:
                raise
            return complain(str(error), 1)
    model = folder / MODEL
    if given.json:
        print_json({"folder": str(folder), "model": str(model)})
    else:
        show(f"model: {model}")
    return 0


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
