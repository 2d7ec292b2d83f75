"""Clients that are elsewhere: every method gives the same bits as in a simulation, and nothing but numbers travels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scenes import begin, same
from test_contract import BATCHINGS, ROUNDS, scene, straight

from halfmoon import catalog
from halfmoon.budget import Budget
from halfmoon.data.draw import Views
from halfmoon.data.split import SERVER, Split
from halfmoon.evaluate import Examples
from halfmoon.ground import Ground, Holdings
from halfmoon.net.message import Joined, Malformed, Message, Offer, Refusal, Reply, Request, read, write
from halfmoon.net.remote import Remote
from halfmoon.net.roster import Answer
from halfmoon.net.site import Refused, Site
from halfmoon.packing import pack
from halfmoon.store import Store, StoreShelf

FEDERATED = [name for name in catalog.names() if not catalog.entry(name).pooled]
SEED, VERSION, HASH = 3, "0.1.0", "f" * 64


def alone(held: Holdings, k: int) -> Holdings:
    """Return what a site has: its own rows and nobody else's, without the labels that are hidden."""
    mine = np.flatnonzero(held.split.client == k)
    labeled = held.split.labeled[mine]
    labels = held.train.labels[mine].clone()
    if not held.all_labels:
        labels[torch.from_numpy(~labeled)] = 0
    split = Split(np.full(len(mine), k), labeled, held.split.clients)
    return Holdings(Examples(held.train.images[mine], labels), split, held.all_labels, reuse_labeled=held.reuse_labeled)


def ground(held: Holdings, rule: str, store: Store) -> Ground:
    shelf = StoreShelf(store, "client/", torch.device("cpu"))
    batching = BATCHINGS[rule]
    return Ground(held, Views(), batching, batching, Budget(), SEED, "loop", shelf)


RUN = "0" * 32
REQUEST = Request(HASH, VERSION, RUN, round=0, attempt=0, trip=0, work="train")


class Wire:
    """A link within one process; it keeps what went over it."""

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = sites
        self.seen: list[bytes] = []

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, Answer]:
        self.seen += requests.values()
        # Answered last to first: the order of replies is nobody's promise.
        replies = {name: answer(self.sites[name], requests[name]) for name in reversed(list(requests))}
        self.seen += replies.values()
        return {name: Answer(data) for name, data in replies.items()}


def answer(site: Site, data: bytes) -> bytes:
    """Answer a request as a site does."""
    return write(site.do(read(data, Request)))


def federation(name: str, rule: str) -> tuple[Any, Any, Remote, Wire]:
    """Return a method, its task, and the runtime of a server whose clients are sites."""
    method, shared, simulation = scene(name, rule)
    held = simulation.holdings
    sites = {}
    for k in range(held.clients):
        own = ground(alone(held, k), rule, Store())
        sites[f"site-{k}"] = Site(k, method, shared, own, HASH, VERSION)
    wire, store = Wire(sites), Store()
    server = ground(alone(held, SERVER), rule, store) if simulation.labeled else None
    remote = Remote(
        method, shared, Views(), wire, list(sites), federation=HASH, version=VERSION, run=RUN,
        cohort=simulation.size, seed=SEED, server=server, store=store,
    )  # fmt: skip
    return method, shared, remote, wire


def test_nothing_but_numbers_travels() -> None:
    """No row of pixels of any client, nor its labels, is in the bytes that went over the wire."""
    method, shared, remote, wire = federation("fedloke", "both")
    server = begin(method, shared)
    for number in range(ROUNDS):
        remote.open(number)
        server = method.round(remote.task, server, remote)
    said = b"".join(wire.seen)
    assert len(said) > 100_000
    for site in wire.sites.values():
        images = site.ground.holdings.train.images
        for image in images:
            assert image[0, 0].numpy().tobytes() not in said
            assert (image.double() / 255).numpy().tobytes()[:64] not in said
    replies = [read(data, Reply) for data in wire.seen if b'\\"reply\\"' in data]
    assert {tuple(sorted(reply.up)) for reply in replies} == {("params", "stats", "weight")}


def test_a_site_remembers_and_its_memory_stays() -> None:
    method, shared, remote, wire = federation("fedloke", "both")
    server = begin(method, shared)
    for number in range(ROUNDS):
        remote.open(number)
        server = method.round(remote.task, server, remote)
    last = straight("fedloke", "both")[-1]
    kept = {k: wire.sites[f"site-{k}"].ground.memories.get(str(k)) for k in range(4)}
    assert {str(k): memory for k, memory in kept.items() if memory}.keys() == last.state["client"].keys()
    for k, memory in last.state["client"].items():
        assert same(kept[int(k)] or {}, memory)


@pytest.fixture
def asked() -> tuple[Site, Request]:
    _, _, _, wire = federation("fedavg", "both")
    return wire.sites["site-0"], REQUEST


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "9.0.0"}, "this site has to upgrade to 9.0.0"),
        ({"version": "0.0.9"}, "the server has to upgrade to 0.1.0"),
        ({"federation": "a" * 64}, "plays federation aaaaaaaa, but this site joined ffffffff"),
        ({"work": "steal"}, "asks for 'steal', which the method does not have"),
        ({"round": 99}, "asks for round 100 of 3"),
        ({"round": 3}, "asks for round 4 of 3"),
    ],
)
def test_a_site_refuses_what_it_did_not_join(asked: tuple[Site, Request], changes: dict[str, Any], said: str) -> None:
    site, request = asked
    with pytest.raises(Refused, match=said):
        answer(site, write(replace(request, **changes)))


@pytest.mark.parametrize("cut", [0, 7, 8, 20, -1])
def test_a_cut_message_is_refused(asked: tuple[Site, Request], cut: int) -> None:
    site, request = asked
    tree = {"a": torch.ones(3)}
    data = write(replace(request, down=tree))
    with pytest.raises(Malformed):
        answer(site, data[:cut])


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 8 + b"x" * 100,
        (2).to_bytes(8, "little") + b"{}",
        pack({"a": torch.ones(2)})[0],
        write(REQUEST).replace(b'\\"round\\": 0', b'\\"round\\": []'),
        write(REQUEST).replace(b"request", b"reequst"),
    ],
)
def test_what_is_no_message_is_refused(asked: tuple[Site, Request], data: bytes) -> None:
    with pytest.raises(Malformed):
        answer(asked[0], data)


def test_a_message_keeps_every_bit_and_the_order_in_memory() -> None:
    leaf = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    down = {"b": {"x": leaf}, "a": torch.tensor(3), "none": {}}
    back = read(write(replace(REQUEST, round=7, trip=2, down=down)), Request)
    assert list(back.down) == ["b", "a", "none"]
    assert torch.equal(back.down["b"]["x"], leaf)
    assert back.down["b"]["x"].stride() == leaf.stride()
    assert (back.round, back.trip, back.work) == (7, 2, "train")


MESSAGES: list[Message] = [
    Offer(VERSION, "terms"),
    REQUEST,
    Joined(HASH, VERSION, "site-0", 3, 4),
    Refusal(VERSION, "failed", "its disk is full."),
    Reply(HASH, VERSION, RUN, 1, 2, 3, "train", [1, 2, 3, 0], [4, 5], 6, 7, {"a": {}}, {}),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    assert read(write(message), type(message)) == message


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_another_kind_is_refused(message: Message) -> None:
    other = Offer if type(message) is not Offer else Reply
    with pytest.raises(Malformed, match=f"{other.__name__.lower()} was expected, not a"):
        read(write(message), other)


def test_a_shape_that_no_tensor_has_is_refused() -> None:
    """The order of dimensions in memory comes from outside too."""
    data = write(replace(REQUEST, down={"x": torch.ones(3)})).replace(b'{\\"x\\": null}', b'{\\"x\\": [0, 0]}')
    with pytest.raises(Malformed, match="cannot be read"):
        read(data, Request)


class Bad:
    """A link on which one site misbehaves."""

    def __init__(self, wire: Wire, change: Any) -> None:
        self.wire, self.change = wire, change

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, Answer]:
        answers = dict(self.wire.exchange(requests, what))
        name = next(iter(requests))
        return {**answers, name: self.change(answers[name].data or b"")}


def other(data: bytes, **changes: Any) -> Answer:
    return Answer(write(replace(read(data, Reply), **changes)))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: Answer(None, "it was away"), "has no part in round 1: it was away"),
        (lambda data: Answer(data[:50]), "refused in round 1: the answer of site-.: a message"),
        (lambda data: Answer(data, "it is too large"), "refused in round 1: the answer of site-.: it is too large"),
        (lambda data: other(data, round=5), "it answers round 6, trip 1 .train."),
        (lambda data: other(data, attempt=1), "it answers round 1, trip 1 .train."),
        (
            lambda data: Answer(data.replace(b'\\"kept\\": 0', b'\\"kept\\":-1')),
            "kept is not made of whole numbers from 0",
        ),
        (lambda data: Answer(write(Refusal(VERSION, "failed", "its disk is full"))), "in round 1: its disk is full"),
    ],
)
def test_a_server_does_without_a_site_whose_answer_it_cannot_use(change: Any, said: str) -> None:
    """The round goes on with the others; the reason is said."""
    method, shared, remote, wire = federation("fedavg", "both")
    heard: list[str] = []
    remote.link, remote.say = Bad(wire, change), heard.append
    remote.open(0)
    drawn = remote.cohort.tolist()
    method.round(remote.task, begin(method, shared), remote)
    assert remote.close().cohort == drawn[1:]
    assert any(re.search(said, words) for words in heard), heard
