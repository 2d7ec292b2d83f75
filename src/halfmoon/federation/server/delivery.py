"""The end of a federation at its server: every site gets the final model, and a file says which sites have it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from halfmoon.federation.protocol.messages import Malformed, Receipt, Refusal, read
from halfmoon.federation.server.sessions import ClientManager
from halfmoon.federation.server.spool import content
from halfmoon.storage import atomic_io
from halfmoon.storage.run_folder import MODEL

DELIVERY = "delivery.json"
"""The file in a run folder that says which sites have the final model, and which lack it."""

PERIOD, RETRY = 2.0, 30.0
"""Seconds between two polls for sites that were away, and between two attempts at one that did not take the model."""


def hand_out(
    manager: ClientManager, names: Sequence[str], final: bytes, run: Path, say: Callable[[str], None], seconds: float
) -> None:
    """Deliver the final model to sites and, for so many seconds more, to those that come back; write the file.

    `run` is the run's folder, whose file of deliveries also names the sites that got it before.
    """
    record = atomic_io.read_json(run / DELIVERY) or {}
    has: list[str] = record.get("has", [])
    attempts: dict[str, float] = {}

    def serve(some: Sequence[str]) -> list[str]:
        has.extend(deliver(manager, some, final, run / MODEL, say))
        lacks = [name for name in names if name not in has]
        facts = {**record, "has": sorted(set(has)), "lacks": lacks}
        atomic_io.replace(run / DELIVERY, (json.dumps(facts) + "\n").encode())
        return lacks

    lacks, end = serve(names), manager.clock.now() + seconds
    if lacks and seconds > 0:
        say(f"the server stays for {', '.join(lacks)}: who comes back gets the model")
    while lacks and (now := manager.clock.now()) < end:
        here = manager.poll()
        back = [name for name in lacks if name in here and now - attempts.get(name, -RETRY) >= RETRY]
        attempts |= dict.fromkeys(back, now)
        if back:
            lacks = serve(back)
        else:
            manager.clock.sleep(PERIOD)


def deliver(
    manager: ClientManager, names: Sequence[str], final: bytes, model: Path, say: Callable[[str], None]
) -> list[str]:
    """Send the sites of these names the final model, and return those that have it; `model` is where it will lie here.

    Sites that are away are waited for as in any round.
    """
    has, missing = list[str](), dict[str, str]()
    for name, answer in manager.exchange(dict.fromkeys(names, final), "the final model").items():
        try:
            if answer.data is None:
                raise Malformed(answer.reason)
            reply = read(content(answer.data), Receipt, Refusal)
            if isinstance(reply, Refusal):
                raise Malformed(reply.reason)
            has.append(name)
        except Malformed as error:
            missing[name] = str(error)
    say(f"the final model is at {len(has)} of {len(names)} sites")
    for name, why in missing.items():
        say(f"{name} does not have the final model ({why}): send it {model}, or serve the federation again")
    return has
