"""All uses of Flower that Flower does not promise to support, in one module; `NAMES` lists them.

Flower promises `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and its commands. halfmoon needs more: a site's own loop
instead of Flower's, which would execute what a server sends; the size of an answer before it is fetched; the keys of
sites; and both apps in one process. The test of this module alone tries a new version of Flower, which pyproject.toml
then admits.
"""

import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.bundle import ForeignBundle

T = TypeVar("T")

VERSIONS = ("1.41.0", "1.42.0")  # the versions of Flower in which all of `NAMES` exists

NAMES: Mapping[str, tuple[str, ...]] = {
    "flwr.supernode.fleet_http_connection:http_request_response": (),
    "flwr.supernode.fleet_http_client:FleetHttpClient": ("_unary_unary",),
    "flwr.supernode.fleet_http_connection:FleetHttpClient": (),
    "flwr.app.message:remove_content_from_message": (),
    "flwr.common.serde:message_to_proto": (),
    "flwr.common.serde:message_from_proto": (),
    "flwr.proto.message_pb2:Message": ("FromString",),
    "flwr.proto.message_pb2:ObjectTree": ("FromString", "object_id"),
    "flwr.supercore.inflatable.inflatable_object:get_all_nested_objects": (),
    "flwr.supercore.inflatable.inflatable_object:get_object_tree": (),
    "flwr.supercore.inflatable.inflatable_object:iterate_object_tree": (),
    "flwr.supercore.inflatable.inflatable_utils:inflate_object_from_contents": (),
    "flwr.supercore.inflatable.inflatable_utils:pull_objects": ("initial_backoff", "backoff_cap"),
    "flwr.superlink.grid.http_grid:pull_objects": ("object_ids", "pull_object_fn"),
    "flwr.supercore.inflatable.inflatable_utils:push_object_contents_from_iterable": (),
    "flwr.supercore.fab:Fab": ("content",),
    "flwr.supercore.run:RunNotRunningException": (),
    "flwr.supercore.run:Run": ("primary_task_type", "fab_hash"),
    "flwr.superlink.grid.http_grid:HttpGrid": ("_runtime_client",),
    "flwr.proto.runtime_pb2:PullAppMessagesRequest": ("message_ids",),
    "flwr.proto.runtime_pb2:PullAppMessagesResponse": ("messages_list", "message_object_trees"),
    "flwr.supercore.control:ControlHttpClient": ("ListNodes", "RegisterNode", "UnregisterNode"),
    "flwr.proto.control_pb2:ListNodesRequest": (),
    "flwr.proto.control_pb2:ListNodesResponse": ("nodes_info",),
    "flwr.proto.control_pb2:RegisterNodeRequest": ("public_key", "name"),
    "flwr.proto.control_pb2:UnregisterNodeRequest": ("node_id",),
    "flwr.supercore.task_identity:TaskIdentity": ("_task_id", "_run_id", "_node_id"),
    "flwr.app.metadata:Metadata": ("message_id",),
    "flwr.supercore.exit:ExitCode": ("RUNTIME_VERSION_INCOMPATIBLE",),
}
"""MODULE:NAME of each use, with the parameters or attributes that are used."""

UNKNOWN_KEY = "2004]"

REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not to be trusted",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS",
    "2001]": "the server wants sites with a key: give --key FILE",
    UNKNOWN_KEY: "the server does not let this site's key in: it does not know it, or not any more, or another process "
    "uses it (one that was killed counts for a minute)",
    "401 Unauthorized": "the server does not accept this site's key, or the clocks of the two machines differ",
    "Exit Code: 606": "the server has another version of Flower",
    "500 Internal Server Error": "the server's Flower failed over a call, as where its disk is busy or full",
    "Heartbeat failed": "the server does not know this site any more",
    "told to end": "the server does not accept this site's key any more, or its process was told to end",
}
"""Words in the log of a node that ended, and their meaning: Flower names the reason there alone."""

SERVER_LOST, SERVER_REACHED = "Connection attempt failed", "Connection successful"
"""Words of a node that loses its server, and reaches it again."""

MESSAGE_RECEIVED, REPLY_SENT = "receiving a message", "sent an answer"
"""Words of a node about a message and its answer; it has one at a time."""

PIECE = 5 * 2**20
"""Bytes into which Flower cuts an array at least; behind `halfmoon.sites.keys` nginx lets none through of over 6
MiB."""

ANSWER, SLOWEST = 30.0, 2**14
"""Seconds that a SuperLink has for an answer, as Flower gives it; and bytes a second of a link over which a request is
still sent, for which Flower gives no time: 5 MiB at 1 Mbit/s would be sent again and again."""

PARTS = 16  # objects that a message of ours is made of, beside its pieces, and some to spare


def print_line(words: str) -> None:
    sys.stderr.write(f"{words}\n")


class Oversized(ValueError):
    """A message of more pieces than any may have; nothing of it was fetched."""


class MessageList:
    """Asks a SuperLink once for all replies, in place of a Grid's client, and refuses those of too many pieces unread.

    Flower has no hook for that, nor for when it tries again: a Grid without such a client is asked for each ticket.
    """

    def __init__(self, grid: Any, most: int | None) -> None:
        self.client = runtime_client(grid)
        self._most = None if most is None else PARTS + most // PIECE
        self._replies: dict[str, tuple[Any, Any]] = {}
        if self.client is not None:
            from flwr.superlink.grid import http_grid

            http_grid.pull_objects = pull_objects_soon  # pyright: ignore[reportPrivateImportUsage]
            self._ask = self.client.PullMessages
            self.client.PullMessages = self._hand

    def with_reply(self, message_ids: Sequence[str]) -> Sequence[str]:
        """Return the tickets whose reply has come; all of them where nobody can say."""
        if self.client is None or not message_ids:
            return message_ids
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        answer = self._ask(PullAppMessagesRequest(message_ids=message_ids))
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        replies = {message.metadata.reply_to_message_id: (message, tree) for message, tree in pairs}
        self._replies |= {message_id: replies[message_id] for message_id in message_ids if message_id in replies}
        return [message_id for message_id in message_ids if message_id in self._replies]

    def _hand(self, request: Any) -> Any:
        """Answer in place of the SuperLink."""
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        replies = [self._replies.pop(message_id) for message_id in request.message_ids if message_id in self._replies]
        for _, tree in replies:
            if self._most is not None and next(islice(iterate_object_tree(tree), self._most, None), None) is not None:
                raise Oversized
        return PullAppMessagesResponse(
            messages_list=[message for message, _ in replies], message_object_trees=[tree for _, tree in replies]
        )


def pull_objects_soon(object_ids: Sequence[str], pull_object_fn: Callable[[str], bytes]) -> dict[str, bytes]:
    """Return these objects, asking for those under way again after 0.02 s to 1 s: Flower waits 1 s to 10 s."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    names = list(dict.fromkeys(object_ids))
    return pull_objects(names, pull_object_fn, max_tries_per_object=None, initial_backoff=0.02, backoff_cap=1.0)


def runtime_client(grid: Any) -> Any:
    return getattr(grid, "_runtime_client", None)


@dataclass
class Packet:
    """A message on its way: itself without content, the tree of its objects, and these as bytes by hash."""

    message: Any
    tree: Any
    objects: dict[str, bytes]


def pack_message(message: Any) -> Packet:
    """Return a message of this process as a packet."""
    from flwr.app.message import remove_content_from_message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    set_message_id(message, message.object_id)
    objects = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    return Packet(remove_content_from_message(message), get_object_tree(message), objects)


def to_frames(packet: Packet) -> list[bytes]:
    """Return a packet as byte strings, for a pipe."""
    from flwr.common.serde import message_to_proto

    heads = [message_to_proto(packet.message).SerializeToString(), packet.tree.SerializeToString()]
    return [*heads, *(part for name, data in packet.objects.items() for part in (name.encode(), data))]


def from_frames(frames: Sequence[bytes]) -> Packet:
    """Undo `to_frames`."""
    from flwr.common.serde import message_from_proto
    from flwr.proto import message_pb2

    message = message_from_proto(message_pb2.Message.FromString(frames[0]))
    objects = {name.decode(): data for name, data in zip(frames[2::2], frames[3::2], strict=True)}
    return Packet(message, message_pb2.ObjectTree.FromString(frames[1]), objects)


def unpack_message(packet: Packet) -> Any:
    """Return the whole message; this process may answer it from now on."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    _act_for(packet.message)
    message = inflate_object_from_contents(packet.tree.object_id, packet.objects)
    set_message_id(message, packet.tree.object_id)
    return message


class Fleet:
    """A site's connection to its SuperLink, made of the functions of Flower's own."""

    def __init__(self, functions: Sequence[Any]) -> None:
        _, self._pull, self._push, self._run, self._fab, self._pull_object, self._push_object, self._confirm = functions

    def receive(self) -> Packet | None:
        """Return the next message; None where there is none, or it cannot be fetched as a whole."""
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.run import RunNotRunningException

        try:
            if (pair := self._pull()) is None:
                return None
        except RunNotRunningException:
            return None
        message, tree = pair
        run, name = message.metadata.run_id, message.metadata.message_id
        try:
            names = [part.object_id for part in iterate_object_tree(tree)]
            objects = pull_objects_soon(names, partial(self._pull_object, run))
            self._confirm(run, name)
        except Exception as error:  # its run is over, or the server has lost a part of it
            print_line(f"cannot receive the message {name}: {type(error).__name__}: {error}")
            return None
        return Packet(message, tree, objects)

    def send(self, packet: Packet, seconds: float) -> bool:
        """Send an answer that took so many seconds; return whether the server has it."""
        from flwr.supercore.inflatable.inflatable_utils import push_object_contents_from_iterable

        try:
            missing, session = self._push(packet.message, packet.tree, seconds)
            push = partial(self._push_object, packet.message.metadata.run_id, session)
            push_object_contents_from_iterable(((name, packet.objects[name]) for name in missing), push)
        except Exception as error:  # its run is over, or the server fails: it asks again where it needs to
            print_line(f"cannot send an answer: {type(error).__name__}: {error}")
            return False
        return True

    def bundle(self, run: int) -> bytes | None:
        """Return the app bundle of a run, None where that is over; raise `Foreign` for an agent of Flower's."""
        from flwr.supercore.run import RunNotRunningException

        try:
            facts = self._run(run)
            if "agent" in str(facts.primary_task_type).lower():
                raise ForeignBundle("an agent of Flower")
            return self._fab(facts.fab_hash, run).content
        except RunNotRunningException:
            return None


def load_private_key(path: Path) -> Any:
    """Return the key of a node; raise UserError where Flower would not take it."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a passphrase
        key = None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise UserError(
            f"--key {path} is no private key that Flower takes: it must be of an elliptic curve, in OpenSSH's format, "
            "without a passphrase (ssh-keygen -t ecdsa -b 384 -N '' -f FILE makes one)."
        )
    return key


@contextmanager
def connect_fleet(server: str, ca: Path | None, key: Path | None) -> Iterator[Fleet]:
    """Connect to a SuperLink; the process ends where that does not work, and what goes wrong later is printed."""
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.fleet_http_client import FleetHttpClient

    class SlowLinkClient(FleetHttpClient):
        def _unary_unary(self, **words: Any) -> Any:
            return super()._unary_unary(**{"timeout": ANSWER + words["request"].ByteSize() / SLOWEST, **words})

    fleet_http_connection.FleetHttpClient = SlowLinkClient  # pyright: ignore[reportPrivateImportUsage]
    private = None if key is None else load_private_key(key)
    pair = None if private is None else (private, private.public_key())
    connecting = fleet_http_connection.http_request_response
    with connecting(server, ca is None, None if ca is None else str(ca), pair) as functions:
        yield Fleet(functions)


def error_reply(message: Any, code: int, words: str) -> Packet:
    """Return the answer to a message that was not answered, with a code of Flower's `ErrorCode`."""
    from flwr.app import Error, Message

    _act_for(message)
    return pack_message(Message(Error(code=code, reason=words), reply_to=message))


def _act_for(message: Any) -> None:
    """Make this process the node that a message was sent to: Flower asks who writes an answer."""
    from flwr.supercore.task_identity import TaskIdentity

    facts = message.metadata
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, facts.run_id, facts.dst_node_id


def app_context(message: Any, config: Mapping[str, Any]) -> Any:
    """Return the context in which a site's app answers a message."""
    from flwr.app import Context, RecordDict

    facts = message.metadata
    return Context(facts.run_id, facts.dst_node_id, dict(config), RecordDict(), {})


@contextmanager
def act_as_node() -> Iterator[None]:
    """Let messages be made outside Flower's processes."""
    from flwr.supercore.task_identity import TaskIdentity

    before = TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    try:
        yield
    finally:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = before


def set_message_id(message: Any, name: str) -> None:
    """Give a message the number that Flower's server would give it."""
    message.metadata.__dict__["_message_id"] = name


class Node(NamedTuple):
    """A node that the SuperLink knows: its number, its public key (PEM), and when its process connected."""

    number: int
    key: bytes
    since: str


class ControlApi:
    """The nodes that a SuperLink knows; every method may raise ConnectionError, and ValueError for a refusal."""

    def __init__(self, address: str, verify: ssl.SSLContext, seconds: float) -> None:
        from flwr.proto import control_pb2
        from flwr.supercore.control import ControlHttpClient

        self._client, self._words = ControlHttpClient(address, verify=verify, timeout=seconds), control_pb2

    def nodes(self) -> Sequence[Node]:
        nodes = _call(lambda: self._client.ListNodes(self._words.ListNodesRequest()).nodes_info)
        return [
            Node(node.node_id, node.public_key, node.last_activated_at)
            for node in nodes
            if node.status != "unregistered"
        ]

    def register(self, key: bytes, name: str) -> int:
        """Register a public key (PEM), and return its node's number."""
        request = self._words.RegisterNodeRequest(public_key=key, name=name)
        number = _call(lambda: self._client.RegisterNode(request).node_id)
        if not number:
            raise ValueError("the SuperLink gave it no number")
        return number

    def unregister(self, number: int) -> None:
        _call(lambda: self._client.UnregisterNode(self._words.UnregisterNodeRequest(node_id=number)))


def _call(call: Callable[[], T]) -> T:
    import httpx

    try:
        return call()
    except httpx.HTTPStatusError as error:
        raise ValueError(f"HTTP {error.response.status_code}: {error.response.text[:200]}") from error
    except httpx.HTTPError as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
