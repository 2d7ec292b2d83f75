"""All uses of private names of Flower, in one module; `NAMES` lists them.

Flower supports `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and its commands. halfmoon needs more: a loop at the site
that, unlike Flower's, never executes a bundle of the server; the size of a reply before it is fetched; the keys of
sites; and both apps in one process. The test of this module is enough to admit a new version of Flower in
pyproject.toml.
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

VERSIONS = ("1.41.0", "1.42.0")
"""Versions of Flower in which all of `NAMES` exist."""

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
"""Text in the log of a node whose key the server does not know."""

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
"""Reason for the end of a node, by a text in its log: Flower reports the reason only there."""

SERVER_LOST = "Connection attempt failed"
SERVER_REACHED = "Connection successful"
"""Texts in the log of a node that loses its server, and reaches it again."""

MESSAGE_RECEIVED = "receiving a message"
REPLY_SENT = "sent an answer"
"""Lines in the log of a node about a message and its reply; it has one message at a time."""

MIN_PIECE_BYTES = 5 * 2**20
"""Size of the pieces into which Flower cuts an array, or more; nginx (`halfmoon.sites.keys`) passes up to 6 MiB."""

REPLY_SECONDS = 30.0
"""Flower's time limit for a reply of a SuperLink."""

MIN_BYTES_PER_SECOND = 2**14
"""Speed of the slowest supported link, by which the time limit of a large request is extended.

Flower does not extend it: at 1 Mbit/s a piece of 5 MiB would time out and be re-sent forever.
"""

MAX_SMALL_OBJECTS = 16
"""Objects of a message in addition to its pieces, with some to spare."""

MIN_BACKOFF_SECONDS = 0.02
MAX_BACKOFF_SECONDS = 1.0
"""Bounds of the pause before an object that has not arrived yet is requested a second time."""

MAX_REASON_LENGTH = 200
"""Characters of an HTTP response that an error quotes."""


def print_line(text: str) -> None:
    """Print a line to the log of a process."""
    sys.stderr.write(f"{text}\n")


class Oversized(ValueError):
    """A message with too many pieces; none of them was fetched."""


class MessageList:
    """List all available replies by one request to the SuperLink, and refuse those with too many pieces unread.

    It replaces functions of the Grid's client, because Flower has no hook for either. A Grid without such a client is
    queried for each message.
    """

    def __init__(self, grid: Any, max_reply_bytes: int | None) -> None:
        """Replace functions of a Grid's client, so that replies are listed and limited before they are fetched.

        Flower has no hook for this. It calls `pull_objects` by its name in its module, so it is replaced there, for all
        Grids of this process.

        Args:
            grid: Flower's Grid. The Grid of a simulation has no such client; then nothing is replaced.
            max_reply_bytes: size that no reply may exceed; None for no limit.
        """
        self.client = runtime_client(grid)
        # Flower does not announce the size of a reply, but the number of its objects: a few small ones, and pieces of
        # at least `MIN_PIECE_BYTES`, except for the last one.
        self._max_objects: int | None = None
        if max_reply_bytes is not None:
            self._max_objects = MAX_SMALL_OBJECTS + max_reply_bytes // MIN_PIECE_BYTES
        self._replies: dict[str, tuple[Any, Any]] = {}  # listed: reply and tree of its objects, by the message's id
        if self.client is not None:
            from flwr.superlink.grid import http_grid

            http_grid.pull_objects = pull_objects_with_short_retries  # pyright: ignore[reportPrivateImportUsage]
            self._pull_messages = self.client.PullMessages
            self.client.PullMessages = self._pull_listed_messages

    def with_reply(self, message_ids: Sequence[str]) -> Sequence[str]:
        """Query the SuperLink once for the replies to many messages, without their contents.

        Args:
            message_ids: ids of the messages.

        Returns:
            The ids of messages whose reply has arrived; all ids if the Grid has no client to query.
        """
        if self.client is None or not message_ids:
            return message_ids
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        response = self._pull_messages(PullAppMessagesRequest(message_ids=message_ids))
        requested_ids = set(message_ids)
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            message_id = message.metadata.reply_to_message_id
            if message_id in requested_ids:
                self._replies[message_id] = (message, tree)
        return [message_id for message_id in message_ids if message_id in self._replies]

    def _pull_listed_messages(self, request: Any) -> Any:
        """Respond to a request of Flower's Grid in the place of the SuperLink, with replies that were listed before.

        Args:
            request: names the ids of messages whose replies the Grid is going to fetch.

        Raises:
            Oversized: a reply has too many objects. The Grid has not fetched any of them yet.
        """
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        replies = [self._replies.pop(message_id) for message_id in request.message_ids if message_id in self._replies]
        for _, tree in replies:
            if self._max_objects is None:
                continue
            # A tree may be huge, so its objects are not counted. It is too large if skipping the limit leaves one.
            excess = next(islice(iterate_object_tree(tree), self._max_objects, None), None)
            if excess is not None:
                raise Oversized
        return PullAppMessagesResponse(
            messages_list=[message for message, _ in replies], message_object_trees=[tree for _, tree in replies]
        )


def pull_objects_with_short_retries(
    object_ids: Sequence[str], pull_object_fn: Callable[[str], bytes]
) -> dict[str, bytes]:
    """Fetch the objects of a message from the SuperLink, with shorter pauses between retries than Flower has.

    An object may be announced before it has arrived at the SuperLink. Flower waits 1 s to 10 s for it, which would
    dominate the time of a short round.

    Args:
        object_ids: hashes of the objects.
        pull_object_fn: fetches one object.

    Returns:
        The objects as bytes, by hash.
    """
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    unique_ids = list(dict.fromkeys(object_ids))  # equal tensors are one object
    return pull_objects(
        unique_ids,
        pull_object_fn,
        max_tries_per_object=None,  # Flower's time limit for all objects remains
        initial_backoff=MIN_BACKOFF_SECONDS,
        backoff_cap=MAX_BACKOFF_SECONDS,
    )


def runtime_client(grid: Any) -> Any:
    """Get the client of a Grid of Flower; None for another implementation."""
    return getattr(grid, "_runtime_client", None)


@dataclass
class Packet:
    """A message in transit.

    Attributes:
        message: the message without content.
        tree: the tree of its objects.
        objects: the objects as bytes, by hash.
    """

    message: Any
    tree: Any
    objects: dict[str, bytes]


def pack_message(message: Any) -> Packet:
    """Turn a message of this process into a packet: the message without content, and its content as a tree of objects.

    This is the form in which Flower transfers messages. An object is identified by the hash of its bytes.
    """
    from flwr.app.message import remove_content_from_message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

    set_message_id(message, message.object_id)
    objects = {name: nested.deflate() for name, nested in get_all_nested_objects(message).items()}
    return Packet(remove_content_from_message(message), get_object_tree(message), objects)


def to_frames(packet: Packet) -> list[bytes]:
    """Turn a packet into byte strings, for a pipe."""
    from flwr.common.serde import message_to_proto

    frames = [message_to_proto(packet.message).SerializeToString(), packet.tree.SerializeToString()]
    for name, data in packet.objects.items():
        frames += [name.encode(), data]
    return frames


def from_frames(frames: Sequence[bytes]) -> Packet:
    """Turn the byte strings of `to_frames` into the packet: message, tree, then name and data of each object in turn."""
    from flwr.common.serde import message_from_proto
    from flwr.proto import message_pb2

    message_bytes, tree_bytes, *object_frames = frames
    message = message_from_proto(message_pb2.Message.FromString(message_bytes))
    tree = message_pb2.ObjectTree.FromString(tree_bytes)
    names = [name.decode() for name in object_frames[::2]]
    objects = dict(zip(names, object_frames[1::2], strict=True))
    return Packet(message, tree, objects)


def unpack_message(packet: Packet) -> Any:
    """Turn a packet into the message with its content; this process may reply to it from then on."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    _act_for(packet.message)
    message = inflate_object_from_contents(packet.tree.object_id, packet.objects)
    set_message_id(message, packet.tree.object_id)
    return message


class Fleet:
    """The connection of a site to its SuperLink, through the functions of Flower's connection."""

    def __init__(self, functions: Sequence[Any]) -> None:
        _, self._pull, self._push, self._run, self._fab, self._pull_object, self._push_object, self._confirm = functions

    def receive(self) -> Packet | None:
        """Poll Flower's SuperLink for the next message to this site, fetch its contents, and confirm it.

        Returns:
            The message with all its objects; None if there is no message, its run is over, or an object is missing.
        """
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.run import RunNotRunningException

        try:
            message_and_tree = self._pull()
        except RunNotRunningException:
            return None
        if message_and_tree is None:
            return None
        # The message arrives without content. Its content is a tree of objects, which are fetched one by one.
        message, tree = message_and_tree
        run_id = message.metadata.run_id
        message_id = message.metadata.message_id
        try:
            object_ids = [node.object_id for node in iterate_object_tree(tree)]
            objects = pull_objects_with_short_retries(object_ids, partial(self._pull_object, run_id))
            self._confirm(run_id, message_id)
        except Exception as error:  # the run of the message is over, or the server has lost one of its objects
            print_line(f"cannot receive the message {message_id}: {type(error).__name__}: {error}")
            return None
        return Packet(message, tree, objects)

    def send(self, packet: Packet, seconds: float) -> bool:
        """Send a reply to Flower's SuperLink: first the list of its objects, then those that the SuperLink lacks.

        Args:
            packet: the reply.
            seconds: how long it took to compute it.

        Returns:
            True if the server has received it. A failure is only logged: its server repeats the request if necessary.
        """
        from flwr.supercore.inflatable.inflatable_utils import push_object_contents_from_iterable

        try:
            missing_names, session = self._push(packet.message, packet.tree, seconds)
            push_object = partial(self._push_object, packet.message.metadata.run_id, session)
            missing_objects = ((name, packet.objects[name]) for name in missing_names)
            push_object_contents_from_iterable(missing_objects, push_object)
        except Exception as error:  # the run of the reply is over, or the server fails
            print_line(f"cannot send an answer: {type(error).__name__}: {error}")
            return False
        return True

    def bundle(self, run: int) -> bytes | None:
        """Fetch the app bundle of a run, the program that the server wants this site to execute.

        Args:
            run: the id of the run.

        Returns:
            The bundle, a zip file; None if the run is over.

        Raises:
            ForeignBundle: the run is one of Flower's agents, another kind of program than an app. Sites agree to one
                app only.
        """
        from flwr.supercore.run import RunNotRunningException

        try:
            metadata = self._run(run)
            if "agent" in str(metadata.primary_task_type).lower():
                raise ForeignBundle("an agent of Flower")
            return self._fab(metadata.fab_hash, run).content
        except RunNotRunningException:
            return None


def load_private_key(path: Path) -> Any:
    """Load the private key by which a server identifies this site.

    Args:
        path: a file in OpenSSH's format.

    Raises:
        UserError: it is missing, has a passphrase, or is of a kind that Flower does not support.
    """
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
    """Connect a site to Flower's SuperLink during the `with` block.

    Flower ends the process if the connection fails at the beginning, and prints later failures.

    Args:
        server: HOST:PORT of the SuperLink.
        ca: certificate of the authority for TLS; None for a plain connection.
        key: file of the site's private key; None if the server admits all sites.
    """
    from flwr.supernode import fleet_http_connection
    from flwr.supernode.fleet_http_client import FleetHttpClient

    class SlowLinkClient(FleetHttpClient):
        """Flower's client, with a time limit that grows with the size of the request."""

        def _unary_unary(self, **arguments: Any) -> Any:
            timeout = REPLY_SECONDS + arguments["request"].ByteSize() / MIN_BYTES_PER_SECOND
            return super()._unary_unary(**{"timeout": timeout, **arguments})

    # Flower has no option for its client class, so the name is replaced in the module that uses it.
    fleet_http_connection.FleetHttpClient = SlowLinkClient  # pyright: ignore[reportPrivateImportUsage]
    key_pair = None
    if key is not None:
        private_key = load_private_key(key)
        key_pair = (private_key, private_key.public_key())
    insecure = ca is None
    certificate = None if ca is None else str(ca)
    with fleet_http_connection.http_request_response(server, insecure, certificate, key_pair) as functions:
        yield Fleet(functions)


def error_reply(message: Any, code: int, reason: str) -> Packet:
    """Make the reply to a message that failed, with a code of Flower's `ErrorCode`."""
    from flwr.app import Error, Message

    _act_for(message)
    return pack_message(Message(Error(code=code, reason=reason), reply_to=message))


def _act_for(message: Any) -> None:
    """Make this process the node that a message was sent to: Flower writes the node of the process into a reply."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = 1
    TaskIdentity.run_id = message.metadata.run_id
    TaskIdentity.node_id = message.metadata.dst_node_id


def app_context(message: Any, config: Mapping[str, Any]) -> Any:
    """Make the context in which a site's app replies to a message."""
    from flwr.app import Context, RecordDict

    metadata = message.metadata
    return Context(metadata.run_id, metadata.dst_node_id, dict(config), RecordDict(), {})


@contextmanager
def act_as_node() -> Iterator[None]:
    """Allow this process to create Flower messages during the `with` block.

    Flower writes the task, run and node of the process into each message, and fails if the process has none. Here a
    message gets its real ids later, so any numbers do.
    """
    from flwr.supercore.task_identity import TaskIdentity

    earlier_ids = (TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id)
    # The fields themselves: the properties, such as `task_id`, raise an error while an id is None, as it may be here.
    TaskIdentity.task_id = 1
    TaskIdentity.run_id = 1
    TaskIdentity.node_id = 1
    try:
        yield
    finally:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = earlier_ids


def set_message_id(message: Any, name: str) -> None:
    """Set the id of a message, as Flower's server does."""
    message.metadata.__dict__["_message_id"] = name


class Node(NamedTuple):
    """A registered node of a SuperLink.

    Attributes:
        number: its number in Flower.
        key: its public key in PEM.
        since: when its process connected.
    """

    number: int
    key: bytes
    since: str


class ControlApi:
    """The register of nodes of a SuperLink. Every method may raise ConnectionError, and ValueError for a refusal."""

    def __init__(self, address: str, verify: ssl.SSLContext, seconds: float) -> None:
        from flwr.proto import control_pb2
        from flwr.supercore.control import ControlHttpClient

        self._client = ControlHttpClient(address, verify=verify, timeout=seconds)
        self._requests = control_pb2

    def nodes(self) -> Sequence[Node]:
        """List the nodes whose keys are registered with the SuperLink."""
        request = self._requests.ListNodesRequest()
        all_nodes = _call(lambda: self._client.ListNodes(request).nodes_info)
        registered = [node for node in all_nodes if node.status != "unregistered"]
        return [Node(node.node_id, node.public_key, node.last_activated_at) for node in registered]

    def register(self, key: bytes, name: str) -> int:
        """Register a public key (PEM) and return the number of its node."""
        request = self._requests.RegisterNodeRequest(public_key=key, name=name)
        number = _call(lambda: self._client.RegisterNode(request).node_id)
        if not number:
            raise ValueError("the SuperLink gave it no number")
        return number

    def unregister(self, number: int) -> None:
        """Remove a node, whose key is never accepted after that."""
        _call(lambda: self._client.UnregisterNode(self._requests.UnregisterNodeRequest(node_id=number)))


def _call(request: Callable[[], T]) -> T:
    """Send a request to the SuperLink, and translate the errors of its HTTP client into built-in ones.

    So its callers do not depend on the client that Flower happens to use.

    Args:
        request: sends it and returns the response.

    Raises:
        ValueError: the SuperLink refuses it.
        ConnectionError: the SuperLink cannot be reached.
    """
    import httpx

    try:
        return request()
    except httpx.HTTPStatusError as error:
        reason = error.response.text[:MAX_REASON_LENGTH]
        raise ValueError(f"HTTP {error.response.status_code}: {reason}") from error
    except httpx.HTTPError as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
