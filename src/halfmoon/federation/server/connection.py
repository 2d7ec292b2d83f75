"""Transports of bytes between a server and its sites, and a connection that waits out their losses."""

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
from halfmoon.storage.serialization import map_tree, unpack

T = TypeVar("T")


class TransportReply(NamedTuple):
    """The result for a ticket: the answer, or None; an answer that comes with a problem must not count."""

    message_id: str
    data: bytes | None
    problem: str = ""


class NodeIdentity(NamedTuple):
    """The site whose key a node has, and when its process connected, in any words: others mean another process."""

    name: str
    since: str = ""


class Transport(Protocol):
    """Carries bytes; every method but `holders` may raise ConnectionError, which is waited out."""

    def nodes(self) -> Sequence[int]:
        """Return the nodes that are connected."""
        ...

    def key_owners(self) -> Mapping[int, NodeIdentity] | None:
        """Return whose key each node has, as far as sites may come in; None where sites have no keys."""
        ...

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        """Send each node its bytes, an offer where `asks`, and return a ticket for each that was accepted."""
        ...

    def collect(self, message_ids: Sequence[str]) -> Iterable[TransportReply]:
        """Return the replies to these tickets that have come; an iterator fetches each when it is its turn."""
        ...


@dataclass(frozen=True)
class Clock:
    """Time that a test can replace."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass
class Connection:
    """A transport that may be cut off: `say` hears of it once, and nothing is sent until it works again."""

    post: Transport
    say: Callable[[str], None]
    cut: set[str] = field(default_factory=set)  # which ways failed when they were last tried

    def nodes(self) -> set[int] | None:
        return self._attempt("nodes", lambda: set(self.post.nodes()))

    def send(self, mail: Mapping[int, bytes], seconds: float, asks: bool) -> Mapping[int, str]:
        return (self._attempt("send", lambda: self.post.send(mail, seconds, asks)) or {}) if mail else {}

    def collect(self, message_ids: Sequence[str]) -> Iterator[TransportReply]:
        """Yield the replies to these tickets, one by one; nothing more once the connection is lost."""
        replies: list[Iterator[TransportReply]] = []

        def following() -> TransportReply | None:
            replies[:] = replies or [iter(self.post.collect(message_ids))]
            return next(replies[0], None)

        while (reply := self._attempt("collect", following)) is not None:
            yield reply

    def _attempt(self, way: str, call: Callable[[], T]) -> T | None:
        try:
            result = call()
        except ConnectionError as error:
            if not self.cut:
                self.say(f"the connection to the sites is lost ({error}); waiting for it")
            self.cut.add(way)
            return None
        if self.cut == {way}:
            self.say("the connection to the sites is there again")
        self.cut.discard(way)
        return result


SPOOL_FOLDER = "spool"  # the subfolder of a run for answers that wait


class SpooledFile:
    """Bytes in a file, which is removed with the last reference to this."""

    def __init__(self, path: Path) -> None:
        self.path = path
        weakref.finalize(self, _remove, path)

    def read(self) -> bytes:
        """Read the spooled bytes; raise `UserError` where the file is gone."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{self.path}: what a site sent cannot be read again ({atomic_io.error_reason(error)})."
            ) from error


class Spool:
    """A folder of files that belong to nobody else; what the disk does not take stays in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def store(self, data: bytes) -> bytes | SpooledFile:
        """Write bytes down, for this user alone to read, and return where they lie; or the bytes, on a full disk."""
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
    return data.read() if isinstance(data, SpooledFile) else data


def load_tree(data: bytes | SpooledFile, shape: dict[str, Any], name: str) -> Tree:
    """Return the tree `name` of a message whose trees have this `shape`, mapped into memory from a file."""
    branch = {name: shape.get(name, {})}
    return (map_tree(data.path, branch) if isinstance(data, SpooledFile) else unpack(data, branch))[name]


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink(missing_ok=True)
