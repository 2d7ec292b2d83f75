"""`halfmoon site join`: take part in a federation with the images of a site folder, which stay where they are."""

from __future__ import annotations

import argparse
from pathlib import Path

from halfmoon.commands.base import complain
from halfmoon.commands.serve import shower, whole
from halfmoon.errors import UserError

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
    about = f"where to train: {', '.join(DEVICES)} (default: auto)"
    parser.add_argument("--device", metavar="DEVICE", default=DEVICES[0], help=about)
    about = "a folder of labeled images that models are tested on, and never trained on (default: none)"
    parser.add_argument("--test", metavar="FOLDER", type=Path, help=about)
    about = "a port of this machine for Flower's own use (default: a free one)"
    parser.add_argument("--port", metavar="N", help=about)


def run(given: argparse.Namespace) -> int:
    """Take part until interrupted, then return 130."""
    from halfmoon.flower.contact import Address
    from halfmoon.flower.joining import Joining, join
    from halfmoon.flower.processes import interruptible, require_flower
    from halfmoon.site.folder import read
    from halfmoon.site.prepare import HOME

    server = Address.parse(given.server)
    port = None if given.port is None else whole("--port", given.port, 1, 2**16 - 1)
    if given.device not in DEVICES:
        raise UserError(f"--device is {given.device!r}: it must be one of {', '.join(DEVICES)}.")
    require_flower()
    found = read(given.site)
    if given.test is not None and not (read(given.test).labels >= 0).any():
        raise UserError(f"--test {given.test} has no labeled image: name some in its labels.csv.")
    site = Joining(
        server,
        given.name,
        given.site,
        images=len(found),
        labeled=int((found.labels >= 0).sum()),
        home=given.home or given.site / HOME,
        ca=given.ca,
        insecure=given.insecure,
        key=given.key,
        device=given.device,
        port=port,
        tests=given.test,
    )
    try:
        with interruptible():
            join(site, shower(given.json))
    except KeyboardInterrupt:
        if given.debug:
            raise
        return complain(f"{given.name} has left; the same command joins again, with all that it remembers.", 130)
    return 0
