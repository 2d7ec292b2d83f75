"""What carries bytes between a server and its sites, and a connection of which losses are waited out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class TransportReply(NamedTuple):
    """What came for a ticket: the answer, or None and why there will be none.

    An answer with a problem is one that must not count: who sends such ones is set aside.
    """

    message_id: str
    data: bytes | None
    problem: str = ""


class NodeIdentity(NamedTuple):
    """Whose key a node has, and when its process connected, in any words: others mean that it is another process."""

    name: str
    since: str = ""


class Transport(Protocol):
    """What carries bytes; every method but `holders` may raise ConnectionError, which is waited out."""

    def nodes(self) -> Sequence[int]:
        """Return the nodes that are connected."""
        ...

    def holders(self) -> Mapping[int, NodeIdentity] | None:
        """Return whose key each node has, as far as sites may come in; None where sites have no keys."""
        ...

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        """Send each node its bytes, which it may take so many seconds for; return a ticket for each that was taken.

        `asks` says that this is a question who is there, not work.
        """
        ...

    def collect(self, message_ids: Sequence[str]) -> Iterable[TransportReply]:
        """Return what has come for these tickets; an iterator fetches each when it is its turn."""
        ...


@dataclass(frozen=True)
class Clock:
    """Time that a test can replace."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Connection:
    """A transport that may be cut off: what cannot be carried is left, and `say` hears of it once."""

    post: Transport
    say: Callable[[str], None]
    cut: set[str] = field(default_factory=set)  # which ways failed when they were last tried

    def nodes(self) -> set[int] | None:
        """Return the nodes that are connected, None where the connection is lost."""
        return self._tried("nodes", lambda: set(self.post.nodes()))

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        """Send as `Transport.send` does, and return the tickets: none where the connection is lost."""
        return (self._tried("send", lambda: self.post.send(mail, seconds, asks)) or {}) if mail else {}

    def collect(self, message_ids: Sequence[str]) -> Iterator[TransportReply]:
        """Yield what has come for these tickets, one by one; nothing more once the connection is lost."""
        coming: list[Iterator[TransportReply]] = []

        def following() -> TransportReply | None:
            coming[:] = coming or [iter(self.post.collect(message_ids))]
            return next(coming[0], None)

        while (reply := self._tried("collect", following)) is not None:
            yield reply

    def _tried(self, way: str, call: Callable[[], T]) -> T | None:
        try:
            done = call()
        except ConnectionError as error:
            if not self.cut:
                self.say(f"the connection to the sites is lost ({error}); waiting for it")
            self.cut.add(way)
            return None
        if self.cut == {way}:
            self.say("the connection to the sites is there again")
        self.cut.discard(way)
        return done
