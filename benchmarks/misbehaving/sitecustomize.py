"""Make a site misbehave, for most kinds once, in its second round: Python imports this file if its folder is in PYTHONPATH.

The site joins by the normal command; MISBEHAVE names the kind, which affects only its node or only its worker process.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

KIND = os.environ.get("MISBEHAVE", "")
OTHER_VERSION = "0.0.1"
ROUND = 1
"""The round in which the site misbehaves, from 0."""
REPLIES = 3
"""Replies of a site until then: that it joins, and two rounds."""


def spoil_answers() -> None:
    """Replace the replies of the site's program."""
    import torch

    from halfmoon.core import tree
    from halfmoon.core.tree import Tree
    from halfmoon.federation.protocol.messages import MalformedMessage, Reply, Request, read_message, write_message
    from halfmoon.federation.site.client import SiteClient

    honest = SiteClient.reply_to

    def first(upload: Tree, change: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
        flat = tree.flatten(upload)
        name = next(each for each, leaf in flat.items() if leaf.is_floating_point() and leaf.dim())
        return tree.unflatten({**flat, name: change(flat[name])})

    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "nan": lambda leaf: torch.full_like(leaf, float("nan")),
        "shape": lambda leaf: torch.cat([leaf, leaf]),
        "huge": lambda leaf: leaf + 1e6,
    }

    def reply_wrongly(self: SiteClient, data: bytes) -> bytes:
        try:
            request = read_message(data, Request)
        except MalformedMessage:  # it is an offer
            if KIND == "stranger":
                self.version = OTHER_VERSION
            return honest(self, data)
        if KIND == "slow":
            time.sleep(float(os.environ["MISBEHAVE_SECONDS"]))
            return honest(self, data)
        if KIND == "turned":  # in every round: the update with the opposite sign, times four
            reply = read_message(honest(self, data), Reply)
            broadcast = tree.flatten(request.download)
            flat = tree.flatten(reply.upload)
            before = {f"update/{path}": leaf for path, leaf in broadcast.items() if path.startswith("params/")}
            flat |= {path: leaf + 4 * (leaf - flat[path]) for path, leaf in before.items() if path in flat}
            return write_message(replace(reply, upload=tree.unflatten(flat)))
        last = self.state_folder / "last.reply"
        if request.round != ROUND or request.attempt:
            reply_data = honest(self, data)
            last.write_bytes(reply_data)
            return reply_data
        if KIND == "version":
            self.version = OTHER_VERSION
        reply_data = honest(self, data)
        if KIND == "old":
            return last.read_bytes()
        if KIND == "late":
            time.sleep(float(os.environ["MISBEHAVE_SECONDS"]))
        if KIND in changes:
            reply = read_message(reply_data, Reply)
            return write_message(replace(reply, upload=first(reply.upload, changes[KIND])))
        return reply_data

    SiteClient.reply_to = reply_wrongly


def spoil_sending() -> None:
    """Send every reply twice ("twice"), or exit between announcing and sending that of the second round ("cut")."""
    from flwr.app import Message

    from halfmoon.federation.transport.internals import Fleet

    honest = Fleet.send
    marker = Path(os.environ["HALFMOON_FLOWER"], f"sent-{KIND}")
    count = [0]

    def send(self: Fleet, message: Message, seconds: float) -> bool:
        count[0] += 1
        if KIND == "cut" and count[0] == REPLIES and not marker.exists():
            marker.touch()
            push_message = self._push

            def push_and_exit(*announced: object) -> None:
                push_message(*announced)
                os.kill(os.getpid(), signal.SIGKILL)

            self._push = push_and_exit
        done = honest(self, message, seconds)
        if KIND == "twice":
            honest(self, message, seconds)
            marker.touch()
        return done

    Fleet.send = send


def move_clock() -> None:
    """Shift `time.time` by the seconds in a file."""
    path = Path(os.environ["MISBEHAVE_CLOCK"])
    true = time.time

    def moved() -> float:
        shift = path.read_text() if path.exists() else ""
        return true() + float(shift or 0)

    time.time = moved


if KIND == "clock":
    move_clock()
elif KIND in ("twice", "cut"):
    if "flower-supernode" in sys.orig_argv:
        spoil_sending()
elif KIND and "worker" in sys.orig_argv and "halfmoon.federation.transport.node" in sys.orig_argv:
    spoil_answers()
