"""A transport and a clock for tests, in which nodes come and go and replies are late, duplicated, damaged or missing."""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from text_log import TextLog

from halfmoon.federation.protocol.messages import Acceptance, Refusal, write_message
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.connection import Clock, NodeIdentity, SiteReply
from halfmoon.federation.server.sessions import ClientManager
from halfmoon.runs.factory import ImageSpec

VERSION = metadata.version("halfmoon")
SITES = ("north", "south", "west")
IMAGE_SPEC = ImageSpec((1, 8, 8), ("sound", "ill"), False, (0.5,), (0.25,))
SMALL = {"method": "fedavg", "network": "small", "width": 2, "cohort": 2, "rounds": 3}

MAX_SECONDS = 5_000
"""A test that sleeps longer on the fake clock has failed."""

DelayedReply = tuple[float, bytes | None]
"""Seconds until a reply arrives, and its bytes, or None if the message failed."""


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # 0: the system chooses a free port
        return probe.getsockname()[1]


def make_terms(sites: Sequence[str] = SITES, image_spec: ImageSpec = IMAGE_SPEC, **options: Any) -> Terms:
    """Return terms of a small federation; `options` are options of the run."""
    return Terms.from_options("test", tuple(sites), image_spec, {**SMALL, **options}, "the test")


TERMS = make_terms()


def make_message_bytes(header: str, body: bytes = b"") -> bytes:
    """Return a message with an arbitrary header."""
    data = header.encode()
    # The wire format: the length of the header in 8 bytes, the header, the tensors.
    return len(data).to_bytes(8, "little") + data + body


@dataclass
class FakeNode:
    """The replies of a node: `join` to an offer, `client_update` to a request. Each may return several replies."""

    join: Callable[[], Iterable[DelayedReply]]
    client_update: Callable[[bytes], Iterable[DelayedReply]]


def make_acceptance(name: str, **changes: Any) -> bytes:
    """Return the message with which a site accepts `TERMS`."""
    return write_message(replace(Acceptance(TERMS.hash, VERSION, name, 4, 6), **changes))


def make_node(name: str, delay: float = 1.0, reply: bytes | None = None) -> FakeNode:
    """Return the node of a site, which replies to each request after `delay` seconds.

    Args:
        name: the site.
        delay: seconds until a reply arrives.
        reply: its bytes, by default the name and the request.
    """
    return FakeNode(
        join=lambda: [(0.3, make_acceptance(name))],
        client_update=lambda data: [(delay, reply if reply is not None else name.encode() + b":" + data)],
    )


def make_silent_node(join_reply: bytes) -> FakeNode:
    """Return a node that replies to offers only."""
    return FakeNode(join=lambda: [(0.3, join_reply)], client_update=lambda data: [])


def make_refusal(kind: str, reason: str = "no") -> bytes:
    """Return the message with which a site refuses."""
    return write_message(Refusal(VERSION, kind, reason))


@dataclass
class FakeTransport:
    """A `Transport` with its own `Clock`. Replies of nodes that have disappeared still arrive.

    Attributes:
        fake_nodes: the connected nodes by number.
        time: seconds on the clock.
        events: (time, callback) of scheduled changes.
        offers: (time, node) of each offer that was sent.
        requests: (time, node, data) of each request that was sent.
        broken_calls: names of methods that raise ConnectionError.
        full_nodes: nodes that accept no message.
        identities: owners of the keys by node, None without authentication.
        log: texts of the manager's events.
        timeouts: seconds for which each message was sent.
    """

    fake_nodes: dict[int, FakeNode] = field(default_factory=dict)
    time: float = 0.0
    events: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    offers: list[tuple[float, int]] = field(default_factory=list)
    requests: list[tuple[float, int, bytes]] = field(default_factory=list)
    broken_calls: set[str] = field(default_factory=set)
    full_nodes: set[int] = field(default_factory=set)
    identities: dict[int, NodeIdentity] | None = None
    log: list[str] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    _pending: list[tuple[float, str, bytes | None]] = field(default_factory=list)
    _message_count: int = 0

    def make_manager(self, timeout: float = 100.0, absence: float = 20.0, terms: Terms = TERMS) -> ClientManager:
        """Return a client manager on this transport and clock, whose events are appended to `log`."""
        clock = Clock(lambda: self.time, self.sleep)
        return ClientManager(self, terms, VERSION, timeout, absence, TextLog(self.log), clock)

    def schedule(self, time: float, callback: Callable[[], Any]) -> None:
        """Call `callback` when the clock reaches `time`."""
        # The result of the callback is dropped: events return nothing.
        self.events.append((time, lambda: (callback(), None)[1]))

    def sleep(self, seconds: float) -> None:
        """Advance the clock and call what is due."""
        self.time += seconds
        # Removed before they are called: a callback may schedule the next event.
        due = [callback for time, callback in self.events if time <= self.time]
        self.events = [each for each in self.events if each[0] > self.time]
        for callback in due:
            callback()
        assert self.time < MAX_SECONDS, "the test waits too long"

    def restart_node(self, old: int, new: int, node: FakeNode) -> None:
        """Replace a node by one with a new number, as after a restart of the site."""
        self.fake_nodes.pop(old, None)
        self.fake_nodes[new] = node

    def nodes(self) -> Sequence[int]:
        """Return the numbers of the connected nodes."""
        self._connect("nodes")
        return list(self.fake_nodes)

    def key_owners(self) -> Mapping[int, NodeIdentity] | None:
        """Return the owner of each node's key."""
        return self.identities

    def send(self, messages: Mapping[int, bytes], seconds: float, is_offer: bool) -> Mapping[int, str]:
        """Send messages to the nodes that are connected and not full, and return their message ids."""
        self._connect("send")
        message_ids = {}
        for number, data in messages.items():
            if number not in self.fake_nodes or number in self.full_nodes:
                continue
            node = self.fake_nodes[number]
            self._message_count += 1
            message_ids[number] = f"message {self._message_count}"
            self.timeouts.append(seconds)
            if is_offer:
                self.offers.append((self.time, number))
            else:
                self.requests.append((self.time, number, data))
            replies = node.join() if is_offer else node.client_update(data)
            self._pending += [(self.time + delay, message_ids[number], reply) for delay, reply in replies]
        return message_ids

    def collect(self, message_ids: Sequence[str]) -> Sequence[SiteReply]:
        """Return the replies that have arrived, in reverse order: a transport does not guarantee any order."""
        self._connect("collect")
        arrived = [each for each in self._pending if each[0] <= self.time and each[1] in message_ids]
        self._pending = [each for each in self._pending if each not in arrived]
        return [
            SiteReply(data, "it fell over" if data is None else "", message_id)
            for _, message_id, data in reversed(arrived)
        ]

    def count_logged(self, text: str) -> int:
        """Return the number of logged events that contain a text."""
        return sum(text in line for line in self.log)

    def _connect(self, call: str) -> None:
        if call in self.broken_calls:
            raise ConnectionError("no way")


def exchange_messages(
    manager: ClientManager, *names: str, data: bytes = b"do", purpose: str = "round 1"
) -> dict[str, SiteReply]:
    """Send the same data to some sites, by default all, and return their responses."""
    return manager.exchange(dict.fromkeys(names or SITES, data), purpose)
