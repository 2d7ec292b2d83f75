"""Clients that are elsewhere: every method gives the same bits as in a simulation, and nothing but numbers is sent."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_contract import BATCHINGS, ROUNDS, build_simulation, straight
from text_log import TextLog

from halfmoon.api.uploads import Upload
from halfmoon.federation.contract.sites import HASH, RUN, VERSION, Wire, make_remote_runtime
from halfmoon.federation.contract.small_federation import start_server, trees_equal
from halfmoon.federation.protocol.messages import (
    Acceptance,
    MalformedMessage,
    Message,
    Offer,
    Refusal,
    Reply,
    Request,
    read_message,
    write_message,
)
from halfmoon.federation.server.connection import SiteReply
from halfmoon.federation.server.runtime import RemoteRuntime
from halfmoon.methods import registry
from halfmoon.storage.serialization import pack

FEDERATED = [name for name in registry.names() if not registry.entry(name).pooled]
REQUEST = Request(HASH, VERSION, RUN, round=0, attempt=0, query=0, client_update="train")


def federation(name: str, rule: str) -> tuple[Any, Any, RemoteRuntime, Wire]:
    """Return a method, its task, and the runtime of a server whose clients are sites."""
    method, shared, simulation = build_simulation(name, rule)
    remote, wire = make_remote_runtime(simulation, BATCHINGS[rule])
    return method, shared, remote, wire


def test_only_numbers_are_sent() -> None:
    method, shared, remote, wire = federation("fedloke", "both")
    server = start_server(method, shared)
    for number in range(ROUNDS):
        remote.open(number)
        server = method.round(remote.task, server, remote)
    text = b"".join(wire.messages)
    assert len(text) > 100_000
    for site in wire.sites.values():
        images = site.local_clients.dataset.train.images
        for image in images:
            assert image[0, 0].numpy().tobytes() not in text
            assert (image.double() / 255).numpy().tobytes()[:64] not in text
    replies = [read_message(data, Reply) for data in wire.messages if b'\\"reply\\"' in data]
    assert {tuple(sorted(Upload.from_tree(reply.upload).parts)) for reply in replies} == {("params", "stats", "weight")}


def test_site_stores_a_memory_that_is_never_sent() -> None:
    method, shared, remote, wire = federation("fedloke", "both")
    server = start_server(method, shared)
    for number in range(ROUNDS):
        remote.open(number)
        server = method.round(remote.task, server, remote)
    last = straight("fedloke", "both")[-1]
    stored = {k: wire.sites[f"site-{k}"].local_clients.memories.get(str(k)) for k in range(4)}
    assert {str(k): memory for k, memory in stored.items() if memory}.keys() == last.state["client"].keys()
    for k, memory in last.state["client"].items():
        assert trees_equal(stored[int(k)] or {}, memory)


WHOLE = write_message(replace(REQUEST, download={"a": torch.ones(3)}))


@pytest.mark.parametrize(
    "data",
    [
        *(WHOLE[:cut] for cut in (0, 7, 8, 20, -1)),
        b"\xff" * 8 + b"x" * 100,
        (2).to_bytes(8, "little") + b"{}",
        pack({"a": torch.ones(2)})[0],
        write_message(REQUEST).replace(b'\\"round\\": 0', b'\\"round\\": []'),
        write_message(REQUEST).replace(b"request", b"reequst"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        read_message(data, Request)


def test_message_preserves_every_bit_and_the_memory_layout() -> None:
    leaf = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    broadcast = {"b": {"x": leaf}, "a": torch.tensor(3), "none": {}}
    back = read_message(write_message(replace(REQUEST, round=7, query=2, download=broadcast)), Request)
    assert list(back.download) == ["b", "a", "none"]
    assert torch.equal(back.download["b"]["x"], leaf)
    assert back.download["b"]["x"].stride() == leaf.stride()
    assert (back.round, back.query, back.client_update) == (7, 2, "train")


MESSAGES: list[Message] = [
    Offer(VERSION, "terms"),
    REQUEST,
    Acceptance(HASH, VERSION, "site-0", 3, 4),
    Refusal(VERSION, "failed", "its disk is full."),
    Reply(HASH, VERSION, RUN, 1, 2, 3, "train", [1, 2, 3, 0], [4, 5], 6, 7, {"a": {}}, {}),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_round_trips(message: Message) -> None:
    assert read_message(write_message(message), type(message)) == message


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_another_kind_is_refused(message: Message) -> None:
    other = Offer if type(message) is not Offer else Reply
    with pytest.raises(MalformedMessage, match=f"{other.__name__.lower()} was expected, not an?"):
        read_message(write_message(message), other)


class Bad:
    """A link on which one site misbehaves."""

    def __init__(self, wire: Wire, change: Any) -> None:
        self.wire = wire
        self.change = change

    def exchange(self, requests: Mapping[str, bytes], what: str) -> Mapping[str, SiteReply]:
        responses = dict(self.wire.exchange(requests, what))
        name = next(iter(requests))
        return {**responses, name: self.change(responses[name].data or b"")}


def other(data: bytes, **changes: Any) -> SiteReply:
    return SiteReply(write_message(replace(read_message(data, Reply), **changes)))


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (lambda data: SiteReply(None, "it was away"), "has no part in round 1: it was away"),
        (lambda data: SiteReply(data[:50]), "refused in round 1: the answer of site-.: a message"),
        (
            lambda data: SiteReply(data, "it is too large"),
            "refused in round 1: the answer of site-.: it is too large",
        ),
        (lambda data: other(data, round=5), "it answers round 6, query 1 .train."),
        (lambda data: other(data, attempt=1), "it answers round 1, query 1 .train."),
        (
            lambda data: SiteReply(data.replace(b'\\"kept\\": 0', b'\\"kept\\":-1')),
            "kept is not made of non-negative integers",
        ),
        (
            lambda data: SiteReply(write_message(Refusal(VERSION, "failed", "its disk is full"))),
            "in round 1: its disk is full",
        ),
    ],
)
def test_server_continues_without_a_site_with_an_unusable_reply(change: Any, pattern: str) -> None:
    method, shared, remote, wire = federation("fedavg", "both")
    messages: list[str] = []
    remote.calls.link = Bad(wire, change)
    remote.calls.log = TextLog(messages)
    remote.open(0)
    drawn = remote.cohort.tolist()
    method.round(remote.task, start_server(method, shared), remote)
    assert remote.close().cohort == drawn[1:]
    assert any(re.search(pattern, text) for text in messages), messages
