"""A site that misbehaves, most kinds once, in its second round: Python imports this where it is in PYTHONPATH.

The site is joined by the plain command; of its processes the node or the worker alone is touched, as MISBEHAVE says.
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
"""The round that is spoiled, from 0."""
ANSWERS = 3
"""What a site has answered then: that it joins, and two rounds."""


def spoil_answers() -> None:
    """Spoil what the site's own program answers."""
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

    def answer(self: SiteClient, data: bytes) -> bytes:
        try:
            request = read_message(data, Request)
        except MalformedMessage:  # an offer
            if KIND == "stranger":
                self.version = OTHER_VERSION
            return honest(self, data)
        if KIND == "slow":
            time.sleep(float(os.environ["MISBEHAVE_SECONDS"]))
            return honest(self, data)
        if KIND == "turned":  # in every round: the update with its sign turned, times four
            reply = read_message(honest(self, data), Reply)
            broadcast, flat = tree.flatten(request.download), tree.flatten(reply.upload)
            before = {f"update/{path}": leaf for path, leaf in broadcast.items() if path.startswith("params/")}
            flat |= {path: leaf + 4 * (leaf - flat[path]) for path, leaf in before.items() if path in flat}
            return write_message(replace(reply, upload=tree.unflatten(flat)))
        last = self.state_folder / "last.answer"
        if request.round != ROUND or request.attempt:
            said = honest(self, data)
            last.write_bytes(said)
            return said
        if KIND == "version":
            self.version = OTHER_VERSION
        said = honest(self, data)
        if KIND == "old":
            return last.read_bytes()
        if KIND == "late":
            time.sleep(float(os.environ["MISBEHAVE_SECONDS"]))
        if KIND in changes:
            reply = read_message(said, Reply)
            return write_message(replace(reply, upload=first(reply.upload, changes[KIND])))
        return said

    SiteClient.reply_to = answer


def spoil_sending() -> None:
    """Send every answer twice ("twice"), or die between announcing that of the second round and sending it ("cut")."""
    from flwr.app import Message

    from halfmoon.federation.transport.internals import Fleet

    honest = Fleet.send
    mark = Path(os.environ["HALFMOON_FLOWER"], f"sent-{KIND}")
    count = [0]

    def send(self: Fleet, message: Message, seconds: float) -> bool:
        count[0] += 1
        if KIND == "cut" and count[0] == ANSWERS and not mark.exists():
            mark.touch()
            push_message = self._push

            def push_and_die(*announced: object) -> None:
                push_message(*announced)
                os.kill(os.getpid(), signal.SIGKILL)

            self._push = push_and_die
        done = honest(self, message, seconds)
        if KIND == "twice":
            honest(self, message, seconds)
            mark.touch()
        return done

    Fleet.send = send


def move_clock() -> None:
    """Let `time.time` be as far from the truth, in seconds, as a file says."""
    path, true = Path(os.environ["MISBEHAVE_CLOCK"]), time.time

    def moved() -> float:
        words = path.read_text() if path.exists() else ""
        return true() + float(words or 0)

    time.time = moved


if KIND == "clock":
    move_clock()
elif KIND in ("twice", "cut"):
    if "flower-supernode" in sys.orig_argv:
        spoil_sending()
elif KIND and "worker" in sys.orig_argv and "halfmoon.federation.transport.node" in sys.orig_argv:
    spoil_answers()
