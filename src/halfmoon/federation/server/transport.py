"""Transports of bytes between a server and its sites, and a connection that waits out their losses."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class TransportReply(NamedTuple):
    """The result for a ticket: the answer, or None and why there will be none.

    An answer with a problem must not count: it brings its sender nearer to quarantine.
    """

    message_id: str
    data: bytes | None
    problem: str = ""


class NodeIdentity(NamedTuple):
    """The site whose key a node has, and when its process connected, in any words: others mean another process."""

    name: str
    since: str = ""


class Transport(Protocol):
    """Carries bytes; every method but `holders` may raise ConnectionError, which is waited out."""

    def nodes(self) -> Sequence[int]:
        """Return the nodes that are connected."""
        ...

    def holders(self) -> Mapping[int, NodeIdentity] | None:
        """Return whose key each node has, as far as sites may come in; None where sites have no keys."""
        ...

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        """Send each node its bytes, for which it has so many seconds; return a ticket for each that was accepted.

        `asks` says that this is an offer, not a request.
        """
        ...

    def collect(self, message_ids: Sequence[str]) -> Iterable[TransportReply]:
        """Return the replies to these tickets that have come; an iterator fetches each when it is its turn."""
        ...


@dataclass(frozen=True)
class Clock:
    """Time that a test can replace."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Connection:
    """A transport that may be cut off: `say` hears of it once, and nothing is sent until it works again."""

    post: Transport
    say: Callable[[str], None]
    cut: set[str] = field(default_factory=set)  # which ways failed when they were last tried

    def nodes(self) -> set[int] | None:
        """Return the nodes that are connected, None where the connection is lost."""
        return self._attempt("nodes", lambda: set(self.post.nodes()))

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        """Send as `Transport.send` does, and return the tickets: none where the connection is lost."""
        return (self._attempt("send", lambda: self.post.send(mail, seconds, asks)) or {}) if mail else {}

    def collect(self, message_ids: Sequence[str]) -> Iterator[TransportReply]:
        """Yield the replies to these tickets, one by one; nothing more once the connection is lost."""
        replies: list[Iterator[TransportReply]] = []

        def following() -> TransportReply | None:
            replies[:] = replies or [iter(self.post.collect(message_ids))]
            return next(replies[0], None)

        while (reply := self._attempt("collect", following)) is not None:
            yield reply

    def _attempt(self, way: str, call: Callable[[], T]) -> T | None:
        try:
            result = call()
        except ConnectionError as error:
            if not self.cut:
                self.say(f"the connection to the sites is lost ({error}); waiting for it")
            self.cut.add(way)
            return None
        if self.cut == {way}:
            self.say("the connection to the sites is there again")
        self.cut.discard(way)
        return result
