"""Flower's Grid as a `halfmoon.federation.server.connection.Transport`: bytes in the arrays of a record."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from halfmoon.federation.server.connection import NodeIdentity, TransportReply
from halfmoon.federation.transport import internals
from halfmoon.storage import atomic_io

NAME, HEAD, BODY = "message", "head", "body"
"""Of the record, and of the arrays in it. Flower stores equal arrays once: a model that goes to all sites is one."""

UNREADABLE = "what it sent is no message"

OVERSIZED = "it is larger than any answer in this federation"

PROBLEMS = {
    1: "its program cannot be loaded",
    2: "its program failed",
    3: "its request or its answer is lost",
    4: "it did not answer in time",
    5: "it is not connected any more",
    7: "it was sent another program",
    8: "its process was ended",
}
"""The meaning of the codes of `flwr.common.constant.ErrorCode` that can come."""


SMALL = 2**20
"""Bytes of a message at most that travels as one object: each object is a request to the SuperLink, of 20 ms."""


def wrap_message(data: bytes) -> RecordDict:
    """Return a message's content: small ones whole, others as the header and the tensors, equal for many sites."""
    if len(data) <= SMALL:
        return RecordDict({NAME: ConfigRecord({BODY: data})})
    end = 8 + int.from_bytes(data[:8], "little")
    parts = {HEAD: data[:end], BODY: data[end:]}
    arrays = {
        name: Array(dtype="uint8", shape=(len(part),), stype="halfmoon", data=part) for name, part in parts.items()
    }
    return RecordDict({NAME: ArrayRecord(arrays)})


def unwrap_message(content: RecordDict) -> bytes:
    """Return the bytes in a message's content, none where there are none."""
    small = content.config_records.get(NAME, {}).get(BODY)
    if isinstance(small, bytes):
        return small
    try:
        record = content.array_records[NAME]
        return record[HEAD].data + record[BODY].data
    except KeyError:
        return b""


def read_key_owners(path: Path) -> dict[int, NodeIdentity]:
    """Return the site of each node's key, as `halfmoon serve` wrote it down; none where it cannot be read."""
    nodes = (atomic_io.read_json(path) or {}).get("nodes", {})
    return {int(number): NodeIdentity(node["name"], node["since"]) for number, node in nodes.items()}


class GridTransport:
    """Carries bytes over a Grid, answers up to `most` bytes; the file `keys` says whose key each node has."""

    def __init__(self, grid: Grid, keys: Path | None = None, most: int | None = None) -> None:
        self.grid, self.keys, self.most = grid, keys, most
        self._list: internals.MessageList | None = None

    def nodes(self) -> Sequence[int]:
        with _connecting():
            return list(self.grid.get_node_ids())

    def key_owners(self) -> Mapping[int, NodeIdentity] | None:
        return None if self.keys is None else read_key_owners(self.keys)

    def send(self, mail: Mapping[int, bytes], seconds: float, is_offer: bool) -> Mapping[int, str]:
        """Send each node its bytes; return a ticket for each that was taken; raises ConnectionError."""
        kind = MessageType.QUERY if is_offer else MessageType.TRAIN
        contents = {data: wrap_message(data) for data in mail.values()}  # equal bytes are made into one object
        messages = [Message(contents[data], node, kind, ttl=seconds) for node, data in mail.items()]
        with _connecting():
            message_ids = list(self.grid.push_messages(messages))
        # Where the whole post is refused, Flower returns no ticket at all.
        return {node: message_id for node, message_id in zip(mail, message_ids, strict=False) if message_id}

    def collect(self, message_ids: Sequence[str]) -> Iterator[TransportReply]:
        """Yield the replies to these tickets, each fetched when it is its turn; raises ConnectionError."""
        with _connecting():
            if self._list is None or self._list.client is not internals.runtime_client(self.grid):
                self._list = internals.MessageList(self.grid, self.most)
            complete = self._list.with_reply(message_ids)
        for message_id in complete:
            yield from self._collect(message_id)

    def _collect(self, message_id: str) -> list[TransportReply]:
        """Return the reply to a ticket, alone: one that Flower cannot put together would take others with it."""
        try:
            with _connecting():
                return [_reply(message) for message in self.grid.pull_messages([message_id])]
        except internals.Oversized:
            return [TransportReply(message_id, b"", OVERSIZED)]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError):
            return [TransportReply(message_id, None, UNREADABLE)]


def _reply(message: Message) -> TransportReply:
    message_id = message.metadata.reply_to_message_id
    if message.has_error():
        # The reason may hold a traceback with paths of the site: its code is enough.
        return TransportReply(message_id, None, describe_error(message.error.code))
    return TransportReply(message_id, unwrap_message(message.content))


def describe_error(code: int) -> str:
    return f"{PROBLEMS.get(code, 'nobody knows why')} (error {code} of Flower)"


@contextmanager
def _connecting() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
