"""The one module that touches what Flower does not promise to keep; `NAMES` lists all of it.

Flower promises `flwr.app`, `flwr.clientapp`, `flwr.serverapp` and its commands. What halfmoon needs beside them is a
name in a module of Flower's own: to compare a run's bundle before a site stores it, to load the installed app alone, to
see the size of an answer before it is fetched, to register sites' keys, and to play both apps in one process. A new
version of Flower is tried by the test of this module alone, and admitted in pyproject.toml once that passes.
"""

from __future__ import annotations

import importlib
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from types import ModuleType
from typing import Any

from halfmoon.core.errors import UserError
from halfmoon.federation.protocol import bundle
from halfmoon.federation.protocol.bundle import Foreign

SEEN = ("1.41.0", "1.42.0")
"""The versions of Flower in which all of `NAMES` was found."""

LOOP = "flwr.supernode.start_client_internal"
"""The module in which a SuperNode asks for work."""

ANSWERING = "flwr.supernode.runtime.run_clientapp"
"""The module that answers a message at a site."""

NAMES: Mapping[str, tuple[str, ...]] = {
    f"{LOOP}:_pull_and_store_message": ("get_run", "get_fab", "trusted_entities"),
    f"{LOOP}:time": ("sleep",),
    f"{ANSWERING}:install_from_fab": (),
    f"{ANSWERING}:install_app_dependencies": (),
    f"{ANSWERING}:get_load_client_app_fn": (),
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
}
"""What is touched, as MODULE:NAME, with the parameters or attributes of it that are used."""

PIECE = 5 * 2**20
"""Bytes into which Flower cuts an array at least; behind `halfmoon.sites.keys` nginx lets none through of over 6
MiB."""

PARTS = 16
"""Objects that a message of ours is made of, beside its pieces, and some to spare."""


class Oversized(ValueError):
    """A message of more pieces than any may have; nothing of it was fetched."""


class MessageList:
    """What stands between a Grid and the client by which it asks the SuperLink: one question for all that has come.

    A Grid asks which messages there are and fetches them at once. Here the list is asked for once for all tickets, a
    hundredth of a second each time, and handed to the Grid ticket by ticket; and a message of too many pieces is seen
    before the first of them is fetched. Flower offers no place for either: a Grid without such a client is asked for
    each ticket, and what comes is judged when it is there.
    """

    def __init__(self, grid: Any, most: int | None) -> None:
        """Stand before the client of a Grid, if it has one."""
        self.client = client_of(grid)
        self._most = None if most is None else PARTS + most // PIECE
        self._listed: dict[str, tuple[Any, Any]] = {}
        if self.client is not None:
            self._ask = self.client.PullMessages
            self.client.PullMessages = self._hand

    def look(self, message_ids: Sequence[str]) -> Sequence[str]:
        """Return the tickets for which something has come; all of them where nobody can say."""
        if self.client is None or not message_ids:
            return message_ids
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        said = self._ask(PullAppMessagesRequest(message_ids=message_ids))
        found = zip(said.messages_list, said.message_object_trees, strict=True)
        listed = {each.metadata.reply_to_message_id: (each, tree) for each, tree in found}
        self._listed |= {message_id: listed[message_id] for message_id in message_ids if message_id in listed}
        return [message_id for message_id in message_ids if message_id in self._listed]

    def _hand(self, request: Any) -> Any:
        """Answer in place of the SuperLink."""
        from flwr.proto.runtime_pb2 import PullAppMessagesResponse
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        found = [self._listed.pop(message_id) for message_id in request.message_ids if message_id in self._listed]
        for _, tree in found:
            if self._most is not None and next(islice(iterate_object_tree(tree), self._most, None), None) is not None:
                raise Oversized
        return PullAppMessagesResponse(
            messages_list=[each for each, _ in found], message_object_trees=[tree for _, tree in found]
        )


def client_of(grid: Any) -> Any:
    """Return what a Grid asks the SuperLink by, None where it has no such thing."""
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
    pull = _found(module, "_pull_and_store_message")
    said = set[str]()

    def checked(given: dict[str, Any]) -> Any:
        verdict = _Verdict()

        def refuse(why: str) -> None:
            verdict.foreign = True
            if why not in said:
                said.add(why)
                say(f"refused: the server wants another program executed here than the agreed one: {why}")

        def get_run(number: int) -> Any:
            run = given["get_run"](number)
            if "agent" in str(getattr(run, "primary_task_type", "")).lower():
                refuse("an agent of Flower")
            return run

        def get_fab(hash: str, number: int) -> Any:
            fab = given["get_fab"](hash, number)
            try:
                bundle.check(fab.content, apps)
            except Foreign as error:
                refuse(f"{error} (bundle {str(hash)[:16]})")
            # Without a word of anybody for it: a foreign one can be vouched for by nobody.
            return type(fab)(fab.hash_str, b"" if verdict.foreign else fab.content, {})

        return pull(**{**given, "get_run": get_run, "get_fab": get_fab, "trusted_entities": verdict})

    vars(module)["_pull_and_store_message"] = lambda **given: checked(given)


def load_installed(module: ModuleType, apps: tuple[str, ...], say: Callable[[str], None]) -> None:
    """Let the process that answers a message load the installed app alone; raise UserError for another Flower."""
    for name in ("install_from_fab", "get_load_client_app_fn", "install_app_dependencies"):
        _found(module, name)

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
        return lambda *_args, **_given: getattr(importlib.import_module(module), attribute)

    vars(module).update(install_from_fab=install, get_load_client_app_fn=loader, install_app_dependencies=refuse)


def _found(module: ModuleType, name: str) -> Any:
    if not callable(vars(module).get(name)):
        raise UserError(
            f"this version of Flower ({module.__name__} without {name}) loads programs in a way that halfmoon does not "
            "know: a site cannot be protected from a server's. Install a version that constraints.txt names."
        )
    return vars(module)[name]


def sleep_by(module: ModuleType, time: Any) -> None:
    """Let the loop of a SuperNode sleep by `time`, which stands for the module; one that has no `time` stays."""
    if hasattr(module, "time"):
        vars(module)["time"] = time


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


class ControlApi:
    """Flower's Control API at an address; every method may raise what httpx does."""

    def __init__(self, address: str, verify: ssl.SSLContext, seconds: float) -> None:
        from flwr.proto import control_pb2
        from flwr.supercore.control import ControlHttpClient

        self._client, self._words = ControlHttpClient(address, verify=verify, timeout=seconds), control_pb2

    def nodes(self) -> Sequence[Any]:
        """Return the nodes: `node_id`, `public_key`, `last_activated_at`, `status`."""
        return self._client.ListNodes(self._words.ListNodesRequest()).nodes_info

    def register(self, key: bytes, name: str) -> int:
        """Register a public key, and return its node's number, 0 where it gets none."""
        return self._client.RegisterNode(self._words.RegisterNodeRequest(public_key=key, name=name)).node_id

    def unregister(self, number: int) -> None:
        """Let a node not come in any more."""
        self._client.UnregisterNode(self._words.UnregisterNodeRequest(node_id=number))
