"""Transport of the server over Flower's Grid."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from halfmoon.federation.server.connection import NodeIdentity, SiteReply
from halfmoon.federation.transport import internals
from halfmoon.federation.transport.records import unwrap_message, wrap_message
from halfmoon.storage import atomic_io

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
"""Meaning of each code of `flwr.common.constant.ErrorCode` that a reply can have."""


def read_key_owners(path: Path) -> dict[int, NodeIdentity]:
    """Read which site owns the key of each node, as `halfmoon serve` stored it; {} if the file cannot be read."""
    nodes = (atomic_io.read_json(path) or {}).get("nodes", {})
    return {int(number): NodeIdentity(node["name"], node["since"]) for number, node in nodes.items()}


class GridTransport:
    """Send and receive bytes over a Grid (`halfmoon.federation.server.connection.Transport`).

    Attributes:
        grid: Flower's Grid.
        keys: the file of `halfmoon serve` with the owner of each node's key; None if sites have no keys.
        max_reply_bytes: size that no reply may exceed; None for no limit.
    """

    def __init__(self, grid: Grid, keys: Path | None = None, max_reply_bytes: int | None = None) -> None:
        self.grid = grid
        self.keys = keys
        self.max_reply_bytes = max_reply_bytes
        self._list: internals.ReplyList | None = None

    def nodes(self) -> Sequence[int]:
        """List the connected nodes; raises ConnectionError."""
        with _connecting():
            return list(self.grid.get_node_ids())

    def key_owners(self) -> Mapping[int, NodeIdentity] | None:
        """Read the site of each node's key; None if sites have no keys."""
        return None if self.keys is None else read_key_owners(self.keys)

    def send(self, mail: Mapping[int, bytes], seconds: float, is_offer: bool) -> Mapping[int, str]:
        """Send each node (Flower's name for the connected process of a site) a message, through Flower's SuperLink.

        Args:
            mail: the serialized message for each node, by its id.
            seconds: time until Flower discards the message.
            is_offer: whether the messages are offers to join, not requests to sites that have joined.

        Returns:
            The id of each message that Flower has accepted, by node.

        Raises:
            ConnectionError: the SuperLink cannot be reached.
        """
        # No site depends on the type: its ClientApp replies to every message by its content.
        kind = MessageType.QUERY if is_offer else MessageType.TRAIN
        contents = {data: wrap_message(data) for data in mail.values()}  # equal bytes become one object
        messages = [Message(contents[data], node, kind, ttl=seconds) for node, data in mail.items()]
        with _connecting():
            message_ids = list(self.grid.push_messages(messages))
        # If all messages are refused, Flower returns an empty list.
        return {node: message_id for node, message_id in zip(mail, message_ids, strict=False) if message_id}

    def collect(self, message_ids: Sequence[str]) -> Iterator[SiteReply]:
        """Yield the replies to these messages that have arrived.

        Each is fetched only when it is needed, so that one reply at a time is in memory.

        Raises:
            ConnectionError: the SuperLink cannot be reached.
        """
        with _connecting():
            # The list belongs to one client (connection) of the Grid, and a Grid may make another client.
            if self._list is None or self._list.client is not internals.runtime_client(self.grid):
                self._list = internals.ReplyList(self.grid, self.max_reply_bytes)
            complete = self._list.with_reply(message_ids)
        for message_id in complete:
            # One by one: if they were fetched together, one that Flower cannot assemble would lose all.
            reply = self._fetch_reply(message_id)
            if reply is not None:
                yield reply

    def _fetch_reply(self, message_id: str) -> SiteReply | None:
        """Fetch the reply to one message; one that is too large or invalid becomes a reply with a problem.

        Returns:
            The reply; None if there is none. A too large one has empty bytes, because the site has replied and need not
            join again; the data of an unreadable one is None, like that of a site that has not replied.
        """
        try:
            with _connecting():
                message = next(iter(self.grid.pull_messages([message_id])), None)
            if message is None:
                return None
            if message.has_error():
                # The reason may contain a traceback with paths of the site, so only its code is used.
                return SiteReply(None, describe_error(message.error.code), message_id)
            return SiteReply(unwrap_message(message.content), message_id=message_id)
        except internals.Oversized:
            return SiteReply(b"", OVERSIZED, message_id)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError):
            return SiteReply(None, UNREADABLE, message_id)


def describe_error(code: int) -> str:
    """Describe an error code of Flower."""
    return f"{PROBLEMS.get(code, 'nobody knows why')} (error {code} of Flower)"


@contextmanager
def _connecting() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
