"""Made-up posts, clocks and links: nodes appear and vanish, answers come late, twice, spoiled or not at all."""

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any

from text_log import TextLog

from halfmoon.federation.protocol.messages import Acceptance, Refusal, write_message
from halfmoon.federation.protocol.terms import Terms
from halfmoon.federation.server.connection import Clock, NodeIdentity, TransportReply
from halfmoon.federation.server.sessions import ClientManager, SiteResponse
from halfmoon.runs.factory import ImageSpec

VERSION = metadata.version("halfmoon")
SITES = ("north", "south", "west")
IMAGE_SPEC = ImageSpec((1, 8, 8), ("sound", "ill"), False, (0.5,), (0.25,))
SMALL = {"method": "fedavg", "network": "small", "width": 2, "cohort": 2, "rounds": 3}

DelayedReply = tuple[float, bytes | None]
"""Seconds until something comes for a ticket, and what: bytes, or None for a problem."""


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_terms(sites: Sequence[str] = SITES, form: ImageSpec = IMAGE_SPEC, **values: Any) -> Terms:
    return Terms.from_options("test", tuple(sites), form, {**SMALL, **values}, "the test")


TERMS = make_terms()


def make_message_bytes(header: str, body: bytes = b"") -> bytes:
    """Return a message with any header."""
    data = header.encode()
    return len(data).to_bytes(8, "little") + data + body


@dataclass
class FakeNode:
    """What is behind a node's number: `join` answers an offer, `client_update` a request; each may repeat."""

    join: Callable[[], Iterable[DelayedReply]]
    client_update: Callable[[bytes], Iterable[DelayedReply]]


def make_acceptance(name: str, **changes: Any) -> bytes:
    """Return the bytes by which a site of `TERMS` joins."""
    return write_message(replace(Acceptance(TERMS.hash, VERSION, name, 4, 6), **changes))


def make_node(name: str, takes: float = 1.0, said: bytes | None = None) -> FakeNode:
    """Return a node of the site `name`, which answers requests after some seconds with `said`, or with what it got."""
    return FakeNode(
        lambda: [(0.3, make_acceptance(name))],
        lambda data: [(takes, said if said is not None else name.encode() + b":" + data)],
    )


def make_silent_node(answer: bytes) -> FakeNode:
    return FakeNode(lambda: [(0.3, answer)], lambda data: [])


def make_refusal(kind: str, reason: str = "no") -> bytes:
    return write_message(Refusal(VERSION, kind, reason))


@dataclass
class FakeTransport:
    """A `Post` and a `Clock`: `at` says what happens when; nodes that are gone still have their answers under way."""

    nodes_: dict[int, FakeNode] = field(default_factory=dict)
    time: float = 0.0
    events: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    offers: list[tuple[float, int]] = field(default_factory=list)
    requests: list[tuple[float, int, bytes]] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    full: set[int] = field(default_factory=set)
    keys: dict[int, NodeIdentity] | None = None
    said: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    _under_way: list[tuple[float, str, bytes | None]] = field(default_factory=list)
    _tickets: int = 0

    def manager(self, timeout: float = 100.0, absence: float = 20.0, about: Terms = TERMS) -> ClientManager:
        """Return a roster on this street; what it says is kept."""
        return ClientManager(
            self, about, VERSION, timeout, absence, TextLog(self.said), Clock(lambda: self.time, self.sleep)
        )

    def at(self, time: float, happens: Callable[[], Any]) -> None:
        self.events.append((time, lambda: (happens(), None)[1]))

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        due = [happens for time, happens in self.events if time <= self.time]
        self.events = [each for each in self.events if each[0] > self.time]
        for happens in due:
            happens()
        assert self.time < 5_000, "nobody waits this long"

    def move(self, old: int, new: int, there: FakeNode) -> None:
        """Let a site start again: under a new number."""
        self.nodes_.pop(old, None)
        self.nodes_[new] = there

    def nodes(self) -> Sequence[int]:
        self._connect("nodes")
        return list(self.nodes_)

    def key_owners(self) -> Mapping[int, NodeIdentity] | None:
        return self.keys

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        """Take mail for the nodes that are there and not `full`."""
        self._connect("send")
        message_ids = {}
        for number, data in mail.items():
            if number not in self.nodes_ or number in self.full:
                continue
            there = self.nodes_[number]
            self._tickets += 1
            message_ids[number] = f"ticket {self._tickets}"
            self.seconds.append(seconds)
            if asks:
                self.offers.append((self.time, number))
            else:
                self.requests.append((self.time, number, data))
            comes = there.join() if asks else there.client_update(data)
            self._under_way += [(self.time + after, message_ids[number], said) for after, said in comes]
        return message_ids

    def collect(self, message_ids: Sequence[str]) -> Sequence[TransportReply]:
        """Return what has come, last sent first: the order of replies is nobody's promise."""
        self._connect("collect")
        come = [each for each in self._under_way if each[0] <= self.time and each[1] in message_ids]
        self._under_way = [each for each in self._under_way if each not in come]
        return [
            TransportReply(message_id, data, "it fell over" if data is None else "")
            for _, message_id, data in reversed(come)
        ]

    def heard(self, words: str) -> int:
        return sum(words in said for said in self.said)

    def _connect(self, what: str) -> None:
        if what in self.cut:
            raise ConnectionError("no way")


def exchange_messages(
    manager: ClientManager, *names: str, words: bytes = b"do", what: str = "round 1"
) -> dict[str, SiteResponse]:
    return manager.exchange(dict.fromkeys(names or SITES, words), what)
