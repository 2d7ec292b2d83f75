"""The end of a federation at its server: every site gets the final model, and the log says who has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from halfmoon.federation.protocol.messages import Delivered, Malformed, Refusal, read
from halfmoon.federation.server.sessions import ClientManager


def deliver(
    manager: ClientManager, names: Sequence[str], final: bytes, model: Path, say: Callable[[str], None]
) -> list[str]:
    """Send the sites of these names the final model, and return who has it; `model` is where it will lie here.

    Sites that are away are waited for as in any round.
    """
    got, missing = list[str](), dict[str, str]()
    for name, answer in manager.exchange(dict.fromkeys(names, final), "the final model").items():
        try:
            if answer.data is None:
                raise Malformed(answer.reason)
            reply = read(answer.data, Delivered, Refusal)
            if isinstance(reply, Refusal):
                raise Malformed(reply.reason)
            got.append(name)
        except Malformed as error:
            missing[name] = str(error)
    say(f"the final model is at {len(got)} of {len(names)} sites")
    for name, why in missing.items():
        say(f"{name} does not have the final model ({why}): send it {model}")
    return got
