"""The server's connection to its sites: transports of bytes, reconnection, and a store for replies that wait."""

import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from halfmoon.core.errors import UserError
from halfmoon.storage import atomic_io
from halfmoon.storage.events import EventRecorder

T = TypeVar("T")

SPOOL_FOLDER = "spool"
"""Subfolder of a run for replies that wait to be aggregated."""


@dataclass
class SiteReply:
    """The reply of a site to one message as it has arrived: bytes in memory or in a file, or why there are none.

    Attributes:
        data: the serialized reply; None if there is none, or if it is in a file.
        problem: why there is no reply, or why it does not count; "" otherwise.
        message_id: the id of the message, which `Transport.send` returned; "" if no message was sent.
        path: the file to which a `Spool` has moved the reply, or None. It is deleted with this object.
    """

    data: bytes | None
    problem: str = ""
    message_id: str = field(default="", compare=False)
    path: Path | None = field(default=None, init=False, compare=False)

    @property
    def has_arrived(self) -> bool:
        """True if the site has replied; `problem` may still be why the reply does not count."""
        return self.data is not None or self.path is not None

    def read(self) -> bytes:
        """Return the serialized reply, of which there must be one; raise UserError if its file cannot be read."""
        if self.path is None:
            assert self.data is not None
            return self.data
        try:
            return self.path.read_bytes()
        except OSError as error:
            message = f"{self.path}: the reply of a site cannot be read back ({atomic_io.error_reason(error)})."
            raise UserError(message) from error


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

    def collect(self, message_ids: Sequence[str]) -> Iterable[SiteReply]:
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

    def collect(self, message_ids: Sequence[str]) -> Iterator[SiteReply]:
        """Yield the replies to these messages that have arrived, one at a time, until there are no more.

        The same if the transport fails in between: the remaining replies are collected by a later call.
        """
        try:
            for reply in self.transport.collect(message_ids):
                self._record_success("collect")
                yield reply
        except ConnectionError as error:
            self._record_failure("collect", error)
        else:
            self._record_success("collect")

    def _attempt(self, operation: str, call: Callable[[], T]) -> T | None:
        """Call a function of the transport and track whether the connection works.

        Args:
            operation: "nodes", "send" or "collect".
            call: the function.

        Returns:
            The result of the call; None if it raised ConnectionError.
        """
        try:
            result = call()
        except ConnectionError as error:
            self._record_failure(operation, error)
            return None
        self._record_success(operation)
        return result

    def _record_failure(self, operation: str, error: ConnectionError) -> None:
        """Note that an operation fails, with an event if it is the first one that does."""
        if not self.failing:
            self.log.record("connection_lost", f"the connection to the sites is lost ({error}); waiting for it")
        self.failing.add(operation)

    def _record_success(self, operation: str) -> None:
        """Note that an operation works, with an event if it was the last one that failed."""
        if self.failing == {operation}:
            self.log.record("connection_restored", "the connection to the sites works again")
        self.failing.discard(operation)


class Spool:
    """A folder for replies that wait. A reply for which the disk has no space stays in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def clear(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self, reply: SiteReply) -> None:
        """Move a reply to a new file, so that waiting replies need no memory.

        If the file cannot be written, for example because the disk is full, the reply remains in memory. Only this user
        can read the file, and it is deleted with the reply.
        """
        self._count += 1
        path = self.folder / f"{self._count}.safetensors"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            with atomic_io.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600) as handle:
                atomic_io.write_all(handle, reply.read())
        except OSError:
            _remove(path)
            return
        weakref.finalize(reply, _remove, path)  # unlike __del__, it also runs when the process exits
        reply.path = path
        reply.data = None


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
