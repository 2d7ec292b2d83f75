"""All uses of private names of Flower, in one module; `NAMES` lists them with the reason for each.

Flower supports `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and its commands. halfmoon needs more: a loop at the site
that, unlike Flower's, never executes a bundle of the server; the size of a reply before it is fetched; the keys of
sites; and both apps in one process. The test of this module is enough to admit a new version of Flower in
pyproject.toml.
"""

import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol.bundle import ForeignBundle

T = TypeVar("T")

VERSIONS = ("1.41.0", "1.42.0")
"""Versions of Flower in which all of `NAMES` exist."""


class PrivateName(NamedTuple):
    """A class or function of Flower that is used although Flower does not support this.

    Attributes:
        attributes: parameters and attributes of it that are used.
        reason: why there is no supported way.
    """

    attributes: tuple[str, ...]
    reason: str


NAMES: Mapping[str, PrivateName] = {
    # The site: Flower's own node executes the app bundle that a server sends, so a site has its own node.
    "flwr.supernode.fleet_http_connection:http_request_response": PrivateName(
        ("server_address", "insecure", "root_certificates", "authentication_keys"),
        "connects a site to the SuperLink: its key, heartbeats, retries and all requests",
    ),
    "flwr.supernode.fleet_http_client:FleetHttpClient": PrivateName(
        ("_unary_unary",),
        "its time limit of 30 s is too short for a large object over a slow link, and it is no option",
    ),
    "flwr.supercore.inflatable.inflatable_utils:pull_and_inflate_object_from_tree": PrivateName(
        ("return_type", "max_tries_per_object", "initial_backoff", "backoff_cap"),
        "fetches the content of a message to the site",
    ),
    "flwr.supercore.inflatable.inflatable_object:get_object_tree": PrivateName(
        (), "lists the objects of a reply of the site, which the SuperLink wants before they are sent"
    ),
    "flwr.supercore.run:Run": PrivateName(
        ("primary_task_type", "fab_hash"), "names the app bundle of a run, which the site compares with the terms"
    ),
    "flwr.supercore.fab:Fab": PrivateName(("content",), "is this bundle"),
    # Both sides.
    "flwr.supercore.task_identity:TaskIdentity": PrivateName(
        ("_task_id", "_run_id", "_node_id"),
        "a message cannot be created in a process that Flower has not started, unless it has these ids",
    ),
    "flwr.app.metadata:Metadata": PrivateName(
        ("message_id",), "a reply refers to the id of its message, which only Flower's own programs set"
    ),
    # The server: Flower's Grid fetches all replies at once, however large they are.
    "flwr.superlink.grid.http_grid:HttpGrid": PrivateName(
        ("_runtime_client",), "its client is the place where replies are listed and limited before they are fetched"
    ),
    "flwr.proto.runtime_pb2:PullAppMessagesResponse": PrivateName(
        ("messages_list", "message_object_trees"), "is this list"
    ),
    "flwr.superlink.grid.http_grid:pull_objects": PrivateName(
        ("max_tries_per_object", "initial_backoff", "backoff_cap"),
        "waits for 1 s to 10 s for an object that has not arrived yet, and this is no option",
    ),
    # The keys of sites. Flower's command `flwr supernode list` has no keys in its output, and takes a second each time.
    "flwr.supercore.control:ControlHttpClient": PrivateName(
        ("ListNodes", "RegisterNode", "UnregisterNode"), "registers and lists the keys of sites at the SuperLink"
    ),
    "flwr.proto.control_pb2:ListNodesResponse": PrivateName(("nodes_info",), "lists these keys"),
    "flwr.proto.control_pb2:RegisterNodeRequest": PrivateName(("public_key", "name"), "registers a key"),
    "flwr.proto.control_pb2:UnregisterNodeRequest": PrivateName(("node_id",), "removes a key"),
}
"""Each private name, as MODULE:NAME: those that are imported or replaced, and the types of their results."""

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

OBJECT_BYTES = 72
"""Bytes of an object in the list of a message's objects, or less: a hash of 64 digits, and lengths."""

MIN_BACKOFF_SECONDS = 0.02
MAX_BACKOFF_SECONDS = 1.0
"""Bounds of the pause before an object that has not arrived yet is requested a second time.

It may be announced before it has arrived. Flower's pauses of 1 s to 10 s would dominate the time of a short round.
"""

SHORT_RETRIES: Mapping[str, Any] = {
    "max_tries_per_object": None,  # Flower's time limit for all objects remains
    "initial_backoff": MIN_BACKOFF_SECONDS,
    "backoff_cap": MAX_BACKOFF_SECONDS,
}

CONCURRENT_PUSHES = 2
"""Objects of a reply that a site sends at the same time, as Flower does."""

MAX_REASON_LENGTH = 200
"""Characters of an HTTP response that an error quotes."""


def print_line(text: str) -> None:
    """Print a line to the log of a process."""
    sys.stderr.write(f"{text}\n")


class Oversized(ValueError):
    """A message with too many pieces; none of them was fetched."""


class RunOver(Exception):
    """The run of a message has ended."""


class ReplyList:
    """List all available replies by one request to the SuperLink, and refuse those with too many pieces unread.

    It replaces a function of the Grid's client, because Flower has no hook for either. A Grid without such a client is
    queried for each message.
    """

    def __init__(self, grid: Any, max_reply_bytes: int | None) -> None:
        """Replace a function of a Grid's client, so that replies are listed and limited before they are fetched.

        Args:
            grid: Flower's Grid. The Grid of a simulation has no such client; then nothing is replaced.
            max_reply_bytes: size that no reply may exceed; None for no limit.
        """
        self.grid = grid
        self.client = runtime_client(grid)
        # Flower does not announce the size of a reply, but lists its objects: a few small ones, and pieces of at least
        # `MIN_PIECE_BYTES`, except for the last one. So the size of the list limits that of the reply.
        self._max_list_bytes: int | None = None
        if max_reply_bytes is not None:
            self._max_list_bytes = OBJECT_BYTES * (MAX_SMALL_OBJECTS + max_reply_bytes // MIN_PIECE_BYTES)
        self._replies: dict[str, tuple[Any, Any]] = {}  # listed: reply and tree of its objects, by the message's id
        self._is_listing = False
        if self.client is not None:
            _shorten_retries()
            self._pull_messages = self.client.PullMessages
            self.client.PullMessages = self._pull_in_two_steps

    def with_reply(self, message_ids: Sequence[str]) -> Sequence[str]:
        """Query the SuperLink once for the replies to many messages, without their contents.

        Args:
            message_ids: ids of the messages.

        Returns:
            The ids of messages whose reply has arrived; all ids if the Grid has no client to query.
        """
        if self.client is None or not message_ids:
            return message_ids
        self._is_listing = True
        try:
            self.grid.pull_messages(message_ids)
        finally:
            self._is_listing = False
        return [message_id for message_id in message_ids if message_id in self._replies]

    def _pull_in_two_steps(self, request: Any) -> Any:
        """Respond to a request of Flower's Grid: list replies without handing them over, or hand over listed ones.

        Args:
            request: names the ids of messages whose replies the Grid is going to fetch.

        Raises:
            Oversized: a reply has too many objects. The Grid has not fetched any of them yet.
        """
        if self._is_listing:
            response = self._pull_messages(request)
            requested_ids = set(request.message_ids)
            for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
                message_id = message.metadata.reply_to_message_id
                if message_id in requested_ids:
                    self._replies[message_id] = (message, tree)
            return SimpleNamespace(messages_list=[], message_object_trees=[])
        replies = [self._replies.pop(message_id) for message_id in request.message_ids if message_id in self._replies]
        for _, tree in replies:
            if self._max_list_bytes is not None and tree.ByteSize() > self._max_list_bytes:
                raise Oversized
        return SimpleNamespace(
            messages_list=[message for message, _ in replies], message_object_trees=[tree for _, tree in replies]
        )


def _shorten_retries() -> None:
    """Let the Grids of this process wait less for an object that has not arrived yet.

    Flower calls `pull_objects` by its name in the Grid's module, so it is replaced there.
    """
    from flwr.superlink.grid import http_grid

    original = vars(http_grid)["pull_objects"]
    if not isinstance(original, partial):  # a partial function is that of an earlier call
        http_grid.pull_objects = partial(original, **SHORT_RETRIES)  # pyright: ignore[reportPrivateImportUsage]


def runtime_client(grid: Any) -> Any:
    """Get the client of a Grid of Flower; None for another implementation."""
    return getattr(grid, "_runtime_client", None)


class Fleet:
    """The connection of a site to its SuperLink, through the functions of Flower's connection."""

    def __init__(self, functions: Sequence[Any]) -> None:
        _, self._pull, self._push, self._run, self._fab, self._pull_object, self._push_object, self._confirm = functions

    def receive(self) -> Any:
        """Poll Flower's SuperLink for the next message to this site, fetch its content, and confirm it.

        Returns:
            The `Message`, to which this process may reply; None if there is no message, its run is over, or an object
            is missing.
        """
        from flwr.app import Message
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

        try:
            header_and_tree = self._pull()
        except RunOver:
            return None
        if header_and_tree is None:
            return None
        # The message arrives without content, which is a tree of objects. They are fetched one by one.
        header, tree = header_and_tree
        run_id = header.metadata.run_id
        message_id = header.metadata.message_id
        try:
            message = pull_and_inflate_object_from_tree(
                tree,
                partial(self._pull_object, run_id),
                partial(self._confirm, run_id),
                return_type=Message,
                **SHORT_RETRIES,
            )
        except Exception as error:  # the run of the message is over, or the server has lost one of its objects
            print_line(f"cannot receive the message {message_id}: {type(error).__name__}: {error}")
            return None
        set_message_id(message, message_id)
        _set_sender_of_reply(message)
        return message

    def send(self, message: Any, seconds: float) -> bool:
        """Send a reply to Flower's SuperLink: first the list of its objects, then those that the SuperLink lacks.

        Args:
            message: the reply, a `Message` with content.
            seconds: how long it took to compute it.

        Returns:
            True if the server has received it. A failure is only logged: its server repeats the request if necessary.
        """
        from flwr.supercore.inflatable.inflatable_object import get_object_tree

        set_message_id(message, message.object_id)  # the hash of its content, as Flower names all objects
        try:
            missing_ids, session = self._push(message, get_object_tree(message), seconds)
            objects = _find_objects(message)
            push_object = partial(self._push_object, message.metadata.run_id, session)
            with ThreadPoolExecutor(CONCURRENT_PUSHES) as executor:
                pushes = [executor.submit(push_object, name, objects[name].deflate()) for name in missing_ids]
            for push in pushes:
                push.result()  # raises the error of the push, if there was one
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
        try:
            metadata = self._run(run)
            if "agent" in str(metadata.primary_task_type).lower():
                raise ForeignBundle("an agent of Flower")
            return self._fab(metadata.fab_hash, run).content
        except RunOver:
            return None


def _find_objects(tree: Any) -> dict[str, Any]:
    """Find a message of Flower and everything in it: its record, the arrays in the record, and so on.

    Returns:
        The objects by their hashes.
    """
    objects: dict[str, Any] = {}
    for child in (tree.children or {}).values():
        objects |= _find_objects(child)
    return {**objects, tree.object_id: tree}


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
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.fleet_http_connection import http_request_response

    original = FleetHttpClient._unary_unary
    key_pair = None
    if key is not None:
        private_key = load_private_key(key)
        key_pair = (private_key, private_key.public_key())
    insecure = ca is None
    certificate = None if ca is None else str(ca)
    FleetHttpClient._unary_unary = partialmethod(_request_over_slow_link, original)  # pyright: ignore
    try:
        with http_request_response(server, insecure, certificate, key_pair) as functions:
            yield Fleet(functions)
    finally:
        FleetHttpClient._unary_unary = original


def _request_over_slow_link(client: Any, original: Callable[..., Any], **arguments: Any) -> Any:
    """Send a request by Flower's client, with a time limit that grows with the size of the request.

    Args:
        client: the client.
        original: the client's own method, which has a fixed time limit.
        arguments: the arguments of this method.

    Raises:
        RunOver: the run of the request has ended. Flower's own exception for this ends the process.
    """
    import httpx

    timeout = REPLY_SECONDS + arguments["request"].ByteSize() / MIN_BYTES_PER_SECOND
    try:
        return original(client, **{"timeout": timeout, **arguments})
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.FORBIDDEN:
            raise RunOver("the run is over") from error
        raise


def _set_sender_of_reply(message: Any) -> None:
    """Set the node of this process to the one that a message was sent to. Flower writes it into replies as the sender.

    Args:
        message: the message, to which this process is going to reply.
    """
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = 1  # Flower requires a task; its number has no effect
    TaskIdentity.run_id = message.metadata.run_id
    TaskIdentity.node_id = message.metadata.dst_node_id


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
        """Connect to the register.

        Args:
            address: URL of the SuperLink.
            verify: the certificates to trust.
            seconds: time limit of a reply.
        """
        from flwr.supercore.control import ControlHttpClient

        self._client = ControlHttpClient(address, verify=verify, timeout=seconds)

    def nodes(self) -> Sequence[Node]:
        """List the nodes whose keys are registered with the SuperLink."""
        from google.protobuf.empty_pb2 import Empty

        request: Any = Empty()  # Flower's request has no fields, so it has the same bytes
        all_nodes = _call(lambda: self._client.ListNodes(request).nodes_info)
        registered = [node for node in all_nodes if node.status != "unregistered"]
        return [Node(node.node_id, node.public_key, node.last_activated_at) for node in registered]

    def register(self, key: bytes, name: str) -> int:
        """Register a public key (PEM) and return the number of its node."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        request = RegisterNodeRequest(public_key=key, name=name)
        number = _call(lambda: self._client.RegisterNode(request).node_id)
        if not number:
            raise ValueError("the SuperLink gave it no number")
        return number

    def unregister(self, number: int) -> None:
        """Remove a node, whose key is never accepted after that."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        _call(lambda: self._client.UnregisterNode(UnregisterNodeRequest(node_id=number)))


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
