"""A site that attacks: Python imports this first where its folder is in PYTHONPATH, before the site's own program.

The file ATTACK says what it answers in place of a round's first attempt, such as "replay:1 pickle:2" (rounds from 0).
With "hold:3" it answers that round only when the file says so no more. The site is joined by the plain command, with a
key of its own; it answers honestly otherwise.
"""

import os
import pickle
import sys
import time
from pathlib import Path

FILE = os.environ.get("ATTACK", "")
LARGE = 300_000_000
"""Bytes that are added to an answer: random ones, of which Flower keeps no piece twice."""


class Creates:
    """Whoever unpickles it creates a file, and could as well have done anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def planned(round: int) -> str:
    """Return what is to be answered in a round, nothing for an honest answer."""
    return dict(word.split(":")[::-1] for word in Path(FILE).read_text().split()).get(str(round), "")


def spoil() -> None:
    """Spoil what the site's own program answers."""
    from dataclasses import replace

    import torch

    from halfmoon.federation.protocol.messages import MalformedMessage, Reply, Request, read_message, write_message
    from halfmoon.federation.site.client import SiteClient

    honest = SiteClient.reply_to

    def answer(self: SiteClient, data: bytes) -> bytes:
        said = honest(self, data)
        try:
            request = read_message(data, Request)
        except MalformedMessage:  # an offer
            return said
        last = self.state_folder / f"answer-{request.round}"
        while (kind := planned(request.round)) == "hold":
            time.sleep(0.1)
        kind = "" if request.attempt else kind
        if kind == "replay":
            return (self.state_folder / f"answer-{request.round - 1}").read_bytes()
        if kind == "pickle":
            return pickle.dumps(Creates(self.state_folder / "pwned"))
        if kind == "garbage":
            return os.urandom(10_000)
        if kind == "large":
            ballast = torch.frombuffer(bytearray(os.urandom(LARGE)), dtype=torch.uint8)
            reply = read_message(said, Reply)
            return write_message(replace(reply, upload={**reply.upload, "ballast": ballast}))
        last.write_bytes(said)
        return said

    SiteClient.reply_to = answer


if FILE and "worker" in sys.orig_argv and "halfmoon.federation.transport.node" in sys.orig_argv:
    spoil()
