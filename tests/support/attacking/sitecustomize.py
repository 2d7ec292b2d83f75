"""Turn a site into an attacker. Python imports this module before the site's program if its folder is in PYTHONPATH.

The file ATTACK names the reply to the first attempt of a round, such as "replay:1 pickle:2" (rounds from 0). With "hold:3"
the reply of that round is delayed until the file no longer contains it. The site runs the normal command with its
registered key and otherwise replies honestly.
"""

import os
import pickle
import sys
import time
from pathlib import Path

ATTACK_FILE = os.environ.get("ATTACK", "")
LARGE_BYTES = 300_000_000
"""Random bytes that are added to a reply. Flower would store equal pieces only once."""


class CreateFileOnUnpickle:
    """Creates a file when it is unpickled, as a proof that a pickle can execute code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), "w")


def read_planned_attack(round: int) -> str:
    """Return the kind of reply for a round, "" for an honest one."""
    return dict(word.split(":")[::-1] for word in Path(ATTACK_FILE).read_text().split()).get(str(round), "")


def install_attack() -> None:
    """Replace the replies of the site's program."""
    from dataclasses import replace

    import torch

    from halfmoon.federation.protocol.messages import MalformedMessage, Reply, Request, read_message, write_message
    from halfmoon.federation.site.client import SiteClient

    reply_honestly = SiteClient.reply_to

    def reply_or_attack(self: SiteClient, data: bytes) -> bytes:
        reply = reply_honestly(self, data)
        try:
            request = read_message(data, Request)
        except MalformedMessage:  # an offer
            return reply
        stored_reply = self.state_folder / f"answer-{request.round}"
        while (kind := read_planned_attack(request.round)) == "hold":
            time.sleep(0.1)
        kind = "" if request.attempt else kind
        if kind == "replay":
            return (self.state_folder / f"answer-{request.round - 1}").read_bytes()
        if kind == "pickle":
            return pickle.dumps(CreateFileOnUnpickle(self.state_folder / "pwned"))
        if kind == "garbage":
            return os.urandom(10_000)
        if kind == "large":
            padding = torch.frombuffer(bytearray(os.urandom(LARGE_BYTES)), dtype=torch.uint8)
            content = read_message(reply, Reply)
            return write_message(replace(content, upload={**content.upload, "padding": padding}))
        stored_reply.write_bytes(reply)
        return reply

    SiteClient.reply_to = reply_or_attack


if ATTACK_FILE and "worker" in sys.orig_argv and "halfmoon.federation.transport.node" in sys.orig_argv:
    install_attack()
