"""What of Flower is used without a promise is there, in the version that is installed, and what is made of it."""

import importlib
import inspect
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import RegisterNodeFleetResponse
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.superlink.grid import http_grid
from flwr.supernode import fleet_http_connection

from halfmoon.federation.transport import internals
from halfmoon.federation.transport.grid import GridTransport, unwrap_message, wrap_message
from halfmoon.federation.transport.internals import NAMES, VERSIONS, act_as_node, set_message_id

VERSION = metadata.version("flwr")


def known(thing: Any) -> set[str]:
    fields = {field.name for field in thing.DESCRIPTOR.fields} if hasattr(thing, "DESCRIPTOR") else set()
    try:
        return {*dir(thing), *fields, *inspect.signature(thing).parameters}
    except (TypeError, ValueError):
        return {*dir(thing), *fields}


@pytest.mark.parametrize("name", NAMES)
def test_what_flower_does_not_promise_is_there(name: str):
    """A version that fails here is not admitted in pyproject.toml before internals.py knows its other name."""
    module, _, attribute = name.partition(":")
    text = f"Flower {VERSION} has no {{}}; it was there in {' and '.join(VERSIONS)}: change internals.py"
    thing = getattr(importlib.import_module(module), attribute, None)
    assert thing is not None, text.format(name)
    missing = [each for each in NAMES[name] if each not in known(thing)]
    assert missing == [], text.format(f"{name} with {', '.join(missing)}")


def test_a_version_that_was_not_tried_is_seen():
    """The version that the other tests of this file hold for is among those that are written down."""
    assert VERSION in VERSIONS


def test_a_message_made_here_has_an_author_and_a_number():
    with act_as_node():
        message = Message(RecordDict(), 7, "query")
        set_message_id(message, "message-3")
    assert (message.metadata.message_id, message.metadata.src_node_id) == ("message-3", 1)


LATE = """
import sys

import halfmoon.federation.transport.client_app

import torch
from halfmoon.core.autodiff import grad_and_value

before = set(sys.modules)
grad_and_value(lambda params: (params["w"].square().sum(), ()), {"w": torch.ones(2)})
late = sorted(set(sys.modules) - before)
assert not late, f"{len(late)} modules, such as {late[:3]}"
"""


def test_a_worker_imports_nothing_for_its_first_gradient():
    """What is imported late is imported for every message to a site; torch.func's own gradient needs 800 modules."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Late:
    """A SuperLink with one message, whose objects come with the second question for each."""

    def __init__(self) -> None:
        with internals.act_as_node():
            message = Message(wrap_message(b"model"), 7, "train")
            self.packet = internals.pack_message(message)
        self.asked: list[str] = []

    def content(self, name: str) -> bytes:
        self.asked.append(name)
        if self.asked.count(name) < 2:
            raise ObjectUnavailableError(name)
        return self.packet.objects[name]

    def found(self, request: Any) -> PullObjectResponse:
        try:
            return PullObjectResponse(
                object_found=True, object_available=True, object_content=self.content(request.object_id)
            )
        except ObjectUnavailableError:
            return PullObjectResponse(object_found=True)

    def replies(self, request: Any) -> PullAppMessagesResponse:
        message = message_to_proto(self.packet.message)
        message.metadata.reply_to_message_id = "asked"
        return PullAppMessagesResponse(messages_list=[message], message_object_trees=[self.packet.tree])


def test_a_site_fetches_a_request_whose_objects_are_under_way_without_flowers_wait_of_a_second():
    link = Late()
    fleet = internals.Fleet(
        [None, lambda: (link.packet.message, link.packet.tree), *[None] * 3, lambda _, name: link.content(name), None,
         lambda *_: None]
    )  # fmt: skip
    start = time.monotonic()
    packet = fleet.receive()
    assert packet is not None
    assert time.monotonic() - start < 0.6
    assert unwrap_message(internals.unpack_message(packet).content) == b"model"


def test_a_server_fetches_an_answer_whose_objects_are_under_way_without_flowers_wait_of_a_second(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(http_grid, "pull_objects", vars(http_grid)["pull_objects"])  # as it was, once the test is over
    link = Late()
    grid = http_grid.HttpGrid(token="t")
    calls = {"PullMessages": link.replies, "PullObject": link.found, "ConfirmMessageReceived": lambda _: None}
    grid._client = SimpleNamespace(**calls)
    grid._run = SimpleNamespace(run_id=1)
    start = time.monotonic()
    replies = list(GridTransport(grid).collect(["asked"]))
    assert [reply.data for reply in replies] == [b"model"]
    assert time.monotonic() - start < 0.6


class Slow(BaseHTTPRequestHandler):
    """A SuperLink over a link so slow that an object of 1 MiB takes a second, and that has nothing to say."""

    calls: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        size = int(self.headers["content-length"])
        self.rfile.read(size)
        self.calls.append(self.path)
        time.sleep(size / 2**20)
        responses = {"/v1/fleet/push-object": PushObjectResponse(stored=True)}
        self.send_response(200)
        body = responses.get(self.path, RegisterNodeFleetResponse(node_id=7)).SerializeToString()
        self.send_header("content-length", str(len(body)))
        self.send_header("content-type", "application/protobuf")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_an_answer_over_a_slow_link_is_sent_once(monkeypatch: pytest.MonkeyPatch):
    """Flower's client sends a request that takes longer than 30 s again, and again: here it is half a second."""
    monkeypatch.setattr(internals, "REPLY_SECONDS", 0.5)
    monkeypatch.setattr(internals, "MIN_BYTES_PER_SECOND", 2**18)
    monkeypatch.setattr(fleet_http_connection, "FleetHttpClient", vars(fleet_http_connection)["FleetHttpClient"])
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with internals.connect_fleet(f"127.0.0.1:{server.server_port}", None, None) as fleet:
            fleet._push_object(1, "session", "a" * 64, bytes(2**20))
        server.shutdown()
    assert Slow.calls.count("/v1/fleet/push-object") == 1
