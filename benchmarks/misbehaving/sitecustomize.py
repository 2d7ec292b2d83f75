"""A site that misbehaves once, in its second round: Python imports this first where its folder is in PYTHONPATH.

The site is joined by the plain command; in its processes alone what they answer is spoiled, as MISBEHAVE says. Flower's
SuperNode and the process that forks for each message (`halfmoon.federation.flower.prefork`) are touched, all others are
left alone.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    from halfmoon.federation.protocol.messages import Malformed, Reply, Request, read, write
    from halfmoon.federation.site.client import SiteClient

    honest = SiteClient.answer

    def first(up: Tree, change: Callable[[torch.Tensor], torch.Tensor]) -> Tree:
        flat = tree.flatten(up)
        name = next(each for each, leaf in flat.items() if leaf.is_floating_point() and leaf.dim())
        return tree.unflatten({**flat, name: change(flat[name])})

    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "nan": lambda leaf: torch.full_like(leaf, float("nan")),
        "shape": lambda leaf: torch.cat([leaf, leaf]),
        "huge": lambda leaf: leaf + 1e6,
    }

    def answer(self: SiteClient, data: bytes) -> bytes:
        try:
            request = read(data, Request)
        except Malformed:  # an offer
            if KIND == "stranger":
                self.version = OTHER_VERSION
            return honest(self, data)
        last = self.home / "last.answer"
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
            reply = read(said, Reply)
            return write(replace(reply, up=first(reply.up, changes[KIND])))
        return said

    SiteClient.answer = answer


def spoil_sending() -> None:
    """Send every answer twice ("twice"), or die between announcing that of the second round and sending it ("cut")."""
    from flwr.supernode import start_client_internal as internal

    honest = internal._push_messages
    mark = Path(os.environ["HALFMOON_FLOWER"], f"sent-{KIND}")
    count = [0]

    def push(state: Any, object_store: Any, send: Callable[..., Any], push_object: Any) -> None:
        sent: list[tuple[Any, ...]] = []

        def noting(*words: Any) -> Any:
            sent.append(words)
            said = send(*words)
            count[0] += 1
            if KIND == "cut" and count[0] == ANSWERS and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return said

        honest(state=state, object_store=object_store, send=noting, push_object=push_object)
        if KIND == "twice":
            for words in sent:
                send(*words)
                mark.touch()

    internal._push_messages = push


if KIND in ("twice", "cut"):
    if "flower-supernode" in sys.orig_argv:
        spoil_sending()
elif KIND and "warm" in sys.orig_argv and "halfmoon.federation.flower.child_main" in sys.orig_argv:
    spoil_answers()
