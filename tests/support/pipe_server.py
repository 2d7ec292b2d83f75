"""Run a federation's server in a separate process that exchanges messages over its standard input and output.

    python tests/support/pipe_server.py FEDERATION.toml RUN-DIR SITES

A parcel is the number of the site, the number of the message and a length, of four bytes each, and a message.
"""

import os
import queue
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

HEAD = struct.Struct(">III")  # big-endian, unsigned, 4 bytes each


def write_parcel(pipe: BinaryIO, node: int, message_id: int, data: bytes) -> None:
    """Write a parcel and flush the pipe."""
    pipe.write(HEAD.pack(node, message_id, len(data)) + data)
    pipe.flush()


def read_parcel(pipe: BinaryIO) -> tuple[int, int, bytes] | None:
    """Read the next parcel; None at the end of the pipe."""
    head = pipe.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    node, message_id, length = HEAD.unpack(head)
    return node, message_id, pipe.read(length)


class PipeTransport:
    """A `halfmoon.federation.server.connection.Transport` over two pipes."""

    def __init__(self, sites: int, input_pipe: BinaryIO, output_pipe: BinaryIO) -> None:
        self.sites = sites
        self.input = input_pipe
        self.output = output_pipe
        self.count = 0
        self.received: queue.SimpleQueue[tuple[int, int, bytes]] = queue.SimpleQueue()
        # A thread, because reading from a pipe blocks until there is a message.
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while (reply := read_parcel(self.input)) is not None:
            self.received.put(reply)

    def nodes(self) -> Sequence[int]:
        return range(self.sites)

    def key_owners(self) -> None:
        return None

    def send(self, mail: Mapping[int, bytes], seconds: float, is_offer: bool) -> Mapping[int, str]:
        message_ids = {}
        for node, data in mail.items():
            self.count += 1
            message_ids[node] = str(self.count)
            write_parcel(self.output, node, self.count, data)
        return message_ids

    def collect(self, message_ids: Sequence[str]) -> Sequence[Any]:
        from halfmoon.federation.server.connection import SiteReply

        replies = []
        while not self.received.empty():
            _, message_id, data = self.received.get()
            replies.append(SiteReply(data, message_id=str(message_id)))
        return replies


def main() -> None:
    """Serve the federation of the command line until it ends."""
    from halfmoon.federation.server.plan import load_plan
    from halfmoon.federation.server.server import FederationServer

    server = FederationServer(load_plan(Path(sys.argv[1])), Path(sys.argv[2]))
    server.prepare()
    server.serve(PipeTransport(int(sys.argv[3]), sys.stdin.buffer, sys.stdout.buffer))
    os._exit(0)  # skip waiting for the thread that reads standard input


if __name__ == "__main__":
    main()
