"""What of Flower is used without a promise is there, in the version that is installed, and what is made of it."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import pytest

pytest.importorskip("flwr")

from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import RegisterNodeFleetResponse
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.exit import ExitCode
from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, inflate_object_from_contents
from flwr.superlink.grid import http_grid
from packaging.requirements import Requirement

from halfmoon.federation.transport import internals
from halfmoon.federation.transport.grid import GridTransport
from halfmoon.federation.transport.internals import NAMES, VERSIONS, act_as_node, set_message_id
from halfmoon.federation.transport.records import MAX_INLINE_BYTES, unwrap_message, wrap_message

VERSION = metadata.version("flwr")


PUBLIC_MODULES = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}


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
    missing = [each for each in NAMES[name].attributes if each not in known(thing)]
    assert missing == [], text.format(f"{name} with {', '.join(missing)}")


def test_private_names_are_few_and_have_a_reason():
    assert len(NAMES) <= 15
    assert all(len(name.reason) > 10 for name in NAMES.values())


def find_private_imports(path: Path) -> set[str]:
    """Return what a module imports from Flower's private modules: MODULE:NAME, or MODULE: where it is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {f"{alias.name}:" for alias in node.names if alias.name.split(".")[0] == "flwr"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr":
            found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return {name for name in found if name.split(":")[0] not in PUBLIC_MODULES}


def test_only_listed_private_names_are_imported_and_only_in_one_module():
    source = Path(internals.__file__).parents[2]
    assert source.name == "halfmoon"
    used: set[str] = set()
    for path in source.rglob("*.py"):
        private = find_private_imports(path)
        assert not private or path == Path(internals.__file__), f"{path} imports {private}"
        used |= private
    modules = {name.partition(":")[0] for name in NAMES}
    for name in used:
        # A module is imported where one of its names is replaced.
        assert name in NAMES or name.replace(":", ".") in modules, f"{name} is not in NAMES"


def test_the_exit_code_of_another_version_is_known():
    assert f"Exit Code: {ExitCode.RUNTIME_VERSION_INCOMPATIBLE}" in internals.REASONS


def test_a_version_that_was_not_tried_is_seen():
    """The version that the other tests of this file hold for is among those that are written down."""
    assert VERSION in VERSIONS


def test_the_oldest_and_the_newest_supported_version_are_tested_at_night():
    root = Path(__file__).resolve().parents[2]
    tested = ast.literal_eval(re.search(r"FLOWER_VERSIONS = (\[.*\])", (root / "noxfile.py").read_text())[1])
    assert tuple(tested) == VERSIONS
    extra = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]["flower"]
    supported = Requirement(extra[0]).specifier
    assert all(version in supported for version in VERSIONS)
    major, minor, _ = map(int, VERSIONS[0].split("."))
    assert f"{major}.{minor - 1}.9" not in supported
    major, minor, _ = map(int, VERSIONS[-1].split("."))
    assert f"{major}.{minor + 1}.0" not in supported
    assert "nox --session flower" in (root / ".github/workflows/ci.yml").read_text()


def test_the_node_of_a_site_does_not_import_torch():
    """It would triple its memory, and a site has one node and one worker."""
    code = "import sys, halfmoon.federation.transport.node; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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


def test_worker_has_all_imports_before_its_first_gradient():
    """What is imported late is imported for every message to a site; torch.func's own gradient needs 800 modules."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Late:
    """A SuperLink with one message, whose objects come with the second question for each."""

    def __init__(self) -> None:
        with internals.act_as_node():
            message = Message(wrap_message(b"model"), 7, "train")
        set_message_id(message, message.object_id)
        self.tree = get_object_tree(message)
        self.objects = {name: each.deflate() for name, each in internals._find_objects(message).items()}
        self.header = remove_content_from_message(message)
        self.requests: list[str] = []
        self.confirmed: list[str] = []

    def content(self, name: str) -> bytes:
        self.requests.append(name)
        if self.requests.count(name) < 2:
            raise ObjectUnavailableError(name)
        return self.objects[name]

    def found(self, request: Any) -> PullObjectResponse:
        try:
            return PullObjectResponse(
                object_found=True, object_available=True, object_content=self.content(request.object_id)
            )
        except ObjectUnavailableError:
            return PullObjectResponse(object_found=True)

    def replies(self, request: Any) -> PullAppMessagesResponse:
        message = message_to_proto(self.header)
        message.metadata.reply_to_message_id = "asked"
        return PullAppMessagesResponse(messages_list=[message], message_object_trees=[self.tree])

    def fleet(self) -> internals.Fleet:
        """Return the connection of a site to this SuperLink."""
        confirm = lambda run, name: self.confirmed.append(name)  # noqa: E731
        pull_object = lambda run, name: self.content(name)  # noqa: E731
        return internals.Fleet(
            [None, lambda: (self.header, self.tree), None, None, None, pull_object, None, confirm]
        )  # fmt: skip


@pytest.fixture(autouse=True)
def restore_identity() -> Iterator[None]:
    """Forget which node this process was, as a site's process is of one node only."""
    with internals.act_as_node():
        yield


def test_a_site_fetches_a_request_whose_objects_are_under_way_without_flowers_wait_of_a_second():
    link = Late()
    start = time.monotonic()
    message = link.fleet().receive()
    assert time.monotonic() - start < 0.6
    assert unwrap_message(message.content) == b"model"
    assert link.confirmed == [link.tree.object_id]
    reply = Message(wrap_message(b"update"), reply_to=message)
    assert reply.metadata.reply_to_message_id == link.tree.object_id
    assert reply.metadata.src_node_id == 7


@pytest.mark.parametrize("data", [b"update", bytes(MAX_INLINE_BYTES) + b"update"])
def test_a_reply_is_sent_as_the_objects_that_the_superlink_lacks(data: bytes):
    """The server can put it together from them: of a small reply from one record, of a large one from arrays."""
    message = Late().fleet().receive()
    sent: dict[str, bytes] = {}
    lists: list[Any] = []

    def push(reply: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        lists.append(tree)
        assert (reply.metadata.message_id, seconds) == (tree.object_id, 1.5)
        return {each.object_id for each in iterate_object_tree(tree)}, "session"

    def push_object(run_id: int, session: str, name: str, content: bytes) -> None:
        assert session == "session"
        sent[name] = content

    fleet = internals.Fleet([None, None, push, None, None, None, push_object, None])
    assert fleet.send(Message(wrap_message(data), reply_to=message), 1.5)
    received = inflate_object_from_contents(lists[0].object_id, sent)
    assert isinstance(received, Message)
    assert unwrap_message(received.content) == data


def test_a_reply_to_a_run_that_is_over_does_not_end_the_site(capsys: pytest.CaptureFixture[str]):
    def push(*_: Any) -> NoReturn:
        raise internals.RunOver("the run is over")

    message = Late().fleet().receive()
    fleet = internals.Fleet([None, None, push, *[None] * 5])
    assert not fleet.send(Message(wrap_message(b"update"), reply_to=message), 0.0)
    assert "cannot send an answer: RunOver" in capsys.readouterr().err


def test_server_fetches_a_reply_still_in_transfer_without_flowers_wait(
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


def test_reply_over_a_slow_link_is_sent_once(monkeypatch: pytest.MonkeyPatch):
    """Flower's client sends a request that takes longer than 30 s again, and again: here it is half a second."""
    monkeypatch.setattr(internals, "REPLY_SECONDS", 0.5)
    monkeypatch.setattr(internals, "MIN_BYTES_PER_SECOND", 2**18)
    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with internals.connect_fleet(f"127.0.0.1:{server.server_port}", None, None) as fleet:
            fleet._push_object(1, "session", "a" * 64, bytes(2**20))
        server.shutdown()
    assert Slow.calls.count("/v1/fleet/push-object") == 1


class Over(Slow):
    """A SuperLink whose only run is over: it refuses all requests except those for a connection."""

    def do_POST(self) -> None:
        if self.path.endswith(("-node", "-heartbeat")):
            super().do_POST()
            return
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(403)
        self.send_header("content-length", "0")
        self.end_headers()


def test_a_run_that_ends_between_a_request_and_its_reply_does_not_end_the_site(capsys: pytest.CaptureFixture[str]):
    """Flower raises a BaseException for it, which ended the node: it started again only after a pause."""
    message = Late().fleet().receive()
    with ThreadingHTTPServer(("127.0.0.1", 0), Over) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with internals.connect_fleet(f"127.0.0.1:{server.server_port}", None, None) as fleet:
            assert fleet.receive() is None
            assert fleet.bundle(1) is None
            assert not fleet.send(Message(wrap_message(b"update"), reply_to=message), 1.0)
        server.shutdown()
    assert "cannot send an answer: RunOver" in capsys.readouterr().err
