"""All uses of Flower that Flower does not promise to support, in one module; `NAMES` lists them.

Flower promises `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and its commands. halfmoon needs more: to compare a run's
bundle before a site stores it, to load the installed app alone, to see the size of an answer before it is fetched, to
register sites' keys, to ask for requests more often, to read why a SuperNode ended, and to play both apps in one
process. The test of this module alone tries a new version of Flower, which pyproject.toml then admits.
"""

import importlib
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol import bundle
from halfmoon.federation.protocol.bundle import Foreign

T = TypeVar("T")

VERSIONS = ("1.41.0", "1.42.0")
"""The versions of Flower in which all of `NAMES` exists."""

LOOP = "flwr.supernode.start_client_internal"
"""The module in which a SuperNode asks for messages."""

CLIENT_APP = "flwr.supernode.runtime.run_clientapp"
"""The module that answers a message at a site."""

NAMES: Mapping[str, tuple[str, ...]] = {
    f"{LOOP}:_pull_and_store_message": ("get_run", "get_fab", "trusted_entities"),
    f"{LOOP}:time": ("sleep",),
    f"{CLIENT_APP}:install_from_fab": (),
    f"{CLIENT_APP}:install_app_dependencies": (),
    f"{CLIENT_APP}:get_load_client_app_fn": (),
    "flwr.supercore.fab:Fab": ("hash_str", "content", "verifications"),
    "flwr.supercore.run:Run": ("primary_task_type",),
    "flwr.superlink.grid.http_grid:HttpGrid": ("_runtime_client",),
    "flwr.proto.runtime_pb2:PullAppMessagesRequest": ("message_ids",),
    "flwr.proto.runtime_pb2:PullAppMessagesResponse": ("messages_list", "message_object_trees"),
    "flwr.supercore.inflatable.inflatable_object:iterate_object_tree": (),
    "flwr.supercore.control:ControlHttpClient": ("ListNodes", "RegisterNode", "UnregisterNode"),
    "flwr.proto.control_pb2:ListNodesRequest": (),
    "flwr.proto.control_pb2:ListNodesResponse": ("nodes_info",),
    "flwr.proto.control_pb2:RegisterNodeRequest": ("public_key", "name"),
    "flwr.proto.control_pb2:UnregisterNodeRequest": ("node_id",),
    "flwr.supercore.task_identity:TaskIdentity": ("_task_id", "_run_id", "_node_id"),
    "flwr.app.metadata:Metadata": ("message_id",),
    "flwr.common.constant:ErrorCode": ("LOAD_CLIENT_APP_EXCEPTION",),
    "flwr.supercore.exit:ExitCode": ("SUPERNODE_NODE_AUTH_KEY_INVALID", "RUNTIME_VERSION_INCOMPATIBLE"),
}
"""MODULE:NAME of each use, with the parameters or attributes that are used."""

REASONS = {
    "CERTIFICATE_VERIFY_FAILED": "the server's certificate is not to be trusted",
    "WRONG_VERSION_NUMBER": "the server does not speak TLS",
    "2001]": "the server wants sites with a key: give --key FILE",
    "2004]": "the server does not let this site's key in: it does not know it, or not any more, or another process "
    "uses it (one that was killed counts for a minute)",
    "401 Unauthorized": "the server does not accept this site's key, or the clocks of the two machines differ",
    "Exit Code: 302": "--key is no private key (elliptic curve, in OpenSSH's format)",
    "Exit Code: 606": "the server has another version of Flower",
    "a site cannot be protected": "this version of Flower is not one that halfmoon can use; see constraints.txt",
    "address already in use": "its port on this machine is taken",
    "500 Internal Server Error": "the server's Flower failed over a call, as where its disk is busy or full",
    "Heartbeat failed": "the server does not know this site any more",
    "terminated gracefully": "the server does not accept this site's key any more, or its process was told to end",
}
"""Words in the log of a SuperNode that ended, and their meaning.

Flower ends every process that fails with the status 1, whatever its exit code (`flwr.supercore.exit`), and offers no
hook that would get the code: it stands in the log alone. Reasons of the network have no code at all.
"""

BROKEN = re.compile(r"(Client|Server) error '\d{3} ")
"""The last words of a SuperNode that has given up: its process stays, and neither asks for messages nor reports."""

LOST, FOUND = "Connection attempt failed", "Connection successful"
"""Words of a SuperNode that loses its server, and finds it again."""

MAIL = re.compile(r"(Receiving|Sending): \w+ message|Sent successfully")
"""Words of a SuperNode about a message and its answer; it has one at a time."""

PIECE = 5 * 2**20
"""Bytes into which Flower cuts an array at least; behind `halfmoon.sites.keys` nginx lets none through of over 6
MiB."""

PARTS = 16
"""Objects that a message of ours is made of, beside its pieces, and some to spare."""


class Oversized(ValueError):
    """A message of more pieces than any may have; nothing of it was fetched."""


class MessageList:
    """Stands between a Grid and its client of the SuperLink, to ask once for all replies that have come.

    A Grid asks which messages there are and fetches them at once. Here the list is asked for once for all tickets, a
    hundredth of a second each time, and handed to the Grid ticket by ticket; and a message of too many pieces is seen
    before the first of them is fetched. Flower has no hook for either: a Grid without such a client is asked for each
    ticket, and its messages are checked when they are there.
    """

    def __init__(self, grid: Any, most: int | None) -> None:
        self.client = client_of(grid)
        self._most = None if most is None else PARTS + most // PIECE
        self._replies: dict[str, tuple[Any, Any]] = {}
        if self.client is not None:
            self._ask = self.client.PullMessages
            self.client.PullMessages = self._hand

    def ready(self, message_ids: Sequence[str]) -> Sequence[str]:
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


def client_of(grid: Any) -> Any:
    """Return a Grid's client of the SuperLink, None where it has none."""
    return getattr(grid, "_runtime_client", None)


class _Verdict(dict[str, str]):
    """Flower's table of trusted entities, empty: where it counts as given, a bundle without their word is refused."""

    foreign = False

    def __bool__(self) -> bool:
        return self.foreign


def refuse_foreign(module: ModuleType, apps: tuple[str, ...], say: Callable[[str], None]) -> None:
    """Let the loop of a SuperNode refuse runs of another program; the server is told by Flower's error for that.

    Raise UserError for a Flower whose loop is another one.
    """
    pull = _function(module, "_pull_and_store_message")
    reasons = set[str]()

    def checked(arguments: dict[str, Any]) -> Any:
        verdict = _Verdict()

        def refuse(why: str) -> None:
            verdict.foreign = True
            if why not in reasons:
                reasons.add(why)
                say(f"refused: the server wants another program executed here than the agreed one: {why}")

        def get_run(number: int) -> Any:
            run = arguments["get_run"](number)
            if "agent" in str(getattr(run, "primary_task_type", "")).lower():
                refuse("an agent of Flower")
            return run

        def get_fab(hash: str, number: int) -> Any:
            fab = arguments["get_fab"](hash, number)
            try:
                bundle.check(fab.content, apps)
            except Foreign as error:
                refuse(f"{error} (bundle {str(hash)[:16]})")
            # Without anybody's word for it: a foreign one can be vouched for by nobody.
            return type(fab)(fab.hash_str, b"" if verdict.foreign else fab.content, {})

        return pull(**{**arguments, "get_run": get_run, "get_fab": get_fab, "trusted_entities": verdict})

    vars(module)["_pull_and_store_message"] = lambda **arguments: checked(arguments)


def load_installed(module: ModuleType, apps: tuple[str, ...], say: Callable[[str], None]) -> None:
    """Let the process that answers a message load the installed app alone; raise UserError for another Flower."""
    for name in ("install_from_fab", "get_load_client_app_fn", "install_app_dependencies"):
        _function(module, name)

    def install(content: Any, *_: Any, **__: Any) -> None:
        """Unpack nothing."""
        try:
            bundle.check(content if isinstance(content, bytes) else b"", apps)
        except Foreign as error:
            say(f"refused: a message of another program than the agreed one: {error}")
            raise

    def refuse(*_: Any, **__: Any) -> None:
        raise Foreign("nothing is installed at a site because a server asks for it")

    def loader(*_: Any, **__: Any) -> Callable[..., Any]:
        module, attribute = apps[1].split(":")
        return lambda *_args, **_options: getattr(importlib.import_module(module), attribute)

    vars(module).update(install_from_fab=install, get_load_client_app_fn=loader, install_app_dependencies=refuse)


def _function(module: ModuleType, name: str) -> Any:
    if not callable(vars(module).get(name)):
        raise UserError(
            f"this version of Flower ({module.__name__} without {name}) loads programs in a way that halfmoon does not "
            "know: a site cannot be protected from a server's. Install a version that constraints.txt names."
        )
    return vars(module)[name]


IDLE = 3.0
"""Seconds that Flower sleeps where no message has come; a shorter sleep waits for the site's own program."""

FIRST = 0.2
"""Seconds until the first poll after an answer; each further one waits twice as long, up to what Flower would."""

OWN = 0.1
"""Seconds, at most, between two polls for the answer of the site's own program."""


class Pace:
    """Stands for the module `time` in a SuperNode's loop, to poll soon after an answer and more seldom later.

    Flower's loop sleeps three seconds whenever nothing has come, which is most of the time of a short round. A round is
    several messages to the same sites, so one that has just answered is likely to be asked again at once; an idle site
    burdens its server as before.
    """

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self._sleep = sleep
        self._polls = 0

    def sleep(self, seconds: float) -> None:
        """Sleep so long at most, less where a message is to be expected."""
        if seconds < IDLE:
            self._polls = 0
            self._sleep(min(seconds, OWN))
            return
        self._sleep(min(seconds, FIRST * 2**self._polls))
        self._polls = min(self._polls + 1, 10)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def sleep_by(module: ModuleType, pace: Pace) -> None:
    """Let the loop of a SuperNode sleep by `pace`; one that has no module `time` stays."""
    if hasattr(module, "time"):
        vars(module)["time"] = pace


@contextmanager
def identity() -> Iterator[None]:
    """Let messages be made outside Flower's processes."""
    from flwr.supercore.task_identity import TaskIdentity

    before = TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    try:
        yield
    finally:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = before


def number(message: Any, name: str) -> None:
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
        """Return the nodes that are registered."""
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
