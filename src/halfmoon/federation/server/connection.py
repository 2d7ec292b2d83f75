"""The server's connection to its sites: transports of bytes, reconnection, and a store for replies that wait."""

import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from halfmoon.core.errors import UserError
from halfmoon.core.tree import Tree
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder
from halfmoon.storage.serialization import map_tree, unpack

T = TypeVar("T")

SPOOL_FOLDER = "spool"
"""Subfolder of a run for replies that wait to be aggregated."""


class TransportReply(NamedTuple):
    """The result of one message.

    Attributes:
        message_id: the id that `Transport.send` returned.
        data: the site's reply, or None if there is none.
        problem: why the reply does not count, or "".
    """

    message_id: str
    data: bytes | None
    problem: str = ""


class NodeIdentity(NamedTuple):
    """The site behind a node.

    Attributes:
        name: the site whose key the node uses.
        since: when its process connected. A different value means a different process.
    """

    name: str
    since: str = ""


class Transport(Protocol):
    """Carries bytes to nodes and back. Every method except `key_owners` may raise ConnectionError."""

    def nodes(self) -> Sequence[int]:
        """List the connected nodes."""
        ...

    def key_owners(self) -> Mapping[int, NodeIdentity] | None:
        """Map each node to the site whose key it uses, or return None if sites have no keys."""
        ...

    def send(self, mail: Mapping[int, bytes], seconds: float, is_offer: bool) -> Mapping[int, str]:
        """Send each node (the connected process of a site) a message.

        Args:
            mail: the serialized message for each node, by the node's number.
            seconds: how long a message stays valid. A node that fetches messages later does not get it.
            is_offer: whether the messages are offers to join; otherwise they are requests to sites that have joined.

        Returns:
            The id of each message that the transport has accepted, by node; `collect` finds the reply by it.
        """
        ...

    def collect(self, message_ids: Sequence[str]) -> Iterable[TransportReply]:
        """Yield the replies to these messages that have arrived; each is fetched only when it is needed."""
        ...


@dataclass(frozen=True)
class Clock:
    """The time, replaceable in tests."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Connection:
    """A transport that may fail for a while. The log reports a loss once; sending pauses until the transport works.

    Attributes:
        transport: carries the bytes.
        log: receives the events "connection_lost" and "connection_restored".
        failing: the operations ("nodes", "send", "collect") that failed at the last attempt.
    """

    transport: Transport
    log: EventRecorder
    failing: set[str] = field(default_factory=set)

    def nodes(self) -> set[int] | None:
        """List the connected nodes; None while the transport fails."""
        return self._attempt("nodes", lambda: set(self.transport.nodes()))

    def send(self, mail: Mapping[int, bytes], seconds: float, is_offer: bool) -> Mapping[int, str]:
        """Send as `Transport.send` does; while the transport fails nothing is accepted."""
        if not mail:
            return {}
        return self._attempt("send", lambda: self.transport.send(mail, seconds, is_offer)) or {}

    def collect(self, message_ids: Sequence[str]) -> Iterator[TransportReply]:
        """Yield the replies to these messages that have arrived, one at a time, until there are no more.

        The same if the transport fails in between: the remaining replies are collected by a later call.
        """
        iterators: list[Iterator[TransportReply]] = []  # the transport's iterator, once it is created

        def next_reply() -> TransportReply | None:
            # Creating the iterator may fail as well, so it belongs to the attempt to get the first reply.
            if not iterators:
                iterators.append(iter(self.transport.collect(message_ids)))
            return next(iterators[0], None)

        while (reply := self._attempt("collect", next_reply)) is not None:
            yield reply

    def _attempt(self, operation: str, call: Callable[[], T]) -> T | None:
        """Call a function of the transport and track whether the connection works.

        The log gets one event when the first operation fails, and one when all operations work.

        Args:
            operation: "nodes", "send" or "collect".
            call: the function.

        Returns:
            The result of the call; None if it raised ConnectionError.
        """
        try:
            result = call()
        except ConnectionError as error:
            if not self.failing:
                self.log.record("connection_lost", f"the connection to the sites is lost ({error}); waiting for it")
            self.failing.add(operation)
            return None
        if self.failing == {operation}:  # the last one that failed, so all of them work now
            self.log.record("connection_restored", "the connection to the sites works again")
        self.failing.discard(operation)
        return result


class SpooledFile:
    """Bytes in a file that is deleted with the last reference to this object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, _remove, path)  # unlike __del__, it also runs when the process exits

    def read(self) -> bytes:
        """Read the file; raise UserError if that fails."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            message = f"{self.path}: the reply of a site cannot be read back ({atomic_io.error_reason(error)})."
            raise UserError(message) from error


class Spool:
    """A folder for replies that wait. A reply for which the disk has no space stays in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def clear(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self, data: bytes) -> bytes | SpooledFile:
        """Write a reply to a new file that only this user can read, so that waiting replies need no memory.

        Args:
            data: the serialized reply.

        Returns:
            The file. If it cannot be written, for example because the disk is full: `data`, which remains in memory.
        """
        self._count += 1
        path = self.folder / f"{self._count}.safetensors"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with atomic_io.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) as handle:
                atomic_io.write_all(handle, data)
        except OSError:
            _remove(path)
            return data
        return SpooledFile(path)


def read_content(data: bytes | SpooledFile) -> bytes:
    """Read the bytes of a reply, from memory or from its file."""
    return data.read() if isinstance(data, SpooledFile) else data


def load_tree(data: bytes | SpooledFile, layout: dict[str, Any], name: str) -> Tree:
    """Load one tree of tensors from a serialized message, without the other trees.

    Args:
        data: the message. A file is mapped into memory, so that only this tree is read from the disk.
        layout: for each tree of the message the nested names of its tensors.
        name: the tree to load, such as "up" for the upload.
    """
    tree_layout = {name: layout.get(name, {})}  # an empty tree has none
    if isinstance(data, SpooledFile):
        return map_tree(data.path, tree_layout)[name]
    return unpack(data, tree_layout)[name]


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
